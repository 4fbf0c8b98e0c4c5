"""``bench dlrm``: who, on what, against which targets."""

from __future__ import annotations

from embedrock.bench.harness.bench import EFFORT, Bench, Task
from embedrock.bench.harness.comparison import compare
from embedrock.bench.harness.many_tables import ManyTables
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import faster
from embedrock.bench.step.benches import OVER_THE_FIRST
from embedrock.bench.tables.contenders import CONTENDERS

SIZES = ("dim", "batch", "zipf", "batches", "seed", "max_rows", "max_bag")
RAM_ROWS = 1_000_000  # that the largest tables are cut to, so that all contenders fit the RAM of a laptop


def compare_many(task: Task) -> Report:
    """Measure contenders on many tables, print their table, and return what was found."""
    workload = task.workload
    print(describe(workload))
    return compare([one.racer(workload) for one in task.contenders], task.bench.targets, task.effort)


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
