"""What a batch needs, decided on the GPU."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.kernels.gpu import directory
from embedrock.kernels.gpu import plan as kernels
from embedrock.kernels.gpu.binding import TensorPart
from embedrock.kernels.gpu.cache import CacheInsertion
from embedrock.kernels.gpu.sums import partial_rows


@dataclass(eq=False)
class FoundWeights:
    """Weights of a plan's rows as a lookup read them, until a step goes on from them.

    Attributes:
        weights: float32 (n, dim), which nobody else has.
        versions: of the rows of each table then, see `ChangeCounter`.
    """

    weights: Tensor | None
    versions: tuple[int, ...]


class SteppedRows(NamedTuple):
    """What of a batch is stepped, where the host planned.

    Attributes:
        plan: of the rows.
        rows: their positions among those of the batch, int64; None: all of them.
    """

    plan: Plan
    rows: np.ndarray | None

    @staticmethod
    def of(batch: Plan, rows: np.ndarray) -> SteppedRows:
        """Return those of some rows of a batch."""
        return SteppedRows(batch.of_rows(rows), rows)


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
        stepped: what of that is stepped; None: all of it.
        epoch: of the directory on the device that `keys` were found in; changes when ids get slots.
        found: what a lookup has read from RAM, for a step of the same rows.
        new: how many of `keys` have no slot there, see `directory.search`; None where that is not known.
    """

    shape: tuple[int, ...]
    keys: Tensor
    ids: Tensor
    starts: Tensor | TensorPart
    order: Tensor
    inverse: Tensor
    count: Tensor
    pins: Tensor | TensorPart
    stamp: int
    positions: Tensor | None = None
    ordered: Tensor | None = None
    host: Plan | None = None
    stepped: SteppedRows | None = None
    epoch: int = 0
    found: FoundWeights | None = None
    new: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that its large arrays take."""
        return sum(array.nbytes for array in (self.keys, self.ids, self.order, self.inverse))

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
    arrival: CacheInsertion | None = None,
    merges: bool = False,
    pins: int = 0,
) -> DevicePlan:
    """Decide what a batch needs, by sorting. Nothing waits for the device.

    Args:
        keys: int64 or int32, any shape: slots of rows, which are their ids. Those outside ``[0, rows)`` are a fault.
        rows: of the table, below 2**31. This is also the key of no row, and what is in ``keys`` beyond the rows that
            there are.
        fault: int64 (4,), see `DeviceErrors`.
        stamp: number of the batch.
        arrival: of its rows, which is noted; None where no rows come and go.
        merges: keys of other plans are among these, and no row is no fault.
        tickets: how many there are beside those of sums.
    """
    n, device = keys.numel(), keys.device
    given = keys if keys.dim() == 1 and keys.is_contiguous() else keys.reshape(-1).contiguous()
    is_wide = given.dtype == torch.int64
    room = carved(device, _room_of(n, is_wide, pins))
    unique, inverse, positions, count, starts, counts, drawn = room
    unique = unique.view(torch.int64)
    if is_wide:  # half of the bytes to sort by
        kernels.narrow(given, positions)
    else:
        positions = given
    ordered, order = torch.sort(positions, stable=True)
    kernels.mark(ordered, rows + merges, counts, fault, stamp)
    kernels.collect(ordered, rows, order, counts, unique, starts, inverse, count, drawn, arrival)
    shape = tuple(keys.shape)
    return DevicePlan(shape, unique, unique, starts, order, inverse, count, drawn, stamp, positions, ordered)


def make_open_plan(ids: Tensor, stamp: int, rows: int | None, fault: Tensor) -> DevicePlan:
    """Decide what a batch of hashed ids needs, by sorting. Nothing waits for the device. `keys` are yet to be found.

    Args:
        ids: int64, any shape. Those outside ``[0, rows)`` are a fault.
        stamp: number of the batch.
        rows: of the table; None: any number is an id.
        fault: int64 (4,), see `DeviceErrors`.
    """
    n, device = ids.numel(), ids.device
    room = carved(device, _open_room_of(n))
    keys, unique, inverse, count, new, starts, counts, drawn = room
    keys, unique = keys.view(torch.int64), unique.view(torch.int64)
    ordered, order = torch.sort(ids if ids.dim() == 1 else ids.reshape(-1), stable=True)
    kernels.mark(ordered, rows, counts, fault, stamp)
    kernels.collect(ordered, 0, order, counts, unique, starts, inverse, count, drawn)
    return DevicePlan(tuple(ids.shape), keys, unique, starts, order, inverse, count, drawn, stamp, new=new)


@functools.lru_cache(maxsize=256)
def _room_of(n: int, is_wide: bool, pins: int) -> ScratchLayout:
    """Return the layout of a plan: unique keys, inverse, narrow keys and count; starts, counts and tickets."""
    narrow = n if is_wide else 0
    return layout((2 * n, n, narrow, 1), (n + 1, kernels.blocks(n), 1 + partial_rows(n) + pins))


@functools.lru_cache(maxsize=256)
def _open_room_of(n: int) -> ScratchLayout:
    """Return that of a plan of open ids: keys, ids, inverse, count and new ones; starts, counts and tickets."""
    sizes = 2 * n, 2 * n, n, 1, directory.blocks(n)
    return layout(sizes, (n + 1, kernels.blocks(n), 1 + partial_rows(n)))


class ScratchLayout(NamedTuple):
    """How tensors and parts lie in one allocation of elements of 4 bytes, each from 16 bytes on.

    Attributes:
        size: of all elements.
        cuts: sizes of what the allocation is cut into, with room between them.
        tensors: picks the tensors of that.
        parts: where parts begin, and their shapes.
    """

    size: int
    cuts: list[int]
    tensors: Callable[[Any], Any]
    parts: list[tuple[int, tuple[int, ...]]]


def carved(device: torch.device, layout: ScratchLayout) -> list[Any]:
    """Return int32 tensors, and parts, that lie in one allocation."""
    size, cuts, tensors, parts = layout
    whole = torch.empty(size, dtype=torch.int32, device=device)
    made = tensors(torch.split_with_sizes(whole, cuts))
    return [*made, *[TensorPart(whole, start, shape, torch.int32) for start, shape in parts]]


@functools.lru_cache(maxsize=256)
def layout(sizes: tuple[int, ...], more: tuple[int, ...] = ()) -> ScratchLayout:
    """Return how tensors of so many elements, two or more, and `more` parts lie in one allocation."""
    cuts, places = list[int](), list[int]()  # with room between them where there has to be
    for size in sizes:
        places.append(len(cuts))
        cuts += (size, -size % 4) if size % 4 else (size,)
    starts = [*itertools.accumulate((aligned(size) for size in more), initial=sum(cuts))]
    parts = [(start, (size,)) for start, size in zip(starts, more, strict=False)]
    return ScratchLayout(starts[-1], [*cuts, starts[-1] - sum(cuts)], operator.itemgetter(*places), parts)


def aligned(count: int) -> int:
    """Return how many elements of 4 bytes there are up to the next multiple of 16 bytes."""
    return count + -count % 4
