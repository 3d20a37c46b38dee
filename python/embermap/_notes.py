"""Notes of commits: JSON of what a user gives, and back."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

_MOST_DEEP = 12


def text(note: Mapping[str, Any]) -> str:
    """JSON of a note. Raises TypeError, ValueError naming the key."""
    if not isinstance(note, Mapping):
        raise TypeError(f"note must be a dict, not {note!r}")
    return json.dumps(_plain(note, "note", 1), ensure_ascii=False, allow_nan=False)


def value(text: str) -> dict[str, Any] | None:
    """What text() was given; None for no note."""
    return json.loads(text) if text else None


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MOST_DEEP + 1:
        raise ValueError(f"{where} is nested more than {_MOST_DEEP} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, numbers.Integral):
        number = int(value)
        if not -(2**63) <= number < 2**64:
            raise ValueError(f"{where} is {number}, which 64 bits do not hold")
        return number
    if isinstance(value, numbers.Real):
        real = float(value)
        if not math.isfinite(real):
            raise ValueError(f"{where} is {real}, which JSON does not have")
        return real
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings")
        return {
            _text(key, where): _plain(item, f"{where}[{key!r}]", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if type(value).__name__ == "bool":  # of NumPy
        return bool(value)
    raise TypeError(f"{where} is a {type(value).__name__}, which is no value of JSON")


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where} has {value!r}, which is not valid Unicode") from None
    return value
