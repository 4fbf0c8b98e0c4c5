"""The demo on planted clicks, from top to bottom."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np
from tqdm import tqdm

import embedrock.torch as ert
from embedrock.bench.machine import available_bytes, rss_bytes
from embedrock.bench.report import format_table
from embedrock.cli.demo.backends import EMBEDROCK, TableSize
from embedrock.cli.demo.contest import Outcome, contest
from embedrock.cli.demo.meter import DiskMeter
from embedrock.cli.demo.metrics import auc
from embedrock.cli.demo.options import ClickOptions
from embedrock.cli.demo.storage import DEPTH, SAVE_STEPS, Storage, on_disk
from embedrock.cli.demo.synthetic import ZIPF, Clicks, PlantedLog
from embedrock.cli.demo.train import ModelPlan, Trainer, use_threads, warm_up
from embedrock.durability import UncommittedWarning
from embedrock.errors import MemoryBudgetError
from embedrock.sizes import format_bytes

TEST_CLICKS = 200_000
REPORTS = 4  # how often the AUC is measured
TRAIN_STREAM, TEST_STREAM = 0, 1  # of random numbers; the contest has another


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks and print how it goes; return all numbers, as plain JSON values."""
    use_threads(options.threads)
    log = PlantedLog(options.users, options.items, options.seed)
    half = available_bytes() // 2
    sizes = options.users, options.items, options.dim
    in_ram = ModelPlan(options.model, *sizes, options.lr, options.seed, budgets=(half, half))
    print(f"clicks   {log.users:,} users x {log.items:,} items, popularity Zipf({ZIPF}), seed {log.seed}")
    print(f"model    {options.model}, Adam(lr={options.lr:g}), {options.steps:,} batches of {options.batch_size:,}\n")
    print(_format_sizes(in_ram.sizes))
    results: dict[str, Any] = {"training": _train_in_ram(in_ram, log, options) if options.in_ram else None}
    if not options.in_ram:
        results["training"] = _train_on_disk(in_ram, log, options)
    if options.compare:
        print("\na few steps of the same model in RAM, in a process of its own each")
        outcomes = list(contest(in_ram, options.batch_size, options.threads))
        print(_format_outcomes(outcomes))
        results["contest"] = [asdict(outcome) for outcome in outcomes]
    return results


# ---------------------------------------------------------------- training


def _train_in_ram(plan: ModelPlan, log: PlantedLog, options: ClickOptions) -> dict[str, Any]:
    warm_up(plan, EMBEDROCK)
    try:
        with closing(Training(plan, log, options, None)) as training:
            return training.run()
    except MemoryBudgetError as error:
        remedy = "In the demo: fewer --steps, or a smaller --batch-size or --dim."
        raise MemoryBudgetError(f"{error} {remedy}") from error


def _train_on_disk(plan: ModelPlan, log: PlantedLog, options: ClickOptions) -> dict[str, Any]:
    storage = Storage.of(options)
    print(f"\n{storage.describe()}")
    storage.claim(options)
    warm_up(plan, EMBEDROCK)
    try:
        with closing(Training(on_disk(plan, storage), log, options, storage)) as training:
            results = training.run()
    except KeyboardInterrupt:
        print(f"\nfiles    stay in {storage.folder}; the same command goes on from the last checkpoint")
        raise
    print(storage.finish())
    return results


