"""Batches of several tables that are planned, and loaded, ahead of their lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from embedrock.device.batch import DeviceBatch
from embedrock.device.features import FeatureLayout

if TYPE_CHECKING:
    from embedrock.batch.plan import Plan


class PrefetchedBatch(NamedTuple):
    """A batch of a table that is planned before its lookup.

    Attributes:
        ids: the ids as the caller passed them.
        version: of the ids, see `version_of`.
        stamp: number of the batch; None if only the host has planned it.
        batch: of this table and perhaps others; None if only the host has planned it.
        host: the host's plan; None where the device plans.
    """

    ids: Tensor
    version: int
    stamp: int | None
    batch: DeviceBatch | None = None
    host: Plan | None = None

    def is_of(self, ids: Tensor) -> bool:
        """Return whether these ids are the same memory, unchanged since."""
        mine = self.ids
        same = mine.device == ids.device and mine.dtype == ids.dtype and mine.numel() == ids.numel()
        same = same and mine.data_ptr() == ids.data_ptr() and ids.is_contiguous()
        return same and self.version >= 0 and self.version == version_of(ids)


def version_of(ids: Tensor) -> int:
    """Return a tensor's version, which grows with in-place changes; -1 where PyTorch does not count them."""
    return -1 if ids.is_inference() or not ids.is_contiguous() else ids._version


def plan_ahead(batch: DeviceBatch) -> None:
    """Plan the next batch of all tables of a lookup that expect one, in parallel with the device's work.

    The plan also loads their rows. The caller holds `working` of all tables.
    """
    layout = batch.layout
    expected = [
        (executor, executor.take_expected(), padding)
        for executor, padding in zip(layout.executors, layout.paddings, strict=True)
    ]
    known = [each for each in expected if each[1] is not None]
    executors, given, paddings = (tuple(each) for each in zip(*known, strict=True))
    first: Any = executors[0]
    if not first.plans:
        return first.plan_ahead_by_host(given[0])
    same = len(executors) == len(layout.executors) == len(layout.tables)
    features = layout if same else FeatureLayout(executors, paddings)
    sizes = features.sizes(tuple([ids.numel() for ids in given]))
    made = first.batch(features, sizes, True, None)
    flat = [first.on_device(ids).reshape(-1).contiguous() for ids in given]
    joined = flat[0] if len(flat) == 1 else torch.cat([ids.to(torch.int64) for ids in flat])
    try:
        with first.timeline.aside(joined, made.placed, made.tables.entries):
            made.make(joined, is_ahead=True)
    finally:  # part of the work may be under way
        for executor in executors[1:]:
            executor.timeline.copied = first.timeline.copied
    for executor, ids, stamp in zip(executors, given, made.stamps, strict=True):
        executor.keep_ahead(PrefetchedBatch(ids, version_of(ids), stamp, made))


def taken_ahead(
    layout: FeatureLayout, given: Sequence[Tensor], aheads: Sequence[PrefetchedBatch | None]
) -> DeviceBatch | None:
    """Return the prefetched batch of a lookup; None if there is none.

    Args:
        layout: of the lookup, which trains.
        given: ids of each feature, table by table.
        aheads: prefetched batch of each table.
    """
    batch = None if aheads[0] is None else aheads[0].batch
    if batch is None or batch.executors != layout.executors or len(given) != len(aheads):
        return None
    is_whole = all(ahead is not None and ahead.batch is batch for ahead in aheads)
    if not is_whole or batch.layout.paddings != layout.paddings:
        return None
    if not all(ahead is not None and ahead.is_of(ids) for ahead, ids in zip(aheads, given, strict=True)):
        return None
    layout.first.timeline.uses(*batch.allocations)
    return batch
