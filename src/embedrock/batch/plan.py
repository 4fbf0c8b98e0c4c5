"""The plan of a batch: its unique ids, the row of each position, and the positions of each row."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from embedrock import kernels
from embedrock.batch.ids import HASH_BITS
from embedrock.errors import ArgumentError
from embedrock.system.buffers import address_of, buffers
from embedrock.system.spans import spanned

MAX_IDS = 2**31 - 1
WORKER_IDS = 1 << 14  # fewest ids of several tables that are worth a thread, whose call takes 0.1 ms
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
# Direct-address tables, int64 (tables, 3), and a hash table, int64 (entries, 2), of `embedrock.storage.slot_index`, as
# kernels read them. Without an index both are empty.
SlotIndex = tuple[np.ndarray, np.ndarray]
NO_DIRECT, NO_ENTRIES = np.empty((0, 3), np.int64), np.empty((0, 2), np.int64)
NO_INDEX: SlotIndex = NO_DIRECT, NO_ENTRIES
LOWEST, HIGHEST = -(2**63), 2**63 - 1
_ANY = np.array([[0, 1, LOWEST, HIGHEST, 0]])  # a table of one source of any ids
_NONE, _IN_ORDER = np.empty(0, np.int64), np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Plan:
    """The plan of a batch of one table or several, an immutable value. All arrays become read-only.

    Rows and positions of a table are contiguous. The segments always exist although only a step needs them. They take a
    quarter of a plan's time (0.03 of 0.10 ms at 16,384 ids). A plan takes a tenth of a step's time. A value with lazy
    fields would not be immutable.

    Attributes:
        shape: shape of the given ids; of several tables (n,).
        ids: int64 (unique,), no id twice in a table. In order of first occurrence in batches of up to `SMALL_BATCH` ids
            of a table. Larger ones are ordered by partition (top bits of a fixed hash), and by first occurrence inside
            each.
        inverse: int32 (n,); ``ids[inverse]`` are the given ids, flattened.
        starts: int32 (unique + 1,); positions ``order[starts[k] : starts[k + 1]]`` hold ``ids[k]``.
        order: int32 (n,), all positions, grouped by id, in order of occurrence inside a segment.
        slots: int64 (unique,), slots of the rows by the table's slot index, -1 for none; empty if unknown.
        missing: number of -1 in `slots`.
        epoch: generation of the slots, -1 for none.
        parts: the merged plans, see `merge_plans`; empty if nothing was merged.
        rows: int64 (tables + 1,), where the unique rows of each table begin.
        positions: int64 (tables + 1,), where its positions begin.
        whole: ids of the plan of which this is a slice. They live until the batch is done: see `TableState.last_read`.

    Example:
        >>> import embedrock as er
        >>> plan = er.Table(rows=10, dim=4).plan([7, 3, 7])
        >>> plan.ids.tolist(), plan.inverse.tolist()
        ([7, 3], [0, 1, 0])
    """

    shape: tuple[int, ...]
    ids: Int64Array
    inverse: Int32Array
    starts: Int32Array
    order: Int32Array
    slots: Int64Array = field(default_factory=lambda: _NONE)
    missing: int = 0
    epoch: int = -1
    parts: tuple[Plan, ...] = ()
    rows: Int64Array = field(default_factory=lambda: _NONE)
    positions: Int64Array = field(default_factory=lambda: _NONE)
    whole: Int64Array | None = None

    @property
    def nbytes(self) -> int:
        return sum([each.nbytes for each in (self.ids, self.inverse, self.starts, self.order, self.slots)])

    def __post_init__(self) -> None:
        for array in (self.ids, self.inverse, self.starts, self.order, self.slots):
            array.setflags(write=False)  # quicker than array.flags
        if not len(self.rows):  # of one table
            vars(self).update(rows=np.array([0, len(self.ids)]), positions=np.array([0, len(self.inverse)]))
        self.rows.setflags(write=False)

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """Return a plan of arrays that are read-only already, in a fifth of the time; `fields` are all but `parts`."""
        plan = object.__new__(cls)
        plan.__dict__.update(fields)  # `parts` is the class's
        return plan

    def of(self, table: int) -> slice:
        """Return where the rows of a table are."""
        return slice(int(self.rows[table]), int(self.rows[table + 1]))

    def with_slots(self, slots: Int64Array, epoch: int) -> Plan:
        """Return the plan with the slots of an epoch."""
        if slots is self.slots and epoch == self.epoch:
            return self
        slots.setflags(write=False)
        plan = Plan.made(**vars(self))
        vars(plan).update(slots=slots, missing=int((slots < 0).sum()), epoch=epoch)
        return plan

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


def make_plan(ids: Int64Array, index: SlotIndex = NO_INDEX, epoch: int = -1) -> Plan:
    """Plan a batch of one table. The result is a pure function of the ids: the number of threads changes no bit.

    Args:
        ids: int64, any shape, any values, at most 2**31 - 1 of them, with repeats.
        index: slot index, which fills in the slots of the unique ids.
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
    check_count(ids.size, ids.shape)
    return _plan_one([as_source(ids)], ids.shape, index, epoch)


