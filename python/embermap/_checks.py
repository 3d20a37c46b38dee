"""Checks of single arguments, with errors that name the argument and its value."""

from __future__ import annotations

import operator
from dataclasses import fields
from numbers import Real
from typing import Any

from . import _core


def numbers(options: Any) -> None:
    """Every field of a dataclass of hyperparameters is a number, or a bool where it says so."""
    for entry in fields(options):
        value = getattr(options, entry.name)
        flag = entry.type in ("bool", bool)
        if isinstance(value, bool) != flag or not isinstance(value, bool if flag else Real):
            wanted = "True or False" if flag else "a number"
            name = f"{entry.name} of {type(options).__name__}"
            raise TypeError(f"{name} must be {wanted}, not {value!r}")


def number(value: object, name: str) -> float:
    """`value` as a float; an array or a tensor of one element will do."""
    plain: Any = value
    if hasattr(value, "item"):
        try:
            plain = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several elements, by library
            plain = None
    if isinstance(plain, bool | str | bytes) or not hasattr(plain, "__float__"):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(plain)
    except OverflowError:
        raise ValueError(f"{name} is too large: {value!r}") from None


def integer(value: object, name: str, *, most: int = 2**63 - 1) -> int:
    """`value` as an int in [0, most]."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not 0 <= number <= most:
        raise ValueError(f"{name} must be from 0 to {most}, not {number}")
    return number


def size(value: object, name: str) -> int:
    """Bytes of an int or of a text such as "8GiB"."""
    if isinstance(value, str):
        return _core.parse_size(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f'{name} must be a number of bytes or a text like "8GiB", not {value!r}')
    return integer(value, name)
