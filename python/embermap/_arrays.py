"""Ids and values as callers give them, turned into what the core takes, and results turned back.

The rule of the package is that a result lives where the ids do: NumPy arrays and lists give NumPy
arrays, a torch tensor gives a torch tensor on its device, a CuPy array a CuPy array, any other
object that speaks DLPack an array of its own library. Memory for results comes from that library.
Neither torch nor CuPy is imported here unless an object of theirs (or a foreign CUDA array, which
only they can wrap) was passed in.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _dtypes
from ._errors import RowIdError

Shape = tuple[int, ...]

_INT64_MAX = 2**63 - 1
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST = 1, 2, 3  # DLDeviceType


@dataclass
class Batch:
    """Ids of one call.

    On the host: `host`, int64, flat. On a CUDA device: `count` int64 at address `pointer`, to be
    read in the order of `stream`, kept alive by `owner`.
    """

    shape: Shape
    count: int
    library: str  # "numpy", "torch", "cupy": what results are made by
    host: NDArray[np.int64]
    device: int | None = None
    pointer: int = 0
    stream: int = 0
    owner: Any = None
    unsigned: bool = False  # uint64 on a device, seen as int64
    wrap: Callable[[Any], Any] | None = None  # a result of `library` as one of the caller's own
    foreign: bool = False  # arrays of another library: their memory ends in the order of no stream

    @property
    def place(self) -> str:
        return "the host" if self.device is None else f"cuda:{self.device}"


@dataclass
class Values:
    """Rows or gradients of one call: C order, `dtype` by the core's name, bytes or an address."""

    dtype: str
    bytes: NDArray[np.uint8]
    pointer: int = 0
    owner: Any = None


_NO_IDS: NDArray[np.int64] = np.empty(0, np.int64)
_NO_BYTES: NDArray[np.uint8] = np.empty(0, np.uint8)


def flat_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The memory of a C-contiguous array, not copied."""
    return array.reshape(-1).view(np.uint8)


# --- whose object is it ---------------------------------------------------------------------------


def _is_instance(value: object, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    kind = getattr(loaded, name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_torch(value: object) -> bool:
    return _is_instance(value, "torch", "Tensor")


def is_cupy(value: object) -> bool:
    return _is_instance(value, "cupy", "ndarray")


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    """(kind, index) of a foreign object that speaks DLPack; None if it does not."""
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        return None
    kind, index = value.__dlpack_device__()
    return int(kind), int(index)


def cuda_device(value: object) -> int | None:
    """The CUDA device a tensor or array lies on; None for everything else."""
    if isinstance(value, np.ndarray | np.generic | list | tuple | range | int | float):
        return None
    if is_torch(value):
        device = value.device  # type: ignore[attr-defined]
        return int(device.index) if device.type == "cuda" else None
    if is_cupy(value):
        return int(value.device.id)  # type: ignore[attr-defined]
    place = _dlpack_device(value)
    return place[1] if place is not None and place[0] == _DL_CUDA else None


def kind_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _foreign_wrap(value: Any) -> Callable[[Any], Any] | None:
    """How the library of a foreign object takes arrays in: its `from_dlpack`, if it has one."""
    found: Any = None
    if hasattr(value, "__array_namespace__"):
        found = getattr(value.__array_namespace__(), "from_dlpack", None)
    top = type(value).__module__.partition(".")[0]
    for name in (top, f"{top}.numpy", f"{top}.dlpack"):
        found = found or getattr(sys.modules.get(name), "from_dlpack", None)
    if found is None:
        return None

    def wrap(result: Any) -> Any:
        if isinstance(result, np.ndarray) and result.dtype.kind == "V":
            # NumPy cannot hand bfloat16 over by DLPack.
            namespace = (
                value.__array_namespace__() if hasattr(value, "__array_namespace__") else None
            )
            return namespace.asarray(result) if namespace is not None else result
        return found(result)

    return wrap


def _foreign_cuda(value: Any) -> Any:
    """A foreign CUDA array as a torch tensor or a CuPy array of the same memory."""
    for module in ("torch", "cupy"):
        try:
            library = importlib.import_module(module)
        except ImportError:
            continue
        return library.from_dlpack(value)
    raise TypeError(
        f"{kind_of(value)} on a CUDA device can be used where torch or CuPy is installed"
    )


# --- ids ------------------------------------------------------------------------------------------


def _id_dtype_error(dtype: object, what: str, *, empty: bool = False) -> TypeError:
    name = str(dtype).removeprefix("torch.")
    if empty:
        return TypeError(
            f"{what} must be integers, not {name}: this empty array is of {name}; "
            "make it one of integers, np.array([], dtype=np.int64)"
        )
    if name == "bool":
        return TypeError(
            f"{what} must be integers, not bool; a mask works as table[mask], "
            "or as ids through np.flatnonzero(mask)"
        )
    return TypeError(f"{what} must be integers, not {name}")


def _out_of_range(value: int, position: int) -> RowIdError:
    error = RowIdError(f"row id {value} at position {position} is out of range: beyond 64 bits")
    error.id, error.position = value, position
    return error


def _as_int64(array: NDArray[Any], what: str) -> NDArray[np.int64]:
    """A NumPy array of integers of any width as flat int64."""
    if array.dtype.kind not in "iu":
        raise _id_dtype_error(array.dtype, what, empty=array.size == 0 and array.dtype.kind == "f")
    flat = array.reshape(-1)
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and flat.size:
        large = flat > np.uint64(_INT64_MAX)
        if large.any():
            position = int(large.argmax())
            raise _out_of_range(int(flat[position]), position)
    return np.ascontiguousarray(flat, dtype=np.int64)


def _list_ids(value: Any, what: str) -> NDArray[Any]:
    """An array of the integers in (nested) Python sequences."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"{what} is no regular list of integers: {error}") from None
    if array.size == 0:
        return array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind in "fO":
        # Integers beyond 64 bits, or of both signs beyond 63, become float64 or objects.
        plain = np.array(value, dtype=object).reshape(-1)
        numbers = (int, np.integer)
        if all(isinstance(x, numbers) and not isinstance(x, bool) for x in plain):
            for position, x in enumerate(plain):
                if not -_INT64_MAX - 1 <= int(x) <= _INT64_MAX:
                    raise _out_of_range(int(x), position)
            return plain.astype(np.int64).reshape(array.shape)
        odd = next(x for x in plain if not isinstance(x, numbers) or isinstance(x, bool))
        raise TypeError(f"{what} must be integers, not {kind_of(odd)} ({odd!r})")
    return array


