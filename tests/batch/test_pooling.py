"""The pooling kernels against their reference: on poisoned memory, at odd sizes, cut into any parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from embedrock import kernels
from embedrock.batch.plan import counting, make_plan, plan_tables, sources_of
from embedrock.batch.pooling import NO_BAGS, ONES, places_of
from embedrock.spec.spec import STORAGES
from slow import examples
from suites.kernels import GUARD, AsLaunched, Guarded, poison

CPU = AsLaunched(kernels.cpu.pooling)
NO_PADDING = -1  # no row of the batch: the CPU plans ids without it

# Sizes on both sides of the unrolled loops (4 and 8 wide), of the columns that are summed together (16 and 64), and of
# the prefetch distance.
DIMS = [1, 3, 8, 16, 17, 64, 83, 100]


class Strided:
    """Poisoned memory of the rows of several features, each with rows that lie apart; `arrays` are what is in use."""

    def __init__(self, bounds: np.ndarray, dim: int, dtype: Any = np.float32) -> None:
        self._whole = [poison((stop - start + 2 * GUARD, dim + GUARD), dtype) for start, stop in pairs(bounds)]
        self.arrays = [whole[GUARD:-GUARD, 1 : 1 + dim] for whole in self._whole]
        self.places = places_of(self.arrays)

    @staticmethod
    def of(rows: np.ndarray, bounds: np.ndarray) -> Strided:
        made = Strided(bounds, rows.shape[1], rows.dtype)
        for array, (start, stop) in zip(made.arrays, pairs(bounds), strict=True):
            array[:] = rows[start:stop]
        return made

    def joined(self) -> np.ndarray:
        """Return all rows, and fail where other memory was written to."""
        found = np.concatenate(self.arrays)
        for whole, array in zip(self._whole, self.arrays, strict=True):
            array[:] = poison(array.shape, array.dtype)
            assert (whole.view(np.uint8) == 0xFF).all(), "a kernel wrote outside its output"
        return found


def pairs(bounds: np.ndarray) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds.tolist()))


class Batch(NamedTuple):
    """Bags of ids of several features, with weights, and gradients for them. The features are those of two tables."""

    rows: np.ndarray
    inverse: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    offsets: np.ndarray
    bounds: np.ndarray
    own: np.ndarray
    of_tables: np.ndarray
    bags: np.ndarray
    weights: np.ndarray
    grads: np.ndarray

    @property
    def source(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The rows in any slots of wider records, but for every third one, which has none."""
        slots, is_new = np.random.default_rng(0).permutation(len(self.rows) + 3), np.arange(len(self.rows)) % 3 == 1
        words = np.full((len(slots), self.rows.shape[1] + 2), np.nan, np.float32)
        words[slots[: len(self.rows)], :-2] = self.rows
        return words, np.where(is_new, -np.cumsum(is_new), slots[: len(self.rows)]), self.inverse, self.rows[is_new]

    @property
    def places(self) -> np.ndarray:
        """Places of the bags in the arrays of the reference."""
        return np.arange(len(self.grads), dtype=np.int32)


