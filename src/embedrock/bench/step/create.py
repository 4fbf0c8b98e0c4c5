"""``bench create``: what a table of a billion rows costs, empty and after rows are touched, and importing."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import ArgumentParser
from typing import Any

import numpy as np

from embedrock.bench.harness.bench import Bench, Task
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.processes import ChildError, child_environment
from embedrock.bench.harness.report import Report, medians
from embedrock.bench.harness.targets import Target, each
from embedrock.bench.harness.workload import SCATTER, Workload
from embedrock.machine.ram import peak_rss_bytes, rss_bytes
from embedrock.terminal.arguments import count

ROWS, TOUCHED_ROWS, RUNS = 10**9, 10**6, 5
CREATE_S = 0.2
IMPORT_S = 0.3
SPARE_BYTES = 50_000_000
RECORD_FACTOR = 1.3
BATCH, SMALL_BATCH = 65_536, 1024
MB = 1e6
FORBIDDEN = ("torch", "tensorflow", "keras", "triton")
_IMPORT = f"""
import sys, time
start = time.perf_counter()
import numpy
middle = time.perf_counter()
import embedrock
print(middle - start, time.perf_counter() - middle, *(name for name in {FORBIDDEN} if name in sys.modules))
"""


class TableProbe:
    """In a fresh process: creates a table, touches rows, and tells what that took."""

    def create(self, rows: int, dim: int) -> dict[str, float]:
        """Create ``Table(rows, dim, rule=Adam())``; return its seconds and the growth of RAM in bytes."""
        import embedrock as er

        self._rows = rows
        before_bytes, start = rss_bytes(), time.perf_counter()
        self._table = er.Table(rows, dim, rule=er.Adam())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "rss_growth_bytes": rss_bytes() - before_bytes}

    def touch(self, count: int) -> dict[str, float]:
        """Train `count` rows scattered over the table; return the growth of RAM and what was expected.

        The kernels are loaded on another small table before, so that the growth is the table's own.
        """
        import embedrock as er

        rows, dim = self._rows, self._table.dim
        count = min(count, rows)
        start_bytes = rss_bytes()
        gradient = np.full((BATCH, dim), 1e-3, np.float32)
        with er.Table(rows, dim, rule=er.Adam()) as other:
            _train(other, rows, min(rows, SMALL_BATCH), gradient)
        before_bytes, start = rss_bytes(), time.perf_counter()
        _train(self._table, rows, count, gradient)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "touched": count,
            "record_bytes": self._table.spec.record_bytes,
            "rss_growth_bytes": rss_bytes() - before_bytes,
            "peak_growth_bytes": peak_rss_bytes() - before_bytes,
            "kernels_bytes": before_bytes - start_bytes,
        }


def _train(table: Any, rows: int, count: int, gradient: np.ndarray) -> None:
    for first in range(0, count, len(gradient)):
        ranks = np.arange(first, min(first + len(gradient), count))
        table.update(ranks * SCATTER % rows, gradient[: len(ranks)])


def import_facts() -> dict[str, float]:
    """Import NumPy, then Embedrock, in a fresh interpreter; return seconds, and how many frameworks came."""
    command = [sys.executable, "-c", _IMPORT]
    output = subprocess.run(command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if output.returncode:
        raise ChildError("Died", "embedrock does not import", output.stderr)
    numpy_s, embedrock_s, *frameworks = output.stdout.split()
    return {"numpy_seconds": float(numpy_s), "seconds": float(embedrock_s), "frameworks": len(frameworks)}


def measure(task: Task) -> Report:
    """Create a table, touch its rows and import Embedrock, each in fresh processes, and print the targets."""
    workload, runs = task.workload, task.arguments.runs
    try:
        probes = [_probe(workload, task.arguments.touch if index == 0 else 0, task.effort) for index in range(runs)]
        imports = [import_facts() for _ in range(runs)]
    except ChildError as error:
        return Report().fail("create", error)
    lines = {"create": medians([made for made, _ in probes]), "touch": probes[0][1], "import": medians(imports)}
    table = {"rows": workload.rows, "dim": workload.dim, "runs": runs}
    report = Report([{"name": name, **table, **line} for name, line in lines.items()])
    report.judge(_targets(lines["touch"]))
    return report


def _probe(workload: Workload, touch: int, effort: Effort) -> tuple[dict[str, float], dict[str, float]]:
    with effort.child(TableProbe) as child:
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


CREATE = Bench(
    "create",
    "creation, RAM and import time of a table of a billion rows",
    measure,
    ("rows", "dim", "threads", "timeout_s"),
    workloads=(Workload(rows=ROWS),),
    add_options=_add_options,
)
