"""The plan of a batch: its unique ids, the row of each position, and the positions of each row."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from embedrock import kernels
from embedrock.errors import ArgumentError
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned

MAX_IDS = 2**31 - 1
WORKER_IDS = 1 << 13  # fewest ids of several tables that are worth a thread
# Up to this size one table stays in a core's cache, and partitions, even on two threads, gain nothing.
SMALL_BATCH = 1 << 16
# Ids in a partition of a larger batch, at most, on average: its table, ids and segments stay in a core's L2.
# At 1.7 M ids, half as many and twice as many took the same time.
PARTITION_IDS = 1 << 13
# The scatter uses a cache line and a page of every partition at once: more would cost more than they save.
MAX_PARTITIONS = 1 << 10
# A larger scratch buffer is not kept for the next batch. Batches of 2 M ids keep all of theirs (40 MB).
KEEP_BYTES = 1 << 24

# Most parts of a merged plan: gradients that are accumulated for long must not keep all their batches.
MAX_PARTS = 32
# Parts of a plan for each thread. One thread may still run the previous stage.
SHARES = 4

# Seed of the hash tables; no result depends on it. Each process draws a new one, so that no ids, not even malicious
# ones, can all collide.
SEED = secrets.randbits(63)

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Arrays = tuple[Int64Array, Int32Array, Int32Array, Int32Array]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of a batch, an immutable value. All arrays become read-only.

    The segments always exist although only a step needs them. They take a quarter of a plan's time (0.03 of 0.10 ms at
    16,384 ids). A plan takes a tenth of a step's time. A value with lazy fields would not be immutable.

    Attributes:
        shape: shape of the given ids.
        ids: int64 (unique,), no id twice. In order of first occurrence in batches of up to `SMALL_BATCH` ids. Larger
            batches are ordered by partition (top bits of a fixed hash), and by first occurrence inside each.
        inverse: int32 (n,); ``ids[inverse]`` are the given ids, flattened.
        starts: int32 (unique + 1,); positions ``order[starts[k] : starts[k + 1]]`` hold ``ids[k]``.
        order: int32 (n,), all positions, grouped by id, in order of occurrence inside a segment.
        slots: int64 (unique,), slots of the rows by the table's slot index, -1 for none; empty if unknown.
        missing: number of -1 in `slots`.
        epoch: generation of the slots, -1 for none.
        parts: the merged plans, see `merge_plans`; empty if nothing was merged.
        rows: where the rows of each table begin, and where the last ones end; empty: all are of one table.
    """

    shape: tuple[int, ...]
    ids: Int64Array
    inverse: Int32Array
    starts: Int32Array
    order: Int32Array
    slots: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    missing: int = 0
    epoch: int = -1
    parts: tuple[Plan, ...] = ()
    rows: Sequence[int] = ()

    @property
    def bounds(self) -> Sequence[int]:
        """Return where the rows of each table begin, and where the last ones end."""
        return self.rows or (0, len(self.ids))

    def of(self, table: int) -> slice:
        """Return the rows of a table."""
        return slice(*self.bounds[table : table + 2])

    def with_slots(self, slots: Int64Array, epoch: int) -> Plan:
        """Return the plan with the slots of an epoch."""
        if slots is self.slots and epoch == self.epoch:
            return self
        return replace(self, slots=slots, missing=int(np.count_nonzero(slots < 0)), epoch=epoch)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.ids, self.inverse, self.starts, self.order, self.slots))

    def __post_init__(self) -> None:
        for array in (self.ids, self.inverse, self.starts, self.order, self.slots):
            array.setflags(write=False)  # quicker than array.flags

    def of_rows(self, rows: Int64Array) -> Plan:
        """Return a plan for a step of some rows, positions in `ids`, without the positions of the batch."""
        none = np.empty(0, np.int32)
        slots = self.slots[rows]
        return Plan((0,), self.ids[rows], none, none, none, slots, int(np.count_nonzero(slots < 0)), self.epoch)

    def batches(self, rows: np.ndarray) -> Iterator[tuple[Plan, np.ndarray]]:
        """Iterate over the merged plans, or the plan itself, each with its slice of `rows` (unique, ...)."""
        if not self.parts:
            yield self, rows
        start = 0
        for part in self.parts:
            end = start + len(part.ids)
            yield from part.batches(rows[self.inverse[start:end]])
            start = end


