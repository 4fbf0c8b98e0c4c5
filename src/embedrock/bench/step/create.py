"""What a table of a billion rows costs, before and after rows are touched, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median
from typing import Any

import numpy as np

from embedrock.bench.harness.machine import peak_rss_bytes, rss_bytes
from embedrock.bench.harness.processes import Child, ChildError, child_environment
from embedrock.bench.harness.report import Report, Verdict, format_verdicts
from embedrock.bench.harness.rounds import Effort
from embedrock.bench.harness.workload import SCATTER

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


def run(rows: int, dim: int, touch: int, runs: int, effort: Effort) -> Report:
    """Create, touch and import, each in fresh processes, and print the targets.

    Args:
        rows, dim: of the table.
        touch: rows that are trained after creation, scattered over the table.
        runs: processes for creation and for import, whose medians count.
        effort: its threads and timeout.
    """
    try:
        probes = [_probe(rows, dim, touch if index == 0 else 0, effort) for index in range(runs)]
        imports = [import_facts() for _ in range(runs)]
    except ChildError as error:
        print(f"create: failed: {error.kind}: {error}")
        return Report(failures=[("create", error.details)])
    created, touched, imported = _medians([made for made, _ in probes]), probes[0][1], _medians(imports)
    report = Report(verdicts=_verdicts(created, touched, imported))
    for name, line in (("create", created), ("touch", touched), ("import", imported)):
        report.results.append({"name": name, "rows": rows, "dim": dim, "runs": runs, **line})
    print(format_verdicts(report.verdicts))
    return report


def _probe(rows: int, dim: int, touch: int, effort: Effort) -> tuple[dict[str, float], dict[str, float]]:
    with Child(TableProbe, environment=effort.environment(), timeout_s=effort.timeout_s) as child:
        return child.call("create", rows, dim), child.call("touch", touch) if touch else {}


def _medians(lines: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(line[key] for line in lines) for key in lines[0]}


def _verdicts(created: dict[str, float], touched: dict[str, float], imported: dict[str, float]) -> list[Verdict]:
    allowed_bytes = RECORD_FACTOR * touched["touched"] * touched["record_bytes"] + SPARE_BYTES
    return [
        Verdict("creating the table", created["seconds"], CREATE_S, "s", at_most=True),
        Verdict("RAM of the new table", created["rss_growth_bytes"] / MB, SPARE_BYTES / MB, "MB", at_most=True),
        Verdict(
            f"RAM after touching {touched['touched']:,.0f} rows of {touched['record_bytes']:.0f} bytes",
            touched["rss_growth_bytes"] / MB,
            allowed_bytes / MB,
            "MB",
            at_most=True,
        ),
        Verdict("import embedrock, beyond NumPy", imported["seconds"], IMPORT_S, "s", at_most=True),
        Verdict("frameworks that it imports", imported["frameworks"], 0, "", at_most=True),
    ]
