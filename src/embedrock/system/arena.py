"""Memory that costs RAM only where it was written to."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock.errors import MemoryBudgetError
from embedrock.system import platform
from embedrock.system.sizes import format_bytes

_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later
PAGE, HUGE_PAGE = mmap.PAGESIZE, 2 << 20
FIRST_LOOK = 1024  # pages are looked at once so small a part of the memory is in use ...
LEAST_LOOK_BYTES = 64 << 10  # ... and so much ...
GROWTH = 1.25  # ... and again whenever its use has grown so much
MAX_RUNS = 256  # places that get huge pages at a time: the system holds each apart, and only so many (vm.max_map_count)
MOST_AT_ONCE = 8  # huge pages made in one call: 5 ms


class Arena:
    """Zeroed memory whose pages take up RAM from the moment that they are written to.

    Its address never changes, so a table grows without a copy and without a pause, and readers never lose it.

    Random rows cost fewer address translations in huge pages (1.44 against 1.70 ms for a step on records of 768 bytes),
    but one byte in a huge page takes 2 MiB of RAM. So memory has small pages first, and huge ones where they cost no
    more RAM than as much again: from the second on where it is filled in order, and else where half of the small ones
    are in use, see `densify`. What is in memory never depends on it.

    Args:
        nbytes: how much.
        subject: whose, for error messages.
        scattered: it is written to at any places; else from the beginning on, without gaps.

    Attributes:
        memory: uint8 (nbytes,).

    Raises:
        MemoryBudgetError: the system does not give that much address space.

    Example:
        >>> arena = Arena(1 << 30, "a table", scattered=True)
        >>> arena.memory[::1 << 28] = 1
        >>> arena.resident_bytes
        16384
    """

    def __init__(self, nbytes: int, subject: str, scattered: bool = False) -> None:
        self._map = _map(nbytes, subject)
        self.memory = np.frombuffer(self._map, np.uint8, nbytes)
        self._start = -self.memory.ctypes.data % HUGE_PAGE  # of the first huge page
        self._is_small = np.ones(max(0, nbytes - self._start) // HUGE_PAGE if platform.HAS_HUGE_PAGES else 0, bool)
        self._next_look = max(LEAST_LOOK_BYTES, nbytes // FIRST_LOOK)
        self._waiting: list[int] = []  # huge pages to make, the last one first
        if self._is_small.size:
            self._map.madvise(mmap.MADV_NOHUGEPAGE)  # some systems have them everywhere, unless told
            if not scattered and len(self._is_small) > 1:
                self._allow(1, len(self._is_small))

    def densify(self, nbytes: int) -> None:
        """Use huge pages where half of the small ones are in use, a few at a time.

        Call it often: it looks at the pages only when the memory in use has grown by a quarter.

        Args:
            nbytes: of the memory, how much is in use.
        """
        if nbytes >= self._next_look:
            self._next_look = min(int(nbytes * GROWTH), max(len(self.memory), nbytes + 1))
            self._look()
        for _ in range(min(MOST_AT_ONCE, len(self._waiting))):
            with suppress(OSError):  # an older system makes them by itself, in time; or it has none left
                self._map.madvise(_COLLAPSE, self._start + self._waiting.pop() * HUGE_PAGE, HUGE_PAGE)

    def expect_all(self) -> None:
        """Use huge pages from now on wherever nothing was written yet, as all of it will be."""
        if self._is_small.any():
            self._allow(0, len(self._is_small))

    def give_back(self, start: int, stop: int) -> int:
        """Let the whole pages from byte `start` to `stop` go, with what is in them; return where the next one begins.

        Where the system cannot, they stay, and take RAM as long as the memory does.
        """
        start, stop = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)
        return max(start, stop)

    @property
    def resident_bytes(self) -> int:
        """RAM that it takes, in whole pages, as the system says, also those that were only read. 24 GiB: 20 ms."""
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
        """Return which pages from byte `start` to `stop` are in RAM: uint8, 1 for those that are."""
        return platform.resident_pages(self.memory.ctypes.data + start, stop - start)


def reserve(nbytes: int, subject: str, scattered: bool = False) -> np.ndarray:
    """Return the memory of an `Arena`, whose use nobody will tell it: uint8 (nbytes,)."""
    return Arena(nbytes, subject, scattered).memory


def returned(shape: int | tuple[int, ...], dtype: npt.DTypeLike, subject: str) -> npt.NDArray[Any]:
    """Return zeros whose memory the system has back as soon as no array uses it.

    What `malloc` gave it may keep, for each thread that was. So this is for what is large, and gone soon.

    Example:
        >>> returned((2, 3), np.int32, "a copy").shape
        (2, 3)
    """
    made = np.dtype(dtype)
    return reserve(made.itemsize * math.prod(np.atleast_1d(shape).tolist()), subject).view(made).reshape(shape)


def taken(array: npt.NDArray[Any], at: npt.NDArray[Any] | slice, subject: str) -> npt.NDArray[Any]:
    """Return items of an array, by number, in memory of that kind."""
    if isinstance(at, slice):
        made = returned(array[at].shape, array.dtype, subject)
        made[...] = array[at]
        return made
    made = returned((len(at), *array.shape[1:]), array.dtype, subject)
    return np.take(array, at, axis=0, out=made, mode="clip")  # which "raise" would make another copy for


def _map(nbytes: int, subject: str) -> mmap.mmap:
    try:
        return platform.private_memory(max(nbytes, 1), sparse=True)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryBudgetError(
            f"{subject} needs {format_bytes(nbytes)} of address space, and the system refused: {error}. "
            "Pass a smaller memory=, or lift the limit (ulimit -v)."
        ) from error
