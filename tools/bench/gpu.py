#!/usr/bin/env python3
"""Rows to and from a GPU: embermap beside SpeedTorch's way, torch, and what the link gives.

    python tools/bench/gpu.py --json results.json
    python tools/bench/gpu.py --suite pools --pools 1GiB,8GiB
    python tools/bench/gpu.py --cases 'from/131072/*/512B/8GiB/16t' --ways embermap
    python tools/bench/gpu.py --quick

All in one process. Every way's rows are compared cell by cell with what they must be before it is
timed. The ways take turns in rounds, with other ids in every call; what is reported is the median
of a round's ratios. All tables are in memory as a whole: nothing is read from a disk or written.

Needs a CUDA device, torch for it, and the package with CUDA (`make build`); CuPy for SpeedTorch's
way, which is left out, and it is said so, without. Host memory: the rows twice; where they do not
fit twice, embermap and the others run one after the other.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import fnmatch
import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Threads of torch that spin while they wait would slow the way that is measured next to it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import out_of_core
import torch
from out_of_core import BenchError, machine, parse_bytes
from rivals import device as devices
from rivals import movers, workload
from rivals.movers import Batch, Embermap, Field, Limit, Way

MIB, GIB = 1 << 20, 1 << 30
ZIPF = "zipf:1.05"
ORDERS = ("uniform", "sorted", ZIPF)
COUNTS = (1_024, 16_384, 131_072, 1_048_576)
ROW_BYTES = (64, 128, 512, 1_600, 4_096)
POOLS = (GIB // 2, GIB, 8 * GIB, 24 * GIB, 48 * GIB)
THREADS = (1, 2, 4, 8, 16)
MAIN_IDS, MAIN_ROW, MAIN_POOL = 131_072, 512, 8 * GIB
GPU_TABLE_MOST = 100 * GIB
RESERVE = 4 * GIB  # of host memory that is left alone
LOOK_BYTES = 256 * MIB  # rows compared at a time

TRAINING = ("lit2vec2", "research2vec2")  # names of training.SHAPES

LEAST_BATCHES, LEAST_CALLS = 12, 3


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One thing that is measured."""

    op: str  # to, from, beside-to, beside-from, overlap, training
    ids: int  # in a batch
    order: str  # uniform, sorted, zipf:1.05; of training the name of its shape
    row_bytes: int
    pool: int  # bytes of all rows
    threads: int

    @property
    def name(self) -> str:
        """As `--cases` matches it."""
        if self.op == "training":
            return f"training/{self.order}/{self.threads}t"
        return (
            f"{self.op}/{self.ids}/{self.order}/{self.row_bytes}B/{size_text(self.pool)}"
            f"/{self.threads}t"
        )

    @property
    def dim(self) -> int:
        """Numbers in a row."""
        return self.row_bytes // 4

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.pool // self.row_bytes


def training_case(shape: str, threads: int) -> Case:
    """A training step of a real user's shape."""
    return Case("training", 0, shape, 0, 0, threads)


def size_text(size: int) -> str:
    """Bytes as sizes are given: "0.5GiB", "64MiB"."""
    if size >= GIB // 2:
        return f"{size / GIB:g}GiB"
    return f"{size / MIB:g}MiB"


@dataclass(frozen=True)
class Axes:
    """What cases are made of."""

    pools: tuple[int, ...] = POOLS
    counts: tuple[int, ...] = COUNTS
    row_bytes: tuple[int, ...] = ROW_BYTES
    threads: tuple[int, ...] = THREADS  # the largest is that of every suite but "threads"

    @property
    def pool(self) -> int:
        """Of suites that are about something else."""
        return min(self.pools, key=lambda pool: (abs(pool - MAIN_POOL), pool))

    @property
    def ids(self) -> int:
        """The same for ids."""
        return min(self.counts, key=lambda count: (abs(count - MAIN_IDS), count))

    @property
    def row(self) -> int:
        """The same for rows."""
        return min(self.row_bytes, key=lambda size: (abs(size - MAIN_ROW), size))

    @property
    def most_threads(self) -> int:
        """The same for threads."""
        return max(self.threads)


def suites(axes: Axes) -> dict[str, list[Case]]:
    """Cases by what they are about; some are in several."""

    def both(**values: Any) -> list[Case]:
        given = {
            "ids": axes.ids,
            "order": "uniform",
            "row_bytes": axes.row,
            "pool": axes.pool,
            "threads": axes.most_threads,
            **values,
        }
        return [Case(op, **given) for op in ("to", "from")]

    def special(op: str) -> Case:
        return dataclasses.replace(both()[0], op=op)

    most, least = max(axes.counts), min(axes.counts)
    return {
        "pools": [c for pool in axes.pools for c in both(pool=pool)],
        "large": [c for pool in axes.pools for c in both(pool=pool, ids=most)],
        "ids": [c for count in axes.counts for c in both(ids=count)],
        "orders": [
            c for count in (axes.ids, most) for o in ORDERS for c in both(ids=count, order=o)
        ],
        "rows": [c for size in axes.row_bytes for c in both(row_bytes=size)],
        "threads": [c for n in axes.threads for c in both(threads=n)],
        "fixed": [c for pool in axes.pools[:2] for c in both(ids=least, pool=pool)],
        "beside": [special("beside-to"), special("beside-from")],
        "overlap": [special("overlap")],
        "training": [training_case(shape, axes.most_threads) for shape in TRAINING],
    }


