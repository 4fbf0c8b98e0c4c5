"""Contenders compared by the times of their steps: sessions, lines, and the table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.report import Report, about, base_of, failures, format_results, name_field, spread
from embedrock.bench.harness.runner import Racer, Result, measure
from embedrock.bench.harness.targets import Target
from embedrock.bench.harness.workload import Workload
from embedrock.machine.ram import peak_rss_bytes, rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import Field, format_factor, format_number, format_range

SETTLE_STEPS = 3  # untimed steps at the start of a turn: the others have used the caches meanwhile
SETTLE_BELOW_S = 0.05  # slower contenders outgrow every cache anyway
FIRST_STEPS = 2  # steps that load or compile what they need

Step = Callable[[int], object]  # given the number of a batch


class Timing(NamedTuple):
    """What came of a turn.

    Attributes:
        steps_s: seconds of each timed step.
        rss_bytes: RAM that the process held after it.
        peak_bytes: the most RAM that it ever held.
    """

    steps_s: list[float]
    rss_bytes: int
    peak_bytes: int

    @classmethod
    def now(cls, steps_s: list[float]) -> Timing:
        """Return a turn with the RAM that this process holds now."""
        return cls(steps_s, rss_bytes(), peak_rss_bytes())


class StepSession:
    """In a contender's own process: makes its step, and times it."""

    def __init__(self, make: Callable[[Workload], Step], workload: Workload) -> None:
        self._step = make(workload)
        self._batches = workload.batches
        self._count = 0
        self._last_s = 0.0

    def warm_up(self, seconds: float) -> list[float]:
        """Work through all batches, or as many as fit into `seconds`; return the seconds of each step.

        The first steps, in which kernels are compiled if this is the first run ever, do not count.
        """
        first = min(FIRST_STEPS, self._batches)
        return self._timed_steps(first, math.inf) + self._timed_steps(self._batches - first, seconds)

    def turn(self, steps: int, seconds: float) -> Timing:
        """Make `steps` steps, or as many as fit into `seconds`."""
        if self._last_s < SETTLE_BELOW_S:
            self._timed_steps(SETTLE_STEPS, seconds)
        return Timing.now(self._timed_steps(steps, seconds))

    def _timed_steps(self, steps: int, seconds: float) -> list[float]:
        times: list[float] = []
        while len(times) < steps and sum(times) < seconds:
            index = self._count % self._batches
            start = time.perf_counter()
            self._step(index)
            self._last_s = time.perf_counter() - start
            self._count += 1
            times.append(self._last_s)
        return times


def compare(racers: Sequence[Racer], targets: Sequence[Target], effort: Effort) -> Report:
    """Measure racers together, print their table and targets, and return what was found.

    Args:
        racers: with sessions whose turns are `Timing`; the first is the baseline.
        targets: what should come out.
        effort: how long.
    """
    baseline = racers[0].name
    report = report_of(measure(racers, effort), baseline)
    print(f"{format_times(report.results, baseline)}\n")
    report.judge(targets)
    return report


def report_of(results: Sequence[Result], baseline: str) -> Report:
    """Return the lines and the failures of results."""
    lines = [summary(result, base_of(result, baseline, results)) for result in results]
    return Report(lines, failures=failures(results))


def summary(result: Result, base: Result | None) -> dict[str, Any]:
    """Return one line of the table and of the JSON; times in milliseconds.

    ``ratio`` is the median over all steps, over the baseline's in the same rounds; ``ratio_range`` has the
    least and the greatest of single rounds.
    """
    line = about(result) | {
        "workload": asdict(result.racer.workload),
        "group": result.group,
        "need_bytes": result.racer.need.host,
    }
    if result.status != "ok":
        return line
    steps_s, rounds_s = _steps_s(result), _rounds_s(result)
    low, middle, high = spread(steps_s)
    last: Timing = result.turns[-1]
    return line | {
        "steps": len(steps_s),
        "median_ms": middle * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "least_ms": min(steps_s) * 1e3,
        "first_pass_ms": median(result.first[FIRST_STEPS:] or result.first) * 1e3,
        "first_step_ms": result.first[0] * 1e3,
        "rounds_ms": [seconds * 1e3 for seconds in rounds_s],
        "ratio": None if base is None else middle / median(_steps_s(base)),
        "ratio_range": None if base is None else ratio_range(rounds_s, _rounds_s(base)),
        "rss_bytes": last.rss_bytes,
        "peak_bytes": last.peak_bytes,
    }


def _steps_s(result: Result) -> list[float]:
    return [seconds for turn in result.turns for seconds in turn.steps_s]


def _rounds_s(result: Result) -> list[float]:
    return [median(turn.steps_s) for turn in result.turns]


def ratio_range(rounds_s: Sequence[float], base_s: Sequence[float]) -> list[float]:
    """Return the least and the greatest ratio of single rounds."""
    # Not strict: a process that is made anew costs a round, and so does a budget that ends between two turns.
    ratios = [seconds / base for seconds, base in zip(rounds_s, base_s, strict=False)]
    return [min(ratios), max(ratios)]


_FIELDS = (
    Field("ms", "median_ms", format_number),
    Field("quartiles", "quartiles_ms", format_range),
    Field("least", "least_ms", format_number),
    Field("first pass", "first_pass_ms", format_number),
    Field("ratio", "ratio", format_factor),
    Field("range", "ratio_range", format_range),
    Field("peak RAM", "peak_bytes", format_bytes),
)


def format_times(lines: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return the table that people read, times in ms."""
    compared = any(line.get("ratio") is not None for line in lines)
    note = f"ratio: median over that of {baseline}, same rounds; range: least and greatest of single rounds"
    return format_results((name_field(lines), *_FIELDS), lines, note if compared else "")


def describe(workload: Workload) -> str:
    """Return one line about a workload."""
    return (
        f"{workload.rows:,} x {workload.dim} float32, batch {workload.batch:,} x {workload.features} "
        f"= {workload.lookups:,} lookups, Zipf({workload.zipf:g}), {workload.unique_ids():,.0f} unique"
    )
