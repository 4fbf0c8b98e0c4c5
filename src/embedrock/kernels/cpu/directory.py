"""Slot indexes, on the CPU: see ``tests/reference/directory.py`` for the specification."""

import numpy as np

from embedrock.kernels.cpu.addresses import int32s, uint8s
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_at, prefetch_to_write
from embedrock.kernels.cpu.runtime import inlined, kernel
from embedrock.kernels.keys import ADDRESS, BITS, ID, LENGTH, PART_BITS

AHEAD = 20  # 12 took a sixth longer, 32 and 48 a tenth


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


@kernel()
def _table(direct, key):
    """Return the number of the direct-address table that has a key; -1: the hash table has it."""
    number = key >> PART_BITS
    return number if 0 <= number < direct.shape[0] and (key & ID) < direct[number, LENGTH] else np.int64(-1)


@kernel()
def _write(direct, number, key, slot):
    """Write the slot of a key to a direct-address table, and return the slot; -1: none."""
    address, length, row = direct[number, ADDRESS], direct[number, LENGTH], key & ID
    if direct[number, BITS] == 1:
        present, bit = uint8s(address, (length + 7) >> 3), np.uint8(1) << np.uint8(row & 7)
        present[row >> 3] = present[row >> 3] | bit if slot >= 0 else present[row >> 3] & ~bit
        return row
    int32s(address, length)[row] = slot + 1
    return slot


@inlined
def _put(direct, entries, bits, key, slot):
    """Write the slot of a key to its table, and return the slot, and whether the hash table has one key more."""
    number = _table(direct, key)
    if number >= 0:
        return _write(direct, number, key, slot), False
    position = _entry(entries, key, bits)
    is_new = entries[position, 1] == 0
    entries[position, 0] = key
    entries[position, 1] = slot + 1
    return slot, is_new


@kernel(over="ids", reads=("ids",), grain=4096)
def find(direct, entries, ids, slots, lo, hi):
    if direct.shape[0] == 1 and direct[0, BITS] == 1:  # the only table, without a hash table
        present = uint8s(direct[0, ADDRESS], (direct[0, LENGTH] + 7) >> 3)
        for i in range(lo, hi):
            row = ids[i]
            here = (present[row >> 3] >> np.uint8(row & 7)) & np.uint8(1)
            slots[i] = row if here else -1
        return
    bits = _bits(entries.shape[0])
    for i in range(lo, hi):
        if i + AHEAD < hi:
            number = _table(direct, ids[i + AHEAD])
            if number < 0:
                prefetch(entries, _home(ids[i + AHEAD], bits), 16)
            else:
                prefetch_at(direct[number, ADDRESS] + 4 * (ids[i + AHEAD] & ID), 4)
        number = _table(direct, ids[i])
        if number < 0:
            slots[i] = entries[_entry(entries, ids[i], bits), 1] - 1
        else:
            slots[i] = int32s(direct[number, ADDRESS], direct[number, LENGTH])[ids[i] & ID] - 1


@kernel(reads=("ids",))
def insert(direct, entries, ids, slots, used, slot_ids):
    bits, hashed = _bits(entries.shape[0]), 0
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0] and entries.shape[0] > 0:
            prefetch(entries, _home(ids[i + AHEAD], bits), 16)
        if slots[i] < 0:
            slots[i], is_hashed = _put(direct, entries, bits, ids[i], used)
            hashed += is_hashed
            if slot_ids.shape[0] > 0:
                slot_ids[used] = ids[i]
            used += 1
    return used, hashed


@kernel()
def rehash(old, direct, entries):
    bits, hashed = _bits(entries.shape[0]), 0
    for i in range(old.shape[0]):
        if old[i, 1] != 0:
            hashed += _put(direct, entries, bits, old[i, 0], old[i, 1] - 1)[1]
    return hashed


@kernel(reads=("ids", "values"))
def set_values(direct, entries, ids, values):
    bits, hashed = _bits(entries.shape[0]), 0
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch_to_write(entries, _home(ids[i + AHEAD], bits), 16)
        hashed += _put(direct, entries, bits, ids[i], values[i])[1]
    return hashed
