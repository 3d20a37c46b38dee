"""Many threads and streams on the tables of one store, every row checked.

    python tests/stress/gpu_stress.py --minutes 30
    python tests/stress/gpu_stress.py --minutes 30 --seed 17      # the same batches again
    python tests/stress/gpu_stress.py --device none               # on the host alone

Each thread owns the ids that leave its number as the remainder, and only it changes their rows. So
it knows them exactly; rows of the others are checked for what they say of themselves. In the tables
"whole" and "large" a row is a function of its id and a version, which lies between what its owner
had finished before the gather and what it has begun after it. Rows of "half" are trained: a table
on the host beside it gets the same calls and must have the same bits, and in each row all elements
are equal. A round ends with a check of all rows, a commit, changes that no commit has, and the end
of the session; the next one opens the store with other memory, threads and replacement.

Prints a line a round. Ends with 1 at the first wrong row, and says which, what it is and what it
should be.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

import embermap as em
import numpy as np

NEVER = 2**21  # a version that no row may have
TABLES = {  # rows and dim; in a small run
    "whole": ((60_000, 32), (8_000, 32)),
    "large": ((400_000, 64), (40_000, 64)),
    "half": ((120_000, 48), (12_000, 48)),
}


class Wrong(Exception):
    """A row that is not what it should be."""


def content(ids, versions, dim):
    """Rows of the tables "whole" and "large": whole numbers, exact in float32, also when added."""
    rows = (ids * 31 + versions * 17)[:, None] + 7 * np.arange(dim)
    rows = (rows % 1021).astype(np.float32)
    rows[:, 0] = ids
    rows[:, 1] = versions
    return rows


def last_positions(ids):
    """The distinct ids, and where each stands last."""
    distinct, at = np.unique(ids[::-1], return_index=True)
    return distinct, len(ids) - 1 - at


def describe(ids, bad, rows, wanted):
    """The first bad row, and where the next ones are."""
    at = np.flatnonzero(bad)
    return (
        f"{len(ids)} ids, {len(at)} rows wrong, the first at position {at[0]}: id {ids[at[0]]}\n"
        f"  is        {rows[at[0]].tolist()}\n  should be {wanted[at[0]].tolist()}\n"
        f"  positions {at[:20].tolist()}, their ids {ids[at[:20]].tolist()}"
    )


class Truth:
    """What each row of a table may be. Arrays by id, whose elements only the row's owner writes."""

    def __init__(self, rows):
        self.begun = np.zeros(
            rows, np.int64
        )  # the version that its owner is about to write, or has written
        self.done = np.zeros(rows, np.int64)  # the one that is there for certain
        self.committed = np.zeros(rows, np.int64)  # the one that a commit has, or an earlier one


