"""`DeviceBatchPlan`: the plan of a batch, made on the GPU."""

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
from embedrock.kernels.gpu.addresses import DeviceTables
from embedrock.kernels.gpu.binding import TensorPart
from embedrock.kernels.gpu.cache import VictimScratch
from embedrock.kernels.gpu.sums import partial_rows


@dataclass(eq=False)
class FoundWeights:
    """Weights of a plan's rows as a lookup read them, for the next step.

    Attributes:
        weights: float32 (n, dim), without other references.
        versions: of the rows of each table at the read, see `ChangeCounter`.
    """

    weights: Tensor | None
    versions: tuple[int, ...]


class SteppedRows(NamedTuple):
    """The stepped rows of a host-planned batch.

    Attributes:
        plan: of the rows.
        rows: positions of the rows in the batch, int64; None: all of them.
    """

    plan: Plan
    rows: np.ndarray | None

    @staticmethod
    def of(batch: Plan, rows: np.ndarray) -> SteppedRows:
        """Return the stepped rows at some positions of a batch."""
        return SteppedRows(batch.of_rows(rows), rows)


@dataclass(eq=False)  # a frozen dataclass would take four times as long to create
class DeviceBatchPlan:
    """Plan of one batch on a device. Only the device knows the number of rows, so arrays have room for n.

    Attributes:
        shape: of the caller's ids.
        keys: int64 (n,): slots of the rows, ascending if the device planned; other numbers are of no row.
        ids: int64 (n,), of the rows.
        starts: int32 (n + 1,); positions ``order[starts[k] : starts[k + 1]]`` hold row k.
        order: int64 (n,), all positions, grouped by row, in order of occurrence.
        inverse: int32 (n,), the row of each position.
        count: int32 (1,), number of rows.
        tickets: int32, zeros, counters by which programs that sum over the plan find the last one.
        stamp: number of the batch.
        positions: int32 (n,), the key of each position, if the device planned.
        ordered: the same, sorted; or the sorted open ids, if they are to be checked.
        scan: int32, zeros: see `kernels.collect`, if the device planned. Zeroed counters of tables follow.
        host: the host's plan, if the host planned.
        stepped: the stepped rows of `host`; None: all of them.
        epoch: state of the hash index that `keys` come from; changes when ids get slots.
        found: weights that a lookup has read from RAM, for a step of the same rows.
        new: numbers of `keys` without a slot; None if unknown.
    """

    shape: tuple[int, ...]
    keys: Tensor
    ids: Tensor
    starts: Tensor | TensorPart
    order: Tensor
    inverse: Tensor
    count: Tensor
    tickets: Tensor | TensorPart
    stamp: int
    positions: Tensor | None = None
    ordered: Tensor | None = None
    scan: Tensor | None = None
    host: Plan | None = None
    stepped: SteppedRows | None = None
    epoch: int = 0
    found: FoundWeights | None = None
    new: SlotCounts | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of the large arrays."""
        return sum(array.nbytes for array in (self.keys, self.ids, self.order, self.inverse))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arrays that sums over the plan take: see `sums.sum_shares`."""
        return self.starts, self.order, self.inverse, self.count

    @property
    def allocations(self) -> list[Tensor]:
        """One tensor of each allocation."""
        return [self.keys, self.order] if self.ordered is None else [self.keys, self.order, self.ordered]


SlotCounts = tuple[Tensor, "Tensor | TensorPart"]  # numbers of rows without a slot: see `directory.search`


class SteppedTables(NamedTuple):
    """Neighbouring tables of one plan that are ready to be stepped: see `rows.step`.

    Attributes:
        tables, keys, ids, row_count, bounds, values: for the kernel, valid once records are created.
        first: index of the first stepped table in the plan.
        found: weights of the rows that a lookup has read.
        admit: creates records, or gives slots to new rows; None: nothing is new, or the step's kernel does so.
    """

    tables: DeviceTables
    keys: Tensor
    ids: Tensor | None
    row_count: Tensor
    bounds: Tensor | None
    values: Tensor
    first: int = 0
    found: FoundWeights | None = None
    admit: Callable[[], object] | None = None


