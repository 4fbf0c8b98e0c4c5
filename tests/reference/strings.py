"""Hashing strings: the specification of ``kernels/cpu/strings.py``.

SipHash-2-4 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012): 64 bits, keyed by 128. String k is the
bytes ``starts[k]`` to ``ends[k]`` of `data`, uint8.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_CONSTANTS = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


def _rotated(x: int, bits: int) -> int:
    return (x << bits | x >> (64 - bits)) & _MASK


def _round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a, c = (a + b) & _MASK, (c + d) & _MASK
    b, d = _rotated(b, 13) ^ a, _rotated(d, 16) ^ c
    a = _rotated(a, 32)
    a, c = (a + d) & _MASK, (c + b) & _MASK
    b, d = _rotated(b, 17) ^ c, _rotated(d, 21) ^ a
    return a, b, _rotated(c, 32), d


def sip_hash(text: bytes, low: int, high: int) -> int:
    """Return the hash of some bytes; the key's words are `low` and `high`."""
    a, b, c, d = (word ^ constant for word, constant in zip((low, high, low, high), _CONSTANTS, strict=True))
    padded = text + bytes(-(len(text) + 1) % 8) + bytes([len(text) % 256])
    for first in range(0, len(padded), 8):
        word = int.from_bytes(padded[first : first + 8], "little")
        a, b, c, d = _round(*_round(a, b, c, d ^ word))
        a ^= word
    c ^= 0xFF
    for _ in range(4):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d


def hash_strings(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, key: np.ndarray, buckets: int, out: np.ndarray
) -> None:
    """Hash strings into ``[0, buckets)``.

    Args:
        key: uint64 (2,).
        out: int64 (n,).
    """
    text, (low, high) = data.tobytes(), map(int, key)
    for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
        out[k] = sip_hash(text[start:end], low, high) % buckets


def trim(data: np.ndarray, width: int, ends: np.ndarray) -> None:
    """Find where strings of fixed width end: NumPy fills them up with zeros.

    Args:
        data: uint8 or uint32 (n * width,).
        ends: int64 (n,) receives, for string k, the position behind its last character.
    """
    for k in range(len(ends)):
        (there,) = np.nonzero(data[k * width : (k + 1) * width])
        ends[k] = k * width + (there[-1] + 1 if len(there) else 0)


def utf8_sizes(data: np.ndarray, width: int, ends: np.ndarray, sizes: np.ndarray) -> None:
    """Count the bytes that strings have in UTF-8.

    Args:
        data: uint32 (n * width,), code points.
        ends: int64 (n,), as from `trim`.
        sizes: int64 (n,); -1 for a string that has none: half of a surrogate pair, or no character, is in it.
    """
    for k in range(len(ends)):
        try:
            sizes[k] = len(_text(data[k * width : ends[k]]).encode())
        except (ValueError, OverflowError):
            sizes[k] = -1


def write_utf8(data: np.ndarray, width: int, ends: np.ndarray, starts: np.ndarray, out: np.ndarray) -> None:
    """Write strings as UTF-8: string k from ``starts[k]`` on, in `out`, uint8."""
    for k in range(len(ends)):
        text = _text(data[k * width : ends[k]]).encode()
        out[starts[k] : starts[k] + len(text)] = np.frombuffer(text, np.uint8)


def _text(points: np.ndarray) -> str:
    return "".join(map(chr, points))
