"""What a tape returns for rows: whatever is done to it does to them what it does to a variable, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import embedrock as er
import embedrock.keras as erk
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import make_plan
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.keras.training.pending import PendingGradients
from slow import slow, slow_but

ROWS, DIM = 5, 2
SGD = keras.optimizers.SGD
FIRST = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 8
IDS, OTHERS = tf.constant([[1, 3, 1], [3, 4, 1]]), tf.constant([[4, 4, 0], [1, 1, 2]])
HALF, THIRD = keras.Variable(0.5), tf.Variable(3.0)
WEIGHTS = tf.constant([[3.0, 4.0], [-1.0, 0.5]])[:, tf.newaxis]

_tf: Any = tf
Look = Callable[[tf.Tensor], tf.Tensor]


def once(look: Look, k: int) -> tf.Tensor:
    """The loss of micro-batch `k` with one lookup."""
    return tf.reduce_sum(look((IDS, OTHERS)[k % 2]) * WEIGHTS * (k + 1.0))


def gradient_of(layer: Any, ids: Any = IDS) -> Any:
    """Return the gradient of the sum of a layer's rows."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids))
    return tape.gradient(loss, layer.rows)


def twice(look: Look, k: int) -> tf.Tensor:
    """That of two lookups whose gradients partly cancel, and meet in the same rows."""
    return once(look, k) - 0.5 * tf.reduce_sum(look(IDS) * WEIGHTS) + tf.reduce_sum(look(OTHERS) ** 2)


def in_a_loop(look: Look, k: int) -> tf.Tensor:
    """That of a loop of TensorFlow's, which looks up in every round."""
    total = tf.zeros(())
    for row in tf.range(2):
        total += tf.reduce_sum(look(IDS[row]) * WEIGHTS[row]) * (k + 1.0)
    return total


def by_map(look: Look, k: int) -> tf.Tensor:
    return tf.reduce_sum(tf.map_fn(look, IDS, fn_output_signature=tf.float32) * WEIGHTS)


