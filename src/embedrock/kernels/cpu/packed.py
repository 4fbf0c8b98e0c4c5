"""Rows of `PackedRows` and of stored words, read and written: see ``tests/reference/packed.py``.

The type of the rows selects the code when a kernel is compiled. Codes are computed in float64. No result depends on
float32 subnormals, as in `codec`: scales are so large that all of them round to the code of zero.
"""

import numpy as np
from numba import types

from embedrock.kernels.constants import LEAST_NORMAL, LEAST_OFFSET, LEAST_SCALE, LEAST_STEP, MOST_OF_INT8
from embedrock.kernels.cpu.codec import decode, store_row_nearest
from embedrock.kernels.cpu.prefetch import prefetch
from embedrock.kernels.cpu.runtime import by_types, inlined

f32 = np.float32
f64 = np.float64
u32 = np.uint32

NOTHING = f32(-0.0)  # added to a weight, it leaves every bit


@by_types
def read_row(rows, slot, out):
    """Write the weights of a row to `out`, float32 (dim,)."""
    if isinstance(rows, types.Array):
        return _read_words
    is_listed = isinstance(rows.types[-1], types.Array)
    return _read_bytes if is_listed or rows[0].dtype == types.int8 else _read_halves


def _read_words(rows, slot, out):
    words = rows[slot]
    for d in range(out.shape[0]):
        out[d] = decode(words[d])


@inlined
def _scale_and_offset(rows, slot, group):
    has_offsets = rows.offset_start >= 0
    offset = decode(rows.offsets[slot, rows.offset_start + group]) if has_offsets else NOTHING
    return decode(rows.scales[slot, rows.scale_start + group]), offset


@by_types
def _number(rows, code):
    """Return the number of a code of a byte."""
    is_listed = isinstance(rows.types[-1], types.Array)
    return (lambda rows, code: rows.values[code]) if is_listed else (lambda rows, code: f32(code))


def _read_bytes(rows, slot, out):
    for start in range(0, out.shape[0], rows.group):
        scale, offset = _scale_and_offset(rows, slot, start // rows.group)
        part = out[start : start + rows.group]
        codes = rows.codes[slot, start : start + part.shape[0]]
        for d in range(part.shape[0]):
            part[d] = _number(rows, codes[d]) * scale + offset


def _read_halves(rows, slot, out):
    for start in range(0, out.shape[0], rows.group):
        scale, offset = _scale_and_offset(rows, slot, start // rows.group)
        part, codes = out[start : start + rows.group], rows.codes[slot, start >> 1 :]
        pairs = part.shape[0] >> 1
        for k in range(pairs):
            part[2 * k] = f32(codes[k] & 15) * scale + offset
            part[2 * k + 1] = f32(codes[k] >> 4) * scale + offset
        if part.shape[0] & 1:
            part[2 * pairs] = f32(codes[pairs] & 15) * scale + offset


@by_types
def ask_for_row(rows, slot, dim):
    """Prefetch a row."""
    if isinstance(rows, types.Array):
        return lambda rows, slot, dim: prefetch(rows, slot, dim * rows.itemsize)
    return _ask_for_packed


def _ask_for_packed(rows, slot, dim):
    prefetch(rows.codes, slot, rows.codes.shape[1])
    prefetch(rows.scales, slot, rows.scales.shape[1] * rows.scales.itemsize)
    if rows.offset_start >= 0:
        prefetch(rows.offsets, slot, rows.offsets.shape[1] * rows.offsets.itemsize)


@by_types
def write_row(rows, slot, values):
    """Overwrite a row by `values`, float32 (dim,), rounded to nearest."""
    if isinstance(rows, types.Array):
        return lambda rows, slot, values: store_row_nearest(rows[slot, : values.shape[0]], values)
    return _write_bytes if rows[0].dtype == types.int8 else _write_halves


@inlined
def _code(value, offset, scale, low, high):
    normal = value if abs(value) >= LEAST_NORMAL else f32(0.0)
    return np.int64(min(max(np.rint((f64(normal) - offset) / scale), low), high))


def _write_bytes(rows, slot, values):
    codes, dim = rows.codes[slot], values.shape[0]
    for start in range(0, dim, rows.group):
        end, most = min(start + rows.group, dim), f32(0.0)
        for d in range(start, end):
            most = max(most, abs(values[d]))
        scale = max(f32(min(most, MOST_OF_INT8) / f32(127.0)), LEAST_SCALE)
        rows.scales[slot, rows.scale_start + start // rows.group] = scale
        for d in range(start, end):
            codes[d] = np.int8(_code(values[d], 0.0, f64(scale), -127.0, 127.0))


@inlined
def _bfloat16_below(value):
    """Return the bits of the largest finite bfloat16 that is at most `value`, or of the lowest one."""
    bits = f32(value).view(np.uint32)
    is_negative = bits >> u32(31)
    bits = u32(bits + u32(0xFFFF) * is_negative) >> u32(16)
    return np.uint16(min(bits, u32(0xFF7F)))


@inlined
def _bfloat16_above(value):
    """Return the bits of the least bfloat16 that is at least `value`, which is positive."""
    return np.uint16(u32(f32(value).view(np.uint32) + u32(0xFFFF)) >> u32(16))


def _write_halves(rows, slot, values):
    codes, dim = rows.codes[slot], values.shape[0]
    for start in range(0, dim, rows.group):
        end, low, high = min(start + rows.group, dim), values[start], values[start]
        for d in range(start + 1, end):
            low, high = min(low, values[d]), max(high, values[d])
        below = _bfloat16_below(low) if abs(low) >= LEAST_OFFSET else np.uint16(0)
        offset = f64(decode(below))
        step = max((f64(high) - offset) / 15.0, 2.0 * (offset - f64(low)), LEAST_STEP)
        above = _bfloat16_above(step)
        at = start // rows.group
        rows.offsets[slot, rows.offset_start + at] = below
        rows.scales[slot, rows.scale_start + at] = above
        scale = f64(decode(above))
        for k in range(start >> 1, (end + 1) >> 1):
            code = _code(values[2 * k], offset, scale, 0.0, 15.0)
            if 2 * k + 1 < end:
                code |= _code(values[2 * k + 1], offset, scale, 0.0, 15.0) << 4
            codes[k] = np.uint8(code)
