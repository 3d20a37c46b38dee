"""What all switchers have in common: their tables, their store, their end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import _checks
from .. import init as initializers
from .._store import Store
from . import _home
from ._home import Home, PathLike, Place
from ._rows import Variable, carrier, torch_dtype


class Tables:
    """The tables of one object, and where they are."""

    def __init__(self, home: Home, device: torch.device) -> None:
        self.home = home
        self.device = device
        self.variables: dict[str, Variable] = {}


class Base:
    """What every object of `embermap.speedtorch` has.

    It holds rows in tables of a store: one of its own, or one that it was given (`store=`). Its own
    ends with `close()`, at the end of a `with` block, when the object goes, or with the process. A
    temporary one is removed then; one with a place of its own is committed. An object is not for
    several threads at once.
    """

    _place: Place = "auto"
    _first_steps: ClassVar[str] = ""

    _home: Home | None = None
    _tables: Tables | None = None
    _directory: PathLike | None = None
    _memory: int | str | None = None
    _asked: Any = None
    _store: Store | None = None

    def _settle(
        self, directory: PathLike | None, memory: int | str | None, device: Any, store: Store | None
    ) -> None:
        """Keep where the tables are to be, and refuse what cannot be."""
        kind = type(self).__name__
        if store is not None:
            if not isinstance(store, Store):
                raise TypeError(f"store of {kind} must be an embermap.Store, not {store!r}")
            if directory is not None or memory is not None or device is not None:
                raise ValueError(
                    f"{kind} takes store= or directory=, memory= and device=, not both: "
                    "a store that is open has those already"
                )
        if memory is not None:
            _checks.size(memory, "memory")
        self._directory, self._memory, self._asked, self._store = directory, memory, device, store
        self._check_device()

    def _weight(self) -> Tensor | None:
        """The model's weight, where there is one."""
        return None

    def _check_device(self) -> torch.device:
        if self._store is not None:
            number = self._store.device
            return torch.device("cpu") if number is None else torch.device("cuda", number)
        return _home.choose_device(type(self).__name__, self._place, self._asked, self._weight())

    def _live(self) -> Tables:
        if self._tables is None:
            raise RuntimeError(f"{type(self).__name__} has no rows yet: call {self._first_steps}")
        return self._tables

    # --- making tables ----------------------------------------------------------------------------

    def _open_home(
        self,
        device: torch.device,
        row_bytes: int,
        rows: int,
        *,
        keep: bool = False,
        resume: bool = False,
    ) -> Home:
        if self._store is not None:
            return Home(self, self._store, own=False, scratch=False)
        return Home.open(
            self,
            directory=self._directory,
            memory=self._memory,
            device=device,
            row_bytes=row_bytes,
            rows=rows,
            keep=keep,
            resume=resume,
        )

    def _create(
        self,
        rows: int,
        fields: dict[str, tuple[tuple[int, ...], torch.dtype, initializers.Initializer]],
        seed: int = 0,
        *,
        resume: bool = False,
    ) -> Tables:
        """New tables for `fields` (name -> row shape, dtype, initial rows), in place of older ones.

        With `resume` the ones that are there. Raises FileExistsError, NotFoundError, ValueError.
        """
        device = self._check_device()
        if self._home is None:
            row_bytes = sum(int(np.prod(shape)) * t.itemsize for shape, t, _ in fields.values())
            if resume and self._directory is None and self._store is None:
                raise ValueError("resume() needs directory= or store=, where the rows are")
            self._home = self._open_home(device, row_bytes, rows, resume=resume)
        store = self._home.store
        old = self._tables
        made: list[str] = []
        tables = Tables(self._home, device)
        try:
            for name, (shape, dtype, init) in fields.items():
                kind, dim = carrier(shape, dtype)
                if resume:
                    table = store[name]
                    if (table.rows, table.dim, table._dtype) != (rows, dim, kind):
                        raise ValueError(
                            f"table {name!r} of {str(store.path)!r} has {table.rows} x "
                            f"{table.dim} elements of {table._dtype}, not {rows} x {dim} of {kind}"
                        )
                else:
                    if old is not None and name in store and name in old.variables:
                        store.remove(name)  # this object's own, which it makes anew
                    try:
                        table = store.create(
                            name, rows=rows, dim=dim, dtype=kind, init=init, seed=seed
                        )
                    except FileExistsError as error:
                        raise FileExistsError(
                            f"{error}; resume() goes on with its rows, and another directory= or "
                            "name= begins anew"
                        ) from None
                    made.append(name)
                tables.variables[name] = Variable(table, shape, dtype, device)
        except BaseException:
            self._tables = None
            for name in made:
                with contextlib.suppress(Exception):
                    store.remove(name)
            if old is None:
                home, self._home = self._home, None
                home.close()
            raise
        self._tables = tables
        return tables

    # --- end --------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """Where the tables' files are. Raises RuntimeError before there are any."""
        return self._live().home.store.path

    @property
    def store(self) -> Store:
        """The store of the tables. Raises RuntimeError before there is one."""
        return self._live().home.store

    def flush(self) -> None:
        """Bring the files up to now, as numpy.memmap.flush() does: they are durable then.

        Does nothing for tables in a temporary directory. A store that was given is committed by its
        owner.
        """
        self._live().home.flush()

    def close(self) -> None:
        """End the object's own store: what it keeps is committed, what is temporary is removed.

        A second call does nothing. Every use of the rows afterwards is ValueError.
        """
        if self._home is not None:
            self._home.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def floating(dtype: Any, what: str) -> torch.dtype:
    """A dtype that rows which are trained can have."""
    found = torch_dtype(dtype, what)
    if found not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(
            f"{what} must be float32, float64, float16 or bfloat16 for rows that are trained, "
            f"not {dtype!r}"
        )
    return found


def fresh_seed() -> int:
    """A seed from torch's generator, so that torch.manual_seed() repeats it."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu").item())


def first_free(diskname: str, tail: str) -> Path:
    """Make the first directory of `diskname`0`tail`, `diskname`1`tail`, ... that is free."""
    number = 0
    while True:
        path = Path(f"{diskname}{number}{tail}")
        if not os.path.lexists(f"{path}.cpy.npy"):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
        number += 1


def link_file(table_file: Path, name: Path) -> None:
    """`name` as a relative link to the file of a table, where file systems have links."""
    with contextlib.suppress(OSError):
        name.symlink_to(os.path.relpath(table_file, name.absolute().parent))


Custom = Callable[..., object]
