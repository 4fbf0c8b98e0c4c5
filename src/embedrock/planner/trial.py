"""Steps of real tables, timed: what the model of cost is fitted to, and what `bench plan` compares it with."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from embedrock.machine.arena import PAGE, Arena
from embedrock.planner.cost import Taken
from embedrock.process import platform
from embedrock.process.spans import forget, trace_by
from embedrock.table.table import Table

Batch = list[np.ndarray]  # the ids for each table
QUIET = 0.15  # cores that others may use while something is timed


@dataclass(frozen=True)
class Timing:
    """What steps took.

    Attributes:
        rounds: what a step took, on average over each of them.
        steps: that were made.
        others: cores that other programs used meanwhile, on average.
        counts: for each table, what a step added to its counters, on average.
    """

    rounds: list[Taken]
    steps: int
    others: float
    counts: list[dict[str, float]]

    @property
    def taken(self) -> Taken:
        """What a step took, on average over a round that took longer than a quarter of them."""
        return quarter(self.rounds)


def quarter(rounds: Sequence[Taken]) -> Taken:
    """Return the round that took longer than a quarter of them: many are slow for reasons of the machine's own."""
    return sorted(rounds)[len(rounds) // 4]


def touch_memory(nbytes: int) -> None:
    """Write so much memory once, and give it back, before steps are timed that need some.

    The host of a virtual machine may have to find a page that was not in use for a while, which takes up to a hundred
    times as long as to clear one.
    """
    Arena(nbytes, "memory to be touched", scattered=True).memory[::PAGE] = 1


class Others:
    """How much of the machine other programs use, from when it is made."""

    def __init__(self) -> None:
        self._start = self._now()

    def cores(self) -> float:
        """Return how many cores they used, on average; 0.0 where nobody counts."""
        elapsed, busy, own = (now - before for now, before in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - own) / max(elapsed, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.perf_counter(), platform.busy_seconds(), time.process_time()


class _Clock:
    """Seconds by phase, of any thread."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


class Trial:
    """Tables that are stepped as models do: all of them are read, then all are stepped.

    Args:
        tables: to step.
        batches: endless.
    """

    def __init__(self, tables: Sequence[Table], batches: Iterator[Batch]) -> None:
        self._tables, self._batches, self._grads = tables, batches, list[np.ndarray]()

    def train(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            self._step(next(self._batches))

    def fill(self, most: int) -> None:
        """Make steps, at most so many, until rows leave the caches of tables on disk."""
        for _ in range(most):
            self.train(1)
            if all(table.stats().get("evictions", 1) for table in self._tables):
                return

    def timed(self, rounds: int, together: int, seconds: float = float("inf")) -> Timing:
        """Make steps, and tell what they took; making their ids does not count.

        Args:
            rounds: of steps, of which the median counts.
            together: steps of a round, which are timed as one, as some of the work is done in the background.
            seconds: after which no round is begun, but for the first three.
        """
        self._settle()
        others, end = Others(), time.perf_counter() + seconds
        before, taken = [table.stats() for table in self._tables], list[Taken]()
        while len(taken) < rounds and (len(taken) < 3 or time.perf_counter() < end):
            taken.append(self._round([next(self._batches) for _ in range(together)]))
        done, after = len(taken) * together, [table.stats() for table in self._tables]
        counts = [
            {name: (now[name] - one[name]) / done for name in now if name in one}
            for one, now in zip(before, after, strict=True)
        ]
        return Timing(taken, done, others.cores(), counts)

    def _round(self, batches: list[Batch]) -> Taken:
        clock = _Clock()
        phase = clock.phase  # the same object for both calls
        trace_by(phase)
        try:
            start = time.perf_counter()
            for batch in batches:
                self._step(batch)
            self._settle()
            spent = time.perf_counter() - start, clock.seconds["disk"], clock.seconds["spill"]
        finally:
            forget(phase)
        return Taken(*(each / len(batches) for each in spent))

    def _step(self, batch: Batch) -> None:
        plans = [table.plan(ids) for table, ids in zip(self._tables, batch, strict=True)]
        read = [table.read(plan) for table, plan in zip(self._tables, plans, strict=True)]
        if not self._grads:
            self._grads = [np.ones_like(values) for values in read]
        for table, plan, grads in zip(self._tables, plans, self._grads, strict=True):
            table.apply(plan, grads)

    def _settle(self) -> None:
        """Return once no step runs in the background."""
        for table in self._tables:
            table.stats()
