"""One exact step for each batch: under fit, the optimizers' options and loops of the user's own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from dense_twins import ROWS, batches, dense, every_row, first_values, one_hot, ours

import embedrock as er
import embedrock.keras as erk
from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.storage.records import Records
from embedrock.table import batches as batches_of_tables
from slow import slow

SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam
DECAY = keras.optimizers.schedules.ExponentialDecay


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**15)


def fit(model, inputs, targets, **options):
    return model.fit(inputs, targets, batch_size=16, epochs=2, shuffle=False, verbose=0, **options)


# How far the twins may drift apart: rounding. Rows move by 0.1 and more.
ROUNDED, ADAM = 1e-7, 1e-5

CASES = {
    "sgd": (lambda: SGD(0.05), ROUNDED),
    "schedule": (lambda: SGD(DECAY(0.05, 5, 0.9)), ROUNDED),
    "clipnorm": (lambda: SGD(0.05, clipnorm=0.3), ROUNDED),
    "global clipnorm": (lambda: SGD(0.05, global_clipnorm=0.5), ROUNDED),
    "clipvalue": (lambda: SGD(0.05, clipvalue=0.01), ROUNDED),
    "accumulation": (lambda: SGD(0.05, gradient_accumulation_steps=3), ROUNDED),
    "accumulation, clipped": (lambda: SGD(0.05, gradient_accumulation_steps=3, global_clipnorm=0.2), ROUNDED),
    "loss scale": (lambda: scaled(SGD(0.05)), ROUNDED),
    "loss scale, clipped": (lambda: scaled(SGD(0.05, global_clipnorm=0.5)), ROUNDED),
    "momentum": (lambda: SGD(DECAY(0.02, 5, 0.9), momentum=0.9), ROUNDED),
    "nesterov": (lambda: SGD(0.02, momentum=0.9, nesterov=True), ROUNDED),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.05), ROUNDED),
    "rmsprop": (lambda: keras.optimizers.RMSprop(DECAY(0.01, 5, 0.9)), 1e-6),
    "ftrl": (lambda: keras.optimizers.Ftrl(0.5, l1_regularization_strength=0.01), 1e-6),
    "adamw": (lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1), ADAM),
    "adam, decaying": (lambda: Adam(0.02, weight_decay=0.1), ADAM),
    "adam": (lambda: Adam(0.02), ADAM),
    "adam, schedule": (lambda: Adam(DECAY(0.02, 5, 0.9)), ADAM),
}


@pytest.mark.parametrize("rule", [er.Ftrl(), er.Adam(dense=True)], ids=repr)
def test_a_schedule_may_end_at_zero(rule: er.Rule) -> None:
    ids, layer = np.arange(64).reshape(-1, 1) % 7, erk.Embedding(ROWS, 4, rule=rule)
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer(SGD(keras.optimizers.schedules.PolynomialDecay(0.1, 4, 0.0))), loss="mse")
    first = layer.table.lookup(np.arange(7))
    fit(model, ids, np.ones(64))
    moved = layer.table.lookup(np.arange(7))
    assert not np.array_equal(moved, first)
    fit(model, ids, np.ones(64))
    np.testing.assert_array_equal(layer.table.lookup(np.arange(7)), moved)
    assert layer.table.steps == 16


# Each is part of another case, or a rule that tests/keras/test_rules_against_keras.py follows step by step.
PARTS = "schedule", "accumulation", "loss scale", "momentum", "adam", "adam, schedule", "rmsprop", "nesterov"
PARTS += "adagrad", "ftrl"


@pytest.mark.parametrize("case", [*(case for case in CASES if case not in PARTS), *slow(*PARTS)])
def test_fit_does_to_rows_what_it_does_to_a_variable(case):
    make, tolerance = CASES[case]
    ids, targets = batches()
    model, table = ours(erk.optimizer(make()))
    twin, layer = dense(make(), run_eagerly=True)
    losses = fit(model, ids, targets).history["loss"]
    expected = fit(twin, one_hot(ids), targets).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(every_row(table), layer.get_weights()[0], rtol=0, atol=tolerance)
    assert np.abs(every_row(table) - first_values()).max() > 100 * tolerance


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 4}], ids=str)
def test_ways_to_run_give_the_same_rows(options):
    ids, targets = batches()
    tables = []
    for more in ({}, options):
        keras.utils.set_random_seed(0)
        model, table = ours(erk.optimizer(SGD(0.05)), **more)
        fit(model, ids, targets)
        tables.append(every_row(table))
    np.testing.assert_allclose(tables[0], tables[1], rtol=0, atol=1e-8)  # TensorFlow fuses operations of graphs


def test_steps_of_an_unrolled_graph_come_one_after_the_other():
    """Several steps in one graph, where TensorFlow orders operations by variables only."""
    ids, targets = batches()
    model, table = ours(erk.optimizer(SGD(0.05)))
    other, expected = ours(erk.optimizer(SGD(0.05)))

    def step(model, k):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids[16 * k : 16 * k + 16]) - targets[16 * k : 16 * k + 16]) ** 2)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    model.optimizer.build(model.trainable_variables)

    @tf.function
    def unrolled():
        seen = []
        for k in range(4):
            step(model, k)
            seen.append(tf.identity(model.layers[1](ids[:16], training=False)))
        return seen

    for k, seen in enumerate(unrolled()):
        step(other, k)
        np.testing.assert_allclose(seen, expected.lookup(ids[:16]), rtol=0, atol=1e-8)
    assert table.steps == 4


def loop(model, ids, targets, apply):
    """A loop of the user's own; `apply` is given the number of the step, the gradients and the variables."""
    for k in range(0, len(ids), 16):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids[k : k + 16]) - targets[k : k + 16]) ** 2)
        variables = model.trainable_variables
        apply(k // 16, tape.gradient(loss, variables), variables)


def both(make, apply):
    """Run the same loop on both twins; return the rows of ours, and of the other."""
    ids, targets = batches()
    model, table = ours(erk.optimizer(make()))
    twin, layer = dense(make())
    loop(model, ids, targets, apply(model.optimizer))
    loop(twin, one_hot(ids), targets, apply(twin.optimizer))
    return every_row(table), layer.get_weights()[0]


def test_a_skipped_step_leaves_nothing_behind():
    def apply(optimizer):
        return lambda k, grads, variables: None if k % 3 == 1 else optimizer.apply(grads, variables)

    mine, theirs = both(lambda: SGD(0.05), apply)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDED)


