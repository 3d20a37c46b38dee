"""Training steps of the shapes of two real users of SpeedTorch.

Lit2Vec2 has two tables of 2,829,854 rows x 400; a step looks up 128 targets in one and 132 contexts
for each in the other, 4 drawn evenly and 128 log-uniformly, and takes dot products, binary
cross-entropy of the logits, gradients, and a step of Adagrad. Research2Vec2 has two of 14,886,545 x
188, 512 targets with 136 contexts each, all drawn evenly, and SGD; its user had the table of the
targets in GPU memory, and so has SpeedTorch's way here.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import movers
from .device import Device, HostMemory

LR = 0.01
LOOPS = AS_IT_IS, AHEAD = ("", ", next batch prefetched")
EPS = 1e-6  # so large that gradients next to 0, whose last bits differ, do not change the step
STEPS_BETWEEN_WAITS = 10
SALTS = (3, 4)  # of the rows of the two tables


@dataclass(frozen=True)
class Shape:
    """Of both tables, and of a step."""

    rows: int
    dim: int
    targets: int
    even: int  # contexts of a target, the true ones
    others: int
    skewed: bool = True  # these are drawn log-uniformly
    adagrad: bool = True  # else SGD

    @property
    def contexts(self) -> int:
        """Of a target."""
        return self.even + self.others

    @property
    def bytes(self) -> int:
        """Of the weights of one table."""
        return self.rows * self.dim * 4

    @property
    def states(self) -> int:
        """Numbers that the optimizer keeps for one of the weights."""
        return int(self.adagrad)


SHAPES = {
    "lit2vec2": Shape(2_829_854, 400, 128, 4, 128),
    "research2vec2": Shape(14_886_545, 188, 512, 4, 132, skewed=False, adagrad=False),
}
QUICK = {
    "lit2vec2": Shape(20_011, 24, 16, 4, 12),
    "research2vec2": Shape(30_011, 12, 16, 4, 12, skewed=False, adagrad=False),
}


@dataclass
class Batch:
    """Ids of a step, on the device, and as arrays of CuPy where there is one."""

    targets: Tensor  # (targets,)
    contexts: Tensor  # (targets, contexts)
    arrays: tuple[Any, Any]  # flat


def _batch(device: Device, targets: Any, contexts: Any) -> Batch:
    there = [torch.from_numpy(ids).to(device.torch_name) for ids in (targets, contexts)]
    arrays = (None, None)
    if device.arrays() is None:
        arrays = (device.array(there[0]), device.array(there[1].reshape(-1)))
    return Batch(there[0], there[1], arrays)


def batch_of(shape: Shape, device: Device, number: int) -> Batch:
    """The ids of step `number`."""
    rng = np.random.default_rng([17, number])
    even = rng.integers(0, shape.rows, (shape.targets, shape.even))
    if shape.skewed:
        drawn = np.exp(rng.random((shape.targets, shape.others)) * np.log(shape.rows + 1.0))
        others = np.minimum(drawn.astype(np.int64) - 1, shape.rows - 1)
    else:
        others = rng.integers(0, shape.rows, (shape.targets, shape.others))
    targets = rng.integers(0, shape.rows, shape.targets)
    return _batch(device, targets, np.concatenate([even, others], axis=1))


def distinct_batch(shape: Shape, device: Device) -> Batch:
    """Ids none of which comes twice: what SpeedTorch's way does with those is of its own."""
    rng = np.random.default_rng(23)
    contexts = rng.choice(shape.rows, shape.targets * shape.contexts, replace=False)
    targets = rng.choice(shape.rows, shape.targets, replace=False)
    return _batch(device, targets, contexts.reshape(shape.targets, shape.contexts))


