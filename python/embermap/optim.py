"""The optimizers a table can be trained with. Each equals the one of torch.optim on the rows of a
batch; rows outside of the batch keep their weights and state bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from . import _checks, _core

__all__ = ["SGD", "Adagrad", "Optimizer"]


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD with dampening 0.

    State with momentum: "momentum_buffer". A row's momentum changes only when the row is in a
    batch. Raises ValueError for a hyperparameter that is negative or not finite, or nesterov
    without momentum; TypeError for one that is not a number.
    """

    lr: float = 1e-3
    momentum: float = field(default=0.0, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    nesterov: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _checks.numbers(self)
        _core.check_optimizer(_to_core(self))


@dataclass(frozen=True)
class Adagrad:
    """torch.optim.Adagrad. State: "sum", the sum of squared gradients of each element.

    lr is divided by 1 + (step - 1) * lr_decay, where step counts the updates of the table from 1.
    Raises ValueError for a hyperparameter that is negative or not finite; TypeError for one that
    is not a number.
    """

    lr: float = 1e-2
    lr_decay: float = field(default=0.0, kw_only=True)
    weight_decay: float = field(default=0.0, kw_only=True)
    initial_accumulator_value: float = field(default=0.0, kw_only=True)
    eps: float = field(default=1e-10, kw_only=True)

    def __post_init__(self) -> None:
        _checks.numbers(self)
        _core.check_optimizer(_to_core(self))


Optimizer: TypeAlias = SGD | Adagrad


def _to_core(optimizer: object) -> _core.Sgd | _core.Adagrad | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, SGD):
        return _core.Sgd(
            lr=float(optimizer.lr),
            momentum=float(optimizer.momentum),
            weight_decay=float(optimizer.weight_decay),
            nesterov=optimizer.nesterov,
        )
    if isinstance(optimizer, Adagrad):
        return _core.Adagrad(
            lr=float(optimizer.lr),
            lr_decay=float(optimizer.lr_decay),
            weight_decay=float(optimizer.weight_decay),
            initial_accumulator_value=float(optimizer.initial_accumulator_value),
            eps=float(optimizer.eps),
        )
    raise TypeError(
        "optimizer must be None, embermap.optim.SGD(...) or embermap.optim.Adagrad(...), "
        f"not {optimizer!r}"
    )


def _from_core(optimizer: _core.Sgd | _core.Adagrad | None) -> Optimizer | None:
    if optimizer is None:
        return None
    if isinstance(optimizer, _core.Sgd):
        return SGD(
            optimizer.lr,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov,
        )
    return Adagrad(
        optimizer.lr,
        lr_decay=optimizer.lr_decay,
        weight_decay=optimizer.weight_decay,
        initial_accumulator_value=optimizer.initial_accumulator_value,
        eps=optimizer.eps,
    )
