"""``bench step | lookup | unique | rows``: who, on what, against which targets."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace

from embedrock.bench.harness.bench import EFFORT, SIZES, Bench, Task
from embedrock.bench.harness.comparison import compare, describe
from embedrock.bench.harness.options import several_rows
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import faster
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step import contenders

OVER_THE_FIRST = "names or patterns such as 'ours-*' (default: all); ratios are over the first one's time"
ROWS = (1_000_000, 4_000_000, 100_000_000, 1_000_000_000)


def compare_contenders(task: Task) -> Report:
    """Measure contenders on each workload, print a table for each, and return all that was found."""
    report = Report()
    for workload in task.workloads:
        print(describe(workload))
        report.add(compare([one.racer(workload) for one in task.contenders], task.bench.targets, task.effort))
    return report


def compare_rows(task: Task) -> Report:
    """Measure our Adam step on tables of several sizes, by the same pattern of ids."""
    sizes = list(dict.fromkeys(task.arguments.sizes))
    workload = replace(task.workload, ranks=min(sizes))
    ours = next(one for one in contenders.STEP if one.name == "ours-adam")
    racers = [ours.racer(replace(workload, rows=rows), f"{rows:,} rows") for rows in sizes]
    print(describe(racers[0].workload))
    return compare(racers, task.bench.targets, task.effort)


def add_sizes(parser: ArgumentParser, sizes: tuple[int, ...]) -> None:
    """Add ``--rows`` for several tables."""
    parser.add_argument(
        "--rows", dest="sizes", type=several_rows, default=list(sizes), metavar="N,N,...", help="table sizes"
    )


STEP = Bench(
    "step",
    "a training step: forward, backward and optimizer, through the public API",
    compare_contenders,
    ("rows", *SIZES, *EFFORT),
    contenders.STEP,
    (
        faster("ours-adam", "torch-sparse-adam", 7),
        faster("ours-rowwise-adagrad", "fbgemm-rowwise-sum", 1),
        faster("ours-rowwise-adagrad", "fbgemm-rowwise-none", 5),
        faster("ours-adam", "torch-dense-adam", 300, rows=10_000_000),
    ),
    texts={"contenders": OVER_THE_FIRST},
)
LOOKUP = Bench(
    "lookup",
    "lookup alone, under torch.no_grad()",
    compare_contenders,
    ("rows", *SIZES, *EFFORT),
    contenders.LOOKUP,
    (faster("ours", "torch", 1),),
    texts={"contenders": OVER_THE_FIRST},
)
UNIQUE = Bench(
    "unique",
    "the plan of a batch (unique ids, inverse, segments) against torch.unique and numpy.unique",
    compare_contenders,
    ("rows", *SIZES, *EFFORT),
    contenders.UNIQUE,
    (faster("ours", "torch-unique", 2, lookups=26 * 65_536),),
    (Workload(batch=65_536, features=26, batches=8), Workload()),
    texts={"contenders": OVER_THE_FIRST},
)
TABLE_SIZES = Bench(
    "rows",
    "our Adam step on tables of several sizes, same ids",
    compare_rows,
    (*SIZES, *EFFORT),
    targets=(faster(f"{100_000_000:,} rows", f"{1_000_000:,} rows", 1.5, at_most=True),),
    add_options=lambda parser: add_sizes(parser, ROWS),
)
