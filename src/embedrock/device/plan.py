"""What a batch needs, decided on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device.faults import LEAST_ID, MOST_ID
from embedrock.kernels.gpu import directory
from embedrock.kernels.gpu import plan as kernels
from embedrock.kernels.gpu.cache import Arrival
from embedrock.kernels.gpu.sums import partial_rows


@dataclass(eq=False)
class Found:
    """Weights of a plan's rows as a lookup read them, until a step goes on from them.

    Attributes:
        weights: float32 (n, dim), which nobody else has.
        versions: of the rows of each table then, see `Version`.
    """

    weights: Tensor | None
    versions: tuple[int, ...]


@dataclass(eq=False)  # not frozen, which would take four times as long to make
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
        tickets: int32, zeros, by which programs that sum over the plan know who is the last.
        stamp: number of the batch.
        positions: int32 (n,), the key of each position, where the device planned.
        ordered: the same, sorted.
        host: the same on the host, where the host planned.
        epoch: of the directory on the device that `keys` were found in; changes when ids get slots.
        found: what a lookup has read from RAM, for a step of the same rows.
        new: how many of `keys` have no slot there, see `directory.search`; None where that is not known.
    """

    shape: tuple[int, ...]
    keys: Tensor
    ids: Tensor
    starts: Tensor
    order: Tensor
    inverse: Tensor
    count: Tensor
    tickets: Tensor
    stamp: int
    positions: Tensor | None = None
    ordered: Tensor | None = None
    host: Plan | None = None
    epoch: int = 0
    found: Found | None = None
    new: Tensor | None = None

    @property
    def all_keys(self) -> Tensor:
        """The keys of all positions, sorted."""
        assert self.ordered is not None  # the device planned
        return self.ordered


def make_plan(
    keys: Tensor,
    rows: int,
    fault: Tensor,
    stamp: int,
    arrival: Arrival | None = None,
    merges: bool = False,
    tickets: int = 0,
) -> DevicePlan:
    """Decide what a batch needs, by sorting. Nothing waits for the device.

    Args:
        keys: int64 or int32, any shape: slots of rows, which are their ids. Those outside ``[0, rows)`` are a fault.
        rows: of the table, below 2**31. This is also the key of no row, and what is in ``keys`` beyond the rows that
            there are.
        fault: int64 (4,), see `Faults`.
        stamp: number of the batch.
        arrival: of its rows, which is noted; None where no rows come and go.
        merges: keys of other plans are among these, and no row is no fault.
        tickets: how many there are beside those of sums.
    """
    n, device = keys.numel(), keys.device
    sizes = 2 * n, n + 1, n, 1, kernels.blocks(n), 1 + partial_rows(n) + tickets
    unique, starts, inverse, count, counts, drawn = carved(torch.int32, device, sizes)
    unique, positions = unique.view(torch.int64), keys if keys.dim() == 1 else keys.reshape(-1)
    if positions.dtype == torch.int64:  # half of the bytes to sort by; what does not fit is outside, and stays there
        positions = positions.clamp(LEAST_ID, MOST_ID).to(torch.int32)
    ordered, order = torch.sort(positions, stable=True)
    kernels.mark(ordered, rows + merges, counts, fault, stamp)
    kernels.collect(ordered, rows, order, counts, unique, starts, inverse, count, drawn, arrival)
    shape = tuple(keys.shape)
    return DevicePlan(shape, unique, unique, starts, order, inverse, count, drawn, stamp, positions, ordered)


def make_open_plan(ids: Tensor, stamp: int) -> DevicePlan:
    """Decide what a batch of any ids needs, by sorting. Nothing waits for the device. `keys` are yet to be found.

    Args:
        ids: int64, any shape.
        stamp: number of the batch.
    """
    n, device = ids.numel(), ids.device
    sizes = 2 * n, 2 * n, n + 1, n, 1, kernels.blocks(n), 1 + partial_rows(n), directory.blocks(n)
    keys, unique, starts, inverse, count, counts, drawn, new = carved(torch.int32, device, sizes)
    keys, unique = keys.view(torch.int64), unique.view(torch.int64)
    ordered, order = torch.sort(ids if ids.dim() == 1 else ids.reshape(-1), stable=True)
    kernels.mark(ordered, None, counts, count, stamp)  # no id is wrong, so there is no fault
    kernels.collect(ordered, 0, order, counts, unique, starts, inverse, count, drawn)
    return DevicePlan(tuple(ids.shape), keys, unique, starts, order, inverse, count, drawn, stamp, new=new)


def carved(dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> list[Tensor]:
    """Return tensors of so many elements of 4 bytes, in one allocation: each begins at a multiple of 16 bytes."""
    parts, places = [], []  # with room between them where there has to be
    for size in sizes:
        places.append(len(parts))
        parts += (size, -size % 4) if size % 4 else (size,)
    made = torch.split_with_sizes(torch.empty(sum(parts), dtype=dtype, device=device), parts)
    return [made[place] for place in places]
