"""Whole tables against a dict, bit-equal among directories and thread counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import embedrock as er
from same_tables import LAZY, RULES
from slow import examples
from suites import TableMachine


class LargeTables(TableMachine):
    table_rules = LAZY

    def make_tables(self, **arguments: Any) -> list[er.Table]:
        return [er.Table(self.rows, directory="hashed", **arguments), er.Table(None, **arguments)]


class SmallTables(TableMachine):
    table_rules = LAZY
    rows = 61

    def make_tables(self, **arguments: Any) -> list[er.Table]:
        return [er.Table(self.rows, directory=name, **arguments) for name in ("direct", "hashed")]


class Members(TableMachine):
    table_rules = LAZY

    def make_tables(self, **arguments: Any) -> list[er.Table]:
        group = er.Group()
        return [
            group.table(name, rows, **arguments) for name, rows in (("a", self.rows), ("b", None), ("c", self.rows))
        ]


@pytest.mark.parametrize(("machine", "many"), [(LargeTables, 40), (SmallTables, 40), (Members, 15)])
def test_tables_agree_with_a_dict(machine: type[TableMachine], many: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(many), stateful_step_count=20, deadline=None)
    )


def test_the_oracle_can_fail() -> None:
    class Wrong(SmallTables):
        def make_tables(self, **arguments: Any) -> list[er.Table]:
            changed = arguments | {"seed": (arguments["seed"] + 1) % 2**63}
            return [er.Table(self.rows, **arguments), er.Table(self.rows, **changed)]

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Wrong,
            settings=settings(
                max_examples=20, deadline=None, print_blob=False, database=None, phases=[Phase.generate]
            ),  # not shrunk
        )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule))
def test_results_do_not_depend_on_threads_or_directory(rule: er.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embedrock.kernels.cpu.threads.LEAST_WORK", 1)
    results = set()
    before = er.get_threads()
    try:
        for threads in (1, 3, 8):
            er.set_threads(threads)
            for directory in ("direct", "hashed"):
                results.add(train(rule, directory))
    finally:
        er.set_threads(before)
    assert len(results) == 1


def train(rule: er.Rule, directory: str) -> bytes:
    """Train on batches large enough to be cut among threads, and return all rows as bytes."""
    rng, table = np.random.default_rng(0), er.Table(20_000, 6, rule=rule, directory=directory, seed=5)
    for size in (3_000, 70_000, 9_000):
        ids = np.minimum(rng.zipf(1.1, size) - 1, 19_999)
        table.update(ids, rng.standard_normal((size, 6)).astype(np.float32))
    return table.lookup(np.arange(20_000)).tobytes()
