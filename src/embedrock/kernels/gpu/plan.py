"""Planning of a batch on the GPU from its sorted keys: see ``tests/reference/device.py`` for each kernel's reference.

Each program counts the keys that begin in its block of positions, and tells the others. Then it waits for the counts of
all earlier blocks. These run or are done, as programs start in order. So a framework only sorts, one kernel does the
rest, and the number of unique keys stays on the device.
"""

import functools

import triton.language as tl

from embedrock.kernels.gpu.addresses import TOUCHING_WARPS, WORDS, touch_keys
from embedrock.kernels.gpu.gate import raise_flag
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

BLOCK = 1024
TILE = tl.constexpr(1024)  # counts that are added up at once

NUMBER = tl.constexpr(1)  # error code of a key out of range

_WORDS = tl.constexpr(WORDS)
_NOBODY = tl.constexpr(2**62)


def blocks(n):
    """Return the number of counts for n positions or keys."""
    return -(-n // BLOCK)


@inlined
def sum_before(counts, stop, TOLD=0):
    """Return the sum of ``counts[:stop]``; with `TOLD` = 1, wait for them: 0 is none, and 1 was added to each."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    start = 0
    while start < stop:  # in the interpreter, `range` cannot count to a tensor
        here = start + lane < stop
        count = tl.load(counts + start + lane, mask=here, other=TOLD, volatile=TOLD == 1)
        if TOLD:
            while tl.min(count, axis=0) == 0:
                count = tl.load(counts + start + lane, mask=here, other=TOLD, volatile=True)
        total += count - TOLD
        start += TILE
    return tl.sum(total, axis=0)


@inlined
def load_heads(keys, i, n, places=None):
    """Return keys, and a mask of the first one among equal neighbours; `places` of the keys, if not in order."""
    place, last, after = i, i - 1, (i > 0) & (i < n)
    if places is not None:
        place, last = tl.load(places + i, mask=i < n, other=0), tl.load(places + i - 1, mask=after, other=0)
    key = tl.load(keys + place, mask=i < n, other=0).to(tl.int64)
    before = tl.load(keys + last, mask=after, other=0).to(tl.int64)
    return key, (i < n) & ((i == 0) | (key != before))


@inlined
def clear(tickets, size, program, programs, LANES: tl.constexpr):
    """Set counters to 0, by some programs."""
    i = program * LANES + tl.arange(0, LANES)
    while tl.min(i, axis=0) < size:  # of many tables, more than positions
        tl.store(tickets + i, tl.zeros([LANES], tl.int32), mask=i < size)
        i += programs * LANES


@inlined
def _check_range(keys, limit, fault, n):
    first = tl.load(keys, mask=n > 0, other=0).to(tl.int64)
    last = tl.load(keys + n - 1, mask=n > 0, other=0).to(tl.int64)
    bad = ((first < 0) | (last >= limit)) & (tl.load(fault) == 0)
    tl.debug_barrier()  # the stores overwrite the code read above
    if bad:
        raise_flag(fault, bad)
        tl.store(fault, NUMBER)
        tl.store(fault + 2, tl.where(first < 0, first, last))


@kernel("n", "limit")
def _check(keys, limit, fault, n):
    _check_range(keys, limit, fault, n)


def check(keys, limit, fault):
    """Record a key outside ``[0, limit)`` of sorted keys, unless `fault` has an error already."""
    launch(_check, 1, keys, limit, fault, keys.shape[0], num_warps=1)


@inlined
def first_from(keys, low, high, key):
    """Return, in each lane, the first place from `low` on with a sorted key of at least `key`, or `high`."""
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) // 2
        is_open = low < high
        below = is_open & (tl.load(keys + middle, mask=is_open, other=0) < key)
        low = tl.where(below, middle + 1, low)
        high = tl.where(is_open & (below == 0), middle, high)
    return low


@inlined
def _write_bounds(entries, tables, keys, count, ids, order, starts, bounds, LANES: tl.constexpr):
    t = tl.arange(0, LANES)
    here = t < tables
    entry = entries + t * _WORDS
    first, rows = tl.load(entry, mask=here, other=_NOBODY), tl.load(entry + 1, mask=here, other=0)
    low = tl.zeros([LANES], tl.int32)
    high = low + count
    begin, stop = first_from(keys, low, high, first - 1), first_from(keys, low, high, first + rows + 1)
    tl.store(bounds + t, begin, mask=here)
    tl.store(bounds + t + 1, stop, mask=t == tables - 1)
    some = here & (begin < stop)
    is_low = some & (tl.load(keys + begin, mask=some, other=0) == first - 1)
    is_high = some & (tl.load(keys + stop - 1, mask=some, other=0) == first + rows)
    bad = is_low | is_high
    row = tl.where(is_low, begin, stop - 1)
    value = tl.load(
        ids + tl.load(order + tl.load(starts + row, mask=bad, other=0), mask=bad, other=0), mask=bad, other=0
    )
    padding = tl.load(entry + 11, mask=here, other=-2)
    padded = first_from(keys, begin, stop, first + padding)
    some = here & (padding >= 0) & (padded < stop)
    is_padding = some & (tl.load(keys + padded, mask=some, other=0) == first + padding)
    tl.store(bounds + tables + 1 + t, tl.where(is_padding, padded, -1), mask=here)
    fault = tl.load(entry + 7, mask=bad, other=0).to(tl.pointer_type(tl.int64))
    bad = bad & (tl.load(fault, mask=bad, other=1) == 0)
    raise_flag(fault, bad)
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(fault, tl.zeros_like(first) + NUMBER, mask=bad)
    tl.store(fault + 2, value.to(tl.int64), mask=bad)


@kernel("tables")
def _bounds(entries, tables, keys, count, ids, order, starts, bounds, LANES: tl.constexpr):
    _write_bounds(entries, tables, keys, tl.load(count), ids, order, starts, bounds, LANES)


def bounds(tables, keys, count, ids, order, starts, bounds):
    """Write the range of each table's rows in a plan, and its padding row; record ids outside of a table.

    Args:
        tables: see `addresses.DeviceTables`.
        keys, count, order, starts: of the plan.
        ids: (n,), the argument of `joint.join`.
        bounds: int32 (2 * k + 1,) receives each table's first row, the last one's end, and each padding row (-1: none).
    """
    k = tables.entries.shape[0]
    args = tables.entries, k, keys, count, ids, order, starts, bounds
    launch(_bounds, 1, *args, num_warps=1, LANES=lanes_of(k))


@functools.cache
def lanes_of(k):
    """Return the lanes of a program with one lane for each of k tables."""
    return max(2, 1 << (k - 1).bit_length())


@kernel("n", "size", "limit", "tables", anywhere=("shares", "times"))
def _collect(
    keys,
    nobody,
    order,
    scan,
    unique,
    starts,
    inverse,
    count,
    tickets,
    size,
    n,
    of_positions,
    places,
    positions,
    limit,
    fault,
    ids,
    bounds,
    entries,
    tables,
    shares,
    times,
    LANES: tl.constexpr,
    TABLES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    i = program * LANES + tl.arange(0, LANES)
    key, heads = load_heads(keys, i, n, places)
    if places is None:
        position = tl.load(order + i, mask=i < n, other=0)
    else:
        _, begun = load_heads(of_positions, i, n)
        heads |= begun
        position = tl.load(positions + tl.load(places + i, mask=i < n, other=0), mask=i < n, other=0)
        tl.store(order + i, position, mask=i < n)
    own = tl.sum(heads.to(tl.int32), axis=0)
    tl.atomic_xchg(scan + 1 + program, own + 1, sem="relaxed")
    before = sum_before(scan + 1, program, TOLD=1)
    rank = before + tl.cumsum(heads.to(tl.int32), axis=0) - 1
    # Equal keys make room at the end, where each of them leaves one `nobody`.
    tl.store(unique + tl.where(heads, rank, n - i + rank), tl.where(heads, key, nobody), mask=i < n)
    tl.store(starts + rank, i, mask=heads)
    tl.store(inverse + position, rank, mask=i < n)
    if program == programs - 1:
        tl.store(starts + before + own, n)
        tl.store(count, before + own)
    clear(tickets, size, program, programs, LANES)
    if fault is not None:  # noqa: SIM102
        if program == 0:  # (Triton would evaluate both sides of `and`)
            _check_range(keys, limit, fault, n)
    if times is not None:
        touch_keys(key, heads, entries, tables, shares, times)
    if is_last(scan, programs - 1):
        clear(scan + 1, programs, 0, 1, LANES)
        if bounds is not None:
            _write_bounds(entries, tables, unique, tl.load(count), ids, order, starts, bounds, TABLES)


def scan_words(n):
    """Return the number of words of a scan over n positions."""
    return 1 + (blocks(n) or 1)


def collect(keys, nobody, order, scan, plan, tables=None, search=None, found=None, of=None, checked=None):
    """Write the plan of sorted keys.

    Args:
        keys: int64 or int32 (n,).
        nobody: the key that follows the unique keys.
        order: int64 (n,), the positions of the keys.
        scan: int32 (scan_words(n),), zeros, and zeros again afterwards.
        plan: receives unique keys, starts, inverse and count; and int32 tickets, which are set to 0.
        tables: see `addresses.DeviceTables`, if the kernel does more:
        search: the work of `cache.touch` for these tables and this search.
        found: the work of `bounds`, with these arguments of it: ids and bounds.
        of: of keys that were then sorted by table: the table of each, (n,) integers; their places in `keys`, int64; and
            the positions of `keys`, int64. Equal keys of different tables differ, and `order` receives the positions.
        checked: the work of `check`, with these arguments of it: limit and fault.
    """
    n = keys.shape[0]
    arrays = keys, nobody, order, scan, *plan, plan[-1].shape[0], n
    args = *arrays, *(of or (None, None, None)), *(checked or (0, None)), *(found or (None, None))
    entries, k = (None, 0) if tables is None else (tables.entries, tables.entries.shape[0])
    shares, times, warps = (None, None, 4) if search is None else (search.shares, search.times, TOUCHING_WARPS)
    _to_collect(lanes_of(k), warps).launch(blocks(n) or 1, *args, entries, k, shares, times)


@functools.cache
def _to_collect(tables, warps):
    return ReadyKernel(_collect, num_warps=warps, TABLES=tables, LANES=BLOCK)
