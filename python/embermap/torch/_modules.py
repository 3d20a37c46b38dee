"""Modules that look rows of tables up: an embedding, a bag of embeddings, a collection of both."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks
from .. import optim as optimizers
from .._prefetch import Prefetcher
from .._store import Store
from .._table import Prefetch, Table
from ._lookup import (
    Ahead,
    HostLookup,
    Lookup,
    Pending,
    SmallLookup,
    ids_of,
    raw_stream,
    register,
    traced,
)
from ._weight import Weight

# Up to here the memory for rows comes from NumPy, which takes half the time of torch.
_SMALL_BYTES = 1 << 14

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
}

_ZEROS = 256  # gradients of an anchor that are made at once

_WORTH_PREFETCHING = 64  # ids, from which a collection reads ahead


class TableModule(nn.Module):
    """What Embedding and EmbeddingBag share: a table, the anchor, and the gradients that wait."""

    _handle: int

    def __init__(
        self,
        table: Table,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        device: torch.device | str | int | None,
    ) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"table must be an embermap.Table, not {table!r}")
        dtype: torch.dtype = getattr(torch, table._dtype)
        if not dtype.is_floating_point:
            raise TypeError(f"table {table.name!r} is of {table._dtype}; gradients need floats")
        self.table = table
        place = "cpu" if device is None else device
        self.anchor = nn.Parameter(torch.zeros(1, dtype=dtype, device=place))
        self.padding_idx = _padding(table, padding_idx)
        self.max_norm = None if max_norm is None else _checks.number(max_norm, "max_norm")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be more than 0, not {max_norm!r}")
        self.norm_type = _checks.number(norm_type, "norm_type")
        self.scale_grad_by_freq = bool(scale_grad_by_freq)
        self._dim = table.dim
        self._dtype = dtype
        self._begin()

    def _begin(self) -> None:
        self._pending = Pending()
        self._watched: weakref.ref[Tensor] | None = None  # the anchor that tells of its gradient
        self._single = True  # the last step was of one look-up
        self._ahead = Ahead()
        self._zeros: list[Tensor] = []  # gradients of the anchor that nobody has had
        self._handle = register(self)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self.table.dim

    @property
    def weight(self) -> Weight:
        """The table, read when it is indexed: `weight[3:7]`, `weight[ids]`, `weight.grad`."""
        return Weight(self)

    @property
    def sparse(self) -> bool:
        """True: gradients are of the rows of a batch."""
        return True

    def extra_repr(self) -> str:
        parts = [repr(self.table)]
        if self.padding_idx is not None:
            parts.append(f"padding_idx={self.padding_idx}")
        if self.max_norm is not None:
            parts.append(f"max_norm={self.max_norm}")
        if self.norm_type != 2:
            parts.append(f"norm_type={self.norm_type}")
        if self.scale_grad_by_freq:
            parts.append("scale_grad_by_freq=True")
        return ", ".join(parts)

    # --- reading ahead ----------------------------------------------------------------------------

    def prefetch(self, ids: Any) -> Prefetch:
        """Get the rows of a batch to come while this one computes.

        On the host it is `Table.prefetch`: the pages are read into memory. Where all of the table
        is in memory and `ids` is an int64 tensor on the GPU, the rows themselves come to the GPU,
        on a stream of their own, and `forward(ids)`, given the same tensor unchanged, has them at
        once; steps taken until then are seen in them. Call it before the work of the batch that
        comes first, so that the two run side by side. The batches of the last four calls are kept.
        """
        if self._prefetch_to_device(ids):
            ids = ids.new_empty(0, device="cpu")  # there is nothing to read
        return self.table.prefetch(ids)

    def prefetcher(self) -> Prefetcher:
        """`Table.prefetcher`: the same for the workers of a DataLoader."""
        return self.table.prefetcher()

    def _prefetch_to_device(self, ids: Any) -> bool:
        table = self.table
        if (
            not isinstance(ids, Tensor)
            or ids.dtype is not torch.int64
            or not ids.is_cuda
            or not ids.is_contiguous()
            or ids.get_device() != table._store.device
            or ids.is_inference()  # nobody could tell whether it was changed
            or self.max_norm is not None
        ):
            return False
        return self._ahead.begin(table._live, ids)

    # --- gradients --------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait. Both values of `set_to_none` do the same."""
        self._pending.drop()
        anchor = self._parameters["anchor"]
        if anchor is not None and anchor.grad is not None:
            anchor.grad = None

    def _gradients(self) -> tuple[Tensor, Tensor] | None:
        """Ids (n,) and gradients (n, dim) of all backward passes since they were dropped last."""
        return self._pending.gradients(self.anchor)

    def _kept(self) -> tuple[Any, Tensor, int] | None:
        """What the one look-up of the gradients has kept for an update, and these; once."""
        anchor = self._parameters["anchor"]
        assert anchor is not None
        return self._pending.kept(anchor)

    def _update_from(self, live: Any, kept: Any, grads: Tensor, stream: int) -> bool:
        """Update the table from what a look-up kept; False, and nothing done, if rows changed."""
        self._single = True
        return bool(
            live.update_kept(
                kept, grads.numel() // self._dim, grads.data_ptr(), self.table._dtype, stream
            )
        )

    def _forget_kept(self, shared: bool) -> None:
        """An update has no use for what each of several look-ups, or modules, has kept."""
        self._single = self._pending.forget_kept() <= 1 and not shared

    def _lookup(self, ids: Tensor, lead: int = 0) -> Tensor:
        """Rows with a graph, where gradients are wanted; `lead` rows of zeros before them."""
        anchor = self._parameters["anchor"]  # as self.anchor, in a quarter of the time
        assert anchor is not None
        if torch.compiler.is_compiling():
            return traced(anchor, ids, self._handle, self._dim, self._dtype, lead)
        if torch.is_grad_enabled() and anchor.requires_grad:
            if self._watched is None or self._watched() is not anchor:
                self._watch()
            # Of small batches each use of a tensor counts, and one within an autograd function
            # takes twice the time of one outside.
            small = None if lead or self.max_norm is not None else self._fetch_small(ids)
            if small is not None:
                found: Tensor = SmallLookup.apply(anchor, *small, self)  # type: ignore[no-untyped-call]
                return found
            if not lead and self.max_norm is None and _is_on_host(ids):
                # A copy: between here and the optimizer's step the caller may refill the buffer.
                own = ids.numpy().copy()
                rows = [self._fetch_host(own)]
                found = HostLookup.apply(anchor, rows, own, self)  # type: ignore[no-untyped-call]
            else:
                found = Lookup.apply(anchor, ids, self, lead)  # type: ignore[no-untyped-call]
            return found
        return self._fetch(ids, lead)

    def _fetch_small(self, ids: Tensor) -> tuple[NDArray[Any], NDArray[np.int64]] | None:
        """Rows of few ids on the host, ids.shape + (dim,), and a flat copy of the ids.

        What Table.gather does, without what small batches would wait for most. None for others.
        """
        if not _is_on_host(ids):
            return None
        kind = _NUMPY.get(self._dtype)
        if kind is None or ids.numel() * self._dim * kind.itemsize > _SMALL_BYTES:
            return None
        # A copy: between here and the optimizer's step the caller may refill the buffer it gave.
        own: NDArray[np.int64] = ids.numpy().copy()
        flat = own.reshape(-1)
        rows: NDArray[Any] = np.empty((*own.shape, self._dim), kind)
        self.table._live.gather(flat, rows.reshape(-1).view(np.uint8), "weight")
        return rows, flat

    def _fetch_host(self, ids: NDArray[np.int64]) -> Tensor:
        """Rows of ids in C order, of shape ids.shape + (dim,), as Table.gather gives them."""
        rows = torch.empty((*ids.shape, self._dim), dtype=self._dtype, device="cpu")
        out = rows.view(torch.uint8).numpy().reshape(-1)
        self.table._live.gather(ids.reshape(-1), out, "weight")
        return rows

    def _fetch(self, ids: Tensor, lead: int) -> Tensor:
        """Rows of the ids, of shape ids.shape + (dim,), or (lead + n, dim)."""
        if self.max_norm is not None:
            self._renormalise(ids)
        if lead:
            rows = torch.zeros(
                (lead + ids.numel(), self._dim), dtype=self._dtype, device=ids.device
            )
            self.table.gather(ids.reshape(-1), out=rows[lead:])
            return rows
        small = self._fetch_small(ids)
        if small is not None:
            return torch.from_numpy(small[0])
        if self._ahead and ids.is_cuda and ids.dtype is torch.int64 and ids.is_contiguous():
            rows = torch.empty((*ids.shape, self._dim), dtype=self._dtype, device=ids.device)
            if self._ahead.take(self.table._live, ids, rows) is not None:
                return rows
        found: Tensor = self.table.gather(ids)
        return found

    def _renormalise(self, ids: Tensor) -> None:
        """Shorten the rows of the batch that are longer than max_norm, in the table."""
        with torch.no_grad():
            distinct = torch.unique(ids)
            rows = self.table.gather(distinct)
            norms = torch.linalg.vector_norm(rows, self.norm_type, dim=1, keepdim=True)
            long = (norms > self.max_norm).reshape(-1)
            if bool(long.any()):
                shorter = rows[long] * (self.max_norm / (norms[long] + 1e-7))
                self.table.scatter(distinct[long], shorter.to(self._dtype))

    def _fetch_for_update(self, ids: Tensor, lead: int) -> tuple[Tensor, Any]:
        """`_fetch`, and what an update of just these ids can take from it.

        The rows are not to be used before its check(), which throws for a bad id.

        It is the records of the batch, weight and state, so it is not asked for where steps are of
        several look-ups, or leave some ids out: those are fetched once more.
        """
        if not ids.is_cuda or not self._single or self.padding_idx is not None or self.max_norm:
            return self._fetch(ids, lead), None
        if not lead:
            if ids.dtype is torch.int64 and ids.is_contiguous():
                live, place = self.table._live, ids.get_device()  # of another one the core tells
                # What it does below, without what small batches would wait for most.
                rows = ids.new_empty((*ids.shape, self._dim), dtype=self._dtype)
                kept = self._ahead.take(live, ids, rows) if self._ahead else None
                if kept is None:
                    kept = live.gather_working_set(
                        place, ids.data_ptr(), ids.numel(), rows.data_ptr(), raw_stream(ids), True
                    )
                return rows, kept if kept else None
            return self.table._gather_for_update(ids)
        rows = torch.zeros((lead + ids.numel(), self._dim), dtype=self._dtype, device=ids.device)
        return rows, self.table._gather_for_update(ids.reshape(-1), rows[lead:])[1]

    def _collect(
        self, ids: Tensor | None, grad: Tensor, lead: int, fetched: Any = None, alone: bool = False
    ) -> None:
        """From within a backward pass: keep the gradient of the rows that `_fetch` gave.

        `alone`: nobody else has it, so that it may stay where it is. Ids that are None are those of
        what was fetched, and of `grad.shape[:-1]`.
        """
        grads = grad if grad.layout is torch.strided else grad.to_dense()
        if lead or self.padding_idx is not None or self.scale_grad_by_freq:
            if ids is None:
                ids = ids_of(fetched, grads)
            ids, grads = ids.reshape(-1), grads.reshape(-1, self._dim)[lead:]
        if self.padding_idx is not None:
            assert ids is not None
            kept = ids != self.padding_idx
            ids, grads = ids[kept], grads[kept]
        elif not alone or not grads.is_contiguous():
            # A copy: the caller's own tensor, a retained gradient or another parameter's may lie
            # in the same memory.
            grads = grads.clone(memory_format=torch.contiguous_format)
        if self.scale_grad_by_freq:
            _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
            grads /= counts[inverse].unsqueeze(1)
        self._pending.append(self.anchor, ids, grads, fetched)

    def _zero(self, anchor: Tensor) -> Tensor:
        """The anchor's gradient, which is always zero, in memory that no other pass has.

        Gradients that are added up, clipped or scaled are written to, and `grad.data` so that no
        version tells of it. On a device each zero of its own would take a kernel.
        """
        try:
            zero = self._zeros.pop()
        except IndexError:
            zero = None
        if zero is None or zero.dtype is not anchor.dtype or zero.device != anchor.device:
            if anchor.shape != (1,):
                return torch.zeros_like(anchor.detach())
            block = torch.zeros(_ZEROS, dtype=anchor.dtype, device=anchor.device)
            zeros = [part.detach() for part in torch.split(block, 1)]
            zero = zeros.pop()
            self._zeros = zeros
        return zero

    def _watch(self) -> None:
        """Have the anchor tell of its gradient; it is another one after some kinds of loading."""
        anchor = self.anchor
        if (self._watched is not None and self._watched() is anchor) or not anchor.is_leaf:
            return
        module = weakref.ref(self)

        def settle(_: Tensor) -> None:
            alive = module()
            if alive is not None:
                alive._pending.settle()

        anchor.register_post_accumulate_grad_hook(settle)  # type: ignore[no-untyped-call]
        self._watched = weakref.ref(anchor)

    # --- copies -----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        # Copies begin without gradients, as those of parameters do, and watch their own anchor.
        own = ("_pending", "_watched", "_handle", "_ahead", "_zeros")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


