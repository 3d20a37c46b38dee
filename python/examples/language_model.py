#!/usr/bin/env python3
"""A small language model with a memory of hashed n-grams, in a table larger than the machine's RAM.

A recurrent network (GRU) reads a text byte by byte. Beside it, the last 3 and the last 5 bytes of
every place are hashed to rows of a table, and what is in them is added to what the network knows
before it says what comes next. The last 3 bytes say which page of the table it is, so that the rows
of a place come with one read:

    rows = memory(ids)                                        # (places, 2, dim) of a huge table
    logits = head(gru(bytes) + project(rows))

Rows that no n-gram has led to are zeros, and take neither disk nor memory. The same network is
trained without the memory on the same batches, and both are asked about text that neither has seen:
the difference is the memory's.

The text is what any Python has, the documentation strings of its standard library, or a file:

    python language_model.py --text novel.txt.gz --steps 2000 --rows 1e9

A run that is killed goes on with the same command, and ends with the same bits.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# PyTorch's threads otherwise spin while they wait, on cores that the store's threads need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import embermap as em
import numpy as np
import torch
from example_parts import (
    DemoError,
    Run,
    add_run_options,
    at_least,
    hash_ngrams,
    mib,
    open_text,
    pages_line,
    parse_size,
    pick_device,
    step_or_save,
    summary,
)
from numpy.typing import NDArray
from torch import nn

LENGTH = 64  # bytes of a piece of text that is read from start to end
ORDERS = (3, 5)  # bytes that a row stands for
PAGE = 4096  # bytes of a table's page
HELD_OUT_EVERY = 40  # one piece in so many is not trained on
EMBEDDED = 48  # numbers that stand for a byte
SHOW_STEPS = 50
SAVE_STEPS = 50  # between checkpoints: what a run that is killed has to do again


# --- text -----------------------------------------------------------------------------------------


def library_text(most: int) -> bytes:
    """Documentation strings of Python's standard library, about `most` bytes of them."""
    found: list[str] = []
    size = 0
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text:
                found.append(text)
                size += len(text)
        if size >= most:
            break
    return "\n\n".join(found).encode()[:most]


def read_text(path: Path | None, most: int) -> NDArray[np.uint8]:
    """The text as bytes, at most so many."""
    if path is None:
        text, name = library_text(most), "the standard library"
    else:
        name = str(path)
        try:
            with open_text(path) as file:
                text = file.read(most)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DemoError(f"{path}: {reason}") from error
    if len(text) < 2 * HELD_OUT_EVERY * LENGTH:
        raise DemoError(
            f"{name} has {len(text):,} bytes of text, at least {2 * HELD_OUT_EVERY * LENGTH:,} are "
            "needed"
        )
    return np.frombuffer(text, np.uint8)


