"""`TableMachine`: a stateful property test of whole tables. A dict is the oracle."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import reference
from embedrock.initializers import Uniform
from embedrock.optimizers import Rule
from embedrock.table.table import Table, rows_of

DIM = 5
FEW = 60  # ids up to here are drawn often, so that rows meet again
LARGE = (2**31 - 1, 2**31, 2**33)
ids_lists = st.lists(st.integers(0, FEW) | st.sampled_from(LARGE), max_size=30)


def records_of(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return all ids that have records, int64 (n,), ascending, and the records uint8 (n, record_bytes).

    Those are all bytes of the rows, weights and optimizer state, wherever they lie.

    Example:
        >>> import embedrock as er
        >>> table = er.Table(rows=100, dim=4, init=er.Zeros())
        >>> table.assign([7, 3], np.zeros((2, 4), np.float32))
        >>> ids, records = records_of(table)
        >>> ids.tolist(), records.shape
        ([3, 7], (2, 16))
    """
    rows = rows_of(table)
    with rows.table_lock.alone():
        ids, records = rows.tier.snapshot()
    order = np.argsort(ids)
    return ids[order], records[order]


class ModelTable:
    """A table as a dict of rows, stepped by the NumPy reference one batch at a time. Slow, and easy to believe."""

    def __init__(self, rule: Rule, first: Any) -> None:
        self._rule, self._first, self._steps = rule, first, 0
        self.rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def row(self, row_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and state of a row, by its first value if it was never stepped."""
        if row_id in self.rows:
            return self.rows[row_id]
        return self._first(row_id), self._rule.first_state(DIM)

    def lookup(self, ids: list[int]) -> np.ndarray:
        """Return the weights of rows."""
        return np.array([self.row(i)[0] for i in ids], np.float32).reshape(len(ids), DIM)

    def update(self, ids: list[int], grads: np.ndarray) -> None:
        """Make one step."""
        self._steps += 1
        totals: dict[int, np.ndarray] = {}
        for i, grad in zip(ids, grads, strict=True):
            totals[i] = totals[i] + grad if i in totals else grad
        numbers = self._rule.numbers(self._steps)
        for i, total in totals.items():
            w, s = (np.array(part[None]) for part in self.row(i))
            reference.rules.UPDATES[type(numbers)](w, s, total[None], numbers)
            self.rows[i] = w[0], s[0]


class TableMachine(RuleBasedStateMachine):
    """Subclass it with `make_tables`: tables that must stay equal to each other bit for bit, and to a dict."""

    table_rules: ClassVar[tuple[Rule, ...]]
    rows: ClassVar[int] = 2**40

    def make_tables(self, **arguments: Any) -> list[Table]:
        """Return tables of the same contents that keep their rows in different ways."""
        raise NotImplementedError

    @initialize(which=st.integers(0, 100), seed=st.integers(-(2**63), 2**64 - 1))
    def start(self, which: int, seed: int) -> None:
        chosen = self.table_rules[which % len(self.table_rules)]
        self.tables = self.make_tables(dim=DIM, rule=chosen, init=Uniform(-1, 1), seed=seed)
        self.model = ModelTable(chosen, self._first_value)
        self.seed = seed

    def _first_value(self, row_id: int) -> np.ndarray:
        out = np.empty((1, DIM), np.float32)
        reference.generator.uniform_values(np.array([row_id]), np.uint64(self.seed % 2**64), -1.0, 1.0, out)
        return out[0]

    def fitting(self, ids: list[int]) -> list[int]:
        """Return the ids as ids of these tables."""
        return [i % self.rows for i in ids]

    def agree(self, ids: list[int]) -> None:
        """Fail unless all tables give the same bits, close to those of the dict."""
        first, *others = (table.lookup(ids) for table in self.tables)
        for other in others:
            np.testing.assert_array_equal(other, first)
        np.testing.assert_allclose(first.reshape(len(ids), DIM), self.model.lookup(ids), rtol=1e-5, atol=1e-6)

    @rule(ids=ids_lists)
    def lookup(self, ids: list[int]) -> None:
        ids = self.fitting(ids)
        self.agree(ids)

    @rule(ids=ids_lists, draw=st.integers(0, 2**32))
    def update(self, ids: list[int], draw: int) -> None:
        ids = self.fitting(ids)
        grads = np.random.default_rng(draw).standard_normal((len(ids), DIM)).astype(np.float32)
        for table in self.tables:
            table.update(ids, grads)
        self.model.update(ids, grads)
        self.agree(ids)

    @rule(ids=ids_lists, draw=st.integers(0, 2**32))
    def update_by_plan(self, ids: list[int], draw: int) -> None:
        ids = self.fitting(ids)
        grads = np.random.default_rng(draw).standard_normal((len(ids), DIM)).astype(np.float32)
        plans = [table.plan(ids) for table in self.tables]
        self.lookup_by_plans(ids, plans)
        for table, plan in zip(self.tables, plans, strict=True):
            table.apply(plan, grads)
        self.model.update(ids, grads)
        self.lookup_by_plans(ids, plans)  # made before rows were: they must be found all the same

    def lookup_by_plans(self, ids: list[int], plans: list[Any]) -> None:
        """Fail unless reading by plan gives what looking up gives."""
        for table, plan in zip(self.tables, plans, strict=True):
            np.testing.assert_array_equal(table.read(plan), table.lookup(ids))

    @rule(ids=st.lists(st.integers(0, FEW), unique=True, max_size=10), value=st.floats(-2, 2, width=32))
    def assign(self, ids: list[int], value: float) -> None:
        values = np.full((len(ids), DIM), value, np.float32)
        for table in self.tables:
            table.assign(ids, values)
        for i in ids:
            self.model.rows[i] = values[0].copy(), self.model.row(i)[1]

    @precondition(lambda self: bool(self.model.rows))
    @rule()
    def export(self) -> None:
        for table in self.tables:
            ids, weights = table.export()
            assert ids.tolist() == sorted(self.model.rows)
            np.testing.assert_allclose(weights, self.model.lookup(ids.tolist()), rtol=1e-5, atol=1e-6)

    @rule()
    def save_and_load(self) -> None:
        for table in self.tables:
            state = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in table.state().items()}
            table.load_state(state)