def _range_ids(value: range) -> NDArray[np.int64]:
    if len(value) == 0:
        return _NO_IDS
    for position, end in ((0, value[0]), (len(value) - 1, value[-1])):
        if not -_INT64_MAX - 1 <= end <= _INT64_MAX:
            raise _out_of_range(end, position)
    ids: NDArray[np.int64] = np.arange(len(value), dtype=np.int64)
    ids *= value.step
    ids += value[0]
    return ids


def read_ids(ids: Any, what: str = "ids") -> Batch:
    """Ids of any accepted kind.

    Raises TypeError (not integers, or no array at all), RowIdError (an id beyond int64).
    """
    if isinstance(ids, np.ndarray | np.generic):
        return _host_batch(_plain_numpy(ids, what), what)
    if is_torch(ids):
        return _torch_batch(ids, what)
    if is_cupy(ids):
        return _cupy_batch(ids, what)
    if isinstance(ids, range):
        return _host_batch(_range_ids(ids), what)
    if isinstance(ids, bool | str | bytes | bytearray | float | complex) or ids is None:
        raise TypeError(f"{what} must be integers, not {kind_of(ids)} ({ids!r})")
    if isinstance(ids, list | tuple):
        return _host_batch(_list_ids(ids, what), what)
    place = _dlpack_device(ids)
    if place is not None and place[0] == _DL_CUDA:
        batch = read_ids(_foreign_cuda(ids), what)
        batch.foreign = True
        batch.wrap = _foreign_wrap(ids)
        return batch
    if place is not None:
        batch = _host_batch(_foreign_host(ids, place, what), what)
        batch.wrap = _foreign_wrap(ids)
        return batch
    if hasattr(ids, "__array__") or hasattr(ids, "__array_interface__"):
        return _host_batch(np.asarray(ids), what)
    if hasattr(ids, "__index__"):
        return _host_batch(_list_ids(operator.index(ids), what), what)
    raise TypeError(
        f"{what} must be integers in a list, a NumPy array or a tensor that speaks DLPack, "
        f"not {kind_of(ids)}"
    )


def _plain_numpy(value: Any, what: str) -> NDArray[Any]:
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(f"{what} has masked elements; fill or drop them first")
    return np.asarray(value)


def _foreign_host(value: Any, place: tuple[int, int], what: str) -> NDArray[Any]:
    if place[0] not in (_DL_CPU, _DL_CUDA_HOST):
        raise TypeError(f"{what} is on a device of DLPack kind {place[0]}, neither host nor CUDA")
    if hasattr(value, "__array__"):
        return np.asarray(value)
    return np.from_dlpack(value)


