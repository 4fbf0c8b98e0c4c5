"""Frequency counters of ids, on the CPU: see ``tests/reference/residents.py`` for the specification."""

import numpy as np

from embedrock.kernels.constants import SKETCH_DEPTH as DEPTH
from embedrock.kernels.constants import SKETCH_LINE_BYTES as LINE_BYTES
from embedrock.kernels.cpu.directory import AHEAD, mix
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.runtime import kernel


@kernel()
def _line(lines, h):
    return np.int64(((h >> np.uint64(32)) * np.uint64(lines)) >> np.uint64(32))


@kernel()
def _least(line, bits, h):
    # The number of cells is a power of two, so the lowest of 9 bits select one.
    mask, most = np.int64(LINE_BYTES * 8 // bits - 1), np.int64((1 << bits) - 1)
    least = most
    for j in range(DEPTH):
        at = (np.int64((h >> np.uint64(9 * j)) & np.uint64(511)) & mask) * bits
        least = min(least, (np.int64(line[at >> 3]) >> (at & 7)) & most)
    return least


@kernel(over="ids", reads=("sketch", "firsts", "ids"), grain=2048)
def count_seen(sketch, lines, bits, key, firsts, ids, counts, lo, hi):
    for i in range(lo, hi):
        if i + AHEAD < hi:
            ahead = _line(lines, mix(np.uint64(ids[i + AHEAD]) ^ key))
            prefetch(sketch, firsts[i + AHEAD] + ahead, LINE_BYTES)
        h = mix(np.uint64(ids[i]) ^ key)
        counts[i] = _least(sketch[firsts[i] + _line(lines, h)], bits, mix(h))


@kernel(over="ids", reads=("firsts", "ids"), grain=4096)
def lines_of(lines, key, firsts, ids, numbers, lo, hi):
    for i in range(lo, hi):
        numbers[i] = firsts[i] + _line(lines, mix(np.uint64(ids[i]) ^ key))


@kernel(reads=("firsts", "ids"))
def see(sketch, changed, lines, bits, key, firsts, ids):
    mask, most = np.int64(LINE_BYTES * 8 // bits - 1), np.int64((1 << bits) - 1)
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            ahead = _line(lines, mix(np.uint64(ids[i + AHEAD]) ^ key))
            prefetch_to_write(sketch, firsts[i + AHEAD] + ahead, LINE_BYTES)
        h = mix(np.uint64(ids[i]) ^ key)
        number, h = firsts[i] + _line(lines, h), mix(h)
        line = sketch[number]
        least = _least(line, bits, h)
        if least == most:
            continue
        changed[number] = 1
        for j in range(DEPTH):
            at = (np.int64((h >> np.uint64(9 * j)) & np.uint64(511)) & mask) * bits
            if (np.int64(line[at >> 3]) >> (at & 7)) & most == least:
                line[at >> 3] = np.uint8(np.int64(line[at >> 3]) + (np.int64(1) << (at & 7)))


@kernel(over="numbers", reads=("numbers",), grain=4096)
def touch(last, marks, numbers, step, half_life, one, most, lo, hi):
    now = step // half_life
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch_to_write(last, numbers[i + AHEAD], 8)
            prefetch_to_write(marks, numbers[i + AHEAD], 8)
        row, uses = numbers[i], marks[numbers[i]]
        if last[row] < now * half_life:  # most rows in use were used since: a division takes as long as a cache miss
            uses >>= min(now - last[row] // half_life, 62)
        marks[row], last[row] = min(uses + one, most), step
