"""Slots of a cache, one by one: the specification of ``kernels/cpu/cache.py``.

A slot that is in use has an id, a score (0 to 255: how much it is worth to keep) and a number of pins. The histogram
counts the slots in use and without pins by their score. Free slots that have been used are chained through their ids.

Ghosts are the scores of ids that left: buckets of 32 words of 16 bits, one line of a CPU cache each. A bucket's first
word is the epoch in which it was last brought up to date; the others are 11 bits of an id's hash and its level, which
falls by one each epoch as the scores do. A word of level 0 is empty.
"""

from __future__ import annotations

import numpy as np

from reference.directory import EMPTY, _entry, mix, take_out

PROTECTED = 6  # the flags FROZEN and WRITING of `embedrock.storage.cache`
FREE = 0xFFFF  # as a number of pins: a slot without a row
NO_SLOT = -1
LEVEL_BITS = 5
LEVELS = (1 << LEVEL_BITS) - 1
MARKS = 0xFFFF - LEVELS  # the bits of a word that tell its id


def take_slots(
    slot_ids: np.ndarray, pins: np.ndarray, first_free: int, used: int, slots: np.ndarray
) -> tuple[int, int]:
    """Write free slots to ``slots``: chained ones, then unused ones; return the new start of the chain and ``used``."""
    for i in range(len(slots)):
        if first_free == NO_SLOT:
            slots[i], used = used, used + 1
        else:
            slots[i], first_free = first_free, int(slot_ids[first_free])
            pins[slots[i]] = 0
    return first_free, used


def give_slots(slot_ids: np.ndarray, pins: np.ndarray, first_free: int, slots: np.ndarray) -> int:
    """Chain ``slots`` as free, the last one first, and return the new start of the chain."""
    for slot in slots.tolist():
        slot_ids[slot], first_free = first_free, slot
        pins[slot] = FREE
    return first_free


def erase(direct: np.ndarray, entries: np.ndarray, ids: np.ndarray) -> int:
    """Take ids out of an index, see `directory`; return how many were in the hash table.

    Whatever a hole there would cut off from its home moves back.
    """
    mask, hashed = len(entries) - 1, 0
    for key in ids.tolist():
        if take_out(direct, key):
            continue
        hashed += 1
        position = _entry(entries, key)
        entries[position] = EMPTY
        position = (position + 1) & mask
        while entries[position, 1] != EMPTY:  # each of the run that follows is entered anew
            moved = entries[position].copy()
            entries[position] = EMPTY
            entries[_entry(entries, int(moved[0]))] = moved
            position = (position + 1) & mask
    return hashed


def _place(ghosts: np.ndarray, key: int) -> tuple[np.ndarray, int]:
    h = mix(key)
    return ghosts[((h >> 32) * len(ghosts)) >> 32], (h << LEVEL_BITS) & 0xFFFF


def remember(ghosts: np.ndarray, ids: np.ndarray, levels: np.ndarray, epoch: int) -> None:
    """Keep the levels (at most 31) of ids that leave. In a full bucket they replace the lowest, if not higher."""
    for key, level in zip(ids.tolist(), np.minimum(levels, LEVELS).tolist(), strict=True):
        if level == 0:
            continue
        bucket, mark = _place(ghosts, key)
        left = (bucket[1:] & LEVELS).astype(int) - ((epoch - int(bucket[0])) & 0xFFFF)
        bucket[1:] = np.where(left > 0, (bucket[1:] & MARKS) | left, 0)
        bucket[0] = epoch & 0xFFFF
        left = np.where(((bucket[1:] & MARKS) == mark) | (left < 0), 0, left)  # the same id's word is replaced
        if left.min() <= level:
            bucket[1 + left.argmin()] = mark | level


def recall(ghosts: np.ndarray, ids: np.ndarray, epoch: int, levels: np.ndarray) -> None:
    """Write the levels of ids that come back, 0 where none is known, and drop them from the ghosts."""
    for i, key in enumerate(ids.tolist()):
        bucket, mark = _place(ghosts, key)
        same = np.flatnonzero((bucket[1:] & MARKS) == mark) + 1
        left = (bucket[same] & LEVELS).astype(int) - ((epoch - int(bucket[0])) & 0xFFFF)
        levels[i] = max(left.max(initial=0), 0)
        bucket[same] = 0


