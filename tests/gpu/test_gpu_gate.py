"""Whether a step is made, decided on the device."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import Poisoned, one, same, tensor
from triton import jit

import reference
from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu.addresses import WORDS
from embedrock.kernels.gpu.runtime import launch
from slow import examples

NUMBERS = st.sampled_from([0.0, 1.0, 0.5, 3e38, 1e-40, float("inf"), float("nan"), 2.0])
TABLES = st.tuples(NUMBERS, NUMBERS, st.sampled_from([0, 0, 0, 0, 1, 2, 3]))


def lines_of(tables: list[tuple[float, float, int]]) -> tuple[np.ndarray, torch.Tensor]:
    """Return the errors of tables, and their flags."""
    flags = tensor(np.zeros(len(tables), np.int64))
    words = [[code, flags[k].data_ptr(), 6, 7 if code else 0] for k, (_, _, code) in enumerate(tables)]
    return np.array(words, np.int64), flags


@settings(max_examples=examples(60), deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=5))
def test_judge(tables: list[tuple[float, float, int]]):
    count = len(tables)
    numbers = np.array([[now for now, _, _ in tables], [shown for _, shown, _ in tables]], np.float32)
    faults, flags = lines_of(tables)
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
    assert flags.tolist() == [code == 0 and fault[0] != 0 for (_, _, code), fault in zip(tables, faults, strict=True)]


@jit
def _note(numbers, shown, first, stop, ticket, number, entries, found, LANES: tl.constexpr):
    live, factors = gate.verdicts_of(numbers, shown, first, stop, ticket, number, entries, LANES)
    table = 0
    while table < stop - first:
        place = found + (tl.program_id(0) * LANES + table) * 2
        is_live, factor = gate.verdict_of(table, live, factors, LANES)
        tl.store(place, is_live.to(tl.int32))
        tl.store(place + 1, factor.to(tl.int32, bitcast=True))
        table += 1


@settings(max_examples=examples(60), deadline=None)
@given(tables=st.lists(TABLES, min_size=1, max_size=9), first=st.integers(0, 3), is_last=st.booleans())
def test_programs_of_a_step_decide_as_judge_does(
    tables: list[tuple[float, float, int]], first: int, is_last: bool
) -> None:
    count, programs, lanes = len(tables), 3, 1 << (len(tables) + first - 1).bit_length()
    numbers = np.array([[now for now, _, _ in tables], [shown for _, shown, _ in tables]], np.float32)
    faults, flags = lines_of(tables)
    mine, found, ticket = tensor(faults), Poisoned((programs * lanes, 2), torch.int32), one(0)
    entries = torch.zeros(first + count, WORDS, dtype=torch.int64)
    entries[first:, 7] = mine.data_ptr() + 32 * torch.arange(count)  # other tables have no error that could be read
    now, shown = tensor(numbers[0]), tensor(numbers[1])
    case = gate.VerdictCase(now, shown, first, first + count, ticket if is_last else None, 9)
    launch(_note, programs, *case, tensor(entries.numpy()), found.inside, LANES=lanes)
    factors, live, finite = np.empty(count, np.float32), np.empty(count, np.int32), np.empty(count, np.int32)
    expected = faults.copy()
    reference.device.judge(numbers, expected, factors, live, finite, 9)
    for lines in found.check(programs * lanes).reshape(programs, lanes, 2):
        np.testing.assert_array_equal(lines[:count, 0], live)
        np.testing.assert_array_equal(lines[:count, 1].copy().view(np.float32), factors)  # any NaN is as good
    same(mine, expected if is_last else faults)
    assert flags.tolist() == (mine.cpu().numpy() != faults)[:, 0].tolist()
    assert ticket.item() == 0  # they may be drawn again


def test_verdicts_are_read_as_judge_has_written_them() -> None:
    verdicts, found = Poisoned((2, gate.LINE), torch.int32), Poisoned((2 * 4, 2), torch.int32)
    faults = tensor(np.zeros((2, 4), np.int64))
    addresses = faults.data_ptr() + 32 * torch.arange(2)
    numbers = tensor(np.array([0.5, 0, 2, 3], np.float32))
    gate.judge(numbers[:2], numbers[2:], tensor(addresses.numpy()), verdicts.inside, 9)
    launch(_note, 2, *gate.VerdictCase(verdicts.inside, None, 1, 3, None, 0), one(0), found.inside, LANES=4)
    for lines in found.check(2 * 4).reshape(2, 4, 2):
        assert lines[:2].tolist() == [[1, np.float32(0.25).view(np.int32)], [0, 0]]
