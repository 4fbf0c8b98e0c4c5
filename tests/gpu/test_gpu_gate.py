"""Whether a step is made, decided on the device."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import Poisoned, same, tensor

from embedrock.kernels import reference
from embedrock.kernels.gpu import gate

NUMBERS = st.sampled_from([0.0, 1.0, 0.5, 3e38, 1e-40, float("inf"), float("nan"), 2.0])
TABLES = st.tuples(NUMBERS, NUMBERS, st.sampled_from([0, 0, 0, 0, 1, 2, 3]))


@settings(max_examples=60, deadline=None)
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
