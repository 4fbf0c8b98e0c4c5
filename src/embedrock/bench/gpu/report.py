"""``bench gpu``: from results to lines, tables and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from embedrock.bench.gpu.contenders import WIDE, WIDER
from embedrock.bench.gpu.limits import RATE
from embedrock.bench.gpu.rounds import GpuResult
from embedrock.bench.gpu.workloads import GpuWorkload
from embedrock.bench.harness.report import Verdict
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_number, format_table

BUS_SHARE, NEAR_SHARE = 0.75, 0.45  # wanted of what the machine gives
Limits = Mapping[str, float]  # rates by name, see `gpu_limits`


@dataclass(frozen=True)
class GpuTarget:
    """A way to train should be so many times faster than another; each is the fastest of those named.

    Args:
        workload: where.
        what: for people.
        fast, slow: names of contenders; they may prefetch, unless `prefetch` says that `fast` must.
        factor: time of `slow` / time of `fast` should reach this; with `at_most`, time of `fast` / time of `slow`
            should not exceed it.
        prefetch: only `fast` with prefetching counts.
    """

    workload: str
    what: str
    fast: tuple[str, ...]
    slow: tuple[str, ...]
    factor: float
    at_most: bool = False
    prefetch: bool = False


FROM_HOST = ("ours-b", "ours-c100", "ours-c80", "ours-c20", "ours-c10")
TARGETS = (
    GpuTarget("forum", "rows in host RAM", FROM_HOST, ("torch-sparse-gpu",), 1),
    GpuTarget("forum", "rows in host RAM", FROM_HOST, ("torch-sparse-cpu",), 3.6),
    GpuTarget("forum", "rows in GPU memory", ("ours-a",), ("torch-sparse-gpu",), 2),
    GpuTarget("forum", f"rows {WIDER} times as wide", (f"{WIDE}-wide",), (WIDE,), 1.5, at_most=True),
    GpuTarget("cache", "100% cached", ("ours-c100",), ("ours-a",), 1.5, at_most=True),
    GpuTarget("cache", "80% cached", ("ours-c80",), ("ours-a",), 2, at_most=True, prefetch=True),
    GpuTarget("cache", "20% cached", ("ours-c20",), ("ours-a",), 4, at_most=True, prefetch=True),
)


# ---------------------------------------------------------------- targets


def judge_limits(limits: Limits) -> list[Verdict]:
    """Return the verdicts on our kernels in GPU memory, if they were measured."""
    if "copies" not in limits:
        return []
    return [
        Verdict(
            f"{name} in GPU memory: share of the rate of copies",
            limits[name] / limits["copies"],
            NEAR_SHARE,
            "",
        )
        for name in ("step", "gather")
    ]


def judge(
    workload: GpuWorkload, baseline: str, results: Sequence[GpuResult], limits: Limits
) -> tuple[list[Verdict], list[str]]:
    """Return the verdicts on a workload, and what could not be judged.

    Args:
        workload: what the results are of.
        baseline: the entry in every group, through which groups compare.
        results: all of them.
        limits: what the machine gives.
    """
    verdicts: list[Verdict] = []
    missing: list[str] = []
    for target in TARGETS:
        if target.workload == workload.name:
            verdict = _verdict(target, baseline, results)
            verdicts += [verdict] if verdict else []
            missing += [] if verdict else [_say(target, " or ".join(target.fast), " or ".join(target.slow))]
    if workload.name == "cache":
        shares = list(_bus_verdicts(results, limits))
        verdicts += shares
        missing += [] if shares else ["mode b: share of the bus"]
    return verdicts, missing


def _verdict(target: GpuTarget, baseline: str, results: Sequence[GpuResult]) -> Verdict | None:
    fast = _best(target.fast, results, baseline, only_ahead=target.prefetch)
    slow = _best(target.slow, results, baseline)
    if fast is None or slow is None:
        return None
    ratio = _relative(slow, results, baseline) / _relative(fast, results, baseline)
    measured = 1 / ratio if target.at_most else ratio
    return Verdict(_say(target, fast.name, slow.name), measured, target.factor, "x", target.at_most)


def _say(target: GpuTarget, fast: str, slow: str) -> str:
    relation = "time over that of" if target.at_most else "faster than"
    return f"{target.workload}, {target.what}: {fast}, {relation} {slow}"


def _best(
    names: Sequence[str], results: Sequence[GpuResult], baseline: str, only_ahead: bool = False
) -> GpuResult | None:
    named = [one for one in results if one.status == "ok" and one.entry.name in names and one.ahead >= only_ahead]
    return min(named, key=lambda result: _relative(result, results, baseline), default=None)


def _relative(result: GpuResult, results: Sequence[GpuResult], baseline: str) -> float:
    """Return the time over that of the baseline in the same rounds, or the time itself if there is none."""
    base = _base_of(result, results, baseline)
    return result.median_s / base.median_s if base else result.median_s


def _base_of(result: GpuResult, results: Sequence[GpuResult], baseline: str) -> GpuResult | None:
    same = (other for other in results if other.name == baseline and other.group == result.group)
    return next((other for other in same if other.status == "ok"), None)


def _bus_verdicts(results: Sequence[GpuResult], limits: Limits) -> Iterator[Verdict]:
    direct = [one for one in results if one.entry.name == "ours-b" and one.status == "ok"]
    if direct:
        best = min(direct, key=lambda result: result.median_s)
        for limit, share in _bus_shares(best, limits).items():
            yield Verdict(f"cache, {best.name}: share of the bus, as {limit} have it", share, BUS_SHARE, "")


# ---------------------------------------------------------------- the bus


def _bus_shares(result: GpuResult, limits: Limits) -> dict[str, float]:
    """Return the share of the bus that a step takes, by what the limit was measured with.

    The fuller direction counts, over what the bus gives each way while both are busy.
    """
    if result.traffic is None or not max(result.traffic):
        return {}
    rate = max(result.traffic) / result.median_s / RATE
    names = {"copies": "copies_both_ways", "kernels": f"kernel_both_ways_{result.entry.workload.record_bytes}"}
    return {what: rate / limits[name] for what, name in names.items() if name in limits}


# ---------------------------------------------------------------- lines


def summary(result: GpuResult, baseline: str, results: Sequence[GpuResult], limits: Limits) -> dict[str, Any]:
    """Return one line of the table and of the JSON.

    ``ratio`` is the median over the rounds, over the baseline's in the same rounds; ``ratio_range`` has the least and
    the greatest of single rounds.
    """
    entry = result.entry
    line: dict[str, Any] = {
        "name": result.name,
        "label": entry.contender.label,
        "prefetch": result.ahead,
        "workload": asdict(entry.workload),
        "unique_rows": entry.workload.unique,
        "working_set_rows": sum(entry.workload.touched),
        "group": result.group,
        "status": result.status,
        "reason": result.reason,
        "need_host_bytes": entry.needs[0],
        "need_device_bytes": entry.needs[1],
    }
    if result.status != "ok":
        return line
    base = _base_of(result, results, baseline)
    return line | {
        "median_ms": result.median_s * 1e3,
        "host_ms": median(result.host_s) * 1e3,
        "rounds_ms": [seconds * 1e3 for seconds in result.rounds_s],
        "ratio": None if base is None else result.median_s / base.median_s,
        "ratio_range": None if base is None else _ratio_range(result, base),
        "counts": result.counts,
        "hit_rate": result.hit_rate,
        **_traffic(result),
        "bus_shares": _bus_shares(result, limits),
        **result.memory,
    }


def _ratio_range(result: GpuResult, base: GpuResult) -> list[float]:
    # Not strict: a restart costs a round, and so does a budget that ends between two turns.
    ratios = [seconds / base_s for seconds, base_s in zip(result.rounds_s, base.rounds_s, strict=False)]
    return [min(ratios), max(ratios)]


def _traffic(result: GpuResult) -> dict[str, float | None]:
    if result.traffic is None:
        return {"in_bytes": None, "out_bytes": None}
    return {"in_bytes": result.traffic.inward, "out_bytes": result.traffic.outward}


# ---------------------------------------------------------------- printing

_COLUMNS = (
    "contender",
    "ms",
    "host",
    "steps/s",
    "ratio",
    "range",
    "hits",
    "MB in",
    "MB out",
    "bus",
    "near",
    "peak RAM",
)
_NOTE = """\
host: ms until the host had given the GPU all to do. ratio: median over that of {baseline}, same rounds; range: least
and greatest of single rounds. hits: share of a batch's unique rows that were near. in, out: bytes of rows that a step
moves into the GPU and out of it. bus: share of what copies have each way when both go at once. near: GPU memory of our
tables."""


def format_lines(lines: Sequence[dict[str, Any]], baseline: str) -> str:
    """Return the table that people read; below it, why who is missing."""
    grouped = len({line["group"] for line in lines if line["group"]}) > 1
    rows = [_cells(line, grouped) for line in lines if line["status"] == "ok"]
    table = format_table(_COLUMNS, rows) if rows else "nothing was measured"
    missing = [f"{line['name']}: {line['status']}: {line['reason']}" for line in lines if line["status"] != "ok"]
    return "\n".join([table, *([_NOTE.format(baseline=baseline)] if rows else []), *missing])


def _cells(line: dict[str, Any], grouped: bool) -> list[str]:
    return [
        f"{line['name']} (group {line['group']})" if grouped else line["name"],
        format_number(line["median_ms"]),
        format_number(line["host_ms"]),
        format_number(1e3 / line["median_ms"]),
        _known(line["ratio"], lambda ratio: f"{format_number(ratio)}x"),
        _known(line["ratio_range"], lambda ends: " - ".join(map(format_number, ends))),
        _known(line["hit_rate"], lambda rate: f"{rate:.1%}"),
        _known(line["in_bytes"], lambda moved: format_number(moved / 1e6)),
        _known(line["out_bytes"], lambda moved: format_number(moved / 1e6)),
        _known(line["bus_shares"].get("copies"), lambda share: f"{share:.0%}"),
        _known(line["near_bytes"] or None, format_bytes),
        format_bytes(line["peak_rss_bytes"]),
    ]


def _known(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)