def one_each(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
    return lambda grads: [change(g) for g in grads]


# What users do to gradients before they apply them.
CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "nothing": lambda grads: grads,
    "clip_by_value": one_each(lambda g: tf.clip_by_value(g, -1.0, 1.0)),
    "clip_by_value to above zero": one_each(lambda g: tf.clip_by_value(g, 0.25, 1.0)),
    "clip_by_norm": one_each(lambda g: tf.clip_by_norm(g, 1.0)),
    "clip_by_norm of columns": one_each(lambda g: tf.clip_by_norm(g, 1.0, [0])),
    "clip_by_global_norm": lambda grads: tf.clip_by_global_norm(grads, 1.0)[0],
    "clip_by_global_norm, then scaled": lambda grads: [g * 0.5 for g in tf.clip_by_global_norm(grads, 1.0)[0]],
    "divided by their norm": one_each(lambda g: g / tf.norm(g)),
    "divided by the norm of all": lambda grads: [g / tf.linalg.global_norm(grads) for g in grads],
    "sign": one_each(tf.sign),
    "noise": one_each(lambda g: g + tf.random.stateless_normal((ROWS, DIM), (1, 2))),
    "scaled by numbers": one_each(lambda g: 0.25 * g / 2 + 3.0 * -g),
    "scaled by tensors": one_each(lambda g: tf.constant(0.25) * g - g / tf.constant(3.0)),
    "scaled by variables": one_each(lambda g: HALF * (g * HALF) + g / THIRD),
    "scaled by arrays of one": one_each(lambda g: np.float32([0.5]) * g + g * np.float32(2) - np.float32(3) * g),
    "operators": one_each(lambda g: abs(g) % 0.7 - g // 0.5),
    "comparisons": one_each(lambda g: tf.where(g > 0.1, g, tf.cast(g <= -0.5, tf.float32))),
    "divided by a root of squares": one_each(lambda g: g / tf.sqrt(tf.reduce_sum(tf.square(g)))),
    "squared": one_each(lambda g: g**2 + g * g),
    "add_n": one_each(lambda g: tf.add_n([g, g, tf.tanh(g)])),
    "sum": one_each(lambda g: sum([g, g]) - tf.clip_by_norm(g, 1.0)),
    "where": one_each(lambda g: tf.where(tf.greater(g, 0.0), g, 0.0)),
    "sums with keras.ops": one_each(lambda g: _tf.add_n([keras.ops.multiply(g, 2.0), g])),
    "keras.ops": one_each(lambda g: keras.ops.clip(keras.ops.multiply(g, 0.5), -1, 1)),
    "keras.ops.divide": one_each(lambda g: keras.ops.divide(g, 4.0)),
    "of values": one_each(
        lambda g: tf.IndexedSlices(tf.sign(g.values), g.indices) if hasattr(g, "indices") else tf.sign(g)
    ),
}


def stepped(
    look: Look, variable: Any, optimizer: Any, change: Any, loss: Any, *, micro: int, wrap: Callable[[Any], Any]
) -> None:
    """Make a step by the changed sum of the gradients of micro-batches."""
    optimizer.build([variable])

    @wrap
    def step() -> None:
        summed: Any = None
        for k in range(micro):
            with tf.GradientTape() as tape:
                value = loss(look, k)
            grads = tape.gradient(value, [variable])
            summed = grads if summed is None else [a + b for a, b in zip(summed, grads, strict=True)]
        optimizer.apply_gradients(zip(change(summed), [variable], strict=True))

    step()


def made() -> tuple[Any, er.Table]:
    table = er.Table(ROWS, DIM, init=er.FromArray(FIRST))
    layer = erk.Embedding(table)
    layer.build()
    return layer, table


def both(change: Any, loss: Any, *, micro: int = 1, wrap: Any = lambda f: f, optimizer: Any = None) -> None:
    """Compare rows after a step with a variable's."""
    optimizer = optimizer or (lambda: SGD(0.5))
    layer, table = made()
    stepped(layer, layer.rows, erk.optimizer(optimizer()), change, loss, micro=micro, wrap=wrap)
    variable = keras.Variable(FIRST)

    def look(ids: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matmul(tf.one_hot(ids, ROWS), tf.convert_to_tensor(variable.value))

    stepped(look, variable, optimizer(), change, loss, micro=micro, wrap=wrap)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), variable.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(variable.numpy() - FIRST).max() > 0.05
    assert table.steps == 1


# One of each kind: by columns and rows, of several gradients, an operator, another tensor, and what is not linear.
MOSTLY = (
    *("nothing", "clip_by_value", "clip_by_norm of columns", "clip_by_global_norm, then scaled", "noise"),
    *("scaled by tensors", "scaled by variables", "operators", "divided by a root of squares", "add_n", "where"),
)
WAYS: dict[str, Any] = {"eager": lambda f: f, "function": tf.function}


@pytest.mark.parametrize("wrap", [WAYS["function"], *slow(WAYS["eager"])], ids=["function", "eager"])
@pytest.mark.parametrize("change", slow_but(CHANGES, *MOSTLY))
def test_gradients_are_changed_as_those_of_a_variable(change: Any, wrap: Any) -> None:
    both(change, twice, micro=2, wrap=wrap)


@pytest.mark.parametrize(
    ("loss", "micro"), [(twice, 3), (by_map, 1), *slow((once, 1), (once, 3), (twice, 1), (by_map, 3))]
)
def test_norms_are_those_of_what_is_summed(loss: Any, micro: int) -> None:
    both(lambda grads: tf.clip_by_global_norm(grads, 0.5)[0], loss, micro=micro, wrap=tf.function)


@pytest.mark.parametrize(
    "change", [CHANGES["clip_by_global_norm"], *slow(CHANGES["nothing"])], ids=["clipped", "as is"]
)
def test_lookups_in_a_loop_of_a_program(change: Any) -> None:
    both(change, in_a_loop, wrap=tf.function, micro=2)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: SGD(0.5, clipnorm=0.4),
    "clipvalue": lambda: SGD(0.5, clipvalue=0.2),
    "adam": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.3),
}


@pytest.mark.parametrize("optimizer", slow_but(OPTIMIZERS, "adam"))
def test_optimizers_that_clip_what_was_changed(optimizer: Any) -> None:
    both(one_each(lambda g: tf.clip_by_value(g, -1.0, 1.0)), twice, micro=2, wrap=tf.function, optimizer=optimizer)


