"""Every rule against its oracle, over direct and hashed directories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

import embedrock as er
import reference
from embedrock import kernels
from embedrock.initializers import INITIALIZERS, Given
from embedrock.kernels import arguments
from embedrock.optimizers import RULES, StepHistory, describe_rule
from embedrock.spec.description import rule_of
from first_values import FIRST_VALUES
from slow import slow
from suites import RULE_CASES, RuleSuite
from suites.kernels import DEFAULTS, DENSE, FORMS, step_numbers
from suites.rules import DIM, ROWS, check_rate_of_zero


class TestDirect(RuleSuite):
    def make_table(self, rule: er.Rule, **arguments: Any) -> er.Table:
        return er.Table(ROWS, DIM, rule=rule, directory="direct", **arguments)


class TestHashed(RuleSuite):
    def make_table(self, rule: er.Rule, **arguments: Any) -> er.Table:
        return er.Table(ROWS, DIM, rule=rule, directory="hashed", **arguments)


ANYTHING: Any = 0.9


def test_every_rule_and_each_of_its_switches_has_a_case() -> None:
    assert {type(case.rule) for case in RULE_CASES} == set(RULES)
    for kind in RULES:
        switches = [field.name for field in dataclasses.fields(cast(Any, kind)) if isinstance(field.default, bool)]
        rules = [case.rule for case in RULE_CASES if type(case.rule) is kind]
        assert [name for name in switches if not any(getattr(rule, name) for rule in rules)] == []


def test_every_step_has_its_functions_and_is_tested() -> None:
    assert list(reference.rules.UPDATES) == list(kernels.cpu.rules.UPDATES) == list(arguments.STEPS)
    assert list(reference.rules.REFRESHES) == list(kernels.cpu.rules.REFRESHES)
    assert {type(step_numbers(rule, 1)) for rule in (*DEFAULTS, *FORMS)} == set(arguments.STEPS)
    catching_up = {type(step_numbers(rule, 1)) for rule in DENSE if (made := rule.history()) and made.moves_weights}
    assert set(reference.rules.REFRESHES) == catching_up


def test_first_values_of_every_kind_are_tested() -> None:
    assert {type(init) for init in FIRST_VALUES} == {kind for kind in INITIALIZERS if not issubclass(kind, Given)}


@pytest.mark.parametrize("kind", RULES)
def test_docstring_has_formula_source_and_untouched_rows(kind: type[er.Rule]) -> None:
    text = kind.__doc__ or ""
    assert "Source:" in text
    assert "w = " in text
    assert "not touch" in text


@pytest.mark.parametrize("kind", RULES)
def test_hyperparameters_are_checked(kind: Any) -> None:
    with pytest.raises(er.ArgumentError, match=rf"`lr` of {kind.__name__} must be a finite number in \[.*got -1"):
        kind(lr=-1)
    with pytest.raises(er.ArgumentError, match="got nan"):
        kind(lr=float("nan"))
    with pytest.raises(er.ArgumentError, match=r"must be a finite number in .*: got 1e\+39"):
        kind(lr=1e39)  # kernels would step by Inf
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    with pytest.raises(er.UnknownArgumentError, match=rf"{kind.__name__} takes {names}: got 'learning_rate'"):
        kind(learning_rate=0.1)
    with pytest.raises(TypeError):
        kind(*range(20))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: er.Adam(betas=(0.9, 1.0)),
            r"`betas\[1\]` of Adam must be a finite number in \[0, 1\): got 1.0",
        ),
        (lambda: er.Adam(betas=ANYTHING), "`betas` of Adam must be two numbers: got 0.9"),
        (lambda: er.AdamW(weight_decay=-1), "`weight_decay` of AdamW"),
        (lambda: er.RMSprop(alpha=1.0), "`alpha` of RMSprop"),
        (lambda: er.Momentum(momentum=1.5), "`momentum` of Momentum"),
        (lambda: er.Ftrl(lr=float("inf")), "`lr` of Ftrl"),
        (lambda: er.Adagrad(initial_accumulator_value=-1), "`initial_accumulator_value` of Adagrad"),
        (lambda: er.Ftrl(l2_shrinkage=-1), "`l2_shrinkage` of Ftrl"),
        (lambda: er.Ftrl(l2_shrinkage=0.1, dense=True), r"`l2_shrinkage` of Ftrl\(dense=True\) must be 0: got 0.1"),
        (lambda: er.RowwiseRMSprop(alpha=1.0), "`alpha` of RowwiseRMSprop"),
        (lambda: er.RowwiseAdagrad(weight_decay=-1), "`weight_decay` of RowwiseAdagrad"),
        (lambda: er.RowwiseRMSprop(groups=0), "`groups` of RowwiseRMSprop must be a whole number from 1 on: got 0"),
        (lambda: er.RowwiseAdagrad(groups=True), "`groups` of RowwiseAdagrad must be a whole number .*: got True"),
        (lambda: er.RowwiseAdagrad(groups=ANYTHING), "`groups` of RowwiseAdagrad must be a whole number .*: got 0.9"),
        (lambda: er.AdamW(lr=2, weight_decay=0.5, dense=True), r"of AdamW\(dense=True\) must be less than 1.*2 \* 0.5"),
    ],
)
def test_bad_hyperparameters(make: Any, message: str) -> None:
    with pytest.raises(er.ArgumentError, match=message):
        make()


def test_a_step_changes_only_known_hyperparameters() -> None:
    table = er.Table(5, 2, rule=er.Adam())
    before = table.lookup(np.arange(5))
    for changes in ({"momentum": 0.5}, {"dense": True}):
        with pytest.raises(er.UnknownArgumentError, match="it has betas, eps, eps_hat, lr"):
            table.update([1], np.ones((1, 2)), **changes)
    with pytest.raises(er.ArgumentError, match="`lr` of Adam"):
        table.update([1], np.ones((1, 2)), lr=-1)
    np.testing.assert_array_equal(table.lookup(np.arange(5)), before)
    assert table.steps == 0


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("lr", [-0.0001, float("nan"), float("inf")])
def test_a_rate_that_cannot_work_is_refused_with_the_name_of_the_table(kind: Any, lr: float) -> None:
    table = er.Table(5, 2, rule=kind(), name="users")
    with pytest.raises(er.ArgumentError, match=rf"`lr` of {kind.__name__} .*got {lr!r}.*step of table 'users' was ref"):
        table.update([1], np.ones((1, 2)), lr=lr)
    assert table.steps == 0
    table.update([1], np.ones((1, 2)), lr=0)
    assert table.steps == 1


def test_a_rate_of_zero_moves_no_bit_on_disk(tmp_path: Path) -> None:
    for number, case in enumerate(RULE_CASES):
        make = {"rule": case.rule, "init": er.Normal(std=0.5), "path": tmp_path / f"{number}", "memory": "48KiB"}
        with er.Table(ROWS, DIM, **make) as table:
            check_rate_of_zero(table)
            before = table.lookup(np.arange(ROWS))
            table.commit()
            table.update([1, 2], np.ones((2, DIM), np.float32), lr=0)
            table.commit()
        with er.open(tmp_path / f"{number}", mode="r") as table:
            if not getattr(case.rule, "lr_inside", False):
                np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), before)


@pytest.mark.parametrize("dense", [False, True])
def test_rates_that_ftrl_cannot_divide_by_count_as_zero(dense: bool) -> None:
    table = er.Table(ROWS, DIM, rule=er.Ftrl(lr=0.1, dense=dense), init=er.Normal())
    first = table.lookup(np.arange(ROWS))
    table.update([1], np.ones((1, DIM), np.float32), lr=1e-40)
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), first)
    assert table.first_scale == 1
    table.update([1], np.ones((1, DIM), np.float32))
    moved = table.lookup(np.arange(ROWS))
    assert (moved[1] != first[1]).all()
    assert (moved[2] == (0 if dense else first[2])).all()
    table.update([2], np.ones((1, DIM), np.float32), lr=0)
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), moved)
    again = er.Table(ROWS, DIM, init=er.Normal())
    again.load_state(table.state())
    for each in (table, again):
        each.update([2], np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(again.lookup(np.arange(ROWS)), table.lookup(np.arange(ROWS)))
    assert np.isfinite(table.lookup(np.arange(ROWS))).all()


# A description by 0.1, and the rule that it is.
OLD_DESCRIPTIONS = [
    ({"name": "Momentum", "lr": 0.1, "momentum": 0.9, "nesterov": False}, er.Momentum(0.1)),
    ({"name": "Adagrad", "lr": 0.1, "eps": 1e-10, "initial_accumulator_value": 0.0}, er.Adagrad(0.1)),
    ({"name": "RMSprop", "lr": 0.1, "alpha": 0.99, "eps": 1e-8}, er.RMSprop(0.1)),
    ({"name": "Adam", "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "dense": False}, er.Adam(0.1)),
    ({"name": "AdamW", "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}, er.AdamW(0.1)),
    (
        {"name": "RowwiseAdagrad", "lr": 0.1, "eps": 1e-8, "initial_accumulator_value": 0.0},
        er.RowwiseAdagrad(0.1),
    ),
    (
        {"name": "Ftrl", "lr": 0.1, "l1": 0.0, "l2": 0.0, "beta": 0.0, "initial_accumulator_value": 0.1},
        er.Ftrl(0.1),
    ),
]


@pytest.mark.parametrize(("description", "rule"), OLD_DESCRIPTIONS, ids=lambda value: repr(value)[:30])
def test_descriptions_are_those_of_0_1_where_no_newer_form_is_used(description: dict[str, Any], rule: er.Rule) -> None:
    assert rule_of(description) == rule
    assert describe_rule(rule) == description


ROWWISE = [
    er.RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.3, weight_decay=0.5, groups=4),
    er.RowwiseRMSprop(lr=0.2, alpha=0.9, eps=1e-4, weight_decay=0.005, groups=4),
]


@pytest.mark.parametrize("rule", [*FORMS, *ROWWISE], ids=repr)
def test_descriptions_of_newer_forms(rule: er.Rule) -> None:
    assert rule_of(describe_rule(rule)) == rule


class Pair(NamedTuple):
    """A rule, and the PyTorch optimizer whose dense trajectory it gives to every row."""

    rule: er.Rule
    name: str
    arguments: dict[str, Any]


PAIRS = [
    Pair(er.Adam(dense=True), "Adam", {}),
    Pair(er.AdamW(weight_decay=0.1, dense=True), "AdamW", {"weight_decay": 0.1}),
    # Without eps, Keras' form is PyTorch's.
    Pair(er.AdamW(eps=1e-12, weight_decay=0.1, dense=True, eps_hat=True), "AdamW", {"eps": 1e-12, "weight_decay": 0.1}),
    Pair(er.Momentum(dense=True), "SGD", {"momentum": 0.9}),
    Pair(er.Momentum(nesterov=True, dense=True), "SGD", {"momentum": 0.9, "nesterov": True}),
    Pair(er.RMSprop(dense=True), "RMSprop", {}),
]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: repr(pair.rule))


def train_pair(pair: Pair, steps: int) -> tuple[er.Table, Any]:
    """Train a table and the dense optimizer on a skewed stream with a learning rate that falls and rises."""
    torch = pytest.importorskip("torch")
    rows, dim, rng = 500, 16, np.random.default_rng(0)
    table = er.Table(rows, dim, rule=pair.rule, init=er.Normal(std=0.1), seed=0)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(np.arange(rows))))
    optimizer = getattr(torch.optim, pair.name)([weight], lr=1.0, **pair.arguments)
    for step in range(steps):
        lr = 1e-2 * 0.995**step * (1 + 0.5 * np.sin(step / 20))
        ids = (rng.zipf(1.2, 64) - 1) % rows
        grads = rng.standard_normal((64, dim)).astype(np.float32)
        table.update(ids, grads, lr=lr)
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.zeros(rows, dim).index_add_(0, torch.from_numpy(ids), torch.from_numpy(grads))
        optimizer.step()
    return table, weight.detach().numpy()


@each_pair
def test_dense_rules_have_the_trajectory_of_dense_optimizers(pair: Pair) -> None:
    table, expected = train_pair(pair, 400)
    first = er.Table(500, 16, init=er.Normal(std=0.1), seed=0).lookup(np.arange(500))
    assert np.abs(expected - first).max() > 0.3
    np.testing.assert_allclose(table.lookup(np.arange(500)), expected, rtol=2e-6, atol=3e-6)
    ids, weights = table.export()
    np.testing.assert_allclose(weights, expected[ids], rtol=2e-6, atol=3e-6)
    np.testing.assert_array_equal(weights, table.lookup(ids))


@each_pair
def test_lazy_rules_have_another_trajectory(pair: Pair) -> None:
    """The tolerance above tells the two apart."""
    lazy = dataclasses.replace(pair.rule, dense=False)  # pyright: ignore[reportArgumentType]
    table, expected = train_pair(pair._replace(rule=lazy), 100)
    assert np.abs(table.lookup(np.arange(500)) - expected).max() > 5e-3


@pytest.mark.parametrize("rule", [rule for rule in FORMS if getattr(rule, "dense", False)], ids=repr)
def test_reading_under_dense_rules_changes_nothing(rule: er.Rule) -> None:
    often, never = (er.Table(50, 4, rule=rule, seed=1) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(100):
        ids, grads = rng.integers(0, 40, 5), rng.standard_normal((5, 4)).astype(np.float32)
        often.update(ids, grads, lr=0.1)
        never.update(ids, grads, lr=0.1)
        often.lookup(rng.integers(0, 50, 7))
    np.testing.assert_array_equal(often.lookup(np.arange(50)), never.lookup(np.arange(50)))
    again = er.Table(50, 4, seed=1)
    again.load_state({key: np.array(v) if isinstance(v, np.ndarray) else v for key, v in often.state().items()})
    for table in (never, again):
        table.update([1, 45], np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(again.lookup(np.arange(50)), never.lookup(np.arange(50)))


@pytest.mark.parametrize(
    "pair", [PAIRS[1], PAIRS[3], *slow(PAIRS[0], PAIRS[2], *PAIRS[4:])], ids=lambda pair: repr(pair.rule)
)
def test_dense_rules_after_a_long_absence(pair: Pair) -> None:
    """Rows that rest for thousands of steps take the shortcut; it must not change what they would have become."""
    torch = pytest.importorskip("torch")
    table = er.Table(4, 8, rule=pair.rule, init=er.Normal(), seed=0)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(range(4))))
    optimizer = getattr(torch.optim, pair.name)([weight], lr=0.01, **pair.arguments)
    grads = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    for step in range(3000):
        row = {0: 0, 2980: 3, 2990: 0}.get(step, 1)  # row 2 is never touched
        weight.grad = torch.zeros(4, 8)
        weight.grad[row] = torch.from_numpy(grads[row])
        optimizer.step()
        table.update([row], grads[row : row + 1], lr=0.01)
    # Thousands of steps of one row: in float32 they are off by more than the shortcut.
    tolerance = 2e-6 if pair.name == "Adam" else 2e-5
    np.testing.assert_allclose(table.lookup(range(4)), weight.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_rows_that_were_never_stepped_decay_under_dense_adamw() -> None:
    table = er.Table(10, 4, rule=er.AdamW(lr=0.1, weight_decay=0.5, dense=True), init=er.Uniform(-1, 1), seed=0)
    first = table.lookup([7])
    assert table.first_scale == 1
    for lr in (0.1, 0.2):
        table.update([1], np.ones((1, 4), np.float32), lr=lr)
    assert table.first_scale == pytest.approx(0.95 * 0.9, rel=1e-6)
    np.testing.assert_allclose(table.lookup([7]), first * 0.95 * 0.9, rtol=1e-6)
    table.update([7], np.zeros((1, 4), np.float32))
    np.testing.assert_allclose(table.lookup([7]), first * 0.95 * 0.9 * 0.95, rtol=1e-6)


@pytest.mark.parametrize("rule", [er.AdamW(dense=True), er.Ftrl(dense=True)], ids=repr)
def test_rules_that_moved_rows_without_records_cannot_be_replaced(rule: er.Rule) -> None:
    table = er.Table(10, 4, rule=rule)
    table.set_rule(er.SGD())  # before the first step it can
    table.set_rule(rule)
    table.update([1], np.ones((1, 4), np.float32))
    before = table.lookup(range(10))
    with pytest.raises(er.UnsupportedError, match=r"cannot be replaced after 1 step by .*dense=True"):
        table.set_rule(er.SGD())
    table.set_rule(dataclasses.replace(rule, lr=0.5))  # pyright: ignore[reportArgumentType]
    assert table.rule == dataclasses.replace(rule, lr=0.5)  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(table.lookup(range(10)), before)


def test_assigning_under_dense_rules() -> None:
    values = np.ones((1, 4), np.float32)
    for rule in (er.Momentum(dense=True), er.AdamW(dense=True)):
        with pytest.raises(er.UnsupportedError, match=f"{type(rule).__name__}.dense=True., where rows lag behind"):
            er.Table(10, 4, rule=rule).assign([1], values)
    table = er.Table(10, 4, rule=er.RMSprop(dense=True))  # whose weights do not lag behind
    table.assign([1], values)
    np.testing.assert_array_equal(table.lookup([1]), values)


def test_where_the_learning_rate_stands_is_part_of_the_state() -> None:
    table = er.Table(10, 4, rule=er.Momentum(lr=0.1))
    table.update([1], np.ones((1, 4), np.float32))
    with pytest.raises(er.UnknownArgumentError, match="'lr_inside'"):
        table.update([1], np.ones((1, 4), np.float32), lr_inside=True)
    table.set_rule(er.Momentum(lr=0.1, lr_inside=True), reset_state=True)
    assert table.steps == 0


@pytest.mark.parametrize("rule", [er.Adam(dense=True), er.AdamW(lr=0.1, dense=True), er.Momentum(dense=True)], ids=repr)
@pytest.mark.parametrize("path", [None, "table.rock"])
def test_what_a_read_has_caught_up_with_is_what_the_step_would(rule, path, tmp_path):
    """A step takes over what the last read computed, if nothing came in between: not a bit is another."""
    places: list[dict[str, Any]] = [{} if path is None else {"path": str(tmp_path / f"{k}{path}")} for k in range(2)]
    tables = [er.Table(1000, 8, rule=rule, seed=0, **place) for place in places]
    generator = np.random.default_rng(0)
    for step in range(60):
        ids = generator.zipf(1.3, 40) % 1000
        grads = generator.standard_normal((40, 8)).astype(np.float32)
        plan = tables[0].plan(ids)
        np.testing.assert_array_equal(tables[0].read(plan), tables[1].lookup(ids))
        if step % 5 == 1:  # another step, of rows that were read
            for table in tables:
                table.update(ids[:3], grads[:3])
        if step % 5 == 2:  # another read in between
            tables[0].read(tables[0].plan(ids[:7]))
        tables[0].apply(plan, grads)
        tables[1].update(ids, grads)
    every = np.arange(1000)
    np.testing.assert_array_equal(tables[0].lookup(every), tables[1].lookup(every))
    for table in tables:
        if table.is_on_disk:
            table.commit()
        table.close()


def test_histories_of_the_same_steps_have_the_same_content() -> None:
    rule, other = er.Adam(0.1, dense=True), er.Adam(0.2, dense=True)
    one, same, late, loaded = (cast(StepHistory, rule.history()) for _ in range(4))
    assert one.content is same.content
    for _ in range(2):
        assert one.draft(rule) is same.draft(rule)
        late.draft(other)
        for history in (one, same, late):
            history.append()
        assert one.content is same.content
        assert one.content is not late.content
    loaded.load(one.state(), 2)
    assert loaded.content is not one.content  # numbers of files are not compared


class PartsOfRows:
    """The row-wise rules, written out for a table whose parts of rows are arrays of their own, in float64."""

    def __init__(self, rule: Any, weights: np.ndarray) -> None:
        self.rule, self.weights = rule, np.split(weights.astype(np.float64), rule.groups, axis=1)
        self.h = [np.full(len(weights), getattr(rule, "initial_accumulator_value", 0.0)) for _ in self.weights]

    def step(self, ids: np.ndarray, grads: np.ndarray) -> None:
        rule = self.rule
        for w, h, g in zip(self.weights, self.h, np.split(grads, rule.groups, axis=1), strict=True):
            for row in np.unique(ids):
                total = g[ids == row].sum(axis=0, dtype=np.float64)
                square = sum(total**2) / len(total)
                h[row] = rule.alpha * h[row] + (1 - rule.alpha) * square if hasattr(rule, "alpha") else h[row] + square
                w[row] -= rule.lr * rule.weight_decay * w[row]
                w[row] -= rule.lr * total / (np.sqrt(h[row]) + rule.eps)


@pytest.mark.parametrize("rule", ROWWISE, ids=repr)
def test_row_wise_rules_step_each_part_of_a_row_alone(rule: er.Rule, tmp_path: Path) -> None:
    make: dict[str, Any] = {"rule": rule, "init": er.Normal(std=0.5), "seed": 1}
    rng = np.random.default_rng(2)
    table, on_disk = er.Table(30, 20, **make), er.Table(30, 20, **make, path=tmp_path / "a.rock", memory="64KiB")
    dense = PartsOfRows(rule, table.lookup(np.arange(30)))
    for k in range(40):
        ids, grads = rng.integers(0, 25, 16), rng.standard_normal((16, 20)).astype(np.float32)
        grads[:, 5:] *= 1000  # a mean over the row would not move its first part
        for step in (table.update, on_disk.update, dense.step):
            step(ids, grads)
        if k == 20:
            on_disk.commit()
            on_disk.close()
            on_disk = er.open(tmp_path / "a.rock")
            assert on_disk.rule == rule
    on_disk.commit()
    on_disk.close()
    rows = table.lookup(np.arange(30))
    np.testing.assert_allclose(rows, np.concatenate(dense.weights, axis=1), rtol=1e-4, atol=2e-6)
    np.testing.assert_array_equal(er.open(tmp_path / "a.rock", mode="r").lookup(np.arange(30)), rows)


def test_groups_divide_the_columns_of_a_row() -> None:
    match = r"`groups` of RowwiseRMSprop must divide the 10 columns of a row of a table into .* got 4\. groups=2 does"
    with pytest.raises(er.ArgumentError, match=match):
        er.Table(5, 10, rule=er.RowwiseRMSprop(groups=4))
    table = er.Table(5, 10, rule=er.RowwiseRMSprop(groups=5))
    table.update([1], np.ones((1, 10)))
    with pytest.raises(er.UnknownArgumentError, match=r"no hyperparameter 'groups' that a step may change"):
        table.update([1], np.ones((1, 10)), groups=2)
    with pytest.raises(er.ArgumentError, match="groups=2 does"):
        table.set_rule(er.RowwiseRMSprop(groups=4), reset_state=True)
    assert table.rule == er.RowwiseRMSprop(groups=5)
    assert table.spec.layout.state_width == 5
