"""Tables in PyTorch: a module that looks rows up, and an optimizer that updates them.

    embedding = em.torch.Embedding(table)           # where nn.Embedding would stand
    optimizer = em.torch.Optimizer([embedding])     # beside the optimizer of the dense part
    optimizer.zero_grad()
    loss = criterion(model(embedding(ids)), target)
    loss.backward()
    optimizer.step()

Nothing of the size of the table is ever made: a backward pass keeps the ids and gradients of its
batch, step() gives them to `Table.update`, and zero_grad() drops them. Weights, optimizer state
and step count live in the table and are made durable by `store.commit()`; `state_dict()` of the
module or the optimizer does not hold them.
"""

from __future__ import annotations

import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import optim
from ._table import Table

__all__ = ["Embedding", "Optimizer"]


@dataclasses.dataclass
class _Batch:
    """The gradient of one look-up: row i of `grads`, (n, dim), belongs to the row `ids[i]`."""

    ids: Tensor
    grads: Tensor
    backward: int  # the backward pass it comes from, by torch's number


class _Pending:
    """The gradients of one module.

    They live as long as the anchor's gradient is there. In the middle of a backward pass it is not
    yet: the gradients of several look-ups arrive before the anchor's. So they count from when their
    pass has reached the anchor; those of a pass that failed before never do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # backward passes may run in several threads at once
        self._batches: list[_Batch] = []
        self._arriving: list[_Batch] = []

    def append(self, anchor: Tensor, ids: Tensor, grads: Tensor) -> None:
        """From within a backward pass."""
        with self._lock:
            if anchor.grad is None:
                self._batches.clear()
            self._arriving.append(_Batch(ids, grads, torch._C._current_graph_task_id()))

    def settle(self) -> None:
        """From within a backward pass: it has given the anchor its gradient."""
        backward = torch._C._current_graph_task_id()
        with self._lock:
            self._batches += [batch for batch in self._arriving if batch.backward == backward]
            self._arriving = [batch for batch in self._arriving if batch.backward != backward]

    def batches(self, anchor: Tensor) -> list[_Batch]:
        """What counts, for a step: no backward pass is under way."""
        if anchor.grad is None:
            self.drop()
        with self._lock:
            self._arriving.clear()
            return list(self._batches)

    def drop(self) -> None:
        with self._lock:
            self._batches.clear()
            self._arriving.clear()


class _Lookup(torch.autograd.Function):
    """Rows of a table as a function of nothing but the anchor, which makes them part of a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, embedding: Embedding) -> Tensor:
        rows = embedding._rows(ids)
        ctx.embedding = embedding
        ctx.anchor_like = anchor.detach()
        # A copy: between here and the optimizer's step the caller may refill the buffer it gave.
        ctx.save_for_backward(ids.detach().to(torch.int64, copy=True).reshape(-1))
        ctx.set_materialize_grads(False)
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        embedding: Embedding = ctx.embedding
        # A copy as well: the caller's own tensor, a retained gradient or another parameter's may
        # lie in the same memory.
        dense = grad.detach() if grad.layout == torch.strided else grad.detach().to_dense()
        grads = dense.reshape(-1, embedding.table.dim).clone(memory_format=torch.contiguous_format)
        embedding._pending.append(embedding.anchor, ids, grads)
        return torch.zeros_like(ctx.anchor_like), None, None


