"""``commit``: bytes, time and RAM of commits, and stalls of training beside them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Option, Task, several_rows
from benchmarks.disk import ARGUMENTS, ARRAYS, TABLE, WORKLOAD, Job, scratch_folder, train
from benchmarks.implementations import LEARNING_RATE
from benchmarks.options import DiskOptions
from benchmarks.progress import say
from benchmarks.report import Report, format_line, medians
from benchmarks.targets import Line, Target, each
from benchmarks.workload import SCATTER, Workload
from embedrock.io.probe import write_rate
from embedrock.system.ram import peak_rss_bytes

COMMIT_ROWS = (10_000, 100_000, 1_000_000)
TOUCH_ROWS = 16_384  # stepped at a time
QUIET_STEPS = 60  # timed without a commit, to compare with
RESIDENT_BATCHES = 8


class Commits:
    """In a process of its own: a table on disk, and commits of rows that were stepped."""

    def __init__(self, job: Job) -> None:
        import embedrock as er

        workload = job.workload
        where: dict[str, Any] = {"path": job.folder / TABLE, "memory": job.memory, "keep": 1}
        self._job, self._gradient = job, workload.gradient()
        self._table = er.Table(workload.rows, workload.dim, rule=er.Adam(lr=LEARNING_RATE), **where)
        self._step = 0
        self._table.update([0], np.zeros((1, workload.dim), np.float32))  # compiles
        self._table.commit()

    def commit(self, count: int) -> dict[str, float]:
        """Step `count` rows and commit them; return bytes, seconds and the growth of RAM."""
        before = self._written()
        self._touch(count)
        middle = self._written()
        ram_bytes = _fresh_peak()
        start = time.perf_counter()
        self._table.commit()
        seconds, after = time.perf_counter() - start, self._written()
        return {
            "rows": count,
            "record_bytes": self._table.spec.record_bytes,
            "seconds": seconds,
            "bytes_written": after - before,
            "bytes_in_commit": after - middle,
            "extra_ram_bytes": peak_rss_bytes() - ram_bytes,
        }

    def stalls(self, count: int) -> dict[str, float]:
        """Commit `count` rows in the background; return the times of training on other, resident rows meanwhile."""
        batches = list(self._job.batches(0, RESIDENT_BATCHES))
        self._touch(count)
        for ids in batches * 2:
            self._train(ids)
        quiet = [self._train(batches[index % len(batches)]) for index in range(QUIET_STEPS)]
        number, start = self._table.last_commit, time.perf_counter()
        self._table.commit(wait=False)
        call_s, busy = time.perf_counter() - start, list[float]()
        while self._table.last_commit == number:
            busy.append(self._train(batches[len(busy) % len(batches)]))
        longest = max(quiet)
        return {
            "rows": count,
            "seconds": time.perf_counter() - start,
            "steps": len(busy),
            "quiet_step_s": median(quiet),
            "step_s": median(busy) if busy else 0.0,
            # The call, and the time of steps beyond the longest of those without a commit.
            "stalled_s": call_s + sum(max(0.0, step - longest) for step in busy),
        }

    def _touch(self, count: int) -> None:
        self._step += 1
        gradient = np.full((TOUCH_ROWS, self._job.workload.dim), 1e-3, np.float32)
        for first in range(0, count, TOUCH_ROWS):
            ranks = np.arange(first, min(first + TOUCH_ROWS, count)) + self._step * count
            self._table.update(ranks * SCATTER % self._job.workload.rows, gradient[: len(ranks)])

    def _train(self, ids: np.ndarray) -> float:
        start = time.perf_counter()
        train(self._table, ids, self._gradient)
        return time.perf_counter() - start

    def _written(self) -> float:
        stats = self._table.stats()
        return stats["bytes_written"] - stats["bytes_compacted"]  # compaction runs in the background


def _fresh_peak() -> int:
    """Begin this process's peak of RAM anew, where the system can; return it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()


# ---------------------------------------------------------------- in the parent


def measure(task: Task) -> Report:
    """Measure commits of several sizes, print them, and return the outcome."""
    report = Report(_commits(task.arguments.commits, task.workload, task.options))
    print("\n".join([*map(format_line, report.results), "", task.options.limit_note(), ""]))
    report.compare_with(_targets(report.results))
    return report


def _commits(sizes: Sequence[int], workload: Workload, options: DiskOptions) -> list[dict[str, Any]]:
    """Commit each number of rows some times, with the disk's own rate before and after each."""
    record_bytes = workload.dim * 4 * len(ARRAYS)
    with (
        scratch_folder(options.folder, 8 * max(sizes) * record_bytes) as folder,
        options.child(Commits, Job(workload, folder, options.memory)) as child,
    ):
        lines = [_commit(child, folder, count, count * record_bytes, options.rounds) for count in sizes]
        return [*lines, {"name": "commit in the background", **child.call("stalls", max(sizes))}]


def _commit(child: Any, folder: Path, count: int, size: int, times: int) -> dict[str, Any]:
    say(f"commits of {count:,} rows")
    rates, turns = [write_rate(folder / "sequential", size)], list[dict[str, float]]()
    for _ in range(times):
        turns.append(child.call("commit", count))
        rates.append(write_rate(folder / "sequential", size))
    name = f"commit of {count:,} rows"
    return {"name": name, **medians(turns), "disk_bytes_per_s": mean(rates), "turns": turns}


def _targets(lines: Sequence[Line]) -> list[Target]:
    """Return the targets; the rate is that of the largest commit."""
    largest = next((line["name"] for line in reversed(lines) if "bytes_written" in line), "")
    written = each(lambda line: line["bytes_written"] / (line["rows"] * line["record_bytes"]), "bytes_written")
    rate = each(lambda line: line["bytes_in_commit"] / line["seconds"] / line["disk_bytes_per_s"], name=largest)
    extra = each(lambda line: line["extra_ram_bytes"] / 1e6, "extra_ram_bytes")
    stalled = each(lambda line: line["stalled_s"] / line["seconds"], "stalled_s")
    return [
        Target("bytes written of {name}, over its records", written, 1.1, at_most=True),
        Target("rate of a {name}, over the disk's own", rate, 0.6),
        Target("extra RAM of a {name}", extra, 128.0, "MB", at_most=True),
        Target("time that training stood during a commit in the background", stalled, 0.05, at_most=True),
    ]


COMMIT = Benchmark(
    "commit",
    "commits, and training beside them",
    arguments=ARGUMENTS,
    measure=measure,
    workloads=(WORKLOAD,),
    options=DiskOptions(),
    own=(Option("--sizes", "commits", several_rows, COMMIT_ROWS, "rows of each commit"),),
)
