"""``bench tf-data``: ways to read a log of ids into `tf.data`, and what `erk.prefetch` does for a table on disk.

Each contender has a process of its own, and turns are interleaved. The log was just written, and is read from the page
cache unless it is larger than RAM; the rows of the table come from the disk itself, past the page cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from embedrock.bench.disk.training import SPARE_BYTES, scratch_folder
from embedrock.bench.harness.machine import ROOT, rss_bytes
from embedrock.bench.harness.processes import Child, ChildError
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.rounds import Effort
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.readings import READINGS, SHARDS, Log, records
from embedrock.bench.step.contenders import Unavailable
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.tables import format_number, format_table

WORKLOAD = Workload(rows=1_000_000, features=8, batches=250)
ROWS_AT_ONCE = 65_536
SAMPLE_S = 0.005  # between looks at the RAM
WARM_UP_STEPS = 30


@dataclass(frozen=True)
class TfDataEffort(Effort):
    """How much to measure, and where.

    Args:
        rounds: turns of each contender, whose medians count.
        steps: timed steps of `fit` in a turn.
        folder: files go to a new folder in it, which is removed at the end.
    """

    rounds: int = 3
    steps: int = 100
    folder: Path = Path()


# ---------------------------------------------------------------- files


class Writer:
    """Writes the files, in a process of its own, whose memory ends with it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def write_log(self) -> None:
        """Write the ids."""
        workload, log = self._log.workload, self._log
        ids = np.concatenate([workload.batch_at(k) for k in range(workload.batches)])
        np.save(log.ids, ids)
        for part, npy, parquet in zip(
            np.array_split(ids.reshape(workload.batches, -1, workload.features), SHARDS),
            log.parts("npy"),
            log.parts("parquet"),
            strict=True,
        ):
            samples = part.reshape(-1, workload.features)
            np.save(npy, samples)
            _write_parquet(samples, parquet, workload.batch)

    def write_table(self) -> None:
        """Write a table that has all of its rows in files."""
        import embedrock as er

        workload = self._log.workload
        with er.Table(workload.rows, workload.dim, path=self._log.folder / "table.rock", rule=er.SGD(lr=0.1)) as table:
            for first in range(0, workload.rows, ROWS_AT_ONCE):
                ids = np.arange(first, min(first + ROWS_AT_ONCE, workload.rows))
                table.assign(ids, table.lookup(ids))
            table.commit()


def _write_parquet(samples: np.ndarray, path: str, batch: int) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return
    columns = {f"id{k}": column for k, column in enumerate(samples.T.copy())}
    pq.write_table(pa.table(columns), path, row_group_size=4 * batch)


# ---------------------------------------------------------------- reading


class Reader:
    """In its own process: reads the log once, and tells how fast and in how much RAM."""

    def __init__(self, log: Log, name: str) -> None:
        self._log = log
        self._reading = next(one for one in READINGS if one.name == name)

    def turn(self) -> dict[str, float]:
        """Read all of it."""
        import tensorflow as tf

        list(tf.data.Dataset.range(2))  # what TensorFlow itself takes is not the contender's
        peak, start = _Peak(), time.perf_counter()
        dataset = self._reading.make(self._log).prefetch(tf.data.AUTOTUNE)
        first_s = _seconds(dataset.take(1), start)
        seconds = [_seconds(dataset, time.perf_counter()) for _ in range(self._reading.passes)][-1]
        workload = self._log.workload
        samples = workload.batch * workload.batches
        return {"samples_per_s": samples / seconds, "first_batch_s": first_s, "peak_growth_bytes": peak.stop()}


def _seconds(dataset: Any, start: float) -> float:
    """Go through a dataset; return the seconds since `start`."""
    for _ in dataset:
        pass
    return time.perf_counter() - start


class _Peak:
    """Looks at the RAM of this process, pages of files not counted, until it is stopped."""

    def __init__(self) -> None:
        self._first = self._most = _anonymous_bytes()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            self._most = max(self._most, _anonymous_bytes())

    def stop(self) -> int:
        """Return by how many bytes it grew at most."""
        self._stopping.set()
        self._thread.join()
        return max(self._most, _anonymous_bytes()) - self._first


def _anonymous_bytes() -> int:
    lines = (ROOT / "proc/self/status").read_text().splitlines() if (ROOT / "proc/self/status").exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else rss_bytes()


# ---------------------------------------------------------------- training on a table on disk


class Ahead(NamedTuple):
    """A way to prefetch: `depth` batches, of their rows too with `rows`."""

    name: str
    label: str
    depth: int
    rows: bool


AHEADS = (
    Ahead("fit", "nothing ahead", 0, False),
    Ahead("fit-dataset-prefetch", "dataset.prefetch(2)", 2, False),
    *(Ahead(f"fit-erk-prefetch-{k}", f"erk.prefetch(dataset, ..., depth={k})", k, True) for k in (1, 2, 4)),
)


