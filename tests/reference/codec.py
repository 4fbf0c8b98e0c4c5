"""16-bit weights: how their words decode to float32, and the two ways in which float32 is rounded to them.

The dtype of an array of words says what they are: float32 is itself, uint16 holds the bits of bfloat16, and
int16 those of float16 (two integer types, so that compiled kernels can tell them apart). Rounding is defined
in ``docs/first-values.md``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from reference.generator import rounding_words

_INFINITY = {np.dtype(np.uint16): 0x7F80, np.dtype(np.int16): 0x7C00}
_NAN = {np.dtype(np.uint16): 0x7FC0, np.dtype(np.int16): 0x7E00}


def decode(words: NDArray[Any]) -> NDArray[np.float32]:
    """Return the float32 values of `words` (any shape): float32, uint16 (bfloat16) or int16 (float16)."""
    if words.dtype == np.uint16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    if words.dtype == np.int16:
        with np.errstate(invalid="ignore"):  # signaling NaNs
            return words.view(np.float16).astype(np.float32)
    if words.dtype == np.uint8:  # E8M0
        return np.where(words == 255, np.nan, np.exp2(words.astype(np.float64) - 127)).astype(np.float32)
    return words.astype(np.float32, copy=False)


def encode_nearest(values: NDArray[np.float32], storage: DTypeLike) -> NDArray[Any]:
    """Return the words of `storage` nearest to `values`: ties to even, and beyond the largest, infinity."""
    storage = np.dtype(storage)
    if storage == np.float32:
        return values.copy()
    magnitude = np.abs(values)
    if storage == np.uint16:
        bits = magnitude.view(np.uint32)
        words = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            words = magnitude.astype(np.float16).view(np.uint16)
    return _with_sign(words, values, storage)


def encode_stochastic(
    values: NDArray[np.float32], ids: NDArray[np.int64], seed: int | np.uint64, step: int, storage: DTypeLike
) -> NDArray[Any]:
    """Return words of `storage` whose expected value is `values` (n, dim): rows `ids` (n,) at step `step`.

    A value between two neighbors becomes the one farther from zero with the probability (to 2**-32) of its
    position between them. A value that has a word keeps it, infinity and NaN included; a finite value beyond
    the largest finite word becomes that word.
    """
    storage = np.dtype(storage)
    if storage == np.float32:
        return values.copy()
    random = np.empty(values.shape, np.uint32)
    rounding_words(ids, seed, step, random)
    magnitude = np.abs(values)
    below = encode_nearest(magnitude, storage)
    below -= decode(below) > magnitude
    between = below < _INFINITY[storage] - 1  # the others have no finite neighbor farther from zero
    lower = np.where(between, decode(below), 0).astype(np.float64)
    upper = np.where(between, decode(below + between), 1).astype(np.float64)
    # Exact: neighbors are a power of two apart.
    position = (np.where(between, magnitude, 0) - lower) / (upper - lower)
    farther = random < np.floor(position * 2.0**32)
    return _with_sign((below + farther).view(np.uint16), values, storage)


def _with_sign(words: NDArray[Any], values: NDArray[np.float32], storage: np.dtype[Any]) -> NDArray[Any]:
    signed = np.where(np.isnan(values), _NAN[storage], words) | np.where(np.signbit(values), 0x8000, 0)
    return signed.astype(np.uint16).view(storage)
