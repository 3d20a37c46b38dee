"""One class a way: rows of a table to a device by id, and back.

All tables hold the same rows: every number is a function of row and column, so that what a way
gives or leaves can be compared with what it must be without a second copy of the table. `salt`
makes other rows of the same ids.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .device import PIECE, Device, HostMemory

LR = 2.0**-10  # of updates: sums of rows and steps are exact
_BITS = 23  # every number is a multiple of 2^-23 in [-0.5, 0.5), so exact in float32
_MASK = (1 << _BITS) - 1
_ROW = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as torch's 64-bit numbers have it
_COLUMN, _SALT = 0x85EBCA77, 0x3C6EF372
_FILL_BYTES = 64 << 20  # rows made at once


def rows_of(ids: Tensor, dim: int, salt: int = 0, out: Tensor | None = None) -> Tensor:
    """The rows of these ids, (n, dim) float32, where the ids are."""
    hashed = ((ids.reshape(-1, 1).to(torch.int64) * _ROW) >> (63 - _BITS)) & _MASK
    columns = torch.arange(dim, dtype=torch.int64, device=ids.device) * _COLUMN + salt * _SALT
    mixed = hashed.to(torch.int32) + (columns & _MASK).to(torch.int32)
    mixed &= _MASK
    if out is None:
        out = torch.empty(mixed.shape, dtype=torch.float32, device=ids.device)
    out.copy_(mixed)
    return out.mul_(2.0**-_BITS).sub_(0.5)


def blocks(rows: int, dim: int, most: int = 0) -> Iterator[tuple[int, int]]:
    """Ranges of rows of about `most` bytes; 0: as many as are made at once."""
    step = max(1, (most or _FILL_BYTES) // (dim * 4))
    for first in range(0, rows, step):
        yield first, min(first + step, rows)


def fill_host(
    device: Device, memory: HostMemory, first: int, rows: int, dim: int, salt: int = 0
) -> None:
    """The rows of a table into host memory, made on the device."""
    flat, border = memory.floats, PIECE // 4
    for low, high in blocks(rows, dim):
        made = rows_of(torch.arange(low, high, device=device.torch_name), dim, salt).view(-1)
        begin, done = first + low * dim, 0
        while done < made.numel():  # a copy must not lie across two registrations
            end = min(made.numel(), done + border - (begin + done) % border)
            flat[begin + done : begin + end].copy_(made[done:end])
            done = end


@dataclass
class Batch:
    """The ids of one call, where each way wants them: none of it is part of anybody's time."""

    ids: Tensor  # (n,) int64, on the device
    host: Tensor  # the same in host memory
    array: Any  # the same as an array of CuPy; None without it
    distinct: int  # how many different ones


@dataclass
class Field:
    """A table's shape and what the ways share."""

    device: Device
    folder: Path
    rows: int
    dim: int
    threads: int
    most_ids: int  # of any batch
    memory: HostMemory | None = None  # the rows in registered host memory, for all rivals
    _staging: Tensor | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return self.rows * self.dim * 4

    @property
    def pool(self) -> Tensor:
        """The rows in registered host memory, (rows, dim)."""
        if self.memory is None:
            raise RuntimeError("no rows in host memory")
        return self.memory.table(0, self.rows, self.dim)

    def staging(self) -> Tensor:
        """Pinned memory for the rows of a batch."""
        if self._staging is None:
            self._staging = self.device.pinned(self.most_ids, self.dim)
        return self._staging

    def build_pool(self) -> None:
        """Make the rows in host memory."""
        if self.memory is None:
            self.memory = HostMemory(self.device, self.bytes)
            fill_host(self.device, self.memory, 0, self.rows, self.dim)

    def close(self) -> None:
        """Give back what is shared; the ways are closed before."""
        self._staging = None
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close()
        self.device.release()


class Way(ABC):
    """Rows of a table to a device and back."""

    name: str
    place = ""  # where its table lies: "pool" (shared host memory), "own" (host), "device"

    def __init__(self, field: Field) -> None:
        """The table is there and holds the rows of salt 0."""
        self.field = field

    @abstractmethod
    def gather(self, batch: Batch) -> Tensor:
        """The rows of `batch.ids` on the device, (n, dim)."""

    @abstractmethod
    def scatter(self, batch: Batch, rows: Tensor) -> None:
        """Replace the rows of `batch.ids` by these, which are on the device."""

    @abstractmethod
    def look(self, ids: Tensor) -> Tensor:
        """Rows as they are in the table, read in another way than by `gather`. Ids on the host."""

    def close(self) -> None:  # noqa: B027
        """Give back what is its own."""

    def stats(self) -> dict[str, Any] | None:
        """What it tells of how it moved rows."""
        return None


