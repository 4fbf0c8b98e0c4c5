"""Train on a stream whose items are born and die, by tables of open ids with and without admission and eviction.

    python examples/stream.py                     a planted stream, whose best AUC is known for each day
    python examples/stream.py --data FILE         the items of a log of yours, ``user item [rating] [timestamp]`` a line

Items are strings; `er.hash_ids` makes ids of them. It prints AUC, rows, RAM and disk of each day. It needs no
framework. A log is cut into --days by the order of its times, and beside each of its items stands one that was not
taken.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import embedrock as er
from common import DataError, auc, count, facts, make_parser, mib, run
from interactions import read_log
from planted import draw_labels, zipf

PULL, BIAS = 1.5, -1.0
LIFE = 5  # days of an item
SHOWN_ONCE = 0.3  # share of the impressions whose item never comes again
ONCE = 1 << 40  # first number of these items
MEMORY, SKETCH = "256MiB", "512KiB"
HEAD = "day  table          AUC    best       rows         RAM        disk  seconds"


class Shown(NamedTuple):
    """Items that were shown.

    Attributes:
        names: str or bytes (n,).
        labels: float32 (n,), 1: clicked, 0: not.
        planted: float32 (n,), the logit of each label; None: nobody knows it.
    """

    names: np.ndarray
    labels: np.ndarray
    planted: np.ndarray | None


class PlantedStream:
    """Impressions of items with Zipf's popularity. Each day brings new items and takes as many.

    An item has a pull, normally distributed; the chance of a click is the sigmoid of ``PULL * pull + BIAS``.

    Example:
        >>> PlantedStream(alive=1000, seed=0).shown(day=3, step=0, size=5).names.shape
        (5,)
    """

    def __init__(self, alive: int, seed: int) -> None:
        self._alive, self._born, self._seed = alive, max(1, alive // LIFE), seed
        self._order = np.random.default_rng((seed, 7)).permutation(alive)
        self._pulls = er.Table(None, 1, init=er.Normal(), seed=seed)

    def shown(self, day: int, step: int, size: int) -> Shown:
        """Draw the impressions of a step of a day."""
        random = np.random.default_rng((self._seed, day, step))
        ranks = zipf(random.random(size), self._alive + 1)  # which leaves the last one out
        items = day * self._born + self._order[ranks]
        is_once = random.random(size) < SHOWN_ONCE
        items[is_once] = ONCE + random.integers(0, ONCE, int(is_once.sum()))
        planted = PULL * self._pulls.lookup(items)[:, 0] + np.float32(BIAS)
        return Shown(np.char.add("item ", items.astype(str)), draw_labels(random, planted), planted)


class LoggedStream:
    """Items of a log in the order of their times. Beside each stands one of those seen before, with label 0.

    Args:
        path: the log.
        days: number of parts of equal size to cut it into.
        batch_size: most items in a batch, half of them with label 1.
        seed: of the items with label 0.

    Attributes:
        steps_a_day: batches of each day.
        items: number of different items.
    """

    def __init__(self, path: Path, days: int, batch_size: int, seed: int) -> None:
        log = read_log(path)
        if len(log.items) < days:
            raise DataError(
                f"{path}: expected an interaction for each of {days} days or more; got {len(log.items)}. Pass fewer "
                "--days."
            )
        in_time = log.items if log.times is None else log.items[np.argsort(log.times, kind="stable")]
        steps = -(-len(in_time) // (days * max(1, batch_size // 2)))
        self.steps_a_day, self.items = min(steps, len(in_time) // days), log.num_items
        self._names, self._seed = log.names, seed
        self._batches = np.array_split(in_time, days * self.steps_a_day)
        _, first = np.unique(in_time, return_index=True)
        self._came = in_time[np.sort(first)]
        self._known = np.searchsorted(np.sort(first), np.cumsum([len(batch) for batch in self._batches]))

    def shown(self, day: int, step: int, size: int) -> Shown:
        """Return the items of a step of a day, whatever `size` is."""
        number = day * self.steps_a_day + step
        taken = self._batches[number]
        draws = np.random.default_rng((self._seed, number)).integers(0, self._known[number], len(taken))
        items = np.concatenate([taken, self._came[draws]])
        names = np.array([self._names[item] for item in items.tolist()], object)
        return Shown(names, np.repeat(np.array([1, 0], np.float32), len(taken)), None)


class Learner:
    """A logistic model: the sum of an item's row is its logit."""

    def __init__(self, name: str, policies: dict[str, Any], folder: str, options: Namespace) -> None:
        self.name, self._options, self._bias = name, options, 0.0
        self._path = Path(folder, name.replace(" ", "-"))
        self._table = er.Table(
            None,  # open ids
            options.dim,
            rule=er.Adam(lr=options.lr),
            init=er.Zeros(),
            seed=options.seed,
            path=self._path,
            memory=MEMORY,
            keep=1,
            **policies,
        )

    def live_through(self, stream: PlantedStream | LoggedStream, day: int) -> dict[str, Any]:
        """Score each batch of a day, then train on it; return the numbers of the day."""
        started, table, steps = time.perf_counter(), self._table, self._options.steps_a_day
        seen = list[tuple[np.ndarray, Shown]]()
        for step in range(steps):
            shown = stream.shown(day, step, self._options.batch_size)
            seen.append((self._step(shown), shown))
        table.commit(step=(day + 1) * steps)
        table.compact()
        labels = np.concatenate([shown.labels for _, shown in seen])
        planted = [shown.planted for _, shown in seen if shown.planted is not None]
        stats = table.stats()
        return {
            "day": day + 1,
            "table": self.name,
            "auc": auc(labels, np.concatenate([logits for logits, _ in seen])),
            "best": auc(labels, np.concatenate(planted)) if planted else None,
            "rows": stats["rows_touched"],
            "ram": stats["rows_touched"] * table.spec.record_bytes + stats.get("residents_bytes", 0),
            "disk": sum(file.stat().st_size for file in self._path.rglob("*") if file.is_file()),
            "seconds": time.perf_counter() - started,
        }

    def _step(self, shown: Shown) -> np.ndarray:
        """Train on a batch; return its logits of before."""
        ids = er.hash_ids(shown.names)
        logits = self._table.lookup(ids).sum(axis=1) + np.float32(self._bias)
        errors = (1 / (1 + np.exp(-logits)) - shown.labels) / len(ids)
        self._table.update(ids, np.repeat(errors[:, None], self._options.dim, axis=1).astype(np.float32))
        self._bias -= 0.5 * float(errors.sum())
        return logits

    def close(self) -> None:
        """Close the table."""
        self._table.close()