class Run:
    """One run of the program: the store, what it should hold, and when to stop."""

    def __init__(self, options, directory):
        self.options = options
        self.directory = directory
        self.random = np.random.default_rng([options.seed, 1 << 20])
        self.shapes = {name: shapes[options.small] for name, shapes in TABLES.items()}
        self.truth = {name: Truth(self.shapes[name][0]) for name in ("whole", "large")}
        self.counts = Counter()
        self.lock = threading.Lock()  # counts, failure, committed
        self.committing = threading.Lock()
        self.failure = None
        self.stop = threading.Event()
        self.device = options.device
        self.twin_store = em.open(directory / "twin", memory="1GiB", threads=2, durability="none")
        self.optimizer = [em.optim.Adagrad(0.05), em.optim.SGD(0.05, momentum=0.9)][
            options.seed % 2
        ]
        rows, dim = self.shapes["half"]
        self.twin = self.twin_store.create(
            "half",
            rows=rows,
            dim=dim,
            dtype="float16",
            optimizer=self.optimizer,
            init=em.init.Zeros(),
        )
        self.open(first=True)

    def open(self, first=False):
        total = sum(rows * dim * 4 for rows, dim in self.shapes.values())
        # "whole" always fits; the two others get a part of what they would need.
        rows, dim = self.shapes["whole"]
        memory = int(2 * rows * dim * 4 + (8 << 20) + total * self.random.uniform(0.05, 0.4))
        self.config = {
            "memory": memory,
            "threads": int(self.random.choice([1, 2, 4, 8, 16])),
            "policy": str(self.random.choice(["lru", "s3fifo"])),
            "durability": str(self.random.choice(["commit", "commit", "none"])),
            "log_limit": [None, 16 << 20][self.random.integers(0, 2)],
        }
        self.store = em.open(self.directory / "store", device=self.device, **self.config)
        if first:
            for name, (rows, dim) in self.shapes.items():
                half = name == "half"
                table = self.store.create(
                    name,
                    rows=rows,
                    dim=dim,
                    dtype="float16" if half else "float32",
                    optimizer=self.optimizer if half else None,
                    init=em.init.Zeros(),
                )
                if not half:
                    ids = np.arange(rows)
                    table[:] = content(ids, np.zeros(rows, np.int64), dim)
            self.store.commit()
        self.store["whole"].memory = 2 * self.shapes["whole"][0] * self.shapes["whole"][1] * 4

    def count(self, what, rows):
        with self.lock:
            self.counts[what] += 1
            self.counts["rows"] += int(rows)

    def fail(self, error):
        with self.lock:
            if self.failure is None:
                self.failure = error
        self.stop.set()

    def commit(self):
        """A commit, and what it has for certain."""
        with self.committing:
            before = {name: truth.done.copy() for name, truth in self.truth.items()}
            self.store.commit()
            for name, done in before.items():
                self.truth[name].committed = done

    # --- checks -----------------------------------------------------------------------------------

    def check(self, name, what, ids, rows, low, high):
        """Rows of "whole" or "large" are what their ids and versions say, these between the two."""
        versions = rows[:, 1].astype(np.int64)
        wanted = content(ids, versions, self.shapes[name][1])
        bad = (rows != wanted).any(axis=1) | (versions < low) | (versions > high)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise Wrong(
                f"{what} of table {name!r}, {describe(ids, bad, rows, wanted)}\n"
                f"  owner {ids[at] % self.options.threads}, version {rows[at, 1]}, "
                f"which may be {low[at]} to {high[at]}"
            )

    def check_equal(self, what, ids, rows, wanted):
        """Rows of "half" have the same bits as those of the table on the host."""
        bits = [array.view(np.uint8).reshape(len(ids), -1) for array in (rows, wanted)]
        bad = (bits[0] != bits[1]).any(axis=1)
        if bad.any():
            raise Wrong(f"{what} of table 'half', {describe(ids, bad, rows, wanted)}")

    def check_all(self, what):
        for name, truth in self.truth.items():
            table = self.store[name]
            for begin in range(0, table.rows, 50_000):
                ids = np.arange(begin, min(begin + 50_000, table.rows))
                self.check(
                    name,
                    what,
                    ids,
                    table.read(begin, ids[-1] + 1),
                    truth.done[ids],
                    truth.done[ids],
                )
        half = self.store["half"]
        for field in half.fields:
            self.check_equal(
                f"{what} ({field})",
                np.arange(half.rows),
                half.read(field=field),
                self.twin.read(field=field),
            )
        if half.step != self.twin.step:
            raise Wrong(
                f"{what}: table 'half' has had {half.step} steps, that on the host {self.twin.step}"
            )

    # --- rounds -----------------------------------------------------------------------------------

    def round(self, number, seconds):
        begin = time.monotonic()
        self.stop.clear()
        workers = [Worker(self, number, thread) for thread in range(self.options.threads)]
        threads = [
            threading.Thread(target=worker.run, name=f"worker {i}", daemon=True)
            for i, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(timeout=300)
            if thread.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                raise Wrong(f"{thread.name} has not ended for five minutes")
        if self.failure is not None:
            raise self.failure
        self.check_all("read after all threads had ended")
        stats = [self.store[name].stats() for name in self.shapes]
        names = ("evictions", "whole", "registered")
        self.commit()
        if self.store.path.joinpath("UNCOMMITTED").exists():
            raise Wrong("the store says that it has changes after a commit with nothing beside it")
        print(
            f"round {number}: {time.monotonic() - begin:.1f} s, {self.config}, "
            f"{dict(self.counts)}, "
            + ", ".join(f"{name} {[s[name] for s in stats]}" for name in names)
            + f", rows by kernel, threads, pageable {[self.moved(s) for s in stats]}",
            flush=True,
        )
        if self.config["durability"] == "commit":
            for name, truth in self.truth.items():  # changes that no commit has
                ids = self.random.integers(0, len(truth.done), 500)
                self.store[name].scatter(
                    ids, content(ids, np.full(len(ids), NEVER), self.shapes[name][1])
                )
            self.store.abandon()
        else:
            self.store.close()
        self.open()
        self.check_all("read in the next session")

    @staticmethod
    def moved(stats):
        cuda = stats.get("cuda", {})
        return tuple(cuda.get(name, 0) for name in ("kernel_rows", "thread_rows", "pageable_rows"))


class Worker:
    """A thread with a stream of its own."""

    def __init__(self, run, number, thread):
        self.on = run
        self.number = number
        self.thread = thread
        self.random = np.random.default_rng([run.options.seed, number, thread])
        self.iteration = 0
        self.doing = "nothing"

    def run(self):
        try:
            if self.on.device is None:
                self.work()
                return
            import torch

            with torch.cuda.device(self.on.device), torch.cuda.stream(torch.cuda.Stream()):
                self.work()
        except BaseException as error:
            where = (
                f"seed {self.on.options.seed}, round {self.number}, thread {self.thread}, "
                f"iteration {self.iteration}"
            )
            if not isinstance(error, Wrong):
                error = Wrong(f"{self.doing}: {''.join(traceback.format_exception(error))}")
            self.on.fail(Wrong(f"{where}: {error}"))

    def work(self):
        calls = [
            self.gather_own,
            self.gather_any,
            self.scatter,
            self.add,
            self.train,
            self.prefetch,
            self.read,
            self.commit,
        ]
        calls += [self.look_as_reader, self.checkpoint]
        weights = np.array([6, 6, 5, 4, 6, 2, 1, 0.3, 0.3, 0.1])
        while not self.on.stop.is_set():
            self.iteration += 1
            call = calls[self.random.choice(len(calls), p=weights / weights.sum())]
            self.doing = call.__name__
            self.on.count(call.__name__, call())

    # --- batches ----------------------------------------------------------------------------------

    def ids(self, rows, own):
        """A batch of ids of any size up to the largest, as training has them and worse."""
        count = int(self.on.options.max_batch ** self.random.random())
        step = self.on.options.threads if own else 1
        first = self.thread if own else 0
        there = (rows - first + step - 1) // step
        kind = self.random.integers(0, 6)
        if kind == 0:
            at = self.random.integers(0, there, count)
        elif kind == 1:  # each once
            at = self.random.permutation(there)[:count]
        elif kind == 2:
            at = (there ** self.random.random(count) - 1).astype(np.int64)
        elif kind == 3:
            at = self.random.integers(0, min(there, 8), count)
        elif kind == 4:  # one stretch, in order
            at = np.sort((self.random.integers(0, there) + np.arange(count)) % there)
        else:
            at = np.full(count, self.random.integers(0, there))
        return at * step + first

    def place(self, array):
        """On the device, or for one in ten calls on the host."""
        if not self.on_device:
            return array
        import torch

        return torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def choose_place(self):
        self.on_device = self.on.device is not None and self.random.random() < 0.9

    def back(self, rows):
        return rows.cpu().numpy() if self.on_device else np.asarray(rows)

    def any_table(self):
        return str(self.random.choice(["whole", "large"]))

    # --- calls; each returns how many rows it was about -------------------------------------------

    def gather_own(self):
        self.choose_place()
        name = str(self.random.choice(["whole", "large", "half"]))
        table = self.on.store[name]
        ids = self.ids(table.rows, own=True)
        if name != "half":
            rows = self.back(table.gather(self.place(ids)))
            done = self.on.truth[name].done[ids]
            self.on.check(name, "gather of own rows", ids, rows, done, done)
            return len(ids)
        field = str(self.random.choice(list(table.fields)))
        rows = self.back(table.gather(self.place(ids), field=field))
        self.on.check_equal(
            f"gather of own rows ({field})", ids, rows, self.on.twin.gather(ids, field=field)
        )
        return len(ids)

    def gather_any(self):
        self.choose_place()
        name = str(self.random.choice(["whole", "large", "half"]))
        table = self.on.store[name]
        ids = self.ids(table.rows, own=False)
        if name == "half":
            rows = self.back(table.gather(self.place(ids)))
            self.on.check_equal(
                "gather of any rows, torn,", ids, rows, np.repeat(rows[:, :1], table.dim, axis=1)
            )
            return len(ids)
        truth = self.on.truth[name]
        low = truth.done[ids]
        rows = self.back(table.gather(self.place(ids)))
        self.on.check(name, "gather of any rows", ids, rows, low, truth.begun[ids])
        return len(ids)

    def scatter(self):
        self.choose_place()
        name = self.any_table()
        table, truth = self.on.store[name], self.on.truth[name]
        ids = self.ids(table.rows, own=True)
        distinct, at = last_positions(ids)
        versions = np.full(len(ids), NEVER)
        versions[at] = truth.done[distinct] + 1
        rows = content(ids, versions, table.dim)
        truth.begun[distinct] += 1
        table.scatter(self.place(ids), self.place(rows))
        truth.done[distinct] += 1
        return len(ids)

    def add(self):
        self.choose_place()
        name = self.any_table()
        table, truth = self.on.store[name], self.on.truth[name]
        ids = self.ids(table.rows, own=True)
        distinct, at = last_positions(ids)
        before = truth.done[distinct]
        # All positions but the last take 3 away, the last gives them back.
        deltas = np.full((len(ids), table.dim), -3, np.float32)
        times = np.unique(ids, return_counts=True)[1]
        deltas[at] = (
            content(distinct, before + 1, table.dim)
            - content(distinct, before, table.dim)
            + 3 * (times[:, None] - 1)
        )
        truth.begun[distinct] += 1
        table.add(self.place(ids), self.place(deltas))
        truth.done[distinct] += 1
        return len(ids)

    def train(self):
        """Updates, adds and scatters of "half", of rows whose elements are all equal."""
        self.choose_place()
        table, twin = self.on.store["half"], self.on.twin
        ids = self.ids(table.rows, own=True)
        dtype = self.random.choice([np.float16, np.float32])
        values = self.random.normal(0, 0.5, (len(ids), 1)).astype(dtype)
        kind = self.random.choice(["update", "update", "update", "scatter", "add"])
        if kind != "update":
            values = values.astype(np.float16)
        rows = np.repeat(values, table.dim, axis=1)
        options = {"lr": 0.01} if kind == "update" and self.random.random() < 0.2 else {}
        getattr(table, kind)(self.place(ids), self.place(rows), **options)
        getattr(twin, kind)(ids, rows, **options)
        return len(ids)

    def prefetch(self):
        self.choose_place()
        table = self.on.store[str(self.random.choice(["whole", "large", "half"]))]
        ids = self.ids(table.rows, own=False)
        job = table.prefetch(self.place(ids))
        what = self.random.integers(0, 3)
        if what == 0:
            job.wait()
        elif what == 1:
            job.cancel()
        return len(ids)

    def read(self):
        name = self.any_table()
        table, truth = self.on.store[name], self.on.truth[name]
        count = int(self.random.integers(1, 20_000))
        begin = int(self.random.integers(0, table.rows))
        ids = np.arange(begin, min(begin + count, table.rows))
        low = truth.done[ids]
        rows = table.read(begin, int(ids[-1]) + 1)
        self.on.check(name, "read", ids, rows, low, truth.begun[ids])
        return len(ids)

    def commit(self):
        self.on.commit()
        return 0

    def checkpoint(self):
        self.on.store.checkpoint()
        return 0

    def look_as_reader(self):
        """A session that reads sees a commit no older than the last one before it."""
        if self.on.config["durability"] != "commit":
            return 0
        low = {name: truth.committed for name, truth in self.on.truth.items()}
        self.choose_place()
        device = self.on.device if self.on_device else None
        total = 0
        pin = str(self.random.choice(["frames", "mapping"]))
        with em.open(
            self.on.store.path, mode="r", memory="48MiB", threads=2, device=device, pin=pin
        ) as reader:
            for name in ("whole", "large"):
                ids = self.ids(reader[name].rows, own=False)
                for _ in range(20):
                    try:
                        rows = self.back(reader[name].gather(self.place(ids)))
                        break
                    except em.StaleError:
                        reader.refresh()
                else:
                    continue
                self.on.check(
                    name,
                    f"gather by a reader ({pin})",
                    ids,
                    rows,
                    low[name][ids],
                    self.on.truth[name].begun[ids],
                )
                total += len(ids)
        return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument(
        "--seed", type=int, help="of all batches; printed, and by the clock if it is not given"
    )
    parser.add_argument(
        "--threads", type=int, default=8, help="threads, each with a stream (default: 8)"
    )
    parser.add_argument(
        "--device", default="cuda:0", help='a CUDA device, or "none" (default: cuda:0)'
    )
    parser.add_argument(
        "--max-batch", type=int, default=200_000, help="ids of the largest batch (default: 200000)"
    )
    parser.add_argument(
        "--round",
        type=float,
        default=30.0,
        help="seconds between two checks of all rows (default: 30)",
    )
    parser.add_argument("--small", action="store_true", help="tables of a tenth of the size")
    parser.add_argument(
        "--directory", type=Path, help="where the store is made (default: a temporary directory)"
    )
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(time.time())
    if options.device == "none":
        options.device = None
    print(f"seed {options.seed}", flush=True)

    end = time.monotonic() + options.minutes * 60
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="embermap-stress-") as directory:
        run = None
        try:
            run = Run(options, Path(directory))
            number = 0
            while time.monotonic() < end:
                run.round(number, min(options.round, max(1.0, end - time.monotonic())))
                number += 1
            run.store.close()
            again = em.open(Path(directory) / "store", mode="r", memory="256MiB")
            for name in again.tables():
                report = again[name].verify()
                if not report["ok"]:
                    raise Wrong(f"table {name!r} after the end: {report}")
            again.close()
            print(f"no row was wrong: {number} rounds, {dict(run.counts)}")
            return 0
        except Wrong as error:
            config = run.config if run is not None else {}
            print(f"WRONG (seed {options.seed}, {config}): {error}", flush=True)
            return 1


if __name__ == "__main__":
    sys.exit(main())
