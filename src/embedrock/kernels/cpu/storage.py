"""Records to and from files, on the CPU: see ``tests/reference/storage.py`` for the specification."""

import numpy as np

from embedrock.kernels.constants import MARK_STEP, RUN_SHIFT
from embedrock.kernels.cpu import crc
from embedrock.kernels.cpu.directory import mix
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.runtime import inlined, kernel

AHEAD = 8
RECORDS_AHEAD = 4
BLOCK = 4096  # bytes: the block size of disk reads
FULL, BITS, LISTED = 0, 1, 2


@kernel(over="slots", reads=("slots", "ids"), grain=256)
def seal(records, slots, ids, out, lo, hi):
    source, target, names = records.view(np.uint32), out.view(np.uint32), ids.view(np.uint32)
    words = source.shape[1]
    for i in range(lo, hi):
        if i + RECORDS_AHEAD < hi:
            prefetch(source, slots[i + RECORDS_AHEAD], records.shape[1])
        target[i, words] = crc.copy(source[slots[i]], target[i, :words], names[2 * i], names[2 * i + 1])


@inlined
def _last_at_most(values, lo, hi, value):
    # Index of the last of the ascending values[lo:hi] that is <= value; lo - 1 if there is none.
    while lo < hi:
        middle = (lo + hi) >> 1
        if values[middle] <= value:
            lo = middle + 1
        else:
            hi = middle
    return lo - 1


@kernel(over="sealed", grain=8192)
def stamp(sealed, salt, first, lo, hi):
    words = sealed.view(np.uint32)
    last = words.shape[1] - 1
    for i in range(lo, hi):
        words[i, last] ^= np.uint32((salt + MARK_STEP * (first + i)) & 0xFFFFFFFF)


@kernel()
def mark(locations, numbers, salts, steps, marks):
    number, salt, step = -1, np.int64(0), np.int64(0)
    for i in range(locations.shape[0]):
        if locations[i] >> RUN_SHIFT != number:
            number = locations[i] >> RUN_SHIFT
            k = _last_at_most(numbers, 0, numbers.shape[0], number)
            salt, step = np.int64(salts[k]), np.int64(steps[k])
        marks[i] = np.uint32((salt + step * (locations[i] & ((1 << RUN_SHIFT) - 1))) & 0xFFFFFFFF)


@kernel(over="good", reads=("buffer",), grain=256)
def unseal(buffer, starts, ids, marks, records, slots, good, lo, hi):
    source, target, names = buffer.view(np.uint32), records.view(np.uint32), ids.view(np.uint32)
    words = target.shape[1]
    for i in range(lo, hi):
        if i + RECORDS_AHEAD < hi:
            prefetch(source, starts[i + RECORDS_AHEAD] >> 2, records.shape[1])
            prefetch_to_write(target, slots[i + RECORDS_AHEAD], records.shape[1])
        start = starts[i] >> 2
        found = crc.copy(source[start : start + words], target[slots[i]], names[2 * i], names[2 * i + 1])
        good[i] = np.uint8(source[start + words] == found ^ marks[i])


@kernel()
def unmix(h):
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0x9CB4B2F8129337DB)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0x4F74430C22A54005)
    return h ^ (h >> np.uint64(33))


@inlined
def _home(key, homes):
    return np.int64(((key >> np.uint64(32)) * np.uint64(homes)) >> np.uint64(32))


@inlined
def _position(entries, homes, key):
    position = _home(key, homes)
    while entries[position, 1] != 0 and entries[position, 0] < key:
        position += 1
    return position


@inlined
def _key(row, salt):
    return mix(np.uint64(row) ^ salt)


@kernel(over="ids", reads=("ids",), grain=2048)
def find_overlay(entries, homes, salt, ids, locations, lo, hi):
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch(entries, _home(_key(ids[i + AHEAD], salt), homes), 128)
        key = _key(ids[i], salt)
        position = _position(entries, homes, key)
        here = entries[position, 1] != 0 and entries[position, 0] == key
        locations[i] = np.int64(entries[position, 1]) - 1 if here else -1