@spanned("plan")
def make_plan(ids: Int64Array, find: Callable[[Int64Array], Int64Array] | None = None, epoch: int = -1) -> Plan:
    """Plan a batch of ids. The result is a pure function of the ids: the number of threads changes no bit.

    Args:
        ids: int64, any shape, any values, at most 2**31 - 1 of them, with repeats.
        find: lookup of a slot index, which fills in the slots of the unique ids.
        epoch: generation of the slots.

    Returns:
        The plan; no caller's array is shared.

    Raises:
        ArgumentError: too many ids for one batch.

    Example:
        >>> plan = make_plan(np.array([[7, 3], [7, 7]]))
        >>> plan.ids.tolist(), plan.inverse.tolist()
        ([7, 3], [0, 1, 0, 0])
        >>> plan.starts.tolist(), plan.order.tolist()
        ([0, 3, 4], [0, 2, 3, 1])
    """
    flat = _flat(ids)
    if flat.size <= SMALL_BATCH:
        unique, inverse = _deduped(flat)
        arrays = unique, inverse, *_segmented(inverse, unique.size)
    else:
        arrays = _plan_by_partitions(flat)
    if find is None:
        return Plan(ids.shape, *arrays)
    slots = find(arrays[0])
    return Plan(ids.shape, *arrays, slots, int(np.count_nonzero(slots < 0)), epoch)


def by_owner(ids: Int64Array, ranks: int) -> tuple[Int32Array | None, list[int]]:
    """Group the positions of ids, int64 (n,), by owner, in order of occurrence.

    Returns:
        The positions, None if they are grouped already, and where those of each owner begin and the last ones end.

    Example:
        >>> order, bounds = by_owner(np.array([4, 1, 5]), ranks=2)  # 1 is rank 1's
        >>> order.tolist(), bounds
        ([0, 2, 1], [0, 2, 3])
    """
    order, bounds = np.empty(ids.size, np.int32), np.empty(ranks + 1, np.int64)
    is_grouped = kernels.cpu.plan.by_owner(_flat(ids), ranks, order, bounds)
    return None if is_grouped else order, bounds.tolist()


def owned(ids: Int64Array, rank: int, ranks: int) -> npt.NDArray[np.bool_]:
    """Return which ids, int64 (n,), a rank owns: see `embedrock.distributed.owners`."""
    here = np.empty(ids.size, np.bool_)
    kernels.cpu.plan.owned(_flat(ids), rank, ranks, here)
    return here


def moved(plan: Plan, moves: Int32Array) -> Arrays:
    """Return the arrays of a plan whose rows are in another order: row k is row ``moves[k]`` of `plan`.

    Example:
        >>> plan = make_plan(np.array([4, 1, 5, 1]))
        >>> [array.tolist() for array in moved(plan, np.array([0, 2, 1], np.int32))]
        [[4, 5, 1], [0, 2, 1, 2], [0, 1, 2, 4], [0, 2, 1, 3]]
    """
    old = plan.ids, plan.inverse, plan.starts, plan.order
    ids, inverse, starts, order = (buffers.empty(each.shape, each.dtype) for each in old)
    kernels.cpu.plan.move_rows(moves, _scratch.take("places", len(moves), np.int32), *old, ids, inverse, starts, order)
    return ids, inverse, starts, order


def _flat(ids: Int64Array) -> Int64Array:
    """Return ids as a 1-D array, always contiguous, aligned and read-only.

    So the kernels are compiled once, not for every kind of array.
    """
    if ids.size > MAX_IDS:
        check_count(ids.size, ids.shape)
    flat = np.ascontiguousarray(ids, np.int64)
    if not flat.flags.aligned:
        flat = flat.copy()
    flat = flat.reshape(-1)
    flat.flags.writeable = False
    return flat


def check_count(n: int, shape: tuple[int, ...]) -> None:
    """Raise `ArgumentError` if there are more ids than one batch may have."""
    if n > MAX_IDS:
        raise ArgumentError(
            f"`ids` of one batch must be at most {MAX_IDS:,}: got {n:,} (shape {shape}). "
            "Split the batch and update the table once for each part."
        )


def merge_plans(plans: Sequence[Plan]) -> Plan:
    """Return a plan of the rows of several plans. The positions are the unique ids of each, one plan after the other.

    Example:
        >>> merged = merge_plans([make_plan(np.array([7, 7, 3])), make_plan(np.array([3, 5]))])
        >>> merged.ids.tolist(), merged.inverse.tolist()
        ([7, 3, 5], [0, 1, 1, 2])
    """
    merged, epoch = make_plan(np.concatenate([plan.ids for plan in plans])), plans[0].epoch
    if sum(_count(plan) for plan in plans) <= MAX_PARTS:
        merged = replace(merged, parts=tuple(plans))
    if epoch < 0 or any(plan.epoch != epoch for plan in plans):
        return merged
    slots = np.concatenate([plan.slots for plan in plans])[merged.order[merged.starts[:-1]]]
    return replace(merged, slots=slots, missing=int(np.count_nonzero(slots < 0)), epoch=epoch)


