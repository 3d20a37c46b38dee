#!/usr/bin/env python3
"""What durability costs: training with commits, commits alone, recovery, verification.

    python tools/bench/durability.py --memory 256MiB --json results.json
    python tools/bench/durability.py --quick

Training loops with durability "commit" and "none", several commits each, take turns on tables of
their own; what is reported is the median of the ratios of a round. The loop with commits pays in
its time for all of it: for moving what it committed on to the table's file as well, in a checkpoint
at its end; "before_checkpoint" is the ratio without that checkpoint, which a loop that goes on does
not have. Rows are compared first. Beside the other figures stands what the bare disk takes to write
or read as many bytes, with direct I/O.

Needs the package (`make build`). Root is not needed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import mmap
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from out_of_core import BenchError, dd_rate, machine, parse_bytes
from rivals import workload

PAGE = 4096
DIM = 128  # float32 with Adagrad's sum: records of 1 KiB
ROW = 2 * DIM * 4
LR = 0.125
BLOCK = 1 << 20  # of the bare disk's requests in order
THREADS = 32  # of the bare disk's writes of pages here and there


@dataclass(frozen=True)
class Settings:
    """What the run was asked for."""

    folder: Path
    memory: int  # of a store in the training loops; the table is four times as large
    log_limit: int | None  # of theirs; None: the default
    batch: int
    every: int  # batches between commits
    commits: int  # of a training loop
    rounds: int
    sizes: tuple[int, ...]  # of tables whose commits are timed
    dirty: tuple[int, ...]  # bytes changed before a commit
    log: int  # bytes of the log to be recovered


class Results:
    """Measurements, as they come and as they are kept."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.cases: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def add(self, case: str, **found: Any) -> None:
        """One measurement."""
        self.cases.append({"case": case, **found})
        print(f"  {case:32} " + "  ".join(f"{k} {_shown(v)}" for k, v in found.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- the bare disk --------------------------------------------------------------------------------


def open_direct(file: Path, flags: int) -> int:
    """A descriptor past the page cache where the file system has such; else an ordinary one."""
    try:
        return os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        return os.open(file, flags, 0o600)


def write_in_order(file: Path, size: int) -> float:
    """Seconds to write `size` bytes over what the file has, and to sync them."""
    with mmap.mmap(-1, BLOCK) as block:
        block.write(os.urandom(PAGE) * (BLOCK // PAGE))
        descriptor = open_direct(file, os.O_RDWR | os.O_CREAT)
        try:
            began = time.perf_counter()
            for offset in range(0, size, BLOCK):
                count = min(BLOCK, size - offset)
                with memoryview(block)[:count] as piece:
                    os.pwrite(descriptor, piece, offset)
            os.fdatasync(descriptor)
            return time.perf_counter() - began
        finally:
            os.close(descriptor)


def read_in_order(file: Path, size: int) -> float:
    """Seconds to read the first `size` bytes."""
    descriptor = open_direct(file, os.O_RDONLY)
    try:
        with mmap.mmap(-1, BLOCK) as block:
            began = time.perf_counter()
            for offset in range(0, size, BLOCK):
                if os.preadv(descriptor, [block], offset) == 0:
                    break
            return time.perf_counter() - began
    finally:
        os.close(descriptor)


def write_pages(file: Path, pages: Sequence[int]) -> float:
    """Seconds to write these pages of a file, in the order given, by many threads; synced."""
    descriptor = open_direct(file, os.O_RDWR)
    try:
        with mmap.mmap(-1, PAGE) as block:

            def write(part: Sequence[int]) -> None:
                for page in part:
                    os.pwrite(descriptor, block, page * PAGE)

            parts = [pages[i::THREADS] for i in range(THREADS)]
            began = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(write, parts))
            os.fdatasync(descriptor)
            return time.perf_counter() - began
    finally:
        os.close(descriptor)


# --- training -------------------------------------------------------------------------------------


def create(store: Any, rows: int) -> Any:
    """The table that all cases use."""
    import embermap as em

    return store.create("items", rows=rows, dim=DIM, optimizer=em.optim.Adagrad(lr=LR))


def fill(table: Any) -> None:
    """Write every row, so that nothing is made up while it is timed."""
    content = workload.Content(DIM)
    for first in range(0, table.rows, 65_536):
        last = min(first + 65_536, table.rows)
        table[first:last] = content.block(first, last)


def train(store: Any, table: Any, stream: workload.Stream, first: int, settings: Settings) -> float:
    """Train, with a commit each `every` batches. Returns the seconds, but for making batches."""
    spent = 0.0
    for number in range(first, first + settings.commits * settings.every):
        ids = stream.ids_of(number)
        began = time.perf_counter()
        rows = table.gather(ids)
        table.update(ids, rows)  # the gradient of half of the squares' sum
        if (number + 1 - first) % settings.every == 0:
            store.commit()
        spent += time.perf_counter() - began
    return spent


def compare_rows(stores: dict[str, Any], stream: workload.Stream, settings: Settings) -> None:
    """Both modes, and a reader, must give the same rows after the same batches."""
    import embermap as em

    found = {}
    for name, store in stores.items():
        table = store["items"]
        for number in range(3):
            ids = stream.ids_of(number)
            table.update(ids, table.gather(ids))
        store.commit()
        found[name] = table.gather(stream.ids_of(0)).tobytes()
        with em.open(store.path, mode="r", memory=settings.memory) as reader:
            if reader["items"].gather(stream.ids_of(0)).tobytes() != found[name]:
                raise BenchError(f"durability {name!r}: a reader sees other rows than the writer")
    if len(set(found.values())) != 1:
        raise BenchError("the two modes have different rows: times would mean nothing")


def training(settings: Settings, results: Results, ids: str) -> None:
    """A loop that commits, with and without durability, in turns."""
    import embermap as em

    rows = 4 * settings.memory // ROW
    stream = workload.Stream(rows, DIM, ids, settings.batch)
    stores = {}
    for name in ("none", "commit"):
        place = settings.folder / f"train-{name}"
        stores[name] = em.open(
            place, memory=settings.memory, durability=name, log_limit=settings.log_limit
        )
        fill(create(stores[name], rows))
        stores[name].commit()
    compare_rows(stores, stream, settings)
    stores["commit"].checkpoint()
    logged, applied, ratios, before, seconds = 0, 0, [], [], []
    batches = settings.commits * settings.every
    for number in range(settings.rounds):
        spent = {}
        first = 1000 + number * batches
        order = list(stores.items())
        for name, store in order if number % 2 == 0 else reversed(order):
            log = store.stats()["log"]
            spent[name] = train(store, store["items"], stream, first, settings)
            alone = spent[name]
            if name == "commit":
                start = time.perf_counter()
                store.checkpoint()
                spent[name] += time.perf_counter() - start
                after = store.stats()["log"]
                logged = after["appended_bytes"] - log["appended_bytes"]
                applied = PAGE * (after["applied_pages"] - log["applied_pages"])
                before.append(alone)
        ratios.append(spent["none"] / spent["commit"])
        before[-1] = spent["none"] / before[-1]
        seconds.append(spent["commit"])
    results.add(
        f"train/{ids}",
        ratio=statistics.median(ratios),
        before_checkpoint=statistics.median(before),
        ratios=ratios,
        seconds=statistics.median(seconds),
        ids_per_second=batches * settings.batch / statistics.median(seconds),
        commits=settings.commits,
        logged_bytes=logged,
        applied_bytes=applied,
    )
    for store in stores.values():
        store.close()
        shutil.rmtree(store.path)


# --- commits --------------------------------------------------------------------------------------


def commits(settings: Settings, results: Results) -> None:
    """Seconds of a commit by how much was changed, in tables of several sizes."""
    import embermap as em

    plain = settings.folder / "plain"
    write_in_order(plain, max(settings.dirty))
    for size in settings.sizes:
        place = settings.folder / "commits"
        most = max(settings.dirty)
        # Everything changed is in memory when the commit begins, and none of it applied meanwhile.
        with em.open(place, memory=3 * most + (64 << 20), log_limit=64 * most) as store:
            table = create(store, size // ROW)
            fill(table)
            store.commit()
            for dirty in settings.dirty:
                times, bare = [], []
                for number in range(settings.rounds):
                    store.checkpoint()
                    rng = np.random.default_rng(number)
                    pages = rng.choice(size // PAGE, dirty // PAGE, replace=False)
                    ids = pages.astype(np.int64) * (PAGE // ROW)
                    table.scatter(ids, np.full((len(ids), DIM), number, np.float32))
                    began = time.perf_counter()
                    store.commit()
                    times.append(time.perf_counter() - began)
                    bare.append(write_in_order(plain, dirty))
                results.add(
                    f"commit/{size >> 20}MiB/{dirty >> 10}KiB",
                    table_bytes=size,
                    dirty_bytes=dirty,
                    seconds=statistics.median(times),
                    bare_seconds=statistics.median(bare),
                )
        shutil.rmtree(place)
    plain.unlink()


# --- recovery and verification --------------------------------------------------------------------


def leave_log(place: str, memory: int, log: int) -> None:
    """Entry of a process: commit `log` bytes of pages, and die before they are applied."""
    import embermap as em

    store = em.open(place, memory=memory, log_limit=max(9 * log, 1 << 20), autocommit=False)
    table = store["items"]
    ids = np.arange(0, log // PAGE * 2, 2, dtype=np.int64) * (PAGE // ROW)  # every other page
    for first in range(0, len(ids), 8192):
        part = ids[first : first + 8192]
        table.scatter(part, np.full((len(part), DIM), 7, np.float32))
    store.commit()
    os._exit(0)


def recovery(settings: Settings, results: Results) -> None:
    """Opening a store whose log is full, and one whose log is empty; verifying it."""
    import embermap as em

    place = settings.folder / "recovery"
    memory = max(settings.log // 2, 64 << 20)
    with em.open(place, memory=memory) as store:
        fill(create(store, 2 * settings.log // ROW))
    process = multiprocessing.get_context("spawn").Process(
        target=leave_log, args=(str(place), memory, settings.log)
    )
    process.start()
    process.join()
    if process.exitcode != 0:
        raise BenchError(f"making the log failed (exit {process.exitcode})")
    log = (place / "redo.log").stat().st_blocks * 512
    if log < settings.log:
        raise BenchError(f"the log has {log} bytes instead of {settings.log}")
    bare = read_in_order(place / "redo.log", log)

    def opening() -> tuple[float, Any]:
        began = time.perf_counter()
        store = em.open(place, memory=memory)
        return time.perf_counter() - began, store

    spent, store = opening()
    with store:
        if not (store["items"].gather([0]) == 7).all():
            raise BenchError("a committed row is not there after recovery")
    clean, store = opening()
    with store:
        began = time.perf_counter()
        report = store["items"].verify()
        verified = time.perf_counter() - began
        if not report["ok"]:
            raise BenchError(f"{report['bad_pages']} bad pages after recovery")
    file = place / "items.npy"
    bare += write_pages(file, range(1, settings.log // PAGE * 2, 2))  # spoils it
    results.add(
        "recovery", log_bytes=log, seconds=spent - clean, clean_seconds=clean, bare_seconds=bare
    )
    size = file.stat().st_size
    rate = dd_rate(file, size, write=False)
    results.add(
        "verify",
        bytes=size,
        bytes_per_second=size / verified,
        dd_bytes_per_second=rate,
        ratio=None if rate is None else size / verified / rate,
    )
    shutil.rmtree(place)


# --- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="durability.py", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add(
        "--memory",
        type=parse_bytes,
        help="of a store that trains; tables have 4 times that (256MiB)",
    )
    add("--log-limit", type=parse_bytes, help="of a store that trains (default: the store's)")
    add("--batch", type=int, help="ids in a batch (default 4096)")
    add("--every", type=int, help="batches between commits (default 1000)")
    add("--commits", type=int, help="of each training loop (default 5)")
    add("--rounds", type=int, help="of each case (default 5)")
    add("--log", type=parse_bytes, help="bytes of the log that is recovered (default 1GiB)")
    add("--only", action="append", choices=("train", "commit", "recovery"), help="these parts")
    add("--quick", action="store_true", help="tiny tables: a try, not a result")
    add("--folder", type=Path, help="where tables are made (default: TMPDIR, else /var/tmp)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    quick = args.quick
    args.memory = args.memory or (2 << 20 if quick else 256 << 20)
    args.batch = args.batch or (256 if quick else 4096)
    args.every = args.every or (5 if quick else 1000)
    args.commits = args.commits or (2 if quick else 5)
    args.rounds = args.rounds or (1 if quick else 5)
    args.log = args.log or (1 << 20 if quick else 1 << 30)
    if min(args.batch, args.every, args.commits, args.rounds) < 1:
        parser.error("--batch, --every, --commits and --rounds must be above 0")
    if args.memory < 1 << 20 or args.log < 1 << 20:
        parser.error("--memory and --log must be at least 1MiB")
    return args


def measure(args: argparse.Namespace) -> None:
    """Run everything in a folder that is gone at the end; keep the results, also of a part."""
    base = args.folder or Path(os.environ.get("TMPDIR") or "/var/tmp")
    small = (64 << 10, 1 << 20)
    settings = Settings(
        folder=Path(tempfile.mkdtemp(prefix="embermap-durability-", dir=base)),
        memory=args.memory,
        log_limit=args.log_limit,
        batch=args.batch,
        every=args.every,
        commits=args.commits,
        rounds=args.rounds,
        sizes=(4 << 20, 16 << 20) if args.quick else (512 << 20, 4 << 30),
        dirty=small if args.quick else (*small, 16 << 20, 64 << 20, 256 << 20),
        log=args.log,
    )
    results = Results()
    began = time.monotonic()
    load = os.getloadavg()[0]
    try:
        needed = max(24 * settings.memory, 2 * max(settings.sizes), 4 * settings.log)
        if (free := shutil.disk_usage(base).free) < needed:
            raise BenchError(f"{base}: {needed >> 20} MiB are needed, {free >> 20} MiB are free")
        parts: dict[str, list[Callable[[], None]]] = {
            "train": [
                lambda: training(settings, results, "uniform"),
                lambda: training(settings, results, "zipf:1.05"),
            ],
            "commit": [lambda: commits(settings, results)],
            "recovery": [lambda: recovery(settings, results)],
        }
        for name in args.only or parts:
            for part in parts[name]:
                part()
    finally:
        shutil.rmtree(settings.folder, ignore_errors=True)
        found = {
            "machine": machine(base),
            "settings": {
                key: getattr(args, key)
                for key in (
                    "memory",
                    "log_limit",
                    "batch",
                    "every",
                    "commits",
                    "rounds",
                    "log",
                    "quick",
                )
            },
            "load": load,
            "minutes": (time.monotonic() - began) / 60,
            "cases": results.cases,
        }
        if args.json is not None and results.cases:
            partial = args.json.with_name(args.json.name + ".tmp")
            partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            partial.replace(args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        measure(args)
    except (BenchError, OSError, ImportError) as error:
        print(f"durability.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("durability.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up as Ctrl-C does
    sys.exit(main())
