"""Probes of a disk: random reads, and one long write."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from embedrock.io.vfs import BLOCK, OS_SYSTEM
from embedrock.system.platform import O_DIRECT

REQUESTS = 8192  # reads per call of the reader
WRITE_BYTES = 8 << 20  # bytes per write call
PROBE_BYTES, PROBE_S = 64 << 20, 1.0  # size of the probe's file; seconds to write and to read, at most


class BlockReader:
    """Reader of random 4 KiB blocks by `embedrock.io.vfs`, past the page cache.

    Args:
        paths: files to read, each of at least one block.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._fds = [OS_SYSTEM.open(str(path), os.O_RDONLY | O_DIRECT) for path in paths]
        self._blocks = [OS_SYSTEM.size(fd) // BLOCK for fd in self._fds]
        self._random = np.random.default_rng()
        self._memory = np.frombuffer(mmap.mmap(-1, REQUESTS * BLOCK), np.uint8)

    def rate(self, seconds: float) -> float:
        """Return the reads/s of large calls that take about `seconds` together."""
        self._read(REQUESTS)  # compiles kernels and starts threads
        start, count = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds or not count:
            count += self._read(REQUESTS)
        return count / elapsed

    def best_rate(self, seconds: float) -> float:
        """Return the reads/s of the fastest call, in about `seconds` at most. Each call makes more reads at once."""
        self._read(1)  # compiles kernels and starts threads
        best, count, end = 0.0, 1, time.perf_counter() + seconds
        while not best or time.perf_counter() + count / best < end:
            start = time.perf_counter()
            best = max(best, self._read(count) / (time.perf_counter() - start))
            count = min(4 * count, REQUESTS)
        return best

    def close(self) -> None:
        for fd in self._fds:
            OS_SYSTEM.close(fd)
        self._fds = []

    def _read(self, count: int) -> int:
        chosen = self._random.integers(len(self._fds), size=count)
        offsets = (self._random.random(count) * np.array(self._blocks)[chosen]).astype(np.int64) * BLOCK
        fds, sizes = np.array(self._fds, np.int64)[chosen], np.full(count, BLOCK)
        OS_SYSTEM.read_many(fds, offsets, sizes, self._memory, np.arange(count) * BLOCK)
        return count


def random_reads(folder: str | os.PathLike[str]) -> float:
    """Return the random 4 KiB reads a second of a folder's disk, measured in at most 3 seconds.

    The probe writes a file of at most 64 MiB to the folder, and removes it.

    Raises:
        OSError: the folder is not writable, or its disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="embedrock-probe-", dir=folder) as scratch:
        path = Path(scratch) / "blocks"
        write_rate(path, PROBE_BYTES, keep=True, seconds=PROBE_S)
        with closing(BlockReader([path])) as reader:
            return reader.best_rate(PROBE_S)


def write_rate(path: Path, size: int, keep: bool = False, seconds: float = float("inf")) -> float:
    """Write a file of `size` random bytes and return the rate in bytes/s. The file is removed unless `keep`.

    Writes bypass the page cache where the file system can, and are durable at the end. The file is shorter if writing
    takes more than `seconds`.
    """
    with mmap.mmap(-1, WRITE_BYTES) as block:
        block[:] = np.random.default_rng(0).bytes(WRITE_BYTES)
        fd = OS_SYSTEM.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_DIRECT)
        try:
            start, written = time.perf_counter(), 0
            while written < size and time.perf_counter() - start < seconds:
                written += os.write(fd, block)
            OS_SYSTEM.fdatasync(fd)
            return written / (time.perf_counter() - start)
        finally:
            OS_SYSTEM.close(fd)
            if not keep:
                path.unlink()
