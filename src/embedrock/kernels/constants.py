"""Numbers that several sets of kernels, or kernels and their callers, share. The module loads no Numba and no
Triton.
"""

import numpy as np

# ---------------------------------------------------------------- the generator: docs/first-values.md

FIRST_VALUES, ROUNDING = 0, 1  # purposes of random words


def _float32(*coefficients: float) -> tuple[np.float32, ...]:
    return tuple(np.float32(coefficient) for coefficient in coefficients)


# Highest power first, for Horner's scheme. (log(1 + f) - f) / f**2 for f in [sqrt(1/2) - 1, sqrt(2) - 1]:
LOG_SERIES = _float32(
    -0.100346155, 0.16335641, -0.17325994, 0.19888277, -0.24961466, 0.33335263, -0.50000584
)  # fmt: skip
LN_2 = np.float32(0.6931472)
# z / x as a quotient of two polynomials in w = -log(1 - x**2), for w in [0, 21.5]: relative error 3.4e-8. All
# coefficients are positive, so no digits cancel. The usual choice, Giles' two polynomials (GPU Computing Gems, 2011),
# needs both branches and a square root, and is made for w < 16.
NUMERATOR = _float32(
    1.9116676e-07, 5.9312377e-05, 0.0011378796, 0.01252214, 0.09099906, 0.44743615, 1.2533141
)  # fmt: skip
DENOMINATOR = _float32(3.7379534e-06, 0.000248412, 0.0023113347, 0.034651984, 0.09520273, 1.0)

# ---------------------------------------------------------------- rows in 8 or 4 bits: docs/format.md

LEAST_NORMAL = np.float32(2.0**-126)  # of float32; smaller weights count as 0
LEAST_SCALE = np.float32(2.0**-124)  # of int8: weights below LEAST_NORMAL have the code 0
# Of int4. All weights are multiples of 2**-125 (8 bits of a bfloat16 below 2**-117), so that none is subnormal. The
# least step is twice the least offset: weights from -LEAST_OFFSET to 0 have the offset 0.
LEAST_OFFSET, LEAST_STEP = np.float32(2.0**-118), 2.0**-117
MOST_OF_INT8 = np.float32(3.4e38)  # 127 * (this / 127) does not overflow when the quotient is rounded up

# ---------------------------------------------------------------- files

RUN_SHIFT = 40  # of a record's location: lower bits are a position, higher ones a file
CRC_BYTES = 4
MARK_STEP = 0x9E3779B1  # odd, so two records of a segment less than 2^32 apart never have the same mark

# ---------------------------------------------------------------- counters and vocabularies

SKETCH_DEPTH = 5  # cells of an id in a count-min sketch, all of them in one ...
SKETCH_LINE_BYTES = 64  # ... line of it
ENTRY_WORDS = 3  # of a vocabulary entry with a hash and an id: hash, id, size

# ---------------------------------------------------------------- GPUs

MOST_SLOTS = 1 << 30  # words in device memory: a slot, and one bit that marks its record as changed
