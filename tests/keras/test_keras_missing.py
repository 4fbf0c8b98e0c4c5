"""`missing=` of Keras' layers and of exports: rows that are not there, where nothing trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, IdError, UnsupportedError
from slow import slow

ROWS, DIM = 50, 4
ROW = [0.5, -1.0, 2.0, 3.0]
KNOWN = [3, 4, 14]
IDS = np.array([[3, 14, 15], [9, 4, 0]])
CHOICES: list[tuple[Any, list[float]]] = [("zeros", [0.0] * DIM), (ROW, ROW)]
TRAINS = r"erk\.Embedding\(50, 4\) has missing='zeros', and trains: a row would be read as one value"


def filled(layer: Any) -> Any:
    layer.table.assign(KNOWN, np.arange(DIM * len(KNOWN)).reshape(-1, DIM) + 1.0)
    return layer


def weight(layer: Any, row: Any) -> np.ndarray:
    """Return all rows as a lookup must see them."""
    found = np.tile(np.asarray(row, np.float32), (ROWS, 1))
    found[KNOWN] = layer.table.lookup(KNOWN)
    return found


def model_of(layer: Any) -> Any:
    head = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), head])
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    return model


@pytest.mark.parametrize(("missing", "row"), CHOICES)
def test_rows_and_bags(missing: Any, row: list[float]):
    layer = filled(erk.Embedding(ROWS, DIM, missing=missing))
    np.testing.assert_array_equal(layer(IDS, training=False), weight(layer, row)[IDS])
    np.testing.assert_array_equal(model_of(layer).predict(IDS, verbose=0)[:, 0], weight(layer, row)[IDS].sum((1, 2)))
    assert len(layer.table) == len(KNOWN)
    bag = filled(erk.EmbeddingBag(ROWS, DIM, mode="mean", missing=missing))
    np.testing.assert_allclose(bag(IDS, training=False), weight(bag, row)[IDS].mean(1), rtol=1e-6)
    largest = filled(erk.EmbeddingBag(ROWS, DIM, mode="max", missing=missing))
    np.testing.assert_array_equal(largest(IDS, training=False), weight(largest, row)[IDS].max(1))


def test_training_is_refused_and_nothing_changes():
    layer = filled(erk.Embedding(ROWS, DIM, missing="zeros"))
    model = model_of(layer)
    with pytest.raises(tf.errors.OpError, match=TRAINS):
        model.fit(IDS, np.ones(2), verbose=0)
    assert (len(layer.table), layer.table.steps) == (len(KNOWN), 0)
    layer.missing = None
    model.fit(IDS, np.ones(2), verbose=0)
    assert layer.table.contains(IDS).all()
    layer.missing = "zeros"  # programs that were traced before see it
    with pytest.raises(tf.errors.OpError, match=TRAINS):
        model.fit(IDS, np.ones(2), verbose=0)
    with pytest.raises(UnsupportedError, match=TRAINS), tf.GradientTape() as tape:  # whatever `training` says
        tape.gradient(tf.reduce_sum(model(IDS)), model.trainable_variables)
    assert layer.table.steps == 1
    layer.trainable = False
    model.compile(optimizer=erk.optimizer("sgd"), loss="mse")
    model.fit(IDS, np.ones(2), verbose=0)
    assert layer.table.steps == 1


def test_it_can_be_set_at_any_time_and_is_saved(tmp_path: Path):
    layer = filled(erk.Embedding(ROWS, DIM))
    model = model_of(layer)
    first = model.predict(IDS, verbose=0)
    layer.missing = ROW
    np.testing.assert_array_equal(model.predict(IDS, verbose=0)[:, 0], weight(layer, ROW)[IDS].sum((1, 2)))
    assert layer.get_config()["missing"] == ROW
    model.save(tmp_path / "model.keras")
    loaded = erk.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0))
    layer.missing = "first"
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), first)
    layer.missing = "raise"
    with pytest.raises(tf.errors.OpError, match=r"demands: 3 ids without one, \[0, 9, 15\]"):
        model.predict(IDS, verbose=0)


@pytest.mark.parametrize("kind", [erk.Embedding, erk.EmbeddingBag])
def test_what_is_refused(kind: Any):
    with pytest.raises(ArgumentError, match=r"`missing` of .*\(50, 4\) must be one of first, zeros"):
        kind(ROWS, DIM, missing="nothing")
    with pytest.raises(ArgumentError, match="has no default row"):
        kind(ROWS, DIM, missing="shared")
    with pytest.raises(ArgumentError, match=r"must be a row of shape \(4,\): got one of shape \(2,\)"):
        kind(ROWS, DIM, missing=[1.0, 2.0])


def test_padding_is_there(tmp_path: Path):
    layer = filled(erk.Embedding(ROWS, DIM, er.Constant(7.0), mask_zero=True, missing="raise"))
    assert layer(np.array([[0]])).numpy()[0, 0, 0] == 7.0
    with pytest.raises(IdError, match=r"1 id without one, \[9\]"):
        layer(np.array([[0, 9]]))
    layer.missing = "zeros"
    assert layer(np.array([[0, 9]])).numpy()[0, :, 0].tolist() == [7.0, 0.0]
    bag = erk.EmbeddingBag(ROWS, DIM, mask_zero=True, missing="raise")
    assert bag(np.array([[0, 0]])).numpy().tolist() == [[0.0] * DIM]


def test_features_of_a_group():
    group = er.Group()
    layers = {
        name: filled(erk.Embedding(ROWS, DIM, er.Constant(7.0), group=group, name=name, missing=missing))
        for name, missing in (("a", "zeros"), ("b", None), ("c", "zeros"), ("d", ROW))
    }
    found = erk.EmbeddingCollection(layers)(dict.fromkeys(layers, np.array([9])), training=False)
    assert {name: float(rows[0, 0]) for name, rows in found.items()} == {"a": 0.0, "b": 7.0, "c": 0.0, "d": 0.5}


def test_layers_of_one_program_agree():
    table = er.Table(ROWS, DIM, name="shared_rows")
    first, second = (erk.Embedding(table) for _ in range(2))
    model = erk.EmbeddingCollection({"a": first, "b": second})
    program = tf.function(lambda ids: model({"a": ids, "b": ids}, training=False))
    ids = tf.constant([9])
    program(ids)
    first.missing = "zeros"
    with pytest.raises(tf.errors.OpError, match=r"that one call looks up in .* must have one `missing`: got 'zero"):
        program(ids)
    second.missing = "zeros"
    assert [rows.numpy().tolist() for rows in program(ids).values()] == [[[0.0] * DIM]] * 2


# ---------------------------------------------------------------- SavedModels


@pytest.mark.parametrize(
    ("missing", "by_layer", "whole"),
    [
        *(("zeros", False, None), ("zeros", True, 1), (ROW, True, None), (ROW, False, 1)),
        *slow(("zeros", False, 1), ("zeros", True, None), (ROW, True, 1), (ROW, False, None)),
    ],
)
def test_exports(whole: int | None, by_layer: bool, missing: Any, tmp_path: Path):
    layer = filled(erk.Embedding(ROWS, DIM, er.Normal(), mask_zero=True, missing=missing if by_layer else None))
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer])
    more = {} if by_layer else {"missing": missing}
    erk.export(model, tmp_path / "model", whole_bytes=whole, **more)
    layer.missing = missing
    served = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(served.serve(IDS), model(IDS, training=False))


def test_exports_that_raise(tmp_path: Path):
    layer = filled(erk.Embedding(ROWS, DIM, mask_zero=True))
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer])
    erk.export(model, tmp_path / "model", missing="raise")
    served = tf.saved_model.load(str(tmp_path / "model"))
    ids = np.array([[3, 14, 0]])  # with padding
    np.testing.assert_array_equal(served.serve(ids), model(ids, training=False))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have rows, as missing=") as got:
        served.serve(np.array([[3, 14, 0], [4, 15, 3]]))
    assert "[15] [at position] [4]" in str(got.value)
    empty = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(ROWS, DIM)])
    erk.export(empty, tmp_path / "empty", missing="raise")
    served = tf.saved_model.load(str(tmp_path / "empty"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have rows"):
        served.serve(IDS)


def test_two_layers_on_one_table_are_exported_by_their_choices(tmp_path: Path):
    table = er.Table(ROWS, DIM, name="of_both")
    ids = keras.Input((3,), dtype="int64")
    layers = [erk.Embedding(table, missing=missing) for missing in ("zeros", ROW)]
    model = keras.Model(ids, [layer(ids) for layer in layers])
    erk.export(model, tmp_path / "model")
    served = tf.saved_model.load(str(tmp_path / "model"))
    found = served.serve(IDS)
    assert [rows[0, 0].numpy().tolist() for rows in found] == [[0.0] * DIM, ROW]


def test_exports_that_cannot_be(tmp_path: Path):
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(ROWS, DIM)])
    for missing, text in (("shared", "has no default row"), ("x", r"`missing` of erk\.export"), ([1.0], "of shape")):
        with pytest.raises(ArgumentError, match=text):
            erk.export(model, tmp_path / "model", missing=missing)
    with pytest.raises(ArgumentError, match=r"`missing` of erk\.export cannot go with dependency="):
        erk.export(model, tmp_path / "model", missing="zeros", dependency="embedrock")
    assert not (tmp_path / "model").exists()


def test_a_saved_model_over_a_reader_keeps_its_choice(tmp_path: Path):
    with er.Table(ROWS, DIM, path=tmp_path / "rows", rule=er.SGD()) as table:
        table.assign(KNOWN, np.ones((3, DIM)))
        table.commit(name="served")
    reader = er.open(tmp_path / "rows", mode="r", missing=ROW)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), erk.Embedding(reader, trainable=False)])
    assert model(IDS)[0, 2].numpy().tolist() == ROW
    erk.export(model, tmp_path / "exported")
    served = tf.saved_model.load(str(tmp_path / "exported"))
    assert served.serve(IDS)[0, 2].numpy().tolist() == ROW
    model.save(tmp_path / "model.keras")
    loaded = erk.load_model(tmp_path / "model.keras", mode="r")
    assert loaded(IDS)[0, 2].numpy().tolist() == ROW
    reader.close()
