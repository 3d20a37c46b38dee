"""Names of dtypes: what people write, what the core calls them, what NumPy has."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64")
ITEM_BYTES = dict(zip(DTYPES, (4, 2, 2, 8, 1, 1, 4, 8), strict=True))
FLOATING = frozenset(("float32", "float16", "bfloat16", "float64"))
HALF = frozenset(("float16", "bfloat16"))


def bfloat16() -> np.dtype[Any]:
    """NumPy's bfloat16, which ml_dtypes adds to it. Raises ImportError if that is not installed."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "bfloat16 in NumPy arrays needs the package ml_dtypes: pip install ml_dtypes "
            "(torch tensors work without it)"
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a core dtype name."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def array_dtype_name(dtype: np.dtype[Any]) -> str:
    """The core's name of a NumPy dtype in native byte order; otherwise NumPy's, for messages."""
    if dtype.isnative and dtype.name in ITEM_BYTES:
        return str(dtype.name)
    return str(dtype) if dtype.isnative else dtype.str


def is_torch_dtype(dtype: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, getattr(torch, "dtype", ()))


def dtype_name(dtype: object) -> str:
    """The core's name of what a caller gave as dtype.

    A name, a NumPy dtype or scalar type, `ml_dtypes.bfloat16`, or a torch dtype.
    Raises TypeError listing the dtypes that exist.
    """
    name: str | None = None
    if is_torch_dtype(dtype):
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, str) and dtype in ITEM_BYTES:
        name = dtype  # without asking NumPy, which may not know bfloat16
    elif dtype is not None:
        try:
            name = array_dtype_name(np.dtype(dtype))  # type: ignore[call-overload]
        except (TypeError, ValueError):
            name = None
    if name not in ITEM_BYTES:
        shown = repr(dtype) if name is None or isinstance(dtype, str) else name
        raise TypeError(f"dtype {shown} is not one a table can hold: {', '.join(DTYPES)}")
    return name
