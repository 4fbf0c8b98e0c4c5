"""``bench gpu``: from results to lines, tables and targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

from embedrock.bench.gpu.contenders import PREFETCH, WIDE, WIDER
from embedrock.bench.gpu.limits import RATE
from embedrock.bench.gpu.session import counts, hit_rate, median_s, rounds_s, traffic
from embedrock.bench.harness.comparison import ratio_range
from embedrock.bench.harness.report import about, base_of, format_results, name_field
from embedrock.bench.harness.runner import Result
from embedrock.bench.harness.targets import Found, Line, Race, Target, Verdict, each, judge
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import Field, format_factor, format_number, format_range

BUS_SHARE, NEAR_SHARE = 0.75, 0.45  # wanted of what the machine gives
WAYS = ("", PREFETCH)
Limits = Mapping[str, float]  # rates by name, see `limits`


# ---------------------------------------------------------------- targets


def _race(
    what: str, fast: tuple[str, ...], slow: str, factor: float, at_most: bool = False, ways: tuple[str, ...] = WAYS
) -> Target:
    relation = "time over that of" if at_most else "faster than"
    return Target(f"{what}: {{fast}}, {relation} {{slow}}", Race(fast, (slow,), ways, at_most), factor, at_most=at_most)


FROM_HOST = ("ours-b", "ours-c100", "ours-c80", "ours-c20", "ours-c10")
RACES = {
    "forum": (
        _race("forum, rows in host RAM", FROM_HOST, "torch-sparse-gpu", 1),
        _race("forum, rows in host RAM", FROM_HOST, "torch-sparse-cpu", 3.6),
        _race("forum, rows in GPU memory", ("ours-a",), "torch-sparse-gpu", 2),
        _race(f"forum, rows {WIDER} times as wide", (f"{WIDE}-wide",), WIDE, 1.5, at_most=True),
    ),
    "cache": (
        _race("cache, 100% cached", ("ours-c100",), "ours-a", 1.5, at_most=True),
        _race("cache, 80% cached", ("ours-c80",), "ours-a", 2, at_most=True, ways=(PREFETCH,)),
        _race("cache, 20% cached", ("ours-c20",), "ours-a", 4, at_most=True, ways=(PREFETCH,)),
    ),
}
KERNELS = tuple(
    Target(
        f"{name} in GPU memory: share of the rate of copies",
        each(lambda line, name=name: line[name] / line["copies"], name, "copies"),
        NEAR_SHARE,
        "",
    )
    for name in ("step", "gather")
)


def _share_of_bus(limit: str, lines: Sequence[Line]) -> Iterator[Found]:
    """Measure the faster way to train in place, beside what the bus gave to `limit`."""
    direct = [line for line in lines if line["name"] in ("ours-b", f"ours-b{PREFETCH}")]
    best = min(direct, key=lambda line: line["median_ms"], default=None)
    if best is not None and limit in best["bus_shares"]:
        yield best["bus_shares"][limit], best


BUS = tuple(
    Target(f"cache, {{name}}: share of the bus, as {limit} have it", partial(_share_of_bus, limit), BUS_SHARE, "")
    for limit in ("copies", "kernels")
)


def _fastest(names: tuple[str, ...], lines: Sequence[Line]) -> Iterator[Found]:
    """Measure the ms of a step of the fastest of some contenders."""
    wanted = {name + way for name in names for way in WAYS}
    best = min((line for line in lines if line["name"] in wanted), key=lambda line: line["median_ms"], default=None)
    if best is not None:
        yield best["median_ms"], best


def _time(what: str, names: tuple[str, ...], most_ms: float) -> Target:
    return Target(f"{what}, on an H200: {{name}}, a step", partial(_fastest, names), most_ms, " ms", at_most=True)


# A ratio is reached too where both are slow.
TIMES = {
    "forum": (_time("forum, rows in host RAM", FROM_HOST, 1e3 / 330), _time("forum, near", ("ours-a",), 1e3 / 660)),
    "cache": (_time("cache, near", ("ours-a",), 2.0),),
}
TARGETS = {"forum": (*RACES["forum"], *TIMES["forum"]), "cache": (*RACES["cache"], *BUS, *TIMES["cache"])}


def judge_workload(name: str, lines: Sequence[dict[str, Any]]) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts on a workload, and what could not be judged."""
    missing = [_unjudged(target) for target in RACES[name] if not judge([target], lines)]
    if name == "cache" and not judge(BUS, lines):
        missing.append("mode b: share of the bus")
    return judge(TARGETS[name], lines), missing


