"""Memory that other processes of this machine read: a file without a name, that each maps."""

from __future__ import annotations

import mmap
import os
import secrets
import weakref

import numpy as np

from embedrock.process import platform

TOKEN = 16  # bytes at the start, by which a reader knows the segment
GRAIN = 1 << 16  # bytes, that sizes are multiples of


class SharedMemory:
    """Memory of this process that others read. It is gone with the last process that has it open.

    Raises:
        OSError: this system has no such memory.

    Attributes:
        token: int64 (2,), at its start.
    """

    def __init__(self) -> None:
        self._fd = platform.file_in_memory("embedrock")
        weakref.finalize(self, os.close, self._fd)
        self._memory = np.empty(0, np.uint8)
        self.token = np.frombuffer(secrets.token_bytes(TOKEN), np.int64)
        self._grow(GRAIN)

    @property
    def address(self) -> tuple[int, int]:
        """Where others find it: the number of this process, and of the open file."""
        return os.getpid(), self._fd

    @property
    def start(self) -> int:
        """The address of its first byte in this process."""
        return self._memory.ctypes.data

    def has(self, array: np.ndarray) -> bool:
        """Return whether an array lies in it."""
        return self.start <= array.ctypes.data <= self.start + len(self._memory) - array.nbytes

    def take(self, nbytes: int) -> np.ndarray:
        """Return so many bytes of it, uint8, of unknown content, which take the place of those before.

        Raises:
            MemoryError: the system has no more.
        """
        needed = TOKEN + nbytes
        if needed > len(self._memory):
            self._grow(-(-(needed + needed // 8) // GRAIN) * GRAIN)
        return self._memory[TOKEN:needed]

    def _grow(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # or who writes to it would end by a signal, not by an error
            self._memory = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        except OSError as error:
            raise MemoryError(f"no {nbytes:,} bytes for messages to other processes: {error.strerror}") from error
        self._memory[:TOKEN] = self.token.view(np.uint8)


class MappedMemory:
    """A segment of another process, to read.

    Args:
        address, token: of the segment.

    Raises:
        OSError: this process cannot see it.
    """

    def __init__(self, address: tuple[int, int], token: np.ndarray) -> None:
        self._fd = os.open(f"/proc/{address[0]}/fd/{address[1]}", os.O_RDONLY | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._fd)
        self._memory = np.empty(0, np.uint8)
        if not os.readlink(f"/proc/self/fd/{self._fd}").startswith("/memfd:embedrock"):
            raise OSError("the file is another one")
        if not np.array_equal(self.view(0, TOKEN).view(np.int64), token):
            raise OSError("the segment is another one")

    def view(self, start: int, nbytes: int) -> np.ndarray:
        """Return some of its bytes, uint8, as they are: the other process may write to them later."""
        if start + nbytes > len(self._memory):
            mapped = mmap.mmap(self._fd, os.fstat(self._fd).st_size, prot=mmap.PROT_READ)
            self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory[start : start + nbytes]
