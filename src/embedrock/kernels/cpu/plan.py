"""Planning a batch: unique ids, inverse and segments, by hashing, in one pass or by partitions.

A batch that fits a core's cache takes `dedupe` and `segments`. A larger one is cut by hash into partitions that fit
(`count_partitions`, `partition`). Threads then process each partition alone (`group`) and join the results (`collect`).
No result depends on the number of chunks, workers or parts. The reference documents every argument.
"""

import numpy as np

from embedrock.kernels.cpu.addresses import address_of, int32s, int64s
from embedrock.kernels.cpu.directory import find
from embedrock.kernels.cpu.runtime import kernel

# Columns of `sources`, arrays of ids by address and length, are not named. These are of `tables`, and of `parts`: the
# first source, one past the last one, the lowest and the highest id of the table, and the key of its id 0.
FIRST, LAST, LOWEST, HIGHEST, BASE = range(5)

# Entries, 512 KiB: half a core's L2. Starting at this size rather than an eighth halves the time of 65,536 distinct
# ids. Growing with the unique ids only keeps a partition in cache that one hot id made huge.
FIRST_TABLE = 1 << 17
LEAST, MOST = np.int64(-(2**63)), np.int64(2**63 - 1)
COLLECT_GRAIN = 1 << 16  # positions: a call of another thread takes as long as to join 100,000

_MULTIPLIER_1 = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
# Parts differ in length, and a thread may still run the previous stage: more calls than threads even that out.
CUTS = 8


@kernel()
def _bucket(key, seed, shift):
    """Return the top ``64 - shift`` bits of a hash of `key`; each bit depends on every bit of the key."""
    # One multiplication alone would send ids that step by its inverse to a single bucket.
    mixed = (np.uint64(key) ^ np.uint64(seed)) * _MULTIPLIER_1
    mixed = (mixed ^ (mixed >> _HALF)) * _MULTIPLIER_2
    return np.int64(mixed >> np.uint64(shift))


@kernel()
def _shift_for(buckets):
    """Return the shift with which `_bucket` has `buckets` values, rounded up to a power of two, at least 2."""
    shift = 63
    while (np.int64(1) << (64 - shift)) < buckets:
        shift -= 1
    return shift


