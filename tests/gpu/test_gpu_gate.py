"""Whether a step is made, decided on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import Poisoned, one, same, tensor

import reference
from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu.runtime import inlined, launch
from slow import examples

NUMBERS = st.sampled_from([0.0, 1.0, 0.5, 3e38, 1e-40, float("inf"), float("nan"), 2.0])
TABLES = st.tuples(NUMBERS, NUMBERS, st.sampled_from([0, 0, 0, 0, 1, 2, 3]))


@settings(max_examples=examples(60), deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=5))
def test_judge(tables: list[tuple[float, float, int]]):
    count = len(tables)
    numbers = np.array([[now for now, _, _ in tables], [shown for _, shown, _ in tables]], np.float32)
    faults = np.array([[code, 5, 6, 7 if code else 0] for _, _, code in tables], np.int64)
    expected = np.empty(count, np.float32), np.empty(count, np.int32), np.empty(count, np.int32)
    mine = tensor(faults)
    addresses = mine.data_ptr() + 32 * torch.arange(count)
    got = Poisoned((count, gate.LINE), torch.int32)
    gate.judge(tensor(numbers[0]), tensor(numbers[1]), tensor(addresses.numpy()), got.inside, 9)
    reference.device.judge(numbers, faults, expected[0], expected[1], expected[2], 9)
    verdicts = got.check(count)
    np.testing.assert_array_equal(verdicts[:, gate.FACTOR].copy().view(np.float32), expected[0])
    for part, wanted in zip((gate.LIVE, gate.FINITE), expected[1:], strict=True):
        np.testing.assert_array_equal(verdicts[:, part], wanted)
    same(mine, faults)


@inlined
def _note_alone(number, shown, fault, tickets, found, step):
    is_made, factor = gate.judge_alone(number, shown, fault, tickets, step)
    place = found + tl.program_id(0) * 2
    tl.store(place, is_made)
    tl.store(place + 1, factor.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize(
    ("now", "shown"), [(1.0, 1.0), (0.5, 2.0), (0.0, 3.0), (np.inf, 1.0), (np.nan, 1.0), (0.0, 0.0)]
)
def test_programs_that_judge_a_table_alone_decide_as_judge_does(now: float, shown: float, code: int) -> None:
    numbers, faults = np.array([[now], [shown]], np.float32), np.array([[code, 5, 6, 7 if code else 0]], np.int64)
    mine, found, tickets = tensor(faults[0]), Poisoned((3, 2), torch.int32), one(0)
    launch(_note_alone, 3, tensor(numbers[0]), tensor(numbers[1]), mine, tickets, found.inside, 9)
    factor, live, finite = np.empty(1, np.float32), np.empty(1, np.int32), np.empty(1, np.int32)
    reference.device.judge(numbers, faults, factor, live, finite, 9)
    lines = found.check(3)
    assert lines[:, 0].tolist() == [live[0]] * 3
    np.testing.assert_array_equal(lines[:, 1].copy().view(np.float32), factor.repeat(3))  # any NaN is as good
    same(mine, faults[0])
    assert tickets.item() == 0  # they may be drawn again
