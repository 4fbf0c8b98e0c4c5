"""``stream``: a long stream of ids that are born and die, through a table on disk that keeps the rows in use.

The ids of a step are those of items by their age, spread evenly by its logarithm. So young items come most, as in logs
of clicks, and all ids of the stream come again and again. Admission by a sketch and eviction by least use keep the
table at `ROWS` rows. Commits run in the background. Measured since the table is full: throughput of the last tenth of
the stream against that of the first, slow steps, RAM, and files against the records that are alive.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.benchmark import Benchmark, Option, Task
from benchmarks.disk import scratch_folder
from benchmarks.options import DiskOptions
from benchmarks.progress import say
from benchmarks.report import Report, format_line
from benchmarks.targets import Target, each
from benchmarks.workload import Workload
from embedrock.cli.terminal.arguments import count
from embedrock.cli.terminal.tables import format_count
from embedrock.planner.demand import bounded_zipf
from embedrock.system.ram import peak_rss_bytes

MIXED = np.uint64(0x9E3779B97F4A7C15)  # odd: ids that are neighbours in time end up far apart
ROWS, LOOKUPS = 1_000_000, 100_000_000
STEPS_A_COMMIT = 200
WITHIN = 1000  # steps, of the admission
SAMPLED_STEPS = 10  # between two looks at the files
MANY = 2  # times the median: a longer step is slow


def ids_of(workload: Workload, step: int, steps: int) -> npt.NDArray[np.int64]:
    """Return the ids of a step; in all steps together, one id is born for each row of the workload."""
    uniform = np.random.default_rng((workload.seed, step)).random(workload.lookups)
    born = step * workload.rows // steps
    return ((born - bounded_zipf(uniform, workload.rows, 1.0)).astype(np.uint64) * MIXED).view(np.int64)


class Stream:
    """In a process of its own: a table on disk, and a stream through it.

    Args:
        workload: its `rows` are the ids of the stream.
        folder: of the table.
        memory: of the table.
        lookups: of the stream.
        rows: that the table may have.
    """

    def __init__(self, workload: Workload, folder: Path, memory: int, lookups: int, rows: int) -> None:
        import embedrock as er

        self._workload, self._folder = workload, folder / "table"
        self._steps = lookups // workload.lookups
        seen = workload.lookups * WITHIN // 2  # in a period; fewer are different
        admission = er.Admission(2, within=WITHIN, sketch=er.Admission.sketch_bytes(seen // 2, 2))
        options: dict[str, Any] = {"rule": er.Adam(lr=1e-3), "seed": 0, "keep": 1, "admission": admission}
        self._gradient = np.full((workload.lookups, workload.dim), 1e-3, np.float32)
        small = er.Eviction(max_rows=2 * workload.lookups)  # loads kernels
        with er.Table(None, workload.dim, eviction=small, path=folder / "small", memory="32MiB", **options) as table:
            for step in range(4):
                self._step(table, ids_of(workload, step, 4))
                table.commit()
            table.compact()
        self._before_bytes = peak_rss_bytes()
        eviction = er.Eviction(max_rows=rows)
        self._table = er.Table(None, workload.dim, eviction=eviction, path=self._folder, memory=memory, **options)

    def run(self) -> dict[str, Any]:
        """Go through the stream, and return the measurements since the first row was evicted."""
        table, full_at, worst = self._table, 0, 0.0
        times, begun = np.zeros(self._steps), np.zeros(self._steps + 1)
        for step in range(self._steps):
            begun[step] = time.perf_counter()
            ids = ids_of(self._workload, step, self._steps)
            started = time.perf_counter()
            self._step(table, ids)
            times[step] = time.perf_counter() - started
            if (step + 1) % SAMPLED_STEPS == 0 and full_at:
                worst = max(worst, self._files_over_live(table.stats()))
            if (step + 1) % STEPS_A_COMMIT == 0:
                table.commit(step=step, wait=False)
                full_at = full_at or (step + 1 if table.stats()["evicted"] else 0)
                say(f"{(step + 1) * self._workload.lookups:,} lookups", transient=True)
        begun[-1] = time.perf_counter()
        table.commit()
        return self._summary(times[full_at:], np.diff(begun)[full_at:], worst)

    def _step(self, table: Any, ids: np.ndarray) -> None:
        table.update(ids, 0.1 * table.lookup(ids) + self._gradient)
        table.lookup(ids[:1])  # waits for the step

    def _summary(self, times: np.ndarray, whole: np.ndarray, worst: float) -> dict[str, Any]:
        stats, tenth = self._table.stats(), max(1, len(whole) // 10)
        typical = float(np.median(times)) if len(times) else 0.0
        return {
            "rows": stats["rows_touched"],
            **{name: stats[name] for name in ("admitted", "evicted", "budget_bytes", "residents_bytes")},
            "lookups": self._steps * self._workload.lookups,
            "lookups_full": len(whole) * self._workload.lookups,
            "first_lookups_per_s": self._workload.lookups * tenth / float(whole[:tenth].sum()),
            "last_lookups_per_s": self._workload.lookups * tenth / float(whole[-tenth:].sum()),
            "step_ms": 1e3 * typical,
            "slow_share": float(np.mean(times > MANY * typical)),
            "longest_ms": 1e3 * float(times.max()),
            "ram_bytes": peak_rss_bytes() - self._before_bytes,
            "files_over_live": self._files_over_live(stats),
            "most_files_over_live": worst,
        }

    def _files_over_live(self, stats: dict[str, float]) -> float:
        """Return the bytes of all existing files, over those of the rows."""
        sizes = [_size(one) for one in self._folder.rglob("*") if one.is_file()]
        return sum(sizes) / (stats["rows_touched"] * stats["record_bytes"])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # a commit in the background has just removed it
        return 0


def measure(task: Task) -> Report:
    """Send the stream through a table, and print the outcome."""
    workload, options = task.workload, task.options
    lookups, rows = task.arguments.lookups, task.arguments.most_rows
    print(
        f"{format_count(lookups, 'lookup')} of {format_count(workload.rows, 'id')}, {workload.lookups:,} in a step, "
        f"max_rows={rows:,}, dim {workload.dim}, a commit every {STEPS_A_COMMIT} steps"
    )
    with (
        scratch_folder(options.folder, 5 * rows * 12 * workload.dim) as folder,
        options.child(Stream, workload, folder, options.memory, lookups, rows) as child,
    ):
        line = {"name": "stream", "status": "ok", "ids": workload.rows, **child.call("run")}
    print(f"{format_line(line)}\n")
    report = Report([line])
    report.compare_with(TARGETS)
    return report


def _at_most(what: str, number: Any, wanted: float) -> Target:
    return Target(what, each(number, name="stream"), wanted, at_most=True)


TARGETS = (
    _at_most(
        "time of the last tenth, over the first",
        lambda one: one["first_lookups_per_s"] / one["last_lookups_per_s"],
        1.2,
    ),
    _at_most("files at the end, over live records", lambda one: one["files_over_live"], 3.0),
    _at_most("files at most, over live records", lambda one: one["most_files_over_live"], 3.0),
    _at_most(
        "RAM of the process, over the budgets",
        lambda one: one["ram_bytes"] / (one["budget_bytes"] + one["residents_bytes"]),
        1.0,
    ),
)


STREAM = Benchmark(
    "stream",
    "a long stream of ids that are born and die, through a table on disk that keeps the rows in use",
    measure=measure,
    arguments=("rows", "dim", "batch", "seed", "threads", "timeout_s", "folder", "memory", "limit"),
    workloads=(Workload(rows=100_000_000, dim=16, batch=16384, features=1),),
    options=DiskOptions(memory=256 << 20, limit=2 << 30),
    own=(
        Option("--lookups", "lookups", count, LOOKUPS, "ids looked up and stepped, in all"),
        Option("--most-rows", "most_rows", count, ROWS, "rows that the table may have"),
    ),
)