def test_what_is_applied_may_be_looked_at_after() -> None:
    layer, _ = made()
    optimizer = erk.optimizer(SGD(0.5))
    optimizer.build([layer.rows])

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = once(layer, 0)
        grads = tape.gradient(loss, [layer.rows])
        optimizer.apply(grads, [layer.rows])
        return grads[0], tf.norm(grads[0])

    for _ in range(3):
        gradient, norm = step()
        assert float(norm) == pytest.approx(float(tf.norm(gradient)))
        assert sorted(gradient.indices.numpy()) == [1, 3, 4]


def test_several_gradients_are_applied_one_after_the_other() -> None:
    rows = []
    for wrap in WAYS.values():
        layer, table = made()
        optimizer = erk.optimizer(SGD(0.5, momentum=0.9))
        optimizer.build([layer.rows])

        @wrap
        def step(layer: Any = layer, optimizer: Any = optimizer) -> None:
            grads = []
            for k in range(4):
                with tf.GradientTape() as tape:
                    loss = once(layer, k)
                grads.append(tape.gradient(loss, layer.rows))
            for gradient in reversed(grads):
                optimizer.apply([gradient], [layer.rows])

        step()
        step()
        assert table.steps == 8
        rows.append(table.lookup(np.arange(ROWS)))
    np.testing.assert_array_equal(*rows)


def test_a_gradient_is_applied_in_every_round_of_a_loop() -> None:
    layer, table = made()
    optimizer = erk.optimizer(SGD(1.0))
    optimizer.build([layer.rows])

    @tf.function
    def step() -> None:
        gradient = gradient_of(layer)
        for _ in tf.range(12):
            optimizer.apply([gradient], [layer.rows])

    step()
    step()
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS))[:, 0], FIRST[:, 0] - [0, 72, 0, 48, 24])
    assert table.steps == 24


def test_a_gradient_that_a_function_knows_is_applied_at_each_of_its_calls() -> None:
    layer, table = made()
    optimizer = erk.optimizer(SGD(1.0))
    optimizer.build([layer.rows])

    @tf.function
    def step() -> None:
        gradient = gradient_of(layer)
        inner = tf.function(lambda: optimizer.apply([gradient], [layer.rows]))
        inner()
        inner()

    step()
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS))[:, 0], FIRST[:, 0] - [0, 6, 0, 4, 2])


def jacobian(look: Look, variable: Any) -> Any:
    with tf.GradientTape() as tape:
        out = tf.reduce_sum(look(IDS) ** 2, axis=[1, 2])
    return tape.jacobian(out, variable)


def watched(look: Look, variable: Any) -> Any:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variable.value)
        loss = tf.reduce_sum(look(IDS) ** 2)
    return tape.gradient(loss, variable)


def not_watched(look: Look, variable: Any) -> Any:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        loss = tf.reduce_sum(look(IDS) ** 2)
    return tape.gradient(loss, variable)


def by_tf_gradients(look: Look, variable: Any) -> Any:
    return tf.function(lambda: tf.gradients(tf.reduce_sum(look(IDS) ** 2), variable)[0])()


def around_a_function(look: Look, variable: Any) -> Any:
    function = tf.function(lambda ids: tf.reduce_sum(look(ids) ** 2))
    with tf.GradientTape() as tape:
        loss = function(IDS) * 2.0 + function(IDS[:1])
    return tape.gradient(loss, variable)


def penalized(look: Look, variable: Any) -> Any:
    """A gradient of the gradient of what the layer returns."""
    with _tf.GradientTape() as tape:
        out = look(IDS)
        with _tf.GradientTape() as inner:
            inner.watch(out)
            loss = tf.reduce_sum(out * tf.reduce_sum(out**2))
        penalty = tf.reduce_sum(inner.gradient(loss, out) ** 2)
    return tape.gradient(penalty, variable)


def asked_for_twice(look: Look, variable: Any) -> Any:
    with _tf.GradientTape() as tape:
        loss = tf.reduce_sum(look(IDS) ** 2)
    one, two = tape.gradient(loss, [variable, variable])
    return one + two


TAPES = (jacobian, watched, not_watched, by_tf_gradients, around_a_function, penalized, asked_for_twice)


