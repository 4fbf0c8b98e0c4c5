"""`CpuExecutor`: reads and steps rows of a table on the CPU, for tensors on any device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan
from embedrock.batch.pooling import Bags
from embedrock.distributed.exchange import Exchange
from embedrock.distributed.owners import Placement, Replica
from embedrock.distributed.stages import GradientBlock
from embedrock.frontend.executor import ArrayExecutor
from embedrock.storage.table_lock import TableLock
from embedrock.table.table import rows_of

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class HostGradients:
    """Row gradients, with their norm for outside code.

    Attributes:
        rows: the gradients.
        shown: their L2 norm as a float32, Inf if an element is not finite. Later scaling is applied to it.
    """

    rows: RowGradients
    shown: float

    @staticmethod
    def of(grads: RowGradients, shown: float | None = None) -> HostGradients:
        """Wrap gradients. `shown` is their norm, computed if None."""
        return HostGradients(grads, _shown(grads.norm) if shown is None else shown)

    def row_ids(self) -> np.ndarray:
        return self.rows.plan.ids

    def rescaled_by(self, number: Tensor) -> HostGradients | None:
        shown = number.item()
        if shown == self.shown:
            return self
        if shown == 0.0:
            return None
        # Any factor keeps zero gradients at zero, but must not hide a number that is not finite.
        return self._scaled(shown / self.shown if self.shown else shown, shown)

    def _scaled(self, factor: float, shown: float) -> HostGradients:
        return HostGradients.of(self.rows.scaled(factor), shown)

    def clipped(self, clip_value: float | None) -> RowGradients:
        return self.rows.scaled(1.0, clip_value)

    def vector_norm(self, order: float) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(self.rows.values, dtype=np.float64)
            if order == 0:
                return float(np.count_nonzero(sizes))
            if order == math.inf:
                return float(sizes.max(initial=0.0))
            return float((sizes if order == 1 else sizes**order).sum() ** (1.0 / order))

    def clamped(self, low: float | None, high: float | None) -> HostGradients:
        return HostGradients.of(self.rows.with_values(np.clip(self.rows.values, low, high)))

    def nothing(self) -> None:
        """Return None: handles on the CPU have their own 0."""

    def instead_of(self, nothing: Tensor) -> None: ...

    def growth_since(self, earlier: HostGradients | None) -> float:
        if earlier is None:
            return self.shown
        return self.shown - earlier.shown if math.isfinite(earlier.shown) else 0.0


def _shown(norm: float) -> float:
    return float(np.float32(norm)) if norm <= FLOAT32_MAX else math.inf  # comparisons with NaN are false


class CpuExecutor(ArrayExecutor):
    """`Executor` that reads and steps rows on the CPU, for tensors on any device."""

    is_current = True

    def is_used_on(self, device: torch.device) -> bool:
        return False

    @property
    def joins(self) -> TableLock | None:
        """Lock of the table, and of the others of its group; None for subclasses, which share rows with other
        processes or average them.
        """
        return rows_of(self.table).table_lock if type(self) is CpuExecutor else None

    def lookup(self, ids: Tensor) -> Tensor:
        return torch.from_numpy(self.table.lookup(ids.cpu().numpy()))

    def plan(self, ids: Tensor, trains: bool) -> Plan:
        return self.table.plan(ids.cpu().numpy())

    def read(self, plan: Plan) -> Tensor:
        return torch.from_numpy(self.table.read(plan))

    def sum(self, plan: Plan, grads: Tensor, padding: int | None, by_frequency: bool) -> HostGradients:
        return HostGradients.of(super().sum(plan, host_floats(grads), padding, by_frequency))

    def merge(self, earlier: HostGradients, later: HostGradients) -> HostGradients:
        return HostGradients.of(earlier.rows.merge(later.rows))

    def bounds(self, offsets: Tensor, n: int) -> np.ndarray:
        return offsets.cpu().numpy()

    def pool(self, rows: np.ndarray, weights: Tensor | None, bags: Bags) -> tuple[Tensor, np.ndarray]:
        out, trace = super().pool(rows, host_weights(weights), bags)
        return torch.from_numpy(out), trace

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: Bags, trace: np.ndarray, by_frequency: bool
    ) -> HostGradients:
        return HostGradients.of(super().unpool(host_floats(grads), host_weights(weights), bags, trace, by_frequency))

    def weight_grads(self, grads: Tensor, rows: np.ndarray, bags: Bags) -> Tensor:
        return torch.from_numpy(super().weight_grads(host_floats(grads), rows, bags))

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


@dataclass(frozen=True, eq=False)
class SharedGradients(HostGradients):
    """Row gradients summed over ranks, with the norm of their mean over all ranks.

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
        norm = math.sqrt(square) / placement.ranks if math.isfinite(square) else math.inf
        return SharedGradients(rows, _shown(norm), 1.0 / placement.ranks, math.isfinite(square), exchange, placement)

    @property
    def sums(self) -> RowGradients:
        """Sums over ranks, scaled as `shown` was. Blocks of later backwards are added to them."""
        return self.rows.scaled(self.factor * self.placement.ranks)

    def _scaled(self, factor: float, shown: float) -> SharedGradients:
        return replace(self, shown=shown, factor=self.factor * (_snapped(factor) if self.shown else factor))

    def clipped(self, clip_value: float | None) -> RowGradients:
        due = self.rows.scaled(self.factor, clip_value)
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
        mean = self.rows.scaled(self.factor)
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


