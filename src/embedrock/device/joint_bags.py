"""Bags of several tables on a GPU, pooled together: see `joint`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedrock.device.features import FeatureBags
from embedrock.device.joint_plan import JointBatchPlan
from embedrock.device.plan import carved, layout
from embedrock.kernels.gpu import joint as kernels
from embedrock.kernels.gpu import pooling, sums


class JointDeviceBags:
    """Batch of bags of several tables, feature by feature.

    Args:
        all_bags: of the features: sums and means, or all of mode "max".
        sizes: ids of each feature.
        plan: of the ids.
        cuts: int64, on the device, see `kernels.bags`.

    Attributes:
        counts: bags of each feature.
    """

    _trace: Tensor  # of the pooling: factors of sums, float32 (bags,), or places of maxima, int32 (bags, dim)

    def __init__(
        self, all_bags: Sequence[FeatureBags], sizes: Sequence[int], plan: JointBatchPlan, cuts: Tensor
    ) -> None:
        self._plan, device = plan, plan.bounds.device
        self._are_maxima, self._sizes = all_bags[0].mode == "max", sizes
        self.counts = [bags.count(n) for bags, n in zip(all_bags, sizes, strict=True)]
        self._weights = _joined_weights(all_bags, sizes, plan.bounds)
        starts = [bags.starts for bags in all_bags if bags.starts is not None]
        joined = _joined_starts(starts, plan) if starts else cuts
        count, n = sum(self.counts), sum(sizes)
        self._offsets, self._of_positions, self._words = carved(device, layout((count + 1, n, count)))
        args = plan.tables, plan.bounds, plan.tickets_of_bags, self._offsets, self._of_positions, self._words
        kernels.bags(joined, cuts, len(sizes), *args)
        self._rows: Tensor | None = None

    def pool(self, rows: Tensor, keeps_rows: bool) -> Tensor:
        """Return the bags of the plan's rows: float32 (bags, dim).

        Args:
            rows: float32 (n, dim).
            keeps_rows: keep the rows for `weight_grads`.
        """
        count, dim, device = len(self._words), rows.shape[1], rows.device
        out = torch.empty(count, dim, dtype=torch.float32, device=device)
        args = rows, self._plan.plan.inverse, self._offsets
        if self._are_maxima:
            self._trace = torch.empty(count, dim, dtype=torch.int32, device=device)
            pooling.pool_max(*args, self._words, out, self._trace, each=True)
        else:
            self._trace = torch.empty(count, dtype=torch.float32, device=device)
            pooling.pool_sum(*args, self._weights, self._words, None, out, self._trace)
        self._rows = rows if keeps_rows else None
        return out

    @property
    def shares(self) -> tuple[int, tuple[Tensor | None, ...]]:
        """The mode and arrays that map bag gradients to positions: see `sums.sum_shares`."""
        if self._are_maxima:
            return sums.MAXIMA, (self._of_positions, None, None, self._trace)
        return sums.POOLED, (self._of_positions, self._weights, self._trace, None)

    def trace_of(self, place: int) -> Tensor:
        """Return the `pooling.unpool` trace of one feature, as its own lookup would have it."""
        trace = torch.split_with_sizes(self._trace, self.counts)[place]
        return torch.where(trace >= 0, trace - sum(self._sizes[:place]), trace) if self._are_maxima else trace.clone()

    def weight_grads(self, grads: Tensor) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,), from the gradients of the bags."""
        assert self._rows is not None  # `pool` kept them
        out = torch.empty(len(self._of_positions), dtype=torch.float32, device=grads.device)
        args = self._plan.plan.inverse, self._of_positions, self._words
        pooling.weight_grads(grads, self._rows, *args, out, each=True)
        return out


def _joined_starts(starts: Sequence[Tensor], plan: JointBatchPlan) -> Tensor:
    if len({part.device for part in starts}) > 1:
        starts = [plan.executors[0].on_device(part) for part in starts]
    return plan.executors[0].on_device(torch.cat(list(starts)))


def _joined_weights(all_bags: Sequence[FeatureBags], sizes: Sequence[int], some: Tensor) -> Tensor:
    """Return the weights of all positions for kernels; (0,), a view of `some`, if all are ones."""
    if all(bags.weights is None for bags in all_bags):
        return some[:0].view(torch.float32)
    return torch.cat([
        torch.ones(n, dtype=torch.float32, device=some.device) if bags.weights is None else bags.weights
        for bags, n in zip(all_bags, sizes, strict=True)
    ])  # fmt: skip
