"""Reused memory for the arrays of batches.

Fresh memory costs a page fault per 4 KiB written. `malloc` may give freed arrays back to the system, depending on sizes
and threads, only to fetch them again. For two replicas' lookups that was a fifth of a step. TensorFlow uses an array
without a copy if it begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.system import forks

LEAST_BYTES = 1 << 16  # `malloc` keeps the memory of smaller arrays anyway
MOST_BYTES = 1 << 24  # larger arrays cost more to fill than to fetch
KEPT_BYTES = 1 << 26  # bytes of all kept memory, in use or not
ALIGNMENT = 64


def _references(kept: list[tuple[np.ndarray, int]], number: int) -> int:
    return sys.getrefcount(kept[number][0])


# Reference count of memory that no array uses. The caller's own references depend on the version of Python.
_FREE = _references([(np.empty(1, np.uint8), 0)], 0)


class Buffers:
    """Pool of memory, which reuses memory that no array refers to."""

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        # Memory, and its first aligned byte. NumPy's arrays refer to the memory itself, not to a view of it.
        self._kept: list[tuple[np.ndarray, int]] = []  # the most recently used is last
        self._bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array of unknown content, as `numpy.empty` does. The pool reuses memory without references.

        Example:
            >>> Buffers().empty((3, 2), np.float32).shape
            (3, 2)
        """
        made = np.dtype(dtype)
        nbytes = made.itemsize * math.prod(shape)
        if not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return np.empty(shape, made)
        with self._lock:
            memory, start = self._take(_size_class(nbytes))
            return memory[start : start + nbytes].view(made).reshape(shape)

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of an array in memory of the pool."""
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def _take(self, size: int) -> tuple[np.ndarray, int]:
        for k in range(len(self._kept)):
            if self._kept[k][0].nbytes == size and _references(self._kept, k) == _FREE:
                self._kept.append(self._kept.pop(k))
                return self._kept[-1]
        memory = np.empty(size, np.uint8)
        self._kept.append((memory, -memory.ctypes.data % ALIGNMENT))
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.pop(0)[0].nbytes  # arrays that use it keep it alive
        return self._kept[-1]


def _size_class(nbytes: int) -> int:
    """Return the bytes to allocate for `nbytes`: at most an eighth more, so that similar batches share memory."""
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step + ALIGNMENT


buffers = Buffers()


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where the first item of an array is. The caller keeps the array alive while a kernel uses the address."""
    return array.__array_interface__["data"][0]