def product(axes: Axes) -> Iterator[Case]:
    """Every case there could be: patterns choose from these."""
    for pool in axes.pools:
        for size in axes.row_bytes:
            for threads in axes.threads:
                for count in axes.counts:
                    for order in ORDERS:
                        for op in ("to", "from", "beside-to", "beside-from", "overlap"):
                            yield Case(op, count, order, size, pool, threads)
    for threads in axes.threads:
        for shape in TRAINING:
            yield training_case(shape, threads)


def choose(axes: Axes, names: Sequence[str] | None, patterns: Sequence[str] | None) -> list[Case]:
    """The cases of these suites and those whose names match; all suites if neither is given.

    In the order in which they run: cases of one table together, the smallest table first.
    """
    found: dict[Case, None] = {}
    known = suites(axes)
    if names is None and patterns is None:
        names = list(known)
    for name in names or []:
        if name not in known:
            raise BenchError(f"no suite {name!r}: {', '.join(known)}")
        found.update(dict.fromkeys(known[name]))
    for pattern in patterns or []:
        matched = [case for case in product(axes) if fnmatch.fnmatchcase(case.name, pattern)]
        if not matched:
            raise BenchError(f"no case is called {pattern!r}; --list shows names")
        found.update(dict.fromkeys(matched))

    def place(case: Case) -> tuple[int, ...]:
        last = case.op == "training"
        order = (TRAINING if last else ORDERS).index(case.order)
        return (last, case.pool, case.row_bytes, -case.threads, case.ids, order)

    return sorted(found, key=place)


# --- results --------------------------------------------------------------------------------------


class Results(out_of_core.Results):
    """Measurements, as they come and as they are kept, and embermap's counters."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self.stats: list[dict[str, Any]] = []

    def line(self, entry: dict[str, Any]) -> str:
        """An entry for people."""
        return line_of(entry)


def line_of(entry: dict[str, Any]) -> str:
    """An entry for people."""
    head = f"{entry['case']:40} {entry['way']:24}"
    if "error" in entry:
        return f"{head} FAILED: {entry['error']}"
    if "slowdown" in entry:
        return (
            f"{head} a matrix product takes {entry['slowdown']:+.1%} longer beside "
            f"{entry['calls_per_second']:,.0f} calls/s (alone "
            f"{entry['calls_per_second_alone']:,.0f})"
        )
    if "compute_ratio" in entry:
        return (
            f"{head} {entry['compute_ratio']:.3f} of computing alone "
            f"({entry['seconds'] * 1e3:.2f} ms a step, transfers alone "
            f"{entry['transfer_seconds'] * 1e3:.2f})"
        )
    text = f"{head} {entry['seconds'] * 1e3:9.3f} ms (least {entry['least'] * 1e3:.3f})"
    if "bytes_per_second" in entry:
        text += f" {entry['bytes_per_second'] / 1e9:8.2f} GB/s"
    if entry.get("limit_ratio") is not None:
        text += f"  {entry['limit_ratio']:.2f} of the link"
    if entry.get("embermap_ratio") is not None:
        text += f"  embermap: {entry['embermap_ratio']:.2f} x"
    return text


CSV_COLUMNS = (
    "case",
    "op",
    "ids",
    "order",
    "row_bytes",
    "pool_bytes",
    "threads",
    "way",
    "seconds",
    "least",
    "bytes",
    "bytes_per_second",
    "limit_ratio",
    "embermap_ratio",
    "slowdown",
    "compute_ratio",
    "error",
)


def write_csv(path: Path, cases: Sequence[dict[str, Any]]) -> None:
    """One line for each way in each case; empty where a column does not apply."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(cases)


def entry_of(case: Case, way: str, **found: Any) -> dict[str, Any]:
    """The beginning of every entry."""
    return {
        "case": case.name,
        "op": case.op,
        "ids": case.ids,
        "order": case.order,
        "row_bytes": case.row_bytes,
        "pool_bytes": case.pool,
        "threads": case.threads,
        "way": way,
        **found,
    }


# --- one way in one case --------------------------------------------------------------------------


class WrongRows(Exception):
    """A way gave or left other rows than it must."""


