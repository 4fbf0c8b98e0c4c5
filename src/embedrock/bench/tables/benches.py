"""``bench dlrm | groups``: who, on what, against which targets."""

from __future__ import annotations

from dataclasses import replace

from embedrock.bench.harness.bench import EFFORT, Bench, Task
from embedrock.bench.harness.comparison import compare
from embedrock.bench.harness.many_tables import ManyTables
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target, beside, faster
from embedrock.bench.step.benches import OVER_THE_FIRST
from embedrock.bench.tables.contenders import CONTENDERS

SIZES = ("dim", "batch", "zipf", "batches", "seed", "max_rows", "max_bag")
ROWS, ONE_MORE = 200_000, "27-tables"
RAM_ROWS = 1_000_000  # that the largest tables are cut to, so that all contenders fit the RAM of a laptop


def compare_many(task: Task) -> Report:
    """Measure contenders on many tables, print their table, and return what was found."""
    workload = task.workload
    print(describe(workload))
    return compare([one.racer(workload) for one in task.contenders], task.bench.targets, task.effort)


def compare_groups(task: Task) -> Report:
    """Measure contenders on tables that are alike, and what one table more costs the first of them."""
    workload, first = task.workload, task.contenders[0]
    more = replace(workload, cardinalities=(*workload.cardinalities, ROWS), bag_sizes=(*workload.bag_sizes, 1))
    print(describe(workload))
    racers = [one.racer(workload) for one in task.contenders]
    return compare([*racers, first.racer(more, ONE_MORE)], task.bench.targets, task.effort)


def describe(workload: ManyTables) -> str:
    """Return one line about a workload."""
    return (
        f"{len(workload.rows)} tables, {sum(workload.rows):,} rows x {workload.dim} float32, "
        f"batch {workload.batch:,} x {sum(workload.bags)} ids = {workload.lookups:,} lookups, Zipf({workload.zipf:g}), "
        f"{workload.unique_ids():,.0f} unique"
    )


DLRM = Bench(
    "dlrm",
    "a training step on DLRM's 26 tables with MLPerf's bags: forward, backward and optimizer",
    compare_many,
    (*SIZES, *EFFORT),
    CONTENDERS,
    (faster("ours-rowwise-adagrad", "fbgemm-rowwise-sum", 1.3),),
    (ManyTables(max_rows=RAM_ROWS),),
    texts={"contenders": OVER_THE_FIRST, "max_rows": "the most rows of a table, such as 4M"},
)

# A batch of 2,048 of one more table costs its ids, its rows, and what a table costs whatever its batch.
GROUPS = Bench(
    "groups",
    "a training step on 26 tables that are alike, one id each: forward, backward and optimizer",
    compare_groups,
    (*SIZES, *EFFORT),
    CONTENDERS,
    (
        faster("ours-side-by-side", "fbgemm-rowwise-sum", 1.8),
        faster("ours-adam-side-by-side", "torch-sparse-adam", 8),
        Target(
            "the 27th table",
            beside(ONE_MORE, CONTENDERS[0].name, lambda one, other: one["median_ms"] - other["median_ms"], "median_ms"),
            0.1,
            "ms",
            at_most=True,
        ),
    ),
    (ManyTables(cardinalities=(ROWS,) * 26, bag_sizes=(1,) * 26),),
    texts={"contenders": OVER_THE_FIRST},
)
