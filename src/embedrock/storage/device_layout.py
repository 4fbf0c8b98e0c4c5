"""Where a table's records go: all of them near (in GPU memory), a cache of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.errors import counted
from embedrock.kernels.constants import MOST_SLOTS
from embedrock.spec.spec import Spec
from embedrock.system.sizes import format_bytes

MAP_BYTES = 4  # for each row of the table: where it is
SLOT_BYTES = 17  # for each record of the cache: whose it is, how often and when it was used, whether it changed
OPEN_ENTRIES = 2  # of the directory of open ids, for each record, of 8 bytes; there are 8 bytes for its id, too
FREE_SHARE = 2  # of the GPU memory that is free, one part in so many, where no budget is given


class DeviceLayout(NamedTuple):
    """How the records of a table are spread.

    Attributes:
        mode: "device" (all near), "cached" (some near, all others in RAM) or "host" (all in RAM).
        near_rows: records that fit near.
        bytes: of GPU memory, with what tells where rows are.
    """

    mode: str
    near_rows: int
    bytes: int

    def __str__(self) -> str:
        if self.mode == "cached":
            return f"{counted(self.near_rows, 'row')} cached ({format_bytes(self.bytes)})"
        return {"device": f"all rows ({format_bytes(self.bytes)})", "host": "rows used in RAM"}[self.mode]


def choose(spec: Spec, budget: int) -> DeviceLayout:
    """Decide how the records of a table of `spec`, whose ids are its slots, are spread, given bytes of GPU memory."""
    rows = spec.rows
    assert rows is not None  # or its slots would not be its ids
    whole, mapping = rows * (spec.record_bytes + MAP_BYTES), rows * MAP_BYTES
    if whole <= budget and rows <= MOST_SLOTS:
        return DeviceLayout("device", rows, whole)
    near = min(max(0, budget - mapping) // (spec.record_bytes + SLOT_BYTES), MOST_SLOTS, rows - 1)
    if near < 1:
        return DeviceLayout("host", 0, mapping)
    return DeviceLayout("cached", near, mapping + near * (spec.record_bytes + SLOT_BYTES))


class DeviceDemand(NamedTuple):
    """What a table, or a pool, makes use of: bytes that tell where its rows are, and those of all their records."""

    map: int
    records: int


def need_of(spec: Spec, slots: int | None = None) -> DeviceDemand:
    """Return what a table needs whose ids are its slots or, on disk, that has so many slots in RAM."""
    if slots is None:
        return DeviceDemand(MAP_BYTES * (spec.rows or 0), spec.table_bytes or 0)
    return DeviceDemand(MAP_BYTES * slots, slots * (spec.record_bytes + SLOT_BYTES))


def share(own: DeviceDemand, others: Sequence[DeviceDemand], budget: int) -> int:
    """Return the part of GPU memory that one of several tables, or pools, gets.

    Each gets its map. Of what is left all get as much, but those that need less for all of their rows, whose rest the
    others get. So tables with few rows, each of which is used often, are near whole.

    Args:
        own: of the table.
        others: of those that wait for theirs.
        budget: bytes that none has got yet.
    """
    waiting = sorted(each.records for each in (own, *others))
    left = max(0, budget - sum(each.map for each in (own, *others)))
    even = left // len(waiting)
    for count, needed in zip(range(len(waiting), 0, -1), waiting, strict=True):
        even = left // count
        if needed > even:
            break
        left -= needed
    return own.map + min(even, own.records)


def over(spec: Spec, slots: int, budget: int) -> DeviceLayout:
    """Return the placement of a table on disk, whose cache in RAM has so many slots, given bytes of GPU memory."""
    mapping = slots * MAP_BYTES
    near = min(max(0, budget - mapping) // (spec.record_bytes + SLOT_BYTES), MOST_SLOTS, slots)
    if near < 1:
        return DeviceLayout("host", 0, 0)
    return DeviceLayout("cached", near, mapping + near * (spec.record_bytes + SLOT_BYTES))


def slot_bytes(spec: Spec) -> int:
    """Return the bytes of a record in the cache of a table whose slots are not its ids, with its part of the map."""
    return spec.record_bytes + SLOT_BYTES + MAP_BYTES


def all_open(spec: Spec, budget: int) -> DeviceLayout:
    """Return the placement of a table of hashed ids, all of whose rows are near while so many bytes hold them."""
    rows = min(budget // open_bytes(spec), spec.rows or MOST_SLOTS, MOST_SLOTS)
    return DeviceLayout("device" if rows else "host", rows, rows * open_bytes(spec))


def open_bytes(spec: Spec) -> int:
    """Return the bytes of a record of a table of hashed ids that are all near, with what finds it."""
    return spec.record_bytes + MAP_BYTES + 8 * (1 + OPEN_ENTRIES)


def cached(spec: Spec, near_rows: int) -> DeviceLayout:
    """Return the placement of a table whose slots are not its ids: a cache of so many records, or none."""
    if near_rows < 1:
        return DeviceLayout("host", 0, 0)
    return DeviceLayout("cached", near_rows, near_rows * (spec.record_bytes + SLOT_BYTES))


def memory_for(spec: Spec, near_rows: int, slots: int | None = None) -> int:
    """Return a `device_memory` in bytes with which a table of `spec` keeps so many records near.

    Args:
        spec: of the table.
        near_rows: how many.
        slots: of a table on disk, how many rows its cache in RAM has room for: ``stats()["cache_slots"]``.

    Example:
        >>> import embedrock as er
        >>> memory_for(er.Table(rows=1000, dim=16, rule=er.Adam()).spec, 100)
        24900
    """
    if spec.rows is None and slots is None:
        return near_rows * open_bytes(spec)
    return ((spec.rows or 0) if slots is None else slots) * MAP_BYTES + near_rows * (spec.record_bytes + SLOT_BYTES)
