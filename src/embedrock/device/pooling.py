"""Pooling of rows on a GPU into bags, and what their gradients are made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embedrock.device.batch import DeviceBatch
from embedrock.device.features import FeatureBags
from embedrock.device.workspace import carved, layout
from embedrock.kernels.gpu import joint as kernels
from embedrock.kernels.gpu import pooling, sums


class DeviceBags:
    """Batch of bags of one or more tables, feature by feature.

    Args:
        all_bags: of the features: sums and means, or all of mode "max".
        sizes: ids of each feature.
        batch: of the ids.
        cuts: int64, on the device, see `kernels.bags`.

    Attributes:
        batch: see above.
        counts: bags of each feature.
    """

    def __init__(self, all_bags: Sequence[FeatureBags], sizes: Sequence[int], batch: DeviceBatch, cuts: Tensor) -> None:
        self.batch, executor, device = batch, batch.layout.first, cuts.device
        self._what, self._sizes = sums.MAXIMA if all_bags[0].mode == "max" else sums.POOLED, sizes
        self.counts = [bags.count(n) for bags, n in zip(all_bags, sizes, strict=True)]
        self._weights = _joined_weights(all_bags, sizes, batch.inverse)
        starts = [bags.starts for bags in all_bags if bags.starts is not None]
        if len({part.device for part in starts}) > 1:
            starts = [executor.on_device(part) for part in starts]
        joined = executor.on_device(torch.cat(starts)) if starts else cuts
        count, n = sum(self.counts), sum(sizes)
        self._offsets, self._of_positions, self._words = carved(device, layout((count + 1, n, count)))
        tickets = batch.tickets[-len(batch.executors) - 1 :]  # behind the counters of sums
        args = batch.tables, batch.paddings, tickets, self._offsets, self._of_positions, self._words
        kernels.bags(joined, cuts, len(sizes), *args)

    def pool(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bags of the plan's rows, float32 (bags, dim), and the trace for `shares`.

        Args:
            rows: float32 (n, dim).
        """
        count, dim, device = len(self._words), rows.shape[1], rows.device
        out = torch.empty(count, dim, dtype=torch.float32, device=device)
        if self._what == sums.MAXIMA:
            trace = torch.empty(count, dim, dtype=torch.int32, device=device)  # places of maxima
        else:
            trace = torch.empty(count, dtype=torch.float32, device=device)  # factors of sums
        pooling.pool(self._what, rows, self.batch.inverse, self._offsets, self._weights, self._words, out, trace)
        return out, trace

    def shares(self, trace: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        """Return the mode and arrays that map bag gradients to positions: see `sums.sum_shares`."""
        return self._what, (self._of_positions, self._weights, trace)

    def trace_of(self, place: int, trace: Tensor) -> Tensor:
        """Return the trace of one feature, as its own lookup would have it."""
        own = torch.split_with_sizes(trace, self.counts)[place]
        return torch.where(own >= 0, own - sum(self._sizes[:place]), own) if self._what == sums.MAXIMA else own.clone()

    def weight_grads(self, grads: Tensor, rows: Tensor) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,), from those of the bags; `rows`: see `pool`."""
        out = torch.empty(len(self._of_positions), dtype=torch.float32, device=grads.device)
        pooling.weight_grads(grads, rows, self.batch.inverse, self._of_positions, self._words, out)
        return out


def _joined_weights(all_bags: Sequence[FeatureBags], sizes: Sequence[int], some: Tensor) -> Tensor:
    """Return the weights of all positions for kernels; (0,), a view of `some`, if all are ones."""
    if {None}.issuperset([bags.weights for bags in all_bags]):
        return some[:0].view(torch.float32)
    return torch.cat([
        torch.ones(n, dtype=torch.float32, device=some.device) if bags.weights is None else bags.weights
        for bags, n in zip(all_bags, sizes, strict=True)
    ])  # fmt: skip