@pytest.mark.parametrize("wrap", [WAYS["eager"], *slow(WAYS["function"])], ids=WAYS)
@pytest.mark.parametrize("gradient", TAPES, ids=lambda f: f.__name__)
def test_what_tapes_are_asked_for(gradient: Any, wrap: Any) -> None:
    layer, _ = made()
    variable = keras.Variable(FIRST)

    def look(ids: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matmul(tf.one_hot(ids, ROWS), tf.convert_to_tensor(variable.value))

    mine, its = wrap(lambda: gradient(layer, layer.rows))(), wrap(lambda: gradient(look, variable))()
    if its is None:
        assert mine is None
    else:
        np.testing.assert_allclose(np.asarray(mine), np.asarray(its), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("as_slices", [True, False], ids=["slices", "dense"])
def test_gradients_of_unknown_shape(as_slices: bool) -> None:
    layer, table = made()
    optimizer = erk.optimizer(SGD(1.0))
    optimizer.build([layer.rows])

    @tf.function
    def step() -> None:
        gradient = gradient_of(layer)
        if as_slices:
            given = [gradient.values, gradient.indices]
            made: Any = tf.IndexedSlices(*tf.py_function(lambda *parts: parts, given, [tf.float32, tf.int64]))
        else:
            made = tf.py_function(lambda dense: dense, [tf.convert_to_tensor(gradient)], tf.float32)
        optimizer.apply([made], [layer.rows])

    step()
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS))[:, 0], FIRST[:, 0] - [0, 3, 0, 2, 1])


def test_what_was_traced_before_a_table_grew() -> None:
    table = er.Table(ROWS, DIM, init=er.Zeros())
    layer: Any = erk.Embedding(table)
    layer.build()
    optimizer = erk.optimizer(SGD(1.0))
    optimizer.build([layer.rows])

    def gradient(ids: Any) -> Any:
        return gradient_of(layer, ids)

    programs = [tf.function(lambda ids: tf.exp(gradient(ids))), tf.function(gradient)]
    programs.append(tf.function(lambda ids: optimizer.apply([tf.ones((ROWS, DIM))], [layer.rows])))
    for program in programs:
        program(IDS)
    before = gradient(IDS)
    layer.grow(8)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has grown since .* have 5 rows"):
        programs[0](IDS)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has grown since .* have 5 rows"):
        programs[2](IDS)
    assert table.steps == 1
    new = programs[1](tf.constant([7]))
    assert (before + new).shape == (8, DIM)
    np.testing.assert_array_equal(tf.convert_to_tensor(before + new)[:, 0], [0, 3, 0, 2, 1, 0, 0, 1])


def test_what_is_too_old_is_told() -> None:
    layer, _ = made()
    optimizer = erk.optimizer(SGD(0.5))
    optimizer.build([layer.rows])

    @tf.function
    def step() -> None:
        grads = []
        for k in range(10):
            with tf.GradientTape() as tape:
                loss = once(layer, k)
            grads.append(tape.gradient(loss, layer.rows))
        for gradient in grads:
            optimizer.apply([gradient], [layer.rows])

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"1 of which are gone.*before 8 more steps"):
        step()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_what_was_changed_before_the_tape_returned_it_is_told(factor: float) -> None:
    layer, _ = made()

    @tf.custom_gradient
    def scaled(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            out = layer(ids)

        def gradient(upstream: Any, variables: Any) -> Any:
            return None, [factor * g for g in tape.gradient(out, variables, upstream)]

        return out, gradient

    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(IDS)) + tf.reduce_sum(scaled(IDS))
        with pytest.raises((ArgumentError, tf.errors.InvalidArgumentError), match="by a gradient function of your own"):
            tape.gradient(loss, layer.rows)


def test_gradients_go_in_and_out_of_functions() -> None:
    layer, table = made()
    traced = []

    @tf.function
    def of(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) * 2.0)
        return tape.gradient(loss, layer.rows)

    @tf.function
    def halved(gradient: Any) -> Any:
        traced.append(gradient)
        return gradient / 2

    one, two = of(tf.constant([1, 3, 1])), of(tf.constant([3, 0, 0]))
    summed = halved(one + two)
    assert len(halved(two).indices) == 2
    assert len(traced) == 1
    np.testing.assert_array_equal(tf.convert_to_tensor(summed)[:, 0], [2, 2, 0, 2, 0])
    erk.optimizer(SGD(1.0)).apply([summed], [layer.rows])
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS))[:, 0], FIRST[:, 0] - [2, 2, 0, 2, 0])