def _host_batch(array: NDArray[Any], what: str) -> Batch:
    return Batch(array.shape, array.size, "numpy", _as_int64(array, what))


def check_torch(value: Any, what: str) -> None:
    if str(value.layout) != "torch.strided":
        raise TypeError(f"{what} must be a dense tensor, not one of layout {value.layout}")
    if value.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{what} is on device '{value.device}': only cpu and cuda have data here")


def _torch_batch(ids: Any, what: str) -> Batch:
    torch = sys.modules["torch"]
    check_torch(ids, what)
    if ids.dtype == torch.bool or ids.dtype.is_floating_point or ids.dtype.is_complex:
        floats = bool(ids.dtype.is_floating_point)
        raise _id_dtype_error(ids.dtype, what, empty=ids.numel() == 0 and floats)
    shape, count = tuple(ids.shape), ids.numel()
    ids = ids.detach()
    if ids.device.type == "cpu":
        host = _as_int64(ids.contiguous().numpy(), what)
        return Batch(shape, count, "torch", host)
    flat = ids.reshape(-1).to(torch.int64).contiguous()
    return Batch(
        shape,
        count,
        "torch",
        _NO_IDS,
        device=ids.device.index,
        pointer=flat.data_ptr(),
        stream=torch.cuda.current_stream(ids.device).cuda_stream,
        owner=flat,
        unsigned=ids.dtype == torch.uint64,
    )


def _cupy_batch(ids: Any, what: str) -> Batch:
    cupy = sys.modules["cupy"]
    if ids.dtype.kind not in "iu":
        raise _id_dtype_error(ids.dtype, what, empty=ids.size == 0 and ids.dtype.kind == "f")
    with ids.device:
        flat = cupy.ascontiguousarray(ids.reshape(-1).astype(cupy.int64, copy=False))
        stream = cupy.cuda.get_current_stream().ptr
    return Batch(
        tuple(ids.shape),
        int(ids.size),
        "cupy",
        _NO_IDS,
        device=int(ids.device.id),
        pointer=int(flat.data.ptr),
        stream=int(stream),
        owner=flat,
        unsigned=ids.dtype == np.uint64,
    )


# --- values ---------------------------------------------------------------------------------------


