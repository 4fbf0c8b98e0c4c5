"""Ids of n-grams. The reference documents every argument."""

import numpy as np

from embedrock.kernels.cpu.runtime import kernel


@kernel(over="out", reads=("tokens", "folded", "multipliers", "moduli", "offsets"), grain=256)
def ngram_ids(tokens, folded, length, boundary, pad, multipliers, moduli, offsets, is_sum, out, lo, hi):
    heads, lags = multipliers.shape
    for k in range(lo, hi):
        at = k // length * (length + lags - 1) + k % length + lags - 1
        seen = 1
        while seen < lags and tokens[at - seen] != boundary:
            seen += 1
        for head in range(heads):
            mixed = np.uint64(0)
            for lag in range(lags):
                token = folded[at - lag] if lag < seen else pad
                product = np.uint64(token * multipliers[head, lag])
                mixed = mixed + product if is_sum else mixed ^ product
            out[k, head] = np.int64(mixed % np.uint64(moduli[head])) + offsets[head]
