"""Planning a batch: unique ids, inverse and segments, by hashing, in one pass or by partitions."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from reference import directory

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def ids_of(sources: Int64Array) -> Int64Array:
    """Return the ids of all sources, int64 (sources, 2): the address and the number of the ids of each."""
    parts = [np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(start)) for start, n in sources.tolist() if n]
    return np.concatenate([*parts, np.empty(0, np.int64)])


def dedupe(sources: Int64Array, seed: int, table: Int32Array, unique: Int64Array, inverse: Int32Array) -> int:
    """Write the unique ids in order of first occurrence, and for each position the index of its id.

    Args:
        sources: of n ids, see `ids_of`.
        seed, table: how the fast kernel finds an id; the results do not depend on them.
        unique: int64 (n,), may be the only source itself; only the first `count` entries mean anything afterwards.
        inverse: int32 (n,).

    Returns:
        count: how many ids are unique.
    """
    ids = ids_of(sources)
    values, first, index = np.unique(ids, return_index=True, return_inverse=True)
    by_occurrence = np.argsort(first)
    rank = np.empty_like(by_occurrence)
    rank[by_occurrence] = np.arange(by_occurrence.size)
    inverse[:] = rank[index]
    unique[: values.size] = values[by_occurrence]
    return values.size


def segments(inverse: Int32Array, count: int, starts: Int32Array, order: Int32Array) -> None:
    """Group the positions by unique id, in order of occurrence.

    Args:
        inverse: int32 (n,), values in ``[0, count)``.
        count: number of segments.
        starts: int32, at least ``count + 1`` entries; segment k is ``order[starts[k] : starts[k + 1]]``.
        order: int32 (n,).
    """
    starts[0] = 0
    starts[1 : count + 1] = np.cumsum(np.bincount(inverse, minlength=count))
    order[:] = np.argsort(inverse, kind="stable")


def by_owner(ids: Int64Array, ranks: int, bits: int, order: Int32Array, bounds: Int64Array) -> bool:
    """Group the positions of ids by owner, in order of occurrence.

    Args:
        ids: int64 (n,).
        ranks: how many share the rows: `embedrock.distributed.owners`.
        bits: how many bits of the hash decide.
        order: int32 (n,), the positions.
        bounds: int64 (ranks + 1,), where those of each owner begin.

    Returns:
        Whether they were grouped already.
    """
    mixed = (ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - bits)
    owners = ((mixed * np.uint64(ranks)) >> np.uint64(bits)).astype(np.int64)
    order[:] = np.argsort(owners, kind="stable")
    bounds[:] = np.searchsorted(owners[order], np.arange(ranks + 1))
    return bool((np.diff(owners) >= 0).all())


def move_rows(
    moves: Int32Array,
    places: Int32Array,
    ids: Int64Array,
    inverse: Int32Array,
    starts: Int32Array,
    order: Int32Array,
    new_ids: Int64Array,
    new_inverse: Int32Array,
    new_starts: Int32Array,
    new_order: Int32Array,
) -> None:
    """Change the order of a plan's rows: row k becomes what row ``moves[k]`` was.

    Args:
        moves: int32 (unique,), each row once.
        places: int32 (unique,), where each row has gone.
        ids, inverse, starts, order: the plan.
        new_ids, new_inverse, new_starts, new_order: the changed one.
    """
    new_ids[:], places[moves] = ids[moves], np.arange(len(ids))
    new_inverse[:] = places[inverse]
    segments(new_inverse, len(ids), new_starts, new_order)


def are_outside(sources: Int64Array, table: Int64Array) -> bool:
    """Return whether an id lies outside its table, a row of `tables`, see `plan_tables`."""
    ids = ids_of(sources)
    return bool(((ids < table[2]) | (ids > table[3])).any())


def plan_tables(
    sources: Int64Array,
    tables: Int64Array,
    direct: Int64Array,
    entries: Int64Array,
    seed: int,
    hashes: Int32Array,
    block: Int64Array,
) -> tuple[int, int]:
    """Plan the batch of all tables.

    Args:
        sources: see `ids_of`, those of one table after the other; n ids in all.
        tables: int64 (tables, 5): the first source, one past the last one, the lowest and the highest id, and the key
            of id 0 in the index.
        direct, entries: the index, as in `directory`. If both are empty, no slots are written.
        seed, hashes: as in `dedupe`.
        block: int64, receives where the unique rows of each table begin, (tables + 1,); the ids and slots of all rows,
            each (n,), of which the first `count` mean something; and as int32 the inverse (n,), the order (n,) and
            the starts (count + 1,) of `Plan`.

    Returns:
        count: how many rows are unique, -1 if an id lies outside its table; and how many of them have no slot.
    """
    n, begin = len(ids_of(sources)), len(tables) + 1
    rows, ids, slots, words = np.split(block, [begin, begin + n, begin + 2 * n])
    inverse, order, starts = np.split(words.view(np.int32), [n, 2 * n])
    rows[0] = starts[0] = position = missing = 0
    for t, table in enumerate(tables):
        own = sources[table[0] : table[1]]
        if are_outside(own, table):
            return -1, 0
        first, mine = rows[t], slice(position, position + len(ids_of(own)))
        count = dedupe(own, seed, hashes, ids[first:], inverse[mine])
        segments(inverse[mine], count, starts[first:], order[mine])
        missing += find(int(table[4]), ids[first : first + count], (direct, entries), slots[first:])
        starts[first : first + count + 1] += position
        inverse[mine] += first
        order[mine] += position
        position, rows[t + 1] = mine.stop, first + count
    return int(rows[-1]), missing


def find(base: int, ids: Int64Array, index: tuple[Int64Array, Int64Array], slots: Int64Array) -> int:
    """Write the slots of a table's unique ids, if there is an index; return how many have none."""
    if not any(each.size for each in index):
        return 0
    directory.find(*index, ids + base, slots[: len(ids)])
    return int(np.count_nonzero(slots[: len(ids)] < 0))


