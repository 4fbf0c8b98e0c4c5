"""The counter-based generator and the initial values drawn from it, as ``docs/first-values.md`` defines them.

Every operation is exact or rounded once as in IEEE 754, so the results equal the reference bit for bit. Tiles are
(rows, BLOCK), one row of a table each. BLOCK is a power of two and at least 4.
"""

import triton.language as tl
from triton.language.random import philox_impl

from embedrock.kernels import constants
from embedrock.kernels.gpu.runtime import inlined

FIRST_VALUES = tl.constexpr(constants.FIRST_VALUES)
ROUNDING = tl.constexpr(constants.ROUNDING)
LOG_SERIES = tl.constexpr(tuple(map(float, constants.LOG_SERIES)))
LN_2 = tl.constexpr(float(constants.LN_2))
NUMERATOR = tl.constexpr(tuple(map(float, constants.NUMERATOR)))
DENOMINATOR = tl.constexpr(tuple(map(float, constants.DENOMINATOR)))


@inlined
def row_words(ids, seed, step, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words of all columns of rows `ids` (rows,) int64, as a tile of uint32."""
    blocks = tl.arange(0, BLOCK // 4).to(tl.uint32) | (PURPOSE << 30)
    key = seed.to(tl.uint64)
    w0, w1, w2, w3 = philox_impl(
        ids.to(tl.uint32)[:, None],
        (ids >> 32).to(tl.uint32)[:, None],
        blocks[None, :],
        step.to(tl.uint32),
        key.to(tl.uint32),
        (key >> 32).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@inlined
def first_words(ids, seed, BLOCK: tl.constexpr):
    """Return the words for the initial values of rows `ids`."""
    return row_words(ids, seed, tl.zeros([1, 1], tl.uint32), FIRST_VALUES, BLOCK)


@inlined
def rounding_words(ids, seed, step, BLOCK: tl.constexpr):
    """Return the words for the rounding of rows `ids` at `step`."""
    return row_words(ids, seed, step, ROUNDING, BLOCK)


@inlined
def standard_normal(word):
    """Return the standard normal values of words."""
    p, x = _tail(word)
    return _quantile(word, p, x)


@inlined
def _tail(word):
    # p is the probability beyond |z|, and x = 1 - 2 p, both computed from k to avoid cancellation.
    k = (word >> 1).to(tl.int32)
    p = (k.to(tl.float32) + 0.5) * 2.0**-32
    return p, ((0x7FFFFFFF - k).to(tl.float32) + 0.5) * 2.0**-31


@inlined
def _quantile(word, p, x):
    w = _minus_log((4.0 * p) * (1.0 - p))
    z = tl.div_rn(x * _polynomial(w, NUMERATOR, 7), _polynomial(w, DENOMINATOR, 6))
    return (z.to(tl.uint32, bitcast=True) | (word << 31)).to(tl.float32, bitcast=True)


@inlined
def _minus_log(t):
    bits = t.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return (-exponent).to(tl.float32) * LN_2 - (f + (f * f) * _polynomial(f, LOG_SERIES, 7))


@inlined
def _polynomial(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    value = COEFFICIENTS[0] * x + COEFFICIENTS[1]
    for k in tl.static_range(2, COUNT):
        value = value * x + COEFFICIENTS[k]
    return value


@inlined
def constant(ids, seed, value, unused, unused_too, BLOCK: tl.constexpr):
    return tl.full([ids.shape[0], BLOCK], value, tl.float32)


@inlined
def uniform(ids, seed, low, high, unused, BLOCK: tl.constexpr):
    word = first_words(ids, seed, BLOCK)
    return low + (high - low) * ((word >> 8).to(tl.int32).to(tl.float32) * 2.0**-24)


@inlined
def normal(ids, seed, mean, std, unused, BLOCK: tl.constexpr):
    return mean + std * standard_normal(first_words(ids, seed, BLOCK))


@inlined
def truncated_normal(ids, seed, mean, std, beyond, BLOCK: tl.constexpr):
    word = first_words(ids, seed, BLOCK)
    p, x = _tail(word)
    inside = 1.0 - 2.0 * beyond
    return mean + std * _quantile(word, beyond + inside * p, inside * x)


DRAWS = {"constant": constant, "uniform": uniform, "normal": normal, "truncated_normal": truncated_normal}
