"""Co-occurrence counts of V x V pairs: only those that occur, in files; see _runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _checks
from .._errors import RowIdError
from .._sparse import sparse_tensor
from . import _files, _home
from ._home import PathLike, Place
from ._rows import as_tensor, flat_ids, to_numpy, torch_dtype
from ._runs import Keys, Runs, Values, add_checked, sum_pairs
from ._switcher import first_free

_LEAST_MEMORY = 1 << 20


class CountTable:
    """Counts of pairs (row, column), each from 0 to total_classes - 1, most of which never occur.

    `counts.add(rows, columns)` counts pairs, `counts[rows, columns]` tells how often,
    `counts.triples()` gives all that occur. Memory stays within `memory` whatever is added; the
    rest is in `directory`. Not for several threads at once. Sums of integers are exact up to 2**63;
    what `datatype` does not hold is OverflowError when it is asked for, never another number.
    """

    _place: Place = "auto"

    _runs: Runs | None = None

    def _begin(
        self,
        total_classes: Any,
        datatype: Any,
        *,
        directory: PathLike | None,
        memory: int | str,
        device: Any,
    ) -> None:
        self.total_classes = _checks.integer(total_classes, "total_classes", most=3_037_000_499)
        self.datatype = self.dtype = datatype
        if isinstance(datatype, torch.dtype) or datatype == "bfloat16":
            plain = to_numpy(torch.empty(0, dtype=torch_dtype(datatype), device="cpu")).dtype
        else:
            plain = np.dtype(datatype)
        if plain.kind not in "iuf":
            raise TypeError(f"datatype must be of integers or floats, not {datatype!r}")
        self._out = plain
        self._wide = np.dtype(np.float64 if plain.kind == "f" else np.int64)
        self._memory = _checks.size(memory, "memory")
        if self._memory < _LEAST_MEMORY:
            raise ValueError(f"memory must be at least {_LEAST_MEMORY} bytes, not {memory!r}")
        self._directory = directory
        _home.choose_device(type(self).__name__, self._place, device, None)

    # --- beginning and end ------------------------------------------------------------------------

    def comInit(self, CPUPinn: bool = False) -> None:
        """Begin with no pair counted. CPUPinn is kept for old calls, and does nothing.

        Raises FileExistsError where `directory` has counts: resume() goes on with them.
        """
        if self._runs is not None:
            self._live().clear()
            return
        self._open(resume=False)

    def resume(self) -> None:
        """Go on with the counts that `directory` has from before.

        Raises FileNotFoundError, FormatError (not counts, or of other classes or kinds of numbers),
        LockedError (in use elsewhere).
        """
        if self._directory is None:
            raise ValueError("resume() needs directory=, the one whose counts are to be used")
        self._open(resume=True)

    def _new_directory(self) -> tuple[Path, bool]:
        """(where, whether it is removed at the end)."""
        if self._directory is not None:
            path = Path(self._directory).absolute()
            path.mkdir(exist_ok=True)
            return path, False
        return Path(tempfile.mkdtemp(prefix="embermap-speedtorch-")), True

    def _open(self, *, resume: bool) -> None:
        path, scratch = self._new_directory()
        try:
            files = Runs(
                path, self.total_classes, self._wide, self._memory, scratch=scratch, resume=resume
            )
        except BaseException:
            if scratch:
                shutil.rmtree(path, ignore_errors=True)
            raise
        self._runs = files
        # Counts that are dropped go to their files, and so do those of a process that ends.
        weakref.finalize(self, files.close)

    def _live(self) -> Runs:
        if self._runs is None:
            raise RuntimeError(f"{type(self).__name__} has no counts yet: call comInit() first")
        if self._runs.closed:
            raise ValueError(f"the counts in {str(self._runs.path)!r} are closed")
        return self._runs

    def flush(self) -> None:
        """Write what is counted to the files: they are durable then. Nothing for temporary ones."""
        live = self._live()
        if not live.scratch:
            live.spill()

    def close(self) -> None:
        """Write what is counted, or remove the directory if it is a temporary one.

        A second call does nothing. It comes by itself when the object goes and when the process
        ends.
        """
        if self._runs is not None:
            self._runs.close()

    @property
    def directory(self) -> Path:
        """Where the files are. Raises RuntimeError before comInit()."""
        return self._live().path

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- counting ---------------------------------------------------------------------------------

    def add(self, rows: Any, columns: Any, counts: Any = 1) -> None:
        """Count pairs: `rows` and `columns`, ids in arrays, tensors or lists, are broadcast.

        Args:
            counts: added to each pair; a number, or an array of the same shape. Of a pair given
                several times all count. Floats need a datatype of floats.

        Raises RowIdError (an id that is no class), TypeError, ValueError: nothing is counted then.
        """
        live = self._live()
        first, second = self._ids(rows, "rows"), self._ids(columns, "columns")
        values = to_numpy(as_tensor(counts, "counts"))
        if values.dtype.kind == "f" and self._wide.kind != "f":
            raise TypeError(f"counts of {values.dtype} do not fit {self.datatype!r}")
        if values.dtype.kind not in "iuf":
            raise TypeError(f"counts must be numbers, not {values.dtype}")
        if values.dtype == np.uint64 and (values > np.uint64(2**63 - 1)).any():
            raise OverflowError(f"a count of {values.max()} is beyond 63 bits")
        try:
            shape = np.broadcast_shapes(first.shape, second.shape, values.shape)
        except ValueError:
            raise ValueError(
                f"rows of shape {first.shape}, columns of {second.shape} and counts of "
                f"{values.shape} cannot be broadcast to one shape"
            ) from None
        parts = [np.broadcast_to(part, shape).reshape(-1) for part in (first, second, values)]
        step = max(1, live.room() // 2)
        for start in range(0, parts[0].size, step):
            some = slice(start, start + step)
            keys = parts[0][some].astype(np.uint64) * np.uint64(self.total_classes)
            keys += parts[1][some].astype(np.uint64)
            live.append(keys, parts[2][some].astype(self._wide))

    def _ids(self, ids: Any, what: str) -> NDArray[np.int64]:
        flat = flat_ids(ids, None, torch.device("cpu")).numpy()
        bad = (flat < 0) | (flat >= self.total_classes)
        if bad.any():
            position = int(bad.argmax())
            error = RowIdError(
                f"id {flat[position]} at position {position} of {what} is out of range for "
                f"{self.total_classes} classes"
            )
            error.id, error.position = int(flat[position]), position
            raise error
        shape = tuple(ids.shape) if hasattr(ids, "shape") else np.shape(ids)
        return flat.reshape(shape)

    # --- asking -----------------------------------------------------------------------------------

    def get(self, rows: Any, columns: Any) -> NDArray[Any]:
        """How often pairs were counted: `rows` and `columns` broadcast -> that shape, datatype."""
        live = self._live()
        first, second = self._ids(rows, "rows"), self._ids(columns, "columns")
        try:
            first, second = np.broadcast_arrays(first, second)
        except ValueError:
            raise ValueError(
                f"rows of shape {first.shape} and columns of {second.shape} cannot be broadcast "
                "to one shape"
            ) from None
        wanted = first.reshape(-1).astype(np.uint64) * np.uint64(self.total_classes)
        wanted += second.reshape(-1).astype(np.uint64)
        sums = np.zeros(wanted.size, self._wide)
        for keys, values in live.sources():
            if len(keys) == 0:
                continue
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            hit = keys[at] == wanted
            add_checked(sums, hit, values[at[hit]])
        return self._shown(sums, wanted).reshape(first.shape)

    def __getitem__(self, key: Any) -> Any:
        """`counts[rows, columns]`, as get(); `counts[row]`, all of a row, a vector."""
        if isinstance(key, tuple) and len(key) == 2:
            found = self.get(*key)
            return found[()] if found.ndim == 0 else found
        if isinstance(key, int | np.integer):
            dense = np.zeros(self.total_classes, self._out)
            columns, counts = self.row(int(key))
            dense[columns] = counts
            return dense
        raise TypeError("counts are indexed by [rows, columns] or by the number of a row")

    def __setitem__(self, key: Any, value: Any) -> None:
        """`counts[rows, columns] = value`; for counting use add(), where repeated pairs count."""
        if not (isinstance(key, tuple) and len(key) == 2):
            raise TypeError("counts are set by [rows, columns]")
        now = self.get(*key).astype(self._wide)
        wanted = np.broadcast_to(to_numpy(as_tensor(value, "value")), now.shape)
        rows, columns = np.broadcast_arrays(self._ids(key[0], "rows"), self._ids(key[1], "columns"))
        # Of a pair that is set twice the last value stays.
        pairs = rows.reshape(-1) * self.total_classes + columns.reshape(-1)
        _, last = np.unique(pairs[::-1], return_index=True)
        keep = pairs.size - 1 - last
        change = (wanted.astype(self._wide) - now).reshape(-1)[keep]
        self.add(rows.reshape(-1)[keep], columns.reshape(-1)[keep], change)

    def row(self, row: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The columns that occur with a row, ascending, and their counts."""
        live = self._live()
        number = int(self._ids([row], "rows")[0])
        low = np.uint64(number * self.total_classes)
        high = np.uint64((number + 1) * self.total_classes)
        parts = []
        for keys, values in live.sources():
            some = slice(int(np.searchsorted(keys, low)), int(np.searchsorted(keys, high)))
            parts.append((np.array(keys[some]), np.array(values[some])))
        keys, values = sum_pairs(parts, self._wide)
        keys, values = keys[values != 0], values[values != 0]
        return (keys - low).astype(np.int64), self._shown(values, keys)

    def triples(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]]:
        """All pairs that occur, sorted by row and column, in blocks: (rows, columns, counts)."""
        live = self._live()
        classes = np.uint64(max(1, self.total_classes))
        for keys, values in live.merged_blocks(live.sources()):
            if len(keys):
                rows, columns = np.divmod(keys, classes)
                yield rows.astype(np.int64), columns.astype(np.int64), self._shown(values, keys)

    def toTriples(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        """All pairs that occur as three arrays in memory: (rows, columns, counts)."""
        blocks = list(self.triples())
        if not blocks:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, self._out)
        rows, columns, counts = (np.concatenate(part) for part in zip(*blocks, strict=True))
        return rows, columns, counts

    def toScipy(self, format: str = "coo") -> Any:  # noqa: A002
        """All pairs that occur as a matrix of scipy.sparse, in memory. Needs SciPy."""
        import scipy.sparse

        rows, columns, counts = self.toTriples()
        shape = (self.total_classes, self.total_classes)
        return scipy.sparse.coo_matrix((counts, (rows, columns)), shape=shape).asformat(format)

    @property
    def shape(self) -> tuple[int, int]:
        """(total_classes, total_classes)."""
        return (self.total_classes, self.total_classes)

    def __len__(self) -> int:
        return self.total_classes

    def __bool__(self) -> bool:
        return True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("counts cannot be seen as a dense matrix without a copy")
        dense = self.getNumpyVersion()
        return dense if dtype is None else dense.astype(dtype, copy=False)

    @property
    def nnz(self) -> int:
        """Number of pairs that occur. Reads all of them."""
        live = self._live()
        return sum(len(keys) for keys, _ in live.merged_blocks(live.sources()))

    def sum(self) -> Any:
        """The sum of all counts."""
        live = self._live()
        total: Any = 0
        for _, values in live.sources():
            for start in range(0, len(values), 1 << 20):
                total += values[start : start + (1 << 20)].sum(dtype=self._wide).item()
        return total

    def merge(self, other: CountTable) -> None:
        """Add all counts of another one, which stays as it is.

        Raises TypeError, ValueError (other classes).
        """
        if not isinstance(other, CountTable):
            raise TypeError(f"other must be counts, not {other!r}")
        if other.total_classes != self.total_classes:
            raise ValueError(
                f"counts of {other.total_classes} classes cannot be added to those of "
                f"{self.total_classes}"
            )
        if other._wide.kind == "f" and self._wide.kind != "f":
            raise TypeError(f"counts of {other.datatype!r} do not fit {self.datatype!r}")
        live, added = self._live(), other._live()
        for keys, values in added.merged_blocks(added.sources()):
            for start in range(0, len(keys), step := max(1, live.room() // 2)):
                some = slice(start, start + step)
                live.append(keys[some], values[some].astype(self._wide))

    def compact(self) -> None:
        """Merge all that is counted into one run."""
        live = self._live()
        live.spill()
        if live.runs:
            live.merge_runs(list(live.runs), max(run.level for run in live.runs))

    def _shown(self, values: Values, keys: Keys) -> NDArray[Any]:
        """Counts in the datatype. Raises OverflowError naming a pair whose count it cannot hold."""
        if self._out.kind != "f":
            limits = np.iinfo(self._out)
            # uint64 holds all that an int64 can be, but for the negative.
            most = min(int(limits.max), 2**63 - 1)
            bad = (values < int(limits.min)) | (values > most)
            if bad.any():
                at = int(bad.argmax())
                row, column = divmod(int(keys[at]), self.total_classes)
                raise OverflowError(
                    f"({row}, {column}) was counted {values[at]} times, which {self._out} does not "
                    "hold"
                )
        shown: NDArray[Any] = values.astype(self._out)
        return shown

    def getNumpyVersion(self) -> NDArray[Any]:
        """The dense matrix, (total_classes, total_classes), as a NumPy array in memory."""
        dense = np.zeros((self.total_classes, self.total_classes), self._out)
        for rows, columns, counts in self.triples():
            dense[rows, columns] = counts
        return dense

    # --- files ------------------------------------------------------------------------------------

    def saveCupy(self, saveFileName: Any) -> None:
        """Write the pairs that occur to a .npz file, as scipy.sparse.save_npz does, in blocks.

        The file appears under its name, to which ".npz" is added if it lacks it, when it is
        complete; scipy.sparse.load_npz reads it.
        """
        self.compact()
        runs = self._live().runs
        pairs = runs[0].pairs if runs else 0
        index = np.dtype(np.int32 if self.total_classes <= 2**31 else np.int64)

        def part(which: int) -> Any:
            return lambda: (triple[which] for triple in self.triples())

        _files.save_npz(
            saveFileName,
            {
                "row": _files.Blocks((pairs,), index, part(0)),
                "col": _files.Blocks((pairs,), index, part(1)),
                "format": np.array(b"coo"),
                "shape": np.array([self.total_classes, self.total_classes], np.int64),
                "data": _files.Blocks((pairs,), self._out, part(2)),
            },
        )

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Take the counts of a file that saveCupy() wrote, or scipy.sparse.save_npz (COO).

        In blocks. Raises ValueError (another format or shape), TypeError (floats for integers).
        """
        with _files.Archive(loadFileName) as archive:
            form = archive.read("format") if "format" in archive.names else np.array(b"")
            if form.item() not in (b"coo", "coo"):
                raise ValueError(f"{str(archive.path)!r} is not a COO matrix of scipy.sparse")
            shape = tuple(archive.read("shape").tolist())
            if shape != (self.total_classes, self.total_classes):
                raise ValueError(
                    f"{str(archive.path)!r} has the shape {shape}, the counts are of "
                    f"{self.total_classes} classes"
                )
            with (
                archive.open("row") as (size, row_dtype, rows),
                archive.open("col") as (_, column_dtype, columns),
                archive.open("data") as (_, dtype, data),
            ):
                if dtype.kind == "f" and self._wide.kind != "f":
                    raise TypeError(f"counts of {dtype} do not fit {self.datatype!r}")
                self.comInit()
                step = max(1, self._live().room() // 2)
                for start in range(0, size[0], step):
                    count = min(step, size[0] - start)
                    self.add(
                        np.frombuffer(rows.read(count * row_dtype.itemsize), row_dtype),
                        np.frombuffer(columns.read(count * column_dtype.itemsize), column_dtype),
                        np.frombuffer(data.read(count * dtype.itemsize), dtype),
                    )

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"<embermap.speedtorch.{kind} {self.total_classes} classes, {self._out}>"


class COM(CountTable):
    """Co-occurrence counts of V x V pairs, sparse and in files; was a dense CuPy matrix.

    Args:
        total_classes: V, at most 3,037,000,499.
        datatype: of the counts that are given back: any integers or floats.
        CPUPinn: kept, and does nothing.
        directory: where the files are; None: a temporary directory, removed at the end.
        memory: bytes, or a text, that pairs take in memory.
        device: kept for symmetry; counts are in memory and files.
    """

    def __init__(
        self,
        total_classes: int,
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str = "64MiB",
    ) -> None:
        self.CPUPinn = CPUPinn
        self._begin(total_classes, datatype, directory=directory, memory=memory, device="cpu")

    @property
    def CUPYCom(self) -> COM:
        """The counts, which `CUPYCom[rows, columns]` indexes."""
        self._live()
        return self

    def getCupyVar(self) -> COM:
        """The counts themselves."""
        return self.CUPYCom


class COMMM(CountTable):
    """Co-occurrence counts in files of their own: "DISKNAMEn.memmap", n the first number free.

    The arguments are those of COM, and diskname, the beginning of the name.
    """

    def __init__(
        self,
        total_classes: int,
        diskname: PathLike = "COM",
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str = "64MiB",
    ) -> None:
        self.diskname = diskname
        self.CPUPinn = CPUPinn
        self.fileName: str | None = None
        self._begin(total_classes, datatype, directory=directory, memory=memory, device="cpu")

    def _new_directory(self) -> tuple[Path, bool]:
        if self._directory is not None:
            return super()._new_directory()
        made = first_free(os.fspath(self.diskname), ".memmap")
        self.fileName = str(made)
        return made.absolute(), False

    @property
    def CUPYmemmap(self) -> COMMM:
        """The counts, which `CUPYmemmap[rows, columns]` indexes."""
        self._live()
        return self

    def getCupyMM(self) -> COMMM:
        """The counts themselves."""
        return self.CUPYmemmap


class _TorchCounts(CountTable):
    """Files of torch, and sparse tensors."""

    def __init__(
        self,
        total_classes: int,
        datatype: Any = torch.int32,
        *,
        directory: PathLike | None = None,
        memory: int | str = "64MiB",
        device: Any = None,
    ) -> None:
        self._begin(total_classes, datatype, directory=directory, memory=memory, device=device)

    def toTorch(self) -> torch.Tensor:
        """All pairs that occur as a sparse COO tensor, coalesced, in memory."""
        rows, columns, counts = self.toTriples()
        return sparse_tensor(
            torch.from_numpy(np.stack([rows, columns])),
            as_tensor(counts),
            (self.total_classes, self.total_classes),
            is_coalesced=True,
        )

    def saveTorch(self, saveFileName: Any) -> None:
        """torch.save() of toTorch()."""
        if hasattr(saveFileName, "write"):
            torch.save(self.toTorch(), saveFileName)
            return
        with _files.replacing(Path(saveFileName)) as file:
            torch.save(self.toTorch(), file)

    def loadTorch(self, loadFileName: PathLike) -> None:
        """Take the counts of a sparse or dense tensor that torch.save() wrote.

        Raises ValueError (shape), TypeError (no tensor; floats for integers).
        """
        found = torch.load(os.fspath(loadFileName), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"{str(loadFileName)!r} has no tensor, but a {type(found).__name__}")
        if tuple(found.shape) != (self.total_classes, self.total_classes):
            raise ValueError(
                f"{str(loadFileName)!r} has the shape {tuple(found.shape)}, the counts are of "
                f"{self.total_classes} classes"
            )
        pairs = found.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        if pairs.dtype.is_floating_point and self._wide.kind != "f":
            raise TypeError(f"counts of {pairs.dtype} do not fit {self.datatype!r}")
        self.comInit()
        self.add(pairs.indices()[0], pairs.indices()[1], pairs.values())

    def getTorchVar(self) -> Any:
        """The counts themselves."""
        self._live()
        return self

    @property
    def pytorchGPUVar(self) -> Any:
        """The counts, which `pytorchGPUVar[rows, columns]` indexes."""
        return self.getTorchVar()

    @property
    def pytorchCPUVar(self) -> Any:
        """The counts, which `pytorchCPUVar[rows, columns]` indexes."""
        return self.getTorchVar()


class PytorchCOM(_TorchCounts):
    """Co-occurrence counts, sparse and in files; see COM."""

    _place = "cpu"


class CPUPytorchCOM(_TorchCounts):
    """Co-occurrence counts, sparse and in files; see COM."""

    _place = "cpu"


class GPUPytorchCOM(_TorchCounts):
    """Co-occurrence counts, sparse and in files; see COM. Needs no GPU: counts are in memory."""

    _place = "cpu"