@dataclass(frozen=True, eq=False)
class PositionGradients(HostGradients):
    """Row gradients of this rank, with the gradients of positions that they sum.

    Attributes:
        lookups: gradients of the positions of each lookup, in the order of the backward.
    """

    lookups: tuple[GradientBlock, ...]

    @staticmethod
    def of_lookup(sums: HostGradients, ids: np.ndarray, values: np.ndarray, padding: int | None) -> PositionGradients:
        """Take the position gradients of one lookup, float32 (n, dim), without the id `padding`."""
        kept = slice(None) if padding is None or not (is_padding := ids == padding).any() else ~is_padding
        return PositionGradients(sums.rows, sums.shown, (GradientBlock(ids[kept], values[kept]),))


class PositionExecutor(CpuExecutor):
    """`Executor` that keeps gradients by position, beside their sums by row."""

    def sum(self, plan: Plan, grads: Tensor, padding: int | None, by_frequency: bool) -> PositionGradients:
        sums, values = super().sum(plan, grads, padding, by_frequency), host_floats(grads)
        return PositionGradients.of_lookup(sums, _ids_of(plan), values.reshape(-1, self.table.dim), padding)

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: Bags, trace: np.ndarray, by_frequency: bool
    ) -> PositionGradients:
        sums = super().unpool(grads, weights, bags, trace, by_frequency)
        ids = _ids_of(bags.plan)
        places = np.arange(len(ids) + 1, dtype=np.int32)  # of positions, each with a row of its own
        each = Plan((len(ids),), np.arange(len(ids)), places[:-1], places, places[:-1])
        alone = bags._replace(plan=each, skip=-1)
        given = host_floats(grads)
        values, _ = pooling.sum_bags(pooling.places_of([given]), self.table.dim, host_weights(weights), alone, trace)
        padding = None if bags.skip < 0 else int(bags.plan.ids[bags.skip])
        return PositionGradients.of_lookup(sums, ids, values, padding)

    def merge(self, earlier: HostGradients, later: HostGradients) -> HostGradients:
        assert isinstance(earlier, PositionGradients)  # from `sum` or `unpool`
        assert isinstance(later, PositionGradients)
        sums = super().merge(earlier, later)
        return PositionGradients(sums.rows, sums.shown, earlier.lookups + later.lookups)


def _ids_of(plan: Plan) -> np.ndarray:
    return plan.ids[plan.inverse]
