"""Tables to files and back, in blocks: .npy, .npz, files of torch. Nothing is unpickled freely."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ._rows import Variable, numpy_dtype

PathLike = str | os.PathLike[str]


def with_suffix(file: PathLike, suffix: str) -> Path:
    """The name numpy.save and numpy.savez give a file."""
    name = os.fspath(file)
    return Path(name if name.endswith(suffix) else name + suffix)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when it is complete; nothing is left after an error."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # as open() would have made it
        Path(name).replace(path)
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the name as well is there after a loss of power
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


# --- NumPy ----------------------------------------------------------------------------------------


def header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    text = io.BytesIO()
    description = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(text, description)
    return text.getvalue()


def _write_variable(file: IO[bytes], variable: Variable) -> None:
    file.write(header(variable.shape, numpy_dtype(variable.dtype)))
    for _, block in variable.blocks():
        file.write(np.ascontiguousarray(block).data)


def check_outside(path: Path, variables: Iterable[Variable]) -> None:
    """Refuse to put a file in the place of one that rows are in (ValueError)."""
    for variable in variables:
        variable.table._store._check_outside(path)


def save_npy(file: Any, variable: Variable) -> None:
    """Write a .npy as numpy.save does, to a name or to a file that is open for writing."""
    if hasattr(file, "write"):
        _write_variable(file, variable)
        return
    path = with_suffix(file, ".npy")
    check_outside(path, [variable])
    with replacing(path) as target:
        _write_variable(target, variable)


@dataclass(frozen=True)
class Blocks:
    """An array that is made block by block."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[], Iterable[NDArray[Any]]]


Writable = Variable | NDArray[Any] | Blocks


def save_npz(file: Any, arrays: Mapping[str, Writable]) -> None:
    """Write a .npz as numpy.savez does, to a name or to a file that is open for writing."""
    if hasattr(file, "write"):
        _write_archive(file, arrays)
        return
    path = with_suffix(file, ".npz")
    check_outside(path, [array for array in arrays.values() if isinstance(array, Variable)])
    with replacing(path) as target:
        _write_archive(target, arrays)


def save_array(file: Any, array: Blocks) -> None:
    """save_npy of something that is no table."""
    with contextlib.ExitStack() as stack:
        target = file
        if not hasattr(file, "write"):
            target = stack.enter_context(replacing(with_suffix(file, ".npy")))
        target.write(header(array.shape, array.dtype))
        for block in array.make():
            target.write(np.ascontiguousarray(block, array.dtype).data)


def _write_archive(file: IO[bytes], arrays: Mapping[str, Writable]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                if isinstance(array, Variable):
                    _write_variable(entry, array)
                    continue
                entry.write(header(array.shape, array.dtype))
                if isinstance(array, Blocks):
                    for block in array.make():
                        entry.write(np.ascontiguousarray(block, array.dtype).data)
                else:
                    entry.write(np.ascontiguousarray(array).tobytes())


def open_npy(file: PathLike) -> NDArray[Any]:
    """A .npy file, mapped: nothing is read yet. Raises ValueError for any other file."""
    found = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"{os.fspath(file)!r} is no .npy file")
    return found


class Archive:
    """The arrays of a .npz, read in blocks of rows."""

    def __init__(self, file: PathLike) -> None:
        path = Path(file)
        if not path.exists() and not path.name.endswith(".npz"):
            path = with_suffix(file, ".npz")
        if not path.exists():
            raise FileNotFoundError(2, "no such file", os.fspath(file))
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{os.fspath(path)!r} is no .npz file")
        self._zip = zipfile.ZipFile(path)
        self.path = path
        self.names = [n.removesuffix(".npy") for n in self._zip.namelist() if n.endswith(".npy")]

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[tuple[int, ...], np.dtype[Any], IO[bytes]]]:
        """Shape, dtype, and the bytes of an array in C order."""
        with self._zip.open(f"{name}.npy") as entry:
            version = np.lib.format.read_magic(entry)
            read = np.lib.format.read_array_header_1_0
            if version != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(entry)
            if dtype.hasobject or (fortran and len(shape) > 1):
                raise ValueError(f"{name!r} of {str(self.path)!r} is not an array of numbers")
            yield shape, dtype, entry

    def read(self, name: str) -> NDArray[Any]:
        """A small array."""
        with self.open(name) as (shape, dtype, entry):
            found: NDArray[Any] = np.frombuffer(entry.read(), dtype).reshape(shape).copy()
            return found


# --- torch ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def mapped_tensor(variable: Variable, folder: Path) -> Iterator[Tensor]:
    """A table as one tensor over a file, which is removed at the end: takes disk, not memory."""
    count = int(np.prod(variable.shape, dtype=np.int64))
    number, name = tempfile.mkstemp(prefix=".embermap-", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            for _, block in variable.blocks():
                file.write(np.ascontiguousarray(block).data)
        if count == 0:
            yield torch.empty(variable.shape, dtype=variable.dtype, device="cpu")
            return
        flat = torch.from_file(name, shared=False, size=count, dtype=variable.dtype, device="cpu")
        yield flat.reshape(variable.shape)
    finally:
        Path(name).unlink()


def save_torch(file: Any, variables: Mapping[str, Variable], small: Mapping[str, Any]) -> None:
    """torch.save of one tensor (the only variable, under the name ""), or of a dict of them."""
    with contextlib.ExitStack() as stack:
        if hasattr(file, "write"):
            target, folder = file, Path(tempfile.gettempdir())
        else:
            check_outside(Path(file), variables.values())
            target = stack.enter_context(replacing(Path(file)))
            folder = Path(file).absolute().parent
        tensors = {
            name: stack.enter_context(mapped_tensor(variable, folder))
            for name, variable in variables.items()
        }
        torch.save(tensors.get("", {**tensors, **small}), target)


def load_torch(file: PathLike) -> Any:
    """What torch.load gives with weights_only=True, on the CPU, mapped where the file allows it."""
    path = os.fspath(file)
    mapped = zipfile.is_zipfile(path)  # files of torch before 1.6 are none
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
