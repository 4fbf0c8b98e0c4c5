"""`RowGradients`: the gradients of a batch, summed to one per unique row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import Plan, bounds_of, make_plan, merge_plans, plan_of_rows
from embedrock.errors import ArgumentError
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned


@spanned("sum")
def sum_segments(plan: Plan, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum gradients float32 (n, dim) of a batch's positions by id, in order of occurrence.

    Returns:
        The sums, float32 (unique, dim), and the sum of squares of each, float64 (unique,).
    """
    values, squares = buffers.empty((len(plan.ids), grads.shape[1]), np.float32), np.empty(len(plan.ids), np.float64)
    kernels.cpu.launch(kernels.cpu.rows.sum_segments, grads, plan.starts, plan.order, values, squares)
    return values, squares


@dataclass(frozen=True, eq=False)
class RowGradients:
    """One gradient for each unique row of a plan.

    Attributes:
        plan: plan of the batch, of one table or of several; its ``ids`` are the rows.
        values: float32 (unique, dim).
        square_norm: sum of squares of all values, in float64; NaN or Inf exactly where a value is.
        squares: float64 (unique,), sum of squares of each row, if the plan is of several tables.
    """

    plan: Plan
    values: np.ndarray
    square_norm: float
    squares: np.ndarray | None = None

    @staticmethod
    def sum(plan: Plan, grads: np.ndarray) -> RowGradients:
        """Sum gradients float32 (n, dim) of a batch's positions by id, in order of occurrence."""
        values, squares = sum_segments(plan, grads)
        return RowGradients(plan, values, float(squares.sum()))

    @staticmethod
    def of_rows(plan: Plan, values: np.ndarray) -> RowGradients:
        """Wrap gradients float32 (unique, dim) that are summed already."""
        squares = np.empty(len(values), np.float64)
        kernels.cpu.launch(kernels.cpu.rows.row_squares, values, squares)
        return RowGradients(plan, values, float(squares.sum()))

    @property
    def norm(self) -> float:
        return math.sqrt(self.square_norm)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.square_norm)

    def has_width(self, dim: int) -> bool:
        """Return whether `values` is float32 with one row of `dim` columns for each row of the plan."""
        return self.values.shape == (len(self.plan.ids), dim) and self.values.dtype == np.float32

    def nonfinite_ids(self) -> np.ndarray:
        return self.plan.ids[~np.isfinite(self.values).all(axis=1)]

    @staticmethod
    def sum_of(parts: Sequence[RowGradients]) -> RowGradients:
        """Sum one or more gradients. A row that occurs in several is summed in their order."""
        if len(parts) == 1:
            return parts[0]
        plan = merge_plans([part.plan for part in parts])
        values = buffers.empty((len(plan.inverse), parts[0].values.shape[1]), np.float32)
        return RowGradients.sum(plan, np.concatenate([part.values for part in parts], out=values))

    def merge(self, other: RowGradients) -> RowGradients:
        """Return the sum of both. In a row of both, this one's gradient comes first."""
        return RowGradients.sum_of([self, other])

    def scaled(self, factor: float, clip_value: float | None = None) -> RowGradients:
        """Return all values times `factor`, then clamped to ``[-clip_value, clip_value]``."""
        if factor == 1.0 and clip_value is None:
            return self
        if clip_value is not None and not clip_value > 0:
            raise ArgumentError(f"`clip_value` must be a number > 0, or None: got {clip_value!r}.")
        with np.errstate(over="ignore", invalid="ignore"):
            values = buffers.empty(self.values.shape, np.float32)
            np.multiply(self.values, np.float32(factor), out=values)
        if clip_value is not None:
            np.clip(values, -clip_value, clip_value, out=values)
        elif abs(factor) <= 1 and math.frexp(factor)[0] in (0.5, -0.5):  # exact: squares need no new sum
            return RowGradients(self.plan, values, self.square_norm * factor * factor)
        return RowGradients.of_rows(self.plan, values)

    def kept(self, rows: np.ndarray) -> RowGradients:
        """Return the gradients of the rows selected by a mask, bool (unique,)."""
        if rows.all():
            return self
        return RowGradients.sum(make_plan(self.plan.ids[rows]), self.values[rows])  # the new plan has its own order

    def with_values(self, values: np.ndarray) -> RowGradients:
        return RowGradients.of_rows(self.plan, values)

    def of(self, table: int) -> RowGradients:
        """Return the gradients of one table of the plan."""
        if self.squares is None or len(self.plan.rows) == 2:
            return self
        return PartGradients(self, table, float(np.add.reduce(self.squares[self.plan.of(table)])))

    def run_of(self, first: int, last: int) -> RowGradients:
        """Return the gradients of the tables from `first` to `last`. The norm is not computed."""
        plan = self.plan
        start, stop = plan.rows[[first, last]].tolist()
        if (start, stop) == (0, len(plan.ids)):
            return self
        own = slice(start, stop)
        rows = plan.rows[first : last + 1] - start
        of_rows = plan_of_rows(plan.ids[own], plan.slots[own], plan.epoch, plan.missing > 0, rows)
        return RowGradients(of_rows, self.values[own], math.nan)


