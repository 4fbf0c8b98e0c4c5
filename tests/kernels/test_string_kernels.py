"""Kernels of strings against the reference, on poisoned memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import reference
from embedrock.kernels import cpu
from suites.kernels import AsLaunched, Guarded

CPU = AsLaunched(cpu.strings)
COUNT = 203
POINTS = np.array([0, 65, 0x7F, 0x80, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x10FFFF], np.uint32)


def in_parts(kernel: Any, *arguments: Any) -> None:
    for lo, hi in itertools.pairwise([0, 61, 62, 150, COUNT]):
        kernel(*arguments, lo, hi)


def compare(name: str, shape: int, dtype: Any, *arguments: Any) -> np.ndarray:
    """Return what the kernel of a name writes to an array of its own, which is what the reference does."""
    expected, got = np.empty(shape, dtype), Guarded((shape,), dtype)
    getattr(reference.strings, name)(*arguments, expected)
    in_parts(getattr(CPU, name), *arguments, got.inside)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
    return expected


@pytest.mark.parametrize("width", [1, 7, 30])
def test_strings_become_utf8_and_hashes(width: int):
    rng = np.random.default_rng(width)
    data = rng.choice(POINTS, COUNT * width)
    ends = compare("trim", COUNT, np.int64, data, width)
    sizes = compare("utf8_sizes", COUNT, np.int64, data, width, ends)
    starts = np.cumsum(sizes) - sizes
    text = compare("write_utf8", int(sizes.sum()), np.uint8, data, width, ends, starts)
    for buckets in (1, 1000, 2**63 - 1):
        compare(
            "hash_strings", COUNT, np.int64, text, starts, starts + sizes, rng.integers(0, 2**64, 2, np.uint64), buckets
        )


@pytest.mark.parametrize("point", [0xD800, 0xDFFF, 0x110000, 0xFFFFFFFF])
def test_what_is_no_character(point: int):
    data = np.full(COUNT * 3, 65, np.uint32)
    data[10] = point
    sizes = compare("utf8_sizes", COUNT, np.int64, data, 3, np.arange(3, 3 * COUNT + 3, 3))
    assert (sizes.min(), int(np.argmin(sizes))) == (-1, 3)


def test_bytes_are_trimmed():
    data = np.frombuffer(b"ab\0\0a\0b\0\0\0\0\0" * COUNT, np.uint8)[: COUNT * 4]
    compare("trim", COUNT, np.int64, data, 4)