def test_a_dense_gradient_is_a_gradient() -> None:
    layer, table = made()
    erk.optimizer(SGD(1.0)).apply([tf.ones((ROWS, DIM))], [layer.rows])
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), FIRST - 1)


def test_numpy_has_the_gradient_of_all_rows() -> None:
    for rows in (9, 10**9):
        layer = erk.Embedding(rows, 2)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(np.array([7, 7, 3])) * tf.constant([3.0, 4.0]))
        gradient = tape.gradient(loss, layer.rows)
        if rows == 9:
            expected = np.zeros((9, 2), np.float32)
            expected[3], expected[7] = [3, 4], [6, 8]
            np.testing.assert_array_equal(np.asarray(gradient), expected)
            assert np.linalg.norm(gradient) == np.linalg.norm(expected)
        else:
            with pytest.raises(UnsupportedError, match="cannot become a dense tensor for 1,000,000,000 rows"):
                np.asarray(gradient)


def test_repeated_indices_are_summed_first() -> None:
    layer, table = made()
    repeated = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([2, 2]))
    erk.optimizer(keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0)).apply([repeated], [layer.rows])
    np.testing.assert_allclose(table.lookup(np.array([2])), FIRST[2:3] - 1, rtol=1e-5)


WRONG: dict[str, Any] = {
    "another shape": lambda layer: tf.ones((ROWS, DIM + 1)),
    "slices of another shape": lambda layer: tf.IndexedSlices(tf.ones((1, 3)), tf.constant([1])),
    "inside of TensorFlow": lambda layer: tf.ones(256),
}


@pytest.mark.parametrize("gradient", WRONG.values(), ids=WRONG)
def test_what_is_no_gradient_of_rows(gradient: Any) -> None:
    layer, table = made()
    with pytest.raises(ArgumentError, match=r"must be what a tape returns for layer\.rows"):
        erk.optimizer(SGD(1.0)).apply([gradient(layer)], [layer.rows])
    assert table.steps == 0


def test_rows_that_are_not_there() -> None:
    layer, table = made()
    with pytest.raises(er.EmbedrockError, match="99"):
        erk.optimizer(SGD(1.0)).apply([tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([99]))], [layer.rows])
    assert table.steps == 0


# ---------------------------------------------------------------- of a table of any size

LARGE: dict[str, Callable[[Any], Any]] = {
    "norm": tf.norm,
    "global norm": lambda g: tf.linalg.global_norm([g]),
    "clipped": lambda g: tf.clip_by_value(tf.clip_by_norm(g, 3.0), -1.0, 1.0).values,
    "clipped to a number of the program": lambda g: tf.clip_by_value(g, -tf.norm(g), tf.norm(g)).values,
    "sign": lambda g: tf.sign(g + g).values,
    "scaled by a variable": lambda g: (HALF.value * (g * HALF)).values,
    "scaled by an array of one": lambda g: (np.float32([0.5]) * g).values,
    "absolute": lambda g: abs(g).values,
    "root of squares": lambda g: tf.sqrt(tf.reduce_sum(tf.square(g))),
}


@pytest.mark.parametrize("wrap", [WAYS["function"], *slow(WAYS["eager"])], ids=["function", "eager"])
@pytest.mark.parametrize("function", LARGE.values(), ids=LARGE)
def test_cost_follows_the_rows_of_the_batch(function: Any, wrap: Any) -> None:
    found = []
    for rows, ids in (10**12, [10**11, 5, 5]), (6, [4, 5, 5]):
        layer: Any = erk.Embedding(rows, DIM, "zeros")
        layer.build()

        @wrap
        def step(layer: Any = layer, ids: Any = ids) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant(ids, tf.int64)) * tf.constant([1.5, -2.0]))
            return function(tape.gradient(loss, layer.rows))

        found.append(step().numpy())
    np.testing.assert_array_equal(*found)


DENSE: dict[str, Callable[[Any], Any]] = {
    "exp": tf.exp,
    "a number more": lambda g: g + 1.0,
    "clipped to above zero": lambda g: tf.clip_by_value(g, 1.0, 2.0),
    "sum of columns": lambda g: tf.reduce_sum(g, axis=0),
    "comparison": lambda g: g > 0,
    "keras.ops.add": lambda g: keras.ops.add(g, g * 1.0 + g),
    "keras.ops.exp": keras.ops.exp,
    "where": lambda g: tf.where(tf.greater(g, 0.0), g, 0.0),
    "noise": lambda g: g + tf.random.normal((3, DIM)),
}