def make_batches(field: Field, case: Case, *, arrays: bool) -> list[Batch]:
    """Batches with other ids each: at least 12, and more of small ones, which caches would keep."""
    count = max(LEAST_BATCHES, min(200, (1 << 21) // case.ids))
    kind = "uniform" if case.order == "sorted" else case.order
    stream = workload.Stream(field.rows, field.dim, kind, case.ids)
    made = []
    for number in range(count):
        ids = stream.ids_of(number)
        if case.order == "sorted":
            ids = np.sort(ids)
        host = torch.from_numpy(np.ascontiguousarray(ids))
        there = host.to(field.device.torch_name, copy=True)
        array = field.device.array(there) if arrays else None
        made.append(Batch(there, host, array, int(torch.unique(there).numel())))
    return made


def compare(got: torch.Tensor, ids: torch.Tensor, field: Field, salt: int, what: str) -> None:
    """Every cell against what it must be. Raises WrongRows."""
    if tuple(got.shape) != (len(ids), field.dim):
        raise WrongRows(f"{what}: shape {tuple(got.shape)}, not {(len(ids), field.dim)}")
    wrong = 0
    for low, high in movers.blocks(len(ids), field.dim, LOOK_BYTES):
        part = ids[low:high].to(field.device.torch_name)
        wanted = movers.rows_of(part, field.dim, salt)
        there = got[low:high].to(field.device.torch_name)
        wrong += int(torch.count_nonzero(there.view(torch.int32) != wanted.view(torch.int32)))
    if wrong:
        raise WrongRows(f"{what}: {wrong:,} of {got.numel():,} numbers are wrong")


def check(way: Way, case: Case, batches: Sequence[Batch]) -> None:
    """Compare all that one batch gives, or leaves in the table, with what it must be."""
    field, batch = way.field, batches[-1]
    if isinstance(way, Limit):
        check_limit(way, case, batch)
    elif case.op.endswith("to"):
        got = way.gather(batch)
        field.device.synchronize()
        compare(got, batch.ids, field, 0, "to the device")
    else:
        known = torch.from_numpy(np.unique(batch.host.numpy()))
        other = batches[0].host[:20_000]
        other = other[~torch.isin(other, known)]
        for salt in (1, 0):  # other rows, and those that were there
            way.scatter(batch, movers.rows_of(batch.ids, field.dim, salt))
            field.device.synchronize()
            for low, high in movers.blocks(len(known), field.dim, LOOK_BYTES):
                ids = known[low:high]
                compare(way.look(ids), ids, field, salt, "from the device")
            compare(way.look(other), other, field, 0, "rows of no batch")


def check_limit(way: Limit, case: Case, batch: Batch) -> None:
    """A copy copies."""
    field = way.field
    places = torch.arange(batch.distinct, device=field.device.torch_name)
    rows = movers.rows_of(places, field.dim, 2)
    if case.op.endswith("to"):
        field.staging()[: batch.distinct].copy_(rows)
        got = way.gather(batch)
    else:
        way.scatter(batch, rows)
        field.device.synchronize()
        got = way.look(places)
    field.device.synchronize()
    compare(got, places, field, 2, case.op)


def timed(
    way: Way, case: Case, batches: Sequence[Batch], seconds: float
) -> tuple[list[float], list[float]]:
    """Calls one after the other with all batches, or until their times add up to `seconds`.

    Returns the time of each call, with the device's work, and bytes of distinct rows a second.
    """
    field, device = way.field, way.field.device
    times: list[float] = []
    rates: list[float] = []
    rows: torch.Tensor | None = None
    for batch in batches:
        result: Any = None
        if case.op.endswith("to"):
            device.synchronize()
            began = time.perf_counter()
            result = way.gather(batch)
            device.synchronize()
            spent = time.perf_counter() - began
        else:
            rows = movers.rows_of(batch.ids, field.dim, out=rows)
            device.synchronize()
            began = time.perf_counter()
            way.scatter(batch, rows)
            device.synchronize()
            spent = time.perf_counter() - began
        del result
        times.append(spent)
        rates.append(batch.distinct * field.dim * 4 / spent)
        if sum(times) >= seconds and len(times) >= LEAST_CALLS:
            break
    return times, rates


@dataclass
class Rounds:
    """What a way took in one case."""

    times: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    round_times: list[float] = dataclasses.field(default_factory=list)  # medians
    round_rates: list[float] = dataclasses.field(default_factory=list)

    def add(self, times: list[float], rates: list[float]) -> None:
        """One round."""
        self.times += times
        self.rates += rates
        self.round_times.append(statistics.median(times))
        self.round_rates.append(statistics.median(rates))


def entries_of(case: Case, found: dict[str, Rounds], size: float) -> Iterator[dict[str, Any]]:
    """The results of a case: ratios are medians of those of the rounds."""
    limit, own = found.get(Limit.name), found.get(Embermap.name)
    for name, rounds in found.items():
        entry = entry_of(
            case,
            name,
            seconds=statistics.median(rounds.times),
            least=min(rounds.times),
            bytes=size,
            bytes_per_second=statistics.median(rounds.rates),
            rounds=rounds.round_times,
            calls=len(rounds.times),
        )
        if limit is not None and name != Limit.name:
            entry["limit_ratio"] = median_ratio(rounds.round_rates, limit.round_rates)
        if own is not None and name not in (Limit.name, Embermap.name):
            entry["embermap_ratio"] = median_ratio(rounds.round_times, own.round_times)
        yield entry


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of rounds."""
    return statistics.median(a / b for a, b in zip(above, below, strict=False))


# --- beside computing -----------------------------------------------------------------------------


class Compute:
    """Products of two square matrices, as large as the device makes worth while."""

    def __init__(self, device: devices.Device) -> None:
        """Matrices whose products neither vanish nor overflow."""
        size = 8192 if device.kind == "cuda" else 64
        dtype = torch.bfloat16 if device.kind == "cuda" else torch.float32
        self.device = device
        self._a = torch.randn(size, size, device=device.torch_name).to(dtype) / math.sqrt(size)
        self._b = torch.randn(size, size, device=device.torch_name).to(dtype)
        self._out = torch.empty_like(self._a)
        self.stream = device.stream()
        self.queue(3).seconds()

    def once(self) -> None:
        """One product, given to the current stream."""
        torch.matmul(self._a, self._b, out=self._out)

    def queue(self, times: int) -> devices.Work:
        """Products one after the other on a stream of their own."""
        return self.device.queue(self.stream, self.once, times)


def beside(
    way: Embermap, case: Case, batches: Sequence[Batch], settings: Settings
) -> dict[str, Any]:
    """How much longer matrix products take while rows go to and fro without a pause."""
    field, device = way.field, way.field.device
    compute, to = Compute(device), case.op.endswith("to")
    batches = batches[:4]
    # Of the batches, so that the table stays what it is.
    rows = [] if to else [movers.rows_of(batch.ids, field.dim) for batch in batches]

    def call(number: int) -> None:
        batch = batches[number % len(batches)]
        if to:
            way.gather(batch)
        else:
            way.scatter(batch, rows[number % len(batches)])

    times = max(1, min(500, int(settings.seconds / max(compute.queue(10).seconds() / 10, 1e-6))))
    number = 0
    began = time.perf_counter()
    while number < LEAST_CALLS or time.perf_counter() - began < settings.seconds / 2:
        call(number)
        number += 1
    device.synchronize()
    rate_alone = number / (time.perf_counter() - began)
    alone, together, rates = [], [], []
    for _ in range(settings.rounds):
        alone.append(compute.queue(times).seconds() / times)
        work, made = compute.queue(times), 0
        began = time.perf_counter()
        while made == 0 or not work.done():
            call(made)
            made += 1
        spent = time.perf_counter() - began
        together.append(work.seconds() / times)
        device.synchronize()
        rates.append(made / spent)
    return entry_of(
        case,
        way.name,
        slowdown=median_ratio(together, alone) - 1,
        seconds=statistics.median(together),
        seconds_alone=statistics.median(alone),
        calls_per_second=statistics.median(rates),
        calls_per_second_alone=rate_alone,
        rounds=together,
        rounds_alone=alone,
    )


def overlap(
    way: Embermap, case: Case, batches: Sequence[Batch], settings: Settings, results: Results
) -> dict[str, Any]:
    """A training loop whose computing takes longer than its transfers, against computing alone.

    While a step computes, the update of the step before goes back and the rows of the next one come
    on another stream, of higher priority: gradients are one step late. Every gradient is 1, so that
    it can be told afterwards, exactly, what each row must be.
    """
    field, device, table = way.field, way.field.device, way.table
    compute, side = Compute(device), device.stream(urgent=True)
    shape = (case.ids, field.dim)
    rows = [torch.empty(shape, device=device.torch_name) for _ in range(2)]
    grads = [torch.ones(shape, device=device.torch_name) for _ in range(2)]
    steps = len(batches) if settings.quick else 64  # its first and last transfers hide nowhere
    used = [0] * len(batches)
    ahead = can_prefetch(table, batches[0], results)

    def ids_of(step: int) -> torch.Tensor:
        return batches[step % len(batches)].ids

    def back(step: int) -> None:
        table.update(ids_of(step), grads[step % 2])
        used[step % len(batches)] += 1

    def transfers() -> float:
        device.synchronize()
        began = time.perf_counter()
        for step in range(steps):
            table.gather(ids_of(step), out=rows[step % 2])
            back(step)
        device.synchronize()
        return (time.perf_counter() - began) / steps

    transfers()
    moved = transfers()
    product_seconds = compute.queue(10).seconds() / 10
    products = max(1, math.ceil(1.5 * moved / product_seconds))

    def work(step: int) -> None:
        for _ in range(products):
            compute.once()
        torch.sign(rows[step % 2].abs_().add_(1), out=grads[step % 2])

    def computing() -> float:
        device.synchronize()
        began = time.perf_counter()
        for step in range(steps):
            with device.use(compute.stream):
                work(step)
        device.synchronize()
        return time.perf_counter() - began

    def loop() -> float:
        device.synchronize()
        began = time.perf_counter()
        with device.use(side):
            table.gather(ids_of(0), out=rows[0])
            ready = device.mark(side)
        done: list[Any] = []
        for step in range(steps):
            device.wait(compute.stream, ready)
            with device.use(compute.stream):
                work(step)
            done.append(device.mark(compute.stream))
            with device.use(side):
                if ahead and step + 2 < steps:
                    table.prefetch(ids_of(step + 2))
                if step > 0:
                    device.wait(side, done[step - 1])
                    back(step - 1)
                if step + 1 < steps:
                    table.gather(ids_of(step + 1), out=rows[(step + 1) % 2])
                    ready = device.mark(side)
        with device.use(side):
            device.wait(side, done[-1])
            back(steps - 1)
        device.synchronize()
        return time.perf_counter() - began

    loop()
    check_updates(way, batches, used)
    alone, together = [], []
    for _ in range(settings.rounds):
        alone.append(computing())
        together.append(loop())
    check_updates(way, batches, used)
    for batch in batches:  # as it was
        way.scatter(batch, movers.rows_of(batch.ids, field.dim))
    device.synchronize()
    return entry_of(
        case,
        way.name,
        compute_ratio=median_ratio(alone, together),
        seconds=statistics.median(together) / steps,
        seconds_alone=statistics.median(alone) / steps,
        transfer_seconds=moved,
        products=products,
        rounds=together,
        rounds_alone=alone,
        prefetch=ahead,
    )


def can_prefetch(table: Any, batch: Batch, results: Results) -> bool:
    """Whether ids on the device can be prefetched; a note if not."""
    try:
        table.prefetch(batch.ids)
    except (TypeError, ValueError, NotImplementedError) as error:
        results.note(f"prefetch of ids on the device: {error}")
        return False
    return True


def check_updates(way: Embermap, batches: Sequence[Batch], used: Sequence[int]) -> None:
    """Rows are what so many gradients of 1 make of them, to the bit."""
    field = way.field
    counts = torch.zeros(field.rows, device=field.device.torch_name)
    for batch, times in zip(batches, used, strict=True):
        counts.index_add_(0, batch.ids, torch.full_like(batch.ids, times, dtype=torch.float32))
    ids = torch.unique(torch.cat([batches[0].host, batches[-1].host]))[:200_000]
    steps = counts.cpu()[ids][:, None]
    wanted = movers.rows_of(ids, field.dim) - steps * movers.LR
    got = way.look(ids)
    if not torch.equal(got, wanted):
        wrong = int(torch.count_nonzero(got != wanted))
        raise WrongRows(f"updates: {wrong:,} of {got.numel():,} numbers are wrong")


# --- running --------------------------------------------------------------------------------------


@dataclass
class Settings:
    """What the run was asked for."""

    device: devices.Device
    folder: Path
    ways: list[type[Way]]
    seconds: float  # of each way in each round of a case
    rounds: int
    quick: bool
    until: float  # time.monotonic() after which no case begins


class Ways:
    """Ways that are alive at once, and their turns."""

    def __init__(
        self, field: Field, kinds: Sequence[type[Way]], results: Results, first: Case
    ) -> None:
        """Start them; one that cannot start is reported and left out."""
        self.field, self.results = field, results
        self.alive: dict[str, Way] = {}
        for kind in kinds:
            try:
                if kind.place == "pool":
                    field.build_pool()
                self.alive[kind.name] = kind(field)
            except Exception as error:  # the others are measured all the same
                self.lose(kind.name, first, error)

    def lose(self, name: str, case: Case, error: Exception) -> None:
        """A way is out; the result says why."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        self.results.add(entry_of(case, name, error=text))
        way = self.alive.pop(name, None)
        if way is not None:
            way.close()
        if name == Embermap.name:
            self.results.fail(f"embermap, {case.name}: {text}")

    def run(self, case: Case, batches: Sequence[Batch], settings: Settings) -> dict[str, Rounds]:
        """Check, then rounds. Returns what each way took."""
        found: dict[str, Rounds] = {}
        for name, way in list(self.alive.items()):
            try:
                check(way, case, batches)
                # Warm: caching allocators, and what a first call sets up.
                timed(way, case, batches[:2], settings.seconds)
                found[name] = Rounds()
            except Exception as error:
                self.lose(name, case, error)
        for _ in range(settings.rounds):
            for name, rounds in list(found.items()):
                try:
                    rounds.add(*timed(self.alive[name], case, batches, settings.seconds))
                except Exception as error:
                    del found[name]
                    self.lose(name, case, error)
        return found

    def close(self) -> None:
        """End all."""
        own = self.alive.get(Embermap.name)
        if own is not None:
            found = own.stats()
            if found is not None:
                shape = {
                    "pool_bytes": self.field.bytes,
                    "row_bytes": self.field.dim * 4,
                    "threads": self.field.threads,
                }
                self.results.stats.append({**shape, "cuda": found})
                print("  embermap, cuda: " + ", ".join(f"{k} {v}" for k, v in found.items()))
        for way in self.alive.values():
            way.close()
        self.alive.clear()
        gc.collect()
        self.field.device.release()


def memory_needed(kinds: Sequence[type[Way]], case: Case, ids: int) -> int:
    """Bytes of host memory of these ways for tables as of a case, batches of at most `ids`."""
    places = {kind.place for kind in kinds}
    temporary = 2 * ids * case.row_bytes  # pinned memory is given in powers of two
    if "pool" in places:
        temporary += ids * case.row_bytes  # torch, as people write it
    own = int(1.05 * case.pool) + 128 * MIB if "own" in places else 0
    return own + (case.pool if "pool" in places else 0) + temporary


def fits(group: Sequence[type[Way]], case: Case, ids: int, free: int, results: Results) -> bool:
    """Whether there is memory for these ways, and more to do than plain copies; a note if not."""
    tables = [kind.name for kind in group if kind.place]
    needed = memory_needed(group, case, ids)
    if tables and needed > free:
        results.note(
            f"{', '.join(tables)}, {size_text(case.pool)}, rows of {case.row_bytes} B: left out, "
            f"{needed >> 20:,} MiB of memory are needed, {free >> 20:,} are free"
        )
        return False
    return bool(tables)


def run_table(settings: Settings, results: Results, cases: list[Case], threads: int) -> None:
    """All cases of one table with one number of threads."""
    first, device = cases[0], settings.device
    ids = max(case.ids for case in cases)
    field = Field(device, settings.folder, first.rows, first.dim, threads, ids)
    kinds = list(settings.ways)
    plain = [case for case in cases if case.op in ("to", "from")]
    if not plain:
        kinds = [kind for kind in kinds if kind is Embermap]
    spare = 6 * ids * first.row_bytes
    if movers.DeviceTable in kinds and first.pool > min(GPU_TABLE_MOST, device.free() - spare):
        kinds.remove(movers.DeviceTable)
        results.note(f"{size_text(first.pool)}: no table in GPU memory, where it does not fit")
    free = devices.available_memory() - RESERVE * (not settings.quick)
    groups = [kinds]
    if memory_needed(kinds, first, ids) > free:
        groups = [
            [kind for kind in kinds if kind.place != "own"],
            [kind for kind in kinds if kind.place in ("", "own")],
        ]
    groups = [group for group in groups if fits(group, first, ids, free, results)]
    if len(groups) > 1:
        results.note(
            f"{size_text(first.pool)}, rows of {first.row_bytes} B: the rows are not in memory "
            "twice; the ways ran in turn, not in rounds"
        )
    torch.set_num_threads(threads)
    found: dict[Case, dict[str, Rounds]] = {case: {} for case in plain}
    arrays = movers.SpeedTorch in kinds and device.arrays() is None
    for group in groups:
        ways = Ways(field, group, results, first)
        made: tuple[int, str] | None = None
        batches: list[Batch] = []
        try:
            for case in cases:
                if time.monotonic() > settings.until:
                    results.note("the time was over: cases are missing")
                    break
                if made != (case.ids, case.order):
                    made, batches = (case.ids, case.order), []
                    batches = make_batches(field, case, arrays=arrays)
                if case in found:
                    found[case].update(ways.run(case, batches, settings))
                    if group is groups[-1]:
                        size = statistics.mean(b.distinct for b in batches) * case.row_bytes
                        for entry in entries_of(case, found[case], size):
                            results.add(entry)
                elif Embermap.name in ways.alive:
                    run_special(ways, case, batches, settings, results)
        finally:
            ways.close()
            field.close()


def run_special(
    ways: Ways, case: Case, batches: list[Batch], settings: Settings, results: Results
) -> None:
    """Cases of embermap alone."""
    way = ways.alive[Embermap.name]
    assert isinstance(way, Embermap)
    try:
        if case.op == "overlap":
            results.add(overlap(way, case, batches, settings, results))
        else:
            results.add(beside(way, case, batches, settings))
    except Exception as error:
        ways.lose(way.name, case, error)


def run_all(
    settings: Settings, results: Results, cases: Sequence[Case], save: Callable[[], None]
) -> None:
    """Table by table; what was found is kept after each."""
    tables: dict[tuple[int, int, int], list[Case]] = {}
    for case in cases:
        tables.setdefault((case.pool, case.row_bytes, case.threads), []).append(case)
    for (pool, size, threads), mine in tables.items():
        if time.monotonic() > settings.until:
            results.note("the time was over: cases are missing")
            break
        if mine[0].op == "training":
            print(f"Training steps, {threads} threads", flush=True)
            for case in mine:
                run_training(settings, results, case)
        else:
            print(
                f"{mine[0].rows:,} rows of {size} B: {size_text(pool)}, {threads} threads",
                flush=True,
            )
            try:
                run_table(settings, results, mine, threads)
            except Exception as error:  # other tables are measured all the same
                results.fail(
                    f"{size_text(pool)}, rows of {size} B: {type(error).__name__}: {error}"
                )
        save()


def run_training(settings: Settings, results: Results, case: Case) -> None:
    """A training step of the shape of a real user's."""
    from rivals import training

    torch.set_num_threads(case.threads)
    shape = (training.QUICK if settings.quick else training.SHAPES)[case.order]
    steps = 5 if settings.quick else 30
    ways: dict[str, training.Step] = {}
    found: dict[str, Rounds] = {}

    def lose(name: str, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        results.add(entry_of(case, name, error=text))
        for loop in training.LOOPS:
            found.pop(name + loop, None)
        way = ways.pop(name, None)
        if way is not None:
            way.close()
        if name == Embermap.name:
            results.fail(f"embermap, {case.name}: {text}")

    wanted = [kind for kind in training.STEPS if kind.way in settings.ways]
    free = devices.available_memory() - RESERVE * (not settings.quick)
    needed = sum(kind.host_bytes(shape) for kind in wanted)
    if needed > free:
        results.note(f"training left out: {needed >> 20:,} MiB are needed, {free >> 20:,} are free")
        return
    try:
        for kind in wanted:
            try:
                ways[kind.name] = kind(settings.device, settings.folder, shape, case.threads)
                ways[kind.name].check()
                found.update({kind.name + loop: Rounds() for loop in kind.loops})
            except Exception as error:
                lose(kind.name, error)
        batches = [training.batch_of(shape, settings.device, n) for n in range(steps)]
        for number in range(settings.rounds + 1):
            for name, way in list(ways.items()):
                try:
                    for loop in way.loops:
                        times = way.run(batches, loop)
                        if number > 0:  # the first one is warming up
                            found[name + loop].add(times, [1 / t for t in times])
                except Exception as error:
                    lose(name, error)
        for entry in entries_of(case, found, 0.0):
            results.add({k: v for k, v in entry.items() if k not in ("bytes", "bytes_per_second")})
    finally:
        for way in ways.values():
            way.close()
        settings.device.release()


# --- command line ---------------------------------------------------------------------------------


def parse_numbers(text: str) -> tuple[int, ...]:
    """Numbers of "1,2,4"."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"not numbers such as 1,2,4: {text!r}")
    return found


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of "1GiB,8GiB", ascending."""
    return tuple(sorted({parse_bytes(part) for part in text.split(",")}))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="gpu.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--suite", action="append", metavar="NAME", help="of cases (default: all); see --list")
    add("--cases", action="append", metavar="PATTERN", help="'to/131072/*/512B/*/16t'")
    add(
        "--pools",
        type=parse_sizes,
        help="sizes of the tables (default 0.5GiB,1GiB,8GiB,24GiB,48GiB)",
    )
    add("--ids", type=parse_numbers, help="in a batch (default 1024,16384,131072,1048576)")
    add("--rows", type=parse_numbers, help="bytes of a row (default 64,128,512,1600,4096)")
    add("--threads", type=parse_numbers, help="of embermap and torch (default 1,2,4,... all cores)")
    add("--ways", action="append", metavar="NAME", help="embermap, ... (default: all); see --list")
    add("--seconds", type=float, help="of each way in each round (default 0.3)")
    add("--rounds", type=int, help="of each case (default 3)")
    add("--minutes", type=float, default=math.inf, help="begin no case after so long")
    add("--list", action="store_true", help="list suites with their cases, and ways, and exit")
    add("--quick", action="store_true", help="small tables, a few seconds: a try, not a result")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: try the program without a GPU; its times say nothing",
    )
    add("--folder", type=Path, help="where stores are made (default: TMPDIR, else /var/tmp)")
    add("--json", type=Path, metavar="FILE", help="write the results there, after every table")
    add("--csv", type=Path, metavar="FILE", help="the same as a table")
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = 0.05 if args.quick else 0.3
    if args.rounds is None:
        args.rounds = 1 if args.quick else 3
    if args.rounds < 1 or args.seconds <= 0 or args.minutes <= 0:
        parser.error("--rounds, --seconds and --minutes must be above 0")
    for size in args.rows or ():
        if size % 4:
            parser.error(f"--rows: {size} bytes are no whole number of float32")
    for name in args.ways or []:
        if name not in movers.WAYS:
            parser.error(f"--ways: no way {name!r}: {', '.join(movers.WAYS)}")
    return args


def axes_of(args: argparse.Namespace) -> Axes:
    """The axes of the cases, as asked for and as this machine has them."""
    cores = min(16, len(os.sched_getaffinity(0)))
    threads = args.threads or tuple(sorted({*(n for n in THREADS if n < cores), cores}))
    if args.quick:
        return Axes(
            args.pools or (32 * MIB, 64 * MIB),
            args.ids or (1_024, 16_384),
            args.rows or (512, 1_600),
            tuple(sorted(args.threads or {1, cores})),
        )
    return Axes(
        args.pools or POOLS, args.ids or COUNTS, args.rows or ROW_BYTES, tuple(sorted(threads))
    )


def find_device(kind: str) -> devices.Device:
    """The device. Raises BenchError where it or what it needs is missing."""
    if importlib.util.find_spec("embermap") is None:
        raise BenchError("the package embermap is not installed for this Python: `make build`")
    import embermap as em

    if kind == "cpu":
        return devices.Host()
    if em.cuda_devices() == 0:
        raise BenchError(f"embermap has no CUDA device: {em.cuda_absence()}")
    try:
        return devices.Cuda()
    except RuntimeError as error:
        raise BenchError(str(error)) from error


def save_results(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Both files, each whole or not at all."""
    if args.json is not None:
        partial = args.json.with_name(args.json.name + ".tmp")
        partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        partial.replace(args.json)
    if args.csv is not None:
        partial = args.csv.with_name(args.csv.name + ".tmp")
        write_csv(partial, found["cases"])
        partial.replace(args.csv)


def versions() -> dict[str, str]:
    """Of what takes part besides."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("cupy", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            found["cupy"] = version(name)
        except PackageNotFoundError:
            continue
    return found


def measure(args: argparse.Namespace) -> bool:
    """Run everything; keep the results, also of a part.

    Returns whether embermap was measured in all that was asked for.
    """
    device = find_device(args.device)
    axes, results = axes_of(args), Results()
    cases = choose(axes, args.suite, args.cases)
    base = args.folder or Path(os.environ.get("TMPDIR") or "/var/tmp")
    ways = [way for name, way in movers.WAYS.items() if args.ways is None or name in args.ways]
    if Limit not in ways:
        ways.insert(0, Limit)
    missing = device.arrays()
    if missing is not None and movers.SpeedTorch in ways:
        ways.remove(movers.SpeedTorch)
        results.note(f"{movers.SpeedTorch.name} left out: {missing}")
    here = machine(base)
    here["versions"].update(versions())
    found: dict[str, Any] = {
        "machine": {**here, "gpu": device.describe()},
        "settings": {
            "seconds": args.seconds,
            "rounds": args.rounds,
            "threads": axes.most_threads,
            "quick": args.quick or args.device != "cuda",
            "device": args.device,
        },
        "notes": results.notes,
        "stats": results.stats,
        "cases": results.cases,
    }
    gpu = found["machine"]["gpu"]
    print(
        f"{gpu['name']}, {here['cores']} cores, {here['memory'] / GIB:.0f} GiB; {len(cases)} cases"
    )
    began = time.monotonic()

    def save() -> None:
        found["minutes"] = (time.monotonic() - began) / 60
        if results.cases:
            save_results(args, found)

    folder = Path(tempfile.mkdtemp(prefix="embermap-gpu-", dir=base))
    settings = Settings(
        device=device,
        folder=folder,
        ways=ways,
        seconds=args.seconds,
        rounds=args.rounds,
        quick=args.quick,
        until=began + 60 * args.minutes,
    )
    try:
        with torch.no_grad():
            run_all(settings, results, cases, save)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        save()
    return not results.failed


def show(axes: Axes) -> str:
    """Suites, their cases, and the ways."""
    lines = []
    for name, cases in suites(axes).items():
        lines += [f"{name}:", *(f"  {case.name}" for case in cases)]
    lines.append(
        "other cases, for --cases: {to,from,beside-to,beside-from,overlap}"
        f"/{{{','.join(map(str, axes.counts))}}}/{{{','.join(ORDERS)}}}"
        f"/{{{','.join(f'{size}B' for size in axes.row_bytes)}}}"
        f"/{{{','.join(map(size_text, axes.pools))}}}"
        f"/{{{','.join(f'{n}t' for n in axes.threads)}}}"
    )
    lines.append("ways: " + ", ".join(movers.WAYS))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    if args.list:
        print(show(axes_of(args)))
        return 0
    try:
        if not measure(args):
            print("gpu.py: error: not all could be measured", file=sys.stderr)
            return 1
    except (BenchError, OSError) as error:
        print(f"gpu.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpu.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Here and not in main(): a program that calls that has handlers of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up as Ctrl-C does
    sys.exit(main())
