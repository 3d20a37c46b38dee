#!/usr/bin/env python3
"""Tables larger than memory: embermap beside np.memmap, torch.from_file, h5py and LMDB.

All hold the same table, and each works in a process of its own that may take the same memory, its
page cache included. Rows are compared with what they must be before anything is timed. A case is
timed in rounds, the stores one after the other in each, and what is reported is the median of the
ratios of a round: a machine that is busier for a while slows both.

    python tools/bench/out_of_core.py --size 8GiB --json results.json
    python tools/bench/out_of_core.py --cases 'dim128/*/zipf:1.05/*' --rivals np.memmap
    python tools/bench/out_of_core.py --quick

Needs the package (`make build`), and the `embermap` command line for the bare speed of the disk;
h5py, lmdb and torch are left out, and it is said so, where they are not installed. Root is not
needed; without it, or without control groups, confinement is weaker: the output says which it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Threads of torch that spin while they wait would slow the store that is measured next to it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rivals import confine, stores, workload
from rivals.worker import StoreDied, Worker

ZIPF = "zipf:1.05"
COLD_BATCHES = 4
DD_MOST = 2 << 30  # bytes
FAR = 1_000  # batches between those of one purpose and of the next


class BenchError(Exception):
    """A cause the user can act on; shown as one line."""


@dataclass(frozen=True)
class Case:
    """One thing that is measured."""

    dim: int
    adagrad: bool
    op: str  # gather, update, scan, bulk, prefetch
    ids: str  # uniform, zipf:1.05, rows
    temperature: str  # cold, warm, hot

    @property
    def updates(self) -> bool:
        """Whether the table's rows change."""
        return self.op in ("update", "bulk")

    @property
    def name(self) -> str:
        """As `--cases` matches it."""
        kind = "adagrad" if self.adagrad else "weights"
        return f"dim{self.dim}/{kind}/{self.op}/{self.ids}/{self.temperature}"


def all_cases() -> list[Case]:
    """Every case, in the order in which they run: reading first, for updates change the rows."""
    found = []
    for dim in (128, 32):
        for adagrad in (False, True):
            for op in ("gather", "update"):
                for ids in ("uniform", ZIPF):
                    found += [Case(dim, adagrad, op, ids, t) for t in ("cold", "warm")]
                if op == "gather" and not adagrad:
                    found.append(Case(dim, adagrad, "prefetch", "uniform", "warm"))
                    found.append(Case(dim, adagrad, "scan", "rows", "cold"))
            if not adagrad:
                found.append(Case(dim, adagrad, "bulk", "rows", "cold"))
            for op in ("gather", "update"):
                found += [Case(dim, adagrad, op, ids, "hot") for ids in ("uniform", ZIPF)]
    return found


# Stores that take minutes for what others do in seconds are asked for less, unless they are named.
SLOW = ("h5py, contiguous", "h5py, chunked", "LMDB")
SLOW_CASES = (
    "dim128/*/gather/uniform/cold",
    "dim128/*/*/zipf:1.05/warm",
    "dim128/*/scan/*",
    "dim128/*/bulk/*",
)

QUICK_CASES = (
    "dim128/weights/gather/uniform/cold",
    "dim32/adagrad/update/zipf:1.05/warm",
    "dim128/weights/scan/*",
    "dim128/weights/bulk/*",
    "dim128/weights/prefetch/*",
    "dim32/*/*/uniform/hot",
)


@dataclass
class Settings:
    """What the run was asked for."""

    folder: Path
    size: int  # bytes of the table's records
    hot_size: int
    memory: int
    batch: int
    seconds: float
    rounds: int
    threads: int
    rivals: list[type[stores.Rival]]
    named: bool  # rivals were named by the user
    patterns: list[str]
    kind: confine.Kind
    warm_most: int = 60  # batches before a warm case


