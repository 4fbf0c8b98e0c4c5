"""`CudaRuntime`: what is asked of CUDA's runtime library itself, because PyTorch has no names for it."""

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
        library: with functions of these names, as `ctypes` finds them.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def register(self, address: int, nbytes: int) -> int:
        """Pin memory; return 0, or the number of the error, which is not left behind for others."""
        with self.beside_captures():
            return self._drained(self._library.cudaHostRegister(_pointer(address), _size(nbytes), PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Let memory go that was pinned; return 0, or the number of the error, which is not left behind for others."""
        with self.beside_captures():
            return self._drained(self._library.cudaHostUnregister(_pointer(address)))

    def reads_host_addresses(self, device: int) -> bool:
        """Return whether a device finds pinned memory at the addresses that the host has for it."""
        value = ctypes.c_int(0)
        code = self._drained(self._library.cudaDeviceGetAttribute(ctypes.byref(value), SAME_ADDRESS, device))
        return code == 0 and value.value == 1

    @contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Let this thread pin RAM, or wait for its work, while one captures a CUDA graph, which that would break."""
        mode = ctypes.c_int(RELAXED)
        self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _drained(self, code: int) -> int:
        # An error stays the library's last one, and whoever looks at that next, PyTorch behind a kernel, takes it for
        # its own.
        if code:
            self._library.cudaGetLastError()
        return code


def _pointer(address: int) -> Any:
    return ctypes.c_void_p(address)


def _size(nbytes: int) -> Any:
    return ctypes.c_size_t(nbytes)


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """Return the runtime library that PyTorch uses.

    Raises:
        UnsupportedError: none is loaded that can be found.
    """
    torch.cuda.init()
    for path in _paths():
        library = platform.library(path)
        if hasattr(library, "cudaHostRegister"):
            return CudaRuntime(library)
    raise UnsupportedError(
        "CUDA's runtime library (libcudart) is not among those that this process has loaded, so no RAM can be "
        "pinned for a GPU. Install a build of PyTorch that brings it, as its wheels do."
    )


def _paths() -> list[str]:
    """Return what may be CUDA's runtime library, or know it, the best first."""
    # There may be several: others bring it, too, or functions of these names that only fail, and each has an error
    # of its own that was its last. In a library of PyTorch's, names are those of what it is linked to.
    linked, major = platform.loaded_libraries("libc10_cuda.so"), (torch.version.cuda or "").partition(".")[0]
    return [*linked, *sorted(platform.loaded_libraries("libcudart.so"), key=lambda path: f".so.{major}" not in path)]
