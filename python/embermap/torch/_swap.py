"""Any optimizer of torch.optim for a table: rows and their state come to it, and go back."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _rows_alone
from .. import init as initializers
from .._sparse import sparse_tensor
from .._table import Table
from ._modules import Embedding, EmbeddingBag, TableModule
from ._weight import Weight

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_DTYPES = {  # of state, as tables hold it
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
_NUMBERS = {float: torch.float64, int: torch.int64}


@dataclasses.dataclass(frozen=True)
class State:
    """One entry of what an optimizer keeps for a parameter of (n, dim)."""

    name: str
    kind: str  # "row": n of them; "whole": a tensor for all rows; "float", "int": a number
    shape: tuple[int, ...]  # of one row's part, or of the whole
    dtype: torch.dtype
    initial: float  # of rows no step has had yet
    beside: bool  # on the device of the parameter

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Swap(nn.Module):
    """A table trained by an unmodified optimizer of `torch.optim`, or one written like those.

        swap = em.torch.Swap(table, lambda params: torch.optim.Adam(params, lr=1e-3))
        swap.zero_grad()
        loss = criterion(model(swap(ids)), target)
        loss.backward()
        swap.step()

    Looking rows up and what becomes of gradients is as in `Embedding`. At a step the rows of the
    distinct ids whose gradients wait become a small parameter, (ids, dim), with their gradients in
    its `.grad`; the state that the optimizer keeps of them is brought as well; the optimizer steps;
    rows and state go back. Rows that have no gradient, and their state, stay as they are. Nothing
    of the size of the table is made.

    State is kept in tables of the same store, so that commits take it with the rows and the next
    session goes on with it. They are made at the first step, from what the optimizer holds after
    one: state of the shape of the parameter, "exp_avg", is a table of dim columns, "NAME.exp_avg";
    a number or a tensor for each row is one of as many columns; what is there once, such as "step",
    is a table of one row. They take disk only for rows that were in a batch; rows that no batch has
    had begin with the state that a step without gradient makes of a row of zeros. Counts are the
    optimizer's: bias corrections go by all steps, not by those of a row.

    With every row in every batch it is the same as the optimizer over the whole table as an
    `nn.Parameter`. Optimizers whose step of a row depends on other rows (LBFGS, Adafactor, Muon,
    and others that turn out to do so with a few rows) are refused: they would train with the rows
    of the batch what they mean to do with all.

    `optimizer` is the optimizer, for schedulers, hooks and hyperparameters; its `step()` and
    `zero_grad()` do what those here do (with set_to_none=False it leaves gradients). Between steps
    it holds neither rows nor their state; its `state_dict()` is small and keeps hyperparameters and
    counts.

    Args:
        table: the table, or an `Embedding` or `EmbeddingBag` over it. Its own optimizer, if it has
            one, is not used.
        optimizer_factory: called with a list of one parameter, makes the optimizer over it alone.
            It is called several times: for the optimizer, and to see what it keeps.

    Raises TypeError (table, or a factory that makes no optimizer, or one that mixes rows),
    ValueError (an optimizer over other parameters, state that no table can hold, tables of another
    optimizer's state); a step raises as `Table.gather` and `Table.scatter` do.
    """

    def __init__(self, table: Table | Embedding | EmbeddingBag, optimizer_factory: Factory) -> None:
        super().__init__()
        module = Embedding(table) if isinstance(table, Table) else table
        if not isinstance(module, TableModule):
            raise TypeError(
                f"table must be a Table, an Embedding or an EmbeddingBag, not {table!r}"
            )
        self.module = module
        self._factory = optimizer_factory
        weight = nn.Parameter(torch.zeros(0, module._dim, dtype=module._dtype, device="cpu"))
        self._optimizer = _made(optimizer_factory, weight)
        # Not a parameter of this module: other optimizers must not step it.
        self._small = [weight]
        # So that the optimizer's own zero_grad() drops gradients as well.
        module._pending.mark = weakref.ref(weight)
        self._states: dict[str, list[State]] = {}  # by type of device
        self._batch: Tensor | None = None  # the ids whose rows are with the optimizer
        self._left: list[tuple[Table, Tensor, Tensor]] = []  # what has not gone back yet
        me = weakref.ref(self)

        def bring(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if len(args) > 1 or options.get("closure") is not None:
                raise RuntimeError(
                    "the optimizer of a Swap cannot call a closure, which comes before rows are "
                    "brought: give it to Swap.step"
                )
            if (swap := me()) is not None:
                swap._bring()

        def take(*_: Any) -> None:
            if (swap := me()) is not None:
                swap._take()

        self._optimizer.register_step_pre_hook(bring)
        self._optimizer.register_step_post_hook(take)
        self._expected("cpu")  # what cannot be kept is an error now
        if _rows_alone.mixes_rows(
            lambda parameter: _made(optimizer_factory, parameter),
            module._dim,
            module._dtype,
            torch.device("cpu"),
        ):
            raise _mixing(self._optimizer)
        self._resume()

    # --- what it is -------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """The table."""
        return self.module.table

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the factory made."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's: one, unless the factory made more."""
        return self._optimizer.param_groups

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
        """The table, read when it is indexed."""
        return self.module.weight

    @property
    def state_tables(self) -> dict[str, Table]:
        """The tables of the optimizer's state that are there, by its name for it."""
        store = self.table._store
        names = {state.name: self._table_name(state) for state in self._expected("cpu")}
        return {state: store[name] for state, name in names.items() if name in store}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the module's: rows, or bags of them, with a graph."""
        rows: Tensor = self.module(*args, **kwargs)
        return rows

    def prefetch(self, ids: Any) -> None:
        """Read the pages of a batch to come, of the rows and of their state."""
        self.table.prefetch(ids)
        for state in self._expected("cpu"):
            name = self._table_name(state)
            if state.kind == "row" and name in self.table._store:
                self.table._store[name].prefetch(ids)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Bring rows and state, step the optimizer, take them back. Gradients stay; see zero_grad.

        Returns what `closure` returns.

        Args:
            closure: computes the loss and its gradients again, called first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait. Both values of `set_to_none` do the same."""
        self.module.zero_grad()
        self._small[0].grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Swap:
        raise TypeError(
            "a Swap cannot be copied: two optimizers would step one table. Make another Swap, or "
            "copy its .module"
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a Swap cannot be pickled; pickle its .module, or its table")

    # --- state ------------------------------------------------------------------------------------

    def _table_name(self, state: State) -> str:
        return f"{self.table.name}.{state.name}"

    def _expected(self, device: str) -> list[State]:
        """What the optimizer keeps, as two small ones that have made a step tell."""
        if device not in self._states:
            self._states[device] = _probe(self._factory, self.table, self.module._dtype, device)
        return self._states[device]

    def _resume(self) -> None:
        """Give the optimizer what an earlier session has left, if there was one."""
        store = self.table._store
        begun, missing = [], []
        for state in self._expected("cpu"):
            name = self._table_name(state)
            if name not in store:
                missing.append(name)
                continue
            table = store[name]
            self._check(state, table)
            if table._live.written_pages or table.stats()["dirty_pages"]:
                begun.append(name)
        if begun and missing:
            raise ValueError(
                f"table {begun[0]!r} is of the state of another optimizer: there is no "
                f"{missing[0]!r}, which {type(self._optimizer).__name__} needs as well; remove the "
                "tables of that state to begin anew"
            )
        self._begun = bool(begun)
        if begun:
            self._load_wholes("cpu")

    def _load_wholes(self, device: str) -> None:
        kept = self._optimizer.state[self._small[0]]
        for state in self._expected(device):
            if state.kind == "row":
                continue
            value = self.table._store[self._table_name(state)].gather(
                torch.tensor([0], device="cpu")
            )
            if state.kind in ("float", "int"):
                kept[state.name] = value.reshape(()).item()
            else:
                place = device if state.beside else "cpu"
                kept[state.name] = value.reshape(state.shape).to(place)

    def _check(self, state: State, table: Table) -> None:
        wanted = (
            self.table.rows if state.kind == "row" else 1,
            max(1, state.elements),
            _DTYPES[state.dtype],
        )
        found = (table.rows, table.dim, table._dtype)
        grown = state.kind == "row" and found[1:] == wanted[1:] and found[0] != wanted[0]
        if grown and table.writable:
            table.resize(wanted[0])  # as the table was
            return
        if found != wanted:
            raise ValueError(
                f"table {table.name!r} is {found[0]} x {found[1]} {found[2]}; the state "
                f"{state.name!r} of {type(self._optimizer).__name__} needs {wanted[0]} x "
                f"{wanted[1]} {wanted[2]}"
            )

    def _state_table(self, state: State) -> Table:
        """The table of a state; made now if it is not there."""
        store = self.table._store
        name = self._table_name(state)
        if name in store:
            table = store[name]
            self._check(state, table)
            return table
        return store.create(
            name,
            rows=self.table.rows if state.kind == "row" else 1,
            dim=max(1, state.elements),
            dtype=state.dtype,
            init=initializers.Constant(state.initial) if state.initial else None,
            page_bytes=self.table.page_bytes,
        )

    # --- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _bring(self) -> None:
        """Before the optimizer's step: rows, gradients and state of the batch."""
        weight = self._small[0]
        found = self.module._gradients()
        self._batch = None
        if self._left:  # the step has been made; what it has changed is to go back first
            self._give_back()
            found = None
        if found is None or found[0].numel() == 0:
            weight.grad = None  # the optimizer steps nothing
            return
        ids, inverse = torch.unique(found[0], return_inverse=True)
        device = ids.device.type
        expected = self._expected(device)
        count = ids.numel()
        rows = self.table.gather(ids)
        if not self.table.writable:
            raise PermissionError(f"table {self.table.name!r} is read-only: it cannot be trained")
        # As nn.Embedding sums them: in order, and the same each time on a GPU as well.
        grad = torch.ops.aten.embedding_dense_backward(
            found[1].to(rows.dtype), inverse, count, -1, False
        )
        brought: dict[str, Any] = {}
        kept = self._optimizer.state.get(weight, {})
        for state in expected:
            table = self._state_table(state)
            if state.kind == "row":
                if self._begun or state.name in kept:
                    value = table.gather(ids)
                    brought[state.name] = value.reshape(count, *state.shape)
            elif state.name in kept and isinstance(kept[state.name], Tensor):
                place = ids.device if state.beside else torch.device("cpu")
                brought[state.name] = kept[state.name].to(place)
        weight.grad = None
        weight.data = rows
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            places = torch.arange(count, device=ids.device).unsqueeze(0)
            grad = sparse_tensor(places, grad, grad.shape, is_coalesced=True)
        weight.grad = grad
        if brought:
            self._optimizer.state[weight].update(brought)
        self._batch = ids

    @torch.no_grad()
    def _take(self) -> None:
        """After the optimizer's step: rows and state go back to their tables."""
        ids, self._batch = self._batch, None
        weight = self._small[0]
        if ids is None:
            self._rest()
            return
        kept = self._optimizer.state[weight]
        expected = {state.name: state for state in self._expected(ids.device.type)}
        for name in kept:
            if name not in expected and kept[name] is not None:
                raise RuntimeError(
                    f"{type(self._optimizer).__name__} keeps {name!r}, which it did not keep after "
                    "its first step"
                )
        one = torch.zeros(1, dtype=torch.int64, device="cpu")
        left = [(self.table, ids, weight.data)]
        for name, state in expected.items():
            table = self.table._store[self._table_name(state)]
            if state.kind == "row":
                # The optimizer keeps none of it, so that a later batch is not taken for this one.
                value = kept.pop(name)
                left.append((table, ids, value.reshape(ids.numel(), max(1, state.elements))))
            elif state.kind == "whole":
                left.append((table, one, kept[name].detach().cpu().reshape(1, -1)))
            else:
                value = torch.tensor([[kept[name]]], dtype=state.dtype, device="cpu")
                left.append((table, one, value))
        self._rest()
        self._begun = True
        self._left = left
        self._give_back()

    def _rest(self) -> None:
        """Leave the optimizer a parameter of no rows, whose gradient is there: they wait on."""
        weight = self._small[0]
        weight.grad = None
        weight.data = weight.data[:0].clone()
        weight.grad = torch.zeros_like(weight)

    def _give_back(self) -> None:
        while self._left:
            table, ids, rows = self._left[0]
            table.scatter(ids, rows.contiguous())
            self._left.pop(0)


def _made(factory: Factory, weight: nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer of a factory, checked."""
    if isinstance(factory, torch.optim.Optimizer) or not callable(factory):
        raise TypeError(
            "optimizer_factory must be a function that makes an optimizer, such as "
            f"lambda params: torch.optim.Adam(params), not {factory!r}"
        )
    optimizer = factory([weight])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer_factory must make a torch.optim.Optimizer, not {optimizer!r}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _mixing(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(held) != 1 or held[0] is not weight:
        raise ValueError(
            "optimizer_factory must make an optimizer over the parameter it is given, and no other"
        )
    return optimizer


def _mixing(optimizer: torch.optim.Optimizer) -> TypeError:
    name = type(optimizer).__name__
    return TypeError(f"{name} cannot train a table: {_rows_alone.REASON}")


def _probe(factory: Factory, table: Table, dtype: torch.dtype, device: str) -> list[State]:
    """What an optimizer keeps: of parameters of two and of three rows, after a step without grad.

    What differs in its first dimension is of the rows.
    """
    if device == "cuda":
        device = f"cuda:{table._store.device}"
    found = []
    for rows in (2, 3):
        weight = nn.Parameter(torch.zeros(rows, table.dim, dtype=dtype, device=device))
        with torch.random.fork_rng(devices=[weight.device] if weight.is_cuda else []):
            optimizer = _made(factory, weight)
            weight.grad = torch.zeros_like(weight)
            if isinstance(optimizer, torch.optim.SparseAdam):
                weight.grad = weight.grad.to_sparse(1)
            optimizer.step()
        found.append((type(optimizer).__name__, dict(optimizer.state[weight]), weight))
    (kind, two, weight), (_, three, _) = found
    if two.keys() != three.keys():
        raise ValueError(f"{kind} keeps {sorted(two)} of two rows and {sorted(three)} of three")
    return [
        state
        for name in two
        if (state := _state(kind, name, two[name], three[name], weight.device)) is not None
    ]


def _state(kind: str, name: str, two: Any, three: Any, device: torch.device) -> State | None:
    if two is None:
        return None
    if type(two) in _NUMBERS:
        return State(name, type(two).__name__, (), _NUMBERS[type(two)], 0, False)
    if not isinstance(two, Tensor) or two.layout != torch.strided or two.dtype not in _DTYPES:
        what = f"a {type(two).__name__}" if not isinstance(two, Tensor) else f"of {two.dtype}"
        raise ValueError(f"the state {name!r} of {kind} is {what}, which a table cannot hold")
    beside = two.device == device
    if two.shape == three.shape:
        return State(name, "whole", tuple(two.shape), two.dtype, 0, beside)
    if two.shape[:1] != (2,) or three.shape[:1] != (3,) or two.shape[1:] != three.shape[1:]:
        raise ValueError(
            f"the state {name!r} of {kind} has the shape {tuple(two.shape)} for two rows and "
            f"{tuple(three.shape)} for three: not the same for each row"
        )
    values = torch.cat([two.reshape(-1), three.reshape(-1)])
    if values.numel() and not bool((values == values[0]).all()):
        raise ValueError(f"the state {name!r} of {kind} does not begin the same for each element")
    initial = float(values[0].item()) if values.numel() else 0.0
    return State(name, "row", tuple(two.shape[1:]), two.dtype, initial, beside)
