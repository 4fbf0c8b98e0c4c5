"""How long to measure, and with how many threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embedrock.bench.harness.processes import Child

WARM_UP_ROUNDS = 5  # times `Effort.seconds` that the pass over all batches before the first round may take


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: turns of each contender.
        steps: timed steps in a turn.
        seconds: a turn ends early once it took this long (it has one timed step at least).
        threads: threads of each contender.
        timeout_s: a contender that does not answer for so long is ended.
    """

    rounds: int = 7
    steps: int = 30
    seconds: float = 2.0
    threads: int = 2
    timeout_s: float = 600.0

    @property
    def warm_up_s(self) -> float:
        """Seconds after which a contender's untimed steps before the first round end."""
        return WARM_UP_ROUNDS * self.seconds

    @property
    def starters(self) -> int:
        """How many contenders are made and warm up at a time."""
        return 1

    def environment(self) -> dict[str, str]:
        """Return the variables that thread pools read when a child's libraries load.

        OpenMP threads that spin while they wait go on spinning in another contender's turn, and where they
        have no core to themselves they cost torch and FBGEMM many times their own time: FBGEMM's rowwise
        Adagrad (SUM) took 70 ms on 2 cores, and 1.5 ms with threads that sleep. So they sleep; an
        OMP_WAIT_POLICY of the caller's own is left alone.
        """
        threads = dict.fromkeys(("EMBEDROCK_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        return {**threads, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}

    def child(self, factory: Callable[..., object], *args: Any) -> Child:
        """Return ``factory(*args)`` in a process of its own."""
        return Child(factory, *args, environment=self.environment(), timeout_s=self.timeout_s)


class Clock:
    """The time that a whole benchmark may take."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more should begin."""
        return time.monotonic() > self._end
