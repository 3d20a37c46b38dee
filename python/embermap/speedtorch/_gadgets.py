"""Arrays of .npy files, of any rank, from which tensors come and into which they go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _dtypes
from .. import init as initializers
from .._store import Store
from . import _files
from ._home import PathLike
from ._rows import BLOCK_BYTES, Variable, as_tensor, flat_ids, host_part, to_numpy, torch_dtype
from ._switcher import Base, Tables

_TABLE = "data"


class DataGadget(Base):
    """An array from a .npy file, of any rank and any dtype torch has, for quick transfer.

    Args:
        fileName: the .npy file. What insertData() changes does not reach it; saveCupy() writes.
        CPUPinn: kept, and needed no more.
        directory, memory: as for ModelFactory.
        device: where tensors come and go; None: the first CUDA device, or the CPU where there is
            none.
        store: an open embermap.Store, instead of directory, memory and device.
        name: of the table in it; None: "data".
    """

    _first_steps: ClassVar[str] = "gadgetInit() first"

    def __init__(
        self,
        fileName: PathLike,
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
    ) -> None:
        self.fileName = fileName
        self.CPUPinn = CPUPinn
        if store is None and name is not None:
            raise ValueError("name= is for a store that is given: store=, name=")
        self._name = name or _TABLE
        self._settle(directory, memory, device, store)

    def gadgetInit(self) -> None:
        """Read the file, in blocks. Raises FileNotFoundError, ValueError, TypeError (a dtype that
        torch does not have)."""
        self._take(self.fileName)

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Take another .npy file, of any shape and dtype, instead."""
        self._take(loadFileName)

    def _take(self, file: PathLike) -> None:
        source = _files.open_npy(file)
        dtype = torch_dtype(source.dtype, f"the dtype of {os.fspath(file)!r},")
        if source.ndim == 0 or source.size == 0:
            raise ValueError(
                f"{os.fspath(file)!r} has the shape {source.shape}: there is nothing to index"
            )
        self._create(source.shape[0], {self._name: (source.shape[1:], dtype, initializers.Zeros())})
        self._variable().fill(source)

    def _variable(self) -> Variable:
        return self._live().variables[self._name]

    @property
    def device(self) -> torch.device:
        """Where tensors come and go. Raises RuntimeError before gadgetInit()."""
        return self._live().device

    def getData(self, indexes: Any) -> Tensor:
        """A tensor with what `indexes` select, a copy, on `device`.

        Args:
            indexes: whatever a NumPy array takes: numbers, slices, arrays or tensors of integers or
                bools, lists, and tuples of them.

        Raises IndexError.
        """
        return self._variable()[indexes]

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write a tensor, or any array, where `indexes` select. The last of a row stays.

        Broadcast and converted to the dtype as NumPy does. Raises IndexError, ValueError (shape):
        nothing has been written then.
        """
        self._variable()[indexes] = as_tensor(dataObject)

    def saveCupy(self, saveFileName: Any) -> None:
        """Write the array to a .npy file, as numpy.save does, in blocks."""
        _files.save_npy(saveFileName, self._variable())

    def getNumpyVersion(self) -> NDArray[Any]:
        """The array as a NumPy array in memory."""
        return self._variable().numpy()

    def getCupyVar(self) -> Variable:
        """A live handle of the array."""
        return self._variable()

    @property
    def CUPYcorpus(self) -> Variable:
        """`getCupyVar()`."""
        return self._variable()


class DataGadgetMM(Base):
    """An array in a .npy file that is used in place, of any rank: insertData() changes the file.

    It does so by `flush()`, `close()`, or the end of the process. A two-dimensional file of a dtype
    that tables have, in C order, is adopted by a store, so that memory is bounded and kernels reach
    the rows; any other one is mapped by NumPy.

    The arguments are those of DataGadget; `directory` has what embermap knows about the file.
    """

    _first_steps: ClassVar[str] = "gadgetInit() first"

    def __init__(
        self,
        fileName: PathLike,
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
    ) -> None:
        self.fileName = fileName
        self.CPUPinn = CPUPinn
        if store is None and name is not None:
            raise ValueError("name= is for a store that is given: store=, name=")
        self._name = name or _TABLE
        self._mapped: MappedArray | None = None
        self._settle(directory, memory, device, store)

    def gadgetInit(self) -> None:
        """Open the file; nothing is read yet. Raises FileNotFoundError, ValueError, TypeError."""
        self.close()
        found = _files.open_npy(self.fileName)
        dtype = torch_dtype(found.dtype, f"the dtype of {os.fspath(self.fileName)!r},")
        device = self._check_device()
        name = str(dtype).removeprefix("torch.")
        fits = found.ndim == 2 and found.size > 0 and name in _dtypes.ITEM_BYTES
        if not fits or not found.flags.c_contiguous:
            self._mapped = MappedArray(self.fileName, dtype, device)
            return
        self._adopt(found.shape, dtype, device)

    def _adopt(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        home = self._open_home(device, shape[1] * dtype.itemsize, shape[0], keep=True)
        try:
            file = Path(self.fileName).absolute()
            if self._name in home.store:
                table = home.store[self._name]
                if table.path.resolve() != file.resolve():
                    raise ValueError(
                        f"table {self._name!r} of {str(home.store.path)!r} is that of "
                        f"{str(table.path)!r}, not of {str(file)!r}"
                    )
            else:
                table = home.store.adopt(self._name, file)
        except BaseException:
            home.close()
            raise
        self._home = home
        self._tables = Tables(home, device)
        self._tables.variables[self._name] = Variable(table, shape[1:], dtype, device)

    def _variable(self) -> Any:
        return self._mapped if self._mapped is not None else self._live().variables[self._name]

    def getData(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> Tensor:
        """A tensor with what the indexes select, a copy; see DataGadget.getData.

        With negatives: the rows of the positives in row-major order, then those of the negatives.
        """
        if retrievedNegIndexes is None:
            found: Tensor = self._variable()[retrievedPosIndexes]
            return found
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, torch.device("cpu"))
        both: Tensor = self._variable()[ids]
        return both

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Write a tensor, or any array, where `indexes` select; see DataGadget.insertData."""
        self._variable()[indexes] = as_tensor(dataObject)

    def saveCupy(self, saveFileName: Any) -> None:
        """Write the array to another .npy file, as numpy.save does, in blocks."""
        if self._mapped is None:
            _files.save_npy(saveFileName, self._variable())
            return
        if not hasattr(saveFileName, "write"):
            path = _files.with_suffix(saveFileName, ".npy")
            if path.resolve() == Path(self.fileName).resolve():
                raise ValueError(f"{str(path)!r} is the file of this gadget")
        _files.save_array(saveFileName, self._mapped.blocks_of())

    def getNumpyVersion(self) -> NDArray[Any]:
        """The array as a NumPy array in memory."""
        found: NDArray[Any] = self._variable().numpy()
        return found

    def getCupyMM(self) -> Any:
        """A live handle of the array."""
        return self._variable()

    @property
    def CUPYmemmap(self) -> Any:
        """`getCupyMM()`."""
        return self._variable()

    def flush(self) -> None:
        """Bring the file up to now."""
        if self._mapped is not None:
            self._mapped.flush()
        else:
            super().flush()

    def close(self) -> None:
        """Bring the file up to now, and let go of it."""
        if self._mapped is not None:
            self._mapped.flush()
            self._mapped = None
        super().close()
        self._home, self._tables = None, None