@pytest.mark.parametrize("rows", [10**12, None], ids=["closed", "open"])
@pytest.mark.parametrize("function", DENSE.values(), ids=DENSE)
def test_what_would_touch_all_rows_is_refused(function: Any, rows: int | None) -> None:
    layer: Any = erk.Embedding(rows, DIM, "zeros")
    layer.build()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([7])))
    gradient = tape.gradient(loss, layer.rows)
    with pytest.raises(UnsupportedError, match=r"cannot become a dense tensor for .*gradient\.with_values"):
        function(gradient)


# ---------------------------------------------------------------- many lookups


@pytest.mark.parametrize("wrap", [*slow("eager", "function")])
def test_eight_lookups_of_forty_steps(wrap: str) -> None:
    def eight(look: Look, k: int) -> tf.Tensor:
        return (
            tf.add_n([tf.reduce_sum(look(tf.math.floormod(IDS + j + k, ROWS)) * WEIGHTS) / (j + 1.0) for j in range(8)])
            / 40
        )

    both(CHANGES["clip_by_global_norm"], eight, micro=40, wrap=WAYS[wrap])


def test_a_cell_looks_up_three_hundred_times() -> None:
    class Cell(keras.layers.Layer):
        def __init__(self, embedding: Any) -> None:
            super().__init__()
            self.embedding, self.state_size, self.output_size = embedding, DIM, DIM

        def call(self, inputs: Any, states: Any) -> Any:
            state = 0.99 * states[0] + self.embedding(keras.ops.cast(inputs[:, 0], "int64"))
            return state, [state]

    steps = 300
    ids = np.random.default_rng(0).integers(0, ROWS, (2, steps, 1)).astype(np.float32)
    layer, table = made()
    inputs = keras.Input((steps, 1))
    model: Any = keras.Model(inputs, keras.layers.RNN(Cell(layer))(inputs))
    model.compile(erk.optimizer(SGD(0.01)), "mse")
    model.fit(ids, np.zeros((2, DIM), np.float32), verbose=0)
    decay = 0.99 ** np.arange(steps - 1, -1, -1)
    hot = np.eye(ROWS)[ids[..., 0].astype(int)] * decay[:, np.newaxis]
    out = (hot @ FIRST).sum(axis=1)
    expected = FIRST - 0.01 * np.einsum("bsr,bd->rd", hot, 2 * out / out.size)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("wrap", "rounds"), [(lambda f: f, 12), (tf.function, _tf.constant(12))], ids=WAYS)
def test_passes_that_share_a_number(wrap: Any, rounds: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("embedrock.keras.training.pending.SINGLES", 5)
    layer, _ = made()

    def gradients(rounds: Any) -> list[tf.Tensor]:
        found = []
        for _ in range(3):
            total = tf.zeros(())
            with tf.GradientTape() as tape:
                for _ in range(rounds) if isinstance(rounds, int) else tf.range(rounds):
                    total += once(layer, 0)
            found.append(tape.gradient(total, layer.rows).values)
        return found

    one = gradients(1)[0]
    np.testing.assert_allclose(wrap(gradients)(rounds), [12 * one] * 3, rtol=1e-5)


def test_a_sum_of_some_of_the_passes_that_share_a_number_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("embedrock.keras.training.pending.SINGLES", 2)
    grads = RowGradients.sum(make_plan(np.array([1, 3])), np.ones((2, DIM), np.float32))
    pending = PendingGradients(RowGradients.sum_of)
    tokens = [pending.add((0, 0), lookup, grads) for lookup in range(5)]
    for some in (tokens[4], sum(tokens[:4])):
        with pytest.raises(ArgumentError, match=r"of some of more than 2 backward .*long loop before the next"):
            pending.take(np.asarray(some))
    found = pending.take(np.asarray(sum(tokens)))
    assert found is not None
    np.testing.assert_array_equal(found.values, 5 * grads.values)


def test_three_hundred_steps_of_accumulation() -> None:
    layer, table = made()
    inputs: Any = keras.Input((3,), dtype="int64")
    model: Any = keras.Model(inputs, keras.layers.Flatten()(layer(inputs)))
    model.compile(erk.optimizer(SGD(0.5, gradient_accumulation_steps=300, clipnorm=0.5)), "mse")
    ids = np.random.default_rng(0).integers(0, ROWS, (600, 3))
    model.fit(ids[:300], np.zeros((300, 3 * DIM)), batch_size=1, shuffle=False, verbose=0)
    hot = np.eye(ROWS)[ids[:300]]
    grad = np.einsum("bsr,bsd->rd", hot, 2 * FIRST[ids[:300]] / (3 * DIM)) / 300
    grad *= 0.5 / max(0.5, np.linalg.norm(grad))
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), FIRST - 0.5 * grad, rtol=1e-4, atol=1e-5)
    assert table.steps == 1


