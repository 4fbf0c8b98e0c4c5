"""Codec of 16-bit weights, with the arithmetic of ``kernels/cpu/codec.py``: integers and exact float32 only.

The `RecordForm` sets the word type: float32, or uint16 with the bits of bfloat16 or float16.
"""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined


@inlined
def decode(word, FORM):
    """Return the float32 values of words."""
    value = word
    if FORM.dtype_name == "bfloat16":
        value = (word.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if FORM.dtype_name == "float16":
        value = _decode_float16(word.to(tl.uint32))
    return value


@inlined
def encode_nearest(value, FORM):
    """Return the words nearest to float32 values, ties to even."""
    word = value
    if FORM.dtype_name == "bfloat16":
        bits, magnitude = _bits(value)
        odd = (magnitude >> 16) & 1
        word = _join(bits, (magnitude + 0x7FFF + odd) >> 16, 0x7FC0)
    if FORM.dtype_name == "float16":
        word = _nearest_float16(value)
    return word


@inlined
def encode_stochastic(value, random, FORM):
    """Return words of float32 values, rounded away from zero or not by the uint32 words `random`."""
    word = value
    if FORM.dtype_name == "bfloat16":
        bits, magnitude = _bits(value)
        kept = (magnitude >> 16) + (random < (magnitude << 16)).to(tl.uint32)
        word = _join(bits, tl.where(magnitude == 0x7F800000, kept, tl.minimum(kept, 0x7F7F)), 0x7FC0)
    if FORM.dtype_name == "float16":
        word = _stochastic_float16(value, random)
    return word


@inlined
def _decode_float16(word):
    bits = word & 0x7FFF
    large = bits << 13
    large = tl.where(bits >= 0x7C00, large + 0x70000000, large + 0x38000000)  # infinity and NaN; normal
    subnormal = (bits.to(tl.int32).to(tl.float32) * 2.0**-24).to(tl.uint32, bitcast=True)
    magnitude = tl.where(bits >= 0x0400, large, subnormal)
    return (((word & 0x8000) << 16) | magnitude).to(tl.float32, bitcast=True)


@inlined
def _bits(value):
    bits = value.to(tl.uint32, bitcast=True)
    return bits, bits & 0x7FFFFFFF


@inlined
def _join(bits, kept, NAN: tl.constexpr):
    # The 16-bit word with the sign of `bits` and the magnitude `kept`, or the single NaN.
    kept = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, NAN, kept)
    return (((bits >> 16) & 0x8000) | kept).to(tl.uint16)


@inlined
def _nearest_float16(value):
    bits, magnitude = _bits(value)
    # Subnormal: at 0.5 the last place of float32 is 2**-24, as in float16, so the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 0.5
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x3F000000
    odd = (magnitude >> 13) & 1
    kept = tl.where(magnitude < 0x38800000, subnormal, (magnitude - 0x37FFF001 + odd) >> 13)
    return _join(bits, tl.minimum(kept, 0x7C00), 0x7E00)


@inlined
def _stochastic_float16(value, random):
    bits, magnitude = _bits(value)
    small = magnitude < 0x38800000
    # Subnormal: in units of 2**-24, whole and fraction. Every step is exact.
    scaled = tl.where(small, magnitude, 0).to(tl.float32, bitcast=True) * 2.0**24
    whole = scaled.to(tl.int32)
    fraction = ((scaled - whole.to(tl.float32)) * 2.0**32).to(tl.uint32)
    kept = tl.where(small, whole.to(tl.uint32), (magnitude - 0x38000000) >> 13)
    kept += (random < tl.where(small, fraction, magnitude << 19)).to(tl.uint32)
    kept = tl.where(magnitude == 0x7F800000, 0x7C00, tl.minimum(kept, 0x7BFF))
    return _join(bits, kept, 0x7E00)
