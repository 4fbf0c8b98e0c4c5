"""String hashing: SipHash-2-4. The reference documents every argument."""

import numpy as np

from embedrock.kernels.cpu.runtime import inlined, kernel

_CONSTANTS = tuple(map(np.uint64, (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)))
_BYTE = np.uint64(8)
_SURROGATES, _LAST = (np.uint32(0xD800), np.uint32(0xE000)), np.uint32(0x10FFFF)


@inlined
def _rotated(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@inlined
def _round(a, b, c, d):
    a, c = a + b, c + d
    b, d = _rotated(b, 13) ^ a, _rotated(d, 16) ^ c
    a = _rotated(a, 32)
    a, c = a + d, c + b
    b, d = _rotated(b, 17) ^ c, _rotated(d, 21) ^ a
    return a, b, _rotated(c, 32), d


@inlined
def _two_rounds(a, b, c, d, word):
    a, b, c, d = _round(a, b, c, d ^ word)
    a, b, c, d = _round(a, b, c, d)
    return a ^ word, b, c, d


@inlined
def _word(data, first, count):
    word = np.uint64(0)
    for k in range(count):
        word |= np.uint64(data[first + k]) << (np.uint64(k) * _BYTE)
    return word


@kernel(over="out", reads=("data", "starts", "ends", "key"))
def hash_strings(data, starts, ends, key, buckets, out, lo, hi):
    first = (key[0] ^ _CONSTANTS[0], key[1] ^ _CONSTANTS[1], key[0] ^ _CONSTANTS[2], key[1] ^ _CONSTANTS[3])
    for k in range(lo, hi):
        a, b, c, d = first
        at, end = starts[k], ends[k]
        size = end - at
        while end - at >= 8:
            a, b, c, d = _two_rounds(a, b, c, d, _word(data, at, 8))
            at += 8
        rest = _word(data, at, end - at) | (np.uint64(size & 255) << np.uint64(56))
        a, b, c, d = _two_rounds(a, b, c, d, rest)
        c ^= np.uint64(0xFF)
        for _ in range(4):
            a, b, c, d = _round(a, b, c, d)
        out[k] = np.int64((a ^ b ^ c ^ d) % np.uint64(buckets))


@kernel(over="ends", reads=("data",))
def trim(data, width, ends, lo, hi):
    for k in range(lo, hi):
        end = (k + 1) * width
        while end > k * width and data[end - 1] == 0:
            end -= 1
        ends[k] = end


@inlined
def _utf8_size(point):
    return 1 + (point >= 0x80) + (point >= 0x800) + (point >= 0x10000)


@kernel(over="ends", reads=("data", "ends"))
def utf8_sizes(data, width, ends, sizes, lo, hi):
    for k in range(lo, hi):
        size, wrong = 0, False
        for at in range(k * width, ends[k]):
            point = data[at]
            size += _utf8_size(point)
            wrong |= (_SURROGATES[0] <= point < _SURROGATES[1]) or point > _LAST
        sizes[k] = -1 if wrong else size


@kernel(over="ends", reads=("data", "ends", "starts"))
def write_utf8(data, width, ends, starts, out, lo, hi):
    for k in range(lo, hi):
        to = starts[k]
        for at in range(k * width, ends[k]):
            point = data[at]
            size = _utf8_size(point)
            if size == 1:
                out[to] = point
            else:
                # The first byte starts with a 1 for each byte of the letter; each other byte has 6 bits after a 1 and a
                # 0.
                for j in range(size - 1, 0, -1):
                    out[to + j] = 0x80 | (point & np.uint32(0x3F))
                    point >>= np.uint32(6)
                out[to] = (0xF00 >> size) & 0xFF | point
            to += size
