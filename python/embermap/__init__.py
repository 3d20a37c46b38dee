"""embermap: memory-mapped, out-of-core embedding tables.

    import embermap as em

    with em.open("tables", memory="8GiB") as store:
        items = store.create("items", rows=1_000_000_000, dim=128,
                             optimizer=em.optim.Adagrad(lr=0.05), init=em.init.Normal(0, 0.02))
        rows = items.gather([3, 1, 4])
        items.update([3, 1, 4], gradients)

`embermap.io` reads rows of other programs' files, and `embermap.convert` copies them.
`embermap.torch` has modules and optimizers for PyTorch, `embermap.speedtorch` the classes of
SpeedTorch; they are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core, init, io, optim
from ._errors import (
    BudgetError,
    CorruptError,
    CudaError,
    Error,
    ForkError,
    FormatError,
    LockedError,
    LogFullError,
    NotFoundError,
    RowIdError,
    StaleError,
    StoreNotFoundError,
)
from ._prefetch import Prefetcher
from ._store import Commit, Store, open  # noqa: A004
from ._table import Prefetch, Table, TableView
from .io import convert

if TYPE_CHECKING:
    from . import speedtorch as speedtorch
    from . import torch as torch

__all__ = [
    "BudgetError",
    "Commit",
    "CorruptError",
    "CudaError",
    "Error",
    "ForkError",
    "FormatError",
    "LockedError",
    "LogFullError",
    "NotFoundError",
    "Prefetch",
    "Prefetcher",
    "RowIdError",
    "StaleError",
    "Store",
    "StoreNotFoundError",
    "Table",
    "TableView",
    "__version__",
    "convert",
    "cuda_absence",
    "cuda_devices",
    "init",
    "io",
    "open",
    "optim",
]

__version__ = _core.version()


def cuda_devices() -> int:
    """Number of CUDA devices that can be used now; 0 without driver or in a build without CUDA."""
    return _core.cuda_devices()


def cuda_absence() -> str:
    """Why `cuda_devices()` is 0; empty if it is not."""
    return _core.cuda_absence()


def __getattr__(name: str) -> Any:
    if name in ("speedtorch", "torch"):
        import importlib

        return importlib.import_module(f"embermap.{name}")
    raise AttributeError(f"module 'embermap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "speedtorch", "torch"})
