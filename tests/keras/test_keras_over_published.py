"""Keras layers over published tables: frozen, trained, saved and loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from published_files import floats, written

ROWS, DIM = 300, 8
BASE = floats("BF16", ROWS, DIM).split(100)
EVERY = np.arange(ROWS)


@pytest.fixture
def base(tmp_path: Path) -> er.FromSafetensors:
    return written(BASE, tmp_path / "base")


def fitted(layer: erk.Embedding, prefetches: bool = False) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int64"),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    model.compile(erk.optimizer(keras.optimizers.Adam(0.1)), "mse")
    ids = np.random.default_rng(0).integers(0, ROWS // 2, (40, 5))
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones((40, 1), np.float32))).batch(8)
    model.fit(erk.prefetch(data, {layer: lambda x, y: x}) if prefetches else data, verbose=0)
    return model


def test_rows_are_those_of_the_files(base: er.FromSafetensors):
    layer = erk.Embedding.from_pretrained(base)
    assert layer(EVERY).dtype == tf.bfloat16
    np.testing.assert_array_equal(np.asarray(layer(EVERY)).astype(np.float32), BASE.rows)
    wide = erk.Embedding.from_pretrained(base, dtype="float32")
    np.testing.assert_array_equal(wide(EVERY), BASE.rows)


@pytest.mark.parametrize("on_disk", [False, True])
def test_training_is_that_over_an_array(on_disk: bool, base: er.FromSafetensors, tmp_path: Path):
    where = {"path": tmp_path / "delta", "memory": "256KiB"} if on_disk else {}
    layer = erk.Embedding.from_pretrained(base, dtype="float32", **where)
    other = erk.Embedding.from_pretrained(BASE.rows, dtype="float32")
    for each in (layer, other):
        fitted(each, prefetches=True)
    np.testing.assert_array_equal(layer(EVERY), other(EVERY))
    assert layer.table.stats()["rows_touched"] == other.table.stats()["rows_touched"] < ROWS
    if on_disk:
        layer.table.commit()
        layer.table.close()


def test_a_model_is_saved_and_loaded(base: er.FromSafetensors, tmp_path: Path):
    model = fitted(erk.Embedding.from_pretrained(base, dtype="float32"))
    model.save(tmp_path / "model.keras")
    rows = np.asarray(model.layers[0](EVERY))
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.layers[0](EVERY), rows)
    assert loaded.layers[0].table.stats()["rows_touched"] == model.layers[0].table.stats()["rows_touched"] < ROWS
    assert (tmp_path / "model.keras").stat().st_size < 200_000


def test_a_model_whose_base_moved(base: er.FromSafetensors, tmp_path: Path):
    model = fitted(erk.Embedding.from_pretrained(base, dtype="float32"))
    model.save(tmp_path / "model.keras")
    rows = np.asarray(model.layers[0](EVERY))
    shutil.move(tmp_path / "base", tmp_path / "moved")
    with pytest.raises(er.TableFileError, match=r"those of .* relocate=\{old path: new path\}\)\."):
        keras.models.load_model(tmp_path / "model.keras")
    loaded = erk.load_model(tmp_path / "model.keras", relocate={base.folder: tmp_path / "moved"})
    np.testing.assert_array_equal(loaded.layers[0](EVERY), rows)
    assert loaded.layers[0].table.spec.init.folder == str(tmp_path / "moved")


def test_float8_is_refused():
    with pytest.raises(er.ArgumentError) as caught:
        erk.Embedding.from_pretrained(np.ones((3, 4), ml_dtypes.float8_e4m3fn))
    assert str(caught.value) == (
        "`weights` of erk.Embedding must be floats of 16 bits or more: got float8_e4m3fn. Read them with their scale "
        "from their file: er.FromSafetensors(folder, tensor)."
    )
