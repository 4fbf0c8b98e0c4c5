"""``create``: the cost of a table of a billion rows, empty and after a million rows are touched."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Option, Task
from benchmarks.report import Report, medians
from benchmarks.targets import Target, each
from benchmarks.workload import SCATTER, Workload
from embedrock.cli.terminal.arguments import count
from embedrock.system.ram import rss_bytes

ROWS, TOUCHED_ROWS, RUNS = 10**9, 10**6, 5
SPARE_BYTES, RECORD_FACTOR = 50_000_000, 1.3
BATCH, SMALL_BATCH = 65_536, 1024
CREATE_S, MB = 0.2, 1e6


class TableProbe:
    """In a fresh process: creates a table, touches rows, and measures the cost."""

    def create(self, rows: int, dim: int) -> dict[str, float]:
        """Create ``Table(rows, dim, rule=Adam())``; return its seconds and the growth of RAM in bytes."""
        import embedrock as er

        before_bytes, start = rss_bytes(), time.perf_counter()
        self._table = er.Table(rows, dim, rule=er.Adam())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "rss_growth_bytes": rss_bytes() - before_bytes}

    def touch(self, count: int) -> dict[str, float]:
        """Train `count` rows scattered over the table; return the growth of RAM, and the bytes of a record.

        Another small table loads the kernels before, so the growth is the table's own.
        """
        import embedrock as er

        rows, dim = self._table.rows, self._table.dim
        assert rows is not None
        count = min(count, rows)
        gradient = np.full((BATCH, dim), 1e-3, np.float32)
        with er.Table(rows, dim, rule=er.Adam()) as other:
            _train(other, rows, min(rows, SMALL_BATCH), gradient)
        before_bytes, start = rss_bytes(), time.perf_counter()
        _train(self._table, rows, count, gradient)
        return {
            "seconds": time.perf_counter() - start,
            "touched": count,
            "record_bytes": self._table.spec.record_bytes,
            "rss_growth_bytes": rss_bytes() - before_bytes,
        }


def _train(table: Any, rows: int, count: int, gradient: np.ndarray) -> None:
    for first in range(0, count, len(gradient)):
        ranks = np.arange(first, min(first + len(gradient), count))
        table.update(ranks * SCATTER % rows, gradient[: len(ranks)])


def measure(task: Task) -> Report:
    """Create tables in fresh processes, touch the rows of the first one, and print the targets."""
    workload, runs = task.workload, task.arguments.runs
    created, touched = [], {}
    for _ in range(runs):
        with task.options.child(TableProbe) as child:
            created.append(child.call("create", workload.rows, workload.dim))
            touched = touched or child.call("touch", task.arguments.touch)
    lines = {"create": medians(created), "touch": touched}
    table = {"rows": workload.rows, "dim": workload.dim, "runs": runs}
    report = Report([{"name": name, **table, **line} for name, line in lines.items()])
    report.compare_with(_targets(lines["touch"]))
    return report


def _targets(touched: dict[str, float]) -> tuple[Target, ...]:
    seconds = each(lambda line: line["seconds"], name="create")
    empty, full = (each(lambda line: line["rss_growth_bytes"] / MB, name=name) for name in ("create", "touch"))
    allowed_bytes = RECORD_FACTOR * touched["touched"] * touched["record_bytes"] + SPARE_BYTES
    rows = "RAM after touching {touched:,.0f} rows of {record_bytes:.0f} bytes"
    return (
        Target("creating the table", seconds, CREATE_S, "s", at_most=True),
        Target("RAM of the new table", empty, SPARE_BYTES / MB, "MB", at_most=True),
        Target(rows, full, allowed_bytes / MB, "MB", at_most=True),
    )


CREATE = Benchmark(
    "create",
    "creation and RAM of a table of a billion rows",
    measure=measure,
    arguments=("rows", "dim", "threads", "timeout_s"),
    workloads=(Workload(rows=ROWS),),
    own=(
        Option("--touch", "touch", count, TOUCHED_ROWS, "rows trained after creation"),
        Option("--runs", "runs", count, RUNS, "processes; medians over them"),
    ),
)
