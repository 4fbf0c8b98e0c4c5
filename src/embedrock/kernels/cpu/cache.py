"""Slots of a cache, on the CPU: see ``tests/reference/cache.py`` for the specification."""

import numpy as np

from embedrock.kernels.cpu.directory import AHEAD, _bits, _entry, _home, _table, _write, mix
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.runtime import inlined, kernel

BLOCK = 64  # slots that are scanned together
PROTECTED = 6  # the flags FROZEN and WRITING of `embedrock.storage.cache`
FREE = 0xFFFF  # number of pins of a slot without a row
NO_SLOT = -1
LEVEL_BITS = 5
LEVELS = np.int32((1 << LEVEL_BITS) - 1)
MARKS = np.int32(0xFFFF - LEVELS)  # the bits of a word with its id


@kernel()
def take_slots(slot_ids, pins, first_free, used, slots):
    for i in range(slots.shape[0]):
        if first_free == NO_SLOT:
            slots[i] = used
            used += 1
        else:
            slots[i] = first_free
            first_free = slot_ids[first_free]
            pins[slots[i]] = 0
    return first_free, used


@kernel(reads=("slots",))
def give_slots(slot_ids, pins, first_free, slots):
    for i in range(slots.shape[0]):
        slot_ids[slots[i]] = first_free
        pins[slots[i]] = FREE
        first_free = slots[i]
    return first_free


@kernel(reads=("ids",))
def erase(direct, entries, ids):
    bits, hashed = _bits(entries.shape[0]), 0
    mask = entries.shape[0] - 1
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0] and mask >= 0:
            prefetch_to_write(entries, _home(ids[i + AHEAD], bits), 16)
        number = _table(direct, ids[i])
        if number >= 0:
            _write(direct, number, ids[i], np.int64(-1))
            continue
        hashed += 1
        hole = _entry(entries, ids[i], bits)
        position = (hole + 1) & mask
        while entries[position, 1] != 0:
            home = _home(entries[position, 0], bits)
            if ((position - home) & mask) >= ((position - hole) & mask):
                entries[hole, 0] = entries[position, 0]
                entries[hole, 1] = entries[position, 1]
                hole = position
            position = (position + 1) & mask
        entries[hole, 0] = 0
        entries[hole, 1] = 0
    return hashed


@kernel()
def _bucket(ghosts, key):
    return np.int64(((mix(key) >> np.uint64(32)) * np.uint64(ghosts.shape[0])) >> np.uint64(32))


@kernel()
def _print(key):
    return np.int32((mix(key) << np.uint64(LEVEL_BITS)) & np.uint64(0xFFFF))


@kernel(reads=("ids",))
def remember(ghosts, ids, levels, epoch):
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch_to_write(ghosts, _bucket(ghosts, ids[i + AHEAD]), 64)
        level = min(np.int32(levels[i]), LEVELS)
        if level == 0:
            continue
        bucket, mark = ghosts[_bucket(ghosts, ids[i])], _print(ids[i])
        age = np.int32((epoch - np.int64(bucket[0])) & 0xFFFF)
        bucket[0] = np.uint16(epoch & 0xFFFF)
        lowest = np.int32(1 << 30)
        for k in range(1, bucket.shape[0]):  # without branches, which would prevent vectorization
            word = np.int32(bucket[k])
            left = max((word & LEVELS) - age, np.int32(0))
            word = ((word & MARKS) | left) * np.int32(left > 0)
            bucket[k] = np.uint16(word)
            left *= np.int32((word & MARKS) != mark)
            lowest = min(lowest, left * np.int32(64) + np.int32(k))
        if lowest >> 6 <= level:
            bucket[lowest & 63] = np.uint16(mark | level)


@kernel(reads=("ids",))
def recall(ghosts, ids, epoch, levels):
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch_to_write(ghosts, _bucket(ghosts, ids[i + AHEAD]), 64)
        bucket, mark = ghosts[_bucket(ghosts, ids[i])], _print(ids[i])
        age = (epoch - np.int64(bucket[0])) & 0xFFFF
        levels[i] = 0
        for k in range(1, bucket.shape[0]):
            if (np.int32(bucket[k]) & MARKS) == mark:
                levels[i] = max(np.int64(levels[i]), (np.int64(bucket[k]) & LEVELS) - age)
                bucket[k] = 0


