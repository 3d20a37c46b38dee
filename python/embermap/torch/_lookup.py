"""Rows of a table as part of a graph, and the gradients that come back for them.

Two ways lead to the same place: an autograd function, for code that runs as it is written, and
custom operators with fake kernels, which `torch.compile` takes into its graphs as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sparse import sparse_tensor
from ._alone import is_alone


class Source(Protocol):
    """What the rows come from: a module over a table."""

    anchor: torch.nn.Parameter

    def _fetch(self, ids: Tensor, lead: int) -> Tensor: ...
    def _fetch_for_update(self, ids: Tensor, lead: int) -> tuple[Tensor, Any]: ...
    def _collect(
        self, ids: Tensor | None, grad: Tensor, lead: int, fetched: Any = None, alone: bool = False
    ) -> None: ...
    def _watch(self) -> None: ...
    def _zero(self, anchor: Tensor) -> Tensor: ...


def raw_stream(tensor: Tensor) -> int:
    """The current stream of a tensor's device, as CUDA names it; 0 for one on the host."""
    if not tensor.is_cuda:
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(tensor.get_device())
    return stream


def ids_of(fetched: Any, grads: Tensor) -> Tensor:
    """The ids of a look-up by what it has for an update; `grads` is its gradient, (..., dim)."""
    ids = torch.empty(grads.shape[:-1], dtype=torch.int64, device=grads.device)
    fetched.ids(ids.data_ptr(), raw_stream(ids))
    return ids


@dataclasses.dataclass(slots=True)
class _Batch:
    """The gradient of one look-up: row i of `grads` belongs to the row `ids[i]`.

    Both may have the shape that the look-up had: (..., dim) and (...).
    """

    ids: Tensor | None  # None: `origin` knows them
    grads: Tensor
    backward: int  # the backward pass it comes from, by torch's number
    origin: Any  # what the look-up has for an update, on a device
    fetched: Any  # the same as long as it is good for one
    stream: int  # on which they were made; 0 on the host
    lookups: int = 1  # of how many it is
    shown: Tensor | None = None  # the sparse tensor that somebody was given

    def flat(self) -> tuple[Tensor, Tensor]:
        """Ids (n,) and gradients (n, dim), which is the memory of `grads`."""
        self.look()
        if self.ids is None:
            self.ids = ids_of(self.origin, self.grads)
        return self.ids.reshape(-1), self.grads.reshape(-1, self.grads.shape[-1])

    def look(self) -> None:
        """Take what has become of the sparse tensor: torch changes some in place by other parts."""
        if self.shown is None:
            return
        assert self.ids is not None
        ids, grads = self.shown._indices()[0], self.shown._values()
        if grads.data_ptr() != self.grads.data_ptr() or len(ids) * grads.shape[-1] != (
            self.grads.numel()
        ):
            self.grads = grads.detach().contiguous()
            if len(ids) != self.ids.numel() or ids.data_ptr() != self.ids.data_ptr():
                self.ids, self.origin, self.fetched = ids, None, None


