"""Launching kernels: over all items, with what they only read as read-only views."""

from __future__ import annotations

import numpy as np
import pytest

from embedrock.kernels.cpu import launch
from embedrock.kernels.cpu.runtime import kernel


@kernel(over="out", reads=("values", "positions"), grain=3)
def pick(values, positions, out, lo, hi):
    for i in range(lo, hi):
        out[i] += values[positions[i]]


@kernel(reads=("values",))
def total(values, start):
    for value in values:
        start += value
    return start


@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_kernel_is_launched_over_all_items(count):
    values, out = np.arange(7.0), np.zeros(count)
    positions = np.arange(count) % 7
    assert launch(pick, values, positions, out) is None
    np.testing.assert_array_equal(out, values[positions])


def test_a_kernel_without_a_range_is_called_once():
    assert launch(total, np.arange(5), 2) == 12


def test_read_only_or_not_is_one_type():
    values, frozen = np.arange(3.0), np.arange(3.0)
    frozen.flags.writeable = False
    out = np.zeros(2)
    for some in (values, frozen):
        launch(pick, some, np.zeros(2, np.int64), out)
        launch(total, some, 0)
    assert values.flags.writeable
    assert len({signature[0] for signature in pick.signatures}) == 1
    assert len([signature for signature in total.signatures if signature[0].dtype.name == "float64"]) == 1


@pytest.mark.parametrize("names", [{"over": "nobody"}, {"reads": ("nobody",)}])
def test_only_parameters_can_be_named(names):
    with pytest.raises(ValueError, match="not in"):
        kernel(**names)(lambda values, lo, hi: None)
