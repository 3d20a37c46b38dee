#!/usr/bin/env python3
"""A billion rows on one machine: a language model of hashed word n-grams, trained out of core.

A table of 10^9 rows of 128 numbers with Adagrad's state is a terabyte. It is created in an instant
and trained here through 256 MiB of memory: rows that are never used take neither disk nor memory,
and those that are used take disk alone.

The text is a dictionary of English (GNU Collaborative International Dictionary of English, Debian
package `dict-gcide`). Five words predict the next one: the row at the hash of all five, and, since
most groups of five words occur only once, the rows at the hashes of the last two and of the last
word. Their sum is scored against the next word's vector and those of words drawn at random; the
words' vectors are a second table of the same store. All of it is NumPy:

    rows = grams.gather(ids)                       # 65,536 of a billion
    grams.prefetch(next_ids)                       # read while this batch computes
    loss, gradients = ...
    grams.update(ids, gradients)                   # Adagrad, on weight and state where they lie

The memory of the process is sampled every second. The run fails if at its highest it is above what
the same process takes without the store, plus the budget, plus 64 MiB.

    python billion_ngrams.py --minutes 5 --memory 256MiB --plot memory.png
    python billion_ngrams.py --text mine.txt.gz --rows 2e9 --disk 100GiB
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import mmap
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
from example_parts import (
    DICTIONARY,
    DemoError,
    forget_peak_memory,
    give_memory_back,
    hash_ngrams,
    memory_of_process,
    mib,
    parse_size,
    prepare_folder,
    read_words,
    remove_files,
)
from numpy.typing import NDArray

give_memory_back()

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

CONTEXT = 5  # words
ORDERS = (1, 2, 5)  # how many of the last words each row of a place stands for
NOISE_POWER = 0.75  # words are drawn at random by count ** 0.75
SHARED_NOISE = 256  # drawn for a batch, which its places share
NEGATIVES = 5  # what they count for, for each place
ALLOWANCE = 64 << 20  # bytes above budget and process that the run may take
REHEARSED_STEPS = 12
PAGE = 4096  # bytes of a table's page: what a row takes of the disk at most
OWN_FILES = ("tables",)


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A text as word numbers, in order of first occurrence."""

    words: list[str]
    text: NDArray[np.int32]  # (N,) the running text


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read texts into lower-cased runs of letters."""
    words, text, _ = read_words(paths)
    return Corpus(words, text)


# --- rows of a place in the text ------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Consecutive places of the text: the rows of each one's context, and the word that follows."""

    ids: Ids  # (places, len(ORDERS)) rows of the table of n-grams
    targets: Ids  # (places,) word numbers

    @classmethod
    def of(cls, text: NDArray[np.int32], first: int, count: int, rows: int) -> Places:
        """The `count` places whose contexts begin at word `first`."""
        words = text[first : first + count + CONTEXT]
        ids = np.empty((count, len(ORDERS)), np.int64)
        for column, n in enumerate(ORDERS):
            ids[:, column] = hash_ngrams(words[CONTEXT - n : count + CONTEXT - 1], n, rows)
        return cls(ids, words[CONTEXT:].astype(np.int64))


