"""`JointPlan`: one plan for the ids of several tables, each of which finds in it what its own plan would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import SMALL_BATCH, Int64Array, Plan, bounds_of, check_count, partition, plan_parts

WORKER_IDS = 1 << 13  # fewest ids that are worth a thread


class JointPlan(NamedTuple):
    """What one batch of several tables needs. The rows of a table, and its positions, are one after the other.

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
        """Return where the rows of a table are."""
        return slice(int(self.rows[table]), int(self.rows[table + 1]))


def make_joint_plan(ids: Sequence[Int64Array]) -> JointPlan:
    """Decide what a batch needs of several tables.

    Args:
        ids: of each table, int64 (n,).

    Returns:
        A plan in which the ids of each table are in the order of its own `make_plan`.

    Raises:
        ArgumentError: too many ids for one batch.

    Example:
        >>> plan = make_joint_plan([np.array([7, 3, 7]), np.array([7])])
        >>> plan.ids.tolist(), plan.inverse.tolist(), plan.rows.tolist()
        ([7, 3, 7], [0, 1, 0, 2], [0, 2, 3])
    """
    bounds = bounds_of([len(each) for each in ids])
    n = int(bounds[-1])
    check_count(n, (n,))
    keys, positions, cuts = _cut(ids, bounds)
    workers = max(1, min(kernels.cpu.threads.get_threads(), n // WORKER_IDS, len(cuts) - 1))
    arrays, begins = plan_parts(keys, positions, cuts, workers)
    return JointPlan(*arrays, bounds, begins[np.searchsorted(cuts, bounds)])


def _cut(ids: Sequence[Int64Array], bounds: Int64Array) -> tuple[Int64Array, np.ndarray, Int64Array]:
    """Return all ids, their positions, and the bounds of the parts that are planned alone.

    A part is a table's batch or, of a batch that its own plan would cut by hash, a partition of it.
    """
    keys, positions, cuts = np.empty(bounds[-1], np.int64), np.arange(bounds[-1], dtype=np.int32), [bounds[:1]]
    for each, start, stop in zip(ids, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if stop - start <= SMALL_BATCH:
            keys[start:stop] = each
            cuts.append(np.array([stop]))
        else:
            part = partition(each, kernels.cpu.threads.get_threads())
            keys[start:stop], positions[start:stop] = part[0], part[1] + start
            cuts.append(part[2][1:] + start)
    return keys, positions, np.concatenate(cuts)


_counting = np.arange(1 << 12, dtype=np.int32)


def plan_of_rows(ids: Int64Array, slots: Int64Array, epoch: int, may_miss: bool = True) -> Plan:
    """Return the plan of a batch in which each of `ids` is once, in this order; the arrays become read-only.

    Args:
        ids: of the rows.
        slots, epoch: see `Plan`.
        may_miss: whether there may be slots that are -1.
    """
    global _counting
    counting = _counting
    if len(ids) >= len(counting):
        _counting = counting = np.arange(2 * len(ids), dtype=np.int32)
    each = counting[: len(ids)]
    missing = int(np.count_nonzero(slots < 0)) if may_miss else 0
    return Plan((len(ids),), ids, each, counting[: len(ids) + 1], each, slots, missing, epoch)


def rejoined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays as one: without a copy, where they are what one array was cut into along its first axis."""
    first = parts[0]
    if len(parts) == 1:
        return first
    end, whole = _address(first), first.base
    if not isinstance(whole, np.ndarray) or not (whole.flags.c_contiguous and first.flags.c_contiguous):
        return np.concatenate(parts)
    for part in parts:
        is_next = part.base is whole and part.strides == first.strides and part.shape[1:] == first.shape[1:]
        if not is_next or part.dtype != first.dtype or (len(part) and _address(part) != end):
            return np.concatenate(parts)
        end += part.nbytes
    return np.ndarray((sum(map(len, parts)), *first.shape[1:]), first.dtype, whole, _address(first) - _address(whole))


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
