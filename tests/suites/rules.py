"""`RuleSuite`: every rule of a table against the optimizer that it must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import reference
from embedrock.initializers import Normal
from embedrock.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    RowwiseAdagrad,
    RowwiseRMSprop,
    Rule,
)
from embedrock.table.table import Table
from suites.kernels import step_numbers

ROWS, DIM, BATCH = 40, 9, 24


@dataclass(frozen=True)
class RuleCase:
    """A rule, and the PyTorch optimizer (name, arguments) that steps touched rows alike; None: only the reference.

    `sparse`: the optimizer takes sparse gradients. `lazy`: a dense gradient of zero would move rows, so the oracle is
    compared on a stream whose batches touch every row. `keras`: its form is that of Keras, and the oracle is
    `KerasOracle`.
    """

    rule: Rule
    torch_name: str | None = None
    torch_arguments: dict[str, Any] = field(default_factory=dict)
    sparse: bool = False
    lazy: bool = False
    keras: bool = False
    changes: tuple[dict[str, Any], ...] = ({}, {"lr": 0.02}, {"lr": 0.005})


FALLING = ({}, {"lr": 0.02}, {"betas": (0.8, 0.99)}, {"eps": 1e-3, "lr": 0.003})

RULE_CASES = (
    RuleCase(SGD(lr=0.1), "SGD"),
    RuleCase(Momentum(lr=0.1), "SGD", {"momentum": 0.9}, lazy=True),
    RuleCase(Momentum(lr=0.1, momentum=0.8, nesterov=True), "SGD", {"momentum": 0.8, "nesterov": True}, lazy=True),
    RuleCase(Adagrad(lr=0.1), "Adagrad"),
    RuleCase(Adagrad(lr=0.1, initial_accumulator_value=0.3), "Adagrad", {"initial_accumulator_value": 0.3}),
    RuleCase(RowwiseAdagrad(lr=0.1)),
    RuleCase(RowwiseAdagrad(lr=0.1, initial_accumulator_value=0.3)),
    RuleCase(RowwiseAdagrad(lr=0.1, weight_decay=0.5, groups=3), changes=({}, {"lr": 0.02}, {"weight_decay": 0.1})),
    RuleCase(RowwiseRMSprop(lr=0.01)),
    RuleCase(RowwiseRMSprop(lr=0.01, weight_decay=0.5, groups=9), changes=({}, {"lr": 0.02}, {"alpha": 0.9})),
    RuleCase(RMSprop(lr=0.01), "RMSprop", lazy=True),
    RuleCase(
        Adam(lr=0.01),
        "SparseAdam",
        sparse=True,
        changes=FALLING,
    ),
    RuleCase(AdamW(lr=0.01, weight_decay=0.1), "AdamW", {"weight_decay": 0.1}, lazy=True),
    RuleCase(Adam(lr=0.01, dense=True), "Adam", changes=FALLING),
    RuleCase(AdamW(lr=0.01, weight_decay=0.1, dense=True), "AdamW", {"weight_decay": 0.1}, changes=FALLING),
    RuleCase(
        Momentum(lr=0.1, dense=True), "SGD", {"momentum": 0.9}, changes=({}, {"lr": 0.02}, {"momentum": 0.5, "lr": 0.1})
    ),
    RuleCase(Momentum(lr=0.1, momentum=0.8, nesterov=True, dense=True), "SGD", {"momentum": 0.8, "nesterov": True}),
    RuleCase(RMSprop(lr=0.01, dense=True), "RMSprop", changes=({}, {"lr": 0.02}, {"alpha": 0.9})),
    RuleCase(Ftrl(lr=0.1)),
    RuleCase(Ftrl(lr=0.1, l1=0.05, l2=0.1, beta=1.0)),
    RuleCase(Momentum(lr=0.1, lr_inside=True), keras=True, lazy=True),
    RuleCase(Momentum(lr=0.1, nesterov=True, lr_inside=True), keras=True, lazy=True),
    RuleCase(Momentum(lr=0.1, lr_inside=True, dense=True), keras=True),
    RuleCase(
        Momentum(lr=0.1, nesterov=True, lr_inside=True, dense=True),
        keras=True,
        changes=({}, {"lr": 0.02, "momentum": 0.5}),
    ),
    RuleCase(Adagrad(lr=0.1, eps=1e-2, initial_accumulator_value=0.1, eps_inside=True), keras=True),
    RuleCase(RMSprop(lr=0.01, eps=1e-2, eps_inside=True), keras=True, lazy=True),
    RuleCase(
        RMSprop(lr=0.01, eps=1e-2, eps_inside=True, dense=True), keras=True, changes=({}, {"lr": 0.1, "alpha": 0.9})
    ),
    RuleCase(Adam(lr=0.01, eps=1e-3), keras=True, lazy=True),
    RuleCase(Adam(lr=0.01, eps=1e-3, dense=True, eps_hat=True), keras=True, changes=FALLING),
    RuleCase(AdamW(lr=0.01, eps=1e-3, weight_decay=0.1, eps_hat=True), keras=True, lazy=True),
    RuleCase(AdamW(lr=0.01, eps=1e-3, weight_decay=0.1, dense=True, eps_hat=True), keras=True, changes=FALLING),
    RuleCase(Ftrl(lr=0.1, l1=0.05, l2=0.1, beta=1.0, l2_shrinkage=0.05), keras=True, lazy=True),
    RuleCase(Ftrl(lr=0.1, l1=0.05, l2=0.1, beta=1.0, dense=True), keras=True, changes=({}, {"lr": 0.5}, {"l1": 0.2})),
)


def batches(seed: int, count: int, every_row: bool = False) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, grads) with repeated ids, a few rows far hotter than the others."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        ids = np.minimum(rng.zipf(1.4, BATCH) - 1, ROWS - 1)
        if every_row:
            ids = rng.permutation(np.concatenate([ids, np.arange(ROWS)]))
        yield ids, rng.standard_normal((len(ids), DIM)).astype(np.float32)


class DenseOracle:
    """A PyTorch optimizer over the whole table as one dense parameter."""

    def __init__(self, case: RuleCase, weights: np.ndarray) -> None:
        self._torch = pytest.importorskip("torch")
        self._parameter = self._torch.nn.Parameter(self._torch.from_numpy(weights.copy()))
        self._sparse, arguments = case.sparse, {"lr": case.rule.lr, **case.torch_arguments}
        self._optimizer = getattr(self._torch.optim, case.torch_name or "")([self._parameter], **arguments)

    def step(self, ids: np.ndarray, grads: np.ndarray, changes: dict[str, Any]) -> None:
        """Make one step, with hyperparameters changed from here on."""
        torch, group = self._torch, self._optimizer.param_groups[0]
        group.update(changes)
        indices, values = torch.from_numpy(ids), torch.from_numpy(grads)
        if self._sparse:
            self._parameter.grad = torch.sparse_coo_tensor(
                indices[None], values, self._parameter.shape, check_invariants=True
            )
        else:
            self._parameter.grad = torch.zeros_like(self._parameter).index_add_(0, indices, values)
        self._optimizer.step()

    @property
    def weights(self) -> np.ndarray:
        """The weights now: float32 (rows, dim)."""
        return self._parameter.detach().numpy()


class ReferenceOracle:
    """The readable NumPy rule over all rows at once, stepping those that a batch touches."""

    def __init__(self, case: RuleCase, weights: np.ndarray) -> None:
        self.weights, self._rule, self._step = weights.copy(), case.rule, 0
        self._state = np.tile(case.rule.first_state(weights.shape[1]), (len(weights), 1))

    def step(self, ids: np.ndarray, grads: np.ndarray, changes: dict[str, Any]) -> None:
        """Make one step, with hyperparameters changed from here on."""
        self._rule, self._step = self._rule.with_changes(changes), self._step + 1
        total = np.zeros_like(self.weights)
        np.add.at(total, ids, grads)
        rows, numbers = np.unique(ids), step_numbers(self._rule, self._step)
        w, s = self.weights[rows], self._state[rows]
        reference.rules.UPDATES[type(numbers)](w, s, total[rows], numbers)
        self.weights[rows], self._state[rows] = w, s


class KerasOracle:
    """The formulas of `keras.optimizers` in float64, over the whole table as one dense variable."""

    def __init__(self, case: RuleCase, weights: np.ndarray) -> None:
        self.weights, self._rule, self._step = weights.astype(np.float64), case.rule, 0
        self._velocity, self._average = np.zeros((2, *weights.shape))
        self._average += getattr(case.rule, "initial_accumulator_value", 0.0)

    def step(self, ids: np.ndarray, grads: np.ndarray, changes: dict[str, Any]) -> None:
        """Make one step, with hyperparameters changed from here on."""
        self._rule, self._step = self._rule.with_changes(changes), self._step + 1
        total = np.zeros_like(self.weights)
        np.add.at(total, ids, grads)
        formulas = {Momentum: self._momentum, Adagrad: self._adagrad, RMSprop: self._rmsprop, Ftrl: self._ftrl}
        formulas.get(type(self._rule), self._adam)(self._rule, total)

    def _momentum(self, r: Any, g: np.ndarray) -> None:
        self._velocity = r.momentum * self._velocity - r.lr * g
        self.weights += r.momentum * self._velocity - r.lr * g if r.nesterov else self._velocity

    def _adagrad(self, r: Any, g: np.ndarray) -> None:
        self._average += g**2
        self.weights -= r.lr * g / np.sqrt(self._average + r.eps)

    def _rmsprop(self, r: Any, g: np.ndarray) -> None:
        self._average = r.alpha * self._average + (1 - r.alpha) * g**2
        self.weights -= r.lr * g / np.sqrt(self._average + r.eps)

    def _adam(self, r: Any, g: np.ndarray) -> None:
        self.weights -= self.weights * getattr(r, "weight_decay", 0.0) * r.lr
        (beta1, beta2), t = r.betas, self._step
        self._velocity += (g - self._velocity) * (1 - beta1)
        self._average += (g**2 - self._average) * (1 - beta2)
        alpha = r.lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
        self.weights -= alpha * self._velocity / (np.sqrt(self._average) + r.eps)

    def _ftrl(self, r: Any, g: np.ndarray) -> None:
        if not r.lr:  # Keras would divide by it
            return
        accumulator = self._average + g**2
        growth = (np.sqrt(accumulator) - np.sqrt(self._average)) / r.lr
        self._velocity += g + 2 * r.l2_shrinkage * self.weights - growth * self.weights
        quadratic = np.sqrt(accumulator) / r.lr + 2 * (r.l2 + r.beta / (2 * r.lr))
        self.weights = (np.clip(self._velocity, -r.l1, r.l1) - self._velocity) / quadratic
        self._average = accumulator


def check_rate_of_zero(table: Table) -> None:
    """Fail unless steps with a learning rate of 0 move no weight by a bit, and count.

    Momentum that was gathered with the rate in it (``lr_inside=True``) goes on moving weights, as in Keras: of such a
    table, only the steps before all others are looked at. Rows of 16 bits that lag behind are rounded when a step
    catches up with them, whatever its rate: so no row of such a table does.
    """
    for trained in (0, 8):
        if trained and getattr(table.rule, "lr_inside", False):
            return
        for ids, grads in batches(5, trained, every_row=table.spec.dtype != "float32"):
            table.update(ids, grads)
        before, steps = table.lookup(np.arange(ROWS)).tobytes(), table.steps
        for ids, grads in batches(6, 5):
            table.update(ids, grads, lr=0)
            assert table.lookup(np.arange(ROWS)).tobytes() == before
        assert table.steps == steps + 5


class RuleSuite:
    """Subclass it with a way to make a table; every rule of `RULE_CASES` is driven through the same tests."""

    def make_table(self, rule: Rule, **arguments: Any) -> Table:
        """Return a new table of ROWS rows and DIM columns."""
        raise NotImplementedError

    def drive(self, case: RuleCase, oracle: Callable[..., Any], steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Train table and oracle on the same stream, and return the weights of both."""
        table = self.make_table(case.rule, init=Normal(std=0.5), seed=3)
        other = oracle(case, table.lookup(np.arange(ROWS)))
        lasting: dict[str, Any] = {}
        for k, (ids, grads) in enumerate(batches(5, steps, every_row=case.lazy)):
            lasting |= case.changes[k * len(case.changes) // steps]
            other.step(ids, grads, lasting)
            table.update(ids, grads, **lasting)
        return table.lookup(np.arange(ROWS)), other.weights

    @pytest.mark.parametrize("case", [c for c in RULE_CASES if c.torch_name], ids=lambda c: repr(c.rule))
    def test_equals_torch(self, case: RuleCase) -> None:
        ours, theirs = self.drive(case, DenseOracle, 60)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("case", [c for c in RULE_CASES if c.keras], ids=lambda c: repr(c.rule))
    def test_equals_keras(self, case: RuleCase) -> None:
        ours, theirs = self.drive(case, KerasOracle, 60)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize(
        "case", [c for c in RULE_CASES if not c.torch_name and not c.keras], ids=lambda c: repr(c.rule)
    )
    def test_equals_reference(self, case: RuleCase) -> None:
        ours, theirs = self.drive(case, ReferenceOracle, 60)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("case", RULE_CASES, ids=lambda c: repr(c.rule))
    def test_steps_with_a_rate_of_zero_are_those_of_the_oracle(self, case: RuleCase) -> None:
        """Also what they leave for the steps after them: state, and how many they were."""
        oracle = DenseOracle if case.torch_name else KerasOracle if case.keras else ReferenceOracle
        rates = {"lr": 0.0}, {"lr": case.rule.lr}, {"lr": 0.0}, {"lr": case.rule.lr}
        ours, theirs = self.drive(replace(case, changes=rates), oracle, 40)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("case", RULE_CASES, ids=lambda c: repr(c.rule))
    def test_a_rate_of_zero_moves_no_bit(self, case: RuleCase, dtype: str) -> None:
        check_rate_of_zero(self.make_table(case.rule, init=Normal(std=0.5), seed=3, dtype=dtype))

    @pytest.mark.parametrize("case", RULE_CASES, ids=lambda c: repr(c.rule))
    def test_duplicates_are_one_step(self, case: RuleCase) -> None:
        one, split = (self.make_table(case.rule, seed=2) for _ in range(2))
        grad = np.full((1, DIM), 0.5, np.float32)
        for _ in range(3):
            one.update([7], grad)
            split.update([7, 7], np.concatenate([grad / 2, grad / 2]))
        np.testing.assert_array_equal(one.lookup([7]), split.lookup([7]))

    @pytest.mark.parametrize("case", RULE_CASES, ids=lambda c: repr(c.rule))
    def test_untouched_rows_stay(self, case: RuleCase) -> None:
        table = self.make_table(case.rule, init=Normal(), seed=1)
        before = table.lookup(np.arange(ROWS))
        table.update([3], np.ones((1, DIM), np.float32))
        after = table.lookup(np.arange(ROWS))
        # But for dense AdamW and Ftrl, which multiply all rows that were never stepped.
        expected = before * np.float32(table.first_scale)
        np.testing.assert_array_max_ulp(np.delete(after, 3, axis=0), np.delete(expected, 3, axis=0), 1)
        if table.first_scale == 1:
            np.testing.assert_array_equal(np.delete(after, 3, axis=0), np.delete(before, 3, axis=0))
        assert (after[3] != before[3]).all()
