"""RAM: what a table takes once it has seen so many rows, and what a process takes at its peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from embedrock.machine.arena import HUGE_PAGE, PAGE
from embedrock.spec import Spec
from embedrock.store.reading import STAGING_BYTES
from embedrock.tiers.cache import Cache, Whole
from embedrock.tiers.directory import Direct, Hashed
from embedrock.tiers.placing import OVERLAY_ROW_BYTES, place

FITS_BYTES = 32 << 20  # up to which a table in RAM is direct, and never worth a file
DENSE = 0.5  # share of a huge page's pages in use, from which on all of it is
BATCH_COPIES = 2  # of the rows of a batch, of all tables: as they were read, and gradients
ROW_COPIES = 2  # of the different rows of one table: sums, and first values or what was read
POSITION_BYTES, UNIQUE_BYTES = 40, 64  # of a plan and what it is made with: for each id, and each different one
MARGIN_BYTES = 6 << 20  # threads, and memory that is kept for the next batch
WRITING_BYTES = 8 << 20  # to write rows that leave a cache


def in_ram(spec: Spec, rows: float) -> int:
    """Return the RAM of a table that is there wholly, with a record of each of so many rows."""
    if spec.rows is not None and spec.rows * spec.record_bytes + Direct.bytes_for(spec.rows) <= FITS_BYTES:
        return _scattered(spec, spec.rows, rows) + Direct.bytes_for(spec.rows)
    return in_group(spec, min(rows, spec.rows or math.inf))


def in_group(spec: Spec, rows: float) -> int:
    """Return the RAM of a group in RAM, of all of whose rows `spec` tells, with a record of each of so many."""
    return int(rows) * spec.record_bytes + Hashed.bytes_for(int(rows)) + HUGE_PAGE


def on_disk(spec: Spec, memory: int, rows: float, evicts: bool, is_pool: bool = False) -> int:
    """Return the RAM of a table on disk with so much ``memory=`` that has seen so many rows, which is no more.

    Args:
        spec: of the table.
        memory: its budget.
        rows: that it has seen.
        evicts: whether some have left its cache.
        is_pool: whether it is a group of tables.
    """
    placement = place(spec, memory, "the table", is_pool=is_pool)
    if placement.direct and spec.rows is not None:
        return min(memory, _scattered(spec, spec.rows, rows) + Whole.bytes_for(spec.rows))
    filled = int(min(placement.slots, rows))
    share = filled / placement.slots
    index = placement.overlay_bytes if math.isinf(rows) else min(placement.overlay_bytes, int(rows) * OVERLAY_ROW_BYTES)
    directory = Cache.bytes_for(placement.slots) if evicts else int(1.5 * share * Cache.bytes_for(placement.slots))
    return min(memory, filled * spec.record_bytes + HUGE_PAGE + directory + (index if evicts else 0))


def _scattered(spec: Spec, slots: int, rows: float) -> int:
    """Return the bytes of the pages that records are in whose slots are anywhere."""
    whole = slots * spec.record_bytes
    touched = min(rows, slots) * (spec.record_bytes + PAGE - 1) / max(whole, 1)  # pages, over those that there are
    share = -math.expm1(-touched) if rows < slots else 1.0
    return whole if share >= DENSE else int(whole * share)


class Batch(NamedTuple):
    """What a batch has of a table.

    Attributes:
        spec: of the table.
        positions: ids.
        rows: different ones.
    """

    spec: Spec
    positions: float
    rows: float


def besides(base_bytes: int, batches: Sequence[Batch], any_on_disk: bool) -> int:
    """Return the RAM of a process besides its tables: Python and libraries, a batch of each, and buffers of files."""
    values = sum(one.positions * (4 * one.spec.dim * BATCH_COPIES + POSITION_BYTES) for one in batches)
    rows = max(
        one.rows * (4 * one.spec.dim * ROW_COPIES + UNIQUE_BYTES + any_on_disk * one.spec.record_bytes)
        for one in batches
    )
    files = STAGING_BYTES + WRITING_BYTES if any_on_disk else 0
    return int(base_bytes + values + rows + files + MARGIN_BYTES)
