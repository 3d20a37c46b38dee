"""Tables in PyTorch: a module that looks rows up, and an optimizer that updates them.

    embedding = em.torch.Embedding(table)           # where nn.Embedding would stand
    optimizer = em.torch.Optimizer([embedding])     # beside the optimizer of the dense part
    loss = criterion(model(embedding(ids)), target)
    loss.backward()
    optimizer.step()

Nothing of the size of the table is ever made: a backward pass keeps the ids and gradients of its
batch, and step() gives them to `Table.update`. Weights, optimizer state and step count live in the
table and are made durable by `store.commit()`; `state_dict()` of the module or the optimizer does
not hold them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import optim
from ._table import Table

__all__ = ["Embedding", "Optimizer"]


class _Lookup(torch.autograd.Function):
    """Rows of a table as a function of nothing but the anchor, which makes them part of a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, embedding: Embedding) -> Tensor:
        ctx.embedding = embedding
        ctx.anchor_like = anchor.detach()
        ctx.save_for_backward(ids)
        ctx.set_materialize_grads(False)
        return embedding._rows(ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        (ids,) = ctx.saved_tensors
        # The very tensor is kept, not a view of it: autograd then knows that it is shared, and
        # gives a copy to whoever else wants to own it.
        ctx.embedding._pending.append((ids, grad.detach().clone() if grad.requires_grad else grad))
        return torch.zeros_like(ctx.anchor_like), None, None


class Embedding(nn.Module):
    """Rows of a table, looked up by id, with gradients: an ordinary module, as `nn.Embedding` is.

    `forward(ids)` takes an integer tensor of any shape and gives `ids.shape + (dim,)` of the
    table's dtype on the device of the ids. For ids on a CUDA device the store must be open with
    that device.

    The only parameter is `anchor`, one zero, through which the rows belong to the graph; it does
    not change. `requires_grad_(False)` on the module freezes the table. Gradients do not appear in
    a `.grad` but wait in the module until `Optimizer.step()` uses them or `zero_grad()` (of that
    optimizer, or of any module or optimizer that sets the anchor's gradient to None) drops them.

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
        self._pending: list[tuple[Tensor, Tensor]] = []

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
            result: Tensor = _Lookup.apply(self.anchor, ids, self)  # type: ignore[no-untyped-call]
            return result
        return self._rows(ids)

    def extra_repr(self) -> str:
        return f"{self.table!r}"

    def _rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table.gather(ids)
        return rows

    def _take_pending(self) -> tuple[Tensor, Tensor] | None:
        """Ids (n,) and gradients (n, dim) of all backward passes, kept until `_drop_pending`."""
        if self.anchor.grad is None:
            self._pending.clear()  # someone has zeroed the gradients of all parameters
        if not self._pending:
            return None
        device = self._pending[0][0].device
        ids = [i.reshape(-1).to(device=device, dtype=torch.int64) for i, _ in self._pending]
        grads = [g.reshape(-1, self.table.dim).to(device) for _, g in self._pending]
        if len(ids) == 1:
            return ids[0], grads[0]
        return torch.cat(ids), torch.cat(grads)

    def _drop_pending(self) -> None:
        self._pending.clear()
        self.anchor.grad = None


class Optimizer(torch.optim.Optimizer):
    """The tables' own optimizers as one of PyTorch.

    Each embedding is a parameter group whose hyperparameters are those of its table's optimizer
    (`embermap.optim`); schedulers of `torch.optim.lr_scheduler` change `lr` as in any other. What a
    group says at a step is what the table's optimizer becomes, and what a commit keeps.

    `step()` calls `Table.update` once for each embedding with the gradients of all backward passes
    since the last step, those of an id summed, and **uses them up**: a loop without `zero_grad()`
    does not add old gradients to new ones. An embedding without gradients is left alone; its step
    does not count. `zero_grad()` drops what waits.

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
        """Update each table with the gradients that wait; returns what `closure` returns.

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
            pending = embedding._take_pending()
            if pending is None:
                continue
            table = embedding.table
            optimizer = _optimizer_of(group, table)
            if optimizer != table.optimizer:
                table.optimizer = optimizer
            table.update(*pending)
            embedding._drop_pending()
            group["step"] = table.step
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait."""
        for embedding in self._embeddings:
            embedding._drop_pending()

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
    kind: Callable[..., optim.Optimizer] = optim.SGD
    if isinstance(table.optimizer, optim.Adagrad):
        kind = optim.Adagrad
    values = {name: group[name] for name in dataclasses.asdict(table.optimizer or optim.SGD())}
    # A scheduler may keep lr as a tensor.
    return kind(**{name: v.item() if isinstance(v, Tensor) else v for name, v in values.items()})