def score(scores: np.ndarray, histogram: np.ndarray, slots: np.ndarray, levels: np.ndarray) -> None:
    """Give slots that were just taken their scores."""
    scores[slots] = levels
    np.add.at(histogram, levels, 1)


def forget(scores: np.ndarray, histogram: np.ndarray, slots: np.ndarray, levels: np.ndarray) -> None:
    """Take slots (without pins) out of the histogram, and write their scores to ``levels``."""
    levels[:] = scores[slots]
    np.subtract.at(histogram, levels, 1)


def touch(
    scores: np.ndarray,
    pins: np.ndarray,
    histogram: np.ndarray,
    slots: np.ndarray,
    rises: np.ndarray,
    chances: np.ndarray,
    random: int,
) -> int:
    """Raise the scores of slots: from s to ``rises[s]``, or one more with chance ``chances[s] / 2**32``.

    ``histogram`` counts the scores of slots without pins.
    ``random`` is the state of Knuth's 64-bit linear congruential generator; the new one is returned.
    """
    for slot in slots.tolist():
        random = (int(random) * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
        now = scores[slot]
        scores[slot] = rises[now] + ((random >> 32) < chances[now])
        if pins[slot] == 0:
            histogram[now] -= 1
            histogram[scores[slot]] += 1
    return random


def pin(scores: np.ndarray, pins: np.ndarray, histogram: np.ndarray, slots: np.ndarray, change: int) -> None:
    """Add a pin to each of the slots, which may repeat, or take one away: `change` is 1 or -1."""
    for slot in slots.tolist():
        histogram[scores[slot]] -= change * (0 in (pins[slot], int(pins[slot]) + change))
        pins[slot] = int(pins[slot]) + change


def sweep(
    scores: np.ndarray,
    pins: np.ndarray,
    flags: np.ndarray,
    used: int,
    hand: int,
    threshold: int,
    loss: int,
    histogram: np.ndarray,
    slots: np.ndarray,
) -> tuple[int, int]:
    """Pin slots whose scores are at most ``threshold``, from ``hand`` on, at most once around; write them to ``slots``.

    Pinned and protected ones are passed over; others that the hand passes lose ``loss`` (0 or 1).

    Returns:
        Where the hand stands now, and how many slots were written.
    """
    found = 0
    for _ in range(used):
        if found == len(slots):
            break
        slot, hand = hand, (hand + 1) % used
        if pins[slot]:
            continue
        if scores[slot] > threshold:
            histogram[scores[slot]] -= 1
            scores[slot] -= loss
            histogram[scores[slot]] += 1
        elif not flags[slot] & PROTECTED:
            slots[found] = slot
            pin(scores, pins, histogram, slots[found : found + 1], 1)
            found += 1
    return hand, found


def age(scores: np.ndarray, histogram: np.ndarray) -> None:
    """Lower all scores above 0 by one."""
    scores -= scores > 0
    histogram[:2] = histogram[:2].sum(), 0
    histogram[1:] = np.append(histogram[2:], 0)


def sample(slot_ids: np.ndarray, slots: np.ndarray, share: int, ids: np.ndarray) -> tuple[int, int]:
    """Write the ids in slots to ``ids`` whose hash makes them one of about ``share``, until it is full.

    Returns:
        How many slots were looked at, and how many ids were written.
    """
    found = 0
    for i, key in enumerate(slot_ids[slots].tolist()):
        if (mix(key) & 0xFFFFFFFF) * share < 1 << 32:
            ids[found] = key
            found += 1
            if found == len(ids):
                return i + 1, found
    return len(slots), found


def thin_out(ids: np.ndarray, share: int, kept: np.ndarray) -> int:
    """Write those of ``ids`` that `sample` would take to ``kept``, which has room for all; return how many."""
    taken = [key for key in ids.tolist() if (mix(key) & 0xFFFFFFFF) * share < 1 << 32]
    kept[: len(taken)] = taken
    return len(taken)
