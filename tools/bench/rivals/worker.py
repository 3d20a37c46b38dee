"""A process with one store in it, confined, which does what it is told and times it.

The parent sends (command, arguments) over a pipe and gets ("ok", result) or ("error", text). What
is timed is the store's call alone: batches are made before, results are dropped after.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from . import confine, stores
from .workload import Batch, Content, Stream

START = multiprocessing.get_context("spawn")
_PATIENCE = 1800.0  # seconds that a command may take


class StoreDied(Exception):
    """The process with the store ended: killed, mostly."""


class Worker:
    """The parent's side."""

    def __init__(
        self, store: str, folder: Path, shape: stores.Shape, way: str, group: confine.Group
    ) -> None:
        """Start the process; it imports what it needs, then joins the group."""
        self.store, self.group = store, group
        self._pipe, other = START.Pipe()
        self._process = START.Process(
            target=_serve,
            args=(other, store, folder, asdict(shape), way, group.path and str(group.path)),
            daemon=True,
        )
        self._process.start()
        other.close()
        self.call("ready")

    def call(self, command: str, **arguments: Any) -> Any:
        """One command. Raises StoreDied, RuntimeError with what the store raised."""
        try:
            self._pipe.send((command, arguments))
            if not self._pipe.poll(_PATIENCE):
                self._process.kill()
                raise StoreDied(f"{self.store}: {command} took more than {_PATIENCE:.0f} s")
            kind, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(10)
            killed = self.group.kills()
            code = self._process.exitcode
            reason = "out of memory in its group" if killed else f"exit code {code}"
            raise StoreDied(f"{self.store}: the process died in {command} ({reason})") from error
        if kind == "error":
            raise RuntimeError(f"{self.store}: {command}: {result}")
        return result

    def end(self) -> None:
        """Close the store and end the process."""
        try:
            if self._process.is_alive():
                self.call("end")
        except (StoreDied, RuntimeError):
            pass
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()
        self.group.close()


def _serve(
    pipe: multiprocessing.connection.Connection,
    store: str,
    folder: Path,
    shape: dict[str, Any],
    way: str,
    group: str | None,
) -> None:
    kind = stores.ALL[store]
    server = _Server(kind(folder, stores.Shape(**shape), way), trimmed=group is None)
    _import_libraries(store)
    confine.join(group)
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(server, command)(**arguments)
        except Exception as error:  # told to the parent, whatever it is
            pipe.send(("error", f"{type(error).__name__}: {error}"))
            continue
        pipe.send(("ok", result))
        if command == "end":
            return


def _import_libraries(store: str) -> None:
    if "torch" in store:
        import torch

        torch.zeros(1).add_(1)
    elif "h5py" in store:
        import h5py  # noqa: F401
    elif store == "LMDB":
        import lmdb  # noqa: F401
    elif store == "embermap":
        import embermap  # noqa: F401


