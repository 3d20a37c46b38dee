"""Whether a gradient is nobody else's, so that it may be kept as it is, without a copy.

torch's own parameters take a gradient over where nothing else refers to it. What counts references
is no part of torch's interface, and how many there are depends on how Python calls a function: so
it is tried out first, with gradients of which it is known, and where they cannot be told apart
every gradient is copied.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Signs = tuple[int, int, int]

_WORTH_IT = 4096  # elements; fewer are copied in the time that it takes to look


# A torch without these counts copies.
_CAN_TELL = hasattr(Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")


def is_alone(grad: Tensor) -> bool:
    """From a function that `Function.backward` gives its gradient to, in a statement of its own.

    Where it is called from counts: arguments of a call that is being made are references too.
    """
    if not grad.is_cuda and grad.numel() < _WORTH_IT:
        return False
    if not _CAN_TELL:
        return False
    try:
        return _signs(grad) == _of_one_alone()
    except NotImplementedError:  # a sparse gradient, or one that a transform wraps, has no memory
        return False


def _signs(grad: Tensor) -> _Signs:
    """References to the Python object, to the tensor, and to its memory."""
    return (
        sys.getrefcount(grad),
        grad._use_count(),  # type: ignore[attr-defined]
        torch._C._storage_Use_Count(grad.untyped_storage()._cdata),
    )


class _Trial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, found: list[_Signs]) -> Tensor:
        ctx.found = found
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return _tried(ctx, grad)


def _tried(ctx: Any, grad: Tensor) -> tuple[None, None]:
    ctx.found.append(_as_is_alone(grad))
    return None, None


def _as_is_alone(grad: Tensor) -> _Signs:
    return _signs(grad)


def _signs_of(use: Callable[[Tensor], Any]) -> _Signs:
    found: list[_Signs] = []
    given = torch.zeros(2, requires_grad=True)
    use(_Trial.apply(given, found))  # type: ignore[no-untyped-call]
    (signs,) = found
    return signs


@functools.cache
def _of_one_alone() -> _Signs | None:
    """The signs of a gradient that only its function has; None where they say nothing."""
    kept: list[Tensor] = []

    def hooked(keep: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def use(rows: Tensor) -> None:
            rows.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: kept.append(keep(grad))
            )
            torch.autograd.backward(rows.exp().sum())

        return use

    def given(rows: Tensor) -> None:
        kept.append(torch.ones(2))
        torch.autograd.backward(rows, kept[-1])

    with torch.inference_mode(False), torch.enable_grad():
        alone = _signs_of(lambda rows: torch.autograd.backward(rows.exp().sum()))
        again = _signs_of(lambda rows: torch.autograd.backward(rows.sin().sum()))
        shared = [
            _signs_of(hooked(lambda grad: grad)),
            _signs_of(hooked(lambda grad: grad.detach())),
            _signs_of(hooked(lambda grad: grad.view(1, -1))),
            _signs_of(given),
        ]
    return alone if alone == again and alone not in shared else None