def test_gradients_are_added_up_and_scaled_by_hand():
    def apply(optimizer):
        kept = []

        def step(k, grads, variables):
            kept.append(grads)
            if len(kept) == 2:
                optimizer.apply([0.25 * one + 0.75 * two for one, two in zip(*kept, strict=True)], variables)
                kept.clear()

        return step

    mine, theirs = both(lambda: SGD(0.05), apply)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDED)


def test_gradients_are_clipped_by_hand():
    def apply(optimizer):
        return lambda k, grads, variables: optimizer.apply(tf.clip_by_global_norm(grads, 0.3)[0], variables)

    mine, theirs = both(lambda: SGD(0.05), apply)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDED)


def test_a_step_that_loss_scaling_skips():
    ids, targets = batches()
    targets[32:48] = np.inf  # one batch of six
    model, table = ours(scaled(erk.optimizer(SGD(0.05))))
    twin, layer = dense(scaled(SGD(0.05)))
    fit(model, ids, targets)
    fit(twin, one_hot(ids), targets)
    np.testing.assert_allclose(every_row(table), layer.get_weights()[0], rtol=0, atol=ROUNDED)
    assert table.steps == 10


def test_gradients_that_are_not_finite_are_refused_as_a_whole():
    ids, targets = batches()
    targets[32:48] = np.nan
    model, table = ours(erk.optimizer(Adam(0.02)))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"gradients of .*, erk\.Embedding.* must be finite: got NaN"
    ):
        fit(model, ids, targets)
    assert table.steps == 2
    assert int(model.optimizer.iterations) == 2
    assert np.isfinite(every_row(table)).all()
    assert all(np.isfinite(each).all() for each in model.layers[-1].get_weights())