class MappedArray:
    """A .npy file mapped by NumPy, indexed for tensors."""

    def __init__(self, file: PathLike, dtype: torch.dtype, device: torch.device) -> None:
        self._array = np.load(file, mmap_mode="r+", allow_pickle=False)
        self.dtype = dtype
        self.device = device
        self.shape: tuple[int, ...] = self._array.shape

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Tensor:
        parts = tuple(host_part(part) for part in (key if isinstance(key, tuple) else (key,)))
        return as_tensor(np.array(self._array[parts], copy=True)).to(self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        parts = tuple(host_part(part) for part in (key if isinstance(key, tuple) else (key,)))
        self._array[parts] = to_numpy(as_tensor(value, "value"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self._array, dtype=dtype, copy=True)

    def numpy(self) -> NDArray[Any]:
        """All of it as a NumPy array in memory."""
        return np.array(self._array)

    def blocks_of(self) -> _files.Blocks:
        """What a file of it holds."""
        native = self._array.dtype.newbyteorder("=")
        step = max(1, BLOCK_BYTES * len(self._array) // max(1, self._array.nbytes))
        starts = range(0, len(self._array), step)
        return _files.Blocks(
            self.shape,
            native,
            lambda: (np.ascontiguousarray(self._array[s : s + step], native) for s in starts),
        )

    def flush(self) -> None:
        self._array.flush()
