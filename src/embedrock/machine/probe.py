"""What the machine gives to a program that wants nothing else: random reads, one long write, copies, random rows."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from embedrock import kernels
from embedrock.machine.vfs import BLOCK, OS_SYSTEM
from embedrock.process.platform import O_DIRECT

REQUESTS = 8192  # of one call of the reader
WRITE_BYTES = 8 << 20  # of one call, when writing


class BlockReader:
    """Reads random blocks of 4 KiB by `embedrock.machine.vfs`, past the page cache.

    Args:
        paths: files to read, each of one block at least.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._fds = [OS_SYSTEM.open(str(path), os.O_RDONLY | O_DIRECT) for path in paths]
        self._blocks = [OS_SYSTEM.size(fd) // BLOCK for fd in self._fds]
        self._random = np.random.default_rng()
        self._memory = np.frombuffer(mmap.mmap(-1, REQUESTS * BLOCK), np.uint8)

    def rate(self, seconds: float, at_once: int = REQUESTS, size: int = BLOCK) -> float:
        """Return the reads/s of calls of so many reads, of `size` bytes each, that take about `seconds` together."""
        self._read(at_once, size)  # compiles, starts threads
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds or not count:
            count += self._read(at_once, size)
        return count / elapsed

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            OS_SYSTEM.close(fd)
        self._fds = []

    def _read(self, count: int, size: int) -> int:
        chosen = self._random.integers(len(self._fds), size=count)
        starts = np.array(self._blocks)[chosen] - size // BLOCK + 1
        offsets = (self._random.random(count) * starts).astype(np.int64) * BLOCK
        fds, sizes = np.array(self._fds, np.int64)[chosen], np.full(count, size)
        OS_SYSTEM.read_many(fds, offsets, sizes, self._memory, np.arange(count) * size)
        return count


def write_rate(path: Path, size: int, keep: bool = False) -> float:
    """Write a file of `size` bytes from its beginning to its end, and return its bytes/s; it is removed unless kept.

    Random bytes, past the page cache where the file system can, and safe on the disk at the end.
    """
    with mmap.mmap(-1, WRITE_BYTES) as block:
        block[:] = np.random.default_rng(0).bytes(WRITE_BYTES)
        fd = OS_SYSTEM.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_DIRECT)
        try:
            start, written = time.perf_counter(), 0
            while written < size:
                written += os.write(fd, block)
            OS_SYSTEM.fdatasync(fd)
            return written / (time.perf_counter() - start)
        finally:
            OS_SYSTEM.close(fd)
            if not keep:
                path.unlink()


def copy_rate(nbytes: int = 64 << 20, seconds: float = 0.2) -> float:
    """Return the bytes/s that one thread copies from memory to memory."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return nbytes / _best(lambda: np.copyto(target, source), seconds)


def row_rate(row_bytes: int, nbytes: int = 128 << 20, seconds: float = 0.2) -> float:
    """Return the rows/s that our threads gather at random from memory."""
    memory, random = np.zeros((nbytes // row_bytes, row_bytes // 4), np.float32), np.random.default_rng(0)
    count = 1 << 15
    slots, positions = random.integers(len(memory), size=count), np.arange(count, dtype=np.int32)
    memory.fill(1)  # so that each page is there
    out, fresh = np.empty((count, memory.shape[1]), np.float32), np.empty((0, memory.shape[1]), np.float32)
    gather = kernels.cpu.rows.gather
    return count / _best(lambda: kernels.cpu.launch(gather, memory, slots, positions, fresh, out), seconds)


def _best(function: object, seconds: float) -> float:
    """Return the least seconds of a call, of those that take `seconds` together."""
    assert callable(function)
    function()
    least, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        function()
        least = min(least, time.perf_counter() - start)
    return least
