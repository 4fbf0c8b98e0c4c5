"""Memory that other processes of this machine read: an unnamed file that each process maps."""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
import weakref

import numpy as np

from embedrock.system import platform

TOKEN = 16  # bytes at the start that identify the segment
GRAIN = 1 << 16  # sizes are multiples of this many bytes


class SharedMemory:
    """Memory of this process that others read, freed with the last process that has it open.

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
        """Return the address for other processes: the ids of this process and of the open file."""
        return os.getpid(), self._fd

    def take(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes of it, uint8 (nbytes,), of unknown content, in place of the bytes of the last call.

        Raises:
            MemoryError: the system has no more memory.
        """
        needed = TOKEN + nbytes
        if needed > len(self._memory):
            self._grow(-(-(needed + needed // 8) // GRAIN) * GRAIN)
        return self._memory[TOKEN:needed]

    def _grow(self, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, nbytes)  # a write to missing pages would end the process by a signal
            self._memory = np.frombuffer(mmap.mmap(self._fd, nbytes), np.uint8)
        except OSError as error:
            raise MemoryError(f"no {nbytes:,} bytes for messages to other processes: {error.strerror}") from error
        self._memory[:TOKEN] = self.token.view(np.uint8)


class MappedMemory:
    """Shared memory of another process, for reading.

    Args:
        address, token: the attributes of its `SharedMemory`.

    Raises:
        OSError: this process cannot open it.
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
        """Return some of its bytes, uint8 (nbytes,), as a view. The other process may change them later."""
        if start + nbytes > len(self._memory):
            mapped = mmap.mmap(self._fd, os.fstat(self._fd).st_size, prot=mmap.PROT_READ)
            self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory[start : start + nbytes]


MOST = 4096  # bytes of a message: a pipe takes one at once, and has room for a few


class PipeLine:
    """Connection to another process, with one pipe in each direction.

    A process reads each message before its peer sends the next but one.

    Raises:
        OSError: this system has no such pipes.

    Attributes:
        address: ids of this process and of the open file. The other process opens its end there.
        process: id of the other process, once connected.
    """

    def __init__(self) -> None:
        self._reads, far = os.pipe()
        os.set_blocking(self._reads, False)
        self.address = os.getpid(), far
        self._open = [self._reads, far]
        self._writes = self.process = -1
        self._wakes = select.poll()
        self._wakes.register(self._reads, select.POLLIN)
        weakref.finalize(self, _close_all, self._open)

    def connect(self, address: tuple[int, int]) -> None:
        """Open this process's end of the other line, at its address.

        Raises:
            OSError: this process cannot open it.
        """
        process, far = address
        self._writes = os.open(f"/proc/{process}/fd/{far}", os.O_WRONLY | os.O_NONBLOCK)
        self._open.append(self._writes)
        if not os.readlink(f"/proc/self/fd/{self._writes}").startswith("pipe:"):
            raise OSError("the file is another one")
        self.process = process
        lives = platform.watch_process(process)
        self._open.append(lives)
        self._wakes.register(lives, select.POLLIN)

    def connected(self) -> None:
        """Close this process's copy of the far end, because the other process has opened it."""
        os.close(self._open.pop(1))

    def send(self, message: bytes) -> None:
        """Send a message of at most `MOST` bytes.

        Raises:
            OSError: the other process has closed the line.
        """
        os.write(self._writes, message)

    def receive(self, nbytes: int, until: float) -> bytes:
        """Return the next message, of `nbytes` bytes. Wait for it until `until`, in seconds of `time.monotonic`.

        Raises:
            OSError: the other process has closed the line, is gone, or sent nothing in time.
        """
        while True:
            try:
                message = os.read(self._reads, nbytes)
            except BlockingIOError:
                woken = self._wakes.poll(max(0.0, until - time.monotonic()) * 1000.0)
                if not woken:
                    raise TimeoutError("timed out") from None
                if not any(fd == self._reads for fd, _ in woken):
                    raise ConnectionResetError("the process is gone") from None
                continue
            if len(message) != nbytes:
                raise ConnectionResetError("the process has closed the connection")
            return message

    @property
    def has_message(self) -> bool:
        """Return whether an unread message is there, from a process that has not closed the line."""
        return bool(self._open) and (self._reads, select.POLLIN) in self._wakes.poll(0)

    def close(self) -> None:
        """Close the line. The other process gets an error when it sends or waits."""
        _close_all(self._open)


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
