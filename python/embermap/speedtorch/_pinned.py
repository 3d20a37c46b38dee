"""Pinned host memory, and an allocator of it for CuPy."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .. import _checks
from .._errors import CudaError


class PMemory:
    """Host memory that a GPU reaches at the same address, for `size` bytes.

    It is freed with the object, at the end of the process as well. Raises CudaError without a CUDA
    device; where there is not as much memory, what torch raises.

    Attributes:
        size: bytes.
        ptr: the address; 0 for no bytes.
        device_id: number of the current CUDA device.
    """

    def __init__(self, size: int) -> None:
        self.size = _checks.integer(size, "size")
        if not torch.cuda.is_available():
            raise CudaError("pinned memory needs a CUDA device, and torch finds none")
        self.device_id = torch.cuda.current_device()
        self._memory = torch.empty(self.size, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.ptr = self._memory.data_ptr() if self.size else 0


def my_pinned_allocator(bsize: int) -> Any:
    """An allocator for `cupy.cuda.set_allocator`: pinned host memory as CuPy has it.

    Raises ImportError without CuPy; otherwise as PMemory does. embermap itself sets no allocator.
    """
    cupy = importlib.import_module("cupy")
    memory = PMemory(bsize)
    unowned = cupy.cuda.UnownedMemory(memory.ptr, memory.size, memory, memory.device_id)
    return cupy.cuda.MemoryPointer(unowned, 0)
