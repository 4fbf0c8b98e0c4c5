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
from embedrock.batch.plan import make_plan
from slow import examples
from suites.kernels import Guarded

# Sizes on both sides of the unrolled loops (4 and 8 wide), of the columns that are summed together (16 and 64), and of
# the prefetch distance.
DIMS = [1, 3, 8, 16, 17, 64, 83]


class Batch(NamedTuple):
    """Bags of ids with weights, and gradients for them."""

    rows: np.ndarray
    inverse: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    bags: np.ndarray
    weights: np.ndarray
    grads: np.ndarray
    skip: int

    @property
    def source(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The rows in any slots of wider records, but for every third one, which has none."""
        slots, is_new = np.random.default_rng(0).permutation(len(self.rows) + 3), np.arange(len(self.rows)) % 3 == 1
        words = np.full((len(slots), self.rows.shape[1] + 2), np.nan, np.float32)
        words[slots[: len(self.rows)], :-2] = self.rows
        return words, np.where(is_new, -np.cumsum(is_new), slots[: len(self.rows)]), self.inverse, self.rows[is_new]


def make_batch(seed: int, lengths: list[int], dim: int, weighted: bool, padded: bool) -> Batch:
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    plan = make_plan(rng.integers(0, max(1, n // 2), n))
    # Few distinct values, so that equal maxima and exact cancellation occur.
    rows = rng.integers(-3, 4, (len(plan.ids), dim)).astype(np.float32) / 8
    weights = rng.normal(size=n if weighted else 0).astype(np.float32)
    grads = rng.normal(size=(len(lengths), dim)).astype(np.float32)
    skip = int(rng.integers(0, len(plan.ids))) if padded and n else -1
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    places = rng.permutation(len(lengths)).astype(np.int32)
    bags = np.repeat(places, lengths)
    return Batch(rows, plan.inverse, plan.starts, plan.order, offsets, places, bags, weights, grads, skip)


Call = tuple[str, tuple[Any, ...], dict[str, tuple[tuple[int, ...], type]]]


def forward_calls(b: Batch) -> list[Call]:
    """Name, arguments and outputs of the forward kernels."""
    bags, dim = b.grads.shape
    pooled = {"out": ((bags, dim), np.float32)}
    scale, argmax = {"scale": ((bags,), np.float32)}, {"argmax": ((bags, dim), np.int32)}
    no_scale = {"scale": ((0,), np.float32)}
    return [
        ("pool_sum", (*b.source, b.offsets, b.places, b.weights, b.skip, False), pooled | no_scale),
        ("pool_sum", (*b.source, b.offsets, b.places, b.weights, b.skip, False), pooled | scale),
        ("pool_sum", (*b.source, b.offsets, b.places, b.weights, b.skip, True), pooled | scale),
        ("pool_max", (*b.source, b.offsets, b.places, b.skip), pooled | argmax),
    ]


def backward_calls(b: Batch) -> list[Call]:
    """Name, arguments and outputs of the backward kernels."""
    unique = {"values": (b.rows.shape, np.float32), "squares": ((len(b.rows),), np.float64)}
    scale = np.linspace(0.1, 1, len(b.grads), dtype=np.float32)
    argmax = np.empty(b.grads.shape, np.int32)
    reference.pooling.pool_max(*b.source, b.offsets, b.places, b.skip, np.empty_like(b.grads), argmax)
    return [
        ("pool_sum_backward", (b.grads, b.bags, b.starts, b.order, b.weights, scale, b.skip), unique),
        ("pool_sum_backward", (b.grads, b.bags, b.starts, b.order, b.weights, scale[:0], b.skip), unique),
        ("pool_max_backward", (b.grads, b.bags, b.starts, b.order, argmax), unique),
        (
            "weight_grads",
            (b.grads, b.rows, b.inverse, b.bags, b.skip),
            {"out": ((len(b.inverse),), np.float32)},
        ),
    ]


def run(function: Callable[..., None], call: Call, parts: list[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Call a kernel into poisoned, guarded outputs, part by part, and return them."""
    _, arguments, outputs = call
    made = {name: Guarded(shape, dtype) for name, (shape, dtype) in outputs.items()}
    for part in parts:
        function(*arguments, *(output.inside for output in made.values()), *part)
    for output in made.values():
        output.check()
    return {name: output.inside for name, output in made.items()}


def check_call(call: Call, cuts: list[int]) -> None:
    name = call[0]
    count = next(iter(call[2].values()))[0][0]
    expected = run(getattr(reference.pooling, name), call, [()])
    whole = run(getattr(kernels.cpu.pooling, name), call, [(0, count)])
    bounds = sorted({0, count, *(cut % (count + 1) for cut in cuts)})
    pieces = run(getattr(kernels.cpu.pooling, name), call, list(itertools.pairwise(bounds)))
    for output, values in whole.items():
        np.testing.assert_array_equal(pieces[output], values)
        if name == "weight_grads" or output == "squares":  # summed in another order, in float64
            np.testing.assert_allclose(values, expected[output], rtol=1e-6, atol=1e-12)
        else:
            np.testing.assert_array_equal(values, expected[output])


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("weighted", "padded"), [(False, True), (True, False)])
def test_equal_to_the_reference(dim: int, weighted: bool, padded: bool):
    batch = make_batch(dim, [3, 0, 1, 40, 17, 0, 5], dim, weighted, padded)
    for call in forward_calls(batch) + backward_calls(batch):
        check_call(call, [1, 3, 4])


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 9), max_size=9),
    dim=st.sampled_from(DIMS),
    weighted=st.booleans(),
    padded=st.booleans(),
    cuts=st.lists(st.integers(0, 100), max_size=4),
)
def test_parts_and_sizes_do_not_matter(seed, lengths, dim, weighted, padded, cuts):
    batch = make_batch(seed, lengths, dim, weighted, padded)
    for call in forward_calls(batch) + backward_calls(batch):
        check_call(call, cuts)


def test_backward_is_the_adjoint_of_forward():
    batch = make_batch(5, [4, 0, 9, 2, 30], 8, weighted=True, padded=True)
    ones = np.ones_like(batch.rows)
    out, scale = np.empty_like(batch.grads), np.empty(len(batch.grads), np.float32)
    values, squares = np.empty_like(batch.rows), np.empty(len(batch.rows))
    cpu, bags, unique = kernels.cpu.pooling, len(batch.grads), len(batch.rows)
    where = np.arange(unique), batch.inverse, ones[:0], batch.offsets, batch.places
    cpu.pool_sum(ones, *where, batch.weights, batch.skip, False, out, scale, 0, bags)
    segments = batch.bags, batch.starts, batch.order
    cpu.pool_sum_backward(batch.grads, *segments, batch.weights, scale, batch.skip, values, squares, 0, unique)
    np.testing.assert_allclose((values * ones).sum(), (out * batch.grads).sum(), rtol=1e-4)


def test_a_maximum_after_nan_follows_torch():
    rows = np.array([[np.nan], [1.0], [2.0]], np.float32)
    plan = make_plan(np.array([0, 1, 1, 0, 2]))
    out, argmax = np.empty((2, 1), np.float32), np.empty((2, 1), np.int32)
    places = np.arange(2, dtype=np.int32)
    source = rows, np.arange(3), plan.inverse, rows[:0]
    kernels.cpu.pooling.pool_max(*source, np.array([0, 2, 5]), places, -1, out, argmax, 0, 2)
    np.testing.assert_array_equal(out, [[np.nan], [2.0]])
    assert argmax.tolist() == [[0], [4]]