def make_batch(seed: int, lengths: list[int], dim: int, weighted: bool) -> Batch:
    rng = np.random.default_rng(seed)
    n, own = sum(lengths), np.array([0, 2, 3])
    bounds = np.sort(np.append(rng.integers(0, len(lengths) + 1, 2), [0, len(lengths)]))
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tables = np.array([[0, 1, -(2**63), 2**63 - 1, 0], [1, 2, -(2**63), 2**63 - 1, 0]])
    positions = offsets[bounds[own]]
    ids = np.split(rng.integers(0, max(1, n // 2), n), positions[1:-1])
    plan = plan_tables(sources_of(ids), tables, positions)
    assert plan is not None
    # Few distinct values, so that equal maxima and exact cancellation occur.
    rows = rng.integers(-3, 4, (len(plan.ids), dim)).astype(np.float32) / 8
    weights = rng.normal(size=n if weighted else 0).astype(np.float32)
    grads = rng.normal(size=(len(lengths), dim)).astype(np.float32)
    of_bags = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    segments = plan.inverse, plan.starts, plan.order
    return Batch(rows, *segments, offsets, bounds, own, plan.rows, of_bags, weights, grads)


def check(found: np.ndarray, expected: np.ndarray, is_exact: bool = True) -> None:
    if is_exact:
        np.testing.assert_array_equal(found, expected)
    else:  # summed in another order, in float64
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


def parts_of(count: int, cuts: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(sorted({0, count, *(cut % (count + 1) for cut in cuts)}))) or [(0, 0)]


def check_forward(b: Batch, cuts: list[int]) -> None:
    """Compare the forward kernels with their reference."""
    cpu, (bags, dim) = CPU, b.grads.shape
    begins, ends = b.offsets[:-1], b.offsets[1:]
    for size, mean in ((0, False), (bags, False), (bags, True)):
        out, scale = np.empty((bags, dim), np.float32), np.empty(size, np.float32)
        reference.pooling.pool_sum(*b.source, b.offsets, b.places, b.weights, NO_PADDING, mean, out, scale)
        got, got_scale = Strided(b.bounds, dim), Guarded((size,), np.float32)
        where = got.places.at, b.bounds, dim, got_scale.inside
        for lo, hi in parts_of(bags, cuts):
            cpu.pool_sum(*b.source, begins, ends, b.weights, mean, *where, lo, hi)
        check(got.joined(), out)
        check(got_scale.inside, scale)
        got_scale.check()
    out, argmax = np.empty((bags, dim), np.float32), np.empty((bags, dim), np.int32)
    reference.pooling.pool_max(*b.source, b.offsets, b.places, NO_PADDING, out, argmax)
    got, got_argmax = Strided(b.bounds, dim), Guarded((bags, dim), np.int32)
    for lo, hi in parts_of(bags, cuts):
        cpu.pool_max(*b.source, begins, ends, got.places.at, b.bounds, got_argmax.inside, lo, hi)
    check(got.joined(), out)
    check(got_argmax.inside, argmax)
    got_argmax.check()


def check_backward(b: Batch, cuts: list[int], dtype: Any = np.float32) -> None:
    """Compare the backward kernels with their reference."""
    words = reference.codec.encode_nearest(b.grads, dtype)
    b.grads[:] = reference.codec.decode(words)
    cpu, given, (unique, dim) = CPU, Strided.of(words, b.bounds), b.rows.shape
    segments = *given.places, b.bounds, b.own, b.of_tables, b.bags, b.starts, b.order
    scale, argmax = np.linspace(0.1, 1, len(b.grads), dtype=np.float32), np.empty(b.grads.shape, np.int32)
    reference.pooling.pool_max(*b.source, b.offsets, b.places, NO_PADDING, np.empty_like(b.grads), argmax)

    def compare(kernel: Callable[..., None], own: tuple[Any, ...], expected: Callable[..., None], its: Any) -> None:
        values, squares = np.empty((unique, dim), np.float32), np.empty(unique)
        got, got_squares = Guarded((unique, dim), np.float32), Guarded((unique,), np.float64)
        expected(b.grads, b.bags, b.starts, b.order, *its, values, squares)
        for lo, hi in parts_of(unique, cuts):
            kernel(*segments, *own, got.inside, got_squares.inside, lo, hi)
        check(got.inside, values)
        check(got_squares.inside, squares, is_exact=False)
        got.check()
        got_squares.check()

    for factors in (scale, scale[:0]):
        own, its = (b.weights, factors, np.float32(0)), (b.weights, factors, NO_PADDING)
        compare(cpu.pool_sum_backward, own, reference.pooling.pool_sum_backward, its)
    compare(cpu.pool_max_backward, (argmax,), reference.pooling.pool_max_backward, (argmax,))

    out, got = np.empty(len(b.inverse), np.float32), Guarded((len(b.inverse),), np.float32)
    reference.pooling.weight_grads(b.grads, b.rows, b.inverse, b.bags, NO_PADDING, out)
    for lo, hi in parts_of(len(out), cuts):
        cpu.weight_grads(*given.places, b.bounds, b.rows, b.inverse, b.bags, got.inside, lo, hi)
    check(got.inside, out, is_exact=False)
    got.check()
    check(given.joined(), words)


def check_rows(b: Batch, cuts: list[int], dtype: Any = np.float32) -> None:
    """Compare positions that are bags of one each: rows copied, bit for bit or as sums, and summed."""
    cpu, n, dim = CPU, len(b.inverse), b.rows.shape[1]
    b.rows[::2] *= np.float32(-0.0)
    bounds, expected = b.offsets[b.bounds], np.empty((n, dim), np.float32)
    reference.rows.gather(*b.source[:2], b.inverse, b.source[3], expected)
    for start in (np.float32(-0.0), np.float32(0.0)):
        got = Strided(bounds, dim, dtype)
        for lo, hi in parts_of(n, cuts):
            cpu.copy_rows(*b.source, *got.places, bounds, start, dim, lo, hi)
        check(got.joined().view(np.uint16), reference.codec.encode_nearest(start + expected, dtype).view(np.uint16))

    grads = np.random.default_rng(0).normal(size=(n, dim)).astype(np.float32)
    grads[::3] = np.float32(-0.0)
    words = reference.codec.encode_nearest(grads, dtype)
    grads = reference.codec.decode(words)
    given, values = Strided.of(words, bounds), np.empty(b.rows.shape, np.float32)
    squares, got_squares = np.empty(len(values)), np.empty(len(values))
    reference.rows.sum_segments(grads, b.starts, b.order, values, squares)
    for bags in (counting(n), NO_BAGS):
        got = Guarded(values.shape, np.float32)
        segments = *given.places, bounds, b.own, b.of_tables, bags, b.starts, b.order
        for lo, hi in parts_of(len(values), cuts):
            cpu.pool_sum_backward(*segments, ONES, ONES, np.float32(-0.0), got.inside, got_squares, lo, hi)
        check(got.inside.view(np.int32), values.view(np.int32))
        check(got_squares, squares, is_exact=False)
        got.check()

    of_weights, expected = np.empty(n, np.float32), np.empty(n, np.float32)
    reference.pooling.weight_grads(grads, b.rows, b.inverse, counting(n), NO_PADDING, expected)
    cpu.weight_grads(*given.places, bounds, b.rows, b.inverse, NO_BAGS, of_weights, 0, n)
    check(of_weights, expected, is_exact=False)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("weighted", [False, True])
def test_equal_to_the_reference(dim: int, weighted: bool):
    batch = make_batch(dim, [3, 0, 1, 40, 17, 0, 5], dim, weighted)
    for check_kernels in (check_forward, check_backward, check_rows):
        check_kernels(batch, [])
        check_kernels(batch, [1, 3, 4])


@pytest.mark.parametrize("dim", [1, 17, 64])
@pytest.mark.parametrize("dtype", [STORAGES["bfloat16"], STORAGES["float16"]], ids=["bf16", "f16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_and_gradients_of_16_bits(dim: int, dtype: Any, weighted: bool):
    batch = make_batch(dim, [3, 0, 1, 40, 17, 0, 5], dim, weighted)
    batch.rows[:] = np.random.default_rng(1).normal(size=batch.rows.shape)  # which copies round
    for check_kernels in (check_backward, check_rows):
        check_kernels(batch, [1, 3, 4], dtype)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 9), max_size=9),
    dim=st.sampled_from(DIMS),
    weighted=st.booleans(),
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_parts_and_sizes_do_not_matter(seed, lengths, dim, weighted, cuts):
    batch = make_batch(seed, lengths, dim, weighted)
    for check_kernels in (check_forward, check_backward, check_rows):
        check_kernels(batch, cuts)


def test_a_check_notices_what_a_kernel_does_wrong():
    strided = Strided(np.array([0, 2, 5]), 3)
    strided._whole[1][-1, 0] = 0
    with pytest.raises(AssertionError, match="wrote outside"):
        strided.joined()
    with pytest.raises(AssertionError):
        check(np.zeros(2), np.array([0.0, 1.0]))


@pytest.mark.parametrize("count", [*range(18), 127, 128, 129, 130, 136, 256, 257, 5000])
def test_squares_are_added_with_the_bits_of_numpy(count: int):
    squares, rows, sums = (
        np.random.default_rng(count).random(count + 3) ** 5,
        np.array([0, 3, 3, count + 3]),
        np.empty(3),
    )
    CPU.sum_squares(squares, rows, sums)
    assert sums.tolist() == [squares[:3].sum(), 0.0, squares[3:].sum()]


def test_backward_is_the_adjoint_of_forward():
    b = make_batch(5, [4, 0, 9, 2, 30], 8, weighted=True)
    ones, out, scale = np.ones_like(b.rows), np.empty_like(b.grads), np.empty(len(b.grads), np.float32)
    values, squares, bounds = np.empty_like(b.rows), np.empty(len(b.rows)), np.array([0, len(b.grads)])
    source = ones, np.arange(len(b.rows)), b.inverse, ones[:0], b.offsets[:-1], b.offsets[1:]
    about = b.weights, False, places_of([out]).at, bounds, 8, scale
    CPU.pool_sum(*source, *about, 0, len(b.grads))
    segments = *places_of([b.grads]), bounds, np.array([0, 1]), np.array([0, len(b.rows)]), b.bags, b.starts, b.order
    about = b.weights, scale, np.float32(0), values, squares
    CPU.pool_sum_backward(*segments, *about, 0, len(b.rows))
    np.testing.assert_allclose((values * ones).sum(), (out * b.grads).sum(), rtol=1e-4)


def test_a_maximum_after_nan_follows_torch():
    rows = np.array([[np.nan], [1.0], [2.0]], np.float32)
    plan = make_plan(np.array([0, 1, 1, 0, 2]))
    out, argmax = np.empty((2, 1), np.float32), np.empty((2, 1), np.int32)
    source = rows, np.arange(3), plan.inverse, rows[:0]
    about = places_of([out]).at, np.array([0, 2]), argmax
    CPU.pool_max(*source, np.array([0, 2]), np.array([2, 5]), *about, 0, 2)
    np.testing.assert_array_equal(out, [[np.nan], [2.0]])
    assert argmax.tolist() == [[0], [4]]


def test_places_are_addresses_and_strides_of_rows() -> None:
    whole = np.zeros((6, 8), np.float32)
    arrays = [whole, whole[2:, 3:5], whole[::-2], np.broadcast_to(whole[:1], (4, 8))]
    first = whole.__array_interface__["data"][0]
    assert places_of(arrays).at.tolist() == [[first, 32], [first + 76, 32], [first + 160, -64], [first, 0]]
    assert places_of([whole], np.array([0, 64])).at.tolist() == [[first, 32], [first + 64, 32]]
