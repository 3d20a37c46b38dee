"""Keeping a process and its page cache within a number of bytes, and files out of memory.

A control group counts all that a process makes the kernel keep for it, page cache included. Where
none can be made, the cached part of a file is cut back to the same size between batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER


@dataclass(frozen=True)
class Kind:
    """How processes are confined here."""

    name: str  # "cgroup v2", "cgroup v1", "trimmed"
    parent: Path | None  # where groups are made

    def describe(self) -> str:
        """For people."""
        return {
            "cgroup v2": "cgroup v2, memory.max: all of the process's memory and its page cache",
            "cgroup v1": "cgroup v1, memory.limit_in_bytes: all of the process's memory and its "
            "page cache",
            "trimmed": "no control group can be made here: between batches the page cache of each "
            "store's file is cut back to the same size (dirty pages written first), outside of "
            "the times",
        }[self.name]


def find_kind() -> Kind:
    """The strongest confinement this process can set up, tried out."""
    v1 = _CGROUP / "memory"
    places = [("cgroup v1", v1, "memory.limit_in_bytes")]
    own = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    v2 = next((line[3:] for line in own if line.startswith("0::")), None)
    if v2 is not None:
        places = [
            ("cgroup v2", _CGROUP / v2.lstrip("/"), "memory.max"),
            ("cgroup v2", _CGROUP, "memory.max"),
            *places,
        ]
    for name, parent, limit in places:
        probe = parent / f"embermap-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        works = False
        with contextlib.suppress(OSError):
            if (probe / limit).exists():
                (probe / limit).write_text(str(1 << 30))
                works = _can_join(probe)
        with contextlib.suppress(OSError):
            probe.rmdir()
        if works:
            return Kind(name, parent)
    return Kind("trimmed", None)


def _can_join(group: Path) -> bool:
    child = os.fork()
    if child == 0:
        try:
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


class Group:
    """A place for one process, with a limit; removed by close()."""

    def __init__(self, kind: Kind, name: str, limit: int) -> None:
        """Made now; the process joins later, so that its libraries are not counted."""
        self.kind, self.limit = kind, limit
        self.path: Path | None = None
        if kind.parent is None:
            return
        self.path = kind.parent / f"embermap-{os.getpid()}-{name}"
        self.path.mkdir()
        v2 = kind.name == "cgroup v2"
        limits = (
            [("memory.max", limit), ("memory.swap.max", 0)]
            if v2
            else [("memory.limit_in_bytes", limit), ("memory.memsw.limit_in_bytes", limit)]
        )
        for file, value in limits:
            if (self.path / file).exists():
                (self.path / file).write_text(str(value))

    def peak(self) -> int | None:
        """The most the group ever took, bytes; None where the kernel does not say."""
        return self._number("memory.peak", "memory.max_usage_in_bytes")

    def kills(self) -> int:
        """How often the kernel killed a process for want of memory."""
        if self.path is None:
            return 0
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self.path / file).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def _number(self, *files: str) -> int | None:
        for file in files:
            if self.path is not None:
                with contextlib.suppress(OSError, ValueError):
                    return int((self.path / file).read_text())
        return None

    def close(self) -> None:
        """Remove the group; its processes must have ended."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def join(path: str | None) -> None:
    """Put this process into a group."""
    if path is not None:
        (Path(path) / "cgroup.procs").write_text(str(os.getpid()))


# --- files in the page cache ----------------------------------------------------------------------


def cached_pages(file: Path) -> bytes:
    """One byte for each page of a file, odd if it is in the page cache."""
    size = file.stat().st_size
    if size == 0:
        return b""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ) as view:
        found = (ctypes.c_ubyte * ((size + _PAGE - 1) // _PAGE))()
        address = _address_of(view)
        if _libc.mincore(address, size, ctypes.addressof(found)) != 0:
            raise OSError(ctypes.get_errno(), "mincore", str(file))
        return bytes(found)


def _address_of(view: mmap.mmap) -> int:
    import numpy as np  # reads the address of a read-only buffer, which ctypes does not

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def cached_bytes(file: Path) -> int:
    """How much of a file is in the page cache."""
    import numpy as np

    return int(np.count_nonzero(np.frombuffer(cached_pages(file), np.uint8) & 1)) * _PAGE


def forget_file(file: Path) -> None:
    """Write a file's dirty pages and drop it from the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def forget_files(files: list[Path]) -> str:
    """Drop files from the page cache, see that they are gone, and say how it was done."""
    for file in files:
        forget_file(file)
    left = sum(map(cached_bytes, files))
    total = sum(file.stat().st_size for file in files)
    if left <= max(total // 100, 1 << 20):
        return "posix_fadvise"
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return f"posix_fadvise ({left >> 20} MiB stayed in the page cache)"
    return "drop_caches"


def advise_random(address: int, size: int) -> None:
    """madvise(MADV_RANDOM): no read-ahead at page faults."""
    start = address // _PAGE * _PAGE
    if _libc.madvise(start, address + size - start, mmap.MADV_RANDOM) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def trim(file: Path, limit: int) -> None:
    """Cut the page cache of a file back to `limit` bytes, windows of 1 MiB drawn at random."""
    import numpy as np

    window = (1 << 20) // _PAGE
    pages = np.frombuffer(cached_pages(file), np.uint8) & 1
    here = int(pages.sum()) * _PAGE
    if here <= limit:
        return
    counts = np.add.reduceat(pages.astype(np.int64), np.arange(0, len(pages), window))
    order = np.flatnonzero(counts)
    random.Random(0).shuffle(order)
    mappings = _mappings(file)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        for number in order:
            if here <= limit:
                break
            start, size = int(number) << 20, 1 << 20
            _libc.sync_file_range(descriptor, start, size, _SYNC_WAIT)
            for address, first, length in mappings:
                low, high = max(start, first), min(start + size, first + length)
                if low < high:
                    _libc.madvise(address + low - first, high - low, mmap.MADV_DONTNEED)
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
            here -= int(counts[number]) * _PAGE
    finally:
        os.close(descriptor)


def _mappings(file: Path) -> list[tuple[int, int, int]]:
    """Where this process has a file mapped: (address, offset in the file, bytes)."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == str(file):
            low, high = (int(x, 16) for x in parts[0].split("-"))
            found.append((low, int(parts[2], 16), high - low))
    return found


def memory_of_process(field: str) -> int:
    """A field of /proc/self/status in bytes: VmRSS, VmHWM, RssAnon, ..."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0
