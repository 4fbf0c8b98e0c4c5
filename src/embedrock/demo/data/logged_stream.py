"""A log of the user's own as a stream: what was shown, day by day, beside as many items that were not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embedrock.demo.data.interactions import LogError, read_log
from embedrock.demo.data.planted_stream import Shown


class LoggedStream:
    """Interactions in the order of their times (without times: of the file), cut into days of as many each.

    An interaction's item has label 1. Beside each stands one with label 0, drawn alike from the items seen until the
    end of its batch: so what is learned is which items people take now.

    Args:
        path: a log, see `read_log`.
        days: to cut it into.
        batch_size: items in a batch, at most: half of them with label 1.
        seed: of the items with label 0.

    Attributes:
        steps_a_day: batches of each day.
        interactions, items: how many there are, of items different ones.
        form: how the file was understood, for people.

    Raises:
        LogError: there are fewer interactions than days, or the file cannot be read.
    """

    def __init__(self, path: Path, days: int, batch_size: int, seed: int) -> None:
        log = read_log(path)
        if len(log.items) < days:
            raise LogError(
                f"{path}: expected an interaction for each of {days} days or more; got {len(log.items)}. Pass fewer "
                "--days."
            )
        in_time = log.items if log.times is None else log.items[np.argsort(log.times, kind="stable")]
        self.interactions, self.items, self.form, self._seed = len(log.items), log.num_items, log.form, seed
        steps = -(-len(in_time) // (days * max(1, batch_size // 2)))
        self.steps_a_day = min(steps, len(in_time) // days)
        self._names = log.item_names
        self._batches = np.array_split(in_time, days * self.steps_a_day)
        # Items by when they came, and how many had come by the end of each batch.
        _, first = np.unique(in_time, return_index=True)
        self._came = in_time[np.sort(first)]
        ends = np.cumsum([len(batch) for batch in self._batches])
        self._known = np.searchsorted(np.sort(first), ends)

    def shown(self, day: int, step: int, count: int) -> Shown:
        """Return the items of a step of a day: as many as its batch has, not `count`. Nobody knows the best score."""
        number = day * self.steps_a_day + step
        taken = self._batches[number]
        draws = np.random.default_rng((self._seed, number)).integers(0, self._known[number], len(taken))
        items = np.concatenate([taken, self._came[draws]])
        names = np.array([self._names[item] for item in items.tolist()], object)
        return Shown(names, np.repeat(np.array([1, 0], np.float32), len(taken)), None)