# ---------------------------------------------------------------- refused


def test_an_optimizer_that_steps_in_its_own_way_is_refused() -> None:
    class Half(SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient * 0.5, variable, learning_rate)

    layer, table = made()
    gradient = tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([1]))
    with pytest.raises(UnsupportedError, match=r"rows cannot follow Half, whose update_step is not that of .*SGD"):
        erk.optimizer(Half(1.0)).apply([gradient], [layer.rows])
    assert table.steps == 0
    ruled: Any = erk.Embedding(er.Table(ROWS, DIM, init=er.Zeros()), rule=er.SGD())
    ruled.build()
    erk.optimizer(Half(1.0)).apply([gradient], [ruled.rows])
    np.testing.assert_array_equal(ruled.table.lookup(np.array([1])), [[-1.0, -1.0]])


@pytest.mark.parametrize("method", ["assign_sub", "_backend_update_step"])
def test_an_optimizer_that_writes_to_variables_in_its_own_way_is_refused(method: str) -> None:
    def nothing(*args: Any) -> None:
        raise AssertionError("called")

    layer, table = made()
    with pytest.raises(UnsupportedError, match=rf"rows cannot follow Own, whose {method} is not that of .*SGD"):
        erk.optimizer(type("Own", (SGD,), {method: nothing})(1.0)).build([layer.rows])
    assert table.rule is None


CHANGED = {"update_step": lambda *args: None, "weight_decay": 0.1}


@pytest.mark.parametrize("name", CHANGED)
def test_an_optimizer_that_was_changed_since_it_was_built_is_refused(name: str) -> None:
    layer, table = made()
    optimizer = erk.optimizer(SGD(1.0))
    optimizer.build([layer.rows])
    setattr(optimizer, name, CHANGED[name])
    with pytest.raises(UnsupportedError, match=f"rows cannot follow .*SGD.* {name}"):
        optimizer.apply([tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([1]))], [layer.rows])
    assert table.steps == 0


def test_a_step_that_is_refused_is_not_counted_by_the_optimizer_either() -> None:
    layer, _ = made()
    variables, optimizer = layer.trainable_variables, erk.optimizer(SGD(1.0))
    optimizer.build(variables)

    @tf.function
    def step(scale: Any) -> None:
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(layer(np.array([1])))
        optimizer.apply(tape.gradient(loss, variables), variables)

    step(tf.constant(1.0))
    for _ in range(3):
        with pytest.raises(tf.errors.OpError, match="NaN"):
            step(tf.constant(np.nan, tf.float32))
    assert int(optimizer.iterations) == 1
    step(tf.constant(1.0))
    assert int(optimizer.iterations) == 2


def test_a_subclass_that_changes_gradients_is_followed() -> None:
    class Half(SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> None:
            super().apply([g * 0.5 for g in grads], trainable_variables)

    layer, table = made()
    erk.optimizer(Half(1.0)).apply([tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([1]))], [layer.rows])
    np.testing.assert_array_equal(table.lookup(np.array([1])), FIRST[1:2] - 0.5)


