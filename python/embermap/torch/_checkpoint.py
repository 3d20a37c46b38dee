"""The dense part of a model in a file, together with the commits of its tables it belongs to."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import _notes
from .._store import Store
from ._modules import TableModule
from ._swap import Swap

_VERSION = 1
_KEY = "embermap.torch"  # in the note of a commit: the token of the file


class Checkpoint(NamedTuple):
    """What `save` wrote, or `load` found."""

    commits: list[int]  # of the stores, in the order of the model's modules
    note: dict[str, Any] | None  # what `save` was given


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    store: Store | Iterable[Store] | None = None,
    note: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Commit the tables of a model and write the rest of it to a file: they belong together.

    Whatever happens meanwhile, `load` finds the last commit and the file of that commit: the file
    is complete, under another name ("PATH.next"), before the commit, and gets its own after it. So
    a run that is killed goes on from the last `save`, if nothing has committed since: the store
    does by itself where its redo log is full, unless it was opened with autocommit=False or a
    larger `log_limit`. That is for one store; a crash between the commits of several leaves them at
    different moments, which `load` says.

    Args:
        model: any module; its `state_dict()` goes to the file, which for tables is next to nothing.
        path: the file, replaced. `torch.load(path, weights_only=True)` reads it: a dict of "model",
            "metadata" (of the model's state), "optimizer", "rng" (torch's random numbers), "stores"
            (of each: "path", "commit", "tables"), "note", "token", "version". C++ reads it too
            (`nn/checkpoint.hpp`), but for "optimizer".
        optimizer: whatever has a `state_dict()`: optimizers of torch and embermap, `Swap`,
            schedulers; or a list or dict of them.
        store: stores beside those whose tables the model has.
        note: part of the commits and of the file, as for `Store.commit`.

    Returns the numbers of the commits, and the note.

    Raises: ValueError (no store; note; a PATH.next that is no such file), TypeError (a state that
    `weights_only=True` would not read; note), PermissionError (a store open read-only), OSError.
    The last commit and its file are then still together.
    """
    stores = _stores(model, store)
    if not stores:
        raise ValueError("neither the model nor store= has a table or store to commit")
    for each in stores:
        if not each.writable:
            raise PermissionError(f"store {str(each.path)!r} is open read-only")
    plain = None if note is None else _notes.value(_notes.text(note))
    if plain is not None and _KEY in plain:
        raise ValueError(f"the key {_KEY!r} of a note is for embermap itself")
    token = secrets.token_hex(16)
    state = model.state_dict()
    content = {
        "version": _VERSION,
        "token": token,
        "model": dict(state),  # a plain dict, which C++ reads as well
        "metadata": {key: dict(value) for key, value in getattr(state, "_metadata", {}).items()},
        "optimizer": _states(optimizer),
        "rng": _random_state(),
        "stores": [_of_store(each, each.commit_number + 1) for each in stores],
        "note": plain,
    }
    file = Path(os.fsdecode(path)).absolute()
    unfinished = _next(file).exists() and _fits(_read_next(file), stores)
    _write(content, _part(file))
    if unfinished:
        _next(file).replace(file)  # of a run that ended between its commit and this
    _part(file).replace(_next(file))
    _sync_folder(file)
    numbers = [each.commit({**(plain or {}), _KEY: token}) for each in stores]
    if numbers != [found["commit"] for found in content["stores"]]:  # another thread committed
        content["stores"] = [
            _of_store(each, number) for each, number in zip(stores, numbers, strict=True)
        ]
        _write(content, _part(file))
        _part(file).replace(_next(file))
    _next(file).replace(file)
    _sync_folder(file)
    return Checkpoint(numbers, plain)


