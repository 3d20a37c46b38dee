"""How far the optimizers of embermap are from those of torch.optim.

Run as a program it prints a table: each optimizer with several options, each dtype, each way of
training, the largest difference of weights and state as a part of the largest element of its row.
test_optim.py checks the same. With --page it keeps the figures of this device, and makes
docs/parity.md of all that are kept:

    python tests/python/optim_parity.py --page                   # on the CPU
    python tests/python/optim_parity.py --page --device cuda     # where there is a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import embermap as em
import numpy as np
import torch

ROWS, DIM, STEPS = 12, 7, 100
WAYS = ("dense", "rows", "late")
DTYPES = ("float32", "float64")
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
DOCS = Path(__file__).parents[2] / "docs"
FIGURES, PAGE = DOCS / "parity.json", DOCS / "parity.md"


@dataclass(frozen=True)
class Case:
    """An optimizer with options that torch's class of the same name has too."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.kind}({options})"

    def ours(self, **more: Any) -> em.optim.Optimizer:
        made: em.optim.Optimizer = getattr(em.optim, self.kind)(**self.options, **more)
        return made

    @property
    def counts_steps(self) -> bool:
        """Whether `step` says whose steps count."""
        return hasattr(self.ours(), "step")


def _cases() -> list[Case]:
    decay = {"weight_decay": 0.05}
    up = {"maximize": True}
    betas = {"betas": (0.3, 0.95)}
    kinds: dict[str, list[dict[str, Any]]] = {
        "SGD": [
            {},
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, **decay},
            {"lr": 0.1, "momentum": 0.8, "nesterov": True, **decay, **up},
        ],
        "Adagrad": [
            {},
            {"lr": 0.1, "lr_decay": 0.05, **decay},
            {"initial_accumulator_value": 0.5, "eps": 1e-3, **up},
        ],
        "RowWiseAdagrad": [
            {},
            {"lr": 0.1, "lr_decay": 0.05, **decay},
            {"initial_accumulator_value": 0.5, "eps": 1e-3, **up},
        ],
        "Adadelta": [{}, {"rho": 0.7, "eps": 1e-3, **decay}, {"lr": 0.5, "rho": 1.0, **up}],
        "Adam": [
            {},
            {"amsgrad": True, **decay},
            {"lr": 0.02, **betas, "eps": 1e-4, **up},
            {"decoupled_weight_decay": True, **decay},
            {"betas": (0.0, 0.0)},
        ],
        "AdamW": [{}, {"lr": 0.02, "amsgrad": True, **betas}, {"weight_decay": 0.3, **up}],
        "SparseAdam": [{}, {"lr": 0.02, **betas, "eps": 1e-3, **up}],
        "Adamax": [{}, {"lr": 0.02, **betas, "eps": 1e-3, **decay}, up],
        "NAdam": [
            {},
            {"lr": 0.02, **betas, "momentum_decay": 0.1, **decay},
            {"decoupled_weight_decay": True, **decay, **up},
        ],
        "RAdam": [
            {},
            {"lr": 0.02, **betas, "eps": 1e-3, **decay},
            {"betas": (0.9, 0.5)},  # never rectified
            {"decoupled_weight_decay": True, **decay, **up},
        ],
        "ASGD": [
            {},
            {"lr": 0.1, "lambd": 0.01, "alpha": 0.6, "t0": 10, **decay},
            {"t0": 50, **up},
        ],
        "RMSprop": [
            {},
            {"momentum": 0.9, **decay},
            {"alpha": 0.9, "centered": True, "eps": 1e-2},
            {"alpha": 0.8, "centered": True, "momentum": 0.5, "eps": 1e-2, **up},
        ],
        "Rprop": [{}, {"etas": (0.7, 1.5), "step_sizes": (1e-3, 0.1)}, up],
    }
    return [Case(kind, options) for kind, several in kinds.items() for options in several]


CASES = _cases()


class RowWiseAdagrad(torch.optim.Optimizer):
    """torchrec's: as Adagrad, with the mean of a row's squares. For parameters (n, dim)."""

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        maximize: bool = False,
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self.numbers = (lr, lr_decay, weight_decay, eps, maximize)
        for parameter in self.param_groups[0]["params"]:
            start = torch.full_like(parameter[:, :1], initial_accumulator_value)
            self.state[parameter].update(step=torch.zeros(()), sum=start)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        lr, lr_decay, weight_decay, eps, maximize = self.numbers
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            state["step"] += 1
            grad = -parameter.grad if maximize else parameter.grad
            grad = grad + weight_decay * parameter
            state["sum"] += grad.pow(2).mean(1, keepdim=True)
            rate = lr / (1 + (state["step"].item() - 1) * lr_decay)
            parameter.addcdiv_(grad, state["sum"].sqrt() + eps, value=-rate)


