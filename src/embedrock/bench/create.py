"""What a table of a thousand million rows costs before and after rows are touched, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from statistics import median
from typing import Any

import numpy as np

from embedrock.bench.machine import peak_rss_bytes, rss_bytes
from embedrock.bench.processes import Child, ChildError
from embedrock.bench.report import Report, Verdict, format_table, format_verdicts
from embedrock.bench.workload import SCATTER
from embedrock.sizes import format_bytes

CREATE_S = 0.2
IMPORT_S = 0.3
SPARE_BYTES = 50_000_000
RECORD_FACTOR = 1.3
BATCH = 65_536
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

        before_bytes, start = rss_bytes(), time.perf_counter()
        self._table = er.Table(rows, dim, rule=er.Adam())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "rss_growth_bytes": rss_bytes() - before_bytes}

    def touch(self, count: int) -> dict[str, float]:
        """Train `count` rows scattered over the table; return the growth of RAM and what was expected.

        The kernels are loaded on another table before, so that the growth is the table's own.
        """
        import embedrock as er

        rows, dim = self._table.spec.rows, self._table.spec.dim
        start_bytes = rss_bytes()
        gradient = np.full((min(count, BATCH), dim), 1e-3, np.float32)
        _train(er.Table(rows, dim, rule=er.Adam()), rows, len(gradient), gradient)
        before_bytes, start = rss_bytes(), time.perf_counter()
        _train(self._table, rows, count, gradient)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "rows": count,
            "record_bytes": self._table.spec.record_bytes,
            "rss_growth_bytes": rss_bytes() - before_bytes,
            "peak_growth_bytes": peak_rss_bytes() - before_bytes,
            "kernels_bytes": before_bytes - start_bytes,
        }


def _train(table: Any, rows: int, count: int, gradient: np.ndarray) -> None:
    for first in range(0, count, len(gradient)):
        ranks = np.arange(first, min(first + len(gradient), count))
        table.update(ranks * SCATTER % rows, gradient[: len(ranks)])


def run(arguments: Namespace) -> Report:
    """Run ``embedrock bench create`` and print what it finds."""
    report = Report()
    environment = {"EMBEDROCK_THREADS": str(arguments.threads)}
    try:
        creations, touched = [], {}
        for _ in range(arguments.runs):
            with Child(TableProbe, environment=environment, timeout_s=arguments.timeout) as child:
                creations.append(child.call("create", arguments.rows, arguments.dim))
                touched = touched or child.call("touch", arguments.touch)
        imports = [import_seconds() for _ in range(arguments.runs)]
    except ChildError as error:
        print(f"create: failed: {error.kind}: {error}")
        return Report(failures=[("create", error.details)])
    lines = [
        {"name": "create"} | {key: median(line[key] for line in creations) for key in creations[0]},
        {"name": "touch"} | touched,
        {"name": "import"} | {key: median(line[key] for line in imports) for key in imports[0]},
    ]
    report.results = [line | {"runs": arguments.runs, "rows": arguments.rows, "dim": arguments.dim} for line in lines]
    report.verdicts = verdicts(*lines)
    print(format_verdicts(report.verdicts))
    return report