class Results:
    """Measurements, as they come and as they are kept."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.cases: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.failed = False

    def note(self, text: str) -> None:
        """Something the reader must know."""
        if text not in self.notes:
            self.notes.append(text)
            print(f"  note: {text}", flush=True)

    def fail(self, text: str) -> None:
        """embermap could not be measured: the run goes on, and ends with exit status 1."""
        self.failed = True
        self.note(text)

    def add(self, entry: dict[str, Any]) -> None:
        """One contestant in one case."""
        self.cases.append(entry)
        print("  " + self.line(entry), flush=True)

    def line(self, entry: dict[str, Any]) -> str:
        """An entry for people."""
        return line_of(entry)


def line_of(entry: dict[str, Any]) -> str:
    """An entry for people."""
    if "error" in entry:
        return f"{entry['case']:42} {entry['store']:22} FAILED: {entry['error']}"
    if entry["unit"] == "ratio":
        return f"{entry['case']:42} {entry['store']:22} {entry['value']:8.2f} of compute alone"
    value = entry["value"]
    shown = f"{value / 1e6:9.0f} MB/s" if entry["unit"] == "bytes/s" else f"{value:12,.0f} rows/s"
    ratio = entry.get("embermap_ratio")
    extra = "" if ratio is None else f"   embermap: {ratio:.2f} x"
    if "bare_ratio" in entry:
        extra = f"   {entry['bare_ratio']:.2f} of the bare disk"
    way = "" if entry["way"] == "plain" else f"  [{entry['way']}]"
    return f"{entry['case']:42} {entry['store']:22} {shown}{extra}{way}"


# --- the bare disk --------------------------------------------------------------------------------


def find_program() -> str | None:
    """The `embermap` command line: EMBERMAP_CLI, beside this Python, or on the PATH."""
    given = os.environ.get("EMBERMAP_CLI")
    beside = Path(sys.executable).parent / "embermap"
    return given or (str(beside) if beside.exists() else shutil.which("embermap"))


def bare_disk(file: Path, seconds: float) -> dict[str, Any] | None:
    """Random 4 KiB reads at depth 128 and sequential reads of a file, as the program measures."""
    program = find_program()
    if program is None:
        return None
    done = subprocess.run(
        [program, "bench", str(file), "--json", "--seconds", f"{seconds:g}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)["bare"]
    return found


def dd_rate(file: Path, size: int, *, write: bool) -> float | None:
    """Bytes per second of dd with direct I/O and blocks of 1 MiB; None where it is refused."""
    dd = shutil.which("dd")
    if dd is None:
        return None
    count = max(1, size >> 20)
    target = file.with_name("dd.tmp")
    arguments = (
        ["if=/dev/zero", f"of={target}", "oflag=direct", "conv=fsync"]
        if write
        else [f"if={file}", "of=/dev/null", "iflag=direct"]
    )
    try:
        began = time.perf_counter()
        done = subprocess.run(
            [dd, *arguments, "bs=1M", f"count={count}"], capture_output=True, check=False
        )
        spent = time.perf_counter() - began
        moved = target.stat().st_size if write else min(count << 20, file.stat().st_size)
    except OSError:
        return None
    finally:
        target.unlink(missing_ok=True)
    return moved / spent if done.returncode == 0 else None


# --- running --------------------------------------------------------------------------------------


class Field:
    """One table (dim, with or without state) in some stores that run against each other."""

    def __init__(self, settings: Settings, results: Results, dim: int, adagrad: bool) -> None:
        """Builds embermap's table; the others' come and go with `rivals_of`."""
        self.settings, self.results = settings, results
        width = dim * (2 if adagrad else 1) * 4
        self.shape = stores.Shape(
            settings.size // width, dim, adagrad, settings.memory, settings.threads
        )
        self.folder = settings.folder / f"dim{dim}-{'adagrad' if adagrad else 'weights'}"
        self.ways: dict[tuple[str, str, str], str] = {}
        self.updated = False  # rows are no longer those of the content

    def stream(self, ids: str, seed: int = 1) -> workload.Stream:
        """Batches for this table, small enough for a batch's rows to fit beside the store."""
        most = self.shape.memory // 4 // (3 * self.shape.dim * 4)
        batch = min(self.settings.batch, 1 << max(6, most.bit_length() - 1))
        if batch < self.settings.batch:
            self.results.note(
                f"dim {self.shape.dim}: batches of {batch:,} ids: gradients and results of larger "
                "ones would not fit the memory of a process"
            )
        return workload.Stream(self.shape.rows, self.shape.dim, ids, batch, seed)

    def place(self, kind: type[stores.Rival]) -> Path:
        """Where a store's files lie."""
        return self.folder / kind.data.replace(" ", "-")

    def build(self, kind: type[stores.Rival]) -> None:
        """Make a store's files, in a process of its own, whose memory goes with it."""
        place = self.place(kind)
        place.mkdir(parents=True)
        process = stores_process(kind.name, place, self.shape)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise BenchError(f"{kind.name}: making the table failed (exit {process.exitcode})")

    def start(self, kind: type[stores.Rival]) -> Worker:
        """A confined process with the store in it; its rows are checked."""
        name = "".join(c if c.isalnum() else "-" for c in kind.name)
        group = confine.Group(self.settings.kind, name, self.shape.memory)
        worker = Worker(kind.name, self.place(kind), self.shape, kind.ways[0], group)
        try:
            worker.call("reopen")
            if not self.updated:
                worker.call("check", stream=self.stream("uniform", 99))
        except BaseException:
            worker.end()
            raise
        return worker

    def forget(self, kinds: Sequence[type[stores.Rival]]) -> None:
        """Drop the files of closed stores from the page cache."""
        files = [file for kind in kinds for file in kind.files(self.place(kind))]
        how = confine.forget_files([file for file in files if file.exists()])
        if how != "posix_fadvise":
            self.results.note(f"page cache dropped with {how}")


