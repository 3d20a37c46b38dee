"""Rows in files of other programs: NumPy, HDF5, safetensors, torch, word vectors, and more.

    rows = em.io.open("model.safetensors:encoder.weight")
    rows.shape, rows.dtype                  # (30522, 384), float32
    rows[5], rows[100:200], rows[-1]        # arrays of their own
    for first, block in rows.blocks():      # all of them, with little memory
        ...

    em.io.ls("model.pt")                    # what a file holds
    em.convert("glove.6B.100d.txt", "glove.npy")

docs/formats.md has all formats. Parquet and Arrow files need the package pyarrow. Nothing in a file
is executed. Rows are the first dimension: an array of more than two is rows of all the others.
"""

from __future__ import annotations

import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from . import _checks, _columns, _core, _dtypes, _errors

__all__ = ["Entry", "Rows", "convert", "ls", "open"]

Path = str | os.PathLike[str]
Progress = Callable[[int, int], object]

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """An array in a file. `name` opens it, as `FILE:name`; empty where the file holds no other."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the format calls it, where a table cannot hold it
    bytes: int  # of the array, not compressed
    layout: str  # "stored", "deflated", "chunked (64, 128), gzip", ...


# What `open` was asked for, its file with the whole path: what _core.FileRows takes.
_Request = tuple[bytes, _checks.Reading]
# The same of a column in a Parquet or Arrow file, for _columns.ColumnRows.
_ColumnRequest = tuple[_columns.Place, str | None, int | None]
# Inode, bytes and time of modification of a file, which tell it from another one.
_Stamp = tuple[int, int, int]


class Rows:
    """The rows of an array in a file; nothing is read before it is asked for.

    A context manager. Rows come as NumPy arrays of their own, in native byte order; bfloat16 needs
    the package ml_dtypes. Thread safety: calls from several threads take turns.

    Worker processes may use it: a forked child opens the file for itself with its first read, and
    a pickle keeps the path, not the rows. ValueError where the file is not the same any more.
    """

    def __init__(self, request: _Request | _ColumnRequest) -> None:
        # Not for callers: from open().
        core = _opened(request)
        self._core = core
        self._process = os.getpid()
        self._closed = False
        self._request = _from_anywhere(request)
        self._stamp = _stamp(self._request)
        self.shape: tuple[int, int] = (core.rows, core.dim)
        self._name = core.dtype

    @property
    def _live(self) -> _core.FileRows | _columns.ColumnRows:
        """The open file, of this process."""
        if self._closed:
            raise ValueError(f"{_source_text(self._request)!r} is closed")
        if self._process != os.getpid():
            if _stamp(self._request) != self._stamp:
                raise ValueError(_changed(self._request))
            self._core, self._process = _opened(self._request), os.getpid()
        return self._core

    def __reduce__(self) -> tuple[Any, ...]:
        if self._closed:
            raise ValueError(f"{_source_text(self._request)!r} is closed")
        return (_restore, (self._request, self._stamp))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the arrays. Raises ImportError for bfloat16 without ml_dtypes."""
        return _dtypes.numpy_dtype(self._name)

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def description(self) -> str:
        """What the rows come from: "model.h5:/v, chunked, gzip"."""
        return self._live.description

    @property
    def remarks(self) -> list[str]:
        """What rows do not show of their array, a sentence each: a shape of other than two
        dimensions, a lossy filter of HDF5, chunks that were never written.
        """
        live = self._live
        return live.remarks if isinstance(live, _core.FileRows) else []

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """`rows[5]`, `rows[3:7]`, `rows[::2]`, `rows[[4, 1]]`, `rows[3:7, 0]`, as in NumPy."""
        columns: Any = slice(None)
        if isinstance(key, tuple):
            if len(key) > 2:
                raise IndexError(f"rows have two dimensions, {len(key)} were given")
            key, columns = (*key, slice(None))[:2]
        if key is Ellipsis:
            key = slice(None)
        if isinstance(key, slice):
            chosen = range(*key.indices(len(self)))
            if len(chosen) == 0:
                picked = np.empty((0, self.shape[1]), self.dtype)
            else:
                first, last = min(chosen[0], chosen[-1]), max(chosen[0], chosen[-1])
                if abs(chosen.step) == 1:
                    picked = self._read(first, last - first + 1)[:: chosen.step]
                else:
                    picked = self._pick(np.asarray(chosen))
            return picked[:, columns]
        try:
            row = operator.index(key)
        except TypeError:
            ids = np.asarray(key)
            if ids.dtype == bool:
                if ids.shape != (len(self),):
                    raise IndexError(f"a mask of shape {ids.shape} for {len(self)} rows") from None
                ids = np.flatnonzero(ids)
            elif ids.size == 0:
                ids = ids.astype(np.int64)
            elif ids.dtype.kind not in "iu":
                raise IndexError(f"rows are chosen by integers, not by {key!r}") from None
            flat = ids.reshape(-1)
            bad = flat >= len(self)
            if flat.dtype.kind == "i":
                bad |= flat < -len(self)
            if bad.any():
                raise IndexError(
                    f"row {flat[bad.argmax()]} of {self.description}, which has {len(self)}"
                ) from None
            flat = flat.astype(np.int64)
            picked = self._pick(np.where(flat < 0, flat + len(self), flat))
            return picked.reshape(*ids.shape, self.shape[1])[..., columns]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {self.description}, which has {len(self)}")
        one: NDArray[Any] = self._read(row % len(self), 1)[0][columns]
        return one

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for _, block in self.blocks():
            yield from block

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows of a file cannot be an array without a copy")
        whole = self._read(0, len(self))
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
        """(number of the first row, rows) for consecutive blocks of all rows.

        Args:
            rows: how many at a time; None takes what the file is stored in, about a MiB or a few.
        """
        if rows is None:
            wide = max(1, self.shape[1] * _dtypes.ITEM_BYTES[self._name])
            size = max(self._live.block_rows, _BLOCK_BYTES // wide, 1)
        else:
            size = _checks.integer(rows, "rows")
            if size == 0:
                raise ValueError("rows must be at least 1")
        for first in range(0, len(self), size):
            yield first, self._read(first, min(size, len(self) - first))

    def close(self) -> None:
        """Give the file back. Further reads raise ValueError."""
        self._closed = True
        if self._process == os.getpid():
            self._core.close()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rows, dim = self.shape
        return f"<embermap.io.Rows {rows:,} x {dim:,} {self._name}>"

    def _read(self, first: int, count: int) -> NDArray[Any]:
        out = np.empty((count, self.shape[1]), self.dtype)
        self._live.read(first, count, out.reshape(-1).view(np.uint8))
        return out

    def _pick(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Rows by number: in ascending order from the file, each once."""
        distinct, where = np.unique(ids, return_inverse=True)
        found = np.empty((len(distinct), self.shape[1]), self.dtype)
        begin = 0
        for end in range(1, len(distinct) + 1):  # neighbours in one read
            if end == len(distinct) or distinct[end] != distinct[end - 1] + 1:
                found[begin:end] = self._read(int(distinct[begin]), end - begin)
                begin = end
        return found[where.reshape(-1)]


def open(  # noqa: A001
    src: Path,
    *,
    format: str | None = None,  # noqa: A002
    dtype: Any = None,
    dim: int | None = None,
    offset: int = 0,
    allow_external: bool = False,
    follow_links: bool = False,
) -> Rows:
    """Open the rows of a file: "x.npy", "x.h5:/dataset", "x.safetensors:tensor", "x.vec", ...

    "x.parquet:column" and "x.arrow:column" (Feather too) are lists of numbers, all as long, or one
    number a row; without a column the only one is taken.

    Args:
        src: the file, and after a colon the field, member, dataset or tensor in it.
        format: the file's, where content and name do not tell: "glove", "raw", ...
        dtype: what bytes are that do not say it (raw files, bfloat16 in a .npy); of text, float64
            instead of float32. Else it must be the file's.
        dim, offset: columns, and bytes before the first row, of raw files.
        allow_external: let an HDF5 file refer to files below its own folder: raw files, virtual
            datasets, external links.
        follow_links: the same wherever those files are, for a file that is trusted.

    Raises: FileNotFoundError, FormatError, NotFoundError (no such array; the error lists those that
    are there), TypeError (elements that no table can hold), ValueError, OSError.
    """
    name = None if dtype is None else _dtypes.dtype_name(dtype)
    if (place := _columns.place_of(src, format)) is not None:
        return Rows((place, name, _checks.columns(dim) or None))
    how = _checks.reading(dtype, allow_external, follow_links, format, dim, offset)
    return Rows((os.fsencode(src), how))


def _of_column(request: _Request | _ColumnRequest) -> TypeGuard[_ColumnRequest]:
    return isinstance(request[0], _columns.Place)


def _opened(request: _Request | _ColumnRequest) -> _core.FileRows | _columns.ColumnRows:
    if _of_column(request):
        return _columns.ColumnRows(*request)
    return _core.FileRows(*cast(_Request, request))


def _from_anywhere(request: _Request | _ColumnRequest) -> _Request | _ColumnRequest:
    """The same with the whole path: not normalized, for what follows a colon is no path."""
    if _of_column(request):
        place = request[0]
        return (place._replace(file=pathlib.Path.cwd() / place.file), *request[1:])
    plain = cast(_Request, request)
    return (os.path.join(os.getcwdb(), plain[0]), *plain[1:])  # noqa: PTH109, PTH118


def _source_text(request: _Request | _ColumnRequest) -> str:
    return str(request[0].file) if _of_column(request) else os.fsdecode(cast(_Request, request)[0])


def _stamp(request: _Request | _ColumnRequest) -> _Stamp:
    if _of_column(request):
        status = os.stat(request[0].file)  # noqa: PTH116
    else:
        plain = cast(_Request, request)
        status = _core.location_file(plain[0], plain[1][3]).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _changed(request: _Request | _ColumnRequest) -> str:
    return f"{_source_text(request)!r} has changed since it was opened"


def _restore(request: _Request | _ColumnRequest, stamp: _Stamp) -> Rows:
    if _stamp(request) != stamp:
        raise ValueError(_changed(request))
    return Rows(request)


def ls(file: Path, *, format: str | None = None) -> list[Entry]:  # noqa: A002
    """The arrays in a file, found out from its headers alone. Raises as `open`."""
    if (place := _columns.place_of(file, format)) is not None:
        return [Entry(*entry) for entry in _columns.entries(place)]
    found = _core.list_file(os.fsencode(file), None if format is None else str(format))
    return [Entry(name, tuple(shape), dtype, size, how) for name, shape, dtype, size, how in found]


def convert(
    src: Path,
    dst: Path,
    *,
    dtype: Any = None,
    rows: slice | tuple[int | None, int | None] | None = None,
    order: Path | None = None,
    fields: Sequence[str] | Mapping[str, str] | None = None,
    overwrite: bool = False,
    gzip: int | None = None,
    src_format: str | None = None,
    dst_format: str | None = None,
    source_dtype: Any = None,
    vocab: Path | None = None,
    dim: int | None = None,
    offset: int = 0,
    allow_external: bool = False,
    follow_links: bool = False,
    check: bool = False,
    resume: bool = False,
    jobs: int = 1,
    memory: int | str = "256MiB",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Copy rows from file to file, as `embermap convert` does, with little memory.

    The new file appears under its name when it is complete; on failure nothing is left.

    Args:
        src: the file, and after a colon the array in it.
        dst: where to; members, datasets and tensors are added to a file that is there.
        dtype: convert to this dtype (nearest even); None keeps the file's.
        rows: only these, a slice or (first, end) as of one, with step 1.
        order: a file of row numbers, integers in any format, each row once: row i of `dst` is row
            order[i] of `src`. The way back goes to "DST.order.npy".
        fields: these arrays of `src` into one new file (npz, HDF5, safetensors, torch), under their
            names, or {name in dst: name in src}.
        overwrite: replace what is there (otherwise FileExistsError).
        gzip: compression level 0 to 9; HDF5, npz and Parquet only.
        src_format, dst_format: where content and names do not tell.
        source_dtype: what bytes of `src` are that do not say it.
        vocab: the words of the rows, see docs/formats.md.
        dim, offset: columns, and bytes before the first row, of a raw `src`.
        allow_external, follow_links: as for `open`.
        check: read `dst` back and compare.
        resume: go on with a copy that was interrupted, and keep what is done if this one is.
        jobs: threads that read and convert.
        memory: bound of the buffers.
        progress: called with (done, total) rows; may raise to stop.

    `order`, `fields`, `resume` and `jobs` are not for Parquet and Arrow files.

    Returns {"rows", "dim", "source_dtype", "dtype", "became_infinite", "became_zero"}: the last two
    count values that the new dtype does not hold. Also "vocabulary" and "order", files that were
    written beside `dst`, "resumed_rows", and "fields", such a dict for each. Warns
    (UserWarning) of what `Rows.remarks` has.

    Raises: as `open`; FileExistsError, TypeError (a value that the dtype cannot hold, by row and
    column), ValueError (src is dst, or it would be in a store's own directory; no permutation),
    CorruptError (check), OSError (a full disk).
    """
    if gzip is not None:
        gzip = _checks.integer(gzip, "gzip", most=9)
    pairs = _checks.pairs(fields)
    sides = (_columns.place_of(src, src_format), _columns.place_of(dst, dst_format))

    def source() -> Rows:
        return open(
            src,
            format=src_format,
            dtype=source_dtype,
            dim=dim,
            offset=offset,
            allow_external=allow_external,
            follow_links=follow_links,
        )

    how = _checks.reading(source_dtype, allow_external, follow_links, src_format, dim, offset)

    def count() -> int:
        if pairs and sides == (None, None):
            return _checks.count_rows(src, how, pairs)
        with source() as there:
            return len(there)

    first, end = _checks.row_range(rows, count)
    threads = _checks.integer(jobs, "jobs", most=256)
    if sides != (None, None):
        if order is not None or pairs or resume or threads > 1:
            raise ValueError("order, fields, resume and jobs are not for Parquet and Arrow files")
        with source() as there:
            found = _convert_columns(
                there,
                (os.fsdecode(src), os.fsdecode(dst)),
                sides,
                (min(first, len(there)), min(end, len(there))),
                None if dtype is None else _dtypes.dtype_name(dtype),
                overwrite=bool(overwrite),
                gzip=gzip,
                src_format=None if src_format is None else str(src_format),
                dst_format=None if dst_format is None else str(dst_format),
                vocab=vocab,
                check=check,
                memory=_checks.size(memory, "memory"),
                progress=progress,
            )
            _checks.tell(there.remarks)
            return found
    found = _core.convert_file(
        os.fsencode(src),
        os.fsencode(dst),
        None if dtype is None else _dtypes.dtype_name(dtype),
        how,
        _checks.selection((first, end), order, threads),
        pairs,
        bool(overwrite),
        gzip,
        None if dst_format is None else str(dst_format),
        b"" if vocab is None else os.fsencode(vocab),
        bool(check),
        bool(resume),
        _checks.size(memory, "memory"),
        progress,
    )
    _checks.tell(_checks.told(found))
    return found


def _convert_columns(
    source: Rows,
    names: tuple[str, str],
    sides: tuple[_columns.Place | None, _columns.Place | None],
    part: tuple[int, int],
    dtype: str | None,
    *,
    overwrite: bool,
    gzip: int | None,
    src_format: str | None,
    dst_format: str | None,
    vocab: Path | None,
    check: bool,
    memory: int,
    progress: Progress | None,
) -> dict[str, Any]:
    """From or to a Parquet or Arrow file: rows pass through Python, a block at a time."""
    first, end = part
    count, dim = max(0, end - first), source.shape[1]
    kept = source._name
    wanted = dtype or kept
    into = sides[1]
    file = into.file if into is not None else _core.location_file(os.fsencode(names[1]), dst_format)
    come_from = sides[0].file if sides[0] is not None else None
    if come_from is None:
        come_from = _core.location_file(os.fsencode(names[0]), src_format, True)
    if pathlib.Path(file).exists() and pathlib.Path(file).samefile(come_from):
        raise ValueError(f"{file} is both source and destination")
    out: Any
    if into is not None:
        if vocab is not None and os.fspath(vocab) != "none":
            raise ValueError("vocab: Parquet and Arrow files take no words along")
        out = _columns.ColumnWriter(into, count, dim, wanted, overwrite, gzip)
    else:
        out = _core.FileWriter(
            os.fsencode(names[1]),
            count,
            dim,
            wanted,
            overwrite,
            gzip,
            dst_format,
            os.fsencode(f"{come_from}.vocab.txt" if vocab is None else vocab)
            if _core.has_words(os.fsencode(names[1]), dst_format) or vocab is not None
            else b"",
        )
    infinite = zero = 0
    widest = dim * max(_dtypes.ITEM_BYTES[kept], _dtypes.ITEM_BYTES[wanted])
    block = max(1, min(memory // 4, _BLOCK_BYTES * 8) // max(1, widest))
    try:
        for at in range(first, first + count, block):
            some = min(block, first + count - at)
            raw = np.empty(some * dim * _dtypes.ITEM_BYTES[kept], np.uint8)
            source._core.read(at, some, raw)
            if wanted != kept:
                made = np.empty(some * dim * _dtypes.ITEM_BYTES[wanted], np.uint8)
                try:
                    more = _core.convert_bytes(raw, kept, made, wanted)
                except TypeError as error:
                    raise TypeError(f"{source.description}, from row {at} on: {error}") from None
                infinite, zero, raw = infinite + more[0], zero + more[1], made
            out.write(raw)
            if progress is not None:
                progress(at - first + some, count)
        out.finish()
    finally:
        out.close()
    if check:
        _check(source, names[1], dst_format, first, count, wanted)
    return {
        "rows": count,
        "dim": dim,
        "source_dtype": kept,
        "dtype": wanted,
        "became_infinite": infinite,
        "became_zero": zero,
    }


def _check(
    source: Rows, dst: str, dst_format: str | None, first: int, count: int, dtype: str
) -> None:
    """Raise CorruptError unless what was written is read as the rows it was made of."""
    # What a raw file, which such a source may become, does not say.
    raw_needs: dict[str, Any] = {}
    if dst_format == "raw" or os.fsdecode(dst).lower().endswith(".raw"):
        raw_needs = {"dtype": dtype, "dim": source.shape[1]}
    with open(dst, format=dst_format, **raw_needs) as there:
        for at, block in there.blocks():
            want = source[first + at : first + at + len(block)].astype(block.dtype)
            bad = np.flatnonzero((want != block) & ~((want != want) & (block != block)))
            if len(bad):
                raise _errors.CorruptError(
                    f"{dst}: read back, row {at + bad[0] // block.shape[1]}, column "
                    f"{bad[0] % block.shape[1]} is not what was written"
                )
