"""Numbers that benchmarks should reach. A target is compared with the lines of a report that are "ok"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import truediv
from typing import Any

from embedrock.cli.terminal.tables import Field, format_lines, format_number

Line = Mapping[str, Any]
Found = tuple[float, Mapping[str, Any]]  # a number, and fields for the target's text
Measure = Callable[[Sequence[Line]], Iterable[Found]]


@dataclass(frozen=True)
class TargetResult:
    """A measured number beside the number wanted."""

    what: str
    measured: float
    wanted: float
    unit: str
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the measured number is as good as the one wanted."""
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


@dataclass(frozen=True)
class Target:
    """A number that should be reached.

    Args:
        what: for people; may name ``{fields}`` that `measure` returns.
        measure: returns numbers from lines, each with fields; none if it was not measured.
        wanted: at least this; with `at_most`, at most.
        unit: of both.
    """

    what: str
    measure: Measure
    wanted: float
    unit: str = "x"
    at_most: bool = False


def compare_with(targets: Sequence[Target], lines: Iterable[Line]) -> list[TargetResult]:
    """Return the results that lines allow."""
    measured = [line for line in lines if line.get("status", "ok") == "ok"]
    return [
        TargetResult(one.what.format(**fields), number, one.wanted, one.unit, one.at_most)
        for one in targets
        for number, fields in one.measure(measured)
    ]


@dataclass(frozen=True)
class Race:
    """How many times faster one implementation is than another, by the medians or the least times of their steps.

    Implementations that were never in the same round are compared through the baseline, which ran beside either.

    Args:
        fast, slow: names; the fastest of each counts.
        ways: suffixes of the names of `fast`; `slow` may have these or none.
        at_most: measure the time of `fast` over that of `slow`.
        least: compare least times.
        only: numbers of the workload that count, by their names.
    """

    fast: tuple[str, ...]
    slow: tuple[str, ...]
    ways: tuple[str, ...] = ("",)
    at_most: bool = False
    least: bool = False
    only: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, lines: Sequence[Line]) -> Iterator[Found]:
        fast = self._named(self.fast, self.ways, lines)
        slow = self._named(self.slow, ("", *self.ways), lines)
        if fast and slow:
            over, time = ("least_ratio", "least_ms") if self.least else ("ratio", "median_ms")
            key = over if all(line[over] is not None for line in (*fast, *slow)) else time
            one, two = min(
                ((one, two) for one in fast for two in slow),
                key=lambda pair: (pair[0][key], pair[1][key], pair[0]["group"] != pair[1]["group"]),
            )
            ratio = one[key] / two[key] if self.at_most else two[key] / one[key]
            yield ratio, {**one.get("workload", {}), "fast": one["name"], "slow": two["name"]}

    def _named(self, names: tuple[str, ...], ways: tuple[str, ...], lines: Sequence[Line]) -> list[Line]:
        wanted = {name + way for name in names for way in ways}
        return [line for line in lines if line["name"] in wanted and _is_of(line, self.only)]


def _is_of(line: Line, numbers: Mapping[str, int]) -> bool:
    return all(line["workload"][name] == number for name, number in numbers.items())


def faster(fast: str, slow: str, factor: float, at_most: bool = False, **only: int) -> Target:
    """Return the target that one implementation is `factor` times faster than another.

    With `at_most`: its time is at most `factor` times the other's.
    """
    what = "time of {fast} over that of {slow}" if at_most else "{fast} faster than {slow}"
    return Target(what, Race((fast,), (slow,), at_most=at_most, only=only), factor, at_most=at_most)


def at_most(fast: str, slow: Sequence[str], factor: float, **only: int) -> Target:
    """Return the target that the least time of one is at most `factor` times that of the fastest of some others."""
    numbers = "".join(f", {name} {number:,}" for name, number in only.items())
    race = Race((fast,), tuple(slow), at_most=True, least=True, only=only)
    return Target(f"least time of {{fast}} over that of {{slow}}{numbers}", race, factor, at_most=True)


def each(number: Callable[[Line], float], *keys: str, name: str | None = None) -> Measure:
    """Measure a number of each line that has all of `keys`, or only of the one of that name."""

    def measure(lines: Sequence[Line]) -> Iterator[Found]:
        for line in lines:
            if name in (None, line["name"]) and all(line.get(key) is not None for key in keys):
                yield number(line), line

    return measure


def beside(one: str, other: str, key: str, number: Callable[[Any, Any], float], **only: int) -> Measure:
    """Measure two names beside each other by one of their numbers, on workloads with the numbers of `only`."""

    def measure(lines: Sequence[Line]) -> Iterator[Found]:
        found = {line["name"]: line for line in lines if line.get(key) is not None and _is_of(line, only)}
        if one in found and other in found:
            yield number(found[one][key], found[other][key]), found[one].get("workload", {})

    return measure


def ratio(what: str, one: str, other: str, key: str, most: float, **only: int) -> Target:
    """Return the target that a number of one name is at most `most` times that of the other."""
    return Target(what, beside(one, other, key, truediv, **only), most, at_most=True)


_FIELDS = (
    Field("target", lambda one: one.what),
    Field("measured", lambda one: f"{format_number(one.measured)} {one.unit}"),
    Field("wanted", lambda one: f"{'at most' if one.at_most else 'at least'} {format_number(one.wanted)} {one.unit}"),
    Field("", lambda one: "met" if one.met else "MISSED"),
)


def format_targets(results: Sequence[TargetResult]) -> str:
    """Return the table of targets, or "" if none was measured."""
    return format_lines(_FIELDS, results) if results else ""
