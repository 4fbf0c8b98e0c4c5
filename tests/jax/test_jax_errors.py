"""Each error of `embedrock.jax`: its text, and that nothing has changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import embedrock as er
import embedrock.jax as ej
from embedrock.errors import (
    ArgumentError,
    ClosedTableError,
    EmbedrockError,
    GradientError,
    IdError,
    IdTypeError,
    OutdatedBatchError,
    ReadOnlyTableError,
)

IDS = {"user": np.array([3, 1, 3]), "item": np.array([[7, 7], [2, 9]])}


def made(**options: Any) -> er.Table:
    given: dict[str, Any] = {"rows": 20, "dim": 2, "seed": 1, "rule": er.Adam(lr=0.1)}
    return er.Table(**given | options)


class Case:
    """Tables of two names, with all that a refused call must not change."""

    def __init__(self, **options: Any) -> None:
        self.by_name = {"user": made(**options), "item": made(**options)}
        self.tables = ej.Tables(self.by_name)
        self.step()

    def step(self, ids: Any = IDS, **options: Any) -> ej.Batch:
        batch = self.tables.fetch(ids)
        self.tables.apply(batch, ones(batch), True, **options)
        return batch

    @property
    def everything(self) -> Any:
        states = [table.state() for table in self.by_name.values()]
        counts = [(state["steps"], state["skipped_steps"], state["ids"].tobytes()) for state in states]
        stats = {name: number for name, number in self.tables.stats().items() if not name.startswith(("comp", "bytes"))}
        return counts, [state["records"].tobytes() for state in states], stats

    def refuses(self, call: Callable[[], Any], error: type[EmbedrockError], text: str) -> None:
        """Check the text of an error, all of it or with ... at its end, and that nothing has changed."""
        before = self.everything
        with pytest.raises(error) as found:
            call()
        assert type(found.value) is error
        start, dots, _ = text.partition("...")
        assert str(found.value)[: len(start) if dots else None] == start
        assert self.everything == before


def ones(batch: ej.Batch) -> Any:
    return jax.tree.map(jnp.ones_like, batch.rows)


@pytest.fixture
def case() -> Case:
    return Case()


# -------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    ("tree", "got"),
    [
        (lambda: "x", "'x'"),
        (lambda: None, "None"),
        (lambda: {"a": made(), "b": 3}, "3 as b"),
        (lambda: {"a": {"b": made(), "c": [made(), None]}}, "None as a/c/1"),
        (lambda: {"a": er.Table}, "<class 'embedrock.table.table.Table'> as a"),
        (lambda: {"a": np.arange(2)}, "array([0, 1]) as a"),
    ],
)
def test_a_leaf_that_is_no_table(tree: Callable[[], Any], got: str):
    with pytest.raises(ArgumentError) as error:
        ej.Tables(tree())
    assert str(error.value) == (
        f"`tables` of ej.Tables must be er.Table, or a tree of them: got {got}. Pass, for example, "
        "{'item': er.Table(rows=10**6, dim=32)}."
    )


def test_a_table_that_is_named_twice():
    one = made()
    with pytest.raises(ArgumentError) as error:
        ej.Tables({"clicked": one, "more": [made(), one]})
    assert str(error.value) == (
        f"`tables` of ej.Tables must have each table once: got {one!r} twice, as clicked. Name it once. Fetch several "
        "arrays of its ids by a dict in their place, {'clicked': ids, 'shown': other_ids}."
    )
    batch = ej.Tables({"item": one}).fetch({"item": {"clicked": np.array([1]), "shown": np.array([[2, 1]])}})
    assert batch.lookup("item", "shown").shape == (1, 2, 2)  # the remedy


def test_two_tables_of_one_name():
    with pytest.raises(ArgumentError) as error:
        ej.Tables({"a/b": made(), "a": {"b": made()}})
    assert str(error.value) == ("`tables` of ej.Tables must have different names: got ['a']['b'], ['a/b']. Rename one.")


def test_errors_name_the_table(tmp_path: Path):
    """By its place in the tree, unless it has a name of its own."""
    group = er.Group()
    group.table("own", rows=5, dim=2)
    tree = {"a": {"b": made()}, "d": made(path=tmp_path / "d"), "g": group}
    tables, zero = ej.Tables(tree), np.array([0])
    for name, ids in (
        ("table 'a/b'", {"a": {"b": np.array([99])}, "d": zero, "g": {"own": zero}}),
        (f"table 'd' at {str(tmp_path / 'd')!r}", {"a": {"b": zero}, "d": np.array([99]), "g": {"own": zero}}),
        ("table 'own'", {"a": {"b": zero}, "d": zero, "g": {"own": np.array([99])}}),
    ):
        with pytest.raises(IdError, match=re.escape(f"`ids` of {name} must lie in [0, ")):
            tables.fetch(ids)
    tree["d"].close()


# -------------------------------------------------------------------- ids


def test_ids_out_of_range(case: Case):
    wrong = {"user": IDS["user"], "item": np.array([[7, 7], [20, 9]])}
    remedy = "For more rows, grow(21). For any int64, make it with rows=None..."
    text = f"`ids` of table 'item' must lie in [0, 20): got 20 at [1, 0] of ids of shape (2, 2). {remedy}"
    case.refuses(lambda: case.tables.fetch(wrong), IdError, text)
    features = {"user": {"a": IDS["user"], "b": np.array([0, -1])}, "item": IDS["item"]}
    text = "`ids` of table 'user' must lie in [0, 20): got -1 at [1] of ids of shape (2,)..."
    case.refuses(lambda: case.tables.fetch(features), IdError, text)
    case.refuses(lambda: list(ej.prefetch([IDS, wrong], case.tables, 1)), IdError, "`ids` of table 'item' must lie...")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (np.array([1.0]), "got dtype float64. Pass np.asarray(ids).astype('int64')."),
        (jnp.array([1.5]), "got dtype float32..."),
        (np.array([True]), "got dtype bool. Pass np.flatnonzero(mask) for where a mask is True..."),
        (np.array(["a"]), "got dtype <U1, 'a' at [0] of ids of shape (1,)..."),
        (
            np.ma.array([1, 2], mask=[False, True]),
            "got a masked array, with a missing one at [1] of ids of shape (2,)...",
        ),
        ([[1, 2], [3]], "..."),
        (None, "got dtype object, None at [] of ids of shape ()..."),
        (object(), "got dtype object..."),
    ],
)
def test_ids_that_are_no_integers(case: Case, wrong: Any, text: str):
    start = "`ids` of table 'item' must be integers" + (
        ": " if text != "..." else " in one shape: got lists of several "
    )
    case.refuses(lambda: case.tables.fetch({**IDS, "item": wrong}), IdTypeError, start + text)


@pytest.mark.parametrize("ids", [[3, 1, 3], 3, np.int32(3), jnp.array([[3]]), np.zeros((0, 4), np.uint8), [[1], [2]]])
def test_ids_of_other_forms(case: Case, ids: Any):
    """Lists, scalars, arrays of JAX and empty ones have rows, too."""
    batch = case.tables.fetch({**IDS, "item": ids})
    np.testing.assert_array_equal(batch.lookup("item"), case.by_name["item"].lookup(np.asarray(ids)))
    case.tables.apply(batch, ones(batch), True)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ({"user": IDS["user"]}, "Dict key mismatch; expected keys: ['item', 'user']; ..."),
        ({**IDS, "other": IDS["user"]}, "Dict key mismatch; ..."),
        ([IDS["user"], IDS["item"]], "..."),
        (IDS["user"], "..."),
        (None, "..."),
    ],
)
def test_another_tree(case: Case, wrong: Any, got: str):
    names = "must have the tree of the tables, item, user: "
    case.refuses(lambda: case.tables.fetch(wrong), ArgumentError, f"`ids` {names}{got}")
    batch = case.tables.fetch(IDS)
    case.refuses(lambda: case.tables.apply(batch, wrong, True), ArgumentError, f"`grads` {names}{got}")
    if wrong is not None and not isinstance(wrong, np.ndarray):
        case.refuses(lambda: case.tables.apply(batch, ones(batch), True, lr=wrong), ArgumentError, f"`lr` {names}{got}")
    case.tables.apply(batch, ones(batch), True)


def test_gradients_of_several_arrays_in_another_tree(case: Case):
    ids = {"user": {"shown": IDS["user"], "clicked": IDS["user"] + 1}, "item": IDS["item"]}
    batch = case.tables.fetch(ids)
    grads = jax.tree.map(lambda own: np.ones((*own.shape, 2), np.float32), ids)
    one, other = grads["user"].values()
    for wrong, got in (
        ((one, other), "Expected dict, got (array(..."),  # leaves alone would be in another order
        ({"shown": one, "bought": other}, "Dict key mismatch; expected keys: ['clicked', 'shown']; ..."),
        ({"shown": one}, "Dict key mismatch; ..."),
    ):
        given, text = {**grads, "user": wrong}, f"`grads` must have the tree of the tables, item, user: {got}"
        case.refuses(lambda given=given: case.tables.apply(batch, given, True, by_position=True), ArgumentError, text)
    case.tables.apply(batch, grads, True, by_position=True)


def test_ids_in_another_tree_are_quoted_in_short(case: Case):
    with pytest.raises(ArgumentError, match=r"Expected dict, got \[\[0, 1, 2, .*") as error:
        case.tables.fetch([list(range(70_000))])
    assert len(str(error.value)) < 500


# -------------------------------------------------------------------- batches


def test_a_batch_that_comes_out_of_a_jitted_function(case: Case):
    batch = case.tables.fetch(IDS)
    text = (
        "`batch` of apply must be what fetch returned: got {0!r}, without its ids. What comes out of a jitted "
        "function, or is a copy, has none. Keep the one that went in: batch = tables.fetch(ids)."
    )
    wrongs: Any = (jax.jit(lambda own: own)(batch), batch.with_rows(batch.rows), jax.tree.map(jnp.array, batch), "x")
    for wrong in wrongs:
        case.refuses(lambda wrong=wrong: case.tables.apply(wrong, ones(batch), True), ArgumentError, text.format(wrong))
    case.tables.apply(batch, ones(batch), True)


def test_tables_inside_of_a_jitted_function(case: Case):
    """The host's part is outside of it: JAX says so."""
    batch = case.tables.fetch(IDS)
    before = case.everything
    for call in (
        lambda ids, grads: case.tables.fetch(ids).rows,
        lambda ids, grads: case.tables.apply(batch, grads, ej.all_finite(grads)),
        lambda ids, grads: case.tables.apply(batch, grads, True),
    ):
        with pytest.raises(jax.errors.TracerArrayConversionError):
            jax.jit(call)(IDS, ones(batch))
    assert case.everything == before
    case.tables.apply(batch, ones(batch), True)


