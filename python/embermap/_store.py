"""Stores: directories of tables."""

from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _checks, _core, _dtypes, _notes
from . import init as initializers
from . import optim as optimizers
from ._errors import ForkError, NotFoundError, StoreNotFoundError
from ._prefetch import HintServer
from ._table import Progress, Table

__all__ = ["Commit", "Store", "open"]

Mode = Literal["a", "r+", "r"]
Io = Literal["auto", "io_uring", "threads", "cached"]
Policy = Literal["lru", "s3fifo"]
Pin = Literal["frames", "mapping"]
Durability = Literal["commit", "none"]
Verify = Literal["memory", "read"]


class Commit(NamedTuple):
    """A commit of a store."""

    number: int
    time: str  # when it was begun, UTC: "2031-05-06T07:08:09.123Z"
    note: dict[str, Any] | None  # what Store.commit() was given


class _Session:
    """One opening of a store, shared by the store's handle and those of its tables."""

    def __init__(self, core: _core.Store, path: str, mode: str, device: int | None) -> None:
        self.core = core
        self.path = path
        self.mode = mode
        self.device = device
        self.process = os.getpid()
        self.forked = False
        self.allow_adopted: bool | None = None
        self.pin: Pin = "frames"
        self.hints: HintServer | None = (
            None  # takes ids from worker processes, if any were asked for
        )
        self.hints_lock = threading.Lock()
        self.restored_from: _Stamp | None = None  # if a pickle opened it
        _sessions.add(self)

    def hint_address(self) -> str:
        """Where worker processes send the ids of batches to come; opened with the first call."""
        with self.hints_lock:
            if self.hints is None:
                # Weakly, or a store that is dropped without close() would never let go of its lock.
                prefetch = weakref.WeakMethod(self.prefetch)

                def hint(table: str, ids: NDArray[np.int64]) -> None:
                    if (call := prefetch()) is not None:
                        call(table, ids)

                self.hints = HintServer(hint)
                weakref.finalize(self, self.hints.close)
            return self.hints.address

    def prefetch(self, table: str, ids: NDArray[np.int64]) -> None:
        self.core.table(table).prefetch(ids)

    def end_hints(self) -> None:
        with self.hints_lock:
            if self.hints is not None:
                self.hints.close()

    def check(self) -> None:
        if self.forked:
            raise ForkError(
                f"this handle of store {self.path!r} was opened in process {self.process} and "
                f"is used in process {os.getpid()}, a child of it; open the store again there"
            )

    def check_open(self) -> None:
        self.check()
        if self.core.closed:
            raise ValueError(f"store {self.path!r} is closed")


_sessions: weakref.WeakSet[_Session] = weakref.WeakSet()

# What the files that a commit changes were like: another commit, another stamp.
_Stamp = tuple[tuple[int, int, int] | None, ...]

# What pickles opened in this process, by path and memory: those that come later use the same.
_restored: weakref.WeakValueDictionary[tuple[str, int, bool | None, Pin], _Session] = (
    weakref.WeakValueDictionary()
)
_restoring = threading.Lock()


