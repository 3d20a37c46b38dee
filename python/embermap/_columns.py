"""Parquet and Arrow files: a column of lists of numbers as rows, through pyarrow."""

from __future__ import annotations

import bisect
import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _core, _dtypes, _errors

FORMATS = ("parquet", "arrow")
_EXTENSIONS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_BLOCK_BYTES = 4 << 20  # of rows, read at a time
_GROUP_BYTES = 64 << 20  # of rows, written as one group
_DEFAULT_COLUMN = "weight"


class Place(NamedTuple):
    """A file, the column of it that is meant (empty: the only one), and its format."""

    file: Path
    column: str
    format: str


def place_of(location: str | os.PathLike[str], format: str | None) -> Place | None:  # noqa: A002
    """Where rows lie, if that is a Parquet or Arrow file; None for all other formats."""
    if format is not None and format not in FORMATS:
        return None
    text = os.fsdecode(location)
    file, column = text, ""
    if not Path(text).exists():
        for at in reversed([i for i, c in enumerate(text) if c == ":" and i > 0]):
            before = text[:at]
            if Path(before).is_file() or Path(before).suffix.lower() in _EXTENSIONS:
                file, column = before, text[at + 1 :]
                break
        if file != text and not column:
            raise ValueError(f"{text!r}: nothing after the ':'")
    if format is not None:
        return Place(Path(file), column, format)
    found = _format_of_content(file) or _EXTENSIONS.get(Path(file).suffix.lower())
    return None if found is None else Place(Path(file), column, found)


def _format_of_content(file: str) -> str | None:
    with contextlib.suppress(OSError), Path(file).open("rb") as opened:
        head = opened.read(8)
        if head.startswith(b"PAR1"):
            return "parquet"
        if head.startswith(b"ARROW1"):
            return "arrow"
    return None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "Parquet and Arrow files need the package pyarrow: pip install pyarrow"
        ) from error
    return pyarrow


@contextlib.contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """pyarrow's errors as those of every other format."""
    pa = _pyarrow()
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(file)) from error
        raise _errors.FormatError(f"{file}: {error}") from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        raise _errors.FormatError(f"{file}: {error}") from error


class _Column(NamedTuple):
    name: str
    dtype: str  # of the core, or Arrow's own for one that no table can hold
    dim: int | None  # None: lists that do not say their length
    lists: bool
    known: bool  # whether a table can hold it


def _column_of(field: Any) -> _Column:
    pa = _pyarrow()
    kind = field.type
    dim: int | None = 1
    lists = True
    if pa.types.is_fixed_size_list(kind):
        dim, kind = kind.list_size, kind.value_type
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        dim, kind = None, kind.value_type
    else:
        lists = False
    name = {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "uint8"}.get(
        str(kind), str(kind)
    )
    known = name in _dtypes.ITEM_BYTES and name != "bfloat16"
    return _Column(field.name, name if known else str(field.type), dim, lists, known)


