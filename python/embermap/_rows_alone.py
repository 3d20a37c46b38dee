"""Whether an optimizer of torch treats each row of a weight for itself, as training by batches of
rows needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

REASON = (
    "what it does to a row depends on the other rows, so that rows cannot be trained in batches "
    "of their own"
)


def mixes_rows(
    make: Callable[[nn.Parameter], torch.optim.Optimizer],
    dim: int,
    dtype: Any,
    device: torch.device,
) -> bool:
    """Whether the steps of a row depend on what weights and gradients other rows have.

    Two optimizers step weights of three rows that differ in the last one alone. Random numbers that
    they draw are the same; those of the caller's are left alone. Raises what making an optimizer or
    its step raises.

    Args:
        make: an optimizer over one parameter.
        dim, dtype, device: of the rows.
    """
    outcomes = [_outcome(make, dim, dtype, device, last) for last in (0, 1)]
    return not torch.equal(outcomes[0].nan_to_num(), outcomes[1].nan_to_num())


def _outcome(
    make: Callable[[nn.Parameter], torch.optim.Optimizer],
    dim: int,
    dtype: Any,
    device: torch.device,
    last: int,
) -> Tensor:
    """The first two rows after two steps."""
    numbers = torch.Generator(device="cpu").manual_seed(1)
    weights, *gradients = (
        torch.randn(4, dim, generator=numbers, device="cpu").to(dtype) for _ in range(3)
    )
    rows = [0, 1, 2 + last]
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # Not torch.manual_seed, which sets the generators of all devices.
        torch.default_generator.manual_seed(1)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(1)
        weight = nn.Parameter(weights[rows].to(device))
        optimizer = make(weight)
        for gradient in gradients:
            weight.grad = gradient[rows].to(device)
            try:
                optimizer.step()
            except RuntimeError:  # takes sparse gradients only
                weight.grad = weight.grad.to_sparse(1)
                optimizer.step()
    return weight.detach()[:2]
