"""What a benchmark found: as lines of numbers, as tables for people, and as JSON."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from embedrock.bench.harness.processes import ChildError
from embedrock.bench.harness.runner import Result
from embedrock.bench.harness.targets import Target, Verdict, format_verdicts, judge
from embedrock.terminal.tables import Field, format_lines

SCHEMA = 1  # of the JSON


@dataclass
class Report:
    """What a benchmark found.

    Attributes:
        results: plain JSON values, one dict for each line measured.
        verdicts: the targets that could be judged.
        failures: name and traceback of each contender that failed; those that failed alike together.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Append what another benchmark found."""
        self.results += other.results
        self.verdicts += other.verdicts
        self.failures += other.failures

    def fail(self, name: str, error: ChildError) -> Report:
        """Note, and print, that what was measured in a process has failed; return this report."""
        print(f"{name}: failed: {error.kind}: {error}", flush=True)
        self.failures.append((name, error.details))
        return self

    def judge(self, targets: Sequence[Target]) -> None:
        """Compare its lines with targets, and print the verdicts."""
        found = judge(targets, self.results)
        self.verdicts += found
        if found:
            print(f"{format_verdicts(found)}\n", flush=True)


def failures(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Return names and traceback of those that failed."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.status == "failed":
            names.setdefault(result.details, []).append(result.name)
    return [(", ".join(alike), details) for details, alike in names.items()]


def about(result: Result) -> dict[str, Any]:
    """Return what every line of the JSON says: who, and whether it was measured."""
    label = result.racer.contender.label
    return {"name": result.name, "label": label, "status": result.status, "reason": result.reason}


def base_of(result: Result, baseline: str, results: Sequence[Result]) -> Result | None:
    """Return the baseline's result from the rounds that `result` took part in, if there is one."""
    same = (other for other in results if other.name == baseline and other.group == result.group)
    return next((other for other in same if other.status == "ok"), None)


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile of one or more times."""
    if len(times) == 1:
        return times[0], times[0], times[0]
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return low, middle, high


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over some turns."""
    return {name: median(turn[name] for turn in turns) for name in turns[0]}


# ---------------------------------------------------------------- printing


def format_results(fields: Sequence[Field], lines: Sequence[dict[str, Any]], note: str = "") -> str:
    """Return the table that people read; below it a note on what it shows, and why who is missing.

    Args:
        fields: what the table shows.
        lines: those that are "ok" are in the table.
        note: left out where there is no table.
    """
    measured = [line for line in lines if line["status"] == "ok"]
    missing = [f"{line['name']}: {line['status']}: {line['reason']}" for line in lines if line["status"] != "ok"]
    table = format_lines(fields, measured) if measured else "nothing was measured"
    return "\n".join([table, *([note] if measured and note else []), *missing])


def name_field(lines: Sequence[dict[str, Any]]) -> Field:
    """Return the column of names, with the group where there are several."""
    grouped = len({line["group"] for line in lines if line["group"]}) > 1
    return Field("contender", lambda line: f"{line['name']} (group {line['group']})" if grouped else line["name"])


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
