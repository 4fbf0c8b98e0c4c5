"""The counter-based generator and the first values drawn from it; ``docs/first-values.md`` is the definition.

Every operation is exact or rounded once as IEEE 754 says (integers, ``+ - * /`` in float32, conversions, bit
casts), so that any implementation without fused multiply-add gives the same bits. No library function is
called: the logarithms of two libraries, or of two versions of one, differ in the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedrock.kernels.constants import DENOMINATOR, FIRST_VALUES, LN_2, LOG_SERIES, NUMERATOR, ROUNDING


def philox(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return Philox4x32-10 of `counter` (..., 4) under `key` (2,): four random words per counter.

    Source: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = np.moveaxis(np.asarray(counter, np.uint64), -1, 0)
    for number in range(10):
        k0 = np.uint64((int(key[0]) + number * 0x9E3779B9) % 2**32)
        k1 = np.uint64((int(key[1]) + number * 0xBB67AE85) % 2**32)
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (second >> np.uint64(32)) ^ c1 ^ k0, second & np.uint64(0xFFFFFFFF)
        c2, c3 = (first >> np.uint64(32)) ^ c3 ^ k1, first & np.uint64(0xFFFFFFFF)
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def _words(ids: NDArray[np.int64], seed: int | np.uint64, purpose: int, step: int, dim: int) -> NDArray[np.uint32]:
    blocks = -(-dim // 4)
    counter = np.empty((len(ids), blocks, 4), np.uint32)
    counter[:, :, 0] = ids.astype(np.uint64)[:, None] & np.uint64(0xFFFFFFFF)
    counter[:, :, 1] = ids.astype(np.uint64)[:, None] >> np.uint64(32)
    counter[:, :, 2] = np.arange(blocks) | purpose << 30
    counter[:, :, 3] = int(step) % 2**32
    seed = int(seed) % 2**64
    key = np.array([seed % 2**32, seed >> 32], np.uint32)
    return philox(counter, key).reshape(len(ids), 4 * blocks)[:, :dim]


def _minus_log(t: NDArray[Any]) -> NDArray[Any]:
    # t = (1 + f) * 2**exponent, 1 + f between sqrt(1/2) and sqrt(2)
    bits = t.view(np.int32)
    exponent = (bits - np.int32(0x3F3504F3)) >> 23
    f = (bits - (exponent << 23)).view(np.float32) - np.float32(1)
    return (-exponent).astype(np.float32) * LN_2 - (f + (f * f) * _polynomial(f, LOG_SERIES))


def _polynomial(x: NDArray[Any], coefficients: tuple[np.float32, ...]) -> NDArray[Any]:
    value = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def standard_normal(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the standard normal values that belong to `words` (any shape)."""
    return _quantile(words, *_tail(words))


def truncated_normal(words: NDArray[np.uint32], beyond: float) -> NDArray[np.float32]:
    """Return the values that belong to `words` (any shape), normal but for the tails: `beyond` of each is cut off."""
    cut = np.float32(beyond)
    inside = np.float32(1) - np.float32(2) * cut
    p, x = _tail(words)
    return _quantile(words, cut + inside * p, inside * x)


def _tail(words: NDArray[np.uint32]) -> tuple[NDArray[Any], NDArray[Any]]:
    # p is the probability beyond |z|, and x = 1 - 2 p, made from k so that nothing cancels.
    k = (words >> 1).astype(np.int32)
    p = (k.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return p, ((0x7FFFFFFF - k).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-31)


def _quantile(words: NDArray[np.uint32], p: NDArray[Any], x: NDArray[Any]) -> NDArray[np.float32]:
    w = _minus_log((np.float32(4) * p) * (np.float32(1) - p))
    z = (x * _polynomial(w, NUMERATOR)) / _polynomial(w, DENOMINATOR)
    return (z.view(np.uint32) | words << 31).view(np.float32)


def uniform_values(
    ids: NDArray[np.int64], seed: int | np.uint64, low: float, high: float, out: NDArray[np.float32]
) -> None:
    """Fill `out` (n, dim) with the first values of the rows `ids` (n,): uniform between `low` and `high`."""
    words = _words(ids, seed, FIRST_VALUES, 0, out.shape[1])
    start = np.float32(low)
    out[:] = start + (np.float32(high) - start) * ((words >> 8).astype(np.float32) * np.float32(2.0**-24))


def normal_values(
    ids: NDArray[np.int64], seed: int | np.uint64, mean: float, std: float, out: NDArray[np.float32]
) -> None:
    """Fill `out` (n, dim) with the first values of the rows `ids` (n,): normal, `mean` and `std`."""
    words = _words(ids, seed, FIRST_VALUES, 0, out.shape[1])
    out[:] = np.float32(mean) + np.float32(std) * standard_normal(words)


def truncated_normal_values(
    ids: NDArray[np.int64], seed: int | np.uint64, mean: float, std: float, beyond: float, out: NDArray[np.float32]
) -> None:
    """Fill `out` (n, dim) with the first values of the rows `ids` (n,): normal without `beyond` of each tail."""
    words = _words(ids, seed, FIRST_VALUES, 0, out.shape[1])
    out[:] = np.float32(mean) + np.float32(std) * truncated_normal(words, beyond)


def constant_values(ids: NDArray[np.int64], value: float, out: NDArray[np.float32]) -> None:
    """Fill `out` (n, dim) with `value`, whichever rows `ids` (n,) names."""
    out[:] = np.float32(value)


def rounding_words(ids: NDArray[np.int64], seed: int | np.uint64, step: int, out: NDArray[np.uint32]) -> None:
    """Fill `out` (n, dim) uint32 with the words that decide the rounding of the rows `ids` (n,) at `step`."""
    out[:] = _words(ids, seed, ROUNDING, step, out.shape[1])
