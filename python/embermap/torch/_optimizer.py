"""The tables' own optimizers as one of PyTorch."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizers

from .. import optim
from ._lookup import joined
from ._modules import Embedding, EmbeddingBag, EmbeddingCollection, TableModule
from ._swap import Swap

Modules = Embedding | EmbeddingBag | EmbeddingCollection

COUNT = "step"  # the key of a group that has the table's count of updates

# Options that optimizers got after others, and all names of hyperparameters.
_LATER = {"dampening", "maximize", "decoupled_weight_decay", "clip_value", "clip_row"}
_LATER |= {"stochastic_rounding"}
_ALL_NAMES = sorted(
    {field.name for kind in optim._KINDS.values() for field in dataclasses.fields(kind)} - {COUNT}
)


class Optimizer(torch.optim.Optimizer):
    """The tables' own optimizers as one of PyTorch.

    Each table is a parameter group, whose hyperparameters are the fields of its optimizer
    (`embermap.optim`): "lr", "weight_decay", ... Schedulers of `torch.optim.lr_scheduler` change
    them as in any other. What a group says at a step is what the table's optimizer becomes, and
    what a commit keeps; state that a table was not created with cannot be had that way (momentum
    for a table without it is a ValueError of the step).

    `step()` calls `Table.update` once for each table with the gradients of all backward passes
    since `zero_grad()`, those of an id summed, also where several modules are over one table. As
    everywhere in torch they stay until then: a second `step()` applies them again, and a loop
    without `zero_grad()` adds new ones to old ones. A table without gradients is left alone; its
    step does not count. If the update of a table raises, tables before it have been updated.

    `state_dict()` holds the groups: hyperparameters and `step`, the table's count of updates.
    `load_state_dict()` sets the hyperparameters, and warns where the step differs from the table's:
    the checkpoint and the table are then of different moments. `embermap.torch.save` and `load`
    keep the two together.

    Args:
        embeddings: `embermap.torch` modules: Embedding, EmbeddingBag, EmbeddingCollection; or dicts
            of "params", which is one or several of them, and hyperparameters of their own.
        lr: learning rate of all of them; None keeps each table's.

    Raises TypeError (another kind of module), ValueError (no embeddings, a table without optimizer,
    a module given twice, two rates for a table); `step` raises RuntimeError under a GradScaler, and
    as `Table.update` does.
    """

    # Makes torch.amp.GradScaler hand over its scale, by which it is noticed, instead of training on
    # scaled gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        embeddings: Iterable[Modules | dict[str, Any]] | Modules,
        lr: float | None = None,
    ) -> None:
        given = [embeddings] if isinstance(embeddings, nn.Module | dict) else list(embeddings)
        self._tables: list[list[TableModule]] = []  # modules of each group
        groups: dict[tuple[int, str], dict[str, Any]] = {}
        members: dict[tuple[int, str], list[TableModule]] = {}
        for entry in given:
            for module, options in _entries(entry, lr):
                key = _key(module)
                if key not in groups:
                    groups[key], members[key] = _group(module, options), [module]
                    continue
                if any(other is module for other in members[key]):
                    raise ValueError(f"the module of table {key[1]!r} is given twice")
                wanted = _group(module, options)
                for name in _fields(module):
                    if groups[key][name] != wanted[name]:
                        raise ValueError(
                            f"table {key[1]!r} is given with {name}={groups[key][name]!r} and with "
                            f"{name}={wanted[name]!r}"
                        )
                groups[key]["params"].append(module.anchor)
                members[key].append(module)
        if not groups:
            raise ValueError("no embeddings given")
        first = next(iter(groups.values()))
        inner = ("params", "table", COUNT)
        # Of all groups: torch gives them to groups without, and schedulers ask what there is.
        defaults = {
            name: value
            for name, value in first.items()
            if name not in inner and all(name in group for group in groups.values())
        }
        self._waiting = list(members.values())
        # What each table was told last: the table's count of such changes, names with values.
        self._told: dict[int, tuple[int, tuple[tuple[str, Any], ...]]] = {}
        super().__init__(list(groups.values()), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a table: {"params": modules of it, and hyperparameters that differ from its own}.

        Raises TypeError (parameters instead of modules), ValueError (a table that is here already).
        """
        if self._waiting:  # from __init__
            self._tables.append(self._waiting.pop(0))
            self._add(param_group)
            return
        new: dict[tuple[int, str], list[TableModule]] = {}
        groups: dict[tuple[int, str], dict[str, Any]] = {}
        here = {_key(modules[0]) for modules in self._tables}
        for module, options in _entries(param_group, None):
            key = _key(module)
            if key in here:
                raise ValueError(
                    f"table {key[1]!r} has a group already; give all its modules together"
                )
            if key in new:
                groups[key]["params"].append(module.anchor)
                new[key].append(module)
            else:
                groups[key], new[key] = _group(module, options), [module]
        for key, group in groups.items():
            self._tables.append(new[key])
            try:
                self._add(group)
            except BaseException:
                self._tables.pop()
                raise

    def _add(self, group: dict[str, Any]) -> None:
        own = set(group)
        super().add_param_group(group)
        for name in set(group) - own:  # a default that this kind of optimizer does not have
            del group[name]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each table with the gradients that wait, and keep them; see `zero_grad`.

        Returns what `closure` returns.

        Args:
            closure: computes the loss and its gradients again, called first.
        """
        # What torch puts around a step takes longer than a small step, so it is left out where
        # nobody would notice. A class that overrides this method has it around its own.
        if torch.compiler.is_compiling():
            apart: float | None = self._apart(closure)
            return apart
        if type(self).step is Optimizer.step and self._is_watched():
            return self._announced(closure) if closure is not None else self._announced()
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch is not to wrap it

    def _is_watched(self) -> bool:
        """Whether there are hooks of steps, or a profiler that is told of them."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or torch_optimizers._global_optimizer_pre_hooks
            or torch_optimizers._global_optimizer_post_hooks
            or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        )

    def _step(self, closure: Callable[[], float] | None = None) -> float | None:
        if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
            raise RuntimeError(
                "gradients of embermap tables cannot be unscaled by a GradScaler: "
                "step this optimizer without it, on a loss that is not scaled"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, (group, modules) in enumerate(
            zip(self.param_groups, self._tables, strict=True)
        ):
            module = modules[0]
            kept = module._kept() if len(modules) == 1 else None
            if kept is not None:
                live = module.table._live
                self._tell(number, group, module.table, live)
                if module._update_from(live, *kept):
                    group[COUNT] = live.step
                    continue
            self._update(number, group, modules)
        return loss

    # Inside of a graph that is being compiled: not part of it. With hooks and a profiler's range.
    _apart = torch.compiler.disable(  # type: ignore[no-untyped-call]
        torch.optim.Optimizer.profile_hook_step(_step)
    )
    _announced = torch.optim.Optimizer.profile_hook_step(_step)

    @torch.no_grad()
    def _update(self, number: int, group: dict[str, Any], modules: list[TableModule]) -> None:
        """Update a table with all gradients of its modules."""
        table = modules[0].table
        waiting = [module._gradients() for module in modules]
        gradients = [part for part in waiting if part is not None]
        if not gradients:
            return
        self._tell(number, group, table, table._live)
        for module in modules:
            module._forget_kept(shared=len(gradients) > 1)
        ids, grads = joined(gradients)
        if (
            ids.is_cpu
            and grads.is_cpu
            and grads.dtype is modules[0]._dtype
            and grads.shape == (len(ids), table.dim)
        ):
            # What it does below, without what small batches would wait for most.
            values = grads.contiguous().view(torch.uint8).numpy().reshape(-1)
            table._live.update(ids.contiguous().numpy(), values, table._dtype, None)
            group[COUNT] = table.step
            return
        for part in (ids, grads):
            # They are ours, and freed in the order of the stream of the backward pass.
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))
        table.update(ids, grads)
        group[COUNT] = table.step

    def _tell(self, number: int, group: dict[str, Any], table: Any, live: Any) -> None:
        """Make the hyperparameters of a group those of its table, if either has changed."""
        told = self._told.get(number)
        if told is not None and told[0] == live.optimizer_version:
            for name, value in told[1]:
                if group[name] is not value:
                    break
            else:
                return
        current = table.optimizer
        optimizer = _optimizer_of(group, current)
        if optimizer != current:
            table.optimizer = optimizer
        values = tuple((name, group[name]) for name in _names(optimizer))
        # Of what can be changed in place, only comparing the contents would tell.
        if all(_is_fixed(value) for _, value in values):
            self._told[number] = (live.optimizer_version, values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait. Both values of `set_to_none` do the same."""
        for modules in self._tables:
            for module in modules:
                module.zero_grad()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the hyperparameters of the groups from what `state_dict()` gave.

        Options that a state of an earlier version does not know get their defaults. Raises
        ValueError, as torch does and with nothing changed, for groups of another number, table or
        kind of optimizer, and for hyperparameters that cannot be; TypeError (it is no dict),
        KeyError (it has no "param_groups").
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"loaded state dict has a different number of parameter groups: {len(saved_groups)}"
                f", not {len(self.param_groups)}"
            )
        complete = [
            _saved_group(saved, group, modules[0].table)
            for saved, group, modules in zip(
                saved_groups, self.param_groups, self._tables, strict=True
            )
        ]
        state_dict = {**state_dict, "param_groups": complete}
        super().load_state_dict(state_dict)
        for group, modules in zip(self.param_groups, self._tables, strict=True):
            if group[COUNT] != modules[0].table.step:
                warnings.warn(
                    f"the state is of step {group['step']} of table {group['table']!r}, which is "
                    f"at step {modules[0].table.step}",
                    UserWarning,
                    stacklevel=2,
                )

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_tables": self._tables, "_waiting": [], "_told": {}}


def _entries(entry: Any, lr: float | None) -> Iterable[tuple[TableModule, dict[str, Any]]]:
    """Modules of one thing that was given, with the hyperparameters that were given for them."""
    options: dict[str, Any] = {} if lr is None else {"lr": lr}
    if isinstance(entry, dict):
        options.update(entry)
        if "params" not in entry:
            raise ValueError('a group needs "params", its modules')
        given = options.pop("params")
        for part in [given] if isinstance(given, nn.Module | Tensor) else list(given):
            yield from ((module, options) for module, _ in _entries(part, None))
        return
    if isinstance(entry, EmbeddingCollection):
        for module in dict.fromkeys(entry.features.values()):
            yield from _entries(module, lr)
        return
    if isinstance(entry, Swap):
        raise TypeError(f"{entry!r} has an optimizer of its own; call its step()")
    if not isinstance(entry, TableModule):
        what, inside = repr(entry), ""
        if isinstance(entry, Tensor):
            what, inside = type(entry).__name__, ": give the modules, not their parameters"
        elif isinstance(entry, nn.Module):
            what = type(entry).__name__
            names = [
                n
                for n, m in entry.named_modules()
                if isinstance(m, EmbeddingCollection | TableModule)
            ]
            # Those of a collection come with it.
            names = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
            if names:
                inside = f"; give those that are in it: {', '.join(names)}"
        raise TypeError(
            "embeddings must be embermap.torch.Embedding, EmbeddingBag or EmbeddingCollection, "
            f"not {what}{inside}"
        )
    yield entry, options


def _key(module: TableModule) -> tuple[int, str]:
    return id(module.table._store._session), module.table.name


def _names(optimizer: Any) -> list[str]:
    """The hyperparameters of a group. How steps are counted is the table's, and cannot change."""
    return [field.name for field in dataclasses.fields(optimizer) if field.name != COUNT]


def _fields(module: TableModule) -> list[str]:
    optimizer = module.table.optimizer
    return [] if optimizer is None else _names(optimizer)


def _group(module: TableModule, options: dict[str, Any]) -> dict[str, Any]:
    table = module.table
    optimizer = table.optimizer
    if optimizer is None:
        raise ValueError(
            f"table {table.name!r} has no optimizer; create it with "
            "optimizer=embermap.optim.Adagrad(...) or another one of embermap.optim"
        )
    names = _names(optimizer)
    for name in options:
        if name not in names:
            raise ValueError(
                f"{type(optimizer).__name__}, the optimizer of table {table.name!r}, has no {name}"
            )
    group = {name: getattr(optimizer, name) for name in names}
    checked = _optimizer_of({**group, **options}, optimizer)
    return {
        "params": [module.anchor],
        "table": table.name,
        **{name: getattr(checked, name) for name in names},
        COUNT: table.step,
    }


def _saved_group(saved: Any, group: dict[str, Any], table: Any) -> dict[str, Any]:
    """A group of a state that was saved, complete; ValueError if it is not of this table."""
    if not isinstance(saved, Mapping) or not {"table", COUNT} <= set(saved):
        raise ValueError(
            "loaded state dict is not of embermap.torch.Optimizer: its group for table "
            f"{group['table']!r} names no table and step"
        )
    if saved["table"] != group["table"]:
        raise ValueError(f"the state is of table {saved['table']!r}, not {group['table']!r}")
    optimizer = table.optimizer
    fields = [field for field in dataclasses.fields(optimizer) if field.name != COUNT]
    missing = [f.name for f in fields if f.name not in saved]
    # Hyperparameters are there from the first version of an optimizer on; what came later begins
    # with the default that leaves it out.
    alien = [name for name in _ALL_NAMES if name in saved and name not in {f.name for f in fields}]
    if alien or any(name not in _LATER for name in missing):
        kind = type(optimizer).__name__
        what = f"has {alien[0]!r}" if alien else f"has no {missing[0]!r}"
        raise ValueError(
            f"the state for table {table.name!r} is of another kind of optimizer than {kind}: "
            f"it {what}"
        )
    complete = {**{f.name: f.default for f in fields if f.name in missing}, **saved}
    _optimizer_of(complete, optimizer)  # a value that cannot be is an error now
    return complete


def _optimizer_of(group: dict[str, Any], optimizer: Any) -> Any:
    """The hyperparameters of a group, as an optimizer of the kind of a table's."""
    values = {name: _plain(group[name]) for name in _names(optimizer)}
    return dataclasses.replace(optimizer, **values)


def _is_fixed(value: Any) -> bool:
    """Whether a hyperparameter that is the same object has the same value."""
    if isinstance(value, tuple):
        return all(_is_fixed(part) for part in value)
    return isinstance(value, float | int | bool | str | None)


def _plain(value: Any) -> Any:
    """A hyperparameter without the tensors that schedulers may keep it in."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    return value
