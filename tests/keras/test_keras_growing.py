"""Layers of Keras whose tables get more rows while a model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk
from slow import slow

ROWS, MORE, DIM = 50, 400, 4


def make_model(rows: int | None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    layer = erk.Embedding(rows, DIM, er.Normal(std=0.1), seed=3, **options)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer("adam"), "mse", run_eagerly=True)
    return model


def fit(model: Any, below: int) -> None:
    rng = np.random.default_rng(below)
    model.fit(rng.integers(0, below, (32, 3)), rng.standard_normal((32, 1)), batch_size=8, shuffle=False, verbose=0)


@pytest.mark.parametrize(("rows", "on_disk"), [(MORE, False), *slow((None, True))])
def test_a_grown_layer_trains_and_is_saved_as_one_that_was_made_so(rows: int | None, on_disk: bool, tmp_path: Path):
    grown, made = make_model(ROWS, path=str(tmp_path / "t") if on_disk else None), make_model(rows)
    for model in (grown, made):
        fit(model, ROWS)
    grown.layers[0].grow(rows)
    assert grown.layers[0].input_dim == rows
    for model in (grown, made):
        fit(model, MORE)
    ids = np.random.default_rng(5).integers(0, MORE, (200, 3))
    expected = made.predict(ids, verbose=0)
    np.testing.assert_array_equal(grown.predict(ids, verbose=0), expected)
    grown.save(tmp_path / "model.keras")
    if on_disk:
        grown.layers[0].table.close()
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].input_dim == rows
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), expected)
    loaded.layers[0].table.close()


def test_first_values_keep_the_scale_that_they_had(tmp_path: Path):
    """A name whose numbers follow from the count of rows is not asked again."""
    layer = erk.Embedding(ROWS, DIM, "glorot_uniform", seed=3)
    before = layer.table.spec.init
    layer.grow(MORE)
    assert layer.table.spec.init == before
    again = erk.Embedding.from_config(layer.get_config())
    assert (again.input_dim, again.table.spec.init) == (MORE, before)
    np.testing.assert_array_equal(again(np.arange(MORE)), layer(np.arange(MORE)))