def loss_of(targets: Tensor, contexts: Tensor, even: int) -> Tensor:
    """Of rows (targets, dim) and (targets, contexts, dim): the first `even` are true ones."""
    scores = torch.bmm(contexts, targets.unsqueeze(2)).squeeze(2)
    logits = torch.cat([scores[:, :even], -scores[:, even:]], dim=1)
    losses = nn.functional.binary_cross_entropy_with_logits(
        logits, torch.ones_like(logits), reduction="none"
    )
    return losses.sum(1).mean()


def adagrad(weights: Tensor, sums: Tensor, grads: Tensor) -> None:
    """One step in place."""
    sums.addcmul_(grads, grads)
    weights.addcdiv_(grads, sums.sqrt().add_(EPS), value=-LR)


def sgd(weights: Tensor, grads: Tensor) -> None:
    """One step in place."""
    weights.add_(grads, alpha=-LR)


class Step(ABC):
    """Two tables with what their optimizer keeps, which take steps."""

    name: str
    loops: tuple[str, ...] = (AS_IT_IS,)
    way: type[movers.Way]  # it is measured where that one is

    def __init__(self, device: Device, folder: Path, shape: Shape, threads: int) -> None:
        """The tables hold their initial rows, the sums zeros."""
        self.device, self.folder, self.shape, self.threads = device, folder, shape, threads

    @classmethod
    def host_bytes(cls, shape: Shape) -> int:
        """Host memory that it takes."""
        return 0

    @abstractmethod
    def step(self, batch: Batch) -> None:
        """One training step."""

    @abstractmethod
    def look(self, table: int, ids: Tensor) -> tuple[Tensor, ...]:
        """Weights, and sums of Adagrad, of rows of a table, on the device."""

    @abstractmethod
    def close(self) -> None:
        """Give all back."""

    def prefetch(self, batch: Batch) -> None:
        """What a loop does beforehand with a batch to come, where it is of AHEAD."""
        raise NotImplementedError

    def run(self, batches: Sequence[Batch], loop: str = AS_IT_IS) -> list[float]:
        """Seconds of each step. As in a training loop, the device is waited for now and then."""
        times: list[float] = []
        with torch.enable_grad():
            for first in range(0, len(batches), STEPS_BETWEEN_WAITS):
                some = batches[first : first + STEPS_BETWEEN_WAITS]
                self.device.synchronize()
                began = time.perf_counter()
                for number, batch in enumerate(some, first + 1):
                    if loop == AHEAD and number < len(batches):
                        self.prefetch(batches[number])
                    self.step(batch)
                self.device.synchronize()
                times += [(time.perf_counter() - began) / len(some)] * len(some)
        return times

    def check(self) -> None:
        """One step of distinct ids gives what plain tensors give. Raises AssertionError."""
        shape, batch = self.shape, distinct_batch(self.shape, self.device)
        ids = (batch.targets, batch.contexts.reshape(-1))
        weights = [
            movers.rows_of(i, shape.dim, salt).requires_grad_()
            for i, salt in zip(ids, SALTS, strict=True)
        ]
        with torch.enable_grad():
            loss_of(
                weights[0],
                weights[1].view(shape.targets, shape.contexts, shape.dim),
                shape.even,
            ).backward()
        self.run([batch])
        for table, (where, wanted) in enumerate(zip(ids, weights, strict=True)):
            grads = wanted.grad
            assert grads is not None
            sums = torch.zeros_like(grads)
            after = wanted.detach().clone()
            largest = float(grads.abs().max())
            if shape.adagrad:
                adagrad(after, sums, grads)
            else:
                sgd(after, grads)
            # SGD's step is as small as the gradients; what is left over is rounding of the weights.
            near = LR * 1e-2 if shape.adagrad else LR * 1e-2 * largest + 1e-7
            compared = [("weights", after, near)]
            if shape.adagrad:
                compared.append(("sums", sums, largest**2 * 1e-6))
            got = self.look(table, where)
            for (what, other, allowed), one in zip(compared, got, strict=True):
                if not torch.allclose(one, other, rtol=1e-3 if what == "sums" else 0, atol=allowed):
                    worst = float((one - other).abs().max())
                    raise AssertionError(f"{what} of table {table} are off by up to {worst:.3g}")
            if torch.equal(got[0], wanted.detach()):
                raise AssertionError(f"the weights of table {table} did not change")


