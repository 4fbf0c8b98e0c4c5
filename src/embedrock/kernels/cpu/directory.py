"""Slot indexes, on the CPU: see ``tests/reference/directory.py`` for the specification."""

import numpy as np

from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.runtime import kernel

AHEAD = 20  # 12 took a sixth longer, 32 and 48 a tenth


@kernel(over="ids", reads=("ids",), grain=4096)
def find_direct(present, ids, slots, lo, hi):
    for i in range(lo, hi):
        row = ids[i]
        here = (present[row >> 3] >> np.uint8(row & 7)) & np.uint8(1)
        slots[i] = row if here else -1


@kernel(reads=("ids",))
def insert_direct(present, ids, slots):
    for i in range(ids.shape[0]):
        row = ids[i]
        present[row >> 3] |= np.uint8(1) << np.uint8(row & 7)
        slots[i] = row


@kernel()
def mix(key):
    h = np.uint64(key)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@kernel()
def _bits(size):
    # log2 of a power of two.
    bits = 0
    while (1 << bits) < size:
        bits += 1
    return bits


@kernel()
def _home(key, bits):
    return np.int64(mix(key) >> np.uint64(64 - bits)) if bits > 0 else np.int64(0)


@kernel()
def _entry(entries, key, bits):
    mask = entries.shape[0] - 1
    position = _home(key, bits)
    while entries[position, 1] != 0 and entries[position, 0] != key:
        position = (position + 1) & mask
    return position


@kernel(over="ids", reads=("ids",), grain=4096)
def find_hashed(entries, ids, slots, lo, hi):
    bits = _bits(entries.shape[0])
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch(entries, _home(ids[i + AHEAD], bits), 16)
        slots[i] = entries[_entry(entries, ids[i], bits), 1] - 1


@kernel(reads=("ids",))
def insert_hashed(entries, ids, slots, used, slot_ids):
    bits = _bits(entries.shape[0])
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch(entries, _home(ids[i + AHEAD], bits), 16)
        if slots[i] < 0:
            position = _entry(entries, ids[i], bits)
            entries[position, 0] = ids[i]
            entries[position, 1] = used + 1
            slot_ids[used] = ids[i]
            slots[i] = used
            used += 1
    return used


@kernel()
def rehash(old, entries):
    bits = _bits(entries.shape[0])
    for i in range(old.shape[0]):
        if old[i, 1] != 0:
            position = _entry(entries, old[i, 0], bits)
            entries[position, 0] = old[i, 0]
            entries[position, 1] = old[i, 1]


@kernel(reads=("ids", "values"))
def set_values(entries, ids, values):
    bits = _bits(entries.shape[0])
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch_to_write(entries, _home(ids[i + AHEAD], bits), 16)
        position = _entry(entries, ids[i], bits)
        entries[position, 0] = ids[i]
        entries[position, 1] = values[i] + 1
