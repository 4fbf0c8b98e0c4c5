"""Insertion and eviction in a device cache: see ``tests/reference/device.py`` for each kernel's reference.

For each batch, `touch`, `offer`, `choose` and `swap` run on one stream, in that order. Then `exchange` runs on any
stream. The host waits for none of them. Grids have their maximum size, and programs without work return.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu.addresses import (
    AGES,
    FAR,
    BatchTime,
    CacheSlots,
    fade,
    far_word,
    read_word,
    touch_rows,
)
from embedrock.kernels.gpu.numbers import loaded
from embedrock.kernels.gpu.plan import BLOCK, blocks, load_heads, sum_before
from embedrock.kernels.gpu.runtime import inlined, kernel, launch

BINS = 128
NOBODY = 2**63 - 1

_BINS = tl.constexpr(BINS)
_LAST = tl.constexpr(BINS - 1)  # the bin of slots that may not be evicted
_NOBODY = tl.constexpr(NOBODY)
_AGES = tl.constexpr(AGES)
_FAR = tl.constexpr(FAR)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0
_TO_BIN = tl.constexpr(20)  # leaves 8 bins to a doubling of the score
_MIDDLE = tl.constexpr(33)  # the bin of score 1
_SLOT_BITS = tl.constexpr(31)
_SLOT_MASK = tl.constexpr((1 << 31) - 1)
WORDS = 2048  # of the records that one program copies at once


class VictimScratch(NamedTuple):
    """Scratch of one batch's search for victims. The next batch on the same stream may reuse it at once.

    Attributes:
        counts: int32 (blocks(n),): rows to load in each block of keys.
        bins: uint8 (window,): bin of each device slot of the window, ascending with its score.
        table: int32 (BINS, blocks(window)): number of a block's slots in the bins below each bin.
        histogram: int32 (BINS,): number of the window's slots in each bin.
        victims: int64 (at most n,): ``(owner + 1) << 31 | device slot`` of the victims, then `NOBODY`, with the lower
            31 bits of no slot. No more rows are loaded than it holds.
    """

    counts: Any
    bins: Any
    table: Any
    histogram: Any
    victims: Any


class CacheInsertion(NamedTuple):
    """Insertion of a batch's rows into a device cache.

    Attributes:
        slots: state of the cache.
        search: scratch.
        time: of the batch.
    """

    slots: CacheSlots
    search: VictimScratch
    time: BatchTime


# ---------------------------------------------------------------- rows of a batch


@inlined
def _load_rows(keys, count, limit, u):
    """Return keys, and a mask of the rows among them, without repeats. Equal keys are adjacent."""
    if count.dtype.is_ptr():
        count = tl.load(count)
    key, heads = load_heads(keys, u, count)
    return key, heads & (key >= 0) & (key < limit)


@kernel("count", "stamp", "span")
def _touch(
    keys, count, where, worth, used, tallies, limit, stamp, span, fading, counts, histogram, LANES: tl.constexpr
):
    program = tl.program_id(0)
    key, known = _load_rows(keys, count, limit, program * LANES + tl.arange(0, LANES))
    tl.store(counts + program, touch_rows(key, known, where, worth, used, tallies, stamp, span, fading))
    if program == 0:
        tl.store(histogram + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))


def touch(slots, search, time, keys, count, limit):
    """Mark rows as used by a batch, and count rows to load: on host, and unused by unfinished batches."""
    where, _, worth, used, _, tallies = slots
    args = limit, *time[:3], search.counts, search.histogram
    launch(_touch, blocks(keys.shape[0]), keys, count, where, worth, used, tallies, *args, LANES=BLOCK)


# ---------------------------------------------------------------- victims


@inlined
def _slot(j, hand, capacity):
    rest = capacity - hand
    return tl.where(j < rest, hand + j, j - rest)


@inlined
def offer_slots(
    part, parts, owner, worth, used, hand, capacity, window, stamp, span, fading, bins, table, histogram, LANES
):
    """Assign bins to the slots of a program's part of a window, one of `parts` parts."""
    bin_, j = tl.arange(0, _BINS), part * LANES + tl.arange(0, LANES)
    inside = j < window
    v = _slot(j, hand, capacity)
    age = (stamp - tl.load(used + v, mask=inside, other=0)) & _AGES
    rest = fade(tl.load(worth + v, mask=inside, other=1.0), age, fading)
    mine = ((rest.to(tl.int32, bitcast=True) - _ONE) >> _TO_BIN) + _MIDDLE
    mine = tl.minimum(tl.maximum(mine, 1), _LAST - 1)
    free = tl.load(owner + v, mask=inside, other=0) < 0
    mine = tl.where(free, 0, tl.where(inside & (age > span), mine, _LAST))
    tl.store(bins + j, mine.to(tl.uint8), mask=inside)
    found = tl.histogram(mine, _BINS)
    tl.store(table + bin_ * parts + part, tl.cumsum(found, axis=0) - found)
    tl.atomic_add(histogram + bin_, found, sem="relaxed")


