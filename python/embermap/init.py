"""What rows hold before anyone writes them: a pure function of (seed, row, column).

The same seed gives the same rows on every machine, for every page size and thread count. Rows are
made when they are first read, so that a table of any size is created at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from . import _checks, _core

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "Zeros"]


@dataclass(frozen=True)
class Zeros:
    """Every element is 0."""


@dataclass(frozen=True)
class Constant:
    """Every element is `value`, which the table's dtype must be able to hold."""

    value: float

    def __post_init__(self) -> None:
        _checks.numbers(self)


@dataclass(frozen=True)
class Uniform:
    """Elements drawn evenly from [low, high); integers of it for integer tables."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _checks.numbers(self)


@dataclass(frozen=True)
class Normal:
    """Elements drawn from the normal distribution. For floating tables."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _checks.numbers(self)


Initializer: TypeAlias = Zeros | Constant | Uniform | Normal
_CoreInitializer: TypeAlias = _core.Zeros | _core.Constant | _core.Uniform | _core.Normal


def _to_core(init: object) -> _CoreInitializer:
    if init is None or isinstance(init, Zeros):
        return _core.Zeros()
    if isinstance(init, Constant):
        return _core.Constant(value=float(init.value))
    if isinstance(init, Uniform):
        return _core.Uniform(low=float(init.low), high=float(init.high))
    if isinstance(init, Normal):
        return _core.Normal(mean=float(init.mean), std=float(init.std))
    raise TypeError(
        "init must be None or one of embermap.init.Zeros(), Constant(value), Uniform(low, high), "
        f"Normal(mean, std), not {init!r}"
    )


def _from_core(init: _CoreInitializer) -> Initializer:
    if isinstance(init, _core.Constant):
        return Constant(init.value)
    if isinstance(init, _core.Uniform):
        return Uniform(init.low, init.high)
    if isinstance(init, _core.Normal):
        return Normal(init.mean, init.std)
    return Zeros()
