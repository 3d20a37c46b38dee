"""One class a store: the same table made, opened, gathered from, updated, read and written.

A table of `rows` records of `width` float32: the weight, then, if it is trained with Adagrad, the
sum of squares. All stores but embermap keep records of weight and state side by side: for them as
for embermap one record is one place on disk, which halves the pages an update touches compared
with two arrays.

Where there are several ways to do a thing, `ways` names them; the fastest on this machine is found
first, and used.
"""

from __future__ import annotations

import itertools
import shutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import confine
from .workload import EPS, LR, Batch, Content, Ids, Rows

BUILD_BYTES = 32 << 20  # written at once when a table is made
READER_THREADS = 16  # of the store that reads with threads


@dataclass(frozen=True)
class Shape:
    """What the table is, and what a store may take."""

    rows: int
    dim: int
    adagrad: bool
    memory: int  # bytes that the process may take, page cache included
    threads: int

    @property
    def width(self) -> int:
        """Numbers in a record."""
        return self.dim * (2 if self.adagrad else 1)

    @property
    def bytes(self) -> int:
        """Of all records."""
        return self.rows * self.width * 4


def step(records: Rows, grads: Rows, dim: int) -> None:
    """One optimizer step on records in place: Adagrad if they have state, else SGD."""
    weight = records[:, :dim]
    if records.shape[1] == dim:
        weight -= np.float32(LR) * grads
        return
    total = records[:, dim:]
    total += grads * grads
    weight -= np.float32(LR) * grads / (np.sqrt(total) + np.float32(EPS))


class Rival(ABC):
    """A store under test. Ids in, rows out; nothing else is asked of it."""

    name: str
    data: str  # stores of the same data share one file
    ways: tuple[str, ...] = ("plain",)
    takes_batches_as_they_are = False  # finds distinct ids and sums gradients itself

    def __init__(self, folder: Path, shape: Shape, way: str) -> None:
        """Of the table in `folder`, made by `build` with the same shape."""
        self.folder, self.shape, self.way = folder, shape, way

    @classmethod
    @abstractmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        """Make the table's files in a folder."""

    @classmethod
    @abstractmethod
    def files(cls, folder: Path) -> list[Path]:
        """Those whose page cache is the store's."""

    @abstractmethod
    def open(self) -> None:
        """Open; close() ends it."""

    @abstractmethod
    def close(self) -> None:
        """Write what is dirty and close."""

    @abstractmethod
    def gather(self, batch: Batch) -> Any:
        """The weights of `batch.ids`, shape (n, dim)."""

    @abstractmethod
    def update(self, batch: Batch) -> None:
        """One optimizer step."""

    @abstractmethod
    def state(self, ids: Ids) -> Rows:
        """The sums of squares of these ids (a trained table)."""

    @abstractmethod
    def read(self, first: int, last: int) -> Any:
        """The weights of consecutive rows."""

    @abstractmethod
    def write(self, first: int, weights: Rows) -> None:
        """Replace the weights of consecutive rows; state keeps its values."""

    @abstractmethod
    def flush(self) -> None:
        """Return when everything written is on the disk."""

    def stats(self) -> dict[str, Any]:
        """Counters, where the store has any."""
        return {}

    def warm(self, batch: Batch) -> None:
        """Touch what gather would touch; the fastest way counts, for it is not timed."""
        self.gather(batch)


