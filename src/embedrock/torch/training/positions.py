"""Gradients by position: what ranks bring so that owners sum it in the order of one batch, that of all ranks together.

A block, summed where it arose, has lost the order in which one process would have added. With ``positions=True`` each
lookup of a rank brings the gradient of each of its positions, and the owners sum those of all ranks, by lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from embedrock.batch import pooling
from embedrock.batch.plan import JointPlan, Plan
from embedrock.batch.pooling import Bags
from embedrock.shards.stages import GradientBlock
from embedrock.torch.training.host_side import CpuExecutor, HostGradients, host_floats, host_weights


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
