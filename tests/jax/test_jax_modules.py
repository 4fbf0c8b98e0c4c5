"""Models of Flax and of Equinox: they train as a function of JAX does, to the bit, with schedules for both kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import embedrock as er
import embedrock.jax as ej
from embedrock.jax import Embed

DIM, SIZE, STEPS, ROWS = 8, 32, 6, 50
# A model: its start, its step, and its dense weights. A step takes where the model is, a batch and targets, and returns
# where it is then; and row gradients, whether they are finite, and the loss.
Model = tuple[Any, Callable[[Any, ej.Batch, Any], tuple[Any, tuple[Any, Any, Any]]], Callable[[Any], Any]]


def tables() -> ej.Tables:
    def table(seed: int) -> er.Table:
        return er.Table(rows=ROWS, dim=DIM, rule=er.Adam(), init=er.Normal(), seed=seed, on_nonfinite="skip")

    return ej.Tables({"user": table(0), "item": table(1)})


def batches(nan_at: int | None = None) -> Iterator[tuple[Any, np.ndarray]]:
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        items = {"clicked": rng.integers(0, ROWS, SIZE), "history": rng.integers(0, ROWS, (SIZE, 3))}
        targets = rng.normal(size=SIZE).astype(np.float32)
        targets[3] = np.nan if step == nan_at else targets[3]
        yield {"user": rng.integers(0, ROWS, SIZE), "item": items}, targets


def weights(side: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(side).normal(0, 0.5, (DIM, DIM)), jnp.float32)


def score(user: Any, item: Any) -> Any:
    return jnp.sum(jax.nn.relu(user) * jax.nn.relu(item), -1)


def optimizer() -> optax.GradientTransformation:
    return optax.adam(optax.linear_schedule(0.1, 0.01, STEPS))


# ---------------------------------------------------------------- the same model, five times


def of_functions() -> Model:
    tx, start = optimizer(), {"user": weights(0), "item": weights(1)}

    def loss_of(dense: Any, rows: Any, batch: ej.Batch, targets: Any) -> Any:
        vectors = batch.with_rows(rows).lookup()
        item = vectors["item"]["clicked"] + vectors["item"]["history"].mean(1)
        return jnp.mean((score(vectors["user"] @ dense["user"], item @ dense["item"]) - targets) ** 2)

    @jax.jit
    def step(own: Any, batch: ej.Batch, targets: Any) -> Any:
        dense, state = own
        loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(dense, batch.rows, batch, targets)
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = tx.update(grads, state, dense)
        dense, state = ej.where(finite, (optax.apply_updates(dense, updates), new), (dense, state))
        return (dense, state), (row_grads, finite, loss)

    return (start, tx.init(start)), step, lambda own: own[0]


class FlaxTowers(nnx.Module):
    def __init__(self) -> None:
        self.user, self.clicked, self.history = Embed("user"), Embed("item", "clicked"), Embed("item", "history")
        self.of_user, self.of_item = nnx.Param(weights(0)), nnx.Param(weights(1))

    def __call__(self, batch: ej.Batch) -> Any:
        item = self.clicked(batch) + self.history(batch).mean(1)
        return score(self.user(batch) @ self.of_user[...], item @ self.of_item[...])


def flax_loss(model: FlaxTowers, rows: Any, batch: ej.Batch, targets: Any) -> Any:
    return jnp.mean((model(batch.with_rows(rows)) - targets) ** 2)


def dense_of(model: Any) -> dict[str, Any]:
    return {"user": model.of_user[...], "item": model.of_item[...]}


def of_nnx_jit() -> Model:
    model = FlaxTowers()
    dense = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: FlaxTowers, dense: nnx.Optimizer, batch: ej.Batch, targets: Any) -> Any:
        loss, (grads, row_grads) = nnx.value_and_grad(flax_loss, argnums=(0, 1))(model, batch.rows, batch, targets)
        finite = ej.all_finite(loss, grads, row_grads)
        before = jax.tree.map(lambda leaf: leaf, nnx.state((model, dense)))
        dense.update(model, grads)
        nnx.update((model, dense), ej.where(finite, nnx.state((model, dense)), before))
        return row_grads, finite, loss

    def stepped(own: Any, batch: ej.Batch, targets: Any) -> Any:
        model, dense = own
        return own, step(model, dense, batch, targets)

    return (model, dense), stepped, lambda own: dense_of(own[0])


def of_nnx_split() -> Model:
    graph, start = nnx.split(FlaxTowers())
    tx = optimizer()

    @jax.jit
    def step(own: Any, batch: ej.Batch, targets: Any) -> Any:
        params, state = own

        def loss_of(params: Any, rows: Any) -> Any:
            return flax_loss(nnx.merge(graph, params), rows, batch, targets)

        loss, (grads, row_grads) = jax.value_and_grad(loss_of, (0, 1))(params, batch.rows)
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = tx.update(grads, state, params)
        params, state = ej.where(finite, (optax.apply_updates(params, updates), new), (params, state))
        return (params, state), (row_grads, finite, loss)

    return (start, tx.init(start)), step, lambda own: dense_of(nnx.merge(graph, own[0]))


class EquinoxTowers(eqx.Module):
    of_user: jax.Array
    of_item: jax.Array
    user: Embed = Embed("user")
    clicked: Embed = Embed("item", "clicked")
    history: Embed = Embed("item", "history")

    def __call__(self, batch: ej.Batch) -> Any:
        item = self.clicked(batch) + self.history(batch).mean(1)
        return score(self.user(batch) @ self.of_user, item @ self.of_item)


def of_equinox(whole_batch: bool) -> Model:
    """Differentiate by rows, or by the batch: Equinox takes its floats."""
    start, tx = EquinoxTowers(weights(0), weights(1)), optimizer()

    @eqx.filter_value_and_grad
    def loss_of(given: Any, batch: ej.Batch, targets: Any) -> Any:
        model, rows = given
        return jnp.mean((model(rows if whole_batch else batch.with_rows(rows)) - targets) ** 2)

    @eqx.filter_jit
    def step(own: Any, batch: ej.Batch, targets: Any) -> Any:
        model, state = own
        loss, (grads, of_rows) = loss_of((model, batch if whole_batch else batch.rows), batch, targets)
        row_grads = of_rows.rows if whole_batch else of_rows
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = tx.update(grads, state, model)
        model, state = ej.where(finite, (eqx.apply_updates(model, updates), new), (model, state))
        return (model, state), (row_grads, finite, loss)

    return (start, tx.init(eqx.filter(start, eqx.is_array))), step, lambda own: dense_of(own[0])


MODELS: dict[str, Callable[[], Model]] = {
    "nnx.jit": of_nnx_jit,
    "jax.jit of nnx": of_nnx_split,
    "equinox": lambda: of_equinox(False),
    "equinox by batch": lambda: of_equinox(True),
}


def train(make: Callable[[], Model], steps: int = STEPS) -> dict[str, np.ndarray]:
    """Return what a run ends with: rows, dense weights, losses and numbers of steps. Its last batch has NaN."""
    (own, step, dense_of), given, losses = make(), tables(), []
    schedule = optax.linear_schedule(0.1, 0.02, STEPS)
    for batch, (_, targets) in ej.prefetch(islice(batches(nan_at=STEPS - 1), steps), given):
        own, (row_grads, finite, loss) = step(own, batch, targets)
        given.apply(batch, row_grads, finite, lr=schedule)
        losses.append(loss)
    rows = {name: table.lookup(np.arange(ROWS)) for name, table in given.by_name.items()}
    dense = {f"dense {name}": weights for name, weights in dense_of(own).items()}
    found = {**rows, **dense, "losses": losses, "steps": [table.steps for table in given.by_name.values()]}
    return {name: np.asarray(values) for name, values in found.items()}


@pytest.fixture(scope="module")
def plain() -> dict[str, np.ndarray]:
    return train(of_functions)


def test_a_step_with_nan_changes_neither_rows_nor_dense_weights(plain: dict[str, np.ndarray]):
    """The oracle has all batches but the last one, and its own last step changes rows and dense weights."""
    without, less = train(of_functions, STEPS - 1), train(of_functions, STEPS - 2)
    assert plain["steps"].tolist() == without["steps"].tolist() == [STEPS - 1] * 2
    assert np.isnan(plain["losses"]).tolist() == [False] * (STEPS - 1) + [True]
    for part in ("user", "item", "dense user", "dense item"):
        np.testing.assert_array_equal(plain[part], without[part], err_msg=part)
        assert (plain[part] != less[part]).any()
    for part, before in {"dense user": weights(0), "user": tables().by_name["user"].lookup(np.arange(ROWS))}.items():
        assert (plain[part] != before).mean() > 0.9


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_the_function_does(name: str, plain: dict[str, np.ndarray]):
    """With a last step of NaN, which changes nothing."""
    found = train(MODELS[name])
    assert found.keys() == plain.keys()
    for part in plain:
        np.testing.assert_array_equal(found[part], plain[part], err_msg=part)


# ---------------------------------------------------------------- paths


def batch() -> ej.Batch:
    return tables().fetch(next(batches())[0])


def test_a_module_has_no_parameters_and_looks_up_by_its_path():
    own = batch()
    assert jax.tree.leaves(Embed("item", "history")) == []
    for path in (("user",), ("item", "clicked"), ("item", "history")):
        np.testing.assert_array_equal(Embed(*path)(own), own.lookup(*path))
    assert Embed("item")(own).keys() == {"clicked", "history"}
    assert Embed()(own).keys() == {"user", "item"}
    assert Embed("item", "history")(own).shape == (SIZE, 3, DIM)


def test_a_model_of_one_example_is_mapped_over_positions():
    """Equinox models take one example. `Batch(None, 0)` maps over positions, and leaves rows as they are."""
    own = batch()
    found = jax.vmap(EquinoxTowers(weights(0), weights(1)).user, in_axes=(ej.Batch(None, 0),))(own)
    np.testing.assert_array_equal(found, own.lookup("user"))


def test_errors_of_jax_name_the_arrays_of_a_batch():
    leaves = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(batch())]
    positions = [".positions['item']['clicked']", ".positions['item']['history']", ".positions['user']"]
    assert leaves == [".rows['item']", ".rows['user']", *positions]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("itme",), "got 'itme' of ('itme',)."),
        (("item", "clikced"), "got 'clikced' of ('item', 'clikced')."),
        (("user", "clicked"), "got 'clicked' of ('user', 'clicked')."),
        (("user", 0), "got 0 of ('user', 0)."),
    ],
)
def test_a_wrong_path(path: tuple[Any, ...], said: str):
    shapes = f"{{'item': {{'clicked': ({SIZE},), 'history': ({SIZE}, 3)}}, 'user': ({SIZE},)}}"
    for call in (Embed(*path), jax.jit(Embed(*path).__call__)):
        with pytest.raises(er.ArgumentError) as caught:
            call(batch())
        assert str(caught.value) == f"`lookup` must name ids of the batch, {shapes}: {said}"


def test_a_wrong_number_in_a_tuple_of_tables():
    own = ej.Tables((er.Table(rows=9, dim=2), er.Table(rows=9, dim=3))).fetch((np.arange(4), np.arange(5)))
    assert Embed(1)(own).shape == (5, 3)
    for wrong in (2, -1, "user"):
        with pytest.raises(er.ArgumentError, match=rf"of the batch, \(\(4,\), \(5,\)\): got {wrong!r} of"):
            Embed(wrong)(own)


# ---------------------------------------------------------------- schedules


def test_one_schedule_moves_rows_and_dense_weights_alike():
    """The oracle is a dense weight of the same values, stepped by optax: SGD of both, and no row is left out."""
    schedule = optax.exponential_decay(0.5, transition_steps=2, decay_rate=0.3)
    table = er.Table(rows=6, dim=DIM, rule=er.SGD(lr=99.0), seed=3, init=er.Normal())
    own, ids, tx = ej.Tables(table), np.arange(6), optax.sgd(schedule)
    dense = jnp.asarray(table.lookup(ids))
    state = tx.init(dense)
    for step in range(STEPS):
        rows = own.fetch(ids)
        of = jax.grad(lambda weights: jnp.sum(jnp.sin(weights)))
        row_grads = jax.grad(lambda own, rows: jnp.sum(jnp.sin(rows.with_rows(own).lookup())))(rows.rows, rows)
        updates, state = tx.update(of(dense), state, dense)  # outside of jit: no product is fused with a sum
        dense = optax.apply_updates(dense, updates)
        own.apply(rows, row_grads, True, lr=schedule)
        np.testing.assert_array_equal(table.lookup(ids), dense, err_msg=str(step))
