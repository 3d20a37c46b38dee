"""prefetch: its handle, and ids that come from worker processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import threading
import time

import embermap as em
import numpy as np
import pytest


@pytest.fixture
def table(store):
    return store.create("t", rows=100_000, dim=128)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def resident(table):
    return table.stats()["resident_pages"]


# --- the handle -----------------------------------------------------------------------------------


def test_the_handle_ends_when_the_pages_are_there(table):
    handle = table.prefetch(range(800))
    assert handle.wait() is True
    assert handle.done()
    assert "done" in repr(handle)
    assert resident(table) == 100
    misses = table.stats()["misses"]
    table.gather(range(800))
    assert table.stats()["misses"] == misses
    assert handle.wait(timeout=0)
    handle.cancel()  # too late, and no error


def test_a_cancelled_prefetch_ends(table):
    handles = [table.prefetch(range(k, 100_000, 8)) for k in range(6)]
    for handle in handles:
        handle.cancel()
    assert all(handle.wait(60) for handle in handles)


def test_handles_outlive_their_store(path):
    with em.open(path, memory="8MiB") as store:
        handle = store.create("t", rows=100_000, dim=128).prefetch(range(100_000))
    assert handle.wait(60)
    assert handle.done()


@pytest.mark.parametrize("timeout", ["1", [1, 2], object()])
def test_timeouts_that_are_none(table, timeout):
    with pytest.raises(TypeError, match="timeout"):
        table.prefetch([1]).wait(timeout)


# --- from other processes -------------------------------------------------------------------------


def send(prefetch, ids):
    prefetch(ids)
    # The sending thread is given a moment: a worker that ends at once may leave the ids unsent.
    time.sleep(0.5)


def caught(prefetch, ids, answers):
    try:
        prefetch(ids)
    except em.RowIdError as error:
        answers.put((str(error), error.id, error.position))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ids_of_a_process_are_prefetched_here(table, method):
    context = multiprocessing.get_context(method)
    prefetch = table.prefetcher()
    worker = context.Process(target=send, args=(prefetch, range(800)))
    worker.start()
    wait_until(lambda: resident(table) == 100)
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_bad_ids_raise_in_the_worker(table, method):
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    args = (table.prefetcher(), [5, 100_000], answers)
    worker = context.Process(target=caught, args=args)
    worker.start()
    text, bad, position = answers.get(timeout=60)
    worker.join()
    assert (bad, position) == (100_000, 1)
    assert "'t'" in text
    assert "100000" in text


def test_it_is_small_and_checks_its_ids(table):
    prefetch = table.prefetcher()
    assert len(pickle.dumps(prefetch)) < 300
    assert "'t'" in repr(prefetch)
    for here in (prefetch, pickle.loads(pickle.dumps(prefetch))):
        here(np.arange(0, 800))
        here([])
        with pytest.raises(em.RowIdError, match="-1"):
            here([1, -1])
        with pytest.raises(TypeError, match="float"):
            here([1.5])
    wait_until(lambda: resident(table) == 100)


def test_a_batch_of_a_million_ids_and_many_batches_arrive(table):
    context = multiprocessing.get_context("fork")
    ids = np.random.default_rng(0).integers(0, 8 * 300, 1_000_000)
    workers = [context.Process(target=send, args=(table.prefetcher(), ids)) for _ in range(3)]
    for worker in workers:
        worker.start()
    wait_until(lambda: resident(table) == 300)
    for worker in workers:
        worker.join()


def test_a_caller_is_never_held_up(table):
    """The other side does not read at all, and batches that come then are dropped."""
    prefetch = table.prefetcher()
    release = threading.Event()
    session = table._store._session
    session.hints._prefetch = lambda *_: release.wait()
    away = pickle.loads(pickle.dumps(prefetch))
    away._sender = em._prefetch._Sender(session.hints.address)
    ids = np.arange(100_000)
    message = b"x"
    for _ in range(200):
        em._prefetch._Sender.add(away._sender, message * 1_000_000)
    assert len(away._sender._waiting) <= em._prefetch._MOST_WAITING
    release.set()
    prefetch(ids[:8])


def test_the_worker_does_not_mind_a_closed_store(path):
    store = em.open(path, memory="8MiB")
    prefetch = store.create("t", rows=1000, dim=8).prefetcher()
    store.close()
    for _ in range(5):
        prefetch([1, 2])
        time.sleep(0.05)
    assert prefetch._sender._gone


def forever(prefetch, started):
    while True:
        prefetch(range(800))
        started.set()
        time.sleep(0.001)


def test_the_store_does_not_mind_a_killed_worker(table):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    worker = context.Process(target=forever, args=(table.prefetcher(), started))
    worker.start()
    assert started.wait(60)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    table.prefetcher()([9000])
    table.gather([1])
    wait_until(lambda: not table._store._session.hints._connections)


def test_strangers_are_not_listened_to(table):
    import socket

    prefetch = table.prefetcher()
    for junk in (b"\xff" * 100, b"x", em._prefetch._HEAD.pack(3, 2**60) + b"abc"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(f"\0{prefetch._address}")
            peer.sendall(junk)
    # A table that is not there, ids that are none: hints that lead nowhere.
    nowhere = em.Prefetcher(prefetch._address, "gone", 10**9)
    sender = em._prefetch._Sender(prefetch._address)
    head = em._prefetch._HEAD
    for name, ids in ((b"gone", [1]), (b"t", [10**9]), (b"t", range(800))):
        sender.add(head.pack(len(name), len(ids)) + name + np.array(ids, "<i8").tobytes())
    with pytest.raises(em.NotFoundError):
        nowhere([1])  # in this process it is a call like any other
    wait_until(lambda: resident(table) == 100)


def test_a_store_can_be_closed_and_opened_again(path):
    before = threading.active_count()
    for _ in range(3):
        with em.open(path, memory="8MiB") as store:
            table = store["t"] if "t" in store else store.create("t", rows=1000, dim=8)
            table.prefetcher()([1, 2, 3])
    assert threading.active_count() <= before


def test_a_store_that_is_dropped_lets_go(path):
    store = em.open(path, memory="8MiB")
    table = store.create("t", rows=1000, dim=8)
    table.prefetcher()([1, 2, 3])
    before = threading.active_count()
    store.commit()
    del store, table
    wait_until(lambda: gc.collect() is not None and threading.active_count() < before)
    em.open(path, memory="8MiB").close()  # LockedError if the lock is still held


def test_a_prefetcher_takes_its_thread_with_it(table):
    away = table.prefetcher()
    away._sender = em._prefetch._Sender(away._address)
    sender = away._sender
    del away
    wait_until(lambda: sender._gone and not sender._thread.is_alive())


# --- DataLoader -----------------------------------------------------------------------------------

torch = pytest.importorskip("torch")


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 3200

    def __getitem__(self, i):
        return i * 8  # a page each


class Collate:
    def __init__(self, table):
        self.prefetch = table.prefetcher()

    def __call__(self, samples):
        ids = torch.tensor(samples)
        self.prefetch(ids)
        return ids


@pytest.mark.parametrize(
    ("workers", "method", "persistent"),
    [
        (0, None, False),
        (1, "fork", False),
        (2, "fork", True),
        (1, "spawn", True),
        (2, "spawn", False),
    ],
)
def test_workers_of_a_dataloader(path, workers, method, persistent):
    with em.open(path, memory="32MiB", threads=2) as store:
        table = store.create("t", rows=3200 * 8, dim=128, init=em.init.Uniform())
        table.materialize()
        loader = torch.utils.data.DataLoader(
            Numbers(),
            batch_size=64,
            num_workers=workers,
            collate_fn=Collate(table),
            multiprocessing_context=method,
            persistent_workers=persistent,
        )
        for _ in range(2):
            seen = 0
            for ids in loader:
                if seen == 0:  # what the workers sent comes without any gather of these rows
                    wait_until(lambda: resident(table) >= 64)
                assert table.gather(ids).shape == (64, 128)
                seen += len(ids)
            assert seen == 3200
        if persistent:
            del loader


class Batches(torch.utils.data.Dataset):
    """Ids of batch k, as one sample."""

    def __len__(self):
        return 60

    def __getitem__(self, k):
        return np.random.default_rng(k).integers(0, 100_000, 250)


class CollateBatch(Collate):
    def __call__(self, samples):
        ids = torch.from_numpy(samples[0])
        self.prefetch(ids)
        return ids


def test_workers_far_ahead_of_a_small_memory_read_hardly_a_page_twice(path):
    with em.open(path, memory="4MiB", threads=2) as store:
        table = store.create("t", rows=100_000, dim=128, init=em.init.Uniform())
        table.materialize()
        loader = torch.utils.data.DataLoader(
            Batches(), num_workers=4, collate_fn=CollateBatch(table), multiprocessing_context="fork"
        )
        wanted = 0
        for ids in loader:
            table.gather(ids)
            time.sleep(0.005)
            wanted += len(np.unique(ids.numpy() // 8))
        assert table.stats()["frames"] < 1000
        assert table.stats()["pages_read"] < 1.05 * wanted
