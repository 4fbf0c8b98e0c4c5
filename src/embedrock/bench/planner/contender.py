"""A process that trains what a setting says, and tells what that took."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from embedrock.bench.planner.settings import ROUNDS, Setting
from embedrock.machine.ram import peak_rss_bytes
from embedrock.planner.trial import Timing, Trial, quarter
from embedrock.planner.zipf import bounded_zipf, scattered
from embedrock.rules import Adam
from embedrock.table.table import Table

SECONDS, PASSES = 1.0, 8  # in which it is done again, and so often at most
COUNTS = "misses", "reads", "spilled", "rows_touched"


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
        """Return the seconds of a step, its misses, the RAM at its peak, and cores that others used.

        What is done soon is done again with new tables, as a machine's pace changes within a tenth of a second.
        """
        end, timings, peak = time.perf_counter() + SECONDS, list[Timing](), 0
        while not timings or (len(timings) < PASSES and time.perf_counter() < end):
            with TemporaryDirectory(dir=self._folder) as folder, ExitStack() as stack:
                tables = [stack.enter_context(self._table(number, folder)) for number in range(self._setting.tables)]
                trial = Trial(tables, self._batches())
                trial.train(self._setting.steps)
                timings.append(trial.timed(ROUNDS, self._setting.together))
                peak = peak or peak_rss_bytes()
                for table in tables:
                    if table.is_on_disk:
                        table.commit()
        step = quarter([taken for timing in timings for taken in timing.rounds])
        counted = timings[0].counts
        counts = {name: sum(each.get(name, 0.0) for each in counted) for name in COUNTS}
        return (
            dict(zip(("step_s", "reading_s", "spilling_s"), step, strict=True))
            | {"others": median(timing.others for timing in timings), "peak_bytes": peak}
            | counts
        )

    def _table(self, number: int, folder: str) -> Table:
        setting = self._setting
        options = {"path": Path(folder, f"{number}.rock"), "memory": setting.memory} if setting.memory else {}
        return Table(setting.rows, setting.dim, rule=Adam(), seed=number, **options)

    def _batches(self) -> Iterator[list[np.ndarray]]:
        setting = self._setting
        for step in itertools.count():
            random = np.random.default_rng((self._seed, step))
            yield [
                scattered(bounded_zipf(random.random(setting.batch), setting.rows, setting.zipf), setting.rows)
                for _ in range(setting.tables)
            ]
