"""`JointPlan`: one plan for the ids of several tables, each of which finds in it what its own plan would be.

`JointGradients`: the same of their rows' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import SMALL_BATCH, Int64Array, Plan, check_count, partition, plan_parts
from embedrock.machine.buffers import buffers
from embedrock.process.spans import spanned

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


def joined_ids(ids: Sequence[np.ndarray]) -> Int64Array:
    """Return a copy of int64 ids of any shapes, one after the other, for `make_joint_plan` to use up."""
    out = buffers.empty((sum([each.size for each in ids]),), np.int64)
    return np.concatenate([each.reshape(-1) for each in ids], out=out) if ids else out


@spanned("plan")
def make_joint_plan(ids: Int64Array, bounds: Int64Array) -> JointPlan:
    """Decide what a batch needs of several tables.

    Args:
        ids: int64 (n,), those of each table, one after the other. They are overwritten.
        bounds: int64 (tables + 1,), where those of each table begin.

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
    return JointPlan(*arrays, bounds, begins[np.searchsorted(cuts, bounds)])


def _cut(ids: Int64Array, bounds: Int64Array) -> tuple[np.ndarray, Int64Array]:
    """Return the positions of all ids, and the bounds of the parts that are planned alone.

    A part is a table's batch or, of a batch that its own plan would cut by hash, a partition of it: the ids are moved.
    """
    positions, cuts = counting(len(ids)), bounds
    for table in np.flatnonzero(bounds[1:] - bounds[:-1] > SMALL_BATCH).tolist():
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


def plan_of_rows(ids: Int64Array, slots: Int64Array, epoch: int, may_miss: bool = True) -> Plan:
    """Return the plan of a batch in which each of `ids` is once, in this order; the arrays become read-only.

    Args:
        ids: of the rows.
        slots, epoch: see `Plan`.
        may_miss: whether there may be slots that are -1.
    """
    starts = counting(len(ids) + 1)
    each = starts[:-1]
    missing = int(np.count_nonzero(slots < 0)) if may_miss else 0
    return Plan((len(ids),), ids, each, starts, each, slots, missing, epoch)


@dataclass(eq=False)
class JointGradients:
    """The gradients of the rows of several tables, summed to one for each row, those of one table after another's.

    Attributes:
        ids, slots, epoch: of the rows, as in `Plan`.
        may_miss: whether there may be slots that are -1.
        values: float32 (unique, dim).
        rows: where the rows of each table begin, and where the last ones end.
    """

    ids: Int64Array
    slots: Int64Array
    epoch: int
    may_miss: bool
    values: np.ndarray
    rows: list[int]

    def run_of(self, first: int, last: int) -> JointGradients:
        """Return those of the tables from `first` to `last`."""
        start, stop = self.rows[first], self.rows[last]
        if (start, stop) == (0, len(self.ids)):
            return self
        own = slice(start, stop)
        rows = [row - start for row in self.rows[first : last + 1]]
        return JointGradients(self.ids[own], self.slots[own], self.epoch, self.may_miss, self.values[own], rows)


class PartGradients(RowGradients):
    """Those of one table among several. What nobody asks for is not cut out of them: a step of all needs no parts.

    Args:
        joint: of all tables.
        number: of the table.
        square_norm: see `RowGradients`.
    """

    joint: JointGradients
    number: int

    def __init__(self, joint: JointGradients, number: int, square_norm: float) -> None:
        vars(self).update(joint=joint, number=number, square_norm=square_norm)  # as it is frozen

    def __getattr__(self, name: str) -> Any:
        if name not in ("plan", "values"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        joint, own = self.joint, slice(*self.joint.rows[self.number : self.number + 2])
        plan = plan_of_rows(joint.ids[own], joint.slots[own], joint.epoch, joint.may_miss)
        vars(self).update(plan=plan, values=joint.values[own])
        return vars(self)[name]

    def has_width(self, dim: int) -> bool:
        return self.joint.values.shape[1] == dim


def run_of(parts: Sequence[RowGradients]) -> JointGradients | None:
    """Return the gradients of several tables as they were summed, without a copy; None if they were not, or changed.

    Example:
        >>> rows = np.arange(4), np.arange(4), 0, False, np.ones((4, 2), np.float32)
        >>> joint = JointGradients(*rows, [0, 1, 3, 4])
        >>> parts = [PartGradients(joint, table, 1.0) for table in range(3)]
        >>> run_of(parts) is joint, run_of(parts[1:]).ids, run_of(parts[::2])
        (True, array([1, 2, 3]), None)
    """
    first = parts[0]
    if not isinstance(first, PartGradients):
        return None
    joint, begin = first.joint, first.number
    for number, part in enumerate(parts, begin):
        if not isinstance(part, PartGradients) or part.joint is not joint or part.number != number:
            return None
    return joint.run_of(begin, begin + len(parts))


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
