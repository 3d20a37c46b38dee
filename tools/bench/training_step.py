#!/usr/bin/env python3
"""A step of word2vec on the CPU: tables of embermap beside torch's sparse nn.Embedding.

Two tables, words and contexts, as in python/examples/word2vec.py: a step looks up 4,096 words of
running text in one, the same and 256 drawn at random in the other, and takes the skip-gram loss,
its gradients, and a step of the optimizer. Both sides have the same ids, rows and optimizer, and
are compared before anything is timed. Three ways are timed in turn, a few steps each, so that what
else the machine does meanwhile reaches all of them:

    torch   nn.Embedding(sparse=True) and torch.optim's optimizer
    whole   em.torch.Embedding and em.torch.Optimizer, tables in memory as a whole
    frames  the same, with less memory than the tables take: out of core. The ids of the steps are
            those of rows that fit, so that all pages are in memory

It prints the median time of a step of each way, and the median of the quotients of neighbouring
ones. `--overhead` times calls of the modules with one id instead: what Python costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
import torch
from torch import nn
from torch.nn import functional

CHUNK = 64  # words of text that are scored against each other
SHARED = 256  # negatives of a batch
NEGATIVES = 5
STEPS_IN_TURN = 5
WAYS = ("torch", "whole", "frames")

# By name, with an eps so large that gradients next to 0, whose last bits differ, do not change the
# step: the optimizer of a table, and torch's of sparse gradients.
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (em.optim.SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    "adagrad": (
        em.optim.Adagrad(lr=0.05, eps=1e-6),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-6),
    ),
    "sparse_adam": (
        em.optim.SparseAdam(lr=1e-3, eps=1e-5),
        lambda p: torch.optim.SparseAdam(p, lr=1e-3, eps=1e-5),
    ),
}


class Way:
    """Two modules and the optimizers that step them."""

    def __init__(self, words: nn.Module, contexts: nn.Module, optimizer: Any) -> None:
        self.words, self.contexts, self.optimizer = words, contexts, optimizer

    def step(self, tokens: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """tokens (chunks, CHUNK), ids (chunks * CHUNK + SHARED,)."""
        centre = self.words(tokens)
        rows = self.contexts(ids)
        count = tokens.numel()
        loss = skip_gram_loss(centre, rows[:count].view_as(centre), rows[count:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def skip_gram_loss(centre: Any, context: Any, noise: Any) -> torch.Tensor:
    """Of all pairs of words of a chunk, and negatives that the batch shares."""
    pairs = torch.bmm(centre, context.transpose(1, 2))
    wrong = centre.flatten(0, 1) @ noise.T
    loss: torch.Tensor = (
        functional.softplus(-pairs).mean() + functional.softplus(wrong).mean() * NEGATIVES
    )
    return loss


def batches(rows: int, chunks: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Text with a long tail, the same each time: ids below `rows`."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        drawn = np.exp(rng.random(chunks * CHUNK + SHARED) * np.log(rows + 1.0))
        ids = np.minimum(drawn.astype(np.int64) - 1, rows - 1)
        found.append(
            (torch.from_numpy(ids[: chunks * CHUNK].reshape(chunks, CHUNK)), torch.from_numpy(ids))
        )
    return found


def make_ways(args: argparse.Namespace, folder: Path, kind: str) -> tuple[dict[str, Way], Any]:
    """The three ways, with the same rows, and a function that closes what they have open."""
    ours, theirs = OPTIMIZERS[kind]
    start = [
        torch.from_numpy(np.random.default_rng(k).normal(0, 0.05, (args.rows, args.dim))).float()
        for k in (1, 2)
    ]
    dense = [
        nn.Embedding.from_pretrained(rows.clone(), freeze=False, sparse=True) for rows in start
    ]
    weights = [parameter for module in dense for parameter in module.parameters()]
    ways = {"torch": Way(dense[0], dense[1], theirs(weights))}
    opened = []
    states = {"sgd": 1, "adagrad": 2, "sparse_adam": 3}[kind]
    size = 2 * args.rows * args.dim * 4 * states
    for name, memory in (("whole", 3 * size + (64 << 20)), ("frames", int(size * 0.75))):
        store = em.open(folder / f"{kind}-{name}", memory=memory)
        opened.append(store)
        modules = [
            em.torch.Embedding(store.from_array(table, rows.numpy(), optimizer=ours))
            for table, rows in zip(("words", "contexts"), start, strict=True)
        ]
        store.commit()
        ways[name] = Way(modules[0], modules[1], em.torch.Optimizer(modules))

    def close() -> None:
        for store in opened:
            store.abandon()

    return ways, close


def check(ways: dict[str, Way], some: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """After the same steps all ways have the same rows. SystemExit if not."""
    for tokens, ids in some:
        losses = {name: way.step(tokens, ids).item() for name, way in ways.items()}
        spread = max(losses.values()) - min(losses.values())
        if not spread <= 1e-4 * abs(losses["torch"]):
            sys.exit(f"training_step.py: error: losses differ: {losses}")
    ids = torch.unique(torch.cat([ids for _, ids in some]))
    expected = ways["torch"].contexts.weight.detach()[ids]
    for name in WAYS[1:]:
        found = ways[name].contexts.weight[ids]
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
            most = (found - expected).abs().max().item()
            sys.exit(f"training_step.py: error: rows of {name!r} differ from torch's by {most:.1e}")


def measure(args: argparse.Namespace, folder: Path, kind: str) -> dict[str, Any]:
    """Times of a step of each way, with one optimizer."""
    ways, close = make_ways(args, folder, kind)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    try:
        # Rows in use fit in the frames of the way that has the least.
        hot = batches(args.rows // 4, args.chunks, args.batches)
        check(ways, hot)
        for way in ways.values():
            for tokens, ids in hot:
                way.step(tokens, ids)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        misses = [way.words.table.stats()["misses"] for way in (ways["whole"], ways["frames"])]
        gc.collect()
        gc.disable()
        for turn in range(args.turns):
            order = WAYS if turn % 2 == 0 else WAYS[::-1]
            for name in order:
                began = clock()
                for k in range(STEPS_IN_TURN):
                    ways[name].step(*hot[(turn * STEPS_IN_TURN + k) % len(hot)])
                seconds[name].append((clock() - began) / STEPS_IN_TURN)
        gc.enable()
        after = [way.words.table.stats()["misses"] for way in (ways["whole"], ways["frames"])]
        return {
            "optimizer": kind,
            "ms": {name: statistics.median(times) * 1e3 for name, times in seconds.items()},
            "ratio": {
                name: statistics.median(
                    ours / theirs
                    for ours, theirs in zip(seconds[name], seconds["torch"], strict=True)
                )
                for name in WAYS[1:]
            },
            "misses": after[1] - misses[1] + after[0] - misses[0],
        }
    finally:
        close()


def overhead(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Microseconds of calls with one id, the fastest of many turns."""
    ways, close = make_ways(args, folder, "adagrad")
    try:
        ids = torch.tensor([3])
        found = {}
        for name in ("torch", "whole"):
            module = ways[name].words

            def with_gradient(module: Any = module) -> None:
                module(ids)

            def without(module: Any = module) -> None:
                with torch.no_grad():
                    module(ids)

            for what, call in (("with gradient", with_gradient), ("without", without)):
                best = min(timed(call, 200) for _ in range(args.turns * 5))
                found[f"{name}, {what}"] = best * 1e6
        return found
    finally:
        close()


