"""First values of layers that were given no seed: `keras.utils.set_random_seed` decides them, as in Keras."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import embedrock as er
import embedrock.keras as erk

IDS = np.arange(100)


def towers(embedding: Any = erk.Embedding, **options: Any) -> Any:
    user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
    dot = keras.layers.Dot(1)([embedding(100, 16, name="user", **options)(user), embedding(100, 16, name="item")(item)])
    return keras.Model([user, item], keras.layers.Dense(1, name="head")(dot))


def seeded(seed: int, **options: Any) -> Any:
    keras.utils.set_random_seed(seed)
    return towers(**options)


def rows(model: Any) -> list[np.ndarray]:
    return [np.asarray(model.get_layer(name)(IDS)) for name in ("user", "item")]


def contents(model: Any) -> list[np.ndarray]:
    return [*rows(model), np.asarray(model.get_layer("head").kernel)]


def test_layers_of_the_same_dim_start_apart():
    keras.utils.set_random_seed(0)
    first = np.stack([np.asarray(erk.Embedding(100, 8)(IDS)) for _ in range(26)])
    assert len(np.unique(first)) > 0.999 * first.size


@pytest.mark.parametrize("drawn", [er.Normal(), keras.initializers.RandomNormal(stddev=1.0)])
def test_layers_that_share_an_initializer_start_apart(drawn: Any):
    one, other = (np.asarray(erk.Embedding(100, 8, drawn)(IDS)) for _ in range(2))
    assert not np.isin(one, other).any()


@pytest.mark.parametrize("embedding", [keras.layers.Embedding, erk.Embedding])
def test_the_item_ranked_first_for_a_user_is_not_that_of_the_same_id(embedding: Any):
    keras.utils.set_random_seed(0)
    user, item = (np.asarray(embedding(1000, 16)(np.arange(1000))) for _ in range(2))
    assert ((user @ item.T).argmax(1) == np.arange(1000)).mean() < 0.02


def test_set_random_seed_repeats_a_model():
    for a, b, c in zip(contents(seeded(0)), contents(seeded(0)), contents(seeded(1)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_dense_weights_start_as_beside_layers_of_keras():
    np.testing.assert_array_equal(contents(seeded(0))[2], contents(seeded(0, embedding=keras.layers.Embedding))[2])


def test_a_layer_draws_as_much_whether_its_table_is_there_or_not(tmp_path: Path):
    made = seeded(0, path=tmp_path / "user.rock")
    expected = contents(made)
    made.get_layer("user").table.close()
    again = seeded(0, path=tmp_path / "user.rock")
    for a, b in zip(contents(again), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    again.get_layer("user").table.close()
    other = seeded(1, path=tmp_path / "user.rock")  # not the seed that it would draw now: no complaint
    np.testing.assert_array_equal(rows(other)[0], expected[0])
    other.get_layer("user").table.close()


def test_a_table_that_pytorch_made_is_opened_with_what_it_has(tmp_path: Path):
    with er.Table(100, 16, path=tmp_path / "user.rock") as made:  # Normal(0, 1), no Keras initializer
        first = made.lookup(IDS)
    layer = erk.Embedding(100, 16, path=tmp_path / "user.rock")
    np.testing.assert_array_equal(np.asarray(layer(IDS)), first)
    layer.table.close()
    with pytest.raises(er.TableFileError, match="init"):
        erk.Embedding(100, 16, "uniform", path=tmp_path / "user.rock")


def test_a_file_brings_the_seed(tmp_path: Path):
    saved = seeded(0)
    saved.compile(erk.optimizer("adam"), "mse")
    saved.train_on_batch([np.array([1, 2]), np.array([3, 4])], np.zeros((2, 1)))
    saved.save(tmp_path / "model.keras")
    keras.utils.set_random_seed(1)
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(contents(saved), contents(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_config_has_the_seed_that_was_given_and_a_clone_draws_its_own():
    assert erk.Embedding(9, 4, seed=3).get_config()["seed"] == 3
    assert erk.Embedding(9, 4).get_config()["seed"] is None
    model = seeded(0)
    for a, b in zip(rows(model), rows(keras.models.clone_model(model)), strict=True):
        assert not np.array_equal(a, b)  # as those of keras.layers.Embedding
    given = erk.Embedding(9, 4, seed=3)
    same = erk.Embedding.from_config(given.get_config())
    np.testing.assert_array_equal(np.asarray(given(IDS[:9])), np.asarray(same(IDS[:9])))


@pytest.mark.parametrize("drawn", [None, "uniform", "glorot_uniform", {"class_name": "RandomNormal", "config": {}}])
def test_describing_a_layer_draws_nothing(drawn: Any):
    layer = erk.Embedding(9, 4, drawn)
    random.seed(0)
    expected = random.random()
    random.seed(0)
    config = layer.get_config()
    assert random.random() == expected
    assert erk.Embedding.from_config(config).table.spec.init == layer.table.spec.init


def test_a_seed_of_the_layer_or_of_its_initializer():
    brought = keras.initializers.RandomUniform(seed=5)
    assert erk.Embedding(9, 4, seed=3).table.spec.seed == 3
    assert erk.Embedding(9, 4, brought).table.spec.seed == 5
    assert erk.Embedding(9, 4, brought, seed=3).table.spec.seed == 3
    assert erk.Embedding(9, 4, brought, seed=0).table.spec.seed == 5  # as files of 0.1 have it
    assert erk.Embedding(9, 4, keras.initializers.RandomUniform(seed=0)).table.spec.seed == 0
    assert erk.Embedding(9, 4, seed=0).table.spec.seed == 0


def test_a_mirrored_strategy_has_one_seed():
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    expected = rows(towers())
    keras.utils.set_random_seed(0)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        for a, b in zip(rows(towers()), expected, strict=True):
            np.testing.assert_array_equal(a, b)