def _after_fork_in_child() -> None:
    """The child leaves the files, the lock and the device of its parent alone."""
    global _restoring
    _restoring = threading.Lock()  # a thread that does not exist here may have held it
    for session in list(_sessions):
        if not session.forked:
            session.forked = True
            if session.hints is not None:
                session.hints.forget_after_fork()
            session.core.forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Store:
    """An open store, from `embermap.open`.

    As a context manager it commits and closes at the end; when the block is left by an exception,
    it closes without committing. A store that is dropped or still open at the end of the process
    is not committed either.

    Names of tables: letters, digits, "_", "-", ".", and any character beyond ASCII; not beginning
    with "." or "-"; at most 200 bytes.

    Thread safety: all methods may be called from several threads; they release the GIL.

    After fork() the child cannot use the handles it inherits (ForkError) and does not disturb
    those of its parent; it opens the store again, read-only. Pickling a store keeps its path,
    memory and pin, a few hundred bytes; the copy opens it **read-only**, without a device, and sees
    the last commit; ValueError if another store is at the path by then. Copies that come into the
    same process share one opening, and its memory, until there is another commit; closing one
    closes them all. Commit before workers start. While a writer with durability "none" has written
    pages since its last commit, opening raises CorruptError.
    `copy.copy` and `copy.deepcopy` give the same handle.
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: _Session) -> None:
        # Not for callers: stores come from embermap.open.
        self._session = session

    @property
    def _live(self) -> _core.Store:
        self._session.check_open()
        return self._session.core

    # --- what it is -------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The directory, absolute."""
        return Path(self._session.path)

    @property
    def mode(self) -> str:
        """ "a", "r+" or "r", as it was opened."""
        return self._session.mode

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        return self._session.mode != "r"

    @property
    def memory(self) -> int:
        """The budget for the hot pages of all tables and what belongs to them, bytes."""
        return self._live.memory

    @property
    def device(self) -> int | None:
        """Number of the CUDA device it uses; None if there is none."""
        return self._session.device

    @property
    def commit_number(self) -> int:
        """Number of the last commit; 0 if there is none yet."""
        return self._live.commit_number

    @property
    def closed(self) -> bool:
        """Whether handles are useless: after close(), or in a child that inherited them by fork."""
        return self._session.forked or self._session.core.closed

    def __repr__(self) -> str:
        path, mode = self._session.path, self._session.mode
        if self.closed:
            return f"<embermap.Store {path!r} (closed)>"
        core = self._live
        tables, memory = len(core.tables()), _core.format_size(core.memory)
        device = "" if self.device is None else f" device=cuda:{self.device}"
        return f"<embermap.Store {path!r} mode={mode!r} tables={tables} memory={memory}{device}>"

    def __bool__(self) -> bool:
        return True  # an empty store is still a store

    def __copy__(self) -> Store:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        core = self._live
        inode = self.path.stat().st_ino
        session = self._session
        where = (session.path, core.memory, core.commit_number, inode, session.allow_adopted)
        return (_restore_store, (*where, session.pin))

    def _check_outside(self, file: Path) -> None:
        """Refuse to write a file that the store itself lives in."""
        core = self._live
        resolved = file.resolve()
        if resolved.parent == self.path.resolve():
            raise ValueError(f"{str(file)!r} is in the store's own directory; choose another place")
        for name in core.tables():
            try:
                used = core.table(name).file.resolve()
            except Exception:
                continue  # a broken table, or one that was removed just now
            if resolved == used:
                raise ValueError(f"{str(file)!r} is the file of table {name!r}")

    # --- tables -----------------------------------------------------------------------------------

    def create(
        self,
        name: str,
        *,
        rows: int,
        dim: int,
        dtype: Any = "float32",
        optimizer: optimizers.Optimizer | None = None,
        init: initializers.Initializer | None = None,
        seed: int = 0,
        page_bytes: int | str = 4096,
        memory: int | str | None = None,
    ) -> Table:
        """Make a table. It takes no time and no disk whatever its size: rows come when touched.

        Args:
            name: see the class.
            rows: number of rows; 0 is an empty table, which can be resized.
            dim: elements of a row.
            dtype: a name, NumPy dtype, `ml_dtypes.bfloat16` or torch dtype: float32, float16,
                bfloat16, float64, int8, uint8, int32, int64.
            optimizer: one of `embermap.optim`, for a table that is trained.
            init: one of `embermap.init`; None is zeros.
            seed: of the initial rows.
            page_bytes: unit of disk I/O and caching, a power of two from 4 KiB to 2 MiB.
            memory: bytes of the store's memory for this table; None: by size. See `Table.memory`.

        The table is there for good when this returns, without a commit.
        Raises: FileExistsError, ValueError, TypeError, PermissionError (store read-only), OSError.
        """
        handle = self._live.create(
            _table_name(name),
            _checks.integer(rows, "rows"),
            _checks.integer(dim, "dim"),
            _dtypes.dtype_name(dtype),
            optimizers._to_core(optimizer),
            initializers._to_core(init),
            _checks.integer(seed, "seed", most=2**64 - 1),
            _checks.size(page_bytes, "page_bytes"),
            _table_memory(memory),
        )
        return Table(self, handle)

    def from_array(
        self,
        name: str,
        array: Any,
        *,
        optimizer: optimizers.Optimizer | None = None,
        page_bytes: int | str = 4096,
        memory: int | str | None = None,
    ) -> Table:
        """Make a table with the rows of an array or CPU tensor of shape (rows, dim).

        The dtype is the array's. The rows are kept by the next commit.
        Raises as create does, and ValueError for an array that is not 2-D.
        """
        source, dtype = _arrays.host_array(array, "array")
        if source.ndim != 2:
            raise ValueError(f"array must have the shape (rows, dim), not {source.shape}")
        table = self.create(
            name,
            rows=source.shape[0],
            dim=source.shape[1],
            dtype=dtype,
            optimizer=optimizer,
            page_bytes=page_bytes,
            memory=memory,
        )
        try:
            table[:] = array
        except BaseException:
            self.remove(name)
            raise
        return table

    def import_file(
        self,
        name: str,
        src: str | os.PathLike[str],
        *,
        dtype: Any = None,
        source_dtype: Any = None,
        rows: slice | tuple[int | None, int | None] | None = None,
        order: str | os.PathLike[str] | None = None,
        fields: Sequence[str] | Mapping[str, str] | None = None,
        optimizer: optimizers.Optimizer | None = None,
        page_bytes: int | str = 4096,
        memory: int | str | None = None,
        allow_external: bool = False,
        follow_links: bool = False,
        format: str | None = None,  # noqa: A002
        dim: int | None = None,
        offset: int = 0,
        vocab: str | os.PathLike[str] | None = None,
        check: bool = False,
        resume: bool = False,
        jobs: int = 1,
        progress: Progress | None = None,
    ) -> Table:
        """Make a table with the rows of a file: "x.npy", "x.npz:member", "x.h5:/path/to/dataset",
        "x.safetensors:tensor", "x.pt:encoder.weight", "x.vec" (docs/formats.md has all).

        The words of formats that have them (word2vec, GloVe, fastText) go to a vocabulary, one a
        line, where `Table.export` finds them.

        Nobody sees the table before it is complete; on failure nothing is left. Memory stays
        small whatever the file's size.

        Args:
            name: see the class.
            src: the file, and after a colon the field, member, dataset or tensor in it. Its first
                dimension is rows, all others together are columns.
            dtype: convert to this dtype; None keeps the file's. Bytes that do not say what they
                are (bfloat16 in a .npy, raw files) are taken as this.
            source_dtype: what bytes are that do not say it, where `dtype` is another one.
            rows: only these, a slice or (first, end) as of one, with step 1.
            order: a file of row numbers, integers in any format, each row once: row i of the table
                is row order[i] of `src`. The way back goes to STORE/NAME.order.npy.
            fields: the weight and state of the optimizer, each from the array of its name, or
                {field: array}: `fields=["weight", "sum"]`.
            optimizer: one of `embermap.optim`; its state begins as in a new table.
            page_bytes, memory: as for create.
            allow_external, follow_links: as for `embermap.io.open`.
            format: the file's; None: what its content, else its name, tells. "glove", "raw", ...
            dim: columns, where the format does not tell them: raw, GloVe, an empty .fvecs.
            offset: bytes before the first row of a raw file.
            vocab: the file that words go to; None: STORE/NAME.vocab.txt, "none": nowhere.
            check: read all fields back and compare with `src`.
            resume: go on with an import that was interrupted, and keep what is done if this one is,
                as `embermap import --resume` does: not with several fields or words (vocab="none"
                leaves them out). `progress` is called once for the rows that are read, and once
                for the table.
            jobs: threads that read and convert.
            progress: called with (done, total) rows; may raise to stop, and Ctrl-C stops there. It
                must not use the store or its tables: they wait for this call to end.

        Warns (RuntimeWarning) of values that the new dtype made infinite or zero, and (UserWarning)
        of what rows do not show: a shape of other than two dimensions, a lossy filter, chunks of
        HDF5 that were never written.

        Raises: FileNotFoundError, FormatError, NotFoundError (nothing of that name in the file),
        TypeError (dtype that does not fit), ValueError (a format that is not known or cannot be
        told, several arrays that could be meant), FileExistsError (table, vocabulary), CorruptError
        (check), OSError.
        """
        how = _checks.reading(source_dtype, allow_external, follow_links, format, dim, offset)
        arrays = _checks.pairs(fields)
        part = _checks.row_range(rows, lambda: _checks.count_rows(src, how, arrays))
        handle, found = self._live.import_file(
            _table_name(name),
            os.fsencode(src),
            None if dtype is None else _dtypes.dtype_name(dtype),
            how,
            _checks.selection(part, order, jobs),
            arrays,
            optimizers._to_core(optimizer),
            _checks.size(page_bytes, "page_bytes"),
            _table_memory(memory),
            b"" if vocab is None else os.fsencode(vocab),
            os.fsencode(self.path / name),
            bool(check),
            bool(resume),
            progress,
        )
        _checks.tell(_checks.told(found))
        parts = found.get("fields", {"weight": found}).values()
        infinite = sum(part["became_infinite"] for part in parts)
        zero = sum(part["became_zero"] for part in parts)
        if infinite or zero:
            warnings.warn(
                f"{infinite} values of {os.fsdecode(src)!r} became infinite in "
                f"{handle.dtype}, {zero} became zero",
                RuntimeWarning,
                stacklevel=2,
            )
        return Table(self, handle)

    def import_all(
        self,
        name: str,
        src: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002
        vocab: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Table:
        """Make a table of a file that `Table.export_all` or `embermap export --all` wrote: equal to
        the one exported, with every state of its optimizer, its steps and its vocabulary.

        Args:
            name: see the class.
            src: the file.
            format: the file's; None: what its content, else its name, tells.
            vocab: the file that words go to; None: STORE/NAME.vocab.txt, "none": nowhere.
            progress: as for `import_file`.

        Raises: as `import_file`. On failure nothing is left.
        """
        words = self.path / f"{name}.vocab.txt" if vocab is None else vocab
        handle = self._live.import_all(
            _table_name(name),
            os.fsencode(src),
            None if format is None else str(format),
            b"" if os.fspath(words) == "none" else os.fsencode(words),
            progress,
        )
        return Table(self, handle)

    def adopt(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        writable: bool = True,
        dtype: Any = None,
    ) -> Table:
        """Use an existing .npy file where it is: 2-D, C order; not copied.

        A big-endian file gives native rows, and stays big-endian when rows are written to it.

        Args:
            name: see the class.
            path: the file. Removing the table leaves it there.
            writable: False protects the file from writes, which otherwise go to it.
            dtype: what the file's bytes are, where it does not say (bfloat16).

        Raises: FileNotFoundError, FormatError, TypeError (dtype), FileExistsError (table).
        """
        handle = self._live.adopt(
            _table_name(name),
            _checks.path(path),
            bool(writable),
            None if dtype is None else _dtypes.dtype_name(dtype),
        )
        return Table(self, handle)

    def __getitem__(self, name: str) -> Table:
        """The table `name`. Raises NotFoundError, a KeyError, which lists the tables."""
        return Table(self, self._live.table(_table_name(name)))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._live.contains(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.tables())

    def __len__(self) -> int:
        return len(self._live.tables())

    def keys(self) -> list[str]:
        """Names of the tables, sorted."""
        return self._live.tables()

    def tables(self) -> list[str]:
        """Names of the tables, sorted."""
        return self._live.tables()

    def remove(self, name: str) -> None:
        """Delete a table and its files, for good, without a commit.

        An adopted file stays. The vocabulary and the order of rows that an import has put beside
        the table, NAME.vocab.txt and NAME.order.npy, go with it.

        Raises: NotFoundError, PermissionError (store read-only).
        """
        self._live.remove(_table_name(name))

    def stats(self) -> dict[str, Any]:
        """What the tables did since the store was opened.

        Returns {"memory": the budget, "memory_bytes": what is taken of it now, "tables": {name:
        Table.stats()}, "total": sums over the tables, "log": of the redo log}. A broken table is
        left out. The log has "limit", "bytes" that are needed now, "pages" in them, "memory_bytes",
        "appended_bytes" and "applied_pages" (moved on to the tables) since the store was opened;
        zeros without a log: opened read-only, or with durability "none".
        """
        core = self._live
        tables = {}
        for name in core.tables():
            try:
                tables[name] = core.table(name).stats()
            except (OSError, ValueError, KeyError):
                continue  # broken, or removed just now
        total = {key: sum(stats[key] for stats in tables.values()) for key in _SUMMED}
        log = core.log_stats()
        taken = total.pop("memory_bytes") + total["io_memory_bytes"] + log["memory_bytes"]
        return {
            "memory": core.memory,
            "memory_bytes": taken,
            "tables": tables,
            "total": total,
            "log": log,
        }

    # --- commits ----------------------------------------------------------------------------------

    def commit(self, note: Mapping[str, Any] | None = None) -> int:
        """Make all changes since the last commit durable, of all tables together.

        Other threads go on while the disk is waited for. A failed sync is final: the store takes no
        writes from then on (CorruptError); opened again it is at the commit before. Other errors, a
        full disk, change nothing: commit again.

        Args:
            note: what belongs to these rows, as part of the commit: `{"step": 1000, "loss": 0.25}`.
                Strings, numbers, True, False, None, lists and mappings of them, numbers of NumPy
                too; at most 64 KiB as JSON, nested at most 12 deep. With a note it is a commit even
                if no row has changed.

        Returns the number of the commit; without changes that of the last one.

        Raises: TypeError, ValueError (NaN, infinity, a whole number beyond 64 bits), which name the
        key; what is said above.
        """
        return self._live.commit("" if note is None else _notes.text(note))

    @property
    def note(self) -> dict[str, Any] | None:
        """The note of the last commit, or None; a reader's is that of the commit it sees."""
        return _notes.value(self._live.note())

    def commits(self) -> list[Commit]:
        """The last commits, the newest last: `number`, `time` (UTC, ISO 8601), `note` (None: none).

        At most 1000, and as many as take a MiB as text. Commits that the store makes by itself (at
        close, to resize, where the redo log is full) have no note. A reader's list ends with the
        commit it sees.
        """
        return [
            Commit(number, time, _notes.value(note)) for number, time, note in self._live.commits()
        ]

    def checkpoint(self) -> None:
        """Move what is committed from the redo log to the tables' `.npy` files.

        They are exactly the last commit then: for NumPy, backups and whoever looks at the files
        themselves. The store does so by itself, later, and when it is closed. Commits nothing.
        """
        self._live.checkpoint()

    def recalibrate(self) -> None:
        """Forget how fast rows moved to and from the GPU.

        The next large batch of a table measures it again, in about a second, and the store keeps
        that in `cuda.json`. For a machine that has changed, or was busy when it was measured.
        """
        self._live.recalibrate()

    def snapshot(
        self, destination: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> dict[str, int]:
        """Make `destination` a store that is this one at its last commit.

        Other threads and processes go on meanwhile; the copy is gone over until all of it is of one
        commit. In the writer's process the last round keeps the redo log from being applied: what
        needs that (checkpoint, resize, append, remove, close, a log at its limit) waits for it.
        Only written pages are copied, or none where the file system can share blocks between
        files. An adopted table becomes an ordinary one with a file of its own. With durability
        "none" nothing may have changed since the last commit, and other calls wait.

        After an error or a crash the destination is no store; the same call goes on with it.

        Args:
            destination: a directory that is not there or empty, or a half-done snapshot of this
                store; not inside the store.
            progress: called with (bytes done, bytes in all); must not use the store.

        Returns {"commit": its number, "pages": written ones of all tables, "copied_pages" and
        "copied_bytes": by this call, "cloned_tables": those that share their blocks, "rounds"}.

        Raises: FileExistsError, StaleError (another process changes the store faster than it is
        copied), CorruptError (a page of the store is damaged), OSError (a full disk, naming the
        file), ValueError.
        """
        return self._live.snapshot(_checks.path(destination), progress)

    def refresh(self) -> int:
        """Bring a store opened with mode "r" to the last commit.

        Tables made since are there, handles of removed ones raise ValueError, and the others show
        the rows of that commit. Does nothing for a writer. Returns the number of the commit.
        """
        return self._live.refresh()

    def close(self) -> None:
        """Commit, if the store is writable, and release files, memory and the lock.

        Tables of the store raise ValueError from then on. A second call does nothing, nor does one
        in a child that inherited the store by fork.
        """
        if not self._session.forked:
            self._session.end_hints()
            self._session.core.close()

    def abandon(self) -> None:
        """Release everything without committing: what was not written stays unwritten."""
        if not self._session.forked:
            self._session.end_hints()
            self._session.core.abandon()

    def __enter__(self) -> Store:
        self._session.check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _table_name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a table must be a string, not {name!r}")
    return name


_SUMMED = (
    "hits",
    "misses",
    "evictions",
    "write_backs",
    "pages_read",
    "pages_generated",
    "bytes_read",
    "bytes_written",
    "read_requests",
    "write_requests",
    "rows_gathered",
    "rows_mapped",
    "rows_written",
    "seconds_waiting",
    "resident_pages",
    "dirty_pages",
    "memory_bytes",
    "io_memory_bytes",
    "mapped_bytes",
)


def _table_memory(memory: int | str | None) -> int:
    """Bytes of a table's own share; 0: by size."""
    if memory is None:
        return 0
    size = _checks.size(memory, "memory")
    if size == 0:
        raise ValueError("memory of a table must be more than 0 bytes; None shares by size")
    return size


def _log_limit(limit: int | str | None) -> int:
    """Bytes of the redo log; 0: the default."""
    if limit is None:
        return 0
    size = _checks.size(limit, "log_limit")
    if size == 0:
        raise ValueError("log_limit must be more than 0 bytes; None takes 64 times memory")
    return size


def _device_number(device: object) -> int | None:
    """The number of a CUDA device: None, "cpu", "cuda", "cuda:1", a number, a torch.device."""
    if device is None:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(device, getattr(torch, "device", ())):
        device = str(device)
    if isinstance(device, str):
        kind, colon, number = device.partition(":")
        if kind == "cpu" and number in ("", "0"):
            return None
        if kind == "cuda" and not colon:
            return 0
        if kind == "cuda" and number.isascii() and number.isdigit():
            return int(number)
        raise ValueError(
            f'device must be None, "cpu", "cuda", "cuda:1" or a number, not {device!r}'
        )
    return _checks.integer(device, "device", most=2**31 - 1)


def open(  # noqa: A001
    path: str | os.PathLike[str],
    *,
    mode: Mode = "a",
    memory: int | str = "1GiB",
    device: Any = None,
    threads: int = 0,
    accept_unclean: bool = False,
    io: Io = "auto",
    direct: bool | None = None,
    policy: Policy = "lru",
    durability: Durability = "commit",
    log_limit: int | str | None = None,
    autocommit: bool = True,
    allow_adopted: bool | None = None,
    pin: Pin = "frames",
    accept_changed: bool = False,
    verify: Verify = "memory",
) -> Store:
    """Open a store: a directory of tables.

    Args:
        path: the directory.
        mode: "a" opens it for reading and writing, and makes it if the path is free or an empty
            directory; "r+" opens one that exists; "r" reads it, without a lock. One process may
            have a store open for writing, any number for reading. A reader sees the last commit, as
            a whole, and stays there until `Store.refresh()`: also while a writer is at work, until
            that has moved the files on to a later commit, which it does every now and then. Rows
            that are not in memory raise StaleError then.
        memory: bytes, or a text like "8GiB", for all tables together: their hot pages, what is kept
            about each page in memory, look-up tables, page bits and checksums; and a thirty-second
            of it, at most 16 MiB, for pages in flight (scans, imports, appends). Small tables are
            in memory as a whole, large ones share the rest by size; `create(memory=)` and
            `Table.memory` set a table's share. BudgetError names the tables and the least that
            would do. Not in it: the arrays of a call and what it keeps for its ids, 20 to 50 bytes
            each; threads; and buffers of I/O (`io_memory_bytes` of `Table.stats()`): some 100 KiB a
            table, but several MiB for one whose pages are not multiples of 512 bytes.
        device: CUDA device whose tensors tables take and give: "cuda", "cuda:1", a number, a
            torch.device; None: host memory only.
        threads: for copies and optimizer steps; 0 takes what the process may use, at most 16.
            I/O has 32 threads of its own.
        accept_unclean: take the tables as they are after a session with durability "none" that
            ended while it was writing pages, where they may hold a mix of the last commit and later
            rows.
        io: how pages go between files and memory: "io_uring", "threads", "cached"; "auto" chooses
            for each file by a short probe. What the system refuses falls back; `Table.stats()`
            tells what is used and why.
        direct: past the page cache (O_DIRECT), or through it; None: past it where the file system
            allows it.
        policy: which pages stay in memory that is too small for all: "lru", the least recently used
            batches go first, or "s3fifo", which keeps pages used again and again longer.
        durability: "commit": everything up to a commit, of all tables, or nothing, whatever happens
            to the process or the machine; opened after a crash, the store is at its last commit.
            Changed pages are written to a redo log, and once more to the tables later. "none":
            pages are written to the tables at any time, once; after a crash they may be of
            different moments, and the store is refused until `accept_unclean`. For what can be made
            again.
        log_limit: bytes, or a text, of the redo log, at least 1 MiB: what is changed between two
            commits may take half of it. None: 64 times `memory`, 128 MiB to 16 GiB, or 4 times
            where that is more, at most 128 GiB. It takes disk only as it is used, and is moved on
            to the tables when it is four times as long as the pages in it. Its index takes up to 5
            % as many bytes; `memory` keeps them for it, but no more than an eighth, or some 4 MiB,
            which budgets below 32 MiB have beside them. Where the tables have more pages than it
            has room for, the limit counts as reached when half of it is pages changed since the
            last commit.
        autocommit: where more than that was changed, commit at the beginning of the call that would
            change more; `Table.write` and `materialize` of more than half as much do so in
            stretches. False: that call raises LogFullError. A single call that exceeds it is done
            all the same.
        allow_adopted: whether tables whose data is a file from elsewhere (`Store.adopt`) are
            opened. None: if you adopted the file and the store is still the directory in which you
            did: one that was copied, unpacked from an archive or restored, or that belongs to
            another user, must not decide which of your files are read and written. Such a table is
            listed, and asking for it raises FormatError naming the file. True: open whatever the
            store names; a writer records that it belongs here now. False: open none.
        pin: what rows are gathered from, by kernels of the device and on the host. "frames": hot
            pages in memory of the store's own. "mapping", for mode "r": each table's `.npy` itself,
            mapped, and registered with CUDA for reading, so that any number of processes share
            the page cache and rows take nothing of `memory`. For tables that fit in the machine's
            memory and rarely change. Pages are not compared with their checksums. gather raises
            ValueError for a table with pages that were never written (`Table.materialize`) or an
            adopted file of the other byte order; a batch with pages that the reader's commit has
            only in the redo log (`Store.checkpoint` by the writer, then `refresh`) goes through
            frames. A file that is cut short is FormatError.
        accept_changed: open an adopted file as it is though something other than embermap changed
            it, as its size and time tell; without this, asking for the table raises CorruptError
            that says what changed. It is told of again until `Table.accept()`.
        verify: when pages that are read are compared with their checksums. "memory": those of
            tables whose checksums fit an eighth of their memory (up to about a hundred times it),
            at no cost; `Table.verify()` compares the others. "read": all of them, with a second
            read, of the checksum, where that is not in memory.

    Raises: StoreNotFoundError (a FileNotFoundError; modes "r+" and "r"), FormatError (not a store,
    a newer version, a broken manifest or log, committed rows of an adopted file that is not
    opened), LockedError (open for writing elsewhere, names the process), CorruptError (an unclean
    end, see accept_unclean), StaleError (the store changes all the time; mode "r"), CudaError (no
    such device), OSError, ValueError.
    """
    where = _checks.path(path)
    if mode not in ("a", "r+", "r"):
        raise ValueError(f'mode must be "a", "r+" or "r", not {mode!r}')
    if direct is not None and not isinstance(direct, bool):
        raise TypeError(f"direct must be True, False or None, not {direct!r}")
    if allow_adopted is not None and not isinstance(allow_adopted, bool):
        raise TypeError(f"allow_adopted must be True, False or None, not {allow_adopted!r}")
    for value, name in (
        (io, "io"),
        (policy, "policy"),
        (durability, "durability"),
        (pin, "pin"),
        (verify, "verify"),
    ):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, not {value!r}")
    number = _device_number(device)
    arguments = (
        mode,
        _checks.size(memory, "memory"),
        -1 if number is None else number,
        _checks.integer(threads, "threads", most=4096),
        bool(accept_unclean),
        io,
        direct,
        policy,
        durability,
        _log_limit(log_limit),
        bool(autocommit),
        allow_adopted,
        pin,
        bool(accept_changed),
        verify,
    )
    try:
        core = _core.Store.open(where, *arguments)
    except NotFoundError as error:
        if _core.is_store(where):
            raise
        raise StoreNotFoundError(errno.ENOENT, "no store", str(where)) from error
    session = _Session(core, str(core.path), mode, number)
    session.allow_adopted = allow_adopted
    session.pin = pin
    return Store(session)


def _stamp(path: str) -> _Stamp:
    def of(name: str) -> tuple[int, int, int] | None:
        try:
            found = (Path(path) / name).stat()
        except OSError:
            return None
        return (found.st_ino, found.st_size, found.st_mtime_ns)

    return (of("embermap.json"), of("redo.log"))


def _restore_store(
    path: str,
    memory: int,
    commit: int,
    inode: int,
    allow_adopted: bool | None,
    pin: Pin = "frames",
) -> Store:
    """Open the store of a pickle, read-only, and check that it is the same one."""
    with _restoring:
        stamp = _stamp(
            path
        )  # before it is opened: a commit in between makes the next one open anew
        session = _restored.get((path, memory, allow_adopted, pin))
        if session is None or session.core.closed or session.restored_from != stamp:
            session = open(
                path, mode="r", memory=memory, allow_adopted=allow_adopted, pin=pin
            )._session
            session.restored_from = stamp
            _restored[path, memory, allow_adopted, pin] = session
    store = Store(session)
    if store.path.stat().st_ino != inode or store.commit_number < commit:
        raise ValueError(f"{path!r} is not the store that was pickled: it was replaced since")
    return store
