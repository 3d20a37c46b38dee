"""Where the tables of one object live: a store, on which device, and when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from .. import _checks, _core
from .._errors import CudaError
from .._store import Mode, Store
from .._store import open as open_store

Place = Literal["auto", "cpu", "cuda"]
PathLike = str | os.PathLike[str]

_SLACK = 16 << 20  # bytes of a budget beside the rows of a small table
_SHARE = 8  # of the memory available now, that one object takes unless it is told


def choose_device(
    owner: str, place: Place, asked: Any, weight: torch.Tensor | None
) -> torch.device:
    """The device whose kernels reach the tables of `owner`; the CPU where threads do.

    Args:
        place: what the family is for. "cuda" needs a device, "auto" and "cpu" take one where the
            model is on it; without a model, "auto" takes the first there is.
        asked: the caller's `device=`; None leaves it to the family.
        weight: of the model, if there is one.

    Raises CudaError (no such device), ValueError (neither cpu nor cuda).
    """
    if asked is not None:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a cpu or cuda device, not {str(device)!r}")
    elif place == "cuda":
        device = torch.device("cuda")
    elif weight is not None:
        device = weight.device
    elif place == "auto":
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    if device.type != "cuda":
        return torch.device("cpu")
    absent = _core.cuda_absence() if _core.cuda_devices() == 0 else ""
    if not absent and not torch.cuda.is_available():
        absent = "torch finds none"
    if absent:
        if asked is None and place != "cuda":
            return torch.device("cpu")
        raise CudaError(
            f"{owner} needs the device 'cuda', and there is none ({absent}): "
            'pass device="cpu" to keep its rows where the CPU reaches them'
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


def default_memory(row_bytes: int, rows: int) -> int:
    """A budget for so many rows: all of them, but no more than an eighth of the memory there is."""
    whole = rows * row_bytes
    return max(_SLACK, min(whole + whole // 3 + _SLACK, _available() // _SHARE))


def _available() -> int:
    """Bytes this process might still take."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Another system may not say: all of the machine's memory will have to do.
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # where there is no limit
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


class Home:
    """A store that an object opened for itself, or one that it was given.

    Its own store ends with `close()`, with the object, or with the process, whichever comes first:
    one in a temporary directory is removed then, any other is committed; `keep` has a temporary one
    committed as well, because the rows themselves are elsewhere. One that was given stays open, and
    its owner commits it.
    """

    def __init__(
        self, owner: object, store: Store, *, own: bool, scratch: bool, keep: bool = False
    ) -> None:
        self.store = store
        self.own = own
        self.scratch = scratch and not keep
        self._finish: Callable[[], object] | None = None
        if own:
            self._finish = weakref.finalize(owner, _end, store, scratch, keep, os.getpid())

    @classmethod
    def open(
        cls,
        owner: object,
        *,
        directory: PathLike | None,
        memory: int | str | None,
        device: torch.device,
        row_bytes: int,
        rows: int,
        keep: bool = False,
        resume: bool = False,
    ) -> Home:
        """Open a store in `directory`, one that is there if `resume`, or in a temporary one."""
        if memory is None:
            budget = default_memory(row_bytes, rows)
        else:
            budget = _checks.size(memory, "memory")
        number = device.index if device.type == "cuda" else None
        if directory is not None:
            mode: Mode = "r+" if resume else "a"
            store = open_store(directory, mode=mode, memory=budget, device=number)
            return cls(owner, store, own=True, scratch=False)
        made = tempfile.mkdtemp(prefix="embermap-speedtorch-")
        try:
            # Nobody opens it again: pages that leave memory need no log.
            store = open_store(made, memory=budget, device=number, durability="none")
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return cls(owner, store, own=True, scratch=True, keep=keep)

    def flush(self) -> None:
        """Bring the files up to now. Nothing where nobody will open them again."""
        if self.own and not self.scratch:
            self.store.commit()
            self.store.checkpoint()

    def close(self) -> None:
        if self._finish is not None:
            self._finish()


def _end(store: Store, scratch: bool, keep: bool, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child: the store and its directory are its parent's
    if keep or not scratch:
        store.close()
    else:
        store.abandon()
    if scratch:
        shutil.rmtree(store.path, ignore_errors=True)
