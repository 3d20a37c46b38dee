#!/usr/bin/env python3
"""A recommender in the manner of DLRM: many tables, bags of ids, and a small dense network.

Clicks are made up, with a structure that can be learned: every item, user and word of a query
belongs to one of 16 topics that the model is not told; a user's history is mostly of the user's
topic; a click is likely where the topics of user, query and item agree, in a good shop, and by
two of the 13 numbers that come with an impression. Ids are drawn with a long tail, from tables
much larger than the memory they get:

    tables = em.torch.EmbeddingCollection({
        "user": users, "item": items, "shop": shops, "city": cities,
        "history": em.torch.EmbeddingBag(items, mode="mean"),     # the table of items once more
        "query": em.torch.EmbeddingBag(words, mode="sum"),
    })
    rows = tables({"user": ids, "history": (flat_ids, offsets), ...})

The rows' dot products with each other and with the numbers' vector, and the vectors themselves, go
through a network to one score. Tables have row-wise Adagrad, one number of state a row, the network
has Adam. `em.torch.save` keeps both together every 50 steps, so a run that is killed goes on with
the same command, and ends with the same bits.

    python recommender.py --steps 5000 --memory 128MiB
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    mib,
    pages_line,
    pick_device,
    summary,
)
from numpy.typing import NDArray
from torch import nn

ROWS = {"users": 2_000_000, "items": 500_000, "words": 100_000, "shops": 20_000, "cities": 2_000}
TOPICS = 16
NUMBERS = 13  # that come with an impression
HISTORY = 12  # items of a user's at most
WORDS = 4  # of a query at most
# Between checkpoints: what a run that is killed has to do again. Half of the redo log's index,
# which takes an eighth of the memory at most, may be of what no commit has: with 64 MiB, 40,000
# pages.
SAVE_STEPS = 50
SHOW_STEPS = 100
HELD_OUT_BATCHES = 8

Ids = NDArray[np.int64]


# --- clicks ---------------------------------------------------------------------------------------


def long_tail(rng: np.random.Generator, rows: int, count: Any) -> Ids:
    """Ids in [0, rows), the chance of each falling as one over its number."""
    return np.minimum(np.exp(rng.random(count) * np.log(rows + 1)).astype(np.int64), rows) - 1


def of_topic(ids: Ids, topic: Ids, rows: int) -> Ids:
    """The ids moved to others nearby that are of these topics: an id's topic is id % TOPICS."""
    moved = ids - ids % TOPICS + topic
    return np.where(moved < rows, moved, moved - TOPICS)