def test_frozen_rows_stay():
    ids, targets = batches()
    model, table = ours(erk.optimizer(SGD(0.05)))
    model.layers[1].trainable = False
    model.compile(erk.optimizer("adam"), "mse")
    fit(model, ids, targets)
    assert table.steps == 0
    model.layers[1].trainable = True
    model.compile(erk.optimizer("adam"), "mse")
    fit(model, ids, targets)
    assert table.steps == 12


def test_two_lookups_of_one_table_are_one_step():
    """Ids that both inputs have get one summed gradient, also in the norm that clipping looks at."""

    def model_of(make_layer, shape, optimizer):
        one, two = (keras.Input(shape, dtype=dtype) for _ in range(2))
        layer = make_layer()
        both = keras.layers.Subtract()([layer(one), keras.layers.Rescaling(0.5)(layer(two))])
        pooled = keras.layers.GlobalAveragePooling1D()(both)
        model = keras.Model([one, two], keras.layers.Dense(1, kernel_initializer="ones")(pooled))
        model.compile(optimizer, "mse")
        return model, layer

    ids, targets = batches()
    dtype = "int64"
    table = er.Table(ROWS, 4, init=er.FromArray(first_values()))
    model, _ = model_of(lambda: erk.Embedding(table), (5,), erk.optimizer(SGD(0.05, global_clipnorm=0.2)))
    dtype = "float32"
    twin, layer = model_of(lambda: keras.layers.Dense(4, use_bias=False), (5, ROWS), SGD(0.05, global_clipnorm=0.2))
    layer.set_weights([first_values()])
    fit(model, [ids, ids[:, ::-1]], targets)
    fit(twin, [one_hot(ids), one_hot(ids[:, ::-1])], targets)
    np.testing.assert_allclose(every_row(table), layer.get_weights()[0], rtol=0, atol=ROUNDED)
    assert table.steps == 12


@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "graph"])
def test_gradients_that_went_through_tensorflow_keep_the_plans_of_their_lookups(monkeypatch, run_eagerly):
    plans, taken, plan_of, step = [], [], batches_of_tables.plan, Records.step
    monkeypatch.setattr(batches_of_tables, "plan", lambda *args: plans.append(1) or plan_of(*args))
    monkeypatch.setattr(Records, "step", lambda self, *args: taken.append(len(args[6])) or step(self, *args))
    ids, targets = batches()
    model, table = ours(erk.optimizer(Adam(0.05, global_clipnorm=0.2)))
    model.run_eagerly = run_eagerly
    fit(model, ids, targets)
    assert table.steps == len(taken) == len(plans)
    assert set(taken[1:]) == {1}  # the rows that the lookup brought up to date; before the first one there was no rule


