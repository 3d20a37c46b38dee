"""Readers that gather from the tables' files: pin="mapping"."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import embermap as em
import numpy as np
import pytest

ROWS, DIM = 4_000, 24


@pytest.fixture
def filled(path):
    """A store of a table that is written whole; row i holds i."""
    with em.open(path, memory="16MiB", threads=2) as store:
        table = store.create("t", rows=ROWS, dim=DIM, optimizer=em.optim.Adagrad(0.1))
        table[:] = np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, axis=1)
    return path


def mapped(path, **options):
    return em.open(path, mode="r", pin="mapping", memory="64KiB", threads=2, **options)


def test_rows_come_from_the_file(filled):
    ids = np.random.default_rng(0).integers(0, ROWS, 5_000)
    with mapped(filled) as store, em.open(filled, mode="r") as plain:
        table = store["t"]
        assert table.stats()["mapped_bytes"] == 0
        assert np.array_equal(table.gather(ids), plain["t"].gather(ids))
        assert np.array_equal(table.gather(ids, field="sum"), plain["t"].gather(ids, field="sum"))
        assert np.array_equal(table[ids[:7]], plain["t"][ids[:7]])
        out = np.empty((2, DIM), np.float32)
        assert table.gather([1, ROWS - 1], out=out) is out
        assert out[:, 0].tolist() == [1, ROWS - 1]
        assert table[5:8, 0].tolist() == [5, 6, 7]
        stats = table.stats()
        assert stats["frames"] == 0
        assert stats["pinned"] is None
        assert stats["registered"] is False
        assert stats["mapped_bytes"] == (filled / "t.npy").stat().st_size
        assert stats["rows_mapped"] == stats["rows_gathered"] == 10_012
        assert store.stats()["total"]["mapped_bytes"] == stats["mapped_bytes"]
        assert table.verify()["ok"]


def test_only_for_readers(path):
    for mode in ("a", "r+"):
        with pytest.raises(ValueError, match="pin 'mapping' is for a store that is open read-only"):
            em.open(path, mode=mode, pin="mapping")
    assert not path.exists()
    with pytest.raises(ValueError, match="no pin 'slab'; there are frames and mapping"):
        em.open(path, pin="slab")
    with pytest.raises(TypeError, match="pin must be a string"):
        em.open(path, pin=None)


def test_rows_that_were_never_written(path):
    with em.open(path) as store:
        store.create("t", rows=ROWS, dim=DIM, init=em.init.Constant(3))[:1] = 1
    with mapped(path) as store:
        with pytest.raises(
            ValueError, match=r"pages were never written.*embermap materialize .*/t'"
        ):
            store["t"].gather([0])
        for key in (5, slice(5, 6), [5], np.arange(ROWS) == 5):
            with pytest.raises(ValueError, match="pages were never written"):
                store["t"][key]
        assert (store["t"].read(1, 2) == 3).all()
        assert (np.asarray(store["t"])[1:] == 3).all()
    with em.open(path) as store:
        store["t"].materialize()
    with mapped(path) as store:
        assert store["t"].gather([0, ROWS - 1])[:, 0].tolist() == [1, 3]


def test_a_file_of_the_other_byte_order(path, tmp_path):
    np.save(tmp_path / "a.npy", np.ones((4, 3), ">f4"))
    with em.open(path) as store:
        store.adopt("t", tmp_path / "a.npy")
    with mapped(path) as store, pytest.raises(ValueError, match="byte order"):
        store["t"].gather([0])


def test_commits_of_a_writer(filled):
    with em.open(filled) as writer, mapped(filled) as store:
        table = store["t"]
        assert table.gather([9])[0, 0] == 9
        writer["t"][9] = -1
        writer.commit()
        assert table.gather([9])[0, 0] == 9
        writer.checkpoint()
        with pytest.raises(em.StaleError):
            table.gather([9])
        store.refresh()
        assert table.gather([9])[0, 0] == -1
        writer["t"][9] = -2
        writer.commit()
        store.refresh()
        before = table.stats()["rows_mapped"]
        assert table.gather([9])[0, 0] == -2  # the log has it
        assert table.gather([3_999])[0, 0] == 3_999
        assert table.stats()["rows_mapped"] == before + 1


def test_a_file_that_is_cut_short(filled):
    file = filled / "t.npy"
    content = file.read_bytes()
    with mapped(filled) as store:
        table = store["t"]
        assert table.gather([ROWS - 1])[0, 0] == ROWS - 1
        os.truncate(file, 10_000)
        for _ in range(2):
            with pytest.raises(em.FormatError, match=r"t\.npy: truncated"):
                table.gather(np.arange(ROWS))
        file.write_bytes(content)
        store.refresh()
        assert table.gather([ROWS - 1])[0, 0] == ROWS - 1


def test_the_end_of_a_file_is_no_signal_for_a_whole_process(filled, run_python):
    """Also with faulthandler, which wants the signal as well and had it first."""
    run_python(
        """
        import faulthandler, os, sys
        faulthandler.enable()
        import embermap as em, numpy as np
        with em.open(sys.argv[1], mode="r", pin="mapping") as store:
            table = store["t"]
            table.gather([0])
            os.truncate(sys.argv[1] + "/t.npy", 10_000)
            try:
                table.gather(np.arange(len(table)))
            except em.FormatError as error:
                assert "truncated" in str(error)
            else:
                raise AssertionError
        """,
        filled,
    )


def test_pickles_keep_it(filled):
    with mapped(filled) as store:
        copy = pickle.loads(pickle.dumps(store["t"]))
        assert copy.gather([5])[0, 0] == 5
        assert copy.stats()["rows_mapped"] == 1


def test_processes_at_once(filled, run_python):
    """Each sees the rows; what they map is the file itself."""
    code = """
        import sys
        import embermap as em, numpy as np
        with em.open(sys.argv[1], mode="r", pin="mapping", memory="64KiB") as store:
            table = store["t"]
            rows = table.gather(np.arange(len(table)))
            assert (rows[:, 3] == np.arange(len(table))).all()
            with open("/proc/self/maps") as maps:
                line = next(line for line in maps if line.rstrip().endswith("t.npy"))
            assert line.split()[1] == "r--s", line
        """
    with mapped(filled) as store:
        table = store["t"]
        table.gather([0])
        run_python(code, filled)
        run_python(code, filled)
        assert table.gather([7])[0, 0] == 7


def test_snapshots_and_exports_of_such_a_reader(filled, tmp_path):
    with mapped(filled) as store:
        store["t"].gather([0])
        store.snapshot(tmp_path / "copy")
        store["t"].export(tmp_path / "t.npy")
    assert np.load(tmp_path / "t.npy")[7, 0] == 7
    assert Path(tmp_path / "copy" / "t.npy").exists()


def test_a_file_larger_than_any_memory(path, tmp_path):
    """Only what is gathered is read."""
    rows = 2**27 + 5
    shape = (rows, 16_384)  # 8 TiB, all holes
    file = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, shape)
    file[-1] = 7
    del file
    with em.open(path, memory="64MiB") as store:
        store.adopt("t", tmp_path / "a.npy")
    with em.open(path, mode="r", pin="mapping", memory="64MiB") as store:
        assert store["t"].gather([0, rows - 1])[:, 5].tolist() == [0, 7]
        assert store["t"].stats()["mapped_bytes"] == 2**43 + 5 * 65_536 + 128
