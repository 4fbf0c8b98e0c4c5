"""Sums over segments on the GPU against the reference: bit for bit where segments are short."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensors import DEVICE, Poisoned, one, same, tensor

from embedrock.kernels import reference
from embedrock.kernels.gpu import sums
from embedrock.kernels.reference import device

DIMS = 1, 3, 17, 64
SHORT = [1, 2, 5, 64, 3, 63, 1, 1]
LONG = [[65], [1, 64, 65, 1], [3, 128, 129, 2], [700], [1, 63, 66, 70, 64, 300, 1, 193, 2]]


class Plan(NamedTuple):
    """A batch's plan, as arrays."""

    starts: np.ndarray
    order: np.ndarray
    inverse: np.ndarray
    rows: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The plan on the device; what is beyond count is poison."""
        starts = Poisoned((len(self.order) + 1,), torch.int32).inside
        starts[: self.rows + 1] = tensor(self.starts[: self.rows + 1])
        return starts, tensor(self.order), tensor(self.inverse), one(self.rows)


def plan_of(sizes: list[int], seed: int = 0) -> Plan:
    """Return the plan of ids that occur so often, in random order."""
    keys = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    n, order = len(keys), np.argsort(keys, kind="stable")
    starts, inverse, count = np.empty(n + 1, np.int32), np.empty(n, np.int32), np.empty(1, np.int32)
    device.collect(keys[order], -1, order, count, np.empty(n, np.int64), starts, inverse, count)
    return Plan(starts, order, inverse, int(count[0]))


def expected_sums(grads: np.ndarray, plan: Plan, skip: int) -> tuple[np.ndarray, np.ndarray]:
    values, squares = np.zeros((plan.rows, grads.shape[1]), np.float32), np.zeros(plan.rows)
    reference.rows.sum_segments(grads, plan.starts, plan.order, values, squares)
    if skip >= 0:
        values[skip], squares[skip] = 0, 0
    return values, squares


def run(call: Any, plan: Plan, dim: int, skip: int) -> tuple[np.ndarray, np.ndarray]:
    """Call a kernel that sums over a plan, on poisoned memory; return its sums and squares."""
    n = len(plan.order)
    values, squares = Poisoned((n, dim), torch.float32), Poisoned((n,), torch.float64)
    partial = Poisoned((sums.partial_rows(n), dim), torch.float32)
    call(plan.tensors, one(skip), partial.inside, values.inside, squares.inside)
    partial.check(sums.partial_rows(n))
    got, got_squares = values.check(n), squares.check(n)
    assert not got[plan.rows :].any()
    assert not got_squares[plan.rows :].any()
    return got[: plan.rows], got_squares[: plan.rows]


def summed(grads: torch.Tensor, plan: Plan, skip: int) -> tuple[np.ndarray, np.ndarray]:
    return run(lambda plan, *rest: sums.sum_segments(grads, *plan, *rest), plan, grads.shape[1], skip)


def close(got: np.ndarray, grads: np.ndarray, plan: Plan, expected: np.ndarray) -> None:
    """Compare sums that were added up in another order: within what rounding can do, and a wrong row cannot."""
    bound = np.zeros_like(expected, np.float64)
    np.add.at(bound, plan.inverse, np.abs(grads))
    sizes = np.diff(plan.starts[: plan.rows + 1])[:, None]
    assert (np.abs(got - expected.astype(np.float64)) <= bound * (sizes * 2.0**-24)).all()
    short = sizes[:, 0] <= sums.CHUNK
    same(got[short], expected[short])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", DIMS)
def test_short_segments(dim: int, dtype: torch.dtype) -> None:
    plan, rng = plan_of(SHORT), np.random.default_rng(dim)
    grads = tensor(rng.standard_normal((140, dim + 3)).astype(np.float32)).to(dtype)[:, :dim]  # rows with a stride
    grads[tensor(plan.order[: plan.starts[2]])] = -0.0  # the sums of two segments, of one row and of two, are -0.0 too
    expected = expected_sums(grads.float().cpu().numpy(), plan, -1)
    values, squares = summed(grads, plan, -1)
    same(values, expected[0])
    np.testing.assert_allclose(squares, expected[1], rtol=1e-14)


@pytest.mark.parametrize("sizes", LONG, ids=str)
@pytest.mark.parametrize("skipped", [None, min, max])
def test_long_segments(skipped: Any, sizes: list[int]) -> None:
    plan, dim = plan_of(sizes), 5
    skip = -1 if skipped is None else sizes.index(skipped(sizes))
    array = np.random.default_rng(dim).standard_normal((sum(sizes), dim)).astype(np.float32)
    values, squares = summed(tensor(array), plan, skip)
    close(values, array, plan, expected_sums(array, plan, skip)[0])
    np.testing.assert_allclose(squares, np.square(values, dtype=np.float64).sum(1), rtol=1e-14)


def test_rows_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of more than 1024 columns are summed."""
    monkeypatch.setattr(sums, "COLUMNS", 8)
    for sizes in ([1, 5, 3], [2, 150, 1]):
        plan, dim = plan_of(sizes), 19
        array = np.random.default_rng(dim).standard_normal((sum(sizes), dim)).astype(np.float32)
        values, squares = summed(tensor(array), plan, -1)
        close(values, array, plan, expected_sums(array, plan, -1)[0])
        again = Poisoned((len(sizes),), torch.float64)
        sums.row_squares(tensor(values), one(len(sizes)), again.inside)
        np.testing.assert_allclose(again.check(len(sizes)), squares, rtol=1e-14)


