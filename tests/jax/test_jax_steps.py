"""Steps of rows and dense weights with JAX: all or nothing, compilations by their cause, what people type."""

from __future__ import annotations

import copy
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
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
from embedrock.errors import ArgumentError, MemoryBudgetError, NonFiniteGradientError, counted
from embedrock.frontend import row_fetcher
from slow import slow

NAN, INF = float("nan"), float("inf")
IDS = {"user": np.array([3, 1, 3]), "item": np.array([[7, 7], [2, 9], [0, 7]])}


def tables_of(user: str = "raise", item: str = "raise", **options: Any) -> er.Group:
    """Return a group of two tables, which react so to NaN and Inf."""
    options = {"rule": er.Adam(lr=0.1), "dim": 4, "rows": 20, **options}
    group = er.Group()
    for seed, (name, how) in enumerate({"user": user, "item": item}.items()):
        group.table(name, seed=seed, on_nonfinite=how, **options)
    return group


def everything(group: Any) -> dict[str, Any]:
    """Return all that a step may change: ids of records, in order, their records, and the number of steps."""
    states = {name: group[name].state() for name in group}
    orders = {name: np.argsort(state["ids"]) for name, state in states.items()}
    return {
        name: {"steps": state["steps"], **{key: state[key][orders[name]] for key in ("ids", "records")}}
        for name, state in states.items()
    }


def skipped(group: Any) -> list[int]:
    return [group[name].state()["skipped_steps"] for name in group]


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def dense_of(batch: ej.Batch, dense: Any, spoil: Any) -> tuple[Any, Any]:
    vectors = batch.lookup()
    user, item = vectors["user"], vectors["item"].sum(axis=1)
    return jnp.sum((user * item * dense["w"]) ** 2) * spoil["loss"] + jnp.sum(dense["b"] * spoil["dense"]), vectors


def make_step(optimizer: optax.GradientTransformation, traces: list[Any] | None = None) -> Callable[..., Any]:
    """Return a jitted step. `spoil` multiplies the loss, the gradient of a dense weight, and those of the rows."""

    @jax.jit
    def step(dense: Any, state: Any, batch: ej.Batch, spoil: Any) -> Any:
        if traces is not None:
            traces.append(None)
        of_rows = jax.value_and_grad(
            lambda dense, rows: dense_of(batch.with_rows(rows), dense, spoil), (0, 1), has_aux=True
        )
        (loss, _), (grads, row_grads) = of_rows(dense, batch.rows)
        row_grads = {name: row_grads[name] * spoil[name] for name in row_grads}
        finite = ej.all_finite(loss, grads, row_grads)
        updates, new = optimizer.update(grads, state, dense)
        dense, state = ej.where(finite, (optax.apply_updates(dense, updates), new), (dense, state))
        return dense, state, row_grads, finite

    return step


def spoiled(**by: float) -> dict[str, float]:
    return {"loss": 1.0, "dense": 1.0, "user": 1.0, "item": 1.0} | by


OPTIMIZER = optax.adam(1e-2)
STEP = make_step(OPTIMIZER)


class Training:
    """A model of two tables and dense weights."""

    def __init__(self, **options: str) -> None:
        self.group = tables_of(**options)
        self.tables = ej.Tables(self.group)
        self.dense = {"w": jnp.ones(4, jnp.float32), "b": jnp.zeros((), jnp.float32)}
        self.state = OPTIMIZER.init(self.dense)

    def step(self, ids: Any = IDS, **by: float) -> None:
        batch = self.tables.fetch(ids)
        self.dense, self.state, grads, finite = STEP(self.dense, self.state, batch, spoiled(**by))
        self.tables.apply(batch, grads, finite)

    @property
    def everything(self) -> Any:
        return jax.tree.map(np.array, (self.dense, self.state, everything(self.group)))


# -------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["loss", "dense", "user", "item"])
def test_a_step_that_is_refused_changes_neither_rows_nor_dense_weights(where: str, value: float):
    training, twin = Training(), Training()
    training.step()
    before = training.everything
    with pytest.raises(NonFiniteGradientError) as error:
        training.step(**{where: value})
    assert_equal(training.everything, before)
    assert skipped(training.group) == [0, 0]
    if where == "dense":
        assert str(error.value) == (
            "gradients must be finite: got NaN or Inf in those of dense weights or of other rows, or in the loss. "
            "Those of rows of table 'item' are finite. No row has changed. Lower the learning rate, clip or scale the "
            'gradients, or pass on_nonfinite="skip" to leave such steps out.'
        )
        assert (error.value.count, error.value.ids.tolist()) == (0, [])
    elif where == "item":
        assert error.value.count == 4
        assert sorted(error.value.ids.tolist()) == [0, 2, 7, 9]
        assert "table 'item'" in str(error.value)
    training.step()  # goes on, as if nothing had been
    for _ in range(2):
        twin.step()
    assert_equal(training.everything, twin.everything)


