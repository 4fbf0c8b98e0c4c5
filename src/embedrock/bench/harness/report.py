"""From results to what is printed and written: statistics, ratios, verdicts, tables, JSON."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from embedrock.bench.harness.rounds import FIRST_STEPS, Result
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_number, format_table

SCHEMA = 1  # of the JSON


@dataclass(frozen=True)
class Target:
    """One contender should be so many times faster than another.

    Args:
        fast, slow: names of contenders.
        factor: time of `slow` / time of `fast` should reach this; with `at_most`, time of `fast` / time of `slow`
            should not exceed it.
        rows: the table size that the target speaks of, or None for any.
        lookups: the batch size that the target speaks of, or None for any.
    """

    fast: str
    slow: str
    factor: float
    rows: int | None = None
    lookups: int | None = None
    at_most: bool = False


@dataclass(frozen=True)
class Verdict:
    """A measured number beside the number wanted."""

    what: str
    measured: float
    wanted: float
    unit: str
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether the measured number is as good as the one wanted."""
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


@dataclass
class Report:
    """What a benchmark found.

    Attributes:
        results: plain JSON values, one dict for each line measured.
        verdicts: the targets that could be judged.
        failures: name and traceback of each contender that failed.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Append what another benchmark found."""
        self.results += other.results
        self.verdicts += other.verdicts
        self.failures += other.failures


def comparison(results: Sequence[Result], baseline: str, targets: Sequence[Target]) -> Report:
    """Return the report of contenders that were measured in rounds."""
    return Report(
        results=[summary(result, _base_of(result, baseline, results)) for result in results],
        verdicts=[verdict for target in targets for verdict in _judge(target, results, baseline)],
        failures=[(result.name, result.details) for result in results if result.status == "failed"],
    )


def summary(result: Result, base: Result | None) -> dict[str, Any]:
    """Return one line of the table and of the JSON; times in milliseconds.

    ``ratio`` is the median over all steps, over the baseline's in the same rounds; ``ratio_range`` has the
    least and the greatest of single rounds.
    """
    contender, workload = result.entry.contender, result.entry.workload
    line: dict[str, Any] = {
        "name": result.name,
        "label": contender.label,
        "workload": asdict(workload),
        "group": result.group,
        "status": result.status,
        "reason": result.reason,
        "need_bytes": result.entry.need_bytes,
    }
    if result.status != "ok":
        return line
    low, middle, high = spread(result.steps_s)
    return line | {
        "steps": len(result.steps_s),
        "median_ms": middle * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "least_ms": min(result.steps_s) * 1e3,
        "first_pass_ms": median(result.first_s[FIRST_STEPS:] or result.first_s) * 1e3,
        "first_step_ms": result.first_s[0] * 1e3,
        "rounds_ms": [median(round_s) * 1e3 for round_s in result.rounds_s],
        "ratio": None if base is None else result.median_s / base.median_s,
        "ratio_range": None if base is None else _ratio_range(result, base),
        "rss_bytes": result.rss_bytes,
        "peak_bytes": result.peak_bytes,
    }


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of one or more times."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return low, middle, high


def _base_of(result: Result, baseline: str, results: Sequence[Result]) -> Result | None:
    """Return the baseline's result from the rounds that `result` took part in."""
    same = (other for other in results if other.name == baseline and other.group == result.group)
    return next((other for other in same if other.status == "ok"), None)


def _ratio_range(result: Result, base: Result) -> list[float]:
    pairs = zip(result.rounds_s, base.rounds_s, strict=True)
    ratios = [median(times) / median(base_times) for times, base_times in pairs]
    return [min(ratios), max(ratios)]


def _judge(target: Target, results: Sequence[Result], baseline: str) -> list[Verdict]:
    pair = _pair(target, [result for result in results if result.status == "ok"])
    if pair is None or not _applies(target, pair[0]):
        return []
    fast, slow = pair
    fast_base, slow_base = (_base_of(result, baseline, results) for result in pair)
    measured = slow.median_s / fast.median_s
    if fast.group != slow.group and fast_base and slow_base:
        # Never in the same round: compare through the baseline, which ran beside either.
        measured *= fast_base.median_s / slow_base.median_s
    if target.at_most:
        what = f"time of {target.fast} over that of {target.slow}"
        return [Verdict(what, 1 / measured, target.factor, "x", at_most=True)]
    return [Verdict(f"{target.fast} faster than {target.slow}", measured, target.factor, "x")]


def _pair(target: Target, results: Sequence[Result]) -> tuple[Result, Result] | None:
    """Return results of both contenders, from the same group if there is one."""
    pairs = [(a, b) for a in results for b in results if (a.name, b.name) == (target.fast, target.slow)]
    return min(pairs, key=lambda pair: pair[0].group != pair[1].group, default=None)


def _applies(target: Target, result: Result) -> bool:
    workload = result.entry.workload
    return target.rows in (None, workload.rows) and target.lookups in (None, workload.lookups)


# ---------------------------------------------------------------- printing

_COLUMNS = ("contender", "ms", "quartiles", "least", "first pass", "ratio", "range", "peak RAM")


def format_results(lines: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return the table that people read, times in ms; below it, why who is missing."""
    grouped = len({line["group"] for line in lines if line["group"]}) > 1
    rows = [_cells(line, grouped) for line in lines if line["status"] == "ok"]
    table = format_table(_COLUMNS, rows) if rows else "nothing was measured"
    missing = [f"{line['name']}: {line['status']}: {line['reason']}" for line in lines if line["status"] != "ok"]
    note = f"ratio: median over that of {baseline}, same rounds; range: least and greatest of single rounds"
    compared = any(line.get("ratio") is not None for line in lines)
    return "\n".join([table, *([note] if compared else []), *missing])


def _cells(line: dict[str, Any], grouped: bool) -> list[str]:
    low, high = line["quartiles_ms"]
    base = line["ratio"] is not None
    return [
        f"{line['name']} (group {line['group']})" if grouped else line["name"],
        format_number(line["median_ms"]),
        f"{format_number(low)} - {format_number(high)}",
        format_number(line["least_ms"]),
        format_number(line["first_pass_ms"]),
        f"{format_number(line['ratio'])}x" if base else "",
        " - ".join(format_number(ratio) for ratio in line["ratio_range"]) if base else "",
        format_bytes(line["peak_bytes"]),
    ]


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return the table of targets, or nothing where none was measured."""
    if not verdicts:
        return ""
    rows = [
        [
            verdict.what,
            f"{format_number(verdict.measured)} {verdict.unit}",
            f"{'at most' if verdict.at_most else 'at least'} {format_number(verdict.wanted)} {verdict.unit}",
            "reached" if verdict.reached else "NOT reached",
        ]
        for verdict in verdicts
    ]
    return format_table(("target", "measured", "wanted", ""), rows)


# ---------------------------------------------------------------- JSON


def write_json(path: Path, report: Report, circumstances: dict[str, Any]) -> None:
    """Write everything that is needed to read, repeat and compare a measurement.

    Args:
        path: the file.
        report: what was found; each result says on what workload.
        circumstances: benchmark, options, and the machine's facts of before.
    """
    document = {
        "schema": SCHEMA,
        "command": shlex.join(["embedrock", *["bench"][: sys.argv[1:2] != ["bench"]], *sys.argv[1:]]),
        **circumstances,
        "results": report.results,
        "verdicts": [asdict(verdict) | {"reached": verdict.reached} for verdict in report.verdicts],
        "failures": [{"name": name, "details": details} for name, details in report.failures],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
