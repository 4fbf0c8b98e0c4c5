"""Which records are near, and where all of them are: see ``kernels/reference/device.py`` for what each kernel does.

For each batch: `touch`, `offer`, `choose`, `swap` on one stream, in that order, then `exchange` on any stream. Nothing
waits for the host: grids are as large as they could have to be, and programs that have nothing to do return.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from embedrock.kernels.gpu.plan import BLOCK, blocks, sum_before
from embedrock.kernels.gpu.runtime import inlined, kernel, launch

BINS = 128
NOBODY = 2**63 - 1
CHANGED = 1 << 30  # of a word of `where` where all rows are near: the record is newer than the far one
MOST_SLOTS = CHANGED
ABSENT, FAR = -2, -1  # words of `where` for rows that no batch has used: without a record, and with one
AGES = (1 << 22) - 1

_CHANGED = tl.constexpr(CHANGED)
_SLOTS = tl.constexpr(CHANGED - 1)
_BINS = tl.constexpr(BINS)
_LAST = tl.constexpr(BINS - 1)  # the bin of slots that may not be taken
_NOBODY = tl.constexpr(NOBODY)
_AGES = tl.constexpr(AGES)
_CODES = tl.constexpr(255)
_ONE = tl.constexpr(127 << 23)  # the bits of 1.0: the upper ones, counted from there, are a logarithm, near enough
_TO_CODE = tl.constexpr(19)  # leaves 16 codes to a doubling of worth
_TO_BIN = tl.constexpr(20)  # leaves 8 bins
_MIDDLE = tl.constexpr(33)  # the bin of worth 1
_FADED = tl.constexpr(24.0)  # more half-lives make no difference
_SLOT_BITS = tl.constexpr(31)
_SLOT_MASK = tl.constexpr((1 << 31) - 1)
WORDS = 2048  # of records that one program copies at once


class Slots(NamedTuple):
    """What is known about records: tensors that stay from batch to batch.

    Attributes:
        where: int32 (far slots,): the near slot of a record, or, < 0, ``-1 - u`` with bit 0 of u: there is no record;
            bits 1 to 22: the stamp of the last batch that used the row; bits 23 to 30: its worth then, coded.
        owner: int64 (near slots,): the far slot of the record, -1: free.
        worth: float32 (near slots,): how often the row was used, as of the last batch that used it; uses fade.
        used: int32 (near slots,): the stamp of the last batch that used it.
        dirty: uint8 (near slots,): 1 where the record is newer than the far one.
        tallies: int64 (8,): rows that were near; far; without a record. Records fetched; put out; of those, written
            back.
    """

    where: Any
    owner: Any
    worth: Any
    used: Any
    dirty: Any
    tallies: Any


class BatchTime(NamedTuple):
    """A batch's place in time.

    Attributes:
        stamp: of the batch: one more than the batch before.
        oldest: the stamp of the oldest batch that is not finished, this one counted in.
        half_life: the number of batches in which past uses of a row lose half of their weight.
    """

    stamp: int
    oldest: int
    half_life: float

    def numbers(self):
        """Return the numbers as kernels take them: stamps fit into 22 bits."""
        return self.stamp & AGES, self.stamp - self.oldest, 1.0 / self.half_life


class Search(NamedTuple):
    """Scratch of one batch's search for victims. It may be used again at once, on the same stream.

    Attributes:
        counts: int32 (blocks(n),): rows to fetch in each block of keys.
        bins: uint8 (window,): how cheap it is to put out each near slot of the window.
        table: int32 (BINS, blocks(window)): how many slots of a block are in lower bins.
        histogram: int32 (BINS,): how many slots of the window are in each bin.
        victims: int64 (at most n,): ``(owner + 1) << 31 | near slot`` of those chosen, then `NOBODY`. No more rows are
            fetched than it holds.
    """

    counts: Any
    bins: Any
    table: Any
    histogram: Any
    victims: Any


class RecordMemory(NamedTuple):
    """Where records lie: the addresses of the near and the far slot 0, and the bytes of a record."""

    near: int
    far: int
    record_bytes: int


# ---------------------------------------------------------------- words


@inlined
def _word(absent, stamp, worth):
    # A row that was used is worth 1 or more: no code is negative.
    code = tl.minimum((worth.to(tl.int32, bitcast=True) - _ONE) >> _TO_CODE, _CODES)
    return -1 - ((code << 23) | (stamp << 1) | absent)


@inlined
def _read_word(word):
    u = -1 - word
    worth = _ONE + (((u >> 23) & _CODES) << _TO_CODE)
    return u & 1, (u >> 1) & _AGES, worth.to(tl.float32, bitcast=True)


@inlined
def _fade(worth, age, fading):
    return worth * tl.exp2(-tl.minimum(age.to(tl.float32) * fading, _FADED))


@inlined
def _load_words(keys, count, where, limit, u):
    key = tl.load(keys + u, mask=u < tl.load(count), other=-1)
    here = (key >= 0) & (key < limit)
    return key, here, tl.load(where + key, mask=here, other=0)


# ---------------------------------------------------------------- a batch's rows


@kernel("stamp", "span")
def _touch(
    keys, count, where, worth, used, tallies, limit, stamp, span, fading, counts, histogram, LANES: tl.constexpr
):
    program = tl.program_id(0)
    if program == 0:
        tl.store(histogram + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
    key, here, word = _load_words(keys, count, where, limit, program * LANES + tl.arange(0, LANES))
    near = here & (word >= 0)
    age = (stamp - tl.load(used + word, mask=near, other=0)) & _AGES
    now = _fade(tl.load(worth + word, mask=near, other=1.0), age, fading) + 1.0
    tl.debug_barrier()  # what was read is overwritten
    tl.store(worth + word, now, mask=near)
    tl.store(used + word, tl.zeros_like(word) + stamp, mask=near)

    absent, last, then = _read_word(word)
    absent = absent & (here & (word < 0)).to(tl.int32)
    age = (stamp - last) & _AGES
    far = here & (word < 0) & (absent == 0)
    missing = far & (age > span)
    stays = here & (word < 0) & ~missing
    tl.store(where + key, _word(absent, stamp, _fade(then, age, fading) + 1.0), mask=stays)
    tl.store(counts + program, tl.sum(missing.to(tl.int32), axis=0))
    tl.atomic_add(tallies, tl.sum(near.to(tl.int64), axis=0))
    tl.atomic_add(tallies + 1, tl.sum(far.to(tl.int64), axis=0))
    tl.atomic_add(tallies + 2, tl.sum(absent.to(tl.int64), axis=0))


def touch(slots, search, time, keys, count, limit):
    """Note that a batch uses rows, and count those to fetch: far, and used by no batch that is not finished."""
    where, _, worth, used, _, tallies = slots
    args = limit, *time.numbers(), search.counts, search.histogram
    launch(_touch, blocks(keys.shape[0]), keys, count, where, worth, used, tallies, *args, LANES=BLOCK)


# ---------------------------------------------------------------- victims


@inlined
def _slot(j, hand, capacity):
    rest = capacity - hand
    return tl.where(j < rest, hand + j, j - rest)


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
    if sum_before(counts, stop) > 0:
        program, bin_ = tl.program_id(0), tl.arange(0, _BINS)
        j = program * LANES + tl.arange(0, LANES)
        inside = j < window
        v = _slot(j, hand, capacity)
        age = (stamp - tl.load(used + v, mask=inside, other=0)) & _AGES
        rest = _fade(tl.load(worth + v, mask=inside, other=1.0), age, fading)
        mine = ((rest.to(tl.int32, bitcast=True) - _ONE) >> _TO_BIN) + _MIDDLE
        mine = tl.minimum(tl.maximum(mine, 1), _LAST - 1)
        free = tl.load(owner + v, mask=inside, other=0) < 0
        mine = tl.where(free, 0, tl.where(inside & (age > span), mine, _LAST))
        tl.store(bins + j, mine.to(tl.uint8), mask=inside)
        found = tl.histogram(mine, _BINS)
        tl.store(table + bin_ * tl.num_programs(0) + program, tl.cumsum(found, axis=0) - found)
        tl.atomic_add(histogram + bin_, found)


def offer(slots, search, time, hand):
    """Judge the near slots from `hand` on, as many as ``search.bins`` holds, at most once around."""
    capacity, window = slots.owner.shape[0], search.bins.shape[0]
    args = slots.owner, slots.worth, slots.used, hand, capacity, window, search.counts, search.counts.shape[0]
    launch(_offer, blocks(window), *args, *time.numbers(), search.bins, search.table, search.histogram, LANES=BLOCK)


@kernel("hand", "window", "stop", "size")
def _choose(owner, hand, capacity, window, counts, stop, bins, table, histogram, victims, size, LANES: tl.constexpr):
    program, bin_ = tl.program_id(0), tl.arange(0, _BINS)
    found = tl.where(bin_ < _LAST, tl.load(histogram + bin_), 0)
    wanted = tl.minimum(tl.minimum(sum_before(counts, stop), tl.sum(found, axis=0)), size)
    j = program * LANES + tl.arange(0, LANES)
    tl.store(victims + j, tl.full([LANES], _NOBODY, tl.int64), mask=(j >= wanted) & (j < size))
    if (wanted > 0) & (program * LANES < window):
        # All in bins below the edge are taken, and the first of those at the edge.
        edge = tl.sum(((tl.cumsum(found, axis=0) < wanted) & (bin_ < _LAST)).to(tl.int32), axis=0)
        quota = wanted - tl.sum(tl.where(bin_ < edge, found, 0), axis=0)
        row = table + edge * tl.cdiv(window, LANES)
        below = sum_before(row, program)
        ties = sum_before(row + tl.cdiv(window, LANES), program) - below
        mine = tl.load(bins + j, mask=j < window, other=_LAST).to(tl.int32)
        tie = (mine == edge).to(tl.int32)
        taken = (mine < edge) | ((tie == 1) & (ties + tl.cumsum(tie, axis=0) <= quota))
        rank = below + tl.minimum(ties, quota) + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        v = _slot(j, hand, capacity)
        whose = tl.load(owner + v, mask=taken, other=0)
        tl.store(victims + rank, ((whose + 1) << _SLOT_BITS) | v, mask=taken)


def choose(slots, search, hand):
    """Write the victims, in the order of the window: those worth least, as many as there are rows to fetch."""
    capacity, window, size = slots.owner.shape[0], search.bins.shape[0], search.victims.shape[0]
    args = slots.owner, hand, capacity, window, search.counts, search.counts.shape[0], search.bins, search.table
    launch(_choose, blocks(max(window, size)), *args, search.histogram, search.victims, size, LANES=BLOCK)


# ---------------------------------------------------------------- in and out


@inlined
def _leave(where, owner, worth, used, dirty, slot, goes):
    """Take the records out of near slots; return whose they were, and whether they must be written back."""
    whose = tl.load(owner + slot, mask=goes, other=-1)
    owned = goes & (whose >= 0)
    word = _word(0, tl.load(used + slot, mask=owned, other=0), tl.load(worth + slot, mask=owned, other=1.0))
    tl.store(where + whose, word, mask=owned)
    return whose, owned, owned & (tl.load(dirty + slot, mask=owned, other=0) != 0)


@kernel("stamp", "span", "size")
def _swap(
    keys,
    count,
    where,
    owner,
    worth,
    used,
    dirty,
    tallies,
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
    nobody = tl.load(victims + u, mask=u < size, other=0) == _NOBODY
    tl.store(moves + u.to(tl.int64) * 3, tl.full([LANES], -1, tl.int64), mask=nobody)

    key, here, word = _load_words(keys, count, where, limit, u)
    absent, last, then = _read_word(word)
    age = (stamp - last) & _AGES
    missing = here & (word < 0) & (absent == 0) & (age > span)
    rank = sum_before(counts, program) + tl.cumsum(missing.to(tl.int32), axis=0) - 1
    victim = tl.load(victims + rank, mask=missing & (rank < size), other=_NOBODY)
    comes = victim != _NOBODY
    slot = (victim & _SLOT_MASK).to(tl.int32)
    whose, owned, back = _leave(where, owner, worth, used, dirty, slot, comes)
    move = moves + rank.to(tl.int64) * 3
    tl.store(move, slot.to(tl.int64), mask=comes)
    tl.store(move + 1, tl.where(back, whose, -1), mask=comes)
    tl.store(move + 2, key, mask=comes)

    now = _fade(then, age, fading) + 1.0
    tl.debug_barrier()  # what was read is overwritten
    tl.store(owner + slot, key, mask=comes)
    tl.store(worth + slot, now, mask=comes)
    tl.store(used + slot, tl.zeros_like(slot) + stamp, mask=comes)
    tl.store(dirty + slot, tl.zeros_like(slot).to(tl.uint8), mask=comes)
    tl.store(where + key, tl.where(comes, slot, _word(0, stamp, now)), mask=missing)
    tl.atomic_add(tallies + 3, tl.sum(comes.to(tl.int64), axis=0))
    tl.atomic_add(tallies + 4, tl.sum(owned.to(tl.int64), axis=0))
    tl.atomic_add(tallies + 5, tl.sum(back.to(tl.int64), axis=0))


def swap(slots, search, time, keys, count, limit, moves):
    """Give the slots of victims to the rows to fetch, in order; rows that get none stay far, and are used there.

    Args:
        slots, search, time, keys, count, limit: as in `touch`. ``search.victims`` may have been sorted since `choose`.
        moves: int64 (len(victims), 3) receives what `exchange` has to do: near slot, or -1: nothing; the far slot that
            its record is written back to, or -1; the far slot whose record takes its place.
    """
    size = search.victims.shape[0]
    args = limit, *time.numbers(), search.counts, search.victims, moves, size
    launch(_swap, blocks(max(keys.shape[0], size)), keys, count, *slots, *args, LANES=BLOCK)


# ---------------------------------------------------------------- bytes


@inlined
def _words(address, BYTES: tl.constexpr):
    words = address.to(tl.pointer_type(tl.int32))
    if BYTES % 16 == 0:
        words = tl.multiple_of(words, 16)
    return words[:, None]


@kernel("size")
def _exchange(moves, near, far, size, BYTES: tl.constexpr, RECORDS: tl.constexpr, WIDTH: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * RECORDS + tl.arange(0, RECORDS)
    slot = tl.load(moves + r * 3, mask=r < size, other=-1)
    if tl.max(slot, axis=0) >= 0:
        comes = slot >= 0
        whose = tl.load(moves + r * 3 + 1, mask=comes, other=-1)
        key = tl.load(moves + r * 3 + 2, mask=comes, other=0)
        goes = whose >= 0
        here, home = _words(near + slot * BYTES, BYTES), _words(far + whose * BYTES, BYTES)
        there = _words(far + key * BYTES, BYTES)
        for start in range(0, BYTES // 4, WIDTH):
            column = start + tl.arange(0, WIDTH)[None, :]
            inside = column < BYTES // 4
            old = tl.load(here + column, mask=goes[:, None] & inside, other=0)
            new = tl.load(there + column, mask=comes[:, None] & inside, other=0)
            tl.debug_barrier()  # what was read is overwritten
            tl.store(home + column, old, mask=goes[:, None] & inside)
            tl.store(here + column, new, mask=comes[:, None] & inside)


def _tiles(size, record_bytes):
    width = min(WORDS // 2, triton.next_power_of_2(record_bytes // 4))
    records = WORDS // width
    return -(-size // records), {"BYTES": record_bytes, "RECORDS": records, "WIDTH": width}


def exchange(moves, memory):
    """Move records as `swap` decided: out of near slots and into them at the same time."""
    size = moves.shape[0]
    grid_size, constexprs = _tiles(size, memory.record_bytes)
    launch(_exchange, grid_size, moves, memory.near, memory.far, size, **constexprs)


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
    """Copy records from addresses to addresses, int64 (n,); where one is negative, nothing."""
    size = sources.shape[0]
    grid_size, constexprs = _tiles(size, record_bytes)
    launch(_copy_records, grid_size, sources, targets, size, **constexprs)


# ---------------------------------------------------------------- places


@kernel()
def _locate(
    keys, count, where, limit, near, far, places, BYTES: tl.constexpr, EVERYWHERE: tl.constexpr, LANES: tl.constexpr
):
    u = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = u < tl.load(count)
    key = tl.load(keys + u, mask=inside, other=-1)
    here = (key >= 0) & (key < limit)
    place = far + key * BYTES
    if not EVERYWHERE:
        word = tl.load(where + key, mask=here, other=0)
        place = tl.where(word >= 0, near + (word & _SLOTS).to(tl.int64) * BYTES, place)
        here = here & ((word >= 0) | (((-1 - word) & 1) == 0))
    tl.store(places + u, tl.where(here, place, -1 - u.to(tl.int64)), mask=inside)


def locate(keys, count, where, limit, memory, places):
    """Write the address of each record, or ``-1 - u`` where there is none. Without `where` all are far."""
    args = keys if where is None else where, limit, memory.near, memory.far, places
    constexprs = {"BYTES": memory.record_bytes, "EVERYWHERE": where is None, "LANES": BLOCK}
    launch(_locate, blocks(keys.shape[0]), keys, count, *args, **constexprs)


@kernel()
def _settle(
    keys,
    count,
    live,
    where,
    dirty,
    limit,
    near,
    far,
    places,
    new,
    BYTES: tl.constexpr,
    IDENTITY: tl.constexpr,
    CACHED: tl.constexpr,
    LANES: tl.constexpr,
):
    u = tl.program_id(0) * LANES + tl.arange(0, LANES)
    key, here, word = _load_words(keys, count, where, limit, u)
    here = here & (tl.load(live) != 0)
    absent = here & (word < 0) & (((-1 - word) & 1) == 1)
    moves = here if IDENTITY else absent
    record = key.to(tl.int32) | _CHANGED if IDENTITY else word + 1  # as it was, but for the bit
    there = tl.where(moves, record, word)
    if CACHED:
        tl.store(dirty + word, tl.full([LANES], 1, tl.uint8), mask=here & (word >= 0))
    tl.debug_barrier()  # what was read is overwritten
    tl.store(where + key, there, mask=moves)
    place = tl.where(there >= 0, near + (there & _SLOTS).to(tl.int64) * BYTES, far + key * BYTES)
    inside = u < tl.load(count)
    tl.store(places + u, tl.where(here, place, -1), mask=inside)
    tl.store(new + u, absent.to(tl.uint8), mask=inside)


def settle(keys, count, live, where, dirty, identity, limit, memory, places, new):
    """Before rows are stepped: give those without a record a place, and note which near records will be newer."""
    args = where, where if dirty is None else dirty, limit, memory.near, memory.far, places, new
    constexprs = {"BYTES": memory.record_bytes, "IDENTITY": identity, "CACHED": dirty is not None, "LANES": BLOCK}
    launch(_settle, blocks(keys.shape[0]), keys, count, live, *args, **constexprs)