@pytest.mark.parametrize("wrap", WAYS.values(), ids=WAYS)
def test_vectorized_lookups_are_refused(wrap: Any) -> None:
    layer, _ = made()
    with pytest.raises(Exception, match=r"tf.vectorized_map drops the gradients .* layer\(ids\)"):
        wrap(lambda: tf.vectorized_map(lambda ids: layer(ids[0]) + layer(ids[1]), IDS))()


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda v, g: v.assign(np.zeros((ROWS, DIM))),
    "assign_sub": lambda v, g: v.assign_sub(g),
    "assign_add": lambda v, g: v.assign_add(tf.ones((ROWS, DIM))),
    "scatter its value": lambda v, g: v.value.scatter_nd_update([[0]], [1.0]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_stands_for_rows_is_not_written_to(write: Callable[[Any, Any], Any]) -> None:
    layer, _ = made()
    with pytest.raises(erk.ForgottenGradientsError, match=r"something writes to .* Rows are written by layer\.table"):
        write(layer.rows, tf.ones((ROWS, DIM)))


def test_how_many_rows_a_gradient_is_of() -> None:
    layer, _ = made()
    assert len(gradient_of(layer)) == ROWS
    layer = erk.Embedding(None, DIM)
    with pytest.raises(TypeError, match="open ids has no length"):
        len(gradient_of(layer))


@pytest.mark.parametrize("rows", [ROWS, 10**9], ids=["small", "large"])
def test_histograms_of_tensorboard(rows: int, tmp_path: Any, monkeypatch: Any) -> None:
    layer = erk.Embedding(rows, DIM)
    layer.build()
    callback: Any = keras.callbacks.TensorBoard(tmp_path, histogram_freq=1, write_graph=False)
    callback.set_model(keras.Sequential([layer]))
    if rows == ROWS:
        seen: list[Any] = []
        written = SimpleNamespace(histogram=lambda name, data, step: seen.append(_tf.convert_to_tensor(data)))
        callback._train_writer  # noqa: B018  # which is made of the real one
        monkeypatch.setattr(keras.callbacks.TensorBoard, "summary", written)
        callback._log_weights(0)
        np.testing.assert_array_equal(seen[0], layer.table.lookup(np.arange(ROWS)))
    else:
        with pytest.raises(UnsupportedError, match=r"TensorBoard\(histogram_freq=.*has too many"):
            callback._log_weights(0)


READS: dict[str, Callable[[Any], Any]] = {
    "l2_loss": tf.nn.l2_loss,
    "norm": tf.norm,
    "as an array": np.asarray,
    "squared": lambda v: v**2,
    "Keras' sum": keras.ops.sum,
    "numpy": lambda v: v.numpy(),
    "value": lambda v: v.value + 1.0,
    "value as an array": lambda v: v.value.numpy(),
    "l2_loss of its value": lambda v: tf.nn.l2_loss(v.value),
    "a list of values": lambda v: tf.reduce_sum([v.value]),
    "a row of its value": lambda v: tf.gather(v.value, [0]),
    "value as an argument": lambda v: tf.function(tf.nn.l2_loss)(v.value),
    "by a tensor": lambda v: tf.constant(2.0) * v,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_stands_for_rows_is_not_read(read: Callable[[Any], Any]) -> None:
    layer, _ = made()
    with pytest.raises(Exception, match=r"the rows of 'embedding.*', erk\.Embedding.* layer\.table\.lookup"):
        read(layer.rows)


@pytest.mark.parametrize("name", ["embeddings", "item", "item_embedding/.*", "^embeddings", "rows", "user"])
def test_weight_decay_leaves_rows_out_by_the_name_that_keras_gives_them(name: str) -> None:
    theirs = keras.layers.Embedding(ROWS, DIM, name="item_embedding")
    ours = erk.Embedding(ROWS, DIM, name="item_embedding")
    kept = []
    for layer in (theirs, ours):
        layer.build(None)
        optimizer = erk.optimizer(keras.optimizers.AdamW(0.1, weight_decay=0.5))
        optimizer.exclude_from_weight_decay(var_names=[name])
        optimizer.build(layer.trainable_variables)
        before = layer(np.array([0]))
        variables = layer.trainable_variables
        with tf.GradientTape() as tape:
            loss = 0.0 * tf.reduce_sum(layer(np.array([0])))
        optimizer.apply(tape.gradient(loss, variables), variables)
        kept.append(bool(np.allclose(layer(np.array([0])), before)))
    assert kept == ([False, True] if name == "rows" else [kept[0]] * 2)
    assert kept[0] == (name in ("embeddings", "item", "item_embedding/.*"))