@pytest.mark.parametrize("where", ["loss", "dense", "user", "item"])
def test_a_step_that_is_skipped_changes_neither_rows_nor_dense_weights(where: str):
    training, twin = Training(user="skip", item="skip"), Training()
    for by in ({}, {where: NAN}, {where: INF}, {}):
        training.step(**by)
    for _ in range(2):
        twin.step()
    assert_equal(training.everything, twin.everything)
    assert skipped(training.group) == [2, 2]
    assert training.tables.stats()["steps"] == 2


@pytest.mark.parametrize("where", ["loss", "dense", "user", "item"])
def test_one_strict_table_refuses_the_step_of_a_group(where: str):
    training = Training(item="skip")
    training.step()
    before = training.everything
    with pytest.raises(NonFiniteGradientError, match="gradients") as error:
        training.step(**{where: NAN})
    assert_equal(training.everything, before)
    assert skipped(training.group) == [0, 0]
    assert ("of other rows" in str(error.value)) == (where in ("item", "dense"))  # rows of 'user' are finite
    training.step()
    assert training.group["item"].steps == 2


@pytest.mark.parametrize("how", ["raise", "skip"])
@pytest.mark.parametrize("by_position", [False, True])
def test_a_step_that_is_said_to_be_finite_by_mistake(how: str, by_position: bool):
    training = Training(user=how, item=how)
    training.step()
    before, batch = training.everything, training.tables.fetch(IDS)
    grads = jax.tree.map(jnp.ones_like, batch.lookup() if by_position else batch.rows)
    grads["item"] = grads["item"].at[2].set(NAN)  # a row, or the ids of a sample
    with pytest.raises(NonFiniteGradientError) as error:
        training.tables.apply(batch, grads, True, by_position=by_position)
    ids = [0, 7] if by_position else [9]
    assert sorted(error.value.ids.tolist()) == ids
    assert str(error.value) == (
        "gradients must all be finite, as this step said of them: got NaN or Inf in those of "
        f"{counted(len(ids), 'row')} of table 'item', first ids {error.value.ids.tolist()}. No row has changed, but "
        "dense weights may have. Decide on the loss and on all gradients together, of rows and of dense weights."
    )
    assert_equal(training.everything, before)
    training.tables.apply(batch, jax.tree.map(jnp.ones_like, batch.rows), True)  # the same batch, with right gradients


@pytest.mark.parametrize("how", ["raise", "skip"])
def test_sums_by_position_that_overflow(how: str):
    """Each gradient is finite, and not their sum: only the table can see it."""
    training = Training(user=how)
    batch, before = training.tables.fetch(IDS), training.everything
    grads = jax.tree.map(jnp.zeros_like, batch.lookup())
    grads["user"] += 2e38
    assert ej.all_finite(grads)
    with pytest.raises(NonFiniteGradientError, match="got NaN or Inf in those of 1 row of table 'user'") as error:
        training.tables.apply(batch, grads, ej.all_finite(grads), by_position=True)
    assert error.value.ids.tolist() == [3]
    assert_equal(training.everything, before)


def test_padding_rows_count_as_gradients():
    """A NaN in the gradient of a padded row is one of the step: `all_finite` sees it, and no row has it."""
    training = Training()
    batch = training.tables.fetch(IDS)
    grads = jax.tree.map(jnp.zeros_like, batch.rows)
    grads["user"] = grads["user"].at[100].set(NAN)
    assert not ej.all_finite(grads)
    training.tables.apply(batch, grads, True)  # the caller decides: no row of the table has it
    assert training.group["user"].steps == 1


# -------------------------------------------------------------------- trees


def test_all_finite_looks_at_numbers_only():
    key = jax.random.key(0)
    assert ej.all_finite()
    assert ej.all_finite({}, None, [], key, jnp.arange(3), jax.nn.relu, "name", 1.0, 3, True, jnp.zeros((0, 4)))
    for bad in (NAN, INF, -INF, np.float32(NAN), jnp.array([1.0, INF], jnp.bfloat16), 1j * np.inf, np.array([NAN])):
        assert not ej.all_finite(jnp.ones(3), {"deep": (bad, jax.nn.relu)})
    assert ej.all_finite(jnp.finfo(jnp.float32).max)
    assert jax.jit(ej.all_finite)(jnp.ones(2)).dtype == bool