class Embedding(TableModule):
    """Rows of a table, looked up by id, with gradients: an ordinary module, as `nn.Embedding` is.

    `forward(ids)` takes an integer tensor of any shape and gives `ids.shape + (dim,)` of the
    table's dtype on the device of the ids. For ids on a CUDA device the store must be open with
    that device.

    The only parameter is `anchor`, one zero, through which the rows belong to the graph; it does
    not change. `requires_grad_(False)` on the module freezes the table. Gradients do not appear in
    a `.grad` of the parameter (`weight.grad` shows them): each backward pass adds its ids and their
    gradients to what waits in the module for `Optimizer.step()`, and `zero_grad()` drops them: that
    of the optimizer or of this module, or of any module or optimizer that sets the anchor's
    gradient to None, as they do by default (with `set_to_none=False` those others leave them).
    Both are copied: tensors of ids and of gradients may be overwritten as soon as forward, or
    backward, has returned. `torch.nn.utils.clip_grad_norm_` sees the anchor alone.

    `torch.compile` takes the module into its graphs, also with fullgraph=True. Backward passes may
    run in several threads at once, but no step or `zero_grad()` beside them.

    `state_dict()` holds the anchor, not the table: rows and their optimizer state are kept by
    `store.commit()`; `embermap.torch.save` keeps both together. `copy.deepcopy` gives a module over
    the same table; a pickled one opens the store read-only where it is unpickled. Double backward
    is not supported, nor is `torch.amp.GradScaler` (train in bfloat16 or float32).

    Args:
        table: the table; float32, float16, bfloat16 or float64.
        padding_idx: this row has no gradient, so that steps leave it as it is; it is looked up as
            any other, and is not set to zero. Negative numbers count from the end.
        max_norm: rows of a batch whose norm is larger are shortened to it, in the table, before
            they are looked up; the store must be open for writing.
        norm_type: the p of that norm.
        scale_grad_by_freq: divide the gradient of a row by how often the look-up has its id.
        device: where the anchor lies, for code that asks a module's parameters for their device.

    Raises TypeError (not a Table, or one of integers), ValueError (padding_idx, max_norm); at the
    call RowIdError (an IndexError), TypeError (ids that are no integers), as `Table.gather`.
    """

    def __init__(
        self,
        table: Table,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__(table, padding_idx, max_norm, norm_type, scale_grad_by_freq, device)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Any,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        *,
        store: Store,
        name: str,
        optimizer: optimizers.Optimizer | None = None,
    ) -> Embedding:
        """A module over a new table with the rows of an array or a tensor, (rows, dim).

        Args:
            embeddings: the rows; the table's dtype is theirs.
            freeze: whether rows get no gradients.
            padding_idx, max_norm, norm_type, scale_grad_by_freq: see the class.
            store: where the table is made; the next commit keeps its rows.
            name: of the table.
            optimizer: the table's, one of `embermap.optim`, for a table that is to be trained.

        Raises as `Store.from_array`.
        """
        table = _pretrained(store, name, embeddings, optimizer)
        module = cls(
            table,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
        )
        module.anchor.requires_grad_(not freeze)
        return module

    def forward(self, ids: Tensor) -> Tensor:
        """ids of any shape, integers -> rows, `ids.shape + (dim,)`, on the device of the ids."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids must be a tensor of integers, not {type(ids).__name__}")
        return self._lookup(ids)


class EmbeddingBag(TableModule):
    """Sums, means or maxima of bags of rows, with gradients, as `nn.EmbeddingBag` gives them.

    `forward(input, offsets, per_sample_weights)` gives (bags, dim). `input` is (bags, n), each row
    a bag, or flat, and then `offsets` says where each bag begins. Empty bags are zeros. The rest is
    as in `Embedding`.

    Args:
        table: the table; float32, float16, bfloat16 or float64.
        mode: "sum", "mean" or "max".
        max_norm, norm_type: as for Embedding.
        scale_grad_by_freq: divide the gradient of a row by how often `input` has its id; not for
            "max".
        include_last_offset: the last of `offsets` is the end of the last bag; ids beyond it are in
            none.
        padding_idx: ids of this row do not count: neither in a sum, nor in the number that a mean
            is divided by. Bags of them alone are zeros.
        device: where the anchor lies.

    Raises as Embedding does, and ValueError (mode, shapes), NotImplementedError (weights in another
    mode than "sum").
    """

    def __init__(
        self,
        table: Table,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f'mode must be "sum", "mean" or "max", not {mode!r}')
        if mode == "max" and scale_grad_by_freq:
            raise ValueError('mode "max" does not go with scale_grad_by_freq')
        super().__init__(table, padding_idx, max_norm, norm_type, scale_grad_by_freq, device)
        self.mode = mode
        self.include_last_offset = bool(include_last_offset)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Any,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        store: Store,
        name: str,
        optimizer: optimizers.Optimizer | None = None,
    ) -> EmbeddingBag:
        """A module over a new table with the rows of an array or a tensor; as for Embedding."""
        table = _pretrained(store, name, embeddings, optimizer)
        module = cls(
            table,
            mode=mode,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
        )
        module.anchor.requires_grad_(not freeze)
        return module

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f"{super().extra_repr()}, mode={self.mode!r}{last}"

    def forward(
        self,
        input: Tensor,  # noqa: A002 - as nn.EmbeddingBag has it
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Bags of rows, (bags, dim), on the device of the ids.

        Args:
            input: integers, (bags, n) or (n,).
            offsets: with a flat input, where bags begin, ascending from 0; with
                `include_last_offset` one more, the end of the last one.
            per_sample_weights: of the shape of `input` and the dtype of the table; each row is
                multiplied by its weight, mode "sum" only. It may have a gradient.
        """
        ids, offsets, weights = self._bags(input, offsets, per_sample_weights)
        # Ids beyond the last offset are a bag of their own, of which nothing is seen: in torch they
        # are part of the last one, or not, by mode.
        beyond = self.include_last_offset and input.dim() == 1
        padding = self.padding_idx
        lead = 0 if padding is None else 1
        rows = self._lookup(ids, lead)
        if ids.numel() == 0:
            bags = offsets.numel() - int(beyond)
            nothing = rows.sum(0, keepdim=True)
            if weights is not None:
                nothing = nothing + weights.sum()  # which have a gradient, of no elements
            return nothing.expand(bags, self._dim).clone()
        index = torch.arange(lead, lead + ids.numel(), device=ids.device)
        if padding is not None:
            # Row 0 stands for padding, wherever it is in the batch.
            index = index.masked_fill(ids.eq(padding), 0)
        if weights is not None and weights.is_cuda and weights.dtype is torch.bfloat16:
            # torch has no gradient of such weights on a GPU.
            rows = rows * nn.functional.pad(weights, (lead, 0)).unsqueeze(1)
            weights = None
        found = nn.functional.embedding_bag(
            index,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=weights,
            padding_idx=0 if lead else None,
        )
        return found[:-1] if beyond else found

    def _bags(
        self, given: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Flat int64 ids, where bags begin, flat weights."""
        if not isinstance(given, Tensor):
            raise TypeError(f"input must be a tensor of integers, not {type(given).__name__}")
        if given.dtype == torch.bool or given.is_floating_point() or given.is_complex():
            raise TypeError(f"input must be integers, not {given.dtype}")
        if weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(
                    f'per_sample_weights are for mode "sum", not {self.mode!r}'
                )
            if weights.shape != given.shape:
                raise ValueError(
                    f"per_sample_weights have the shape {tuple(weights.shape)}, "
                    f"input has {tuple(given.shape)}"
                )
            if weights.dtype != self._dtype:
                raise TypeError(
                    f"per_sample_weights are of {weights.dtype}, the table of {self._dtype}"
                )
            weights = weights.reshape(-1)
        ids = given.reshape(-1).to(torch.int64)
        if given.dim() == 2:
            if offsets is not None:
                raise ValueError(
                    "offsets must be None for an input of two dimensions, whose rows are the bags"
                )
            bags, width = given.shape
            return ids, torch.arange(bags, device=ids.device) * width, weights
        if given.dim() != 1:
            raise ValueError(f"input must have one or two dimensions, not {given.dim()}")
        if offsets is None:
            raise ValueError("a flat input needs offsets, where its bags begin")
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            raise ValueError("offsets must be a tensor of one dimension")
        if offsets.dtype == torch.bool or offsets.is_floating_point() or offsets.is_complex():
            raise TypeError(f"offsets must be integers, not {offsets.dtype}")
        if self.include_last_offset and offsets.numel() == 0:
            raise ValueError("offsets must have at least the end of the last bag")
        begins = offsets.to(torch.int64)
        if begins.numel() == 0 and ids.numel() != 0:
            raise ValueError(f"no offsets for an input of {ids.numel()} ids")
        # Elsewhere a look would wait for the device, and a compiled graph cannot look.
        looks = begins.is_cpu and begins.numel() != 0 and not torch.compiler.is_compiling()
        if looks and bool((begins[1:] < begins[:-1]).any()):
            raise ValueError("offsets must ascend")
        return ids, begins, weights


class EmbeddingCollection(nn.Module):
    """Several tables in one call: a dict of features -> a dict of rows.

        bag = em.torch.EmbeddingBag(items)
        tables = em.torch.EmbeddingCollection({"user": users, "item": items, "history": bag})
        rows = tables({"user": user_ids, "item": ids, "history": (flat_ids, offsets)})
        rows["item"], rows["history"]

    A feature's value is a tensor of ids or, for a bag, a tuple of its arguments (input, offsets,
    per_sample_weights). A call may leave features out. Pages of all features that are not in memory
    are read side by side. The modules are attributes by name, `collection["item"]`.

    Args:
        modules: feature -> `Embedding`, `EmbeddingBag` or `Table` (an Embedding of it). Features
            may share a module or a table. Names are those of modules in torch: no ".".

    Raises TypeError (another kind of module); KeyError at the call (a feature it does not have).
    """

    def __init__(self, modules: Mapping[str, Embedding | EmbeddingBag | Table]) -> None:
        super().__init__()
        if not isinstance(modules, Mapping):
            raise TypeError(f"modules must be a dict of features, not {type(modules).__name__}")
        self.features = nn.ModuleDict()
        for feature, module in modules.items():
            found = Embedding(module) if isinstance(module, Table) else module
            if not isinstance(found, TableModule):
                raise TypeError(
                    f"feature {feature!r} must be an embermap.torch.Embedding, an EmbeddingBag or "
                    f"a Table, not {module!r}"
                )
            self.features[feature] = found

    def forward(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """Rows of each feature that is given, by its name."""
        for feature in features:
            if feature not in self.features:
                raise KeyError(
                    f"there is no feature {feature!r}; there are {', '.join(self.features)}"
                )
        if not torch.compiler.is_compiling():
            self._read_ahead(features)
        return {
            feature: self.features[feature](*(value if isinstance(value, tuple) else (value,)))
            for feature, value in features.items()
        }

    def prefetch(self, features: Mapping[str, Any]) -> None:
        """`prefetch` of each feature's module: the rows of a batch to come, while this computes."""
        for feature, value in features.items():
            self[feature].prefetch(value[0] if isinstance(value, tuple) else value)

    def __getitem__(self, feature: str) -> Any:
        return self.features[feature]

    def __len__(self) -> int:
        return len(self.features)

    def __contains__(self, feature: object) -> bool:
        return isinstance(feature, str) and feature in self.features

    def _read_ahead(self, features: Mapping[str, Any]) -> None:
        """Have the disk read for all tables, not for one after the other."""
        for feature in list(features)[1:]:
            value = features[feature]
            ids = value[0] if isinstance(value, tuple) else value
            if (
                isinstance(ids, Tensor)
                and ids.is_cpu
                and ids.numel() >= _WORTH_PREFETCHING
                and not ids.is_floating_point()
                and not self[feature].table.stats()["whole"]
            ):
                self[feature].prefetch(ids)


def _is_on_host(ids: Tensor) -> bool:
    """Whether they are memory of int64 on the host."""
    return ids.dtype is torch.int64 and ids.is_cpu and ids.layout is torch.strided


def _padding(table: Table, padding_idx: int | None) -> int | None:
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not hasattr(padding_idx, "__index__"):
        raise TypeError(f"padding_idx must be an integer, not {padding_idx!r}")
    row = padding_idx.__index__()
    if not -table.rows <= row < table.rows:
        raise ValueError(
            f"padding_idx {row} is out of range for table {table.name!r} with {table.rows} rows"
        )
    return row + table.rows if row < 0 else row


def _pretrained(
    store: Store, name: str, embeddings: Any, optimizer: optimizers.Optimizer | None
) -> Table:
    if not isinstance(store, Store):
        raise TypeError(f"store must be an embermap.Store, not {store!r}")
    if isinstance(embeddings, Tensor):
        embeddings = embeddings.detach().cpu()
    return store.from_array(name, embeddings, optimizer=optimizer)
