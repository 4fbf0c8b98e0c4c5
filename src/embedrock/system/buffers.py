"""Reused memory for the arrays of batches.

Fresh memory costs a page fault per 4 KiB written. `malloc` may give freed arrays back to the system, depending on sizes
and threads, only to fetch them again. For two replicas' lookups that was a fifth of a step. TensorFlow uses an array
without a copy if it begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.system import forks

LEAST_BYTES = 1 << 16  # `malloc` keeps the memory of smaller arrays anyway
MOST_BYTES = 1 << 24  # larger arrays cost more to fill than to fetch
KEPT_BYTES = 1 << 26  # bytes of all kept memory, in use or not
ALIGNMENT = 64


def _spare(kept: list[tuple[np.ndarray, int]], size: int, free: int) -> int:
    """Return the index of memory of a size with at most `free` references; -1: there is none."""
    for k, (memory, _) in enumerate(kept):
        if memory.nbytes == size and sys.getrefcount(memory) <= free:
            return k
    return -1


# Reference count of memory that no array uses. The caller's own references depend on the version of Python.
_FREE = next(free for free in itertools.count(1) if _spare([(np.empty(1, np.uint8), 0)], 1, free) == 0)


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
        nbytes = made.itemsize
        for n in shape:  # quicker than `math.prod`
            nbytes *= n
        if not LEAST_BYTES <= nbytes <= MOST_BYTES:
            return np.empty(shape, made)
        step = 1 << (nbytes.bit_length() - 4)  # an eighth more at most, so that similar batches share memory
        size = -(-nbytes // step) * step + ALIGNMENT
        with self._lock:
            k = _spare(self._kept, size, _FREE)
            memory, start = self._add(size) if k < 0 else self._kept.pop(k)
            self._kept.append((memory, start))
        return np.ndarray(shape, made, memory, start)

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy of an array in memory of the pool."""
        made = self.empty(array.shape, array.dtype)
        made[...] = array
        return made

    def _add(self, size: int) -> tuple[np.ndarray, int]:
        memory = np.empty(size, np.uint8)
        self._bytes += size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.pop(0)[0].nbytes  # arrays that use it keep it alive
        return memory, -memory.ctypes.data % ALIGNMENT


buffers = Buffers()


def address_of(array: npt.NDArray[Any]) -> int:
    """Return where the first item of an array is. The caller keeps the array alive while a kernel uses the address."""
    return array.__array_interface__["data"][0]