@kernel(reads=("ids", "locations"))
def insert_overlay(entries, homes, salt, count, most, ids, locations, start):
    for i in range(start, ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch(entries, _home(_key(ids[i + AHEAD], salt), homes), 128)
        key, value = _key(ids[i], salt), np.uint64(locations[i] + 1)
        position = _position(entries, homes, key)
        if entries[position, 1] == 0 or entries[position, 0] != key:
            end = position
            while entries[end, 1] != 0:
                end += 1
            if count == most or end == entries.shape[0] - 1:
                return i, count
            for k in range(end, position, -1):
                entries[k, 0], entries[k, 1] = entries[k - 1, 0], entries[k - 1, 1]
            entries[position, 0] = key
            count += 1
        entries[position, 1] = value
    return ids.shape[0], count


@kernel(reads=("ids", "locations"))
def remove_overlay(entries, homes, salt, ids, locations):
    removed = 0
    for i in range(ids.shape[0]):
        if i + AHEAD < ids.shape[0]:
            prefetch(entries, _home(_key(ids[i + AHEAD], salt), homes), 128)
        key, value = _key(ids[i], salt), np.uint64(locations[i] + 1)
        position = _position(entries, homes, key)
        if entries[position, 0] == key and entries[position, 1] == value:
            while entries[position + 1, 1] != 0 and _home(entries[position + 1, 0], homes) <= position:
                entries[position, 0], entries[position, 1] = entries[position + 1, 0], entries[position + 1, 1]
                position += 1
            entries[position, 1] = 0
            removed += 1
    return removed


@kernel()
def behind_overlay(entries, homes, salt, row):
    key = _key(row, salt)
    return _position(entries, homes, key + np.uint64(1)) if ~key != 0 else entries.shape[0]


@inlined
def _squeeze(entries, homes):
    # Move kept entries to the front. Also return the place of the last one, and whether keys ascend. Branches would be
    # mispredicted every fourth time, so there are none.
    count, last, newest, in_order = 0, -1, np.uint64(0), True
    for position in range(entries.shape[0]):
        key, value = entries[position, 0], entries[position, 1]
        kept = value != 0
        entries[count, 0], entries[count, 1] = key, value
        in_order &= (key >= newest) | (not kept)
        newest = key if kept else newest
        last = max(_home(key, homes), last + 1) if kept else last
        count += 1 if kept else 0
    return count, last, in_order


@inlined
def _last_place(entries, count, homes):
    last = -1
    for k in range(count):
        last = max(_home(entries[k, 0], homes), last + 1)
    return last


@kernel()
def rebuild_overlay(entries, total, expected):
    tail = max(min(total // 16, 4096), 4)
    homes = total - tail
    count, last, in_order = _squeeze(entries, homes)
    if count != expected or not in_order:
        return -1
    while last + tail // 2 >= total:
        homes = max(homes - tail, 1)  # with far fewer home places than entries, each entry would lie far from its own
        last = _last_place(entries, count, homes)
    ahead = total - count
    for k in range(count - 1, -1, -1):
        entries[ahead + k, 0], entries[ahead + k, 1] = entries[k, 0], entries[k, 1]
    empty = 0
    for k in range(count):
        key, value = entries[ahead + k, 0], entries[ahead + k, 1]
        position = max(_home(key, homes), empty)
        while empty < position:
            entries[empty, 1] = 0
            empty += 1
        entries[position, 0], entries[position, 1] = key, value
        empty += 1
    for position in range(empty, entries.shape[0]):
        entries[position, 1] = 0
    return homes


@kernel()
def list_overlay(entries, salt, start, ids, locations):
    count = 0
    while start < entries.shape[0] and count < ids.shape[0]:
        if entries[start, 1] != 0:
            ids[count] = np.int64(unmix(entries[start, 0]) ^ salt)
            locations[count] = np.int64(entries[start, 1]) - 1
            count += 1
        start += 1
    return start, count


@inlined
def _ones(word):
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel()
def rank_blocks(blocks, ranks):
    count = 0
    for k in range(blocks.shape[0]):
        ranks[k] = count
        for w in range(blocks.shape[1]):
            count += _ones(blocks[k, w])
    return count


@inlined
def _bit_rank(blocks, ranks, block, bit):
    # The rank of a bit of a block, or -1 if it is not set.
    last = bit >> 6
    word, place = blocks[block, last], np.uint64(bit & 63)
    if (word >> place) & np.uint64(1) == 0:
        return -1
    rank = np.int64(ranks[block]) + _ones(word & ((np.uint64(1) << place) - np.uint64(1)))
    for w in range(last):
        rank += _ones(blocks[block, w])
    return rank


@inlined
def _index(chunk, listed, blocks, ranks, row):
    # Index of a row's record in its chunk, or -1.
    if chunk[1] == FULL:
        return row - chunk[0]
    if chunk[1] == BITS:
        bit = row - chunk[0]
        return _bit_rank(blocks, ranks, chunk[3] + (bit >> 9), bit & 511)
    place = _last_at_most(listed, chunk[3], chunk[3] + chunk[4], row)
    return place - chunk[3] if place >= chunk[3] and listed[place] == row else -1


@kernel(over="ids", reads=("ids",), grain=2048)
def find_base(lows, lasts, chunks, listed, blocks, ranks, ids, locations, lo, hi):
    for i in range(lo, hi):
        number = _last_at_most(lows, 0, lows.shape[0], ids[i]) if locations[i] == -1 else -1
        if number >= 0 and ids[i] <= lasts[number]:
            locations[i] = -2 - number
            if chunks[number, 1] == BITS:
                prefetch(blocks, chunks[number, 3] + ((ids[i] - lows[number]) >> 9), 64)
    for i in range(lo, hi):
        if locations[i] < -1:
            chunk = chunks[-2 - locations[i]]
            index = _index(chunk, listed, blocks, ranks, ids[i])
            locations[i] = (chunk[2] << RUN_SHIFT) + index if index >= 0 else -1


@kernel()
def list_bits(words, ones_before, low, ids):
    count = -ones_before
    for w in range(words.shape[0]):
        word = words[w]
        while word != 0 and count < ids.shape[0]:
            if count >= 0:
                ids[count] = low + 64 * w + _ones((word & (~word + np.uint64(1))) - np.uint64(1))
            word &= word - np.uint64(1)
            count += 1
