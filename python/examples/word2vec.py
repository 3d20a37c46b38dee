#!/usr/bin/env python3
"""Word vectors trained out of core: skip-gram with negative sampling over two embermap tables.

The text is a dictionary of English (GNU Collaborative International Dictionary of English, Debian
package `dict-gcide`): 5.4 million words, 217 thousand of them distinct. Every word has a row of
128 numbers in two tables, and each row its Adagrad state beside it: 444 MB of files, trained here
through 64 MiB of memory. The training loop is an ordinary one of PyTorch,

    vectors, contexts = em.torch.Embedding(words), em.torch.Embedding(surroundings)
    optimizer = em.torch.Optimizer([vectors, contexts])
    loss = skip_gram_loss(vectors(tokens), contexts(ids), ...)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

and it takes text of your own:

    python word2vec.py --text mine.txt more.txt.gz --memory 256MiB --seconds 600 --words tea,coffee

Words are numbered by frequency, so that the rows in constant use share pages and stay in memory,
while the long tail of rare words comes from the file when it is needed.

The store is committed every hundred steps, rows, state and number of steps together. A run that was
killed goes on from there when the same command is given again, and ends with the same rows as one
that was not: the order of the text follows from the number of steps alone.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# PyTorch's threads otherwise spin while they wait, on cores that the store's threads and other
# programs need: on a busy machine steps took four times as long or more. Read as torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import embermap as em
import numpy as np
import torch
import torch.nn.functional as F
from example_parts import (
    DICTIONARY,
    DemoError,
    at_least,
    forget_peak_memory,
    give_memory_back,
    memory_of_process,
    mib,
    parse_size,
    pick_device,
    prepare_folder,
    read_words,
    remove_files,
)
from numpy.typing import NDArray

give_memory_back()

NEIGHBOUR_WORDS = "oak,silver,ship,river,music,red,physician,horse,bread,king,sword,winter"

CHUNK = 64  # words of running text scored against each other in one small matrix product
FEWEST_WORDS = 10_000  # of text; leaves one chunk to hold out
HELD_OUT_STRETCH = 2_000  # words; every HELD_OUT_EVERY-th stretch of the text is not trained on
HELD_OUT_EVERY = 100
HELD_OUT_NEGATIVES = 1_024  # the same for every evaluation
NOISE_POWER = 0.75  # negatives are drawn by count ** 0.75, as word2vec does
NEIGHBOUR_CANDIDATES = 20_000  # neighbours are sought among the most frequent words only
REHEARSED_STEPS = 100  # without a store, to know what the training takes by itself
BLOCK_ROWS = 8_192  # rows of a table held at once when it is read from end to end
DEFAULT_EPOCHS = 8
DEFAULT_SECONDS = 150.0
# Steps between commits: what a run that is killed has to do again. The redo log's index takes an
# eighth of the memory at most, and half of it may be of what no commit has: with 64 MiB, 40,000
# changed pages.
COMMIT_STEPS = 25
LOG_LIMIT = "4GiB"  # of the redo log: those steps change far less
OWN_FILES = ("run.json", "run.json.tmp", "tables", "vocabulary.txt", "words.npy", "words.h5")


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """A text as word ids, numbered from the most frequent word down."""

    words: list[str]  # id -> word
    counts: NDArray[np.int64]  # (V,) occurrences of each word, descending
    ids: NDArray[np.int32]  # (N,) the running text
    text_bytes: int  # size of the text, unpacked


def read_corpus(paths: Sequence[Path], *, min_count: int = 1) -> Corpus:
    """Read texts into word ids: lower-cased runs of letters, numbered by falling frequency.

    Words seen fewer than `min_count` times are dropped from the text. The text is read in pieces;
    what stays in memory is four bytes a word and the vocabulary.
    """
    names, ids, text_bytes = read_words(paths)
    counts = np.bincount(ids, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= min_count]
    number = np.full(len(names), -1, np.int32)
    number[order] = np.arange(len(order), dtype=np.int32)
    ids = number[ids]
    return Corpus([names[i] for i in order], counts[order], ids[ids >= 0], text_bytes)


# --- sampling -------------------------------------------------------------------------------------


def split_held_out(ids: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Split a text, shape (N,), into the words to train on and the words held out (one in 100).

    The held-out words are whole stretches of running text spread evenly over it: the end alone
    would be one letter of a dictionary.
    """
    stretch = max(1, min(HELD_OUT_STRETCH, len(ids) // HELD_OUT_EVERY))
    whole = len(ids) // stretch * stretch
    stretches = ids[:whole].reshape(-1, stretch)
    held = np.zeros(len(stretches), bool)
    held[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY] = True
    trained = np.concatenate([stretches[~held].reshape(-1), ids[whole:]])
    return trained, stretches[held].reshape(-1)


def keep_probability(counts: NDArray[np.int64], threshold: float) -> NDArray[np.float32]:
    """Chance of each word, shape (V,), to stay in the text when frequent words are thinned out."""
    share = counts / counts.sum()
    keep = np.sqrt(threshold / share) + threshold / share
    return np.minimum(keep, 1.0).astype(np.float32)


def to_chunks(
    ids: NDArray[np.int32], keep: NDArray[np.float32], rng: np.random.Generator
) -> NDArray[np.int32]:
    """Thin out a text, shape (N,), and cut it into rows of CHUNK words, shape (n, CHUNK).

    The first cut falls at random, so that no two words are parted in every epoch.
    """
    kept = ids[rng.random(len(ids), dtype=np.float32) < keep[ids]]
    if len(kept) < CHUNK:
        return np.empty((0, CHUNK), np.int32)
    start = int(rng.integers(min(CHUNK, len(kept) - CHUNK + 1)))
    rows = (len(kept) - start) // CHUNK
    return kept[start : start + rows * CHUNK].reshape(rows, CHUNK)


def noise_distribution(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Cumulative chance of each word, shape (V,), to be drawn as a negative."""
    cumulative = np.cumsum(counts.astype(np.float64) ** NOISE_POWER)
    return cumulative / cumulative[-1]


def draw_noise(
    cumulative: NDArray[np.float64], n: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draw n negatives, shape (n,)."""
    return np.searchsorted(cumulative, rng.random(n), side="right").astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """What one step works on, on the device of the training."""

    tokens: torch.Tensor  # (chunks, CHUNK) int64, running text
    context_ids: torch.Tensor  # (chunks * CHUNK + shared,) int64, the same words, then negatives
    distinct_rows: int  # rows this step fetches and updates, over both tables
    epochs: float  # how much of the text has been seen after this step


@dataclass(frozen=True)
class Sampler:
    """Endless batches from a text; the same for the same seed."""

    text: NDArray[np.int32]  # (N,) the words to train on
    keep: NDArray[np.float32]  # (V,)
    noise: NDArray[np.float64]  # (V,) cumulative
    batch_chunks: int
    shared_negatives: int
    seed: int
    device: torch.device

    def batches(self) -> Iterator[Batch]:
        """Yield batches for ever, epoch after epoch; the last one of an epoch may be smaller."""
        rng = np.random.default_rng(self.seed)
        epoch = 0
        while True:
            chunks = to_chunks(self.text, self.keep, rng)
            if len(chunks) == 0:
                raise DemoError(
                    "too few words are left once frequent ones are thinned out (see --subsample)"
                )
            # Chunks in random order: a dictionary read from A to Z would end up knowing Z best.
            order = rng.permutation(len(chunks))
            for start in range(0, len(chunks), self.batch_chunks):
                tokens = chunks[order[start : start + self.batch_chunks]].astype(np.int64)
                negatives = draw_noise(self.noise, self.shared_negatives, rng)
                ids = np.concatenate([tokens.reshape(-1), negatives])
                distinct = len(np.unique(tokens)) + len(np.unique(ids))
                yield Batch(
                    torch.from_numpy(tokens).to(self.device),
                    torch.from_numpy(ids).to(self.device),
                    distinct,
                    epoch + min(1.0, (start + self.batch_chunks) / len(chunks)),
                )
            del chunks, order  # not kept while the next epoch's are made
            epoch += 1


# --- model ----------------------------------------------------------------------------------------


def window_weights(window: int, device: torch.device) -> torch.Tensor:
    """Weight of each pair of places in a chunk, shape (CHUNK, CHUNK): 1 for neighbours, 0 outside.

    word2vec draws a window of 1 to `window` words for each word; a pair at distance d is then used
    with chance (window + 1 - d) / window. Used as a weight here, it gives the same mean loss
    without that noise.
    """
    place = torch.arange(CHUNK, device=device)
    distance = (place[:, None] - place[None, :]).abs()
    weight = (window + 1 - distance).clamp(min=0) / window
    return weight.masked_fill(distance == 0, 0.0)


def skip_gram_loss(
    centre: torch.Tensor,
    context: torch.Tensor,
    noise: torch.Tensor,
    weights: torch.Tensor,
    negatives: int,
) -> torch.Tensor:
    """Mean loss of a pair of neighbouring words and its `negatives` negatives, in nats.

    centre, context: (chunks, CHUNK, dim), rows of the two tables for the same running text.
    noise: (shared, dim), context rows of words drawn at random. weights: (CHUNK, CHUNK).

    All pairs share the negatives of the batch, so that every score is part of a matrix product.
    They count for `negatives / shared` each: in the mean the same loss as `negatives` draws of its
    own for every pair, at less noise. With all scores zero it is (1 + negatives) ln 2.
    """
    pair_scores = torch.bmm(centre, context.transpose(1, 2))
    noise_scores = centre.flatten(0, 1) @ noise.T
    pairs_of_place = weights.sum(1)
    attract = (F.softplus(-pair_scores) * weights).sum()
    repel = F.softplus(noise_scores).sum(1).view(centre.shape[:2]) @ pairs_of_place
    repel_share = negatives / noise.shape[0]
    return (attract + repel.sum() * repel_share) / (pairs_of_place.sum() * centre.shape[0])


def held_out_loss(
    words: Any,
    contexts: Any,
    chunks: torch.Tensor,
    noise_ids: torch.Tensor,
    weights: torch.Tensor,
    negatives: int,
) -> float:
    """Mean loss over held-out text, chunks of shape (n, CHUNK), in nats a pair. Trains nothing."""
    total = 0.0
    with torch.no_grad():
        noise = contexts.gather(noise_ids)
        for part in chunks.split(16):
            centre, context = words.gather(part), contexts.gather(part)
            loss = skip_gram_loss(centre, context, noise, weights, negatives)
            total += loss.item() * len(part)
    return total / len(chunks)


def nearest(
    table: Any, queries: NDArray[np.int64], candidates: int, n: int
) -> list[list[tuple[float, int]]]:
    """The n most similar rows among the first `candidates`, by cosine, for each of the queries.

    The table is read in blocks; the query itself is left out.
    """
    own = np.asarray(table.gather(queries), np.float32)
    own /= np.linalg.norm(own, axis=1, keepdims=True) + 1e-12
    best: list[list[tuple[float, int]]] = [[] for _ in queries]
    for start in range(0, candidates, BLOCK_ROWS):
        block = np.asarray(table[start : min(start + BLOCK_ROWS, candidates)], np.float32)
        cosines = own @ (block / (np.linalg.norm(block, axis=1, keepdims=True) + 1e-12)).T
        for query, row in enumerate(cosines):
            top = np.argsort(-row)[: n + 1]
            found = [(float(row[i]), start + int(i)) for i in top if start + i != queries[query]]
            best[query] = sorted(best[query] + found, reverse=True)[:n]
    return best


# --- reporting ------------------------------------------------------------------------------------


class Progress:
    """One line that is rewritten on a terminal, a plain line now and then elsewhere."""

    def __init__(self, stream: IO[str]) -> None:
        """Write to `stream`, every half second on a terminal, every ten seconds elsewhere."""
        self._stream = stream
        self._terminal = stream.isatty()
        self._every = 0.5 if self._terminal else 10.0  # seconds
        self._next = 0.0

    def due(self) -> bool:
        """Whether it is time for another line."""
        return time.monotonic() >= self._next

    def show(self, line: str) -> None:
        """Write the line, over the one before on a terminal."""
        self._next = time.monotonic() + self._every
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=self._stream,
            flush=True,
        )

    def finish(self, line: str) -> None:
        """Write the last line and leave it there."""
        self.show(line)
        if self._terminal:
            print(file=self._stream, flush=True)


def mb(n: float) -> str:
    """Bytes in the decimal unit that files are given in."""
    return f"{n / 1e6:.0f} MB" if n < 1e9 else f"{n / 1e9:.2f} GB"


# --- the demonstration ----------------------------------------------------------------------------


def rehearse(batch: Batch, dim: int, weights: torch.Tensor, negatives: int) -> None:
    """One step of the same shapes without a store, so that what it takes is known beforehand.

    With an optimizer of PyTorch's own, whose first step loads some 80 MiB of code.
    """
    stand_in = torch.nn.Embedding(1, dim, device=weights.device)
    optimizer = torch.optim.Adagrad(stand_in.parameters())
    stand_in(torch.zeros(1, dtype=torch.int64, device=weights.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    tokens = batch.tokens.numel()
    vectors = torch.rand(*batch.tokens.shape, dim, device=weights.device, requires_grad=True)
    contexts = torch.rand(len(batch.context_ids), dim, device=weights.device, requires_grad=True)
    loss = skip_gram_loss(
        vectors, contexts[:tokens].view_as(vectors), contexts[tokens:], weights, negatives
    )
    loss.backward()


@dataclass
class Training:
    """What the training loop did."""

    steps: int = 0  # of this and earlier runs
    epochs: float = 0.0
    seconds: float = 0.0
    rows: int = 0  # distinct rows fetched, and as many updated
    last_loss: float = math.nan


def train(
    store: Any,
    words: Any,
    contexts: Any,
    batches: Iterator[Batch],
    weights: torch.Tensor,
    args: argparse.Namespace,
    progress: Progress,
) -> Training:
    """Train both tables until the first of the limits given: epochs, seconds, steps.

    `batches` begins with the first one; those of steps that the tables have had are passed over.
    """
    vectors, surroundings = em.torch.Embedding(words), em.torch.Embedding(contexts)
    optimizer = em.torch.Optimizer([vectors, surroundings])
    untrained = (1 + args.negatives) * math.log(2)
    done = Training(steps=words.step)
    for _ in range(done.steps):
        done.epochs = next(batches).epochs
    recent: list[torch.Tensor] = []  # losses since the last line of progress
    started = time.monotonic()
    if reached(done, args):  # killed after the last step
        return done
    batch, following = next(batches), next(batches)
    while True:
        tokens = batch.tokens.numel()
        centre = vectors(batch.tokens)
        rows = surroundings(batch.context_ids)
        # The next step's pages come in from the file while this step computes.
        words.prefetch(following.tokens)
        contexts.prefetch(following.context_ids)
        loss = skip_gram_loss(
            centre, rows[:tokens].view_as(centre), rows[tokens:], weights, args.negatives
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        recent.append(loss.detach())
        done.steps += 1
        done.rows += batch.distinct_rows
        done.epochs = batch.epochs
        done.seconds = time.monotonic() - started
        last = reached(done, args)
        if last or progress.due():
            done.last_loss = torch.stack(recent).mean().item()
            recent.clear()
            line = (
                f"  {done.seconds:5.0f} s  epoch {done.epochs:5.2f}  step {done.steps:6,d}  "
                f"loss {done.last_loss:.3f} of {untrained:.3f}  "
                f"hit rate {hit_rate(words, contexts):.1%}  "
                f"{done.rows / max(done.seconds, 1e-9) / 1e3:,.0f} k rows/s"
            )
            if last:
                progress.finish(line)
                return done
            progress.show(line)
        if done.steps % COMMIT_STEPS == 0:
            store.commit()
        batch, following = following, next(batches)


def reached(done: Training, args: argparse.Namespace) -> bool:
    """Whether training has come to one of its limits."""
    return (
        (args.steps is not None and done.steps >= args.steps)
        or (args.epochs is not None and done.epochs >= args.epochs)
        or (args.seconds is not None and done.seconds >= args.seconds)
    )


def total(field: str, *tables: Any) -> int:
    """A counter of `Table.stats()`, summed over the tables."""
    return sum(table.stats()[field] for table in tables)


def hit_rate(*tables: Any) -> float:
    """Share of the pages asked for that were in memory."""
    hits, misses = total("hits", *tables), total("misses", *tables)
    return hits / max(hits + misses, 1)


def show_neighbours(table: Any, corpus: Corpus, wanted: list[str]) -> None:
    """Print the nearest neighbours of the wanted words, one word a line."""
    number = {word: i for i, word in enumerate(corpus.words)}
    known = [word for word in wanted if word in number]
    candidates = min(NEIGHBOUR_CANDIDATES, len(corpus.words))
    ids = np.array([number[word] for word in known], np.int64)
    found = nearest(table, ids, candidates, 7) if known else []
    width = max(map(len, wanted), default=0)
    print(f"Nearest neighbours among the {candidates:,} most frequent words:")
    for word, neighbours in zip(known, found, strict=True):
        print(f"  {word:{width}}  " + ", ".join(corpus.words[i] for _, i in neighbours))
    for word in wanted:
        if word not in number:
            print(f"  {word:{width}}  (not in the text)")


def same_rows(table: Any, read: Callable[[int, int], Any]) -> bool:
    """Whether `read(start, stop)` gives the rows of the table, compared block by block."""
    starts = range(0, table.rows, BLOCK_ROWS)
    return all(
        np.array_equal(table[i : min(i + BLOCK_ROWS, table.rows)], read(i, i + BLOCK_ROWS))
        for i in starts
    )


def export(table: Any, folder: Path) -> list[str]:
    """Write the table to .npy and .h5. Returns a line about each, with its size and time."""
    lines = []
    for target in ("words.npy", "words.h5:/words"):
        name = target.partition(":")[0]
        started = time.monotonic()
        table.export(str(folder / target), overwrite=True)
        size = (folder / name).stat().st_size
        lines.append(f"{name} {mb(size)} in {time.monotonic() - started:.1f} s")
    return lines


def check_exports(table: Any, folder: Path) -> str:
    """Compare every row of the exported files, as NumPy and h5py read them, with the table."""
    array = np.load(folder / "words.npy", mmap_mode="r")
    if array.shape != (table.rows, table.dim) or not same_rows(table, lambda a, b: array[a:b]):
        raise DemoError("words.npy differs from the table it was exported from")
    try:
        import h5py  # the only use of it; all else runs without
    except ImportError:
        return "words.npy equals the table (NumPy); words.h5 unchecked: h5py is not installed"
    with h5py.File(folder / "words.h5", "r") as file:
        data = file["words"]
        if data.shape != (table.rows, table.dim) or not same_rows(table, lambda a, b: data[a:b]):
            raise DemoError("words.h5 differs from the table it was exported from")
    return "every row equals the table, read by NumPy and by h5py"


def run(args: argparse.Namespace) -> None:
    """Read the text, check that there is room, demonstrate, tidy up."""
    began = time.monotonic()
    device = pick_device(args.device)
    corpus = read_corpus(args.text, min_count=args.min_count)
    vocabulary = len(corpus.words)
    if len(corpus.ids) < FEWEST_WORDS:
        raise DemoError(
            f"too few words: the text has {len(corpus.ids):,}, at least {FEWEST_WORDS:,} are needed"
        )
    print(
        f"Text: {mb(corpus.text_bytes)}, {len(corpus.ids):,} words, {vocabulary:,} distinct, "
        f"read in {time.monotonic() - began:.1f} s"
    )
    tables_bytes = vocabulary * args.dim * 4 * 2 * 2  # weight and Adagrad's sum, in two tables
    needed = 2 * tables_bytes + vocabulary * args.dim * 4 * 2  # with the log, and two exports
    free = shutil.disk_usage(nearest_existing(args.store)).free
    if free < needed:
        raise DemoError(f"{args.store}: {mb(needed)} are needed, {mb(free)} are free")

    earlier = find_earlier(args, corpus)
    if earlier is None:
        prepare_folder(args.store, OWN_FILES, args.overwrite)
        earlier = Earlier(args.store / "run.json", options_of(args, corpus))
        earlier.save()
    else:
        print(f"{args.store} has a run that did not end: going on from its last commit")
    demonstrate(args, corpus, device, tables_bytes, began, earlier)
    if args.keep:
        earlier.finished = True
        earlier.save()
    else:
        remove_files(args.store, OWN_FILES)
    if args.keep:
        print(f"Kept in {args.store}: the store tables/, vocabulary.txt, words.npy, words.h5")
    else:
        print(f"Removed {args.store} (--keep keeps it)")


@dataclass
class Earlier:
    """What is known of a run before its first step; kept in a file beside the store."""

    file: Path
    options: dict[str, Any]
    loss_before: float | None = None  # held out
    finished: bool = False

    def save(self) -> None:
        """Write the file, whole or not at all."""
        found = {"options": self.options, "loss": self.loss_before, "finished": self.finished}
        partial = self.file.with_name("run.json.tmp")
        partial.write_text(json.dumps(found) + "\n", encoding="utf-8")
        partial.replace(self.file)


def options_of(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """What decides the rows, but for how long they are trained."""
    names = (
        "dim",
        "min_count",
        "window",
        "negatives",
        "shared",
        "subsample",
        "batch",
        "lr",
        "seed",
    )
    text = hashlib.sha256("\n".join(corpus.words).encode())
    text.update(corpus.ids.tobytes())
    return {name: getattr(args, name) for name in names} | {"text": text.hexdigest()}


def find_earlier(args: argparse.Namespace, corpus: Corpus) -> Earlier | None:
    """The run in the folder that was interrupted, if it is the same as this one would be."""
    file = args.store / "run.json"
    if args.overwrite or not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if found["finished"]:
        return None
    here = options_of(args, corpus)
    for name, value in here.items():
        if found["options"].get(name) != value:
            raise DemoError(
                f"{args.store} holds an interrupted run with another --{name.replace('_', '-')}; "
                "go on with the same options, replace it with --overwrite, or choose another "
                "folder with --store"
            )
    return Earlier(file, here, found["loss"])


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def demonstrate(
    args: argparse.Namespace,
    corpus: Corpus,
    device: torch.device,
    tables_bytes: int,
    began: float,
    earlier: Earlier,
) -> None:
    """Train, commit, read back, export and check; `began` is when the run started (monotonic)."""
    vocabulary = len(corpus.words)
    with (args.store / "vocabulary.txt").open("w", encoding="utf-8") as file:
        for word, count in zip(corpus.words, corpus.counts, strict=True):
            file.write(f"{word} {count}\n")

    text, held_out = split_held_out(corpus.ids)
    keep = keep_probability(corpus.counts, args.subsample)
    noise = noise_distribution(corpus.counts)
    fixed = np.random.default_rng(0)  # the held-out words and negatives are the same in every run
    held_chunks = to_chunks(held_out, keep, fixed)
    if len(held_chunks) == 0:  # a short text: hold out all of them
        held_chunks = to_chunks(held_out, np.ones_like(keep), fixed)
    held_tokens = torch.from_numpy(held_chunks.astype(np.int64)).to(device)
    held_noise = torch.from_numpy(draw_noise(noise, HELD_OUT_NEGATIVES, fixed)).to(device)
    weights = window_weights(args.window, device)
    batch_chunks = max(1, args.batch // CHUNK)
    sampler = Sampler(text, keep, noise, batch_chunks, args.shared, args.seed, device)

    # What the process takes with no store open: the text, and steps of the training, of which some
    # take more than others.
    resettable = forget_peak_memory()
    for batch in itertools.islice(sampler.batches(), REHEARSED_STEPS):
        rehearse(batch, args.dim, weights, args.negatives)
    without_store = memory_of_process("VmHWM")
    resettable = forget_peak_memory() and resettable

    def held_out_now(words: Any, contexts: Any) -> float:
        return held_out_loss(words, contexts, held_tokens, held_noise, weights, args.negatives)

    place = args.store / "tables"
    on_gpu = "cuda" if device.type == "cuda" else None
    # A commit between the two tables' steps would be of no whole step.
    options: dict[str, Any] = {"autocommit": False, "log_limit": LOG_LIMIT}
    with em.open(place, memory=args.memory, device=on_gpu, **options) as store:
        adagrad = em.optim.Adagrad(lr=args.lr, eps=1e-10)
        # word2vec's start: small word rows and zero context rows, hence all scores are zero and
        # the loss begins at (1 + negatives) ln 2.
        small = em.init.Uniform(-0.5 / args.dim, 0.5 / args.dim)
        shape: dict[str, Any] = {"rows": vocabulary, "dim": args.dim, "dtype": "float32"}
        make: dict[str, dict[str, Any]] = {
            "words": {"init": small, "seed": args.seed},
            "contexts": {"init": em.init.Zeros(), "seed": args.seed + 1},
        }
        words, contexts = (
            store[name] if name in store else store.create(name, **shape, optimizer=adagrad, **how)
            for name, how in make.items()
        )
        times = tables_bytes / args.memory
        print(
            f"Store: two tables of {vocabulary:,} x {args.dim} float32 with Adagrad, "
            f"{mb(tables_bytes)}: {times:.1f} times its memory of {mib(args.memory)}"
        )
        if earlier.loss_before is None:
            earlier.loss_before = held_out_now(words, contexts)
            earlier.save()
        loss_before = earlier.loss_before
        where = "the GPU" if on_gpu else f"{torch.get_num_threads()} CPU threads"
        from_step = f", from step {words.step:,} on" if words.step else ""
        print(f"Training on {where}{from_step}; held-out loss {loss_before:.3f} before")
        progress = Progress(sys.stdout)
        done = train(store, words, contexts, sampler.batches(), weights, args, progress)
        hits = hit_rate(words, contexts)
        read = total("bytes_read", words, contexts)
        written = total("bytes_written", words, contexts)
        started = time.monotonic()
        store.commit()
        commit_seconds = time.monotonic() - started

    # All that follows reads what was committed, from the files.
    with em.open(place, memory=args.memory, mode="r", device=on_gpu) as store:
        words = store["words"]
        loss_after = held_out_now(words, store["contexts"])
        show_neighbours(words, corpus, args.words)
        exported = export(words, args.store)
        with_store = memory_of_process("VmHWM")  # before the checks map whole files
        checked = check_exports(words, args.store)

    untrained = (1 + args.negatives) * math.log(2)
    rate = done.rows / max(done.seconds, 1e-9) / 1e3
    if resettable:
        peak = (
            f"peak {mib(with_store)} resident, {mib(without_store)} without the store: "
            f"it added {mib(max(0, with_store - without_store))}"
        )
    else:
        peak = f"peak {mib(with_store)} resident (the kernel does not tell the store's part)"
    rows = {
        "text": f"{len(corpus.ids):,} words, {vocabulary:,} distinct",
        "tables": f"2 x {vocabulary:,} x {args.dim} float32 + Adagrad: {mb(tables_bytes)} of files",
        "memory": f"budget {mib(args.memory)}; the tables are {times:.1f} times larger",
        "": peak,
        "training": f"{done.epochs:.1f} epochs, {done.steps:,} steps, {done.seconds:.0f} s",
        "speed": f"{rate:,.0f} k distinct rows/s fetched and as many updated",
        "pages": f"{hits:.1%} found in memory; {mb(read)} read, {mb(written)} written",
        "loss": f"{done.last_loss:.3f} at the end, {untrained:.3f} = "
        f"(1 + {args.negatives}) ln 2 untrained",
        "held out": f"{loss_before:.3f} before, {loss_after:.3f} after",
        "commit": f"{commit_seconds:.2f} s",
        "export": "; ".join(exported),
        "check": checked,
        "in all": f"{time.monotonic() - began:.0f} s",
    }
    print("Summary")
    for name, value in rows.items():
        print(f"  {name:9} {value}")


# --- command line ---------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="word2vec.py",
        description="Train word vectors in tables much larger than the memory they are given.",
        epilog="Training ends at the first limit reached of --epochs, --seconds, --steps; "
        f"with none given, after {DEFAULT_EPOCHS} epochs or {DEFAULT_SECONDS:.0f} seconds. "
        "With --steps alone, a run on the CPU gives the same numbers each time.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=f"text to learn from, UTF-8, plain or gzip (default: {DICTIONARY})",
    )
    add(
        "--store",
        type=Path,
        default=Path("demo-store"),
        metavar="DIR",
        help="folder for the store and the exported files",
    )
    add("--keep", action="store_true", help="keep that folder when done")
    add("--overwrite", action="store_true", help="replace an earlier run in that folder")
    add("--memory", type=parse_size, default="64MiB", metavar="SIZE", help="budget of the store")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto: on a GPU if there is one",
    )
    add("--dim", type=at_least(1), default=128, help="numbers in a row")
    add("--min-count", type=at_least(1), default=1, help="leave out words rarer than this")
    add("--window", type=at_least(1), default=5, help="words to each side that count as context")
    add("--negatives", type=at_least(1), default=5, help="negatives for each pair")
    add(
        "--shared",
        type=at_least(1),
        default=256,
        help="negatives drawn for a batch, which its pairs share",
    )
    add(
        "--subsample",
        type=at_least(1e-12, float),
        default=1e-4,
        help="thin out words with a larger share of the text than this",
    )
    add("--batch", type=at_least(CHUNK), default=4096, help="words of text in a step")
    add("--lr", type=at_least(1e-12, float), default=0.05, help="learning rate of Adagrad")
    add(
        "--epochs",
        type=at_least(1e-9, float),
        default=argparse.SUPPRESS,
        help="passes over the text",
    )
    add(
        "--seconds",
        type=at_least(1e-9, float),
        default=argparse.SUPPRESS,
        help="seconds of training",
    )
    add("--steps", type=at_least(1), default=argparse.SUPPRESS, help="steps of training")
    add("--seed", type=at_least(0), default=1, help="of the rows and of the order of the text")
    add("--words", default=NEIGHBOUR_WORDS, metavar="A,B,...", help="show the neighbours of these")
    args = parser.parse_args(argv)
    args.text = getattr(args, "text", [DICTIONARY])
    limits = {name: getattr(args, name, None) for name in ("epochs", "seconds", "steps")}
    if not any(limits.values()):
        limits.update(epochs=DEFAULT_EPOCHS, seconds=DEFAULT_SECONDS)
    vars(args).update(limits)
    if args.window >= CHUNK:
        parser.error(f"argument --window: must be below {CHUNK}")
    args.words = [word.strip().lower() for word in args.words.split(",") if word.strip()]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        run(args)
    except (DemoError, em.Error, OSError, MemoryError) as error:
        print(f"word2vec.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("word2vec.py: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
