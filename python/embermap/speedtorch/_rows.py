"""Arrays of any rank and dtype over a table, indexed as NumPy arrays are, by tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import dlpack

from .. import _arrays, _dtypes
from .._table import Table

BLOCK_BYTES = 4 << 20  # rows held at once when a table is read or written from end to end


# --- dtypes ---------------------------------------------------------------------------------------


def torch_dtype(dtype: Any, what: str = "datatype") -> torch.dtype:
    """The torch dtype of what a caller gave: a name, a NumPy dtype or type, a torch dtype.

    Raises TypeError naming it where torch has none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype):
        found: torch.dtype = getattr(torch, dtype)
        # np.dtype("float") and its kind are C's, as they were with CuPy; torch's are narrower.
        if dtype not in ("float", "int", "long", "short", "half", "double"):
            return found
    try:
        if dtype is None:
            raise TypeError
        plain = np.dtype(dtype)
        if plain.name == "bfloat16":
            return torch.bfloat16
        return torch.from_numpy(np.empty(0, plain.newbyteorder("="))).dtype
    except TypeError:
        raise TypeError(f"{what} {dtype!r} is not one that torch has") from None


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a torch one; bfloat16 is that of ml_dtypes."""
    if dtype == torch.bfloat16:
        return _dtypes.bfloat16()
    found: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return found


def _plain_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The same bits as NumPy always has them."""
    return np.dtype(np.int16) if dtype == torch.bfloat16 else numpy_dtype(dtype)


def carrier(row_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, int]:
    """Dtype and dim of a table whose rows hold `row_shape` elements of `dtype`.

    The dtype itself where tables have it, else a dtype of integers with the same bytes.
    """
    count = math.prod(row_shape)
    name = str(dtype).removeprefix("torch.")
    if name in _dtypes.ITEM_BYTES:
        return name, count
    row_bytes = count * dtype.itemsize
    for width, integer in ((8, "int64"), (4, "int32"), (1, "uint8")):
        if row_bytes % width == 0:
            return integer, row_bytes // width
    raise AssertionError(row_bytes)


# --- values and ids -------------------------------------------------------------------------------


def as_tensor(value: Any, what: str = "dataObject") -> Tensor:
    """A tensor of the memory of any array: torch, NumPy, DLPack, __cuda_array_interface__; lists.

    Raises TypeError for what is none.
    """
    if isinstance(value, Tensor):
        return value.detach()
    try:
        # Python's floats are float64 to NumPy.
        if isinstance(value, np.ndarray | np.generic | list | tuple | range | int | float):
            return _from_numpy(np.asarray(value))
        if hasattr(value, "__dlpack__"):
            found: Tensor = dlpack.from_dlpack(value)
            return found
        if hasattr(value, "__array__") and not hasattr(value, "__cuda_array_interface__"):
            return _from_numpy(np.asarray(value))
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        kind = _arrays.kind_of(value)
        raise TypeError(f"{what} must be an array or a tensor, not {kind}: {error}") from None


def _from_numpy(array: NDArray[Any]) -> Tensor:
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(
        array.shape
    )
    if not array.flags.writeable:
        array = array.copy()  # torch warns of memory that it may not write to
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: Tensor) -> NDArray[Any]:
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(_dtypes.bfloat16())
    return host.numpy()


def flat_ids(positive: Any, negative: Any, device: torch.device) -> Tensor:
    """The ids of a batch on `device`: the positives in row-major order, then the negatives.

    Raises TypeError (not integers), RowIdError (beyond int64). Whether there are such rows is
    checked by the table.
    """
    parts = [positive] if negative is None else [positive, negative]
    if all(isinstance(part, Tensor) and part.device == device for part in parts):
        for part in parts:
            if part.dtype == torch.bool or part.is_floating_point() or part.is_complex():
                _arrays.read_ids(part, "indexes")  # raises, naming the dtype
        if all(part.dtype != torch.uint64 for part in parts):
            return torch.cat([part.detach().reshape(-1).to(torch.int64) for part in parts])
    host = np.concatenate([_host_ids(part) for part in parts])
    return torch.from_numpy(host).to(device)


def _host_ids(ids: Any) -> NDArray[np.int64]:
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu()
    elif _arrays.cuda_device(ids) is not None or (
        hasattr(ids, "__cuda_array_interface__") and not hasattr(ids, "__dlpack__")
    ):
        ids = as_tensor(ids, "indexes").cpu()
    elif hasattr(ids, "__dlpack__") and not isinstance(ids, np.ndarray | np.generic):
        ids = as_tensor(ids, "indexes")
    return _arrays.read_ids(ids, "indexes").host


# --- the array ------------------------------------------------------------------------------------


