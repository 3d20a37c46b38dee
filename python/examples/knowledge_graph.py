#!/usr/bin/env python3
"""Embeddings of a knowledge graph, out of core: TransE, DistMult or ComplEx.

The graph is made up: entities live in the cells of a square grid, which the model is not told, and
a relation leads from an entity to some of those that lie a number of cells away. The table of
entities with Adagrad's state is larger than the memory it gets; relations are few, and a dense
`nn.Embedding` beside it. Each triple of a batch is scored against heads and tails drawn at random,
which the batch shares:

    rows = entities(torch.cat([heads, tails, negatives]))
    loss = ...                                  # the true triple against the negatives, both ways
    loss.backward()
    sparse.step(); dense.step()

What was learned is the filtered mean reciprocal rank (MRR) of triples that were held out: the true
tail, and head, among all entities, without those that would be true as well. The table is read in
blocks for that. A run that is killed goes on with the same command and ends with the same bits.

    python knowledge_graph.py --model distmult --entities 200000 --memory 48MiB --steps 5000
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
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
    step_or_save,
    summary,
)
from numpy.typing import NDArray
from torch import nn

CELL = 10  # entities in a cell of the grid
HELD_OUT = 400  # triples
BLOCK_ROWS = 8_192  # of the table of entities, scored at once
SHOW_STEPS = 200
SAVE_STEPS = 100  # between checkpoints: what a run that is killed has to do again

Ids = NDArray[np.int64]


# --- the graph ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """Triples (head, relation, tail), shape (n, 3), of a graph that has them all."""

    entities: int
    relations: int
    train: Ids
    held_out: Ids

    @classmethod
    def make(cls, entities: int, relations: int, links: int, seed: int) -> Graph:
        """`links` triples of each entity, about, less at the borders of the grid."""
        rng = np.random.default_rng((seed, 0))
        side = max(2, round((entities / CELL) ** 0.5))
        # Entities of a cell are not neighbours in the table: who is where is for the model to find.
        order = rng.permutation(entities)
        cell = np.empty(entities, np.int64)
        cell[order] = np.arange(entities) * side**2 // entities
        first = np.searchsorted(cell[order], np.arange(side**2 + 1))
        shifts = [(dx, dy) for dx in range(-3, 4) for dy in range(-3, 4) if (dx, dy) > (0, 0)]
        chosen = rng.choice(len(shifts), min(relations, len(shifts)), replace=False)
        found = []
        for relation, number in enumerate(chosen):
            dx, dy = shifts[number]
            heads = np.repeat(rng.permutation(entities), -(-links // len(chosen)))
            x, y = cell[heads] % side + dx, cell[heads] // side + dy
            inside = (x >= 0) & (x < side) & (y >= 0) & (y < side)
            heads, target = heads[inside], (y * side + x)[inside]
            size = first[target + 1] - first[target]
            place = (rng.random(len(heads)) * size).astype(np.int64)
            tails = order[first[target] + place]
            # As one number each: each of them once is found fastest so.
            keys = (heads * len(chosen) + relation) * entities + tails
            found.append(np.unique(keys[size > 0]))
        keys = np.concatenate(found)
        rng.shuffle(keys)
        pairs, tails = np.divmod(keys, entities)
        triples = np.stack([*np.divmod(pairs, len(chosen)), tails], 1)
        held = min(HELD_OUT, len(triples) // 10)
        if held < 10:
            raise DemoError(f"a graph of {len(triples)} triples is too small: see --entities")
        return cls(entities, len(chosen), triples[held:], triples[:held])

    def others(self, given: int, wanted: int) -> Ids:
        """What is true beside the held-out triples: (row of held_out, entity), shape (n, 2).

        Of the triples that have the same entity in column `given` and the same relation, the
        entities in column `wanted`, but for the one that is asked for.
        """
        every = np.concatenate([self.train, self.held_out])
        keys = every[:, given] * self.relations + every[:, 1]
        order = np.argsort(keys, kind="stable")
        asked = self.held_out[:, given] * self.relations + self.held_out[:, 1]
        first, last = (np.searchsorted(keys[order], asked, side) for side in ("left", "right"))
        rows = np.repeat(np.arange(len(asked)), last - first)
        places = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        found = np.stack([rows, every[order[places], wanted]], 1)
        return found[found[:, 1] != self.held_out[rows, wanted]]


@dataclass(frozen=True)
class Batch:
    """What a step works on."""

    triples: torch.Tensor  # (n, 3) int64
    negatives: torch.Tensor  # (k,) int64, entities drawn at random

    @property
    def ids(self) -> torch.Tensor:
        """Rows of the entities: heads, tails, negatives."""
        return torch.cat([self.triples[:, 0], self.triples[:, 2], self.negatives])


class Batches:
    """Batches by number, pass after pass over the triples in an order of its own; the same each
    time."""

    def __init__(self, graph: Graph, size: int, negatives: int, seed: int, device: Any) -> None:
        self._graph, self._size, self._negatives = graph, size, negatives
        self._seed, self._device = seed, device
        self.per_pass = -(-len(graph.train) // size)
        self._order: tuple[int, Ids] | None = None  # of a pass

    def __getitem__(self, number: int) -> Batch:
        lap, place = divmod(number, self.per_pass)
        if self._order is None or self._order[0] != lap:
            rng = np.random.default_rng((self._seed, 1, lap))
            self._order = (lap, rng.permutation(len(self._graph.train)))
        chosen = self._order[1][place * self._size : (place + 1) * self._size]
        rng = np.random.default_rng((self._seed, 2, number))
        negatives = rng.integers(0, self._graph.entities, self._negatives)
        return Batch(
            torch.from_numpy(self._graph.train[chosen]).to(self._device),
            torch.from_numpy(negatives).to(self._device),
        )


# --- models ---------------------------------------------------------------------------------------
#
# Each makes a query of an entity and a relation, whose score with a candidate is what an entity is
# ranked by: a dot product, or a distance. (n, dim), (n, dim) -> (n, dim).

Query = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _complex_product(a: torch.Tensor, b: torch.Tensor, conjugate: bool) -> torch.Tensor:
    """Of rows whose first half is real and whose second half is imaginary; of a and b's
    conjugate."""
    real, imaginary = a.chunk(2, -1)
    other_real, other_imaginary = b.chunk(2, -1)
    if conjugate:
        other_imaginary = -other_imaginary
    return torch.cat(
        [
            real * other_real - imaginary * other_imaginary,
            real * other_imaginary + imaginary * other_real,
        ],
        -1,
    )


@dataclass(frozen=True)
class Kind:
    """A way to score triples."""

    name: str
    tail_query: Query  # of heads and relations
    head_query: Query  # of tails and relations
    distance: bool  # scores are negative distances, else dot products

    def scores(self, query: torch.Tensor, candidates: torch.Tensor, margin: float) -> torch.Tensor:
        """Of each query (n, dim) with each candidate (k, dim): (n, k)."""
        if self.distance:
            return margin - torch.cdist(query, candidates)
        return query @ candidates.T

    def own(self, query: torch.Tensor, candidates: torch.Tensor, margin: float) -> torch.Tensor:
        """Of each query with its own candidate (n, dim): (n,)."""
        if self.distance:
            return margin - torch.linalg.vector_norm(query - candidates, dim=1)
        return (query * candidates).sum(1)


KINDS = {
    "transe": Kind("TransE", lambda h, r: h + r, lambda t, r: t - r, True),
    "distmult": Kind("DistMult", lambda h, r: h * r, lambda t, r: t * r, False),
    "complex": Kind(
        "ComplEx",
        lambda h, r: _complex_product(h, r, False),
        lambda t, r: _complex_product(t, r, True),
        False,
    ),
}


class KnowledgeGraph(nn.Module):
    """Rows of entities in a table, of relations in a parameter."""

    def __init__(self, kind: Kind, table: Any, relations: int, margin: float, device: Any) -> None:
        super().__init__()
        self.kind, self.margin = kind, margin
        self.entities = em.torch.Embedding(table)
        self.relations = nn.Embedding(relations, table.dim)
        if kind.distance:
            nn.init.normal_(self.relations.weight, 0, 0.1)
        else:  # as one: scores begin as those of entities alike
            nn.init.normal_(self.relations.weight, 1, 0.1)
        self.relations.to(device)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Mean loss of the triples: true ones against the negatives, as heads and as tails."""
        count = len(batch.triples)
        rows = self.entities(batch.ids)
        heads, tails, negatives = rows[:count], rows[count : 2 * count], rows[2 * count :]
        relations = self.relations(batch.triples[:, 1])
        total = rows.new_zeros(())
        for query, true in (
            (self.kind.tail_query(heads, relations), tails),
            (self.kind.head_query(tails, relations), heads),
        ):
            right = self.kind.own(query, true, self.margin)
            wrong = self.kind.scores(query, negatives, self.margin)
            # Negatives that score high count most, as in self-adversarial sampling.
            weight = torch.softmax(wrong.detach(), 1)
            total = total + nn.functional.softplus(-right).mean()
            total = total + (weight * nn.functional.softplus(wrong)).sum(1).mean()
        return total / 2


