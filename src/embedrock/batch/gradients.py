"""`RowGradients`: the gradients of a batch, summed to one for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import Plan, make_plan, merge_plans
from embedrock.errors import ArgumentError
from embedrock.machine.buffers import buffers
from embedrock.process.spans import spanned


class Segments(Protocol):
    """Which positions of a batch have which row: a plan."""

    @property
    def ids(self) -> np.ndarray:
        """int64 (unique,)."""
        ...

    @property
    def inverse(self) -> np.ndarray:
        """int32 (n,), which row each position has."""
        ...

    @property
    def starts(self) -> np.ndarray:
        """int32 (unique + 1,), where the positions of each row begin in `order`."""
        ...

    @property
    def order(self) -> np.ndarray:
        """int32 (n,), the positions, by row."""
        ...


@spanned("sum")
def sum_segments(plan: Segments, grads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum gradients float32 (n, dim) of a batch's positions, those of equal ids in order of occurrence.

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
        plan: its ``ids`` are the rows.
        values: float32 (unique, dim).
        square_norm: of all values together, in float64; NaN or Inf exactly where a value is.
    """

    plan: Plan
    values: np.ndarray
    square_norm: float

    @staticmethod
    def sum(plan: Plan, grads: np.ndarray) -> RowGradients:
        """Sum gradients float32 (n, dim) of a batch's positions, those of equal ids in order of occurrence."""
        values, squares = sum_segments(plan, grads)
        return RowGradients(plan, values, float(squares.sum()))

    @staticmethod
    def of_rows(plan: Plan, values: np.ndarray) -> RowGradients:
        """Take gradients float32 (unique, dim) that are summed already."""
        squares = np.empty(len(values), np.float64)
        kernels.cpu.launch(kernels.cpu.rows.row_squares, values, squares)
        return RowGradients(plan, values, float(squares.sum()))

    @property
    def norm(self) -> float:
        """L2 norm of all values together."""
        return math.sqrt(self.square_norm)

    @property
    def is_finite(self) -> bool:
        """Whether no value is NaN or Inf."""
        return math.isfinite(self.square_norm)

    def has_width(self, dim: int) -> bool:
        """Return whether there is a float32 row of so many columns for each of the plan's."""
        return self.values.shape == (len(self.plan.ids), dim) and self.values.dtype == np.float32

    def nonfinite_ids(self) -> np.ndarray:
        """Return the ids of rows with NaN or Inf."""
        return self.plan.ids[~np.isfinite(self.values).all(axis=1)]

    @staticmethod
    def sum_of(parts: Sequence[RowGradients]) -> RowGradients:
        """Sum several, one or more; in a row that more than one has, in their order."""
        if len(parts) == 1:
            return parts[0]
        plan = merge_plans([part.plan for part in parts])
        values = buffers.empty((len(plan.inverse), parts[0].values.shape[1]), np.float32)
        return RowGradients.sum(plan, np.concatenate([part.values for part in parts], out=values))

    def merge(self, other: RowGradients) -> RowGradients:
        """Return the sum of both; in a row that both have, this one's gradient comes first."""
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
        elif abs(factor) <= 1 and math.frexp(factor)[0] in (0.5, -0.5):  # exact: squares need not be summed again
            return RowGradients(self.plan, values, self.square_norm * factor * factor)
        return RowGradients.of_rows(self.plan, values)

    def without(self, row_id: int) -> RowGradients:
        """Return them without the row `row_id`."""
        return self.kept(self.plan.ids != row_id)

    def kept(self, rows: np.ndarray) -> RowGradients:
        """Return them for some of the rows only, bool (unique,)."""
        if rows.all():
            return self
        return RowGradients.sum(make_plan(self.plan.ids[rows]), self.values[rows])  # the new plan has its own order

    def with_values(self, values: np.ndarray) -> RowGradients:
        """Return other values for the same rows."""
        return RowGradients.of_rows(self.plan, values)
