"""Faults people met with other tools in forks, workers, pickles: docs/bug-corpus.md, G and K."""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import embermap as em
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def numbered(rows: int, dim: int) -> np.ndarray:
    """Every element of a row is the row's number."""
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], dim, 1)


def start(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# --- B119, B120: handles that workers inherit -----------------------------------------------------

WORKERS = """
    import os, sys, threading, warnings
    import embermap as em, numpy as np
    warnings.simplefilter("ignore", DeprecationWarning)

    def children(count, work):
        "Exit statuses of forked children that call work(number)."
        pids = []
        for number in range(count):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    work(number)
                    status = 0
                except BaseException as error:
                    print(f"child {number}: {type(error).__name__}: {error}", file=sys.stderr)
                finally:
                    os._exit(status)
            pids.append(pid)
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]

    def look(rows, seed, count):
        rng = np.random.default_rng(seed)
        for _ in range(count):
            ids = rng.integers(0, len(rows), 20)
            got = rows.gather(ids) if hasattr(rows, "gather") else rows[ids]
            assert (got == ids[:, None]).all(), (ids, got)
            first = int(rng.integers(0, len(rows) - 50))
            assert (rows[first : first + 50] == np.arange(first, first + 50)[:, None]).all()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same rows in files of many formats, compressed and not."""
    folder = tmp_path_factory.mktemp("files")
    rows = numbered(5_000, 6)
    np.save(folder / "a.npy", rows)
    np.save(folder / "f.npy", np.asfortranarray(rows))
    np.savez_compressed(folder / "z.npz", v=rows)
    for target in ("g.h5:/v", "h.h5:/v", "a.safetensors:v", "a.pt:v", "a.vec", "a.fvecs"):
        options = {"g.h5:/v": {"gzip": 4}, "a.vec": {"vocab": "none"}}.get(target, {})
        em.convert(folder / "a.npy", f"{folder}/{target}", **options)
    return folder


@pytest.mark.parametrize(
    "name", ["a.npy", "f.npy", "z.npz:v", "g.h5:/v", "h.h5:/v", "a.safetensors:v", "a.pt:v",
             "a.vec", "a.fvecs"],
)  # fmt: skip
def test_rows_of_a_file_opened_before_the_fork(files, run_python, name):
    """By workers and their workers, while a thread of the parent is in the middle of reading."""
    code = (
        WORKERS
        + """
    rows = em.io.open(sys.argv[1])
    look(rows, 0, 1)
    ended = threading.Event()
    failed = []

    def read():
        try:
            while not ended.is_set():
                look(rows, 1, 1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()

    def work(number):
        look(rows, number, 10)
        assert children(1, lambda _: look(rows, 100 + number, 5)) == [0]
        rows.close()
        try:
            rows[0]
        except ValueError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("a closed file is read")

    for _ in range(3):
        assert children(4, work) == [0] * 4
    ended.set()
    thread.join()
    assert not failed, failed
    look(rows, 2, 5)
    """
    )
    run_python(code, files / name)


def test_eight_workers_that_open_a_store_of_their_own(path, run_python):
    with em.open(path) as store:
        store.create("t", rows=50_000, dim=8)[:] = numbered(50_000, 8)
    code = (
        WORKERS
        + """
    store = em.open(sys.argv[1], memory="1MiB", threads=2)
    table = store["t"]
    look(table, 0, 1)

    def work(number):
        try:
            table.gather([1])
        except em.ForkError as error:
            assert "open the store again" in str(error)
        else:
            raise AssertionError("an inherited handle was used")
        for pin in ("frames", "mapping"):
            with em.open(sys.argv[1], mode="r", memory="1MiB", pin=pin, threads=1) as mine:
                look(mine["t"], number, 100)
                assert number % 2 or children(1, deeper) == [0]

    def deeper(number):
        with em.open(sys.argv[1], mode="r", memory="1MiB") as mine:
            look(mine["t"], number, 20)

    assert children(8, work) == [0] * 8
    look(table, 9, 10)
    """
    )
    run_python(code, path)


def test_nothing_seeks_and_reads():
    """Positions belong to open files, which parent and child share: all reads say where."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "io" / "file.cpp").is_file():
        pytest.skip("not in the source tree")
    calls = re.compile(r"(?<![\w:>])::(read|write|lseek|readv|writev|fseeko?|fread|sendfile)\(")
    seen = []
    for folder in ("io", "store"):
        for file in sorted((root / folder).glob("*.?pp")):
            for line in file.read_text().splitlines():
                if calls.search(line) and "SEEK_DATA" not in line:
                    seen.append(f"{file.name}: {line.strip()}")
    assert not seen


# --- B121, B160: pickles --------------------------------------------------------------------------


def test_rows_of_a_file_are_pickled_as_their_path(files, tmp_path, monkeypatch):
    for name in ("a.npy", "g.h5:/v", "z.npz:v", "a.vec"):
        monkeypatch.chdir(files)
        rows = em.io.open(name)
        data = pickle.dumps(rows)
        assert len(data) < 1_000
        monkeypatch.chdir(tmp_path)  # the path in it is absolute
        again = pickle.loads(data)
        assert again.shape == rows.shape
        assert np.array_equal(again[4_000:4_010], rows[4_000:4_010])
        assert np.array_equal(pickle.loads(pickle.dumps(again))[7], rows[7])
        rows.close()
        with pytest.raises(ValueError, match="closed"):
            pickle.dumps(rows)
        assert np.array_equal(again[7], [7] * 6)


def test_a_pickle_of_a_file_that_is_another_one_now_is_refused(tmp_path):
    file = tmp_path / "a.npy"
    np.save(file, numbered(100, 4))
    data = pickle.dumps(em.io.open(file))
    content = file.read_bytes()

    file.rename(tmp_path / "b.npy")
    with pytest.raises(FileNotFoundError, match="a.npy"):
        pickle.loads(data)
    np.save(file, np.zeros((100, 4), np.float32))  # another file of the same size
    with pytest.raises(ValueError, match="a.npy.*has changed since"):
        pickle.loads(data)
    file.unlink()
    (tmp_path / "b.npy").rename(file)
    assert pickle.loads(data)[7].tolist() == [7] * 4
    os.truncate(file, 1_000)
    with pytest.raises(ValueError, match="changed"):
        pickle.loads(data)
    file.write_bytes(content)
    os.utime(file, (1, 1))
    with pytest.raises(ValueError, match="changed"):
        pickle.loads(data)


def test_a_child_is_told_of_a_file_that_was_replaced(tmp_path, run_python):
    np.save(tmp_path / "a.npy", numbered(100, 4))
    code = (
        WORKERS
        + """
    rows = em.io.open(sys.argv[1])
    os.rename(sys.argv[2], sys.argv[1])

    def work(number):
        try:
            rows[5]
        except ValueError as error:
            assert "changed" in str(error)
        else:
            raise AssertionError("rows of two files")

    assert children(2, work) == [0, 0]
    assert rows[5].tolist() == [5] * 4  # the file that is open is still there
    """
    )
    np.save(tmp_path / "b.npy", -numbered(100, 4))
    run_python(code, tmp_path / "a.npy", tmp_path / "b.npy")


def test_pickles_made_while_rows_are_written_see_the_last_commit(path):
    with em.open(path, memory="4MiB") as store:
        table = store.create("t", rows=20_000, dim=32)
        table[:] = 1
        store.commit()
        ended, failed = threading.Event(), []

        def write():
            try:
                rng = np.random.default_rng(0)
                while not ended.is_set():
                    table.scatter(rng.integers(0, 20_000, 3_000), np.full((3_000, 32), 2, "f4"))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                data = pickle.dumps(table)
                assert len(data) < 1_000
                with pickle.loads(data)._store as mine:
                    assert (mine["t"].gather(range(0, 20_000, 97)) == 1).all()
        finally:
            ended.set()
            thread.join()
        assert not failed


def test_readers_warn_of_nothing_and_copy_once(path, run_python):
    """Warnings are errors there; what is gathered takes its own size and no more."""
    pytest.importorskip("torch")
    with em.open(path) as store:
        store.create("t", rows=100_000, dim=64)[:] = numbered(100_000, 64)
    code = """
        import resource, sys, warnings
        warnings.simplefilter("error")
        import numpy as np, torch, embermap as em
        for pin in ("frames", "mapping"):
            with em.open(sys.argv[1], mode="r", memory="8MiB", pin=pin, threads=1) as store:
                table = store["t"]
                assert table.gather(np.arange(5))[:, 0].tolist() == [0, 1, 2, 3, 4]
                rows = table.gather(torch.arange(5))
                rows += 1          # writable, and its own
                torch.from_numpy(table[3:7]).add_(1)
                ids = np.arange(len(table))
                table.gather(ids[:1000])
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                whole = table.gather(ids)
                grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
                allowed = whole.nbytes + 50 * len(ids) + (12 << 20)
                if pin == "mapping":
                    allowed += whole.nbytes  # the page cache's, seen through the mapping
                assert grown < allowed, (pin, grown, allowed)
                assert (whole[:, 5] == ids).all()
        print("quiet")
    """
    done = run_python(code, path)
    assert (done.stdout, done.stderr) == ("quiet\n", "")


LOADER = """
import sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
import torch, embermap as em
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __init__(self, table): self.table = table
    def __len__(self): return 40
    def __getitem__(self, k):
        warnings.simplefilter("error")
        return self.table.gather(torch.arange(100 * k, 100 * k + 100))

if __name__ == "__main__":
    with em.open(sys.argv[1], mode="r", memory="4MiB") as store:
        loader = DataLoader(Data(store["t"]), batch_size=4, num_workers=2,
                            multiprocessing_context="spawn")
        seen = torch.cat([batch.reshape(-1, batch.shape[-1]) for batch in loader])
        assert seen[:, 0].tolist() == list(range(4000))
    print("quiet")
"""


def test_spawned_workers_of_a_loader_warn_of_nothing(path, tmp_path):
    pytest.importorskip("torch")
    with em.open(path) as store:
        store.create("t", rows=5_000, dim=8)[:] = numbered(5_000, 8)
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, script, path], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "quiet\n", "")


# --- B122: memory of workers ----------------------------------------------------------------------


def test_memory_of_forked_workers_does_not_grow(path, run_python):
    """10,000,000 rows, the words of 1,000,000 beside them: there is nothing a worker unshares."""
    with em.open(path) as store:
        store.create("t", rows=10_000_000, dim=16, init=em.init.Normal(), seed=1)
    with (path / "t.vocab.txt").open("w") as words:
        words.writelines(f"word{n}\n" for n in range(1_000_000))
    code = (
        WORKERS
        + """
    import pickle
    def private():
        text = open("/proc/self/smaps_rollup").read()
        return sum(int(line.split()[1]) << 10 for line in text.splitlines()
                   if line.startswith(("Private_Clean", "Private_Dirty")))

    with em.open(sys.argv[1], mode="r", memory="8MiB", threads=1) as store:
        data = pickle.dumps(store["t"])

        def work(number):
            table = pickle.loads(data)
            rng = np.random.default_rng(number)
            most = 0
            for step in range(300):
                rows = table.gather(rng.integers(0, 10_000_000, 256))
                if step % 50 == 49:
                    most = max(most, private())
            assert most < 50 << 20, f"{most >> 20} MiB"

        assert children(8, work) == [0] * 8
    """
    )
    run_python(code, path)


# --- B124: GPU state ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_children_of_a_process_that_used_the_gpu(path):
    torch = pytest.importorskip("torch")
    with em.open(path) as made:
        made.create("t", rows=5_000, dim=8)[:] = numbered(5_000, 8)
    code = (
        WORKERS
        + """
    import pickle, torch
    store = em.open(sys.argv[1], device="cuda", memory="8MiB")
    table = store["t"]
    ids = torch.arange(1000, device="cuda")
    assert (table.gather(ids)[:, 0].cpu() == torch.arange(1000)).all()
    data = pickle.dumps(table)

    def work(number):
        for call in (lambda: table.gather([1]), lambda: table.stats(), lambda: store.stats()):
            try:
                call()
            except em.ForkError:
                pass
            else:
                raise AssertionError
        mine = pickle.loads(data)
        look(mine, number, 20)
        assert not mine.stats()["registered"]
        for device in ("cuda", 0):
            try:
                em.open(sys.argv[1], mode="r", device=device)
            except em.CudaError as error:
                assert "fork" in str(error) or "child" in str(error), error
            else:
                raise AssertionError("the GPU of the parent was used")
        store.close()

    for _ in range(3):
        assert children(4, work) == [0] * 4
        assert (table.gather(ids)[:, 0].cpu() == torch.arange(1000)).all()
        torch.cuda.synchronize()
    store.close()
    """
    )
    child = start(code, path)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    spawned = """
        import sys, torch, embermap as em
        with em.open(sys.argv[1], mode="r", device="cuda", memory="8MiB") as store:
            got = store["t"].gather(torch.arange(1000, device="cuda"))
            assert (got[:, 0].cpu() == torch.arange(1000)).all()
    """
    with em.open(path, mode="r", device="cuda", memory="8MiB") as store:
        store["t"].gather(torch.arange(10, device="cuda"))
        others = [start(spawned, path) for _ in range(3)]
        for other in others:
            _, err = other.communicate(timeout=120)
            assert other.returncode == 0, err
        assert store["t"].gather(torch.arange(10, device="cuda")).shape == (10, 8)


# --- B126, B127: who removes files, and what stays open -------------------------------------------


def test_files_stay_whichever_process_ends_first(path):
    with em.open(path) as store:
        store.create("t", rows=1_000, dim=4)[:] = numbered(1_000, 4)
    reader = """
        import sys, pickle, embermap as em
        table = pickle.loads(bytes.fromhex(sys.argv[1]))
        print(int(table[7][0]), flush=True)
        sys.stdin.readline()
        print(int(table[8][0]), flush=True)
    """
    with em.open(path) as store:
        data = pickle.dumps(store["t"]).hex()
        first, second = start(reader, data), start(reader, data)
        assert first.stdout.readline() == second.stdout.readline() == "7\n"
        out, err = first.communicate("\n", timeout=60)  # a child ends, its parent goes on
        assert (out, err, first.returncode) == ("8\n", "", 0)
        assert store["t"][9].tolist() == [9] * 4
    out, err = second.communicate("\n", timeout=60)  # the parent's store has ended
    assert (out, err, second.returncode) == ("8\n", "", 0)
    assert sorted(p.name for p in path.iterdir() if p.suffix == ".npy") == ["t.npy"]


def test_nothing_is_copied_onto_itself(path, tmp_path):
    np.save(tmp_path / "a.npy", numbered(10, 2))
    (tmp_path / "link.npy").symlink_to("a.npy")
    before = (tmp_path / "a.npy").read_bytes()
    for target in ("a.npy", "link.npy", "../" + tmp_path.name + "/a.npy"):
        with pytest.raises(ValueError, match="both source and destination"):
            em.convert(tmp_path / "a.npy", tmp_path / target, overwrite=True)
    assert (tmp_path / "a.npy").read_bytes() == before
    with em.open(path) as store:
        table = store.import_file("t", tmp_path / "a.npy")
        adopted = store.adopt("a", tmp_path / "a.npy")
        store.commit()
        for call in (
            lambda: store.snapshot(path),
            lambda: store.snapshot(path / "inside"),
            lambda: table.export(table.path, overwrite=True),
            lambda: adopted.export(tmp_path / "a.npy", overwrite=True),
            lambda: table.export(tmp_path / "a.npy", overwrite=True),
            lambda: store.import_file("t", table.path),
        ):
            with pytest.raises((ValueError, FileExistsError)):
                call()
        assert np.array_equal(table[:], numbered(10, 2))
        assert np.array_equal(adopted[:], numbered(10, 2))
    assert (tmp_path / "a.npy").read_bytes() == before


def test_closed_stores_whose_handles_live_leave_nothing_open(path):
    with em.open(path, memory="64KiB") as store:
        store.create("t", rows=100, dim=4)[:] = 1

    def counts():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def opened(mode):
        store = em.open(path, mode=mode, memory="64KiB", threads=1)
        row = store["t"][5]
        cycle = [store, row]
        cycle.append(cycle)
        return store

    opened("r").close()
    gc.collect()
    gc.freeze()
    try:
        before, kept = counts(), []
        for turn in range(200):
            store = opened("r" if turn % 2 else "r+")
            store.close()
            with pytest.raises(ValueError, match="closed"):
                store["t"]
            store.close()
            kept.append(store)
        now = counts()
        assert now[0] == before[0]
        assert now[1] < before[1] + 20  # threads; the system's own come and go
    finally:
        gc.unfreeze()
    with em.open(path, memory="64KiB") as store:  # for writing, though 200 handles live
        store["t"][5] = 2


# --- B129, B167: several processes ----------------------------------------------------------------


def test_a_second_writer_is_told_who_the_first_is_and_follows_it_at_once(path):
    writer = start(
        """
        import sys, embermap as em
        store = em.open(sys.argv[1])
        table = store.create("t", rows=100, dim=4)
        table[:] = 1
        store.commit()
        table[:] = 2
        print("open", flush=True)
        sys.stdin.read()
        """,
        path,
    )
    assert writer.stdout.readline() == "open\n"
    try:
        for mode in ("a", "r+"):
            with pytest.raises(em.LockedError) as caught:
                em.open(path, mode=mode)
            assert str(writer.pid) in str(caught.value)
            assert socket.gethostname() in str(caught.value)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate(timeout=60)
    with em.open(path) as store:
        assert (store["t"][:] == 1).all()


RANK = """
    import re, sys, time, embermap as em, numpy as np
    path, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with em.open(path, mode="r", pin="mapping", memory="1MiB", threads=1) as store:
        table = store["t"]
        rows = len(table)
        for first in range(0, rows, 4096):
            ids = np.arange(first, min(first + 4096, rows))
            assert (table.gather(ids)[:, 3] == ids % 1000).all()
        print("read", flush=True)
        sys.stdin.readline()
        pss, inside = 0, False
        for line in open("/proc/self/smaps"):
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = line.rstrip().endswith("t.npy")
            elif inside and line.startswith("Pss:"):
                pss += int(line.split()[1])
        print(pss, flush=True)
        anonymous = next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup")
                         if line.startswith("Anonymous:"))
        print(anonymous, flush=True)
        sys.stdin.readline()
