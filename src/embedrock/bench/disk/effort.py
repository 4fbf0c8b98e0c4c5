"""How much to measure of tables on disk, where, and with how much RAM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedrock.bench.harness.bench import EFFORT, SIZES
from embedrock.bench.harness.cgroups import MemoryCgroup, confined, why_not
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.workload import Workload
from embedrock.machine.sizes import format_bytes

WORKLOAD = Workload(rows=20_000_000)
# Batches are a stream of different ones.
OPTIONS = ("rows", *(name for name in SIZES if name != "batches"), *EFFORT, "folder", "memory", "limit", "warmup")


@dataclass(frozen=True)
class DiskEffort(Effort):
    """How much to measure, and where. Contenders have one turn each.

    Args:
        rounds: commits of each size, whose medians count.
        folder: files go to a new folder in it, which is removed at the end.
        memory: the most RAM that our table may take, bytes.
        limit: of RAM and page cache of each contender's process together, bytes.
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

    def confined(
        self, factory: Callable[..., object], *args: Any, limited: bool = True
    ) -> AbstractContextManager[tuple[Child, MemoryCgroup | None]]:
        """Return what a ``with`` statement enters to have ``factory(*args)`` in a process of its own, in a cgroup."""
        limit = self.limit if limited else None
        return confined(limit, factory, *args, environment=self.environment(), timeout_s=self.timeout_s)

    def run(self, bench: str, factory: Callable[..., object], *args: Any, **facts: Any) -> Report:
        """Let ``factory(*args)`` `run` in a process of its own: a line of `facts` and what it tells, or a failure."""
        report = Report()
        try:
            with self.confined(factory, *args) as (child, _):
                report.results.append({"name": bench, "status": "ok", **facts, **child.call("run")})
        except ChildError as error:
            report.fail(bench, error)
        return report

    def limit_note(self) -> str:
        """Return one line about the cgroups."""
        if reason := why_not():
            return f"NO memory cgroup could be made ({reason}): page cache is neither bounded nor counted"
        return f"each in a memory cgroup of {format_bytes(self.limit)}, page cache included"