def list_values(value: Any, dtype: str, what: str) -> NDArray[Any]:
    """Numbers in (nested) Python sequences as an array of the table's dtype.

    Integers become floats; floats do not become integers, and integers have to fit.
    """
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what} is no regular list of numbers: {error}") from None
    target = _dtypes.numpy_dtype(dtype)
    if array.size == 0:
        return array.astype(target)
    if array.dtype == target:
        return array
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise TypeError(f"{what} must be numbers of {dtype}, not {array.dtype}")
    if dtype in _dtypes.FLOATING:
        return array.astype(target)
    if array.dtype.kind not in "biu":
        raise TypeError(f"{what} must be numbers of {dtype}, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    limits = np.iinfo(target)
    if low < limits.min or high > limits.max:
        bad = low if low < limits.min else high
        raise ValueError(f"{bad} in {what} does not fit into {dtype}")
    return array.astype(target)


def is_list(value: object) -> bool:
    """Numbers without a dtype of their own that matters: they are converted to the table's."""
    return isinstance(value, list | tuple | range | int | float | np.generic)


def _check_shape(shape: Shape, batch: Batch, dim: int, what: str) -> None:
    expected = (*batch.shape, dim)
    if shape == expected:
        return
    if len(shape) >= 1 and shape[-1] == dim:
        rows = math.prod(shape[:-1])
        if rows != batch.count:
            plural = "s" if batch.count != 1 else ""
            of = "values" if what == "rows" else what
            raise ValueError(
                f"{batch.count} id{plural}, {rows} row{'s' if rows != 1 else ''} of {of}: "
                f"{what} must have the shape {expected}, not {shape}"
            )
    raise ValueError(
        f"{what} of shape {shape} do not fit ids of shape {batch.shape} and a dim of {dim}: "
        f"expected {expected}"
    )


def check_dtype(name: str, accepted: tuple[str, ...], what: str) -> None:
    if name not in accepted:
        raise TypeError(
            f"{what} are of dtype {name}, the table takes {' or '.join(accepted)}: "
            "convert them first"
        )


def read_values(
    values: Any, batch: Batch, dim: int, accepted: tuple[str, ...], what: str = "rows"
) -> Values:
    """One row of `dim` values for every id, in one of the `accepted` dtypes, where the ids are.

    Any strides; a copy is made where they are not in C order. Python lists are converted to the
    first accepted dtype, arrays are not converted.
    Raises ValueError (shape, another device), TypeError (dtype).
    """
    if is_torch(values):
        check_torch(values, what)
    device = cuda_device(values)
    if is_list(values):
        array = list_values(values, accepted[0], what)
        if array.size or batch.count or not isinstance(values, list | tuple):
            _check_shape(array.shape, batch, dim, what)  # [] says nothing about the width
        return to_device(Values(accepted[0], flat_bytes(np.ascontiguousarray(array))), batch)
    if device != batch.device:
        place = "the host" if device is None else f"cuda:{device}"
        raise ValueError(f"ids are on {batch.place}, {what} on {place}: move one to the other")
    if device is not None:
        return _device_values(values, batch, dim, accepted, what)
    array, name = host_array(values, what)
    _check_shape(array.shape, batch, dim, what)
    check_dtype(name, accepted, what)
    return Values(name, flat_bytes(np.ascontiguousarray(array)))


def to_host(values: Any, what: str) -> Any:
    """An array or tensor on a CUDA device copied to the host; everything else as it is."""
    if is_torch(values):
        check_torch(values, what)
        return values.detach().cpu()
    if cuda_device(values) is None:
        return values
    array = values if is_cupy(values) else _foreign_cuda(values)
    return array.get() if is_cupy(array) else array.cpu()


def host_array(values: Any, what: str) -> tuple[NDArray[Any], str]:
    """A host array of any library as a NumPy array and the name of its dtype.

    Not copied where that is possible. A bfloat16 tensor of torch is seen as int16, so that NumPy
    need not know bfloat16.
    """
    if is_torch(values):
        tensor = values.detach()
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bfloat16":
            tensor = tensor.view(sys.modules["torch"].int16)
        return tensor.numpy(), name
    array = _host_numpy(values, what)
    return array, _dtypes.array_dtype_name(array.dtype)


def _host_numpy(values: Any, what: str) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return _plain_numpy(values, what)
    if values is None or isinstance(values, str | bytes | bytearray | dict | set):
        raise TypeError(
            f"{what} must be numbers in arrays, tensors or lists, not {kind_of(values)}"
        )
    place = _dlpack_device(values)
    if place is not None:
        return _foreign_host(values, place, what)
    if hasattr(values, "__array__") or hasattr(values, "__array_interface__"):
        return np.asarray(values)
    raise TypeError(f"{what} must be numbers in arrays, tensors or lists, not {kind_of(values)}")


def _device_values(
    values: Any, batch: Batch, dim: int, accepted: tuple[str, ...], what: str
) -> Values:
    library = sys.modules[batch.library]
    if not (is_torch(values) if batch.library == "torch" else is_cupy(values)):
        batch.foreign = True
        values = library.from_dlpack(values.detach() if is_torch(values) else values)
    name = str(values.dtype).removeprefix("torch.")
    _check_shape(tuple(values.shape), batch, dim, what)
    check_dtype(name, accepted, what)
    if batch.library == "torch":
        tensor = values.detach().contiguous()
        return Values(name, _NO_BYTES, tensor.data_ptr(), tensor)
    with values.device:
        array = library.ascontiguousarray(values)
    return Values(name, _NO_BYTES, int(array.data.ptr), array)


def to_device(values: Values, batch: Batch) -> Values:
    """Numbers from Python lists follow the ids."""
    if batch.device is None:
        return values
    library = sys.modules[batch.library]
    if batch.library == "torch":
        # torch warns of memory that it may not write to.
        host = values.bytes if values.bytes.flags.writeable else values.bytes.copy()
        moved = library.from_numpy(host).to(f"cuda:{batch.device}")
        return Values(values.dtype, _NO_BYTES, moved.data_ptr(), moved)
    with library.cuda.Device(batch.device):
        moved = library.asarray(values.bytes)
    return Values(values.dtype, _NO_BYTES, int(moved.data.ptr), moved)


# --- results --------------------------------------------------------------------------------------


@dataclass
class Result:
    """Where the core puts a result, and what the caller gets."""

    value: Any
    bytes: NDArray[np.uint8]
    pointer: int = 0


def _torch_result(shape: Shape, dtype: str, device: int | None) -> Result:
    torch = sys.modules["torch"]
    place = "cpu" if device is None else f"cuda:{device}"
    value = torch.empty(shape, dtype=getattr(torch, dtype), device=place)
    if device is None:
        return Result(value, value.reshape(-1).view(torch.uint8).numpy())
    return Result(value, _NO_BYTES, value.data_ptr())


def host_result(shape: Shape, dtype: str) -> Result:
    value = np.empty(shape, _dtypes.numpy_dtype(dtype))
    return Result(value, flat_bytes(value))


def make_result(batch: Batch, dim: int, dtype: str, out: Any = None) -> Result:
    """Memory for a row of `dim` elements for every id: new, or `out` if that fits exactly.

    Raises TypeError (dtype or kind of `out`), ValueError (its shape, order, device, read-only, or
    it overlaps the ids).
    """
    shape = (*batch.shape, dim)
    if out is not None:
        return _given_result(batch, shape, dtype, out)
    if batch.library == "torch":
        return _torch_result(shape, dtype, batch.device)
    if batch.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(batch.device):
            value = cupy.empty(shape, dtype=_dtypes.numpy_dtype(dtype))
        return Result(value, _NO_BYTES, int(value.data.ptr))
    return host_result(shape, dtype)


def _check_out(shape: Shape, wanted: Shape, name: str, dtype: str) -> None:
    if name != dtype:
        raise TypeError(f"out is of dtype {name}, the rows are {dtype}")
    if shape != wanted:
        raise ValueError(f"out has the shape {shape}, the rows need {wanted}")


def host_out(out: Any, shape: Shape, dtype: str) -> Result:
    """`out` on the host, checked: a NumPy array or a torch CPU tensor."""
    if is_torch(out):
        torch = sys.modules["torch"]
        check_torch(out, "out")
        _check_out(tuple(out.shape), shape, str(out.dtype).removeprefix("torch."), dtype)
        if not out.is_contiguous():
            raise ValueError("out must be contiguous, in C order")
        if out.requires_grad:
            raise ValueError("out requires grad; rows cannot be read into a part of a graph")
        return Result(out, out.detach().reshape(-1).view(torch.uint8).numpy())
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array or a tensor on the host, not {kind_of(out)}")
    _check_out(out.shape, shape, _dtypes.array_dtype_name(out.dtype), dtype)
    if not out.flags.c_contiguous:
        raise ValueError("out must be contiguous, in C order")
    if not out.flags.writeable:
        raise ValueError("out is read-only")
    return Result(out, flat_bytes(np.asarray(out)))


def _given_result(batch: Batch, shape: Shape, dtype: str, out: Any) -> Result:
    device = cuda_device(out)
    if device != batch.device:
        place = "the host" if device is None else f"cuda:{device}"
        raise ValueError(f"ids are on {batch.place}, out on {place}")
    if device is None:
        result = host_out(out, shape, dtype)
        # Both are contiguous, so that bounds are exact.
        if np.may_share_memory(result.bytes, batch.host):
            raise ValueError("out overlaps the ids")
        return result
    _check_out(tuple(out.shape), shape, str(out.dtype).removeprefix("torch."), dtype)
    batch.foreign |= is_torch(out) != (batch.library == "torch")
    if is_torch(out):
        contiguous, pointer = out.is_contiguous(), out.data_ptr()
        if out.requires_grad:
            raise ValueError("out requires grad; rows cannot be read into a part of a graph")
    elif is_cupy(out):
        contiguous, pointer = bool(out.flags.c_contiguous), int(out.data.ptr)
    else:
        raise TypeError(f"out must be a tensor of torch or CuPy, not {kind_of(out)}")
    if not contiguous:
        raise ValueError("out must be contiguous, in C order")
    last = pointer + math.prod(shape) * _dtypes.ITEM_BYTES[dtype]
    if pointer < batch.pointer + 8 * batch.count and batch.pointer < last:
        raise ValueError("out overlaps the ids")
    return Result(out, _NO_BYTES, pointer)


def wait_for_foreign(batch: Batch) -> None:
    """Wait until the device has read what another library may free as soon as the call returns."""
    if not batch.foreign:
        return
    library = sys.modules[batch.library]
    if batch.library == "torch":
        library.cuda.current_stream(batch.device).synchronize()
        return
    with library.cuda.Device(batch.device):
        library.cuda.get_current_stream().synchronize()


def finish(batch: Batch, result: Result, out: Any) -> Any:
    """What the caller gets: the array of the library the ids came from."""
    if out is not None:
        return out
    return result.value if batch.wrap is None else batch.wrap(result.value)
