"""`RowGradients`: sums, merges and what is left out, beside plain dictionaries."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embedrock import RowGradients
from embedrock.batch.gradients import counted_in_units, largest_of, sum_of_units
from embedrock.batch.plan import SMALL_BATCH, make_plan

DIM = 3


def draw(count: int, largest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, largest, count), rng.standard_normal((count, DIM)).astype(np.float32)


def rows_of(grads: RowGradients) -> dict[int, tuple[float, ...]]:
    return dict(zip(grads.plan.ids.tolist(), map(tuple, grads.values.tolist()), strict=True))


def expected_sums(ids: np.ndarray, grads: np.ndarray) -> dict[int, tuple[float, ...]]:
    sums: dict[int, np.ndarray] = {}
    for i, grad in zip(ids.tolist(), grads, strict=True):
        sums[i] = sums[i] + grad if i in sums else grad
    return {i: tuple(total.tolist()) for i, total in sums.items()}


SIZES = [(0, 10), (7, 3), (5_000, 700), (2 * SMALL_BATCH, 10 * SMALL_BATCH)]


@pytest.mark.parametrize(("count", "largest"), SIZES)
def test_sum(count: int, largest: int) -> None:
    ids, grads = draw(count, largest, 0)
    got = RowGradients.sum(make_plan(ids), grads)
    assert rows_of(got) == expected_sums(ids, grads)
    assert math.isclose(got.square_norm, np.square(got.values, dtype=np.float64).sum(), rel_tol=1e-12)


@pytest.mark.parametrize(("count", "largest"), SIZES)
def test_merge(count: int, largest: int) -> None:
    parts = [RowGradients.sum(make_plan(ids), grads) for ids, grads in (draw(count, largest, seed) for seed in (1, 2))]
    expected = rows_of(parts[0])
    for i, values in rows_of(parts[1]).items():
        both = np.array(expected.get(i, (0.0,) * DIM), np.float32) + np.array(values, np.float32)
        expected[i] = tuple(both.tolist()) if i in expected else values
    assert rows_of(parts[0].merge(parts[1])) == expected


@pytest.mark.parametrize(("count", "largest"), SIZES[1:])
def test_without_a_row(count: int, largest: int) -> None:
    ids, grads = draw(count, largest, 3)
    whole = RowGradients.sum(make_plan(ids), grads)
    left_out = int(ids[count // 2])
    expected = rows_of(whole)
    expected.pop(left_out)
    assert rows_of(whole.kept(whole.plan.ids != left_out)) == expected
    assert whole.kept(whole.plan.ids != -5) is whole


def test_scaled() -> None:
    ids, grads = draw(50, 20, 4)
    whole = RowGradients.sum(make_plan(ids), grads)
    assert whole.scaled(1.0) is whole
    np.testing.assert_array_equal(whole.scaled(0.5).values, whole.values / 2)
    np.testing.assert_array_equal(whole.scaled(4.0, 1.0).values, np.clip(whole.values * 4, -1, 1))
    assert whole.scaled(0.5).norm == pytest.approx(whole.norm / 2)
    assert not whole.scaled(3e38).scaled(3e38).is_finite


def test_nonfinite_rows_are_named() -> None:
    ids, grads = draw(50, 20, 5)
    grads[7, 1], grads[30, 0] = np.nan, np.inf
    whole = RowGradients.sum(make_plan(ids), grads)
    assert not whole.is_finite
    assert set(whole.nonfinite_ids().tolist()) == {int(ids[7]), int(ids[30])}


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=40),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
def test_sums_in_units_are_the_same_bits_in_any_order_and_in_any_parts(
    numbers: list[float], seed: int, parts: int
) -> None:
    values = np.array(numbers, np.float32)[:, None]
    largest = largest_of(values)
    whole = sum_of_units(counted_in_units(values, largest), largest)
    order = np.random.default_rng(seed).permutation(len(values))
    summed = sum(counted_in_units(part, largest) for part in np.array_split(values[order], parts))
    np.testing.assert_array_equal(sum_of_units(np.asarray(summed), largest), whole)
    exact = math.fsum(numbers)
    assert abs(whole.item() - exact) <= len(numbers) * largest * 2.0**-30 + abs(exact) * 2.0**-24


def test_sums_in_units_stay_finite() -> None:
    most = np.full((3, 1), np.finfo(np.float32).max, np.float32)
    assert sum_of_units(counted_in_units(most, largest_of(most)), largest_of(most)) == most[:1]
    assert sum_of_units(counted_in_units(-most, largest_of(most)), largest_of(most)) == -most[:1]
    nothing = np.zeros((2, 3), np.float32)
    assert sum_of_units(counted_in_units(nothing, 0.0), 0.0).tolist() == [[0.0, 0.0, 0.0]]
    assert largest_of(nothing[:0]) == -1
