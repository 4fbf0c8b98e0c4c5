"""``bench compaction``: bytes written for each byte of changed rows, in a long run with little memory.

A table far larger than its memory is trained on Zipf ids and committed again and again, until its logs had some times
the bytes of its base. The index of rows in logs has room for less than a fifth of the rows, so compaction goes on all
the while. What counts is the second part of the run: in the first one, the index fills.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from embedrock.bench.disk.contenders import TABLE, Job, train, write_table
from embedrock.bench.disk.effort import DiskEffort
from embedrock.bench.disk.files import scratch_folder
from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target, each
from embedrock.bench.harness.workload import Workload
from embedrock.machine.sizes import format_bytes

FILLING, COUNTED = 1.0, 1.0  # of the bytes of the base, that logs get before it counts, and while it does
COMMITS = 16  # for as many bytes of logs as the base has, about
LEAST_STEPS = 20  # between two commits
WRITTEN = 2.2


class LongRun:
    """In a process of its own: a compacted table, and training that commits."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._base_bytes = write_table(job)["disk_bytes"]

    def run(self) -> dict[str, float]:
        """Train until logs had `FILLING`, then `COUNTED` times the bytes of the base; return what was written."""
        import embedrock as er

        with er.open(self._job.folder / TABLE, memory=self._job.memory, keep=1) as table:
            self._table, self._step, self._longest_s, self._most_bytes = table, 0, 0.0, 0.0
            room = table.stats()["budget_bytes"]
            self._until(FILLING)
            logged, folded = self._written()
            self._longest_s, start = 0.0, time.perf_counter()
            self._until(FILLING + COUNTED)
            logged, folded = (after - before for after, before in zip(self._written(), (logged, folded), strict=True))
            table.commit()
            return {
                "base_bytes": self._base_bytes,
                "budget_bytes": room,
                "bytes_logged": logged,
                "bytes_folded": folded,
                "most_disk_bytes": self._most_bytes,
                "longest_step_s": self._longest_s,
                "seconds": time.perf_counter() - start,
                "steps": self._step,
            }

    def _until(self, share: float) -> None:
        gradient, committed = self._job.workload.gradient(), self._written()[0]
        while (logged := self._written()[0]) < share * self._base_bytes:
            for _ in range(LEAST_STEPS):
                ids, start = self._job.workload.batch_at(self._step), time.perf_counter()
                train(self._table, ids, gradient)
                self._longest_s, self._step = max(self._longest_s, time.perf_counter() - start), self._step + 1
            if logged - committed > self._base_bytes / COMMITS:
                self._table.commit(wait=False)
                committed = logged
            self._most_bytes = max(self._most_bytes, self._table.stats()["disk_bytes"])

    def _written(self) -> tuple[float, float]:
        stats = self._table.stats()
        return stats["bytes_written"] - stats["bytes_compacted"], stats["bytes_compacted"]


def measure(task: Task) -> Report:
    """Make a table, train it for long, and print what was written."""
    workload, effort = task.workload, task.effort
    with scratch_folder(effort.folder, 4 * 3 * workload.table_bytes) as folder:
        report = effort.run(
            "compaction", LongRun, Job(workload, folder, effort.memory), name="long run", rows=workload.rows
        )
    for line in report.results:
        print(_told(line))
    report.judge(targets())
    return report


def _told(line: dict[str, Any]) -> str:
    return (
        f"\n{format_bytes(line['base_bytes'])} in {format_bytes(line['budget_bytes'])}: logs got "
        f"{format_bytes(line['bytes_logged'])}, and {format_bytes(line['bytes_folded'])} were written to fold them, "
        f"in {line['seconds']:.0f} s; at most {line['most_disk_bytes'] / line['base_bytes']:.2f}x of the base on disk, "
        f"the longest step {line['longest_step_s'] * 1e3:.0f} ms\n"
    )


def targets() -> Sequence[Target]:
    """Return what should come out."""
    written = each(lambda line: 1 + line["bytes_folded"] / line["bytes_logged"], "bytes_folded", name="long run")
    return [Target("bytes written over those of logs", written, WRITTEN, at_most=True)]


COMPACTION = Bench(
    "compaction",
    "bytes written for each byte of changed rows, in a long run with little memory",
    measure,
    ("rows", "dim", "batch", "zipf", "seed", "threads", "timeout_s", "folder", "memory", "limit"),
    workloads=(Workload(batch=1600),),
    effort=DiskEffort(memory=92 << 20, limit=1 << 30),
)