class Pending:
    """The gradients of one module.

    They live as long as the anchor's gradient is there. In the middle of a backward pass it is not
    yet: the gradients of several look-ups arrive before the anchor's. So they count from when their
    pass has reached the anchor; those of a pass that failed before never do.

    `mark` is another parameter whose gradient has to be there, if it is set and alive: for an
    optimizer that does not know of the anchor.
    """

    mark: weakref.ref[Tensor] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()  # backward passes may run in several threads at once
        self._batches: list[_Batch] = []
        self._arriving: list[_Batch] = []

    def append(
        self, anchor: Tensor, ids: Tensor | None, grads: Tensor, fetched: Any = None
    ) -> None:
        """From within a backward pass. Without ids, `fetched` has them."""
        backward, stream = torch._C._current_graph_task_id(), raw_stream(grads)
        batch = _Batch(ids, grads, backward, fetched, fetched, stream)
        with self._lock:
            if self._dropped(anchor):
                self._batches.clear()
            self._arriving.append(batch)

    def settle(self) -> None:
        """From within a backward pass: it has given the anchor its gradient."""
        backward = torch._C._current_graph_task_id()
        with self._lock:
            self._batches += [batch for batch in self._arriving if batch.backward == backward]
            self._arriving = [batch for batch in self._arriving if batch.backward != backward]
            mark = self.mark() if self.mark is not None else None
            if mark is not None and mark.grad is None:
                mark.grad = torch.zeros_like(mark)

    def gradients(self, anchor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Ids (n,) and gradients (n, dim) that count: no backward pass is under way.

        The gradients are what the next step takes: a change of them in place acts.
        """
        if self._dropped(anchor):
            self.drop()
        with self._lock:
            self._arriving.clear()
            if not self._batches:
                return None
            if len(self._batches) > 1:
                ids, grads = joined([batch.flat() for batch in self._batches])
                lookups = sum(batch.lookups for batch in self._batches)
                last = self._batches[-1]
                self._batches = [
                    _Batch(ids, grads, last.backward, None, None, raw_stream(grads), lookups)
                ]
            return self._batches[0].flat()

    def shown(self, anchor: Tensor, size: torch.Size) -> Tensor | None:
        """The gradients that count as a sparse tensor: the same one until there are others."""
        found = self.gradients(anchor)
        if found is None:
            return None
        with self._lock:
            batch = self._batches[0]
            if batch.shown is None:
                batch.shown = sparse_tensor(
                    found[0].unsqueeze(0), found[1], size, is_coalesced=False
                )
            return batch.shown

    def kept(self, anchor: Tensor) -> tuple[Any, Tensor, int] | None:
        """What a single look-up has for the update, its gradients, (..., dim) in C order, a stream.

        None where there are several, or none, or the current stream is not theirs. It is good for
        one update: a second call finds nothing.
        """
        if self._dropped(anchor):
            self.drop()
        with self._lock:
            if len(self._batches) != 1:
                return None
            batch = self._batches[0]
            batch.look()
            if batch.fetched is None or raw_stream(batch.grads) != batch.stream:
                return None
            self._arriving.clear()
            fetched, batch.fetched = batch.fetched, None
            return fetched, batch.grads, batch.stream

    def forget_kept(self) -> int:
        """How many look-ups the gradients are of; what they have for an update is given up."""
        with self._lock:
            for batch in self._batches:
                batch.flat()  # from here on it has its ids
                batch.origin = batch.fetched = None
            return sum(batch.lookups for batch in self._batches)

    def _dropped(self, anchor: Tensor) -> bool:
        """Whether somebody has set a gradient to None."""
        mark = self.mark() if self.mark is not None else None
        return anchor.grad is None or (mark is not None and mark.grad is None)

    def drop(self) -> None:
        if not self._batches and not self._arriving:
            return
        with self._lock:
            self._batches.clear()
            self._arriving.clear()


class Ahead:
    """The batches of one module whose rows are on their way to the GPU before they are looked up.

    A batch is known by its tensor of ids, which is kept: the same memory, not written to since.
    """

    MOST = 4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: list[tuple[Tensor, int, Any]] = []  # ids, their version, rows

    def __bool__(self) -> bool:
        return bool(self._batches)

    def begin(self, table: Any, ids: Tensor) -> bool:
        """Have the rows fetched; False, and nothing done, if not all of the table is in memory."""
        rows = table.prefetch_device(ids.get_device(), ids.data_ptr(), ids.numel(), raw_stream(ids))
        if not rows:
            return False
        with self._lock:
            self._batches = [*self._batches, (ids, ids._version, rows)][-self.MOST :]
        return True

    def take(self, table: Any, ids: Tensor, out: Tensor) -> Any:
        """Put rows that were fetched for these ids in `out`; returns what an update takes.

        None, and nothing done, if there are none, or if they are not what the table has now.
        """
        if not self._batches:
            return None
        where, count = ids.data_ptr(), ids.numel()
        with self._lock:
            found = [b for b in self._batches if b[0].data_ptr() == where and b[0].numel() == count]
            self._batches = [b for b in self._batches if not any(b is other for other in found)]
        for given, version, rows in reversed(found):
            if given._version == version and table.gather_prefetched(
                rows, count, out.data_ptr(), raw_stream(ids)
            ):
                return rows
        return None


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Ids and gradients of several batches as those of one, on the device of the first."""
    if len(parts) == 1:
        return parts[0]
    device = parts[0][0].device
    return (
        torch.cat([ids.to(device) for ids, _ in parts]),
        torch.cat([grads.to(device) for _, grads in parts]),
    )


with torch.inference_mode(False):
    # Saved where there is nothing to save: by saved tensors a graph knows that it has been freed.
    _NOTHING = torch.empty(0, device="cpu")

# Whether the graph of the backward pass under way is kept for another one. A torch that does not
# say so keeps it.
_is_kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class Lookup(torch.autograd.Function):
    """Rows of a table as a function of nothing but the anchor, which makes them part of a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, source: Source, lead: int) -> Tensor:
        rows, fetched = source._fetch_for_update(ids, lead)
        ctx.fetched = fetched
        ctx.origin = (source, anchor, lead)
        # A copy: between here and the optimizer's step the caller may refill the buffer it gave.
        # What was fetched for an update has one already.
        ctx.saves_ids = fetched is None or lead != 0
        if not ctx.saves_ids:
            ctx.ids = None
            ctx.save_for_backward(_NOTHING)
        else:
            ctx.save_for_backward(
                ids.clone() if ids.dtype is torch.int64 else ids.to(torch.int64, copy=True)
            )
        ctx.set_materialize_grads(False)
        if fetched is not None:
            fetched.check()  # the device has looked at the ids meanwhile
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        # As once_differentiable does it, which takes longer than all that is below.
        return _again(ctx, grad) if torch.is_grad_enabled() else _collected(ctx, grad)


def _collected(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    alone = is_alone(grad)
    (ids,) = ctx.saved_tensors
    source, anchor, lead = ctx.origin
    fetched, ctx.fetched = ctx.fetched, None
    if not ctx.saves_ids:
        if fetched is not None and _is_kept():
            ctx.ids = ids_of(fetched, grad)  # for the next pass, when others may be of this set
        ids = ctx.ids
    source._collect(ids, grad, lead, fetched, alone)
    return source._zero(anchor), None, None, None


_again = once_differentiable(_collected)


class SmallLookup(torch.autograd.Function):
    """`Lookup` of rows that have been fetched already, as arrays: NumPy's are made in less time."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: NDArray[Any], ids: NDArray[np.int64], source: Source
    ) -> Tensor:
        ctx.origin = (source, anchor, ids)
        ctx.set_materialize_grads(False)
        return torch.from_numpy(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return _again_small(ctx, grad) if torch.is_grad_enabled() else _collected_small(ctx, grad)


def _collected_small(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    source, anchor, ids = ctx.origin
    source._collect(torch.from_numpy(ids), grad, 0)
    return source._zero(anchor), None, None, None


_again_small = once_differentiable(_collected_small)


class HostLookup(torch.autograd.Function):
    """`Lookup` of many rows that have been fetched already, in a list: they are no input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, rows: list[Tensor], ids: NDArray[np.int64], source: Source
    ) -> Tensor:
        ctx.origin = (source, anchor, ids)
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        return rows.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        return _again_host(ctx, grad) if torch.is_grad_enabled() else _collected_host(ctx, grad)


def _collected_host(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
    if grad is None:
        return None, None, None, None
    alone = is_alone(grad)
    _ = ctx.saved_tensors  # an error if the graph has been freed
    source, anchor, ids = ctx.origin
    source._collect(torch.from_numpy(ids), grad, 0, None, alone)
    return source._zero(anchor), None, None, None


_again_host = once_differentiable(_collected_host)


# --- torch.compile --------------------------------------------------------------------------------
#
# Operators take tensors and numbers, so a module is named by a number. What their fake kernels
# need (dim, dtype) is in the arguments as well: torch keeps compiled graphs on disk, and the number
# may be that of another module in the next process.

_sources: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_calls = itertools.count(1)


def register(source: Any) -> int:
    """A number by which operators find the module; it does not keep it alive."""
    number = next(_numbers)
    _sources[number] = source
    return number


def _source(number: int) -> Any:
    source = _sources.get(number)
    if source is None:
        raise RuntimeError("a compiled graph looks rows up in a module that is gone")
    return source


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _call() -> int:
    """Another number for each look-up in a graph.

    The compiler takes operators for pure functions, and would make one of two with the same
    arguments: of the gradients of two look-ups of the same ids only one would count.
    """
    return next(_calls)


def traced(
    anchor: Tensor, ids: Tensor, number: int, dim: int, dtype: torch.dtype, lead: int
) -> Tensor:
    """What `Lookup` does, for a graph that is being compiled."""
    rows: Tensor = lookup(anchor, ids, number, _call(), dim, dtype, lead)[0]
    return rows


# Python runs in them, so they are no part of a CUDA graph. Where torch has no such tag yet, stores
# refuse a stream that captures one.
_OPTIONS: dict[str, Any] = {"mutates_args": ()}
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _OPTIONS["tags"] = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("embermap::lookup", **_OPTIONS)
def lookup(
    anchor: Tensor, ids: Tensor, number: int, call: int, dim: int, dtype: torch.dtype, lead: int
) -> tuple[Tensor, Tensor]:
    """Rows, and the ids as they were when they were looked up."""
    source = _source(number)
    if source.anchor.requires_grad:
        source._watch()
    rows = source._fetch(ids, lead)
    return rows, ids.to(torch.int64, copy=True).reshape(-1)


@lookup.register_fake
def _(
    anchor: Tensor, ids: Tensor, number: int, call: int, dim: int, dtype: torch.dtype, lead: int
) -> tuple[Tensor, Tensor]:
    shape = (lead + ids.numel(), dim) if lead else (*ids.shape, dim)
    return ids.new_empty(shape, dtype=dtype), ids.new_empty((ids.numel(),), dtype=torch.int64)


@torch.library.custom_op("embermap::collect", **_OPTIONS)
def collect(
    grad: Tensor,
    ids: Tensor,
    number: int,
    call: int,
    lead: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Keep the gradient of a look-up; returns that of the anchor."""
    _source(number)._collect(ids, grad, lead)
    return torch.zeros(1, dtype=dtype, device=device)


@collect.register_fake
def _(
    grad: Tensor,
    ids: Tensor,
    number: int,
    call: int,
    lead: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(1, dtype=dtype, device=device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    anchor, _, ctx.number, ctx.call, _, _, ctx.lead = inputs
    ctx.dtype, ctx.device = anchor.dtype, anchor.device
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    (ids,) = ctx.saved_tensors
    found = collect(grad, ids, ctx.number, ctx.call, ctx.lead, ctx.dtype, ctx.device)
    return (found, *(None,) * 6)


lookup.register_autograd(_backward, setup_context=_setup_context)
