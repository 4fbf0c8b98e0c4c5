"""Ids of n-grams: the specification of ``kernels/cpu/ngrams.py``."""

from __future__ import annotations

import functools
import operator

import numpy as np


def ngram_ids(
    tokens: np.ndarray,
    folded: np.ndarray,
    length: int,
    boundary: int,
    pad: int,
    multipliers: np.ndarray,
    moduli: np.ndarray,
    offsets: np.ndarray,
    is_sum: bool,
    out: np.ndarray,
) -> None:
    """Write the ids of the n-grams that end at each position.

    Args:
        tokens: int64, sequences end to end: each is ``lags - 1`` tokens of history, and `length` positions.
        folded: int64, the token that is hashed in place of each.
        length: positions in a sequence.
        boundary: token that no n-gram reaches past; -1: none.
        pad: token that is hashed in place of those beyond a boundary.
        multipliers: int64 (heads, lags). Sums of products, or their XOR, are below 2**63.
        moduli: int64 (heads,).
        offsets: int64 (heads,).
        is_sum: add the products; False: XOR.
        out: int64 (positions of all sequences, heads).
    """
    heads, lags = multipliers.shape
    mix = operator.add if is_sum else operator.xor
    for position in range(len(out)):
        sequence, step = divmod(position, length)
        at = sequence * (length + lags - 1) + step + lags - 1
        before = tokens[at - lags + 1 : at][::-1].tolist()
        seen = before.index(boundary) if boundary in before else lags - 1
        window = [folded[at], *folded[at - lags + 1 : at][::-1][:seen], *[pad] * (lags - 1 - seen)]
        for head in range(heads):
            products = [int(token) * int(number) for token, number in zip(window, multipliers[head], strict=True)]
            out[position, head] = functools.reduce(mix, products) % int(moduli[head]) + int(offsets[head])
