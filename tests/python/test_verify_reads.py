"""verify="read": pages are compared with checksums that memory has no room for."""

from __future__ import annotations

import embermap as em
import numpy as np
import pytest

ROWS, DIM, PER_PAGE = 64_000, 128, 8
MEMORY = "256KiB"  # an eighth of it has not room for 8,000 checksums


@pytest.fixture
def path(tmp_path):
    with em.open(tmp_path / "store", memory="8MiB") as store:
        table = store.create("t", rows=ROWS, dim=DIM)
        table[:] = rows_of(np.arange(ROWS))
    return tmp_path / "store"


def rows_of(ids):
    return (np.asarray(ids)[:, None] * 1000 + np.arange(DIM)).astype(np.float32)


def flip(file, offset):
    with file.open("r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 4]))


def page_at(page):
    return 4096 + page * 4096


@pytest.mark.parametrize("mode", ["a", "r"])
def test_damage_is_found_where_checksums_are_not_in_memory(path, mode):
    flip(path / "t.npy", page_at(3_000) + 700)
    bad = np.array([3_000 * PER_PAGE + 5])
    good = np.array([17, 2_999 * PER_PAGE + 7, 3_001 * PER_PAGE, ROWS - 1])
    with em.open(path, mode=mode, memory=MEMORY) as store:  # nobody asked
        assert store["t"].gather(bad).shape == (1, DIM)
    with em.open(path, mode=mode, memory=MEMORY, verify="read") as store:
        table = store["t"]
        np.testing.assert_array_equal(table.gather(good), rows_of(good))
        with pytest.raises(em.CorruptError, match=r"t\.npy.*24000.*24007"):
            table.gather(bad)
        with pytest.raises(em.CorruptError):
            table.gather(np.concatenate([good, bad]))
        np.testing.assert_array_equal(table.gather(good), rows_of(good))
        store.abandon()


def test_batches_and_changes(path):
    rng = np.random.default_rng(1)
    want = rows_of(np.arange(ROWS))
    with em.open(path, memory=MEMORY, verify="read") as store:
        table = store["t"]
        for step in range(30):
            ids = rng.integers(0, ROWS, 400)
            np.testing.assert_array_equal(table.gather(ids), want[ids])
            ids = np.unique(rng.integers(0, ROWS, 300))
            want[ids] = rng.random((len(ids), DIM), dtype=np.float32)
            table.scatter(ids, want[ids])
            if step % 10 == 9:
                store.commit()
                store.checkpoint()
        np.testing.assert_array_equal(table[:], want)
    with em.open(path, mode="r", memory=MEMORY, verify="read") as store:
        np.testing.assert_array_equal(store["t"].gather(np.arange(0, ROWS, 7)), want[::7])


def test_rows_never_written_are_generated(tmp_path):
    with em.open(tmp_path / "store", memory=MEMORY, verify="read") as store:
        table = store.create("t", rows=10**6, dim=DIM, init=em.init.Normal(), seed=3)
        ids = np.random.default_rng(2).integers(0, 10**6, 300)
        before = table.gather(ids)
        table.scatter(ids[:10], before[:10])
        store.commit()
        np.testing.assert_array_equal(table.gather(ids), before)


def test_a_damaged_checksum_is_an_error(path):
    # Sums begin behind the header and the bits, which have room for a power of two of bytes in
    # sectors with 508 of content each.
    with (path / "t.pages").open("rb") as f:
        offset = int.from_bytes(f.read(4096)[24:32], "little")
    flip(path / "t.pages", offset + 512 * 3 + 11)
    with em.open(path, mode="r", memory=MEMORY, verify="read") as store:
        store["t"].gather([0])
        with pytest.raises(em.CorruptError, match=r"t\.pages"):
            store["t"].gather([127 * 3 * PER_PAGE + 1])


def test_adopted_files_without_checksums(tmp_path):
    np.save(tmp_path / "a.npy", rows_of(np.arange(ROWS)))
    with em.open(tmp_path / "store", memory=MEMORY, verify="read") as store:
        table = store.adopt("t", tmp_path / "a.npy")
        ids = np.arange(0, ROWS, 331)
        np.testing.assert_array_equal(table.gather(ids), rows_of(ids))
        table.scatter(ids[:3], rows_of(ids[:3]) + 1)
        store.commit()
    with em.open(tmp_path / "store", mode="r", memory=MEMORY, verify="read") as store:
        np.testing.assert_array_equal(store["t"].gather(ids[3:]), rows_of(ids[3:]))
        np.testing.assert_array_equal(store["t"].gather(ids[:3]), rows_of(ids[:3]) + 1)


@pytest.mark.parametrize("name", ["", "always", "Read"])
def test_other_names_are_refused(path, name):
    with pytest.raises(ValueError, match=r"verify.*memory and read"):
        em.open(path, verify=name)
    with pytest.raises(TypeError, match="verify"):
        em.open(path, verify=None)