class Training:
    """The model in training.

    Args:
        plan: of the model.
        log: where batches come from.
        options: how many, and so on.
        storage: where the tables lie on disk; None: in RAM.
    """

    def __init__(self, plan: ModelPlan, log: PlantedLog, options: ClickOptions, storage: Storage | None) -> None:
        self._log, self._options, self._storage = log, options, storage
        self._trainer = Trainer(plan, EMBEDROCK)
        self._test = log.clicks(np.random.default_rng((options.seed, TEST_STREAM)), TEST_CLICKS)
        self._losses: list[float] = []
        layers = [layer for layer in self._trainer.model.modules() if isinstance(layer, ert.Embedding)]
        self._users, self._items = layers
        self._tables = [layer.table for layer in layers]

    def run(self) -> dict[str, Any]:
        """Train, print how it goes, and return all numbers."""
        first = self._storage.resume(self._trainer) if self._storage else 0
        best = auc(self._test.labels, self._test.planted)
        print(f"\n{'step':>8}  {'loss':>6}  {'AUC':>6}   (best possible: {best:.4f}, by the planted model itself)")
        meter = DiskMeter(self._tables)
        curve = self._steps(first, meter)
        users, items = (table.stats() for table in self._tables)
        results = {
            "curve": curve,
            "resumed_at": first,
            "planted_auc": best,
            "test_clicks": TEST_CLICKS,
            "tables": {"users": users, "items": items},
            "disk": meter.totals(self._options.steps - first) if self._storage else None,
            "rss_bytes": rss_bytes(),
            "test_unseen_share": self._unseen_share(),
        }
        print(_format_training(results))
        return results

    def close(self) -> None:
        """Give the tables back. What no checkpoint has is lost, which is said elsewhere."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncommittedWarning)
            for table in self._tables:
                table.close()

    def _steps(self, first: int, meter: DiskMeter) -> list[dict[str, float]]:
        """Train, and return some points of the learning curve."""
        steps, curve, train_s = self._options.steps, list[dict[str, float]](), 0.0
        due = {steps * (report + 1) // REPORTS for report in range(REPORTS)}
        with tqdm(total=steps, initial=first, unit="it", leave=False, disable=None) as bar:
            start = time.perf_counter()
            for step, clicks in enumerate(self._batches(first, meter), start=first + 1):
                self._losses.append(self._trainer.step(clicks.users, clicks.items, clicks.labels))
                bar.set_postfix_str(f"loss={self._loss():.4f}{meter.line(step)}", refresh=False)
                bar.update()
                self._save(step)
                train_s += time.perf_counter() - start
                if step in due:
                    curve.append({"step": step, "train_s": train_s, **self._measure()})
                    bar.write(f"{step:>8,}  {curve[-1]['loss']:.4f}  {curve[-1]['auc']:.4f}")
                start = time.perf_counter()
        return curve or [{"step": first, "train_s": train_s, **self._measure()}]

    def _batches(self, first: int, meter: DiskMeter) -> Iterable[Clicks]:
        made = (
            self._log.clicks(self._random(step), self._options.batch_size) for step in range(first, self._options.steps)
        )
        if self._storage is None:
            return made
        ids_of: dict[Any, Callable[[Clicks], np.ndarray]] = {self._users: _users_of, self._items: _items_of}
        return meter.waited(ert.prefetch(meter.made(made), ids_of, DEPTH))

    def _random(self, step: int) -> np.random.Generator:
        return np.random.default_rng((self._options.seed, TRAIN_STREAM, step))

    def _save(self, step: int) -> None:
        if self._storage and (step % SAVE_STEPS == 0 or step == self._options.steps):
            self._storage.save(self._trainer, step)

    def _measure(self) -> dict[str, float]:
        scores = self._trainer.scores(self._test.users[:, None], self._test.items[:, None])[:, 0]
        return {"loss": self._loss(), "auc": auc(self._test.labels, scores)}

    def _loss(self) -> float:
        return float(np.mean(self._losses[-100:])) if self._losses else float("nan")

    def _unseen_share(self) -> float:
        """Return the share of the test whose user or item was in no batch, by drawing all batches again."""
        users, items = np.zeros(self._log.users, bool), np.zeros(self._log.items, bool)
        for step in range(self._options.steps):
            seen_users, seen_items = self._log.pairs(self._random(step), self._options.batch_size)
            users[seen_users] = items[seen_items] = True
        return float(np.mean(~(users[self._test.users] & items[self._test.items])))


def _users_of(clicks: Clicks) -> np.ndarray:
    return clicks.users


def _items_of(clicks: Clicks) -> np.ndarray:
    return clicks.items


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
    steps = last["step"] - results["resumed_at"]
    rate = steps / last["train_s"] if steps else 0.0
    return "\n".join(
        [
            "",
            f"trained  {steps:,} steps in {last['train_s']:.1f} s, {rate:.0f} it/s",
            *([_format_disk(results["disk"], list(tables))] if results["disk"] else []),
            f"rows     {touched:,} of {rows:,} touched ({touched / rows:.0%})",
            f"RAM      {format_bytes(used)} for the tables, {format_bytes(results['rss_bytes'])} for the process",
            f"AUC      {last['auc']:.4f} trained, {results['planted_auc']:.4f} planted model; "
            f"{results['test_unseen_share']:.0%} of the test has a user or item that was in no batch",
        ]
    )


def _format_disk(rates: dict[str, float], tables: list[dict[str, float]]) -> str:
    size = format_bytes(sum(table["disk_bytes"] for table in tables))
    return (
        f"disk     {rates['hit_rate']:.1%} of the rows were in RAM, {rates['reads_per_step']:,.0f} reads a step, "
        f"{rates['waited_share']:.0%} of the time spent waiting for them; {size} of files"
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
