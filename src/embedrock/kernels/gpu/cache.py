"""Insertion and eviction in device caches: see ``tests/reference/device.py`` for each kernel's reference.

Each table has its own cache. For each batch, `touch`, `offer`, `choose` and `swap` run on one stream, in that order.
Then `exchange` runs on any stream. The host waits for none of them. Grids have their maximum size, and programs without
work return.

The batch may be of several tables, with rows from a joint plan, see ``joint.py``. The search windows and the victims
then lie table by table, and each window begins with a block of its own.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu.addresses import (
    AGES,
    BINS,
    FAR,
    SHARE_WORDS,
    TOUCHING_WARPS,
    WORDS,
    BatchTime,
    fade,
    far_word,
    last_begun,
    read_word,
    rows_of,
    slots_of,
    span_of,
    time_of,
    touch_keys,
)
from embedrock.kernels.gpu.plan import BLOCK, blocks, load_heads, sum_before
from embedrock.kernels.gpu.runtime import inlined, kernel, launch

COPIED = 2048  # words of the records that one program copies at once

_BINS = tl.constexpr(BINS)
_LAST = tl.constexpr(BINS - 1)  # the bin of slots that may not be evicted
_WORDS, _SHARE = tl.constexpr(WORDS), tl.constexpr(SHARE_WORDS)
_AGES = tl.constexpr(AGES)
_FAR = tl.constexpr(FAR)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0
_TO_BIN = tl.constexpr(20)  # leaves 8 bins to a doubling of the score
_MIDDLE = tl.constexpr(33)  # the bin of score 1
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


class VictimScratch(NamedTuple):
    """Scratch of one batch's search for victims, of k tables. The next batch on the same stream may reuse it at once.

    Attributes:
        counts: int32 (blocks(n),): rows to load in each block of keys.
        bins: uint8 (blocks * BLOCK,), of all windows: bin of each device slot, ascending with its score.
        table: int32 (blocks * BINS,): number of a block's slots in the bins below each bin, bin by bin.
        histogram: int32 (k * BINS,): number of a window's slots in each bin.
        victims: int64: ``(owner's key + 1) << 31 | device slot`` of the victims, then the key after the table's last
            row, with the lower 31 bits of no slot. No more rows are loaded than it holds.
        shares: int64 (k, SHARE_WORDS), see `VictimShare`. None: one table has all of `victims`, and its window is
            all of `bins`, of any number.
        times: int32 (k, TIME_WORDS): stamp, span and first device slot of the window of each table, each at 16 bytes.
            None: one table, see `time`.
        misses: int32 (k,): rows to load of each table; zeros before `touch`. None: one table.
        time: of the batch, of one table.
        moves: int64 (victims, 3), memory for `swap`; None: there is none yet.
    """

    counts: Any
    bins: Any
    table: Any
    histogram: Any
    victims: Any
    shares: Any = None
    times: Any = None
    misses: Any = None
    time: BatchTime = BatchTime(0, 0, 0.0)
    moves: Any = None


# ---------------------------------------------------------------- rows of a batch


@inlined
def _keys_of(keys, count, u):
    """Return keys, and a mask of the first of equal neighbours."""
    if count.dtype.is_ptr():
        count = tl.load(count)
    return load_heads(keys, u, count)


@kernel("count", "tables", "stamp", "span", "hand", anywhere=("shares", "times", "misses"))
def _touch(
    keys,
    count,
    entries,
    tables,
    shares,
    times,
    misses,
    stamp,
    span,
    fading,
    hand,
    counts,
    histogram,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    key, heads = _keys_of(keys, count, program * LANES + tl.arange(0, LANES))
    time = stamp, span, fading, hand
    found = touch_keys(key, heads, entries, tables, shares, times, misses, time, histogram)
    tl.store(counts + program, found)


def touch(tables, search, keys, count):
    """Mark rows as used by a batch, and count rows to load: on host, and unused by unfinished batches.

    Args:
        tables: see `addresses.DeviceTables`; all have a cache.
        search: scratch.
        keys: int64 or int32 (n,), of the batch; equal ones are adjacent, and count once. Of several tables, ascending.
        count: number of keys, int32 (1,) or a number.
    """
    args = *_of_tables(tables, search), search.counts, search.histogram
    launch(_touch, blocks(keys.shape[0]), keys, count, *args, num_warps=TOUCHING_WARPS, LANES=BLOCK)


def _of_tables(tables, search):
    entries = tables.entries
    return entries, entries.shape[0], search.shares, search.times, search.misses, *search.time


# ---------------------------------------------------------------- victims


@inlined
def _slot(j, hand, capacity):
    rest = capacity - hand
    return tl.where(j < rest, hand + j, j - rest)


@inlined
def _part(shares, tables, window, size, LANES):
    """Return the table and part of its window that a program handles, the number of parts, and the table's share."""
    part, table, block, victim = tl.program_id(0), 0, 0, 0
    if shares is not None:
        table = last_begun(shares + 3, tables, part, _SHARE)
        share = shares + table * _SHARE
        window, size = tl.load(share + 1).to(tl.int32), tl.load(share + 2).to(tl.int32)
        block, victim = tl.load(share + 3).to(tl.int32), tl.load(share + 4)
    return table, part - block, tl.cdiv(window, LANES), window, size, block, victim


@inlined
def _misses_of(table, misses, counts, parts):
    """Return the number of a table's rows to load; `parts`: blocks of keys."""
    return sum_before(counts, parts) if misses is None else tl.load(misses + table)


@kernel("tables", "stamp", "span", "hand", "stop", "window", anywhere=("shares", "times", "misses"))
def _offer(
    entries,
    tables,
    shares,
    times,
    misses,
    stamp,
    span,
    fading,
    hand,
    counts,
    stop,
    bins,
    window,
    table_of_bins,
    histogram,
    LANES: tl.constexpr,
):
    table, part, parts, window, _size, block, _victim = _part(shares, tables, window, 0, LANES)
    if _misses_of(table, misses, counts, stop) > 0:
        now, unfinished, fades, first = time_of(table, shares, times, stamp, span, fading, hand)
        entry = entries + table * _WORDS
        _, owner, worth, used, _, _ = slots_of(entry)
        bin_, j = tl.arange(0, _BINS), part * LANES + tl.arange(0, LANES)
        inside = j < window
        v = _slot(j, first, tl.load(entry + 17).to(tl.int32))
        age = (now - tl.load(used + v, mask=inside, other=0)) & _AGES
        rest = fade(tl.load(worth + v, mask=inside, other=1.0), age, fades)
        mine = ((rest.to(tl.int32, bitcast=True) - _ONE) >> _TO_BIN) + _MIDDLE
        mine = tl.minimum(tl.maximum(mine, 1), _LAST - 1)
        free = tl.load(owner + v, mask=inside, other=0) < 0
        mine = tl.where(free, 0, tl.where(inside & (age > unfinished), mine, _LAST))
        tl.store(bins + block * LANES + j, mine.to(tl.uint8), mask=inside)
        found = tl.histogram(mine, _BINS)
        tl.store(table_of_bins + block * _BINS + bin_ * parts + part, tl.cumsum(found, axis=0) - found)
        tl.atomic_add(histogram + table * _BINS + bin_, found, sem="relaxed")


def offer(tables, search):
    """Assign bins to the device slots of the tables' windows, cyclically from their first device slots on."""
    counts, bins = search.counts, search.bins
    args = *_of_tables(tables, search), counts, counts.shape[0], bins, bins.shape[0], search.table, search.histogram
    launch(_offer, blocks(bins.shape[0]), *args, num_warps=TOUCHING_WARPS, LANES=BLOCK)


@kernel("tables", "stamp", "span", "hand", "stop", "window", "size", anywhere=("shares", "times", "misses"))
def _choose(
    entries,
    tables,
    shares,
    times,
    misses,
    stamp,
    span,
    fading,
    hand,
    counts,
    stop,
    bins,
    window,
    table_of_bins,
    histogram,
    victims,
    size,
    LANES: tl.constexpr,
):
    table, part, parts, window, size, block, victim = _part(shares, tables, window, size, LANES)
    entry, victims = entries + table * _WORDS, victims + victim
    bin_, j = tl.arange(0, _BINS), part * LANES + tl.arange(0, LANES)
    found = tl.where(bin_ < _LAST, tl.load(histogram + table * _BINS + bin_), 0)
    wanted = tl.minimum(tl.minimum(_misses_of(table, misses, counts, stop), tl.sum(found, axis=0)), size)
    base = tl.load(entry)
    nobody = ((base + tl.load(entry + 1) + 1) << _SLOT_BITS) | _NO_SLOT
    tl.store(victims + j, tl.zeros([LANES], tl.int64) + nobody, mask=(j >= wanted) & (j < size))
    if (wanted > 0) & (part * LANES < window):
        # The victims are all slots in bins below the edge, and the first ones in the edge bin.
        edge = tl.sum(((tl.cumsum(found, axis=0) < wanted) & (bin_ < _LAST)).to(tl.int32), axis=0)
        quota = wanted - tl.sum(tl.where(bin_ < edge, found, 0), axis=0)
        row = table_of_bins + block * _BINS + edge * parts
        below = sum_before(row, part)
        ties = sum_before(row + parts, part) - below
        mine = tl.load(bins + block * LANES + j, mask=j < window, other=_LAST).to(tl.int32)
        tie = (mine == edge).to(tl.int32)
        taken = (mine < edge) | ((tie == 1) & (ties + tl.cumsum(tie, axis=0) <= quota))
        rank = below + tl.minimum(ties, quota) + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        _, _, _, first = time_of(table, shares, times, stamp, span, fading, hand)
        _, owner, _, _, _, _ = slots_of(entry)
        v = _slot(j, first, tl.load(entry + 17).to(tl.int32))
        whose = tl.load(owner + v, mask=taken, other=0)
        tl.store(victims + rank, ((base + whose + 1) << _SLOT_BITS) | v, mask=taken)


def choose(tables, search):
    """Write the victims of each table: the lowest scores, one for each row to load, in the order of the window."""
    counts, bins, victims = search.counts, search.bins, search.victims
    args = *_of_tables(tables, search), counts, counts.shape[0], bins, bins.shape[0], search.table, search.histogram
    programs = blocks(max(bins.shape[0], victims.shape[0]))
    launch(_choose, programs, *args, victims, victims.shape[0], num_warps=TOUCHING_WARPS, LANES=BLOCK)


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
def _is_nobody(victim):
    return (victim & _NO_SLOT) == _NO_SLOT


@inlined
def _swap_table(key, heads, entry, shares, time, ranked, record_bytes, mine):
    """Give the slots of a table's victims to its missing rows, by rank; `ranked`: of those in earlier programs."""
    stamp, span, fading, _ = time
    victims, moves, size = mine
    where, owner, worth, used, dirty, tallies = slots_of(entry)
    near, far = tl.load(entry + 3), tl.load(entry + 4)
    key, known = rows_of(key, heads, entry, shares)
    word = tl.load(where + key, mask=known, other=0)
    row = tl.where(known, key, 0)  # the key, for a late store: Triton 3.6 cannot compile it of 32-bit keys in a loop
    absent, last, then = read_word(word)
    age = (stamp - last) & _AGES
    missing = known & (word < 0) & (absent == 0) & (age > span)
    rank = ranked + tl.cumsum(missing.to(tl.int32), axis=0) - 1

    victim = tl.load(victims + rank, mask=missing & (rank < size), other=_NO_SLOT)
    comes = ~_is_nobody(victim)
    slot = (victim & _NO_SLOT).to(tl.int32)
    whose, owned, back = _leave(where, owner, worth, used, dirty, slot, comes)
    move = moves + rank.to(tl.int64) * 3
    tl.store(move, near + slot.to(tl.int64) * record_bytes, mask=comes)
    tl.store(move + 1, tl.where(back, far + whose * record_bytes, -1), mask=comes)
    tl.store(move + 2, far + key * record_bytes, mask=comes)

    now = fade(then, age, fading) + 1.0
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(owner + slot, row, mask=comes)
    tl.store(worth + slot, now, mask=comes)
    tl.store(used + slot, tl.zeros_like(slot) + stamp, mask=comes)
    tl.store(dirty + slot, tl.zeros_like(slot).to(tl.uint8), mask=comes)
    tl.store(where + key, tl.where(comes, slot, far_word(0, stamp, now)), mask=missing)
    tl.atomic_add(tallies + 3, tl.sum(comes.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 4, tl.sum(owned.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 5, tl.sum(back.to(tl.int64), axis=0), sem="relaxed")


@kernel(
    "count", "tables", "stamp", "span", "hand", "size", "record_bytes", anywhere=("shares", "times", "misses")
)  # fmt: skip
def _swap(
    keys,
    count,
    entries,
    tables,
    shares,
    times,
    misses,
    stamp,
    span,
    fading,
    hand,
    counts,
    victims,
    moves,
    size,
    record_bytes,
    LANES: tl.constexpr,
):
    program = tl.program_id(0)
    u = program * LANES + tl.arange(0, LANES)
    nobody = _is_nobody(tl.load(victims + u, mask=u < size, other=0))
    tl.store(moves + u.to(tl.int64) * 3, tl.full(u.shape, -1, tl.int64), mask=nobody)  # no move
    key, heads = _keys_of(keys, count, u)
    ranked = sum_before(counts, program)
    if shares is None:
        time, mine = time_of(0, shares, times, stamp, span, fading, hand), (victims, moves, size)
        _swap_table(key, heads, entries, shares, time, ranked, record_bytes, mine)
    else:
        table, last = span_of(entries, tables, key, heads)
        before = sum_before(misses, table)
        while table <= last:
            time, share = time_of(table, shares, times, stamp, span, fading, hand), shares + table * _SHARE
            first, most = tl.load(share + 4), tl.load(share + 2).to(tl.int32)
            # The table's missing rows in earlier programs: none if its rows begin here.
            rank, mine = tl.maximum(ranked - before, 0), (victims + first, moves + first * 3, most)
            _swap_table(key, heads, entries + table * _WORDS, shares, time, rank, record_bytes, mine)
            before += tl.load(misses + table)
            table += 1


def swap(tables, search, keys, count, moves):
    """Give the slots of victims to the rows to load, in order. Rows without a slot are used zero-copy on host.

    Args:
        tables, search, keys, count: as in `touch`. ``search.victims`` may be sorted after `choose`.
        moves: int64 (len(victims), 3) receives three addresses a move, for `exchange`. First, the device slot (-1: no
            move). Second, the old record's host slot (-1: clean). Third, the new record's host slot.
    """
    size = search.victims.shape[0]
    args = *_of_tables(tables, search), search.counts, search.victims, moves, size, tables.form.record_bytes
    launch(_swap, blocks(max(keys.shape[0], size)), keys, count, *args, num_warps=TOUCHING_WARPS, LANES=BLOCK)


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
    width = min(COPIED // 2, triton.next_power_of_2(record_bytes // 4))
    records = COPIED // width
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
