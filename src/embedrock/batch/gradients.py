"""`RowGradients`: the gradients of a batch, summed to one per unique row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import Plan, bounds_of, merge_plans, plan_of_rows
from embedrock.batch.pooling import ONES, Bags, places_of, sum_bags
from embedrock.errors import ArgumentError
from embedrock.system.buffers import buffers

FLOAT32_MAX = float(np.finfo(np.float32).max)


class DefaultRowGradient(NamedTuple):
    """Gradient of the default row of a table: the sum over rows that are turned away, on all processes.

    Attributes:
        ids: int64 (n,), the turned-away rows of this process.
        values: float32 (1, dim); None: no process turns rows away.
    """

    ids: np.ndarray
    values: np.ndarray | None

    def scaled(self, factor: float) -> DefaultRowGradient:
        if self.values is None:
            return self
        with np.errstate(over="ignore"):
            return self._replace(values=np.nan_to_num(self.values * np.float32(factor)))


@dataclass(eq=False)
class RowGradients:
    """One gradient for each unique row of a plan, of one table or several: an immutable value.

    Attributes:
        plan: plan of the batch; its ``ids`` are the rows.
        values: float32 (unique, dim).
        square_norm: sum of squares of all values, in float64; NaN or Inf exactly where a value is.
        squares: `square_norm` of each table; empty for one.
        whole, number: the gradients of several tables of which `of` has taken these, and the index of the table.
        scaled_to: number to which outside code has scaled `shown`; None: it has not.
        spare: numbers on a device for outside code: none.
        of_default: the gradient of the default row, if rows of other processes train it, too.

    Example:
        >>> import numpy as np, embedrock as er
        >>> table = er.Table(rows=10, dim=1, rule=er.SGD(lr=1.0), init=er.Zeros())
        >>> grads = table.sum(table.plan([7, 3, 7]), np.ones((3, 1), np.float32))
        >>> grads.plan.ids.tolist(), grads.values.tolist()
        ([7, 3], [[2.0], [1.0]])
        >>> table.step(grads)
    """

    plan: Plan
    values: np.ndarray
    square_norm: float
    squares: Sequence[float] = ()
    whole: RowGradients | None = None
    number: int = 0
    scaled_to: float | None = None
    of_default: DefaultRowGradient | None = None
    spare = ()
    executor, is_current = None, True  # the CPU has the rows

    @property
    def count_of_tables(self) -> int:
        return len(self.squares) or 1

    @staticmethod
    def sum(plan: Plan, grads: np.ndarray) -> RowGradients:
        """Sum gradients float32 (n, dim) of a batch's positions by id, in order of occurrence."""
        given = np.ascontiguousarray(grads, np.float32)
        values, squares = sum_bags(plan, places_of((given,)), given.shape[1], None, Bags.of_rows(plan), ONES)
        return RowGradients(plan, values, squares.item())

    @staticmethod
    def of_rows(plan: Plan, values: np.ndarray) -> RowGradients:
        """Wrap gradients float32 (unique, dim) that are summed already."""
        squares = np.empty(len(values), np.float64)
        kernels.cpu.launch(kernels.cpu.rows.row_squares, values, squares)
        return RowGradients(plan, values, float(np.add.reduce(squares)))

    def of(self, table: int) -> RowGradients:
        """Return the gradients of one table. They are sliced at first use: a step of all tables needs no slices."""
        if len(self.squares) < 2:
            return self
        part = object.__new__(RowGradients)
        vars(part).update(whole=self, number=table, square_norm=self.squares[table])
        return part

    def __getattr__(self, name: str) -> Any:
        if self.whole is None or name not in ("plan", "values"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        vars(self)["plan"], vars(self)["values"] = self.whole._slice(self.number, self.number + 1)
        return vars(self)[name]

    def _slice(self, first: int, last: int) -> tuple[Plan, np.ndarray]:
        """Return the rows of the tables from `first` to `last`, and their gradients."""
        plan, bounds = self.plan, self.plan.rows[first : last + 1]
        own = slice(*bounds[[0, -1]].tolist())
        sliced = plan_of_rows(plan.ids[own], plan.slots[own], plan.epoch, bounds - bounds[0], plan.missing > 0)
        vars(sliced)["whole"] = plan.ids
        return sliced, self.values[own]

    def run_of(self, first: int, last: int) -> RowGradients:
        """Return the gradients of the tables from `first` to `last`, without a copy."""
        if last - first == len(self.squares):
            return self
        squares = self.squares[first:last]
        return RowGradients(*self._slice(first, last), sum(squares), squares)

    @property
    def norm(self) -> float:
        return math.sqrt(self.square_norm)

    @property
    def shown(self) -> float:
        """Norm that outside code sees, a float32; Inf if an element is not finite. Scaling it scales the gradients."""
        return shown_for(self.norm) if self.scaled_to is None else self.scaled_to

    @property
    def is_finite(self) -> bool:
        return self.square_norm < math.inf

    def has_width(self, dim: int) -> bool:
        """Return whether `values` is float32 with one row of `dim` columns for each row of the plan."""
        if self.whole is not None:
            return self.whole.has_width(dim)
        return self.values.shape == (len(self.plan.ids), dim) and self.values.dtype == np.float32

    def nonfinite_ids(self) -> np.ndarray:
        return self.plan.ids[~np.isfinite(self.values).all(axis=1)]

    @staticmethod
    def sum_of(parts: Sequence[RowGradients]) -> RowGradients:
        """Sum one or more gradients of a table. A row that occurs in several is summed in their order."""
        if len(parts) == 1:
            return parts[0]
        return RowGradients.sum_parts(merge_plans([part.plan for part in parts]), [part.values for part in parts])

    @staticmethod
    def sum_parts(plan: Plan, parts: Sequence[np.ndarray]) -> RowGradients:
        """Sum gradients of a batch's positions that lie in several arrays, one after the other: float32 (n, dim)."""
        bags = Bags.of_rows(plan)._replace(
            bounds=bounds_of([len(part) for part in parts]), own=np.array([0, len(parts)])
        )
        values, squares = sum_bags(plan, places_of(parts), parts[0].shape[1], None, bags, ONES)
        return RowGradients(plan, values, squares.item())

    def merge(self, other: RowGradients) -> RowGradients:
        """Return the sum of both. In a row of both, this one's gradient comes first.

        Args:
            other: gradients of the same table.
        """
        return RowGradients.sum_of([self, other])

    def scaled(self, factor: float, clip_value: float | None = None) -> RowGradients:
        """Return all values times `factor`, then clamped to ``[-clip_value, clip_value]``.

        Args:
            factor: factor of every value.
            clip_value: largest absolute value; None: no limit.

        Raises:
            ArgumentError: `clip_value` is not above 0.
        """
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
        plan = self.plan
        slots = plan.slots[rows] if plan.slots.size else plan.slots  # not known yet
        return RowGradients.of_rows(plan_of_rows(plan.ids[rows], slots, plan.epoch), self.values[rows])

    def with_values(self, values: np.ndarray) -> RowGradients:
        return RowGradients.of_rows(self.plan, values)

    # ------------------------------------------------------------ for outside code

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows, int64 (unique,)."""
        return self.plan.ids

    def rescaled_by(self, number: Any) -> Self | None:
        """Return the gradients, scaled as outside code scaled `shown` to get `number`; None if the factor is zero."""
        shown = number.item()
        if shown == self.shown:
            return self
        if shown == 0.0:
            return None
        # Any factor keeps zero gradients at zero, but must not hide a number that is not finite.
        return self._rescaled(shown / self.shown if self.shown else shown, shown)

    def _rescaled(self, factor: float, shown: float) -> Any:
        return replace(self.scaled(factor), scaled_to=shown)

    def clipped(self, clip_value: float | None) -> RowGradients:
        """Return gradients for a step, with every element clamped to ``[-clip_value, clip_value]``."""
        return self.scaled(1.0, clip_value)

    def vector_norm(self, order: float) -> float:
        """Return the norm of any order from 0 to Inf of all elements, as `torch.linalg.vector_norm` does."""
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(self.values, dtype=np.float64)
            if order == 0:
                return float(np.count_nonzero(sizes))
            if order == math.inf:
                return float(sizes.max(initial=0.0))
            return float((sizes if order == 1 else sizes**order).sum() ** (1.0 / order))

    def clamped(self, low: float | None, high: float | None) -> RowGradients:
        """Return gradients with every element clamped to ``[low, high]``. The interval contains 0."""
        return self.with_values(np.clip(self.values, low, high))

    def growth_since(self, earlier: RowGradients | None) -> float:
        """Return the growth of `shown` over that of earlier gradients, which these gradients contain."""
        if earlier is None:
            return self.shown
        return self.shown - earlier.shown if math.isfinite(earlier.shown) else 0.0


def shown_for(norm: float) -> float:
    """Return a norm as a float32; Inf for larger ones, and for NaN."""
    return float(np.float32(norm)) if norm <= FLOAT32_MAX else math.inf  # comparisons with NaN are false


UNIT_BITS = 30


def largest_of(values: np.ndarray) -> float:
    """Return the largest size of an element; -1 without elements."""
    return float(np.abs(values).max(initial=-1.0))


def counted_in_units(values: np.ndarray, largest: float) -> np.ndarray:
    """Return the sum of gradients float32 (n, dim) as a number of units, float64 (dim,).

    A unit is about 2**-30 of `largest`, the largest size of all gradients that will be added. Each is rounded to units
    first. So the sums are exact up to 2**23 rows, and do not depend on an order.

    Example:
        >>> one, other = np.float32([[0.1], [0.7]]), np.float32([[-0.3]])
        >>> parts = counted_in_units(one, 0.7) + counted_in_units(other, 0.7)
        >>> bool(parts == counted_in_units(np.concatenate([other, one]), 0.7)), sum_of_units(parts, 0.7).round(6)
        (True, array([[0.5]], dtype=float32))
    """
    return np.rint(values.astype(np.float64) / _unit(largest)).sum(axis=0)


def sum_of_units(units: np.ndarray, largest: float) -> np.ndarray:
    """Return a sum of `counted_in_units`, float32 (1, dim), finite: at most the largest float32."""
    return np.clip(units * _unit(largest), -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)[None]


def _unit(largest: float) -> float:
    return math.ldexp(1.0, math.frexp(largest)[1] - UNIT_BITS)


def as_one(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the gradients of several tables as one, without a copy if they were summed together.

    Example:
        >>> plan = plan_of_rows(np.arange(4), np.arange(4), 0, np.array([0, 1, 3, 4]))
        >>> whole = RowGradients(plan, np.ones((4, 2), np.float32), 8.0, [2.0, 4.0, 2.0])
        >>> parts = [whole.of(table) for table in range(3)]
        >>> as_one(parts) is whole, as_one(parts[1:]).plan.ids, as_one(parts[::2]).plan.rows
        (True, array([1, 2, 3]), array([0, 1, 2]))
    """
    run = parts[0] if len(parts) == 1 else _run_of(parts)
    if run is not None:
        return run
    plans = [part.plan for part in parts]
    epoch = plans[0].epoch if len({plan.epoch for plan in plans}) == 1 else -1
    ids, slots = (np.concatenate([getattr(plan, name) for plan in plans]) for name in ("ids", "slots"))
    rows = bounds_of(np.concatenate([plan.rows[1:] - plan.rows[:-1] for plan in plans]))
    plan = plan_of_rows(ids, slots, epoch, rows, any(plan.missing for plan in plans))
    return RowGradients(plan, np.concatenate([part.values for part in parts]), sum(part.square_norm for part in parts))


def _run_of(parts: Sequence[RowGradients]) -> RowGradients | None:
    """Return the gradients of neighbouring tables as they were summed; None if the parts do not fit."""
    whole, begin = parts[0].whole, parts[0].number
    for number, part in enumerate(parts, begin):
        if whole is None or part.whole is not whole or part.number != number:
            return None
    return None if whole is None else whole.run_of(begin, begin + len(parts))