def pages_of_text(text: NDArray[np.int32], rows: int, rows_per_page: int, most: int) -> int:
    """How many words of the text can be used before its rows lie on more than `most` pages."""
    block = 1 << 19
    seen: Ids = np.empty(0, np.int64)
    for first in range(0, max(0, len(text) - CONTEXT), block):
        count = min(block, len(text) - CONTEXT - first)
        pages = np.unique(Places.of(text, first, count, rows).ids // rows_per_page)
        added = np.setdiff1d(pages, seen, assume_unique=True)
        if len(seen) + len(added) > most:
            return first + int(count * max(0, most - len(seen)) / max(len(added), 1))
        seen = np.concatenate([seen, added])
    return len(text)


# --- model ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Of the sum of the losses of a batch."""

    loss: float  # mean of a place, in nats
    rows: Rows  # (places, dim): of each of the rows whose sum is the context
    words: Rows  # (places + noise, dim): of the targets' vectors, then of the noise's


def loss_and_gradients(context: Rows, targets: Rows, noise: Rows) -> Gradients:
    """Loss of predicting targets rather than noise: context and targets (P, dim), noise (K, dim).

    Each place has NEGATIVES negatives' worth of noise: in the mean the loss of as many draws of its
    own. With all scores zero it is (1 + NEGATIVES) ln 2.
    """
    share = np.float32(NEGATIVES / len(noise))
    scores = np.einsum("pd,pd->p", context, targets)
    noise_scores = context @ noise.T
    loss = float(np.logaddexp(0, -scores).sum() + share * np.logaddexp(0, noise_scores).sum())
    pull = -1 / (1 + np.exp(np.minimum(scores, 80)))  # d loss / d score
    push = share / (1 + np.exp(np.minimum(-noise_scores, 80)))
    rows = pull[:, None] * targets + push @ noise
    words = np.concatenate([pull[:, None] * context, push.T @ context])
    return Gradients(loss / len(context), rows, words)


# --- memory ---------------------------------------------------------------------------------------


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


def page_cache_of(path: Path) -> int:
    """Bytes of a file in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file:
        found, whole = _CacheStat(), _CacheRange(0, 0)
        if libc.syscall(451, file.fileno(), ctypes.byref(whole), ctypes.byref(found), 0) == 0:
            return int(found.cache) * mmap.PAGESIZE  # cachestat(2), Linux 6.5
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        total, window = 0, 1 << 30
        for offset in range(0, size, window):
            length = min(window, size - offset)
            pages = np.empty(-(-length // mmap.PAGESIZE), np.uint8)
            view = mmap.mmap(file.fileno(), length, prot=mmap.PROT_READ, offset=offset)
            address = np.frombuffer(view, np.uint8).ctypes.data
            if libc.mincore(address, length, pages.ctypes.data) != 0:
                raise OSError(ctypes.get_errno(), "mincore", str(path))
            total += int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE
        return total


@dataclass
class Samples:
    """The memory of the process, taken every second by a thread of its own."""

    every: float = 1.0
    began: float = field(default_factory=time.monotonic)
    seconds: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    anonymous: list[int] = field(default_factory=list)

    def __enter__(self) -> Samples:
        """Begin."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the last one and end."""
        self._stop.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._stop.wait(0 if not self.seconds else self.every):
            self._take()

    def _take(self) -> None:
        self.seconds.append(time.monotonic() - self.began)
        self.resident.append(memory_of_process("VmRSS"))
        self.anonymous.append(memory_of_process("RssAnon"))


def plot(path: Path, samples: Samples, budget: int, without: int) -> None:
    """Draw the samples. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    minutes = np.array(samples.seconds) / 60
    axes.plot(minutes, np.array(samples.resident) / 2**20, label="resident")
    axes.plot(minutes, np.array(samples.anonymous) / 2**20, label="of it anonymous")
    limit = (without + budget + ALLOWANCE) / 2**20
    axes.axhline(limit, color="0.4", linestyle="--", label="process + budget + 64 MiB")
    axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, 1.15 * limit))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# --- reporting ------------------------------------------------------------------------------------


def gb(n: float) -> str:
    """Bytes in the decimal unit that files are given in."""
    return f"{n / 1e9:.2f} GB" if n < 1e12 else f"{n / 1e12:.2f} TB"


# --- training -------------------------------------------------------------------------------------


@dataclass
class Training:
    """What the loop did."""

    steps: int = 0
    seconds: float = 0.0
    passes: float = 0.0
    losses: list[float] = field(default_factory=list)  # of each step


def distribution(text: NDArray[np.int32], words: int) -> NDArray[np.float64]:
    """Cumulative chance of each word to be drawn as noise, shape (words,)."""
    cumulative = np.cumsum(np.bincount(text, minlength=words).astype(np.float64) ** NOISE_POWER)
    return cumulative / cumulative[-1]


def endless(text: NDArray[np.int32], places: int, rows: int) -> Iterator[tuple[Places, float]]:
    """Batches in reading order, pass after pass, each with how many passes are done after it."""
    number = 0
    while True:
        for first in range(0, len(text) - CONTEXT, places):
            count = min(places, len(text) - CONTEXT - first)
            yield Places.of(text, first, count, rows), number + (first + count) / len(text)
        number += 1


def step(
    gather_grams: Callable[[Ids], Rows],
    gather_words: Callable[[Ids], Rows],
    batch: Places,
    noise: Ids,
    meanwhile: Callable[[], None],
) -> tuple[Gradients, Ids, Rows]:
    """One step up to its gradients: (gradients, ids of words, gradients of the n-grams' rows)."""
    context = gather_grams(batch.ids).sum(axis=1)
    vectors = gather_words(np.concatenate([batch.targets, noise]))
    meanwhile()
    places = len(batch.targets)
    found = loss_and_gradients(context, vectors[:places], vectors[places:])
    repeated = np.repeat(found.rows, len(ORDERS), axis=0).reshape(*batch.ids.shape, -1)
    return found, np.concatenate([batch.targets, noise]), repeated


def train(
    grams: Any,
    words: Any,
    text: NDArray[np.int32],
    cumulative: NDArray[np.float64],
    args: argparse.Namespace,
) -> Training:
    """Train both tables for the time given."""
    rng = np.random.default_rng(args.seed)
    batches = endless(text, args.batch // len(ORDERS), grams.rows)
    done = Training()
    recent: deque[float] = deque(maxlen=20)
    began = shown = time.monotonic()
    (batch, passes), (following, passes_then) = next(batches), next(batches)
    while True:
        noise = np.searchsorted(cumulative, rng.random(SHARED_NOISE), side="right")
        ahead = following

        def prefetch(ahead: Places = ahead) -> None:
            grams.prefetch(ahead.ids)

        found, word_ids, repeated = step(grams.gather, words.gather, batch, noise, prefetch)
        grams.update(batch.ids, repeated)
        words.update(word_ids, found.words)
        done.steps += 1
        done.losses.append(found.loss)
        recent.append(found.loss)
        done.passes = passes
        now = time.monotonic()
        done.seconds = now - began
        last = done.seconds >= args.minutes * 60
        if args.steps is not None:
            last = done.steps >= args.steps
        if last or now - shown >= 10:
            shown = now
            stats = grams.stats()
            hits = stats["hits"] / max(stats["hits"] + stats["misses"], 1)
            print(
                f"  {done.seconds:5.0f} s  step {done.steps:5,d}  pass {done.passes:5.2f}  "
                f"loss {np.mean(recent):.3f}  pages in memory {hits:.1%}  "
                f"{gb(stats['bytes_read'])} read, {gb(stats['bytes_written'])} written  "
                f"{mib(memory_of_process('VmRSS'))} resident",
                flush=True,
            )
        if last:
            return done
        del found, word_ids, repeated
        (batch, passes), (following, passes_then) = (following, passes_then), next(batches)


def rehearse(
    text: NDArray[np.int32], cumulative: NDArray[np.float64], args: argparse.Namespace
) -> None:
    """Steps of the same shapes on made-up rows: what training takes without a store."""
    rng = np.random.default_rng(0)

    def rows_of(ids: Ids) -> Rows:
        return np.full((*ids.shape, args.dim), 0.01, np.float32)

    batches = endless(text, args.batch // len(ORDERS), args.rows)
    for _ in range(REHEARSED_STEPS):
        noise = np.searchsorted(cumulative, rng.random(SHARED_NOISE), side="right")
        step(rows_of, rows_of, next(batches)[0], noise, lambda: None)


# --- the run --------------------------------------------------------------------------------------


def disk_of(path: Path) -> int:
    """Bytes that a file takes of the disk."""
    return path.stat().st_blocks * 512


def check_outputs(args: argparse.Namespace) -> None:
    """Fail before minutes are spent on what --json and --plot could not show."""
    for path in (args.json, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise DemoError(f"{path}: there is no folder {path.absolute().parent}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise DemoError("--plot needs matplotlib: python -m pip install matplotlib")


def run(args: argparse.Namespace) -> bool:
    """Read the text, train, measure, tidy up. Returns whether memory stayed within its limit."""
    check_outputs(args)
    corpus = read_corpus(args.text)
    words = len(corpus.words)
    needed = 2 * (args.batch // len(ORDERS)) + CONTEXT
    if len(corpus.text) < needed:
        raise DemoError(
            f"too few words: the text has {len(corpus.text):,}, at least {needed:,} are needed "
            f"with --batch {args.batch}"
        )
    prepare_folder(args.store, OWN_FILES, args.overwrite)
    try:
        free = shutil.disk_usage(args.store).free
        if free < args.disk + (1 << 30):
            raise DemoError(
                f"{args.store}: {gb(args.disk + (1 << 30))} are needed, {gb(free)} are free; "
                "--disk SIZE takes less of the text"
            )
        rows_per_page = max(1, PAGE // (args.dim * 8))
        page = max(PAGE, args.dim * 8)
        usable = pages_of_text(corpus.text, args.rows, rows_per_page, args.disk // page)
        if usable < needed:
            raise DemoError(f"--disk {gb(args.disk)} has room for {usable:,} words of text only")
        text = corpus.text[:usable]
        print(
            f"Text: {len(corpus.text):,} words, {words:,} distinct; {usable:,} of them are used, "
            f"whose rows take at most {gb(args.disk)} of the disk"
        )
        return demonstrate(args, text, words)
    finally:
        if not args.keep:
            # A file of many scattered pages takes the file system a while to free.
            print(f"Removing {args.store} ...", flush=True)
            remove_files(args.store, OWN_FILES)


def demonstrate(args: argparse.Namespace, text: NDArray[np.int32], vocabulary: int) -> bool:
    """Train, measure, report."""
    cumulative = distribution(text, vocabulary)
    resettable = forget_peak_memory()
    rehearse(text, cumulative, args)
    without = memory_of_process("VmHWM")
    resettable = forget_peak_memory() and resettable
    place = args.store / "tables"
    with Samples() as samples:
        began = time.monotonic()
        with em.open(place, memory=args.memory) as store:
            adagrad = em.optim.Adagrad(lr=args.lr, eps=1e-8)
            small = em.init.Normal(0, 0.05)
            shape: dict[str, Any] = {"dim": args.dim, "dtype": "float32", "optimizer": adagrad}
            grams = store.create("grams", rows=args.rows, init=small, seed=args.seed, **shape)
            words = store.create("words", rows=vocabulary, init=em.init.Zeros(), **shape)
            created = time.monotonic() - began
            apparent = grams.path.stat().st_size
            print(
                f"Store: {args.rows:,} x {args.dim} float32 with Adagrad, {gb(apparent)} apparent, "
                f"{gb(disk_of(grams.path))} on disk, created in {created:.2f} s; "
                f"budget {mib(args.memory)}, {apparent / args.memory:,.0f} times smaller",
                flush=True,
            )
            done = train(grams, words, text, cumulative, args)
            stats = grams.stats()
            began = time.monotonic()
            store.commit()
            commit_seconds = time.monotonic() - began
            cached = page_cache_of(grams.path)
            disk = disk_of(grams.path)
    peak = memory_of_process("VmHWM") if resettable else max(samples.resident)
    few = max(1, min(10, done.steps // 4))
    before, after = float(np.mean(done.losses[:few])), float(np.mean(done.losses[-few:]))
    limit = without + args.memory + ALLOWANCE
    within = peak <= limit
    ids = done.steps * (args.batch // len(ORDERS)) * len(ORDERS)
    hits = stats["hits"] / max(stats["hits"] + stats["misses"], 1)
    report = {
        "rows": args.rows,
        "dim": args.dim,
        "batch": args.batch,
        "apparent_bytes": apparent,
        "disk_bytes": disk,
        "create_seconds": created,
        "steps": done.steps,
        "passes": done.passes,
        "seconds": done.seconds,
        "rows_per_second": ids / done.seconds,
        "loss_first": before,
        "loss_last": after,
        "losses": [round(float(x), 4) for x in thin(done.losses, 400)],
        "hit_rate": hits,
        "bytes_read": stats["bytes_read"],
        "bytes_written": stats["bytes_written"],
        "commit_seconds": commit_seconds,
        "budget": args.memory,
        "without_store": without,
        "peak_resident": peak,
        "limit": limit,
        "within": within,
        "page_cache_of_table": cached,
        "samples": {
            "seconds": [round(x, 1) for x in samples.seconds],
            "resident": samples.resident,
            "anonymous": samples.anonymous,
        },
    }
    summary = {
        "table": f"{args.rows:,} rows, {gb(apparent)} apparent, {gb(disk)} on disk",
        "training": f"{done.steps:,} steps of {args.batch:,} rows in {done.seconds:.0f} s, "
        f"{done.passes:.2f} passes; {ids / done.seconds / 1e3:,.0f} k rows/s gathered and updated",
        "loss": f"{before:.3f} in the first {few} steps, {after:.3f} in the last; "
        f"untrained {(1 + NEGATIVES) * math.log(2):.3f}",
        "pages": f"{hits:.1%} found in memory; {gb(stats['bytes_read'])} read, "
        f"{gb(stats['bytes_written'])} written; commit {commit_seconds:.1f} s",
        "memory": f"peak {mib(peak)} resident; {mib(without)} without the store, which added "
        f"{mib(max(0, peak - without))} with a budget of {mib(args.memory)}",
        "page cache": f"{mib(cached)} of the table's file at the end",
        "verdict": f"{'within' if within else 'ABOVE'} process + budget + 64 MiB = {mib(limit)}",
    }
    print("Summary")
    for name, value in summary.items():
        print(f"  {name:10} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(args.plot, samples, args.memory, without)
        print(f"Drawn: {args.plot}")
    if not after < before:
        raise DemoError(f"the loss did not fall: {before:.3f} before, {after:.3f} after")
    return within


def thin(values: list[float], most: int) -> list[float]:
    """Means of equal stretches, at most `most` of them."""
    stretch = -(-len(values) // most) or 1
    return [float(np.mean(values[i : i + stretch])) for i in range(0, len(values), stretch)]


# --- command line ---------------------------------------------------------------------------------


def whole(smallest: int) -> Callable[[str], int]:
    """An argument type: a whole number, also written 1e9, not below `smallest`."""

    def parse(text: str) -> int:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (smallest <= value < 2**53) or value != int(value):
            raise argparse.ArgumentTypeError(f"not a whole number of at least {smallest}: {text!r}")
        return int(value)

    return parse


def positive(text: str) -> float:
    """An argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number above 0: {text!r}")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="billion_ngrams.py",
        description="Train a table of a billion hashed n-grams through a small budget of memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        nargs="+",
        default=[DICTIONARY],
        metavar="FILE",
        help="text to learn from, UTF-8, plain or gzip",
    )
    add("--minutes", type=positive, default=3.0, help="how long to train")
    add("--steps", type=whole(1), help="how many steps to train, instead of --minutes")
    add("--rows", type=whole(1), default="1e9", help="rows of the table of n-grams")
    add("--dim", type=whole(1), default=128, help="numbers in a row")
    add("--memory", type=parse_size, default="256MiB", metavar="SIZE", help="budget of the store")
    add("--batch", type=whole(len(ORDERS)), default=65_536, help="rows in a batch")
    add(
        "--disk",
        type=parse_size,
        default="4GiB",
        metavar="SIZE",
        help="use as much of the text as fits: a row of its own takes a page of the disk",
    )
    add("--lr", type=positive, default=0.05, help="learning rate of Adagrad")
    add("--seed", type=whole(0), default=1, help="of the rows and the words drawn at random")
    add("--store", type=Path, default=Path("ngrams-store"), metavar="DIR", help="folder to use")
    add("--keep", action="store_true", help="keep that folder when done")
    add("--overwrite", action="store_true", help="replace an earlier run in that folder")
    add("--json", type=Path, metavar="FILE", help="write figures and samples there")
    add("--plot", type=Path, metavar="FILE", help="draw the memory over time (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns 0, 1 (failed, or memory above the limit), 130 (interrupted)."""
    args = parse_arguments(argv)
    try:
        if not run(args):
            print("billion_ngrams.py: error: memory went above its limit", file=sys.stderr)
            return 1
    except (DemoError, em.Error, OSError, MemoryError, ImportError) as error:
        print(f"billion_ngrams.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("billion_ngrams.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    # Here and not in main(): a program that calls that has handlers of its own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidies up as Ctrl-C does
    sys.exit(main())
