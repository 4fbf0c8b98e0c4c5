"""Planning on the GPU against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from gpu_device import INTERPRETED
from tensors import Poisoned, one, same, tensor

from embedrock.kernels.gpu import plan
from embedrock.kernels.gpu.runtime import inlined, launch
from reference import device

SIZES = 1, 2, 37, plan.BLOCK - 1, plan.BLOCK, plan.BLOCK + 1, 3 * plan.BLOCK + 5


def counts_of(n: int) -> torch.Tensor:
    return Poisoned((plan.blocks(n),), torch.int32).inside


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rows", [1, 50, 10**6])
def test_collect(rows: int, n: int, dtype: type) -> None:
    keys = np.random.default_rng(n).integers(0, rows, n).astype(dtype)
    order = np.argsort(keys, kind="stable")
    unique, starts = np.empty(n, np.int64), np.empty(n + 1, np.int32)
    inverse, count = np.empty(n, np.int32), np.empty(1, np.int32)
    tickets = np.empty(1 + n // 64 + 2 * plan.BLOCK * (n == SIZES[2]), np.int32)  # of many tables, more than positions
    device.mark(keys[order], rows, count, np.zeros(4, np.int64), tickets, 3)
    device.collect(keys[order], rows, order, count, unique, starts, inverse, count)

    found, bounds = Poisoned((n,), torch.int64), Poisoned((n + 1,), torch.int32)
    back, total, counts = Poisoned((n,), torch.int32), Poisoned((1,), torch.int32), counts_of(n)
    sorted_keys = tensor(keys[order])
    drawn = Poisoned((len(tickets),), torch.int32)
    plan.mark(sorted_keys, rows, counts, one(0, torch.int64), drawn.inside, 3)
    parts = found.inside, bounds.inside, back.inside, total.inside, drawn.inside
    plan.collect(sorted_keys, rows, tensor(order), counts, *parts)
    same(drawn.check(len(tickets)), tickets)
    same(total.check(1), count)
    same(found.check(n), unique)
    same(bounds.check(count[0] + 1), starts[: count[0] + 1])
    same(back.check(n), inverse)


@pytest.mark.parametrize("n", SIZES[2:5])
def test_narrow(n: int) -> None:
    keys = np.random.default_rng(n).integers(-(2**63), 2**63 - 1, n) >> 31  # about half of them fit
    keys[:2] = -(2**63), 2**63 - 1
    expected, got = np.empty(n, np.int32), Poisoned((n,), torch.int32)
    device.narrow(keys, expected)
    plan.narrow(tensor(keys), got.inside)
    same(got.check(n), expected)
    assert len(np.unique(expected)) > n // 4


def test_no_positions() -> None:
    nothing, none = tensor(np.empty(0, np.int64)), tensor(np.empty(0, np.int32))
    plan.narrow(nothing, none)
    count, starts, tickets = one(-7), one(-7), one(-7)
    plan.mark(nothing, 5, none, one(0, torch.int64), tickets, 1)
    plan.collect(nothing, 9, nothing, none, nothing, starts, none, count, tickets)
    assert count.item() == starts.item() == tickets.item() == 0


@inlined
def _add_up(counts, stop, total):
    tl.store(total, plan.sum_before(counts, stop))


@pytest.mark.parametrize("stop", [0, 1, 1024, 1025, 5000])
def test_more_blocks_than_are_added_up_at_once(stop: int) -> None:
    counts = np.random.default_rng(0).integers(0, 1024, 5001).astype(np.int32)
    total = one(-1)
    launch(_add_up, 1, tensor(counts), stop, total)
    assert total.item() == counts[:stop].sum()


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles the kernel itself")
def test_a_launch_that_triton_refuses_fails_where_kernels_are_interpreted() -> None:
    total = one(-1)
    with pytest.raises(AssertionError, match=r"(?s)Triton refuses to compile _add_up for .*total.* re-assigned"):
        launch(_add_up, 1, tensor(np.ones(3, np.int64)), 3, total)
    assert total.item() == -1


@pytest.mark.parametrize(
    ("keys", "bad"),
    [([0, 3, 9], None), ([-4, -1, 3], -4), ([0, 10], 10), ([-1, 12], -1), ([2**40], 2**40), ([-(2**63)], -(2**63))],
)
def test_a_key_out_of_range(keys: list[int], bad: int | None) -> None:
    expected, got = np.zeros(4, np.int64), Poisoned((4,), torch.int64)
    got.inside.zero_()
    args, tickets = (np.array(keys), 10, np.empty(1, np.int32)), one(0)
    device.mark(*args, expected, np.empty(1, np.int32), 16)
    plan.mark(tensor(args[0]), 10, counts_of(len(keys)), got.inside, tickets, 16)
    assert expected.tolist() == ([1, 16, bad, 0] if bad is not None else [0] * 4)
    same(got.check(4), expected)
    plan.mark(tensor(np.array([-7])), 10, counts_of(1), got.inside, tickets, 17)  # the first fault stays
    assert got.check(4).tolist() == (expected.tolist() if bad is not None else [1, 17, -7, 0])
