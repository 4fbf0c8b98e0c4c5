"""``bench shards``: who, on what, against which targets."""

from __future__ import annotations

from embedrock.bench.harness.bench import EFFORT, SIZES, Bench, Task
from embedrock.bench.harness.comparison import compare, describe
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import faster
from embedrock.bench.harness.workload import Workload
from embedrock.bench.shards.contenders import CONTENDERS
from embedrock.bench.step.benches import OVER_THE_FIRST

ROWS = 4_000_000


def measure(task: Task) -> Report:
    """Measure a step of all processes, each with a batch of its own; print a table, and return what was found."""
    print(f"on each process: {describe(task.workload)}")
    racers = [one.racer(task.workload) for one in task.contenders]
    return compare(racers, task.bench.targets, task.effort)


SHARDS = Bench(
    "shards",
    "a training step of one table over several processes of torch.distributed, on this machine",
    measure,
    ("rows", *SIZES, *EFFORT),
    CONTENDERS,
    (faster("ours-sharded-2", "torch-sparse-2", 5),),
    (Workload(rows=ROWS, features=2),),
    Effort(threads=1),
    texts={"contenders": OVER_THE_FIRST},
)