@pytest.mark.parametrize("finite", [True, False])
def test_where_returns_one_of_two_trees(finite: bool):
    key = jax.random.key(0), jax.random.key(1)
    new = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.array(2), "key": key[0], "f": jax.nn.relu, "s": "x", "p": 2.0}
    old = {"w": jnp.zeros(2, jnp.bfloat16), "n": jnp.array(1), "key": key[1], "f": jax.nn.relu, "s": "x", "p": 1.0}
    got = ej.where(jnp.array(finite), new | {"none": None, "empty": ()}, old | {"none": None, "empty": ()})
    want = new if finite else old
    assert got["f"] is jax.nn.relu
    assert (got["s"], got["none"], got["empty"]) == ("x", None, ())
    assert got["key"] == want["key"]
    assert (got["w"].dtype, got["n"].dtype) == (jnp.bfloat16, jnp.array(1).dtype)
    assert_equal([got[name] for name in ("w", "n", "p")], [want[name] for name in ("w", "n", "p")])
    assert ej.where(finite, {}, {}) == {}


def test_where_keeps_negative_zeros_and_hides_nan():
    new, old = jnp.array([-0.0, NAN]), jnp.array([0.0, -0.0])
    assert np.signbit(ej.where(True, new, old)[0])
    assert np.signbit(ej.where(False, new, old)).tolist() == [False, True]
    with pytest.raises(ValueError, match="b"):
        ej.where(True, {"a": new}, {"b": new})


@pytest.mark.parametrize("finite", [True, False])
def test_models_of_equinox_and_flax(finite: bool):
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))  # has functions as leaves
    other = jax.tree.map(lambda own: own + 1 if eqx.is_array(own) else own, model)
    assert ej.all_finite(model)
    kept = ej.where(finite, other, model)
    assert kept.activation is model.activation
    assert_equal(eqx.filter(kept, eqx.is_array), eqx.filter(other if finite else model, eqx.is_array))
    assert not ej.all_finite(jax.tree.map(lambda own: own * NAN if eqx.is_array(own) else own, model))

    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    moved = jax.tree.map(lambda own: own + 1, state)
    assert ej.all_finite(state)
    assert_equal(ej.where(finite, moved, state), moved if finite else state)
    assert not ej.all_finite(jax.tree.map(lambda own: own * INF, moved))

    optimizer = optax.chain(optax.clip(1.0), optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9))
    before = optimizer.init({"w": jnp.ones(2)})
    _, after = optimizer.update({"w": jnp.full(2, NAN)}, before, {"w": jnp.ones(2)})
    assert_equal(ej.where(finite, after, before), after if finite else before)


# -------------------------------------------------------------------- compilations


def compiled(tables: ej.Tables) -> tuple[float, float]:
    stats = tables.stats()
    return stats["compilations_by_shape"], stats["compilations_by_size"]


def batches(sizes: list[int], seed: int = 0, rows: int = 5000) -> list[Any]:
    draw = np.random.default_rng(seed)
    return [{name: draw.integers(0, rows, size) for name in ("user", "item")} for size in sizes]


def train(tables: ej.Tables, loader: list[Any], depth: int | None, step: Any) -> None:
    """Train with vectors (batch, dim) of both tables. Depth None: by `fetch`."""
    w = jnp.ones(4, jnp.float32)
    pairs: Any = ((tables.fetch(ids), ids) for ids in loader) if depth is None else ej.prefetch(loader, tables, depth)
    for batch, _ in pairs:
        w, grads, finite = step(w, batch)
        tables.apply(batch, grads, finite)


def flat_step(traces: list[Any]) -> Callable[..., Any]:
    """Return a jitted step of vectors (batch, dim), which notes when it is traced."""

    @jax.jit
    def step(w: Any, batch: ej.Batch) -> Any:
        traces.append(None)

        def loss_of(w: Any, rows: Any) -> Any:
            user, item = (batch.with_rows(rows).lookup(name) for name in ("user", "item"))
            return jnp.sum(user * item * w)

        grads, row_grads = jax.grad(loss_of, (0, 1))(w, batch.rows)
        finite = ej.all_finite(grads, row_grads)
        return ej.where(finite, w - 0.01 * grads, w), row_grads, finite

    return step