def _records(shape: Shape) -> Any:
    """Yield (first, records) of the initial table, in blocks."""
    content = Content(shape.dim)
    block = max(1, BUILD_BYTES // (shape.width * 4))
    for first in range(0, shape.rows, block):
        last = min(first + block, shape.rows)
        records = np.zeros((last - first, shape.width), np.float32)
        records[:, : shape.dim] = content.block(first, last)
        yield first, records


class Embermap(Rival):
    """This project. Its budget is three quarters of the memory: the process itself needs some."""

    name = "embermap"
    data = "embermap"
    takes_batches_as_they_are = True

    @classmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        import embermap as em

        optimizer = em.optim.Adagrad(lr=LR, eps=EPS) if shape.adagrad else em.optim.SGD(lr=LR)
        with em.open(folder, memory="256MiB") as store:
            table = store.create("t", rows=shape.rows, dim=shape.dim, optimizer=optimizer)
            content = Content(shape.dim)
            block = max(1, BUILD_BYTES // (shape.dim * 4))
            for first in range(0, shape.rows, block):
                table.write(first, content.block(first, min(first + block, shape.rows)))

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        return [folder / "t.npy"]

    @staticmethod
    def budget(memory: int) -> int:
        """Of the store, within the memory of the process."""
        return memory * 3 // 4

    def open(self) -> None:
        import embermap as em

        # None of the others survives a crash: what commits cost is measured for itself.
        self._store = em.open(
            self.folder,
            memory=self.budget(self.shape.memory),
            threads=self.shape.threads,
            durability="none",
        )
        self._table = self._store["t"]

    def close(self) -> None:
        self._store.close()

    def gather(self, batch: Batch) -> Any:
        return self._table.gather(batch.ids)

    def update(self, batch: Batch) -> None:
        self._table.update(batch.ids, batch.grads)

    def state(self, ids: Ids) -> Rows:
        rows: Rows = self._table.gather(ids, field="sum")
        return rows

    def read(self, first: int, last: int) -> Any:
        return self._table.read(first, last)

    def write(self, first: int, weights: Rows) -> None:
        self._table.scatter(np.arange(first, first + len(weights), dtype=np.int64), weights)

    def flush(self) -> None:
        self._store.commit()

    def prefetch(self, ids: Ids) -> None:
        """Bring pages in while the caller computes."""
        self._table.prefetch(ids)

    def stats(self) -> dict[str, Any]:
        return dict(self._table.stats())


class _Mapped(Rival):
    """A plain file of records, mapped as one array. `way`: how it is read at random."""

    data = "raw"
    ways = ("plain", "sorted ids, MADV_RANDOM")
    _array: Any  # (rows, width)

    @classmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        with (folder / "records.bin").open("wb") as file:
            for _, records in _records(shape):
                records.tofile(file)

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        return [folder / "records.bin"]

    @property
    def _file(self) -> Path:
        return self.folder / "records.bin"

    def _advise(self, address: int) -> None:
        if self.way != "plain":
            confine.advise_random(address, self.shape.bytes)

    def flush(self) -> None:
        import os

        descriptor = os.open(self._file, os.O_RDONLY)
        os.fsync(descriptor)  # writes the mapping's dirty pages as well
        os.close(descriptor)


class Memmap(_Mapped):
    """np.memmap of records, in one thread as NumPy works."""

    name = "np.memmap"

    def open(self) -> None:
        shape = self.shape
        self._array = np.memmap(self._file, np.float32, "r+", shape=(shape.rows, shape.width))
        self._advise(self._array.ctypes.data)
        self._weights = self._array[:, : shape.dim]
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.flush()
        del self._weights, self._array

    def gather(self, batch: Batch) -> Any:
        if self.way == "plain":
            return self._weights[batch.ids]
        return np.asarray(self._weights[batch.distinct])[batch.place]

    def update(self, batch: Batch) -> None:
        records = np.asarray(self._array[batch.distinct])
        step(records, batch.summed, self.shape.dim)
        self._array[batch.distinct] = records

    def state(self, ids: Ids) -> Rows:
        return np.asarray(self._array[:, self.shape.dim :][ids])

    def read(self, first: int, last: int) -> Any:
        return np.array(self._weights[first:last])

    def write(self, first: int, weights: Rows) -> None:
        self._weights[first : first + len(weights)] = weights

    def warm(self, batch: Batch) -> None:
        # The same page faults, by many threads.
        self._in_parts(batch.distinct, lambda ids, _: self._weights[ids, 0])

    def _in_parts(self, ids: Ids, work: Callable[[Ids, slice], Any]) -> list[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READER_THREADS)
        edges = np.linspace(0, len(ids), READER_THREADS + 1).astype(int)
        parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
        return list(self._pool.map(lambda part: work(ids[part], part), parts))


class MemmapThreads(Memmap):
    """np.memmap read and written by 16 threads at once, sorted ids, no read-ahead: an expert's."""

    name = f"np.memmap, {READER_THREADS} threads"
    ways = ("sorted ids, MADV_RANDOM",)

    def gather(self, batch: Batch) -> Any:
        rows = np.empty((len(batch.distinct), self.shape.dim), np.float32)

        def work(ids: Ids, part: slice) -> None:
            rows[part] = self._weights[ids]

        self._in_parts(batch.distinct, work)
        return rows[batch.place]

    def update(self, batch: Batch) -> None:
        def work(ids: Ids, part: slice) -> None:
            records = np.asarray(self._array[ids])
            step(records, batch.summed[part], self.shape.dim)
            self._array[ids] = records

        self._in_parts(batch.distinct, work)


class TorchFile(_Mapped):
    """torch.from_file(shared=True): torch's own threads read and write the mapping."""

    name = "torch.from_file"

    def open(self) -> None:
        import torch

        shape = self.shape
        torch.set_num_threads(shape.threads)
        flat = torch.from_file(
            str(self._file), shared=True, size=shape.rows * shape.width, dtype=torch.float32
        )
        self._array = flat.view(shape.rows, shape.width)
        self._advise(self._array.data_ptr())
        self._torch = torch

    def close(self) -> None:
        self.flush()
        del self._array

    def gather(self, batch: Batch) -> Any:
        weights = self._array[:, : self.shape.dim]
        if self.way == "plain":
            return weights.index_select(0, self._torch.from_numpy(batch.ids))
        rows = weights.index_select(0, self._torch.from_numpy(batch.distinct))
        return rows.index_select(0, self._torch.from_numpy(batch.place))

    def update(self, batch: Batch) -> None:
        torch, dim = self._torch, self.shape.dim
        ids, grads = torch.from_numpy(batch.distinct), torch.from_numpy(batch.summed)
        records = self._array.index_select(0, ids)
        if self.shape.adagrad:
            total = records[:, dim:]
            total.addcmul_(grads, grads)
            records[:, :dim].addcdiv_(grads, total.sqrt().add_(EPS), value=-LR)
        else:
            records.add_(grads, alpha=-LR)
        self._array.index_copy_(0, ids, records)

    def state(self, ids: Ids) -> Rows:
        part = self._array[:, self.shape.dim :].index_select(0, self._torch.from_numpy(ids))
        rows: Rows = part.numpy()
        return rows

    def read(self, first: int, last: int) -> Any:
        return self._array[first:last, : self.shape.dim].clone()

    def write(self, first: int, weights: Rows) -> None:
        part = self._array[first : first + len(weights), : self.shape.dim]
        part.copy_(self._torch.from_numpy(weights))


class _Hdf5(Rival):
    """h5py. Rows at random one hyperslab at a time through one selection that is moved."""

    ways = ("hyperslabs", "index lists")
    chunk_bytes: int | None = None

    @classmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        import h5py

        rows = None if cls.chunk_bytes is None else max(1, cls.chunk_bytes // (shape.width * 4))
        with h5py.File(folder / "records.h5", "w", libver="latest") as file:
            data = file.create_dataset(
                "t",
                (shape.rows, shape.width),
                np.float32,
                chunks=None if rows is None else (min(rows, shape.rows), shape.width),
            )
            for first, records in _records(shape):
                data[first : first + len(records)] = records

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        return [folder / "records.h5"]

    def open(self) -> None:
        import h5py

        cache = {}
        if self.chunk_bytes is not None:  # half of the memory for HDF5's own cache of chunks
            size = self.shape.memory // 2
            cache = {"rdcc_nbytes": size, "rdcc_nslots": 100 * (size // self.chunk_bytes) + 1}
        self._h5 = h5py
        self._open = h5py.File(self.folder / "records.h5", "r+", **cache)
        self._data = self._open["t"]
        self._space = self._data.id.get_space()
        self._one = h5py.h5s.create_simple((1, self.shape.width))

    def close(self) -> None:
        self._open.close()

    def _read(self, ids: Ids) -> Rows:
        rows = np.empty((len(ids), self.shape.width), np.float32)
        if self.way == "index lists":
            for at in range(0, len(ids), 1000):  # h5py's time grows faster than the list
                rows[at : at + 1000] = self._data[ids[at : at + 1000]]
            return rows
        read, space, size = self._data.id.read, self._space, (1, self.shape.width)
        for i, row in enumerate(ids.tolist()):
            space.select_hyperslab((row, 0), size)
            read(self._one, space, rows[i : i + 1])
        return rows

    def _write(self, ids: Ids, rows: Rows) -> None:
        if self.way == "index lists":
            for at in range(0, len(ids), 1000):
                self._data[ids[at : at + 1000]] = rows[at : at + 1000]
            return
        write, space, size = self._data.id.write, self._space, (1, self.shape.width)
        for i, row in enumerate(ids.tolist()):
            space.select_hyperslab((row, 0), size)
            write(self._one, space, rows[i : i + 1])

    def gather(self, batch: Batch) -> Any:
        return self._read(batch.distinct)[:, : self.shape.dim][batch.place]

    def update(self, batch: Batch) -> None:
        records = self._read(batch.distinct)
        step(records, batch.summed, self.shape.dim)
        self._write(batch.distinct, records)

    def state(self, ids: Ids) -> Rows:
        distinct, place = np.unique(ids, return_inverse=True)
        return self._read(distinct)[:, self.shape.dim :][place]

    def read(self, first: int, last: int) -> Any:
        return self._data[first:last, : self.shape.dim]

    def write(self, first: int, weights: Rows) -> None:
        self._data[first : first + len(weights), : self.shape.dim] = weights

    def flush(self) -> None:
        import os

        self._open.flush()
        descriptor = os.open(self.folder / "records.h5", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class Hdf5Contiguous(_Hdf5):
    """h5py, a contiguous dataset."""

    name = "h5py, contiguous"
    data = "h5 contiguous"


class Hdf5Chunked(_Hdf5):
    """h5py, chunks of whole rows, 16 KiB each, with half of the memory as HDF5's chunk cache."""

    name = "h5py, chunked"
    data = "h5 chunked"
    chunk_bytes = 16 << 10


class Lmdb(Rival):
    """LMDB. A value holds as many rows as fit its 4,080 bytes of one overflow page."""

    name = "LMDB"
    data = "lmdb"
    ways = ("readahead=False", "readahead=True")

    @classmethod
    def _rows(cls, shape: Shape) -> int:
        return max(1, 4080 // (shape.width * 4))

    @classmethod
    def _environment(cls, folder: Path, shape: Shape, **options: Any) -> Any:
        import lmdb

        return lmdb.open(
            str(folder / "records.lmdb"),
            subdir=False,
            map_size=3 * shape.bytes + (1 << 30),
            writemap=True,
            map_async=True,
            sync=False,  # as with the other stores, only flush() waits for the disk
            lock=False,
            **options,
        )

    @classmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        per = cls._rows(shape)
        with cls._environment(folder, shape) as environment:
            content, block = Content(shape.dim), per * 65_536
            for first in range(0, shape.rows, block):
                last = min(first + block, shape.rows)
                records = np.zeros((last - first, shape.width), np.float32)
                records[:, : shape.dim] = content.block(first, last)
                with environment.begin(write=True) as transaction:
                    cursor = transaction.cursor()
                    cursor.putmulti(
                        (
                            (_key((first + at) // per), records[at : at + per].tobytes())
                            for at in range(0, len(records), per)
                        ),
                        append=True,
                    )
            environment.sync(True)

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        return [folder / "records.lmdb"]

    def open(self) -> None:
        self._environment_ = self._environment(
            self.folder, self.shape, readahead=self.way == "readahead=True"
        )
        self._per = self._rows(self.shape)

    def close(self) -> None:
        self._environment_.sync(True)
        self._environment_.close()

    def _fetch(self, transaction: Any, ids: Ids) -> tuple[Rows, Ids, Ids]:
        """Whole values of sorted ids: (values as records, their keys, where each id is)."""
        keys, value = np.unique(ids // self._per, return_inverse=True)
        found = transaction.cursor().getmulti([_key(key) for key in keys.tolist()])
        if len(found) != len(keys):
            raise KeyError(f"{len(keys) - len(found)} of {len(keys)} keys are missing")
        width, per = self.shape.width, self._per
        records = np.zeros((len(keys), per * width), np.float32)
        packed = b"".join(part for _, part in found)
        if len(packed) == records.nbytes:
            records[:] = np.frombuffer(packed, np.float32).reshape(records.shape)
        else:  # the last value of the table is shorter
            for i, (_, part) in enumerate(found):
                row = np.frombuffer(part, np.float32)
                records[i, : len(row)] = row
        return records.reshape(-1, width), keys, value * per + ids % per

    def gather(self, batch: Batch) -> Any:
        with self._environment_.begin(buffers=True) as transaction:
            records, _, place = self._fetch(transaction, batch.distinct)
        return records[:, : self.shape.dim][place[batch.place]]

    def update(self, batch: Batch) -> None:
        with self._environment_.begin(write=True, buffers=True) as transaction:
            records, keys, place = self._fetch(transaction, batch.distinct)
            mine = records[place]
            step(mine, batch.summed, self.shape.dim)
            records[place] = mine
            self._put(transaction, keys, records)

    def _put(self, transaction: Any, keys: Ids, records: Rows) -> None:
        per, rows = self._per, self.shape.rows
        values = records.reshape(len(keys), -1)
        width = self.shape.width
        transaction.cursor().putmulti(
            (
                (_key(key), values[i, : min(per, rows - key * per) * width].tobytes())
                for i, key in enumerate(keys.tolist())
            )
        )

    def state(self, ids: Ids) -> Rows:
        distinct, place = np.unique(ids, return_inverse=True)
        with self._environment_.begin(buffers=True) as transaction:
            records, _, where = self._fetch(transaction, distinct)
        return records[:, self.shape.dim :][where[place]]

    def read(self, first: int, last: int) -> Any:
        per = self._per
        parts = []
        with self._environment_.begin(buffers=True) as transaction:
            cursor = transaction.cursor()
            cursor.set_key(_key(first // per))
            values = cursor.iternext(keys=False)
            for _ in range(first // per, (last - 1) // per + 1):
                parts.append(next(values))
            packed = np.frombuffer(b"".join(parts), np.float32).reshape(-1, self.shape.width)
        begin = first % per
        return packed[begin : begin + last - first, : self.shape.dim]

    def write(self, first: int, weights: Rows) -> None:
        ids = np.arange(first, first + len(weights), dtype=np.int64)
        with self._environment_.begin(write=True, buffers=True) as transaction:
            records, keys, place = self._fetch(transaction, ids)
            records[place, : self.shape.dim] = weights
            self._put(transaction, keys, records)

    def flush(self) -> None:
        self._environment_.sync(True)


class TorchMemory(Rival):
    """torch with everything in memory: index_select, and the sparse step of torch.optim.

    The gradient is what the backward pass of nn.Embedding(sparse=True) leaves: ids as they were
    given, one row of gradients each.
    """

    name = "torch, in memory"
    data = "none"
    takes_batches_as_they_are = True

    @classmethod
    def build(cls, folder: Path, shape: Shape) -> None:
        pass

    @classmethod
    def files(cls, folder: Path) -> list[Path]:
        return []

    def open(self) -> None:
        import torch

        torch.set_num_threads(self.shape.threads)
        torch.sparse.check_sparse_tensor_invariants.disable()  # as it is, but said: no warning
        self._torch = torch
        table = torch.nn.Embedding(self.shape.rows, self.shape.dim, sparse=True)
        self._weight = table.weight
        with torch.no_grad():
            block = max(1, BUILD_BYTES // (self.shape.dim * 4))
            content = Content(self.shape.dim)
            for first in range(0, self.shape.rows, block):
                last = min(first + block, self.shape.rows)
                self._weight[first:last] = torch.from_numpy(content.block(first, last))
        self._optimizer: Any = (
            torch.optim.Adagrad([self._weight], lr=LR, eps=EPS)
            if self.shape.adagrad
            else torch.optim.SGD([self._weight], lr=LR)
        )

    def close(self) -> None:
        del self._weight, self._optimizer

    def gather(self, batch: Batch) -> Any:
        return self._weight.detach().index_select(0, self._torch.from_numpy(batch.ids))

    def update(self, batch: Batch) -> None:
        torch = self._torch
        self._weight.grad = torch.sparse_coo_tensor(
            torch.from_numpy(batch.ids)[None],
            torch.from_numpy(batch.grads),
            self._weight.shape,
        )
        self._optimizer.step()

    def state(self, ids: Ids) -> Rows:
        total = self._optimizer.state[self._weight]["sum"]
        rows: Rows = total[self._torch.from_numpy(ids)].numpy()
        return rows

    def read(self, first: int, last: int) -> Any:
        return self._weight.detach()[first:last].clone()

    def write(self, first: int, weights: Rows) -> None:
        with self._torch.no_grad():
            self._weight[first : first + len(weights)] = self._torch.from_numpy(weights)

    def flush(self) -> None:
        pass


def _key(number: int) -> bytes:
    return struct.pack(">Q", number)


RIVALS: tuple[type[Rival], ...] = (
    Memmap,
    MemmapThreads,
    TorchFile,
    Hdf5Contiguous,
    Hdf5Chunked,
    Lmdb,
)
ALL: dict[str, type[Rival]] = {kind.name: kind for kind in (Embermap, *RIVALS, TorchMemory)}


def remove_data(folder: Path) -> None:
    """Delete a table's files."""
    shutil.rmtree(folder, ignore_errors=True)
