"""Tables that are files: what goes wrong with mapped arrays. docs/bug-corpus.md, section B."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import embermap as em
import numpy as np
import pytest


@pytest.fixture
def small_disk(tmp_path):
    """An empty file system of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(point)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("not allowed to mount")
    yield point
    for _ in range(100):
        if subprocess.run(["umount", point], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    pytest.fail("the file system is still in use")


def fill(path):
    """Takes all the room there is."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            if file.write(bytes(4096)) < 4096:
                raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_filling_more_than_the_disk_holds_is_an_error(small_disk, durability):
    with em.open(small_disk / "s", memory="2MiB", durability=durability) as store:
        table = store.create("t", rows=1 << 17, dim=128)  # 64 MiB, none of it on disk yet
        table[:100] = 1
        store.commit()
        with pytest.raises(OSError, match="No space left on device") as caught:
            for first in range(0, 1 << 17, 1 << 10):
                table[first : first + (1 << 10)] = 2
            store.commit()
        assert caught.value.errno == errno.ENOSPC
        assert str(small_disk) in str(caught.value.filename)
        try:
            rows = table[:100]
        except OSError as error:  # no frame is clean, and there is no room to write one
            assert durability == "commit"
            assert error.errno == errno.ENOSPC
        else:
            assert (rows == (2 if durability == "none" else rows[0, 0])).all()
        store.abandon()
    if durability == "commit":
        with em.open(small_disk / "s", mode="r", memory="2MiB") as store:
            rows = store["t"].gather(range(100))
            assert np.isin(rows, (1, 2)).all()


def test_a_disk_that_somebody_else_fills(small_disk):
    with em.open(small_disk / "s", memory="4MiB") as store:
        table = store.create("t", rows=4096, dim=128)
        table[:100] = 1
        store.commit()
        fill(small_disk / "other")
        table[1000:2000] = 2
        with pytest.raises(OSError, match="No space"):
            store.commit()
        (small_disk / "other").unlink()
        store.commit()
        assert (table[1000:2000] == 2).all()


def test_an_import_says_what_it_needs_and_what_is_free(small_disk, tmp_path):
    rows = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.float32, (1 << 17, 128))
    rows[:] = 1  # no holes, which would stay holes
    with em.open(small_disk / "s", memory="2MiB") as store:
        before = sorted(p.name for p in (small_disk / "s").iterdir())
        with pytest.raises(OSError, match=r"64\.00 MiB \(.* free\).*No space left on device"):
            store.import_file("t", tmp_path / "a.npy")
        assert store.tables() == []
        assert sorted(p.name for p in (small_disk / "s").iterdir()) == before
    for name in ("b.npy", "b.h5", "b.npz", "b.safetensors", "b.pt", "b.fbin"):
        with pytest.raises(OSError, match="No space left on device"):
            em.convert(tmp_path / "a.npy", small_disk / name)
        assert [p.name for p in small_disk.iterdir()] == ["s"], name


# --- the file a table is --------------------------------------------------------------------------


def test_exports_over_the_file_that_rows_come_from(store, tmp_path):
    file = tmp_path / "x.npy"
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.save(file, rows)
    before = file.read_bytes()
    table = store.adopt("t", file)
    (tmp_path / "soft.npy").symlink_to(file)
    (tmp_path / "d").mkdir()
    for name in ("x.npy", "./x.npy", "d/../x.npy", "soft.npy"):
        with pytest.raises(ValueError, match=r"x\.npy|soft\.npy"):
            table.export(f"{tmp_path}/{name}", overwrite=True)
        assert file.read_bytes() == before
    # Another name of the same file: the export is a new file there, and the table's own stays.
    os.link(file, tmp_path / "hard.npy")
    table.export(tmp_path / "hard.npy", overwrite=True)
    assert not file.samefile(tmp_path / "hard.npy")
    assert file.read_bytes() == before
    assert np.array_equal(np.load(tmp_path / "hard.npy"), rows)
    assert np.array_equal(table[:], rows)


def test_a_conversion_over_its_source(tmp_path):
    file = tmp_path / "x.npy"
    rows = np.arange(400, dtype=np.float32).reshape(100, 4)
    np.save(file, rows)
    before = file.read_bytes()
    (tmp_path / "soft.npy").symlink_to(file)
    os.link(file, tmp_path / "hard.npy")
    for name in ("x.npy", "soft.npy", "hard.npy"):
        with pytest.raises(ValueError, match="both source and destination"):
            em.convert(file, tmp_path / name, overwrite=True, dtype="float16")
    assert file.read_bytes() == before


def test_readers_go_on_while_a_file_is_replaced(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1 << 16, 8), np.float32))
    np.save(tmp_path / "y.npy", np.ones((10, 8), np.float32))
    rows = em.io.open(tmp_path / "x.npy")
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    em.convert(tmp_path / "y.npy", tmp_path / "x.npy", overwrite=True)
    assert not rows[-1].any()
    assert not mapped[-1].any()
    assert em.io.open(tmp_path / "x.npy").shape == (10, 8)


def writes_to(table):
    torch = pytest.importorskip("torch")
    ones = np.ones((1, 4), np.float32)
    yield lambda: table.scatter([0], ones)
    yield lambda: table.add([0], ones)
    yield lambda: table.write(0, ones)
    yield lambda: table.append(ones)
    yield lambda: table.resize(1)
    yield lambda: table.materialize()
    yield lambda: table.__setitem__(0, 1)
    yield lambda: table.__setitem__(slice(None), 1)
    yield lambda: table.scatter(torch.tensor([0]), torch.ones(1, 4))


@pytest.mark.parametrize("pin", ["frames", "mapping"])
def test_writing_to_what_was_opened_for_reading(path, pin):
    torch = pytest.importorskip("torch")
    with em.open(path) as store:
        plain = store.create("t", rows=100, dim=4)
        plain[:] = np.arange(400).reshape(100, 4).astype(np.float32)
        trained = store.create("u", rows=10, dim=4, optimizer=em.optim.Adagrad())
        trained[:] = 1
    for file in path.iterdir():
        file.chmod(0o444)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with em.open(path, mode="r", pin=pin) as store:
        table = store["t"]
        assert not store.writable
        assert not table.writable
        for write in writes_to(table):
            with pytest.raises(PermissionError):
                write()
        with pytest.raises(PermissionError):
            store["u"].update([0], np.ones((1, 4), np.float32))
        for call in (
            store.commit,
            lambda: store.create("n", rows=1, dim=1),
            lambda: store.remove("t"),
        ):
            with pytest.raises(PermissionError):
                call()
        # Rows that are given out are copies: whatever is done to them stays with them.
        for rows in (
            table.gather(np.array([1, 2])),
            table.gather(torch.tensor([1, 2])),
            torch.from_numpy(table[:]),
            torch.from_numpy(table.view()[0:3]),
            torch.from_numpy(table[3]),
        ):
            rows += 1
            rows[0] = 7
        torch.zeros(100, 4).copy_(torch.from_numpy(table.read()))
        assert np.array_equal(table[:], np.arange(400).reshape(100, 4))
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_rows_of_a_read_only_file_of_numpys(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((10, 4), np.float32))
    (tmp_path / "x.npy").chmod(0o444)
    rows = em.io.open(tmp_path / "x.npy")
    for some in (rows[:], rows[3], rows[[3, 4]], next(iter(rows.blocks()))[1]):
        some += 1
    assert not rows[:].any()


# --- reading ahead --------------------------------------------------------------------------------


def drop_from_cache(file):
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


READS = """
    import os, sys
    import embermap as em, numpy as np
    path, pin, io = sys.argv[1:]
    def read_bytes():
        with open("/proc/self/io") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    ids = np.random.default_rng(0).choice(100_000, 3_000, replace=False)
    with em.open(path, mode="r", pin=pin, io=io, memory="64MiB") as store:
        table = store["t"]
        table.gather(ids[:1])
        before = read_bytes()
        rows = table.gather(ids[1:])
        print(read_bytes() - before)
        assert np.array_equal(rows[:, 0], ids[1:])
"""


@pytest.mark.parametrize("pin", ["frames", "mapping"])
@pytest.mark.parametrize("io", ["auto", "cached"])
def test_random_rows_do_not_pull_in_their_neighbourhood(path, run_python, pin, io):
    rows, row_bytes = 100_000, 3072
    with em.open(path, memory="32MiB") as store:
        table = store.create("t", rows=rows, dim=row_bytes // 4)  # 300 MB
        block = np.zeros((2000, row_bytes // 4), np.float32)
        for first in range(0, rows, 2000):
            block[:, 0] = np.arange(first, first + 2000)
            table.write(first, block)
    drop_from_cache(path / "t.npy")
    read = int(run_python(READS, path, pin, io).stdout)
    if read == 0:
        pytest.skip("this file system does not tell what is read from its disk")
    pages = 2_999 * 2 * 4096  # a row lies in at most two pages
    assert read <= 3 * pages


def test_rows_side_by_side_are_read_ahead_from_a_mapping(path, run_python):
    code = """
        import resource, sys
        import embermap as em, numpy as np
        with em.open(sys.argv[1], mode="r", pin="mapping", memory="8MiB") as store:
            table = store["t"]
            ids = np.arange(20_000)
            out = np.zeros((20_000, table.dim), np.float32)
            table.gather(ids[-1:])
            before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
            table.gather(ids, out=out)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
            assert np.array_equal(out[:, 0], ids)
    """
    rows = np.zeros((20_000, 768), np.float32)  # 60 MB, 15,000 pages
    rows[:, 0] = np.arange(20_000)
    with em.open(path, memory="32MiB") as store:
        store.from_array("t", rows)
    drop_from_cache(path / "t.npy")
    assert int(run_python(code, path).stdout) < 3_000


# --- what is saved --------------------------------------------------------------------------------


def test_what_was_committed_is_in_the_file_for_everybody(path, run_python):
    with em.open(path) as store:
        table = store.create("t", rows=100, dim=4)
        table.scatter([7], np.full((1, 4), 5, np.float32))
        store.commit()
        store.checkpoint()
        code = """
            import sys
            with open(sys.argv[1], "rb") as file:
                data = file.read()
            print(list(data[4096 + 7 * 16 : 4096 + 8 * 16]))
        """
        out = run_python(code, table.path).stdout
        assert eval(out) == list(np.full(4, 5, np.float32).tobytes())
        store.close()
        store.close()
    with pytest.raises(ValueError, match="closed"):
        store["t"]


def test_a_commit_that_fails_is_not_called_saved(small_disk):
    store = em.open(small_disk / "s", memory="4MiB")
    table = store.create("t", rows=4096, dim=128)
    table[0] = 1
    saved = store.commit()
    fill(small_disk / "other")
    table[1:2000] = 2
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            store.commit()
        assert store.commit_number == saved
    with pytest.raises(OSError, match="No space"):
        store.close()
    store.abandon()
    (small_disk / "other").unlink()
    with em.open(small_disk / "s", memory="4MiB") as store:
        assert store.commit_number == saved
        assert (store["t"][0] == 1).all()
        assert not store["t"][1:].any()


# --- what is there already ------------------------------------------------------------------------


def snapshot_of(folder):
    return {
        str(p.relative_to(folder)): (
            p.readlink() if p.is_symlink() else p.is_dir() or p.read_bytes()
        )
        for p in folder.rglob("*")
    }


def test_nothing_is_created_over_what_is_there(tmp_path):
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with em.open(tmp_path / "s") as store:
        store.create("t", rows=3, dim=2)[:] = 5
    before = snapshot_of(tmp_path)
    for name in ("file", "folder"):
        for mode in ("a", "r+", "r"):
            with pytest.raises((em.FormatError, OSError, em.NotFoundError), match=name):
                em.open(tmp_path / name, mode=mode)
    for mode in ("r+", "r"):
        with pytest.raises((em.FormatError, OSError), match="dangling"):
            em.open(tmp_path / "dangling", mode=mode)
    with pytest.raises((em.FormatError, OSError), match="dangling"):
        em.open(tmp_path / "dangling")
    assert snapshot_of(tmp_path) == before
    with em.open(tmp_path / "s") as store:
        np.save(tmp_path / "x.npy", np.zeros((4, 4), np.float32))
        for call in (
            lambda: store.create("t", rows=9, dim=9),
            lambda: store.from_array("t", np.zeros((2, 2), np.float32)),
            lambda: store.import_file("t", tmp_path / "x.npy"),
            lambda: store.adopt("t", tmp_path / "x.npy"),
        ):
            with pytest.raises(FileExistsError, match="'t'"):
                call()
        assert store["t"][:].tolist() == [[5, 5]] * 3
        (tmp_path / "s" / "n.npy").write_bytes(b"mine")
        with pytest.raises(FileExistsError, match=r"n\.npy"):
            store.create("n", rows=1, dim=1)
        assert (tmp_path / "s" / "n.npy").read_bytes() == b"mine"
        (tmp_path / "s" / "l.npy").symlink_to(tmp_path / "gone.npy")
        with pytest.raises(FileExistsError, match=r"l\.npy"):
            store.create("l", rows=1, dim=1)
        assert not (tmp_path / "gone.npy").exists()
        with pytest.raises(FileExistsError):
            store.snapshot(tmp_path / "folder")
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["out.npy", "out.h5", "out.npz", "out.safetensors", "out.pt", "out.raw"]
)
def test_files_are_replaced_only_when_told_and_at_the_end(store, tmp_path, name):
    table = store.create("t", rows=1000, dim=4)
    table[:] = 3
    out = tmp_path / name
    out.write_bytes(b"precious")
    (tmp_path / "dangling.npy").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match=name):
        table.export(out)
    assert out.read_bytes() == b"precious"

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        table.export(out, overwrite=True, progress=stop)
    assert out.read_bytes() == b"precious"
    table.export(out, overwrite=True)
    assert b"precious" not in out.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "store", "dangling.npy"])


EXPORT = """
    import sys
    import embermap as em
    with em.open(sys.argv[1], mode="r") as store:
        print("begun", flush=True)
        store["t"].export(sys.argv[2], overwrite=True)
        print("done", flush=True)
"""


def test_a_kill_in_the_middle_leaves_the_old_file(path, tmp_path):
    with em.open(path) as store:
        store.create("t", rows=1 << 19, dim=64)  # 128 MiB of zeros
    out = tmp_path / "out.npy"
    np.save(out, np.full((3, 2), 7, np.float32))
    killed = 0
    for pause in (0, 0.01, 0.03, 0.06, 0.1):
        process = subprocess.Popen(
            [sys.executable, "-c", EXPORT.replace("\n    ", "\n"), path, out],
            stdout=subprocess.PIPE,
        )
        assert process.stdout.readline() == b"begun\n"
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait()
        process.stdout.close()
        rows = np.load(out, mmap_mode="r")
        if b"done" in rest:
            assert rows.shape == (1 << 19, 64)
            np.save(out, np.full((3, 2), 7, np.float32))
        elif rows.shape == (3, 2):
            killed += 1
            assert (rows == 7).all()
        else:  # complete, but for the word
            assert rows.shape == (1 << 19, 64)
    assert killed > 0


# --- private copies -------------------------------------------------------------------------------


CHILD = """
    import pickle, sys
    import numpy as np
    table = pickle.loads(bytes.fromhex(sys.argv[1]))
    assert not table.writable
    try:
        table.scatter([int(sys.argv[2])], np.ones((1, 2), np.float32))
    except PermissionError as error:
        print("refused:", error)
"""


def test_no_handle_writes_into_the_void(path, run_python):
    """There is no copy-on-write: a handle writes to the store, or says that it cannot."""
    import pickle

    with em.open(path) as store:
        table = store.create("t", rows=4, dim=2)
        store.commit()
        sent = pickle.dumps(table).hex()
        for row in range(2):
            assert "refused:" in run_python(CHILD, sent, row).stdout
        assert not table[:].any()
        with pytest.raises(ValueError, match="mode"):
            em.open(path, mode="c")
