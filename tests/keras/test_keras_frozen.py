"""Frozen rows of Keras' layers, by all optimizers, saved with the model, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import UnsupportedError

ROWS, DIM = 50, 4
FROZEN: Any = [3, range(10, 20)]
RANGES = [[3, 4], [10, 20]]
EVERY, STAYS = np.arange(ROWS), np.array([3, *range(10, 20)])


def model_of(**options: Any) -> tuple[keras.Model, Any]:
    layer = erk.Embedding(ROWS, DIM, frozen=FROZEN, **options)
    layers = [keras.Input((5,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers), layer


def fit(model: keras.Model, optimizer: Any) -> None:
    rng = np.random.default_rng(0)
    model.compile(erk.optimizer(optimizer), "mse")
    model.fit(rng.integers(0, ROWS, (64, 5)), rng.standard_normal((64, 1)), epochs=2, verbose=0)


PENALTIES = {"embeddings_regularizer": "l2", "embeddings_constraint": keras.constraints.MaxNorm(0.01, axis=1)}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("sgd", {}),
        ("adam", {}),
        ("rmsprop", {}),
        ("adagrad", PENALTIES),
        (keras.optimizers.SGD(0.1, momentum=0.9), {}),
        ("adamw", {"rule": er.AdamW(weight_decay=0.5)}),
        ("adam", {"rule": er.Adam(), **PENALTIES}),
    ],
    ids=["sgd", "adam", "rmsprop", "adagrad, penalties", "momentum", "lazy adamw", "lazy adam, penalties"],
)
def test_no_optimizer_moves_them(optimizer: Any, options: dict[str, Any]):
    model, layer = model_of(**options)
    first = layer.table.lookup(EVERY)
    fit(model, optimizer)
    stays = (layer.table.lookup(EVERY) == first).all(1)
    assert np.flatnonzero(stays).tolist() == STAYS.tolist()


def test_gradients_of_other_rows_are_those_without_frozen_ones():
    layer, plain = erk.Embedding(ROWS, DIM, frozen=FROZEN, seed=1), erk.Embedding(ROWS, DIM, seed=1)
    ids = tf.constant([[3, 5, 3], [11, 5, 6]])
    found = []
    for each in (layer, plain):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(each(ids) ** 2)
        slices = tape.gradient(loss, each.trainable_variables)[0]
        found.append(dict(zip(slices.indices.numpy().tolist(), slices.values.numpy().tolist(), strict=True)))
    assert found[0].keys() == {5, 6}
    assert found[0] == {row: found[1][row] for row in (5, 6)}


def test_a_rule_that_moves_every_row_is_refused_with_a_remedy():
    model, layer = model_of()
    told = r"erk.Embedding\(50, 4\): `frozen` rows cannot stay under AdamW.*in the layer, rule=er.AdamW\(\)"
    with pytest.raises(UnsupportedError, match=told):
        fit(model, "adamw")
    assert layer.table.steps == 0


def test_they_are_saved_with_the_model(tmp_path: Path):
    model, layer = model_of()
    assert layer.frozen == FROZEN
    fit(model, "adam")
    model.save(tmp_path / "model.keras")
    loaded: Any = erk.load_model(tmp_path / "model.keras")
    made: Any = keras.Sequential.from_config(model.get_config())
    for each in (loaded, made):
        assert each.layers[0].table.spec.frozen.ranges == RANGES
        assert each.layers[0].get_config()["frozen"] == {"ranges": RANGES}
    first = loaded.layers[0].table.lookup(EVERY)
    np.testing.assert_array_equal(first, layer.table.lookup(EVERY))
    fit(loaded, "adam")
    np.testing.assert_array_equal(loaded.layers[0].table.lookup(STAYS), first[STAYS])


def test_an_export_has_frozen_rows_without_records(tmp_path: Path):
    table = er.Table(None, DIM, frozen=[3, range(10, 13)], seed=0)
    table.assign([12, 30], np.ones((2, DIM)))
    model = keras.Sequential([keras.Input((5,), dtype="int64"), erk.Embedding(table)])
    erk.export(model, tmp_path / "served", missing="zeros")
    ids = np.array([[3, 10, 12, 1, 30]])
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    served = loaded.serve(ids)
    np.testing.assert_array_equal(served[0], table.lookup(ids[0], missing="zeros"))
    assert np.flatnonzero((served[0] == 0).numpy().all(1)).tolist() == [3]
    many = er.Table(None, DIM, frozen=range(10**6))
    model = keras.Sequential([keras.Input((5,), dtype="int64"), erk.Embedding(many)])
    with pytest.raises(UnsupportedError, match=r"1,000,000 frozen rows of .*, which has room for 65,536"):
        erk.export(model, tmp_path / "many", missing="zeros")
    assert not (tmp_path / "many").exists()
