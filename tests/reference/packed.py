"""Rows of weights in 8 or 4 bits: the specification of ``kernels/cpu/packed.py``.

A group's scale (and offset) is rounded to what is stored first, and then codes are chosen for the stored numbers. So a
weight is off by at most half a stored scale, and by the rounding of one float32 product and sum.
"""

from __future__ import annotations

import numpy as np

from embedrock.kernels.packed import PackedRows
from reference import codec

LARGEST_BFLOAT16 = np.float32(3.3895314e38)


def unpack(rows: PackedRows, slots: np.ndarray, dim: int) -> np.ndarray:
    """Return the weights of some rows: float32 (n, dim)."""
    codes = rows.codes[slots]
    if rows.values is not None:
        codes = rows.values[codes]
    elif codes.dtype == np.uint8:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)
    group = np.arange(dim) // rows.group
    weights = codes[:, :dim].astype(np.float32) * codec.decode(rows.scales[slots][:, rows.scale_start + group])
    if rows.offset_start >= 0:
        weights += codec.decode(rows.offsets[slots][:, rows.offset_start + group])
    return weights


def pack(rows: PackedRows, slots: np.ndarray, values: np.ndarray) -> None:
    """Overwrite rows by finite `values`, float32 (n, dim). Slots do not repeat."""
    values = np.where(np.abs(values) < np.float32(2**-126), np.float32(0), values)
    for k, start in enumerate(range(0, values.shape[1], rows.group)):
        part = values[:, start : start + rows.group]
        if rows.codes.dtype == np.int8:
            scale = np.maximum(np.minimum(np.abs(part).max(1), np.float32(3.4e38)) / np.float32(127), 2.0**-124)
            scale = rows.scales[slots, rows.scale_start + k] = scale.astype(np.float32)
            codes = np.rint(part / scale[:, None].astype(np.float64)).clip(-127, 127)
            rows.codes[slots, start : start + part.shape[1]] = codes
            continue
        low, high = part.min(1).astype(np.float64), part.max(1).astype(np.float64)
        offset = np.where(np.abs(low) < 2.0**-118, 0, _bfloat16_below(part.min(1)))
        step = np.maximum(np.maximum((high - offset) / 15, 2 * (offset - low)), 2.0**-117).astype(np.float32)
        step = _bfloat16_above(step)
        rows.scales[slots, rows.scale_start + k] = codec.encode_nearest(step, np.uint16)
        rows.offsets[slots, rows.offset_start + k] = codec.encode_nearest(offset.astype(np.float32), np.uint16)
        codes = np.rint((part - offset[:, None]) / step[:, None].astype(np.float64)).clip(0, 15).astype(np.uint8)
        codes = np.concatenate([codes, np.zeros((len(codes), part.shape[1] % 2), np.uint8)], 1)
        rows.codes[slots, start // 2 : start // 2 + codes.shape[1] // 2] = codes[:, ::2] | codes[:, 1::2] << 4


def _bfloat16_below(values: np.ndarray) -> np.ndarray:
    """Return the largest finite bfloat16 that is at most each value, or the lowest one: float32."""
    nearest = codec.decode(codec.encode_nearest(values, np.uint16))
    bits = nearest.view(np.int32)
    below = np.where(nearest > 0, bits - 0x10000, bits + 0x10000).astype(np.int32).view(np.float32)
    return np.maximum(np.where(nearest > values, below, nearest), -LARGEST_BFLOAT16)


def _bfloat16_above(values: np.ndarray) -> np.ndarray:
    """Return the least bfloat16 that is at least each positive value: float32."""
    nearest = codec.decode(codec.encode_nearest(values, np.uint16))
    return np.where(nearest < values, (nearest.view(np.int32) + 0x10000).view(np.float32), nearest)