class PrefetchedPlan(NamedTuple):
    """A prefetched plan of a batch.

    Attributes:
        ids: the ids as the caller passed them.
        version: of the ids, see `version_of`.
        stamp: number of the batch; None if only the host has planned it.
        plan: on the device; None if only the host has planned the batch, or if it is part of a joint plan.
        host: the host's plan; None where the device plans.
        joint: the `JointBatchPlan` of this table and others; None for a plan of one table.
    """

    ids: Tensor
    version: int
    stamp: int | None
    plan: DeviceBatchPlan | None = None
    host: Plan | None = None
    joint: Any = None

    def is_of(self, ids: Tensor) -> bool:
        """Return whether these ids are the same memory, unchanged since."""
        mine = self.ids
        same = mine.device == ids.device and mine.dtype == ids.dtype and mine.numel() == ids.numel()
        same = same and mine.data_ptr() == ids.data_ptr() and ids.is_contiguous()
        return same and self.version >= 0 and self.version == version_of(ids)


def version_of(ids: Tensor) -> int:
    """Return a tensor's version, which grows with in-place changes; -1 where PyTorch does not count them."""
    return -1 if ids.is_inference() or not ids.is_contiguous() else ids._version


def make_plan(
    keys: Tensor,
    rows: int,
    fault: Tensor | None,
    stamp: int,
    arrival: tuple[DeviceTables, VictimScratch] | None = None,
) -> DeviceBatchPlan:
    """Plan a batch by sorting. The host does not wait for the device.

    Args:
        keys: int64 or int32, any shape: slots of rows, equal to their ids. Keys outside ``[0, rows)`` are an error.
        rows: of the table, below 2**31. This is also the key of no row, which fills ``keys`` beyond the existing rows.
        fault: int64 (4,), see `DeviceErrors`; None: keys are not checked.
        stamp: number of the batch.
        arrival: the table, and scratch of the search for victims, if rows are marked as used; None without a cache.
    """
    plan = sorted_plan(keys, stamp)
    collect(plan, rows, *(arrival or ()), checked=None if fault is None else (rows, fault, stamp))
    return plan


def sorted_plan(keys: Tensor, stamp: int, tickets: int = 0, counters: int = 0) -> DeviceBatchPlan:
    """Begin to plan a batch: sort its keys. See `make_plan`.

    Args:
        keys, stamp: see there.
        tickets: number of tickets beside those of sums.
        counters: of tables, zeroed before `collect`.
    """
    n, device = keys.numel(), keys.device
    given = keys if keys.dim() == 1 and keys.is_contiguous() else keys.reshape(-1).contiguous()
    is_wide = given.dtype == torch.int64
    room = carved(device, _room_of(n, is_wide, tickets))
    unique, inverse, positions, count, starts, drawn = room
    scan = torch.zeros(kernels.scan_words(n) + counters, dtype=torch.int32, device=device)
    unique = unique.view(torch.int64)
    if is_wide:  # halves the bytes to sort
        kernels.narrow(given, positions)
    else:
        positions = given
    ordered, order = torch.sort(positions, stable=True)
    arrays = unique, unique, starts, order, inverse, count, drawn
    return DeviceBatchPlan(tuple(keys.shape), *arrays, stamp, positions, ordered, scan)


def collect(plan: DeviceBatchPlan, nobody: int, *more: Any, checked: Any = None) -> None:
    """Write a sorted plan; `nobody` is the key of no row. For `more` see `kernels.collect`."""
    arrays = plan.order, plan.scan, plan.keys, plan.starts, plan.inverse, plan.count, plan.tickets
    kernels.collect(plan.ordered, nobody, *arrays, *more, checked=checked)


