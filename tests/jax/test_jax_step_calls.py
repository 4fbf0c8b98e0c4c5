"""What a small batch costs in Python through JAX: see tests/table/test_table_calls.py.

Calls of JAX count too, as it puts arrays on devices and converts them in Python. They depend on its version a little.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import pytest

import embedrock as er

pytest.importorskip("jax")

import jax

import embedrock.jax as ej
from python_calls import least_calls

IDS = np.arange(32) % 24


def group(count: int) -> er.Group:
    made = er.Group()
    for k in range(count):
        made.table(f"t{k}", rows=1000, dim=16, rule=er.Adam(), seed=0)
    return made


def step_of(tables: Any, by_position: bool = False, depth: int = 0) -> Callable[[], None]:
    """Return a training step: fetch, a jitted loss and its gradients, apply."""
    fetched, ids = ej.Tables(tables), dict.fromkeys(tables, IDS)

    @jax.jit
    def grads_of(batch: ej.Batch) -> Any:
        def loss_of(given: Any) -> Any:
            vectors = given if by_position else batch.with_rows(given).lookup()
            return sum(own.sum() for own in vectors.values())

        grads = jax.grad(loss_of)(batch.lookup() if by_position else batch.rows)
        return grads, ej.all_finite(grads)

    fetching = ej.prefetch(repeat(ids), fetched, depth)

    def step() -> None:
        batch, _ = next(fetching)
        fetched.apply(batch, *grads_of(batch), by_position=by_position)

    return step


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    """Return how many functions are called by a step of one table, of groups, and of tables that share no lock."""
    alone = {f"t{k}": er.Table(rows=1000, dim=16, rule=er.Adam(), seed=0) for k in range(5)}
    steps = {"one": step_of(group(1)), "many": step_of(group(26)), "alone": step_of(alone)}
    steps["by_position"] = step_of(group(26), by_position=True)
    steps["ahead"] = step_of(group(26), depth=2)
    return {name: least_calls(step) for name, step in steps.items()}


def test_a_warm_step(calls: dict[str, int]) -> None:
    assert calls["one"] <= 255


def test_a_further_table_of_a_group(calls: dict[str, int]) -> None:
    assert calls["many"] - calls["one"] <= 25 * 20


def test_a_further_table_alone(calls: dict[str, int]) -> None:
    assert calls["alone"] - calls["one"] <= 4 * 260


def test_gradients_by_position(calls: dict[str, int]) -> None:
    assert calls["by_position"] <= calls["many"] + 26


def test_a_step_whose_rows_are_loaded_ahead(calls: dict[str, int]) -> None:
    assert calls["ahead"] <= calls["many"] + 50
