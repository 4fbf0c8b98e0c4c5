"""`Clock`: the time by which rows of a table become idle, that of events or that of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from embedrock.errors import ArgumentError

TICKS = 64  # recorded times within the allowed idle time
PAUSE_S, LONGER = 60.0, 16  # a gap between steps counts at most this, or `LONGER` times the gap before


class Reading(NamedTuple):
    """Time of a clock after a step.

    Attributes:
        now: seconds since 1970 of events, or seconds of training.
        counts_events: whether it is the time of events.
        shift: seconds to add to all times before, where the clock begins to count events.
        machine: time of the machine, in seconds.
    """

    now: float
    counts_events: bool
    shift: int = 0
    machine: float | None = None


class Clock:
    """Clock of a table: the newest time of its events so far, or the seconds that it has trained.

    The first step with a time makes it a clock of events. Rows keep their age then.

    Args:
        idle: seconds without a use after which a row is idle; 0: the clock stands still.
        machine: returns the time in seconds. Only gaps between steps matter.

    Attributes:
        read: the last reading.
        ticks: int64 (n, 2), pairs of a step and its time. That step was the newest one then.
    """

    def __init__(self, idle: float, machine: Callable[[], float] = time.monotonic) -> None:
        self.idle, self._machine, self.read = idle, machine, Reading(0.0, False)
        self.ticks, self._gap = np.empty((0, 2), np.int64), 0.0  # seconds that the last gap added

    def after(self, event: float | None, subject: str) -> Reading:
        """Return the reading after a step whose newest event has this time. Nothing changes.

        Raises:
            ArgumentError: the clock counts events, and the step has no time.
        """
        last = self.read
        if not self.idle:
            return last
        if event is None and last.counts_events:
            raise ArgumentError(
                f"a step of {subject} must have time=, as the steps before: the time of its events. Got none. For "
                "events of this moment, pass time=time.time()."
            )
        if event is None:
            machine = self._machine()
            return last._replace(now=last.now + self._gap_until(machine), machine=machine)
        newest = math.floor(event)
        if last.counts_events:
            return last._replace(now=max(last.now, newest))
        return Reading(newest, True, newest - math.ceil(last.now))

    def _gap_until(self, machine: float) -> float:
        """Return the seconds of training since the last step. A pause counts as little as a step.

        A gap counts in full if steps are regularly rare: up to `LONGER` times the gap before.
        """
        gap = 0.0 if self.read.machine is None else max(0.0, machine - self.read.machine)
        return min(gap, max(min(PAUSE_S, self.idle / TICKS), LONGER * self._gap))

    def moved(self, to: Reading) -> float:
        """Return the time from the last reading to another, as a share of the idle time."""
        return (to.now - to.shift - self.read.now) / self.idle if self.idle else 0.0

    def idle_before(self, at: Reading) -> int:
        """Return the first step whose rows are not idle yet at a reading. Rows used before it are idle."""
        expired = np.flatnonzero(self.ticks[:, 1] + at.shift <= at.now - self.idle)
        return int(self.ticks[expired[-1], 0]) + 1 if expired.size else -1

    def set(self, step: int, to: Reading) -> None:
        """Take over the reading of a step."""
        if not self.idle:
            return
        self._gap, self.ticks = to.now - to.shift - self.read.now, self.ticks + np.array([0, to.shift])
        self.read, ticks = to._replace(shift=0), self.ticks
        if len(ticks) > 1 and to.now - ticks[-2, 1] < self.idle / TICKS:
            ticks = ticks[:-1]  # drop the last one: it is of the newest step, and the time of the next step is unknown
        expired = np.flatnonzero(ticks[:, 1] <= to.now - self.idle)
        first = int(expired[-1]) if expired.size else 0
        self.ticks = np.concatenate([ticks[first:], np.array([[step, math.ceil(to.now)]], np.int64)])

    def load(self, ticks: np.ndarray, counts_events: bool) -> None:
        """Restore the clock from its ticks, int64 (n, 2)."""
        self.ticks, self.read = ticks.copy(), Reading(float(ticks[-1, 1]) if len(ticks) else 0.0, counts_events)
