"""Host memory that a GPU reads and writes zero-copy."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import numpy as np
import torch

from embedrock.device.cuda_runtime import CudaRuntime, cuda_runtime
from embedrock.errors import MemoryBudgetError, UnsupportedError
from embedrock.system.sizes import format_bytes

# Bytes pinned in one call: whole huge pages, so that parts share none. Newer drivers refuse 512 GiB and more.
LEAST_PART_BYTES, MOST_PART_BYTES = 256 << 20, 64 << 30


class PinningWarning(UserWarning):
    """The system refuses to pin a table's RAM, so the CPU uses its rows."""


class PinnedRecords:
    """Records in RAM, pinned for a GPU from the beginning up to the last `cover`.

    On a GPU, the address of pinned memory is its host address (unified addressing). So kernels take it as it is.

    A fork would copy the pinned pages at once, for each worker of a `DataLoader`. So a child does not get them; it may
    not use the rows anyway.

    Args:
        memory: uint8 of any shape, C-contiguous.
        device: that is to use it.
        quiet: waits until no earlier work uses the memory.
    """

    def __init__(self, memory: np.ndarray, device: torch.device, quiet: Callable[[], None]) -> None:
        self.address, self._memory, self._device = memory.ctypes.data, memory, device
        self._covered = 0 if device.type == "cuda" else memory.nbytes
        self._parts: list[tuple[int, int]] = []  # addresses and bytes
        # The finalizer keeps the memory alive while it is pinned.
        self._unregister = weakref.finalize(self, _free, self._parts, memory, quiet, os.getpid())
        self._unregister.atexit = False  # the end of a process unpins all memory

    def cover(self, nbytes: int) -> None:
        """Pin at least the first `nbytes`.

        Raises:
            PinningError: the system refused. Nothing more is pinned.
        """
        if self._covered >= nbytes:
            return
        runtime, before, made = _runtime_for(self._device), len(self._parts), self._covered
        try:
            while made < nbytes:
                wanted = -(-(nbytes - made) // LEAST_PART_BYTES) * LEAST_PART_BYTES
                part = min(wanted, MOST_PART_BYTES, self._memory.nbytes - made)
                if code := runtime.register(self.address + made, part):
                    raise PinningError(
                        f"the system refused to pin {format_bytes(part)} of RAM for the GPU (cudaHostRegister returned "
                        f"{code}). Lift the limit on locked memory (ulimit -l), pass a smaller memory=, or a "
                        "device_memory= that holds all rows."
                    )
                self._parts.append((self.address + made, part))
                made += part
        except PinningError:
            while len(self._parts) > before:
                runtime.unregister(*self._parts.pop())
            raise
        self._covered = made

    def close(self) -> None:
        """Unpin the memory."""
        self._unregister()


def staging(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return RAM for temporary use that a device writes zero-copy, uint8 (nbytes,).

    Raises:
        MemoryBudgetError: the system refused.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise MemoryBudgetError(
            f"the system refused {format_bytes(nbytes)} of pinned RAM, through which rows come from {device}: {error} "
            "Nothing has changed. Free RAM, or lift the limit on locked memory (ulimit -l), and ask again."
        ) from error


class PinningError(MemoryBudgetError):
    """The system refused to pin memory."""


def _runtime_for(device: torch.device) -> CudaRuntime:
    try:
        runtime = cuda_runtime()
    except UnsupportedError as error:
        raise PinningError(str(error)) from error
    if not runtime.reads_host_addresses(device.index):
        raise PinningError(
            f"{device} does not find pinned RAM at the addresses that the CPU has for it, which kernels rely on. Pass "
            "a device_memory= that holds all rows."
        )
    return runtime


def _free(parts: list[tuple[int, int]], memory: np.ndarray, quiet: Callable[[], None], process: int) -> None:
    if not parts or os.getpid() != process:
        return  # in a forked child, every CUDA call fails
    quiet()
    for part in parts:
        cuda_runtime().unregister(*part)