def policies_of(options: Namespace) -> dict[str, dict[str, Any]]:
    """Return the ways of rows to come and go, by name."""
    most = max(options.alive, 2 * options.batch_size)
    admission = er.Admission(min_count=2, within=4 * options.steps_a_day, sketch=SKETCH)
    eviction = er.Eviction(max_rows=most, idle=3 * options.steps_a_day)
    both = {"admission": admission, "eviction": eviction}
    return {"every id": {}, "admission": {"admission": admission}, "eviction": {"eviction": eviction}, "both": both}


def days(options: Namespace) -> list[dict[str, Any]]:
    """Train a table of each way, print each day, and return its numbers."""
    items = f"{options.alive:,} at a time, each for {LIFE} days; {SHOWN_ONCE:.0%} are shown once"
    stream = PlantedStream(options.alive, options.seed)
    if options.data is not None:
        stream = LoggedStream(options.data, options.days, options.batch_size, options.seed)
        options.steps_a_day, options.alive = stream.steps_a_day, stream.items // 4
        items = f"{stream.items:,} of {options.data.name}"
    print(facts({"stream": f"{options.days} days of {options.steps_a_day} batches", "items": items}))
    print(f"\n{HEAD}")
    lines = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        learners = [Learner(name, policies, folder, options) for name, policies in policies_of(options).items()]
        for day in range(options.days):
            for learner in learners:
                lines.append(learner.live_through(stream, day))
                print(text_of(lines[-1]), flush=True)
        for learner in learners:
            learner.close()
    return lines


def text_of(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    best = "?" if line["best"] is None else f"{line['best']:.4f}"
    sizes = f"{line['rows']:9,}  {mib(line['ram']):>10}  {mib(line['disk']):>10}"
    return f"{line['day']:3}  {line['table']:10}  {line['auc']:.4f}  {best:>6}  {sizes}  {line['seconds']:7.1f}"


def main(words: list[str]) -> list[dict[str, Any]]:
    """Train as the words of the command line say; return the numbers of each day."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="a log, in place of the planted stream")
    for name, default, text in (
        ("dim", 16, "columns of the rows"),
        ("batch-size", 4096, "items in a batch"),
        ("days", 10, "of the stream"),
        ("steps-a-day", 150, "batches of a day, of the planted stream"),
        ("alive", 20_000, "items at a time, of the planted stream"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    parser.add_argument("--lr", type=float, default=0.01, metavar="X", help="learning rate of Adam")
    options = parser.parse_args(words)
    if options.threads is not None:
        er.set_threads(options.threads)
    return days(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
