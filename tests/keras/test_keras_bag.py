"""`erk.EmbeddingBag` against sums, means and maxima of the rows of a dense variable, bag by bag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnknownArgumentError, UnsupportedError
from slow import examples

ROWS, DIM = 20, 4
RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((ROWS, DIM)).astype(np.float32)
# Repeats; padding inside, last and alone.
IDS = np.array([[3, 3, 5, 7, 3], [1, 0, 2, 0, 0], [0, 0, 0, 0, 0], [19, 19, 19, 19, 19]])
RAGGED: Any = tf.RaggedTensor  # TensorFlow's stubs know few of its methods
MODES = ["sum", "mean", "sqrtn", "max"]
FUNCTIONS = [
    pytest.param(lambda f: f, False, id="eager"),
    pytest.param(tf.function, True, id="masked in a program"),
    pytest.param(lambda f: f, True, id="masked", marks=pytest.mark.slow),
    pytest.param(tf.function, False, id="in a program", marks=pytest.mark.slow),
]


def bag(mode: str = "sum", **options: Any) -> erk.EmbeddingBag:
    return erk.EmbeddingBag(er.Table(ROWS, DIM, init=er.FromArray(WEIGHTS)), mode=mode, **options)


def pooled(rows: tf.Tensor, ids: list[int], factors: Any, mode: str) -> tf.Tensor:
    """Return what becomes of one bag."""
    if not ids:
        return tf.zeros(DIM)
    each = tf.gather(rows, ids)
    if mode == "max":
        return tf.reduce_max(each, axis=0)
    total = tf.reduce_sum(each * factors[:, tf.newaxis], axis=0)
    return {
        "sum": lambda: total,
        "mean": lambda: total / tf.reduce_sum(factors),
        "sqrtn": lambda: total / tf.sqrt(tf.reduce_sum(tf.square(factors))),
    }[mode]()


def expected(ids: list[list[int]], factors: list[list[float]], mode: str, mask_zero: bool) -> tuple[Any, Any, Any]:
    """Return bags, and the gradients of `loss` for all rows and for the factors of each bag."""
    rows, weights = tf.constant(WEIGHTS), [tf.constant(each, tf.float32) for each in factors]
    with tf.GradientTape() as tape:
        tape.watch([rows, *weights])
        kept = [[k for k, one in enumerate(each) if one or not mask_zero] for each in ids]
        pairs = zip(ids, weights, kept, strict=True)
        out = [
            pooled(rows, [each[k] for k in which], tf.gather(w, tf.constant(which, tf.int64)), mode)
            for each, w, which in pairs
        ]
        value = loss(tf.stack(out))
    none: Any = "zero"
    of_rows, *of_weights = tape.gradient(value, [rows, *weights], unconnected_gradients=none)
    return tf.stack(out), tf.convert_to_tensor(of_rows), [tf.convert_to_tensor(each) for each in of_weights]


def loss(out: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(out) * tf.reshape(tf.linspace(-1.0, 2.0, tf.size(out)), tf.shape(out)))


def check(layer: Any, ids: Any, factors: Any, lists: tuple[Any, Any], function: Callable = lambda f: f) -> None:
    """Compare bags and gradients with those of lists of ids and factors."""
    out, of_rows, of_weights = expected(*lists, layer.mode, layer.mask_zero)
    layer.build()
    watched, *splits = [tf.zeros(0)] if factors is None else tf.nest.flatten(factors, expand_composites=True)

    def step() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(watched)
            parts = [watched, *splits]
            given = None if factors is None else tf.nest.pack_sequence_as(factors, parts, expand_composites=True)
            found = layer(ids, weights=given)
            value = loss(found)
        return found, tape.gradient(value, [layer.rows, watched])

    found, (of_all, of_factors) = function(step)()
    np.testing.assert_allclose(found, out, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(tf.convert_to_tensor(of_all), of_rows, rtol=1e-5, atol=2e-6)
    if factors is not None:
        flat = np.concatenate([np.ravel(each) for each in of_weights])
        np.testing.assert_allclose(np.ravel(of_factors), flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("function", "mask_zero"), FUNCTIONS)
@pytest.mark.parametrize("mode", MODES)
def test_padded_ids(mode: str, mask_zero: bool, function: Callable):
    check(bag(mode, mask_zero=mask_zero), IDS, None, (IDS.tolist(), np.ones(IDS.shape).tolist()), function)


@pytest.mark.parametrize(("function", "mask_zero"), FUNCTIONS)
@pytest.mark.parametrize("mode", ["sum", "mean", "sqrtn"])
def test_weights(mode: str, mask_zero: bool, function: Callable):
    factors = RNG.uniform(0.2, 2, IDS.shape).astype(np.float32)
    lists = IDS.tolist(), factors.tolist()
    check(bag(mode, mask_zero=mask_zero), IDS, tf.constant(factors), lists, function)


@settings(max_examples=examples(20))
@given(
    ids=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), min_size=1, max_size=5),
    mode=st.sampled_from(MODES),
    mask_zero=st.booleans(),
    is_weighted=st.booleans(),
)
def test_ragged_ids(ids: list[list[int]], mode: str, mask_zero: bool, is_weighted: bool):
    factors = [[0.5 + (k + one) % 3 for k, one in enumerate(each)] for each in ids]
    ones = [[1.0 for _ in each] for each in ids]
    weights = tf.ragged.constant(factors, tf.float32, ragged_rank=1) if is_weighted and mode != "max" else None
    lists = ids, ones if weights is None else factors
    check(bag(mode, mask_zero=mask_zero), tf.ragged.constant(ids, tf.int64, ragged_rank=1), weights, lists)


@pytest.mark.parametrize("mode", ["mean", "sqrtn"])
def test_bags_without_any_weight_are_zeros(mode: str):
    factors = tf.zeros(IDS.shape)
    with tf.GradientTape() as tape:
        tape.watch(factors)
        out = bag(mode)(IDS, weights=factors)
    assert not np.any(out)
    of_factors: Any = tape.gradient(out, factors)
    assert not np.any(of_factors)


@pytest.mark.parametrize("mode", MODES)
def test_no_ids_at_all(mode: str):
    np.testing.assert_array_equal(bag(mode)(np.zeros((3, 0), np.int64)), np.zeros((3, DIM)))
    assert bag(mode)(np.zeros((0, 5), np.int64)).shape == (0, DIM)


def test_the_last_dimension_is_pooled():
    ids = np.stack([IDS, IDS[::-1]])
    layer = bag("mean", mask_zero=True)
    out = layer(ids)
    np.testing.assert_array_equal(out[0], layer(IDS))
    np.testing.assert_array_equal(out[1], layer(IDS[::-1]))
    np.testing.assert_array_equal(out._keras_mask, [[True, True, False, True], [True, False, True, True]])
    nested = tf.ragged.constant([[[1, 2], [3]], [[]], []], dtype=tf.int64)
    rows = layer(nested)
    np.testing.assert_allclose(rows.flat_values, [WEIGHTS[1:3].mean(0), WEIGHTS[3], np.zeros(DIM)], rtol=1e-6)
    assert rows.row_lengths().numpy().tolist() == [2, 1, 0]
    pairs = RAGGED.from_row_lengths(np.array([[1, 2], [3, 3], [4, 5]]), [2, 0, 1])
    rows = layer(pairs)
    np.testing.assert_allclose(rows.flat_values, [WEIGHTS[1:3].mean(0), WEIGHTS[3], WEIGHTS[4:6].mean(0)], rtol=1e-6)
    assert layer.compute_output_shape((None, 7, 5)) == (None, 7, DIM)


def test_models_with_ragged_ids_and_weights_train():
    ids = keras.Input((None,), dtype="int64", ragged=True)
    padded, factors = keras.Input((5,), dtype="int32"), keras.Input((5,))
    first, second = bag("mean"), bag("sum", mask_zero=True)
    out = keras.layers.Concatenate()([first(ids), second(padded, weights=factors)])
    model: Any = keras.Model([ids, padded, factors], keras.layers.Dense(1, kernel_initializer="ones")(out))
    assert first(ids).shape == (None, DIM)
    model.compile(erk.optimizer("sgd"), "mse")
    ragged = RAGGED.from_row_lengths(RNG.integers(0, ROWS, 8), [3, 0, 4, 1])
    inputs = (ragged, IDS.astype(np.int32), np.ones(IDS.shape, np.float32))
    batches = tf.data.Dataset.from_tensor_slices((inputs, np.ones((4, 1), np.float32))).batch(2)
    losses = model.fit(batches, epochs=20, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert first.table.steps == second.table.steps == 40


def test_rows_that_only_padding_names_are_not_stepped():
    layer = bag(mask_zero=True)
    model: Any = keras.Sequential([keras.Input((5,), dtype="int64"), layer, keras.layers.Dense(1)])
    model.compile(erk.optimizer("sgd"), "mse")
    model.fit(IDS, np.ones((4, 1)), verbose=0)
    assert sorted(layer.table.export()[0]) == [1, 2, 3, 5, 7, 19]


@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_dtypes(policy: str):
    layer = erk.EmbeddingBag(ROWS, DIM, mode="mean", dtype=policy)
    out = layer(IDS, weights=tf.ones(IDS.shape))
    assert out.dtype == layer.compute_dtype == layer(keras.Input((5,), dtype="int64")).dtype
    rows = layer.table.lookup(IDS).mean(axis=1)
    np.testing.assert_allclose(tf.cast(out, tf.float32), rows, rtol=0.01, atol=1e-3)


def test_config():
    layer = erk.EmbeddingBag(ROWS, DIM, "zeros", None, None, True, "sqrtn", rule=er.Adagrad(), name="bag")
    copy = erk.EmbeddingBag.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert (copy.mode, copy.mask_zero, copy.name) == ("sqrtn", True, "bag")


def test_what_is_refused():
    with pytest.raises(
        ArgumentError, match=r"`mode` of erk.EmbeddingBag must be one of sum, mean, sqrtn, max: got 'min'"
    ):
        bag("min")
    with pytest.raises(UnknownArgumentError, match=r"erk.EmbeddingBag has no argument `combiner`"):
        bag(combiner="sum")
    with pytest.raises(UnsupportedError, match="go with sum, mean and sqrtn: got them with mode='max'"):
        bag("max")(IDS, weights=tf.ones(IDS.shape))
    for ids in (keras.Input((), dtype="int64"), np.arange(3)):
        with pytest.raises(
            ArgumentError, match=r"must have at least two dimensions, .* keras.ops.expand_dims\(ids, -1\)"
        ):
            bag()(ids)


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ArgumentError, match=r"must have the ids' shape: got \(4, 3\) for ids \(4, 5\)"):
        bag()(IDS, weights=tf.ones((4, 3)))
    with pytest.raises(ArgumentError, match=r"got \(4, 5\) for ids ragged \(4, 5\)"):
        bag()(RAGGED.from_tensor(IDS), weights=tf.ones(IDS.shape))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must have the ids' row splits"):
        bag()(tf.ragged.constant([[1], [2, 3]]), weights=tf.ragged.constant([[1.0, 2.0], [3.0]]))
    with pytest.raises(ArgumentError, match="must have the structure of the ids, 2 tensors: got 1"):
        bag()([IDS, IDS], weights=[tf.ones(IDS.shape)])
    unknown = tf.function(
        lambda ids, factors: layer(ids, weights=factors),
        input_signature=[tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None, None), tf.float32)],
    )
    layer = bag()
    with pytest.raises(tf.errors.OpError, match="must have one weight for each id: got 12 for 20 ids"):
        unknown(IDS, tf.ones((4, 3)))