class Embedding(nn.Module):
    """Rows of a table, looked up by id, with gradients: an ordinary module, as `nn.Embedding` is.

    `forward(ids)` takes an integer tensor of any shape and gives `ids.shape + (dim,)` of the
    table's dtype on the device of the ids. For ids on a CUDA device the store must be open with
    that device.

    The only parameter is `anchor`, one zero, through which the rows belong to the graph; it does
    not change. `requires_grad_(False)` on the module freezes the table. Gradients do not appear in
    a `.grad`: each backward pass adds its ids and their gradients to what waits in the module for
    `Optimizer.step()`, and `zero_grad()` drops them: that of the optimizer or of this module, or of
    any module or optimizer that sets the anchor's gradient to None, as they do by default (with
    `set_to_none=False` those others leave them). Both are copied: tensors of ids and of gradients
    may be overwritten as soon as forward, or backward, has returned.

    `state_dict()` holds the anchor, not the table: rows and their optimizer state are kept by
    `store.commit()`. Double backward is not supported, nor is `torch.amp.GradScaler` (train in
    bfloat16 or float32).

    Args:
        table: the table; float32, float16, bfloat16 or float64.
        device: where the anchor lies, for code that asks a module's parameters for their device.

    Raises TypeError (not a Table, or one of integers); at the call, as `Table.gather`.
    """

    def __init__(self, table: Table, *, device: torch.device | str | int | None = None) -> None:
        super().__init__()
        if not isinstance(table, Table):
            raise TypeError(f"table must be an embermap.Table, not {table!r}")
        dtype = getattr(torch, table._dtype)
        if not dtype.is_floating_point:
            raise TypeError(f"table {table.name!r} is of {table._dtype}; gradients need floats")
        self.table = table
        self.anchor = nn.Parameter(torch.zeros(1, dtype=dtype, device=device or "cpu"))
        self._pending = _Pending()
        self._watched: weakref.ref[Tensor] | None = None  # the anchor that tells of its gradient

    @property
    def num_embeddings(self) -> int:
        """Rows of the table."""
        return self.table.rows

    @property
    def embedding_dim(self) -> int:
        """Elements of a row."""
        return self.table.dim

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, ids: Tensor) -> Tensor:
        """ids of any shape, integers -> rows, `ids.shape + (dim,)`, on the device of the ids."""
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids must be a tensor of integers, not {type(ids).__name__}")
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            self._watch()
            result: Tensor = _Lookup.apply(self.anchor, ids, self)  # type: ignore[no-untyped-call]
            return result
        return self._rows(ids)

    def extra_repr(self) -> str:
        return f"{self.table!r}"

    def _rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table.gather(ids)
        return rows

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait. Both values of `set_to_none` do the same."""
        self._pending.drop()
        self.anchor.grad = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies begin without gradients, as those of parameters do, and watch their own anchor.
        own = ("_pending", "_watched")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pending = _Pending()
        self._watched = None

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

    def _gradients(self) -> tuple[Tensor, Tensor] | None:
        """Ids (n,) and gradients (n, dim) of all backward passes since they were dropped last."""
        batches = self._pending.batches(self.anchor)
        if not batches:
            return None
        if len(batches) == 1:
            return batches[0].ids, batches[0].grads
        device = batches[0].ids.device
        return (
            torch.cat([batch.ids.to(device) for batch in batches]),
            torch.cat([batch.grads.to(device) for batch in batches]),
        )


class Optimizer(torch.optim.Optimizer):
    """The tables' own optimizers as one of PyTorch.

    Each embedding is a parameter group whose hyperparameters are those of its table's optimizer
    (`embermap.optim`); schedulers of `torch.optim.lr_scheduler` change `lr` as in any other. What a
    group says at a step is what the table's optimizer becomes, and what a commit keeps.

    `step()` calls `Table.update` once for each embedding with the gradients of all backward passes
    since `zero_grad()`, those of an id summed. As everywhere in torch they stay until then: a
    second `step()` applies them again, and a loop without `zero_grad()` adds new ones to old ones.
    An embedding without gradients is left alone; its step does not count.

    `state_dict()` holds the groups: hyperparameters and `step`, the table's count of updates.
    `load_state_dict()` sets the hyperparameters, and warns where the step differs from the table's:
    the checkpoint and the table are then of different moments.

    Args:
        embeddings: `embermap.torch.Embedding` modules, each of a table of its own.
        lr: learning rate of all of them; None keeps each table's.

    Raises TypeError (not an Embedding), ValueError (no embeddings, a table without optimizer or
    given twice); `step` raises RuntimeError under a GradScaler, and as `Table.update` does.
    """

    # Makes torch.amp.GradScaler hand over its scale, by which it is noticed, instead of training on
    # scaled gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self, embeddings: Iterable[Embedding] | Embedding, lr: float | None = None
    ) -> None:
        modules = [embeddings] if isinstance(embeddings, Embedding) else list(embeddings)
        if not modules:
            raise ValueError("no embeddings given")
        seen: dict[tuple[int, str], None] = {}
        groups: list[dict[str, Any]] = []
        for module in modules:
            if not isinstance(module, Embedding):
                raise TypeError(f"embeddings must be embermap.torch.Embedding, not {module!r}")
            table = module.table
            key = (id(table._store._session), table.name)
            if key in seen:
                raise ValueError(f"table {table.name!r} is given twice; use one Embedding for it")
            seen[key] = None
            optimizer = table.optimizer
            if optimizer is None:
                raise ValueError(
                    f"table {table.name!r} has no optimizer; create it with "
                    "optimizer=embermap.optim.Adagrad(...) or SGD(...)"
                )
            if lr is not None:
                optimizer = dataclasses.replace(optimizer, lr=float(lr))
            groups.append(
                {
                    "params": [module.anchor],
                    "table": table.name,
                    **dataclasses.asdict(optimizer),
                    "step": table.step,
                }
            )
        self._embeddings: list[Embedding] = modules
        super().__init__(groups, {"lr": groups[0]["lr"]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) >= len(self._embeddings):
            raise TypeError("parameter groups are embeddings; make an Optimizer of all of them")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each table with the gradients that wait, and keep them; see `zero_grad`.

        Returns what `closure` returns.

        Args:
            closure: computes the loss and its gradients again, called first.
        """
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise RuntimeError(
                "gradients of embermap tables cannot be unscaled by a GradScaler: "
                "step this optimizer without it, on a loss that is not scaled"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, embedding in zip(self.param_groups, self._embeddings, strict=True):
            gradients = embedding._gradients()
            if gradients is None:
                continue
            table = embedding.table
            optimizer = _optimizer_of(group, table)
            if optimizer != table.optimizer:
                table.optimizer = optimizer
            table.update(*gradients)
            group["step"] = table.step
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait. Both values of `set_to_none` do the same."""
        for embedding in self._embeddings:
            embedding.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the hyperparameters of the groups from what `state_dict()` gave.

        Raises ValueError if the groups are of other tables or kinds of optimizers.
        """
        saved_groups = state_dict["param_groups"]
        for saved, group in zip(saved_groups, self.param_groups, strict=False):
            if saved.get("table") != group["table"]:
                raise ValueError(
                    f"the state is of table {saved.get('table')!r}, not {group['table']!r}"
                )
            if not set(group) - {"initial_lr"} <= set(saved):
                raise ValueError(
                    f"the state for table {group['table']!r} is of another kind of optimizer"
                )
        super().load_state_dict(state_dict)
        for group, embedding in zip(self.param_groups, self._embeddings, strict=True):
            if group["step"] != embedding.table.step:
                warnings.warn(
                    f"the state is of step {group['step']} of table {group['table']!r}, which is "
                    f"at step {embedding.table.step}",
                    UserWarning,
                    stacklevel=2,
                )


def _optimizer_of(group: dict[str, Any], table: Table) -> optim.Optimizer:
    """The hyperparameters of a group, as the optimizer of its table."""
    current = table.optimizer or optim.SGD()
    # "step" of a group is the table's count. A scheduler may keep lr as a tensor.
    values = {
        name: group[name].item() if isinstance(group[name], Tensor) else group[name]
        for name in dataclasses.asdict(current)
        if name != "step"
    }
    return dataclasses.replace(current, **values)