def build_data(name: str, folder: str, shape: stores.Shape) -> None:
    """Entry of a builder process."""
    stores.ALL[name].build(Path(folder), shape)


def stores_process(name: str, folder: Path, shape: stores.Shape) -> Any:
    """A process that makes a store's files."""
    from rivals.worker import START

    return START.Process(target=build_data, args=(name, str(folder), shape), daemon=True)


class Contest:
    """Stores, alive at once, that take turns in the cases of one field."""

    def __init__(self, field: Field, kinds: Sequence[type[stores.Rival]]) -> None:
        """Start them; one that cannot start is reported and left out."""
        self.field = field
        self.workers: dict[type[stores.Rival], Worker] = {}
        self.updates_checked: set[type[stores.Rival]] = set()
        for kind in kinds:
            try:
                self.workers[kind] = field.start(kind)
            except (StoreDied, RuntimeError, OSError) as error:
                self.lose(kind, "start", error)

    def lose(self, kind: type[stores.Rival], case: str, error: Exception) -> None:
        """A store is out of the contest; the result says why."""
        self.field.results.add(
            {"case": case, "store": kind.name, "way": "plain", "error": str(error)}
        )
        worker = self.workers.pop(kind, None)
        if worker is not None:
            worker.end()
        if kind is stores.Embermap:
            raise BenchError(f"embermap left the contest: {error}")

    def end(self) -> None:
        """End all processes."""
        for worker in self.workers.values():
            worker.end()
        self.workers.clear()

    def each(self, case: str, work: Callable[[type[stores.Rival], Worker], Any]) -> dict[Any, Any]:
        """Do something with every store that is left, in turn."""
        found = {}
        for kind, worker in list(self.workers.items()):
            try:
                found[kind] = work(kind, worker)
            except (StoreDied, RuntimeError) as error:
                self.lose(kind, case, error)
        return found

    def cold(self, kind: type[stores.Rival], worker: Worker) -> None:
        """Close, drop the page cache, open."""
        worker.call("shut")
        self.field.forget([kind])
        worker.call("reopen")

    def choose_way(self, case: Case, kind: type[stores.Rival], worker: Worker) -> None:
        """Find the fastest way of a store for these ids, cold, in short runs."""
        known = (kind.name, case.op, case.ids)
        if len(kind.ways) == 1:
            return
        if known not in self.field.ways:
            settings = self.field.settings
            stream = self.field.stream(case.ids)
            stream = workload.Stream(
                self.field.shape.rows,
                case.dim,
                case.ids,
                min(stream.batch, 8192),
                seed=5,
            )
            rates = {}
            for number, way in enumerate(kind.ways):
                worker.call("set_way", way=way)
                self.cold(kind, worker)
                found = worker.call(
                    "run",
                    op=case.op,
                    stream=stream,
                    first=number * FAR,
                    count=2,
                    seconds=settings.seconds,
                )
                rates[way] = len(found["times"]) / sum(found["times"])
            self.field.ways[known] = max(rates, key=lambda way: rates[way])
        worker.call("set_way", way=self.field.ways[known])

    def run(self, case: Case) -> None:
        """One case, all stores, in rounds."""
        self.field.updated |= case.updates
        if case.op in ("scan", "bulk"):
            self._sequential(case)
        elif case.op == "prefetch":
            self._prefetch(case)
        else:
            self._random(case)

    def _random(self, case: Case) -> None:
        settings, field = self.field.settings, self.field
        stream = field.stream(case.ids)
        if case.op == "update":

            def check(kind: type[stores.Rival], worker: Worker) -> None:
                if kind not in self.updates_checked:
                    # Few rows: the comparison takes several copies of them.
                    few = dataclasses.replace(field.stream(ZIPF, 98), batch=min(stream.batch, 4096))
                    worker.call("check_update", stream=few)
                    self.updates_checked.add(kind)

            self.each(case.name, check)
        self.each(case.name, lambda kind, worker: self.choose_way(case, kind, worker))
        warmed: dict[type[stores.Rival], int] = {}
        warm_batches = 0
        if case.temperature == "warm":
            per_page = max(1, 4096 // (field.shape.width * 4))
            pages = 3 * field.shape.memory // (2 * 4096)
            warm_batches = workload.batches_to_touch(stream, per_page, pages, settings.warm_most)

            def warm(kind: type[stores.Rival], worker: Worker) -> None:
                self.cold(kind, worker)
                warmed[kind] = worker.call(
                    "warm",
                    op=case.op,
                    stream=stream,
                    first=0,
                    count=warm_batches,
                    seconds=12 * settings.seconds,
                )

            self.each(case.name, warm)
        rounds: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in self.workers}
        bare: list[dict[str, Any]] = []
        with_bare = case.op == "gather" and case.ids == "uniform" and case.temperature == "cold"
        for number in range(settings.rounds):
            first = FAR * (number + 1)

            def timed(kind: type[stores.Rival], worker: Worker, first: int = first) -> Any:
                if case.temperature == "cold":
                    self.cold(kind, worker)
                return worker.call(
                    "run",
                    op=case.op,
                    stream=stream,
                    first=first,
                    count=COLD_BATCHES if case.temperature == "cold" else FAR,
                    seconds=settings.seconds,
                )

            for kind, found in self.each(case.name, timed).items():
                rounds[kind].append(found)
            if with_bare and stores.Embermap in self.workers:
                table = stores.Embermap.files(field.place(stores.Embermap))[0]
                found = bare_disk(table, min(settings.seconds, 2.0))
                if found is not None:
                    bare.append(found)
        self._report(case, rounds, bare, {k: [n, warm_batches] for k, n in warmed.items()})

    def _report(
        self, case: Case, rounds: dict[Any, Any], bare: list[dict[str, Any]], warmed: dict[Any, Any]
    ) -> None:
        own = rounds.get(stores.Embermap, [])
        for kind, worker in self.workers.items():
            runs = rounds[kind]
            if not runs:
                continue
            if case.temperature == "cold" and kind is not stores.Embermap:
                # The same batches for both: later ones find more in memory.
                ratios = []
                for mine, other in zip(own, runs, strict=True):
                    common = min(len(mine["times"]), len(other["times"]))
                    ratios.append(sum(other["times"][:common]) / sum(mine["times"][:common]))
            else:
                ratios = [rate(m) / rate(o) for m, o in zip(own, runs, strict=True)]
            entry = {
                "case": case.name,
                "store": kind.name,
                "way": self.field.ways.get((kind.name, case.op, case.ids), "plain"),
                "unit": "rows/s",
                "value": statistics.median(map(rate, runs)),
                "rounds": [rate(run) for run in runs],
                "batches": [len(run["times"]) for run in runs],
                "warmed": warmed.get(kind, [0, 0]),  # batches, of those wanted
                "peak_memory": worker.group.peak(),
                **worker.call("memory"),
            }
            if kind is not stores.Embermap:
                entry["embermap_ratio"] = statistics.median(ratios)
                entry["ratios"] = ratios
            elif runs[-1]["stats"]:
                counted = runs[-1]["stats"]
                wanted = counted.get("hits", 0) + counted.get("misses", 0)
                entry["hit_rate"] = counted.get("hits", 0) / max(wanted, 1)
                if bare:
                    shares = [
                        run["stats"]["misses"]
                        / sum(run["times"])
                        / disk["random_read"]["per_second"]
                        for run, disk in zip(runs, bare, strict=False)
                    ]
                    entry["bare_ratio"] = statistics.median(shares)
                    entry["bare_ratios"] = shares
                    entry["bare_pages_per_second"] = [b["random_read"]["per_second"] for b in bare]
            self.field.results.add(entry)

    def _sequential(self, case: Case) -> None:
        settings, field = self.field.settings, self.field
        write = case.op == "bulk"
        rounds: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in self.workers}
        disk = []
        table = stores.Embermap.files(field.place(stores.Embermap))[0]
        for _ in range(settings.rounds):

            def timed(kind: type[stores.Rival], worker: Worker) -> Any:
                worker.call("set_way", way=kind.ways[-1] if kind.name == "LMDB" else "plain")
                self.cold(kind, worker)
                return worker.call(case.op, seconds=settings.seconds)

            for kind, found in self.each(case.name, timed).items():
                rounds[kind].append(found)
            moved = rounds[stores.Embermap][-1]["bytes"]
            found = dd_rate(table, min(moved, DD_MOST), write=write)
            if found is not None:
                disk.append(found)
        own = rounds[stores.Embermap]
        for kind, worker in self.workers.items():
            runs = rounds[kind]
            rates = [run["bytes"] / run["seconds"] for run in runs]
            entry = {
                "case": case.name,
                "store": kind.name,
                "way": "plain",
                "unit": "bytes/s",
                "value": statistics.median(rates),
                "rounds": rates,
                "peak_memory": worker.group.peak(),
            }
            if kind is not stores.Embermap:
                ratios = [m["bytes"] / m["seconds"] / r for m, r in zip(own, rates, strict=True)]
                entry["embermap_ratio"] = statistics.median(ratios)
            elif disk:
                shares = [mine / other for mine, other in zip(rates, disk, strict=False)]
                entry["bare_ratio"] = statistics.median(shares)
                entry["dd_bytes_per_second"] = disk
            field.results.add(entry)

    def _prefetch(self, case: Case) -> None:
        settings, field = self.field.settings, self.field
        worker = self.workers[stores.Embermap]
        per_page = max(1, 4096 // (field.shape.width * 4))
        # A batch's pages fit the half of the frames that may be prefetched.
        fits = stores.Embermap.budget(field.shape.memory) // 4096 // 3
        rows = min(settings.batch, max(64, fits))
        stream = workload.Stream(field.shape.rows, case.dim, "uniform", rows, seed=3)
        shares, reads, waited, slower = [], [], [], []
        for number in range(settings.rounds):
            self.cold(stores.Embermap, worker)
            pages = stores.Embermap.budget(field.shape.memory) // 4096
            count = workload.batches_to_touch(stream, per_page, pages, settings.warm_most)
            worker.call(
                "warm", op="gather", stream=stream, first=0, count=count, seconds=settings.seconds
            )
            found = worker.call(
                "prefetch_loop",
                stream=stream,
                first=FAR * (number + 1),
                seconds=settings.seconds,
            )
            shares.append(found["compute"] / found["loop"])
            reads.append(found["reads"] / found["compute"])
            waited.append(found["waited"] / found["loop"])
            slower.append(found["computed"] / found["compute"])
        field.results.add(
            {
                "case": case.name,
                "store": "embermap",
                "way": "plain",
                "unit": "ratio",
                "value": statistics.median(shares),
                "rounds": shares,
                "reads_of_compute": reads,  # 1 where the computing takes as long as the reads
                "waited": waited,  # share of the loop that went by in its gathers
                "compute_beside_reads": slower,  # of its time alone: cores and memory are shared
            }
        )


def rate(run: dict[str, Any]) -> float:
    """Rows per second of a timed run."""
    rows: float = run["batch"] * len(run["times"])
    return rows / sum(run["times"])


def run_hot(settings: Settings, results: Results, cases: list[Case]) -> None:
    """Everything in memory: embermap against torch's own tables, on the same threads."""
    if importlib.util.find_spec("torch") is None:
        results.note("all-hot cases left out: torch is not installed")
        return
    whole = confine.Kind("trimmed", None)  # nobody is confined
    for dim, adagrad in dict.fromkeys((case.dim, case.adagrad) for case in cases):
        hot = Settings(**{**vars(settings), "size": settings.hot_size, "kind": whole})
        hot.memory = 4 * settings.hot_size
        field = Field(hot, results, dim, adagrad)
        field.folder = settings.folder / "hot"
        contest = None
        try:
            field.build(stores.Embermap)
            field.place(stores.TorchMemory).mkdir()
            contest = Contest(field, [stores.Embermap, stores.TorchMemory])
            for worker in contest.workers.values():
                worker.call("read_all")
            for case in cases:
                if (case.dim, case.adagrad) == (dim, adagrad):
                    contest.run(case)
        finally:
            if contest is not None:
                contest.end()
            stores.remove_data(field.folder)


def run_all(settings: Settings, results: Results) -> None:
    """All cases that were asked for."""
    wanted = [
        case
        for case in all_cases()
        if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in settings.patterns)
    ]
    if not wanted:
        raise BenchError("no case has such a name; --list shows all")
    outside = [case for case in wanted if case.temperature != "hot"]
    for dim, adagrad in dict.fromkeys((case.dim, case.adagrad) for case in outside):
        field = Field(settings, results, dim, adagrad)
        cases = [case for case in outside if (case.dim, case.adagrad) == (dim, adagrad)]
        kind = "with Adagrad" if adagrad else "weights alone"
        print(
            f"{field.shape.rows:,} rows x {dim} float32 {kind}: "
            f"{field.shape.bytes / 2**20:,.0f} MiB in {settings.memory / 2**20:,.0f} MiB",
            flush=True,
        )
        try:
            for kinds in groups_of(settings.rivals):
                try:
                    run_group(field, kinds, cases, settings)
                except BenchError as error:  # the others are measured all the same
                    results.fail(str(error))
        finally:
            stores.remove_data(field.folder)
    hot = [case for case in wanted if case.temperature == "hot"]
    if hot:
        print(f"All hot: {settings.hot_size / 2**20:,.0f} MiB, {settings.threads} threads")
        try:
            run_hot(settings, results, hot)
        except BenchError as error:
            results.fail(str(error))