def test_recomputed_lookups_are_exact():
    ids, targets = batches(16)
    rows = []
    for wrap in (lambda f: f, tf.recompute_grad):
        model, table = ours(erk.optimizer(SGD(0.05)))
        call = wrap(lambda x, model=model: model(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((call(tf.constant(ids)) - targets) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        rows.append(every_row(table))
        assert table.steps == 1
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("function", [lambda f: f, tf.function], ids=["eager", "function"])
def test_a_persistent_tape_gives_as_many_gradients_as_it_is_asked_for(function):
    ids, _ = batches(16)
    model, table = ours(erk.optimizer(SGD(0.05)))
    model.optimizer.build(model.trainable_variables)

    @function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(model(ids))
        grads = [tape.gradient(loss, model.trainable_variables) for _ in range(2)]
        model.optimizer.apply([one - 0.5 * two for one, two in zip(*grads, strict=True)], model.trainable_variables)

    step()
    half, expected = ours(erk.optimizer(SGD(0.025)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(half(ids))
    half.optimizer.apply(tape.gradient(loss, half.trainable_variables), half.trainable_variables)
    np.testing.assert_allclose(every_row(table), every_row(expected), rtol=0, atol=ROUNDED)
    assert table.steps == 1


@pytest.mark.parametrize("plain", ["sgd", "adam", "rmsprop"])
def test_an_optimizer_that_cannot_step_rows_is_told_at_the_first_step(plain):
    ids, targets = batches()
    model, table = ours(plain)
    before = model.layers[-1].get_weights()
    with pytest.raises(erk.ForgottenGradientsError, match=r"optimizer=erk.optimizer\(\"adam\"\)"):
        fit(model, ids, targets)
    assert table.steps == 0
    np.testing.assert_array_equal(model.layers[-1].get_weights()[0], before[0])


def test_gradients_may_be_applied_twice():
    def apply(optimizer):
        return lambda k, grads, variables: [optimizer.apply(grads, variables) for _ in range(2)]

    mine, theirs = both(lambda: SGD(0.05), apply)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=ROUNDED)


def test_state_that_steps_leave_in_rows_is_of_one_optimizer_at_a_time():
    ids, targets = batches(16)
    model, table = ours(erk.optimizer(Adam(0.05)))
    fit(model, ids, targets)
    other, _ = ours(erk.optimizer(Adam(0.1)), table=table)
    fit(other, ids, targets)
    with pytest.raises(tf.errors.InvalidArgumentError, match="are held by another optimizer, which was built later"):
        fit(model, ids, targets)
    assert table.steps == 4


@pytest.mark.parametrize("rule", [None, er.Adam()], ids=["no state", "the layer's state"])
def test_optimizers_step_rows_in_turn_where_no_state_is_theirs(rule):
    layer = erk.Embedding(er.Table(ROWS, 4, init=er.Zeros()), rule=rule)
    layer.build()
    optimizers = [erk.optimizer(SGD(lr)) for lr in (0.5, 0.25)]
    for k in range(4):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(np.array([1])))
        optimizers[k % 2].apply([tape.gradient(loss, layer.rows)], [layer.rows])
    np.testing.assert_allclose(layer.table.lookup([1]), -1.5, rtol=1e-5)


def test_the_layer_brings_a_rule():
    ids, targets = batches()
    model, table = ours(erk.optimizer(Adam(0.02)), rule=er.SGD(lr=0.05))
    fit(model, ids, targets)
    assert table.rule == er.SGD(lr=0.05)
    other, borrowed = ours(erk.optimizer(Adam(0.05)), rule=er.SGD())
    fit(other, ids, targets)
    assert table.steps == borrowed.steps == 12
    assert np.abs(every_row(table) - first_values()).max() > 0.01
    with pytest.raises(ArgumentError, match="`rule` of layers that share a table must be the same"):
        erk.Embedding(table, rule=er.Adagrad()).build()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: erk.optimizer("nadam"), "rows cannot follow keras.optimizers.Nadam: there is no rule like it"),
        (lambda: erk.optimizer(Adam(use_ema=True)), "use_ema=True of Adam cannot go with"),
        (lambda: erk.optimizer(Adam(amsgrad=True)), "Adam with amsgrad=True: no rule has that"),
        (lambda: erk.optimizer(keras.optimizers.RMSprop(momentum=0.5)), "RMSprop with momentum=0.5: no rule has that"),
        (lambda: erk.optimizer(keras.optimizers.RMSprop(centered=True)), "centered=True"),
        (lambda: erk.optimizer(keras.optimizers.Ftrl(learning_rate_power=-0.4)), "learning_rate_power=-0.4"),
        (lambda: erk.optimizer(SGD(0.1, weight_decay=0.01)), "SGD with weight_decay=0.01: only those of .*AdamW decay"),
    ],
)
def test_optimizers_that_are_refused(optimizer, message):
    ids, targets = batches(16)
    model, table = ours(optimizer())
    with pytest.raises(UnsupportedError, match=message):
        fit(model, ids, targets)
    assert table.steps == 0


