"""Planning of a batch on the GPU from its sorted keys: see ``tests/reference/device.py`` for each kernel's reference.

There are two passes over blocks of positions. The first one counts, and the second one adds up the counts of earlier
blocks. So a framework only sorts, and the number of unique keys stays on the device.
"""

import triton.language as tl

from embedrock.kernels.gpu.addresses import slots_of, touch_rows
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel, launch

BLOCK = 1024
TILE = tl.constexpr(1024)  # counts that are added up at once

LEAST, MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
NUMBER = tl.constexpr(1)  # error code of a key out of range


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


@kernel("n", "number")
def _mark(keys, limit, counts, fault, n, number, LANES: tl.constexpr):
    program = tl.program_id(0)
    _, heads = load_heads(keys, program * LANES + tl.arange(0, LANES), n)
    tl.store(counts + program, tl.sum(heads.to(tl.int32), axis=0))
    if limit is not None and program == 0:
        first, last = tl.load(keys).to(tl.int64), tl.load(keys + n - 1).to(tl.int64)
        bad = ((first < 0) | (last >= limit)) & (tl.load(fault) == 0)
        tl.debug_barrier()  # the stores overwrite the code read above
        if bad:
            tl.store(fault, NUMBER)
            tl.store(fault + 1, number)
            tl.store(fault + 2, tl.where(first < 0, first, last))


def mark(keys, limit, counts, fault, number):
    """Count the keys that begin in each block; record one outside ``[0, limit)``, unless `fault` has an error already.

    If `limit` is None, no key is outside.
    """
    n = keys.shape[0]
    _ready_to_mark.launch(blocks(n), keys, limit, counts, fault, n, number)


@kernel("n", "size", "stamp", "span")
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
    tables,
    size,
    n,
    entry,
    stamp,
    span,
    fading,
    missing,
    histogram,
    BINS: tl.constexpr,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    i = program * LANES + tl.arange(0, LANES)
    key, heads = load_heads(keys, i, n)
    if tables is not None:
        _, begun = load_heads(tables, i, n)
        heads |= begun
    rank = sum_before(counts, program) + tl.cumsum(heads.to(tl.int32), axis=0) - 1
    tl.store(unique + rank, key, mask=heads)
    tl.store(starts + rank, i, mask=heads)
    position = tl.load(order + i, mask=i < n, other=0)
    tl.store(inverse + position, rank, mask=i < n)
    total = sum_before(counts, tl.cdiv(n, LANES))
    tl.store(unique + i, tl.zeros([LANES], tl.int64) + nobody, mask=(i >= total) & (i < n))
    while tl.min(i, axis=0) < size:  # of many tables, more than positions
        tl.store(tickets + i, tl.zeros([LANES], tl.int32), mask=i < size)
        i += tl.num_programs(0) * LANES
    if program == 0:
        tl.store(starts + total, n)
        tl.store(count, total)
    if entry is not None:
        known = heads & (key >= 0) & (key < tl.load(entry + 1))
        where, _, worth, used, _, tallies = slots_of(entry)
        tl.store(missing + program, touch_rows(key, known, where, worth, used, tallies, stamp, span, fading))
        if program == 0:
            tl.store(histogram + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))


def collect(keys, nobody, order, counts, unique, starts, inverse, count, tickets, arrival=None, tables=None):
    """Write the plan of sorted `keys` with positions `order`, from the `counts` of `mark`.

    Beyond the unique keys, `unique` gets the key `nobody`. `tickets`, int32, are set to 0. With an `arrival`, one table
    and the scratch for `cache.touch`, the kernel also does its work. With `tables`, (n,) integers, equal keys of
    different tables differ.
    """
    n = keys.shape[0]
    args = keys, nobody, order, counts, unique, starts, inverse, count, tickets, tables, tickets.shape[0], n
    if arrival is None:
        _ready_to_collect.launch(blocks(n + 1), *args, *_NO_ARRIVAL)
        return
    (entry, *_), search = arrival
    touched = entry, *search.time[:3], search.counts, search.histogram
    launch(_collect, blocks(n + 1), *args, *touched, BINS=search.histogram.shape[0], LANES=BLOCK)


# Kernels that each batch launches, prepared once.
_ready_to_narrow, _ready_to_mark = ReadyKernel(_narrow, LANES=BLOCK), ReadyKernel(_mark, LANES=BLOCK)
_ready_to_collect = ReadyKernel(_collect, BINS=1, LANES=BLOCK)
_NO_ARRIVAL = None, 0, 0, 0.0, None, None


@kernel()
def _adopt(fault, ahead):
    lane = tl.arange(0, 4)
    code, found = tl.load(fault), tl.load(ahead + lane)
    tl.debug_barrier()  # the stores overwrite the code read above
    tl.store(fault + lane, found, mask=(code == 0) & (tl.max(found, axis=0) > 0))


def adopt(fault, ahead):
    """Copy the error int64 (4,) of a prefetched batch to `fault`, unless `fault` has one already."""
    launch(_adopt, 1, fault, ahead, num_warps=1)
