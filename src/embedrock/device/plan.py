"""What a batch needs, decided on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.kernels.gpu import plan as kernels


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """What one batch needs, on a device. How many rows it has is known only there: arrays have room for n.

    Attributes:
        shape: of the ids as they were given.
        keys: int64 (n,): slots of the rows, ascending where the device planned; others than those of rows mean no row.
        ids: int64 (n,), of the rows.
        starts: int32 (n + 1,); positions ``order[starts[k] : starts[k + 1]]`` hold row k.
        order: int64 (n,), all positions, grouped by row, in order of occurrence.
        inverse: int32 (n,), the row of each position.
        count: int32 (1,), how many rows there are.
        stamp: number of the batch.
        host: the same on the host, where the host planned.
    """

    shape: tuple[int, ...]
    keys: Tensor
    ids: Tensor
    starts: Tensor
    order: Tensor
    inverse: Tensor
    count: Tensor
    stamp: int = 0
    host: Plan | None = None


def make_plan(keys: Tensor, rows: int, fault: Tensor, stamp: int, merges: bool = False) -> DevicePlan:
    """Decide what a batch needs, by sorting. Nothing waits for the device.

    Args:
        keys: int64 or int32, any shape: slots of rows, which are their ids. Those outside ``[0, rows)`` are a fault.
        rows: of the table. This is also the key of no row, and what is in ``keys`` beyond the rows that there are.
        fault: int64 (4,), see `Faults`.
        stamp: number of the batch.
        merges: keys of other plans are among these, and no row is no fault.
    """
    n, device = keys.numel(), keys.device
    ordered, order = torch.sort(keys.reshape(-1), stable=True)
    counts = torch.empty(kernels.blocks(n), dtype=torch.int32, device=device)
    unique = torch.empty(n, dtype=torch.int64, device=device)
    starts = torch.empty(n + 1, dtype=torch.int32, device=device)
    inverse = torch.empty(n, dtype=torch.int32, device=device)
    count = torch.empty(1, dtype=torch.int32, device=device)
    kernels.mark(ordered, rows + merges, counts, fault, stamp)
    kernels.collect(ordered, rows, order, counts, unique, starts, inverse, count)
    return DevicePlan(tuple(keys.shape), unique, unique, starts, order, inverse, count, stamp)
