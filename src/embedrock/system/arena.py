"""Memory that takes RAM only where it was written."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.errors import MemoryBudgetError
from embedrock.system import platform
from embedrock.system.sizes import format_bytes

_COLLAPSE = 25  # MADV_COLLAPSE, in Linux 6.1 and later
PAGE, HUGE_PAGE = mmap.PAGESIZE, 2 << 20
FIRST_LOOK = 1024  # pages are first checked once this part of the memory is in use ...
LEAST_LOOK_BYTES = 64 << 10  # ... and at least this many bytes ...
GROWTH = 1.25  # ... and again whenever the use has grown by this factor
MAX_RUNS = 256  # ranges that get huge pages at a time: each takes an entry of the limited memory map (vm.max_map_count)
MOST_AT_ONCE = 8  # huge pages made per call: 5 ms


class Arena:
    """Zeroed memory. A page takes RAM from its first write on.

    The address never changes. So a table grows without a copy or a pause, and readers never lose it.

    Random rows cost fewer address translations in huge pages. A step on records of 768 bytes took 1.44 ms instead of
    1.70. But one byte in a huge page takes 2 MiB of RAM. So memory begins with small pages, and gets huge ones where
    that at most doubles its RAM. If it is filled in order, that is from the second huge page on. If it is scattered,
    that is where half of the small pages are in use, see `densify`. The bytes never depend on it.

    Args:
        nbytes: size in bytes.
        subject: its user, for error messages.
        scattered: whether writes go to any place. If not, the memory fills from its beginning without gaps.

    Attributes:
        memory: uint8 (nbytes,).

    Raises:
        MemoryBudgetError: the system refuses the address space.

    Example:
        >>> arena = Arena(1 << 30, "a table", scattered=True)
        >>> arena.memory[::1 << 28] = 1
        >>> arena.resident_bytes
        16384
    """

    def __init__(self, nbytes: int, subject: str, scattered: bool = False) -> None:
        self._map = _map(nbytes, subject)
        self.memory = np.frombuffer(self._map, np.uint8, nbytes)
        self._start = -self.memory.ctypes.data % HUGE_PAGE  # offset of the first huge page
        self._is_small = np.ones(max(0, nbytes - self._start) // HUGE_PAGE if platform.HAS_HUGE_PAGES else 0, bool)
        self._next_look = max(LEAST_LOOK_BYTES, nbytes // FIRST_LOOK)
        self._waiting: list[int] = []  # huge pages to make, the last one first
        if self._is_small.size:
            self._map.madvise(mmap.MADV_NOHUGEPAGE)  # some systems use them everywhere by default
            if not scattered and len(self._is_small) > 1:
                self._allow(1, len(self._is_small))

    def densify(self, nbytes: int) -> None:
        """Use huge pages where half of the small ones are in use, a few at a time.

        Call it often: it checks the pages only when the memory in use has grown by a quarter.

        Args:
            nbytes: bytes of the memory in use.
        """
        if nbytes >= self._next_look:
            self._next_look = min(int(nbytes * GROWTH), max(len(self.memory), nbytes + 1))
            self._look()
        if not self._waiting:
            return
        for _ in range(min(MOST_AT_ONCE, len(self._waiting))):
            with suppress(OSError):  # an older system makes them on its own, in time; or none is left
                self._map.madvise(_COLLAPSE, self._start + self._waiting.pop() * HUGE_PAGE, HUGE_PAGE)

    def expect_all(self) -> None:
        """Use huge pages wherever nothing was written yet, because the caller will write everywhere."""
        if self._is_small.any():
            self._allow(0, len(self._is_small))

    def give_back(self, start: int, stop: int) -> int:
        """Release the whole pages from byte `start` to `stop`, with their content. Return the start of the next page.

        Systems that cannot release pages keep them until the memory is freed.
        """
        start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        return max(start, stop)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes of RAM in use, in whole pages, by the system's count. Pages that were only read count too.

        The call takes 20 ms for 24 GiB.
        """
        return int(np.count_nonzero(self._resident(0, len(self.memory)))) * PAGE

    def _look(self) -> None:
        if not self._is_small.any():
            return
        count = int(np.flatnonzero(self._is_small)[-1]) + 1
        resident = self._resident(self._start, self._start + count * HUGE_PAGE).reshape(count, HUGE_PAGE // PAGE)
        dense = self._is_small[:count] & (2 * resident.sum(axis=1) >= HUGE_PAGE // PAGE)
        edges = np.flatnonzero(np.diff(dense, prepend=False, append=False)).reshape(-1, 2)
        for first, end in edges[:MAX_RUNS].tolist():
            with suppress(OSError):
                self._allow(first, end)
                self._waiting[:0] = range(end - 1, first - 1, -1)

    def _allow(self, first: int, end: int) -> None:
        self._map.madvise(mmap.MADV_HUGEPAGE, self._start + first * HUGE_PAGE, (end - first) * HUGE_PAGE)
        self._is_small[first:end] = False

    def _resident(self, start: int, stop: int) -> np.ndarray:
        """Return which pages from byte `start` to `stop` are in RAM, uint8 (pages,): 0 or 1."""
        return platform.resident_pages(self.memory.ctypes.data + start, stop - start)


def reserve(nbytes: int, subject: str, scattered: bool = False) -> np.ndarray:
    """Return the memory of an `Arena` without calls of `densify`, uint8 (nbytes,)."""
    return Arena(nbytes, subject, scattered).memory


class ThreadMemory(threading.local):
    """Memory of each thread, aligned to pages, that stays for the next use. `subject`: see `Arena`."""

    def __init__(self, subject: str) -> None:
        self._subject, self._memory = subject, np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """Return at least `nbytes` bytes of unknown content, uint8."""
        if len(self._memory) < nbytes:
            self._memory = reserve(nbytes, self._subject)
        return self._memory


def returned(shape: int | tuple[int, ...], dtype: npt.DTypeLike, subject: str) -> npt.NDArray[Any]:
    """Return zeros whose memory goes back to the system when no array uses it.

    `malloc` may keep freed memory, per thread. So this is for large arrays of short life.

    Example:
        >>> returned((2, 3), np.int32, "a copy").shape
        (2, 3)
    """
    made = np.dtype(dtype)
    return reserve(made.itemsize * math.prod(np.atleast_1d(shape).tolist()), subject).view(made).reshape(shape)


def taken(array: npt.NDArray[Any], at: npt.NDArray[Any] | slice, subject: str) -> npt.NDArray[Any]:
    """Return items of an array, by position, as an array of `returned`."""
    if isinstance(at, slice):
        made = returned(array[at].shape, array.dtype, subject)
        made[...] = array[at]
        return made
    made = returned((len(at), *array.shape[1:]), array.dtype, subject)
    return np.take(array, at, axis=0, out=made, mode="clip")  # "raise" would make another copy


def joined(parts: Iterable[np.ndarray], most: int, subject: str) -> np.ndarray:
    """Return int64 arrays one after another, `most` items or fewer, as an array of `returned`."""
    made, end = returned(most, np.int64, subject), 0
    for part in parts:
        made[end : end + len(part)], end = part, end + len(part)
    return made[:end]


def cut(array: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Split an array into parts of at most `size` items."""
    return (array[start : start + size] for start in range(0, len(array), size))


def _map(nbytes: int, subject: str) -> mmap.mmap:
    try:
        return platform.private_memory(max(nbytes, 1), sparse=True)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryBudgetError(
            f"{subject} needs {format_bytes(nbytes)} of address space, and the system refused: {error}. "
            "Pass a smaller memory=, or lift the limit (ulimit -v)."
        ) from error