def load(
    model: nn.Module,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    store: Store | Iterable[Store] | None = None,
    *,
    map_location: Any = None,
    strict: bool = True,
    rng: bool = False,
) -> Checkpoint:
    """Bring a model, and what `save` was given with it, to what the file has.

    Its stores must be open at the commit of the file, for writing or read-only. A store that has
    gone on cannot go back: a snapshot (`Store.snapshot`) keeps what may be wanted again.

    Args:
        model: built as for `save`, over the same tables.
        path: the file.
        optimizer: as for `save`; None leaves what the file has of them.
        store: as for `save`.
        map_location, strict: as for `torch.load` and `Module.load_state_dict`.
        rng: set torch's random numbers, of the host and of CUDA devices, to what they were.

    Returns the numbers of the commits, and the note that `save` was given.

    Raises: FileNotFoundError, ValueError (a store at another commit, changes since it, another
    model or other optimizers; nothing has been changed then), RuntimeError (`load_state_dict`).
    """
    file = Path(os.fsdecode(path)).absolute()
    stores = _stores(model, store)
    candidates = [_read(each, map_location) for each in (_next(file), file) if each.exists()]
    if not candidates:
        raise FileNotFoundError(2, "no checkpoint", str(file))
    content = next((each for each in candidates if _fits(each, stores)), candidates[-1])
    _check(content, stores, file)
    saved = content["optimizer"]
    pairs = [] if optimizer is None else list(_pairs(optimizer, saved, file))
    model.load_state_dict(_state_of(content), strict=strict)
    for target, state in pairs:
        target.load_state_dict(state)
    if rng:
        torch.set_rng_state(content["rng"]["cpu"].cpu())
        if content["rng"]["cuda"]:
            torch.cuda.set_rng_state_all([state.cpu() for state in content["rng"]["cuda"]])
    return Checkpoint([found["commit"] for found in content["stores"]], content["note"])


# --- stores ---------------------------------------------------------------------------------------


def _stores(model: nn.Module, more: Store | Iterable[Store] | None) -> list[Store]:
    """Those of a model's tables in the order of its modules, then those given."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    found = [part.table._store for part in model.modules() if isinstance(part, TableModule)]
    found += [more] if isinstance(more, Store) else list(more or ())
    for each in found:
        if not isinstance(each, Store):
            raise TypeError(f"store must be an embermap.Store, or several, not {each!r}")
    return list({id(each._session): each for each in found}.values())


def _of_store(store: Store, commit: int) -> dict[str, Any]:
    tables = {}
    for name in store:
        table = store[name]
        tables[name] = {
            "rows": table.rows,
            "dim": table.dim,
            "dtype": table._dtype,
            "step": table.step,
        }
    return {"path": str(store.path), "commit": commit, "tables": tables}


def _token(note: Mapping[str, Any] | None) -> Any:
    return None if note is None else note.get(_KEY)


def _fits(content: dict[str, Any], stores: list[Store]) -> bool:
    """Whether the file is of the commits that the stores are at."""
    return len(content["stores"]) == len(stores) and all(
        _token(store.note) == content["token"] for store in stores
    )


def _check(content: dict[str, Any], stores: list[Store], file: Path) -> None:
    """Raise ValueError unless the stores are what the file belongs to."""
    saved = content["stores"]
    if len(saved) != len(stores):
        raise ValueError(
            f"{str(file)!r} is of {len(saved)} stores, the model and store= have {len(stores)}"
        )
    for store, of in zip(stores, saved, strict=True):
        where = f"store {str(store.path)!r}"
        if _token(store.note) != content["token"]:
            numbers = [
                each.number for each in store.commits() if _token(each.note) == content["token"]
            ]
            if numbers:
                raise ValueError(
                    f"{where} is at commit {store.commit_number}, {str(file)!r} belongs to its "
                    f"commit {numbers[-1]}: the store has gone on since, and cannot go back; take "
                    "a later file, a reader that is still at that commit, or a snapshot of it"
                )
            raise ValueError(
                f"{where} is at commit {store.commit_number}, {str(file)!r} belongs to commit "
                f"{of['commit']} of {of['path']!r}, which is none of its commits: the file is of "
                "another store, or of rows that were never committed"
            )
        for name, table in of["tables"].items():
            if name not in store:
                raise ValueError(f"{where} has no table {name!r} any more")
            now = store[name]
            if now.step != table["step"]:
                raise ValueError(
                    f"{where} has changes since commit {store.commit_number}: table {name!r} is at "
                    f"step {now.step}, not {table['step']}; abandon() it and open it again"
                )
        if store.writable and store.stats()["total"]["dirty_pages"]:
            raise ValueError(
                f"{where} has changes since commit {store.commit_number}, which {str(file)!r} "
                "belongs to; abandon() it and open it again"
            )


# --- states ---------------------------------------------------------------------------------------


def _target(part: Any) -> Any:
    """What has the state of something that was given as an optimizer."""
    if isinstance(part, Swap):
        return part.optimizer
    if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
        raise TypeError(f"optimizer must have a state_dict, or be several that have, not {part!r}")
    return part


def _states(optimizer: Any) -> Any:
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        return {name: _target(part).state_dict() for name, part in optimizer.items()}
    if isinstance(optimizer, list | tuple):
        return [_target(part).state_dict() for part in optimizer]
    return _target(optimizer).state_dict()


def _pairs(optimizer: Any, saved: Any, file: Path) -> Iterable[tuple[Any, Any]]:
    """What was given beside its state in the file."""
    if saved is None:
        raise ValueError(f"{str(file)!r} has no state of optimizers")
    if isinstance(optimizer, Mapping):
        if not isinstance(saved, dict) or set(saved) != set(optimizer):
            there = f"{len(saved)} without names" if isinstance(saved, list) else sorted(saved)
            raise ValueError(
                f"{str(file)!r} has the states {there}, optimizer= names {sorted(optimizer)}"
            )
        return [(_target(part), saved[name]) for name, part in optimizer.items()]
    if isinstance(optimizer, list | tuple):
        if not isinstance(saved, list) or len(saved) != len(optimizer):
            there = f"{len(saved)} states" if isinstance(saved, list) else "no list of states"
            raise ValueError(f"{str(file)!r} has {there}, optimizer= a list of {len(optimizer)}")
        return [(_target(part), state) for part, state in zip(optimizer, saved, strict=True)]
    target = _target(optimizer)
    if isinstance(saved, list):
        raise ValueError(f"{str(file)!r} has a list of {len(saved)} states, optimizer= is one")
    return [(target, saved)]


def _state_of(content: dict[str, Any]) -> Any:
    """The model's state with what modules say of its version."""
    state = content["model"]
    if "metadata" not in content:  # as torch has it, or from C++
        return state
    state = OrderedDict(state)
    state._metadata = OrderedDict(content["metadata"])  # type: ignore[attr-defined]
    return state


