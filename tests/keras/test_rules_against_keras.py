"""The rules in Keras' forms against Keras' own optimizers, which train a one-hot Dense: every row, touched or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import embedrock as er

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
erk = pytest.importorskip("embedrock.keras")

ROWS, DIM, BATCH, STEPS = 50, 8, 12, 250
RESTING = slice(30, 40)  # rows that rest between the first and the last steps; those above are never touched

optimizers = keras.optimizers

# How to make an optimizer, and the rule that does the same to all rows of a table.
CASES: dict[str, tuple[Callable[[], Any], er.Rule]] = {
    "SGD": (lambda: optimizers.SGD(), er.SGD()),
    "momentum": (lambda: optimizers.SGD(momentum=0.9), er.Momentum(momentum=0.9, lr_inside=True, dense=True)),
    "nesterov": (
        lambda: optimizers.SGD(momentum=0.8, nesterov=True),
        er.Momentum(momentum=0.8, nesterov=True, lr_inside=True, dense=True),
    ),
    "Adagrad": (
        lambda: optimizers.Adagrad(),
        er.Adagrad(eps=1e-7, initial_accumulator_value=0.1, eps_inside=True),
    ),
    "Adagrad, large epsilon": (
        lambda: optimizers.Adagrad(initial_accumulator_value=0.0, epsilon=0.1),
        er.Adagrad(eps=0.1, eps_inside=True),
    ),
    "RMSprop": (lambda: optimizers.RMSprop(), er.RMSprop(alpha=0.9, eps=1e-7, eps_inside=True, dense=True)),
    "RMSprop, large epsilon": (
        lambda: optimizers.RMSprop(rho=0.99, epsilon=0.1),
        er.RMSprop(alpha=0.99, eps=0.1, eps_inside=True, dense=True),
    ),
    "Adam": (lambda: optimizers.Adam(), er.Adam(eps=1e-7, eps_hat=True, dense=True)),
    "Adam, large epsilon": (
        lambda: optimizers.Adam(beta_1=0.8, beta_2=0.99, epsilon=0.1),
        er.Adam(betas=(0.8, 0.99), eps=0.1, eps_hat=True, dense=True),
    ),
    "AdamW": (
        lambda: optimizers.AdamW(weight_decay=0.2),
        er.AdamW(eps=1e-7, weight_decay=0.2, eps_hat=True, dense=True),
    ),
    "Ftrl": (lambda: optimizers.Ftrl(), er.Ftrl(dense=True)),
    "Ftrl, all strengths": (
        lambda: optimizers.Ftrl(l1_regularization_strength=0.05, l2_regularization_strength=0.1, beta=1.0),
        er.Ftrl(l1=0.05, l2=0.1, beta=1.0, dense=True),
    ),
}

# How far rows may be off, as a part of the largest movement. Keras computes 1 - beta_2^t in float32, where 1 - 0.999 is
# off by 5e-5: that is in its first steps of Adam.
ROUNDED, ADAM = 1e-6, 2e-5

# Near misses: what the forms above are for.
WRONG = {
    "momentum": er.Momentum(momentum=0.9, dense=True),
    "Adagrad, large epsilon": er.Adagrad(eps=0.1),
    "RMSprop, large epsilon": er.RMSprop(alpha=0.99, eps=0.1, eps_inside=True),
    "Adam, large epsilon": er.Adam(betas=(0.8, 0.99), eps=0.1, dense=True),
    "AdamW": er.AdamW(eps=1e-7, weight_decay=0.2, eps_hat=True),
    "Ftrl": er.Ftrl(),
}


def learning_rate(step: int) -> float:
    """Return one that falls and rises."""
    return 0.05 * 0.99**step * (1 + 0.5 * np.sin(step / 7))


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (ids, grads) with repeated ids, rows that are touched seldom, and rows that rest for 200 steps."""
    rng, made = np.random.default_rng(0), []
    for step in range(STEPS):
        ids = np.minimum(rng.zipf(1.3, BATCH) - 1, RESTING.start - 1)
        if step < 20 or step >= STEPS - 5:
            ids[:5] = rng.integers(RESTING.start, RESTING.stop, 5)
        made.append((ids, rng.standard_normal((BATCH, DIM)).astype(np.float32)))
    return made


