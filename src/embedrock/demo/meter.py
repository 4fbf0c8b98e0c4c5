"""What the disk has to do with a training: hit rate, reads, and the time that was spent waiting for rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from embedrock.table.table import Table

T = TypeVar("T")
NAMES = ("hits", "misses", "reads")
RECENT_STEPS = 50  # that the line speaks of


class DiskMeter:
    """Watches a loop over batches.

    Args:
        tables: on disk or not.
        waits: whether the loop goes through `made` and `waited`, which tell how long it waited.
    """

    def __init__(self, tables: Sequence[Table], waits: bool = True) -> None:
        self._tables, self._waits = tables, waits
        self._making_s = self._waited_s = 0.0
        self._start = self._last = self._now(0)
        self._text = ""

    def made(self, batches: Iterable[T]) -> Iterator[T]:
        """Go through batches whose making is not the disk's fault."""
        source, end = iter(batches), object()
        while True:
            start = time.perf_counter()
            batch: Any = next(source, end)
            self._making_s += time.perf_counter() - start
            if batch is end:
                return
            yield batch

    def waited(self, batches: Iterable[T]) -> Iterator[T]:
        """Go through batches that come when their rows are there."""
        source, end = iter(batches), object()
        while True:
            start, making_s = time.perf_counter(), self._making_s
            batch: Any = next(source, end)
            self._waited_s += time.perf_counter() - start - (self._making_s - making_s)
            if batch is end:
                return
            yield batch

    def line(self, step: int) -> str:
        """Return a few words about the last steps; they are new after `RECENT_STEPS`."""
        if step - self._last["steps"] >= RECENT_STEPS:
            now = self._now(step)
            recent = self._rates(self._last, now)
            self._last = now
            waited = f", disk {recent['waited_share']:.0%} of the time" if self._waits else ""
            self._text = f", hits {recent['hit_rate']:.1%}, {recent['reads_per_step']:,.0f} reads/step{waited}"
        return self._text

    def totals(self, steps: int) -> dict[str, float]:
        """Return the rates of all `steps` steps."""
        return self._rates(self._start, self._now(steps))

    def _now(self, step: int) -> dict[str, float]:
        stats = [table.stats() for table in self._tables]
        counts = {name: sum(one.get(name, 0) for one in stats) for name in NAMES}
        return {**counts, "steps": step, "waited_s": self._waited_s, "time_s": time.perf_counter()}

    def _rates(self, before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
        grown = {name: after[name] - before[name] for name in after}
        asked = grown["hits"] + grown["misses"]
        rates = {
            "hit_rate": grown["hits"] / asked if asked else 1.0,
            "reads_per_step": grown["reads"] / max(grown["steps"], 1),
        }
        if self._waits:
            rates["waited_share"] = grown["waited_s"] / grown["time_s"] if grown["time_s"] else 0.0
        return rates
