"""Planning a batch: unique ids, inverse and segments, by hashing, in one pass or by partitions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def dedupe(ids: Int64Array, seed: int, table: Int32Array, unique: Int64Array, inverse: Int32Array) -> int:
    """Write the unique ids in order of first occurrence, and for each position the index of its id.

    Args:
        ids: int64 (n,).
        seed, table: how the fast kernel finds an id; the results do not depend on them.
        unique: int64 (n,), may be `ids` itself; only the first `count` entries mean anything afterwards.
        inverse: int32 (n,).

    Returns:
        count: how many ids are unique.
    """
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


def by_owner(ids: Int64Array, ranks: int, order: Int32Array, bounds: Int64Array) -> bool:
    """Group the positions of ids by owner, in order of occurrence.

    Args:
        ids: int64 (n,).
        ranks: how many share the rows: `embedrock.distributed.owners`.
        order: int32 (n,), the positions.
        bounds: int64 (ranks + 1,), where those of each owner begin.

    Returns:
        Whether they were grouped already.
    """
    mixed = (ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    owners = ((mixed * np.uint64(ranks)) >> np.uint64(32)).astype(np.int64)
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


def extremes(ids: Int64Array, bounds: Int64Array, lowest: Int64Array, highest: Int64Array) -> None:
    """Write the lowest and the highest id of each table, which for a table without ids are those of int64 in turn.

    Args:
        ids: int64 (n,), those of each table, one after the other.
        bounds: int64 (tables + 1,), where those of each table begin.
        lowest, highest: int64 (tables,).
    """
    for t in range(lowest.size):
        own = ids[bounds[t] : bounds[t + 1]]
        lowest[t], highest[t] = own.min(initial=2**63 - 1), own.max(initial=-(2**63))


def _partition_of(ids: Int64Array, partitions: int) -> Int64Array:
    mixed = ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return (mixed >> np.uint64(65 - partitions.bit_length())).astype(np.int64)


def _chunks(n: int, chunks: int) -> list[slice]:
    return [slice(n * c // chunks, n * (c + 1) // chunks) for c in range(chunks)]


def count_partitions(ids: Int64Array, counts: Int64Array) -> None:
    """Count how many ids of each chunk fall into each partition.

    Args:
        ids: int64 (n,), cut into as many near-equal chunks as `counts` has rows.
        counts: int64 (chunks, partitions); the number of partitions is a power of two, at least 2.
    """
    chunks, partitions = counts.shape
    for c, chunk in enumerate(_chunks(ids.size, chunks)):
        counts[c] = np.bincount(_partition_of(ids[chunk], partitions), minlength=partitions)


def partition(ids: Int64Array, cursors: Int64Array, keys: Int64Array, positions: Int32Array) -> None:
    """Move the ids of each chunk, with their positions, to where their partitions lie; stable.

    Args:
        ids: int64 (n,), cut into chunks as in `count_partitions`.
        cursors: int64 (chunks, partitions), where the next id of a chunk and partition goes; advanced.
        keys, positions: int64 and int32 (n,).
    """
    chunks, partitions = cursors.shape
    for c, chunk in enumerate(_chunks(ids.size, chunks)):
        of = _partition_of(ids[chunk], partitions)
        for p in range(partitions):
            mine = np.flatnonzero(of == p)
            to = slice(cursors[c, p], cursors[c, p] + mine.size)
            keys[to], positions[to] = ids[chunk][mine], chunk.start + mine
            cursors[c, p] = to.stop


def group(
    keys: Int64Array,
    positions: Int32Array,
    bounds: Int64Array,
    seed: int,
    tables: Int32Array,
    local: Int32Array,
    starts: Int32Array,
    order: Int32Array,
    counts: Int64Array,
) -> None:
    """Dedupe each partition, in place, and group its positions.

    Args:
        keys: int64 (n,); on return partition p's unique ids lead ``keys[bounds[p] : bounds[p + 1]]``.
        positions: int32 (n,), of the keys.
        bounds: int64 (partitions + 1,).
        seed, tables: as in `dedupe`; each worker of the fast kernel has a row of `tables`.
        local: int32 (n,), each key's index among its partition's unique ids.
        starts: int32 (n + partitions,); partition p's lie from ``bounds[p] + p``, counted from its bound.
        order: int32 (n,).
        counts: int64 (partitions,), unique ids in each.
    """
    for p in range(counts.size):
        mine = slice(bounds[p], bounds[p + 1])
        counts[p] = dedupe(keys[mine], seed, tables[0], keys[mine], local[mine])
        segments(local[mine], int(counts[p]), starts[mine.start + p : mine.stop + p + 1], order[mine])
        order[mine] = positions[mine][order[mine]]


def collect(
    keys: Int64Array,
    positions: Int32Array,
    bounds: Int64Array,
    counts: Int64Array,
    bases: Int64Array,
    local: Int32Array,
    starts: Int32Array,
    unique: Int64Array,
    inverse: Int32Array,
    all_starts: Int32Array,
) -> None:
    """Join what `group` found into the arrays of the plan.

    Args:
        keys, positions, bounds, counts, local, starts: as `group` left them.
        bases: int64 (at least partitions,), the index of each partition's first unique id.
        unique: int64 (count,).
        inverse: int32 (n,).
        all_starts: int32 (count + 1,); the last is left alone.
    """
    for p in range(counts.size):
        first, last, base, count = bounds[p], bounds[p + 1], bases[p], counts[p]
        unique[base : base + count] = keys[first : first + count]
        all_starts[base : base + count] = first + starts[first + p : first + p + count]
        inverse[positions[first:last]] = base + local[first:last]
