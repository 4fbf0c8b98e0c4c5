"""Layers of one group: looked up, summed and stepped in one go, to the bits of layers alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, NonFiniteGradientError, UnsupportedError
from embedrock.table import batches as table_batches
from slow import slow

SIZES = {"users": 60, "items": 40, "tags": 30, "words": None, "wide": 20}


def layers(group: er.Group | None, **options: Any) -> dict[str, Any]:
    """Rows, sums and means of two dims, of open ids, and a bag whose maxima no group reads."""
    made: dict[str, Any] = {}
    for seed, (name, rows) in enumerate(SIZES.items()):
        kind, dim = erk.EmbeddingBag if name in ("tags", "wide") else erk.Embedding, 6 if name == "wide" else 4
        of_bags = {"mode": "max" if name == "wide" else "mean", "mask_zero": True} if kind is erk.EmbeddingBag else {}
        made[name] = kind(rows, dim, name=name, group=group, seed=seed, **of_bags, **options)
    return made


def model_of(rows: dict[str, Any], optimizer: Any) -> Any:
    inputs = {name: keras.Input((3,), dtype="int64", name=name) for name in rows}
    inputs["more"] = keras.Input((2,), dtype="int64", name="more")  # another feature of items
    asked: dict[str, Any] = {**rows, "more": rows["items"]}
    found = erk.EmbeddingCollection(asked)(inputs)
    flat = [keras.layers.Flatten()(found[name]) for name in asked]
    drawn = keras.initializers.RandomNormal(seed=1)
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer=drawn)(keras.layers.Concatenate()(flat)))
    model.compile(erk.optimizer(optimizer), "mse")
    return model


def batches() -> tuple[dict[str, np.ndarray], np.ndarray]:
    draws = np.random.default_rng(0)
    ids = {name: draws.integers(0, rows or 1000, (48, 3)) for name, rows in SIZES.items()}
    ids["more"] = draws.integers(0, 40, (48, 2))
    return ids, draws.standard_normal((48, 1)).astype(np.float32)


def fit(model: Any, **more: Any) -> None:
    model.fit(*batches(), batch_size=12, shuffle=False, verbose=0, **more)


def rows_in(layers: dict[str, Any]) -> list[np.ndarray]:
    return [layer.table.lookup(np.arange(layer.input_dim or 1000)) for layer in layers.values()]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for ours, theirs in zip(rows_in(one), rows_in(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5),
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adagrad, accumulated": lambda: keras.optimizers.Adagrad(0.1, gradient_accumulation_steps=2),
}
OPTIONS: dict[str, Any] = {
    "adam": {},
    "sgd": {"embeddings_constraint": keras.constraints.MaxNorm(0.08, axis=1), "embeddings_regularizer": "l2"},
    "adagrad, accumulated": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", ["sgd", *slow("adam", "adagrad, accumulated")])
def test_they_train_to_the_bits_of_layers_alone(name: str, monkeypatch: Any) -> None:
    calls: list[str] = []
    for verb in ("plan", "read_planned", "sum_blocks"):
        whole = getattr(table_batches, verb)

        def counted(*args: Any, verb: str = verb, whole: Any = whole, **more: Any) -> Any:
            calls.append(verb)
            return whole(*args, **more)

        monkeypatch.setattr(table_batches, verb, counted)
    alone, together = layers(None, **OPTIONS[name]), layers(er.Group(), **OPTIONS[name])
    for rows in (alone, together):
        calls.clear()
        fit(model_of(rows, OPTIMIZERS[name]()))
    assert_same(alone, together)
    # In each of 4 steps one for the maxima, and one for the rest. The regularizer looks up the rows of each table.
    expected = 4 * (2 + (len(SIZES) if name == "sgd" else 0))
    assert [calls.count(verb) for verb in ("plan", "read_planned", "sum_blocks")] == [expected] * 3


def test_gradients_are_those_of_layers_alone_in_loops_of_ones_own() -> None:
    found = []
    for rows in (layers(None), layers(er.Group())):
        model = model_of(rows, "sgd")
        ids, _ = batches()
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        for _ in range(2):  # of the second one nothing is kept
            found.append([g.values for g in tape.gradient(loss, [layer.rows for layer in rows.values()])])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:device_memory=.*TensorFlow has no GPU here")
def test_a_model_is_saved_with_its_group(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")  # so that the CPU uses the rows
    rows = layers(er.Group(memory="64MiB", device_memory="1MiB"))
    model = model_of(rows, "adam")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = erk.load_model(tmp_path / "model.keras")
    (collection,) = (layer for layer in loaded.layers if isinstance(layer, erk.EmbeddingCollection))
    theirs = {name: collection.embeddings[name] for name in SIZES}
    (group,) = {layer.table.group for layer in theirs.values()}
    assert list(group) == list(SIZES)
    assert group is not rows["users"].table.group
    assert (group.memory, group.device_memory) == ("64MiB", 1 << 20)
    for each in (model, loaded):
        fit(each)
    assert_same(rows, theirs)
    copy = erk.Embedding.from_config(rows["users"].get_config())
    assert copy.table.group is None


def test_a_training_goes_on_from_a_file(tmp_path: Any) -> None:
    whole, rows = layers(er.Group()), layers(er.Group())
    fit(model_of(whole, "adam"), epochs=2)
    with pytest.raises(UnsupportedError, match=r"TableCheckpoint is for tables on disk.*ModelCheckpoint"):
        fit(model_of(rows, "adam"), callbacks=[erk.TableCheckpoint(tmp_path / "checkpoints")])
    fit(model_of(rows, "adam"), callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")])
    loaded = erk.load_model(tmp_path / "model.keras")
    fit(loaded)
    (collection,) = (layer for layer in loaded.layers if isinstance(layer, erk.EmbeddingCollection))
    assert_same(whole, {name: collection.embeddings[name] for name in SIZES})


def test_a_layer_of_a_name_that_is_there_has_its_rows() -> None:
    group = er.Group()
    one = erk.Embedding(60, 4, group=group, name="users")
    with pytest.raises(
        ArgumentError,
        match=r"'users', and a layer has that table of the group already.*erk\.Embedding\(group\['users'\]\)",
    ):
        erk.Embedding(60, 4, group=group, name="users")
    assert erk.Embedding(group["users"]).table is one.table is group["users"]
    with pytest.raises(ArgumentError, match=r"'users' of the group is another one: asked for dim=5, and it has dim=4"):
        erk.Embedding(60, 5, group=group, name="users")


def test_what_is_refused(tmp_path: Any) -> None:
    group = er.Group()
    with pytest.raises(ArgumentError, match=r"`group` of erk\.Embedding must be an er.Group: got 'users'"):
        erk.Embedding(60, 4, group="users")
    with pytest.raises(ArgumentError, match=r"`path` of erk\.Embedding does not go with `group`"):
        erk.Embedding(60, 4, group=group, path=tmp_path / "t.rock")
    with pytest.raises(UnsupportedError, match=r"`group` of erk\.EmbeddingBag does not go with `sharded`"):
        erk.EmbeddingBag(60, 4, group=group, sharded=True)
    with pytest.raises(ArgumentError, match=r"`group` of erk\.Embedding belongs to the table"):
        erk.Embedding(er.Table(60, 4), group=group)
    assert not len(group)


def test_errors_are_those_of_layers_alone_and_nothing_has_changed() -> None:
    rows = layers(er.Group())
    model = model_of(rows, "adam")
    fit(model)
    before, (ids, _) = rows_in(rows), batches()
    ids["more"][3, 1] = 40
    with pytest.raises(tf.errors.UnknownError, match=r"`ids` of 'items', .* got 40 at \[3, 1\] .* of input 2 of 2"):
        model.predict(ids, verbose=0)
    grads = [tf.IndexedSlices(tf.ones((1, layer.output_dim)), tf.constant([1])) for layer in rows.values()]
    grads[1] = tf.IndexedSlices(tf.fill((1, 4), np.nan), tf.constant([1]))
    with pytest.raises(NonFiniteGradientError, match=r"'items', erk\.Embedding"):
        model.optimizer.apply(grads, [layer.rows for layer in rows.values()])
    for now, then in zip(rows_in(rows), before, strict=True):
        np.testing.assert_array_equal(now, then)