def _count(plan: Plan) -> int:
    return 1 + sum(map(_count, plan.parts))


class _Scratch(threading.local):
    """Buffers of a thread, kept from batch to batch: fresh ones cost a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._kept: dict[str, npt.NDArray[Any]] = {}

    def take(self, name: str, size: int, dtype: type) -> npt.NDArray[Any]:
        """Return `size` elements of unknown content. The next call with this name reuses them."""
        buffer = self._kept.get(name)
        if buffer is None or buffer.size < size:
            buffer = np.empty(size, dtype)
            if buffer.nbytes <= KEEP_BYTES:
                self._kept[name] = buffer
        return buffer[:size]


_scratch = _Scratch()


def table_size(ids: int) -> int:
    """Return the number of entries of a hash table for `ids` ids."""
    return 1 << max(1, (2 * ids - 1).bit_length())


def _deduped(ids: Int64Array) -> tuple[Int64Array, Int32Array]:
    n, inverse = ids.size, np.empty(ids.size, np.int32)
    unique, table = _scratch.take("keys", n, np.int64), _scratch.take("tables", table_size(n), np.int32)
    count = kernels.cpu.plan.dedupe(ids, SEED, table, unique, inverse)
    return unique[:count].copy(), inverse


def _segmented(inverse: Int32Array, count: int) -> tuple[Int32Array, Int32Array]:
    starts, order = np.empty(count + 1, np.int32), np.empty(inverse.size, np.int32)
    kernels.cpu.plan.segments(inverse, count, starts, order)
    return starts, order


def _plan_by_partitions(ids: Int64Array) -> Arrays:
    workers = kernels.cpu.threads.get_threads()
    return plan_parts(*partition(ids, workers), workers)[0]


def plan_parts(keys: Int64Array, positions: Int32Array, bounds: Int64Array, workers: int) -> tuple[Arrays, Int64Array]:
    """Plan each part of the ids alone; return the joined plan, and where the unique ids of each part begin.

    Args:
        keys: the ids, part after part.
        positions: positions of the ids in the batch.
        bounds: int64 (parts + 1,), where the parts begin.
        workers: maximum number of threads.
    """
    n, parts, cpu, launch = keys.size, bounds.size - 1, kernels.cpu.plan, kernels.cpu.launch
    size = table_size(int((bounds[1:] - bounds[:-1]).max(initial=1)))
    shares = min(parts, workers * SHARES) if workers > 1 else 1
    tables = _scratch.take("tables", shares * size, np.int32).reshape(shares, size)
    local, starts = _scratch.take("local", n, np.int32), _scratch.take("starts", n + parts, np.int32)
    counts, order = np.empty(parts, np.int64), buffers.empty((n,), np.int32)
    launch(cpu.group, keys, positions, bounds, SEED, tables, local, starts, order, counts)

    bases = bounds_of(counts)
    unique, inverse = buffers.empty((int(bases[-1]),), np.int64), buffers.empty((n,), np.int32)
    all_starts = buffers.empty((unique.size + 1,), np.int32)
    all_starts[-1] = n
    grouped = (keys, positions, bounds, counts, bases, local, starts)
    launch(cpu.collect, *grouped, unique, inverse, all_starts)
    return (unique, inverse, all_starts, order), bases


def partition(ids: Int64Array, workers: int) -> tuple[Int64Array, Int32Array, Int64Array]:
    """Return the ids in the order of their partitions, their positions, and the partitions' bounds."""
    n, cpu, launch = ids.size, kernels.cpu.plan, kernels.cpu.launch
    # A function of n alone: partitions are visible in the plan, but chunks (one for each worker) are not.
    partitions = min(1 << (n // PARTITION_IDS).bit_length(), MAX_PARTITIONS)
    counts = np.empty((workers, partitions), np.int64)
    launch(cpu.count_partitions, ids, counts)
    cursors = np.ascontiguousarray(bounds_of(counts.T)[:-1].reshape(partitions, workers).T)
    keys, positions = _scratch.take("keys", n, np.int64), _scratch.take("positions", n, np.int32)
    launch(cpu.partition, ids, cursors, keys, positions)
    return keys, positions, bounds_of(counts.sum(axis=0))


def bounds_of(sizes: Sequence[int] | np.ndarray) -> Int64Array:
    """Return where parts of these sizes begin, one after the other, and where the last one ends."""
    parts = np.asarray(sizes, np.int64).reshape(-1)
    bounds = np.zeros(parts.size + 1, np.int64)
    np.add.accumulate(parts, out=bounds[1:])
    return bounds


# -------------------------------------------------------------------- batches of several tables


class JointPlan(NamedTuple):
    """The plan of one batch of several tables. Rows and positions of a table are contiguous.

    Attributes:
        ids, inverse, starts, order: as in `Plan`, over all tables; `ids` are those of each table.
        positions: int64 (tables + 1,), where the positions of each table begin.
        rows: int64 (tables + 1,), where its unique rows begin.
    """

    ids: Int64Array
    inverse: np.ndarray
    starts: np.ndarray
    order: np.ndarray
    positions: Int64Array
    rows: Int64Array

    def of(self, table: int) -> slice:
        return slice(int(self.rows[table]), int(self.rows[table + 1]))


def joined_ids(ids: Sequence[np.ndarray]) -> Int64Array:
    """Concatenate int64 ids of any shapes into a new array, which `make_joint_plan` may overwrite."""
    out = buffers.empty((sum([each.size for each in ids]),), np.int64)
    return np.concatenate([each.reshape(-1) for each in ids], out=out) if ids else out


@spanned("plan")
def make_joint_plan(ids: Int64Array, bounds: Int64Array) -> JointPlan:
    """Plan one batch of several tables.

    Args:
        ids: int64 (n,), the ids of each table, one table after the other. They are overwritten.
        bounds: int64 (tables + 1,), where the ids of each table begin.

    Returns:
        A plan in which the ids of each table are in the order of its own `make_plan`.

    Raises:
        ArgumentError: too many ids for one batch.

    Example:
        >>> plan = make_joint_plan(np.array([7, 3, 7, 7]), np.array([0, 3, 4]))
        >>> plan.ids.tolist(), plan.inverse.tolist(), plan.rows.tolist()
        ([7, 3, 7], [0, 1, 0, 2], [0, 2, 3])
    """
    n = len(ids)
    check_count(n, (n,))
    positions, cuts = _cut(ids, bounds)
    workers = max(1, min(kernels.cpu.threads.get_threads(), n // WORKER_IDS, len(cuts) - 1))
    arrays, begins = plan_parts(ids, positions, cuts, workers)
    return JointPlan(*arrays, bounds, begins[cuts.searchsorted(bounds)])


def _cut(ids: Int64Array, bounds: Int64Array) -> tuple[np.ndarray, Int64Array]:
    """Return the positions of all ids, and the bounds of the parts to plan alone.

    A part is a table's batch. A batch that its own plan would partition by hash has a part for each partition: its ids
    are moved.
    """
    positions, cuts = counting(len(ids)), bounds
    for table in (bounds[1:] - bounds[:-1] > SMALL_BATCH).nonzero()[0].tolist():
        start, stop = bounds[table : table + 2].tolist()
        if not positions.flags.writeable:
            positions = buffers.copy(positions)
        own = ids[start:stop].view()
        own.flags.writeable = False  # as other batches are: kernels are compiled once
        part = partition(own, kernels.cpu.threads.get_threads())
        ids[start:stop], positions[start:stop] = part[0], part[1] + start
        cuts = np.union1d(cuts, part[2] + start)
    return positions, cuts


_counting = np.arange(1 << 12, dtype=np.int32)
_counting.flags.writeable = False


def counting(count: int) -> np.ndarray:
    """Return the numbers from 0 on, int32 (count,), read-only."""
    global _counting
    known = _counting
    if count > len(known):
        _counting = known = np.arange(2 * count, dtype=np.int32)
        known.flags.writeable = False
    return known[:count]


def plan_of_rows(
    ids: Int64Array, slots: Int64Array, epoch: int, may_miss: bool = True, rows: Sequence[int] = ()
) -> Plan:
    """Return a plan with each of `ids` once, in this order; the arrays become read-only.

    Without `may_miss`, no slot is -1.
    """
    starts = counting(len(ids) + 1)
    each = starts[:-1]
    missing = int(np.count_nonzero(slots < 0)) if may_miss else 0
    return Plan((len(ids),), ids, each, starts, each, slots, missing, epoch, rows=rows)
