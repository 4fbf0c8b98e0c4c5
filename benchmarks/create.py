"""``create``: the cost of a table of a billion rows, empty and after a million rows are touched, and of the import."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser
from typing import Any

import numpy as np

from benchmarks.benchmark import Benchmark, Task
from benchmarks.options import BenchmarkOptions
from benchmarks.processes import ChildError, child_environment
from benchmarks.report import Report, medians
from benchmarks.targets import Target, each
from benchmarks.workload import SCATTER, Workload
from embedrock.machine.ram import rss_bytes
from embedrock.terminal.arguments import count

ROWS, TOUCHED_ROWS, RUNS = 10**9, 10**6, 5
CREATE_S, IMPORT_S = 0.2, 0.3
SPARE_BYTES, RECORD_FACTOR = 50_000_000, 1.3
BATCH, SMALL_BATCH = 65_536, 1024
MB = 1e6
_IMPORT = """
import sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import embedrock
frameworks = {"torch", "tensorflow", "keras", "triton"} & set(sys.modules)
print(middle - start, time.perf_counter() - middle, len(frameworks))
"""


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


def import_facts() -> dict[str, float]:
    """Import NumPy, then Embedrock, in a fresh interpreter; return seconds, and the number of frameworks loaded."""
    command = [sys.executable, "-c", _IMPORT]
    output = subprocess.run(command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if output.returncode:
        raise ChildError("Died", "embedrock does not import", output.stderr)
    numpy_s, embedrock_s, frameworks = map(float, output.stdout.split())
    return {"numpy_seconds": numpy_s, "seconds": embedrock_s, "frameworks": frameworks}


def measure(task: Task) -> Report:
    """Create a table, touch its rows and import Embedrock, each in fresh processes, and print the targets."""
    workload, runs = task.workload, task.arguments.runs
    try:
        probes = [_probe(workload, task.arguments.touch if index == 0 else 0, task.options) for index in range(runs)]
        imports = [import_facts() for _ in range(runs)]
    except ChildError as error:
        return Report().fail("create", error)
    lines = {"create": medians([created for created, _ in probes]), "touch": probes[0][1], "import": medians(imports)}
    table = {"rows": workload.rows, "dim": workload.dim, "runs": runs}
    report = Report([{"name": name, **table, **line} for name, line in lines.items()])
    report.compare_with(_targets(lines["touch"]))
    return report


def _probe(workload: Workload, touch: int, options: BenchmarkOptions) -> tuple[dict[str, float], dict[str, float]]:
    with options.child(TableProbe) as child:
        return child.call("create", workload.rows, workload.dim), child.call("touch", touch) if touch else {}


def _targets(touched: dict[str, float]) -> tuple[Target, ...]:
    allowed_bytes = RECORD_FACTOR * touched["touched"] * touched["record_bytes"] + SPARE_BYTES
    rows = "RAM after touching {touched:,.0f} rows of {record_bytes:.0f} bytes"
    return (
        _at_most("creating the table", "create", "seconds", CREATE_S, "s"),
        _at_most("RAM of the new table", "create", "rss_growth_bytes", SPARE_BYTES / MB, "MB", MB),
        _at_most(rows, "touch", "rss_growth_bytes", allowed_bytes / MB, "MB", MB),
        _at_most("import embedrock, beyond NumPy", "import", "seconds", IMPORT_S, "s"),
        _at_most("frameworks that it imports", "import", "frameworks", 0, ""),
    )


def _at_most(what: str, name: str, key: str, wanted: float, unit: str, scale: float = 1.0) -> Target:
    return Target(what, each(lambda line: line[key] / scale, key, name=name), wanted, unit, at_most=True)


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--touch", type=count, default=TOUCHED_ROWS, metavar="N", help="rows trained after creation")
    parser.add_argument("--runs", type=count, default=RUNS, metavar="N", help="processes; medians over them")


CREATE = Benchmark(
    "create",
    "creation, RAM and import time of a table of a billion rows",
    measure,
    ("rows", "dim", "threads", "timeout_s"),
    workloads=(Workload(rows=ROWS),),
    add_options=_add_options,
)
