"""`erk.TableStats`: the numbers, where they go; and the spans in a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.keras.prefetch import prefetch
from embedrock.keras.stats import TableStats

STEPS, BATCH, DIM = 8, 16, 4
OF_DISK = {"disk_bytes", "hit_rate", "commit_age_s"}


@pytest.fixture
def table(tmp_path: Path) -> Iterator[er.Table]:
    with er.Table(1000, DIM, path=tmp_path / "t.rock") as table:
        yield table
        table.commit()


def model_of(*tables: er.Table) -> Any:
    inputs: Any = keras.Input((len(tables),), dtype="int64")
    rows = [erk.Embedding(table, name=f"t{k}")(inputs[:, k]) for k, table in enumerate(tables)]
    outputs = keras.layers.Dense(1)(keras.layers.concatenate(rows) if len(rows) > 1 else rows[0])
    model = keras.Model(inputs, outputs)
    model.compile(erk.optimizer("sgd"), "mse")
    return model


def data(columns: int = 1) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(3).integers(0, 1000, (STEPS * BATCH, columns))
    return ids, np.zeros((STEPS * BATCH, 1), np.float32)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Read what TensorBoard would read."""
    found: dict[str, dict[int, float]] = {}
    for path in folder.rglob("*tfevents*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    found.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    return found


def test_the_numbers_are_those_of_the_tables(table: er.Table):
    in_ram, (ids, y) = er.Table(1000, DIM), data(2)
    model = model_of(table, in_ram)
    history = model.fit(ids, y, batch_size=BATCH, epochs=2, callbacks=[TableStats()], verbose=0).history
    assert set(history) == {"loss", "t0/rows", "t0/ram_bytes", "t1/rows", "t1/ram_bytes"} | {f"t0/{k}" for k in OF_DISK}
    for k, each in enumerate((table, in_ram)):
        assert history[f"t{k}/rows"] == [len(np.unique(ids[:, k]))] * 2
        assert history[f"t{k}/ram_bytes"][-1] == each.stats()["bytes_used"]
    assert history["t0/disk_bytes"] == [0, 0]
    first, second = history["t0/hit_rate"]
    assert 0 < first < second == 1
    assert 0 <= history["t0/commit_age_s"][0] < history["t0/commit_age_s"][1] < 600


def test_the_age_is_that_of_the_last_commit(table: er.Table):
    class Commits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                table.commit()

    history = model_of(table).fit(*data(), epochs=2, callbacks=[Commits(), TableStats()], verbose=0).history
    ages = history["t0/commit_age_s"]
    assert ages[1] < ages[0]
    assert history["t0/disk_bytes"][1] == table.stats()["disk_bytes"] > 0


def test_layers_on_one_table_count_once(table: er.Table):
    history = model_of(table, table).fit(*data(2), callbacks=[TableStats()], verbose=0).history
    assert {name.split("/")[0] for name in history if "/" in name} == {"t0"}


def test_between_epochs(table: er.Table):
    seen: list[Any] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append("t0/rows" in (logs or {}))

    model_of(table).fit(*data(), batch_size=BATCH, callbacks=[TableStats(every=3), Sees()], verbose=0)
    assert seen == [k % 3 == 2 for k in range(STEPS)]


def test_scalars_without_tensorboard(table: er.Table, tmp_path: Path):
    stats = TableStats(every=4, log_dir=tmp_path / "log")
    history = model_of(table).fit(*data(), batch_size=BATCH, epochs=2, callbacks=[stats], verbose=0).history
    found = scalars(tmp_path / "log")
    names = {"rows", "ram_bytes", *OF_DISK}
    assert set(found) == {f"{period}_t0/{name}" for period in ("batch", "epoch") for name in names}
    assert list(found["epoch_t0/rows"].values()) == history["t0/rows"]
    assert sorted(found["batch_t0/rows"]) == [4, 8, 12, 16]


def test_scalars_of_keras_own_callback(table: er.Table, tmp_path: Path):
    callbacks = [TableStats(every=1), keras.callbacks.TensorBoard(str(tmp_path / "log"), update_freq="batch")]
    model_of(table).fit(*data(), batch_size=BATCH, callbacks=callbacks, verbose=0)
    found = scalars(tmp_path / "log" / "train")
    assert len(found["batch_t0/rows"]) == STEPS
    assert "epoch_t0/hit_rate" in found


def test_a_model_without_tables():
    model: Any = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    ids, y = data()
    assert set(model.fit(ids, y, callbacks=[TableStats(every=1)], verbose=0).history) == {"loss"}


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "epoch"])
def test_what_it_refuses(every: Any):
    with pytest.raises(er.ArgumentError, match="must be a number of batches, or None: got"):
        TableStats(every)


def test_spans_are_in_the_trace_of_a_profiler(table: er.Table, tmp_path: Path):
    model, trace = model_of(table), tmp_path / "trace"
    source = prefetch(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH), {table: lambda x, y: x})
    tf.profiler.experimental.start(str(trace))
    try:
        model.fit(source, verbose=0)
    finally:
        tf.profiler.experimental.stop()
    found = b"".join(path.read_bytes() for path in trace.rglob("*.xplane.pb"))
    for work in ("lookup", "fetch", "sum", "step"):
        assert b"embedrock." + work.encode() in found