@kernel("hand", "window", "stop", "stamp", "span")
def _offer(
    owner,
    worth,
    used,
    hand,
    capacity,
    window,
    counts,
    stop,
    stamp,
    span,
    fading,
    bins,
    table,
    histogram,
    LANES: tl.constexpr,
):
    stamp, span = loaded(stamp), loaded(span)
    if sum_before(counts, stop) > 0:
        known = owner, worth, used, loaded(hand), capacity, window, stamp, span, fading
        offer_slots(tl.program_id(0), tl.num_programs(0), *known, bins, table, histogram, LANES)


def offer(slots, search, time):
    """Assign bins to the device slots from ``time.hand`` on, cyclically; ``search.bins`` sets their number."""
    capacity, window = slots.owner.shape[0], search.bins.shape[0]
    args = slots.owner, slots.worth, slots.used, time.hand, capacity, window, search.counts, search.counts.shape[0]
    launch(_offer, blocks(window), *args, *time[:3], search.bins, search.table, search.histogram, LANES=BLOCK)


@inlined
def choose_slots(
    part, parts, misses, owner, hand, capacity, window, bins, table, histogram, victims, size, base, nobody, LANES
):
    """Write the victims of one part of a window, for `misses` rows to load.

    Owners are counted from `base`. Places up to `size` without a victim get `nobody`.
    """
    bin_, j = tl.arange(0, _BINS), part * LANES + tl.arange(0, LANES)
    found = tl.where(bin_ < _LAST, tl.load(histogram + bin_), 0)
    wanted = tl.minimum(tl.minimum(misses, tl.sum(found, axis=0)), size)
    tl.store(victims + j, tl.zeros([LANES], tl.int64) + nobody, mask=(j >= wanted) & (j < size))
    if (wanted > 0) & (part * LANES < window):
        # The victims are all slots in bins below the edge, and the first ones in the edge bin.
        edge = tl.sum(((tl.cumsum(found, axis=0) < wanted) & (bin_ < _LAST)).to(tl.int32), axis=0)
        quota = wanted - tl.sum(tl.where(bin_ < edge, found, 0), axis=0)
        row = table + edge * parts
        below = sum_before(row, part)
        ties = sum_before(row + parts, part) - below
        mine = tl.load(bins + j, mask=j < window, other=_LAST).to(tl.int32)
        tie = (mine == edge).to(tl.int32)
        taken = (mine < edge) | ((tie == 1) & (ties + tl.cumsum(tie, axis=0) <= quota))
        rank = below + tl.minimum(ties, quota) + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        v = _slot(j, hand, capacity)
        whose = tl.load(owner + v, mask=taken, other=0)
        tl.store(victims + rank, ((base + whose + 1) << _SLOT_BITS) | v, mask=taken)


@kernel("hand", "window", "stop", "size")
def _choose(owner, hand, capacity, window, counts, stop, bins, table, histogram, victims, size, LANES: tl.constexpr):
    part, parts, misses = tl.program_id(0), tl.cdiv(window, LANES), sum_before(counts, stop)
    known = owner, loaded(hand), capacity, window, bins, table, histogram
    choose_slots(part, parts, misses, *known, victims, size, 0, _NOBODY, LANES)


