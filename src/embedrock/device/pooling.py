"""Pooling of rows on a GPU into bags, and the gradients of the rows and of the positions' weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.gradients import DeviceRowGradients, sum_rows
from embedrock.device.plan import DeviceBatchPlan
from embedrock.kernels.gpu import pooling as kernels
from embedrock.kernels.gpu import sums


class DeviceBags(NamedTuple):
    """A batch of bags.

    Attributes:
        plan: of the n positions of all bags, without the id that counts in no bag.
        offsets: int64 (bags + 1,); bag b holds the positions ``offsets[b]`` to ``offsets[b + 1]``.
        bag_of_position: int32 (n,).
        skip: int32 (1,), the row of the id that counts in no bag, -1 for none.
        mode: "sum", "mean" or "max".
    """

    plan: DeviceBatchPlan
    offsets: Tensor
    bag_of_position: Tensor
    skip: Tensor
    mode: str


def bag_of_position(offsets: Tensor, n: int) -> Tensor:
    """Return the bag of each of n positions: int32 (n,)."""
    positions = torch.arange(n, device=offsets.device)
    return (torch.searchsorted(offsets, positions, right=True) - 1).clamp(0, max(0, len(offsets) - 2)).to(torch.int32)


def pool(rows: Tensor, weights: Tensor | None, bags: DeviceBags) -> tuple[Tensor, Tensor]:
    """Pool unique rows float32 (n, dim).

    Args:
        rows: of ``bags.plan``.
        weights: factors of the positions, float32 (n,); None for ones.
        bags: of the positions.

    Returns:
        The bags float32 (bags, dim), and the trace for `unpool`: the factors of sums, or the places of maxima.
    """
    count, dim = len(bags.offsets) - 1, rows.shape[1]
    out = torch.empty(count, dim, dtype=torch.float32, device=rows.device)
    if bags.mode == "max":
        trace = torch.empty(count, dim, dtype=torch.int32, device=rows.device)
        kernels.pool_max(rows, bags.plan.inverse, bags.offsets, bags.skip, out, trace)
    else:
        trace = torch.empty(count, dtype=torch.float32, device=rows.device)
        args = _factors(weights, rows), bags.skip, bags.mode == "mean", out, trace
        kernels.pool_sum(rows, bags.plan.inverse, bags.offsets, *args)
    return out, trace


def unpool(grads: Tensor, weights: Tensor | None, bags: DeviceBags, trace: Tensor) -> DeviceRowGradients:
    """Return the gradients of the rows from the gradients of the bags, (bags, dim) of any float dtype."""
    if bags.mode == "max":
        return sum_rows(grads, bags.plan, bags.skip, sums.MAXIMA, (bags.bag_of_position, None, None, trace))
    share = bags.bag_of_position, _factors(weights, grads), trace, None
    return sum_rows(grads, bags.plan, bags.skip, sums.POOLED, share)


def _factors(weights: Tensor | None, like: Tensor) -> Tensor:
    """Return weights for kernels: (0,) for ones."""
    return torch.empty(0, dtype=torch.float32, device=like.device) if weights is None else weights


def weight_grads(grads: Tensor, rows: Tensor, bags: DeviceBags) -> Tensor:
    """Return the gradients of the positions' weights float32 (n,), in mode "sum"."""
    out = torch.empty(len(bags.plan.inverse), dtype=torch.float32, device=grads.device)
    kernels.weight_grads(grads, rows, bags.plan.inverse, bags.bag_of_position, bags.skip, out)
    return out
