"""Whether a gradient is nobody else's, so that it may be kept as it is, without a copy.

torch's own parameters take a gradient over where nothing else refers to it. What counts references
is no part of torch's interface, and how many there are depends on how Python calls a function: so
it is tried out first, with gradients of which it is known, where nobody looks on, and where they
cannot be told apart every gradient is copied. Whoever looks on later, as a debugger that keeps
frames, can only make the counts higher: the gradient is copied.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Signs = tuple[int, ...]

_TRIALS = 8  # Python makes other code of what has run some times
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
        return _signs(grad) in _of_one_alone()
    except NotImplementedError:  # a sparse gradient, or one that a transform wraps, has no memory
        return False


def _signs(grad: Tensor) -> _Signs:
    """References to the Python object, to the tensor, and to its memory.

    A view, as from `rows.unsqueeze(1)`, has the tensor that it is a view of: those to it as well.
    """
    storage = grad.untyped_storage()  # the same object to all of Python, counted once in its memory
    signs = (
        sys.getrefcount(grad),
        grad._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(storage),
        torch._C._storage_Use_Count(storage._cdata),
    )
    base = grad._base
    if base is None:
        return signs
    return (*signs, sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]


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
    given = torch.zeros(2, device="cpu", requires_grad=True)
    use(_Trial.apply(given, found))  # type: ignore[no-untyped-call]
    (signs,) = found
    return signs


class _Trials:
    """The signs of gradients that only their function has, tried out once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signs: frozenset[_Signs] | None = None

    def signs(self) -> frozenset[_Signs]:
        """Of a tensor of its own, and of a view; none of a kind where they say nothing."""
        if self._signs is not None:
            return self._signs
        with self._lock:
            if self._signs is not None or _is_looked_at():
                return self._signs or frozenset()
            # Higher counts than they are would let a gradient of somebody else pass for one that
            # is alone: nothing may hold what the trial has. A thread that Python's `threading` does
            # not know of has neither debugger nor profiler, nor modes of torch; what looks at all
            # threads is looked for before and after.
            found: list[frozenset[_Signs]] = []
            done = _thread.allocate_lock()
            done.acquire()

            def tried() -> None:
                try:
                    found.append(_tried_out())
                finally:
                    done.release()

            try:
                _thread.start_new_thread(tried, ())
            except RuntimeError:  # no more threads
                return frozenset()
            done.acquire()
            if not _is_looked_at():
                self._signs = found[0] if found else frozenset()
            return self._signs or frozenset()


_of_one_alone = _Trials().signs


def _is_looked_at() -> bool:
    """Whether something is told of what all threads of Python do."""
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return monitoring is not None and any(monitoring.get_tool(n) is not None for n in range(6))


def _tried_out() -> frozenset[_Signs]:
    kept: list[Tensor] = []

    def hooked(
        make: Callable[[Tensor], Tensor], keep: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], None]:
        """Somebody keeps something of the gradient."""

        def use(rows: Tensor) -> None:
            rows.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: kept.append(keep(grad))
            )
            torch.autograd.backward(make(rows))

        return use

    def given(rows: Tensor) -> None:
        kept.append(torch.ones(2, device="cpu"))
        torch.autograd.backward(rows, kept[-1])

    def given_of_view(rows: Tensor) -> None:
        kept.append(torch.ones(1, 2, device="cpu"))
        torch.autograd.backward(rows.unsqueeze(0), kept[-1])

    def whole(rows: Tensor) -> Tensor:
        return rows.exp().sum()

    def viewed(rows: Tensor) -> Tensor:
        return rows.unsqueeze(0).exp().sum()

    keeps: list[Callable[[Tensor], Any]] = [
        lambda grad: grad,
        lambda grad: grad.detach(),
        lambda grad: grad.view(1, -1),
        lambda grad: grad._base if grad._base is not None else grad,
        lambda grad: grad.untyped_storage(),
    ]
    with torch.inference_mode(False), torch.enable_grad():
        shared = {_signs_of(given), _signs_of(given_of_view)}
        shared |= {_signs_of(hooked(make, keep)) for make in (whole, viewed) for keep in keeps}
        alone: list[_Signs] = []
        for make in (whole, viewed):
            found = {_signs_of(hooked(make, lambda grad: None)) for _ in range(_TRIALS)}
            if len(found) == 1 and not found & shared:
                alone += found
    return frozenset(alone)
