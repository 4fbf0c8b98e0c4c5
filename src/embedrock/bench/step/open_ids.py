"""``bench open-ids``: a step of a table whose rows come and go, and the RAM that counting ids takes."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from functools import partial

import numpy as np

from embedrock.bench.harness.bench import EFFORT, Bench, Task
from embedrock.bench.harness.comparison import Step, compare, describe
from embedrock.bench.harness.contenders import LEARNING_RATE
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Target, each, faster
from embedrock.bench.harness.workload import Workload
from embedrock.bench.step.contenders import StepContender
from embedrock.terminal.arguments import count
from embedrock.terminal.tables import format_count, format_facts

SIZES = ("dim", "batch", "features", "zipf", "batches", "seed")
NEW_SHARE = 0.1  # of the lookups, whose ids were never seen before
MIN_COUNT = 3
COUNTED, COUNTED_AT_ONCE = 10_000_000, 1 << 20
MB = 1 << 20


def stream_step(workload: Workload, admits: bool, evicts: bool, new_share: float = NEW_SHARE) -> Step:
    """Step a table of open ids; in each round through the batches, a share of their ids are new ones."""
    import embedrock as er

    hot = [batch.reshape(-1) for batch in workload.ids()]
    is_new = np.random.default_rng(workload.seed).random((len(hot), workload.lookups)) < new_share
    grads, rounds = workload.gradient().reshape(-1, workload.dim), [0] * len(hot)
    admission = er.Admission(2, within=4 * len(hot), sketch="8MiB") if admits else None
    known = len(np.unique(np.concatenate(hot)))
    eviction = er.Eviction(max_rows=known) if evicts else None
    rule = er.Adam(lr=LEARNING_RATE)
    table = er.Table(None, workload.dim, rule=rule, seed=0, admission=admission, eviction=eviction)

    def step(index: int) -> None:
        rounds[index] += 1
        first = workload.rows + (rounds[index] * len(hot) + index) * workload.lookups
        ids = np.where(is_new[index], first + np.arange(workload.lookups), hot[index])
        table.update(ids, grads)
        table.lookup(ids[:1])  # waits for the step

    return step


def _contender(name: str, label: str, admits: bool, evicts: bool, new_share: float = NEW_SHARE) -> StepContender:
    step = partial(stream_step, admits=admits, evicts=evicts, new_share=new_share)
    return StepContender(name, label, step, 3, lazy=True)


CONTENDERS = (
    _contender("every-id", "er.Table of open ids", False, False),
    _contender("admission", "the same with an Admission, counted by a sketch", True, False),
    _contender("eviction", "the same with an Eviction, max_rows", False, True),
    _contender("both", "the same with both", True, True),
    _contender("every-id-known", "the first without any id that is new", False, False, 0.0),
    _contender("both-known", "the same rows, with both", True, True, 0.0),
)


def measure(task: Task) -> Report:
    """Measure steps, and then how well and how small a sketch counts."""
    workload = task.workload
    print(f"{describe(workload)}; {NEW_SHARE:.0%} of the lookups of ids that are new")
    report = compare([one.racer(workload) for one in task.contenders], task.bench.targets, task.effort)
    report.results.append(_counted(task.arguments.ids))
    report.judge(COUNT_TARGETS)
    return report


def _counted(ids: int) -> dict[str, float | str | int]:
    """Count so many different ids, `MIN_COUNT` - 1 times each, by a sketch of the size that is asked for."""
    from embedrock.residents.admission import Admission
    from embedrock.residents.sightings import Sketch

    nbytes = Admission.sketch_bytes(ids, MIN_COUNT, error=0.01)
    sketch = Sketch(Admission(MIN_COUNT, sketch=nbytes), np.uint64(0))
    started, early = time.perf_counter(), 0
    for number in range(MIN_COUNT - 1):
        for first in range(0, ids, COUNTED_AT_ONCE):
            part = np.arange(first, min(first + COUNTED_AT_ONCE, ids))
            early += int(np.count_nonzero(sketch.of(part) > number))
            sketch.see(part)
    seconds = time.perf_counter() - started
    strangers = np.arange(ids, ids + min(ids, COUNTED_AT_ONCE))
    wrong = float(np.mean(sketch.of(strangers) >= MIN_COUNT - 1))
    facts = {
        "counted": f"{format_count(ids, 'id')}, {MIN_COUNT - 1} times each, in {nbytes / MB:.0f} MiB",
        "time": f"{seconds / ids / (MIN_COUNT - 1) * 1e9:.0f} ns for each sighting",
        "error": f"{wrong:.2%} of ids that were never seen seem to have been; {early / ids:.2%} were counted too high",
    }
    print(format_facts(facts) + "\n")
    return {"name": "sketch", "status": "ok", "ids": ids, "sketch_bytes": nbytes, "wrong_share": wrong}


COUNT_TARGETS = (
    Target(
        "bytes of counting an id",
        each(lambda line: line["sketch_bytes"] / line["ids"], "sketch_bytes"),
        5.37,
        "bytes",
        at_most=True,
    ),
    Target(
        "ids never seen that a sketch lets in",
        each(lambda line: 100 * line["wrong_share"], "wrong_share"),
        1.0,
        "%",
        at_most=True,
    ),
)


def _add_ids(parser: ArgumentParser) -> None:
    text = f"different ids to count by a sketch (default: {COUNTED:,}; 100M takes 500 MB)"
    parser.add_argument("--ids", type=count, default=COUNTED, metavar="N", help=text)


OPEN_IDS = Bench(
    "open-ids",
    "a step of a table whose rows come and go, beside one that keeps every id",
    measure,
    (*SIZES, *EFFORT),
    CONTENDERS,
    (
        faster("both", "every-id", 1.15, at_most=True),
        faster("admission", "every-id", 1.15, at_most=True),
        faster("both-known", "every-id-known", 1.15, at_most=True),
    ),
    (Workload(rows=1_000_000),),
    texts={"contenders": "names or patterns (default: all); ratios are over the first one's time"},
    add_options=_add_ids,
)
