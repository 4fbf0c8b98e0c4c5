"""RAM of a table after a number of rows, and of a process at its peak."""

from __future__ import annotations

import math
from collections.abc import Sequence

from embedrock.planner.demand import Demand
from embedrock.spec.spec import Spec
from embedrock.storage.backend import RamLayout
from embedrock.storage.cache import FullCache, SlotCache
from embedrock.storage.disk_backend import LEAST_OVERLAY_BYTES
from embedrock.storage.ram_layout import OVERLAY_ROW_BYTES
from embedrock.storage.slot_index import DenseIndex, HashIndex
from embedrock.store.log_index import ENTRY_BYTES, FULLEST
from embedrock.store.record_store import LEAST_PIECE_BYTES, PIECES
from embedrock.system.arena import HUGE_PAGE, PAGE

FITS_BYTES = 32 << 20  # up to this size a table in RAM is dense, and never worth a file
DENSE = 0.5  # share of a huge page's pages in use that makes all of it resident
BATCH_COPIES = 2  # of the rows of a batch, of all tables: rows as read, and gradients
ROW_COPIES = 2  # of the different rows of one table: sums, and initial values or rows as read
POSITION_BYTES, UNIQUE_BYTES = 40, 64  # of a plan and its scratch memory: for each id, and each different one
MARGIN_BYTES = 6 << 20  # threads, and memory kept for the next batch
FOLD_BYTES, FOLD_ROW_BYTES = 1 << 20, 100  # to sort rows of logs: besides buffers, and for each row
MOST_FOLDED = 400_000  # rows: the measured maximum; large tables merge a part of their logs at a time
INDEXED_ROW_BYTES = ENTRY_BYTES / FULLEST  # of the index of a row in a log, when it is full
LISTED_ROW_BYTES, MOST_LISTED = 8, 1 << 20  # of a row in a log without a commit; maximum of such rows
STARTS = 8  # possible starts of the first huge page of memory: results are their mean
SPILL_BYTES = 6 << 20  # if rows leave a cache: buffers to write and to read
FILES_BYTES = 4 << 20  # of buffers, beyond those of a small table on disk
TABLE_BYTES = 300 << 10  # of each table: objects, threads, and one kept batch


def in_ram(demand: Demand, rows: float) -> int:
    """Return the RAM of a table, or group, in RAM, with `rows` records."""
    spec, slots = demand.spec, demand.spec.rows
    if slots is not None and not demand.members:
        index = DenseIndex.bytes_for(slots)
        if slots * spec.record_bytes + index <= FITS_BYTES:
            return _scattered(spec, slots, rows) + index
    held = int(min(rows, math.inf if slots is None else slots))
    return held * spec.record_bytes + HashIndex.bytes_for(held, slots) + HUGE_PAGE


def on_disk(spec: Spec, placement: RamLayout, rows: float, logged: float) -> int:
    """Return the RAM of a table on disk after a number of rows.

    Args:
        spec: of the table.
        placement: layout of its RAM.
        rows: number of different rows so far.
        logged: rows that have left its cache, which are listed until the log is committed.
    """
    memory = placement.budget_bytes
    if placement.direct and spec.rows is not None:
        return min(memory, _scattered(spec, spec.rows, rows) + FullCache.bytes_for(spec.rows))
    filled = int(min(placement.slots, rows))
    records = _in_order(filled * spec.record_bytes, placement.slots * spec.record_bytes)
    share = filled / placement.slots
    whole = SlotCache.bytes_for(placement.slots)
    directory = whole if logged else int(1.5 * share * whole)
    most = max(placement.overlay_bytes, LEAST_OVERLAY_BYTES)
    index = 0 if not logged else most if math.isinf(rows) else min(most, int(rows) * OVERLAY_ROW_BYTES)
    beyond = max(0, index - placement.overlay_bytes) + int(min(logged, MOST_LISTED)) * LISTED_ROW_BYTES
    return min(memory, records + directory + index) + beyond


def most_on_disk(placement: RamLayout) -> int:
    """Return the most RAM that a table on disk takes, once all commits are made."""
    return placement.budget_bytes + max(0, LEAST_OVERLAY_BYTES - placement.overlay_bytes)


def _in_order(nbytes: int, most: int) -> int:
    """Return the resident bytes of an `Arena` of `most` bytes that is filled in order, up to `nbytes`.

    The result is the mean over possible starts of its huge pages.
    """
    starts, taken = range(0, HUGE_PAGE, HUGE_PAGE // STARTS), 0
    for start in starts:
        number, huge = (nbytes - start) // HUGE_PAGE, (most - start) // HUGE_PAGE
        is_huge = number < huge and nbytes - start >= (0 if number else HUGE_PAGE // 2)
        taken += start + (number + 1) * HUGE_PAGE if is_huge and nbytes > start else nbytes
    return min(taken // len(starts), most)


def folding(placement: RamLayout, rows: float, logged: float) -> int:
    """Return the additional RAM to merge logs: none while they are short. One table at a time merges.

    Args:
        placement: layout of the table's RAM, a part of which is for the log index.
        rows: number of different rows so far.
        logged: rows that have left its cache.
    """
    most_rows = max(placement.overlay_bytes, LEAST_OVERLAY_BYTES) / INDEXED_ROW_BYTES
    is_long = min(max(0.0, rows - placement.slots / 2), logged) >= most_rows  # the most popular rows never leave
    if placement.direct or not is_long:
        return 0
    buffers = max(placement.buffer_bytes, PIECES * LEAST_PIECE_BYTES)
    return FOLD_BYTES + buffers + int(min(rows, most_rows, MOST_FOLDED)) * FOLD_ROW_BYTES


def _scattered(spec: Spec, slots: int, rows: float) -> int:
    whole = slots * spec.record_bytes
    touched = min(rows, slots) * (spec.record_bytes + PAGE - 1) / max(whole, 1)  # touched pages over all pages
    share = -math.expm1(-touched) if rows < slots else 1.0
    return whole if share >= DENSE else int(whole * share)


def besides(base_bytes: int, demands: Sequence[Demand], used: Sequence[float], any_on_disk: bool) -> int:
    """Return the RAM of a process besides its tables: Python and libraries, a batch of each, and buffers of files.

    Args:
        base_bytes: of a process without tables.
        demands: of the tables.
        used: different rows of a batch, for each.
        any_on_disk: whether any table is on disk.
    """
    values = sum(one.positions * (4 * one.spec.dim * BATCH_COPIES + POSITION_BYTES) for one in demands)
    rows = max(
        rows * (4 * one.spec.dim * ROW_COPIES + UNIQUE_BYTES + any_on_disk * one.spec.record_bytes)
        for one, rows in zip(demands, used, strict=True)
    )
    files = FILES_BYTES + SPILL_BYTES if any_on_disk else 0
    return int(base_bytes + values + rows + files + len(demands) * TABLE_BYTES + MARGIN_BYTES)
