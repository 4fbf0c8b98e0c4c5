"""`NearRanks`: messages between ranks of one machine, through shared memory."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock.distributed.messages import WORD, Mail
from embedrock.system.shared_memory import TOKEN, MappedMemory, PipeLine, SharedMemory

ADDRESS = 4  # int64: address of a board
WIDTH = 8 * (3 + ADDRESS)  # bytes of an entry on a board


class _Wait(NamedTuple):
    """The entry on a board.

    Attributes:
        serial: number of the wait in its process; 0: the process does not wait.
        looks: how often the process has looked for the message, in vain.
        circle: serial of the awaited process's wait if the waits are known to form a circle; else 0.
        address: address of the awaited process's board.
    """

    serial: int
    looks: int
    circle: int
    address: Sequence[int]


class WaitBoard:
    """The process that this process waits for, as other processes see it.

    It shows one wait at a time: that of the first thread that waits.

    Raises:
        OSError: the system has no shared memory.
        MemoryError: no shared memory is left.
    """

    def __init__(self) -> None:
        self._board = SharedMemory()
        self._written = self._board.take(WIDTH).view(np.int64)
        self._written[:] = 0
        self._serial = 0
        self._thread: int | None = None
        self._before: list[_Wait] = []

    @property
    def address(self) -> list[int]:
        """Address of the board, four numbers."""
        return [*self._board.address, *self._board.token.tolist()]

    def look(self, other: Sequence[int]) -> bool:
        """Record that another process's message has not come yet; return whether the waits form a circle.

        Args:
            other: address of the other process's board.
        """
        if self._thread is None:
            self._begin(other)
        if self._thread != threading.get_ident():
            return False  # one of two waits may end, and the process continue
        self._written[1] += 1
        found, before = self._followed(other), self._before
        if [wait.serial for wait in found] != [wait.serial for wait in before]:
            self._before = found
        is_known = any(wait.circle for wait in found)
        is_stuck = is_known or (
            bool(found)
            and self._before is before
            and all(then.looks < wait.looks for then, wait in zip(before, found, strict=True))
        )
        if is_stuck:
            self._written[2] = found[0].serial
        return is_stuck

    def _begin(self, other: Sequence[int]) -> None:
        self._thread, self._before = threading.get_ident(), []
        self._serial += 1
        self._written[0] = 0
        self._written[1:] = [0, 0, *other]
        self._written[0] = self._serial

    def end(self) -> None:
        """Record that the wait is over. A wait in a circle stays visible to the others until the next wait."""
        if self._thread == threading.get_ident():
            self._thread = None
            if not self._written[2]:
                self._written[0] = 0

    def _followed(self, other: Sequence[int]) -> list[_Wait]:
        """Return the waits of the other processes in a circle with this one; empty: no circle.

        The first is that of the process that this one waits for.
        """
        waits, address, own = list[_Wait](), list(other), self.address
        while address != own:
            wait = _read(address)
            if wait is None or any(wait.address == one.address for one in waits):
                return []
            waits.append(wait)
            address = list(wait.address)
        serials = [*(wait.serial for wait in waits), self._serial][1:]
        is_old = any(wait.circle not in (0, serial) for wait, serial in zip(waits, serials, strict=False))
        return [] if is_old else waits


def _read(address: Sequence[int]) -> _Wait | None:
    """Return the wait of a process, by the address of its board; None if the process does not wait, or is gone."""
    try:
        window = MappedMemory((address[0], address[1]), np.array(address[2:], np.int64))
    except OSError:
        return None
    serial, looks, circle, *other = window.view(TOKEN, WIDTH).view(np.int64).tolist()
    return _Wait(serial, looks, circle, other) if serial else None


@functools.lru_cache(1)
def _waits_of(process: int) -> WaitBoard:
    return WaitBoard()


def waits_here() -> WaitBoard:
    """Return the board of this process; a forked child has its own. Raises what `WaitBoard` raises."""
    return _waits_of(os.getpid())


Gather = Callable[[np.ndarray], Any]  # gives all ranks an array, returns that of each
PATIENCE_S = 1.0  # before a rank checks the state of the awaited rank


class NearRanks:
    """Ranks of one machine that exchange messages through shared memory, and send each other only the addresses.

    A rank has two memory segments and writes to them in turn. Ranks read a message before they send the next one. So a
    rank may reuse a segment after one more message.

    Args:
        rank: rank of this process.
        segments: its own memory segments.
        windows: mappings of the memory segments of each rank.
        lines: connections to each other rank.
        boards: addresses of the wait board of each rank.
    """

    def __init__(
        self,
        rank: int,
        segments: Sequence[SharedMemory],
        windows: Sequence[Sequence[MappedMemory]],
        lines: Mapping[int, PipeLine],
        boards: Sequence[Sequence[int]],
    ) -> None:
        self._rank, self._segments, self._windows, self._current = rank, segments, windows, 0
        self._lines, self._boards = lines, boards
        self._room = np.empty(0, WORD)

    @staticmethod
    def of(rank: int, ranks: int, gather: Gather) -> NearRanks | None:
        """Return the connection if all ranks of a group can map each other's memory; None on all ranks otherwise."""
        if ranks == 1:
            return None
        lines: dict[int, PipeLine] = {}
        try:
            segments, lines = [SharedMemory(), SharedMemory()], {to: PipeLine() for to in range(ranks) if to != rank}
            own = np.concatenate([*([*segment.address, *segment.token] for segment in segments), waits_here().address])
        except (OSError, MemoryError):
            segments, own = [], np.zeros(12, np.int64)
        ends = np.array([lines[to].address[1] if to in lines else 0 for to in range(ranks)])
        theirs = gather(np.concatenate([own, ends]).astype(np.int64))
        try:
            windows = [[_window(each[:4]), _window(each[4:8])] for each in theirs]
            for to, line in lines.items():
                line.connect((int(theirs[to][0]), int(theirs[to][12 + rank])))
        except (OSError, MemoryError):
            windows = []
        sees_all = bool(segments and windows)
        if not all(one[0] for one in gather(np.array([sees_all], np.int64))):
            return None
        for line in lines.values():
            line.connected()
        return NearRanks(rank, segments, windows, lines, [each[8:12].tolist() for each in theirs])

    def swapped(self, numbers: np.ndarray, timeout_s: float) -> np.ndarray:
        """Send each rank its row of int64 (ranks, n), of `MOST` bytes at most; return the rows from all ranks.

        Args:
            numbers: the rows.
            timeout_s: time to wait for a rank, in seconds.

        Raises:
            CircleError: the awaited rank waits for this rank, directly or through other ranks.
            OSError: a rank has closed its connection, is gone, or did not answer in time.
        """
        theirs, until = numbers.copy(), time.monotonic() + timeout_s
        for to, line in self._lines.items():
            line.send(numbers[to].tobytes())
        for sender, line in self._lines.items():
            message = _received(line, theirs[sender].nbytes, until, self._boards[sender])
            theirs[sender] = np.frombuffer(message, np.int64)
        return theirs

    @property
    def is_waited_for(self) -> bool:
        """True if a rank has sent a message that this rank has not read, so waits for the answer."""
        return any(line.has_message for line in self._lines.values())

    def close(self) -> None:
        """Close the connections: the other ranks see that at once."""
        for line in self._lines.values():
            line.close()

    def room(self, words: int) -> np.ndarray:
        """Return memory for this rank's next messages, int32 (words,)."""
        self._room = self._segments[self._current].take(4 * words).view(WORD)
        return self._room

    def left(self, mail: Mail) -> np.ndarray:
        """Publish this rank's messages in its memory; return the address for each rank: int64 (ranks, 2)."""
        if mail.flat is not self._room:
            self.room(len(mail.flat))[:] = mail.flat
        self._current = 1 - self._current
        parts = itertools.pairwise(mail.bounds)
        return np.array([(TOKEN + 4 * start, 4 * (end - start)) for start, end in parts], np.int64)

    def read(self, notes: np.ndarray) -> list[np.ndarray]:
        """Return the message from each rank by its address: int32 (words,), valid until the next exchange."""
        previous = 1 - self._current
        found = zip(self._windows, notes.tolist(), strict=True)
        return [windows[previous].view(start, nbytes).view(WORD) for windows, (start, nbytes) in found]


class CircleError(Exception):
    """An error: processes of this machine wait for each other in a circle."""


def _received(line: PipeLine, nbytes: int, until: float, board: Sequence[int]) -> bytes:
    waits = None
    try:
        while True:
            begin = time.monotonic()
            try:
                return line.receive(nbytes, min(until, begin + PATIENCE_S))
            except OSError as error:
                is_over = not isinstance(error, TimeoutError) or begin + PATIENCE_S >= until
                waits = waits or waits_here()
                if waits.look(board):
                    time.sleep(PATIENCE_S)  # so that the others see it too, before this process ends
                    raise CircleError from error
                if is_over:
                    raise
    finally:
        if waits is not None:
            waits.end()


def _window(address: np.ndarray) -> MappedMemory:
    return MappedMemory((int(address[0]), int(address[1])), address[2:4])