@pytest.mark.parametrize("depth", [None, 2, *slow(0, 1, 20)])
@pytest.mark.parametrize(
    ("sizes", "by_cause"),
    [
        ([64] * 4, (1, 0)),
        ([64] * 4 + [17], (2, 0)),  # a short last batch
        ([300] * 3, (1, 0)),  # larger than the least size, from the first
        ([64, 300, 64, 300, 64], (2, 1)),  # 64 again, with the size that grew
    ],
    ids=["one", "short-last", "large", "two"],
)
def test_a_run_compiles_once_for_each_cause(depth: int | None, sizes: list[int], by_cause: tuple[int, int]):
    tables = ej.Tables(tables_of(rows=5000))
    traces: list[Any] = []
    step: Any = flat_step(traces)
    for epoch in range(2):
        train(tables, batches(sizes, seed=epoch), depth, step)
        assert compiled(tables) == by_cause
        assert len(traces) == step._cache_size() == sum(by_cause)


def test_a_size_that_grows_under_the_same_shape():
    """The number of different ids grows: of one table, then of the other one."""
    tables, traces = ej.Tables(tables_of(rows=5000)), []
    step: Any = flat_step(traces)
    few, many = np.arange(512) % 100, np.arange(512)
    loader = [{"user": few, "item": few}, {"user": many, "item": few}, {"user": few, "item": many % 200}] * 2
    train(tables, loader, None, step)
    assert compiled(tables) == (1, 2)
    assert len(traces) == step._cache_size() == 3
    assert [tables.stats()[f"{name}/size"] for name in ("user", "item")] == [512, 256]


def test_evaluation_has_its_own_shape():
    tables, traces, seen = ej.Tables(tables_of(rows=5000)), [], []
    step: Any = flat_step(traces)

    @jax.jit
    def score(batch: ej.Batch) -> Any:
        seen.append(None)
        return batch.lookup("user") @ batch.lookup("item").T

    for _ in range(2):
        train(tables, batches([64] * 3), 2, step)
        for ids in batches([100] * 3):
            score(tables.fetch(ids))
    assert (len(traces), len(seen), compiled(tables)) == (1, 1, (2, 0))


def test_26_tables_compile_once():
    group = er.Group()
    for k in range(26):
        group.table(f"c{k:02}", rows=1000, dim=4, seed=k, rule=er.SGD(lr=0.1))
    tables, traces = ej.Tables(group), []

    @jax.jit
    def step(batch: ej.Batch) -> Any:
        traces.append(None)
        return jax.grad(lambda rows: sum(own.sum() for own in batch.with_rows(rows).lookup().values()))(batch.rows)

    draw = np.random.default_rng(0)
    loader = [{name: draw.integers(0, 1000, 100) for name in group} for _ in range(4)]
    compilations, counts = [], []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for batch, _ in ej.prefetch(loader, tables):
            tables.apply(batch, step(batch), True)
            counts.append(len(compilations))
    finally:
        getattr(jax.monitoring, "unregister_event_duration_listener", id)(note)  # 0.6 has none
    assert len(traces) == 1
    assert compiled(tables) == (1, 0)
    assert counts[0] > 0
    assert counts == counts[:1] * len(loader)  # nothing at all was compiled after the first step


def test_names_in_stats():
    def table() -> er.Table:
        return er.Table(rows=10, dim=2)

    common = ["steps", "compilations_by_shape", "compilations_by_size", "bytes_to_devices", "bytes_from_devices"]
    group = er.Group()
    group.table("b", rows=10, dim=2)
    group.table("a", rows=10, dim=3)
    for tree, names in (
        (table(), ["size"]),
        ({"user": table()}, ["user/size"]),
        ({"a": {"b": table(), "c": (table(), [table()])}}, ["a/b/size", "a/c/0/size", "a/c/1/0/size"]),
        (group, ["a/size", "b/size"]),
        ({"own": group, "x": table()}, ["own/a/size", "own/b/size", "x/size"]),
        ({"steps": table()}, ["steps/size"]),
        ({}, []),
    ):
        assert list(ej.Tables(tree).stats()) == [*common, *names]


def test_bytes_in_stats():
    tables = ej.Tables({"a": er.Table(rows=10, dim=2, rule=er.SGD(lr=0.1))})
    batch = tables.fetch({"a": np.array([1, 2, 3])})
    assert tables.stats()["bytes_to_devices"] == 128 * 2 * 4 + 3 * 4
    tables.apply(batch, jax.tree.map(jnp.ones_like, batch.rows), True)
    assert tables.stats()["bytes_from_devices"] == 128 * 2 * 4


# -------------------------------------------------------------------- learning rates


