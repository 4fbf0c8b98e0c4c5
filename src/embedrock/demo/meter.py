"""What the disk has to do with a training: hit rate, reads, and the time that was spent waiting for rows."""

from __future__ import annotations

import time

from embedrock.demo.training import Learner

NAMES = ("hits", "misses", "reads")
RECENT_STEPS = 50  # that the line speaks of


class DiskMeter:
    """Watches a learner whose tables lie on disk.

    Args:
        learner: in training.
        step: the one that it begins at.
    """

    def __init__(self, learner: Learner, step: int) -> None:
        self._learner = learner
        self._start = self._last = self._now(step)
        self._text = ""

    def line(self, step: int) -> str:
        """Return a few words about the last steps; they are new after `RECENT_STEPS`."""
        if step - self._last["steps"] >= RECENT_STEPS:
            now = self._now(step)
            recent = _rates(self._last, now)
            self._last = now
            waited = f", disk {recent['waited_share']:.0%} of the time" if "waited_share" in recent else ""
            self._text = f", hits {recent['hit_rate']:.1%}, {recent['reads_per_step']:,.0f} reads/step{waited}"
        return self._text

    def totals(self, step: int) -> dict[str, float]:
        """Return the rates of all steps up to this one."""
        return _rates(self._start, self._now(step))

    def _now(self, step: int) -> dict[str, float]:
        stats = self._learner.tables.stats()
        counts = {name: stats[name] for name in NAMES}
        waited = {} if self._learner.waited_s is None else {"waited_s": self._learner.waited_s}
        return {**counts, **waited, "steps": step, "time_s": time.perf_counter()}


def _rates(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    grown = {name: after[name] - before[name] for name in after}
    asked = grown["hits"] + grown["misses"]
    rates = {
        "hit_rate": grown["hits"] / asked if asked else 1.0,
        "reads_per_step": grown["reads"] / max(grown["steps"], 1),
    }
    if "waited_s" in grown:
        rates["waited_share"] = grown["waited_s"] / grown["time_s"] if grown["time_s"] else 0.0
    return rates