def rows_of_places(text: NDArray[np.uint8], rows: int, rows_per_page: int) -> NDArray[np.int64]:
    """Rows of the n-grams that end at each byte, (len(text), orders).

    The shorter one decides the page and is the first of its rows, the longer one is among the rest.
    The first places have too few bytes: row 0.
    """
    short, long = ORDERS
    per_page = max(1, min(rows_per_page, rows))
    ids = np.zeros((len(text), 2), np.int64)
    ids[short - 1 :, 0] = hash_ngrams(text, short, rows // per_page) * per_page
    ids[long - 1 :, 1] = ids[long - 1 :, 0]
    if per_page > 1:
        ids[long - 1 :, 1] += 1 + hash_ngrams(text, long, per_page - 1)
    return ids


class Pieces:
    """A text cut into pieces of LENGTH bytes, with the rows of every place."""

    def __init__(
        self, text: NDArray[np.uint8], rows: int, rows_per_page: int, seed: int, device: Any
    ) -> None:
        self._seed, self._device = seed, device
        count = (len(text) - 1) // LENGTH
        self._text = text
        self._ids = rows_of_places(text, rows, rows_per_page)
        numbers = np.arange(count)
        held = numbers % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        self.train, self.held_out = numbers[~held], numbers[held]
        self._order: tuple[int, NDArray[np.int64]] | None = None  # of a pass

    def batch(self, number: int, size: int) -> tuple[torch.Tensor, ...]:
        """The batch of a step; the same each time."""
        lap, place = divmod(number, -(-len(self.train) // size))
        if self._order is None or self._order[0] != lap:
            rng = np.random.default_rng((self._seed, lap))
            self._order = (lap, rng.permutation(self.train))
        return self.of(self._order[1][place * size : (place + 1) * size])

    def of(self, numbers: NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """Bytes (n, LENGTH), those that follow them, and rows (n, LENGTH, orders)."""
        places = numbers[:, None] * LENGTH + np.arange(LENGTH)
        parts = (self._text[places], self._text[places + 1], self._ids[places])
        return tuple(torch.from_numpy(part.astype(np.int64)).to(self._device) for part in parts)


# --- model ----------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A GRU over bytes, with a memory beside it or without."""

    def __init__(self, hidden: int, memory: em.torch.Embedding | None) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, EMBEDDED)
        self.gru = nn.GRU(EMBEDDED, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 256)
        self.memory = memory
        if memory is not None:
            self.project = nn.Linear(len(ORDERS) * memory.embedding_dim, hidden, bias=False)

    def forward(self, text: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of what follows each byte, (n, LENGTH, 256)."""
        known, _ = self.gru(self.bytes(text))
        if self.memory is not None:
            known = known + self.project(self.memory(ids).flatten(2))
        found: torch.Tensor = self.head(known)
        return found

    def loss(self, text: torch.Tensor, following: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Mean of a byte, in nats."""
        return nn.functional.cross_entropy(self(text, ids).flatten(0, 1), following.flatten())


@torch.no_grad()
def perplexity(reader: Reader, pieces: Pieces, size: int) -> float:
    """Of a byte, over the text held out."""
    total, count = 0.0, 0
    for start in range(0, len(pieces.held_out), size):
        numbers = pieces.held_out[start : start + size]
        total += reader.loss(*pieces.of(numbers)).item() * len(numbers)
        count += len(numbers)
    return math.exp(total / count)


def by_frequency(text: NDArray[np.uint8]) -> float:
    """Perplexity of who knows how frequent each byte is, and nothing else."""
    share = np.bincount(text, minlength=256) / len(text)
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


# --- the run --------------------------------------------------------------------------------------


def machine_memory() -> int:
    """Bytes of RAM."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run(args: argparse.Namespace) -> bool:
    """Train with and without, compare. Returns whether the memory was of use."""
    device = pick_device(args.device)
    text = read_text(args.text, args.text_size)
    row_bytes = args.dim * 4 * 2  # weight and Adagrad's sum
    rows = args.rows if args.rows is not None else machine_memory() * 5 // 4 // row_bytes
    names = ("rows", "dim", "hidden", "steps", "batch", "lr", "dense_lr", "seed")
    options = {name: getattr(args, name) for name in names}
    options |= {"text": hashlib.sha256(text.tobytes()).hexdigest()}
    work = Run(args.store, options, args.overwrite)
    pieces = Pieces(text, rows, PAGE // row_bytes, args.seed, device)
    on_gpu = "cuda" if device.type == "cuda" else None
    # A commit that is not of `em.torch.save` would part memory and network.
    keep: dict[str, Any] = {"autocommit": False, "log_limit": "4GiB"}
    with em.open(work.tables, memory=args.memory, device=on_gpu, **keep) as store:
        torch.manual_seed(args.seed)
        if "memory" not in store:
            adagrad = em.optim.Adagrad(lr=args.lr, eps=1e-8)
            store.create("memory", rows=rows, dim=args.dim, dtype="float32", optimizer=adagrad)
        table = store["memory"]
        model = nn.ModuleDict(
            {
                "with": Reader(args.hidden, em.torch.Embedding(table, device=device)),
                "without": Reader(args.hidden, None),
            }
        ).to(device)
        sparse = em.torch.Optimizer(model["with"].memory)
        dense = torch.optim.Adam(
            [p for p in model.parameters() if p is not model["with"].memory.anchor],
            lr=args.dense_lr,
        )
        parts = {"sparse": sparse, "dense": dense}
        size = table.path.stat().st_size
        print(
            f"Text: {len(text):,} bytes, {len(pieces.train) * LENGTH:,} of them to train on\n"
            f"Memory: {rows:,} x {args.dim} float32 with Adagrad: {size / 1e9:,.1f} GB, "
            f"{size / machine_memory():.2f} times the machine's RAM and {size / args.memory:,.0f} "
            f"times the {mib(args.memory)} it is trained in"
        )
        step = 0

        def save() -> None:
            em.torch.save(model, work.checkpoint, parts, note={"step": step})

        if work.begun:
            step = (em.torch.load(model, work.checkpoint, parts).note or {})["step"]
        else:
            save()
            work.begin()
        first = step
        where = "the GPU" if on_gpu else f"{torch.get_num_threads()} CPU threads"
        print(f"Training on {where} from step {step:,} to {args.steps:,}", flush=True)
        began, losses = time.monotonic(), []
        following = pieces.batch(step, args.batch)
        while step < args.steps:
            batch, following = following, pieces.batch(step + 1, args.batch)
            table.prefetch(following[2])  # read while this batch computes
            loss, other = (reader.loss(*batch) for reader in model.values())
            (loss + other).backward()
            step_or_save(sparse.step, save)  # the table first: see there
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            losses.append(torch.stack([loss.detach(), other.detach()]))
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                save()
            if step % SHOW_STEPS == 0 or step == args.steps:
                known, unknown = torch.stack(losses).mean(0).exp().tolist()
                losses.clear()
                print(
                    f"  step {step:6,d}  perplexity of a byte {known:6.2f} with the memory, "
                    f"{unknown:6.2f} without",
                    flush=True,
                )
        seconds = time.monotonic() - began
        found = perplexity(model["with"], pieces, args.batch)
        without = perplexity(model["without"], pieces, args.batch)
        speed = (step - first) * args.batch * LENGTH / max(seconds, 1e-9)
        disk = table.path.stat().st_blocks * 512
        summary(
            {
                "perplexity": f"{found:.2f} of a byte held out with the memory, {without:.2f} "
                f"without; {by_frequency(text):.2f} by the frequency of bytes alone",
                "training": f"{step - first:,} steps of {args.batch * LENGTH:,} bytes in "
                f"{seconds:.0f} s, {speed:,.0f} bytes/s",
                "disk": f"{disk / 1e6:,.0f} MB of {size / 1e9:,.1f} GB: what has been used",
                "pages": pages_line(table),
            }
        )
    work.end(args.keep)
    return found < without


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="language_model.py",
        description="Train a language model with a memory of n-grams larger than RAM.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_run_options(parser, store="language-store", memory="32MiB")
    add = parser.add_argument
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to learn from, plain or gzip, instead of documentation strings of Python's "
        "standard library",
    )
    add("--text-size", type=parse_size, default="1MB", metavar="SIZE", help="of it that is used")
    add(
        "--rows",
        type=lambda text: int(at_least(1, float)(text)),
        help="of the memory, also 1e9; by default as many as make it 1.25 times the RAM",
    )
    add("--dim", type=at_least(1), default=16, help="numbers in a row")
    add("--hidden", type=at_least(1), default=128, help="numbers in the state of the GRU")
    add("--steps", type=at_least(1), default=300, help="steps of training")
    add("--batch", type=at_least(1), default=64, help=f"pieces of {LENGTH} bytes in a step")
    add("--lr", type=at_least(1e-12, float), default=0.1, help="learning rate of the memory")
    add("--dense-lr", type=at_least(1e-12, float), default=4e-3, help="and of the network")
    add("--save-every", type=at_least(1), default=SAVE_STEPS, help="steps between checkpoints")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        if not run(args):
            print("language_model.py: error: the memory was of no use", file=sys.stderr)
            return 1
    except (DemoError, em.Error, OSError, MemoryError) as error:
        print(f"language_model.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "language_model.py: interrupted; the same command goes on from there", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
