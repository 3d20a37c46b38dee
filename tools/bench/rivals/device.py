"""Where rows go to and come from: a CUDA device, or the processor as its stand-in.

The stand-in lets everything around the device be run where there is none: copies are copies in
host memory then, and NumPy stands where CuPy would. Its times say nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib.util
import mmap
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

PIECE = 1 << 30  # bytes registered at a time; no copy may lie across a border
_FAULT_BYTES = 64 << 20  # of one thread's share when memory is touched first
_NOTHING = contextlib.nullcontext()


class HostMemory:
    """Anonymous memory on huge pages, touched by many threads and registered with the device."""

    def __init__(self, device: Device, size: int) -> None:
        """`size` bytes of zeros."""
        self.size, self._device = max(size, 1), device
        self._map = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # a hint
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.floats = torch.frombuffer(self._map, dtype=torch.float32)
        self.address = self.floats.data_ptr()
        with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
            parts = range(0, self.size, _FAULT_BYTES)
            list(pool.map(self._touch, parts))
        self._registered: list[int] = []
        try:
            for first in range(0, self.size, PIECE):
                device.register(self.address + first, min(PIECE, self.size - first))
                self._registered.append(self.address + first)
        except BaseException:
            self.close()
            raise

    def _touch(self, first: int) -> None:
        # memset of ctypes lets other threads run meanwhile.
        ctypes.memset(self.address + first, 0, min(_FAULT_BYTES, self.size - first))

    def table(self, first: int, rows: int, dim: int) -> torch.Tensor:
        """A part as (rows, dim) float32, from its `first` number on."""
        return self.floats[first : first + rows * dim].view(rows, dim)

    def close(self) -> None:
        """Give it back; nobody may have a tensor of it any more."""
        for address in self._registered:
            self._device.unregister(address)
        self._registered.clear()
        del self.floats
        gc.collect()
        with contextlib.suppress(BufferError):  # a tensor is left somewhere: it goes with that
            self._map.close()


class Work:
    """Something that the device does while the caller goes on."""

    def __init__(self, done: Callable[[], bool], seconds: Callable[[], float]) -> None:
        """`seconds` waits for its end."""
        self.done, self.seconds = done, seconds


class Device(ABC):
    """What the ways and the timing need of a device."""

    kind: str
    torch_name: str  # of torch.device
    store_device: str | None  # as em.open takes it

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all work is done."""

    @abstractmethod
    def pinned(self, rows: int, dim: int) -> torch.Tensor:
        """Host memory that copies go to and from at full speed, float32."""

    @abstractmethod
    def register(self, address: int, size: int) -> None:
        """Let kernels read and write host memory. Raises RuntimeError."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """The end of that."""

    @abstractmethod
    def arrays(self) -> str | None:
        """What is missing for arrays of CuPy; None if nothing is."""

    @abstractmethod
    def array(self, tensor: torch.Tensor) -> Any:
        """A tensor on the device as an array of CuPy, not copied."""

    @abstractmethod
    def array_of_host(self, tensor: torch.Tensor) -> Any:
        """A tensor in registered host memory as an array of CuPy, not copied."""

    @abstractmethod
    def free(self) -> int:
        """Bytes of its memory that are free."""

    @abstractmethod
    def release(self) -> None:
        """Give memory that libraries keep for later back to the system."""

    @abstractmethod
    def stream(self, *, urgent: bool = False) -> Any:
        """A stream of its own, whose kernels go before others' if urgent; `use` enters it."""

    @abstractmethod
    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Work inside goes to that stream."""

    @abstractmethod
    def mark(self, stream: Any) -> Any:
        """What was given to the stream so far, to `wait` for."""

    @abstractmethod
    def wait(self, stream: Any, mark: Any) -> None:
        """Work given to the stream from now on begins after that."""

    @abstractmethod
    def queue(self, stream: Any, work: Callable[[], None], times: int) -> Work:
        """Give `work` to the stream `times` times, and return at once."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The device, for the results."""

    def tensor(self, array: Any) -> torch.Tensor:
        """An array of CuPy as a tensor, not copied."""
        found: torch.Tensor = torch.from_dlpack(array)
        return found


