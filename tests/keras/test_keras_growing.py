"""Layers of Keras whose tables get more rows while a model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk
import same_tables
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


# ---------------------------------------------------------------- checkpoints of fewer rows


def check_same(model: Any, expected: Any) -> None:
    ids = np.arange(MORE)
    for layer, other in zip(model.layers, expected.layers, strict=True):
        if isinstance(layer, erk.Embedding):
            assert layer.input_dim == other.input_dim
            np.testing.assert_array_equal(layer.table.lookup(ids), other.table.lookup(ids))
            same_tables.check_same(layer.table, other.table)
        for weight, like in zip(layer.weights, other.weights, strict=True):
            if "kernel" in weight.path:
                np.testing.assert_array_equal(weight, like)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_of_fewer_rows(on_disk: bool, tmp_path: Path):
    """The model goes on as one that had all rows from the start. Without `grow`, nothing is loaded, or rows go back."""
    path = str(tmp_path / "t") if on_disk else None
    model, file = make_model(ROWS, path=path), tmp_path / ("m.weights.h5" if on_disk else "m.keras")
    fit(model, ROWS)
    model.save_weights(file) if on_disk else model.save(file)
    if on_disk:
        model.layers[0].grow(MORE)
    else:
        model = make_model(MORE)
    fit(model, MORE)
    if not on_disk:
        before = model.layers[0].table.lookup(np.arange(MORE))
        with pytest.raises(ValueError, match=rf"must have rows {MORE}: got {ROWS}\..*Pass grow=True .*erk\.load_wei"):
            model.load_weights(file)
        np.testing.assert_array_equal(model.layers[0].table.lookup(np.arange(MORE)), before)
    erk.load_weights(model, file, grow=True)
    expected = make_model(MORE)
    fit(expected, ROWS)
    check_same(model, expected)
    for each in (model, expected):
        fit(each, MORE)
    check_same(model, expected)
    if on_disk:
        model.load_weights(file)
        assert model.layers[0].input_dim == ROWS  # as it was at that commit
    model.layers[0].table.close()


def test_training_resumes_with_more_rows(tmp_path: Path):
    """As a script that finds a larger vocabulary when it is started again."""
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, ROWS, (32, 3)), rng.standard_normal((32, 1))

    def run(model: Any, more: int, **options: Any) -> None:
        model.fit(ids + more, targets, batch_size=8, shuffle=False, verbose=0, **options)

    model, expected = make_model(ROWS, path=str(tmp_path / "t")), make_model(MORE)
    run(model, 0, callbacks=[erk.TableCheckpoint(tmp_path / "checkpoints")])
    run(expected, 0)
    model.layers[0].table.close()
    model, callback = (
        make_model(ROWS, path=str(tmp_path / "t")),
        erk.TableCheckpoint(tmp_path / "checkpoints", grow=True),
    )
    model.layers[0].grow(MORE)
    run(model, MORE - ROWS, callbacks=[callback], epochs=2)
    run(expected, MORE - ROWS)
    assert callback.step == 4
    check_same(model, expected)
    model.layers[0].table.close()
    assert er.open(tmp_path / "t").rows == MORE
    er.close(tmp_path / "t")


def test_a_file_of_more_rows_says_how_many_had_records(tmp_path: Path):
    large, small = make_model(MORE), make_model(ROWS)
    large.layers[0].table.assign([1, ROWS, MORE - 1], np.ones((3, DIM)))
    large.save(tmp_path / "m.keras")
    with pytest.raises(ValueError, match=rf"grow\({MORE}\)\. 2 rows with records .*shrink\({ROWS}\) cuts them off"):
        erk.load_weights(small, tmp_path / "m.keras", grow=True)
    small.layers[0].grow(MORE)
    small.load_weights(tmp_path / "m.keras")
    assert small.layers[0].shrink(ROWS) == 2
    assert small.layers[0].input_dim == ROWS
    ids = np.arange(ROWS)
    np.testing.assert_array_equal(small.layers[0].table.lookup(ids), large.layers[0].table.lookup(ids))
    fit(small, ROWS)
