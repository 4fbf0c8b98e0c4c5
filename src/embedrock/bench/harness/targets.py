"""What benchmarks should reach, and what they did reach.

A target is judged by the lines of a report that are "ok", as they are in the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embedrock.terminal.tables import Field, format_lines, format_number

Line = Mapping[str, Any]
Found = tuple[float, Mapping[str, Any]]  # a number, and what the target's text may name
Measure = Callable[[Sequence[Line]], Iterable[Found]]


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


@dataclass(frozen=True)
class Target:
    """A number that should be reached.

    Args:
        what: for people; may name ``{fields}`` of what `measure` returns.
        measure: returns the number from lines, or several, each with fields; none where it was not measured.
        wanted: what it should reach; with `at_most`, what it should not exceed.
        unit: of both.
    """

    what: str
    measure: Measure
    wanted: float
    unit: str = "x"
    at_most: bool = False

    def judge(self, lines: Sequence[Line]) -> Iterator[Verdict]:
        """Yield the verdicts; none where it was not measured."""
        for measured, fields in self.measure(lines):
            yield Verdict(self.what.format(**fields), measured, self.wanted, self.unit, self.at_most)


def judge(targets: Sequence[Target], lines: Iterable[Line]) -> list[Verdict]:
    """Return the verdicts that lines allow."""
    measured = [line for line in lines if line.get("status", "ok") == "ok"]
    return [verdict for target in targets for verdict in target.judge(measured)]


# ---------------------------------------------------------------- what targets measure


@dataclass(frozen=True)
class Race:
    """How many times faster one contender is than another, by the medians of their steps.

    Contenders that were never in the same round are compared through the baseline, which ran beside either.

    Args:
        fast, slow: names, of which the fastest counts.
        ways: what follows the names of `fast`, see `Contender.ways`; `slow` may be driven in these ways too.
        at_most: it is the time of `fast` over that of `slow` that is wanted.
        rows, lookups: sizes that it speaks of, or None for any.
    """

    fast: tuple[str, ...]
    slow: tuple[str, ...]
    ways: tuple[str, ...] = ("",)
    at_most: bool = False
    rows: int | None = None
    lookups: int | None = None

    def __call__(self, lines: Sequence[Line]) -> Iterator[Found]:
        """Yield the ratio, and the names of the two."""
        fast = self._named(self.fast, self.ways, lines)
        slow = self._named(self.slow, ("", *self.ways), lines)
        if fast and slow:
            key = "ratio" if all(line["ratio"] is not None for line in (*fast, *slow)) else "median_ms"
            one, two = min(
                ((one, two) for one in fast for two in slow),
                key=lambda pair: (pair[0][key], pair[1][key], pair[0]["group"] != pair[1]["group"]),
            )
            ratio = one[key] / two[key] if self.at_most else two[key] / one[key]
            yield ratio, {"fast": one["name"], "slow": two["name"]}

    @property
    def names(self) -> dict[str, str]:
        """Who might have taken part, as the text of its target names them."""
        return {"fast": " or ".join(name + self.ways[0] for name in self.fast), "slow": " or ".join(self.slow)}

    def _named(self, names: tuple[str, ...], ways: tuple[str, ...], lines: Sequence[Line]) -> list[Line]:
        wanted = {name + way for name in names for way in ways}
        return [line for line in lines if line["name"] in wanted and self._applies(line["workload"])]

    def _applies(self, workload: Mapping[str, Any]) -> bool:
        if self.rows is not None and workload["rows"] != self.rows:
            return False
        return self.lookups is None or workload["batch"] * workload["features"] == self.lookups


def faster(
    fast: str, slow: str, factor: float, at_most: bool = False, rows: int | None = None, lookups: int | None = None
) -> Target:
    """Return the target that one contender is `factor` times faster than another.

    With `at_most`, that its time is at most `factor` times the other's.
    """
    what = "time of {fast} over that of {slow}" if at_most else "{fast} faster than {slow}"
    return Target(what, Race((fast,), (slow,), at_most=at_most, rows=rows, lookups=lookups), factor, at_most=at_most)


def each(number: Callable[[Line], float], *keys: str, name: str | None = None) -> Measure:
    """Measure a number of each line that has all of `keys`, or of the one of that name."""

    def measure(lines: Sequence[Line]) -> Iterator[Found]:
        for line in lines:
            if name in (None, line["name"]) and all(line.get(key) is not None for key in keys):
                yield number(line), line

    return measure


def beside(one: str, other: str, number: Callable[[Line, Line], float], *keys: str) -> Measure:
    """Measure a number of the lines of two names that have all of `keys`."""

    def measure(lines: Sequence[Line]) -> Iterator[Found]:
        found = {line["name"]: line for line in lines if all(line.get(key) is not None for key in keys)}
        if one in found and other in found:
            yield number(found[one], found[other]), {}

    return measure


# ---------------------------------------------------------------- printing


_FIELDS = (
    Field("target", lambda one: one.what),
    Field("measured", lambda one: f"{format_number(one.measured)} {one.unit}"),
    Field("wanted", lambda one: f"{'at most' if one.at_most else 'at least'} {format_number(one.wanted)} {one.unit}"),
    Field("", lambda one: "reached" if one.reached else "NOT reached"),
)


def format_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return the table of targets, or nothing where none was measured."""
    return format_lines(_FIELDS, verdicts) if verdicts else ""