def test_weight_decay_that_leaves_rows_out():
    ids, targets = batches()
    optimizer = keras.optimizers.AdamW(0.02, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["rows"])
    model, table = ours(erk.optimizer(optimizer))
    fit(model, ids, targets)
    assert isinstance(table.rule, er.Adam)


@pytest.mark.parametrize("given", ["adamm", 3, None, keras.optimizers.Adam])
def test_what_is_no_optimizer(given):
    with pytest.raises(ArgumentError, match="must be given an optimizer"):
        erk.optimizer(given)


def test_the_optimizer_that_was_meant_is_named():
    with pytest.raises(ArgumentError, match=r"got 'adm'\. Did you mean 'adam'\?"):
        erk.optimizer("adm")


@pytest.mark.parametrize(
    ("name", "part"), [("lossscaleoptimizer", "inner_optimizer"), ("multioptimizer", "optimizer_map")]
)
def test_an_optimizer_made_of_others_is_to_be_an_instance(name, part):
    match = rf"must be given an optimizer.* got '{name}'\. Without '{part}' Keras cannot make it: pass an instance\."
    with pytest.raises(ArgumentError, match=match):
        erk.optimizer(name)


def pickled(one):
    return pickle.loads(pickle.dumps(one))


def scaled_sgd():
    return scaled(SGD(0.05))


@pytest.mark.parametrize(
    ("copied", "make"),
    [(pickled, Adam), *slow((copy.deepcopy, scaled_sgd), (pickled, scaled_sgd), (copy.deepcopy, Adam))],
)
def test_an_optimizer_can_be_pickled_and_copied(copied, make):
    (inputs, targets), results = batches(), []
    for optimizer in (erk.optimizer(make()), copied(erk.optimizer(make()))):
        model, table = ours(optimizer)
        fit(model, inputs, targets)
        results.append(every_row(table))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_nan_ends_training_by_our_error_or_by_the_callback(on_nonfinite):
    model, table = ours(erk.optimizer("sgd"), table=er.Table(ROWS, 4, on_nonfinite=on_nonfinite))
    (inputs, targets), callback = batches(), keras.callbacks.TerminateOnNaN()
    before, targets = every_row(table), targets + np.nan
    if on_nonfinite == "raise":
        with pytest.raises(tf.errors.InvalidArgumentError, match=r'pass on_nonfinite="skip" to leave such steps out'):
            fit(model, inputs, targets, callbacks=[callback])
    else:
        assert len(fit(model, inputs, targets, callbacks=[callback]).epoch) == 1
    np.testing.assert_array_equal(every_row(table), before)


def test_an_instance_becomes_one_that_steps_rows():
    plain = Adam(0.02, global_clipnorm=1.0)
    made = erk.optimizer(plain)
    assert made is plain
    assert erk.optimizer(made) is made
    assert isinstance(made, Adam)
    inner = erk.optimizer(scaled(SGD(0.1))).inner_optimizer
    assert isinstance(inner, erk.RowOptimizer)
    used = SGD(0.1)
    used.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ArgumentError, match="that was not used yet"):
        erk.optimizer(used)


def test_cost_follows_the_rows_touched():
    layer = erk.Embedding(10**12, 4)
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(erk.optimizer("adam"), "mse")
    model.fit(np.array([[3, 10**12 - 1]] * 8), np.ones((8, 1)), verbose=0)
    assert layer.table.stats()["rows_touched"] == 2


def test_a_model_that_is_let_go_of_leaves_nothing():
    """TensorFlow keeps the functions and gradients of a program for ever; they must not keep tables."""
    ids, targets = batches(32)
    model, table = ours(erk.optimizer(keras.optimizers.Adam(0.1, global_clipnorm=1.0)))
    fit(model, ids, targets)
    model.predict(ids, verbose=0)
    left = weakref.ref(table), weakref.ref(model.optimizer)
    del model, table
    gc.collect()
    assert [each() for each in left] == [None, None]


