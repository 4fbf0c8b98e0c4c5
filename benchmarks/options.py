"""How long to measure, and with how many threads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cgroups, processes
from embedrock.system.sizes import format_bytes

WARM_UP_ROUNDS = 5  # times `BenchmarkOptions.seconds`, for the pass over all batches before the first round
WARM_UP_TIMES = 2  # the same of tables on disk


@dataclass(frozen=True)
class BenchmarkOptions:
    """How long to measure.

    Args:
        rounds: turns of each implementation.
        steps: timed steps in a turn.
        seconds: a turn ends early after this time; it has one timed step at least.
        threads: of each implementation.
        timeout_s: an implementation that does not answer for this time is ended.
        together: all implementations of a group take turns in one process.
        beside: a checkout; ours are measured with its Embedrock, too, as ``NAME-before``.
    """

    rounds: int = 7
    steps: int = 30
    seconds: float = 2.0
    threads: int = 2
    timeout_s: float = 600.0
    together: bool = False
    beside: Path | None = None

    @property
    def warm_up_s(self) -> float:
        """Seconds after which the untimed steps before the first round end."""
        return WARM_UP_ROUNDS * self.seconds

    @property
    def starters(self) -> int:
        """Number of implementations that start at the same time."""
        return 1

    def environment(self) -> dict[str, str]:
        """Return the variables that thread pools read when a child's libraries load.

        OpenMP threads that spin while they wait go on spinning in another implementation's turn. Without a core of
        their own they cost torch and FBGEMM many times their own time: FBGEMM's rowwise Adagrad (SUM) took 70 ms on 2
        cores, and 1.5 ms with threads that sleep. So they sleep, unless the caller sets OMP_WAIT_POLICY.
        """
        threads = dict.fromkeys(("EMBEDROCK_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self.threads))
        paths = {"PYTHONPATH": os.pathsep.join([f"{self.beside}/src", *filter(None, sys.path)])} if self.beside else {}
        return {**threads, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"), **paths}

    def child(self, factory: Callable[..., object], *args: Any) -> processes.Child:
        return processes.Child(factory, *args, environment=self.environment(), timeout_s=self.timeout_s)


@dataclass(frozen=True)
class DiskOptions(BenchmarkOptions):
    """How much to measure of tables on disk, where, and with how much RAM.

    Args:
        rounds: turns of each implementation; commits of each size, whose medians count.
        folder: files go to a new folder in it, which is removed at the end.
        memory: the most RAM that our table may take, bytes.
        limit: of RAM and page cache of each implementation's process together, bytes; 0: none.
        warmup: untimed steps before the timed ones, which fill the cache.
    """

    rounds: int = 3
    steps: int = 200
    seconds: float = 90.0
    timeout_s: float = 3600.0
    folder: Path = Path()
    memory: int = 1 << 30
    limit: int = 2 << 30
    warmup: int = 2500

    @property
    def warm_up_s(self) -> float:
        return WARM_UP_TIMES * self.seconds

    def child(self, factory: Callable[..., object], *args: Any) -> processes.Child:
        """Return ``factory(*args)`` in a process of its own, in a memory cgroup if there is a limit."""
        if not self.limit:
            return super().child(factory, *args)
        return cgroups.confined(self.limit, factory, *args, environment=self.environment(), timeout_s=self.timeout_s)

    def limit_note(self) -> str:
        """Return one line about the cgroups."""
        if reason := cgroups.why_not():
            return f"NO memory cgroup could be made ({reason}): page cache is neither limited nor counted"
        return f"each in a memory cgroup of {format_bytes(self.limit)}, page cache included"