def test_a_batch_that_is_applied_twice(case: Case):
    batch = case.step()
    text = (
        "a batch of table 'item', table 'user' is stepped once: this one was stepped already. Nothing has changed. "
        "Fetch its ids again, and compute the gradients from these rows."
    )
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True), ArgumentError, text)
    skipping = Case(on_nonfinite="skip")
    batch = skipping.tables.fetch(IDS)
    skipping.tables.apply(batch, ones(batch), False)  # a skipped one is spent as well
    skipping.refuses(lambda: skipping.tables.apply(batch, ones(batch), True), ArgumentError, text)


REMEDY = (
    "its gradients are those of older rows. Nothing was stepped. Fetch a batch, or take it from prefetch, after the "
    "step before it."
)


def test_a_batch_of_rows_that_were_stepped_since(case: Case):
    batch = case.tables.fetch(IDS)
    case.step({"user": np.array([5]), "item": np.array([9, 7, 7, 11])})
    text = f"rows of table 'item' have changed since this batch was fetched, 2 of 3: {REMEDY}"
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True), OutdatedBatchError, text)


@pytest.mark.parametrize("steps", [1, 3, 18])
def test_a_batch_of_other_rows_than_those_that_were_stepped(case: Case, steps: int):
    """It is stepped as if it had been fetched after them."""
    twin, batch = Case(), case.tables.fetch(IDS)
    for own in (case, twin):
        for _ in range(steps):
            own.step({"user": np.array([5]), "item": np.array([11, 12])})
    case.tables.apply(batch, ones(batch), True)
    twin.step()
    assert case.everything == twin.everything


