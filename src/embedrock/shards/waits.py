"""`WaitBoard`: which process of a machine waits for which other one, so that a circle of them is found.

A process that has waited for a while says for whom on a board, which the others read: a segment. Who follows them from
one to the next, and comes back to itself, may be in a circle, or may have seen some of them as they were a moment ago.
So it looks again later: if each is at the same wait, and has meanwhile looked once more for what it waits for, then no
message is on its way to any of them, and none will be.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embedrock.machine.segments import TOKEN, MappedMemory, SharedMemory

ADDRESS = 4  # int64: of a board
WIDTH = 8 * (3 + ADDRESS)  # bytes that are written on one


class _Wait(NamedTuple):
    """What is written on a board.

    Attributes:
        serial: which wait of the process it is; 0: it does not wait.
        looks: how often it has looked for the message, in vain.
        circle: the serial of who is waited for, once it is known that this goes round in a circle; else 0.
        address: of the board of who is waited for.
    """

    serial: int
    looks: int
    circle: int
    address: Sequence[int]


class WaitBoard:
    """For whom this process waits, as others see it: one wait at a time, of the first thread that does.

    Raises:
        OSError: this system has no memory that others see.
        MemoryError: it has no more of it.
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
        """Where others find the board, by four numbers."""
        return [*self._board.address, *self._board.token.tolist()]

    def look(self, other: Sequence[int]) -> bool:
        """Note that a message from another process was looked for, in vain; return whether it waits in a circle.

        Args:
            other: its address.
        """
        if self._thread is None:
            self._begin(other)
        if self._thread != threading.get_ident():
            return False  # of two waits, one may end, and the process go on
        self._written[1] += 1
        found, before = self._followed(other), self._before
        if [wait.serial for wait in found] != [wait.serial for wait in before]:
            self._before = found
        is_known = any(wait.circle for wait in found)
        is_stuck = is_known or (bool(found) and self._before is before and _have_looked(before, found))
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
        """Note that the wait is over. One that was in a circle stays there, for the others to see, until the next."""
        if self._thread == threading.get_ident():
            self._thread = None
            if not self._written[2]:
                self._written[0] = 0

    def _followed(self, other: Sequence[int]) -> list[_Wait]:
        """Return the waits of the others in a circle with this one, from that which it waits for; none: no circle."""
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
    """Return the wait of a process, by the address of its board; None where it does not wait, or is gone."""
    try:
        window = MappedMemory((address[0], address[1]), np.array(address[2:], np.int64))
    except OSError:
        return None
    serial, looks, circle, *other = window.view(TOKEN, WIDTH).view(np.int64).tolist()
    return _Wait(serial, looks, circle, other) if serial else None


def _have_looked(before: Sequence[_Wait], now: Sequence[_Wait]) -> bool:
    """Return whether all have looked for their messages since they were seen before, at the same waits."""
    return all(then.looks < wait.looks for then, wait in zip(before, now, strict=True))


@functools.lru_cache(1)
def _waits_of(process: int) -> WaitBoard:
    return WaitBoard()


def waits_here() -> WaitBoard:
    """Return those of this process, of which a forked child has its own. Raises what `WaitBoard` raises."""
    return _waits_of(os.getpid())
