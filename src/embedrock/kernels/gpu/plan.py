"""Planning of a batch on the GPU from its sorted keys: see ``tests/reference/device.py`` for each kernel's reference.

There are two passes over blocks of positions. The first one counts, and the second one adds up the counts of earlier
blocks. So a framework only sorts, and the number of unique keys stays on the device.
"""

import functools

import triton.language as tl

from embedrock.kernels.gpu.addresses import TOUCHING_WARPS, WORDS, touch_keys
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

BLOCK = 1024
TILE = tl.constexpr(1024)  # counts that are added up at once

LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
NUMBER = tl.constexpr(1)  # error code of a key out of range

_WORDS = tl.constexpr(WORDS)
_NOBODY = tl.constexpr(2**62)


def blocks(n):
    """Return the number of counts for n positions or keys."""
    return -(-n // BLOCK)


@inlined
def sum_before(counts, stop):
    """Return the sum of ``counts[:stop]``."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    start = 0
    while start < stop:  # in the interpreter, `range` cannot count to a tensor
        total += tl.load(counts + start + lane, mask=start + lane < stop, other=0)
        start += TILE
    return tl.sum(total, axis=0)


@inlined
def load_heads(keys, i, n):
    """Return keys, and a mask of the first one among equal neighbours."""
    key = tl.load(keys + i, mask=i < n, other=0).to(tl.int64)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < n), other=0).to(tl.int64)
    return key, (i < n) & ((i == 0) | (key != before))


@kernel("n")
def _narrow(keys, narrowed, n, LANES: tl.constexpr):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    key = tl.load(keys + i, mask=i < n, other=0)
    tl.store(narrowed + i, tl.minimum(tl.maximum(key, LEAST), MOST).to(tl.int32), mask=i < n)


def narrow(keys, narrowed):
    """Write keys int64 (n,) to `narrowed` int32 (n,), clamped to the range of int32."""
    n = keys.shape[0]
    _ready_to_narrow.launch(blocks(n), keys, narrowed, n)


@inlined
def clear(tickets, size, program, LANES: tl.constexpr):
    """Set counters to 0, by all programs."""
    i = program * LANES + tl.arange(0, LANES)
    while tl.min(i, axis=0) < size:  # of many tables, more than positions
        tl.store(tickets + i, tl.zeros([LANES], tl.int32), mask=i < size)
        i += tl.num_programs(0) * LANES


@kernel("size", "n", "number")
def _mark(keys, limit, counts, fault, tickets, size, n, number, LANES: tl.constexpr):
    program = tl.program_id(0)
    _, heads = load_heads(keys, program * LANES + tl.arange(0, LANES), n)
    tl.store(counts + program, tl.sum(heads.to(tl.int32), axis=0), mask=n > 0)
    clear(tickets, size, program, LANES)
    if fault is not None and program == 0:
        first = tl.load(keys, mask=n > 0, other=0).to(tl.int64)
        last = tl.load(keys + n - 1, mask=n > 0, other=0).to(tl.int64)
        bad = ((first < 0) | (last >= limit)) & (tl.load(fault) == 0)
        tl.debug_barrier()  # the stores overwrite the code read above
        if bad:
            tl.store(fault, NUMBER)
            tl.store(fault + 1, number)
            tl.store(fault + 2, tl.where(first < 0, first, last))


def mark(keys, limit, counts, fault, tickets, number):
    """Count the keys that begin in each block; record one outside ``[0, limit)``, unless `fault` has an error already.

    If `fault` is None, keys are not checked. `tickets`, int32, are set to 0.
    """
    n = keys.shape[0]
    _ready_to_mark.launch(blocks(n) or 1, keys, limit, counts, fault, tickets, tickets.shape[0], n, number)


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
def _write_bounds(entries, tables, keys, count, ids, order, starts, bounds, number, LANES: tl.constexpr):
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
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(fault, tl.zeros_like(first) + NUMBER, mask=bad)
    tl.store(fault + 1, tl.zeros_like(first) + number, mask=bad)
    tl.store(fault + 2, value.to(tl.int64), mask=bad)


@kernel("tables", "number")
def _bounds(entries, tables, keys, count, ids, order, starts, bounds, number, LANES: tl.constexpr):
    _write_bounds(entries, tables, keys, tl.load(count), ids, order, starts, bounds, number, LANES)


def bounds(tables, keys, count, ids, order, starts, bounds, number):
    """Write the range of each table's rows in a plan, and its padding row; record ids outside of a table.

    Args:
        tables: see `addresses.DeviceTables`.
        keys, count, order, starts: of the plan.
        ids: (n,), the argument of `joint.join`.
        bounds: int32 (2 * k + 1,) receives each table's first row, the last one's end, and each padding row (-1: none).
        number: of the batch, for the table's error.
    """
    k = tables.entries.shape[0]
    args = tables.entries, k, keys, count, ids, order, starts, bounds, number
    launch(_bounds, 1, *args, num_warps=1, LANES=lanes_of(k))


def lanes_of(k):
    """Return the lanes of a program with one lane for each of k tables."""
    return max(2, 1 << (k - 1).bit_length())


@kernel("n", "number", "tables", "stamp", "span", "hand", anywhere=("shares", "times"))
def _collect(
    keys,
    nobody,
    order,
    counts,
    unique,
    starts,
    inverse,
    count,
    tickets,
    n,
    of_positions,
    ids,
    bounds,
    number,
    entries,
    tables,
    shares,
    times,
    stamp,
    span,
    fading,
    hand,
    LANES: tl.constexpr,
    TABLES: tl.constexpr,
):
    program = tl.program_id(0)
    i = program * LANES + tl.arange(0, LANES)
    key, heads = load_heads(keys, i, n)
    if of_positions is not None:
        _, begun = load_heads(of_positions, i, n)
        heads |= begun
    rank = sum_before(counts, program) + tl.cumsum(heads.to(tl.int32), axis=0) - 1
    tl.store(unique + rank, key, mask=heads)
    tl.store(starts + rank, i, mask=heads)
    position = tl.load(order + i, mask=i < n, other=0)
    tl.store(inverse + position, rank, mask=i < n)
    total = sum_before(counts, tl.cdiv(n, LANES))
    tl.store(unique + i, tl.zeros([LANES], tl.int64) + nobody, mask=(i >= total) & (i < n))
    if program == 0:
        tl.store(starts + total, n)
        tl.store(count, total)
    if fading is not None:
        touch_keys(key, heads, entries, tables, shares, times, (stamp, span, fading, hand))
    if bounds is not None:  # noqa: SIM102
        if is_last(tickets, tl.num_programs(0) - 1):  # (Triton would evaluate both sides of `and`)
            _write_bounds(entries, tables, unique, total, ids, order, starts, bounds, number, TABLES)


def collect(
    keys, nobody, order, counts, unique, starts, inverse, count, tickets, tables=None, search=None, found=None, of=None
):
    """Write the plan of sorted `keys` with positions `order`, from the `counts` of `mark`.

    Beyond the unique keys, `unique` gets the key `nobody`.

    Args:
        keys, nobody, order, counts, unique, starts, inverse, count: see above.
        tickets: int32, zeros; the first one is zero again afterwards.
        tables: see `addresses.DeviceTables`, if the kernel does more:
        search: the work of `cache.touch` for these tables and this search.
        found: the work of `bounds`, with these arguments of it: ids, bounds and number.
        of: (n,) integers, the table of each key: equal keys of different tables differ.
    """
    n = keys.shape[0]
    args = keys, nobody, order, counts, unique, starts, inverse, count, tickets, n, of, *(found or _NO_BOUNDS)
    if tables is None:
        _to_collect(1, 4).launch(blocks(n + 1), *args, None, 0, *_NO_SEARCH)
        return
    k, warps, touched = tables.entries.shape[0], 4, _NO_SEARCH
    if search is not None:
        touched, warps = (search.shares, search.times, *search.time), TOUCHING_WARPS
    _to_collect(lanes_of(k), warps).launch(blocks(n + 1), *args, tables.entries, k, *touched)


_NO_BOUNDS = None, None, 0
_NO_SEARCH = None, None, 0, 0, None, 0


@functools.cache
def _to_collect(tables, warps):
    return ReadyKernel(_collect, num_warps=warps, TABLES=tables, LANES=BLOCK)


# Kernels that each batch launches, prepared once.
_ready_to_narrow, _ready_to_mark = ReadyKernel(_narrow, LANES=BLOCK), ReadyKernel(_mark, LANES=BLOCK)
