"""Pooling on the GPU against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tensors import Poisoned, same, tensor
from test_gpu_sums import Plan, close, plan_of, run

import reference
from embedrock.kernels.gpu import pooling, sums
from slow import slow

DIMS = 1, 17
SIZES = [3, 1, 20, 2, 64, 1]  # of segments
HOT = [3, 1, 200, 2, 129]  # rows that need chunks


class Bags:
    """A batch of bags, empty ones too, and its plan."""

    def __init__(self, sizes: list[int], dim: int, weighted: bool) -> None:
        rng = np.random.default_rng(dim)
        self.plan: Plan = plan_of(sizes, dim)
        n = len(self.plan.order)
        cuts = np.sort(rng.integers(0, n + 1, 12))
        self.offsets = np.concatenate([[0, 0], cuts, [n, n]]).astype(np.int64)
        self.places = np.arange(len(self.offsets) - 1, dtype=np.int32)
        self.bags = np.repeat(self.places, np.diff(self.offsets))
        self.rows = rng.integers(-3, 4, (self.plan.rows, dim)).astype(np.float32)  # some are equal
        self.rows[0, 0] = np.nan
        self.grads = rng.standard_normal((len(self.offsets) - 1, dim)).astype(np.float32)
        self.weights = rng.standard_normal(n * weighted).astype(np.float32)

    @property
    def source(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What the reference reads: each row in the slot of its number."""
        return self.rows, np.arange(len(self.rows)), self.plan.inverse, self.rows[:0]

    @property
    def padded_rows(self) -> torch.Tensor:
        """The rows on the device; what is beyond count is poison."""
        rows = Poisoned((len(self.plan.order), self.rows.shape[1]), torch.float32).inside
        rows[: self.plan.rows] = tensor(self.rows)
        return rows


def words(bags: int, skip: int, mean: bool = False) -> torch.Tensor:
    """Return the words of bags, as `joint.bags` writes them."""
    return tensor(np.full(bags, 2 * skip + mean, np.int32))


KINDS = list(itertools.product(DIMS, [False, True], [False, True], [-1, 2]))


@pytest.mark.parametrize(
    ("dim", "mean", "weighted", "skip"), [*KINDS[::5], *slow(*(kind for k, kind in enumerate(KINDS) if k % 5))]
)
def test_sum_and_mean(dim: int, mean: bool, weighted: bool, skip: int) -> None:
    bags = Bags(SIZES, dim, weighted)
    count, weights, plan = len(bags.grads), tensor(bags.weights), bags.plan
    out, scale = np.empty((count, dim), np.float32), np.empty(count, np.float32)
    reference.pooling.pool_sum(*bags.source, bags.offsets, bags.places, bags.weights, skip, mean, out, scale)
    got, got_scale = Poisoned((count, dim), torch.float32), Poisoned((count,), torch.float32)
    args = tensor(plan.inverse), tensor(bags.offsets), weights, words(count, skip, mean)
    pooling.pool(sums.POOLED, bags.padded_rows, *args, got.inside, got_scale.inside)
    np.testing.assert_array_equal(got.check(count), out)
    same(got_scale.check(count), scale)

    values = np.empty((plan.rows, dim), np.float32)
    args = bags.grads, bags.bags, plan.starts, plan.order, bags.weights, scale, skip
    reference.pooling.pool_sum_backward(*args, values, np.empty(plan.rows))
    back = backward(bags, sums.POOLED, (weights, tensor(scale)), skip)
    same(back, values)


def backward(bags: Bags, what: int, share: tuple[torch.Tensor | None, ...], skip: int) -> np.ndarray:
    grads, of = tensor(bags.grads), tensor(bags.bags)
    given = what, grads, (of, *share)
    return run(lambda plan, *rest: sums.sum_shares(*given, plan, *rest), bags.plan, bags.grads.shape[1], skip)


@pytest.mark.parametrize("skip", [-1, 2])
@pytest.mark.parametrize("dim", DIMS)
def test_max(dim: int, skip: int) -> None:
    bags = Bags(SIZES, dim, weighted=False)
    count, plan = len(bags.grads), bags.plan
    out, argmax = np.empty((count, dim), np.float32), np.empty((count, dim), np.int32)
    reference.pooling.pool_max(*bags.source, bags.offsets, bags.places, skip, out, argmax)
    got, source = Poisoned((count, dim), torch.float32), Poisoned((count, dim), torch.int32)
    args = tensor(plan.inverse), tensor(bags.offsets), tensor(bags.weights), words(count, skip)
    pooling.pool(sums.MAXIMA, bags.padded_rows, *args, got.inside, source.inside)
    np.testing.assert_array_equal(got.check(count), out)
    same(source.check(count), argmax)

    values = np.empty((plan.rows, dim), np.float32)
    args = bags.grads, bags.bags, plan.starts, plan.order, argmax
    reference.pooling.pool_max_backward(*args, values, np.empty(plan.rows))
    back = backward(bags, sums.MAXIMA, (None, tensor(argmax)), skip)
    same(back, values)


def test_hot_rows() -> None:
    bags = Bags(HOT, 17, weighted=True)
    scale = np.random.default_rng(0).random(len(bags.grads), np.float32)
    given = (bags.weights * scale[bags.bags])[:, None] * bags.grads[bags.bags]
    values = np.empty((bags.plan.rows, 17), np.float32)
    reference.rows.sum_segments(given, bags.plan.starts, bags.plan.order, values, np.empty(bags.plan.rows))
    back = backward(bags, sums.POOLED, (tensor(bags.weights), tensor(scale)), -1)
    close(back, given, bags.plan, values)

    argmax = np.random.default_rng(0).integers(-1, len(bags.bags), bags.grads.shape).astype(np.int32)
    given = np.where(argmax[bags.bags] == np.arange(len(bags.bags))[:, None], bags.grads[bags.bags], 0)
    reference.rows.sum_segments(given, bags.plan.starts, bags.plan.order, values, np.empty(bags.plan.rows))
    back = backward(bags, sums.MAXIMA, (None, tensor(argmax)), -1)
    close(back, given, bags.plan, values)


def test_rows_in_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "COLUMNS", 8)
    test_sum_and_mean(19, mean=True, weighted=True, skip=2)
    test_max(19, skip=2)
    test_weight_grads(19)


@pytest.mark.parametrize("dim", DIMS)
def test_weight_grads(dim: int) -> None:
    bags = Bags(SIZES, dim, weighted=True)
    n, inverse = len(bags.bags), bags.plan.inverse
    out, got = np.empty(n, np.float32), Poisoned((n,), torch.float32)
    reference.pooling.weight_grads(bags.grads, bags.rows, inverse, bags.bags, 2, out)
    args = bags.padded_rows, tensor(inverse), tensor(bags.bags), words(len(bags.grads), 2)
    pooling.weight_grads(tensor(bags.grads), *args, got.inside)
    np.testing.assert_allclose(got.check(n), out, rtol=1e-6, atol=1e-7)
