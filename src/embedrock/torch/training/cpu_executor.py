"""`CpuExecutor`: the rows of a table as the CPU uses them, for tensors on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import JointPlan, Plan
from embedrock.batch.pooling import Bags
from embedrock.distributed.exchange import Exchange, ExchangeVerdict
from embedrock.distributed.owners import Placement, Replica
from embedrock.distributed.stages import GradientBlock
from embedrock.frontend.steps import judge_on_host
from embedrock.table.batches import BatchFeature
from embedrock.table.group import Group
from embedrock.table.table import Table

FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class HostGradients:
    """Row gradients, and the number that stands for them outside.

    Attributes:
        rows: the gradients.
        shown: their L2 norm as a float32, Inf where one of them is not finite; scaled as they were since.
    """

    rows: RowGradients
    shown: float

    @staticmethod
    def of(grads: RowGradients, shown: float | None = None) -> HostGradients:
        """Take gradients; `shown` is their norm, if it is None."""
        return HostGradients(grads, _norm(grads) if shown is None else shown)

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows."""
        return self.rows.plan.ids

    def rescaled_by(self, number: Tensor) -> HostGradients | None:
        """Return them scaled as `shown` was by whoever made it `number`; None where that zeroed them."""
        shown = number.item()
        if shown == self.shown:
            return self
        if shown == 0.0:
            return None
        # Gradients that are all zero stay so by any factor, but must not hide that a number is not finite.
        factor = shown / self.shown if self.shown else shown
        return HostGradients.of(self.rows.scaled(factor), shown)

    def clipped(self, clip_value: float | None) -> RowGradients:
        """Return them with every element clamped to ``[-clip_value, clip_value]``."""
        return self.rows.scaled(1.0, clip_value)

    def vector_norm(self, order: float) -> float:
        """Return the norm of any order from 0 to Inf of all their elements, in float64."""
        with np.errstate(over="ignore", invalid="ignore"):
            sizes = np.abs(self.rows.values, dtype=np.float64)
            if order == 0:
                return float(np.count_nonzero(sizes))
            if order == math.inf:
                return float(sizes.max(initial=0.0))
            return float((sizes if order == 1 else sizes**order).sum() ** (1.0 / order))

    def clamped(self, low: float | None, high: float | None) -> HostGradients:
        """Return them with every element clamped to ``[low, high]``."""
        return HostGradients.of(self.rows.with_values(np.clip(self.rows.values, low, high)))

    def nothing(self) -> None:
        """Return nothing: handles on the CPU have a 0 of their own."""

    def instead_of(self, nothing: Tensor) -> None:
        """Return nothing: see `nothing`."""

    def growth_since(self, earlier: HostGradients | None) -> float:
        """Return by how much `shown` is more than that of the gradients before, which these contain."""
        if earlier is None:
            return self.shown
        return self.shown - earlier.shown if math.isfinite(earlier.shown) else 0.0


def _norm(grads: RowGradients) -> float:
    norm = grads.norm
    return float(np.float32(norm)) if norm <= FLOAT32_MAX else math.inf  # NaN compares as false