class EmbermapStep(Step):
    """em.torch.Embedding and em.torch.Optimizer: weight and sum side by side, duplicates summed."""

    name, way, loops = "embermap", movers.Embermap, LOOPS

    @classmethod
    def host_bytes(cls, shape: Shape) -> int:
        return int(2 * (1 + shape.states) * shape.bytes * 1.15) + (64 << 20)

    def __init__(self, device: Device, folder: Path, shape: Shape, threads: int) -> None:
        super().__init__(device, folder, shape, threads)
        import embermap as em

        self._place = folder / "training"
        shutil.rmtree(self._place, ignore_errors=True)
        self._store = em.open(
            self._place,
            memory=2 * movers.Embermap.budget(shape.rows, (1 + shape.states) * shape.dim * 4),
            device=device.store_device,
            threads=threads,
            durability="none",
        )
        try:
            self._tables = []
            for number, salt in enumerate(SALTS):
                table = self._store.create(
                    f"t{number}",
                    rows=shape.rows,
                    dim=shape.dim,
                    optimizer=(
                        em.optim.Adagrad(lr=LR, eps=EPS) if shape.adagrad else em.optim.SGD(lr=LR)
                    ),
                )
                movers.fill_table(device, table, salt)
                self._tables.append(table)
            for table in self._tables:
                if not table.stats()["whole"]:
                    raise RuntimeError("the tables are not in memory as a whole")
            from embermap.torch import Embedding, Optimizer

            self._modules = [Embedding(t, device=device.torch_name) for t in self._tables]
            self._optimizer = Optimizer(self._modules)
        except BaseException:
            self.close()
            raise

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        rows = self._modules[0](batch.targets), self._modules[1](batch.contexts)
        loss_of(*rows, self.shape.even).backward()
        self._optimizer.step()

    def prefetch(self, batch: Batch) -> None:
        self._modules[0].prefetch(batch.targets)
        self._modules[1].prefetch(batch.contexts)

    def look(self, table: int, ids: Tensor) -> tuple[Tensor, ...]:
        host = ids.cpu().numpy()
        fields = ("weight", "sum")[: 1 + self.shape.states]
        found = [self._tables[table].gather(host, field=name) for name in fields]
        return tuple(torch.from_numpy(rows).to(self.device.torch_name) for rows in found)

    def close(self) -> None:
        self._store.abandon()
        shutil.rmtree(self._place, ignore_errors=True)