def after_steps(lr: Any, rule: er.Rule, steps: int = 5, tables: Any = None, own: Any = None) -> Any:
    """Return rows after some steps: by `apply(lr=lr)`, or by `own(step)`, the learning rates of `Table.update`."""
    group = tables or {name: er.Table(rows=20, dim=4, seed=k, rule=rule) for k, name in enumerate(("user", "item"))}
    front = ej.Tables(group)
    for _ in range(steps):
        batch = front.fetch(IDS)
        front.apply(batch, jax.tree.map(lambda own: own * 0.5 + 0.25, batch.rows), True, lr=lr)
    return {name: group[name].lookup(np.arange(20)) for name in group}


@pytest.mark.parametrize("rule", [er.SGD, er.Adam, er.Adagrad])
def test_learning_rates(rule: Any):
    as_rule = after_steps(None, rule(lr=0.05))
    for lr in (0.05, np.float64(0.05), lambda step: 0.05, {"user": 0.05, "item": lambda step: 0.05}):
        assert_equal(after_steps(lr, rule(lr=0.7)), as_rule)
    assert_equal(after_steps({"user": 0.05, "item": None}, rule(lr=0.05)), as_rule)
    rounded = after_steps(None, rule(lr=float(np.float32(0.05))))
    for lr in (jnp.float32(0.05), jnp.array(0.05), optax.constant_schedule(jnp.float32(0.05)), np.float32(0.05)):
        assert_equal(after_steps(lr, rule(lr=0.7)), rounded)


def test_a_schedule_is_that_of_each_tables_steps():
    """By optax, by hand, and in two runs of which the second one continues."""
    schedule = optax.cosine_decay_schedule(0.1, 12)
    trees = [{name: er.Table(rows=20, dim=4, seed=1, rule=er.Adam(lr=9.0)) for name in IDS} for _ in range(3)]
    by_schedule = after_steps(schedule, er.Adam(), 8, trees[0])
    first, again = after_steps(schedule, er.Adam(), 3, trees[1]), after_steps(schedule, er.Adam(), 5, trees[1])
    assert first.keys() == again.keys()
    assert_equal(again, by_schedule)
    front = ej.Tables(trees[2])
    for step in range(8):
        batch = front.fetch(IDS)
        grads = jax.tree.map(lambda own: own * 0.5 + 0.25, batch.rows)
        front.apply(batch, grads, True, lr=np.asarray(schedule(step)).item())
    assert_equal({name: trees[2][name].lookup(np.arange(20)) for name in IDS}, by_schedule)


def test_a_schedule_of_a_table_from_disk_continues(tmp_path: Path):
    seen: list[int] = []

    def schedule(step: int) -> float:
        seen.append(step)
        return 0.1 / (1 + step)

    whole = ej.Tables(er.Table(rows=20, dim=4, seed=1, rule=er.Adam()))
    for run in range(2):
        with er.Table(rows=20, dim=4, seed=1, rule=er.Adam(), path=tmp_path / "table") as table:
            tables = ej.Tables(table)
            for _ in range(3):
                for own in (tables, whole):
                    batch = own.fetch(IDS["item"])
                    own.apply(batch, batch.rows, True, lr=schedule)
            table.commit()
            assert_equal(table.lookup(np.arange(20)), whole.fetcher.tables[0].lookup(np.arange(20)))
        assert seen[6 * run :] == [k for k in range(3 * run, 3 * run + 3) for _ in range(2)]


def test_a_skipped_step_does_not_advance_a_schedule():
    seen: list[int] = []
    tables = ej.Tables(er.Table(rows=20, dim=4, rule=er.SGD(lr=1.0), on_nonfinite="skip"))
    for finite in (True, False, True):
        batch = tables.fetch(np.array([1]))
        tables.apply(batch, batch.rows, finite, lr=lambda step: seen.append(step) or 0.1)
    assert seen == [0, 1, 1]


# -------------------------------------------------------------------- steps that are not the usual ones


def test_a_table_without_gradients_is_not_stepped():
    training = Training()
    batch, other = training.tables.fetch(IDS), training.tables.fetch({"user": np.array([9]), "item": IDS["item"]})
    before = everything(training.group)
    training.tables.apply(batch, {"user": jnp.ones_like(batch.rows["user"]), "item": None}, True)
    after = everything(training.group)
    assert (after["user"]["steps"], after["item"]["steps"]) == (1, 0)
    assert_equal(after["item"], before["item"])
    # Of what another batch has, nothing was stepped: `item` was not, and it has no row of `user`'s step.
    training.tables.apply(other, jax.tree.map(jnp.ones_like, other.rows), True)
    assert [training.group[name].steps for name in IDS] == [2, 1]


def test_a_batch_that_steps_no_table():
    training = Training()
    batch, before = training.tables.fetch(IDS), everything(training.group)
    training.tables.apply(batch, {"user": None, "item": None}, True)
    assert_equal(everything(training.group), before)


