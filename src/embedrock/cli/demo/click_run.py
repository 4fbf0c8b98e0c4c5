"""The demo on planted clicks, from top to bottom."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import numpy as np
from tqdm import tqdm

import embedrock.torch as ert
from embedrock.bench.machine import available_bytes, rss_bytes
from embedrock.bench.report import format_table
from embedrock.cli.demo.backends import EMBEDROCK, TableSize
from embedrock.cli.demo.contest import Outcome, contest
from embedrock.cli.demo.metrics import auc
from embedrock.cli.demo.options import ClickOptions
from embedrock.cli.demo.synthetic import ZIPF, Clicks, PlantedLog
from embedrock.cli.demo.train import ModelPlan, Trainer, use_threads, warm_up
from embedrock.errors import MemoryBudgetError
from embedrock.sizes import format_bytes
from embedrock.table import Table

TEST_CLICKS = 200_000
REPORTS = 4  # how often the AUC is measured
TRAIN_STREAM, TEST_STREAM = 0, 1  # of random numbers; the contest has another


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks and print how it goes; return all numbers, as plain JSON values."""
    use_threads(options.threads)
    log = PlantedLog(options.users, options.items, options.seed)
    plan = ModelPlan(
        options.model,
        options.users,
        options.items,
        options.dim,
        options.lr,
        options.seed,
        memory=available_bytes() // 2,
    )
    print(f"clicks   {log.users:,} users x {log.items:,} items, popularity Zipf({ZIPF}), seed {log.seed}")
    print(f"model    {options.model}, Adam(lr={options.lr:g}), {options.steps:,} batches of {options.batch_size:,}\n")
    print(_format_sizes(plan.sizes))
    results: dict[str, Any] = {"training": _train(plan, log, options)}
    if options.compare:
        print("\na few steps of the same model, in a process of its own each")
        outcomes = list(contest(plan, options.batch_size, options.threads))
        print(_format_outcomes(outcomes))
        results["contest"] = [asdict(outcome) for outcome in outcomes]
    return results


# ---------------------------------------------------------------- training


def _train(plan: ModelPlan, log: PlantedLog, options: ClickOptions) -> dict[str, Any]:
    test = log.clicks(np.random.default_rng((options.seed, TEST_STREAM)), TEST_CLICKS)
    best = auc(test.labels, test.planted)
    warm_up(plan, EMBEDROCK)
    trainer = Trainer(plan, EMBEDROCK)
    print(f"\n{'step':>8}  {'loss':>6}  {'AUC':>6}   (best possible: {best:.4f}, by the planted model itself)")
    try:
        curve = _run_steps(trainer, log, test, options)
    except MemoryBudgetError as error:
        remedy = "In the demo: fewer --steps, or a smaller --batch-size or --dim."
        raise MemoryBudgetError(f"{error} {remedy}") from error
    results = {"curve": curve, "planted_auc": best, "test_clicks": TEST_CLICKS, **_usage(trainer, test)}
    print(_format_training(results))
    for table in _tables(trainer):
        table.close()
    return results


def _run_steps(trainer: Trainer, log: PlantedLog, test: Clicks, options: ClickOptions) -> list[dict[str, float]]:
    """Train, and return some points of the learning curve."""
    random = np.random.default_rng((options.seed, TRAIN_STREAM))
    due = {options.steps * (report + 1) // REPORTS for report in range(REPORTS)}
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    train_s = 0.0
    with tqdm(total=options.steps, unit="it", leave=False, disable=None) as bar:
        for step in range(1, options.steps + 1):
            start = time.perf_counter()
            clicks = log.clicks(random, options.batch_size)
            losses.append(trainer.step(clicks.users, clicks.items, clicks.labels))
            train_s += time.perf_counter() - start
            bar.set_postfix_str(f"loss={np.mean(losses[-100:]):.4f}", refresh=False)
            bar.update()
            if step in due:
                scores = trainer.scores(test.users[:, None], test.items[:, None])[:, 0]
                loss, area = float(np.mean(losses[-100:])), auc(test.labels, scores)
                curve.append({"step": step, "loss": loss, "auc": area, "train_s": train_s})
                bar.write(f"{step:>8,}  {loss:.4f}  {area:.4f}")
    return curve


def _tables(trainer: Trainer) -> list[Table]:
    return [layer.table for layer in trainer.model.modules() if isinstance(layer, ert.Embedding)]


def _usage(trainer: Trainer, test: Clicks) -> dict[str, Any]:
    users, items = _tables(trainer)
    unseen = _unseen(users, test.users) | _unseen(items, test.items)
    return {
        "tables": {"users": users.stats(), "items": items.stats()},
        "rss_bytes": rss_bytes(),
        "test_unseen_share": float(unseen.mean()),
    }


def _unseen(table: Table, ids: np.ndarray) -> np.ndarray:
    """Tell which ids were in no batch: they have no record."""
    plan = table.plan(ids)
    return (plan.slots < 0)[plan.inverse]


# ---------------------------------------------------------------- printing


def _format_sizes(sizes: tuple[TableSize, TableSize]) -> str:
    """Return a table of what the tables would take if all rows were there."""
    lines = [(name, size.rows, size.weight_bytes) for name, size in zip(("users", "items"), sizes, strict=True)]
    lines.append(("both", sum(rows for _, rows, _ in lines), sum(weights for *_, weights in lines)))
    return format_table(
        ("all rows", "rows", "dim", "weights", "Adam's state", "together"),
        [
            (name, f"{rows:,}", str(sizes[0].dim), *map(format_bytes, (weights, 2 * weights, 3 * weights)))
            for name, rows, weights in lines
        ],
    )


def _format_training(results: dict[str, Any]) -> str:
    tables, last = results["tables"].values(), results["curve"][-1]
    touched, rows = sum(t["rows_touched"] for t in tables), sum(t["rows"] for t in tables)
    used = sum(t["bytes_used"] for t in tables)
    return "\n".join(
        [
            "",
            f"trained  {last['step']:,} steps in {last['train_s']:.1f} s, {last['step'] / last['train_s']:.0f} it/s",
            f"rows     {touched:,} of {rows:,} touched ({touched / rows:.0%})",
            f"RAM      {format_bytes(used)} for the tables, {format_bytes(results['rss_bytes'])} for the process",
            f"AUC      {last['auc']:.4f} trained, {results['planted_auc']:.4f} planted model; "
            f"{results['test_unseen_share']:.0%} of the test has a user or item that was in no batch",
        ]
    )


def _format_outcomes(outcomes: list[Outcome]) -> str:
    base = outcomes[0].step_s
    done = [
        (
            outcome.name,
            f"{outcome.step_s * 1e3:.1f}",
            f"{outcome.step_s / base:.1f}x" if base else "",
            f"{outcome.new_step_s * 1e3:.1f}",
            f"{outcome.setup_s:.1f}",
            format_bytes(outcome.rss_bytes),
        )
        for outcome in outcomes
        if outcome.step_s
    ]
    table = format_table(("", "ms/step", "time", "with new rows, ms", "first step, s", "RAM"), done)
    skipped = [f"{outcome.name}: skipped, {outcome.reason}" for outcome in outcomes if outcome.reason]
    return "\n".join([table, *skipped])
