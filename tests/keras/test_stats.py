"""`erk.TableStats`: the numbers, where they go; and the spans in a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.frontend.checkpoints import TableNumbers
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
    history = model.fit(ids, y, batch_size=BATCH, epochs=2, callbacks=[TableStats(per_table=True)], verbose=0).history
    assert set(history) == {"loss", "t0/rows", "t0/ram_bytes", "t1/rows", "t1/ram_bytes"} | {f"t0/{k}" for k in OF_DISK}
    for k, each in enumerate((table, in_ram)):
        assert history[f"t{k}/rows"] == [len(np.unique(ids[:, k]))] * 2
        assert history[f"t{k}/ram_bytes"][-1] == each.stats()["bytes_used"]
    assert history["t0/disk_bytes"] == [0, 0]
    first, second = history["t0/hit_rate"]
    assert 0 < first < second == 1
    assert 0 <= history["t0/commit_age_s"][0] < history["t0/commit_age_s"][1] < 600


def test_the_numbers_of_all_tables_are_the_default(table: er.Table, tmp_path: Path):
    others, (ids, y) = er.Group(path=tmp_path / "g.rock"), data(4)
    members = [others.table(f"m{dim}", 1000, dim) for dim in (DIM, 2 * DIM)]  # two pools, with one commit
    model, stats = model_of(table, er.Table(1000, DIM), *members), [TableStats(), TableStats(per_table=True)]
    history = model.fit(ids, y, batch_size=BATCH, epochs=2, callbacks=stats, verbose=0).history
    assert {name for name in history if "tables/" in name} == {f"tables/{k}" for k in ("rows", "ram_bytes", *OF_DISK)}
    for name in ("rows", "ram_bytes"):
        assert history[f"tables/{name}"] == np.sum([history[f"t{k}/{name}"] for k in range(4)], 0).tolist()
    first, second = history["tables/hit_rate"]
    assert first == pytest.approx(np.mean([history[f"t{k}/hit_rate"][0] for k in (0, 2, 3)]), abs=0.05)
    assert 0 < first < second == 1
    names = [("one", table), ("two", members[0]), ("three", members[1])]
    table.commit()
    oldest = datetime.now(UTC) - datetime.fromisoformat(others.commits()[-1]["time"])
    assert TableNumbers().of(names, per_table=False)["tables/commit_age_s"] >= oldest.total_seconds()
    others.commit()
    numbers = TableNumbers().of(names, per_table=False)
    assert numbers["tables/disk_bytes"] == table.stats()["disk_bytes"] + others.stats()["disk_bytes"] > 0
    others.close()


def test_the_age_is_that_of_the_last_commit(table: er.Table):
    class Commits(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                table.commit()

    history = model_of(table).fit(*data(), epochs=2, callbacks=[Commits(), TableStats()], verbose=0).history
    ages = history["tables/commit_age_s"]
    assert ages[1] < ages[0]
    assert history["tables/disk_bytes"][1] == table.stats()["disk_bytes"] > 0


def test_layers_on_one_table_count_once(table: er.Table):
    both = [TableStats(), TableStats(per_table=True)]
    history = model_of(table, table).fit(*data(2), callbacks=both, verbose=0).history
    assert {name.split("/")[0] for name in history if "/" in name} == {"tables", "t0"}
    assert history["tables/rows"] == history["t0/rows"]


def test_between_epochs(table: er.Table):
    seen: list[Any] = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append("tables/rows" in (logs or {}))

    model_of(table).fit(*data(), batch_size=BATCH, callbacks=[TableStats(every=3), Sees()], verbose=0)
    assert seen == [k % 3 == 2 for k in range(STEPS)]


def test_scalars_without_tensorboard(table: er.Table, tmp_path: Path):
    stats = TableStats(every=4, log_dir=tmp_path / "log")
    history = model_of(table).fit(*data(), batch_size=BATCH, epochs=2, callbacks=[stats], verbose=0).history
    found = scalars(tmp_path / "log")
    names = {"rows", "ram_bytes", *OF_DISK}
    assert set(found) == {f"{period}_tables/{name}" for period in ("batch", "epoch") for name in names}
    assert list(found["epoch_tables/rows"].values()) == history["tables/rows"]
    assert sorted(found["batch_tables/rows"]) == [4, 8, 12, 16]


def test_scalars_of_keras_own_callback(table: er.Table, tmp_path: Path):
    callbacks = [TableStats(every=1), keras.callbacks.TensorBoard(str(tmp_path / "log"), update_freq="batch")]
    model_of(table).fit(*data(), batch_size=BATCH, callbacks=callbacks, verbose=0)
    found = scalars(tmp_path / "log" / "train")
    assert len(found["batch_tables/rows"]) == STEPS
    assert "epoch_tables/hit_rate" in found


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
