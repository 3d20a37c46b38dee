#!/usr/bin/env python3
"""A word2vec of SpeedTorch's kind, as it was written for it: one import is another.

The text is made up: 20,000 words by rank, of which each belongs to one of 50 topics, and sentences
of one topic. A word's vector comes near those of its own topic. Only the rows of a batch are ever
in the model; Adamax, which has no sparse form in PyTorch, trains them.

    python speedtorch_word2vec.py --steps 1000
"""

from __future__ import annotations

import argparse
import math
import sys

import embermap.speedtorch as SpeedTorch  # was: import SpeedTorch
import numpy as np
import torch
from torch import nn

WORDS, DIM, TOPICS = 20_000, 64, 50
BATCH, POSITIVES, NEGATIVES = 256, 4, 16


class SkipGram(nn.Module):
    """Two embeddings as large as a batch: `u` of the words, `v` of what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(BATCH, DIM)
        self.v_embeddings = nn.Embedding(BATCH * (POSITIVES + NEGATIVES), DIM)

    def forward(self, u: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
        word = self.u_embeddings(u)
        near = (word * self.v_embeddings(pos)).sum(2)
        far = (word * self.v_embeddings(neg)).sum(2)
        scores = torch.cat([near, -far], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(
            scores, torch.ones_like(scores), reduction="none"
        )
        return loss.sum(1).mean()


def draw(rng: np.random.Generator, chances: np.ndarray) -> tuple[np.ndarray, ...]:
    """Ids of words (BATCH, 1), of words of the same topics (BATCH, P), and of any (BATCH, N)."""
    word = rng.choice(WORDS, (BATCH, 1), p=chances)
    near = rng.choice(WORDS, (BATCH, POSITIVES), p=chances)
    near = near - near % TOPICS + word % TOPICS
    far = rng.choice(WORDS, (BATCH, NEGATIVES), p=chances)
    return tuple(ids.astype(np.int32) for ids in (word, near, far))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="batches to train on")
    parser.add_argument("--save", metavar="FILE.npy", help="write the vectors of all words there")
    args = parser.parse_args()
    steps = args.steps

    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chances = 1 / (10 + np.arange(WORDS))
    chances /= chances.sum()

    model = SkipGram().to(device)
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.02)

    # All rows, and all of the optimizer's state, are here.
    u_rows = SpeedTorch.ModelFactory(model.u_embeddings, WORDS, DIM, CPUPinn=True)
    v_rows = SpeedTorch.ModelFactory(
        model.v_embeddings, total_classes=WORDS, embed_dimension=DIM, CPUPinn=True
    )
    spread = math.sqrt(2 / (WORDS + DIM))
    u_rows.uniformDistributionInit(-spread, spread)
    v_rows.normalDistributionInit(0, math.sqrt(spread))
    u_state = SpeedTorch.OptimizerFactory(
        optimizer, WORDS, DIM, model, "u_embeddings", CPUPinn=True
    )
    v_state = SpeedTorch.OptimizerFactory(
        optimizer, WORDS, DIM, model, "v_embeddings", CPUPinn=True
    )
    u_state.optInit()
    v_state.optInit()

    # The only indexes that the model ever sees.
    u_places = torch.from_numpy(u_rows.variableTransformer(BATCH, 1)).to(device)
    pos_places, neg_places = (
        torch.from_numpy(places).to(device)
        for places in v_rows.variableTransformer(BATCH, POSITIVES, NEGATIVES)
    )

    losses = []
    for step in range(steps):
        word, near, far = draw(rng, chances)
        with torch.no_grad():
            u_rows.beforeForwardPass(word)
            v_rows.beforeForwardPass(near, far)
            u_state.beforeForwardPass(word)
            v_state.beforeForwardPass(near, far)
        optimizer.zero_grad()
        loss = model(u_places, pos_places, neg_places)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            u_rows.afterOptimizerStep(word)
            v_rows.afterOptimizerStep(near, far)
            u_state.afterOptimizerStep(word)
            v_state.afterOptimizerStep(near, far)
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}: loss {np.mean(losses[-100:]):.3f}")

    # What the optimizer kept goes first, as it always had to: the vectors need its room.
    del u_state, v_state
    all_vectors = u_rows.getNumpyVersion()
    if args.save is not None:
        np.save(args.save, all_vectors)
    # With nothing learned every score is 0, and the loss stays here.
    blind = (POSITIVES + NEGATIVES) * math.log(2)
    reached = float(np.mean(losses[-20:]))
    vectors = all_vectors[:200]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    alike = vectors @ vectors.T
    same = np.equal.outer(np.arange(200) % TOPICS, np.arange(200) % TOPICS)
    np.fill_diagonal(same, False)
    mine, others = (
        alike[same].mean(),
        alike[np.arange(200)[:, None] % TOPICS != np.arange(200) % TOPICS].mean(),
    )
    print(f"loss {reached:.3f}, {blind:.3f} with nothing learned")
    print(f"mean cosine within a topic {mine:.2f}, between topics {others:.2f}")
    if reached > 0.9 * blind or mine < others + 0.1:
        print("nothing was learned", file=sys.stderr)
        return 1
    print("learned")
    return 0


if __name__ == "__main__":
    sys.exit(main())
