"""Every rule against its oracle, over direct and hashed directories."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.rules import RULES
from embedrock.testing import RULE_CASES, RuleSuite
from embedrock.testing.rules import DIM, ROWS


class TestDirect(RuleSuite):
    def make_table(self, rule: er.Rule, **arguments: Any) -> er.Table:
        return er.Table(ROWS, DIM, rule=rule, directory="direct", **arguments)


class TestHashed(RuleSuite):
    def make_table(self, rule: er.Rule, **arguments: Any) -> er.Table:
        return er.Table(ROWS, DIM, rule=rule, directory="hashed", **arguments)


ANYTHING: Any = 0.9


def test_every_rule_has_a_case() -> None:
    assert {type(case.rule) for case in RULE_CASES} == set(RULES)


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
        (lambda: er.Ftrl(lr=0), "`lr` of Ftrl"),
        (lambda: er.Adagrad(initial_accumulator_value=-1), "`initial_accumulator_value` of Adagrad"),
    ],
)
def test_bad_hyperparameters(make: Any, message: str) -> None:
    with pytest.raises(er.ArgumentError, match=message):
        make()


def test_a_step_changes_only_known_hyperparameters() -> None:
    table = er.Table(5, 2, rule=er.Adam())
    before = table.lookup(np.arange(5))
    for changes in ({"momentum": 0.5}, {"dense": True}):
        with pytest.raises(er.UnknownArgumentError, match="it has betas, eps, lr"):
            table.update([1], np.ones((1, 2)), **changes)
    with pytest.raises(er.ArgumentError, match="`lr` of Adam"):
        table.update([1], np.ones((1, 2)), lr=-1)
    np.testing.assert_array_equal(table.lookup(np.arange(5)), before)
    assert table.steps == 0


def dense_adam_pair(steps: int, dense: bool) -> tuple[er.Table, Any]:
    """Train a table and torch's dense Adam on a skewed stream with a learning rate that falls and rises."""
    torch = pytest.importorskip("torch")
    rows, dim, rng = 500, 16, np.random.default_rng(0)
    table = er.Table(rows, dim, rule=er.Adam(dense=dense), init=er.Normal(std=0.1))
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(np.arange(rows))))
    optimizer = torch.optim.Adam([weight], lr=1.0)
    for step in range(steps):
        lr = 1e-2 * 0.995**step * (1 + 0.5 * np.sin(step / 20))
        ids = (rng.zipf(1.2, 64) - 1) % rows
        grads = rng.standard_normal((64, dim)).astype(np.float32)
        table.update(ids, grads, lr=lr)
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = torch.zeros(rows, dim).index_add_(0, torch.from_numpy(ids), torch.from_numpy(grads))
        optimizer.step()
    return table, weight.detach().numpy()


def test_dense_adam_has_dense_adams_trajectory() -> None:
    table, expected = dense_adam_pair(600, dense=True)
    first = er.Table(500, 16, init=er.Normal(std=0.1)).lookup(np.arange(500))
    assert np.abs(expected - first).max() > 0.3
    np.testing.assert_allclose(table.lookup(np.arange(500)), expected, rtol=0, atol=3e-6)
    ids, weights = table.export()
    np.testing.assert_allclose(weights, expected[ids], rtol=0, atol=3e-6)
    np.testing.assert_array_equal(weights, table.lookup(ids))


def test_lazy_adam_has_another_trajectory() -> None:
    """The tolerance above tells the two apart."""
    table, expected = dense_adam_pair(100, dense=False)
    assert np.abs(table.lookup(np.arange(500)) - expected).max() > 1e-2


def test_reading_dense_adam_changes_nothing() -> None:
    often, never = (er.Table(50, 4, rule=er.Adam(lr=0.1, dense=True), seed=1) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(100):
        ids, grads = rng.integers(0, 50, 5), rng.standard_normal((5, 4)).astype(np.float32)
        often.update(ids, grads)
        never.update(ids, grads)
        often.lookup(rng.integers(0, 50, 7))
    np.testing.assert_array_equal(often.lookup(np.arange(50)), never.lookup(np.arange(50)))


def test_dense_adam_after_a_long_absence() -> None:
    """Rows that rest for thousands of steps take the shortcut; it must not change what they would have become."""
    torch = pytest.importorskip("torch")
    table = er.Table(3, 8, rule=er.Adam(lr=0.01, dense=True), init=er.Normal())
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup([0, 1, 2])))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    grads = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    for step in range(3000):
        row = 0 if step in (0, 2990) else 1
        weight.grad = torch.zeros(3, 8)
        weight.grad[row] = torch.from_numpy(grads[row])
        optimizer.step()
        table.update([row], grads[row : row + 1])
    np.testing.assert_allclose(table.lookup([0, 1, 2]), weight.detach().numpy(), rtol=2e-6, atol=2e-6)
