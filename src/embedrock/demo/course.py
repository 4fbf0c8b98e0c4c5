"""The course of a training on a `Source`: from the last checkpoint on, measured some times on the way, and printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from embedrock.demo.data.examples import Source
from embedrock.demo.meter import DiskMeter
from embedrock.demo.metrics import auc
from embedrock.demo.model_spec import ANY_IDS, EmbeddingSpec, ModelSpec
from embedrock.demo.options import SourceOptions
from embedrock.demo.training import Learner, Training
from embedrock.demo.training_folder import TrainingFolder
from embedrock.errors import MemoryBudgetError
from embedrock.machine.ram import rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import print_above, progress
from embedrock.terminal.tables import Column, format_count, format_facts, format_head, format_row, format_table

REPORTS = 4  # how often the AUC is measured
RECENT = 100  # batches, whose mean loss is shown
COLUMNS = (Column("step", 8, ",d"), Column("loss", 6, ".4f"), Column("AUC", 6, ".4f"))

MakeLearner = Callable[..., Learner]  # given the spec, and the folder of checkpoints or None


def train(make_learner: MakeLearner, spec: ModelSpec, source: Source, options: SourceOptions) -> dict[str, Any]:
    """Train from the last checkpoint on, print how it goes, and return all numbers, as plain JSON values."""
    if options.in_ram:
        try:
            return train_learner(make_learner(spec, None), spec, source, options.batches)
        except MemoryBudgetError as error:
            remedy = "In the demo: fewer --steps, or a smaller --batch-size or --dim."
            raise MemoryBudgetError(f"{error} {remedy}") from error
    with TrainingFolder.of(spec, options).claimed(options) as folder:
        placed = folder.placed(spec)
        return train_learner(make_learner(placed, folder.checkpoints), placed, source, options.batches)


def train_learner(learner: Learner, spec: ModelSpec, source: Source, batches: int) -> dict[str, Any]:
    """Train until there were so many batches, as `train` does; give the tables back."""
    try:
        training = Training(learner, lambda learner: {"auc": _auc(learner, source)}, RECENT)
        first = learner.resume()
        best = "" if source.best is None else f"   (best possible: {source.best:.4f}, by the planted model itself)"
        print(f"\n{format_head(COLUMNS)}{best}")
        steps = range(first, max(first, batches))
        meter = None if spec.folder is None else DiskMeter(learner, first)
        _train_parts(training, source, steps, meter)
        results = _results(training, spec, source, steps) | {"disk": meter.totals(steps.stop) if meter else None}
        print(_format_training(results))
        return results
    finally:
        learner.tables.close()


def _train_parts(training: Training, source: Source, steps: range, meter: DiskMeter | None) -> None:
    """Train, measure some times on the way, and print what was measured."""
    due = [steps.stop * (report + 1) // REPORTS for report in range(REPORTS)]
    ends = [end for end in sorted(set(due)) if end > steps.start]
    with progress("", steps.stop, steps.start, "it") as advance:

        def after_step() -> None:
            on_disk = meter.line(steps.start + len(training.losses)) if meter else ""
            advance(1, f"loss={training.mean_loss(RECENT):.4f}{on_disk}")

        # Where all was trained before, what was measured then is measured again.
        for part in [range(begin, end) for begin, end in pairwise([steps.start, *ends])] or [steps]:
            measured = training.train(source.batch, part, after_step)
            if part:
                print_above(format_row(COLUMNS, (measured.step, measured.loss, measured.scores["auc"])))


def _auc(learner: Learner, source: Source) -> float:
    return auc(source.test.labels, learner.scores(*source.test.inputs))


def _results(training: Training, spec: ModelSpec, source: Source, steps: range) -> dict[str, Any]:
    """Return all numbers of a training, as plain JSON values.

    Args:
        training: that is done.
        spec: of its model.
        source: what it was trained and tested on.
        steps: of this process; those before were earlier processes'.
    """
    seconds = accumulate(part.train_s for part in training.parts)
    names, tables = [feature.name for feature in spec.features], training.learner.tables
    return {
        "curve": [
            {"step": part.step, "train_s": train_s, "loss": part.loss, **part.scores}
            for part, train_s in zip(training.parts, seconds, strict=True)
        ],
        "resumed_at": steps.start,
        "planted_auc": source.best,
        "tested": len(source.test.labels),
        "tables": dict(zip(names, tables.each(), strict=True)),
        "group": tables.stats(),
        "rss_bytes": rss_bytes(),
        **source.facts(steps.stop),
    }


# ---------------------------------------------------------------- printing


def format_sizes(specs: Sequence[EmbeddingSpec]) -> str:
    """Return a table of what the tables would take if all rows were there."""
    lines = [(spec.feature.name, spec.rows, spec.weight_bytes) for spec in specs]
    together = "both" if len(specs) == 2 else f"all {len(specs)}"
    lines.append((together, sum(rows for _, rows, _ in lines), sum(weights for *_, weights in lines)))
    return format_table(
        ("all rows", "rows", "dim", "weights", "Adam's state", "together"),
        [
            (name, f"{rows:,}", str(specs[0].dim), *map(format_bytes, (weights, 2 * weights, 3 * weights)))
            for name, rows, weights in lines
        ],
    )


def _format_training(results: dict[str, Any]) -> str:
    """Return what came of a training."""
    tables, group, last = list(results["tables"].values()), results["group"], results["curve"][-1]
    used, process = map(format_bytes, (group["bytes_used"], results["rss_bytes"]))
    steps = last["step"] - results["resumed_at"]
    rate = steps / last["train_s"] if steps else 0.0
    facts = {
        "trained": f"{format_count(steps, 'step')} in {last['train_s']:.1f} s, {_format_rate(rate)} it/s",
        "disk": _format_disk(results["disk"], group["disk_bytes"]) if results.get("disk") else "",
        "rows": _format_rows(tables),
        "RAM": f"{used} for the tables, {process} for the process",
        "AUC": _format_auc(results, last["auc"]),
    }
    return "\n" + format_facts({name: text for name, text in facts.items() if text})


def _format_rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2f}"


def _format_rows(tables: Sequence[dict[str, Any]]) -> str:
    touched = sum(table["rows_touched"] for table in tables)
    rows = sum(table["rows"] for table in tables)
    if rows >= ANY_IDS:  # nobody has counted them
        return f"{touched:,} touched"
    return f"{touched:,} of {rows:,} touched ({touched / rows:.0%})"


def _format_auc(results: dict[str, Any], trained: float) -> str:
    planted = "" if results["planted_auc"] is None else f", {results['planted_auc']:.4f} planted model"
    unseen = results.get("test_unseen_share")
    seen = "" if unseen is None else f"; {unseen:.0%} of the test has a user or item that was in no batch"
    return f"{trained:.4f} trained{planted}, on {results['tested']:,} examples{seen}"


def _format_disk(rates: dict[str, float], disk_bytes: float) -> str:
    waited = f", {rates['waited_share']:.0%} of the time spent waiting for them" if "waited_share" in rates else ""
    hits, reads = f"{rates['hit_rate']:.1%} of the rows were in RAM", f"{rates['reads_per_step']:,.0f} reads a step"
    return f"{hits}, {reads}{waited}; {format_bytes(disk_bytes)} of files"