# -------------------------------------------------------------------- of several tables


class PartGradients(RowGradients):
    """The gradients of one table among several. Values are sliced at first use: a step of all tables needs no slices.

    Args:
        joint: gradients of all tables.
        number: index of the table.
        square_norm: see `RowGradients`.
    """

    joint: RowGradients
    number: int

    def __init__(self, joint: RowGradients, number: int, square_norm: float) -> None:
        vars(self).update(joint=joint, number=number, square_norm=square_norm)  # the dataclass is frozen

    def __getattr__(self, name: str) -> Any:
        if name not in ("plan", "values"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        plan = self.joint.plan
        own = plan.of(self.number)
        of_rows = plan_of_rows(plan.ids[own], plan.slots[own], plan.epoch, plan.missing > 0)
        vars(self).update(plan=of_rows, values=self.joint.values[own])
        return vars(self)[name]

    def has_width(self, dim: int) -> bool:
        return self.joint.values.shape[1] == dim


def as_one(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the gradients of several tables as one, without a copy if they were summed together.

    Example:
        >>> ids = np.arange(4)
        >>> plan = plan_of_rows(ids, ids, 0, rows=np.array([0, 1, 3, 4]))
        >>> joint = RowGradients(plan, np.ones((4, 2), np.float32), 8.0, np.full(4, 2.0))
        >>> parts = [joint.of(table) for table in range(3)]
        >>> as_one(parts) is joint, as_one(parts[1:]).plan.ids, as_one(parts[::2]).plan.rows
        (True, array([1, 2, 3]), array([0, 1, 2]))
    """
    if len(parts) == 1:
        return parts[0]
    if (run := _run_of(parts)) is not None:
        return run
    plans = [part.plan for part in parts]
    epoch = plans[0].epoch if len({plan.epoch for plan in plans}) == 1 else -1
    ids, slots = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("ids", "slots"))
    sizes = np.concatenate([plan.rows[1:] - plan.rows[:-1] for plan in plans])
    plan = plan_of_rows(ids, slots, epoch, rows=bounds_of(sizes))
    return RowGradients(plan, np.concatenate([part.values for part in parts]), math.nan)


def _run_of(parts: Sequence[RowGradients]) -> RowGradients | None:
    """Return the gradients of neighbouring tables as they were summed; None if the parts do not fit."""
    first = parts[0]
    if not isinstance(first, PartGradients):
        return None
    joint, begin = first.joint, first.number
    for number, part in enumerate(parts, begin):
        if not isinstance(part, PartGradients) or part.joint is not joint or part.number != number:
            return None
    return joint.run_of(begin, begin + len(parts))


def rejoined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays; without a copy if they are neighbouring slices of one array along its first axis."""
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
