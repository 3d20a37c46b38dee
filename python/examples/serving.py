#!/usr/bin/env python3
"""Two processes serve rows while a third one writes and commits.

The writer changes an eighth of the table's rows at a time, commits, and moves the commit on to the
table's file (`checkpoint()`). Readers open the store read-only with `pin="mapping"`: rows come
straight from the file, whose pages all processes share, on a GPU by kernels. Each answers requests
of random ids, looks at the newest commit every now and then (`refresh()`), and says which commit it
serves. A reader that was left behind by the writer is told so (`StaleError`), and refreshes:

    store = em.open(path, mode="r", pin="mapping", memory="8MiB")
    try:
        rows = table.gather(ids)
    except em.StaleError:
        store.refresh()                 # and once more

Every row tells which commit has written it, so that each answer is checked: all of its rows are
those of the one commit that the reader serves. At the end stand the percentiles of the latencies.

    python serving.py --seconds 60 --rows 2000000 --readers 4

The store is kept with --keep; with --keep again, a writer that was killed goes on after the last
commit. Rows are the same as if it had not been.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
from example_parts import DemoError, at_least, mib, parse_size, prepare_folder, remove_files
from example_parts import summary as print_summary
from numpy.typing import NDArray

OWN = ("run.json", "run.json.tmp", "tables")
PARTS = 8  # a commit changes the rows whose number, divided by this, has a certain rest
BLOCK_ROWS = 16_384  # written at a time
REFRESH_SECONDS = 0.2  # between two looks of a reader at the newest commit
STARTING = 120.0  # seconds that a process may take to begin


# --- rows -----------------------------------------------------------------------------------------


def written_by(ids: NDArray[np.int64], version: int) -> NDArray[np.int64]:
    """Which version has written each row last, as of `version`; 0: none since the first one."""
    return np.maximum(version - (version - ids) % PARTS, 0)


def rows_of(ids: NDArray[np.int64], version: int, dim: int) -> NDArray[np.float32]:
    """The rows as of a version, (n, dim): all elements of a row say which version has written it,
    and a few bits of its number."""
    value = written_by(ids, version) + (ids % 64) / 64
    return np.repeat(value.astype(np.float32)[:, None], dim, axis=1)


# --- processes ------------------------------------------------------------------------------------


def write(path: Path, args: argparse.Namespace, ready: Any, stop: Any, found: Any) -> None:
    """The writer: change, commit, check-point, until told to stop."""
    commits = 0
    with em.open(path, memory=args.memory, autocommit=False, log_limit="1GiB") as store:
        if "rows" not in store:
            store.create("rows", rows=args.rows, dim=args.dim, dtype="float32")
        table = store["rows"]
        version = (store.note or {"version": -1})["version"]
        if version < 0:  # readers need every page to be there
            version = 0
            for start in range(0, args.rows, BLOCK_ROWS):
                ids = np.arange(start, min(start + BLOCK_ROWS, args.rows))
                table.write(start, rows_of(ids, version, args.dim))
            store.commit(note={"version": version})
            store.checkpoint()
        ready.set()
        while not stop.wait(args.every):
            version += 1
            changed = np.arange(version % PARTS, args.rows, PARTS)
            for start in range(0, len(changed), BLOCK_ROWS):
                ids = changed[start : start + BLOCK_ROWS]
                table.scatter(ids, rows_of(ids, version, args.dim))
            store.commit(note={"version": version})
            store.checkpoint()
            commits += 1
    found.put({"who": "writer", "commits": commits, "version": version})


@dataclass
class Served:
    """What a reader has done."""

    requests: int = 0
    rows: int = 0
    wrong: int = 0  # rows that are not those of the commit served
    stale: int = 0  # answers that had to be asked for again
    refreshes: int = 0  # that found a newer commit
    first: int = -1  # version
    last: int = -1
    seconds: list[float] = field(default_factory=list)  # of each request


def read(
    number: int, path: Path, args: argparse.Namespace, ready: Any, stop: Any, found: Any
) -> None:
    """A reader: answer requests from one commit at a time, until told to stop."""
    on_gpu = args.device == "cuda"
    rng = np.random.default_rng((args.seed, number))
    served = Served()
    device = "cuda" if on_gpu else None
    with em.open(path, mode="r", pin="mapping", memory="8MiB", device=device) as store:
        table = store["rows"]
        version = served.first = (store.note or {})["version"]
        shown = looked = time.monotonic()
        while not stop.is_set():
            ids = rng.integers(0, args.rows, args.batch)
            asked: Any = ids
            if on_gpu:
                import torch  # needed for tensors on a GPU only

                asked = torch.from_numpy(ids).cuda()
            began = time.perf_counter()
            while True:
                try:
                    rows = table.gather(asked)
                    break
                except em.StaleError:  # the file has gone on to a later commit
                    served.stale += 1
                    store.refresh()
                    version = (store.note or {})["version"]
            answer = rows.cpu().numpy() if on_gpu else rows
            served.seconds.append(time.perf_counter() - began)
            served.requests += 1
            served.rows += len(ids)
            right = (answer == rows_of(ids, version, args.dim)).all(1)
            served.wrong += int((~right).sum())
            ready.set()
            now = time.monotonic()
            if now - looked >= REFRESH_SECONDS:
                looked = now
                store.refresh()
                newest = (store.note or {})["version"]
                served.refreshes += newest != version
                version = newest
            if now - shown >= args.show:
                shown = now
                print(
                    f"  reader {number} (process {os.getpid()}) serves commit "
                    f"{store.commit_number}, version {version}: {served.requests:,} requests",
                    flush=True,
                )
        served.last = version
    found.put({"who": f"reader {number}", **vars(served)})


def percentiles(seconds: Sequence[float]) -> str:
    """Of latencies, in words."""
    points = np.percentile(np.array(seconds) * 1e3, [50, 90, 99, 99.9])
    names = ("p50", "p90", "p99", "p99.9")
    return ", ".join(f"{name} {x:.3f} ms" for name, x in zip(names, points, strict=True))


# --- the run --------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> bool:
    """Start the processes, let them work, add up. Returns whether every row was right."""
    kind = {name: getattr(args, name) for name in ("rows", "dim")}
    noted = args.store / "run.json"
    going_on = not args.overwrite and noted.is_file()
    if going_on:
        if json.loads(noted.read_text(encoding="utf-8")) != kind:
            raise DemoError(
                f"{args.store} holds a store with other --rows or --dim; go on with the same, "
                "replace it with --overwrite, or choose another folder with --store"
            )
        print(f"{args.store} has a store: going on after its last commit")
    else:
        prepare_folder(args.store, OWN, args.overwrite)
        partial = args.store / "run.json.tmp"
        partial.write_text(json.dumps(kind) + "\n", encoding="utf-8")
        partial.replace(noted)
    if args.device == "auto":
        args.device = "cuda" if em.cuda_devices() > 0 else "cpu"
    path = args.store / "tables"
    # Each process on its own: a fork would share what belongs to one.
    context = multiprocessing.get_context("spawn")
    ready, stop, stop_writing = context.Event(), context.Event(), context.Event()
    found: Any = context.Queue()
    writer = context.Process(target=write, args=(path, args, ready, stop_writing, found))
    serving = [context.Event() for _ in range(args.readers)]
    readers = [
        context.Process(target=read, args=(number, path, args, answered, stop, found))
        for number, answered in enumerate(serving)
    ]
    processes = [writer, *readers]
    try:
        writer.start()
        wait_for(ready, "the writer", writer)
        size = (path / "rows.npy").stat().st_size
        print(
            f"Store: {args.rows:,} x {args.dim} float32, {mib(size)}; {args.readers} readers on "
            f"{'the GPU' if args.device == 'cuda' else 'the CPU'}, a commit every {args.every:g} s",
            flush=True,
        )
        for process in readers:
            process.start()
        for process, answered in zip(readers, serving, strict=True):
            wait_for(answered, "a reader", process)
        until = time.monotonic() + args.seconds
        while time.monotonic() < until:
            if not all(process.is_alive() for process in processes):
                raise DemoError("a process ended before its time; what it said is above")
            time.sleep(0.05)
        stop.set()
        reports = [collect(found, processes) for _ in readers]
        stop_writing.set()
        reports.append(collect(found, processes))
        for process in processes:
            process.join()
    finally:
        stop.set()
        stop_writing.set()
        for process in processes:
            if process.pid is not None:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()
    rows: dict[str, str] = {}
    right = True
    for report in sorted(reports, key=lambda report: report["who"]):
        if report["who"] == "writer":
            rows["writer"] = f"{report['commits']} commits, the last is version {report['version']}"
            continue
        right &= report["wrong"] == 0
        rows[report["who"]] = (
            f"{report['requests']:,} requests, {report['rows']:,} rows, {report['wrong']} of them "
            f"wrong; versions {report['first']} to {report['last']}, {report['refreshes']} "
            f"refreshes, {report['stale']} stale"
        )
        if report["seconds"]:
            rows[f"{report['who']}, latency"] = percentiles(report["seconds"])
    print_summary(rows)
    if args.keep:
        print(f"Kept in {args.store}: the store tables/")
    else:
        remove_files(args.store, OWN)
        print(f"Removed {args.store} (--keep keeps it)")
    return right


def wait_for(event: Any, who: str, process: Any) -> None:
    """Until a process has begun; DemoError if it does not."""
    deadline = time.monotonic() + STARTING
    while not event.wait(0.1):
        if not process.is_alive():
            raise DemoError(f"{who} ended before it began; what it said is above")
        if time.monotonic() > deadline:
            raise DemoError(f"{who} did not begin within {STARTING:.0f} s")


def collect(found: Any, processes: Sequence[Any]) -> dict[str, Any]:
    """The next report; DemoError if a process failed instead."""
    while True:
        try:
            report: dict[str, Any] = found.get(timeout=0.2)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                raise DemoError("a process failed; what it said is above") from None
        else:
            return report


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="serving.py",
        description="Serve rows from several processes while another one writes and commits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--store", type=Path, default=Path("serving-store"), metavar="DIR", help="folder to use")
    add("--keep", action="store_true", help="keep that folder when done")
    add("--overwrite", action="store_true", help="replace an earlier store in that folder")
    add("--memory", type=parse_size, default="64MiB", metavar="SIZE", help="budget of the writer")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where readers need the rows; auto: on a GPU if there is one",
    )
    add("--rows", type=at_least(PARTS), default=500_000, help="rows of the table")
    add("--dim", type=at_least(1), default=64, help="numbers in a row")
    add("--readers", type=at_least(1), default=2, help="processes that serve")
    add("--batch", type=at_least(1), default=256, help="ids of a request")
    add("--seconds", type=at_least(0.1, float), default=20.0, help="how long they serve")
    add("--every", type=at_least(0, float), default=1.0, help="seconds between two commits")
    add("--show", type=at_least(0.01, float), default=5.0, help="seconds between a reader's lines")
    add("--seed", type=at_least(0), default=1, help="of the requests")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        if not run(args):
            print("serving.py: error: rows were not those of the commit served", file=sys.stderr)
            return 1
    except (DemoError, em.Error, OSError, MemoryError) as error:
        print(f"serving.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("serving.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
