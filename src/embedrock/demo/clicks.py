"""The demo on planted clicks, from top to bottom."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import Any

from embedrock.bench.harness.machine import rss_bytes
from embedrock.demo.data.planted import TEST_CLICKS, ZIPF, PlantedLog, PlantedSplit
from embedrock.demo.meter import DiskMeter
from embedrock.demo.metrics import auc
from embedrock.demo.model_spec import EmbeddingSpec, ModelSpec
from embedrock.demo.options import ClickOptions
from embedrock.demo.training import Framework, Learner, Training
from embedrock.demo.training_folder import TrainingFolder
from embedrock.errors import MemoryBudgetError
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.table.files import UncommittedWarning
from embedrock.table.table import Table
from embedrock.terminal.progress import print_above, progress
from embedrock.terminal.tables import Column, format_count, format_facts, format_head, format_row, format_table

REPORTS = 4  # how often the AUC is measured
RECENT = 100  # batches, whose mean loss is shown
COLUMNS = (Column("step", 8, ",d"), Column("loss", 6, ".4f"), Column("AUC", 6, ".4f"))


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks and print how it goes; return all numbers, as plain JSON values."""
    framework = _framework(options)
    framework.use_threads(options.threads)
    spec = _spec_in_ram(options)
    print(_format_start(options, spec))
    train = _train_in_ram if options.in_ram else _train_on_disk
    results: dict[str, Any] = {"training": train(framework, spec, options)}
    if options.compare and not options.keras:
        from embedrock.demo.torch.contest import contest, format_outcomes

        print("\na few steps of the same model in RAM, in a process of its own each")
        outcomes = list(contest(spec, options.batch_size, options.threads))
        print(format_outcomes(outcomes))
        results["contest"] = [asdict(outcome) for outcome in outcomes]
    return results


def _framework(options: ClickOptions) -> Framework:
    # Only the one that is asked for has to be installed.
    if options.keras:
        from embedrock.demo.keras import learner
    else:
        from embedrock.demo.torch import learner
    return learner


def _spec_in_ram(options: ClickOptions) -> ModelSpec:
    """Return the spec of the model with its tables in RAM, half of what is available for each."""
    half = available_bytes() // 2
    sizes = options.users, options.items, options.dim
    return ModelSpec(options.model, *sizes, options.lr, options.seed, budgets=(half, half))


# ---------------------------------------------------------------- training


def _train_in_ram(framework: Framework, spec: ModelSpec, options: ClickOptions) -> dict[str, Any]:
    framework.warm_up(spec)
    try:
        return _train(framework.make_learner(spec, None), options)
    except MemoryBudgetError as error:
        remedy = "In the demo: fewer --steps, or a smaller --batch-size or --dim."
        raise MemoryBudgetError(f"{error} {remedy}") from error


def _train_on_disk(framework: Framework, spec: ModelSpec, options: ClickOptions) -> dict[str, Any]:
    with TrainingFolder.of(options).claimed(options) as folder:
        framework.warm_up(spec)
        return _train(framework.make_learner(folder.placed(spec), folder.checkpoints), options)


def _train(learner: Learner, options: ClickOptions) -> dict[str, Any]:
    """Train from the last checkpoint on, print how it goes, and return all numbers."""
    try:
        split = PlantedSplit(PlantedLog(options.users, options.items, options.seed), options.batch_size)
        training = Training(learner, lambda learner: {"auc": _auc(learner, split)}, RECENT)
        first = learner.resume()
        print(f"\n{format_head(COLUMNS)}   (best possible: {split.best:.4f}, by the planted model itself)")
        steps = range(first, max(first, options.steps))
        meter = None if options.in_ram else DiskMeter(learner, first)
        _train_parts(training, split, steps, meter)
        results = _results(training, split, steps, meter.totals(steps.stop) if meter else None)
        print(_format_training(results))
        return results
    finally:
        _close(learner.tables)


