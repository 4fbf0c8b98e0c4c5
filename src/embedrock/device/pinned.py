"""Host memory that a GPU reads and writes in place."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import numpy as np
import torch

from embedrock.errors import MemoryBudgetError
from embedrock.machine.sizes import format_bytes

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
PART_BYTES = 256 << 20  # a whole number of pages, so that parts do not share one


class PinningWarning(UserWarning):
    """The system does not let a table's RAM be pinned, so that its rows are used by the CPU."""


class Pinned:
    """Records in RAM, pinned where the device is a GPU, from the beginning as far as `cover` was asked.

    On a GPU the address of pinned memory is that of the host (unified addressing), so kernels take it as it is.

    Args:
        memory: uint8 of any shape, C-contiguous.
        device: that is to use it.
    """

    def __init__(self, memory: np.ndarray, device: torch.device) -> None:
        self.address, self._memory = memory.ctypes.data, memory
        self._covered = 0 if device.type == "cuda" else memory.nbytes
        self._parts: list[int] = []  # addresses
        # The memory lives as long as it is pinned.
        self._unregister = weakref.finalize(self, _unregister, self._parts, memory, device, os.getpid())

    def cover(self, nbytes: int) -> None:
        """Pin at least the first `nbytes`.

        Raises:
            PinningError: the system refused.
        """
        while self._covered < nbytes:
            part = min(max(PART_BYTES, nbytes - self._covered), self._memory.nbytes - self._covered)
            _register(self.address + self._covered, part)
            self._parts.append(self.address + self._covered)
            self._covered += part

    def close(self) -> None:
        """Let the memory go."""
        self._unregister()


class PinningError(MemoryBudgetError):
    """The system refused to pin memory."""


def _runtime() -> Any:
    return torch.cuda.cudart()


def _register(address: int, nbytes: int) -> None:
    code = int(_runtime().cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED))
    if code:
        raise PinningError(
            f"the system refused to pin {format_bytes(nbytes)} of RAM for the GPU (cudaHostRegister returned {code}). "
            "Lift the limit on locked memory (ulimit -l), pass a smaller memory=, or a device_memory= that holds all "
            "rows."
        )


def _unregister(parts: list[int], memory: np.ndarray, device: torch.device, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child, where CUDA does nothing but raise errors
    if parts:
        torch.cuda.synchronize(device)  # kernels may still use it
    for address in parts:
        _runtime().cudaHostUnregister(address)


def warn_of(error: PinningError, subject: str) -> None:
    """Warn that rows of a table stay with the CPU."""
    warnings.warn(
        f"rows of {subject} are read and stepped by the CPU, and copied: {error}",
        PinningWarning,
        stacklevel=3,
    )
