"""Regularizers and constraints of rows: where every row is in each batch, those of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnsupportedError
from slow import slow

ROWS, DIM = 6, 3
FIRST = (0.05 * np.random.default_rng(0).standard_normal((ROWS, DIM))).astype(np.float32)
L2 = keras.regularizers.L2(0.05)
MAX_NORM = keras.constraints.MaxNorm(0.2, axis=1)
Make = Callable[..., Any]


def ids_of(steps: int) -> np.ndarray:
    """Batches of 12, with every row twice."""
    draws = np.random.default_rng(1)
    return np.concatenate([draws.permutation(np.repeat(np.arange(ROWS), 2)) for _ in range(steps)])


def model_of(rows: Any, hot: bool, *, lookups: int = 1) -> Any:
    """A model on one or two inputs of ids, or of their one-hot rows."""
    inputs = [keras.Input((ROWS,) if hot else (), dtype=None if hot else "int64") for _ in range(lookups)]
    found = [rows(each) for each in inputs]
    summed = found[0] if lookups == 1 else keras.layers.Add()(found)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(summed))


def both(optimizer: Make, *, lookups: int = 1, steps: int = 8, rule: Any = None, **options: Any) -> Any:
    """Train a layer of ours and a Dense layer on one-hot rows alike; return both models."""
    ids = ids_of(steps)
    targets = np.random.default_rng(2).standard_normal((len(ids), 1)).astype(np.float32)
    of_rows = {f"embeddings_{name}": value for name, value in options.items()}
    layer = erk.Embedding(er.Table(ROWS, DIM, init=er.FromArray(FIRST)), rule=rule, **of_rows)
    dense = keras.layers.Dense(DIM, use_bias=False, **{f"kernel_{name}": value for name, value in options.items()})
    ours, theirs = model_of(layer, False, lookups=lookups), model_of(dense, True, lookups=lookups)
    dense.set_weights([FIRST])
    histories = []
    for model, inputs, made in (
        (ours, ids, erk.optimizer(optimizer())),
        (theirs, np.eye(ROWS, dtype=np.float32)[ids], optimizer()),
    ):
        model.compile(made, "mse")
        given = inputs if lookups == 1 else [inputs] * lookups
        histories.append(model.fit(given, targets, batch_size=12, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(*histories, rtol=1e-5)
    np.testing.assert_allclose(layer.table.lookup(np.arange(ROWS)), dense.get_weights()[0], rtol=2e-5, atol=2e-6)
    return ours, theirs


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.3),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3), initial_scale=8.0),
}


FAST = ("accumulation",)


@pytest.mark.parametrize("name", [*FAST, *slow(*(name for name in OPTIMIZERS if name not in FAST))])
def test_they_are_those_of_a_variable(name: str) -> None:
    both(OPTIMIZERS[name], regularizer=L2, constraint=MAX_NORM)


def test_they_are_those_of_a_variable_for_a_rule_of_the_layer() -> None:
    both(lambda: keras.optimizers.Ftrl(0.3), steps=4, rule=er.Ftrl(), regularizer=L2, constraint=MAX_NORM)


def test_lookups_of_one_call_count_each_row_once() -> None:
    both(OPTIMIZERS["adam"], lookups=2, regularizer=L2, constraint=MAX_NORM)


def made(**options: Any) -> Any:
    layer = erk.Embedding(er.Table(ROWS, DIM, init=er.FromArray(FIRST)), **options)
    layer.build()
    return layer


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_only_the_rows_of_the_batch_are_there(wrap: Any) -> None:
    layer = made(embeddings_regularizer="l2", embeddings_constraint="non_neg")
    optimizer = erk.optimizer(keras.optimizers.SGD(1.0))
    optimizer.build([layer.rows])

    @wrap
    def step() -> Any:
        with tf.GradientTape() as tape:
            layer(tf.constant([[1, 3], [3, 1]]))
            loss = tf.add_n(layer.losses)
        optimizer.apply(tape.gradient(loss, [layer.rows]), [layer.rows])
        return loss

    assert float(step()) == pytest.approx(0.01 * (FIRST[[1, 3]] ** 2).sum(), rel=1e-5)
    expected = FIRST.copy()
    expected[[1, 3]] = np.maximum(0, FIRST[[1, 3]] * (1 - 0.02))
    np.testing.assert_allclose(layer.table.lookup(np.arange(ROWS)), expected, rtol=1e-6)


def test_losses_are_those_of_the_last_call() -> None:
    layer = made(embeddings_regularizer=keras.regularizers.L1(1.0))
    assert [float(loss) for loss in layer.losses] == [0.0]
    for ids in ([1], [2, 2], []):
        layer(np.array(ids, np.int64))
        assert float(layer.losses[0]) == pytest.approx(np.abs(FIRST[sorted(set(ids))]).sum(), rel=1e-5)
    layer.trainable = False
    assert layer.losses == []


def test_layers_on_one_table_share_what_one_of_them_brings() -> None:
    one = made(embeddings_regularizer="l2")
    other = erk.EmbeddingBag(one.table)
    inputs: Any = keras.Input((2,), dtype="int64")
    model: Any = keras.Model(inputs, [one(inputs), other(inputs[:, :1])])
    model(np.array([[1, 2], [4, 2]]))
    assert len(model.losses) == 1
    assert float(model.losses[0]) == pytest.approx(0.01 * (FIRST[[1, 2, 4]] ** 2).sum(), rel=1e-5)
    erk.Embedding(one.table, embeddings_regularizer=keras.regularizers.L2(0.01)).build()
    told = r"`embeddings_regularizer` of layers that share a table must be the same: .* has L2\(l2=0.01\), got L1\(l1="
    with pytest.raises(ArgumentError, match=told):
        erk.Embedding(one.table, embeddings_regularizer="l1").build()


def test_collections_and_bags_of_open_ids() -> None:
    table = er.Table(None, DIM, init=er.Constant(2.0))
    bag = erk.EmbeddingBag(table, mask_zero=True, embeddings_regularizer="l2")
    collection = erk.EmbeddingCollection({"one": bag, "other": erk.Embedding(4, DIM)})
    collection({"one": np.array([[10**15, 10**15, 0], [3, 0, 0]]), "other": np.array([1, 2])})
    assert [float(loss) for loss in collection.losses] == pytest.approx([0.01 * 2 * DIM * 4])


def test_sixteen_bits() -> None:
    layer = erk.Embedding(
        ROWS, DIM, "ones", embeddings_regularizer="l2", embeddings_constraint=MAX_NORM, dtype="bfloat16"
    )
    with tf.GradientTape() as tape:
        layer(np.array([1]))
        loss = layer.losses[0]
    assert loss.dtype == tf.bfloat16
    erk.optimizer(keras.optimizers.SGD(0.1)).apply([tape.gradient(loss, layer.rows)], [layer.rows])
    assert np.linalg.norm(layer.table.lookup([1])) == pytest.approx(0.2, rel=0.01)
    assert np.linalg.norm(layer.table.lookup([2])) == pytest.approx(DIM**0.5)


def test_replicas_count_a_row_for_those_that_have_it() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = made(embeddings_regularizer=keras.regularizers.L2(0.5))
        inputs = keras.Input((), dtype="int64")
        model: Any = keras.Model(inputs, layer(inputs))
        model.compile(erk.optimizer(keras.optimizers.SGD(1.0)), loss=lambda y, found: 0.0 * tf.reduce_sum(found, -1))
    model.fit(np.array([1, 2, 1, 3]), np.zeros((4, DIM)), batch_size=4, shuffle=False, verbose=0)
    left = (layer.table.lookup(np.arange(ROWS)) / FIRST)[:, 0]
    np.testing.assert_allclose(left, [1, 0, 0.5, 0.5, 1, 1], atol=1e-6)


def test_a_layer_says_what_it_was_given(tmp_path: Any) -> None:
    ids, targets = ids_of(2), np.ones((24, 1), np.float32)
    ours = model_of(erk.Embedding(ROWS, DIM, "uniform", L2, MAX_NORM), False)
    ours.compile(erk.optimizer("sgd"), "mse")
    ours.save(tmp_path / "model.keras")
    loaded = erk.load_model(tmp_path / "model.keras")
    for layer in (loaded.layers[1], erk.Embedding.from_config(erk.Embedding(4, 2, "zeros", L2, MAX_NORM).get_config())):
        config = layer.get_config()
        assert config["embeddings_regularizer"] == keras.regularizers.serialize(L2)
        assert config["embeddings_constraint"] == keras.constraints.serialize(MAX_NORM)
    for model in (ours, loaded):
        model.fit(ids, targets, batch_size=12, shuffle=False, verbose=0)
    np.testing.assert_array_equal(*(model.layers[1].table.lookup(np.arange(ROWS)) for model in (ours, loaded)))


WRONG = {
    "another row's": {"embeddings_constraint": "unit_norm"},
    "columns": {"embeddings_constraint": keras.constraints.MaxNorm(1.0, axis=0)},
    "a function of all": {"embeddings_constraint": lambda w: w / tf.reduce_max(w)},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG)
def test_constraints_over_several_rows_are_refused(options: Any) -> None:
    with pytest.raises(ArgumentError, match=r"depends on that row only, .* axis=1"):
        erk.Embedding(ROWS, DIM, **options)


def test_what_is_neither() -> None:
    for options in ({"embeddings_regularizer": "l3"}, {"embeddings_constraint": 3}):
        with pytest.raises(ArgumentError, match=f"`{next(iter(options))}` of erk.Embedding must be one of Keras'"):
            erk.Embedding(ROWS, DIM, **options)


def test_lookups_in_a_loop_are_refused() -> None:
    layer = made(embeddings_regularizer="l2")
    tf.map_fn(layer, tf.constant([1, 2]), fn_output_signature=tf.float32)  # which is no loop of TensorFlow's here
    tf.function(lambda: tf.map_fn(layer, tf.constant([1, 2]), fn_output_signature=tf.float32))()
    with pytest.raises(UnsupportedError, match=r"needs the ids of the batch .* fit or evaluate, .* Call the"):
        layer.losses  # noqa: B018
    layer(np.array([1]))
    assert len(layer.losses) == 1

    @tf.autograph.experimental.do_not_convert
    def add() -> Any:
        tf.map_fn(layer, tf.constant([1, 2]), fn_output_signature=tf.float32)
        return layer.losses

    with pytest.raises(UnsupportedError, match=r"in a loop, a branch or another tf\.function"):
        tf.function(add)()


def test_a_constraint_does_not_last_under_ftrl() -> None:
    layer = made(embeddings_constraint="non_neg")
    with pytest.raises(UnsupportedError, match="cannot go with Ftrl"):
        erk.optimizer("ftrl").build([layer.rows])
    assert layer.table.rule is None


@pytest.mark.parametrize("rule", [None, er.Adam(dense=True)], ids=["sgd", "dense"])
def test_a_step_with_a_constraint_that_breaks_is_refused(rule: Any) -> None:
    broken = made(embeddings_constraint=lambda w: w, rule=rule)
    other = made(rule=rule)
    broken.build()
    optimizer = erk.optimizer(keras.optimizers.SGD(1.0))
    optimizer.build([other.rows, broken.rows])

    def step(pull: float) -> None:
        grads = [tf.IndexedSlices(np.full((1, DIM), pull, np.float32), tf.constant([0])) for _ in range(2)]
        optimizer.apply(grads, [other.rows, broken.rows])

    step(1.0)
    before = [layer.table.state() for layer in (other, broken)]
    broken.handle.brought["embeddings_constraint"] = lambda w: w * np.nan
    with pytest.raises(ArgumentError, match=r"must return finite weights \(1, 3\): got \(1, 3\) with NaN.*No step was"):
        step(1.0)
    for layer, state in zip((other, broken), before, strict=True):
        now = layer.table.state()
        assert now.keys() == state.keys()
        for name, array in state.items():
            np.testing.assert_array_equal(now[name], array, name)
