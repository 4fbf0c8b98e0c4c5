"""Insertion and eviction in device caches: see ``tests/reference/device.py`` for each kernel's reference.

Each table has its own cache. For each batch, `touch` and `insert` run on one stream, in that order. Then `exchange`
runs on any stream. The host waits for none of them. The batch may be of several tables, see ``joint.py``.

Each program of `insert` chooses victims among its own part of the search window, for its own rows. Positions and window
are dealt to programs in turns, so that these are alike. Else programs of rare rows would evict frequent ones.
"""

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu.addresses import (
    AGES,
    FAR,
    SHARE_WORDS,
    TOUCHING_WARPS,
    WORDS,
    fade,
    far_word,
    last_begun,
    rows_of,
    slots_of,
    time_of,
    touch_keys,
    used_on_host,
)
from embedrock.kernels.gpu.plan import BLOCK, blocks, load_heads
from embedrock.kernels.gpu.runtime import inlined, kernel, launch, loaded

WINDOW = 2  # device slots that are searched for victims, for each position of a batch
GROUP = 8  # neighbours that a program is dealt at once: 32 bytes of int32
_WARPS = 16  # of `insert`. With 8, a thread takes 145 registers: a multiprocessor runs one program of either
COPIED = 2048  # words of the records that one program copies at once

_BINS = tl.constexpr(128)
_LAST = tl.constexpr(127)  # the bin of slots that may not be evicted
_WORDS, _SHARE = tl.constexpr(WORDS), tl.constexpr(SHARE_WORDS)
_WINDOW = tl.constexpr(WINDOW)
_AGES = tl.constexpr(AGES)
_FAR = tl.constexpr(FAR)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0
_TO_BIN = tl.constexpr(20)  # leaves 8 bins to a doubling of the score
_MIDDLE = tl.constexpr(33)  # the bin of score 1


class VictimSearch(NamedTuple):
    """One batch's search for victims, of k tables. The next batch on the same stream may use its memory at once.

    Attributes:
        moves: int64 (n, 3), memory for `insert`.
        programs: of `insert`.
        shares: int64 (k * SHARE_WORDS,). Of each table: the bits of `fading`, float32, see `addresses.BatchTime`; its
            number of positions; indices of its first program and position, among those of all tables.
        times: int32 (k * TIME_WORDS,): stamp, span and first device slot of the window of each table, each at 16 bytes.
    """

    moves: Any
    programs: int
    shares: Any
    times: Any


# ---------------------------------------------------------------- rows of a batch


@kernel("count", "tables", anywhere=("shares", "times"))
def _touch(keys, count, entries, tables, shares, times, LANES: tl.constexpr):
    u = tl.program_id(0) * LANES + tl.arange(0, LANES)
    key, heads = load_heads(keys, u, loaded(count))
    touch_keys(key, heads, entries, tables, shares, times)


def touch(tables, search, keys, count):
    """Mark rows as used by a batch.

    Args:
        tables: see `addresses.DeviceTables`; all have a cache.
        search: see `VictimSearch`.
        keys: int64 or int32 (n,), of the batch; equal ones are adjacent, and count once. Of several tables, ascending.
        count: number of keys, int32 (1,) or a number.
    """
    launch(_touch, blocks(keys.shape[0]), keys, count, *_of(tables, search), num_warps=TOUCHING_WARPS, LANES=BLOCK)


def _of(tables, search):
    return tables.entries, tables.entries.shape[0], search.shares, search.times


# ---------------------------------------------------------------- insertion