def _plan_one(ids: Sequence[Int64Array], shape: tuple[int, ...], index: SlotIndex = NO_INDEX, epoch: int = -1) -> Plan:
    table = _ANY if len(ids) == 1 else np.array([[0, len(ids), LOWEST, HIGHEST, 0]])
    plan = plan_tables(sources_of(ids), table, np.array([0, math.prod(shape)]), index, epoch, shape)
    assert plan is not None  # all int64 are in range
    return plan


@spanned("plan")
def plan_tables(
    sources: Int64Array,
    tables: Int64Array,
    positions: Int64Array,
    index: SlotIndex = NO_INDEX,
    epoch: int = -1,
    shape: tuple[int, ...] | None = None,
) -> Plan | None:
    """Plan one batch of several tables; return None if an id lies outside its table.

    Args:
        sources: int64 (features, 2), address and number of the ids of each feature, of one table after the other: see
            `sources_of`.
        tables: int64 (tables, 5), of each table its first source, one past its last one, its lowest and its highest id,
            and the index's key of id 0.
        positions: int64 (tables + 1,), where the ids of each table begin.
        index: slot index, which fills in the slots of the unique ids.
        epoch: generation of the slots.
        shape: of the ids; None: (n,).

    Raises:
        ArgumentError: too many ids for one batch.

    Example:
        >>> ids = [np.array([7, 3, 7]), np.array([7])]
        >>> tables = np.array([[0, 1, 0, 9, 0], [1, 2, 0, 9, 0]])
        >>> plan = plan_tables(sources_of(ids), tables, np.array([0, 3, 4]))
        >>> plan.ids.tolist(), plan.inverse.tolist(), plan.rows.tolist()
        ([7, 3, 7], [0, 1, 0, 2], [0, 2, 3])
    """
    n = int(positions[-1])
    shape = (n,) if shape is None else shape
    if n > MAX_IDS:
        check_count(n, shape)
    threads = kernels.cpu.threads.get_threads()
    if n <= SMALL_BATCH:
        alone = n < 2 * WORKER_IDS or threads <= 2 or len(tables) == 1  # a thread may still be at the step before
    else:
        alone = threads == 1 and int((positions[1:] - positions[:-1]).max()) <= SMALL_BATCH
    planned = _planned_at_once if alone else _planned_by_parts
    return planned(sources, tables, positions, index, epoch, shape)


def by_owner(ids: Int64Array, ranks: int, bits: int = HASH_BITS) -> tuple[Int32Array | None, list[int]]:
    """Group the positions of ids, int64 (n,), by owner, in order of occurrence: see `owners`.

    Returns:
        The positions, None if they are grouped already, and where those of each owner begin and the last ones end.

    Example:
        >>> order, bounds = by_owner(np.array([4, 1, 5]), ranks=2)  # 1 is rank 1's
        >>> order.tolist(), bounds
        ([0, 2, 1], [0, 2, 3])
    """
    order, bounds = np.empty(ids.size, np.int32), np.empty(ranks + 1, np.int64)
    is_grouped = kernels.cpu.launch(kernels.cpu.plan.by_owner, as_source(ids), ranks, bits, order, bounds)
    return None if is_grouped else order, bounds.tolist()


def owned(ids: Int64Array, rank: int, ranks: int, bits: int = HASH_BITS) -> npt.NDArray[np.bool_]:
    """Return which ids, int64 (n,), a rank owns: see `owners`."""
    here = np.empty(ids.size, np.bool_)
    kernels.cpu.launch(kernels.cpu.plan.owned, as_source(ids), rank, ranks, bits, here)
    return here


