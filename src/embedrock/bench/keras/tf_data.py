"""``bench tf-data``: ways to read a log of ids into `tf.data`, and what `erk.prefetch` does for a table on disk.

Each way to read has a process of its own; all ways to train share one, and a table. Turns are interleaved. The log was
just written, and is read from the page cache unless it is larger than RAM; the rows of the table come from the disk
itself, past the page cache.

What is trained has a dense model so large that a step waits for the disk about half of its time: this is measured
first. Prefetching can win back what a step waits, and no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from embedrock.bench.disk.files import SPARE_BYTES, scratch_folder
from embedrock.bench.harness.bench import SIZES, Bench, Task
from embedrock.bench.harness.contenders import Contender
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.machine import RamGrowth
from embedrock.bench.harness.report import Report, about, failures, format_results, medians
from embedrock.bench.harness.runner import Racer, measure
from embedrock.bench.harness.targets import Target, beside
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.readings import READINGS, SHARDS, ClickLog, Reading, records
from embedrock.machine.ram import ROOT, named_number, rss_bytes
from embedrock.machine.sizes import format_bytes
from embedrock.terminal.progress import say
from embedrock.terminal.tables import Field, format_number, format_whole

ROWS_AT_ONCE = 65_536
SAMPLE_S = 0.005  # between looks at the RAM
WARM_UP_STEPS = 30
PROBING_STEPS = 10
TRAINING_BATCH = 2048  # samples at most: a cache of a tenth of the table has room for the rows of several such batches
PROBED_UNITS = 64, 1024  # of the dense model, by whose times its size is chosen
MOST_UNITS = 8192


@dataclass(frozen=True)
class TfDataEffort(Effort):
    """How much to measure, and where.

    Args:
        rounds: turns of each contender, whose medians count.
        steps: timed steps of `fit` in a turn.
        seconds: a turn of `fit` ends early once it took this long.
        folder: files go to a new folder in it, which is removed at the end.
    """

    rounds: int = 3
    steps: int = 30
    seconds: float = 6.0
    folder: Path = Path()

    def environment(self) -> dict[str, str]:
        """Return the variables of the contenders' processes."""
        return {**super().environment(), "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}


# ---------------------------------------------------------------- files


class LogWriter:
    """Writes the files, in a process of its own, whose memory ends with it."""

    def __init__(self, log: ClickLog) -> None:
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


class ReadingSession:
    """In its own process: reads the log once, and tells how fast and in how much RAM."""

    def __init__(self, log: ClickLog, reading: Reading) -> None:
        self._log, self._reading = log, reading

    def turn(self, steps: int, seconds: float) -> dict[str, float]:
        """Read all of it, however long that takes."""
        import tensorflow as tf

        list(tf.data.Dataset.range(2))  # what TensorFlow itself takes is not the contender's
        with RamGrowth(_anonymous_bytes, SAMPLE_S) as ram:
            start = time.perf_counter()
            dataset = self._reading.make(self._log).prefetch(tf.data.AUTOTUNE)
            first_s = _seconds(dataset.take(1), start)
            taken_s = [_seconds(dataset, time.perf_counter()) for _ in range(self._reading.passes)][-1]
        samples = self._log.workload.batch * self._log.workload.batches
        return {"samples_per_s": samples / taken_s, "first_batch_s": first_s, "peak_growth_bytes": ram.growth_bytes}


def _seconds(dataset: Any, start: float) -> float:
    """Go through a dataset; return the seconds since `start`."""
    for _ in dataset:
        pass
    return time.perf_counter() - start


def _anonymous_bytes() -> int:
    """Return the RAM of this process, pages of files not counted."""
    kilobytes = named_number(ROOT / "proc/self/status", "RssAnon:")
    return rss_bytes() if kilobytes is None else kilobytes * 1024


# ---------------------------------------------------------------- training on a table on disk


class Ahead(NamedTuple):
    """A way to prefetch: `depth` batches, of their rows too with `rows`."""

    depth: int = 0
    rows: bool = False


class Fit(Contender):
    """Training with `fit`, prefetching in several ways."""

    @property
    def ways(self) -> dict[str, Ahead]:
        """All in one process, on one table: so they differ in nothing else."""
        of_rows = {f"-erk-prefetch-{depth}": Ahead(depth, rows=True) for depth in (1, 2, 4)}
        return {"": Ahead(), "-dataset-prefetch": Ahead(2), **of_rows}


FIT = Fit("fit", "a table on disk; nothing ahead, dataset.prefetch(2), erk.prefetch of depths 1, 2 and 4")


class TrainingSession:
    """In its own process: trains a model on a table whose cache holds one row in ten.

    The first layer of its dense model has as many units as let a step that prefetches nothing read half of its time.
    """

    def __init__(self, log: ClickLog) -> None:
        import embedrock as er
        import embedrock.keras as erk

        self._workload, self._ids = log.workload, records(str(log.ids), log, log.workload.batch)
        memory = er.Table(log.workload.rows, log.workload.dim, rule=er.SGD()).memory_for(log.workload.rows // 10)
        self._layer = erk.Embedding(er.open(log.folder / "table.rock", memory=memory))
        self._ahead, self._done, self._units = Ahead(), 0, 0

    def use(self, ahead: Ahead) -> None:
        """Prefetch in another way from now on."""
        self._ahead = ahead

    def warm_up(self, seconds: float) -> int:
        """Fill the cache and choose the dense model, once; return its units."""
        if not self._units:
            self._model = self._model_of(PROBED_UNITS[0])
            self.turn(WARM_UP_STEPS, math.inf)
            probes = []
            for units in PROBED_UNITS:
                self._model = self._model_of(units)
                probes.append(self.turn(PROBING_STEPS, math.inf))
            self._units = units_for(probes)
            self._model = self._model_of(self._units)
        return self._units

    def turn(self, steps: int, seconds: float) -> dict[str, float]:
        """Return what each of `steps` steps takes, or of as many as fit into `seconds`, after one that is not timed."""
        import keras

        table = self._layer.table
        marks: list[tuple[float, float, float]] = []

        def note(batch: int, logs: Any) -> None:
            stats = table.stats()
            marks.append((time.perf_counter(), stats["read_seconds"], stats["reads"]))
            if marks[-1][0] - marks[0][0] > seconds:
                self._model.stop_training = True

        timer = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        self._model.fit(self._data(steps + 1), shuffle=False, verbose=0, callbacks=[timer])
        count, self._done = len(marks) - 1, self._done + len(marks)
        taken_s, reading_s, reads = (end - start for start, end in zip(marks[0], marks[-1], strict=True))
        return {
            "ms_per_step": taken_s / count * 1e3,
            "reads_per_step": reads / count,
            "reading_ms_per_step": reading_s / count * 1e3,
            "units": self._units,
        }

    def _data(self, steps: int) -> Any:
        """Return the next batches, and zeros as targets."""
        import tensorflow as tf

        from embedrock.keras.prefetch import prefetch

        part = self._ids.repeat().skip(self._done % self._workload.batches).take(steps)
        part = part.map(lambda ids: (ids, tf.zeros((self._workload.batch, 1))))
        depth, of_rows = self._ahead
        return prefetch(part, {self._layer: lambda x, y: x}, depth) if of_rows else part.prefetch(depth)

    def _model_of(self, units: int) -> Any:
        import keras

        import embedrock.keras as erk

        inputs = keras.Input((self._workload.features,), dtype="int64")
        hidden = keras.layers.Dense(units, activation="relu")(keras.layers.Flatten()(self._layer(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(erk.optimizer(keras.optimizers.SGD(0.01)), "mse")
        return model


def units_for(probes: Sequence[dict[str, float]]) -> int:
    """Return how many units let a step read half of its time, of what steps of `PROBED_UNITS` took."""
    readings = [probe["reading_ms_per_step"] for probe in probes]
    rests = [probe["ms_per_step"] - reading for probe, reading in zip(probes, readings, strict=True)]
    least, most = PROBED_UNITS
    unit_ms = (rests[1] - rests[0]) / (most - least)
    wanted = least + (mean(readings) - rests[0]) / unit_ms if unit_ms > 0 else least
    return round(min(max(wanted, least), MOST_UNITS))


# ---------------------------------------------------------------- the run


def run(task: Task) -> Report:
    """Measure all, print two tables, and return all that was found."""
    workload, effort = task.workload, task.effort
    log_bytes = 8 * workload.batch * workload.batches * workload.features
    samples, table = f"{workload.batch * workload.batches:,} samples", f"{workload.rows:,} rows x {workload.dim}"
    print(f"{samples} of {workload.features} ids ({format_bytes(log_bytes)}) in batches of {workload.batch}")
    print(f"table of {table} ({format_bytes(workload.table_bytes)}) on disk, a tenth of it in RAM")
    with scratch_folder(effort.folder, 3 * (log_bytes + workload.table_bytes) + SPARE_BYTES) as folder:
        log = ClickLog(folder, workload)
        with effort.child(LogWriter, log) as writer:
            writer.call("write_log")
            writer.call("write_table")
        report = Report()
        readings = [one for one in task.contenders if one is not FIT]
        if readings:
            racers = [Racer(one, workload, (ReadingSession, log, one), fresh=True) for one in readings]
            report.add(_measured(racers, effort, _READING))
        if FIT in task.contenders:
            batch = min(workload.batch, TRAINING_BATCH)
            cut = replace(workload, batch=batch, batches=workload.batches * workload.batch // batch)
            say(f"training in batches of {batch}")
            racers = [Racer(FIT, cut, (TrainingSession, ClickLog(folder, cut)))]
            report.add(_measured(racers, effort, _TRAINING))
    report.judge([GAIN])
    return report


def _measured(racers: Sequence[Racer], effort: Effort, fields: Sequence[Field]) -> Report:
    """Give each racer its turns, in rounds; print and return a line for each."""
    results = measure(racers, effort)
    lines = []
    for result in results:
        found = {**medians(result.turns), "turns": result.turns} if result.status == "ok" else {}
        lines.append({**about(result), **found, "workload": asdict(result.racer.workload)})
    print(f"\n{format_results(fields, lines)}")
    return Report(lines, failures=failures(results))


_READING = (
    Field("reading", "name"),
    Field("samples/s", "samples_per_s", format_whole),
    Field("first batch, s", "first_batch_s", format_number),
    Field("RAM", "peak_growth_bytes", format_bytes),
    Field("", "label"),
)
_TRAINING = (
    Field("training", "name"),
    Field("ms/step", "ms_per_step", format_number),
    Field("rows read/step", "reads_per_step", format_whole),
    Field("reading, ms/step", "reading_ms_per_step", format_number),
    Field("dense units", "units", format_whole),
)
GAIN = Target(
    "steps/s of erk.prefetch(depth=2) over dataset.prefetch(2)",
    beside("fit-erk-prefetch-2", "fit-dataset-prefetch", lambda one, other: other["ms_per_step"] / one["ms_per_step"]),
    1.4,
)
TF_DATA = Bench(
    "tf-data",
    "ways to read ids into tf.data, and what erk.prefetch does for a table on disk",
    run,
    ("rows", *SIZES, "threads", "rounds", "steps", "timeout_s", "folder"),
    contenders=(*READINGS, FIT),
    targets=(GAIN,),
    workloads=(Workload(rows=1_000_000, features=8, zipf=0.9, batches=250),),
    effort=TfDataEffort(),
)
