"""Checks of single arguments, with errors that name the argument and its value."""

from __future__ import annotations

import dataclasses
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from . import _core, _dtypes


def numbers(options: Any) -> None:
    """Every field of a dataclass of hyperparameters has the type that it says: float, bool, a pair
    of numbers, a number or None, or one of some words.
    """
    for entry in dataclasses.fields(options):
        value = getattr(options, entry.name)
        name = f"{entry.name} of {type(options).__name__}"
        kind = str(entry.type if isinstance(entry.type, str) else entry.type.__name__)
        if kind == "StepOf":
            if value not in ("global", "row"):
                error = ValueError if isinstance(value, str) else TypeError
                raise error(f'{name} must be "global" or "row", not {value!r}')
        elif kind.startswith("tuple"):
            if (
                not isinstance(value, tuple | list)
                or len(value) != 2
                or not all(_is_number(part) for part in value)
            ):
                raise TypeError(f"{name} must be two numbers, not {value!r}")
            object.__setattr__(options, entry.name, tuple(value))
        elif kind == "bool":
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        elif not _is_number(value) and not (value is None and kind.endswith("None")):
            raise TypeError(f"{name} must be a number, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


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


def columns(dim: object) -> int:
    """`dim` of a file's rows as the core takes it: 0 where the file tells how many there are."""
    if dim is None:
        return 0
    number = integer(dim, "dim")
    if number == 0:
        raise ValueError("dim must be at least 1")
    return number


Reading = tuple[str | None, bool, bool, str | None, int, int]
Selection = tuple[int, int, bytes, int]

_ALL = 2**64 - 1


def reading(
    source_dtype: Any,
    allow_external: object,
    follow_links: object,
    format: object,  # noqa: A002
    dim: object,
    offset: object,
) -> Reading:
    """How a file is read, as the core takes it."""
    return (
        None if source_dtype is None else _dtypes.dtype_name(source_dtype),
        bool(allow_external),
        bool(follow_links),
        None if format is None else str(format),
        columns(dim),
        integer(offset, "offset"),
    )


def count_rows(src: str | os.PathLike[str], how: Reading, arrays: list[tuple[str, str]]) -> int:
    """How many rows a file has; with `arrays`, as `pairs` gives them, the first of these in it."""
    location = os.fsencode(src)
    if arrays:
        location += b":" + os.fsencode(arrays[0][1])
    core = _core.FileRows(location, how)
    try:
        return core.rows
    finally:
        core.close()


def row_range(rows: object, count: Callable[[], int]) -> tuple[int, int]:
    """(first, end) of a slice or a pair, end 2**64 - 1 for all. `count` says how many rows there
    are, asked only where a number counts from the end.
    """
    if rows is None:
        return 0, _ALL
    if not isinstance(rows, slice) and not (isinstance(rows, tuple) and len(rows) == 2):
        raise TypeError(f"rows must be a slice or (first, end), not {rows!r}")
    part = rows if isinstance(rows, slice) else slice(*rows)
    if part.step not in (None, 1):
        raise ValueError(f"rows must be consecutive, not {rows!r}")
    try:
        first = 0 if part.start is None else operator.index(part.start)
        end = _ALL if part.stop is None else operator.index(part.stop)
    except TypeError:
        raise TypeError(f"rows must be a slice or (first, end), not {rows!r}") from None
    if first < 0 or end < 0:
        first, end, _ = part.indices(count())
    first, end = min(first, _ALL), min(end, _ALL)
    return first, max(first, end)


def selection(
    rows: tuple[int, int], order: str | os.PathLike[str] | None, jobs: object
) -> Selection:
    """Which rows, as the core takes it."""
    return (*rows, b"" if order is None else os.fsencode(order), integer(jobs, "jobs", most=256))


def pairs(fields: object) -> list[tuple[str, str]]:
    """A list of names, or {name: what it is of}, as pairs; None: none."""
    if fields is None:
        return []
    if isinstance(fields, str | bytes) or not isinstance(fields, Iterable):
        raise TypeError(f"fields must be a list of names, not {fields!r}")
    found = list(fields.items()) if isinstance(fields, Mapping) else [(n, n) for n in fields]
    if not found:
        raise ValueError("fields names nothing")
    return [(str(name), str(of)) for name, of in found]


def told(found: dict[str, Any]) -> list[str]:
    """Takes the remarks out of what the core says of a copy, each once."""
    out: list[str] = found.pop("remarks")
    for part in found.get("fields", {}).values():
        out += [text for text in part.pop("remarks") if text not in out]
    return out


def size(value: object, name: str) -> int:
    """Bytes of an int or of a text such as "8GiB"."""
    if isinstance(value, str):
        return _core.parse_size(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f'{name} must be a number of bytes or a text like "8GiB", not {value!r}')
    return integer(value, name)


def tell(remarks: list[str]) -> None:
    """Warn the caller's caller of what rows do not show of the file they come from."""
    for remark in remarks:
        warnings.warn(remark, UserWarning, stacklevel=3)


def path(given: str | bytes | os.PathLike[str]) -> Path:
    """The absolute path, so that os.chdir() does not matter later."""
    where = os.fsdecode(given)
    if "\0" in where:
        raise ValueError(f"a path cannot hold a null character: {where!r}")
    return Path(where).absolute()