def _train_parts(training: Training, split: PlantedSplit, steps: range, meter: DiskMeter | None) -> None:
    """Train, measure some times on the way, and print what was measured."""
    due = [steps.stop * (report + 1) // REPORTS for report in range(REPORTS)]
    ends = [end for end in sorted(set(due)) if end > steps.start]
    with progress("", steps.stop, steps.start, "it") as advance:

        def after_step() -> None:
            on_disk = meter.line(steps.start + len(training.losses)) if meter else ""
            advance(1, f"loss={training.mean_loss(RECENT):.4f}{on_disk}")

        # Where all was trained before, what was measured then is measured again.
        for part in [range(begin, end) for begin, end in pairwise([steps.start, *ends])] or [steps]:
            measured = training.train(split.batch, part, after_step)
            if part:
                print_above(format_row(COLUMNS, (measured.step, measured.loss, measured.scores["auc"])))


def _auc(learner: Learner, split: PlantedSplit) -> float:
    test = split.test
    return auc(test.labels, learner.scores(test.users[:, None], test.items[:, None])[:, 0])


def _close(tables: Sequence[Table]) -> None:
    """Give tables back. What no checkpoint has is lost, which is said elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        for table in tables:
            table.close()


def _results(training: Training, split: PlantedSplit, steps: range, disk: dict[str, float] | None) -> dict[str, Any]:
    """Return all numbers of a training, as plain JSON values.

    Args:
        training: that is done.
        split: what it was trained and tested on.
        steps: of this process; those before were earlier processes'.
        disk: what the disk had to do with it.
    """
    users, items = (table.stats() for table in training.learner.tables)
    seconds = accumulate(part.train_s for part in training.parts)
    return {
        "curve": [
            {"step": part.step, "train_s": train_s, "loss": part.loss, **part.scores}
            for part, train_s in zip(training.parts, seconds, strict=True)
        ],
        "resumed_at": steps.start,
        "planted_auc": split.best,
        "test_clicks": TEST_CLICKS,
        "tables": {"users": users, "items": items},
        "disk": disk,
        "rss_bytes": rss_bytes(),
        "test_unseen_share": split.unseen_share(steps.stop),
    }


# ---------------------------------------------------------------- printing


def _format_start(options: ClickOptions, spec: ModelSpec) -> str:
    """Return what is going to be trained, and on what."""
    clicks = f"{options.users:,} users x {options.items:,} items, popularity Zipf({ZIPF}), seed {options.seed}"
    model = f"{options.model}, Adam(lr={options.lr:g}), {options.steps:,} batches of {options.batch_size:,}"
    return f"{format_facts({'clicks': clicks, 'model': model})}\n\n{_format_sizes(spec.embeddings)}"


def _format_sizes(specs: tuple[EmbeddingSpec, EmbeddingSpec]) -> str:
    """Return a table of what the tables would take if all rows were there."""
    lines = [(name, spec.rows, spec.weight_bytes) for name, spec in zip(("users", "items"), specs, strict=True)]
    lines.append(("both", sum(rows for _, rows, _ in lines), sum(weights for *_, weights in lines)))
    return format_table(
        ("all rows", "rows", "dim", "weights", "Adam's state", "together"),
        [
            (name, f"{rows:,}", str(specs[0].dim), *map(format_bytes, (weights, 2 * weights, 3 * weights)))
            for name, rows, weights in lines
        ],
    )


def _format_training(results: dict[str, Any]) -> str:
    """Return what came of a training."""
    tables, last = results["tables"].values(), results["curve"][-1]
    touched, rows = sum(t["rows_touched"] for t in tables), sum(t["rows"] for t in tables)
    used = sum(t["bytes_used"] for t in tables)
    steps = last["step"] - results["resumed_at"]
    rate = steps / last["train_s"] if steps else 0.0
    facts = {
        "trained": f"{format_count(steps, 'step')} in {last['train_s']:.1f} s, {rate:.0f} it/s",
        "disk": _format_disk(results["disk"], list(tables)) if results["disk"] else "",
        "rows": f"{touched:,} of {rows:,} touched ({touched / rows:.0%})",
        "RAM": f"{format_bytes(used)} for the tables, {format_bytes(results['rss_bytes'])} for the process",
        "AUC": f"{last['auc']:.4f} trained, {results['planted_auc']:.4f} planted model; "
        f"{results['test_unseen_share']:.0%} of the test has a user or item that was in no batch",
    }
    return "\n" + format_facts({name: text for name, text in facts.items() if text})


def _format_disk(rates: dict[str, float], tables: list[dict[str, float]]) -> str:
    size = format_bytes(sum(table["disk_bytes"] for table in tables))
    waited = f", {rates['waited_share']:.0%} of the time spent waiting for them" if "waited_share" in rates else ""
    hits, reads = f"{rates['hit_rate']:.1%} of the rows were in RAM", f"{rates['reads_per_step']:,.0f} reads a step"
    return f"{hits}, {reads}{waited}; {size} of files"
