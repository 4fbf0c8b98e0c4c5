"""The benchmarks that compare contenders: who, on what, against which targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embedrock.bench.harness.report import Report, Target, comparison, format_results, format_verdicts
from embedrock.bench.harness.rounds import Effort, Entry, measure
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step import contenders
from embedrock.bench.step.contenders import Contender


@dataclass(frozen=True)
class Comparison:
    """Contenders for one job.

    Args:
        name: of the subcommand.
        help: what it measures.
        contenders: who may take part.
        targets: what should come out.
        workloads: what they work on, one after another, unless the user says otherwise.
    """

    name: str
    help: str
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...]
    workloads: tuple[Workload, ...] = (Workload(),)


STEP = Comparison(
    "step",
    "a training step: forward, backward and optimizer, through the public API",
    contenders.STEP,
    (
        Target("ours-adam", "torch-sparse-adam", 7),
        Target("ours-rowwise-adagrad", "fbgemm-rowwise-sum", 1),
        Target("ours-rowwise-adagrad", "fbgemm-rowwise-none", 5),
        Target("ours-adam", "torch-dense-adam", 300, rows=10_000_000),
    ),
)
LOOKUP = Comparison("lookup", "lookup alone, under torch.no_grad()", contenders.LOOKUP, (Target("ours", "torch", 1),))
PLAN = Comparison(
    "plan",
    "the plan of a batch (unique ids, inverse, segments) against torch.unique and numpy.unique",
    contenders.PLAN,
    (Target("ours", "torch-unique", 2, lookups=26 * 65_536),),
    (Workload(batch=65_536, features=26, batches=8), Workload()),
)
COMPARISONS = (STEP, LOOKUP, PLAN)


def compare(
    job: Comparison, chosen: Sequence[Contender], workloads: Sequence[Workload], baseline: str, effort: Effort
) -> Report:
    """Measure contenders on each workload, print a table for each, and return all that was found."""
    report = Report()
    for workload in workloads:
        print(describe(workload))
        found = run_entries([Entry(contender, workload) for contender in chosen], baseline, job.targets, effort)
        report.add(found)
    return report


def run_entries(entries: Sequence[Entry], baseline: str, targets: Sequence[Target], effort: Effort) -> Report:
    """Measure entries together, print their table and targets, and return what was found."""
    report = comparison(measure(entries, baseline, effort), baseline, targets)
    for text in (format_results(report.results, baseline), format_verdicts(report.verdicts)):
        if text:
            print(f"{text}\n")
    return report


# ---------------------------------------------------------------- bench rows

ROWS = (1_000_000, 4_000_000, 100_000_000, 1_000_000_000)
ROWS_TARGET = Target(f"{100_000_000:,} rows", f"{1_000_000:,} rows", 1.5, at_most=True)


def compare_rows(sizes: Sequence[int], workload: Workload, effort: Effort) -> Report:
    """Measure our Adam step on tables of several sizes, by the same pattern of ids."""
    workload = replace(workload, ranks=min(sizes))
    ours = next(contender for contender in contenders.STEP if contender.name == "ours-adam")
    entries = [
        Entry(replace(ours, name=f"{rows:,} rows"), replace(workload, rows=rows)) for rows in dict.fromkeys(sizes)
    ]
    print(describe(entries[0].workload))
    return run_entries(entries, entries[0].name, (ROWS_TARGET,), effort)


def describe(workload: Workload) -> str:
    """Return one line about a workload."""
    return (
        f"{workload.rows:,} x {workload.dim} float32, batch {workload.batch:,} x {workload.features} "
        f"= {workload.lookups:,} lookups, Zipf({workload.zipf:g}), {workload.unique_ids():,.0f} unique"
    )