# --- ranks ----------------------------------------------------------------------------------------


@torch.no_grad()
def filtered_mrr(model: KnowledgeGraph, graph: Graph, device: Any) -> float:
    """Mean of 1 / rank of the true tails and heads of the held-out triples, others left out.

    The rank of one that scores as others do is the middle of theirs.
    """
    triples = torch.from_numpy(graph.held_out).to(device)
    relations = model.relations(triples[:, 1])
    table = model.entities.table
    reciprocal = 0.0
    for given, wanted, make in (
        (0, 2, model.kind.tail_query),
        (2, 0, model.kind.head_query),
    ):
        query = make(table.gather(triples[:, given]), relations)
        true = triples[:, wanted]
        right = model.kind.own(query, table.gather(true), model.margin)
        left_out = graph.others(given, wanted)
        above = torch.zeros(len(triples), device=device)
        level = torch.zeros(len(triples), device=device)
        for start in range(0, table.rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, table.rows)
            block = table.gather(torch.arange(start, stop, device=device))
            scores = model.kind.scores(query, block, model.margin)
            inside = (left_out[:, 1] >= start) & (left_out[:, 1] < stop)
            rows, columns = torch.from_numpy(left_out[inside]).to(device).T
            scores[rows, columns - start] = -torch.inf
            mine = (true >= start) & (true < stop)
            scores[mine, true[mine] - start] = -torch.inf
            above += (scores > right[:, None]).sum(1)
            level += (scores == right[:, None]).sum(1)
        reciprocal += float((1 / (1 + above + level / 2)).sum())
    return reciprocal / (2 * len(triples))


