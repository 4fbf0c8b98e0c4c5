"""The outcome of a benchmark: lines of numbers, tables for people, and JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.implementations import FIRST_STEPS
from benchmarks.options import BenchmarkOptions
from benchmarks.runner import Entry, Result, measure
from benchmarks.targets import Target, TargetResult, compare_with, format_targets
from embedrock.cli.terminal.tables import Field, format_facts, format_lines, format_number
from embedrock.system.platform import usable_cores
from embedrock.system.ram import ROOT, available_bytes, memory_limit, read_text
from embedrock.system.sizes import format_bytes

SCHEMA = 2  # of the JSON
PACKAGES = ("embedrock", "numpy", "numba", "torch", "fbgemm-gpu-cpu", "jax", "optax", "keras", "tensorflow")


@dataclass
class Report:
    """The outcome of a benchmark.

    Attributes:
        results: plain JSON values, one dict for each line measured.
        targets: results of those that were measured.
        failures: names and tracebacks of failed implementations.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    targets: list[TargetResult] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.results += other.results
        self.targets += other.targets
        self.failures += other.failures

    def compare_with(self, targets: Sequence[Target]) -> None:
        """Compare its lines with targets, and print the results."""
        found = compare_with(targets, self.results)
        self.targets += found
        if found:
            print(f"{format_targets(found)}\n", flush=True)


def compare(
    entries: Sequence[Entry],
    targets: Sequence[Target],
    options: BenchmarkOptions,
    more: Sequence[Field] = (),
    **limits: Any,
) -> Report:
    """Measure entries whose turns are `Timing`; print their table and targets. The first entry is the baseline.

    Args:
        entries, options: see `runner.measure`.
        targets: to compare with.
        more: further columns of the table.
        limits: ``room=`` and ``until=``, see `runner.measure`.
    """
    report = report_of(measure(entries, options, **limits), entries[0].name)
    print(f"{format_times(report.results, entries[0].name, more)}\n", flush=True)
    report.compare_with(targets)
    return report


def report_of(results: Sequence[Result], baseline: str) -> Report:
    """Return the lines and the failures of results."""
    lines = [_summary(result, _base_of(result, baseline, results)) for result in results]
    return Report(lines, failures=[(one.name, one.details) for one in results if one.status == "failed"])


def _base_of(result: Result, baseline: str, results: Sequence[Result]) -> Result | None:
    """Return the baseline's result from the rounds of `result`, if there is one."""
    same = (other for other in results if other.name == baseline and other.group == result.group)
    return next((other for other in same if other.status == "ok"), None)


def _summary(result: Result, base: Result | None) -> dict[str, Any]:
    """Return one line of the table and of the JSON; times in milliseconds.

    ``ratio`` is the median over all steps, over the baseline's in the same rounds; ``ratio_range`` has the least and
    the greatest of single rounds, and ``least_ratio`` is that of least times. Numbers of `Timing.more` are medians over
    the turns.
    """
    line = {
        "name": result.name,
        "label": result.entry.implementation.label,
        "status": result.status,
        "reason": result.reason,
        "workload": asdict(result.entry.workload),
        "group": result.group,
        "need_bytes": result.entry.need.host,
    }
    if result.status != "ok":
        return line
    steps_s, rounds_s = _steps_s(result), _rounds_s(result)
    low, middle, high = spread(steps_s)
    return line | {
        "steps": len(steps_s),
        "median_ms": middle * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "least_ms": min(steps_s) * 1e3,
        "first_pass_ms": median(result.first[FIRST_STEPS:] or result.first) * 1e3,
        "rounds_ms": [seconds * 1e3 for seconds in rounds_s],
        "ratio": None if base is None else middle / median(_steps_s(base)),
        "least_ratio": None if base is None else min(steps_s) / min(_steps_s(base)),
        "ratio_range": None if base is None else _ratio_range(rounds_s, _rounds_s(base)),
        **medians([turn.more for turn in result.turns]),
    }