def moved(plan: Plan, moves: Int32Array) -> dict[str, np.ndarray]:
    """Return the arrays of a plan whose rows are in another order: row k is row ``moves[k]`` of `plan`.

    Example:
        >>> found = moved(make_plan(np.array([4, 1, 5, 1])), np.array([0, 2, 1], np.int32))
        >>> {name: array.tolist() for name, array in found.items()}
        {'ids': [4, 5, 1], 'inverse': [0, 2, 1, 2], 'starts': [0, 1, 2, 4], 'order': [0, 2, 1, 3]}
    """
    count, n, cpu = plan.ids.size, plan.inverse.size, kernels.cpu
    block, places = buffers.empty((3 * count + 1 + 2 * n,), np.int32), _scratch.take("places", count, np.int32)
    starts, positions = block[2 * count : 3 * count + 1], block[3 * count + 1 :]
    new = block[: 2 * count].view(np.int64), positions[:n], starts, positions[n:]
    cpu.launch(cpu.plan.move_rows, moves, places, plan.ids, plan.inverse, plan.starts, plan.order, *new)
    for each in new:
        each.setflags(write=False)
    return dict(zip(("ids", "inverse", "starts", "order"), new, strict=True))


def sources_of(ids: Sequence[Int64Array]) -> Int64Array:
    """Return the addresses and numbers of ids, each int64, C-contiguous and aligned. The caller keeps them alive."""
    objects = np.fromiter(map(id, ids), np.int64)
    found = np.empty((objects.size, 2), np.int64)
    kernels.cpu.addresses.read_sources(objects, found)
    return found


def as_source(ids: Int64Array) -> Int64Array:
    """Return ids as kernels read them, by their address: a copy, if they are not C-contiguous and aligned."""
    flat = np.ascontiguousarray(ids, np.int64)
    return flat if flat.flags.aligned else flat.copy()


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
    ids, epoch = [plan.ids for plan in plans], plans[0].epoch
    merged = _plan_one(ids, (sum(map(len, ids)),))
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
    return 1 << ((2 * ids - 1).bit_length() or 1)


