"""CUDA's runtime library where there is none: what it pins, refuses and remembers, as the real one does."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from embedrock.device import cuda_runtime

OUT_OF_MEMORY, ALREADY_REGISTERED = 2, 712  # cudaErrorMemoryAllocation, cudaErrorHostMemoryAlreadyRegistered
NOT_REGISTERED, CAPTURE_UNSUPPORTED = 713, 900


class FakeLibrary:
    """Functions as `ctypes` has them.

    Args:
        refused: which calls of cudaHostRegister are refused, from 0 on.
        most: bytes that one call pins at most.

    Attributes:
        registered: bytes by address.
        last_error: which the next kernel of PyTorch would be blamed for.
        is_capturing: a thread captures a CUDA graph, and in no thread may be done what could break it: unless it says
            that it knows better.
    """

    def __init__(self, refused: tuple[int, ...] = (), most: int = 1 << 62, same_addresses: bool = True) -> None:
        self._refused, self._most, self._same_addresses = refused, most, same_addresses
        self._calls = itertools.count()
        self.registered: dict[int, int] = {}
        self.last_error, self.capture_mode, self.is_capturing = 0, 0, False

    def cudaHostRegister(self, address: Any, nbytes: Any, flags: int) -> int:
        start, end = address.value, address.value + nbytes.value
        if self._breaks_a_capture():
            return self._failed(CAPTURE_UNSUPPORTED)
        if next(self._calls) in self._refused or nbytes.value > self._most:
            return self._failed(OUT_OF_MEMORY)
        if any(start < known + size and known < end for known, size in self.registered.items()):
            return self._failed(ALREADY_REGISTERED)
        self.registered[start] = nbytes.value
        return 0

    def cudaHostUnregister(self, address: Any) -> int:
        if self._breaks_a_capture():
            return self._failed(CAPTURE_UNSUPPORTED)
        return 0 if self.registered.pop(address.value, None) else self._failed(NOT_REGISTERED)

    def _breaks_a_capture(self) -> bool:
        return self.is_capturing and self.capture_mode != cuda_runtime.RELAXED

    def cudaGetLastError(self) -> int:
        code, self.last_error = self.last_error, 0
        return code

    def cudaDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        assert attribute == cuda_runtime.SAME_ADDRESS
        value._obj.value = int(self._same_addresses)
        return 0

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.capture_mode, mode._obj.value = mode._obj.value, self.capture_mode
        return 0

    def _failed(self, code: int) -> int:
        self.last_error = code
        return code


def use(monkeypatch: Any, library: FakeLibrary) -> FakeLibrary:
    """Have all that asks for CUDA's runtime library get this one."""
    from embedrock.device import copies, pinned
    from embedrock.device import stream_order as timeline

    runtime = cuda_runtime.CudaRuntime(library)
    for module in (copies, pinned, timeline):
        monkeypatch.setattr(module, "cuda_runtime", lambda: runtime)
    return library


GPU = torch.device("cuda", 0)
