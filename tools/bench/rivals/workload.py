"""What every store is asked to do: the table's content, and the batches of ids.

All of it is a function of seeds and row numbers, so that processes that never talk to each other
hold the same table and use the same batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Rows = NDArray[np.float32]

LR = 0.125  # of every optimizer step
EPS = 1e-10  # Adagrad's
_PATTERN = 1 << 16  # distinct beginnings of rows


class Content:
    """The rows of the table, made where they are needed: row r is a piece of one random line."""

    def __init__(self, dim: int) -> None:
        """`dim` numbers in a row."""
        line = np.random.default_rng(7).random(_PATTERN + dim, np.float32) - np.float32(0.5)
        self._windows = np.lib.stride_tricks.sliding_window_view(line, dim)

    def rows(self, ids: Ids) -> Rows:
        """Rows of these ids, shape (n, dim)."""
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self._windows[(mixed >> np.uint64(48)).astype(np.int64)]

    def block(self, first: int, last: int) -> Rows:
        """Rows [first, last)."""
        return self.rows(np.arange(first, last, dtype=np.int64))


class Bijection:
    """A fixed pseudo-random renumbering of [0, n): hot rows end up anywhere in the table.

    Four rounds of a Feistel network over the next power of four, walked until inside [0, n).
    """

    def __init__(self, n: int) -> None:
        """Of the numbers below `n`."""
        self._n = n
        self._half = max(1, math.ceil(math.log2(max(n, 2)) / 2))

    def __call__(self, numbers: Ids) -> Ids:
        """Renumber, shape (n,)."""
        values = self._once(numbers.astype(np.uint64))
        outside = values >= self._n
        while outside.any():
            values[outside] = self._once(values[outside])
            outside = values >= self._n
        return values.astype(np.int64)

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5):
            mixed = (right + np.uint64(key & 0xFFFFFFFF)) * np.uint64(key)
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << half) | right


def zipf_ranks(n: int, exponent: float, count: int, rng: np.random.Generator) -> Ids:
    """Draw ranks 0 ... n - 1 with chance proportional to (rank + 1) ** -exponent, shape (count,).

    Rejection from the integral of the density (Hoermann and Derflinger 1996): exact, and no table
    of n numbers.
    """

    def integral(x: NDArray[np.float64]) -> NDArray[np.float64]:
        if exponent == 1.0:
            return np.log(x)
        return np.expm1((1 - exponent) * np.log(x)) / (1 - exponent)

    def inverse(y: NDArray[np.float64]) -> NDArray[np.float64]:
        if exponent == 1.0:
            return np.exp(y)
        return np.exp(np.log1p((1 - exponent) * y) / (1 - exponent))

    low = integral(np.array(1.5)) - 1.0
    high = integral(np.array(n + 0.5))
    out = np.empty(0, np.int64)
    while out.size < count:
        u = rng.uniform(low, high, 2 * (count - out.size) + 16)
        k = np.clip(np.rint(inverse(u)), 1, n)
        accepted = u >= integral(k + 0.5) - k**-exponent
        out = np.concatenate([out, k[accepted].astype(np.int64) - 1])
    return out[:count]


@dataclass
class Batch:
    """The ids of one call, and for stores that do not do it themselves, the distinct ones.

    Finding distinct ids and summing the gradients of repeated ones is not part of anybody's time
    but embermap's own, which is given `ids` and `grads` and does it itself.
    """

    ids: Ids  # (n,)
    grads: Rows  # (n, dim): eighths, so that sums are exact in every order
    distinct: Ids  # sorted
    place: Ids  # ids = distinct[place]
    summed: Rows  # (distinct, dim)


@dataclass(frozen=True)
class Stream:
    """Batches numbered 0, 1, ...; the same for the same values."""

    rows: int
    dim: int
    ids: str  # "uniform" or "zipf:EXPONENT"
    batch: int
    seed: int = 1
    _permute: list[Bijection] = field(default_factory=list, compare=False, repr=False)

    def ids_of(self, number: int) -> Ids:
        """The ids of batch `number`, shape (batch,)."""
        rng = np.random.default_rng([self.seed, number])
        if self.ids == "uniform":
            return rng.integers(0, self.rows, self.batch)
        kind, _, exponent = self.ids.partition(":")
        if kind != "zipf":
            raise ValueError(f"ids must be uniform or zipf:EXPONENT, not {self.ids!r}")
        if not self._permute:
            self._permute.append(Bijection(self.rows))
        return self._permute[0](zipf_ranks(self.rows, float(exponent), self.batch, rng))

    def batch_of(self, number: int, *, grads: bool, distinct: bool = True) -> Batch:
        """Batch `number`; without gradients, or without the distinct ids, unless asked for.

        What a store has no use for is not kept: its process has little memory.
        """
        ids = self.ids_of(number)
        none = np.empty((0, self.dim), np.float32)
        given = self._grads(number, ids) if grads else none
        if not distinct:
            return Batch(ids, given, ids[:0], ids[:0], none)
        unique, place = np.unique(ids, return_inverse=True)
        if not grads:
            return Batch(ids, none, unique, place, none)
        order = np.argsort(place, kind="stable")
        starts = np.searchsorted(place[order], np.arange(len(unique)))
        summed = np.add.reduceat(given[order], starts, axis=0, dtype=np.float32)
        return Batch(ids, given, unique, place, summed)

    def _grads(self, number: int, ids: Ids) -> Rows:
        rng = np.random.default_rng([self.seed, number, 2])
        line = (rng.integers(-4, 5, 4096 + self.dim) / np.float32(8)).astype(np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(line, self.dim)
        return np.ascontiguousarray(windows[ids % 4096])


def batches_to_touch(stream: Stream, rows_per_page: int, pages: int, most: int) -> int:
    """How many batches touch this many distinct pages; at most `most`."""
    touched = np.zeros(stream.rows // rows_per_page + 1, bool)
    for number in range(most):
        touched[stream.ids_of(number) // rows_per_page] = True
        if np.count_nonzero(touched) >= pages:
            return number + 1
    return most