@pytest.mark.parametrize("how", ["update", "assign", "load_state", "other"])
def test_a_batch_of_rows_that_other_code_has_changed(case: Case, how: str):
    case.step()
    item, batch = case.by_name["item"], case.tables.fetch(IDS)
    if how == "update":
        item.update([7], np.ones((1, 2), np.float32))
    elif how == "assign":
        item.assign([7], np.ones((1, 2), np.float32))
    elif how == "load_state":
        item.load_state(Case().by_name["item"].state())
    else:
        other = ej.Tables(item)
        own = other.fetch([7])
        other.apply(own, ones(own), True)
    count = 3 if how == "load_state" else 1
    text = f"rows of table 'item' have changed since this batch was fetched, {count} of 3: {REMEDY}"
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True), OutdatedBatchError, text)
    case.step()


@pytest.mark.parametrize("how", ["commit", "set_rule", "lookup", "evaluate", "forget", "grow", "rollback"])
def test_a_batch_stays_current_through_calls_that_change_no_row(tmp_path: Path, how: str):
    with made(path=tmp_path / "t") as table:
        tables = ej.Tables(table)
        table.commit()
        batch = tables.fetch([1, 2])
        if how == "commit":
            table.commit()
        elif how == "forget":
            table.forget([3])
        elif how == "grow":
            table.grow(10**6)
        elif how == "rollback":
            table.rollback(table.last_commit)
        elif how == "set_rule":
            table.set_rule(er.Adam(lr=0.5))
        elif how == "lookup":
            table.lookup(np.arange(20))
        else:
            ej.Tables(table).fetch([1, 2])
        tables.apply(batch, ones(batch), True)
        assert table.steps == 1
        table.commit()


