"""`time=` of Keras' layers: a column of the batch, which rides with the gradients to the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
tf = pytest.importorskip("tensorflow")

import embedrock as er  # noqa: E402
import embedrock.keras as erk  # noqa: E402
from embedrock.table.table import rows_of  # noqa: E402
from slow import slow  # noqa: E402

DAY, COUNT, BATCH = 86_400, 96, 4
IDS = np.stack([np.arange(COUNT), np.full(COUNT, 1000)], 1)
TIMES = np.arange(COUNT, dtype="int64") * DAY


def eviction() -> er.Eviction:
    return er.Eviction(idle="30d")


def embedding(kind: Any = erk.Embedding, **options: Any) -> Any:
    return kind(None, 2, embeddings_initializer="zeros", eviction=eviction(), **options)


def clock_of(table: er.Table) -> float:
    lifecycle = rows_of(table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    return lifecycle.usage.clock.read.now


def model_of(rows: Any, dtype: str = "int64") -> Any:
    ids, time = keras.Input((2,), dtype="int64"), keras.Input((), dtype=dtype, name="time")
    out = keras.ops.sum(keras.layers.Flatten()(rows(ids, time=time)), axis=1)
    return keras.Model([ids, time], out)


def stepped_by_hand(every: int = 1) -> er.Table:
    table = er.Table(None, 2, rule=er.SGD(lr=1.0), init=er.Zeros(), eviction=eviction())
    for start in range(0, COUNT - COUNT % (BATCH * every), BATCH * every):
        own = slice(start, start + BATCH * every)
        table.update(IDS[own], np.ones((BATCH * every, 2, 2), np.float32), time=TIMES[own])
    return table


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clipnorm": 1e9},
    "accumulated": {"gradient_accumulation_steps": 2},
    "both": {"global_clipnorm": 1e9, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("eager", [False, *slow(True)])
@pytest.mark.parametrize("kind", [erk.Embedding, *slow(erk.EmbeddingBag)])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_fit_evicts_by_the_time_of_the_event(how: str, kind: Any, eager: bool):
    rows = embedding(kind)
    model = model_of(rows)
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0, **OPTIMIZERS[how])), loss=lambda _, y: y, run_eagerly=eager)
    model.fit([IDS, TIMES], np.ones(COUNT), batch_size=BATCH, shuffle=False, verbose=0)
    table = stepped_by_hand(OPTIMIZERS[how].get("gradient_accumulation_steps", 1))
    assert rows.table.export()[0].tolist() == table.export()[0].tolist()
    assert rows.table.stats()["evicted"] == table.stats()["evicted"] > 50
    assert clock_of(rows.table) == clock_of(table) == (COUNT - 1) * DAY
    model.evaluate([IDS, TIMES + 999 * DAY], np.ones(COUNT), verbose=0)
    model.predict([IDS, TIMES + 999 * DAY], verbose=0)
    assert clock_of(rows.table) == (COUNT - 1) * DAY
    assert rows.table.export()[0].tolist() == table.export()[0].tolist()


def test_outside_of_programs_times_may_have_any_form():
    rows, optimizer = embedding(), erk.optimizer(keras.optimizers.SGD(1.0))
    forms = [DAY, 2.0 * DAY + 0.5, np.array([np.datetime64("1970-01-04")]), tf.constant([4 * DAY], tf.int64),
             tf.constant(5.0 * DAY, tf.float64), np.array([[1.0], [6.0]]) * DAY,
             tf.ragged.constant([[7 * DAY], [], [1, 2]], dtype=tf.int64)]  # fmt: skip
    for day, form in enumerate(forms, 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(np.array([day]), time=form))
        rows(np.array([99]), time=90 * DAY)  # without a gradient
        optimizer.apply_gradients(zip(tape.gradient(loss, [rows.rows]), [rows.rows], strict=True))
        assert clock_of(rows.table) == day * DAY
    rows(np.array([1]), time=None)


def test_a_half_precision_policy_leaves_times_alone():
    rows = embedding(dtype=keras.DTypePolicy("mixed_bfloat16"))
    model = model_of(rows)
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss=lambda _, y: y)
    model.fit([IDS[:4], TIMES[:4] + 1_700_000_003], np.ones(4), verbose=0)
    assert clock_of(rows.table) == 3 * DAY + 1_700_000_003


@pytest.mark.parametrize("fused", [False, True])
def test_a_collection_has_one_time_for_its_tables(fused: bool):
    layers = {name: embedding(name=name) for name in "ab"}
    ids, time = {name: keras.Input((), dtype="int64") for name in "ab"}, keras.Input((), dtype="int64")
    if fused:
        found = {name: layer(ids[name], time=time) for name, layer in layers.items()}
    else:
        found = erk.EmbeddingCollection(layers)(ids, time=time)
    out = keras.ops.sum(found["a"] * 1.0, axis=-1) + keras.ops.sum(found["b"], axis=-1)
    model = keras.Model([*ids.values(), time], out)
    model = erk.fuse(model) if fused else model
    assert sum(isinstance(layer, erk.EmbeddingCollection) for layer in model.layers) == 1
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss=lambda _, y: y)
    model.fit([np.arange(4), np.arange(4), TIMES[:4]], np.ones(4), verbose=0)
    assert [clock_of(layer.table) for layer in layers.values()] == [3 * DAY, 3 * DAY]


def test_lookups_with_different_times_are_not_fused():
    layers = [embedding() for _ in range(4)]
    ids, times = keras.Input((), dtype="int64"), [keras.Input((), dtype="int64") for _ in range(2)]
    found = [layer(ids, time=time) for layer, time in zip(layers, (times[0], times[0], times[1], None), strict=True)]
    model = erk.fuse(keras.Model([ids, *times], keras.ops.sum(keras.layers.Add()(found), axis=-1)))
    assert sorted(type(layer).__name__ for layer in model.layers if "Embedding" in type(layer).__name__) == [
        "Embedding", "Embedding", "EmbeddingCollection"]  # fmt: skip
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss=lambda _, y: y)
    model.fit([np.arange(4), TIMES[:4], TIMES[:4] + 9 * DAY], np.ones(4), verbose=0)
    assert [clock_of(layer.table) for layer in layers[:3]] == [3 * DAY, 3 * DAY, 12 * DAY]


def test_a_file_of_a_model_has_the_clock(tmp_path: Path):
    rows = embedding()
    model = model_of(rows)
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss="mse")
    model.fit([IDS[:50], TIMES[:50]], np.ones(50), batch_size=BATCH, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    other = next(layer for layer in again.layers if isinstance(layer, erk.Embedding))
    for each in (model, again):
        each.fit([IDS[50:], TIMES[50:]], np.ones(COUNT - 50), batch_size=BATCH, shuffle=False, verbose=0)
    assert other.table.export()[0].tolist() == rows.table.export()[0].tolist()
    assert clock_of(other.table) == clock_of(rows.table) == (COUNT - 1) * DAY
    assert other.table.stats()["evicted"] == rows.table.stats()["evicted"] > 50


def test_absurd_times_are_refused_and_nothing_changes():
    rows = embedding()
    model = model_of(rows)
    model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss=lambda _, y: y)
    model.fit([IDS[:4], TIMES[:4]], np.ones(4), verbose=0)
    for times, match in (
        (np.full(4, 1_735_689_600_000), "milliseconds, pass time / 1000"),
        (TIMES[:4] - 99, "at least 0"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=match):
            model.fit([IDS[4:8], times], np.ones(4), verbose=0)
        assert rows.table.export()[0].tolist() == [0, 1, 2, 3, 1000]
    assert (rows.table.steps, clock_of(rows.table)) == (1, 3 * DAY)
    with pytest.raises(er.ArgumentError, match=r"`time` of .* must be seconds since 1970, or dates .* got dtype <U"):
        rows(IDS[:4], time="2025-01-01")