"""


def test_processes_share_one_copy_of_a_table(path):
    """Their proportional memory of the file, added up, is the file once."""
    rows, dim = 500_000, 64
    with em.open(path, memory="64MiB") as store:
        table = store.create("t", rows=rows, dim=dim)
        for first in range(0, rows, 100_000):
            ids = np.arange(first, first + 100_000) % 1_000
            table.write(first, np.repeat(ids.astype(np.float32)[:, None], dim, 1))
    size = (path / "t.npy").stat().st_size
    ranks = [start(RANK, path, rank, 4) for rank in range(4)]
    try:
        for rank in ranks:
            assert rank.stdout.readline() == "read\n", rank.stderr.read()
        pss, anonymous = [], []
        for rank in ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()
            pss.append(int(rank.stdout.readline()) << 10)
            anonymous.append(int(rank.stdout.readline()) << 10)
        assert 0.9 * size < sum(pss) < 1.1 * size
        assert max(anonymous) < size  # nobody has a copy of its own
        for rank in ranks:
            _, err = rank.communicate("\n", timeout=60)
            assert rank.returncode == 0, err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_that_wait_for_the_first_one_see_all_of_a_table_or_none(path, tmp_path):
    """Rank 0 imports; the others look for the table. The first one dies in the middle of it."""
    np.save(tmp_path / "a.npy", numbered(200_000, 32))
    code = """
        import os, sys, signal, embermap as em
        calls = []
        def progress(done, total):
            calls.append(done)
            if sys.argv[3] == "die" and len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        with em.open(sys.argv[1], memory="1MiB") as store:
            store.import_file("t", sys.argv[2], progress=progress)
    """
    waiter = """
        import sys, time, embermap as em
        end = time.monotonic() + float(sys.argv[2])
        while True:
            try:
                with em.open(sys.argv[1], mode="r", memory="1MiB") as store:
                    table = store["t"]
                    assert len(table) == 200_000
                    assert table[199_999][0] == 199_999
                    print("there")
                    break
            except (FileNotFoundError, KeyError) as error:
                if time.monotonic() > end:
                    sys.exit(f"{type(error).__name__}: {error}")
                time.sleep(0.05)
    """
    dying = start(code, path, tmp_path / "a.npy", "die")
    waiting = [start(waiter, path, 0) for _ in range(2)]
    dying.communicate(timeout=60)
    assert dying.returncode == -signal.SIGKILL
    for other in waiting:
        _, err = other.communicate(timeout=60)
        assert other.returncode == 1
        assert re.search(r"NotFoundError: .*(no table|no store|No such file)", err), err
    waiting = [start(waiter, path, 60) for _ in range(3)]
    time.sleep(0.2)
    first = start(code, path, tmp_path / "a.npy", "live")
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    for other in waiting:
        out, err = other.communicate(timeout=90)
        assert (other.returncode, out) == (0, "there\n"), err
