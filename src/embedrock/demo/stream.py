"""The demo on a stream whose items come and go: the same training with and without admission and eviction."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import embedrock as er
from embedrock.demo import collisions
from embedrock.demo.data.logged_stream import LoggedStream
from embedrock.demo.data.planted_stream import PlantedStream
from embedrock.demo.metrics import auc
from embedrock.demo.options import StreamOptions
from embedrock.errors import RequirementError
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_count, format_facts, format_table

MEMORY, SKETCH = "256MiB", "512KiB"
HEAD = ("day", "table", "AUC", "best", "rows", "RAM", "disk", "seconds")


def run(options: StreamOptions) -> dict[str, Any]:
    """Train a table for each way to let rows come and go, print each day, and return all numbers."""
    if options.threads is not None:
        er.set_threads(options.threads)
    pyplot = None if options.png is None else _pyplot()
    stream, options, facts = _planted(options) if options.data is None else _logged(options, options.data)
    model = f"a row of {options.dim} for each item, Adam(lr={options.lr:g}), seed {options.seed}"
    print(format_facts({**facts, "model": model}))
    lines = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        learners = [Learner(name, policies, folder, options) for name, policies in _tables(options).items()]
        if options.compare and collisions.are_installed():
            learners += [Learner(name, {}, folder, options, _slots(name, options)) for name in collisions.POLICIES]
        for day in range(options.days):
            lines += [learner.live_through(stream, day) for learner in learners]
            print(("\n" if day == 0 else "") + _text(lines[-len(learners) :], with_head=day == 0))
        for learner in learners:
            learner.close()
    if pyplot is not None:
        _draw(pyplot, lines, options)
    return {"days": lines}


Opened = tuple[PlantedStream | LoggedStream, StreamOptions, dict[str, str]]


def _planted(options: StreamOptions) -> Opened:
    """Return a stream, the options that fit it, and what is said of it."""
    stream = PlantedStream(options.alive, max(1, options.alive // options.life), options.once, options.seed)
    shown = options.days * options.steps_a_day * options.batch_size
    facts = {
        "stream": f"{_days(options)} of {options.batch_size:,}: {shown:,} items shown, as strings",
        "items": f"{stream.alive:,} at a time, each for {format_count(options.life, 'day')}; "
        f"{options.once:.0%} are shown once",
    }
    return stream, options, facts


def _logged(options: StreamOptions, path: Path) -> Opened:
    """Return the stream of a log, of whose items a quarter may have rows where there is an eviction."""
    stream = LoggedStream(path, options.days, options.batch_size, options.seed)
    options = replace(options, steps_a_day=stream.steps_a_day, alive=stream.items // 4)
    facts = {
        "log": f"{path.name}: {stream.form}",
        "stream": f"{_days(options)}: {format_count(stream.interactions, 'interaction')}, each beside an item of those "
        "seen before",
        "items": f"{stream.items:,}, as strings",
    }
    return stream, options, facts


def _days(options: StreamOptions) -> str:
    return f"{format_count(options.days, 'day')} of {format_count(options.steps_a_day, 'step')}"


def _tables(options: StreamOptions) -> dict[str, dict[str, Any]]:
    """Return the ways to let rows come and go, by name."""
    admission = er.Admission(min_count=2, within=4 * options.steps_a_day, sketch=SKETCH)
    eviction = er.Eviction(max_rows=_most_rows(options), idle=3 * options.steps_a_day)
    both = {"both": {"admission": admission, "eviction": eviction}}
    if not options.compare:
        return both
    return {"every id": {}, "admission": {"admission": admission}, "eviction": {"eviction": eviction}, **both}


def _slots(name: str, options: StreamOptions) -> collisions.ManagedCollisions:
    return collisions.ManagedCollisions(name, _most_rows(options))


def _most_rows(options: StreamOptions) -> int:
    return max(options.alive, 2 * options.batch_size)


class Learner:
    """A table on disk of one way, and a logistic model: the sum of an item's row is its logit.

    Args:
        name: of the way.
        policies: of the table.
        folder: that the table gets one in.
        options: of the demo.
        slots: gives items rows that they share; None: each has its own.
    """

    def __init__(
        self,
        name: str,
        policies: dict[str, Any],
        folder: str,
        options: StreamOptions,
        slots: collisions.ManagedCollisions | None = None,
    ) -> None:
        self._slots = slots
        self._name, self._options, self._path = name, options, os.path.join(folder, name.replace(" ", "-"))
        rule, init = er.Adam(lr=options.lr), er.Zeros()
        place: dict[str, Any] = {"path": self._path, "memory": MEMORY, "keep": 1}
        self._table = er.Table(None, options.dim, rule=rule, init=init, seed=options.seed, **place, **policies)
        self._bias = 0.0

    def live_through(self, stream: PlantedStream | LoggedStream, day: int) -> dict[str, Any]:
        """Score each batch of a day, then train on it; return how the day went."""
        options, table, started = self._options, self._table, time.perf_counter()
        scores, labels, planted = [], [], []
        for step in range(options.steps_a_day):
            shown = stream.shown(day, step, options.batch_size)
            ids = self._rows_of(er.hash_ids(shown.names))
            logits = table.lookup(ids).sum(axis=1) + np.float32(self._bias)
            errors = (1 / (1 + np.exp(-logits)) - shown.labels) / len(ids)
            table.update(ids, np.repeat(errors[:, None], options.dim, axis=1).astype(np.float32))
            self._bias -= 0.5 * float(errors.sum())
            for found, kept in ((logits, scores), (shown.labels, labels), (shown.planted, planted)):
                if found is not None:
                    kept.append(found)
        table.commit(step=(day + 1) * options.steps_a_day)
        table.compact()
        stats, truth = table.stats(), np.concatenate(labels)
        known = stats.get("residents_bytes", 0) if self._slots is None else self._slots.nbytes
        return {
            "day": day + 1,
            "table": self._name,
            "auc": auc(truth, np.concatenate(scores)),
            "best": auc(truth, np.concatenate(planted)) if planted else None,
            "rows": stats["rows_touched"],
            "ram_bytes": stats["rows_touched"] * table.spec.record_bytes + known,
            "disk_bytes": sum(file.stat().st_size for file in Path(self._path).rglob("*") if file.is_file()),
            "seconds": time.perf_counter() - started,
        }

    def _rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of the table that the ids of a batch have."""
        if self._slots is None:
            return ids
        slots, evicted = self._slots(ids)
        self._table.forget(evicted)
        return slots

    def close(self) -> None:
        """Close the table."""
        self._table.close()