class SpeedTorchStep(Step):
    """SpeedTorch's way: rows and sums of the batch, duplicates kept, by CuPy from host memory.

    Of an id that comes twice the last one's step stays, and the others are lost. Without sums the
    table of the targets is in GPU memory, a tensor indexed by torch, as its user had it.
    """

    name, way = "SpeedTorch's way", movers.SpeedTorch

    @classmethod
    def host_bytes(cls, shape: Shape) -> int:
        return (4 if shape.adagrad else 1) * shape.bytes

    def __init__(self, device: Device, folder: Path, shape: Shape, threads: int) -> None:
        super().__init__(device, folder, shape, threads)
        missing = device.arrays()
        if missing is not None:
            raise RuntimeError(missing)
        size = shape.rows * shape.dim
        tables = (0, 1) if shape.adagrad else (1,)  # of those in host memory
        self._memory = HostMemory(device, self.host_bytes(shape))
        self._on_device: Tensor | None = None
        if not shape.adagrad:
            self._on_device = filled_table(device, shape, SALTS[0])
        # Of each table its arrays, and where they begin: weights, sums.
        self._begins = {
            table: [(k * (1 + shape.states) + n) * size for n in range(1 + shape.states)]
            for k, table in enumerate(tables)
        }
        for table, begins in self._begins.items():
            salt = SALTS[table]
            movers.fill_host(device, self._memory, begins[0], shape.rows, shape.dim, salt)
        self._tables = {
            table: [
                device.array_of_host(self._memory.table(begin, shape.rows, shape.dim))
                for begin in begins
            ]
            for table, begins in self._begins.items()
        }

    def _before(self, table: int, batch: Batch) -> list[Tensor]:
        if table not in self._tables:
            assert self._on_device is not None
            return [self._on_device[batch.targets]]
        return [self.device.tensor(t[batch.arrays[table]]) for t in self._tables[table]]

    def _after(self, table: int, batch: Batch, rows: list[Tensor]) -> None:
        if table not in self._tables:
            assert self._on_device is not None
            self._on_device[batch.targets] = rows[0]
            return
        for there, here in zip(self._tables[table], rows, strict=True):
            there[batch.arrays[table]] = self.device.array(here)

    def step(self, batch: Batch) -> None:
        shape = self.shape
        rows = [self._before(table, batch) for table in range(2)]
        targets, contexts = (some[0].requires_grad_() for some in rows)
        loss_of(
            targets, contexts.view(shape.targets, shape.contexts, shape.dim), shape.even
        ).backward()
        with torch.no_grad():
            for table, some in enumerate(rows):
                grads = some[0].grad
                assert grads is not None
                if shape.adagrad:
                    adagrad(some[0], some[1], grads)
                else:
                    sgd(some[0], grads)
                self._after(table, batch, some)

    def look(self, table: int, ids: Tensor) -> tuple[Tensor, ...]:
        if table not in self._tables:
            assert self._on_device is not None
            return (self._on_device[ids],)
        host, shape = ids.cpu(), self.shape
        return tuple(
            self._memory.table(begin, shape.rows, shape.dim)[host].to(self.device.torch_name)
            for begin in self._begins[table]
        )

    def close(self) -> None:
        self._tables.clear()
        self._on_device = None
        self._memory.close()


def filled_table(device: Device, shape: Shape, salt: int) -> Tensor:
    """A table in the device's memory with its initial rows."""
    weight = torch.empty(shape.rows, shape.dim, device=device.torch_name)
    for low, high in movers.blocks(shape.rows, shape.dim):
        ids = torch.arange(low, high, device=device.torch_name)
        movers.rows_of(ids, shape.dim, salt, out=weight[low:high])
    return weight


class DeviceStep(Step):
    """nn.Embedding(sparse=True) and torch's optimizer, all in the device's memory."""

    name, way = "table in GPU memory", movers.DeviceTable

    def __init__(self, device: Device, folder: Path, shape: Shape, threads: int) -> None:
        super().__init__(device, folder, shape, threads)
        self._modules = [
            nn.Embedding.from_pretrained(
                filled_table(device, shape, salt), freeze=False, sparse=True
            )
            for salt in SALTS
        ]
        torch.sparse.check_sparse_tensor_invariants.disable()  # as it is, but said: no warning
        parameters = [module.weight for module in self._modules]
        self._optimizer: Any = (
            torch.optim.Adagrad(parameters, lr=LR, eps=EPS)
            if shape.adagrad
            else torch.optim.SGD(parameters, lr=LR)
        )

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        rows = self._modules[0](batch.targets), self._modules[1](batch.contexts)
        loss_of(*rows, self.shape.even).backward()
        self._optimizer.step()

    def look(self, table: int, ids: Tensor) -> tuple[Tensor, ...]:
        weight = self._modules[table].weight
        if not self.shape.adagrad:
            return (weight.detach()[ids],)
        return weight.detach()[ids], self._optimizer.state[weight]["sum"][ids]

    def close(self) -> None:
        del self._modules, self._optimizer


STEPS: tuple[type[Step], ...] = (EmbermapStep, SpeedTorchStep, DeviceStep)