def _steps_s(result: Result) -> list[float]:
    return [seconds for turn in result.turns for seconds in turn.steps_s]


def _rounds_s(result: Result) -> list[float]:
    return [median(turn.steps_s) for turn in result.turns]


def _ratio_range(rounds_s: Sequence[float], base_s: Sequence[float]) -> list[float]:
    # Not strict: a new process costs a round, and a time limit may end between two turns.
    ratios = [seconds / base for seconds, base in zip(rounds_s, base_s, strict=False)]
    return [min(ratios), max(ratios)]


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of one or more times."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return low, middle, high


def medians(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over some turns; None where they have none."""
    return {name: None if value is None else median(turn[name] for turn in turns) for name, value in turns[0].items()}


# ---------------------------------------------------------------- printing


def format_factor(value: float) -> str:
    """Format a factor."""
    return f"{format_number(value)}x"


def format_range(ends: Sequence[float]) -> str:
    """Format the least and the greatest of some numbers."""
    return " - ".join(map(format_number, ends))


_TIMES = (
    Field("ms", "median_ms", format_number),
    Field("quartiles", "quartiles_ms", format_range),
    Field("least", "least_ms", format_number),
    Field("first pass", "first_pass_ms", format_number),
    Field("ratio", "ratio", format_factor),
    Field("range", "ratio_range", format_range),
    Field("by least", "least_ratio", format_factor),
    Field("calls", "calls", format_number),
    Field("peak RAM", "peak_bytes", format_bytes),
)


def format_times(lines: Sequence[dict[str, Any]], baseline: str, more: Sequence[Field] = ()) -> str:
    """Return the table for people, times in ms."""
    compared = any(line.get("ratio") is not None for line in lines)
    note = f"ratio: median over that of {baseline}, same rounds; range: least and greatest of single rounds"
    return _format_results((_name_field(lines), *_TIMES, *more), lines, note if compared else "")


def _format_results(fields: Sequence[Field], lines: Sequence[dict[str, Any]], note: str = "") -> str:
    measured = [line for line in lines if line["status"] == "ok"]
    missing = [f"{line['name']}: {line['status']}: {line['reason']}" for line in lines if line["status"] != "ok"]
    table = format_lines(fields, measured) if measured else "nothing was measured"
    return "\n".join([table, *([note] if measured and note else []), *missing])


def _name_field(lines: Sequence[dict[str, Any]]) -> Field:
    grouped = len({line["group"] for line in lines if line["group"]}) > 1
    return Field("", lambda line: f"{line['name']} (group {line['group']})" if grouped else line["name"])


def format_line(line: dict[str, Any]) -> str:
    """Return all numbers of a line, one below the other."""
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    facts = {name: format_bytes(value) if "bytes" in name else format_number(value) for name, value in numbers.items()}
    return f"\n{line['name']}\n{format_facts(facts)}"


# ---------------------------------------------------------------- JSON


def machine_facts() -> dict[str, object]:
    """Return the facts that a reader needs to judge a measurement, as plain JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "ram_bytes": memory_limit(),
        "ram_available_bytes": available_bytes(),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
        "huge_pages": read_text(ROOT / "sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        "python": platform.python_version(),
        "packages": {one.name: one.version for one in metadata.distributions() if one.name in PACKAGES},
    }


def _cpu_model() -> str:
    for line in read_text(ROOT / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, report: Report, circumstances: dict[str, Any]) -> None:
    """Write all that is needed to read, repeat and compare a measurement.

    Args:
        path: the file.
        report: the outcome; each result has its workload.
        circumstances: benchmark, options, and the machine's facts of before.
    """
    document = {
        "schema": SCHEMA,
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        **circumstances,
        "results": report.results,
        "targets": [asdict(target) | {"met": target.met} for target in report.targets],
        "failures": [{"name": name, "details": details} for name, details in report.failures],
    }
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")