@pytest.mark.parametrize(
    ("options", "count"), [({"rule": er.Adam(dense=True)}, 3), ({"rows": None, "eviction": er.Eviction(max_rows=3)}, 1)]
)
def test_a_batch_before_another_step_of_tables_that_change_other_rows(options: Any, count: int):
    """A dense rule moves all rows. A step may evict any."""
    case = Case(**options)
    case.step()
    batch, other = case.tables.fetch(IDS), case.tables.fetch({"user": [5], "item": [11]})
    case.tables.apply(other, ones(other), True)
    text = f"rows of table 'item' have changed since this batch was fetched, {count} of 3: {REMEDY}"
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True), OutdatedBatchError, text)
    case.step()


def test_a_batch_of_other_tables(case: Case):
    """Tables of another tree, and tables that a cell made anew."""
    text = (
        "a batch of table 'item', table 'user' must be fetched by the object that steps it: this one was fetched by "
        "another object, for these or for other tables. Nothing has changed. Fetch its ids again."
    )
    for other in (Case().tables, ej.Tables(case.by_name), ej.Tables(made())):
        batch = other.fetch([1] if len(other.by_name) == 1 else IDS)
        case.refuses(
            lambda batch=batch: case.tables.apply(batch, ones(case.tables.fetch(IDS)), True), ArgumentError, text
        )


def test_a_batch_with_missing(case: Case):
    text = (
        "a batch of table 'item', table 'user' that is stepped must have the rows themselves: this one was fetched "
        "with missing='zeros'. Fetch it without `missing`."
    )
    batch = case.tables.fetch(IDS, missing="zeros")
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True), ArgumentError, text)
    text = "`missing` of table 'item', table 'user' must be one of first, zeros, shared, raise, or a row of..."
    case.refuses(lambda: case.tables.fetch(IDS, missing="no"), ArgumentError, text)