@kernel()
def _index(unique, count, seed, shift, table):
    """Clear ``table[: 2 ** (64 - shift)]`` and insert the first `count` unique ids."""
    size = np.int64(1) << (64 - shift)
    for slot in range(size):
        table[slot] = -1
    for k in range(count):
        slot = _bucket(unique[k], seed, shift)
        while table[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        table[slot] = k


@kernel()
def dedupe(sources, seed, table, unique, inverse):
    """Write the unique ids in order of first occurrence, and for each position the index of its id."""
    # To scan the unique ids instead saved a quarter of the time of 16 ids, 0.04 microseconds.
    shift = _shift_for(min(2 * inverse.shape[0], FIRST_TABLE))
    size = np.int64(1) << (64 - shift)
    _index(unique, 0, seed, shift, table)
    count = position = 0
    for s in range(sources.shape[0]):
        ids = int64s(sources[s, 0], sources[s, 1])
        for i in range(ids.shape[0]):
            key = ids[i]
            # Stored before the lookup result is known, so that a free entry and a match are one case. The only branch
            # left is a collision, rare enough to be predicted. A branch for new ids, about half of Zipf ids, is not.
            unique[count] = key
            slot = _bucket(key, seed, shift)
            while True:
                entry = table[slot]
                found = entry if entry >= 0 else count
                if unique[found] == key:
                    break
                slot = (slot + 1) & (size - 1)
            table[slot] = found
            inverse[position] = found
            position += 1
            count += found == count
            if 2 * count > size:
                shift -= 1
                size *= 2
                _index(unique, count, seed, shift, table)
    return count


@kernel()
def segments(inverse, count, starts, order):
    """Group the positions by unique id, in order of occurrence: a counting sort, filled from the back."""
    n = inverse.shape[0]
    for k in range(count + 1):
        starts[k] = 0
    for i in range(n):
        starts[inverse[i]] += 1
    for k in range(count):
        starts[k + 1] += starts[k]
    for i in range(n - 1, -1, -1):
        k = inverse[i]
        starts[k] -= 1
        order[starts[k]] = i


@kernel()
def _owner(key, ranks, bits):
    mixed = (np.uint64(key) * _MULTIPLIER_1) >> np.uint64(64 - bits)
    return np.int64((mixed * np.uint64(ranks)) >> np.uint64(bits))


@kernel(reads=("ids",))
def by_owner(ids, ranks, bits, order, bounds):
    """Group the positions of ids by owner, in order of occurrence; return whether they were grouped already."""
    for r in range(ranks + 1):
        bounds[r] = 0
    last, is_grouped = 0, True
    for k in range(ids.shape[0]):
        owner = _owner(ids[k], ranks, bits)
        bounds[owner + 1] += 1
        is_grouped &= owner >= last
        last = owner
    for r in range(ranks):
        bounds[r + 1] += bounds[r]
    for k in range(ids.shape[0] - 1, -1, -1):  # from the back, so that `bounds` end where each owner's ids begin
        owner = _owner(ids[k], ranks, bits)
        bounds[owner + 1] -= 1
        order[bounds[owner + 1]] = k
    for r in range(ranks):
        bounds[r] = bounds[r + 1]
    bounds[ranks] = ids.shape[0]
    return is_grouped


@kernel(reads=("moves", "ids", "inverse", "starts", "order"))
def move_rows(moves, places, ids, inverse, starts, order, new_ids, new_inverse, new_starts, new_order):
    """Change the order of a plan's rows: row k becomes what row ``moves[k]`` was."""
    at = 0
    for k in range(ids.shape[0]):
        old = moves[k]
        places[old] = k
        new_ids[k] = ids[old]
        new_starts[k] = at
        for i in range(starts[old], starts[old + 1]):
            new_order[at] = order[i]
            at += 1
    new_starts[ids.shape[0]] = at
    for i in range(inverse.shape[0]):
        new_inverse[i] = places[inverse[i]]


@kernel(reads=("ids",))
def owned(ids, rank, ranks, bits, here):
    """Write which ids a rank owns."""
    for k in range(ids.shape[0]):
        here[k] = _owner(ids[k], ranks, bits) == rank


@kernel()
def _count(sources):
    count = 0
    for s in range(sources.shape[0]):
        count += sources[s, 1]
    return count


@kernel()
def _are_outside(sources, lowest, highest):
    """Return whether an id lies outside ``[lowest, highest]``."""
    if lowest == LEAST and highest == MOST:
        return False
    low, high = lowest, highest
    for s in range(sources.shape[0]):
        ids = int64s(sources[s, 0], sources[s, 1])
        for i in range(ids.shape[0]):  # to count ids outside of a range took 0.25 instead of 0.04 ms of 438,272 ids
            low = min(low, ids[i])
            high = max(high, ids[i])
    return low < lowest or high > highest


@kernel()
def plan_tables(sources, tables, direct, entries, seed, hashes, block):
    """Plan the batch of all tables: return the number of unique rows, and of those without a slot.

    Returns -1 if an id lies outside its table.
    """
    n = _count(sources)
    rows, ids, slots, inverse, order, starts = _parts_of(block, tables.shape[0], n)
    count = start = missing = starts[0] = 0
    for t in range(tables.shape[0]):
        own = sources[tables[t, FIRST] : tables[t, LAST]]
        stop = start + _count(own)
        rows[t] = count
        if _are_outside(own, tables[t, LOWEST], tables[t, HIGHEST]):
            return -1, 0
        mine, grouped = inverse[start:stop], order[start:stop]
        unique = dedupe(own, seed, hashes, ids[count:], mine)
        segments(mine, unique, starts[count:], grouped)
        missing += _find(tables[t, BASE], ids, direct, entries, slots, count, count + unique)
        if t > 0:
            for k in range(count, count + unique + 1):
                starts[k] += start
            for i in range(stop - start):
                mine[i] += count
                grouped[i] += start
        count, start = count + unique, stop
    rows[tables.shape[0]] = count
    return count, missing


@kernel()
def _parts_of(block, tables, n):
    """Return the arrays of a plan in a block of memory."""
    rows, block = block[: tables + 1], block[tables + 1 :]
    ids, slots, words = block[:n], block[n : 2 * n], block[2 * n :]
    small = int32s(address_of(words), 2 * words.shape[0])
    return rows, ids, slots, small[:n], small[n : 2 * n], small[2 * n : 3 * n + 1]


@kernel()
def _find(base, ids, direct, entries, slots, lo, hi):
    """Write the slots of a table's ids; return how many have none."""
    if direct.shape[0] + entries.shape[0] == 0:
        return 0
    for k in range(lo, hi):
        slots[k] = ids[k] + base
    find(direct, entries, slots, slots, lo, hi)
    missing = 0
    for k in range(lo, hi):
        missing += slots[k] < 0
    return missing


@kernel(over="counts", grain=1)
def count_partitions(sources, counts, lo, hi):
    """Count how many ids of each chunk ``[lo, hi)`` fall into each partition."""
    n, (chunks, partitions) = _count(sources), counts.shape
    shift = _shift_for(partitions)
    for c in range(lo, hi):
        for p in range(partitions):
            counts[c, p] = 0
        start = 0
        for s in range(sources.shape[0]):
            ids = int64s(sources[s, 0], sources[s, 1])
            for i in range(max(start, n * c // chunks), min(start + ids.shape[0], n * (c + 1) // chunks)):
                counts[c, _bucket(ids[i - start], 0, shift)] += 1
            start += ids.shape[0]


@kernel(over="cursors", grain=1)
def partition(sources, cursors, keys, positions, lo, hi):
    """Move the ids of each chunk ``[lo, hi)``, and their positions, to their partitions; stable."""
    n, (chunks, partitions) = _count(sources), cursors.shape
    shift = _shift_for(partitions)
    for c in range(lo, hi):
        start = 0
        for s in range(sources.shape[0]):
            ids = int64s(sources[s, 0], sources[s, 1])
            for i in range(max(start, n * c // chunks), min(start + ids.shape[0], n * (c + 1) // chunks)):
                p = _bucket(ids[i - start], 0, shift)
                j = cursors[c, p]
                cursors[c, p] = j + 1
                keys[j] = ids[i - start]
                positions[j] = i
            start += ids.shape[0]


@kernel(over="hashes", reads=("positions", "bounds"), grain=1, cuts=CUTS)
def group(
    sources, parts, positions, bounds, direct, entries, seed, hashes, keys, slots, local, starts, order, counts, lo, hi
):
    """Dedupe each part of the ids, find the slots, and group the positions.

    Writes the number of rows of each part, -1 if it has ids outside its table, and the number of those without a slot.

    A worker takes the parts that begin in its range of ids.
    """
    n, workers, moved = keys.shape[0], hashes.shape[0], positions.shape[0] > 0
    for worker in range(lo, hi):
        for p in range(parts.shape[0]):
            first, last = bounds[p], bounds[p + 1]
            if first * workers // (n + 1) != worker:
                continue
            own = sources[parts[p, FIRST] : parts[p, LAST]]
            if _are_outside(own, parts[p, LOWEST], parts[p, HIGHEST]):
                counts[0, p] = -1
                continue
            inverse, grouped = local[first:last], order[first:last]
            count = counts[0, p] = dedupe(own, seed, hashes[worker], keys[first:last], inverse)
            counts[1, p] = _find(parts[p, BASE], keys, direct, entries, slots, first, first + count)
            segments(inverse, count, starts[first + p : last + p + 1], grouped)
            for i in range(last - first):
                grouped[i] = positions[first + grouped[i]] if moved else first + grouped[i]


@kernel(over="inverse", reads=("positions", "bounds"), grain=COLLECT_GRAIN, cuts=CUTS)
def collect(keys, slots, positions, bounds, bases, local, starts, inverse, unique, all_slots, all_starts, lo, hi):
    """Join the results of `group` in the parts that begin in ``[lo, hi)`` into the arrays of the plan."""
    # Filling the inverse in its own order, with a cursor for each partition, was slower: 5.3 against 3.9 ms.
    moved = positions.shape[0] > 0
    for p in range(bounds.shape[0] - 1):
        first, base = bounds[p], bases[p]
        if first < lo or first >= hi:
            continue
        for k in range(bases[p + 1] - base):
            unique[base + k] = keys[first + k]
            all_starts[base + k] = first + starts[first + p + k]
        for k in range(min(all_slots.shape[0], bases[p + 1]) - base):
            all_slots[base + k] = slots[first + k]
        for i in range(first, bounds[p + 1]):
            inverse[positions[i] if moved else i] = base + local[i]