class Cuda(Device):
    """The current CUDA device."""

    kind, torch_name, store_device = "cuda", "cuda", "cuda"

    def __init__(self) -> None:
        """Raises RuntimeError where there is none."""
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device")
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def pinned(self, rows: int, dim: int) -> torch.Tensor:
        return torch.empty(rows, dim, pin_memory=True)

    def register(self, address: int, size: int) -> None:
        error = int(self._cudart.cudaHostRegister(address, size, 0))
        if error != 0:
            raise RuntimeError(f"cudaHostRegister of {size >> 20} MiB: CUDA error {error}")

    def unregister(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)

    @functools.cache  # noqa: B019
    def arrays(self) -> str | None:
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed"
        try:
            import cupy

            cupy.zeros(1).sum()
        except Exception as error:  # whatever it lacks: a library, a header, a driver
            return f"CuPy does not work: {type(error).__name__}: {error}".splitlines()[0]
        return None

    def array(self, tensor: torch.Tensor) -> Any:
        import cupy

        return cupy.from_dlpack(tensor.detach())

    def array_of_host(self, tensor: torch.Tensor) -> Any:
        import cupy

        size = tensor.numel() * tensor.element_size()
        memory = cupy.cuda.UnownedMemory(
            tensor.data_ptr(), size, tensor, torch.cuda.current_device()
        )
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(tuple(tensor.shape), cupy.float32, pointer)

    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with contextlib.suppress(AttributeError):
            torch._C._host_emptyCache()
        if "cupy" in sys.modules:
            import cupy

            cupy.get_default_memory_pool().free_all_blocks()
            cupy.get_default_pinned_memory_pool().free_all_blocks()

    def stream(self, *, urgent: bool = False) -> Any:
        return torch.cuda.Stream(priority=-1 if urgent else 0)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self, stream: Any) -> Any:
        return stream.record_event()

    def wait(self, stream: Any, mark: Any) -> None:
        stream.wait_event(mark)

    def queue(self, stream: Any, work: Callable[[], None], times: int) -> Work:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(times):
                work()
            end.record()

        def seconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return Work(end.query, seconds)

    def describe(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "name": found.name,
            "memory": found.total_memory,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }


def _driver() -> str:
    """The version of NVIDIA's kernel module, if it says so."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return ""
    numbers = [word for word in words if word[:1].isdigit() and word.count(".") >= 1]
    return numbers[0] if numbers else ""


class Host(Device):
    """The processor, in the place of a device."""

    kind, torch_name, store_device = "cpu", "cpu", None

    def synchronize(self) -> None:
        pass

    def pinned(self, rows: int, dim: int) -> torch.Tensor:
        return torch.empty(rows, dim)

    def register(self, address: int, size: int) -> None:
        pass

    def unregister(self, address: int) -> None:
        pass

    def arrays(self) -> str | None:
        return None

    def array(self, tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy()

    def array_of_host(self, tensor: torch.Tensor) -> Any:
        return tensor.numpy()

    def free(self) -> int:
        return available_memory()

    def release(self) -> None:
        gc.collect()

    def stream(self, *, urgent: bool = False) -> Any:
        return None

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return _NOTHING

    def mark(self, stream: Any) -> Any:
        return None

    def wait(self, stream: Any, mark: Any) -> None:
        pass

    def queue(self, stream: Any, work: Callable[[], None], times: int) -> Work:
        began = time.perf_counter()
        for _ in range(times):
            work()
        spent = time.perf_counter() - began
        return Work(lambda: True, lambda: spent)

    def describe(self) -> dict[str, Any]:
        return {"name": "none: the processor as its stand-in", "memory": available_memory()}


def available_memory() -> int:
    """Bytes of host memory that this process may still take."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError, IndexError):  # its group, with control groups v2
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").strip().rpartition("::")[2]
        folder = Path("/sys/fs/cgroup") / own.lstrip("/")
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        found = min(found, limit - used)
    return found
