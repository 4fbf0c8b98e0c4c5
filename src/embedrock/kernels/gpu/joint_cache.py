"""Insertion and eviction in the device caches of several tables at once, as ``cache.py`` does for one.

Each table has its own cache. The same parts of kernels decide about insertion and eviction for each table alone. The
batch's rows come from a joint plan, see ``joint.py``. The search windows and the victims lie table by table, and each
window begins with a block of its own.

For each batch, `touch`, `offer`, `choose` and `swap` run on one stream, in that order. Then `cache.exchange` runs on
any stream.
"""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.addresses import WORDS, last_begun, span_of, touch_rows
from embedrock.kernels.gpu.cache import (
    BINS,
    are_missing,
    choose_slots,
    clear_moves,
    offer_slots,
    swap_rows,
)
from embedrock.kernels.gpu.plan import BLOCK, blocks, sum_before
from embedrock.kernels.gpu.runtime import inlined, kernel, launch

SHARE_WORDS = 5
WARPS = 8  # fewer would take too many registers for a loop over tables
TIME_WORDS = 12  # int32; numbers of a CUDA graph are at multiples of 16 bytes

_BINS = tl.constexpr(BINS)
_WORDS, _SHARE, _TIME = tl.constexpr(WORDS), tl.constexpr(SHARE_WORDS), tl.constexpr(TIME_WORDS)
_SLOT_BITS, _NO_SLOT = tl.constexpr(31), tl.constexpr((1 << 31) - 1)


class VictimShare(NamedTuple):
    """A table's share of a search for victims.

    Attributes:
        fading: the bits of a float32: see `addresses.BatchTime`.
        window: number of device slots to search.
        size: maximum number of victims.
        block: index of the first block of its window, among all blocks.
        victim: index of its first victim, among all victims.
    """

    fading: int
    window: int
    size: int
    block: int
    victim: int


class JointVictimScratch(NamedTuple):
    """Scratch of one batch's search for victims, of k tables.

    Attributes:
        shares: int64 (k, SHARE_WORDS), see `VictimShare`.
        times: int32 (k, TIME_WORDS): stamp, span and first device slot of the window of each table, each at 16 bytes.
        misses: int32 (k,): rows to load of each table; zeros before `touch`.
        counts: int32 (blocks(n),): rows to load in each block of keys.
        bins: uint8 (blocks * BLOCK,), see `cache.VictimScratch`; blocks of all windows.
        table: int32 (blocks * BINS,), see there.
        histogram: int32 (k * BINS,), see there.
        victims: int64 (size,), see there, in the order of tables, also after sorting. They have the keys of their
            owners. The key after a table's last row means no victim.
    """

    shares: Any
    times: Any
    misses: Any
    counts: Any
    bins: Any
    table: Any
    histogram: Any
    victims: Any


@inlined
def _slots(entry):
    """Return the cache state of a table, in the order of `addresses.CacheSlots`."""
    return (
        tl.load(entry + 2).to(tl.pointer_type(tl.int32)),
        tl.load(entry + 12).to(tl.pointer_type(tl.int64)),
        tl.load(entry + 13).to(tl.pointer_type(tl.float32)),
        tl.load(entry + 14).to(tl.pointer_type(tl.int32)),
        tl.load(entry + 15).to(tl.pointer_type(tl.uint8)),
        tl.load(entry + 16).to(tl.pointer_type(tl.int64)),
    )


@inlined
def _time(times, share):
    """Return the stamp, the span and the fading of a table's batch."""
    return tl.load(times), tl.load(times + 4), tl.load(share).to(tl.int32).to(tl.float32, bitcast=True)


