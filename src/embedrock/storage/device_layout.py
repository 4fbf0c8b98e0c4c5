"""How much of a table's records GPU memory holds: all, a cache, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from embedrock.errors import counted
from embedrock.kernels.constants import MOST_SLOTS
from embedrock.spec.spec import Spec
from embedrock.system.sizes import format_bytes

MAP_BYTES = 4  # map entry of each row: its device slot
SLOT_BYTES = 17  # of each cached record: row, use count, last use, dirty flag
OPEN_ENTRIES = 2  # index entries of 8 bytes per record of open ids, besides 8 bytes for its id
FREE_SHARE = 2  # without a budget, 1/FREE_SHARE of the free GPU memory is used


class DeviceLayout(NamedTuple):
    """How the records of a table use GPU memory.

    Attributes:
        mode: "device" (all on device), "cached" (some on device, others in RAM) or "host" (all in RAM).
        near_rows: records on device.
        bytes: of GPU memory, map and index included.
    """

    mode: str
    near_rows: int
    bytes: int

    def __str__(self) -> str:
        if self.mode == "cached":
            return f"{counted(self.near_rows, 'row')} cached ({format_bytes(self.bytes)})"
        return {"device": f"all rows ({format_bytes(self.bytes)})", "host": "rows used in RAM"}[self.mode]


def choose(spec: Spec, budget: int) -> DeviceLayout:
    """Choose the layout of a table of `spec` with dense ids, for a budget of GPU memory in bytes."""
    rows = spec.rows
    assert rows is not None  # dense ids only
    whole, mapping = rows * (spec.record_bytes + MAP_BYTES), rows * MAP_BYTES
    if whole <= budget and rows <= MOST_SLOTS:
        return DeviceLayout("device", rows, whole)
    near = min(max(0, budget - mapping) // (spec.record_bytes + SLOT_BYTES), MOST_SLOTS, rows - 1)
    return DeviceLayout("host", 0, mapping) if near < 1 else cached(spec, near, mapping)


class DeviceDemand(NamedTuple):
    """The GPU memory that a table or pool can use: bytes of its map, and bytes of all its records."""

    map: int
    records: int


def need_of(spec: Spec, slots: int | None = None) -> DeviceDemand:
    """Return the demand of a table with dense ids, or of one on disk with `slots` slots in RAM."""
    if slots is None:
        return DeviceDemand(MAP_BYTES * (spec.rows or 0), spec.table_bytes or 0)
    return DeviceDemand(MAP_BYTES * slots, slots * (spec.record_bytes + SLOT_BYTES))


def share(own: DeviceDemand, others: Sequence[DeviceDemand], budget: int) -> int:
    """Return the GPU memory of one of several tables or pools.

    Each gets its map. The rest is shared evenly, but no table gets more than all of its rows need. The others get its
    remainder. So small tables, whose rows are used often, are entirely on device.

    Args:
        others: of the tables that wait for their share.
        budget: bytes that are not assigned yet.
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
    """Return the layout of a table on disk with `slots` cache slots in RAM, for `budget` bytes of GPU memory."""
    mapping = slots * MAP_BYTES
    near = min(max(0, budget - mapping) // (spec.record_bytes + SLOT_BYTES), MOST_SLOTS, slots)
    return cached(spec, near, mapping)


def slot_bytes(spec: Spec) -> int:
    """Return the bytes of a cached record of a table without dense ids, with its map entry."""
    return spec.record_bytes + SLOT_BYTES + MAP_BYTES


def all_open(spec: Spec, budget: int) -> DeviceLayout:
    """Return the layout of a table of hashed ids with all rows on device, as many as `budget` bytes hold."""
    rows = min(budget // open_bytes(spec), spec.rows or MOST_SLOTS, MOST_SLOTS)
    return DeviceLayout("device" if rows else "host", rows, rows * open_bytes(spec))


def open_bytes(spec: Spec) -> int:
    """Return the bytes of a record of a table of hashed ids that is entirely on device, index included."""
    return spec.record_bytes + MAP_BYTES + 8 * (1 + OPEN_ENTRIES)


def cached(spec: Spec, near_rows: int, mapping: int = 0) -> DeviceLayout:
    """Return the layout of a cache of `near_rows` records beside a map of `mapping` bytes; without records, of none."""
    if near_rows < 1:
        return DeviceLayout("host", 0, 0)
    return DeviceLayout("cached", near_rows, mapping + near_rows * (spec.record_bytes + SLOT_BYTES))


def memory_for(spec: Spec, near_rows: int, slots: int | None = None) -> int:
    """Return a `device_memory` in bytes with which a table of `spec` keeps `near_rows` records on device.

    Args:
        slots: of a table on disk, the rows that its cache in RAM holds: ``stats()["cache_slots"]``.

    Example:
        >>> import embedrock as er
        >>> memory_for(er.Table(rows=1000, dim=16, rule=er.Adam()).spec, 100)
        24900
    """
    if spec.rows is None and slots is None:
        return near_rows * open_bytes(spec)
    return ((spec.rows or 0) if slots is None else slots) * MAP_BYTES + near_rows * (spec.record_bytes + SLOT_BYTES)