class Variable:
    """A live handle of a table: an array of shape (rows, ...) whose rows are read when indexed.

    `variable[key]` takes what a NumPy array takes and gives a tensor, a copy, on `device`;
    `variable[key] = value` writes. Of a row that is written twice the last value stays. Negative
    numbers count from the end; those beyond are IndexError. `np.asarray(variable)`,
    `variable.numpy()` and, as CuPy's arrays have it, `variable.get()` read all of it.
    """

    def __init__(
        self, table: Table, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        # Not for callers: from getCupyVar(), getTorchVar(), getCupyMM() and their attributes.
        self._table = table
        self._row_shape = row_shape
        self._dtype = dtype
        self._carrier = torch_dtype(table._dtype)
        self._device = device

    @property
    def table(self) -> Table:
        """The table of embermap beneath."""
        return self._table

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, ...)."""
        return (self._table.rows, *self._row_shape)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return 1 + len(self._row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where tensors that are read lie."""
        return self._device

    def __len__(self) -> int:
        return self._table.rows

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<embermap.speedtorch.Variable {self.shape} {self._dtype} of {self._table!r}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows of a table cannot be seen without a copy")
        whole = self.numpy()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def numpy(self) -> NDArray[Any]:
        """All of it as a NumPy array in memory."""
        whole = np.empty(self.shape, numpy_dtype(self._dtype))
        plain = whole.view(_plain_dtype(self._dtype))
        for start, block in self.blocks():
            plain[start : start + len(block)] = block
        return whole

    def get(self) -> NDArray[Any]:
        """`numpy()`, by the name CuPy has for it."""
        return self.numpy()

    def __getitem__(self, key: Any) -> Tensor:
        if _is_ids(key):
            return self.gather(self._ids(key))
        if isinstance(key, slice):
            first, stop, step = key.indices(len(self))
            if step == 1 and self._reach().type == "cpu":
                return self._read(first, max(first, stop)).to(self._device)
            return self.gather(torch.from_numpy(_range(key, len(self))))
        rows, inner = _resolve(key, self.shape)
        block = _plain(self.gather(torch.from_numpy(rows), host=True))
        picked = np.array(block[inner], copy=True)
        return torch.from_numpy(picked).view(self._dtype).to(self._device)

    def __setitem__(self, key: Any, value: Any) -> None:
        tensor = as_tensor(value, "value")
        if _is_ids(key):
            ids = self._ids(key)
            shape = (*ids.shape, *self._row_shape)
            self.scatter(ids, _broadcast(tensor.to(self._dtype), shape))
            return
        if isinstance(key, slice) and key.indices(len(self))[2] == 1:
            first, stop, _ = key.indices(len(self))
            rows = max(0, stop - first)
            self.fill(_broadcast(tensor.to(self._dtype), (rows, *self._row_shape)), first)
            return
        touched, inner = _resolve(key, self.shape)
        where = torch.from_numpy(touched)
        block = _plain(self.gather(where, host=True))
        filler = _plain(tensor.to(self._dtype).cpu())
        try:
            block[inner] = filler
        except ValueError:
            raise ValueError(
                f"values of shape {tuple(tensor.shape)} do not fit {np.shape(block[inner])}"
            ) from None
        self.scatter(where, torch.from_numpy(block).view(self._dtype))

    def gather(self, ids: Tensor, *, host: bool = False) -> Tensor:
        """Rows at int64 ids, not negative, of any shape -> ids.shape + shape[1:], a copy.

        On `device`, or in memory if `host`. Raises RowIdError.
        """
        reach = torch.device("cpu") if host else self._reach()
        rows: Tensor = self._table.gather(ids.to(reach))
        rows = rows.view(self._dtype).reshape(*ids.shape, *self._row_shape)
        return rows if host else rows.to(self._device)

    def scatter(self, ids: Tensor, values: Tensor) -> None:
        """Write rows of `dtype` at int64 ids, not negative. Raises RowIdError, ValueError."""
        shape = (*ids.shape, *self._row_shape)
        if tuple(values.shape) != shape:
            raise ValueError(
                f"{ids.numel()} rows need values of shape {shape}, not {tuple(values.shape)}"
            )
        reach = self._reach() if ids.device.type == "cuda" or values.device.type == "cuda" else None
        reach = reach or torch.device("cpu")
        width = math.prod(self._row_shape)
        flat = values.detach().to(reach).contiguous().reshape(*ids.shape, width)
        self._table.scatter(ids.to(reach), self._carried(flat, len(ids.shape)))

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """(first row, rows) from end to end, of some MiB each. bfloat16 is seen as int16."""
        step = self._block_rows()
        for start in range(0, len(self), step):
            yield start, _plain(self._read(start, min(start + step, len(self))))

    def _read(self, start: int, stop: int) -> Tensor:
        """The rows [start, stop) on the host, past the hot pages."""
        out = torch.empty((stop - start, self._table.dim), dtype=self._carrier, device="cpu")
        self._table.read(start, stop, out=out)
        return out.view(self._dtype).reshape(stop - start, *self._row_shape)

    def fill(self, source: Any, first: int = 0) -> None:
        """Write rows from `first` on, of an array or tensor of this dtype, block by block."""
        step = self._block_rows()
        for start in range(0, source.shape[0], step):
            part = source[start : start + step]
            rows = as_tensor(part, "source").reshape(len(part), math.prod(self._row_shape))
            if rows.dtype != self._dtype:
                raise TypeError(f"rows of {rows.dtype} do not fit {self._dtype}")
            self._table.write(first + start, self._carried(rows.cpu(), 1))

    def _carried(self, flat: Tensor, lead: int) -> Tensor:
        """Rows as the table has them: the last dimension seen as the carrier's elements."""
        if self._carrier == self._dtype:
            return flat
        return flat.contiguous().view(self._carrier).reshape(*flat.shape[:lead], self._table.dim)

    def _block_rows(self) -> int:
        return max(1, BLOCK_BYTES // (self._carrier.itemsize * self._table.dim))

    def _reach(self) -> torch.device:
        """Where ids have to be for the rows to come the shortest way."""
        number = self._table._store.device
        if number is not None and self._device.type == "cuda" and self._device.index == number:
            return self._device
        return torch.device("cpu")

    def _ids(self, key: Any) -> Tensor:
        rows = len(self)
        if isinstance(key, Tensor) and key.device.type == "cuda" and self._reach() == key.device:
            # Checked by the device; counted from the end without having seen them.
            ids = key.to(torch.int64)
            return torch.where((ids < 0) & (ids >= -rows), ids + rows, ids)
        host = np.array(_host_ids(key), copy=True)
        host[(host < 0) & (host >= -rows)] += rows
        shape = tuple(key.shape) if hasattr(key, "shape") else np.shape(key)
        return torch.from_numpy(host.reshape(shape)).to(self._reach())


def _plain(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor as a NumPy array of the same memory; bfloat16 as int16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy()
    found: NDArray[Any] = tensor.numpy()
    return found


def _broadcast(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    try:
        return value.broadcast_to(shape)
    except RuntimeError:
        raise ValueError(f"values of shape {tuple(value.shape)} do not fit {shape}") from None


def _is_ids(key: Any) -> bool:
    """Whether a key is an array of row numbers and nothing else."""
    if isinstance(key, tuple) or key is None or key is Ellipsis or isinstance(key, slice | bool):
        return False
    if isinstance(key, int | np.integer):
        return False
    if isinstance(key, Tensor):
        return key.dtype != torch.bool
    if isinstance(key, range):
        return True
    if isinstance(key, list):
        array = np.asarray(key)
        return array.size > 0 and array.dtype.kind in "iu"
    if isinstance(key, np.ndarray):
        return key.dtype.kind in "iu"
    return hasattr(key, "__dlpack__") or hasattr(key, "__cuda_array_interface__")


def _resolve(key: Any, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], Any]:
    """The rows that a NumPy key touches, ascending, and the key of an array of only those."""
    parts = [host_part(part) for part in (key if isinstance(key, tuple) else (key,))]
    first = parts[0] if parts else Ellipsis
    rows = shape[0]
    if isinstance(first, bool | np.bool_) or first is None or first is Ellipsis:
        return np.arange(rows), tuple(parts)
    if isinstance(first, slice):
        return _range(first, rows), (slice(None), *parts[1:])
    array = np.asarray(first)
    if array.dtype == np.bool_:
        if array.shape != shape[: array.ndim]:
            raise IndexError(f"a mask of shape {array.shape} does not fit {shape}")
        touched = array.reshape(rows, -1).any(axis=1).nonzero()[0]
        return touched, (array[touched], *parts[1:])
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise IndexError(f"row numbers must be integers, not {array.dtype}")
    bad = (array < -rows) | (array >= rows)
    if bad.any():
        raise IndexError(f"row {array[bad].flat[0]} is out of range for {rows} rows")
    wrapped = np.where(array < 0, array + rows, array).astype(np.int64)
    touched, places = np.unique(wrapped, return_inverse=True)
    places = places.reshape(array.shape)
    return touched, (int(places) if isinstance(first, int | np.integer) else places, *parts[1:])


def _range(key: slice, rows: int) -> NDArray[np.int64]:
    return np.arange(*key.indices(rows), dtype=np.int64)


def host_part(part: Any) -> Any:
    """One part of a key as NumPy takes it."""
    if isinstance(part, Tensor):
        return part.detach().cpu().numpy()
    if isinstance(part, np.ndarray | slice | int | np.integer | list | range) or part is None:
        return list(part) if isinstance(part, range) else part
    if hasattr(part, "__dlpack__") or hasattr(part, "__cuda_array_interface__"):
        return as_tensor(part, "indexes").cpu().numpy()
    return part
