"""Memory for the arrays of a batch, used again from batch to batch.

Fresh memory costs a page fault for every 4 KiB that is written, and whether `malloc` gives freed arrays back to the
system, to fetch them again a moment later, depends on their sizes and threads: for two replicas' lookups that was a
fifth of a step. TensorFlow takes an array as it is where it begins at a multiple of 64 bytes, and copies it otherwise.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.system import forks

LEAST_BYTES = 1 << 16  # smaller ones come from memory that `malloc` keeps anyway
MOST_BYTES = 1 << 24  # larger ones cost more to fill than to fetch
KEPT_BYTES = 1 << 26  # of all that are kept, in use or not
ALIGNMENT = 64


def _references(kept: list[tuple[np.ndarray, int]], number: int) -> int:
    return sys.getrefcount(kept[number][0])


# To memory that no array uses. What counts for who asks depends on the version of Python.
_FREE = _references([(np.empty(1, np.uint8), 0)], 0)


class Buffers:
    """Memory that is handed out again once no array uses it."""

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        # Memory, and where the first aligned byte is. NumPy's arrays refer to the memory itself, not to a view of it.
        self._kept: list[tuple[np.ndarray, int]] = []  # what was used last is last
        self._bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return what `numpy.empty` returns: an array of unknown content, whose memory is its own while it is used.

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
        """Return a copy of an array, whose memory is its own while it is used."""
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
            self._bytes -= self._kept.pop(0)[0].nbytes  # whoever uses it keeps it
        return self._kept[-1]


def _size_class(nbytes: int) -> int:
    """Return bytes of memory for so many: at most an eighth more, so that batches of about a size share it."""
    step = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // step) * step + ALIGNMENT


buffers = Buffers()
