"""`CpuExecutor`: reads and steps rows of a table on the CPU; and the gradients of rows that ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.gradients import RowGradients, shown_for
from embedrock.batch.plan import Plan, make_plan
from embedrock.distributed.exchange import Exchange
from embedrock.distributed.owners import Placement, Replica
from embedrock.distributed.stages import GradientBlock
from embedrock.frontend.steps import judge_on_host
from embedrock.storage.table_lock import TableLock
from embedrock.table.table import Table, rows_of


@dataclass(eq=False)
class CpuExecutor:
    """`Executor` that reads and steps rows on the CPU.

    Attributes:
        table: the rows.
        planner: plans ids, and is told whether a step may follow; None: the table plans them.
        rows: returns the rows of a plan, float32 (unique, dim); None: the table reads them.
        sums_positions: gradients are `PositionGradients`.
    """

    table: Table
    planner: Callable[[np.ndarray, bool], Plan] | None = None
    rows: Callable[[Any], np.ndarray] | None = None
    sums_positions: bool = False

    is_current = True
    judge = staticmethod(judge_on_host)

    def is_used_on(self, device: torch.device) -> bool:
        return False

    @property
    def joins(self) -> TableLock | None:
        """Lock of the table, and of the others of its group; None for gradients by position, and for rows that other
        processes have, or that are averages.
        """
        return None if self.sums_positions or self.rows is not None else rows_of(self.table).table_lock

    def no_gradients(self) -> RowGradients:
        return RowGradients.sum(make_plan(np.empty(0, np.int64)), np.empty((0, self.table.dim), np.float32))

    def merge(self, earlier: RowGradients, later: RowGradients) -> RowGradients:
        return earlier.merge(later)

    def prepare(self, grads: RowGradients) -> None:
        self.table.check_step(grads)


def host_floats(grads: Tensor) -> np.ndarray:
    """Return the gradient of an output, of any dtype and on any device, as float32."""
    return grads.to("cpu", torch.float32).contiguous().numpy()


def host_grads(grads: Sequence[Tensor | None]) -> list[np.ndarray | None]:
    """Return gradients of outputs as float32, of any strides: where they lie, if they can be read there."""
    for own in grads:
        if own is not None and not (own.dtype is torch.float32 and own.is_cpu):
            break
    else:
        try:
            return [None if own is None else own.numpy() for own in grads]
        except RuntimeError:  # a negating view
            pass
    return [None if own is None else host_floats(own.resolve_neg()) for own in grads]


def host_weights(weights: Tensor | None) -> np.ndarray | None:
    """Return the positions' weights, of any dtype and on any device, as float32; None means ones."""
    return None if weights is None else host_floats(weights.detach())


SNAP = 2.0**-20  # relative to a power of two: possible loss when float32 numbers are averaged over ranks


@dataclass(eq=False, kw_only=True)
class SharedGradients(RowGradients):
    """Row gradients summed over ranks. Outside code sees the norm of their mean over all ranks.

    Attributes:
        factor: factor of the sums in a step: 1 / ranks, times all later scaling of `shown`. It is applied once.
        is_finite_everywhere: no rank has NaN or Inf.
        exchange: exchange with the other ranks.
        placement: placement of the rows of this rank.
    """

    factor: float
    is_finite_everywhere: bool
    exchange: Exchange
    placement: Placement

    @staticmethod
    def of_ranks(rows: RowGradients, square: float, exchange: Exchange, placement: Placement) -> SharedGradients:
        """Take sums, and their square norm over all ranks."""
        is_finite = math.isfinite(square)
        return SharedGradients(
            rows.plan,
            rows.values,
            rows.square_norm,
            scaled_to=shown_for(math.sqrt(square) / placement.ranks if is_finite else math.inf),
            factor=1.0 / placement.ranks,
            is_finite_everywhere=is_finite,
            exchange=exchange,
            placement=placement,
        )

    @property
    def sums(self) -> RowGradients:
        """Sums over ranks, scaled as `shown` was. Blocks of later backwards are added to them."""
        return self.scaled(self.factor * self.placement.ranks)

    def _rescaled(self, factor: float, shown: float) -> SharedGradients:
        return replace(self, scaled_to=shown, factor=self.factor * (_snapped(factor) if self.shown else factor))

    def clipped(self, clip_value: float | None) -> RowGradients:
        due = self.scaled(self.factor, clip_value)
        # So all ranks refuse or skip a step together.
        return due if self.is_finite_everywhere else RowGradients(due.plan, due.values, math.nan)

    def vector_norm(self, order: float) -> float:
        """Return the norm over all ranks. All ranks call it."""
        here = abs(self.factor) ** (order != 0) * super().vector_norm(order)
        if isinstance(self.placement, Replica):
            return here
        norms = self.exchange.numbers(f"a norm of order {order}", here)
        if order in (0, math.inf):
            return float(norms.sum() if order == 0 else norms.max())
        return float((norms**order).sum() ** (1.0 / order))

    def clamped(self, low: float | None, high: float | None) -> SharedGradients:
        """Return the gradients with every element of the mean clamped to ``[low, high]``. All ranks call it."""
        ranks = self.placement.ranks
        mean = self.scaled(self.factor)
        clamped = mean.with_values(np.clip(mean.values, low, high) * np.float32(ranks))
        squares = self.exchange.numbers("a clamp", clamped.square_norm)
        return SharedGradients.of_ranks(clamped, self.placement.total(squares), self.exchange, self.placement)


def _snapped(factor: float) -> float:
    """Return a factor, rounded to a power of two if it is close to one. The average of three equal numbers may be
    inexact.
    """
    if not math.isfinite(factor):
        return factor
    power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
    return power if abs(factor / power - 1.0) < SNAP else factor


@dataclass(eq=False, kw_only=True)
class PositionGradients(RowGradients):
    """Row gradients of this rank, with the gradients of positions that they sum.

    Attributes:
        lookups: gradients of the positions of each lookup, in the order of the backward.
    """

    lookups: tuple[GradientBlock, ...]

    @staticmethod
    def of_sums(sums: RowGradients, lookups: tuple[GradientBlock, ...]) -> PositionGradients:
        return PositionGradients(sums.plan, sums.values, sums.square_norm, lookups=lookups)

    def merge(self, other: RowGradients) -> PositionGradients:
        assert isinstance(other, PositionGradients)  # as the executor sums
        return PositionGradients.of_sums(super().merge(other), self.lookups + other.lookups)