class _Server:
    """The commands."""

    def __init__(self, store: stores.Rival, *, trimmed: bool) -> None:
        self.store, self.shape, self.trimmed = store, store.shape, trimmed
        self.opened = False

    def ready(self) -> None:
        pass

    def set_way(self, way: str) -> None:
        self.store.way = way

    def reopen(self) -> None:
        """Open anew; one row is read, so that nothing is left to be set up."""
        self.shut()
        self.store.open()
        self.opened = True
        one = np.zeros(1, np.int64)
        self.store.gather(Batch(one, np.empty((0, 0), np.float32), one, one, np.empty((0, 0))))

    def shut(self) -> None:
        if self.opened:
            self.opened = False
            self.store.close()
            gc.collect()

    def end(self) -> None:
        self.shut()

    def check(self, stream: Stream) -> None:
        """Rows by id, with repeats, and rows by place are the table's, to the bit."""
        content = Content(self.shape.dim)
        batch = stream.batch_of(1_000_000, grads=False)
        ids = np.concatenate([batch.ids[:3000], batch.ids[:5], [0, self.shape.rows - 1]])
        distinct, place = np.unique(ids, return_inverse=True)
        none = np.empty((0, self.shape.dim), np.float32)
        got = np.asarray(self.store.gather(Batch(ids, none, distinct, place, none)))
        if not np.array_equal(got, content.rows(ids)):
            raise AssertionError("gather gave wrong rows")
        for first in (0, self.shape.rows // 3, max(0, self.shape.rows - 1000)):
            last = min(self.shape.rows, first + 1000)
            if not np.array_equal(
                np.asarray(self.store.read(first, last)), content.block(first, last)
            ):
                raise AssertionError(f"rows [{first}, {last}) are wrong")

    def check_update(self, stream: Stream) -> None:
        """Two optimizer steps give what NumPy computes from the rows before."""
        for number in (1_000_001, 1_000_002):
            batch = stream.batch_of(number, grads=True)
            rows = len(batch.distinct)
            wanted = np.zeros((rows, self.shape.width), np.float32)
            wanted[:, : self.shape.dim] = self._weights(batch.distinct)
            if self.shape.adagrad:
                wanted[:, self.shape.dim :] = self.store.state(batch.distinct)
            stores.step(wanted, batch.summed, self.shape.dim)
            self.store.update(batch)
            got = self._weights(batch.distinct)
            if not np.allclose(got, wanted[:, : self.shape.dim], rtol=1e-5, atol=1e-6):
                raise AssertionError("an update gave wrong weights")
            if self.shape.adagrad and not np.allclose(
                self.store.state(batch.distinct), wanted[:, self.shape.dim :], rtol=1e-6
            ):
                raise AssertionError("an update gave wrong sums")

    def _weights(self, ids: Any) -> Any:
        none = np.empty((0, self.shape.dim), np.float32)
        place = np.arange(len(ids))
        return np.asarray(self.store.gather(Batch(ids, none, ids, place, none))).copy()

    def _batch(self, op: str, stream: Stream, number: int) -> Batch:
        batch = stream.batch_of(
            number,
            grads=op == "update",
            distinct=not self.store.takes_batches_as_they_are,
        )
        if not self.store.takes_batches_as_they_are:
            batch.grads = batch.summed[:0]
        return batch

    def warm(self, op: str, stream: Stream, first: int, count: int, seconds: float) -> int:
        """Untimed batches until `count` were done or the time is over. Returns how many."""
        began = time.perf_counter()
        for number in range(first, first + count):
            batch = self._batch(op, stream, number)
            if op == "update":
                self.store.update(batch)
            else:
                self.store.warm(batch)
            del batch
            self._trim()
            if time.perf_counter() - began > seconds:
                return number + 1 - first
        return count

    def run(
        self, op: str, stream: Stream, first: int, count: int, seconds: float
    ) -> dict[str, Any]:
        """Timed batches, until `count` were done or their time reaches `seconds`."""
        call = getattr(self.store, op)
        before = self.store.stats()
        times: list[float] = []
        for number in range(first, first + count):
            batch = self._batch(op, stream, number)
            began = time.perf_counter()
            result = call(batch)
            times.append(time.perf_counter() - began)
            # Before the next ones are made: their arrays are a tenth of the process's memory.
            del result, batch
            self._trim()
            if sum(times) >= seconds:
                break
        after = self.store.stats()
        counted = {
            key: after[key] - before[key]
            for key in ("hits", "misses", "pages_read", "bytes_read", "bytes_written", "evictions")
            if key in after
        }
        return {"times": times, "batch": stream.batch, "stats": counted}

    def read_all(self) -> None:
        """Bring every row into memory, for cases where all is hot."""
        none = np.empty((0, 0), np.float32)
        for first in range(0, self.shape.rows, 65_536):
            ids = np.arange(first, min(first + 65_536, self.shape.rows), dtype=np.int64)
            self.store.gather(Batch(ids, none, ids, np.arange(len(ids)), none))

    def scan(self, seconds: float) -> dict[str, float]:
        """Read rows from the first on, at most 16 MiB of weights at a time."""
        return self._sequential(seconds, write=False)

    def bulk(self, seconds: float) -> dict[str, float]:
        """Write all weights from the first row on, and wait for the disk at the end."""
        return self._sequential(seconds, write=True)

    def _sequential(self, seconds: float, *, write: bool) -> dict[str, float]:
        block = max(1, min(16 << 20, self.shape.memory // 32) // (self.shape.dim * 4))
        content, spent, done = Content(self.shape.dim), 0.0, 0
        for first in range(0, self.shape.rows, block):
            last = min(first + block, self.shape.rows)
            rows = content.block(first, last) if write else None
            began = time.perf_counter()
            if rows is not None:
                self.store.write(first, rows)
            else:
                self.store.read(first, last)
            spent += time.perf_counter() - began
            done = last
            self._trim()
            if spent >= seconds:
                break
        if write:
            began = time.perf_counter()
            self.store.flush()
            spent += time.perf_counter() - began
        return {"rows": done, "bytes": done * self.shape.width * 4, "seconds": spent}

    def prefetch_loop(
        self, stream: Stream, first: int, seconds: float, turns: int = 4, most: int = 16
    ) -> dict[str, float]:
        """A training loop of embermap, whose computing takes as long as its reads.

        In turns, on batches of their own each, so that a disk or a machine whose pace changes has
        changed for all three: the gathers alone; the computing alone, a fixed amount of work on one
        core that takes as long as these gathers just did, half of it before the loop and half after
        it; and the loop that gathers, prefetches the next batch, and does the same work. A turn has
        as many batches, 4 to `most`, as are read in its share of `seconds`. Times in seconds;
        "waited" is what the loop spent in its gathers, "computed" in its work.
        """
        store: Any = self.store
        ids = [stream.ids_of(number) for number in range(first, first + turns * (2 * most + 1))]
        empty = np.empty((0, 0), np.float32)
        batches = [Batch(i, empty, i, i, empty) for i in ids]
        work = np.random.default_rng(0).random(1 << 14, np.float32)

        def compute(units: int) -> float:
            began = time.perf_counter()
            for _ in range(units):
                np.sin(work)
            return time.perf_counter() - began

        units = 64
        pace = units / compute(units)  # units a second
        pace = max(1.0, 0.2 * pace) / compute(max(1, round(0.2 * pace)))
        found = dict.fromkeys(("loop", "compute", "reads", "waited", "computed"), 0.0)
        at, count = 0, 0
        for turn in range(turns):
            read, reads = 0, 0.0
            while read < count or (
                turn == 0 and read < most and (read < 4 or reads < seconds / turns)
            ):
                began = time.perf_counter()
                store.gather(batches[at + read])
                reads += time.perf_counter() - began
                read += 1
            count = read
            at += count
            per_batch = max(1, round(pace * reads / count))
            alone = compute(count // 2 * per_batch)
            store.prefetch(ids[at])
            compute(per_batch)
            began = time.perf_counter()
            for number in range(at, at + count):
                start = time.perf_counter()
                store.gather(batches[number])
                found["waited"] += time.perf_counter() - start
                store.prefetch(ids[number + 1])
                found["computed"] += compute(per_batch)
            found["loop"] += time.perf_counter() - began
            store.gather(batches[at + count])  # prefetched: nothing is left promised
            at += count + 1
            alone += compute((count - count // 2) * per_batch)
            pace = count * per_batch / alone
            found["compute"] += alone
            found["reads"] += reads
        return found

    def memory(self) -> dict[str, int]:
        return {name: confine.memory_of_process(name) for name in ("VmHWM", "VmRSS", "RssAnon")}

    def _trim(self) -> None:
        if self.trimmed:
            for file in self.store.files(self.store.folder):
                confine.trim(file, self.shape.memory)