def choose(slots, search, time):
    """Write the victims with the lowest scores, one for each row to load, in the order of the window."""
    capacity, window, size = slots.owner.shape[0], search.bins.shape[0], search.victims.shape[0]
    args = slots.owner, time.hand, capacity, window, search.counts, search.counts.shape[0], search.bins, search.table
    launch(_choose, blocks(max(window, size)), *args, search.histogram, search.victims, size, LANES=BLOCK)


# ---------------------------------------------------------------- exchange of records


@inlined
def _leave(where, owner, worth, used, dirty, slot, goes):
    """Evict the records of device slots; return their owners, which slots had one, and which are dirty."""
    whose = tl.load(owner + slot, mask=goes, other=-1)
    owned = goes & (whose >= 0)
    word = far_word(0, tl.load(used + slot, mask=owned, other=0), tl.load(worth + slot, mask=owned, other=1.0))
    tl.store(where + whose, word, mask=owned)
    return whose, owned, owned & (tl.load(dirty + slot, mask=owned, other=0) != 0)


@inlined
def is_nobody(victim):
    return (victim & _SLOT_MASK) == _SLOT_MASK


@inlined
def clear_moves(u, victims, moves, size):
    """Mark the moves of missing victims as empty."""
    nobody = is_nobody(tl.load(victims + u, mask=u < size, other=0))
    tl.store(moves + u.to(tl.int64) * 3, tl.full(u.shape, -1, tl.int64), mask=nobody)


@inlined
def are_missing(key, known, where, stamp, span):
    """Return a mask of the rows to load, the age of their last use, and their score then."""
    word = tl.load(where + key, mask=known, other=0)
    absent, last, then = read_word(word)
    age = (stamp - last) & _AGES
    return known & (word < 0) & (absent == 0) & (age > span), age, then