def _unjudged(target: Target) -> str:
    assert isinstance(target.measure, Race)
    return target.what.format(**target.measure.names)


# ---------------------------------------------------------------- lines


def summary(result: Result, baseline: str, results: Sequence[Result], limits: Limits) -> dict[str, Any]:
    """Return one line of the table and of the JSON.

    ``ratio`` is the median over the rounds, over the baseline's in the same rounds; ``ratio_range`` has the least and
    the greatest of single rounds.
    """
    need, workload = result.racer.need, result.racer.workload
    line: dict[str, Any] = about(result) | {
        "prefetch": result.way == PREFETCH,
        "workload": asdict(workload),
        "unique_rows": workload.unique,
        "working_set_rows": sum(workload.touched),
        "group": result.group,
        "need_host_bytes": need.host,
        "need_device_bytes": need.device,
    }
    if result.status != "ok":
        return line
    base, moved = base_of(result, baseline, results), traffic(result)
    return line | {
        "median_ms": median_s(result) * 1e3,
        "host_ms": median(turn.host_seconds for turn in result.turns) * 1e3,
        "rounds_ms": [seconds * 1e3 for seconds in rounds_s(result)],
        "ratio": None if base is None else median_s(result) / median_s(base),
        "ratio_range": None if base is None else ratio_range(rounds_s(result), rounds_s(base)),
        "counts": counts(result),
        "hit_rate": hit_rate(result),
        "in_bytes": moved and moved.inward,
        "out_bytes": moved and moved.outward,
        "bus_shares": _bus_shares(result, limits),
        **result.turns[-1].memory,
    }


def _bus_shares(result: Result, limits: Limits) -> dict[str, float]:
    """Return the share of the bus that a step takes, by what the limit was measured with.

    The fuller direction counts, over what the bus gives each way while both are busy.
    """
    moved = traffic(result)
    if moved is None or not max(moved):
        return {}
    rate = max(moved) / median_s(result) / RATE
    names = {"copies": "copies_both_ways", "kernels": f"kernel_both_ways_{result.racer.workload.record_bytes}"}
    return {what: rate / limits[name] for what, name in names.items() if name in limits}


# ---------------------------------------------------------------- printing

_FIELDS = (
    Field("ms", "median_ms", format_number),
    Field("host", "host_ms", format_number),
    Field("steps/s", lambda line: 1e3 / line["median_ms"], format_number),
    Field("ratio", "ratio", format_factor),
    Field("range", "ratio_range", format_range),
    Field("hits", "hit_rate", lambda rate: f"{rate:.1%}"),
    Field("MB in", "in_bytes", lambda moved: format_number(moved / 1e6)),
    Field("MB out", "out_bytes", lambda moved: format_number(moved / 1e6)),
    Field("bus", lambda line: line["bus_shares"].get("copies"), lambda share: f"{share:.0%}"),
    Field("near", lambda line: line["near_bytes"] or None, format_bytes),
    Field("peak RAM", "peak_rss_bytes", format_bytes),
)
_NOTE = """\
host: ms until the host had given the GPU all to do. ratio: median over that of {baseline}, same rounds; range: least
and greatest of single rounds. hits: share of a batch's unique rows that were near. in, out: bytes of rows that a step
moves into the GPU and out of it. bus: share of what copies have each way when both go at once. near: GPU memory of our
tables."""


def format_steps(lines: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return the table that people read; below it, why who is missing."""
    return format_results((name_field(lines), *_FIELDS), lines, _NOTE.format(baseline=baseline))