def _partition_of(ids: Int64Array, partitions: int) -> Int64Array:
    mixed = ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(65 - partitions.bit_length())).astype(np.int64)


def _chunks(n: int, chunks: int) -> list[slice]:
    return [slice(n * c // chunks, n * (c + 1) // chunks) for c in range(chunks)]


def count_partitions(sources: Int64Array, counts: Int64Array) -> None:
    """Count how many ids of each chunk fall into each partition.

    Args:
        sources: see `ids_of`; the ids are cut into as many near-equal chunks as `counts` has rows.
        counts: int64 (chunks, partitions); the number of partitions is a power of two, at least 2.
    """
    ids, (chunks, partitions) = ids_of(sources), counts.shape
    for c, chunk in enumerate(_chunks(ids.size, chunks)):
        counts[c] = np.bincount(_partition_of(ids[chunk], partitions), minlength=partitions)


def partition(sources: Int64Array, cursors: Int64Array, keys: Int64Array, positions: Int32Array) -> None:
    """Move the ids of each chunk, with their positions, to where their partitions lie; stable.

    Args:
        sources: of ids that are cut into chunks as in `count_partitions`.
        cursors: int64 (chunks, partitions), where the next id of a chunk and partition goes; advanced.
        keys, positions: int64 and int32 (n,).
    """
    ids, (chunks, partitions) = ids_of(sources), cursors.shape
    for c, chunk in enumerate(_chunks(ids.size, chunks)):
        of = _partition_of(ids[chunk], partitions)
        for p in range(partitions):
            mine = np.flatnonzero(of == p)
            to = slice(cursors[c, p], cursors[c, p] + mine.size)
            keys[to], positions[to] = ids[chunk][mine], chunk.start + mine
            cursors[c, p] = to.stop


def group(
    sources: Int64Array,
    parts: Int64Array,
    positions: Int32Array,
    bounds: Int64Array,
    direct: Int64Array,
    entries: Int64Array,
    seed: int,
    hashes: Int32Array,
    keys: Int64Array,
    slots: Int64Array,
    local: Int32Array,
    starts: Int32Array,
    order: Int32Array,
    counts: Int64Array,
) -> None:
    """Dedupe each part of the ids, find their slots, and group its positions.

    Args:
        sources, parts: as `sources` and `tables` in `plan_tables`. The source of a part may be its place in `keys`.
        positions: int32 (n,), of the ids of one part after the other; (0,) if they are in order.
        bounds: int64 (parts + 1,), where the ids of each part begin.
        direct, entries: as in `plan_tables`.
        seed, hashes: as in `dedupe`; each worker of the fast kernel has a row of `hashes`.
        keys: int64 (n,); on return part p's unique ids lead ``keys[bounds[p] : bounds[p + 1]]``.
        slots: int64 (n,), those of the ids in `keys`; (0,) without an index.
        local: int32 (n,), each id's index among its part's unique ids.
        starts: int32 (n + parts,); part p's lie from ``bounds[p] + p``, counted from its bound.
        order: int32 (n,).
        counts: int64 (2, parts), unique ids in each, -1 if an id lies outside its table; and those without a slot.
    """
    positions = positions if positions.size else np.arange(len(keys), dtype=np.int32)
    for p, part in enumerate(parts):
        own, mine = sources[part[0] : part[1]], slice(bounds[p], bounds[p + 1])
        if are_outside(own, part):
            counts[0, p] = -1
            continue
        count = counts[0, p] = dedupe(own, seed, hashes[0], keys[mine], local[mine])
        counts[1, p] = find(int(part[4]), keys[mine][:count], (direct, entries), slots[mine])
        segments(local[mine], count, starts[mine.start + p : mine.stop + p + 1], order[mine])
        order[mine] = positions[mine][order[mine]]


def collect(
    keys: Int64Array,
    slots: Int64Array,
    positions: Int32Array,
    bounds: Int64Array,
    bases: Int64Array,
    local: Int32Array,
    starts: Int32Array,
    inverse: Int32Array,
    unique: Int64Array,
    all_slots: Int64Array,
    all_starts: Int32Array,
) -> None:
    """Join what `group` found into the arrays of the plan.

    Args:
        keys, slots, positions, bounds, local, starts: as `group` left them.
        bases: int64 (parts + 1,), the index of each part's first unique id, and their number.
        inverse: int32 (n,).
        unique, all_slots: int64 (count,); no slots without an index.
        all_starts: int32 (count + 1,); the last is left alone.
    """
    positions = positions if positions.size else np.arange(len(keys), dtype=np.int32)
    for p in range(len(bounds) - 1):
        first, last, base, count = bounds[p], bounds[p + 1], bases[p], bases[p + 1] - bases[p]
        unique[base : base + count] = keys[first : first + count]
        if all_slots.size:
            all_slots[base : base + count] = slots[first : first + count]
        all_starts[base : base + count] = first + starts[first + p : first + p + count]
        inverse[positions[first:last]] = base + local[first:last]
