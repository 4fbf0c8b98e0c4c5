"""Where records are, key by key: the specification of ``kernels/cpu/directory.py``.

A key is the id of a row plus its table's number times 2**44. ``direct`` int64 (tables, 3) has, by number, the address,
the length and the bits of an item of a direct-address table; an item of 1 bit (lowest bit of a byte first) is whether
the row exists, whose slot is its id; one of 32 bits is its slot + 1. All other keys are in the hash table: ``entries``
int64 (power of two, 2) holds pairs (key, slot + 1).
"""

from __future__ import annotations

import ctypes

import numpy as np

EMPTY = 0  # of a hash entry's second word, which is slot + 1: fresh memory from the system is an empty table
PART_BITS = 44
_MASK = (1 << 64) - 1


def mix(key: int) -> int:
    """Scatter an id over 64 bits (the finalizer of MurmurHash3, by Austin Appleby, public domain)."""
    h = key & _MASK
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return h ^ (h >> 33)


def _table(direct: np.ndarray, key: int) -> tuple[np.ndarray, int, int] | None:
    """Return the direct-address table of a key, the place of its item, and the item's bits; None: it is hashed."""
    number, row = key >> PART_BITS, key % (1 << PART_BITS)
    if not 0 <= number < len(direct) or row >= direct[number, 1]:
        return None
    address, length, bits = direct[number].tolist()
    kind, size = (ctypes.c_uint8, -(-length // 8)) if bits == 1 else (ctypes.c_int32, length)
    return np.ctypeslib.as_array((kind * size).from_address(address)), row, bits


def slot_of(direct: np.ndarray, entries: np.ndarray, key: int) -> int:
    """Return the slot of a key; -1: it has none."""
    found = _table(direct, key)
    if found is None:
        return int(entries[_entry(entries, key), 1]) - 1
    table, row, bits = found
    return (row if table[row >> 3] >> (row & 7) & 1 else -1) if bits == 1 else int(table[row]) - 1


def put(direct: np.ndarray, entries: np.ndarray, key: int, slot: int) -> int:
    """Write the slot of a key, and return it; in a table of bits it is the row."""
    found = _table(direct, key)
    if found is None:
        entries[_entry(entries, key)] = key, slot + 1
        return slot
    table, row, bits = found
    if bits == 1:
        table[row >> 3] |= 1 << (row & 7)
        return row
    table[row] = slot + 1
    return slot


def take_out(direct: np.ndarray, key: int) -> bool:
    """Return whether a direct-address table has the key, whose slot is then gone."""
    found = _table(direct, key)
    if found is not None:
        table, row, bits = found
        if bits == 1:
            table[row >> 3] &= 255 - (1 << (row & 7))
        else:
            table[row] = 0
    return found is not None


def _entry(entries: np.ndarray, key: int) -> int:
    # Linear probing from the hash's top bits, so that a doubled table keeps the order of its entries.
    mask = entries.shape[0] - 1
    position = mix(key) >> (64 - mask.bit_length()) if mask else 0
    while entries[position, 1] != EMPTY and entries[position, 0] != key:
        position = (position + 1) & mask
    return position


def find(direct: np.ndarray, entries: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> None:
    """Write the slot of each key, or -1 where it has no record."""
    for i, key in enumerate(ids.tolist()):
        slots[i] = slot_of(direct, entries, key)


def insert(
    direct: np.ndarray, entries: np.ndarray, ids: np.ndarray, slots: np.ndarray, used: int, slot_ids: np.ndarray
) -> tuple[int, int]:
    """Give new slots from ``used`` on to keys (without repeats) whose slot is -1.

    Notes their keys in ``slot_ids``, unless it is empty. Returns the new ``used``, and how many keys came to the hash
    table.
    """
    hashed = 0
    for i, key in enumerate(ids.tolist()):
        if slots[i] < 0:
            hashed += _table(direct, key) is None
            slots[i] = put(direct, entries, key, used)
            if len(slot_ids):
                slot_ids[used] = key
            used += 1
    return used, hashed


def rehash(old: np.ndarray, direct: np.ndarray, entries: np.ndarray) -> int:
    """Copy all entries into another, empty hash table, or into direct-address tables; return how many are hashed."""
    there = old[old[:, 1] != EMPTY]
    return set_values(direct, entries, there[:, 0], there[:, 1] - 1)


def set_values(direct: np.ndarray, entries: np.ndarray, ids: np.ndarray, values: np.ndarray) -> int:
    """Write the value of each key, without repeats, where ``find`` finds it; return how many are new hash entries."""
    hashed = 0
    for key, value in zip(ids.tolist(), values.tolist(), strict=True):
        hashed += _table(direct, key) is None and slot_of(direct, entries, key) < 0
        put(direct, entries, key, value)
    return hashed
