"""`SharedGradients`: gradients of rows that several processes share, as one of them has them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from embedrock.batch.gradients import RowGradients
from embedrock.shards.exchange import Exchange, ExchangeVerdict
from embedrock.shards.owners import Placement, Replica
from embedrock.torch.training.host_side import FLOAT32_MAX, HostGradients

SNAP = 2.0**-20  # of a power of two: what averaging a number over ranks may lose in float32


@dataclass(frozen=True, eq=False)
class SharedGradients(HostGradients):
    """Row gradients, summed over ranks, and the number that stands for their mean on all of them.

    Attributes:
        factor: what the sums are multiplied by, once, when they are stepped: 1 / ranks, times what was done to `shown`.
        is_finite_everywhere: no rank has NaN or Inf.
        exchange: with the other ranks.
        placement: which rows are here.
    """

    factor: float
    is_finite_everywhere: bool
    exchange: Exchange
    placement: Placement

    @staticmethod
    def of_ranks(verdict: ExchangeVerdict, exchange: Exchange, placement: Placement) -> SharedGradients:
        """Take what an exchange has brought."""
        rows, square = verdict
        norm = math.sqrt(square) / placement.ranks if math.isfinite(square) else math.inf
        shown = float(np.float32(norm)) if norm <= FLOAT32_MAX else math.inf
        return SharedGradients(rows, shown, 1.0 / placement.ranks, math.isfinite(square), exchange, placement)

    @property
    def sums(self) -> RowGradients:
        """What blocks of later backwards are added to: sums over ranks, scaled as the number was."""
        return self.rows.scaled(self.factor * self.placement.ranks)

    def rescaled_by(self, number: Tensor) -> SharedGradients | None:
        """Return them scaled as `shown` was by whoever made it `number`; None where that zeroed them."""
        shown = number.item()
        if shown == self.shown:
            return self
        if shown == 0.0:
            return None
        factor = _snapped(shown / self.shown) if self.shown else shown
        return replace(self, shown=shown, factor=self.factor * factor)

    def clipped(self, clip_value: float | None) -> RowGradients:
        """Return them as they are stepped, every element clamped to ``[-clip_value, clip_value]``."""
        due = self.rows.scaled(self.factor, clip_value)
        # So that all ranks refuse a step, or leave it out, if one has to.
        return due if self.is_finite_everywhere else RowGradients(due.plan, due.values, math.nan)

    def vector_norm(self, order: float) -> float:
        """Return the norm of any order from 0 to Inf of all elements on all ranks. All of them ask for it."""
        here = abs(self.factor) ** (order != 0) * super().vector_norm(order)
        if isinstance(self.placement, Replica):
            return here
        norms = self.exchange.numbers(f"a norm of order {order}", here)
        if order in (0, math.inf):
            return float(norms.sum() if order == 0 else norms.max())
        return float((norms**order).sum() ** (1.0 / order))

    def clamped(self, low: float | None, high: float | None) -> SharedGradients:
        """Return them with every element of the mean clamped to ``[low, high]``. All ranks do so."""
        ranks = self.placement.ranks
        mean = self.rows.scaled(self.factor)
        clamped = mean.with_values(np.clip(mean.values, low, high) * np.float32(ranks))
        squares = self.exchange.numbers("a clamp", clamped.square_norm)
        verdict = ExchangeVerdict(clamped, self.placement.total(squares))
        return SharedGradients.of_ranks(verdict, self.exchange, self.placement)


def _snapped(factor: float) -> float:
    """Return a factor, or the power of two that it is but for rounding: an average of three equal numbers may be."""
    if not math.isfinite(factor):
        return factor
    power = math.copysign(2.0 ** round(math.log2(abs(factor))), factor)
    return power if abs(factor / power - 1.0) < SNAP else factor
