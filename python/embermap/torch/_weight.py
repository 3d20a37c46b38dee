"""`module.weight`: a table seen as the weight of a module, which reads rows when it is indexed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._modules import TableModule

_ITERATION_ROWS = 1024


class Weight:
    """The weight of a module over a table, not a tensor: nothing is read until it is indexed.

    `weight[3:7]`, `weight[5]`, `weight[ids]` and `weight[:]` give tensors, which are copies without
    a graph; keys are those of `Table`. `weight.grad` is what `nn.Embedding(sparse=True)` has there:
    the gradients that wait for a step, as a sparse tensor, or None.

    Functions of torch refuse it (TypeError): they would need the whole table as a tensor.
    """

    __slots__ = ("_module",)

    def __init__(self, module: TableModule) -> None:
        self._module = module

    @property
    def shape(self) -> torch.Size:
        """(rows, dim)."""
        return torch.Size(self._module.table.shape)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the rows."""
        found: torch.dtype = getattr(torch, self._module.table._dtype)
        return found

    @property
    def device(self) -> torch.device:
        """Where a tensor read from it lies: the host, unless ids on a device are the key."""
        return torch.device("cpu")

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def requires_grad(self) -> bool:
        """Whether the rows that the module looks up have gradients: False when it is frozen."""
        return bool(self._module.anchor.requires_grad)

    @property
    def grad(self) -> Tensor | None:
        """The gradients that wait for a step: sparse, not coalesced, of shape (rows, dim).

        The same tensor until another backward pass adds to it. What is done to it in place acts on
        the next step.
        """
        return self._module._pending.shown(self._module.anchor, self.shape)

    @property
    def data(self) -> Weight:
        """Itself: it has no graph."""
        return self

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """2."""
        return 2

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def detach(self) -> Weight:
        """Itself: it has no graph."""
        return self

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        raise RuntimeError("a weight of several rows is neither true nor false")

    def __getitem__(self, key: Any) -> Tensor:
        table = self._module.table
        if isinstance(key, tuple) and key:
            rest = (Ellipsis, *key[1:])
            return self[key[0]][rest]
        if key is Ellipsis:
            key = slice(None)
        if isinstance(key, slice):
            start, stop, step = key.indices(table.rows)
            if step == 1:
                rows = torch.empty(
                    (max(0, stop - start), table.dim), dtype=self.dtype, device="cpu"
                )
                table.read(start, max(start, stop), out=rows)
                return rows
            key = torch.tensor(range(start, stop, step), dtype=torch.int64, device="cpu")
        elif isinstance(key, int) and not isinstance(key, bool):
            if not -table.rows <= key < table.rows:
                raise IndexError(
                    f"row {key} is out of range for table {table.name!r} with {table.rows} rows"
                )
            key = torch.tensor(key + table.rows if key < 0 else key, device="cpu")
        elif not isinstance(key, Tensor):
            on_device = hasattr(key, "__cuda_array_interface__")
            key = torch.as_tensor(key, device=None if on_device else "cpu")
        found: Tensor = table[key]
        return found

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, len(self), _ITERATION_ROWS):
            yield from self[start : start + _ITERATION_ROWS]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._module.table.__array__(dtype, copy)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        raise TypeError(
            f"{name} cannot take the weight of a module over a table, which is not a tensor: "
            "module(ids) and weight[ids] read rows, weight[:] all of them"
        )

    def __repr__(self) -> str:
        return f"<embermap.torch.Weight of {self._module.table!r}>"