def test_a_step_that_fails_leaves_batches_as_they_were(monkeypatch: pytest.MonkeyPatch):
    training, twin = Training(), Training()
    real, errors = row_fetcher.step_all, [MemoryBudgetError("no room")]

    def fails(requests: Any) -> None:
        if errors:
            raise errors.pop()
        real(requests)

    monkeypatch.setattr(row_fetcher, "step_all", fails)
    ahead = training.tables.fetch({"user": np.array([9]), "item": np.array([11])})
    batch = training.tables.fetch(IDS)
    ones = jax.tree.map(jnp.ones_like, batch.rows)
    with pytest.raises(MemoryBudgetError):
        training.tables.apply(batch, ones, True)
    assert training.tables.stats()["steps"] == 0
    training.tables.apply(batch, ones, True)
    training.tables.apply(ahead, ones, True)
    for ids in (IDS, {"user": np.array([9]), "item": np.array([11])}):
        twin.tables.apply(twin.tables.fetch(ids), ones, True)
    assert_equal(training.everything, twin.everything)


def test_ctrl_c_in_a_step_never_steps_a_batch_twice():
    """It arrives while the rows are stepped: they are stepped first, and the batch is spent."""
    training, twin = Training(), Training()
    batch = training.tables.fetch(IDS)
    ones = jax.tree.map(jnp.ones_like, batch.rows)
    twin.tables.apply(twin.tables.fetch(IDS), ones, True)

    def interrupted(request: Any) -> None:
        real(request)
        raise KeyboardInterrupt

    real = row_fetcher.step_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_fetcher, "step_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            training.tables.apply(batch, ones, True)
    assert_equal(training.everything, twin.everything)
    with pytest.raises(ArgumentError, match="have changed since this batch was fetched"):
        training.tables.apply(batch, ones, True)
    assert_equal(training.everything, twin.everything)
    for each in (training, twin):
        each.step()
    assert_equal(training.everything, twin.everything)


def test_ctrl_c_between_step_and_apply():
    """The cell is run again: it fetches anew, and the batch before is dropped."""
    training, twin = Training(), Training()
    training.tables.fetch(IDS)
    loop: Iterator[Any] = ej.prefetch([IDS, IDS], training.tables, depth=1)
    next(loop)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    for _ in range(2):
        training.step()
        twin.step()
    assert_equal(training.everything, twin.everything)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("how", ["freeze", "grow", "rule", "update"])
def test_tables_that_change_while_batches_wait(depth: int, how: str):
    """Batches that were planned before behave as if they were fetched after it."""
    results = []
    for ahead in (0, depth):
        training, w = Training(), jnp.ones(4)
        item, frozen = training.group["item"], None
        for k, (batch, _) in enumerate(ej.prefetch([IDS] * 6, training.tables, ahead)):
            grads = jax.tree.map(lambda own: own * 0.5 + w.sum(), batch.rows)  # noqa: B023
            training.tables.apply(batch, grads, True)
            if k == 2 and how == "freeze":
                training.group.table("item", rows=20, dim=4, seed=1, rule=er.Adam(lr=0.1), frozen=[7])
                frozen = item.lookup([7])
            elif k == 2 and how == "grow":
                item.grow(100)
            elif k == 2 and how == "rule":
                item.set_rule(er.Adam(lr=0.7))
            elif k == 2:
                item.update([9], np.ones((1, 4), np.float32))
        results.append(everything(training.group))
        if how == "freeze":
            assert_equal(item.lookup([7]), frozen)
    assert_equal(*results)


def test_loops_within_loops():
    """Evaluation reads ahead, too, while batches of the training wait. It sees the rows as they are."""
    rows = []
    for depth in (0, 2):
        training = Training()
        for batch, ids in ej.prefetch(
            [IDS, {"user": IDS["user"][:1], "item": IDS["item"][1:2]}] * 3, training.tables, depth
        ):
            for own, _ in ej.prefetch([IDS] * 2, training.tables, depth):
                rows.append(np.asarray(own.lookup("item")))
                assert_equal(rows[-1], training.group["item"].lookup(IDS["item"]))
            training.tables.apply(batch, jax.tree.map(jnp.ones_like, batch.rows), True)
            assert ids.keys() == IDS.keys()
    assert_equal(rows[:12], rows[12:])
    assert len(rows) == 24


# -------------------------------------------------------------------- what people type


