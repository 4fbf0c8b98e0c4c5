"""16-bit weights: decoding to float32, and encoding by nearest or stochastic rounding.

The dtype of the words selects the code when a kernel is compiled. float32 is itself, uint16 holds bfloat16, int16
float16. uint8 holds E8M0, a power of two. Only integers and exact float32 operations are used, never the machine's half
precision, which some machines lack. No result depends on float32 subnormals. So a thread that flushes them to zero
(``torch.set_flush_denormal``) computes the same words.
"""

import numpy as np
from numba import types

from embedrock.kernels.cpu.generator import ROUNDING, column_words
from embedrock.kernels.cpu.runtime import by_types, inlined


@by_types
def decode(word):
    """Return the float32 value of one word."""
    return _DECODERS[word]


def _same(word):
    return word


def _decode_bfloat16(word):
    return np.uint32(np.uint32(word) << np.uint32(16)).view(np.float32)


def _decode_power(word):
    # NaN is 255, as the format says. 0 is 2**-127, which a float32 has as a subnormal number.
    bits = np.uint32(np.uint32(word) << np.uint32(23))
    bits = np.uint32(0x7FC00000) if word == 255 else bits
    return np.uint32(bits if word > 0 else 0x00400000).view(np.float32)


def _decode_float16(word):
    bits = np.uint32(np.uint32(word) & np.uint32(0x7FFF))
    if bits >= np.uint32(0x7C00):  # infinity, NaN
        magnitude = np.uint32((bits << np.uint32(13)) + np.uint32(0x70000000))
    elif bits >= np.uint32(0x0400):
        magnitude = np.uint32((bits << np.uint32(13)) + np.uint32(0x38000000))
    else:  # subnormal
        magnitude = np.float32(np.float32(np.int32(bits)) * np.float32(2.0**-24)).view(np.uint32)
    sign = np.uint32(np.uint32(np.uint32(word) & np.uint32(0x8000)) << np.uint32(16))
    return np.uint32(sign | magnitude).view(np.float32)


@inlined
def _join(bits, kept, largest, nan):
    # The word of 16 bits: the sign of `bits`, and `kept` limited to `largest`, or the one NaN.
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    kept = np.uint32(min(kept, largest))
    if magnitude > np.uint32(0x7F800000):
        kept = nan
    return np.uint16(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000) | kept)


@inlined
def _nearest_bfloat16(value):
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(16)) & np.uint32(1))
    kept = np.uint32(np.uint32(magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return _join(bits, kept, np.uint32(0x7F80), np.uint32(0x7FC0))


@inlined
def _nearest_float16(value):
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude < np.uint32(0x38800000):
        # Subnormal: at 0.5 the last place of float32 is worth 2**-24, as in float16, so the addition rounds.
        shifted = np.float32(magnitude.view(np.float32) + np.float32(0.5))
        kept = np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000))
    else:
        odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
        kept = np.uint32(np.uint32(magnitude - np.uint32(0x37FFF001) + odd) >> np.uint32(13))
    return np.int16(_join(bits, kept, np.uint32(0x7C00), np.uint32(0x7E00)))


@inlined
def _stochastic_bfloat16(value, random):
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    farther = np.uint32(random < np.uint32(magnitude << np.uint32(16)))
    kept = np.uint32(np.uint32(magnitude >> np.uint32(16)) + farther)
    largest = np.uint32(0x7F80) if magnitude == np.uint32(0x7F800000) else np.uint32(0x7F7F)
    return _join(bits, kept, largest, np.uint32(0x7FC0))


@inlined
def _stochastic_float16(value, random):
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude < np.uint32(0x38800000):
        # Subnormal: in units of 2**-24, whole and fraction. Every step is exact.
        scaled = magnitude.view(np.float32) * np.float32(2.0**24)
        whole = np.int32(scaled)
        kept = np.uint32(whole)
        threshold = np.uint32((scaled - np.float32(whole)) * np.float32(2.0**32))
    else:
        kept = np.uint32(np.uint32(magnitude - np.uint32(0x38000000)) >> np.uint32(13))
        threshold = np.uint32(magnitude << np.uint32(19))
    kept = np.uint32(kept + np.uint32(random < threshold))
    largest = np.uint32(0x7C00) if magnitude == np.uint32(0x7F800000) else np.uint32(0x7BFF)
    return np.int16(_join(bits, kept, largest, np.uint32(0x7E00)))


_DECODERS = {types.float32: _same, types.uint16: _decode_bfloat16, types.int16: _decode_float16}
_DECODERS[types.uint8] = _decode_power
_NEAREST = {types.float32: inlined(_same), types.uint16: _nearest_bfloat16, types.int16: _nearest_float16}
_STOCHASTIC = {types.uint16: _stochastic_bfloat16, types.int16: _stochastic_float16}


@by_types
def nearest(value, words):
    """Return the word nearest to a value, ties to even, of the dtype of an array."""
    encode = _NEAREST[words.dtype]
    return lambda value, words: encode(value)


@inlined
def store_row_nearest(words, values):
    """Encode `values` (dim,) into `words` (dim,), rounded to nearest, ties to even."""
    for column in range(words.shape[0]):
        words[column] = nearest(values[column], words)


@by_types
def store_row(words, values, row_id, seed, step):
    """Encode `values` (dim,) into `words` (dim,), rounded stochastically by (seed, row_id, column, step)."""
    if words.dtype == types.float32:
        return lambda words, values, row_id, seed, step: store_row_nearest(words, values)
    encode = _STOCHASTIC[words.dtype]

    def store(words, values, row_id, seed, step):
        blocks = words.shape[0] >> 2
        for block in range(blocks):
            r0, r1, r2, r3 = column_words(row_id, seed, ROUNDING, step, block)
            words[4 * block] = encode(values[4 * block], r0)
            words[4 * block + 1] = encode(values[4 * block + 1], r1)
            words[4 * block + 2] = encode(values[4 * block + 2], r2)
            words[4 * block + 3] = encode(values[4 * block + 3], r3)
        if words.shape[0] & 3:
            rest = column_words(row_id, seed, ROUNDING, step, blocks)
            for column in range(4 * blocks, words.shape[0]):
                words[column] = encode(values[column], rest[column & 3])

    return store
