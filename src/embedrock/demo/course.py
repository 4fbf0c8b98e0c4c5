"""What the demo on planted clicks trains and tests on, and what it prints: the same for every framework."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from embedrock.bench.harness.machine import rss_bytes
from embedrock.demo.metrics import auc
from embedrock.demo.options import ClickOptions
from embedrock.demo.plan import ModelPlan, TableSize
from embedrock.demo.synthetic import ZIPF, Clicks, PlantedLog
from embedrock.machine.ram import available_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.table.files import UncommittedWarning
from embedrock.table.table import Table
from embedrock.terminal.tables import format_table

TEST_CLICKS = 200_000
REPORTS = 4  # how often the AUC is measured
RECENT = 100  # batches, whose mean loss is shown
TRAIN_STREAM, TEST_STREAM = 0, 1  # of random numbers; the contest has another


class Training(Protocol):
    """A model in training.

    Attributes:
        tables: of users and items.
    """

    tables: list[Table]

    def run(self) -> dict[str, Any]:
        """Train, print how it goes, and return all numbers."""
        ...


class Course:
    """Planted clicks to train and to test on.

    Args:
        options: how many, and of what.

    Attributes:
        log: where clicks come from.
        test: clicks that are not trained on.
        best: their AUC by the planted model itself, which no model can beat.
        due: steps after which the AUC is measured.
        losses: of the batches trained so far, in order.
    """

    def __init__(self, options: ClickOptions) -> None:
        self._options = options
        self.log = PlantedLog(options.users, options.items, options.seed)
        self.test = self.log.clicks(np.random.default_rng((options.seed, TEST_STREAM)), TEST_CLICKS)
        self.best = auc(self.test.labels, self.test.planted)
        self.due = sorted({options.steps * (report + 1) // REPORTS for report in range(REPORTS)} - {0})
        self.losses: list[float] = []

    def batch(self, step: int) -> Clicks:
        """Return what is trained on in a step; the first one is step 0."""
        return self.log.clicks(self._random(step), self._options.batch_size)

    @property
    def loss(self) -> float:
        """Mean over the last batches."""
        return float(np.mean(self.losses[-RECENT:])) if self.losses else float("nan")

    def measure(self, scores: np.ndarray) -> dict[str, float]:
        """Return loss and AUC, given the scores of `test`."""
        return {"loss": self.loss, "auc": auc(self.test.labels, scores)}

    def results(
        self, first: int, curve: list[dict[str, float]], tables: Sequence[Table], disk: dict[str, float] | None
    ) -> dict[str, Any]:
        """Return all numbers of a training, as plain JSON values.

        Args:
            first: the step that it began at.
            curve: what was measured.
            tables: of users and items.
            disk: what the disk had to do with it.
        """
        users, items = (table.stats() for table in tables)
        return {
            "curve": curve,
            "resumed_at": first,
            "planted_auc": self.best,
            "test_clicks": TEST_CLICKS,
            "tables": {"users": users, "items": items},
            "disk": disk,
            "rss_bytes": rss_bytes(),
            "test_unseen_share": self._unseen_share(),
        }

    def _random(self, step: int) -> np.random.Generator:
        return np.random.default_rng((self._options.seed, TRAIN_STREAM, step))

    def _unseen_share(self) -> float:
        """Return the share of the test whose user or item was in no batch, by drawing all batches again."""
        users, items = np.zeros(self.log.users, bool), np.zeros(self.log.items, bool)
        for step in range(self._options.steps):
            seen_users, seen_items = self.log.pairs(self._random(step), self._options.batch_size)
            users[seen_users] = items[seen_items] = True
        return float(np.mean(~(users[self.test.users] & items[self.test.items])))


def plan_in_ram(options: ClickOptions) -> ModelPlan:
    """Return the plan of the model with its tables in RAM, half of what is available for each."""
    half = available_bytes() // 2
    sizes = options.users, options.items, options.dim
    return ModelPlan(options.model, *sizes, options.lr, options.seed, budgets=(half, half))


def trained(training: Training) -> dict[str, Any]:
    """Run a training, and give its tables back; return all numbers."""
    try:
        return training.run()
    finally:
        close(training.tables)


def close(tables: Sequence[Table]) -> None:
    """Give tables back. What no checkpoint has is lost, which is said elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncommittedWarning)
        for table in tables:
            table.close()


# ---------------------------------------------------------------- printing


def format_start(options: ClickOptions, plan: ModelPlan) -> str:
    """Return what is going to be trained, and on what."""
    return "\n".join(
        [
            f"clicks   {options.users:,} users x {options.items:,} items, popularity Zipf({ZIPF}), seed {options.seed}",
            f"model    {options.model}, Adam(lr={options.lr:g}), {options.steps:,} batches of {options.batch_size:,}",
            "",
            format_sizes(plan.sizes),
        ]
    )


def format_head(best: float) -> str:
    """Return the head of the table of `format_point` lines."""
    return f"\n{'step':>8}  {'loss':>6}  {'AUC':>6}   (best possible: {best:.4f}, by the planted model itself)"


def format_point(point: dict[str, float]) -> str:
    """Return what was measured after a step."""
    return f"{point['step']:>8,}  {point['loss']:.4f}  {point['auc']:.4f}"


def format_sizes(sizes: tuple[TableSize, TableSize]) -> str:
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


def format_training(results: dict[str, Any]) -> str:
    """Return what came of a training."""
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
    waited = f", {rates['waited_share']:.0%} of the time spent waiting for them" if "waited_share" in rates else ""
    hits, reads = f"{rates['hit_rate']:.1%} of the rows were in RAM", f"{rates['reads_per_step']:,.0f} reads a step"
    return f"disk     {hits}, {reads}{waited}; {size} of files"