class CpuExecutor:
    """Rows that the CPU reads and steps: a `Executor`.

    Args:
        table: whose rows.
    """

    is_current = True
    judge = staticmethod(judge_on_host)

    def __init__(self, table: Table) -> None:
        self.table = table

    def is_used_on(self, device: torch.device) -> bool:
        """Return False: no GPU uses the rows."""
        return False

    @property
    def joins(self) -> Group | None:
        """The table's group; None of sides that do more than this one, for processes that share rows and averages."""
        return self.table.group if type(self) is CpuExecutor else None

    def feature(self, ids: Tensor, padding: int | None) -> BatchFeature:
        """Return ids that are looked up together with those of others."""
        return BatchFeature(self.table, ids.cpu().numpy(), padding=padding)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows for no gradient, in one pass: float32 ``ids.shape + (dim,)``."""
        return torch.from_numpy(self.table.lookup(ids.cpu().numpy()))

    def plan(self, ids: Tensor, trains: bool) -> Plan:
        """Decide what a batch of ids needs."""
        return self.table.plan(ids.cpu().numpy())

    def read(self, plan: Plan) -> Tensor:
        """Return the row of each position: float32 ``plan.shape + (dim,)``."""
        return torch.from_numpy(self.table.read(plan))

    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return each row once: float32 (unique, dim)."""
        return self.table.read_rows(plan)

    def sum(self, plan: Plan, grads: Tensor, padding: int | None, by_frequency: bool) -> HostGradients:
        """Return the gradients of positions summed to one for each row: see `Executor.sum`."""
        return _as_asked(self.table.sum(plan, host_floats(grads)), padding, by_frequency)

    def merge(self, earlier: HostGradients, later: HostGradients) -> HostGradients:
        """Return the sum of two gradients; in a row that both have, the earlier one comes first."""
        return HostGradients.of(earlier.rows.merge(later.rows))

    def bounds(self, offsets: Tensor, n: int) -> np.ndarray:
        """Return where bags start and end, int64 (bags + 1,)."""
        return offsets.cpu().numpy()

    def bags(self, plan: Plan, bounds: np.ndarray, mode: str, padding: int | None) -> Bags:
        """Return the positions of a plan as bags, in which the id `padding` does not count."""
        return Bags(plan, bounds, pooling.index_of(plan, padding), mode)

    def pool(self, rows: np.ndarray, weights: Tensor | None, bags: Bags) -> tuple[Tensor, np.ndarray]:
        """Pool unique rows float32 (unique, dim): see `Executor.pool`."""
        out, trace = pooling.pool(rows, host_weights(weights), bags)
        return torch.from_numpy(out), trace

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: Bags, trace: np.ndarray, by_frequency: bool
    ) -> HostGradients:
        """Return the gradients of the rows from those of the bags: see `Executor.unpool`."""
        padding = None if bags.skip < 0 else int(bags.plan.ids[bags.skip])
        return _as_asked(pooling.unpool(host_floats(grads), host_weights(weights), bags, trace), padding, by_frequency)

    def weight_grads(self, grads: Tensor, rows: np.ndarray, bags: Bags) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,)."""
        return torch.from_numpy(pooling.weight_grads(host_floats(grads), rows, bags))

    def prepare(self, grads: RowGradients) -> None:
        """Raise what a step by these gradients would raise, but for NaN and Inf. No row changes."""
        self.table.check_step(grads)


def host_floats(grads: Tensor) -> np.ndarray:
    """Return the gradient of an output, of any dtype and on any device, as float32."""
    return grads.to("cpu", torch.float32).contiguous().numpy()


def host_weights(weights: Tensor | None) -> np.ndarray | None:
    """Return the positions' weights, of any dtype and on any device, as float32; None for ones."""
    return None if weights is None else host_floats(weights.detach())


def _as_asked(grads: RowGradients, padding: int | None, by_frequency: bool) -> HostGradients:
    if by_frequency:
        counts = np.diff(grads.plan.starts).astype(np.float32)
        grads = grads.with_values(grads.values / counts[:, None])
    return HostGradients.of(grads if padding is None else grads.without(padding))


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


@dataclass(frozen=True, eq=False)
class PositionGradients(HostGradients):
    """Row gradients of this rank, and what they are the sums of.

    Attributes:
        lookups: of each, in the order of the backward, the gradients of its positions.
    """

    lookups: tuple[GradientBlock, ...]

    @staticmethod
    def of_lookup(sums: HostGradients, ids: np.ndarray, values: np.ndarray, padding: int | None) -> PositionGradients:
        """Take the gradients of the positions of one lookup, float32 (n, dim), but those of the id `padding`."""
        kept = slice(None) if padding is None or not (is_padding := ids == padding).any() else ~is_padding
        return PositionGradients(sums.rows, sums.shown, (GradientBlock(ids[kept], values[kept]),))


class PositionExecutor(CpuExecutor):
    """Rows whose gradients are kept by position: a `Executor`."""

    def sum(self, plan: Plan, grads: Tensor, padding: int | None, by_frequency: bool) -> PositionGradients:
        """Return the gradients of positions, and their sums by row: see `Executor.sum`."""
        sums, values = super().sum(plan, grads, padding, by_frequency), host_floats(grads)
        return PositionGradients.of_lookup(sums, _ids_of(plan), values.reshape(-1, self.table.dim), padding)

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: Bags, trace: np.ndarray, by_frequency: bool
    ) -> PositionGradients:
        """Return the gradients of the positions of bags, and their sums by row: see `Executor.unpool`."""
        sums = super().unpool(grads, weights, bags, trace, by_frequency)
        ids = _ids_of(bags.plan)
        alone = bags._replace(plan=_each_alone(len(ids)), skip=-1)
        values, _ = pooling.sum_bags(host_floats(grads), host_weights(weights), alone, trace)
        padding = None if bags.skip < 0 else int(bags.plan.ids[bags.skip])
        return PositionGradients.of_lookup(sums, ids, values, padding)

    def merge(self, earlier: HostGradients, later: HostGradients) -> HostGradients:
        """Return both: see `Executor.merge`."""
        assert isinstance(earlier, PositionGradients)  # of `sum` or `unpool`
        assert isinstance(later, PositionGradients)
        sums = super().merge(earlier, later)
        return PositionGradients(sums.rows, sums.shown, earlier.lookups + later.lookups)


def _ids_of(plan: Plan | JointPlan) -> np.ndarray:
    return plan.ids[plan.inverse]


def _each_alone(count: int) -> Plan:
    """Return a plan of positions of which no two have the same row."""
    places = np.arange(count + 1, dtype=np.int32)
    return Plan((count,), np.arange(count), places[:-1], places, places[:-1])
