"""`previewed`: the weights that a step would leave its rows with, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.table.stepping import StepRequest, previewed, step_all
from embedrock.table.table import rows_of

RULES: dict[str, Any] = {
    "sgd": er.SGD(lr=0.1),
    "lazy adam": er.Adam(lr=0.1),
    "dense adam": er.Adam(lr=0.1, dense=True),
    "dense adamw": er.AdamW(lr=0.1, dense=True),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_step_leaves_what_was_rehearsed(rule: Any, dtype: str, tmp_path: Any) -> None:
    draws = np.random.default_rng(0)
    for options in ({}, {"path": tmp_path / "t.rock", "memory": "1MiB"}):
        table = er.Table(1000, 4, rule=rule, dtype=dtype, seed=0, **options)
        for step in range(4):  # in which rows lag behind, and new ones come
            plan = table.plan(draws.integers(0, 8 + 8 * step, 12))
            grads = table.sum(plan, draws.standard_normal((12, 4)).astype(np.float32))
            before, steps = table.lookup(plan.ids), table.steps
            expected = previewed(rows_of(table), rule, grads)
            np.testing.assert_array_equal(table.lookup(plan.ids), before)
            assert table.steps == steps
            step_all([StepRequest((rows_of(table),), rule, grads)])
            np.testing.assert_array_equal(table.lookup(plan.ids), expected)
        if table.is_on_disk:
            table.commit()
        table.close()