def random_mrr(entities: int) -> float:
    """What ranks at random would give."""
    return float((1 / np.arange(1, entities + 1)).mean())


# --- the run --------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> bool:
    """Train and show what was learned. Returns whether anything was."""
    device = pick_device(args.device)
    kind = KINDS[args.model]
    graph = Graph.make(args.entities, args.relations, args.links, args.seed)
    names = ("model", "entities", "relations", "links", "steps", "batch", "negatives", "dim", "lr")
    options = {name: getattr(args, name) for name in (*names, "margin", "seed")}
    work = Run(args.store, options, args.overwrite)
    on_gpu = "cuda" if device.type == "cuda" else None
    # A commit that is not of `em.torch.save` would part entities and relations.
    keep: dict[str, Any] = {"autocommit": False, "log_limit": "4GiB"}
    with em.open(work.tables, memory=args.memory, device=on_gpu, **keep) as store:
        torch.manual_seed(args.seed)
        if "entities" not in store:
            store.create(
                "entities",
                rows=args.entities,
                dim=args.dim,
                dtype="float32",
                optimizer=em.optim.Adagrad(lr=args.lr, eps=1e-8),
                init=em.init.Normal(0, 0.1),
                seed=args.seed,
            )
        table = store["entities"]
        model = KnowledgeGraph(kind, table, graph.relations, args.margin, device)
        sparse = em.torch.Optimizer(model.entities)
        dense = torch.optim.Adagrad(model.relations.parameters(), lr=args.lr)
        parts = {"sparse": sparse, "dense": dense}
        size = table.path.stat().st_size
        print(
            f"Graph: {args.entities:,} entities, {graph.relations} relations, "
            f"{len(graph.train):,} triples and {len(graph.held_out)} held out\n"
            f"Table: {args.entities:,} x {args.dim} float32 with Adagrad: {mib(size)}, "
            f"{size / args.memory:.1f} times the memory of {mib(args.memory)}"
        )
        step = 0

        def save() -> None:
            note = {"step": step, "before": before}
            em.torch.save(model, work.checkpoint, parts, note=note)

        if work.begun:
            note = em.torch.load(model, work.checkpoint, parts).note or {}
            step, before = note["step"], note["before"]
        else:
            before = filtered_mrr(model, graph, device)
            save()
            work.begin()
        batches = Batches(graph, args.batch, args.negatives, args.seed, device)
        first = step
        where = "the GPU" if on_gpu else f"{torch.get_num_threads()} CPU threads"
        print(f"{kind.name} on {where} from step {step:,} to {args.steps:,}", flush=True)
        began, losses = time.monotonic(), []
        following = batches[step]
        while step < args.steps:
            batch, following = following, batches[step + 1]
            table.prefetch(following.ids)  # read while this batch computes
            loss = model(batch)
            loss.backward()
            step_or_save(sparse.step, save)  # the table first: see there
            dense.step()
            sparse.zero_grad()
            dense.zero_grad()
            losses.append(loss.detach())
            step += 1
            if step % args.save_every == 0 or step == args.steps:
                save()
            if step % SHOW_STEPS == 0 or step == args.steps:
                mean = torch.stack(losses).mean().item()
                losses.clear()
                print(
                    f"  step {step:6,d}  pass {step / batches.per_pass:5.2f}  loss {mean:.4f}",
                    flush=True,
                )
        seconds = time.monotonic() - began
        found, chance = filtered_mrr(model, graph, device), random_mrr(args.entities)
        triples = (step - first) * args.batch
        summary(
            {
                "filtered MRR": f"{found:.4f} of triples held out; {before:.4f} before, "
                f"{chance:.4f} by chance: {found / chance:,.0f} times as high",
                "training": f"{step - first:,} steps of {args.batch:,} triples in {seconds:.0f} s, "
                f"{triples / max(seconds, 1e-9):,.0f} triples/s",
                "pages": pages_line(table),
            }
        )
    work.end(args.keep)
    return found > 3 * chance


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(
        prog="knowledge_graph.py",
        description="Embed a knowledge graph whose entities do not fit in memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_run_options(parser, store="graph-store", memory="4MiB")
    add = parser.add_argument
    add("--model", choices=tuple(KINDS), default="complex", help="how triples are scored")
    add("--entities", type=at_least(200), default=20_000, help="in the graph")
    add("--relations", type=at_least(1), default=10, help="in the graph, 24 at most")
    add("--links", type=at_least(1), default=20, help="triples of an entity")
    add("--steps", type=at_least(1), default=800, help="steps of training")
    add("--batch", type=at_least(1), default=2048, help="triples in a step")
    add("--negatives", type=at_least(1), default=256, help="entities that a batch shares")
    add("--dim", type=at_least(2), default=64, help="numbers in a row, even for complex")
    add("--lr", type=at_least(1e-12, float), default=0.1, help="learning rate of Adagrad")
    add("--margin", type=at_least(0, float), default=1.0, help="of TransE's distances")
    add("--save-every", type=at_least(1), default=SAVE_STEPS, help="steps between checkpoints")
    args = parser.parse_args(argv)
    if args.model == "complex" and args.dim % 2:
        parser.error(f"argument --dim: must be even for complex, not {args.dim}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example. Returns its exit status: 0 done, 1 failed, 130 interrupted."""
    args = parse_arguments(argv)
    try:
        if not run(args):
            print("knowledge_graph.py: error: nothing was learned", file=sys.stderr)
            return 1
    except (DemoError, em.Error, OSError, MemoryError) as error:
        print(f"knowledge_graph.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "knowledge_graph.py: interrupted; the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