def make_open_plan(ids: Tensor, stamp: int, rows: int | None, fault: Tensor | None) -> DeviceBatchPlan:
    """Plan a batch of hashed ids by sorting, without their `keys`. The host does not wait for the device.

    Args:
        ids: int64 or int32, any shape. Ids outside ``[0, rows)`` are an error.
        stamp: number of the batch.
        rows: of the table; None: ids are any int64.
        fault: int64 (4,), see `DeviceErrors`; None: ids are not checked.
    """
    n, device = ids.numel(), ids.device
    room = carved(device, _open_room_of(n))
    keys, unique, inverse, count, new, starts, drawn = room
    scan = torch.zeros(kernels.scan_words(n), dtype=torch.int32, device=device)
    keys, unique = keys.view(torch.int64), unique.view(torch.int64)
    wide = ids.to(torch.int64)
    ordered, order = torch.sort(wide if wide.dim() == 1 else wide.reshape(-1), stable=True)
    checked = None if rows is None or fault is None else (rows, fault, stamp)
    kernels.collect(ordered, 0, order, scan, unique, starts, inverse, count, drawn, checked=checked)
    unchecked = None if rows is None or fault is not None else ordered
    arrays, news = (keys, unique, starts, order, inverse, count, drawn), (new, drawn[-1:])
    return DeviceBatchPlan(tuple(ids.shape), *arrays, stamp, ordered=unchecked, new=news)


@functools.lru_cache(maxsize=256)
def _room_of(n: int, is_wide: bool, tickets: int) -> ScratchLayout:
    """Return the layout of a plan.

    Tensors: unique keys, inverse, narrow keys and count. Parts: starts and tickets.
    """
    narrow = n if is_wide else 0
    return layout((2 * n, n, narrow, 1), (n + 1, 1 + partial_rows(n) + tickets))


@functools.lru_cache(maxsize=256)
def _open_room_of(n: int) -> ScratchLayout:
    """Return the layout of a plan of open ids.

    Tensors: keys, ids, inverse, count and new. Parts: starts and tickets.
    """
    sizes = 2 * n, 2 * n, n, 1, directory.blocks(n)
    return layout(sizes, (n + 1, 2 + partial_rows(n)))


class ScratchLayout(NamedTuple):
    """Layout of tensors and parts in one allocation of 4-byte elements, each aligned to 16 bytes.

    Attributes:
        size: of all elements.
        cuts: sizes of the splits, including gaps.
        tensors: selects the tensors among the splits.
        parts: begins and shapes of the parts.
    """

    size: int
    cuts: list[int]
    tensors: Callable[[Any], Any]
    parts: list[tuple[int, tuple[int, ...]]]


def carved(device: torch.device, layout: ScratchLayout) -> list[Any]:
    """Return int32 tensors and parts in one new allocation."""
    size, cuts, tensors, parts = layout
    whole = torch.empty(size, dtype=torch.int32, device=device)
    made = tensors(torch.split_with_sizes(whole, cuts))
    return [*made, *[TensorPart(whole, start, shape, torch.int32) for start, shape in parts]]


@functools.lru_cache(maxsize=256)
def layout(sizes: tuple[int, ...], more: tuple[int, ...] = ()) -> ScratchLayout:
    """Return the layout of two or more tensors and of `more` parts, given their numbers of elements."""
    cuts, places = list[int](), list[int]()  # with gaps where needed
    for size in sizes:
        places.append(len(cuts))
        cuts += (size, -size % 4) if size % 4 else (size,)
    starts = [*itertools.accumulate((aligned(size) for size in more), initial=sum(cuts))]
    parts = [(start, (size,)) for start, size in zip(starts, more, strict=False)]
    return ScratchLayout(starts[-1], [*cuts, starts[-1] - sum(cuts)], operator.itemgetter(*places), parts)


def aligned(count: int) -> int:
    """Return a number of 4-byte elements rounded up to a multiple of 16 bytes."""
    return count + -count % 4
