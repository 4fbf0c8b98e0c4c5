"""Many reads at once: asynchronous reads of Linux, or threads that wait for the disk."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
from collections.abc import Set
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from embedrock import kernels
from embedrock.errors import ArgumentError
from embedrock.system import forks
from embedrock.system.platform import NAME

Pieces = tuple[npt.NDArray[Any], ...]  # arguments of the kernel `read_pieces`; all but `out` have one item per read

FEWEST = 2  # fewer reads are made one after another
AT_ONCE = 128  # asynchronous reads in flight: 64 reached 0.85 of the rate, 256 the same
THREADS = 64
DISAPPOINTMENTS = 16  # blocking calls in a row, after which threads read: the file system blocks


class ThreadReader:
    """Daemon threads that wait for the disk, started at the first read."""

    def __init__(self, threads: int) -> None:
        pread = kernels.cpu.pread
        self._desk = np.zeros((pread.JOBS + 1, pread.WORDS), np.int64)
        self.threads = threads if pread.set_up(self._desk) else 0
        self._jobs: SimpleQueue[int] = SimpleQueue()
        for job in range(pread.JOBS):
            self._jobs.put(job)
        for index in range(self.threads):
            name = f"embedrock-io-{index}"
            threading.Thread(target=pread.serve, args=(self._desk,), name=name, daemon=True).start()

    def read(self, pieces: Pieces) -> None:
        count = len(pieces[0])
        if count < FEWEST or self.threads == 0:
            return kernels.cpu.pread.read_pieces(*pieces, 0, count)
        job = self._jobs.get()
        try:
            kernels.cpu.pread.read_together(self._desk, job, *pieces, self.threads)
        finally:
            self._jobs.put(job)


class LinuxReader:
    """Asynchronous reads past the page cache. Each call uses its own context, and later calls reuse it.

    Attributes:
        works: whether the system supports asynchronous reads, and they do not block.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._disappointments = at_once, 0
        self._calls = kernels.cpu.aio.CALLS.get(platform.machine(), ()) if NAME == "Linux" else ()
        self._contexts: SimpleQueue[Pieces] = SimpleQueue()
        self.works = bool(self._calls)

    def read(self, pieces: Pieces) -> bool:
        """Make all reads and return True, or make none and return False."""
        context = self._context() if self.works else None
        if context is None:
            return False
        is_asynchronous = kernels.cpu.aio.read_together(*context, self._calls, *pieces)
        # On a busy machine, all of the first reads may end before the caller looks. That does not happen every time.
        self._disappointments = 0 if is_asynchronous else self._disappointments + 1
        self.works = self._disappointments < DISAPPOINTMENTS
        self._contexts.put(context)
        return True

    def _context(self) -> Pieces | None:
        """Return a context that no call uses, if need be a new one; None: the system has no more."""
        with contextlib.suppress(Empty):
            return self._contexts.get_nowait()
        aio, count = kernels.cpu.aio, self._at_once
        words = [1, (count, aio.REQUEST_WORDS), count, count, (count, aio.EVENT_WORDS)]
        number, *rest = (np.zeros(shape, np.int64) for shape in words)
        self.works = aio.set_up(number, count, self._calls)  # containers may forbid it
        return (number, *rest) if self.works else None


class Readers:
    """Readers for all files. Each read takes the fastest way that its file supports."""

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.LOADING)
        self._threads: ThreadReader | None = None

    @forks.cached_property
    def _linux(self) -> LinuxReader:
        return LinuxReader(_wanted() or AT_ONCE)

    def read(self, pieces: Pieces, direct: Set[int]) -> None:
        """Make many reads at once, with the arguments of the kernel `read_pieces`.

        Args:
            pieces: `fds`, `offsets`, `sizes`, `out`, `starts`, `got`.
            direct: descriptors that are read past the page cache.
        """
        fds, _, _, out, _, _ = pieces
        if len(fds) < FEWEST or not self._linux.works:
            return self._by_threads(pieces)
        is_direct = np.isin(fds, np.array(list(direct), np.int64))
        for chosen in (is_direct, ~is_direct):
            if chosen.any():
                is_part = not chosen.all()
                part = tuple(array if array is out else array[chosen] for array in pieces) if is_part else pieces
                if chosen is not is_direct or not self._linux.read(part):
                    self._by_threads(part)
                pieces[-1][chosen] = part[-1]

    def _by_threads(self, pieces: Pieces) -> None:
        if self._threads is None:
            with self._lock:
                self._threads = self._threads or ThreadReader(_wanted() or THREADS)
        self._threads.read(pieces)


def _wanted() -> int | None:
    text = os.environ.get("EMBEDROCK_IO_THREADS")
    if text is None:
        return None
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise ArgumentError(
            f"the environment variable EMBEDROCK_IO_THREADS must be a whole number from 1 to 256: got {text!r}. "
            f"Unset it to have {AT_ONCE} reads in flight, or {THREADS} threads where Linux makes none by itself."
        )
    return int(text)


READERS = Readers()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    """Discard threads and contexts: they are not valid in a forked child."""
    global READERS
    READERS = Readers()
