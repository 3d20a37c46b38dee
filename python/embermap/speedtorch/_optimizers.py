"""Switchers of optimizer state: what an optimizer of torch keeps for the rows of a batch."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .. import _checks, _rows_alone
from .. import init as initializers
from .._store import Store
from .._table import Prefetch
from . import _files
from ._home import PathLike
from ._models import device_type, try_remove
from ._rows import Variable, as_tensor, flat_ids
from ._switcher import Base, first_free, floating, link_file


class _Recorder(dict[str, Any]):
    """The state of a parameter, which remembers what each entry was when it was first made."""

    def __init__(self, made: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(made or {})

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.first:
            self.first[name] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **named: Any) -> None:
        for name, value in dict(*others, **named).items():
            self[name] = value


@dataclass(frozen=True)
class Field:
    """A state that each row has for itself."""

    row_shape: tuple[int, ...]
    dtype: torch.dtype  # as the optimizer has it
    first: float
    exact: bool = False  # kept in this dtype, not in that of the switcher


@dataclass(frozen=True)
class State:
    """What an optimizer keeps for one parameter."""

    fields: dict[str, Field]
    numbers: dict[str, Any]  # one for all rows, as it is before the first step
    complete: bool  # whether that is all, so that it can be made before the first step


def describe(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: Tensor, dim: int
) -> State:
    """Find out what the optimizer keeps: it is made again, for a few rows, and takes a step of
    gradients that are all zero.

    Raises TypeError (it cannot be made again), ValueError (it keeps what no row has for itself).
    """
    kind = type(optimizer)
    rows = 2 if dim != 2 else 3  # so that rows and elements cannot be mistaken
    trial = nn.Parameter(torch.zeros(rows, dim, dtype=param.dtype, device=param.device))
    try:
        probe = _again(optimizer, group)(trial)
        record = _Recorder(probe.state[trial])  # what it has made already, and what it will
        probe.state[trial] = record
        trial.grad = torch.zeros_like(trial)
        try:
            probe.step()
        except RuntimeError:  # takes sparse gradients only
            trial.grad = torch.zeros_like(trial.data).to_sparse(1)
            probe.step()
    except Exception as error:
        raise _untried(optimizer, error) from error
    fields: dict[str, Field] = {}
    numbers: dict[str, Any] = {}
    for name, value in record.first.items():
        if not isinstance(value, Tensor):
            if isinstance(value, int | float):
                numbers[name] = value
        elif value.ndim == 0:
            numbers[name] = value
        elif value.shape[0] == rows and value.ndim <= 2 and value.numel() in (rows, rows * dim):
            fields[name] = Field(tuple(value.shape[1:]), value.dtype, _constant(value))
        else:
            raise ValueError(
                f"{kind.__name__} keeps {name!r} of shape {tuple(value.shape)} for {rows} rows of "
                f"{dim} elements, which is not one value for each row or element"
            )
    complete = len(fields) + len(numbers) == len(record.first)
    return State(fields, numbers, complete)


_COUNT = "row_steps"  # the field of how many steps a row has had, with step="row"


def _by_rows(state: State, name: str) -> State:
    """The same with a number of its own for each row where there is one for all."""
    if not state.complete:
        raise ValueError(
            f'step="row" needs all of what {name} keeps for a row; it keeps more than numbers and '
            "tensors"
        )
    numbers = {key: Field((), torch.float64, 0, True) for key in state.numbers}
    return State({**state.fields, **numbers, _COUNT: Field((), torch.int32, 0, True)}, {}, True)


class _RowSteps:
    """Steps the rows of one parameter by the steps that each has had, instead of its optimizer.

    Rows that have the same numbers (steps, and what else there is once for a parameter) are stepped
    together, by another optimizer of the same kind and options; those that have had none begin as a
    parameter of their own does.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        param: Tensor,
        state: State,
        numbers: dict[str, Any],
    ) -> None:
        self._optimizer, self._group, self._param = optimizer, group, param
        self._state, self._numbers = state, numbers
        self._grad: Tensor | None = None
        me = weakref.ref(self)

        def before(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            alive = me()
            if alive is None:
                return
            if args[1:] or options.get("closure") is not None:
                raise RuntimeError(
                    'with step="row" an optimizer takes no closure: rows are stepped before it '
                    "would be called"
                )
            alive._step()

        def after(*_: Any) -> None:
            alive = me()
            if alive is not None and alive._grad is not None:
                alive._param.grad, alive._grad = alive._grad, None

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    @torch.no_grad()
    def _step(self) -> None:
        live, grad = self._optimizer.state[self._param], self._param.grad
        if grad is None or _COUNT not in live:
            return
        sparse = grad.is_sparse
        dense = grad.to_dense() if sparse else grad
        keys = torch.stack([live[name].double() for name in (_COUNT, *self._numbers)], 1)
        distinct, inverse = torch.unique(keys, dim=0, return_inverse=True)
        for number, key in enumerate(distinct.tolist()):
            rows = (inverse == number).nonzero().reshape(-1)
            part = nn.Parameter(self._param.data[rows])
            part.grad = dense[rows].to_sparse(1) if sparse else dense[rows]
            stepper = _again(self._optimizer, self._group)(part)
            if key[0]:
                own = {name: live[name][rows] for name in self._elements()}
                for value, (name, like) in zip(key[1:], self._numbers.items(), strict=True):
                    own[name] = _number_like(like, value)
                stepper.state[part].update(own)
            stepper.step()
            self._param.data[rows] = part.data
            found = stepper.state[part]
            for name in self._elements():
                if name in found and found[name] is not None:
                    live[name][rows] = found[name].to(live[name].dtype)
            for name in self._numbers:
                live[name][rows] = float(found[name])
            live[_COUNT][rows] += 1
        # The optimizer itself has nothing to do for these rows.
        self._grad, self._param.grad = grad, None

    def _elements(self) -> list[str]:
        return [n for n in self._state.fields if n != _COUNT and n not in self._numbers]


def _again(
    optimizer: torch.optim.Optimizer, group: dict[str, Any]
) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    """Makes optimizers of the same kind and options over a parameter of its own."""
    kind = type(optimizer)

    def make(parameter: nn.Parameter) -> torch.optim.Optimizer:
        own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        options: dict[str, Any] = {**optimizer.defaults, **own}
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
        if "differentiable" in options:
            options["differentiable"] = False
        taken = inspect.signature(kind).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values()):
            options = {key: value for key, value in options.items() if key in taken}
        return kind([parameter], **options)

    return make