def _text(lines: list[dict[str, Any]], with_head: bool) -> str:
    cells = [
        [
            str(line["day"]),
            line["table"],
            f"{line['auc']:.4f}",
            "?" if line["best"] is None else f"{line['best']:.4f}",
            f"{line['rows']:,}",
            format_bytes(int(line["ram_bytes"])),
            format_bytes(line["disk_bytes"]),
            f"{line['seconds']:.1f}",
        ]
        for line in lines
    ]
    wide = [head.rjust(width) for head, width in zip(HEAD, (3, 13, 6, 6, 9, 10, 10, 7), strict=True)]
    table = format_table(wide, cells).splitlines()
    return "\n".join(table if with_head else table[2:])


def _pyplot() -> Any:
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RequirementError(
            f"--png needs matplotlib, which does not import: {error}. pip install 'embedrock[plot]'"
        ) from error


def _draw(pyplot: Any, lines: list[dict[str, Any]], options: StreamOptions) -> None:
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    kinds = (("auc", "AUC of the day", 1), ("rows", "rows with records", 1), ("disk_bytes", "on disk, MB", 1e-6))
    for axis, (key, title, factor) in zip(axes, kinds, strict=True):
        for name in dict.fromkeys(line["table"] for line in lines):
            own = [line for line in lines if line["table"] == name]
            axis.plot([line["day"] for line in own], [line[key] * factor for line in own], label=name)
        if key == "auc" and options.data is None:
            own = [line for line in lines if line["table"] == "both"]
            axis.plot([line["day"] for line in own], [line["best"] for line in own], "k:", label="best there is")
        axis.set_xlabel("day")
        axis.locator_params(axis="x", integer=True)
        axis.set_title(title)
        axis.legend()
    figure.tight_layout()
    figure.savefig(options.png)
