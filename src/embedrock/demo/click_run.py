"""The demo on planted clicks with PyTorch, from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from tqdm import tqdm

import embedrock.torch as ert
from embedrock.demo.backends import EMBEDROCK
from embedrock.demo.contest import Outcome, contest
from embedrock.demo.course import (
    Course,
    format_head,
    format_point,
    format_start,
    format_training,
    plan_in_ram,
    trained,
)
from embedrock.demo.meter import DiskMeter
from embedrock.demo.options import ClickOptions
from embedrock.demo.plan import ModelPlan
from embedrock.demo.storage import DEPTH, SAVE_STEPS, Storage, on_disk
from embedrock.demo.synthetic import Clicks
from embedrock.demo.train import Trainer, use_threads, warm_up
from embedrock.errors import MemoryBudgetError
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_table
from embedrock.torch.checkpoint import NoCheckpointError


def run(options: ClickOptions) -> dict[str, Any]:
    """Train on planted clicks and print how it goes; return all numbers, as plain JSON values."""
    use_threads(options.threads)
    in_ram = plan_in_ram(options)
    print(format_start(options, in_ram))
    train = _train_in_ram if options.in_ram else _train_on_disk
    results: dict[str, Any] = {"training": train(in_ram, options)}
    if options.compare:
        print("\na few steps of the same model in RAM, in a process of its own each")
        outcomes = list(contest(in_ram, options.batch_size, options.threads))
        print(_format_outcomes(outcomes))
        results["contest"] = [asdict(outcome) for outcome in outcomes]
    return results


# ---------------------------------------------------------------- training


def _train_in_ram(plan: ModelPlan, options: ClickOptions) -> dict[str, Any]:
    warm_up(plan, EMBEDROCK)
    try:
        return trained(Training(plan, options, None))
    except MemoryBudgetError as error:
        remedy = "In the demo: fewer --steps, or a smaller --batch-size or --dim."
        raise MemoryBudgetError(f"{error} {remedy}") from error


def _train_on_disk(plan: ModelPlan, options: ClickOptions) -> dict[str, Any]:
    with Storage.of(options).claimed(options) as storage:
        warm_up(plan, EMBEDROCK)
        return trained(Training(on_disk(plan, storage), options, storage))


class Training:
    """The model in training.

    Args:
        plan: of the model.
        options: how many batches, and so on.
        storage: where the tables lie on disk; None: in RAM.

    Attributes:
        tables: of users and items.
    """

    def __init__(self, plan: ModelPlan, options: ClickOptions, storage: Storage | None) -> None:
        self._options, self._storage = options, storage
        self._course = Course(options)
        self._trainer = Trainer(plan, EMBEDROCK)
        layers = [layer for layer in self._trainer.model.modules() if isinstance(layer, ert.Embedding)]
        self._users, self._items = layers
        self.tables = [layer.table for layer in layers]

    def run(self) -> dict[str, Any]:
        """Train, print how it goes, and return all numbers."""
        first = self._resume()
        print(format_head(self._course.best))
        meter = DiskMeter(self.tables)
        curve = self._steps(first, meter)
        disk = meter.totals(self._options.steps - first) if self._storage else None
        results = self._course.results(first, curve, self.tables, disk)
        print(format_training(results))
        return results

    def _steps(self, first: int, meter: DiskMeter) -> list[dict[str, float]]:
        """Train, and return some points of the learning curve."""
        course, steps = self._course, self._options.steps
        curve, train_s = list[dict[str, float]](), 0.0
        with tqdm(total=steps, initial=first, unit="it", leave=False, disable=None) as bar:
            start = time.perf_counter()
            for step, clicks in enumerate(self._batches(first, meter), start=first + 1):
                course.losses.append(self._trainer.step(clicks.users, clicks.items, clicks.labels))
                bar.set_postfix_str(f"loss={course.loss:.4f}{meter.line(step)}", refresh=False)
                bar.update()
                self._save(step)
                train_s += time.perf_counter() - start
                if step in course.due:
                    curve.append({"step": step, "train_s": train_s, **self._measure()})
                    bar.write(format_point(curve[-1]))
                start = time.perf_counter()
        return curve or [{"step": first, "train_s": train_s, **self._measure()}]

    def _batches(self, first: int, meter: DiskMeter) -> Iterable[Clicks]:
        made = map(self._course.batch, range(first, self._options.steps))
        if self._storage is None:
            return made
        ids_of: dict[Any, Callable[[Clicks], np.ndarray]] = {self._users: _users_of, self._items: _items_of}
        return meter.waited(ert.prefetch(meter.made(made), ids_of, DEPTH))

    def _resume(self) -> int:
        """Go on from the last checkpoint, if there is one; return its step."""
        if self._storage is None:
            return 0
        try:
            return ert.load(self._trainer.model, self._storage.checkpoints, self._trainer.optimizers)
        except NoCheckpointError:
            return 0

    def _save(self, step: int) -> None:
        if self._storage and (step % SAVE_STEPS == 0 or step == self._options.steps):
            ert.save(self._trainer.model, self._storage.checkpoints, step, self._trainer.optimizers)

    def _measure(self) -> dict[str, float]:
        test = self._course.test
        return self._course.measure(self._trainer.scores(test.users[:, None], test.items[:, None])[:, 0])


def _users_of(clicks: Clicks) -> np.ndarray:
    return clicks.users


def _items_of(clicks: Clicks) -> np.ndarray:
    return clicks.items


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