def timed(call: Callable[[], None], count: int) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=int, default=217_000, help="of each table")
    add("--dim", type=int, default=128, help="numbers in a row")
    add("--chunks", type=int, default=64, help=f"of {CHUNK} words, in a step")
    add("--batches", type=int, default=10, help="that are used again and again")
    add("--turns", type=int, default=20, help=f"of {STEPS_IN_TURN} steps of each way")
    add("--optimizer", choices=tuple(OPTIMIZERS), action="append", help="only these")
    add(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: of all threads of the process, where other programs keep the machine busy",
    )
    add("--threads", type=int, help="of torch; by default its own choice")
    add("--overhead", action="store_true", help="time calls of one id instead")
    add("--store", type=Path, help="folder to make the tables in; by default a temporary one")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.store) as name:
        folder = Path(name)
        if args.overhead:
            found: Any = overhead(args, folder)
            for what, microseconds in found.items():
                print(f"{what:24} {microseconds:6.1f} us")
        else:
            found = []
            print("a step in ms, and by torch's: below 1 is faster")
            for kind in args.optimizer or OPTIMIZERS:
                figures = measure(args, folder, kind)
                found.append(figures)
                times = "  ".join(f"{way} {ms:7.2f}" for way, ms in figures["ms"].items())
                ratios = "  ".join(f"{way} {r:.2f}" for way, r in figures["ratio"].items())
                print(f"{kind:12} {times}   {ratios}   pages read {figures['misses']}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