def quality(ids: Ids, seed: int) -> NDArray[np.float64]:
    """A number for each id, in [-1, 1), always the same."""
    mixed = (ids.astype(np.uint64) + np.uint64(seed + 1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(11)).astype(np.float64) / 2**52 - 1


@dataclass(frozen=True)
class Clicks:
    """Impressions, and whether each was clicked."""

    features: dict[str, Any]  # as EmbeddingCollection takes them
    numbers: torch.Tensor  # (n, NUMBERS) float32
    clicked: torch.Tensor  # (n,) float32, 0 or 1
    chance: NDArray[np.float64]  # (n,) what the clicks were drawn with

    @classmethod
    def draw(cls, seed: tuple[int, ...], count: int, rows: dict[str, int], device: Any) -> Clicks:
        """`count` impressions; the same for the same seed."""
        rng = np.random.default_rng(seed)
        user = long_tail(rng, rows["users"], count)
        item = long_tail(rng, rows["items"], count)
        shop = long_tail(rng, rows["shops"], count)
        city = long_tail(rng, rows["cities"], count)
        taste = (quality(user, 1) * 0.5 + 0.5) * TOPICS // 1
        wanted = rng.integers(0, TOPICS, count)
        half = rng.random(count) < 0.5  # of the impressions are of what the user likes
        item = np.where(half, of_topic(item, taste.astype(np.int64), rows["items"]), item)

        def bags(table: str, most: int, topic: Ids, share: float) -> tuple[Ids, Ids]:
            lengths = rng.integers(1, most + 1, count)
            owner = np.repeat(np.arange(count), lengths)
            ids = long_tail(rng, rows[table], len(owner))
            theirs = of_topic(ids, topic[owner], rows[table])
            ids = np.where(rng.random(len(owner)) < share, theirs, ids)
            return ids, np.cumsum(lengths) - lengths

        history = bags("items", HISTORY, taste.astype(np.int64), 0.8)
        query = bags("words", WORDS, wanted, 0.9)
        numbers = rng.normal(size=(count, NUMBERS)).astype(np.float32)
        score = (
            2.2 * (item % TOPICS == taste)
            + 2.2 * (item % TOPICS == wanted)
            + 0.8 * quality(shop, 2)
            + 0.4 * quality(city, 3)
            + 0.5 * numbers[:, 0]
            - 0.5 * numbers[:, 1]
            - 2.2
        )
        chance = 1 / (1 + np.exp(-score))
        clicked = rng.random(count) < chance

        def sent(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        features = {
            "user": sent(user),
            "item": sent(item),
            "shop": sent(shop),
            "city": sent(city),
            "history": (sent(history[0]), sent(history[1])),
            "query": (sent(query[0]), sent(query[1])),
        }
        return cls(features, sent(numbers), sent(clicked.astype(np.float32)), chance)


def area_under_curve(scores: NDArray[Any], clicked: NDArray[Any]) -> float:
    """Chance that a click has a higher score than what was not clicked; equal scores count half."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2  # mean rank of equal scores, from 1
    ranks = middle[place.reshape(-1)]
    yes = clicked.astype(bool)
    ones, zeros = int(yes.sum()), int((~yes).sum())
    if ones == 0 or zeros == 0:
        raise DemoError("clicks of one kind only have no area under a curve")
    return float((ranks[yes].sum() - ones * (ones + 1) / 2) / (ones * zeros))


# --- model ----------------------------------------------------------------------------------------


class Recommender(nn.Module):
    """Vectors of all features and of the numbers, their dot products, and a network over both."""

    def __init__(self, tables: em.torch.EmbeddingCollection, dim: int, device: Any) -> None:
        super().__init__()
        self.tables = tables
        vectors = len(tables) + 1
        pairs = vectors * (vectors - 1) // 2
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim))
        self.top = nn.Sequential(nn.Linear(vectors * dim + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.bottom.to(device)
        self.top.to(device)
        upper = torch.triu_indices(vectors, vectors, 1)
        self.register_buffer("upper", upper.to(device), persistent=False)

    def dense(self) -> list[nn.Parameter]:
        """The parameters that are not rows."""
        return [*self.bottom.parameters(), *self.top.parameters()]

    def forward(self, features: dict[str, Any], numbers: torch.Tensor) -> torch.Tensor:
        """Score of each impression, (n,): the logarithm of the odds of a click."""
        rows = self.tables(features)
        vectors = torch.stack([self.bottom(numbers), *rows.values()], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.upper[0], self.upper[1]]
        found: torch.Tensor = self.top(torch.cat([vectors.flatten(1), products], 1)).squeeze(1)
        return found


def make_tables(store: Any, rows: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """The tables of the store, made if they are not there."""
    adagrad = em.optim.RowWiseAdagrad(lr=args.lr, eps=1e-8)
    made = {}
    for number, (name, count) in enumerate(rows.items()):
        if name in store:
            made[name] = store[name]
            continue
        made[name] = store.create(
            name,
            rows=count,
            dim=args.dim,
            dtype="float32",
            optimizer=adagrad,
            init=em.init.Normal(0, args.dim**-0.5),
            seed=args.seed + number,
        )
    return made


@torch.no_grad()
def evaluate(
    model: Recommender, rows: dict[str, int], args: argparse.Namespace, device: Any
) -> tuple[float, float]:
    """AUC of clicks that are not trained on: the model's, and of the chances they were drawn by."""
    scores, clicked, chances = [], [], []
    for number in range(HELD_OUT_BATCHES):
        batch = Clicks.draw((args.seed, 1, number), args.batch, rows, device)
        scores.append(model(batch.features, batch.numbers).cpu().numpy())
        clicked.append(batch.clicked.cpu().numpy())
        chances.append(batch.chance)
    truth = np.concatenate(clicked)
    return (
        area_under_curve(np.concatenate(scores), truth),
        area_under_curve(np.concatenate(chances), truth),
    )


# --- the run --------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> bool:
    """Train and show what was learned. Returns whether anything was."""
    device = pick_device(args.device)
    rows = {name: max(TOPICS, int(count * args.scale)) for name, count in ROWS.items()}
    names = ("steps", "batch", "dim", "lr", "dense_lr", "scale", "seed")
    work = Run(args.store, {name: getattr(args, name) for name in names}, args.overwrite)
    on_gpu = "cuda" if device.type == "cuda" else None
    # A commit that is not of `em.torch.save` would part tables and network.
    options: dict[str, Any] = {"autocommit": False, "log_limit": "4GiB"}
    with em.open(work.tables, memory=args.memory, device=on_gpu, **options) as store:
        torch.manual_seed(args.seed)
        tables = make_tables(store, rows, args)
        collection = em.torch.EmbeddingCollection(
            {
                "user": tables["users"],
                "item": tables["items"],
                "shop": tables["shops"],
                "city": tables["cities"],
                "history": em.torch.EmbeddingBag(tables["items"], mode="mean"),
                "query": em.torch.EmbeddingBag(tables["words"], mode="sum"),
            }
        )
        model = Recommender(collection, args.dim, device)
        sparse = em.torch.Optimizer(collection)
        dense = torch.optim.Adam(model.dense(), lr=args.dense_lr)
        parts = {"sparse": sparse, "dense": dense}
        size = sum(table.path.stat().st_size for table in tables.values())
        print(
            f"Tables: {', '.join(f'{count:,} {name}' for name, count in rows.items())}, "
            f"x {args.dim} float32 with row-wise Adagrad: {mib(size)}, "
            f"{size / args.memory:.1f} times the memory of {mib(args.memory)}"
        )
        if work.begun:
            note = em.torch.load(model, work.checkpoint, parts).note or {}
        else:
            note = {"step": 0, "before": evaluate(model, rows, args, device)[0]}
            em.torch.save(model, work.checkpoint, parts, note=note)
            work.begin()
        step = first = note["step"]
        where = "the GPU" if on_gpu else f"{torch.get_num_threads()} CPU threads"
        print(f"Training on {where} from step {step:,} to {args.steps:,}", flush=True)
        began, losses = time.monotonic(), []
        following = Clicks.draw((args.seed, 0, step), args.batch, rows, device)
        while step < args.steps:
            batch = following
            scores = model(batch.features, batch.numbers)
            following = Clicks.draw((args.seed, 0, step + 1), args.batch, rows, device)
            collection.prefetch(following.features)  # read while this batch computes
            loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.clicked)
            loss.backward()
            sparse.step()
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                note["step"] = step
                em.torch.save(model, work.checkpoint, parts, note=note)
            if step % SHOW_STEPS == 0 or step == args.steps:
                mean = torch.stack(losses).mean().item()
                losses.clear()
                print(f"  step {step:6,d}  loss {mean:.4f}", flush=True)
        seconds = time.monotonic() - began
        found, ceiling = evaluate(model, rows, args, device)
        speed = (step - first) * args.batch / max(seconds, 1e-9)
        summary(
            {
                "AUC": f"{found:.3f} of clicks not trained on; {note['before']:.3f} before, "
                f"0.500 by chance, {ceiling:.3f} by the chances the clicks were drawn with",
                "training": f"{step - first:,} steps of {args.batch:,} in {seconds:.0f} s, "
                f"{speed:,.0f} impressions/s",
                "pages": pages_line(*tables.values()),
            }
        )
    work.end(args.keep)
    return found > max(0.55, note["before"] + 0.02)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="recommender.py",
        description="Train a recommender of many tables and bags, out of core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_run_options(parser, store="recommender-store", memory="64MiB")
    add = parser.add_argument
    add("--steps", type=at_least(1), default=1500, help="steps of training")
    add("--batch", type=at_least(16), default=1024, help="impressions in a step")
    add("--dim", type=at_least(1), default=16, help="numbers in a row")
    add("--scale", type=at_least(1e-6, float), default=1.0, help="of the numbers of rows")
    add("--lr", type=at_least(1e-12, float), default=0.1, help="learning rate of the tables")
    add("--dense-lr", type=at_least(1e-12, float), default=2e-3, help="and of the network")
    add("--save-every", type=at_least(1), default=SAVE_STEPS, help="steps between checkpoints")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        if not run(args):
            print("recommender.py: error: nothing was learned", file=sys.stderr)
            return 1
    except em.LogFullError as error:
        print(f"recommender.py: error: {error}; see --save-every", file=sys.stderr)
        return 1
    except (DemoError, em.Error, OSError, MemoryError) as error:
        print(f"recommender.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("recommender.py: interrupted; the same command goes on from there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
