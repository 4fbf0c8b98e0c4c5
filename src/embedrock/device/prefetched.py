"""Batches of one table or several that are planned, and loaded, ahead of their lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from embedrock.device.batch import DeviceBatch
from embedrock.device.features import FeatureLayout

if TYPE_CHECKING:
    from embedrock.batch.plan import Plan

_FORM = attrgetter("device", "dtype")


@dataclass(eq=False)
class PrefetchedBatch:
    """A batch that is planned before its lookup.

    Attributes:
        given: the ids of each table as the caller passed them.
        versions: of the ids, see `versions_of`.
        batch: of these tables; None if only the host has planned it.
        stamps: number of the batch, for each executor; none if only the host has planned it.
        host: the host's plan; None where the device plans.
    """

    given: Sequence[Tensor]
    versions: Sequence[int]
    batch: DeviceBatch | None = None
    stamps: Mapping[Any, int] = field(default_factory=dict)
    host: Plan | None = None

    def is_of(self, given: Sequence[Tensor]) -> bool:
        """Return whether these ids are the same memory, unchanged since."""
        is_unchanged = -1 not in self.versions and versions_of(given) == self.versions
        return is_unchanged and _memory_of(given) == _memory_of(self.given)


def versions_of(given: Sequence[Tensor]) -> list[int]:
    """Return the versions of tensors, which grow with in-place changes; -1 where PyTorch does not count them."""
    return [-1 if ids.is_inference() or not ids.is_contiguous() else ids._version for ids in given]


def _memory_of(given: Sequence[Tensor]) -> list[Any]:
    return [*map(_FORM, given), *map(Tensor.numel, given), *map(Tensor.data_ptr, given)]


def plan_ahead(layout: FeatureLayout) -> None:
    """Plan the next batch of all tables of a lookup that expect one, in parallel with the device's work.

    The plan also loads their rows. The caller holds `working` of all tables.
    """
    executors: list[Any] = [executor for executor in layout.executors if executor.expected is not None]
    given = [executor.expected for executor in executors]
    for executor in executors:
        executor.expected = None
    first = executors[0]
    if not first.plans:
        return first.plan_ahead_by_host(given[0])
    features = layout.of_tables(executors)
    made = first.batch(features, features.sizes(tuple(map(Tensor.numel, given))), True, None)
    joined = features.joined(given)
    try:
        with first.timeline.aside(joined, made.placed, made.tables.entries):
            made.make(joined, is_ahead=True)
    finally:  # part of the work may be under way
        for executor in executors[1:]:
            executor.timeline.copied = first.timeline.copied
    ahead = PrefetchedBatch(given, versions_of(given), made, dict(zip(executors, made.stamps, strict=True)))
    for executor in executors:
        executor.ahead = ahead


def taken_ahead(
    layout: FeatureLayout, given: Sequence[Tensor], aheads: Sequence[PrefetchedBatch | None]
) -> DeviceBatch | None:
    """Return the prefetched batch of a lookup; None if there is none.

    Args:
        layout: of the lookup, which trains.
        given: ids of each feature, table by table.
        aheads: prefetched batch of each table.
    """
    ahead = aheads[0]
    batch = None if ahead is None else ahead.batch
    if ahead is None or batch is None or batch.executors != layout.executors or len(given) != len(aheads):
        return None
    if aheads.count(ahead) < len(aheads) or batch.layout.paddings != layout.paddings or not ahead.is_of(given):
        return None
    layout.first.timeline.uses(*batch.allocations)
    return batch