def test_a_batch_is_printed_by_its_shapes():
    tables = ej.Tables(tables_of())
    batch = tables.fetch(IDS)
    text = "Batch(rows={'item': (128, 4), 'user': (128, 4)}, positions={'item': (3, 2), 'user': (3,)})"
    assert repr(batch) == f"{batch}" == text
    assert repr(tables.plan(IDS)) == text.replace("{'item': (128, 4), 'user': (128, 4)}", "None")
    seen: list[str] = []
    jax.jit(lambda batch: seen.append(repr(batch)))(batch)
    assert seen == [text]
    assert repr(jax.tree.map(lambda _: 0, batch)).startswith("Batch(rows={'item': 0")


def test_the_numbers_of_a_batch_can_be_pickled():
    batch = ej.Tables(tables_of()).fetch(IDS)
    host = jax.tree.map(np.asarray, batch)
    for again in (pickle.loads(pickle.dumps(host)), copy.deepcopy(host)):
        assert_equal((again.rows, again.positions), (host.rows, host.positions))
        assert again.fetched is None


def test_cells_that_run_twice():
    """The tables, the step and the loop: each again, in any order."""
    training, twin = Training(), Training()
    for _ in range(2):
        training.tables = ej.Tables(training.group)
        training.step()
        training.tables = ej.Tables(training.group)
        training.step()
    for _ in range(4):
        twin.step()
    assert_equal(training.everything, twin.everything)


@pytest.fixture
def one() -> tuple[ej.Tables, ej.Batch, Any]:
    """Tables, a batch, and the gradient of a loss of its rows."""
    tables = ej.Tables(er.Table(rows=50, dim=3, seed=2, rule=er.SGD(lr=0.1)))
    batch = tables.fetch(np.array([[4, 9], [9, 9], [1, 4], [30, 1]]))
    return tables, batch, jax.grad(lambda rows: jnp.sum(jnp.sin(batch.with_rows(rows).lookup())))(batch.rows)


def test_transforms_over_lookup(one: Any):
    _, batch, grads = one

    def by(lookup: Callable[[ej.Batch], Any]) -> Any:
        return jax.jit(jax.grad(lambda rows: jnp.sum(lookup(batch.with_rows(rows)))))(batch.rows)

    def vmapped(batch: ej.Batch) -> Any:
        return jax.vmap(lambda at: jnp.sin(ej.Batch(batch.rows, at).lookup()))(batch.positions)

    def mapped_batch(batch: ej.Batch) -> Any:
        return jax.vmap(lambda own: jnp.sin(own.lookup()), in_axes=(ej.Batch(None, 0),))(batch)

    def scanned(batch: ej.Batch) -> Any:
        def add(total: Any, at: Any) -> Any:
            return total + jnp.sin(ej.Batch(batch.rows, at).lookup()).sum(), None

        return jax.lax.scan(add, 0.0, batch.positions)[0]

    for lookup in (
        jax.checkpoint(lambda batch: jnp.sin(batch.lookup())),
        jax.remat(jax.jit(lambda batch: jnp.sin(batch.lookup()))),
        vmapped,
        mapped_batch,
        scanned,
    ):
        np.testing.assert_allclose(by(lookup), grads, rtol=1e-6, atol=1e-7)
    assert not np.asarray(by(vmapped))[4:].any()  # rows that no id has


def test_micro_batches_by_scan_step_as_one_batch(one: Any):
    tables, batch, grads = one

    @jax.jit
    def step(batch: ej.Batch) -> Any:
        def add(total: Any, at: Any) -> Any:
            own = jax.grad(lambda rows: jnp.sum(jnp.sin(ej.Batch(rows, at).lookup())))(batch.rows)
            return total + own, None

        return jax.lax.scan(add, jnp.zeros_like(batch.rows), batch.positions.reshape(2, 2, 2))[0]

    np.testing.assert_allclose(step(batch), grads, rtol=1e-6, atol=1e-7)
    tables.apply(batch, step(batch), True)
    assert tables.fetcher.tables[0].steps == 1


def test_compute_in_bfloat16(one: Any):
    tables, batch, _ = one

    def loss(rows: Any) -> Any:
        return jnp.sum(batch.with_rows(rows).lookup().astype(jnp.bfloat16) ** 2).astype(jnp.float32)

    grads = jax.jit(jax.grad(loss))(batch.rows)
    assert grads.dtype == jnp.float32
    before = tables.fetcher.tables[0].lookup(np.arange(50))
    tables.apply(batch, grads, ej.all_finite(grads))
    after = before.copy()
    after[[4, 9, 1, 30]] -= np.float32(0.1) * np.asarray(grads)[:4]
    np.testing.assert_allclose(tables.fetcher.tables[0].lookup(np.arange(50)), after, rtol=1e-6)


