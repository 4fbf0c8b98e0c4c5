"""The kernel of n-grams against the reference, on poisoned memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import reference
from embedrock.kernels import cpu
from suites.kernels import AsLaunched, Guarded

KERNEL: Any = AsLaunched(cpu.ngrams).ngram_ids
SEQUENCES, LENGTH = 7, 29


@pytest.mark.parametrize("lags", [1, 2, 5])
@pytest.mark.parametrize("boundary", [-1, 3])
@pytest.mark.parametrize("is_sum", [True, False])
def test_ids_of_ngrams(lags: int, boundary: int, is_sum: bool):
    rng = np.random.default_rng(lags)
    tokens, folds = rng.integers(0, 20, SEQUENCES * (LENGTH + lags - 1)), rng.integers(0, 2**31, 20)
    multipliers = rng.integers(0, 2**29, (6, lags))
    moduli, offsets = np.array([1, 2, 1009, 2**31 - 1, 2**61 - 1, 2**63 - 1]), np.array([0, 1, 5, 2**40, 2**62, 0])
    arguments = tokens, folds[tokens], LENGTH, boundary, 7, multipliers, moduli, offsets, is_sum
    expected, got = np.empty((SEQUENCES * LENGTH, 6), np.int64), Guarded((SEQUENCES * LENGTH, 6), np.int64)
    reference.ngrams.ngram_ids(*arguments, expected)
    for lo, hi in itertools.pairwise([0, 50, 51, 140, SEQUENCES * LENGTH]):
        KERNEL(*arguments, got.inside, lo, hi)
    np.testing.assert_array_equal(got.inside, expected)
    got.check()