@inlined
def _dealt(lane, part, parts, GROUP: tl.constexpr):
    """Return the places that a program is dealt: groups of neighbours, in turns with other programs."""
    return (lane // GROUP * parts + part) * GROUP + lane % GROUP


@inlined
def _victims(entry, place, size, time, wanted):
    """Return device slots of a search window, and a mask of the victims: the lowest scores, one for each wanted one.

    Args:
        entry: of the table.
        place: in the window.
        size: the table's number of positions.
        time: see `addresses.BatchTime`.
        wanted: number of rows to load.
    """
    stamp, span, fading, hand = time
    _, owner, worth, used, _, _ = slots_of(entry)
    capacity = tl.load(entry + 17).to(tl.int32)
    inside, rest = place < tl.minimum(capacity, size * _WINDOW), capacity - hand
    slot = tl.where(place < rest, hand + place, place - rest)
    age = (stamp - tl.load(used + slot, mask=inside, other=0)) & _AGES
    now = fade(tl.load(worth + slot, mask=inside, other=1.0), age, fading)
    own = ((now.to(tl.int32, bitcast=True) - _ONE) >> _TO_BIN) + _MIDDLE
    own = tl.minimum(tl.maximum(own, 1), _LAST - 1)
    free = tl.load(owner + slot, mask=inside, other=0) < 0
    own = tl.where(free, 0, tl.where(inside & (age > span), own, _LAST))

    # The victims are all slots in bins below the edge, and the first ones in the edge bin.
    bin_ = tl.arange(0, _BINS)
    found = tl.where(bin_ < _LAST, tl.histogram(own, _BINS), 0)
    wanted = tl.minimum(wanted, tl.sum(found, axis=0))
    edge = tl.sum(((tl.cumsum(found, axis=0) < wanted) & (bin_ < _LAST)).to(tl.int32), axis=0)
    quota = wanted - tl.sum(tl.where(bin_ < edge, found, 0), axis=0)
    tie = own == edge
    return slot, (own < edge) | (tie & (tl.cumsum(tie.to(tl.int32), axis=0) <= quota))


@inlined
def _replace(entry, slot, comes, row, missing, stamp, now, move, record_bytes):
    """Evict the records of device slots, give these to missing rows, and write the moves.

    `comes`: mask of the missing rows with a slot.
    """
    where, owner, worth, used, dirty, tallies = slots_of(entry)
    near, far = tl.load(entry + 3), tl.load(entry + 4)
    whose = tl.load(owner + slot, mask=comes, other=-1)
    owned = comes & (whose >= 0)
    word = far_word(0, tl.load(used + slot, mask=owned, other=0), tl.load(worth + slot, mask=owned, other=1.0))
    tl.store(where + whose, word, mask=owned)
    back = owned & (tl.load(dirty + slot, mask=owned, other=0) != 0)
    tl.debug_barrier()  # the stores overwrite the words read above
    tl.store(move, near + slot.to(tl.int64) * record_bytes, mask=comes)
    tl.store(move + 1, tl.where(back, far + whose * record_bytes, -1), mask=comes)
    tl.store(move + 2, far + row * record_bytes, mask=comes)
    tl.store(owner + slot, row, mask=comes)
    tl.store(worth + slot, now, mask=comes)
    tl.store(used + slot, tl.zeros_like(slot) + stamp, mask=comes)
    tl.store(dirty + slot, tl.zeros_like(slot).to(tl.uint8), mask=comes)
    tl.store(where + row, tl.where(comes, slot, far_word(0, stamp, now)), mask=missing)
    tl.atomic_add(tallies + 3, tl.sum(comes.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 4, tl.sum(owned.to(tl.int64), axis=0), sem="relaxed")
    tl.atomic_add(tallies + 5, tl.sum(back.to(tl.int64), axis=0), sem="relaxed")


@kernel("count", "tables", "record_bytes", anywhere=("shares", "times"))
def _insert(keys, count, entries, tables, shares, times, moves, record_bytes, LANES: tl.constexpr, GROUP: tl.constexpr):
    table = last_begun(shares + 2, tables, tl.program_id(0), _SHARE)
    entry, share, time = entries + table * _WORDS, shares + table * _SHARE, time_of(table, shares, times)
    size, part = tl.load(share + 1).to(tl.int32), tl.program_id(0) - tl.load(share + 2).to(tl.int32)
    begin = tl.load(share + 3)
    parts, lane, moves = tl.cdiv(size, LANES), tl.arange(0, LANES), moves + begin * 3
    place = _dealt(lane, part, parts, GROUP)
    key, heads = load_heads(keys, begin + place, loaded(count))  # rows of other tables are not known
    row, known = rows_of(key, heads, entry)
    word = tl.load(tl.load(entry + 2).to(tl.pointer_type(tl.int32)) + row, mask=known, other=0)
    _, _, missing, now = used_on_host(word, known, time)
    move = moves + place.to(tl.int64) * 3
    tl.store(move, tl.full([LANES], -1, tl.int64), mask=place < size)  # no move
    wanted = tl.sum(missing.to(tl.int32), axis=0)
    if wanted > 0:
        searched = _dealt(tl.arange(0, LANES * _WINDOW), part, parts, GROUP)
        slot, taken = _victims(entry, searched, size, time, wanted)
        # Victims pass through the memory of moves, by rank, to the rows to load.
        rank = tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(moves + _dealt(rank, part, parts, GROUP).to(tl.int64) * 3 + 1, slot.to(tl.int64), mask=taken)
        tl.debug_barrier()
        rank = tl.cumsum(missing.to(tl.int32), axis=0) - 1
        comes = missing & (rank < tl.sum(taken.to(tl.int32), axis=0))
        found = tl.load(moves + _dealt(rank, part, parts, GROUP).to(tl.int64) * 3 + 1, mask=comes, other=0)
        _replace(entry, found.to(tl.int32), comes, row, missing, time[0], now, move, record_bytes)


def insert(tables, search, keys, count):
    """Give the slots of victims to the rows to load, in order. Rows without a slot are used zero-copy on host.

    ``search.moves`` receives three addresses for each position, for `exchange`. First, the device slot (-1: no move).
    Second, the old record's host slot (-1: clean). Third, the new record's host slot.

    Args:
        tables, search, keys, count: as in `touch`.
    """
    args = *_of(tables, search), search.moves, tables.form.record_bytes
    launch(_insert, search.programs, keys, count, *args, num_warps=_WARPS, LANES=BLOCK, GROUP=GROUP)


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


# ---------------------------------------------------------------- records


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


@functools.lru_cache(maxsize=256)
def _tiles(size, record_bytes):
    width = min(COPIED // 2, triton.next_power_of_2(record_bytes // 4))
    records = COPIED // width
    return -(-size // records), {"BYTES": record_bytes, "RECORDS": records, "WIDTH": width}


def exchange(moves, record_bytes):
    """Move records as `insert` decided: out of device slots and into them at the same time."""
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
