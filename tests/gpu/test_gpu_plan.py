"""Planning on the GPU against NumPy."""

from __future__ import annotations

from typing import Any

import compile_launched
import numpy as np
import pytest
import torch
import triton.language as tl
from gpu_device import INTERPRETED
from tensors import Poisoned, one, same, tensor
from triton.runtime.interpreter import interpreter_builder

from embedrock.kernels.gpu import plan
from embedrock.kernels.gpu.runtime import inlined, launch
from reference import device

SIZES = 1, 2, 37, plan.BLOCK - 1, plan.BLOCK, plan.BLOCK + 1, 3 * plan.BLOCK + 5


def scan_of(n: int) -> Poisoned:
    """Return the zeroed words of a scan."""
    made = Poisoned((plan.scan_words(n),), torch.int32)
    made.inside.zero_()
    return made


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("rows", [1, 50, 10**6])
def test_collect(rows: int, n: int, dtype: type) -> None:
    keys = np.random.default_rng(n).integers(0, rows, n).astype(dtype)
    order = np.argsort(keys, kind="stable")
    unique, starts = np.empty(n, np.int64), np.empty(n + 1, np.int32)
    inverse, count = np.empty(n, np.int32), np.empty(1, np.int32)
    tickets = np.zeros(1 + n // 64 + 2 * plan.BLOCK * (n == SIZES[2]), np.int32)  # of many tables, more than positions
    device.collect(keys[order], rows, order, unique, starts, inverse, count)

    found, bounds = Poisoned((n,), torch.int64), Poisoned((n + 1,), torch.int32)
    back, total, scan = Poisoned((n,), torch.int32), Poisoned((1,), torch.int32), scan_of(n)
    sorted_keys = tensor(keys[order])
    drawn = Poisoned((len(tickets),), torch.int32)
    parts = found.inside, bounds.inside, back.inside, total.inside, drawn.inside
    plan.collect(sorted_keys, rows, tensor(order), scan.inside, parts)
    same(drawn.check(len(tickets)), tickets)
    assert not scan.check(plan.scan_words(n)).any()  # it may be made again
    same(total.check(1), count)
    same(found.check(n), unique)
    same(bounds.check(count[0] + 1), starts[: count[0] + 1])
    same(back.check(n), inverse)


def test_no_positions() -> None:
    nothing, count, starts = tensor(np.empty(0, np.int64)), one(-7), one(-7)
    tickets, fault, scan = one(-7), one(0, torch.int64), scan_of(0)
    made = nothing, starts, nothing, count, tickets
    plan.collect(nothing, 9, nothing, scan.inside, made, checked=(5, fault))
    assert count.item() == starts.item() == tickets.item() == fault.item() == 0
    assert not scan.check(2).any()


@inlined
def _add_up(counts, told, stop, totals):
    tl.store(totals, plan.sum_before(counts, stop))
    tl.store(totals + 1, plan.sum_before(told, stop, TOLD=1))


@pytest.mark.parametrize("stop", [0, 1, 1024, 1025, 5000])
def test_more_blocks_than_are_added_up_at_once(stop: int) -> None:
    counts = np.random.default_rng(0).integers(0, 1024, 5001).astype(np.int32)
    totals = one(-1).repeat(2)
    launch(_add_up, 1, tensor(counts), tensor(counts + 1), stop, totals)
    assert totals.tolist() == [counts[:stop].sum()] * 2


@inlined
def _add_late(told, total):
    tl.store(total, plan.sum_before(told, 2, TOLD=1))


@pytest.mark.skipif(not INTERPRETED, reason="there, programs run at once")
def test_a_program_waits_for_what_earlier_ones_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that comes late, as if from a program that runs at the same time."""
    told, totals, asked = tensor(np.zeros(4, np.int32)), tensor(np.zeros(4, np.int32)), []
    builder = type(interpreter_builder)
    load = builder.create_masked_load

    def load_late(self: Any, pointers: Any, *rest: Any) -> Any:
        found = load(self, pointers, *rest)
        asked.append(int(told[1]))
        if len(asked) == 3:
            told[1] = 5
        return found

    monkeypatch.setattr(builder, "create_masked_load", load_late)
    told[0] = 8
    launch(_add_late, 1, told, totals)
    assert asked[:3] == [0, 0, 0]
    assert len(asked) == 4
    assert totals[0] == 7 + 4


@inlined
def _add_wide(counts, stop, total):
    tl.store(total, plan.sum_before(counts, stop))


@pytest.mark.skipif(not INTERPRETED, reason="Triton compiles the kernel itself")
def test_a_launch_that_triton_refuses_fails_where_kernels_are_interpreted() -> None:
    total = one(-1)
    with (
        compile_launched.compiling(),
        pytest.raises(AssertionError, match=r"(?s)Triton refuses to compile _add_wide for .*total.* re-assigned"),
    ):
        launch(_add_wide, 1, tensor(np.ones(3, np.int64)), 3, total)  # as nobody launched it before
    assert total.item() == -1


@pytest.mark.parametrize(
    ("keys", "bad"),
    [([0, 3, 9], None), ([-4, -1, 3], -4), ([0, 10], 10), ([-1, 12], -1), ([2**40], 2**40), ([-(2**63)], -(2**63))],
)
def test_a_key_out_of_range(keys: list[int], bad: int | None) -> None:
    expected, got = np.zeros(4, np.int64), Poisoned((4,), torch.int64)
    got.inside.zero_()
    device.check(np.array(keys), 10, expected)
    plan.check(tensor(np.array(keys)), 10, got.inside)
    assert expected.tolist() == ([1, 0, bad, 0] if bad is not None else [0] * 4)
    same(got.check(4), expected)
    plan.check(tensor(np.array([-7])), 10, got.inside)  # the first fault stays
    assert got.check(4).tolist() == (expected.tolist() if bad is not None else [1, 0, -7, 0])

    again, n = Poisoned((4,), torch.int64), len(keys)  # the plan of the same keys records the same
    again.inside.zero_()
    sizes = (n, torch.int64), (n + 1, torch.int32), (n, torch.int32), (1, torch.int32), (1, torch.int32)
    made = [Poisoned((size,), dtype).inside for size, dtype in sizes]
    arrays = tensor(np.array(keys)), 10, tensor(np.arange(n)), scan_of(n).inside
    plan.collect(*arrays, made, checked=(10, again.inside))
    same(again.check(4), expected)