def _planned_at_once(
    sources: Int64Array,
    tables: Int64Array,
    positions: Int64Array,
    index: SlotIndex,
    epoch: int,
    shape: tuple[int, ...],
) -> Plan | None:
    """Do `plan_tables` by one call, on this thread, into one block of memory."""
    n, begin, cpu = int(positions[-1]), len(tables) + 1, kernels.cpu
    block = buffers.empty((begin + 2 * n + (3 * n + 2) // 2,), np.int64)
    hashes = _scratch.take("hashes", table_size(n), np.int32)
    count, missing = cpu.launch(cpu.plan.plan_tables, sources, tables, *index, SEED, hashes, block)
    if count < 0:
        return None
    block.setflags(write=False)
    small = block[begin + 2 * n :].view(np.int32)
    return Plan.made(
        shape=shape,
        ids=block[begin : begin + count],
        inverse=small[:n],
        starts=small[2 * n : 2 * n + count + 1],
        order=small[n : 2 * n],
        slots=_NONE if index is NO_INDEX else block[begin + n : begin + n + count],
        missing=missing,
        epoch=epoch,
        rows=block[:begin],
        positions=positions,
    )


def _planned_by_parts(
    sources: Int64Array,
    tables: Int64Array,
    positions: Int64Array,
    index: SlotIndex,
    epoch: int,
    shape: tuple[int, ...],
) -> Plan | None:
    """Do `plan_tables` by parts, on all threads. A part is a table's batch, or a partition of a large one."""
    n, cpu, launch = int(positions[-1]), kernels.cpu.plan, kernels.cpu.launch
    keys = _scratch.take("keys", n, np.int64)
    sources, parts, moved, bounds = _cut(sources, tables, positions, keys)
    workers = max(1, min(kernels.cpu.threads.get_threads(), n // WORKER_IDS, len(parts)))
    size = table_size(int((bounds[1:] - bounds[:-1]).max()))
    shares = min(len(parts), workers * SHARES) if workers > 1 else 1
    hashes = _scratch.take("hashes", shares * size, np.int32).reshape(shares, size)
    local, all_starts = _scratch.take("local", n, np.int32), _scratch.take("starts", n + len(parts), np.int32)
    found = _scratch.take("slots", 0 if index is NO_INDEX else n, np.int64)
    counts, order = np.zeros((2, len(parts)), np.int64), buffers.empty((n,), np.int32)
    args = sources, parts, moved, bounds, *index, SEED, hashes, keys, found, local, all_starts, order, counts
    launch(cpu.group, *args)
    if np.minimum.reduce(counts[0]) < 0:
        return None

    bases = bounds_of(counts[0])
    ids, inverse = buffers.empty((int(bases[-1]),), np.int64), buffers.empty((n,), np.int32)
    starts, slots = buffers.empty((len(ids) + 1,), np.int32), buffers.empty((min(len(ids), len(found)),), np.int64)
    starts[-1] = n
    launch(cpu.collect, keys, found, moved, bounds, bases, local, all_starts, inverse, ids, slots, starts)
    rows, missing = bases[bounds.searchsorted(positions)], int(np.add.reduce(counts[1]))
    return Plan(shape, ids, inverse, starts, order, slots, missing, epoch, (), rows, positions)


def _cut(
    sources: Int64Array, tables: Int64Array, bounds: Int64Array, keys: Int64Array
) -> tuple[Int64Array, Int64Array, Int32Array, Int64Array]:
    """Return the sources, the parts to plan alone, the positions of the ids if they move, and the bounds of the parts.

    A part is a row of `tables`. A batch that its own plan would partition by hash has a part for each partition, whose
    ids move to `keys`.
    """
    sizes, cuts = bounds[1:] - bounds[:-1], [bounds]
    if not (sizes > SMALL_BATCH).any():
        return sources, tables, _IN_ORDER, bounds
    moved = _scratch.take("positions", len(keys), np.int32)
    for table, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        if stop - start > SMALL_BATCH:
            own = sources[tables[table, 0] : tables[table, 1]]
            cuts.append(_partition(own, keys[start:stop], moved[start:stop]) + start)
            moved[start:stop] += start
        else:
            moved[start:stop] = np.arange(start, stop)
    ends = np.unique(np.concatenate(cuts))
    of = bounds.searchsorted(ends[:-1], side="right") - 1
    parts, is_cut = tables[of], sizes[of] > SMALL_BATCH
    made = np.stack([address_of(keys) + ends[:-1] * keys.itemsize, np.diff(ends)], axis=1)[is_cut]
    parts[is_cut, 0] = len(sources) + np.arange(len(made))
    parts[is_cut, 1] = parts[is_cut, 0] + 1
    return np.concatenate([sources, made]), parts, moved, ends


def _partition(sources: Int64Array, keys: Int64Array, positions: Int32Array) -> Int64Array:
    """Write the ids in the order of their partitions, and their positions; return the partitions' bounds."""
    n, cpu, launch, workers = len(keys), kernels.cpu.plan, kernels.cpu.launch, kernels.cpu.threads.get_threads()
    # A function of n alone: partitions are visible in the plan, but chunks (one for each worker) are not.
    partitions = min(1 << (n // PARTITION_IDS).bit_length(), MAX_PARTITIONS)
    counts = np.empty((workers, partitions), np.int64)
    launch(cpu.count_partitions, sources, counts)
    cursors = np.ascontiguousarray(bounds_of(counts.T)[:-1].reshape(partitions, workers).T)
    launch(cpu.partition, sources, cursors, keys, positions)
    return bounds_of(counts.sum(axis=0))


def bounds_of(sizes: Sequence[int] | np.ndarray) -> Int64Array:
    """Return where parts of these sizes begin, one after the other, and where the last one ends."""
    parts = np.asarray(sizes, np.int64).reshape(-1)
    bounds = np.zeros(parts.size + 1, np.int64)
    np.add.accumulate(parts, out=bounds[1:])
    return bounds


KEPT_NUMBERS = 1 << 20  # 8 MB
_counting = np.arange(1 << 12, dtype=np.int32)
_counting.flags.writeable = False


def counting(count: int) -> np.ndarray:
    """Return the numbers from 0 on, int32 (count,), read-only."""
    global _counting
    known = _counting
    if count > len(known):
        known = np.arange(2 * count if count <= KEPT_NUMBERS else count, dtype=np.int32)
        known.flags.writeable = False
        _counting = known if count <= KEPT_NUMBERS else _counting
    return known[:count]


def plan_of_rows(
    ids: Int64Array, slots: Int64Array, epoch: int, rows: Int64Array = _NONE, may_miss: bool = True
) -> Plan:
    """Return a plan with each of `ids` once, in this order; the arrays become read-only.

    `rows` is where those of each table begin, if there are several. Without `may_miss`, no slot is -1.
    """
    starts = counting(len(ids) + 1)
    each = starts[:-1]
    missing = int(np.count_nonzero(slots < 0)) if may_miss else 0
    return Plan((len(ids),), ids, each, starts, each, slots, missing, epoch, (), rows, rows)
