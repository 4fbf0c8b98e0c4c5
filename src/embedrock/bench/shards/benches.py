"""``bench shards``: who, on what, against which targets."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from embedrock.bench.harness import runner
from embedrock.bench.harness.bench import EFFORT, SIZES, Bench, Task
from embedrock.bench.harness.comparison import describe, summary
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.report import Report, base_of, failures, format_results, name_field
from embedrock.bench.harness.runner import Result
from embedrock.bench.harness.targets import Line, Measure, Target, beside, each, faster
from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.contenders import CONTENDERS, RanksContender
from embedrock.bench.shards.ranks import Meters
from embedrock.bench.step.benches import OVER_THE_FIRST
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import Field, format_factor, format_number

ROWS = 4_000_000


def measure(task: Task) -> Report:
    """Measure a step of all processes, each with a batch of its own; print a table, and return what was found."""
    print(f"on each process: {describe(task.workload)}")
    racers = [one.racer(task.workload) for one in task.contenders]
    results = runner.measure(racers, task.effort)
    lines = [_line(result, base_of(result, racers[0].name, results)) for result in results]
    report = Report(lines, failures=failures(results))
    print(f"{format_results((name_field(lines), *_FIELDS), lines, _NOTE)}\n")
    report.judge(task.bench.targets)
    return report


def _line(result: Result, base: Result | None) -> dict[str, Any]:
    """Return a line of the table and of the JSON: that of all benchmarks of steps, and what each rank needs."""
    assert isinstance(result.racer.contender, RanksContender)
    line = summary(result, base) | {"ranks": result.racer.contender.ranks}
    if result.status != "ok":
        return line
    turns = [turn.meters for turn in result.turns]  # by rank
    cpu = [fmean(one.cpu_s for one in ranks) * 1e3 for ranks in turns]
    waited = [fmean(one.waited_s for one in ranks) * 1e3 for ranks in turns if ranks[0].waited_s is not None]
    line |= {"cpu_ms": median(cpu), "cpu_least_ms": min(cpu), "cpu_of_ranks_ms": _of_ranks(turns)}
    if waited:
        line |= {"waited_ms": median(waited), "waiting": median(waited) / line["median_ms"]}
        sent, formula = (fmean(getattr(one, name) for ranks in turns for one in ranks) for name in ("sent", "formula"))
        line |= {"sent_bytes": sent, "formula_bytes": formula}
    return line


def _of_ranks(turns: Sequence[Sequence[Meters]]) -> list[float]:
    return [median(one.cpu_s for one in of_rank) * 1e3 for of_rank in zip(*turns, strict=True)]


def _ratio(one: str, other: str, key: str) -> Measure:
    return beside(one, other, lambda first, second: first[key] / second[key], key)


def _off(line: Line) -> float:
    return abs(line["sent_bytes"] / line["formula_bytes"] - 1) * 100


_NOTE = (
    "cpu: processor time of a rank; waiting: share of the step in collective operations of ours, waiting for the other "
    "ranks included; sent: bytes from a rank to others, and over (2 s D U + 16 U)(W - 1)/W, or (4 D + 8) U (W - 1)"
)
_FIELDS = (
    Field("ms", "median_ms", format_number),
    Field("least", "least_ms", format_number),
    Field("ratio", "ratio", format_factor),
    Field("cpu ms", "cpu_ms", format_number),
    Field("least cpu", "cpu_least_ms", format_number),
    Field("waiting", lambda line: f"{line['waiting']:.0%}" if "waiting" in line else ""),
    Field("sent", lambda line: format_bytes(line["sent_bytes"]) if "sent_bytes" in line else ""),
    Field("of it", lambda line: f"{line['sent_bytes'] / line['formula_bytes']:.4f}" if line.get("sent_bytes") else ""),
)

SHARDS = Bench(
    "shards",
    "a training step of one table over several processes of torch.distributed, on this machine",
    measure,
    ("rows", *SIZES, *EFFORT),
    CONTENDERS,
    (
        faster("ours-sharded-2", "torch-sparse-2", 5),
        faster("ours-prefetch-2", "torch-sparse-2", 5),
        Target(
            "processor time of a rank of 2, over one process",
            _ratio("ours-sharded-2", "ours-alone", "cpu_ms"),
            2,
            at_most=True,
        ),
        Target(
            "sharded on a single rank, over not sharded",
            _ratio("ours-sharded-1", "ours-alone", "median_ms"),
            1.05,
            at_most=True,
        ),
        Target(
            "bytes of {name} off their formula", each(_off, "sent_bytes", name="ours-sharded-2"), 2, "%", at_most=True
        ),
        Target(
            "bytes of {name} off their formula", each(_off, "sent_bytes", name="ours-prefetch-2"), 2, "%", at_most=True
        ),
    ),
    (Workload(rows=ROWS, features=2),),
    Effort(threads=1),
    texts={"contenders": OVER_THE_FIRST},
)