class _Source:
    """Batches of one column of a file, from any row on."""

    def __init__(self, place: Place) -> None:
        self.place = place
        if not place.file.exists():
            raise FileNotFoundError(2, "No such file or directory", os.fspath(place.file))
        if place.file.is_dir():
            raise IsADirectoryError(21, "Is a directory", os.fspath(place.file))
        self._pa = _pyarrow()
        self._file: Any = None
        self._firsts: list[int] = []  # number of the first row of each group or batch
        with _errors_of(place.file):
            if place.format == "parquet":
                self._file = self._pa.parquet.ParquetFile(place.file)
                self.schema = self._file.schema_arrow
                groups = [
                    self._file.metadata.row_group(i).num_rows
                    for i in range(self._file.metadata.num_row_groups)
                ]
                self._set_rows(groups)
            else:
                self._open_arrow()

    def _open_arrow(self) -> None:
        pa = self._pa
        with self.place.file.open("rb") as opened:
            head = opened.read(8)
        if head.startswith(b"FEA1"):
            raise _errors.FormatError(
                f"{self.place.file}: is of Feather's version 1; write it as version 2, which is an "
                "Arrow file"
            )
        self.stream = not head.startswith(b"ARROW1")
        self._map = pa.memory_map(os.fspath(self.place.file))
        if self.stream:
            self.schema = pa.ipc.open_stream(self._map).schema
        else:
            self._file = pa.ipc.open_file(self._map)
            self.schema = self._file.schema

    def count(self, column: str) -> None:
        """Find out where batches of an Arrow file begin; Parquet says it itself."""
        if self.place.format == "parquet":
            return
        with _errors_of(self.place.file):
            self._only = self._pa.ipc.IpcReadOptions(
                included_fields=[self.schema.get_field_index(column)]
            )
            if self.stream:
                self._set_rows([batch.num_rows for batch in self._stream()])
            else:
                self._map.seek(0)
                self._file = self._pa.ipc.open_file(self._map, options=self._only)
                count = self._file.num_record_batches
                self._set_rows([self._file.get_batch(i).num_rows for i in range(count)])

    def _stream(self) -> Iterator[Any]:
        self._map.seek(0)
        yield from self._pa.ipc.open_stream(self._map, options=self._only)

    def _set_rows(self, counts: list[int]) -> None:
        self._firsts = [0]
        for count in counts:
            self._firsts.append(self._firsts[-1] + count)
        self.rows = self._firsts.pop()

    def layout(self) -> str:
        count = len(self._firsts)
        if self.place.format == "parquet":
            metadata = self._file.metadata
            packed = "none"
            if metadata.num_row_groups and metadata.num_columns:
                packed = metadata.row_group(0).column(0).compression.lower()
            return f"parquet, {count} row groups, {packed}"
        return "arrow stream" if self.stream else "arrow"

    def batches(self, column: str, first: int, rows: int) -> Iterator[tuple[int, Any]]:
        """(number of the first row, array) from the group that has row `first` on."""
        if self.rows == 0:
            return
        group = max(0, bisect.bisect_right(self._firsts, first) - 1)
        at = self._firsts[group]
        with _errors_of(self.place.file):
            if self.place.format == "parquet":
                for batch in self._file.iter_batches(
                    batch_size=rows,
                    row_groups=range(group, len(self._firsts)),
                    columns=[column],
                    use_threads=True,
                ):
                    # A nested column of the same first name would come too.
                    yield at, batch.column(0)
                    at += batch.num_rows
            elif self.stream:
                at = 0
                for batch in self._stream():
                    yield at, batch.column(0)
                    at += batch.num_rows
            else:
                for i in range(group, self._file.num_record_batches):
                    batch = self._file.get_batch(i)
                    yield at, batch.column(0)
                    at += batch.num_rows

    def columns(self) -> list[_Column]:
        return [_column_of(field) for field in self.schema]

    def close(self) -> None:
        if self.place.format == "parquet":
            self._file.close()