class Reference:
    """What torch makes of the same gradients.

    `dense`: one parameter for all rows. `rows`: a parameter a row, which takes a step when it has a
    gradient. `late`: the same, but every step is the number of the table's.
    """

    def __init__(self, case: Case, way: str, weights: torch.Tensor) -> None:
        self.case, self.way, self.taken = case, way, 0
        parts = [weights] if way == "dense" else list(weights.split(1))
        self.parameters = [torch.nn.Parameter(part.clone()) for part in parts]
        made = RowWiseAdagrad if case.kind == "RowWiseAdagrad" else getattr(torch.optim, case.kind)
        self.optimizer = made(self.parameters, **case.options)
        self.mu_product = 1.0

    def step(self, grads: dict[int, torch.Tensor]) -> None:
        """Gradients by row."""
        if self.way == "dense":
            whole = torch.zeros_like(self.parameters[0])
            for row, grad in grads.items():
                whole[row] = grad
            present = {0: whole}
        else:
            present = {row: grad[None] for row, grad in grads.items()}
        for number, parameter in enumerate(self.parameters):
            parameter.grad = present.get(number)
            if parameter.grad is not None and self.case.kind == "SparseAdam":
                parameter.grad = parameter.grad.to_sparse(1)
            if parameter.grad is not None and self.way == "late":
                self._set_step(parameter)
        self.optimizer.step()
        self.taken += 1
        if self.case.kind == "NAdam":
            self.mu_product *= self._mu()

    def _mu(self) -> float:
        group = self.optimizer.param_groups[0]
        power = self.taken if self.way == "late" else 1
        beta: float = group["betas"][0]
        return beta * (1 - 0.5 * 0.96 ** (power * group["momentum_decay"]))

    def _set_step(self, parameter: torch.nn.Parameter) -> None:
        """The parameter's state as if it had taken part in every step, with gradients of 0."""
        kind, group = self.case.kind, self.optimizer.param_groups[0]
        state = self.optimizer.state[parameter]
        if not state:
            if kind in ("Adadelta", "RMSprop", "Rprop") or self.taken == 0:
                return
            if kind == "SGD":
                if group["momentum"]:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                return
            # Torch makes the state in a first step.
            grad, weight = parameter.grad, parameter.detach().clone()
            parameter.grad = torch.zeros_like(grad)
            others = [p for p in self.parameters if p is not parameter]
            kept = [p.grad for p in others]
            for other in others:
                other.grad = None
            self.optimizer.step()
            for other, other_grad in zip(others, kept, strict=True):
                other.grad = other_grad
            parameter.data.copy_(weight)
            parameter.grad = grad
            for value in state.values():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    value.zero_()
        if "step" not in state:
            return
        if torch.is_tensor(state["step"]):
            state["step"].fill_(self.taken)
        else:
            state["step"] = self.taken
        if kind == "NAdam":
            state["mu_product"].fill_(self.mu_product)
        if kind == "ASGD" and self.taken > 0:
            rate = group["lr"] / (1 + group["lambd"] * group["lr"] * self.taken) ** group["alpha"]
            state["eta"].fill_(rate)
            state["mu"].fill_(1 / max(1, self.taken - group["t0"]))

    def values(self, name: str) -> torch.Tensor:
        """Weights, or a field of state: shape (rows, dim), or (rows, 1)."""
        if name == "weight":
            return torch.cat([p.detach() for p in self.parameters])
        found = []
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            value = state[name] if name in state else torch.full_like(parameter, torch.nan)
            found.append(torch.as_tensor(value).to(parameter.dtype).reshape(parameter.shape[0], -1))
        return torch.cat(found)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Torch keeps some of its state in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batches(way: str, dtype: str) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Ids with duplicates and their gradients. Dense: every row is in every batch."""
    rng = np.random.default_rng(11)
    for step in range(STEPS):
        if way == "dense":
            ids = np.concatenate([rng.permutation(ROWS), rng.integers(0, ROWS, 5)])
        else:  # the last rows come late
            ids = rng.integers(0, min(ROWS, 4 + step // 8), 6)
        yield ids, rng.normal(size=(len(ids), DIM)).astype(dtype)


def summed(ids: np.ndarray[Any, Any], grads: np.ndarray[Any, Any]) -> dict[int, torch.Tensor]:
    """The sum of each row's gradients, in order of position."""
    sums: dict[int, torch.Tensor] = {}
    for row, grad in zip(ids.tolist(), torch.from_numpy(grads), strict=True):
        sums[row] = sums[row] + grad if row in sums else grad
    return sums


def train(table: em.Table, reference: Reference, way: str, dtype: str, device: str) -> None:
    for ids, grads in batches(way, dtype):
        if device == "cpu":
            table.update(ids, grads)
        else:
            table.update(torch.from_numpy(ids).to(device), torch.from_numpy(grads).to(device))
        reference.step(summed(ids, grads))