@inlined
def swap_rows(
    key, missing, age, then, rank, where, owner, worth, used, dirty, tallies, near, far, record_bytes, stamp, fading,
    victims, moves, size,
):  # fmt: skip
    """Give the slots of victims to missing rows, by rank."""
    victim = tl.load(victims + rank, mask=missing & (rank < size), other=_NOBODY)
    comes = ~is_nobody(victim)
    slot = (victim & _SLOT_MASK).to(tl.int32)
    whose, owned, back = _leave(where, owner, worth, used, dirty, slot, comes)
    move = moves + rank.to(tl.int64) * 3
    tl.store(move, near + slot.to(tl.int64) * record_bytes, mask=comes)
    tl.store(move + 1, tl.where(back, far + whose * record_bytes, -1), mask=comes)
    tl.store(move + 2, far + key * record_bytes, mask=comes)

    now = fade(then, age, fading) + 1.0
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(owner + slot, key, mask=comes)
    tl.store(worth + slot, now, mask=comes)
    tl.store(used + slot, tl.zeros_like(slot) + stamp, mask=comes)
    tl.store(dirty + slot, tl.zeros_like(slot).to(tl.uint8), mask=comes)
    tl.store(where + key, tl.where(comes, slot, far_word(0, stamp, now)), mask=missing)
    tl.atomic_add(tallies + 3, tl.sum(comes.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 4, tl.sum(owned.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 5, tl.sum(back.to(tl.int64), axis=0), sem="relaxed")


@kernel("count", "stamp", "span", "size", "record_bytes")
def _swap(
    keys,
    count,
    where,
    owner,
    worth,
    used,
    dirty,
    tallies,
    near,
    far,
    record_bytes,
    limit,
    stamp,
    span,
    fading,
    counts,
    victims,
    moves,
    size,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    u = program * LANES + tl.arange(0, LANES)
    clear_moves(u, victims, moves, size)
    stamp, span = loaded(stamp), loaded(span)
    key, here = _load_rows(keys, count, limit, u)
    missing, age, then = are_missing(key, here, where, stamp, span)
    rank = sum_before(counts, program) + tl.cumsum(missing.to(tl.int32), axis=0) - 1
    slots = where, owner, worth, used, dirty, tallies
    swap_rows(
        key, missing, age, then, rank, *slots, near, far, record_bytes, stamp, fading, victims, moves, size
    )  # fmt: skip


def swap(slots, search, time, keys, count, limit, memory, moves):
    """Give the slots of victims to the rows to load, in order. Rows without a slot are used zero-copy on host.

    Args:
        slots, search, time, keys, count, limit: as in `touch`. There are `count` keys (n,), int32 (1,) or a number;
            equal ones are adjacent, and count once. ``search.victims`` may be sorted after `choose`.
        memory: addresses of the slots.
        moves: int64 (len(victims), 3) receives three addresses a move, for `exchange`. First, the device slot (-1: no
            move). Second, the old record's host slot (-1: clean). Third, the new record's host slot.
    """
    size = search.victims.shape[0]
    args = *memory, limit, *time[:3], search.counts, search.victims, moves, size
    launch(_swap, blocks(max(keys.shape[0], size)), keys, count, *slots, *args, LANES=BLOCK)


@kernel("size")
def _forget(keys, where, owner, size, LANES: tl.constexpr):
    u = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = u < size
    key = tl.load(keys + u, mask=inside, other=0)
    slot = tl.load(where + key, mask=inside, other=-1)
    tl.store(owner + slot, tl.full([LANES], -1, tl.int64), mask=slot >= 0)
    tl.store(where + key, tl.full([LANES], _FAR, tl.int32), mask=inside)


def forget(slots, keys):
    """Remove rows from the cache. Other rows will reuse their host slots `keys`, int64 (n,), without repeats."""
    size = keys.shape[0]
    launch(_forget, blocks(size), keys, slots.where, slots.owner, size, LANES=BLOCK)


# ---------------------------------------------------------------- bytes


@inlined
def _words(address, BYTES: tl.constexpr):
    words = address.to(tl.pointer_type(tl.int32))
    if BYTES % 16 == 0:
        words = tl.multiple_of(words, 16)
    return words[:, None]


@kernel("size")
def _exchange(moves, size, BYTES: tl.constexpr, RECORDS: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * RECORDS + tl.arange(0, RECORDS)
    slot = tl.load(moves + r * 3, mask=r < size, other=-1)
    if tl.max(slot, axis=0) >= 0:
        comes = slot >= 0
        whose = tl.load(moves + r * 3 + 1, mask=comes, other=-1)
        key = tl.load(moves + r * 3 + 2, mask=comes, other=0)
        goes = whose >= 0
        here, home, there = _words(slot, BYTES), _words(whose, BYTES), _words(key, BYTES)
        for start in range(0, BYTES // 4, WIDTH):
            column = start + tl.arange(0, WIDTH)[None, :]
            inside = column < BYTES // 4
            old = tl.load(here + column, mask=goes[:, None] & inside, other=0)
            new = tl.load(there + column, mask=comes[:, None] & inside, other=0)
            tl.debug_barrier()  # the stores overwrite the records read above
            tl.store(home + column, old, mask=goes[:, None] & inside)
            tl.store(here + column, new, mask=comes[:, None] & inside)


def _tiles(size, record_bytes):
    width = min(WORDS // 2, triton.next_power_of_2(record_bytes // 4))
    records = WORDS // width
    return -(-size // records), {"BYTES": record_bytes, "RECORDS": records, "WIDTH": width}


def exchange(moves, record_bytes):
    """Move records as `swap` decided: out of device slots and into them at the same time."""
    size = moves.shape[0]
    grid_size, constexprs = _tiles(size, record_bytes)
    launch(_exchange, grid_size, moves, size, **constexprs)


@kernel("size")
def _copy_records(sources, targets, size, BYTES: tl.constexpr, RECORDS: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * RECORDS + tl.arange(0, RECORDS)
    source = tl.load(sources + r, mask=r < size, other=-1)
    target = tl.load(targets + r, mask=r < size, other=-1)
    here = ((source >= 0) & (target >= 0))[:, None]
    source, target = _words(source, BYTES), _words(target, BYTES)
    for start in range(0, BYTES // 4, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        moved = tl.load(source + column, mask=here & (column < BYTES // 4), other=0)
        tl.store(target + column, moved, mask=here & (column < BYTES // 4))


def copy_records(sources, targets, record_bytes):
    """Copy records between addresses int64 (n,); a negative address skips its record."""
    size = sources.shape[0]
    grid_size, constexprs = _tiles(size, record_bytes)
    launch(_copy_records, grid_size, sources, targets, size, **constexprs)
