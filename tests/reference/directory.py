"""Where records are, id by id: the specification of ``kernels/cpu/directory.py``.

``find_…`` write the slot of each id, or -1 where it has no record. ``insert_hashed``
gives new slots, in order, to ids (without repeats) whose slot is -1.
"""

from __future__ import annotations

import numpy as np

EMPTY = 0  # of a hash entry's second word, which is slot + 1: fresh memory from the system is an empty table
_MASK = (1 << 64) - 1


def mix(key: int) -> int:
    """Scatter an id over 64 bits (the finalizer of MurmurHash3, by Austin Appleby, public domain)."""
    h = key & _MASK
    h = ((h ^ (h >> 33)) * 0xFF51AFD7ED558CCD) & _MASK
    h = ((h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53) & _MASK
    return h ^ (h >> 33)


def find_direct(present: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> None:
    """``present`` has one bit a row, lowest bit first; the slot of a row is its id."""
    bits = (present[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1
    slots[:] = np.where(bits, ids, -1)


def insert_direct(present: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> None:
    """Mark all ids as present."""
    np.bitwise_or.at(present, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
    slots[:] = ids


def _entry(entries: np.ndarray, key: int) -> int:
    # Linear probing from the hash's top bits, so that a doubled table keeps the order of its entries.
    mask = entries.shape[0] - 1
    position = mix(key) >> (64 - mask.bit_length()) if mask else 0
    while entries[position, 1] != EMPTY and entries[position, 0] != key:
        position = (position + 1) & mask
    return position


def find_hashed(entries: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> None:
    """``entries`` (power of two, 2) int64 holds pairs (id, slot + 1)."""
    for i, key in enumerate(ids.tolist()):
        slots[i] = entries[_entry(entries, key), 1] - 1


def insert_hashed(entries: np.ndarray, ids: np.ndarray, slots: np.ndarray, used: int, slot_ids: np.ndarray) -> int:
    """Give new slots from ``used`` on, note their ids in ``slot_ids``, and return the new ``used``."""
    for i, key in enumerate(ids.tolist()):
        if slots[i] < 0:
            entries[_entry(entries, key)] = key, used + 1
            slot_ids[used] = key
            slots[i] = used
            used += 1
    return used


def rehash(old: np.ndarray, entries: np.ndarray) -> None:
    """Copy all entries into a larger, empty table."""
    for key, slot in old[old[:, 1] != EMPTY].tolist():
        entries[_entry(entries, key)] = key, slot


def set_values(entries: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
    """Write the value of each id, without repeats, to a hash table as of ``find_hashed``, which finds it."""
    for row, value in zip(ids.tolist(), values.tolist(), strict=True):
        entries[_entry(entries, row)] = row, value + 1
