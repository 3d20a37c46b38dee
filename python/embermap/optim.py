"""The optimizers a table can be trained with.

They have the names, options, defaults and formulas of torch.optim (2.11); `RowWiseAdagrad` those of
FBGEMM and torchrec. Each equals the one of torch on the rows of a batch; gradients of repeated ids
are summed first. Rows outside of the batch keep their weights and state bit for bit. State lies
beside the weight, under torch's names: `table.view("exp_avg")`.

Options of every optimizer, all keyword-only, about the sum of a row's gradients in a batch:

    clip_value: each element is kept within [-clip_value, clip_value] (None: it is not clipped).
    clip_row: a row whose L2 norm is greater than clip_row, after that, is scaled to have this norm.
        Both come before weight decay. None: it is not clipped.
    stochastic_rounding: for float16 and bfloat16 tables. A new weight that lies between two values
        of the dtype becomes one of them with a probability by distance, so that small steps count
        on average. Chance comes from the table's seed, the step, the row and the column: the same
        run gives the same rows, on the CPU as on a GPU.

Where a formula depends on the number of the step (bias corrections, lr_decay, SGD's first momentum
with dampening, ASGD's averaging), `step` says whose steps count:

    "global": the table's, as torch has it. A row that comes into a batch late is treated as if its
        gradients had been 0 until then: its averages begin at 0, and their bias, which the table's
        step no longer corrects, makes its first steps small (Adam's some three times lr). Rows that
        are in every batch equal those of torch's dense optimizers, and all rows SparseAdam's.
    "row": each row's own, counted in the int32 field "step" of its record, 4 bytes a row. Each row
        trains as a torch parameter of its own, whenever it comes.

All raise ValueError, with torch's message, for a hyperparameter that cannot be, TypeError for one
that is not a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from . import _checks, _core

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "RowWiseAdagrad",
    "Rprop",
    "SparseAdam",
]

StepOf: TypeAlias = Literal["global", "row"]


# Shown only where they are set.
_MORE = {
    "dampening",
    "decoupled_weight_decay",
    "maximize",
    "step",
    "clip_value",
    "clip_row",
    "stochastic_rounding",
}


class _Checked:
    def __post_init__(self) -> None:
        _checks.numbers(self)
        _core.check_optimizer(_to_core(self))

    def __repr__(self) -> str:
        options = []
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if entry.name not in _MORE or value != entry.default:
                options.append(f"{entry.name}={value!r}")
        return f"{type(self).__name__}({', '.join(options)})"


@dataclass(frozen=True, repr=False)
class SGD(_Checked):
    """torch.optim.SGD. State with momentum: "momentum_buffer".

    A row's momentum changes only when the row is in a batch. With dampening, the gradient of the
    first step (see `step`) goes into the momentum undamped.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class Adagrad(_Checked):
    """torch.optim.Adagrad. State: "sum", the sum of squared gradients of each element.

    lr is divided by 1 + (step - 1) * lr_decay, steps counting from 1. Where "sum" begins cannot be
    changed later.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class RowWiseAdagrad(_Checked):
    """Adagrad with one number of state a row, as FBGEMM's and torchrec's row-wise Adagrad.

    State: "sum", of shape (rows, 1): the sum of the means of a row's squared gradients, of which
    weight decay is a part. The rest is as for `Adagrad`.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class Adadelta(_Checked):
    """torch.optim.Adadelta. State: "square_avg" and "acc_delta"."""

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = field(default=False, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class Adam(_Checked):
    """torch.optim.Adam. State: "exp_avg", "exp_avg_sq", with amsgrad "max_exp_avg_sq"."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = field(default=False, kw_only=True)
    decoupled_weight_decay: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class AdamW(_Checked):
    """torch.optim.AdamW: `Adam` with decoupled weight decay. It decays rows of the batch only."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    amsgrad: bool = False
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class SparseAdam(_Checked):
    """torch.optim.SparseAdam: `Adam` whose eps is added before the bias is corrected."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    maximize: bool = False
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class Adamax(_Checked):
    """torch.optim.Adamax. State: "exp_avg" and "exp_inf"."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class NAdam(_Checked):
    """torch.optim.NAdam. State: "exp_avg", "exp_avg_sq"; with step="row" also "mu_product"."""

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled_weight_decay: bool = False
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class RAdam(_Checked):
    """torch.optim.RAdam. State: "exp_avg" and "exp_avg_sq"."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class ASGD(_Checked):
    """torch.optim.ASGD. State: "ax", the average of the row's weights.

    "ax" is the weight itself up to step t0 + 1, and is drawn towards it later; it does not enter
    the training. A row first met after that (with step="global") has an average that begins at 0.
    As in torch, a step's size is made at the end of the one before: a change of lr counts one step
    later. With step="row" it is the lr of the table's step before, not of the row's.
    """

    lr: float = 1e-2
    lambd: float = 1e-4
    alpha: float = 0.75
    t0: float = 1e6
    weight_decay: float = 0.0
    maximize: bool = field(default=False, kw_only=True)
    step: StepOf = field(default="global", kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class RMSprop(_Checked):
    """torch.optim.RMSprop. State: "square_avg"; with momentum "momentum_buffer", centered
    "grad_avg".
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = field(default=False, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, repr=False)
class Rprop(_Checked):
    """torch.optim.Rprop. State: "prev" and "step_size".

    lr is where each element's "step_size" begins, and nothing else: it cannot be changed later, and
    `Table.update` takes no `lr`.
    """

    lr: float = 1e-2
    etas: tuple[float, float] = (0.5, 1.2)
    step_sizes: tuple[float, float] = (1e-6, 50.0)
    maximize: bool = field(default=False, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_row: float | None = field(default=None, kw_only=True)
    stochastic_rounding: bool = field(default=False, kw_only=True)


Optimizer: TypeAlias = (
    SGD
    | Adagrad
    | RowWiseAdagrad
    | Adadelta
    | Adam
    | AdamW
    | SparseAdam
    | Adamax
    | NAdam
    | RAdam
    | ASGD
    | RMSprop
    | Rprop
)

# By the names of the manifest and of `embermap create --optimizer`.
_KINDS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adadelta": Adadelta,
    "adam": Adam,
    "adamw": AdamW,
    "sparse_adam": SparseAdam,
    "adamax": Adamax,
    "nadam": NAdam,
    "radam": RAdam,
    "asgd": ASGD,
    "rmsprop": RMSprop,
    "rprop": Rprop,
}
_NAMES: dict[type[object], str] = {kind: name for name, kind in _KINDS.items()}

_Core: TypeAlias = tuple[str, dict[str, Any]] | None


def _plain(value: Any) -> Any:
    """Numbers of any library as those of Python."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(float(number) for number in value)
    return float(value)


def _to_core(optimizer: object) -> _Core:
    if optimizer is None:
        return None
    name = _NAMES.get(type(optimizer))
    if name is None:
        raise TypeError(
            f"optimizer must be None or one of embermap.optim ({', '.join(__all__)}), "
            f"not {optimizer!r}"
        )
    options = {
        entry.name: _plain(getattr(optimizer, entry.name))
        for entry in fields(optimizer)  # type: ignore[arg-type]
    }
    return name, options


def _from_core(optimizer: _Core) -> Optimizer | None:
    if optimizer is None:
        return None
    name, options = optimizer
    return _KINDS[name](**options)