def compare(
    case: Case, way: str, dtype: str, folder: Path, device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """For each field the largest difference, as a part of the largest element of its row, and the
    largest one of those beyond 1e-5 of the value and 1e-6 of the row's largest (else 0).
    """
    options = {"step": "row"} if way == "rows" and case.counts_steps else {}
    with (
        default_dtype(getattr(torch, dtype)),
        em.open(
            folder / f"{way}-{dtype}",
            memory="4MiB",
            threads=2,
            device=None if device == "cpu" else device,
        ) as store,
    ):
        table = store.create(
            f"t{len(store.tables())}",
            rows=ROWS,
            dim=DIM,
            dtype=dtype,
            optimizer=case.ours(**options),
            init=em.init.Normal(),
            seed=3,
        )
        reference = Reference(case, way, torch.from_numpy(table[:]))
        train(table, reference, way, dtype, device)
        found = {}
        for name in table.fields:
            if name == "mu_product" or (name == "step" and case.kind == "SGD"):
                continue  # torch has none, or keeps it in the default dtype
            ours = table.read(field=name).astype(np.float64)
            theirs = reference.values(name).double().numpy()
            if name == "step":
                theirs = np.nan_to_num(theirs)
            if np.isnan(theirs).all(1).any():  # rows that never came have no state there
                came = ~np.isnan(theirs).all(1)
                ours, theirs = ours[came], theirs[came]
            difference = np.abs(ours - theirs)
            most = np.maximum(np.abs(theirs).max(1, keepdims=True), 1e-30)
            bad = ~(difference <= np.maximum(1e-5 * np.abs(theirs), 1e-6 * most))
            found[name] = (
                float((difference / most).max()),
                float(np.where(bad, difference / most, 0).max()),
            )
    return found


def ways_of(case: Case) -> tuple[str, ...]:
    """A dense SparseAdam is one in which all rows are in the gradient."""
    return WAYS if case.counts_steps else ("dense", "rows")


def keep(figures: dict[str, Any]) -> None:
    """Figures of a device beside those of others, and the page of all of them."""
    found = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    found.update(figures)
    FIGURES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: dict[str, Any]) -> str:
    """The page of what was kept: device -> {"torch": its version, "cases": name -> dtype -> way ->
    [largest difference, largest one beyond the limit]}."""
    columns = [(device, dtype) for device in DEVICES for dtype in DTYPES]
    versions = {DEVICES[device]: each["torch"] for device, each in sorted(found.items())}
    made = ", ".join(f"torch {version} on the {device}" for device, version in versions.items())
    lines = [
        "# Optimizers beside torch's",
        "",
        "Made by `python tests/python/optim_parity.py --page` (with `--device cuda` for a GPU's "
        "columns); numbers here are not written by hand.",
        f"Beside {made}.",
        "",
        f"Each optimizer takes {STEPS} steps with these options, ids twice and more in a batch "
        "among them, and torch's takes the same in three ways:",
        "every row in every batch, as one parameter; each row a parameter of its own "
        '(`step="row"`); rows that come late, with the count of steps of',
        "the table. The figure is the largest difference of weights and state there, as a part of "
        "the largest element of its row; `!` would mark one beyond",
        "1e-5 of the value and 1e-6 of the largest element of its row. `RowWiseAdagrad` is beside "
        "torchrec's formula. `tests/python/test_optim.py` checks the same.",
        "",
        "| optimizer | " + " | ".join(f"{DEVICES[d]}, {dtype}" for d, dtype in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for case in CASES:
        cells = []
        for device, dtype in columns:
            ways = found.get(device, {}).get("cases", {}).get(case.name, {}).get(dtype)
            if ways is None:
                cells.append("not measured")
                continue
            most = max(most for most, _ in ways.values())
            cells.append(f"{most:.0e}" + ("!" if any(bad for _, bad in ways.values()) else ""))
        lines.append(f"| `{case.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", help="only this optimizer")
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu", help="default: cpu")
    parser.add_argument("--page", action="store_true", help="keep the figures, make docs/parity.md")
    arguments = parser.parse_args()
    if arguments.page and arguments.kind:
        parser.error("a page is of all optimizers: --page goes without --kind")
    print(f"{STEPS} steps; the largest difference as a part of the largest element of its row")
    print(f"{'optimizer':84} {'dtype':8} " + " ".join(f"{way:>9}" for way in WAYS))
    cases: dict[str, dict[str, dict[str, tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if arguments.kind not in (None, case.kind):
                continue
            for dtype in DTYPES:
                line = f"{case.name:84} {dtype:8}"
                for way in ways_of(case):
                    found = compare(case, way, dtype, Path(folder), arguments.device)
                    most, bad = (max(pair[k] for pair in found.values()) for k in (0, 1))
                    cases.setdefault(case.name, {}).setdefault(dtype, {})[way] = (most, bad)
                    line += f" {most:>8.1e}{'!' if bad else ' '}"
                print(line, flush=True)
    if arguments.page:
        keep({arguments.device: {"torch": torch.__version__, "cases": cases}})


if __name__ == "__main__":
    main()