def groups_of(kinds: Sequence[type[stores.Rival]]) -> Iterator[list[type[stores.Rival]]]:
    """Stores of the same files; one group's files are gone before the next one's are made."""
    left = list(kinds)
    if not left:
        yield []
    while left:
        data = left[0].data
        yield [kind for kind in left if kind.data == data]
        left = [kind for kind in left if kind.data != data]


def run_group(
    field: Field, kinds: list[type[stores.Rival]], cases: list[Case], settings: Settings
) -> None:
    """The stores of one kind of file, each alone against embermap: two that have the same file
    mapped would share their page cache. The file is made before and removed after.
    """
    if not settings.named and kinds and all(kind.name in SLOW for kind in kinds):
        cases = [
            case for case in cases if any(fnmatch.fnmatchcase(case.name, p) for p in SLOW_CASES)
        ]
    if not cases:
        return
    field.updated = False
    made = [stores.Embermap, *kinds[:1]]
    try:
        for kind in made:
            field.build(kind)
        for updating in (False, True):
            for kind in kinds or [None]:
                mine = [
                    case
                    for case in cases
                    if case.updates == updating
                    and (case.op != "prefetch" or settings.rivals[:1] in ([], [kind]))
                ]
                if not mine:
                    continue
                contest = Contest(field, [stores.Embermap, *([kind] if kind else [])])
                try:
                    for case in mine:
                        contest.run(case)
                finally:
                    contest.end()
    finally:
        for kind in made:
            stores.remove_data(field.place(kind))


