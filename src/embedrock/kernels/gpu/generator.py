"""The counter-based generator and the initial values drawn from it, as ``docs/first-values.md`` defines them.

Every operation is exact or rounded once as in IEEE 754, so the results equal the reference bit for bit. Tiles are
(rows, BLOCK), one row of a table each. BLOCK is a power of two and at least 4.
"""

import triton.language as tl
from triton.language.random import philox_impl

from embedrock.kernels import constants
from embedrock.kernels.gpu.addresses import number_of
from embedrock.kernels.gpu.runtime import inlined

FIRST_VALUES = tl.constexpr(constants.FIRST_VALUES)
ROUNDING = tl.constexpr(constants.ROUNDING)
LOG_SERIES = tl.constexpr(tuple(map(float, constants.LOG_SERIES)))
LN_2 = tl.constexpr(float(constants.LN_2))
NUMERATOR = tl.constexpr(tuple(map(float, constants.NUMERATOR)))
DENOMINATOR = tl.constexpr(tuple(map(float, constants.DENOMINATOR)))


@inlined
def row_words(ids, entry, step, PURPOSE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words of all columns of a table's rows `ids` (rows,) int64, as a tile of uint32."""
    blocks = tl.arange(0, BLOCK // 4).to(tl.uint32) | (PURPOSE << 30)
    seed = tl.load(entry + 5).to(tl.uint64)
    w0, w1, w2, w3 = philox_impl(
        ids.to(tl.uint32)[:, None],
        (ids >> 32).to(tl.uint32)[:, None],
        blocks[None, :],
        step.to(tl.uint32),
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
    )
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@inlined
def first_words(ids, entry, BLOCK: tl.constexpr):
    """Return the words for the initial values of rows `ids`."""
    return row_words(ids, entry, tl.zeros([1, 1], tl.uint32), FIRST_VALUES, BLOCK)


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
def constant(ids, entry, BLOCK: tl.constexpr):
    return tl.full([ids.shape[0], BLOCK], number_of(entry, 0), tl.float32)


@inlined
def uniform(ids, entry, BLOCK: tl.constexpr):
    word, low = first_words(ids, entry, BLOCK), number_of(entry, 0)
    return low + (number_of(entry, 1) - low) * ((word >> 8).to(tl.int32).to(tl.float32) * 2.0**-24)


@inlined
def normal(ids, entry, BLOCK: tl.constexpr):
    word, beyond = first_words(ids, entry, BLOCK), number_of(entry, 2)  # the probability cut off at each end
    inside = 1.0 - 2.0 * beyond
    # p is the probability beyond |z|, and x = 1 - 2 p, both computed from k to avoid cancellation.
    k = (word >> 1).to(tl.int32)
    p = beyond + inside * ((k.to(tl.float32) + 0.5) * 2.0**-32)
    x = inside * (((0x7FFFFFFF - k).to(tl.float32) + 0.5) * 2.0**-31)
    w = _minus_log((4.0 * p) * (1.0 - p))
    z = tl.div_rn(x * _polynomial(w, NUMERATOR, 7), _polynomial(w, DENOMINATOR, 6))
    z = (z.to(tl.uint32, bitcast=True) | (word << 31)).to(tl.float32, bitcast=True)
    return number_of(entry, 0) + number_of(entry, 1) * z


# The third number of a normal distribution is 0: nothing is cut off.
DRAWS = {"constant": constant, "uniform": uniform, "normal": normal, "truncated_normal": normal}
