"""The shipped suites must be able to fail: each is given a wrong answer here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock import kernels
from suites import RULE_CASES, DenseOracle, KernelSuite, RuleSuite
from suites.kernels import Guarded
from suites.rules import DIM, ROWS, ReferenceOracle


def suite_with(file: str, name: str, spoil: Callable[..., None]) -> KernelSuite:
    """Return a kernel suite over the CPU kernels, one of which is followed by `spoil`."""
    good = getattr(kernels.cpu, file)

    def spoiled(*args: Any) -> Any:
        result = getattr(good, name)(*args)
        spoil(*args)
        return result

    backend = SimpleNamespace(**{**vars(kernels.cpu), file: SimpleNamespace(**{**vars(good), name: spoiled})})
    return type("Spoiled", (KernelSuite,), {"backend": backend})()


def nudge(array: np.ndarray, at: int) -> None:
    if at < len(array):
        array.reshape(len(array), -1)[at, -1] += 1


SPOILED: list[tuple[str, str, Callable[..., None], Callable[[KernelSuite], None]]] = [
    ("rows", "gather", lambda *a: nudge(a[4], a[5]), lambda s: s.test_gather_and_scatter(8, "float32")),
    ("rows", "look_up", lambda *a: nudge(a[7], a[8]), lambda s: s.test_look_up("float32")),
    ("rows", "scatter", lambda *a: nudge(a[0], a[1][0]), lambda s: s.test_gather_and_scatter(8, "bfloat16")),
    ("rows", "reset_state", lambda *a: nudge(a[0], a[1][0]), lambda s: s.test_reset_state(8)),
    ("rows", "put", lambda *a: nudge(a[0], a[1][0]), lambda s: s.test_put(8)),
    ("rows", "row_squares", lambda *a: nudge(a[1], a[2]), lambda s: s.test_row_squares(8)),
    ("rows", "step", lambda *a: nudge(a[0], a[2][0]), lambda s: s.test_step(er.Adam(), 8)),
    ("rows", "step", lambda *a: nudge(a[0], a[2][0]), lambda s: s.test_step_rounds(8, "float16")),
    ("rows", "refresh", lambda *a: nudge(a[0], a[6]), lambda s: s.test_step(er.Adam(dense=True), 8)),
    ("directory", "find", lambda *a: nudge(a[3], a[4]), lambda s: s.test_direct_directory(1)),
    ("directory", "insert", lambda *a: nudge(a[3], 0), lambda s: s.test_direct_directory(32)),
    ("directory", "set_values", lambda *a: nudge(a[1], 0), lambda s: s.test_values_of_ids()),
    ("directory", "rehash", lambda *a: nudge(a[2], 0), lambda s: s.test_hashed_directory(64)),
]


@pytest.mark.parametrize(("file", "name", "spoil", "run"), SPOILED, ids=[case[1] for case in SPOILED])
def test_kernel_suite_notices(
    file: str, name: str, spoil: Callable[..., None], run: Callable[[KernelSuite], None]
) -> None:
    with pytest.raises(AssertionError):
        run(suite_with(file, name, spoil))


def test_guards_notice_a_write_outside() -> None:
    memory = Guarded((4, 3), np.float32)
    memory.inside[:] = 0
    memory.check()
    memory._whole[1, 0] = 0
    with pytest.raises(AssertionError, match="outside its output"):
        memory.check()


class WrongRate(RuleSuite):
    """Trains with a learning rate one percent off."""

    def make_table(self, rule: er.Rule, **arguments: Any) -> er.Table:
        table = er.Table(ROWS, DIM, rule=rule, **arguments)
        exact = table.update

        def update(ids: Any, grads: Any, lr: float | None = None, time: Any = None, **changes: Any) -> None:
            exact(ids, grads, (lr or rule.lr) * 1.01, time, **changes)

        table.update = update
        return table


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: repr(case.rule))
def test_rule_suite_notices_a_learning_rate_off_by_one_percent(case: Any) -> None:
    ours, theirs = WrongRate().drive(case, DenseOracle if case.torch_name else ReferenceOracle, 60)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)