@kernel()
def score(scores, histogram, slots, levels):
    for i in range(slots.shape[0]):
        scores[slots[i]] = levels[i]
        histogram[levels[i]] += 1


@kernel(reads=("slots",))
def forget(scores, histogram, slots, levels):
    for i in range(slots.shape[0]):
        levels[i] = scores[slots[i]]
        histogram[levels[i]] -= 1


@kernel(reads=("slots",))
def touch(scores, pins, histogram, slots, rises, chances, random):
    for i in range(slots.shape[0]):
        slot = slots[i]
        now = scores[slot]
        random = random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        scores[slot] = rises[now] + np.uint8((random >> np.uint64(32)) < chances[now])
        if pins[slot] == 0:
            histogram[now] -= 1
            histogram[scores[slot]] += 1
    return random


@kernel(reads=("slots",))
def pin(scores, pins, histogram, slots, change):
    for i in range(slots.shape[0]):
        if i + AHEAD < slots.shape[0]:
            prefetch_to_write(pins, slots[i + AHEAD], 1)
            prefetch_to_write(scores, slots[i + AHEAD], 1)
        slot = slots[i]
        before = np.int64(pins[slot])
        if before == 0 or before + change == 0:
            histogram[scores[slot]] -= change
        pins[slot] = np.uint16(before + change)


@inlined
def _lowest(scores, start):
    # Lowest score of one block.
    lowest = scores[start]
    for i in range(start, start + BLOCK):
        lowest = scores[i] if scores[i] < lowest else lowest
    return lowest


@kernel()
def sweep(scores, pins, flags, used, hand, threshold, loss, histogram, slots):
    found, left = 0, used
    while left > 0 and found < slots.shape[0]:
        slot = hand
        whole = loss == 0 and slot % BLOCK == 0 and slot + BLOCK <= used and left >= BLOCK
        if whole and _lowest(scores, slot) > threshold:  # no candidate: much faster than one by one
            left -= BLOCK
            hand = slot + BLOCK if slot + BLOCK < used else 0
            continue
        left -= 1
        hand = slot + 1 if slot + 1 < used else 0
        now = scores[slot]
        if now > threshold:
            if loss != 0 and pins[slot] == 0:
                histogram[now] -= 1
                scores[slot] = now - 1
                histogram[now - 1] += 1
        elif pins[slot] == 0 and (flags[slot] & PROTECTED) == 0:
            slots[found] = slot
            found += 1
            histogram[now] -= 1
            pins[slot] = 1
    return hand, found


@kernel()
def age(scores, histogram):
    for i in range(scores.shape[0]):
        scores[i] = scores[i] - np.uint8(scores[i] > 0)
    histogram[0] += histogram[1]
    for level in range(1, histogram.shape[0] - 1):
        histogram[level] = histogram[level + 1]
    histogram[histogram.shape[0] - 1] = 0


@kernel(reads=("slots",))
def sample(slot_ids, slots, share, ids):
    found = 0
    for i in range(slots.shape[0]):
        if i + AHEAD < slots.shape[0]:
            prefetch(slot_ids, slots[i + AHEAD], 8)
        key = slot_ids[slots[i]]
        if (mix(key) & np.uint64(0xFFFFFFFF)) * np.uint64(share) < np.uint64(1 << 32):
            ids[found] = key
            found += 1
            if found == ids.shape[0]:
                return i + 1, found
    return slots.shape[0], found


@kernel(reads=("ids",))
def thin_out(ids, share, kept):
    found, most = 0, np.uint64(0xFFFFFFFF) // np.uint64(share)
    for i in range(ids.shape[0]):
        kept[found] = ids[i]  # without a branch, which would be mispredicted
        found += np.int64((mix(ids[i]) & np.uint64(0xFFFFFFFF)) <= most)
    return found