# --- the machine ----------------------------------------------------------------------------------


def machine(folder: Path) -> dict[str, Any]:
    """What ran it: no names of hosts or people."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file_system = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False
    ).stdout.strip()
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    versions = {}
    for name in ("numpy", "torch", "h5py", "lmdb"):
        if importlib.util.find_spec(name) is not None:
            from importlib.metadata import PackageNotFoundError, version

            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = "?"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory": memory,
        "kernel": platform.release().split("-")[0],
        "file_system": file_system.replace("ext2/ext3", "ext4"),
        "python": platform.python_version(),
        "versions": versions,
    }


def available(kinds: Sequence[type[stores.Rival]], results: Results) -> list[type[stores.Rival]]:
    """Those whose library is installed."""
    found = []
    for kind in kinds:
        library = {"torch.from_file": "torch", "LMDB": "lmdb"}.get(
            kind.name, "h5py" if kind.name.startswith("h5py") else "numpy"
        )
        if importlib.util.find_spec(library) is None:
            results.note(f"{kind.name} left out: {library} is not installed")
        else:
            found.append(kind)
    return found


# --- command line ---------------------------------------------------------------------------------


def parse_bytes(text: str) -> int:
    """Bytes of "8GiB", "800 MiB", "4096"."""
    number = text.strip().lower().removesuffix("b")
    powers = {"ki": 10, "mi": 20, "gi": 30, "ti": 40}
    scale = 1
    if number[-2:] in powers:
        scale = 1 << powers[number[-2:]]
        number = number[:-2]
    try:
        size = int(float(number) * scale)
    except ValueError:
        size = 0
    if size <= 0:
        raise argparse.ArgumentTypeError(f"not a size such as 8GiB: {text!r}")
    return size


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="out_of_core.py", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--size", type=parse_bytes, help="bytes of the table's records (default 8GiB)")
    add("--rows", type=int, help="rows of the table, instead of --size")
    add("--memory", type=parse_bytes, help="of each process (default a tenth of the table)")
    add("--hot-size", type=parse_bytes, help="of the all-hot tables (default 256MiB)")
    add("--batch", type=int, help="ids in a batch (default 65536)")
    add("--seconds", type=float, help="of each timed run (default 4)")
    add("--rounds", type=int, help="timed runs of each store in each case (default 3)")
    add("--threads", type=int, default=0, help="of embermap and torch (default: all cores)")
    add("--cases", action="append", metavar="PATTERN", help="e.g. 'dim128/*/gather/*/warm'")
    add("--rivals", action="append", metavar="NAME", help="np.memmap, torch.from_file, LMDB, ...")
    add("--list", action="store_true", help="list cases and stores, and exit")
    add(
        "--quick",
        action="store_true",
        help="tiny tables, a few cases, about a minute: a try, not a result",
    )
    add("--folder", type=Path, help="where tables are made (default: TMPDIR, else /var/tmp)")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    quick = args.quick
    args.size = args.size or (128 << 20 if quick else 8 << 30)
    args.hot_size = args.hot_size or (8 << 20 if quick else 256 << 20)
    args.batch = args.batch or (2048 if quick else 65_536)
    args.seconds = args.seconds or (0.05 if quick else 4.0)
    args.rounds = args.rounds or (1 if quick else 3)
    if min(args.batch, args.rounds) < 1 or args.seconds <= 0 or args.threads < 0:
        parser.error("--batch, --rounds and --seconds must be above 0, --threads not below")
    for name in args.rivals or []:
        if name != "none" and name not in stores.ALL:
            parser.error(f"--rivals: no store {name!r}: {', '.join(stores.ALL)}")
    return args


def measure(args: argparse.Namespace) -> bool:
    """Run everything in a folder that is gone at the end; keep the results, also of a part.

    Returns whether embermap was measured in all that was asked for.
    """
    if importlib.util.find_spec("embermap") is None:
        raise BenchError("the package embermap is not installed for this Python: `make build`")
    results = Results()
    chosen = [k for k in stores.RIVALS if args.rivals is None or k.name in args.rivals]
    base = args.folder or Path(os.environ.get("TMPDIR") or "/var/tmp")
    size = args.size if args.rows is None else args.rows * 512
    memory = args.memory or max(size // 10, 64 << 20)
    needed, free = (
        int(2.6 * size) + args.hot_size + DD_MOST * (not args.quick),
        shutil.disk_usage(base).free,
    )
    if free < needed:
        raise BenchError(f"{base}: {needed >> 20} MiB are needed, {free >> 20} MiB are free")
    kind = confine.find_kind()
    folder = Path(tempfile.mkdtemp(prefix="embermap-bench-", dir=base))
    threads = args.threads or len(os.sched_getaffinity(0))
    settings = Settings(
        folder=folder,
        size=size,
        hot_size=args.hot_size,
        memory=memory,
        batch=args.batch,
        seconds=args.seconds,
        rounds=args.rounds,
        threads=threads,
        rivals=available(chosen, results),
        named=args.rivals is not None,
        patterns=args.cases or (list(QUICK_CASES) if args.quick else ["*"]),
        kind=kind,
        warm_most=6 if args.quick else 60,
    )
    print(f"Confinement: {kind.describe()}")
    print(
        f"Each process may take {memory / 2**20:,.0f} MiB beyond its libraries; embermap's budget "
        f"in it is {stores.Embermap.budget(memory) / 2**20:,.0f} MiB"
    )
    if find_program() is None:
        results.note("no `embermap` program found: the bare speed of the disk is not measured")
    found: dict[str, Any] = {
        "machine": machine(base),
        "confinement": {"kind": kind.name, "text": kind.describe(), "memory": memory},
        "embermap_budget": stores.Embermap.budget(memory),
        "settings": {
            "size": size,
            "hot_size": args.hot_size,
            "batch": args.batch,
            "seconds": args.seconds,
            "rounds": args.rounds,
            "threads": threads,
            "quick": args.quick,
        },
        "notes": results.notes,
        "cases": results.cases,
    }
    began = time.monotonic()
    try:
        run_all(settings, results)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        found["minutes"] = (time.monotonic() - began) / 60
        if args.json is not None and results.cases:
            partial = args.json.with_name(args.json.name + ".tmp")
            partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            partial.replace(args.json)
    return not results.failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    if args.list:
        print("\n".join(case.name for case in all_cases()))
        print("stores: " + ", ".join(stores.ALL))
        return 0
    try:
        if not measure(args):
            print("out_of_core.py: error: not all could be measured", file=sys.stderr)
            return 1
    except (BenchError, OSError) as error:
        print(f"out_of_core.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("out_of_core.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Here and not in main(): a program that calls that has handlers of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up as Ctrl-C does
    sys.exit(main())
