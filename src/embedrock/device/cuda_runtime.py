"""`CudaRuntime`: calls of CUDA's runtime library that PyTorch does not expose."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from embedrock.errors import UnsupportedError
from embedrock.system import platform

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
SAME_ADDRESS = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem
RELAXED = 2  # cudaStreamCaptureModeRelaxed


class CudaRuntime:
    """CUDA's runtime library, as this process has loaded it.

    Args:
        library: a `ctypes` library with the functions of these names.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory, which forks then do not get. Return 0, or the error number, also cleared in the runtime."""
        platform.share_with_children(False, address, nbytes)
        size = ctypes.c_size_t(nbytes)
        with self.beside_captures():
            code = self._drained(self._library.cudaHostRegister(ctypes.c_void_p(address), size, PORTABLE_AND_MAPPED))
        if code:
            platform.share_with_children(True, address, nbytes)
        return code

    def unregister(self, address: int, nbytes: int) -> None:
        """Unpin memory."""
        with self.beside_captures():
            self._drained(self._library.cudaHostUnregister(ctypes.c_void_p(address)))
        platform.share_with_children(True, address, nbytes)

    def reads_host_addresses(self, device: int) -> bool:
        """Return whether a device reads pinned memory at its host addresses."""
        value = ctypes.c_int(0)
        code = self._drained(self._library.cudaDeviceGetAttribute(ctypes.byref(value), SAME_ADDRESS, device))
        return code == 0 and value.value == 1

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Allow this thread to pin RAM, or to wait, without breaking another thread's CUDA graph capture."""
        mode = ctypes.c_int(RELAXED)
        self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _drained(self, code: int) -> int:
        # CUDA keeps an error as its last one. PyTorch reads the last error after a kernel, and would report this one.
        if code:
            self._library.cudaGetLastError()
        return code


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """Return the runtime library that PyTorch uses.

    Raises:
        UnsupportedError: this process has loaded none that can be found.
    """
    torch.cuda.init()
    # A process may load several CUDA runtimes, and some have stubs that only fail. Each has its own last error. Symbols
    # looked up through PyTorch's library resolve to the runtime that it is linked to.
    linked, major = platform.loaded_libraries("libc10_cuda.so"), (torch.version.cuda or "").partition(".")[0]
    others = sorted(platform.loaded_libraries("libcudart.so"), key=lambda path: f".so.{major}" not in path)
    for path in (*linked, *others):
        library = platform.library(path)
        if hasattr(library, "cudaHostRegister"):
            return CudaRuntime(library)
    raise UnsupportedError(
        "CUDA's runtime library (libcudart) is not among those that this process has loaded, so no RAM can be "
        "pinned for a GPU. Install a build of PyTorch that brings it, as its wheels do."
    )
