"""RAM layout of a table on disk: cache slots, and room for the indexes of its files."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from embedrock.errors import ArgumentError, MemoryBudgetError
from embedrock.spec.spec import Spec
from embedrock.storage.backend import RamLayout
from embedrock.storage.budget import BudgetRequest, MemoryBudget
from embedrock.storage.cache import FullCache, SlotCache
from embedrock.store.manifest import MAX_RECORD_BYTES
from embedrock.system.sizes import format_bytes

BUFFER_BYTES = 16 << 20  # staging of reads and commits, at most
INDEX_SHARE = 4  # at most 1/INDEX_SHARE of the budget is reserved for the index of compacted rows
# A compaction rewrites nearly all of a large table. So there should be room for many rows before one begins: 8 million
# with a budget of 1 GiB.
OVERLAY_SIXTEENTHS = 3  # at most so many sixteenths of the budget are reserved for the log index ...
OVERLAY_ROW_BYTES = 24  # ... and at most the bytes of all rows
UNBOUNDED = 1 << 62  # of bytes, more than any budget
BUFFER_SHARE = 16  # at most 1/BUFFER_SHARE of the budget is reserved for buffers


def place(
    spec: Spec, budget: int, subject: str, note: str = "", is_pool: bool = False, members: Sequence[int] = ()
) -> RamLayout:
    """Choose how a table of `spec` uses `budget` bytes; `note` explains the budget in an error.

    For a pool, `spec` has the rows of all members. Keys of a pool are not dense, so no slot is an id. `members` has the
    rows of each member, if known.

    Raises:
        ArgumentError: a row is too large for a file.
        MemoryBudgetError: the budget holds no cache of use.
    """
    if spec.record_bytes >= MAX_RECORD_BYTES:
        raise ArgumentError(
            f"a row of {subject} takes {spec.record_bytes} bytes, and on disk it must take less than "
            f"{format_bytes(MAX_RECORD_BYTES)}. Use a smaller `dim`, or a rule with less state."
        )
    log_index, buffers = _overlay_bytes(spec, budget, members), min(BUFFER_BYTES, budget // BUFFER_SHARE)
    rows, index = spec.rows, min(_index_bytes(spec), budget // INDEX_SHARE)
    room = budget - log_index - buffers - index
    if rows is not None and not is_pool and rows * spec.record_bytes + FullCache.bytes_for(rows) <= room:
        return RamLayout(budget, rows, True, log_index, buffer_bytes=buffers)
    slots = slots_in(room, spec.record_bytes)
    if rows is not None and is_pool:
        slots = min(slots, rows)
    if slots < 1:
        raise MemoryBudgetError(
            f"a row of {subject} takes {spec.record_bytes} bytes, and its cache must hold one: "
            f"memory={format_bytes(budget)}{note}. Raise memory= to {memory_for(spec, 1)} bytes or more."
        )
    return RamLayout(budget, slots, False, log_index, buffer_bytes=buffers)


def _overlay_bytes(spec: Spec, budget: int, members: Sequence[int]) -> int:
    """Return the part of a budget that is reserved for the log index.

    It is for tables with more rows than RAM holds. Each member of a pool counts as a table alone with an even share of
    the budget. Members that fit it entirely need no more than their rows. No member gets more than an entry for each
    row.
    """
    if spec.rows is None:
        return budget * OVERLAY_SIXTEENTHS // 16
    rows = np.sort(np.array(members or [spec.rows], np.float64))  # exact up to 2**53
    nbytes, larger = rows * spec.record_bytes, np.arange(len(rows) - 1, -1, -1)
    whole = int(np.count_nonzero(np.cumsum(nbytes) + larger * nbytes <= budget))
    even = (budget - int(nbytes[:whole].sum())) * OVERLAY_SIXTEENTHS / 16 / max(1, len(rows) - whole)
    entries = np.minimum(rows * OVERLAY_ROW_BYTES, np.where(np.arange(len(rows)) < whole, np.inf, even))
    return min(int(entries.sum()), budget * OVERLAY_SIXTEENTHS // 16)


def slots_in(nbytes: int, record_bytes: int) -> int:
    """Return how many records a cache of `nbytes` holds, index included."""
    low, high = 0, max(0, nbytes) // record_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = middle * record_bytes + SlotCache.bytes_for(middle) <= nbytes
        low, high = (middle, high) if fits else (low, middle)
    return low


def memory_for(spec: Spec, slots: int) -> int:
    """Return a budget in bytes whose cache holds at least `slots` rows."""
    used = slots * spec.record_bytes + SlotCache.bytes_for(slots)
    rest = 1 - OVERLAY_SIXTEENTHS / 16 - 1 / BUFFER_SHARE
    return math.ceil(min((used + _index_bytes(spec)) / rest, used / (rest - 1 / INDEX_SHARE))) + 16


def most_for(spec: Spec, is_pool: bool = False) -> int:
    """Return the largest useful budget in bytes: it has a slot for each row."""
    if spec.rows is None:
        return UNBOUNDED
    whole = spec.rows * spec.record_bytes + (SlotCache if is_pool else FullCache).bytes_for(spec.rows)
    shares = OVERLAY_SIXTEENTHS / 16 + 1 / BUFFER_SHARE + 1 / INDEX_SHARE  # of the budget; each has an upper limit, too
    rest = spec.rows * OVERLAY_ROW_BYTES + BUFFER_BYTES + _index_bytes(spec)
    return min(whole + rest, math.ceil(whole / (1 - shares)) + 16)


def claim_of(spec: Spec, is_pool: bool = False) -> BudgetRequest:
    """Return a table's request to a shared budget: at least a cache of one row."""
    return BudgetRequest(memory_for(spec, 1), most_for(spec, is_pool))


def check_budget(spec: Spec, budget: MemoryBudget, subject: str, is_pool: bool = False) -> None:
    """Raise the errors of `place` for a table with a backend of `spec`."""
    place(spec, budget.offer(claim_of(spec, is_pool)), subject, budget.note, is_pool)


def _index_bytes(spec: Spec) -> int:
    """Return the most RAM of the index of sorted segments: a bit for each row, and ranks."""
    return 0 if spec.rows is None else spec.rows // 8 + spec.rows // 128
