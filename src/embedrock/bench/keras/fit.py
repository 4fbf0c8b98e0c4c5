"""``bench keras``: ours beside `keras.layers.Embedding` in `fit`, and what our layer takes beyond that of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedrock.bench.harness.report import Report, Target, Verdict, format_verdicts
from embedrock.bench.harness.rounds import Effort, Entry
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.contenders import FIT, LAYER, FitSession
from embedrock.bench.step.comparisons import describe, run_entries
from embedrock.bench.step.contenders import Contender

KERAS_WORKLOAD = Workload(features=1)
KERAS_ROWS = (100_000, 1_000_000, 10_000_000)
TARGETS = (
    Target("ours-adam", "keras-adam", 3, rows=100_000),
    Target("ours-adam", "keras-adam", 12, rows=1_000_000),
    Target("ours-adam", "keras-adam", 80, rows=10_000_000),
    Target("ours-mirrored", "ours-adam", 1.3, at_most=True),
)
OVERHEAD_MS = 1.5
PEAK_ROWS, PEAK_SHARE = 10_000_000, 0.5


@dataclass(frozen=True)
class KerasEffort(Effort):
    """How long to measure, as for other contenders; a turn is one `fit`."""

    rounds: int = 5
    steps: int = 20


def run(workload: Workload, sizes: Sequence[int], chosen: Sequence[Contender], effort: Effort) -> Report:
    """Measure, print a table for each size, and return all that was found.

    Args:
        workload: all but the number of rows.
        sizes: numbers of rows. The layer alone is measured on the one in the middle of them.
        chosen: of `FIT` and `LAYER`; ratios are over the first one of either.
        effort: how long.
    """
    report = Report()
    middle = sorted(sizes)[len(sizes) // 2]
    for rows in dict.fromkeys(sizes):
        entries = [Entry(one, replace(workload, rows=rows), FitSession) for one in chosen if one in FIT]
        if entries:
            report.add(_measured("fit", entries, effort))
    if layers := [Entry(one, replace(workload, rows=middle)) for one in chosen if one in LAYER]:
        report.add(_measured("the layer alone, without fit", layers, effort))
    print(f"all targets\n{format_verdicts(report.verdicts)}")
    return report


def _measured(what: str, entries: Sequence[Entry], effort: Effort) -> Report:
    print(f"{what}: {describe(entries[0].workload)}")
    report = run_entries(entries, entries[0].name, TARGETS, effort)
    rows = f"{entries[0].workload.rows:,} rows"
    report.verdicts = [replace(verdict, what=f"{rows}: {verdict.what}") for verdict in report.verdicts]
    report.verdicts += _other_verdicts({line["name"]: line for line in report.results if line["status"] == "ok"})
    return report


def _other_verdicts(lines: dict[str, dict[str, Any]]) -> list[Verdict]:
    """Judge what is no ratio of times, where it was measured."""
    verdicts = []
    if {"keras-layer", "torch-layer"} <= lines.keys():
        overhead_ms = lines["keras-layer"]["median_ms"] - lines["torch-layer"]["median_ms"]
        what = "time of our Keras layer beyond our PyTorch layer"
        verdicts.append(Verdict(what, overhead_ms, OVERHEAD_MS, "ms", at_most=True))
    if {"ours-adam", "keras-adam"} <= lines.keys() and lines["ours-adam"]["workload"]["rows"] == PEAK_ROWS:
        share = lines["ours-adam"]["peak_bytes"] / lines["keras-adam"]["peak_bytes"]
        what = f"{PEAK_ROWS:,} rows: peak RAM of ours-adam over that of keras-adam"
        verdicts.append(Verdict(what, share, PEAK_SHARE, "x", at_most=True))
    return verdicts