def test_a_batch_that_was_not_read(case: Case):
    batch = case.tables.plan(IDS)
    text = f"`batch` of apply must be what fetch returned: got {batch!r}, without..."
    case.refuses(lambda: case.tables.apply(batch, ones(case.tables.fetch(IDS)), True), ArgumentError, text)


# -------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    ("by_position", "wrong", "text"),
    [
        (False, np.ones((2, 2), np.float32), "must have shape (128, 2), that of the ids and `dim`: got (2, 2)."),
        (False, np.ones((128, 3), np.float32), "must have shape (128, 2), that of the ids and `dim`: got (128, 3)."),
        (True, np.ones((128, 2), np.float32), "must have shape (2, 2, 2), that of the ids and `dim`: got (128, 2)."),
        (True, np.ones((4, 2), np.float32), "must have shape (2, 2, 2), that of the ids and `dim`: got (4, 2)."),
        (False, np.ones((128, 2), int), "must be floats: got dtype int64."),
        (False, jnp.ones((128, 2), bool), "must be floats: got dtype bool."),
        (False, 1.0, "must have shape (128, 2), that of the ids and `dim`: got ()."),
    ],
)
def test_gradients_of_another_shape_or_dtype(case: Case, by_position: bool, wrong: Any, text: str):
    batch = case.tables.fetch(IDS)
    right = ones(batch) if not by_position else jax.tree.map(jnp.ones_like, batch.lookup())
    call = lambda: case.tables.apply(batch, {**right, "item": wrong}, True, by_position=by_position)  # noqa: E731
    case.refuses(call, GradientError, f"`grads` of table 'item' {text}")
    case.tables.apply(batch, right, True, by_position=by_position)  # the batch is not spent


@pytest.mark.parametrize(
    "wrong", [None, 1.0, float("nan"), 1, "yes", jnp.array([True, True]), np.array([]), {"a": True}]
)
def test_finite_that_is_no_bool(case: Case, wrong: Any):
    """A loss that is NaN would be true."""
    batch = case.tables.fetch(IDS)
    text = f"`finite` of apply must be one bool: got {wrong!r}. Pass ej.all_finite(loss, grads, row_grads)."
    case.refuses(lambda: case.tables.apply(batch, ones(batch), wrong), ArgumentError, text)
    for right in (True, np.True_, jnp.array(True), np.array(True)):
        batch = case.tables.fetch(IDS)
        case.tables.apply(batch, ones(batch), right)


# -------------------------------------------------------------------- learning rates


@pytest.mark.parametrize(
    ("lr", "got"),
    [
        (float("nan"), "nan"),
        (lambda step: float("inf"), "inf"),
        (lambda step: jnp.array(jnp.nan), "nan"),
        (optax.constant_schedule(jnp.float32(-0.5)), "-0.5"),
        (-1, "-1"),
        ("x", "'x'"),
        (lambda step: "x", "'x'"),
        (lambda step: [0.1], "[0.1]"),
        (np.array([0.1, 0.2]), "array([0.1, 0.2])"),
        (jnp.array([1.0, 2.0]), "Array([1., 2.], dtype=float32)"),
        ({"user": 0.1, "item": float("nan")}, "nan"),
        ({"user": 0.1, "item": {"a": 0.1}}, "{'a': 0.1}"),
    ],
)
def test_learning_rates(case: Case, lr: Any, got: str):
    batch = case.tables.fetch(IDS)
    text = (
        f"`lr` of Adam must be a finite number in [0, inf): got {got}. The step of table 'item' was refused, and "
        "nothing has changed."
    )
    case.refuses(lambda: case.tables.apply(batch, ones(batch), True, lr=lr), ArgumentError, text)
    case.tables.apply(batch, ones(batch), True, lr=jnp.array(0.1))


# -------------------------------------------------------------------- tables that cannot be stepped