def _untried(optimizer: torch.optim.Optimizer, error: Exception) -> TypeError:
    return TypeError(
        f"cannot find out what {type(optimizer).__name__} keeps for each row: a step of a second "
        f"one, made with the same options, failed: {error}"
    )


def _mixing(optimizer: torch.optim.Optimizer) -> ValueError:
    return ValueError(f"{type(optimizer).__name__} is not supported: {_rows_alone.REASON}")


def _constant(value: Tensor) -> float:
    """What the elements of a state begin with."""
    first = value.reshape(-1)[0].item()
    same = bool((value == first).all())
    return float(first) if same else 0.0


def _number_like(value: Any, number: float) -> Any:
    if isinstance(value, Tensor):
        return torch.full_like(value, number)
    return type(value)(number)


class OptimizerSwitcher(Base):
    """What the optimizer factories have in common."""

    _first_steps: ClassVar[str] = "optInit(), resume() or a load first"
    _numbers: Variable | None = None  # steps and the like, where rows are kept

    def _begin(
        self,
        given_optimizer: Any,
        total_classes: Any,
        embed_dimension: Any,
        model: Any,
        variable_name: Any,
        dtype: Any,
        *,
        directory: PathLike | None,
        memory: int | str | None,
        device: Any,
        store: Store | None,
        name: str | None,
        step: str,
    ) -> None:
        if not isinstance(given_optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"given_optimizer must be an optimizer of torch, not {given_optimizer!r}"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {model!r}")
        if isinstance(given_optimizer, torch.optim.LBFGS):
            raise _mixing(given_optimizer)
        self.given_optimizer = given_optimizer
        self.total_classes = _checks.integer(total_classes, "total_classes")
        self.embed_dimension = _checks.integer(embed_dimension, "embed_dimension")
        if self.embed_dimension == 0:
            raise ValueError("embed_dimension must be at least 1, not 0")
        self.model = model
        self.variable_name = variable_name
        self.datatype = self.dtype = dtype
        self._row_dtype = floating(dtype, "dtype")
        if store is None and name is not None:
            raise ValueError("name= is for a store that is given: store=, name=")
        self._param = _parameter(model, variable_name)
        self._group = _group(given_optimizer, self._param, variable_name)
        make = _again(given_optimizer, self._group)
        rows = (self.embed_dimension, self._param.dtype, self._param.device)
        try:
            mixing = _rows_alone.mixes_rows(make, *rows)
        except Exception as error:
            raise _untried(given_optimizer, error) from error
        if mixing:
            raise _mixing(given_optimizer)
        self._state = describe(given_optimizer, self._group, self._param, self.embed_dimension)
        if step not in ("global", "row"):
            raise ValueError(f'step must be "global" or "row", not {step!r}')
        self._row_steps: _RowSteps | None = None
        if step == "row":
            numbers = self._state.numbers
            self._state = _by_rows(self._state, type(given_optimizer).__name__)
            self._row_steps = _RowSteps(
                given_optimizer, self._group, self._param, self._state, numbers
            )
        self.optVarList = list(self._state.fields)
        self._untouched = True  # no batch has gone back yet
        self._loaded: dict[str, float] = {}
        self._prefix = "" if store is None else f"{name or variable_name}."
        self._settle(directory, memory, device, store)

    def _weight(self) -> Tensor:
        return self._param

    @property
    def _live_state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.given_optimizer.state[self._param]
        return found

    # --- first rows -------------------------------------------------------------------------------

    def optInit(self) -> None:
        """New state for all rows, as the optimizer begins with it: zeros in most cases.

        Adagrad's `sum` begins with initial_accumulator_value, Rprop's `step_size` with lr.
        """
        self._make()
        self._untouched, self._loaded = True, {}

    def resume(self) -> None:
        """Go on with the state that `directory=`, or `store=`, has from before, and its steps.

        Raises NotFoundError (there is none), ValueError (of another shape or dtype).
        """
        self._make(resume=True)
        if self._numbers is not None:
            values = self._numbers.numpy().tolist()
            self._take_numbers(dict(zip(self._state.numbers, values, strict=True)))
        self._untouched = False

    def _make(self, *, resume: bool = False) -> None:
        fields: dict[str, tuple[tuple[int, ...], torch.dtype, initializers.Initializer]] = {}
        for name, field in self._state.fields.items():
            dtype = self._kept(field)
            first: initializers.Initializer = initializers.Zeros()
            if field.first != 0:
                first = initializers.Constant(field.first)
            fields[self._prefix + name] = (field.row_shape, dtype, first)
        self._create(self.total_classes, fields, resume=resume)
        if self._state.numbers and not self._live().home.scratch:
            self._keep_numbers(resume)

    def _kept(self, field: Field) -> torch.dtype:
        """The dtype that a field is kept in."""
        own = field.exact or not field.dtype.is_floating_point
        return field.dtype if own else self._row_dtype

    def _keep_numbers(self, resume: bool) -> None:
        """Steps and the like, one row each, in the same store: they commit with the state."""
        tables = self._live()
        name = self._prefix + "numbers"
        store = tables.home.store
        rows = len(self._state.numbers)
        if not resume:
            if name in store:
                store.remove(name)
            store.create(name, rows=rows, dim=1, dtype="float64")
        table = store[name]
        if table.shape != (rows, 1):
            raise ValueError(f"table {name!r} of {str(store.path)!r} is of another optimizer")
        self._numbers = Variable(table, (), torch.float64, torch.device("cpu"))

    def _fields(self) -> dict[str, Variable]:
        variables = self._live().variables
        return {name: variables[self._prefix + name] for name in self._state.fields}

    def _take_numbers(self, values: dict[str, float]) -> None:
        """Have the optimizer go on from these steps, now or when it has a state."""
        self._loaded = values
        live = self._live_state
        for name, value in values.items():
            if name in live:
                live[name] = _number_like(live[name], value)

    # --- batches ----------------------------------------------------------------------------------

    def beforeForwardPass(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Give the optimizer the state of the rows of a batch; see the model factories for ids.

        What is one number for all rows, such as `step`, stays in the optimizer. Raises RowIdError.
        """
        fields = self._fields()
        device = self._param.device
        reach = next(iter(fields.values()))._reach() if fields else torch.device("cpu")
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, reach)
        rows = {name: variable.gather(ids) for name, variable in fields.items()}
        live = self._live_state
        # The first buffer of SGD is the gradient, undampened: it makes its own.
        own = self._group.get("dampening") or not self._state.complete
        if (
            self._row_steps is None
            and self._untouched
            and own
            and not any(name in live for name in fields)
        ):
            return
        for name, value in rows.items():
            live[name] = value.to(device, self._state.fields[name].dtype)
        for name, number in self._state.numbers.items():
            if name not in live:
                first = number.clone() if isinstance(number, Tensor) else number
                live[name] = _number_like(first, self._loaded[name]) if self._loaded else first

    def afterOptimizerStep(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> None:
        """Write the optimizer's state back to the rows of the same ids.

        Raises ValueError if there are not as many ids as rows in it, RowIdError.
        """
        fields = self._fields()
        reach = next(iter(fields.values()))._reach() if fields else torch.device("cpu")
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, reach)
        live = self._live_state
        held = {name: live[name] for name in fields if isinstance(live.get(name), Tensor)}
        for name, value in held.items():
            if value.shape[0] != ids.numel():
                raise ValueError(
                    f"{ids.numel()} ids, but {name!r} has {value.shape[0]} rows: "
                    "give afterOptimizerStep the ids that beforeForwardPass got"
                )
        for name, value in held.items():
            fields[name].scatter(ids, value.to(fields[name].dtype))
        if held or not fields:
            self._untouched = False
        if self._numbers is not None:
            self._numbers._table.write(0, self._number_values()[:, None])

    def prefetch(self, retrievedPosIndexes: Any, retrievedNegIndexes: Any = None) -> list[Prefetch]:
        """Read the state of a batch to come into memory while this one computes. Returns at once.

        A hint, as Table.prefetch is, whose handles this returns; they may be ignored. Raises
        RowIdError.
        """
        ids = flat_ids(retrievedPosIndexes, retrievedNegIndexes, torch.device("cpu"))
        return [variable.table.prefetch(ids) for variable in self._fields().values()]

    def _number_values(self) -> NDArray[np.float64]:
        live = self._live_state
        values = [
            live.get(name, self._loaded.get(name, first))
            for name, first in self._state.numbers.items()
        ]
        return np.array([float(v) for v in values], np.float64)

    # --- all rows ---------------------------------------------------------------------------------

    def getNumpyVersion(self) -> dict[str, NDArray[Any]]:
        """The state of all rows as NumPy arrays in memory, by name."""
        return {name: variable.numpy() for name, variable in self._fields().items()}

    def _small(self) -> dict[str, NDArray[np.float64]]:
        return {
            name: np.array(value)
            for name, value in zip(self._state.numbers, self._number_values(), strict=True)
        }

    def _check_names(self, found: Any, file: Any) -> None:
        missing = [name for name in self._state.fields if name not in found]
        if missing:
            raise ValueError(
                f"{str(file)!r} has no {', '.join(map(repr, missing))}, which "
                f"{type(self.given_optimizer).__name__} keeps; it has {sorted(found)}"
            )

    def _check_field(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, file: Any
    ) -> None:
        field = self._state.fields[name]
        wanted = (self.total_classes, *field.row_shape)
        kind = self._kept(field)
        if tuple(shape) != wanted:
            raise ValueError(
                f"{name!r} of {str(file)!r} has the shape {tuple(shape)}, the state is {wanted}"
            )
        if dtype != kind:
            raise TypeError(f"{name!r} of {str(file)!r} is of {dtype}, the state is {kind}")


class _Numpy(OptimizerSwitcher):
    """Files of NumPy, as the families that were CuPy's have them."""

    def saveCupy(self, saveFileName: Any) -> None:
        """Write state and steps to a .npz file, in blocks: an array for each name.

        The file appears under its name, to which ".npz" is added if it lacks it, when it is
        complete. `numpy.load(file)["exp_avg"]` reads it.
        """
        _files.save_npz(saveFileName, {**self._fields(), **self._small()})

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Take state and steps from what saveCupy() wrote, in blocks: training goes on from there.

        Raises ValueError (names, shape), TypeError (dtype): nothing has changed then.
        """
        with _files.Archive(loadFileName) as archive:
            self._check_names(archive.names, archive.path)
            for name in self._state.fields:
                with archive.open(name) as (shape, dtype, _):
                    kind = as_tensor(np.empty(0, dtype)).dtype if dtype.kind != "V" else None
                    self._check_field(name, shape, kind or torch.bfloat16, archive.path)
            if self._tables is None:
                self._make()
            for name, variable in self._fields().items():
                with archive.open(name) as (shape, dtype, entry):
                    variable.fill(_Stream(entry, shape, dtype))
            numbers = {
                name: float(archive.read(name))
                for name in self._state.numbers
                if name in archive.names
            }
        self._take_numbers(numbers)
        self._untouched = False

    @property
    def CUPYcorpi(self) -> list[Variable]:
        """Live handles of the states, in the order of optVarList."""
        return list(self._fields().values())


class _Stream:
    """Rows of an archive, from the first to the last."""

    def __init__(self, entry: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._entry = entry
        self.shape = shape
        self._dtype = dtype

    def __getitem__(self, key: slice) -> Any:
        rows = min(key.stop, self.shape[0]) - key.start
        row_bytes = int(np.prod(self.shape[1:])) * self._dtype.itemsize
        data = self._entry.read(rows * row_bytes)
        if len(data) != rows * row_bytes:
            raise ValueError("the file ends before its last row")
        if self._dtype.kind == "V":
            bits = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
            return bits.reshape(rows, *self.shape[1:])
        return np.frombuffer(bytearray(data), self._dtype).reshape(rows, *self.shape[1:])


class _Torch(OptimizerSwitcher):
    """Files of torch, as the families of PyTorch tensors have them."""

    def saveTorch(self, saveFileName: Any) -> None:
        """torch.save() of {name: CPU tensor} with the state, and the steps.

        torch.load(weights_only=True) reads it. Goes through temporary files beside it, not through
        memory.
        """
        small = {
            name: torch.tensor(float(value), device="cpu") for name, value in self._small().items()
        }
        _files.save_torch(saveFileName, dict(self._fields()), small)

    def loadTorch(self, loadFileName: PathLike) -> None:
        """Take state and steps from what saveTorch() wrote: training goes on from there.

        A list of tensors, as SpeedTorch saved it, has the states in the order of optVarList, and no
        steps. Raises ValueError (names, shape), TypeError (dtype): nothing has changed then.
        """
        found = _files.load_torch(loadFileName)
        if isinstance(found, list) and len(found) == len(self.optVarList):
            found = dict(zip(self.optVarList, found, strict=True))
        if not isinstance(found, dict):
            raise TypeError(
                f"{str(loadFileName)!r} has no state of {len(self.optVarList)} tensors, "
                f"but a {type(found).__name__}"
            )
        self._check_names(found, loadFileName)
        for name in self._state.fields:
            self._check_field(name, tuple(found[name].shape), found[name].dtype, loadFileName)
        if self._tables is None:
            self._make()
        for name, variable in self._fields().items():
            variable.fill(found[name])
        self._take_numbers(
            {name: float(found[name]) for name in self._state.numbers if name in found}
        )
        self._untouched = False

    def getTorchVar(self) -> list[Variable]:
        """Live handles of the states, in the order of optVarList."""
        return list(self._fields().values())


class OptimizerFactory(_Numpy):
    """Switches an optimizer's state between that of all rows and that of a batch; was CuPy's.

    Any optimizer of torch that treats every row, or element, for itself: SGD with momentum,
    Adagrad, Adadelta, Adam, AdamW, NAdam, RAdam, SparseAdam, Adamax, RMSprop, Rprop, ASGD, and
    others of the kind, with all their options. What they keep is found out by a step of a second
    one.

    Args:
        given_optimizer: the optimizer, of the model's parameters; any order, any groups.
        total_classes: rows in all.
        embed_dimension: elements of a row.
        model: the model.
        variable_name: dotted name of the module whose weight it is, "u_embeddings", or of the
            parameter, "u_embeddings.weight".
        dtype: float32, float64, float16 or bfloat16, of the state that is kept.
        CPUPinn: kept, and needed no more.
        directory, memory, device, store: as for ModelFactory.
        name: beginning of the tables' names in a store that is given; None: variable_name.
        step: "global": a row that comes late is stepped as if it had been there from the beginning,
            as in SpeedTorch. "row": each row by its own steps, as a parameter of its own would be;
            rows of a batch that have had as many steps are stepped together, which takes a step for
            each number. What the optimizer has once for a parameter, `step` and the like, is a
            state of each row then, and so is `row_steps`.

    Raises TypeError, ValueError (no such variable, not in the optimizer, an optimizer that mixes
    rows), which say what is wrong: there are no half-made objects.
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        step: str = "global",
    ) -> None:
        self.CPUPinn = CPUPinn
        self._begin(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            step=step,
        )

    def getCupyVar(self) -> list[Variable]:
        """Live handles of the states, in the order of optVarList."""
        return list(self._fields().values())


class PytorchOptimizerFactory(_Torch):
    """Switches an optimizer's state between that of all rows and that of a batch.

    Args:
        deviceType: "cuda" needs a device (CudaError without one), "cpu" does not.
        pinType: kept, and needed no more.
        The others are those of OptimizerFactory.
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        step: str = "global",
    ) -> None:
        self.deviceType = deviceType
        self.pinType = pinType
        self._place, named = device_type(deviceType)
        self._begin(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            directory=directory,
            memory=memory,
            device=named if device is None and store is None else device,
            store=store,
            name=name,
            step=step,
        )

    @property
    def pytorchGPUVar(self) -> list[Variable]:
        """`getTorchVar()`."""
        return self.getTorchVar()


class GPUPytorchOptimizerFactory(_Torch):
    """Switches an optimizer's state between that of all rows and that of a batch.

    Needs a CUDA device (CudaError without one), unless it is given device="cpu". The arguments are
    those of OptimizerFactory, without CPUPinn.
    """

    _place = "cuda"

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        step: str = "global",
    ) -> None:
        self._begin(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            step=step,
        )

    @property
    def pytorchGPUVar(self) -> list[Variable]:
        """`getTorchVar()`."""
        return self.getTorchVar()


class CPUPytorchOptimizerFactory(_Torch):
    """Switches an optimizer's state between that of all rows and that of a batch.

    Works with and without a GPU. The arguments are those of OptimizerFactory, without CPUPinn.
    """

    _place = "cpu"

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        step: str = "global",
    ) -> None:
        self._begin(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            step=step,
        )

    @property
    def pytorchCPUVar(self) -> list[Variable]:
        """`getTorchVar()`."""
        return self.getTorchVar()


class OptimizerFactoryMM(_Numpy):
    """Switches an optimizer's state between files with that of all rows and that of a batch.

    The state is in "VARIABLEOPTIMIZERn.memmap/STATE.npy" of the working directory, n the first
    number that is free, and, as links, in "VARIABLEOPTIMIZERn.memmapSTATE.cpy.npy". The files have
    what training did after `flush()`, `close()`, or the end of the process.

    Args:
        directory: instead of that.
        The others are those of OptimizerFactory.
    """

    def __init__(
        self,
        given_optimizer: torch.optim.Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        directory: PathLike | None = None,
        memory: int | str | None = None,
        device: Any = None,
        store: Store | None = None,
        name: str | None = None,
        step: str = "global",
    ) -> None:
        self.CPUPinn = CPUPinn
        self.fileName: str | None = None
        self._numbered = directory is None and store is None
        self._begin(
            given_optimizer,
            total_classes,
            embed_dimension,
            model,
            variable_name,
            dtype,
            directory=directory,
            memory=memory,
            device=device,
            store=store,
            name=name,
            step=step,
        )
        self.diskname = str(variable_name).removesuffix(".weight") + type(given_optimizer).__name__

    def _make(self, *, resume: bool = False) -> None:
        made = None
        if self._numbered and self._directory is None:
            if resume:
                raise ValueError("resume() needs directory=, the one whose state is to be used")
            made = first_free(self.diskname, ".memmap")
            self._directory = made
        try:
            super()._make(resume=resume)
        except BaseException:
            if made is not None:
                self._directory = None
                try_remove(made)
            raise
        for name, variable in self._fields().items():
            if self._state.fields[name].first != 0 and not resume:
                variable.table.materialize()
            if made is not None:
                link_file(variable.table.path, Path(f"{made}{name}.cpy.npy"))
        if made is not None:
            self.fileName = str(made)

    def getCupyMM(self) -> list[Variable]:
        """Live handles of the states, in the order of optVarList."""
        return list(self._fields().values())

    @property
    def CUPYmemmap(self) -> list[Variable]:
        """`getCupyMM()`."""
        return self.getCupyMM()


def _parameter(model: nn.Module, variable_name: Any) -> Tensor:
    if not isinstance(variable_name, str):
        raise TypeError(f"variable_name must be a string, not {variable_name!r}")
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in (f"{variable_name}.weight", variable_name):
        if name in named:
            return named[name]
    raise ValueError(
        f"the model has no variable {variable_name!r}; its parameters are {', '.join(named)}"
    )


def _group(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(own is param for own in group["params"]):
            return group
    raise ValueError(
        f"the weight of {name!r} is not one of those the {type(optimizer).__name__} was made with"
    )