class ColumnRows:
    """The rows of a column, as `_core.FileRows` has those of a file."""

    def __init__(self, place: Place, dtype: str | None, dim: int | None) -> None:
        self._source = _Source(place)
        self._closed = False
        self._column = self._choose()
        name = self._column.name
        self._where = f"{place.file}:{name}"
        if not self._column.known:
            raise TypeError(
                f"{self._where} holds {self._column.dtype}, which a table cannot; it holds "
                f"{', '.join(_dtypes.DTYPES)}"
            )
        self.dtype = self._column.dtype
        if dtype is not None and dtype != self.dtype:
            raise TypeError(f"{self._where} holds {self.dtype}, not {dtype}; convert it after")
        self._source.count(name)
        self.rows = self._source.rows
        self.dim = self._column.dim or self._find_dim(dim)
        if dim is not None and dim != self.dim:
            raise _errors.FormatError(f"{self._where}: its rows have {self.dim} columns, not {dim}")
        self._row_bytes = self.dim * _dtypes.ITEM_BYTES[self.dtype]
        self.block_rows = max(1, _BLOCK_BYTES // self._row_bytes)
        self.description = f"{self._where}, {self._source.layout()}"
        self._batches: Iterator[tuple[int, Any]] = iter(())
        self._array: tuple[int, Any] = (-1, ())  # first row, batch
        self._held: tuple[int, NDArray[Any]] | None = None  # first row, rows

    def _choose(self) -> _Column:
        place, columns = self._source.place, self._source.columns()
        text = "; ".join(f"{each.name}: {each.dtype}" for each in columns) or "nothing"
        if place.column:
            for each in columns:
                if each.name == place.column:
                    return each
            raise _errors.NotFoundError(
                f"{place.file}: there is no column {place.column!r}; it holds {text}"
            )
        for some in (
            columns if len(columns) == 1 else [],
            [each for each in columns if each.lists and each.known],
            [each for each in columns if each.known],
        ):
            if len(some) == 1:
                return some[0]
            if len(some) > 1:
                raise ValueError(
                    f"{place.file}: {len(some)} columns could be meant; name one, as in "
                    f"{place.file}:{some[0].name}. It holds {text}"
                )
        raise _errors.NotFoundError(f"{place.file}: no column of numbers; it holds {text}")

    def _find_dim(self, given: int | None) -> int:
        for first, array in self._source.batches(self._column.name, 0, 1):
            if len(array) == 0:
                continue
            if array.null_count and not array[0].is_valid:
                raise _errors.FormatError(f"{self._where}: row {first} is null")
            length = len(array[0])
            if length == 0:
                raise _errors.FormatError(f"{self._where}: row {first} is an empty list")
            return length
        if given is None:
            raise _errors.FormatError(
                f"{self._where}: it has no rows, and its lists do not say how long they are: give "
                "dim (columns)"
            )
        return given

    def _values(self, first: int, array: Any) -> NDArray[Any]:
        """A batch as rows. Raises FormatError naming the row for nulls and other lengths."""
        if array.null_count:
            row = first + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise _errors.FormatError(f"{self._where}: row {row} is null")
        flat = array
        if self._column.lists:
            if self._column.dim is None:
                lengths = np.diff(array.offsets.to_numpy())
                bad = np.flatnonzero(lengths != self.dim)
                if len(bad):
                    raise _errors.FormatError(
                        f"{self._where}: row {first + int(bad[0])} has {int(lengths[bad[0]])} "
                        f"columns, row 0 has {self.dim}"
                    )
            flat = array.flatten()
        if flat.null_count:
            at = int(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0])
            raise _errors.FormatError(
                f"{self._where}: row {first + at // self.dim}, column {at % self.dim} is null"
            )
        values = flat.to_numpy(zero_copy_only=False)
        return np.ascontiguousarray(values, np.dtype(self.dtype)).reshape(len(array), self.dim)

    def read(self, first: int, count: int, out: NDArray[np.uint8]) -> None:
        if self._closed:
            raise ValueError("the file is closed")
        if first < 0 or count < 0 or first + count > self.rows:
            raise ValueError(f"rows {first} to {first + count} of {self.rows}")
        done = 0
        while done < count:
            row = first + done
            begin, block = self._block(row)
            some = min(count - done, begin + len(block) - row)
            part = np.ascontiguousarray(block[row - begin : row - begin + some])
            at = done * self._row_bytes
            out[at : at + some * self._row_bytes] = part.reshape(-1).view(np.uint8)
            done += some

    def _block(self, row: int) -> tuple[int, NDArray[Any]]:
        """Some rows from one on: of those held, of the batch that has it, or from its group on."""
        if self._held is not None and self._held[0] <= row < self._held[0] + len(self._held[1]):
            return self._held
        first, array = self._array
        end = first + len(array)  # -1: nothing was read yet
        if not first <= row < end:
            if end < 0 or not end <= row < end + 16 * self.block_rows:
                self._batches = self._source.batches(self._column.name, row, self.block_rows)
            for first, array in self._batches:
                if row < first + len(array):
                    break
            else:
                raise _errors.FormatError(f"{self._where}: it ends before row {row}")
            self._array = (first, array)
        # An Arrow batch may be all of a file: rows are taken of it as they are asked for.
        begin = (row - first) // self.block_rows * self.block_rows
        self._held = (
            first + begin,
            self._values(first + begin, array.slice(begin, self.block_rows)),
        )
        return self._held

    def close(self) -> None:
        if not self._closed:
            self._source.close()
        self._closed = True
        self._held = None
        self._array = (-1, ())
        self._batches = iter(())


def entries(place: Place) -> list[tuple[str, tuple[int, ...], str, int, str]]:
    """(name, shape, dtype, bytes, layout) of each column."""
    source = _Source(place)
    try:
        found: list[tuple[str, tuple[int, ...], str, int, str]] = []
        for each in source.columns():
            if place.column and each.name != place.column:
                continue
            source.count(each.name)
            rows = source.rows
            shape: tuple[int, ...] = (rows,)
            if each.lists:
                shape = (rows, -1 if each.dim is None else each.dim)
            if each.lists and each.dim is None and rows and each.known:
                shape = (
                    rows,
                    ColumnRows(Place(place.file, each.name, place.format), None, None).dim,
                )
            size = rows * abs(shape[-1] if len(shape) == 2 else 1)
            item = _dtypes.ITEM_BYTES.get(each.dtype, 0)
            found.append((each.name, shape, each.dtype, size * item, source.layout()))
        if place.column and not found:
            raise _errors.NotFoundError(f"{place.file}: there is no column {place.column!r}")
        return found
    finally:
        source.close()