def test_a_table_without_a_rule():
    tables = ej.Tables({"user": made(rule=None)})
    batch = tables.fetch({"user": [3, 1]})
    with pytest.raises(ArgumentError) as error:
        tables.apply(batch, ones(batch), True)
    assert str(error.value).startswith(
        "table 'user' has no rule to step by. Pass rule=er.Adam(lr=1e-3) when you make it, or call set_rule; "
    )
    tables.apply(batch, {"user": None}, True)  # it is not stepped, and needs none
    tables.by_name["user"].set_rule(er.Adam(lr=1e-3))  # the remedy
    batch = tables.fetch({"user": [3, 1]})
    tables.apply(batch, ones(batch), True)
    assert tables.by_name["user"].steps == 1


def test_a_closed_table(case: Case):
    batch = case.tables.fetch(IDS)
    case.by_name["item"].close()
    user = case.by_name["user"].state()
    for call in (
        lambda: case.tables.apply(batch, ones(batch), True),
        lambda: case.tables.fetch(IDS),
        lambda: next(ej.prefetch([IDS], case.tables, 2)),
    ):
        with pytest.raises(ClosedTableError, match=r"^table 'item' is closed, since .*Make a new Table"):
            call()
    np.testing.assert_array_equal(case.by_name["user"].state()["records"], user["records"])
    assert case.by_name["user"].steps == user["steps"]


def test_a_step_that_is_skipped_is_counted_by_all_tables_or_none():
    case = Case(on_nonfinite="skip")
    batch, (user, item) = case.tables.fetch(IDS), case.by_name.values()
    user.close()
    with pytest.raises(ClosedTableError, match="table 'user' is closed"):
        case.tables.apply(batch, ones(batch), False)
    assert item.state()["skipped_steps"] == 0


def test_a_table_that_is_only_read(tmp_path: Path):
    with made(path=tmp_path / "t") as table:
        table.update([1], np.ones((1, 2), np.float32))
        table.commit()
    with er.open(tmp_path / "t", mode="r") as table:
        own = made()
        tables = ej.Tables({"own": own, "read": table})
        batch = tables.fetch({"own": [1], "read": [1]})
        np.testing.assert_array_equal(batch.lookup("read"), table.lookup([1]))
        with pytest.raises(ReadOnlyTableError, match=r"table 'read' at .* was opened with mode=.r. and cannot change"):
            tables.apply(batch, ones(batch), True)
        assert (own.steps, table.steps, tables.stats()["steps"]) == (0, 1, 0)
        tables.apply(batch, {**ones(batch), "read": None}, True)  # its rows are given, and stay
        assert (own.steps, table.steps) == (1, 1)


# -------------------------------------------------------------------- prefetch


@pytest.mark.parametrize("depth", [-1, 1.5, True, "2", None])
def test_depth_of_prefetch(case: Case, depth: Any):
    text = f"`depth` of prefetch must be a whole number of items, 0 or more: got {depth!r}."
    case.refuses(lambda: ej.prefetch([IDS], case.tables, depth), ArgumentError, text)


def test_arguments_of_prefetch(case: Case):
    text = "`source` of prefetch must be something to loop over: got 3."
    case.refuses(lambda: ej.prefetch(3, case.tables), ArgumentError, text)  # pyright: ignore[reportArgumentType]
    text = (
        "prefetch takes a loader, an ej.Tables, and `ids_of`, a function of an item: got {0!r}, ids_of={1!r}. Pass, "
        "for example, ej.prefetch(loader, tables, ids_of=lambda item: item['ids'])."
    )
    calls: Any = ((made(), None), ([IDS], None), (case.tables, 3), (case.tables, "ids"))
    for tables, ids_of in calls:
        call: Any = lambda tables=tables, ids_of=ids_of: ej.prefetch([IDS], tables, 2, ids_of)  # noqa: E731
        case.refuses(call, ArgumentError, text.format(tables, ids_of))


def test_errors_of_ids_of_are_its_own(case: Case):
    loop = ej.prefetch([{"x": 1}], case.tables, 2, ids_of=lambda item: item["ids"])
    with pytest.raises(KeyError, match="ids"):
        next(loop)
    case.refuses(
        lambda: next(ej.prefetch([(IDS["user"], 1)], case.tables)), ArgumentError, "`ids` must have the tree..."
    )
