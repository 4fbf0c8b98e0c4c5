"""The counter-based generator and the initial values drawn from it; ``docs/first-values.md`` is the definition.

Every operation is exact or rounded once as IEEE 754 says (no library function, no fused multiply-add). So the results
equal the reference bit for bit. Two loops that LLVM vectorizes fill a row. The first, over blocks of four words, writes
the raw words to the row's memory. The second, over columns, transforms the words there.
"""

import numpy as np

from embedrock.kernels.constants import DENOMINATOR, FIRST_VALUES, LN_2, LOG_SERIES, NUMERATOR, ROUNDING
from embedrock.kernels.cpu.runtime import inlined, kernel

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32-10 for counter (c0, c1, c2, c3) and key (k0, k1), all uint32."""
    for _ in range(10):
        first = np.uint64(c0) * np.uint64(0xD2511F53)
        second = np.uint64(c2) * np.uint64(0xCD9E8D57)
        c0 = np.uint32(np.uint32(second >> _32) ^ c1 ^ k0)
        c2 = np.uint32(np.uint32(first >> _32) ^ c3 ^ k1)
        c1 = np.uint32(second)
        c3 = np.uint32(first)
        k0 = np.uint32(k0 + np.uint32(0x9E3779B9))
        k1 = np.uint32(k1 + np.uint32(0xBB67AE85))
    return c0, c1, c2, c3


@inlined
def column_words(row_id, seed, purpose, step, block):
    """Return the words of columns ``4 * block`` to ``4 * block + 3`` of one row."""
    wide_id, wide_seed = np.uint64(row_id), np.uint64(seed)
    return philox(
        np.uint32(wide_id & _LOW),
        np.uint32(wide_id >> _32),
        np.uint32(np.uint32(block) | np.uint32(purpose << 30)),
        np.uint32(np.uint64(step) & _LOW),
        np.uint32(wide_seed & _LOW),
        np.uint32(wide_seed >> _32),
    )


@inlined
def fill_words(row_id, seed, purpose, step, words):
    """Write the word of every column of one row into `words` (dim,) uint32."""
    dim = words.shape[0]
    blocks = dim >> 2
    for block in range(blocks):
        w0, w1, w2, w3 = column_words(row_id, seed, purpose, step, block)
        words[4 * block] = w0
        words[4 * block + 1] = w1
        words[4 * block + 2] = w2
        words[4 * block + 3] = w3
    if dim & 3:
        rest = column_words(row_id, seed, purpose, step, blocks)
        for column in range(4 * blocks, dim):
            words[column] = rest[column & 3]


@inlined
def standard_normal(word):
    """Return the standard normal value of one word."""
    p, x = _tail(word)
    return _quantile(word, p, x)


@inlined
def truncated_normal(word, cut, inside):
    """Return the truncated normal value of one word, without `cut` of each tail; `inside` is ``1 - 2 * cut``."""
    p, x = _tail(word)
    return _quantile(word, cut + inside * p, inside * x)


@inlined
def _tail(word):
    # p is the probability beyond |z|, and x = 1 - 2 p, computed from k so that nothing cancels.
    k = np.int32(word >> np.uint32(1))
    p = (np.float32(k) + np.float32(0.5)) * np.float32(2.0**-32)
    return p, (np.float32(np.int32(0x7FFFFFFF - k)) + np.float32(0.5)) * np.float32(2.0**-31)


@inlined
def _quantile(word, p, x):
    w = _minus_log((np.float32(4.0) * p) * (np.float32(1.0) - p))
    z = (x * _polynomial(w, NUMERATOR)) / _polynomial(w, DENOMINATOR)
    return np.uint32(np.float32(z).view(np.uint32) | np.uint32(word << np.uint32(31))).view(np.float32)


@inlined
def _minus_log(t):
    bits = np.float32(t).view(np.int32)
    exponent = np.int32(np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23))
    f = np.int32(bits - np.int32(exponent << np.int32(23))).view(np.float32) - np.float32(1.0)
    series = _polynomial(f, LOG_SERIES)
    return np.float32(-exponent) * LN_2 - (f + (f * f) * series)


@inlined
def _polynomial(x, coefficients):
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


@inlined
def _draw(value, ids, seed, constants, out, lo, hi):
    words = out.view(np.uint32)
    for i in range(lo, hi):
        row = out[i]
        fill_words(ids[i], seed, FIRST_VALUES, 0, words[i])
        for column in range(row.shape[0]):
            row[column] = value(np.float32(row[column]).view(np.uint32), constants)


@inlined
def _uniform(word, constants):
    low, width = constants
    return low + width * (np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24))


@kernel(over="ids", reads=("ids",), grain=256)
def uniform_values(ids, seed, low, high, out, lo, hi):
    """Fill rows [lo, hi) of `out` (n, dim) float32 with uniform initial values of the rows `ids` (n,) int64."""
    start = np.float32(low)
    _draw(_uniform, ids, seed, (start, np.float32(high) - start), out, lo, hi)


@inlined
def _normal(word, constants):
    mean, std = constants
    return mean + std * standard_normal(word)


@kernel(over="ids", reads=("ids",), grain=256)
def normal_values(ids, seed, mean, std, out, lo, hi):
    """Fill rows [lo, hi) of `out` (n, dim) float32 with normal initial values of the rows `ids` (n,) int64."""
    _draw(_normal, ids, seed, (np.float32(mean), np.float32(std)), out, lo, hi)


@inlined
def _truncated_normal(word, constants):
    mean, std, cut, inside = constants
    return mean + std * truncated_normal(word, cut, inside)


@kernel(over="ids", reads=("ids",), grain=256)
def truncated_normal_values(ids, seed, mean, std, beyond, out, lo, hi):
    """Fill rows [lo, hi) of `out` (n, dim) float32 with normal initial values without `beyond` of each tail."""
    cut = np.float32(beyond)
    inside = np.float32(1.0) - np.float32(2.0) * cut
    _draw(_truncated_normal, ids, seed, (np.float32(mean), np.float32(std), cut, inside), out, lo, hi)


@kernel(over="ids", reads=("ids",), grain=256)
def constant_values(ids, value, out, lo, hi):
    """Fill rows [lo, hi) of `out` (n, dim) float32 with `value`, whatever the `ids` (n,) int64."""
    for i in range(lo, hi):
        out[i] = np.float32(value)


@kernel(over="ids", reads=("ids",), grain=256)
def rounding_words(ids, seed, step, out, lo, hi):
    """Fill rows [lo, hi) of `out` (n, dim) uint32 with the random words of the rounding at `step`."""
    for i in range(lo, hi):
        fill_words(ids[i], seed, ROUNDING, step, out[i])