def train_dense(optimizer: Any, first: np.ndarray) -> np.ndarray:
    """Return the kernel of a one-hot Dense, float32 (ROWS, DIM), after all batches."""
    layer = keras.layers.Dense(DIM, use_bias=False)
    layer.build((None, ROWS))
    layer.kernel.assign(first)
    optimizer.build([layer.kernel])

    @tf.function
    def train(ids: Any, grads: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.one_hot(ids, ROWS)) * grads)
        optimizer.apply(tape.gradient(loss, [layer.kernel]), [layer.kernel])

    for step, (ids, grads) in enumerate(batches()):
        optimizer.learning_rate = learning_rate(step)
        train(tf.constant(ids), tf.constant(grads))
    return layer.kernel.numpy()


def train_rows(rule: er.Rule, first: np.ndarray) -> np.ndarray:
    """Return the same of a table."""
    with er.Table(ROWS, DIM, rule=rule, init=er.FromArray(first)) as table:
        for step, (ids, grads) in enumerate(batches()):
            table.update(ids, grads, lr=learning_rate(step))
        return table.lookup(np.arange(ROWS))


def distance(ours: np.ndarray, theirs: np.ndarray, first: np.ndarray) -> float:
    """Return the largest difference, as a part of the largest movement."""
    return np.abs(ours - theirs).max() / np.abs(theirs - first).max()


@pytest.fixture(scope="module")
def after_keras() -> dict[str, np.ndarray]:
    """What Keras' optimizers made of the first weights."""
    return {name: train_dense(make(), FIRST) for name, (make, _) in CASES.items()}


FIRST = np.random.default_rng(1).normal(0, 0.3, (ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_rows_follow_keras(name: str, after_keras: dict[str, np.ndarray]) -> None:
    limit = ADAM if "Adam" in name else ROUNDED
    assert distance(train_rows(CASES[name][1], FIRST), after_keras[name], FIRST) < limit


@pytest.mark.parametrize("name", WRONG)
def test_near_misses_are_told_apart(name: str, after_keras: dict[str, np.ndarray]) -> None:
    assert distance(train_rows(WRONG[name], FIRST), after_keras[name], FIRST) > 1e-3


def train_two(make: Callable[[], Any], ours: bool, left_out: Callable[[int], int]) -> list[np.ndarray]:
    """Return two tables, or variables, after steps of one optimizer each of which leaves one of them out."""
    made = make()
    if ours:
        made, layers = erk.optimizer(made), [erk.Embedding(er.Table(ROWS, DIM, init=er.FromArray(FIRST))) for _ in "ab"]
        for layer in layers:
            layer.build()
        variables = [layer.rows for layer in layers]
    else:
        layers, variables = [], [keras.Variable(FIRST) for _ in "ab"]
    made.build(variables)
    made.learning_rate = 0.05
    for step, (ids, grads) in enumerate(batches()[:8]):
        stepped = 1 - left_out(step)
        with tf.GradientTape() as tape:
            rows = layers[stepped](ids) if ours else tf.matmul(tf.one_hot(ids, ROWS), variables[stepped])
            loss = tf.reduce_sum(rows * grads)
        made.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return [layer.table.lookup(np.arange(ROWS)) for layer in layers] or [each.numpy() for each in variables]


LEFT_OUT = {"in turn": lambda step: step % 2, "until the last steps": lambda step: int(step < 5)}


@pytest.mark.parametrize("when", LEFT_OUT)
@pytest.mark.parametrize("name", ["momentum", "RMSprop", "Adam", "AdamW", "Ftrl"])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_steps_that_leave_a_table_out_count_as_for_a_variable(name: str, when: str) -> None:
    theirs, ours = (train_two(CASES[name][0], each, LEFT_OUT[when]) for each in (False, True))
    limit = ADAM if "Adam" in name else ROUNDED
    for mine, other in zip(ours, theirs, strict=True):
        assert distance(mine, other, FIRST) < limit