def test_the_same_bits_again() -> None:
    plan, grads = plan_of(LONG[2]), torch.randn(sum(LONG[2]), 8, device=DEVICE)
    first, again = (summed(grads, plan, -1) for _ in range(2))
    same(first[0], again[0])
    same(first[1], again[1])


@pytest.mark.parametrize("dim", DIMS)
def test_row_squares(dim: int) -> None:
    values = Poisoned((37, dim), torch.float32).inside
    values[:29] = torch.randn(29, dim, device=DEVICE)
    squares = Poisoned((37,), torch.float64)
    sums.row_squares(values, one(29), squares.inside)
    expected = np.empty(29)
    reference.rows.row_squares(values[:29].cpu().numpy(), expected)
    got = squares.check(37)
    np.testing.assert_allclose(got[:29], expected, rtol=1e-14)
    assert not got[29:].any()


def test_no_positions() -> None:
    nothing, none = tensor(np.empty((0, 4), np.float32)), tensor(np.empty(0, np.int64))
    sums.sum_segments(nothing, none, none, none, one(0), one(-1), nothing, nothing, none)
    sums.row_squares(nothing, one(0), none)


def test_addresses_beyond_2_to_the_31() -> None:
    dim, far = 256, 2**31 // 256 + 5
    grads = torch.empty(far + 1, dim, device=DEVICE)  # little of it is ever touched
    rows = np.array([far, 3, far - 7])
    grads[tensor(rows)] = torch.arange(3 * dim, dtype=torch.float32, device=DEVICE).view(3, dim)
    plan = plan_of([2, 1])
    values, _ = summed(grads, plan._replace(order=rows[plan.order]), -1)
    same(values, expected_sums(grads[tensor(rows)].cpu().numpy(), plan, -1)[0])


@pytest.mark.parametrize("total", [0.0, 2.0, 1e-60, 1e70, 1e80, float("inf"), float("nan")])
def test_norm(total: float) -> None:
    got, expected = Poisoned((2,), torch.float32), np.empty(2, np.float32)
    sums.norm(torch.tensor(total, dtype=torch.float64, device=DEVICE), got.inside)
    device.norm(np.array(total), expected)
    same(got.check(2), expected)
