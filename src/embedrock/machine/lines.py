"""Short messages between two processes of this machine: a pipe each way, that each opens at the other.

One that waits sleeps in the kernel until the other's message wakes it, and nobody else: no thread, and no network.
"""

from __future__ import annotations

import os
import select
import time
import weakref

from embedrock.process import platform

MOST = 4096  # bytes of a message: so many are written to a pipe at once, and a few such have room in it


class PipeLine:
    """A line to another process, which has one to this one. A message is read before the next but one is sent.

    Raises:
        OSError: this system has no such thing.

    Attributes:
        address: where the other process finds its end: the number of this process, and of the open file.
        process: the number of the other one, once it is connected.
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
        """Open this process's end of the other's line, at its address.

        Raises:
            OSError: this process cannot see it.
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
        """Note that the other process has connected: from now on, its end is open there only."""
        os.close(self._open.pop(1))

    def send(self, message: bytes) -> None:
        """Send a message of `MOST` bytes at most.

        Raises:
            OSError: the other process has closed the line.
        """
        os.write(self._writes, message)

    def receive(self, nbytes: int, until: float) -> bytes:
        """Return the next message, of so many bytes; wait for it until a time of `time.monotonic`.

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
        """Whether a message is there that was not read, from a process that has not closed the line."""
        return bool(self._open) and (self._reads, select.POLLIN) in self._wakes.poll(0)

    def close(self) -> None:
        """Close the line: the other process hears of it as it sends or waits."""
        _close_all(self._open)


def _close_all(files: list[int]) -> None:
    while files:
        os.close(files.pop())