class ColumnWriter:
    """Takes rows into one column of lists of a fixed length, under a temporary name until finish().

    Without it nothing is left behind.
    """

    def __init__(
        self, place: Place, rows: int, dim: int, dtype: str, overwrite: bool, gzip: int | None
    ) -> None:
        pa = _pyarrow()
        if dtype == "bfloat16":
            raise TypeError(f"{place.file}: Arrow has no bfloat16; convert to float32")
        self._target = Path(os.path.realpath(place.file)) if place.file.is_symlink() else place.file
        if self._target.is_dir():
            raise IsADirectoryError(21, "Is a directory", os.fspath(self._target))
        if self._target.exists() and not self._target.is_file():
            raise ValueError(f"{self._target} is not a regular file; it is not replaced")
        if self._target.exists() and not overwrite:
            raise FileExistsError(17, f"{self._target} already exists")
        if gzip is not None and place.format != "parquet":
            raise ValueError(f"{place.file}: gzip is for Parquet, not for Arrow files")
        if not 0 < dim < 2**31:
            raise ValueError(f"{place.file}: lists of {dim} numbers")
        if _core.is_store(self._target.absolute().parent):
            raise ValueError(
                f"{self._target} is in the own directory of the store {self._target.parent}; "
                "choose another place"
            )
        self._pa, self._overwrite, self._rows, self._done = pa, overwrite, rows, 0
        self._dim, self._dtype = dim, np.dtype(dtype)
        kind = pa.list_(pa.from_numpy_dtype(self._dtype), dim)
        self._schema = pa.schema([pa.field(place.column or _DEFAULT_COLUMN, kind, nullable=False)])
        name = f".{self._target.name[:200]}.{secrets.token_hex(4)}.tmp"
        self._temporary = self._target.with_name(name)
        self._group = max(1, _GROUP_BYTES // (dim * self._dtype.itemsize))
        self._pending: list[NDArray[Any]] = []
        self._pending_rows = 0
        self._out: Any = None
        try:
            with _errors_of(self._target):
                if place.format == "parquet":
                    self._out = pa.parquet.ParquetWriter(
                        self._temporary,
                        self._schema,
                        compression="snappy" if gzip is None else "gzip",
                        compression_level=gzip,
                        use_dictionary=False,
                        write_statistics=False,
                    )
                else:
                    self._out = pa.ipc.new_file(os.fspath(self._temporary), self._schema)
        except BaseException:
            self.close()
            raise

    def write(self, rows: NDArray[np.uint8]) -> None:
        values = np.array(rows, np.uint8).view(self._dtype).reshape(-1, self._dim)
        self._pending.append(values)
        self._pending_rows += len(values)
        self._done += len(values)
        if self._pending_rows >= self._group:
            self._flush()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        values = np.concatenate(self._pending).reshape(-1)
        array = self._pa.FixedSizeListArray.from_arrays(self._pa.array(values), self._dim)
        batch = self._pa.RecordBatch.from_arrays([array], schema=self._schema)
        with _errors_of(self._target):
            self._out.write_batch(batch)
        self._pending, self._pending_rows = [], 0

    def finish(self) -> None:
        if self._done != self._rows:
            raise ValueError(
                f"{self._target}: only {self._done} of the {self._rows} rows were written"
            )
        self._flush()
        with _errors_of(self._target):
            self._out.close()
            self._out = None
        handle = os.open(self._temporary, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if self._overwrite:
            if self._target.exists():  # who may read the old file may read the new one
                self._temporary.chmod(self._target.stat().st_mode & 0o7777)
            self._temporary.replace(self._target)
        else:
            try:
                os.link(
                    self._temporary, self._target
                )  # fails where somebody else made it meanwhile
            except FileExistsError:
                raise FileExistsError(17, f"{self._target} already exists") from None
            self._temporary.unlink()
        folder = os.open(self._target.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Nothing is left, unless it was finished."""
        if self._out is not None:
            with contextlib.suppress(Exception):
                self._out.close()
            self._out = None
        with contextlib.suppress(OSError):
            self._temporary.unlink()