@pytest.mark.parametrize("make", [lambda: Adam(0.02), lambda: SGD(0.05, momentum=0.9)], ids=["adam", "momentum"])
def test_a_gradient_of_zeros_is_a_step(make):
    def apply(optimizer):
        return lambda k, grads, variables: optimizer.apply([g * float(k % 2 == 0) for g in grads], variables)

    mine, theirs = both(make, apply)
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=ADAM)


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "function"])
def test_gradients_that_nobody_applies_do_not_pile_up(is_graph):
    ids = batches(16)[0]
    model, table = ours(erk.optimizer(SGD(0.05)))
    layer = model.layers[1]

    def norm():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids))
        return tf.norm(tape.gradient(loss, layer.rows))

    look = tf.function(norm) if is_graph else norm
    assert len({float(look()) for _ in range(50)}) == 1
    assert len(layer.handle.pending._arrivals) <= 8
    assert table.steps == 0


def test_gradients_that_nobody_looks_at_are_not_computed(monkeypatch):
    monkeypatch.setattr("embedrock.keras.training.pending.SINGLES", 3)
    monkeypatch.setattr("embedrock.keras.training.pending.MANY", 2)
    ids = batches(16)[0]
    model, table = ours(erk.optimizer(SGD(0.05)))
    layer = model.layers[1]

    @tf.function
    def unused(rounds):
        total = tf.zeros(())
        with tf.GradientTape() as tape:
            for _ in range(rounds) if isinstance(rounds, int) else tf.range(rounds):
                total += tf.reduce_sum(layer(ids))
        tape.gradient(total, layer.rows)

    for _ in range(12):
        unused(1)
    assert not layer.handle.pending._arrivals
    with pytest.raises(tf.errors.OpError, match=r"more than 2 backward passes of a table wait, and no.*a loop"):
        unused(tf.constant(6))
    loop(model, ids, batches(16)[1], lambda k, grads, variables: model.optimizer.apply(grads, variables))
    assert table.steps == 1


def test_layers_on_one_table_are_trained_together_or_not_at_all():
    model, table = ours(erk.optimizer(SGD(0.05)))
    with pytest.raises(ArgumentError, match="`trainable` of layers that share a table must be the same"):
        erk.Embedding(table, trainable=False).build()
    assert model.layers[1].trainable_variables


def test_a_table_that_models_share_does_not_keep_their_others():
    shared, ids = er.Table(ROWS, 4), batches(16)[0]
    left = []
    for _ in range(2):
        inputs, other = keras.Input((5,), dtype="int64"), er.Table(ROWS, 4)
        both = keras.layers.Add()([erk.Embedding(shared)(inputs), erk.Embedding(other)(inputs)])
        model = keras.Model(inputs, keras.layers.Flatten()(both))
        model.compile(erk.optimizer("sgd"), "mse")
        model.fit(ids, np.zeros((16, 20)), verbose=0)
        left.append(weakref.ref(other))
        del model, other, inputs, both
    gc.collect()
    assert [each() for each in left] == [None, None]
    assert shared.steps == 2


def test_gradients_that_were_multiplied_by_zero_do_not_wait():
    """More steps of zeros than backward passes may wait for a step."""
    ids, targets = batches(16)
    model, table = ours(erk.optimizer(SGD(0.05)))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - targets) ** 2)
        grads = tape.gradient(loss, model.trainable_variables)
        zeros: list[Any] = [grad * 0.0 for grad in list[Any](grads)]
        model.optimizer.apply(zeros, model.trainable_variables)

    model.optimizer.build(model.trainable_variables)
    for _ in range(300):
        step()
    assert table.steps == 300
    np.testing.assert_array_equal(every_row(table), first_values())