def _random_state() -> dict[str, Any]:
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if begun else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


# --- files ----------------------------------------------------------------------------------------


def _next(file: Path) -> Path:
    return file.with_name(f"{file.name}.next")


def _part(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")


class _Writer:
    """A file that keeps its error: torch makes another one of it, without errno."""

    def __init__(self, out: io.FileIO) -> None:
        self._out = out
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        count = len(rest)
        try:
            while rest:
                rest = rest[self._out.write(rest) :]
        except OSError as error:
            self.error = error
            raise
        return count

    def flush(self) -> None:
        """There is nothing to flush."""


def _write(content: dict[str, Any], file: Path) -> None:
    """A complete, durable file, or none."""
    try:
        with file.open("wb", buffering=0) as out:
            writer: Any = _Writer(out)
            try:
                torch.save(content, writer)
            except RuntimeError as error:
                if writer.error is None:
                    raise
                failed = writer.error
                raise OSError(failed.errno, failed.strerror, str(file)) from error
            os.fsync(out.fileno())
        try:
            torch.load(file, map_location="meta", weights_only=True)
        except Exception as error:
            found = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = found[1] if found else str(error)
            raise TypeError(
                f"the state holds what torch.load(weights_only=True) does not read: {what}"
            ) from error
    except BaseException:
        with contextlib.suppress(OSError):
            file.unlink()
        raise


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _read(file: Path, map_location: Any = "cpu") -> dict[str, Any]:
    try:
        content: Any = torch.load(file, map_location=map_location, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch has many for what is no file of its own, cut short, or empty
        raise ValueError(
            f"{str(file)!r} is not a file of embermap.torch.save: {_first_line(error)}"
        ) from error
    keys = ("version", "token", "stores", "model", "optimizer", "rng", "note")
    if not isinstance(content, dict) or not all(key in content for key in keys):
        raise ValueError(f"{str(file)!r} is not a file of embermap.torch.save")
    if not isinstance(content["version"], int) or not isinstance(content["stores"], list):
        raise ValueError(f"{str(file)!r} is not a file of embermap.torch.save")
    if content["version"] > _VERSION:
        raise ValueError(
            f"{str(file)!r} is of version {content['version']}; this embermap reads {_VERSION}"
        )
    return content


def _read_next(file: Path) -> dict[str, Any]:
    """What an interrupted `save` left. Raise ValueError for a file of somebody else's."""
    try:
        return _read(_next(file))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{str(_next(file))!r} is in the way of {str(file)!r}, for which that name is needed: "
            f"{error}; move it away"
        ) from error


def _sync_folder(file: Path) -> None:
    """Make a rename durable."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