class Fit:
    """In its own process: trains a model on a table whose cache holds one row in ten."""

    def __init__(self, log: Log, name: str) -> None:
        self._log = log
        self._ahead = next(one for one in AHEADS if one.name == name)

    def turn(self, steps: int) -> dict[str, float]:
        """Return what a step takes, after some that fill the cache."""
        import keras
        import tensorflow as tf

        import embedrock as er
        import embedrock.keras as erk
        from embedrock.keras.prefetch import prefetch

        workload, ahead = self._log.workload, self._ahead
        memory = er.Table(workload.rows, workload.dim, rule=er.SGD()).memory_for(workload.rows // 10)
        table = er.open(self._log.folder / "table.rock", memory=memory)
        layer = erk.Embedding(table)
        layers = [layer, keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1)]
        model: Any = keras.Sequential([keras.Input((workload.features,), dtype="int64"), *layers])
        model.compile(erk.optimizer(keras.optimizers.SGD(0.01)), "mse")
        data = records(str(self._log.ids), self._log, workload.batch).repeat()
        data = data.map(lambda ids: (ids, tf.zeros((workload.batch, 1))))

        def fit(first: int, count: int) -> float:
            part = data.skip(first).take(count)
            part = prefetch(part, {layer: lambda x, y: x}, ahead.depth) if ahead.rows else part.prefetch(ahead.depth)
            start = time.perf_counter()
            model.fit(part, shuffle=False, verbose=0)
            return time.perf_counter() - start

        fit(0, WARM_UP_STEPS)
        before = table.stats()
        seconds = fit(WARM_UP_STEPS, steps)
        after = table.stats()
        table.close()  # what it learned is lost: the next turn begins with the same table
        reads, reading_s = (after[name] - before[name] for name in ("reads", "read_seconds"))
        return {
            "ms_per_step": seconds / steps * 1e3,
            "reads_per_step": reads / steps,
            "reading_ms_per_step": reading_s / steps * 1e3,
        }


# ---------------------------------------------------------------- the run


def run(workload: Workload, effort: TfDataEffort) -> Report:
    """Measure all, print two tables, and return all that was found."""
    log_bytes = 8 * workload.batch * workload.batches * workload.features
    samples, table = f"{workload.batch * workload.batches:,} samples", f"{workload.rows:,} rows x {workload.dim}"
    print(f"{samples} of {workload.features} ids ({format_bytes(log_bytes)}) in batches of {workload.batch}")
    print(f"table of {table} ({format_bytes(workload.table_bytes)}) on disk, a tenth of it in RAM")
    report = Report()
    with scratch_folder(effort.folder, 3 * (log_bytes + workload.table_bytes) + SPARE_BYTES) as folder:
        log = Log(folder, workload)
        with _child(Writer, effort, log) as writer:
            writer.call("write_log")
            writer.call("write_table")
        readings = _measured(report, effort, {one.name: (one.label, Reader, (log, one.name), ()) for one in READINGS})
        _print(("reading", "samples/s", "first batch, s", "RAM"), readings, _reading_cells)
        fits = _measured(
            report, effort, {one.name: (one.label, Fit, (log, one.name), (effort.steps,)) for one in AHEADS}
        )
        _print(("training", "ms/step", "rows read/step", "reading, ms/step"), fits, _fit_cells)
    report.results = [{**line, "workload": asdict(workload)} for line in (*readings, *fits)]
    return report


Job = tuple[
    str, Callable[..., object], tuple[Any, ...], tuple[Any, ...]
]  # label, what to make, of what, turn's arguments


def _measured(report: Report, effort: TfDataEffort, jobs: dict[str, Job]) -> list[dict[str, Any]]:
    """Give each job its turns, in rounds; return a line for each."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
    failed: dict[str, str] = {}
    for _ in range(effort.rounds):
        for name, (_, factory, made_of, arguments) in jobs.items():
            if name in failed:
                continue
            try:
                with _child(factory, effort, *made_of) as child:
                    turns[name].append(child.call("turn", *arguments))
            except ChildError as error:
                failed[name] = str(error)
                if error.kind != Unavailable.__name__:
                    report.failures.append((name, error.details))
    return [_line(name, job[0], turns[name], failed.get(name)) for name, job in jobs.items()]


def _child(factory: Callable[..., object], effort: Effort, *made_of: Any) -> Child:
    environment = {**effort.environment(), "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
    return Child(factory, *made_of, environment=environment, timeout_s=effort.timeout_s)


def _line(name: str, label: str, turns: Sequence[dict[str, float]], failed: str | None) -> dict[str, Any]:
    about = {"name": name, "label": label}
    if failed is not None:
        return {**about, "status": "failed", "reason": failed}
    return {
        **about,
        "status": "ok",
        **{key: median(turn[key] for turn in turns) for key in turns[0]},
        "turns": list(turns),
    }


def _print(head: Sequence[str], lines: Sequence[dict[str, Any]], cells: Callable[[dict[str, Any]], list[str]]) -> None:
    print(f"\n{format_table((*head, ''), [cells(line) for line in lines if line['status'] == 'ok'])}")
    for line in lines:
        if line["status"] != "ok":
            print(f"{line['name']}: {line['status']}: {line['reason']}")


def _reading_cells(line: dict[str, Any]) -> list[str]:
    rate, first = f"{line['samples_per_s']:,.0f}", format_number(line["first_batch_s"])
    return [line["name"], rate, first, format_bytes(int(line["peak_growth_bytes"])), line["label"]]


def _fit_cells(line: dict[str, Any]) -> list[str]:
    step, reading = (format_number(line[name]) for name in ("ms_per_step", "reading_ms_per_step"))
    return [line["name"], step, f"{line['reads_per_step']:,.0f}", reading, line["label"]]
