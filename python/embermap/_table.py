"""Tables of a store."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _arrays, _checks, _core, _dtypes
from . import init as initializers
from . import optim as optimizers
from ._errors import ForkError, RowIdError
from ._prefetch import Prefetcher

if TYPE_CHECKING:
    from ._store import Store

__all__ = ["Prefetch", "Progress", "Table", "TableView"]

Progress = Callable[[int, int], object]

_STREAM_BYTES = 4 << 20  # slices from here on go past the hot pages, in blocks of this size


def _counts(found: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("became_infinite", "became_zero")}


class Table:
    """One table of a store: `rows` x `dim` elements of one dtype, and its optimizer's state.

    Got from a store (`store["name"]`, `store.create`, ...); a light handle, copies name the same
    table. After the store is closed, or the table removed, every use raises ValueError.

    Ids are integers in a list, tuple, range, NumPy array of any integer width, or any tensor that
    speaks DLPack (torch on CPU or CUDA, CuPy, ...); of any shape. **Results live where the ids
    do**: lists and NumPy arrays give NumPy arrays (bfloat16 as `ml_dtypes.bfloat16`), torch
    tensors give torch tensors on their device, and so on. Tensors on a CUDA device need a store
    opened with that `device`; the work is ordered on the current stream of their library. Results
    are copies: changing them does not change the table.

    Rows and gradients are arrays of shape `ids.shape + (dim,)` where the ids are, of the table's
    dtype (arrays of another dtype are refused), in any memory layout; Python lists are converted.

    Ids count from 0 and negative ones are refused (RowIdError, an IndexError, which names the
    first bad id and its position); only single numbers and slices in `table[...]` count from the
    end as in Python. Ids given several times: gather repeats the row, scatter keeps the last
    value, add and update sum. A call that raises because of its arguments has changed nothing.

    Thread safety: all methods may be called from several threads; they release the GIL. gather
    and read run side by side; scatter, add, update and resize one at a time.

    Pickling a table (for workers of a DataLoader, say) keeps the path of the store and the name,
    a few hundred bytes; the copy opens the store **read-only**, without a device, and sees the
    last commit; copies that come into the same process share one opening, see Store. Commit before
    workers start. While a writer with durability "none" has written pages since its last commit,
    opening raises CorruptError. `copy.copy` and `copy.deepcopy` give the same handle.

    Raises besides: OSError (a failed read or write, with errno and file name), CorruptError
    (bytes that do not match their checksum; a store whose sync failed), StaleError (open read-only:
    the writer has gone on, and rows of this commit are not in its files any more, see
    `Store.refresh`), LogFullError (a change, in a store opened with autocommit=False),
    PermissionError (a write to a read-only store), BudgetError (the store's memory is too small for
    one page), ForkError (a handle inherited by fork).
    """

    __slots__ = ("_dim", "_dtype", "_handle", "_name", "_store")

    def __init__(self, store: Store, handle: _core.Table) -> None:
        # Not for callers: tables come from a store.
        self._store = store
        self._handle = handle
        self._name = handle.name
        self._dim = handle.dim
        self._dtype = handle.dtype

    # --- what it is -------------------------------------------------------------------------------

    @property
    def _live(self) -> _core.Table:
        self._store._session.check_open()
        return self._handle

    @property
    def name(self) -> str:
        """Name in the store."""
        return self._name

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._live.rows

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._dim

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim)."""
        return (self._live.rows, self._dim)

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the elements; bfloat16 is `ml_dtypes.bfloat16`."""
        return _dtypes.numpy_dtype(self._dtype)

    @property
    def fields(self) -> dict[str, np.dtype[Any]]:
        """Names and dtypes of a row's fields: "weight", then the optimizer's state."""
        return {name: _dtypes.numpy_dtype(dtype) for name, dtype in self._live.fields()}

    @property
    def optimizer(self) -> optimizers.Optimizer | None:
        """The optimizer and its hyperparameters; None for a table that is not trained.

        Assigning changes the hyperparameters of later updates; the next commit keeps them. The
        kind of optimizer, the state it needs and what that begins with cannot change (ValueError).
        """
        return optimizers._from_core(self._live.optimizer())

    @optimizer.setter
    def optimizer(self, optimizer: optimizers.Optimizer | None) -> None:
        core = optimizers._to_core(optimizer)
        self._live.set_optimizer(core)

    @property
    def init(self) -> initializers.Initializer:
        """What rows hold before anyone writes them."""
        return initializers._from_core(self._live.initializer())

    @property
    def seed(self) -> int:
        """Seed of the initial rows."""
        return self._live.seed

    @property
    def memory(self) -> int | None:
        """Bytes of the store's memory set aside for this table; None: it shares by size.

        They cover its frames, look-up table, page bits and checksums; what it cannot use goes to
        the others. Assigning bytes, a text like "256MiB", or None takes effect at once (all dirty
        pages are written) and is kept by the next commit, or, in a store that is open read-only,
        for this session. BudgetError, and nothing changed, if it is too little for the table or
        leaves too little for the others.
        """
        return self._live.memory or None

    @memory.setter
    def memory(self, memory: int | str | None) -> None:
        size = 0 if memory is None else _checks.size(memory, "memory")
        if size == 0 and memory is not None:
            raise ValueError("memory of a table must be more than 0 bytes; None shares by size")
        self._live.set_memory(size)

    @property
    def step(self) -> int:
        """Updates since the table was created."""
        return self._live.step

    @property
    def path(self) -> Path:
        """The .npy file, for `numpy.load(path, mmap_mode="r")`.

        It holds the last commit after `Store.checkpoint()` and after close(); until then commits
        may be in the store's redo log alone, and a writer moves them here at any time. Pages that
        were never written are zeros there (see `materialize`), and one that no commit had yet may
        hold rows of none. With durability "none" pages are written here at any time.
        """
        return self._live.file

    @property
    def writable(self) -> bool:
        """Whether rows can be changed through this handle."""
        return self._live.writable

    @property
    def adopted(self) -> bool:
        """Whether the file is a foreign one, used in place."""
        return self._live.adopted

    @property
    def page_bytes(self) -> int:
        """The page size asked for at creation, bytes."""
        return self._live.page_bytes_option

    def __len__(self) -> int:
        return self._live.rows

    def __bool__(self) -> bool:
        return True  # an empty table is still a table

    def __repr__(self) -> str:
        try:
            rows, optimizer = self._live.rows, self.optimizer
            closed = self._store.closed
        except ValueError:
            closed = True
        if closed:
            return f"<embermap.Table {self._name!r} (closed)>"
        trained = f", {optimizer!r}" if optimizer is not None else ""
        return f"<embermap.Table {self._name!r} {rows} x {self._dim} {self._dtype}{trained}>"

    def __copy__(self) -> Table:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Table:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        core = self._live
        identity = (core.dim, core.dtype, core.file.stat().st_ino)
        return (_restore_table, (self._store, self._name, identity))

    # --- rows by id -------------------------------------------------------------------------------

    def gather(self, ids: Any, *, field: str = "weight", out: Any = None) -> Any:
        """Copy rows out: ids of any shape -> `ids.shape + (dim,)`, where the ids are.

        Args:
            ids: row numbers, see the class.
            field: "weight", or a state field of the optimizer ("sum", "momentum_buffer"), which
                is float32 for float16 and bfloat16 tables. One with a single number a row (the
                sum of `optim.RowWiseAdagrad`, "step") gives `ids.shape + (1,)`.
            out: filled and returned if given: contiguous in C order, writable, of the exact shape
                and dtype, on the same device, not overlapping the ids.

        Raises: RowIdError (`out` untouched), NotFoundError (no such field), TypeError, ValueError.
        """
        core = self._live
        dtype = self._field_dtype(core, field)
        batch = self._ids(ids)
        result = _arrays.make_result(batch, core.field_elements(field), dtype, out)
        if batch.device is None:
            core.gather(batch.host, result.bytes, field)
        else:
            with _DeviceCall(batch):
                core.gather_device(
                    batch.device, batch.pointer, batch.count, result.pointer, field, batch.stream
                )
        return _arrays.finish(batch, result, out)

    def _gather_for_update(self, ids: Any, out: Any = None) -> tuple[Any, _core.WorkingSet | None]:
        """gather(), and what it fetched where an update of the same ids may take it from there.

        Not for callers: the core's `update_kept` is given it on the same stream. It holds device
        memory.
        """
        core = self._live
        batch = self._ids(ids)
        if batch.device is None:
            return self.gather(ids, out=out), None
        result = _arrays.make_result(batch, self._dim, self._dtype, out)
        with _DeviceCall(batch):
            kept = core.gather_working_set(
                batch.device, batch.pointer, batch.count, result.pointer, batch.stream
            )
        return _arrays.finish(batch, result, out), kept if kept else None

    def scatter(self, ids: Any, rows: Any, *, field: str = "weight") -> None:
        """Replace rows: `rows` is of shape `ids.shape + (dim,)`. The last of an id wins.

        Nothing is broadcast. Raises: RowIdError, ValueError (number or shape of the rows),
        TypeError (their dtype), NotFoundError (no such field): nothing has been written.
        """
        core = self._live
        dtype = self._field_dtype(core, field)
        batch = self._ids(ids)
        width = core.field_elements(field)
        self._scatter(core, batch, _arrays.read_values(rows, batch, width, (dtype,)), field)

    def add(self, ids: Any, rows: Any) -> None:
        """Add to rows: `rows` is of shape `ids.shape + (dim,)`. Of an id given twice all count.

        What is added to a row is summed in the order of the batch, in float32 (float64 for
        float64, modulo 2**n for integers), and rounded to the table's dtype once: the same bits
        with any number of threads, and on a GPU. Raises as scatter does.
        """
        core = self._live
        batch = self._ids(ids)
        values = _arrays.read_values(rows, batch, self._dim, (self._dtype,))
        if batch.device is None:
            core.add(batch.host, values.bytes)
        else:
            with _DeviceCall(batch):
                core.add_device(
                    batch.device, batch.pointer, batch.count, values.pointer, batch.stream
                )

    def update(
        self,
        ids: Any,
        grads: Any,
        *,
        lr: float | None = None,
    ) -> None:
        """One step of the table's optimizer on the rows of a batch.

        The gradients of an id given several times are summed first. Rows outside of the batch do
        not change, nor does their state. `step` counts up by one.

        Args:
            ids: row numbers, see the class.
            grads: gradients of the weights, shape `ids.shape + (dim,)`, of the table's dtype, or
                float32 for a float16 or bfloat16 table.
            lr: learning rate of this step alone; None takes the optimizer's. Rprop has no use for
                one (ValueError).

        Raises: ValueError (a table without optimizer, shapes, lr), RowIdError, TypeError: nothing
        has been changed.
        """
        core = self._live
        accepted = (self._dtype, "float32") if self._dtype in _dtypes.HALF else (self._dtype,)
        batch = self._ids(ids)
        values = _arrays.read_values(grads, batch, self._dim, accepted, "grads")
        rate = None if lr is None else _checks.number(lr, "lr")
        if batch.device is None:
            core.update(batch.host, values.bytes, values.dtype, rate)
            return
        with _DeviceCall(batch):
            core.update_device(
                batch.device,
                batch.pointer,
                batch.count,
                values.pointer,
                values.dtype,
                batch.stream,
                rate,
            )

    def prefetch(self, ids: Any) -> Prefetch:
        """Read the pages of these rows into memory, for a batch to come, while the caller goes on.

        Calls are served in their order. Pages that were read and not used yet take at most half of
        the table's frames and keep them until a batch uses them or needs the frames; further
        reading waits for room, which batches make by using their pages. It does not wait for pages
        that nobody wanted: those are given up when 64 other batches (or more, where many calls are
        ahead) have come.

        A hint: errors while reading are dropped, the call that needs the rows meets them again; a
        call whose batch comes first reads nothing any more; and where 32 calls for a table wait,
        further ones end at once. Ids that turn out not to be used cost the reading of their pages.
        Ids on a GPU are read there when the current stream has come to this call; bad ones among
        them are not refused, and nothing is read then.

        Returns a handle, which may be ignored. Raises: RowIdError, TypeError.
        """
        core = self._live
        batch = self._ids(ids)
        if batch.device is None:
            return Prefetch(core.prefetch(batch.host))
        with _DeviceCall(batch):
            return Prefetch(
                core.prefetch_pages(batch.device, batch.pointer, batch.count, batch.stream)
            )

    def prefetcher(self) -> Prefetcher:
        """`prefetch` for worker processes, such as those of a DataLoader.

        What it returns can be given to workers that are forked or spawned (it pickles to some
        hundred bytes) and called there with the ids of a batch; they travel to this process, where
        the pages are read while the batch is still on its way:

            class Collate:
                def __init__(self, table):
                    self.prefetch = table.prefetcher()

                def __call__(self, samples):
                    ids = torch.tensor(samples)
                    self.prefetch(ids)
                    return ids

            loader = DataLoader(dataset, batch_size=1024, num_workers=2, collate_fn=Collate(items))
            for ids in loader:
                rows = items.gather(ids)

        Calls never wait: where ids come faster than they can be sent, the newest are dropped. In
        this process (num_workers=0) a call is `prefetch`. Bad ids raise RowIdError where they are
        given; rows are counted when the prefetcher is made, so make it after a resize. When the
        store is closed or this process ends, calls in workers do nothing. Linux only.
        """
        rows = self._live.rows
        return Prefetcher(self._store._session.hint_address(), self._name, rows)

    # --- rows by place ----------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        """Rows as copies: `table[5]`, `table[-1]`, `table[3:7]`, `table[ids]`, `table[mask]`.

        A number gives shape (dim,), a slice (n, dim), both NumPy arrays. Ids give what gather
        gives. A mask, of bools, must have as many elements as the table has rows (IndexError).
        After the rows may come a key for columns, `table[3:7, 0]`, `table[ids, ::2]`,
        `table[..., :4]`: whole rows are read, and the result is what NumPy gives for such a key.
        """
        return _item(self, key, "weight", _STREAM_BYTES)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write rows, for every key of rows. `value` is broadcast as NumPy does.

        Only whole rows are written: a key for columns is refused (TypeError). Scalars and lists
        are converted to the table's dtype; arrays must have it.
        """
        core = self._live
        rows, columns = _split(key)
        if not (isinstance(columns, slice) and columns == slice(None)):
            raise TypeError("whole rows are written, not columns of them: gather, change, scatter")
        target = _key(rows, self)
        device = _arrays.cuda_device(value)
        if isinstance(target, int | range) and device is not None:
            target = _device_ids(target, value)
        if isinstance(target, int):
            target = np.int64(target)
        if isinstance(target, range) and target.step == 1:
            wide = len(target) * self._dim * _dtypes.ITEM_BYTES[self._dtype]
            if wide >= _STREAM_BYTES:
                self._stream_in(core, target, self._host_broadcast(value, (len(target), self._dim)))
                return
        batch = self._ids(target)
        shape = (*batch.shape, self._dim)
        if device is not None:
            values = _arrays.read_values(
                _broadcast_on_device(value, shape), batch, self._dim, (self._dtype,)
            )
        elif batch.device is not None and not _arrays.is_list(value):
            raise ValueError(f"ids are on {batch.place}, rows on the host: move one to the other")
        else:
            array = np.ascontiguousarray(self._host_broadcast(value, shape))
            host = _arrays.Values(self._dtype, _arrays.flat_bytes(array))
            values = _arrays.to_device(host, batch)
        self._scatter(core, batch, values, "weight")

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """Rows in order, read in blocks."""
        return iter(self.view())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """The whole table as a NumPy array in memory; `view()` reads parts."""
        return self.view().__array__(dtype, copy)

    def read(
        self, start: int = 0, stop: int | None = None, *, field: str = "weight", out: Any = None
    ) -> Any:
        """Copy the rows [start, stop) out, past the hot pages: for scans, which evict nothing.

        Rows of one page are of one moment, so none is torn; a change made by another thread
        meanwhile does not wait for the whole read, and may be seen on some pages and not on others.

        Args:
            start, stop: row numbers, 0 <= start <= stop <= rows; stop=None is the end.
            field: "weight" or a state field of the optimizer.
            out: a NumPy array or a torch CPU tensor, filled and returned if given: contiguous in C
                order, of shape (stop - start, dim) and the field's dtype.

        Returns: shape (stop - start, dim), a NumPy array unless `out` is given.
        """
        core = self._live
        dtype = self._field_dtype(core, field)
        start, stop = self._range(core, start, stop)
        shape = (stop - start, core.field_elements(field))
        if out is None:
            result = _arrays.host_result(shape, dtype)
        elif _arrays.cuda_device(out) is not None:
            raise ValueError("out is on a CUDA device; consecutive rows are read to the host")
        else:
            result = _arrays.host_out(out, shape, dtype)
        core.read(start, stop - start, result.bytes, field)
        return result.value

    def write(self, start: int, rows: Any, *, field: str = "weight") -> None:
        """Replace the rows [start, start + len(rows)), past the hot pages.

        Args:
            start: first row.
            rows: shape (n, dim), of the field's dtype, on the host.
        """
        core = self._live
        dtype = self._field_dtype(core, field)
        start = _checks.integer(start, "start")
        if _arrays.is_list(rows):
            array, name = _arrays.list_values(rows, dtype, "rows"), dtype
        elif _arrays.cuda_device(rows) is not None:
            raise ValueError(
                "rows are on a CUDA device; consecutive rows are written from the host"
            )
        else:
            array, name = _arrays.host_array(rows, "rows")
        width = core.field_elements(field)
        if array.ndim != 2 or array.shape[1] != width:
            raise ValueError(f"rows must have the shape (n, {width}), not {array.shape}")
        _arrays.check_dtype(name, (dtype,), "rows")
        start, stop = self._range(core, start, start + array.shape[0])
        core.write(start, stop - start, _arrays.flat_bytes(np.ascontiguousarray(array)), field)

    def view(self, field: str = "weight") -> TableView:
        """The table as a read-only, lazy array: nothing is read until it is indexed."""
        self._field_dtype(self._live, field)
        return TableView(self, field)

    # --- the table as a whole ---------------------------------------------------------------------

    def append(self, rows: Any) -> int:
        """Add rows at the end, and commit. Returns the id of the first new row.

        Args:
            rows: shape (n, dim), or (dim,) for one row, of the table's dtype: an array, a tensor of
                any library (one on a CUDA device is copied to the host), or nested lists.

        The optimizer's state of the new rows is initial. Each call commits, as resize does: add
        many rows at once. After an error the table is as it was before. Other threads may append
        at the same time; each gets rows of its own.

        Raises: ValueError (shape, an adopted file), TypeError (dtype), BudgetError, OSError.
        """
        core = self._live
        if _arrays.is_list(rows):
            array, name = _arrays.list_values(rows, self._dtype, "rows"), self._dtype
            if array.size == 0 and array.ndim == 1:
                array = array.reshape(0, self._dim)  # [] says nothing about the width
        else:
            array, name = _arrays.host_array(_arrays.to_host(rows, "rows"), "rows")
        if array.ndim == 1:
            array = array[np.newaxis]
        if array.ndim != 2 or array.shape[1] != self._dim:
            raise ValueError(
                f"rows must have the shape (n, {self._dim}) or ({self._dim},), not {array.shape}"
            )
        _arrays.check_dtype(name, (self._dtype,), "rows")
        return core.append(_arrays.flat_bytes(np.ascontiguousarray(array)))

    def resize(self, rows: int) -> None:
        """Change the number of rows, and commit.

        Rows beyond the old end are initial rows. Rows beyond the new end are forgotten for good.
        """
        self._live.resize(_checks.integer(rows, "rows"))

    def materialize(self, *, progress: Progress | None = None) -> None:
        """Write every page that was never written, so that the file alone holds all rows. Commits.

        Args:
            progress: called with (done, total) pages from time to time; may raise to stop, and
                Ctrl-C stops there. It must not use the store or its tables: they wait for this
                call to end.
        """
        self._live.materialize(progress)

    def verify(self, *, progress: Progress | None = None) -> dict[str, Any]:
        """Compare every page in the file with its checksum.

        Args:
            progress: called with (done, total) pages from time to time; may raise to stop, and
                Ctrl-C stops there. It must not use the store or its tables: they wait for this
                call to end.

        Returns a dict: "ok", "pages" (of the table), "written" (pages in the file), "verified"
        (pages whose checksum was compared), "bad_pages", and "bad", a list of the first 1,000
        ranges of neighbouring bad pages {"page", "pages", "first_row", "last_row"}, rows inclusive.
        """
        report = self._live.verify(progress)
        return {"ok": report["bad_pages"] == 0, **report}

    def accept(self, *, progress: Progress | None = None) -> None:
        """Take every page in the file as it is: give it the checksum of what it holds now.

        For a file that another program changed on purpose, such as NumPy. Damaged rows are taken
        as well: look at verify() first. Part of the next commit. An adopted file that was changed
        needs a store opened with accept_changed=True, and is opened without it afterwards.

        Args:
            progress: as in verify().
        """
        self._live.accept(progress)

    def repair_from(self, backup: Table, *, progress: Progress | None = None) -> dict[str, Any]:
        """Replace pages that are bad here by those of `backup`, a table of another store.

        Both tables need the same rows and records (ValueError names what differs). Nothing is
        guessed: a page is taken if it has the checksum recorded here; where that was damaged too,
        the page here gets it back if it is the same as a good one there. All else stays as it is.
        Part of the next commit.

        Args:
            progress: as in verify().

        Returns a dict: "ok" (no bad page is left), "bad_pages" (before), "repaired_pages", and
        "repaired" and "left", lists of ranges as in verify().
        """
        report = self._live.repair_from(backup._live, progress)
        return {"ok": report["bad_pages"] == report["repaired_pages"], **report}

    def stats(self) -> dict[str, Any]:
        """Counters since the table was opened, and the state of its hot pages now.

        Pages: "hits", "misses" (a batch counts each of its pages once, and so does a prefetch),
        "evictions", "write_backs", "pages_read", "pages_generated", "resident_pages",
        "dirty_pages", "frames" (0 before the first use). Bytes: "bytes_read", "bytes_written",
        "page_bytes", "memory_bytes" (of the store's budget), "io_memory_bytes" (rings and bounce
        buffers), "mapped_bytes" (of the file, with `pin="mapping"`, from the first gather on). Ids:
        "rows_gathered", "rows_mapped" (those of them that came from the mapping), "rows_written".
        Requests made to the system, neighbouring pages sharing one: "read_requests",
        "write_requests". "seconds_waiting": calls waited for the disk, added up over threads.
        Bools: "huge_pages", "registered" (with CUDA), "whole" (all pages have a frame). "pinned":
        what is registered, "frames", "mapping" or None. How the file is read and written:
        "io_engine" ("io_uring", "threads", "cached"), "direct_reads", "direct_writes", and
        "io_note", what the system refused and why.

        In a store with a device, "cuda" is a dict: its "device" (a name; empty before the first
        use), "transfers" (a call moves its rows in one, an update in two), "kernel_rows" (moved by
        a kernel that reads and writes the frames itself), "thread_rows" (by threads of the host
        and DMA), "pageable_rows" (where frames are not registered), "bytes", "seconds", and
        "measured", what is known of the ways to move rows: dicts with "direction", "rows",
        "row_bytes", "pool_bytes", "threads", "kernel_blocks", "host_threads", "bytes_per_second".
        Rows that a device reads from a mapping are in "rows_mapped" alone.

        Cheap, and free of row access; the first call of a table that nobody has used yet probes
        its file.
        """
        return self._live.stats()

    def counters(self) -> dict[str, int]:
        """What happened to the table in all its sessions, as far as commits recorded it.

        "hits", "misses", "evictions", "write_backs" (pages), "bytes_read", "bytes_written",
        "commits"; this session's up to now are in it.
        """
        return self._live.counters()

    def export(
        self,
        dst: str | os.PathLike[str],
        *,
        field: str = "weight",
        fields: Sequence[str] | Mapping[str, str] | None = None,
        rows: slice | tuple[int | None, int | None] | None = None,
        order: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        dtype: Any = None,
        gzip: int | None = None,
        format: str | None = None,  # noqa: A002
        vocab: str | os.PathLike[str] | None = None,
        check: bool = False,
        resume: bool = False,
        jobs: int = 1,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Write a field to a file: "x.npy", "x.npz:member", "x.h5:/path", "x.safetensors:tensor",
        "x.pt:tensor", "x.vec" (docs/formats.md has all).

        The file appears under its name when it is complete. Members, datasets and tensors of
        npz, HDF5 and safetensors are added to a file that is there.

        Args:
            dst: where to.
            field: "weight" or a state field of the optimizer.
            fields: several of them into one new file (npz, HDF5, safetensors, torch), under their
                names, or {name in dst: field}.
            rows: only these, a slice or (first, end) as of one, with step 1.
            order: a file of row numbers, integers in any format, any rows in any order: row i of
                `dst` is row order[i]. The place of each row goes to "DST.order.npy", -1 for none.
            overwrite: replace what is there (otherwise FileExistsError).
            dtype: convert to this dtype; None keeps the field's.
            gzip: compression level 0 to 9, HDF5 and npz only; None does not compress.
            format: the file's; None: what its name tells. "glove", "word2vec-binary", ...
            vocab: a file with the words of the rows, one a line, for formats with words; None:
                STORE/NAME.vocab.txt, where `Store.import_file` leaves it; "none": words are the
                numbers of the rows.
            check: read `dst` back and compare.
            resume: go on with a copy that was interrupted, and keep what is done if this one is, as
                `embermap export --resume` does. For stores with mode "r": rows of a writer change
                without a commit (ValueError). Not with several `fields`.
            jobs: threads that read and convert.
            progress: called with (done, total) rows; may raise to stop, and Ctrl-C stops there. It
                must not use the store or its tables, which may wait for this call to end.

        Returns how many values the conversion made infinite and how many it made zero:
        {"became_infinite", "became_zero"}, with `order` also "order", the file with the places,
        with `resume` "resumed_rows" if there were some, and with `fields` "fields", such a dict for
        each. Warns if any became infinite.

        Raises: FileExistsError, NotFoundError (no such field; a format with words and no
        vocabulary), ValueError (a file of the store itself or one a table has adopted; a format
        that cannot be told or written), TypeError (values that do not fit dtype), OSError. Nothing
        half-written is left.
        """
        if gzip is not None:
            gzip = _checks.integer(gzip, "gzip", most=9)
        core = self._live
        if resume and self._store.writable:
            raise ValueError(
                "resume: rows of a store that is open for writing change without a commit; open it "
                'with mode="r"'
            )
        location = os.fsencode(dst)
        kind = None if format is None else str(format)
        self._store._check_outside(_core.location_file(location, kind))
        wanted = None if dtype is None else _dtypes.dtype_name(dtype)
        words = b"" if vocab is None else os.fsencode(vocab)
        beside = os.fsencode(self._store.path / self._name)
        found = core.export(
            location,
            field,
            _checks.pairs(fields),
            _checks.selection(_checks.row_range(rows, lambda: core.rows), order, jobs),
            bool(overwrite),
            wanted,
            gzip,
            kind,
            words,
            beside,
            self._store.commit_number,
            bool(check),
            bool(resume),
            progress,
        )
        parts = {name: _counts(part) for name, part in found.get("fields", {}).items()}
        counts = _counts(found)
        if parts:
            counts = {key: sum(part[key] for part in parts.values()) for key in counts}
        if counts["became_infinite"]:
            warnings.warn(
                f"{counts['became_infinite']} values of table {self._name!r} became infinite in "
                f"{wanted}",
                RuntimeWarning,
                stacklevel=2,
            )
        for key in ("order", "resumed_rows"):
            if key in found:
                counts[key] = found[key]
        return {**counts, "fields": parts} if parts else counts

    def import_file(
        self,
        src: str | os.PathLike[str],
        *,
        at: int | None = None,
        append: bool = False,
        field: str = "weight",
        fields: Sequence[str] | Mapping[str, str] | None = None,
        rows: slice | tuple[int | None, int | None] | None = None,
        order: str | os.PathLike[str] | None = None,
        dtype: Any = None,
        source_dtype: Any = None,
        allow_external: bool = False,
        follow_links: bool = False,
        format: str | None = None,  # noqa: A002
        dim: int | None = None,
        offset: int = 0,
        vocab: str | os.PathLike[str] | None = None,
        check: bool = False,
        jobs: int = 1,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Replace rows of this table by those of a file, as `embermap import --into` does.

        Without `at` and `append` the file has as many rows as the table. State of the optimizer
        stays as it is, but for `field` and `fields`. Part of the next commit; `append` commits, as
        the method of that name does. Where something is wrong with the file, or a value, this is
        found before the first row is changed: rows are read once if they fit 32 MiB, else twice.
        After an error in writing (a full disk) some rows are new; leaving the store without a
        commit gives all of them up, but those of stretches that the store has committed by itself
        (`autocommit`), where they were more than the log holds. There is no `resume`: rows that go
        into a table are part of one commit, which is there or not.

        Args:
            src: the file, and after a colon the array in it.
            at: the first row that is replaced.
            append: rows become new ones at the end, with initial state where `fields` names none.
            field: "weight" or a state field of the optimizer, for the rows of one array.
            fields: several, each from the array of its name in `src`, or {field: array}.
            rows: only these of `src`, a slice or (first, end) as of one, with step 1.
            order: a file of row numbers, integers in any format, any rows of `src` in any order.
            dtype: rows whose values the table's dtype does not all hold are converted (nearest
                even) where this is the table's; others are refused (TypeError).
            source_dtype, allow_external, follow_links, format, dim, offset: as for
                `Store.import_file`.
            vocab: formats with words (word2vec, GloVe, fastText) have to have those of this
                vocabulary in these rows (ValueError), one a line; None: STORE/NAME.vocab.txt,
                "none": they are not looked at. With `append` they are added to it.
            check: read the rows back and compare with `src`.
            jobs: threads that read and convert.
            progress: as for `export`.

        Returns {"rows", "dim", "source_dtype", "dtype", "became_infinite", "became_zero"}, with
        `fields` also "fields", such a dict for each. Warns as `Store.import_file`.

        Raises: as `Store.import_file`; ValueError (rows that do not fit in, other columns).
        """
        core = self._live
        how = _checks.reading(source_dtype, allow_external, follow_links, format, dim, offset)
        arrays = _checks.pairs(fields)
        part = _checks.row_range(rows, lambda: _checks.count_rows(src, how, arrays))
        found = self._store._live.import_rows(
            core,
            os.fsencode(src),
            None if dtype is None else _dtypes.dtype_name(dtype),
            how,
            _checks.selection(part, order, jobs),
            arrays,
            field,
            None if at is None else _checks.integer(at, "at"),
            bool(append),
            b"" if vocab is None else os.fsencode(vocab),
            bool(check),
            progress,
        )
        _checks.tell(_checks.told(found))
        parts = list(found.get("fields", {"": found}).values())
        infinite = sum(part["became_infinite"] for part in parts)
        zero = sum(part["became_zero"] for part in parts)
        if infinite or zero:
            warnings.warn(
                f"{infinite} values of {os.fsdecode(src)!r} became infinite in table "
                f"{self._name!r}, {zero} became zero",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def export_all(
        self,
        dst: str | os.PathLike[str],
        *,
        optimizer_state: bool = False,
        overwrite: bool = False,
        gzip: int | None = None,
        format: str | None = None,  # noqa: A002
        vocab: str | os.PathLike[str] | None = None,
        check: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write all of the table to one new file (npz, HDF5, safetensors, torch): every field under
        its name, "vocabulary" (the bytes of its words, where it has some) and "embermap" (JSON: the
        optimizer with its options and steps, seed, initial values). `Store.import_all` makes the
        table of it again.

        Args:
            dst: where to.
            optimizer_state: only what torch.optim's optimizer of this kind keeps, as
                torch.save(optimizer.state_dict()) writes it, with the table as parameter 0.
            overwrite: replace what is there (otherwise FileExistsError), with all it holds.
            gzip: compression level 0 to 9, HDF5 and npz only; None does not compress.
            format: the file's; None: what its name tells.
            vocab: a file with the words of the rows, one a line; None: STORE/NAME.vocab.txt if that
                is there, "none": without.
            check: read the file back and compare.
            progress: as for `export`.

        Raises: as `export`; ValueError (a format that holds one array; an optimizer that torch has
        not), CorruptError (check).
        """
        if gzip is not None:
            gzip = _checks.integer(gzip, "gzip", most=9)
        core = self._live
        location = os.fsencode(dst)
        kind = None if format is None else str(format)
        self._store._check_outside(_core.location_file(location, kind))
        beside = self._store.path / f"{self._name}.vocab.txt"
        words = (beside if beside.exists() else "none") if vocab is None else vocab
        core.export_all(
            location,
            kind,
            bool(optimizer_state),
            bool(overwrite),
            gzip,
            bool(check),
            b"" if os.fspath(words) == "none" or optimizer_state else os.fsencode(words),
            progress,
        )

    def import_optimizer_state(
        self,
        src: str | os.PathLike[str],
        *,
        parameter: int | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Take the state of a parameter of torch.save(optimizer.state_dict()) onto this table.

        Its optimizer is of the same kind: all its state fields, the steps, and the options of the
        parameter's group. Part of the next commit. Nothing in the file is executed.

        Args:
            src: the file, or "x.pt:NAME" for the state_dict under that name in a checkpoint, as
                "optimizer" in {"model": ..., "optimizer": ...}.
            parameter: its number in the file; None: the only one whose state fits.
            progress: as for `export`.

        Returns {"parameter": "state.0", "fields": names, "step"}.

        Raises: NotFoundError, FormatError, ValueError (state that does not fit, before anything is
        changed), OSError.
        """
        name, fields, step = self._live.import_optimizer_state(
            os.fsencode(src),
            None if parameter is None else _checks.integer(parameter, "parameter"),
            progress,
        )
        return {"parameter": name, "fields": fields, "step": step}

    # --- parts ------------------------------------------------------------------------------------

    @staticmethod
    def _field_dtype(core: _core.Table, field: str) -> str:
        if not isinstance(field, str):
            raise TypeError(f"field must be a string, not {field!r}")
        return core.field_dtype(field)

    def _ids(self, ids: Any) -> _arrays.Batch:
        batch = _arrays.read_ids(ids)
        if batch.device is not None and batch.device != self._store.device:
            device = self._store.device
            if device is None:
                raise ValueError(
                    f"ids are on cuda:{batch.device}, but the store was opened without a device: "
                    f'open it with device="cuda{f":{batch.device}" if batch.device else ""}"'
                )
            raise ValueError(f"ids are on cuda:{batch.device}, the store uses cuda:{device}")
        return batch

    def _scatter(
        self, core: _core.Table, batch: _arrays.Batch, values: _arrays.Values, field: str
    ) -> None:
        if batch.device is None:
            core.scatter(batch.host, values.bytes, field)
        else:
            with _DeviceCall(batch):
                core.scatter_device(
                    batch.device, batch.pointer, batch.count, values.pointer, field, batch.stream
                )

    def _range(self, core: _core.Table, start: int, stop: int | None) -> tuple[int, int]:
        rows = core.rows
        first = _checks.integer(start, "start")
        last = rows if stop is None else _checks.integer(stop, "stop")
        if not first <= last <= rows:
            raise IndexError(
                f"rows [{first}, {last}) are no range of table {self._name!r} with {rows} rows"
            )
        return first, last

    def _host_broadcast(self, value: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """`value` as rows of `shape`, not copied; bfloat16 may be seen as another 16-bit dtype."""
        if _arrays.is_list(value):
            array = _arrays.list_values(value, self._dtype, "rows")
        else:
            if _arrays.is_torch(value):
                _arrays.check_torch(value, "rows")
            array, name = _arrays.host_array(value, "rows")
            _arrays.check_dtype(name, (self._dtype,), "rows")
        while array.ndim > len(shape) and array.shape[0] == 1:
            array = array[0]
        try:
            return np.broadcast_to(array, shape)
        except ValueError:
            raise ValueError(
                f"rows of shape {array.shape} cannot be broadcast to {shape}"
            ) from None

    def _stream_in(self, core: _core.Table, target: range, rows: NDArray[Any]) -> None:
        block = max(1, _STREAM_BYTES // (rows.itemsize * self._dim))
        for at in range(0, len(target), block):
            part = np.ascontiguousarray(rows[at : at + block])
            core.write(target.start + at, part.shape[0], _arrays.flat_bytes(part), "weight")


class Prefetch:
    """What `Table.prefetch` began. It may be dropped: the reading goes on.

    A forked child may only drop it (ForkError): what reads is its parent.
    """

    __slots__ = ("_core", "_process")

    def __init__(self, core: _core.Prefetch) -> None:
        # Not for callers: from Table.prefetch.
        self._core = core
        self._process = os.getpid()

    def _here(self) -> _core.Prefetch:
        # In a child nothing ends it, and a lock may have been held when it was forked.
        if os.getpid() != self._process:
            raise ForkError(
                f"this prefetch was begun in process {self._process} and is used in process "
                f"{os.getpid()}, a child of it; open the store again there"
            )
        return self._core

    def cancel(self) -> None:
        """Read nothing more of it than has been asked of the disk already. Returns at once."""
        self._here().cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, at most `timeout` seconds; whether it has.

        It ends when its pages are read, and also when it is cancelled, given up or fails. From now
        on it waits for no room: pages that were read for other batches may have to go.
        """
        return self._here().wait(None if timeout is None else _checks.number(timeout, "timeout"))

    def done(self) -> bool:
        """Whether it has ended."""
        return self._here().done()

    def __repr__(self) -> str:
        if os.getpid() != self._process:
            return "<embermap.Prefetch (of another process)>"
        return f"<embermap.Prefetch ({'done' if self.done() else 'at work'})>"


class TableView:
    """A field of a table as a read-only array that reads rows when it is indexed.

    `view[3:7]`, `view[5]`, `view[ids]`, `len(view)`, iteration; `np.asarray(view)` reads it all.
    What it gives are copies. Slices are read past the hot pages, so that a scan evicts nothing.
    It stays current: rows written later are seen by later reads.
    """

    __slots__ = ("_field", "_table")

    def __init__(self, table: Table, field: str) -> None:
        self._table = table
        self._field = field

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, dim); (rows, 1) of a state field with one number a row."""
        core = self._table._live
        return (core.rows, core.field_elements(self._field))

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy dtype of the elements."""
        return _dtypes.numpy_dtype(self._table._live.field_dtype(self._field))

    def __len__(self) -> int:
        return len(self._table)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        """Rows as copies; keys as for `table[key]`."""
        return _item(self._table, key, self._field, 0)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        block = max(1, _STREAM_BYTES // (self.dtype.itemsize * self.shape[1]))
        start = 0
        while start < len(self):
            part = self._table.read(start, min(start + block, len(self)), field=self._field)
            yield from part
            start += part.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("rows of a table cannot be seen without a copy")
        whole: NDArray[Any] = self._table.read(field=self._field)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<embermap.TableView {self._field!r} of {self._table!r}>"


class _DeviceCall:
    """A call with arrays on a device.

    Lets an error name an id beyond int64 as the caller wrote it, not as its negative twin, and
    waits for the device where arrays of several libraries took part.
    """

    def __init__(self, batch: _arrays.Batch) -> None:
        self._batch = batch

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            _arrays.wait_for_foreign(self._batch)
        if isinstance(error, RowIdError) and self._batch.unsigned and error.id < 0:
            text = str(error).replace(f"row id {error.id} ", f"row id {error.id + 2**64} ", 1)
            proper = RowIdError(text)
            proper.id, proper.position = error.id + 2**64, error.position
            raise proper from None


# --- keys -----------------------------------------------------------------------------------------


def _split(key: Any) -> tuple[Any, Any]:
    """A key of two dimensions as that of the rows and that of the columns."""
    if not isinstance(key, tuple):
        return key, slice(None)
    if any(part is None for part in key):
        raise TypeError("a key of a table cannot add dimensions (None): reshape the result")
    dots = sum(part is Ellipsis for part in key)
    if dots > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(key) - dots > 2:
        raise IndexError(
            f"too many indices for a table: it has 2 dimensions, not {len(key) - dots}"
        )
    if not dots:
        key = (*key, Ellipsis)
    at = next(i for i, part in enumerate(key) if part is Ellipsis)
    parts = (*key[:at], *[slice(None)] * (3 - len(key)), *key[at + 1 :])
    return parts[0], parts[1]


def _item(table: Table, key: Any, field: str, stream_bytes: int) -> Any:
    """What NumPy gives for `array[key]`, where there are whole rows only."""
    rows, columns = _split(key)
    target = _key(rows, table)
    if isinstance(columns, slice) and columns == slice(None):
        return _select(table, target, field, stream_bytes)
    if isinstance(columns, bool | np.bool_):
        raise TypeError(f"a column cannot be {columns!r}")
    if isinstance(target, int):
        return _select(table, target, field, stream_bytes)[columns]
    if isinstance(target, range):
        return _select(table, target, field, stream_bytes)[:, columns]
    if isinstance(columns, slice | int | np.integer):
        return _select(table, target, field, stream_bytes)[..., columns]
    # Ids and columns side by side, element by element.
    batch = _arrays.read_ids(target)
    if batch.library != "numpy":
        raise TypeError("ids of a tensor cannot go with a list of columns: index the result")
    columns = _mask(columns).nonzero()[0] if _mask(columns) is not None else np.asarray(columns)
    try:
        ids, columns = np.broadcast_arrays(batch.host.reshape(batch.shape), columns)
    except ValueError:
        raise IndexError(
            f"ids of shape {batch.shape} and columns of shape {np.shape(columns)} cannot be "
            "broadcast to one shape"
        ) from None
    picked = _select(table, ids, field, stream_bytes)
    if columns.size and columns.dtype.kind not in "iu":
        raise IndexError(f"columns must be integers, not {columns.dtype}")
    width = picked.shape[-1]
    columns = np.where(columns < 0, columns + width, columns).astype(np.intp)
    bad = (columns < 0) | (columns >= width)
    if bad.any():
        raise IndexError(f"a column is out of range for a dim of {width}")
    return np.take_along_axis(picked, columns[..., np.newaxis], -1)[..., 0]


def _key(key: Any, table: Table) -> Any:
    """A key of `table[key]` as a row number, a range of rows, or ids."""
    rows = table.rows
    if key is Ellipsis:
        return range(rows)
    if isinstance(key, slice):
        return range(*key.indices(rows))
    if isinstance(key, bool):
        raise TypeError(f"a row number cannot be {key!r}")
    if isinstance(key, int | np.integer):
        number = int(key)
        if not -rows <= number < rows:
            error = RowIdError(
                f"row {number} is out of range for table {table.name!r} with {rows} rows"
            )
            error.id, error.position = number, 0
            raise error
        return number + rows if number < 0 else number
    mask = _mask(key)
    if mask is None:
        return key
    if tuple(mask.shape) != (rows,):
        raise IndexError(
            f"a mask of shape {tuple(mask.shape)} does not fit table {table.name!r} "
            f"with {rows} rows"
        )
    if _arrays.is_torch(mask):
        return mask.nonzero().reshape(-1)
    return mask.nonzero()[0]


def _mask(key: Any) -> Any:
    """`key` as an array of bools; None if it is none."""
    if isinstance(key, list) and key and isinstance(key[0], bool | np.bool_):
        array = np.asarray(key)
        if array.dtype != np.bool_:
            raise TypeError("a key mixes bools with other things")
        return array
    if isinstance(key, np.ndarray) or _arrays.is_cupy(key):
        return key if key.dtype == np.bool_ and key.ndim > 0 else None
    if _arrays.is_torch(key):
        return key if key.dtype == sys.modules["torch"].bool and key.ndim > 0 else None
    return None


def _select(table: Table, target: Any, field: str, stream_bytes: int) -> Any:
    """Rows at what `_key` gave; slices of `stream_bytes` and more are read past the hot pages."""
    if isinstance(target, int):
        target = np.int64(target)
    if not isinstance(target, range):
        return table.gather(target, field=field)
    if len(target) == 0 or abs(target.step) != 1:
        return table.gather(target, field=field)
    first, last = min(target[0], target[-1]), max(target[0], target[-1])
    core = table._live
    item = _dtypes.ITEM_BYTES[table._field_dtype(core, field)]
    wide = len(target) * core.field_elements(field) * item
    if wide < stream_bytes:
        return table.gather(target, field=field)
    rows = table.read(first, last + 1, field=field)
    return rows if target.step == 1 else np.ascontiguousarray(rows[::-1])


def _device_ids(target: int | range, value: Any) -> Any:
    """A row number or range as ids on the device of `value`."""
    if _arrays.is_cupy(value):
        cupy = sys.modules["cupy"]
        with value.device:
            if isinstance(target, int):
                return cupy.asarray(target, dtype=cupy.int64)
            return cupy.arange(target.start, target.stop, target.step, dtype=cupy.int64)
    import torch

    place = f"cuda:{_arrays.cuda_device(value)}"
    if isinstance(target, int):
        return torch.tensor(target, device=place)
    ids = torch.arange(len(target), dtype=torch.int64, device=place)
    return ids * target.step + target.start


def _broadcast_on_device(value: Any, shape: tuple[int, ...]) -> Any:
    if _arrays.is_cupy(value):
        library = sys.modules["cupy"]
    else:
        import torch as library

        if not _arrays.is_torch(value):
            value = library.from_dlpack(value)
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value[0]
    try:
        return library.broadcast_to(value, shape)
    except (ValueError, RuntimeError):
        raise ValueError(
            f"rows of shape {tuple(value.shape)} cannot be broadcast to {shape}"
        ) from None


def _restore_table(store: Store, name: str, identity: tuple[int, str, int]) -> Table:
    table = store[name]
    core = table._live
    if (core.dim, core.dtype, core.file.stat().st_ino) != identity:
        raise ValueError(
            f"table {name!r} of {str(store.path)!r} is not the one that was pickled: "
            "it has been replaced since"
        )
    return table