@kernel("count", "tables", anywhere=("shares", "times", "misses"))
def _touch_tables(keys, count, entries, tables, shares, times, misses, counts, histogram, LANES: tl.constexpr):
    program, found = tl.program_id(0), 0
    u = program * LANES + tl.arange(0, LANES)
    here = u < tl.load(count)
    key = tl.load(keys + u, mask=here, other=0)
    table, last = span_of(entries, tables, key, here)
    while table <= last:
        entry = entries + table * _WORDS
        own = key - tl.load(entry)
        known = here & (own >= 0) & (own < tl.load(entry + 1))
        stamp, span, fading = _time(times + table * _TIME, shares + table * _SHARE)
        where, _, worth, used, _, tallies = _slots(entry)
        missing = touch_rows(own, known, where, worth, used, tallies, stamp, span, fading)
        tl.atomic_add(misses + table, missing, sem="relaxed")
        found += missing
        table += 1
    tl.store(counts + program, found)
    row = program
    while row < tables:
        tl.store(histogram + row * _BINS + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
        row += tl.num_programs(0)


def touch(tables, search, keys, count):
    """Mark rows as used by a batch, and count rows to load.

    Args:
        tables: see `addresses.DeviceTables`; all have a cache.
        search: scratch.
        keys: int64 (n,), of the batch, ascending, without repeats.
        count: number of keys, int32 (1,).
    """
    args = tables.entries.shape[0], search.shares, search.times, search.misses, search.counts, search.histogram
    programs = blocks(keys.shape[0])
    launch(_touch_tables, programs, keys, count, tables.entries, *args, num_warps=WARPS, LANES=BLOCK)


@inlined
def _part(shares, tables, LANES: tl.constexpr):
    """Return the table and part of a window that a program handles, and the window's number of parts."""
    program = tl.program_id(0)
    table = last_begun(shares + 3, tables, program, _SHARE)
    share = shares + table * _SHARE
    return table, share, program - tl.load(share + 3).to(tl.int32), tl.cdiv(tl.load(share + 1).to(tl.int32), LANES)


@kernel("tables", anywhere=("shares", "times", "misses"))
def _offer_tables(entries, tables, shares, times, misses, bins, table_of_bins, histogram, LANES: tl.constexpr):
    table, share, part, parts = _part(shares, tables, LANES)
    if tl.load(misses + table) > 0:
        entry, first = entries + table * _WORDS, tl.load(share + 3)
        stamp, span, fading = _time(times + table * _TIME, share)
        _, owner, worth, used, _, _ = _slots(entry)
        hand, capacity = tl.load(times + table * _TIME + 8), tl.load(entry + 17).to(tl.int32)
        known = owner, worth, used, hand, capacity, tl.load(share + 1).to(tl.int32), stamp, span, fading
        scratch = bins + first * LANES, table_of_bins + first * _BINS, histogram + table * _BINS
        offer_slots(part, parts, *known, *scratch, LANES)


def offer(tables, search):
    """Assign bins to the device slots of the tables' windows."""
    args = search.shares, search.times, search.misses, search.bins, search.table, search.histogram
    launch(_offer_tables, blocks(search.bins.shape[0]), tables.entries, tables.entries.shape[0], *args, LANES=BLOCK)


@kernel("tables", anywhere=("shares", "times", "misses"))
def _choose_tables(
    entries, tables, shares, times, misses, bins, table_of_bins, histogram, victims, LANES: tl.constexpr
):
    table, share, part, parts = _part(shares, tables, LANES)
    entry, first = entries + table * _WORDS, tl.load(share + 3)
    hand, capacity = tl.load(times + table * _TIME + 8), tl.load(entry + 17).to(tl.int32)
    base = tl.load(entry)
    nobody = ((base + tl.load(entry + 1) + 1) << _SLOT_BITS) | _NO_SLOT
    known = tl.load(entry + 12).to(tl.pointer_type(tl.int64)), hand, capacity, tl.load(share + 1).to(tl.int32)
    scratch = bins + first * LANES, table_of_bins + first * _BINS, histogram + table * _BINS
    own = victims + tl.load(share + 4), tl.load(share + 2).to(tl.int32), base, nobody
    choose_slots(part, parts, tl.load(misses + table), *known, *scratch, *own, LANES)


def choose(tables, search):
    """Write the victims of each table: the lowest scores, one for each row to load."""
    args = search.shares, search.times, search.misses, search.bins, search.table, search.histogram, search.victims
    launch(_choose_tables, blocks(search.bins.shape[0]), tables.entries, tables.entries.shape[0], *args, LANES=BLOCK)


@kernel("count", "tables", "size", "record_bytes", anywhere=("shares", "times", "misses"))
def _swap_tables(
    keys, count, entries, tables, shares, times, misses, counts, victims, moves, size, record_bytes, LANES: tl.constexpr
):
    program = tl.program_id(0)
    u = program * LANES + tl.arange(0, LANES)
    clear_moves(u, victims, moves, size)
    here = u < tl.load(count)
    key = tl.load(keys + u, mask=here, other=0)
    table, last = span_of(entries, tables, key, here)
    ranked, before = sum_before(counts, program), sum_before(misses, table)
    while table <= last:
        entry, share = entries + table * _WORDS, shares + table * _SHARE
        own = key - tl.load(entry)
        known = here & (own >= 0) & (own < tl.load(entry + 1))
        stamp, span, fading = _time(times + table * _TIME, share)
        slots = _slots(entry)
        missing, age, then = are_missing(own, known, slots[0], stamp, span)
        # The table's missing rows in earlier programs: none if its rows begin here.
        rank = tl.maximum(ranked - before, 0) + tl.cumsum(missing.to(tl.int32), axis=0) - 1
        memory = tl.load(entry + 3), tl.load(entry + 4), record_bytes
        first = tl.load(share + 4)
        mine = victims + first, moves + first * 3, tl.load(share + 2).to(tl.int32)
        swap_rows(own, missing, age, then, rank, *slots, *memory, stamp, fading, *mine)
        before += tl.load(misses + table)
        table += 1


def swap(tables, search, keys, count, moves):
    """Give the slots of victims to the rows to load: see `cache.swap`.

    Args:
        tables, search, keys, count: as in `touch`. ``search.victims`` may be sorted after `choose`.
        moves: int64 (len(victims), 3), see `cache.swap`.
    """
    size, entries = search.victims.shape[0], tables.entries
    args = search.shares, search.times, search.misses, search.counts, search.victims, moves, size
    args = keys, count, entries, entries.shape[0], *args, tables.form.record_bytes
    launch(_swap_tables, blocks(max(keys.shape[0], size)), *args, num_warps=WARPS, LANES=BLOCK)
