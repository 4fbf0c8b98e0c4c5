"""A process that trains what a setting says, and tells what that took."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from embedrock.bench.planner.settings import ROUNDS, Setting
from embedrock.machine.ram import peak_rss_bytes
from embedrock.planner.trial import Pace, Trial
from embedrock.planner.zipf import bounded_zipf, scattered
from embedrock.rules import Adam
from embedrock.table.table import Table


class Trainer:
    """Trains the tables of a setting, which are new.

    Args:
        setting: what to train.
        folder: an empty one, for the files.
        seed: of the ids.
    """

    def __init__(self, setting: Setting, folder: Path, seed: int) -> None:
        self._setting, self._folder, self._seed = setting, folder, seed

    def run(self) -> dict[str, float]:
        """Return the seconds of a step, its misses, the RAM at its peak, cores that others used, and the `Pace`."""
        setting = self._setting
        with ExitStack() as stack:
            tables = [stack.enter_context(self._table(number)) for number in range(setting.tables)]
            trial = Trial(tables, self._batches())
            trial.train(setting.steps)
            pace = Pace()
            before = pace.seconds()
            timing = trial.timed(ROUNDS, setting.together)
            peak, after = peak_rss_bytes(), pace.seconds()
            for table in tables:
                if table.is_on_disk:
                    table.commit()
        counts = [sum(each.get(name, 0.0) for each in timing.counts) for name in ("misses", "reads", "spilled")]
        taken = dict(zip(("step_s", "reading_s", "spilling_s"), timing.taken, strict=True))
        return (
            taken
            | {"others": timing.others, "peak_bytes": peak, "pace_s": (before + after) / 2}
            | dict(zip(("misses", "reads", "spilled"), counts, strict=True))
        )

    def _table(self, number: int) -> Table:
        setting = self._setting
        options = {"path": self._folder / f"{number}.rock", "memory": setting.memory} if setting.memory else {}
        return Table(setting.rows, setting.dim, rule=Adam(), seed=number, **options)

    def _batches(self) -> Iterator[list[np.ndarray]]:
        setting = self._setting
        for step in itertools.count():
            random = np.random.default_rng((self._seed, step))
            yield [
                scattered(bounded_zipf(random.random(setting.batch), setting.rows, setting.zipf), setting.rows)
                for _ in range(setting.tables)
            ]