class Limit(Way):
    """One copy of as many bytes as the distinct rows have, from or to pinned memory."""

    name = "cudaMemcpy"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self._there = torch.empty(field.most_ids, field.dim, device=field.device.torch_name)

    def gather(self, batch: Batch) -> Tensor:
        part = self._there[: batch.distinct]
        part.copy_(self.field.staging()[: batch.distinct], non_blocking=True)
        return part

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        self.field.staging()[: batch.distinct].copy_(rows[: batch.distinct], non_blocking=True)

    def look(self, ids: Tensor) -> Tensor:
        return self.field.staging()[: len(ids)]


class Embermap(Way):
    """This project: sorting and duplicates included."""

    name, place = "embermap", "own"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        import embermap as em

        self._folder = field.folder / "store"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._store = em.open(
            self._folder,
            memory=self.budget(field.rows, field.dim * 4),
            device=field.device.store_device,
            threads=field.threads,
            durability="none",
        )
        try:
            self.table = self._store.create(
                "rows", rows=field.rows, dim=field.dim, optimizer=em.optim.SGD(lr=LR)
            )
            fill_table(field.device, self.table)
            if not self.table.stats()["whole"]:
                raise RuntimeError("the table is not in memory as a whole")
        except BaseException:
            self.close()
            raise

    @staticmethod
    def budget(rows: int, record: int) -> int:
        """Memory that gives every page a frame; what is too much is not taken."""
        return int(rows * record * 1.25) + (256 << 20)

    def gather(self, batch: Batch) -> Tensor:
        found: Tensor = self.table.gather(batch.ids)
        return found

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        self.table.scatter(batch.ids, rows)

    def look(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.table.gather(ids.numpy())))

    def close(self) -> None:
        self._store.abandon()  # a commit would write all of it to the disk
        shutil.rmtree(self._folder, ignore_errors=True)

    def stats(self) -> dict[str, Any] | None:
        found = self.table.stats().get("cuda")
        return found if isinstance(found, dict) else None


def fill_table(device: Device, table: Any, salt: int = 0) -> None:
    """The rows into a table of embermap: pages stay in memory, nothing is written to the disk."""
    for low, high in blocks(table.rows, table.dim):
        ids = torch.arange(low, high, device=device.torch_name)
        table.scatter(ids, rows_of(ids, table.dim, salt))


class SpeedTorch(Way):
    """Kernels of CuPy over registered host memory, as SpeedTorch moves rows."""

    name, place = "SpeedTorch's way", "pool"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        missing = field.device.arrays()
        if missing is not None:
            raise RuntimeError(missing)
        self._rows = field.device.array_of_host(field.pool)

    def gather(self, batch: Batch) -> Tensor:
        return self.field.device.tensor(self._rows[batch.array])

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        self._rows[batch.array] = self.field.device.array(rows)

    def look(self, ids: Tensor) -> Tensor:
        return self.field.pool[ids]

    def close(self) -> None:
        del self._rows


class TorchPinned(Way):
    """torch, by somebody who knows it: index_select into pinned memory and one copy, and back."""

    name, place = "torch, pinned", "pool"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        self._there = torch.empty(field.most_ids, field.dim, device=field.device.torch_name)

    def gather(self, batch: Batch) -> Tensor:
        between, there = self.field.staging()[: len(batch.host)], self._there[: len(batch.host)]
        torch.index_select(self.field.pool, 0, batch.host, out=between)
        there.copy_(between, non_blocking=True)
        return there

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        between = self.field.staging()[: len(batch.host)]
        between.copy_(rows, non_blocking=True)
        self.field.device.synchronize()
        self.field.pool.index_copy_(0, batch.host, between)

    def look(self, ids: Tensor) -> Tensor:
        return self.field.pool[ids]


class TorchPlain(Way):
    """torch as people write it."""

    name, place = "torch, as people write it", "pool"

    def gather(self, batch: Batch) -> Tensor:
        return self.field.pool[batch.ids.cpu()].to(self.field.device.torch_name)

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        self.field.pool[batch.ids.cpu()] = rows.cpu()

    def look(self, ids: Tensor) -> Tensor:
        return self.field.pool.index_select(0, ids)


class DeviceTable(Way):
    """The whole table in the device's memory."""

    name, place = "table in GPU memory", "device"

    def __init__(self, field: Field) -> None:
        super().__init__(field)
        where = field.device.torch_name
        self._rows = torch.empty(field.rows, field.dim, device=where)
        for low, high in blocks(field.rows, field.dim):
            rows_of(torch.arange(low, high, device=where), field.dim, out=self._rows[low:high])

    def gather(self, batch: Batch) -> Tensor:
        return torch.index_select(self._rows, 0, batch.ids)

    def scatter(self, batch: Batch, rows: Tensor) -> None:
        self._rows.index_copy_(0, batch.ids, rows)

    def look(self, ids: Tensor) -> Tensor:
        return self._rows[ids.to(self._rows.device)].cpu()

    def close(self) -> None:
        del self._rows


WAYS: dict[str, type[Way]] = {
    way.name: way for way in (Limit, Embermap, SpeedTorch, TorchPinned, TorchPlain, DeviceTable)
}
