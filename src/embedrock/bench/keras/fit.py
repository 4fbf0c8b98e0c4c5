"""``bench keras``: ours beside `keras.layers.Embedding` in `fit`, and what our layer takes beyond that of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedrock.bench.harness.bench import EFFORT, SIZES, Bench, Task
from embedrock.bench.harness.comparison import compare, describe
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.runner import Racer
from embedrock.bench.harness.targets import Target, beside, faster, format_verdicts
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.contenders import FIT, LAYER, FitSession
from embedrock.bench.step.benches import OVER_THE_FIRST, add_sizes

SIZES_OF_TABLES = (100_000, 1_000_000, 10_000_000)
PEAK_ROWS, PEAK_SHARE = 10_000_000, 0.5
OVERHEAD_MS = 1.5
RACES = (
    faster("ours-adam", "keras-adam", 3.5, rows=100_000),
    faster("ours-adam", "keras-adam", 12, rows=1_000_000),
    faster("ours-adam", "keras-adam", 80, rows=10_000_000),
    faster("ours-mirrored", "ours-adam", 1.5, at_most=True),
)
OVERHEAD = Target(
    "time of our Keras layer beyond our PyTorch layer",
    beside("keras-layer", "torch-layer", lambda ours, theirs: ours["median_ms"] - theirs["median_ms"]),
    OVERHEAD_MS,
    "ms",
    at_most=True,
)
PEAK = Target(
    "peak RAM of ours-adam over that of keras-adam",
    beside("ours-adam", "keras-adam", lambda ours, theirs: ours["peak_bytes"] / theirs["peak_bytes"]),
    PEAK_SHARE,
    at_most=True,
)


@dataclass(frozen=True)
class KerasEffort(Effort):
    """How long to measure, as for other contenders; a turn is one `fit`."""

    rounds: int = 5
    steps: int = 20


def measure(task: Task) -> Report:
    """Measure `fit` on tables of each size, and the layer alone on the one in the middle; print a table for each.

    Ratios are over the first contender of either.
    """
    report, sizes = Report(), task.arguments.sizes
    fits, layers = ([one for one in task.contenders if one in kind] for kind in (FIT, LAYER))
    if fits:
        for rows in dict.fromkeys(sizes):
            workload = replace(task.workload, rows=rows)
            report.add(_compare("fit", [one.racer(workload, session=FitSession) for one in fits], task.effort))
    if layers:
        workload = replace(task.workload, rows=sorted(sizes)[len(sizes) // 2])
        report.add(_compare("the layer alone, without fit", [one.racer(workload) for one in layers], task.effort))
    print(f"all targets\n{format_verdicts(report.verdicts)}")
    return report


def _compare(what: str, racers: Sequence[Racer], effort: Effort) -> Report:
    print(f"{what}: {describe(racers[0].workload)}")
    rows = racers[0].workload.rows
    targets = [*RACES, *([PEAK] if rows == PEAK_ROWS else [])]
    named = [replace(target, what=f"{rows:,} rows: {target.what}") for target in targets]
    return compare(racers, [*named, OVERHEAD], effort)


KERAS = Bench(
    "keras",
    "training by Keras' fit, and our layer alone in Keras and in PyTorch",
    measure,
    (*SIZES, *EFFORT),
    (*FIT, *LAYER),
    (*RACES, OVERHEAD, PEAK),
    (Workload(features=1),),
    KerasEffort(),
    {"contenders": OVER_THE_FIRST},
    lambda parser: add_sizes(parser, SIZES_OF_TABLES),
)
