"""Forks, workers, pickles, and the end of a process."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import shutil
import sys
from pathlib import Path

import embermap as em
import numpy as np
import pytest

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


def in_child(work):
    """The exit status of `work()` in a forked child: 0 if it returned, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            sys.__stderr__.write(f"child: {type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_cannot_use_the_handles_it_inherits(path):
    with em.open(path, threads=2) as store:
        table = store.create("t", rows=1_000, dim=4, optimizer=em.optim.Adagrad(lr=1))
        view = table.view()
        table[:] = 1
        store.commit()
        table[7] = 2
        parent = os.getpid()

        def work():
            rows = np.ones((1, 4), np.float32)
            uses = (
                lambda: table.gather([1]),
                lambda: table.scatter([1], rows),
                lambda: table.add([1], rows),
                lambda: table.update([1], rows),
                lambda: table.prefetch([1]),
                lambda: table.prefetcher(),
                lambda: table.read(0, 1),
                lambda: table.write(0, rows),
                lambda: table.append(rows),
                lambda: table.resize(5),
                lambda: table.materialize(),
                lambda: table.verify(),
                lambda: table.stats(),
                lambda: table.counters(),
                lambda: table.export(path.parent / "out.npy"),
                lambda: table[1],
                lambda: table.__setitem__(1, 2),
                lambda: next(iter(table)),
                lambda: np.asarray(table),
                lambda: table.rows,
                lambda: table.step,
                lambda: table.optimizer,
                lambda: setattr(table, "optimizer", em.optim.Adagrad(lr=2)),
                lambda: setattr(table, "memory", "1MiB"),
                lambda: view[1],
                lambda: store.commit(),
                lambda: store.commit_number,
                lambda: store.create("u", rows=1, dim=1),
                lambda: store.from_array("u", rows),
                lambda: store.remove("t"),
                lambda: store.stats(),
                lambda: store.tables(),
                lambda: store["t"],
                lambda: store.__enter__(),
                lambda: pickle.dumps(store),
                lambda: pickle.dumps(table),
            )
            both = f"opened in process {parent} and is used in process {os.getpid()},"
            for use in uses:
                with pytest.raises(em.ForkError, match=both):
                    use()
            assert issubclass(em.ForkError, ValueError)
            assert store.closed
            assert "closed" in repr(store) + repr(table)
            store.close()
            store.abandon()
            with em.open(path, mode="r") as mine:
                assert mine["t"][1].tolist() == [1] * 4
            with pytest.raises(em.LockedError):
                em.open(path)

        assert in_child(work) == 0
        assert in_child(lambda: in_child(work) == 0 or 1 / 0) == 0  # a child of a child
        with pytest.raises(em.LockedError):  # the child did not give the lock away
            em.open(path)
        assert table[7].tolist() == [2] * 4
        table[8] = 3
    with em.open(path, mode="r") as store:
        assert store["t"].gather([6, 7, 8]).tolist() == [[1] * 4, [2] * 4, [3] * 4]


def test_a_child_cannot_use_modules_and_optimizers_it_inherits(path):
    torch = pytest.importorskip("torch")
    import embermap.torch

    with em.open(path, threads=2) as store:
        table = store.create("t", rows=100, dim=4, optimizer=em.optim.Adagrad(lr=1))
        embedding = embermap.torch.Embedding(table)
        optimizer = embermap.torch.Optimizer([embedding])
        embedding(torch.tensor([3])).sum().backward()
        parent = os.getpid()

        def work():
            both = f"opened in process {parent} and is used in process {os.getpid()},"
            for use in (lambda: embedding(torch.tensor([3])), optimizer.step):
                with pytest.raises(em.ForkError, match=both):
                    use()

        assert in_child(work) == 0
        optimizer.step()
        assert table[3].tolist() == [-1] * 4
        assert table.step == 1


def test_a_child_that_leaves_the_block_does_not_commit(path):
    with em.open(path) as store:
        table = store.create("t", rows=10, dim=1)
        store.commit()
        table[1] = 1
        number = store.commit_number

        def work():
            store.__exit__(None, None, None)
            with em.open(path, mode="r") as mine:
                assert mine.commit_number == number

        assert in_child(work) == 0
        assert store.commit_number == number


def test_a_child_ends_in_the_ordinary_way(path, run_python):
    """Not by os._exit: with destructors, and threads that exist in the parent only."""
    code = """
        import os, sys, warnings, embermap as em

        # From 3.12 Python warns of any fork beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        store = em.open(sys.argv[1], threads=3)
        table = store.create("t", rows=1000, dim=4)
        table[:] = 1
        table.prefetch([5])
        pid = os.fork()
        if pid == 0:
            del table, store
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert table[3].tolist() == [1] * 4
        store.close()
    """
    assert run_python(code, path).stderr == ""


def test_the_end_of_a_process_with_an_open_store_is_quiet_and_commits_nothing(path, run_python):
    with em.open(path) as store:
        store.create("t", rows=1_000, dim=4)[5] = 1
    code = """
        import sys, embermap as em
        store = em.open(sys.argv[1])
        table = store["t"]
        table[5] = 2
        table.prefetch(range(1000))
        view = table.view()
        kept = [store, table, view]
        kept.append(kept)
    """
    done = run_python(code, path)
    assert done.stdout == done.stderr == ""
    with em.open(path) as store:
        assert store["t"][5].tolist() == [1] * 4


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_dropped_stores_release_everything(path):
    gc.collect()  # what other tests left
    before = open_files()
    gc.freeze()  # so that looking for cycles is quick
    try:
        for number in range(100):
            store = em.open(path, memory="64KiB", threads=1)
            if number == 0:
                store.create("t", rows=100, dim=4)
            cycle = [store, store["t"]]
            cycle.append(cycle)
            del store, cycle
            gc.collect()  # or the next opening finds the lock taken
    finally:
        gc.unfreeze()
    assert open_files() == before
    with em.open(path, memory="64KiB") as store:
        assert store.tables() == ["t"]


@pytest.mark.parametrize("mode", ["r+", "r"])
@pytest.mark.parametrize("end", ["close", "abandon"])
def test_a_store_that_has_ended_has_no_file_open(path, mode, end):
    """Though its handle lives: the file system could not be unmounted."""
    with em.open(path) as store:
        store.create("t", rows=100, dim=4)[:] = 1
    before = open_files()
    store = em.open(path, mode=mode)
    table = store["t"]
    assert table[5].tolist() == [1] * 4
    assert open_files() > before
    getattr(store, end)()
    assert open_files() == before


def test_a_table_keeps_its_store(path):
    table = em.open(path).create("t", rows=10, dim=2)
    gc.collect()
    table[3] = 1
    assert table[3].tolist() == [1, 1]
    table._store.close()


def test_results_outlive_the_store(path):
    with em.open(path) as store:
        table = store.create("t", rows=10, dim=2, init=em.init.Constant(3))
        kept = table.gather([1, 2]), table[0], table[2:4]
    shutil.rmtree(path)
    assert all((x == 3).all() for x in kept)


# --- pickles --------------------------------------------------------------------------------------


@pytest.fixture
def filled(path):
    with em.open(path) as store:
        table = store.create("t", rows=50_000, dim=16, init=em.init.Normal())
        table[3] = 1
        store.create("u", rows=10, dim=1)[0] = 5
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_pickle_is_small_and_opens_read_only(filled, mode):
    with em.open(filled, mode=mode, memory="2MiB") as store:
        data = pickle.dumps((store, store["t"], store["u"]))
        assert len(data) < 1_000
        again, t, u = pickle.loads(data)
        assert again.mode == "r"
        assert again.memory == 2 << 20
        assert again.path == filled
        assert t._store is again is u._store  # opened once
        assert np.array_equal(t[:10], store["t"][:10])
        assert u[0] == 5
        with pytest.raises(PermissionError):
            t.scatter([0], np.ones((1, 16), np.float32))
        again.close()
        assert store["t"][3].tolist() == [1] * 16


def test_a_pickled_table_sees_the_last_commit(filled):
    with em.open(filled) as store:
        table = store["t"]
        table[3] = 2
        copied = pickle.loads(pickle.dumps(table))
        assert copied[3].tolist() == [1] * 16
        copied._store.close()
        store.commit()
        copied = pickle.loads(pickle.dumps(table))
        assert copied[3].tolist() == [2] * 16
        copied._store.close()


def test_handles_unpickled_in_one_process_share_one_opening(filled):
    with em.open(filled, memory="2MiB") as store:
        first, second = (pickle.dumps(store[name]) for name in ("t", "u"))
        store["t"][3] = 1  # what it opens with its first use is open
        store.commit()
        before = open_files()
        t = pickle.loads(first)
        opened = open_files()
        again, u = pickle.loads(first), pickle.loads(second)
        assert open_files() == opened > before
        assert np.array_equal(again[:5], t[:5])
        assert u[0] == 5
        t[3]
        assert again.stats()["resident_pages"] == t.stats()["resident_pages"] == 1  # one memory

        store["t"][3] = 2
        store.commit()
        fresh = pickle.loads(first)  # of another commit: another opening
        assert fresh[3].tolist() == [2] * 16
        fresh._store.close()
        closed = fresh
        with pytest.raises(ValueError, match="closed"):
            closed[3]
        fresh = pickle.loads(first)
        assert fresh[3].tolist() == [2] * 16
        del t, again, u, fresh, closed
        gc.collect()
        assert open_files() == before  # the last one gone, the files are closed


def test_a_child_does_not_use_what_its_parent_unpickled(filled):
    with em.open(filled) as store:
        data = pickle.dumps(store["t"])
    table = pickle.loads(data)

    def work():
        with pytest.raises(em.ForkError):
            table[3]
        mine = pickle.loads(data)
        assert mine[3].tolist() == [1] * 16
        assert pickle.loads(data)._store._session is mine._store._session

    assert in_child(work) == 0
    assert table[3].tolist() == [1] * 16


def test_copies_are_the_same_handle(filled):
    with em.open(filled) as store:
        table = store["t"]
        assert copy.copy(table) is copy.deepcopy(table) is table
        assert copy.copy(store) is copy.deepcopy(store) is store


def test_pickles_of_what_has_changed_are_refused(filled, tmp_path, monkeypatch):
    with em.open(filled, mode="r") as store:
        data = pickle.dumps(store["t"])
    monkeypatch.chdir(tmp_path)  # the path in it is absolute
    table = pickle.loads(data)
    assert table[3].tolist() == [1] * 16
    table._store.close()

    file = filled / "t.npy"
    whole = file.stat().st_size
    os.truncate(file, 100_000)
    with pytest.raises(em.FormatError, match=r"t\.npy"):
        pickle.loads(data)
    os.truncate(file, whole)

    kept = tmp_path / "kept"
    filled.rename(kept)
    with pytest.raises(FileNotFoundError, match=str(filled)):
        pickle.loads(data)
    with em.open(filled) as store:  # another store at the same place
        store.create("t", rows=50_000, dim=16)
    with pytest.raises(ValueError, match="replaced"):
        pickle.loads(data)
    shutil.rmtree(filled)
    kept.rename(filled)

    with em.open(filled) as store:  # another table of the same name
        store.remove("t")
        store.create("other", rows=1, dim=1)
        store.create("t", rows=50_000, dim=17)
    with pytest.raises(ValueError, match="replaced"):
        pickle.loads(data)
    with em.open(filled) as store:
        store.remove("t")
    with pytest.raises(KeyError, match="'t'"):
        pickle.loads(data)


def test_a_closed_store_is_not_pickled(filled):
    with em.open(filled) as store:
        table = store["t"]
    for thing in (store, table):
        with pytest.raises(ValueError, match="closed"):
            pickle.dumps(thing)


# --- workers --------------------------------------------------------------------------------------


def _sum_of_rows(job):
    table, ids = job
    return float(table.gather(ids).sum())


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_gather_from_a_pickled_table(filled, method):
    context = multiprocessing.get_context(method)
    ids = np.arange(0, 50_000, 7)
    with em.open(filled) as store:
        table = store["t"]
        wanted = _sum_of_rows((table, ids))
        if method == "spawn":  # where this file cannot be imported by its name
            pytest.importorskip("torch")
            from torch.utils.data import DataLoader

            loader = DataLoader(
                [np.arange(7)] * 4,
                batch_size=None,
                num_workers=2,
                multiprocessing_context="spawn",
                collate_fn=table.gather,
            )
            got = [np.asarray(x) for x in loader]
            assert len(got) == 4
            assert all(np.array_equal(x, table[:7]) for x in got)
            return
        with context.Pool(2) as pool:
            assert pool.map(_sum_of_rows, [(table, ids)] * 4) == [wanted] * 4
        table[3] = 9
    with em.open(filled, mode="r") as store:
        assert (store["t"][3] == 9).all()


def test_a_prefetch_of_the_parent_is_refused_and_not_waited_for(tmp_path):
    with em.open(tmp_path / "s", memory="1MiB") as store:
        table = store.create("t", rows=100_000, dim=32, init=em.init.Normal(0, 1))
        store.commit()
        ahead = [table.prefetch(np.arange(i, 100_000, 5)) for i in range(5)]

        def child():
            for use in (ahead[-1].wait, ahead[-1].done, ahead[-1].cancel):
                with pytest.raises(em.ForkError, match="was begun in process"):
                    use()
            assert "another process" in repr(ahead[-1])
            ahead.clear()

        assert in_child(child) == 0
        for one in ahead:
            one.cancel()
            assert one.wait(60)