def test_gradients_in_bfloat16_are_those_in_float32(one: Any):
    tables, batch, _ = one
    grads = jnp.arange(24.0).reshape(4, 2, 3).astype(jnp.bfloat16) / 3
    twin = er.Table(rows=50, dim=3, seed=2, rule=er.SGD(lr=0.1))
    tables.apply(batch, grads, ej.all_finite(grads), by_position=True)
    twin.update([[4, 9], [9, 9], [1, 4], [30, 1]], np.asarray(grads.astype(jnp.float32)))
    assert_equal(tables.fetcher.tables[0].lookup(np.arange(50)), twin.lookup(np.arange(50)))


def test_negative_zeros_are_kept():
    table = er.Table(rows=5, dim=2, rule=er.SGD(lr=0.1))
    table.assign([2], np.array([[-0.0, 0.0]], np.float32))
    rows = np.asarray(jax.jit(lambda batch: batch.lookup())(ej.Tables(table).fetch(np.array([2]))))
    assert np.signbit(rows).tolist() == [[True, False]]


def test_a_step_that_uses_one_of_two_tables():
    """The other one has gradients of zero, and is stepped by them, as by `Table.update`."""
    training, twin = Training(), Training()
    batch = training.tables.fetch(IDS)
    grads = jax.jit(jax.grad(lambda rows: batch.with_rows(rows).lookup("user").sum()))(batch.rows)
    assert not np.asarray(grads["item"]).any()
    training.tables.apply(batch, grads, True)
    twin.group["item"].update([0, 2, 7, 9], np.zeros((4, 4), np.float32))
    twin.group["user"].update([1, 3, 3], np.ones((3, 4), np.float32))
    assert_equal(everything(training.group), everything(twin.group))


def test_lookup_by_path():
    tables = ej.Tables({"user": er.Table(rows=9, dim=2, seed=1), "item": er.Table(rows=9, dim=3, seed=2)})
    ids = {"user": np.array([1, 8]), "item": {"history": np.array([[3, 3], [8, 0]]), "target": np.array([3, 1])}}
    batch = tables.fetch(ids)
    whole = batch.lookup()
    assert_equal(batch.lookup("item"), whole["item"])
    assert_equal(batch.lookup("item", "history"), whole["item"]["history"])
    assert_equal(batch.lookup("user"), tables.fetcher.tables[list(tables.by_name).index("user")].lookup(ids["user"]))
    assert_equal(whole["item"]["target"], tables.by_name["item"].lookup(ids["item"]["target"]))


def test_64_bits_give_the_same_rows():
    """The flag of JAX changes nothing of rows, positions and their steps."""

    def trained() -> np.ndarray:
        tables = ej.Tables(er.Table(rows=9, dim=2, seed=1, rule=er.Adam()))
        for ids in (np.array([3, 8, 3]), np.array([1, 8, 0])):
            batch = tables.fetch(ids)
            assert (batch.rows.dtype, batch.positions.dtype) == (jnp.float32, jnp.int32)
            loss = lambda rows: jnp.sum(batch.with_rows(rows).lookup() * np.arange(2)) * jnp.ones(())  # noqa: B023, E731
            value, grads = jax.jit(jax.value_and_grad(loss))(batch.rows)
            assert value.dtype == jnp.ones(()).dtype
            tables.apply(batch, grads, ej.all_finite(value, grads), lr=lambda step: jnp.asarray(0.5))
        assert jnp.ones(()).dtype == dtype
        return tables.fetcher.tables[0].lookup(np.arange(9))

    dtype = jnp.float32
    usual = trained()
    try:
        jax.config.update("jax_enable_x64", True)
        dtype = jnp.float64
        assert_equal(trained(), usual)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_batch_that_is_only_read_holds_no_row_that_is_forgotten():
    """An evaluation may keep its batch while another thread deletes a user."""
    table = er.Table(rows=None, dim=2, rule=er.SGD(lr=0.1), init=er.Zeros())
    tables = ej.Tables(table)
    for _ in range(2):
        batch = tables.fetch([3, 7])
        tables.apply(batch, np.ones_like(batch.rows), True)
    evaluated = tables.fetch([3, 4], missing="zeros")
    assert table.forget([3]) == 1
    np.testing.assert_allclose(evaluated.lookup(), [[-0.2, -0.2], [0, 0]])
    kept = tables.fetch([7])
    with pytest.raises(er.ArgumentError, match="read and is not stepped yet"):
        table.forget([7])
    tables.apply(kept, np.ones_like(kept.rows), True)
    assert table.forget([7]) == 1
