"""Hash indexes of open ids in GPU memory, from ids to slots of records: see ``tests/reference/device.py``.

An 8-byte entry has 32 bits of its id's hash and the slot + 1, 0: empty. The other bits of the hash give its place. A
collision moves it to the next free place, mostly in the same line of 128 bytes. The order of insertion does not affect
searches, and slots are given by rank. So programs may claim places in any order.

Each table has its own index. The rows of a batch of several tables are in the order of tables, and then of ids. Keys
are slots, counted in the table's range of keys. The key before the first slot is of rows without a slot.
"""

from typing import Any, NamedTuple

import triton.language as tl

from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu.addresses import WORDS
from embedrock.kernels.gpu.plan import BLOCK, first_from, lanes_of, sum_before
from embedrock.kernels.gpu.plan import blocks as blocks_of_positions
from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

LANES = 512
NEW, DROPPED = -1, -2  # instead of slots: of an id without one, and of a row without a step

_NEW, _DROPPED = tl.constexpr(NEW), tl.constexpr(DROPPED)
_WORDS = tl.constexpr(WORDS)
_PADDING, _DIRECTORY = tl.constexpr(11), tl.constexpr(18)  # words of an entry
_SLOTS = tl.constexpr((1 << 32) - 1)  # bits of an entry
_NO_ENTRY = tl.constexpr(-1)
_MIX_1, _MIX_2 = tl.constexpr(0xFF51AFD7ED558CCD), tl.constexpr(0xC4CEB9FE1A85EC53)


class HashIndexTensors(NamedTuple):
    """A hash index: tensors that stay from batch to batch.

    Attributes:
        table: int64 (size,), at least twice the number of slots.
        ids: int64 (slots,), in the order of their slots.
        seed: of the hash, 63 bits.
    """

    table: Any
    ids: Any
    seed: int


def blocks(n):
    """Return the number of counts for n rows."""
    return -(-n // LANES)


@inlined
def _home(key, seed, size):
    """Return the first place for an id's entry, and the hash bits of that entry."""
    h = key.to(tl.uint64) ^ seed
    h = (h ^ (h >> 33)) * _MIX_1  # the finalizer of MurmurHash3, as in tests/reference/directory.py
    h = (h ^ (h >> 33)) * _MIX_2
    h ^= h >> 33
    return (((h >> 32) * size.to(tl.uint64)) >> 32).to(tl.int64), (h << 32).to(tl.int64)


@inlined
def _after(place, size):
    return tl.where(place + 1 == size, 0, place + 1)


@inlined
def seek(key, here, table, ids, seed, size):
    """Return the slots of ids under the mask `here`, `NEW` for ids without one."""
    place, digest = _home(key, seed, size)
    slot = tl.zeros_like(key) + _NEW
    seeks = here
    while tl.max(seeks.to(tl.int32), 0) > 0:
        entry = tl.load(table + place, mask=seeks, other=0)
        at = (entry & _SLOTS) - 1
        alike = seeks & (entry != 0) & ((entry >> 32) == (digest >> 32))
        same = alike & (tl.load(ids + at, mask=alike, other=0) == key)
        slot = tl.where(same, at, slot)
        seeks = seeks & (entry != 0) & (same == 0)
        place = _after(place, size)
    return slot


@inlined
def claim(key, slot, new, table, seed, size):
    """Insert entries for ids without one."""
    place, digest = _home(key, seed, size)
    entry = digest | (slot + 1)
    claims = new
    while tl.max(claims.to(tl.int32), 0) > 0:
        # `atomic_cas` has no mask. Lanes that claim nothing compare with an impossible entry.
        free = tl.zeros_like(entry) + tl.where(claims, 0, _NO_ENTRY)
        was = tl.atomic_cas(table + place, free, entry, sem="relaxed")
        claims = claims & (was != 0)
        place = tl.where(claims, _after(place, size), place)


@kernel("n", "tables", anywhere=("cuts",))
def _tables(order, cuts, found, n, tables, LANES: tl.constexpr):
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    place = tl.load(order + i, mask=i < n, other=0)
    low = tl.zeros_like(place)
    table = first_from(cuts, low, low + tables, place + 1) - 1
    tl.store(found + i, table.to(found.dtype.element_ty), mask=i < n)


def tables(order, cuts, count, found):
    """Write the table of each position of `order` int64 (n,) to `found`, uint8 or int32 (n,).

    Args:
        order: see above.
        cuts: int64 (count + 1,): begin of each table's positions, and the end of the last.
        count: number of tables.
        found: see above.
    """
    n = order.shape[0]
    launch(_tables, blocks_of_positions(n), order, cuts, found, n, count, LANES=BLOCK)


@inlined
def _directory(entry):
    """Return the entries, ids, size and seed of a table's hash index, and the address of its number of slots."""
    table, ids = tl.load(entry + _DIRECTORY), tl.load(entry + _DIRECTORY + 1)
    used = tl.load(entry + _DIRECTORY + 4).to(tl.pointer_type(tl.int64))
    size, seed = tl.load(entry + _DIRECTORY + 2), tl.load(entry + _DIRECTORY + 3).to(tl.uint64)
    return table.to(tl.pointer_type(tl.int64)), ids.to(tl.pointer_type(tl.int64)), size, seed, used


@inlined
def _is_padding(id, entry, here):  # noqa: A002
    pads = tl.load(entry + _DIRECTORY + 5, mask=here, other=0) != 0
    return here & pads & (id == tl.load(entry + _PADDING, mask=here, other=0))


@inlined
def _rows_of(program, ids, starts, tables, count, LANES: tl.constexpr):
    """Return a program's rows, their mask, ids and tables, and the first and the last table."""
    u = program * LANES + tl.arange(0, LANES)
    here = u < tl.load(count)
    id = tl.load(ids + u, mask=here, other=0)  # noqa: A001
    table, first, last = tl.zeros_like(u), program * 0, program * 0
    if tables is not None:
        table = tl.load(tables + tl.load(starts + u, mask=here, other=0), mask=here, other=0).to(tl.int32)
        first, last = tl.min(tl.where(here, table, 2**30), axis=0), tl.max(tl.where(here, table, -1), axis=0)
    return u, here, id, table, first, last


@inlined
def _write_bounds(ids, starts, count, entries, cuts, bounds, tables, TABLES: tl.constexpr):
    """Write the range of each table's rows, and its padding row."""
    t = tl.arange(0, TABLES)
    here, entry = t < tables, entries + t * _WORDS
    low = tl.zeros([TABLES], tl.int32)
    high = low + tl.load(count)
    begin = first_from(starts, low, high, tl.load(cuts + t, mask=here, other=0))
    stop = first_from(starts, low, high, tl.load(cuts + t + 1, mask=here, other=0))
    tl.store(bounds + t, begin, mask=here)
    tl.store(bounds + t + 1, stop, mask=t == tables - 1)
    row = first_from(ids, begin, stop, tl.load(entry + _PADDING, mask=here, other=0))
    some = here & (row < stop)
    is_padding = _is_padding(tl.load(ids + row, mask=some, other=0), entry, some)
    tl.store(bounds + tables + 1 + t, tl.where(is_padding, row, -1), mask=here)


@inlined
def _search_table(u, id, mine, entry, keys):  # noqa: A002
    """Write the keys of a table's rows; return which of them have no slot."""
    of_slots, of_ids, size, seed, _ = _directory(entry)
    slot = seek(id, mine, of_slots, of_ids, seed, size)
    tl.store(keys + u, tl.load(entry) + slot, mask=mine)
    return mine & (slot < 0)


@kernel("count_of_tables", anywhere=("cuts", "news"))
def _search(
    ids,
    starts,
    tables,
    count,
    cuts,
    entries,
    keys,
    counts,
    news,
    bounds,
    count_of_tables,
    LANES: tl.constexpr,
    TABLES: tl.constexpr,
):
    program = tl.program_id(0)
    u, here, id, table, this, last = _rows_of(program, ids, starts, tables, count, LANES)  # noqa: A001
    padding = _is_padding(id, entries + table * _WORDS, here)
    total = this * 0
    while this <= last:
        without = _search_table(u, id, here & (table == this), entries + this * _WORDS, keys)
        new = tl.sum((without & (padding == 0)).to(tl.int32))
        if new > 0:
            tl.atomic_add(news + this, new, sem="relaxed")
        total += new
        this += 1
    tl.store(counts + program, total)
    if program == 0:
        _write_bounds(ids, starts, count, entries, cuts, bounds, count_of_tables, TABLES)


def search(plan, entries, keys, counts, news, bounds):
    """Write the keys of rows, count those without a slot, and write the bounds of tables.

    Args:
        plan: ids int64 (n,), starts, tables int (n,) of the sorted positions (None: all rows are of one table), count,
            and `cuts` as for `tables`.
        entries: see `addresses.DeviceTables`.
        keys: int64 (n,), see above; unchanged beyond the existing rows.
        counts: int32, see `blocks`: rows without a slot.
        news: int32 (k,), zeros, receives each table's number of rows without a slot, except its padding.
        bounds: see `plan.bounds`.
    """
    k = entries.shape[0]
    args = *plan, entries, keys, counts, news, bounds, k
    launch(_search, counts.shape[0], *args, LANES=LANES, TABLES=lanes_of(k))


@inlined
def _enter_table(u, id, new, before, entry, keys):  # noqa: A002
    """Give the next slots to new rows of a table; `before`: new ones in earlier programs."""
    of_slots, of_ids, size, seed, used = _directory(entry)
    slot = tl.load(used) + before + tl.cumsum(new.to(tl.int32), axis=0) - 1
    tl.store(keys + u, tl.load(entry) + slot, mask=new)
    tl.store(of_ids + slot, id, mask=new)
    claim(id, slot, new, of_slots, seed, size)


@inlined
def _count_given(entries, news, live, begin, TABLES: tl.constexpr):
    here, t = live != 0, begin + tl.arange(0, TABLES)
    used = tl.load(entries + t * _WORDS + _DIRECTORY + 4, mask=here, other=0).to(tl.pointer_type(tl.int64))
    given = tl.load(used, mask=here, other=0) + tl.load(news + t, mask=here, other=0)
    tl.debug_barrier()  # the store overwrites the numbers read above
    tl.store(used, given, mask=here)


@kernel("begin", "end", anywhere=("news", "ticket", "verdicts", "shown"))
def _enter(
    ids,
    starts,
    tables,
    count,
    entries,
    keys,
    counts,
    news,
    ticket,
    verdicts,
    shown,
    begin,
    end,
    LANES: tl.constexpr,
    TABLES: tl.constexpr,
):
    program = tl.program_id(0)
    every, factors = gate.verdicts_of(verdicts, shown, begin, end, None, 0, entries, TABLES)
    u, here, id, table, this, last = _rows_of(program, ids, starts, tables, count, LANES)  # noqa: A001
    key = tl.load(keys + u, mask=here, other=0)
    before = sum_before(counts, program)
    padding = _is_padding(id, entries + table * _WORDS, here)
    this, last = tl.maximum(this, begin), tl.minimum(last, end - 1)
    while this <= last:
        entry = entries + this * _WORDS
        live, _ = gate.verdict_of(this - begin, every, factors, TABLES)
        if live:
            new = here & (table == this) & (key < tl.load(entry)) & (padding == 0)
            # The table's new rows in earlier programs: none if its rows begin in this one.
            _enter_table(u, id, new, tl.maximum(before - sum_before(news, this), 0), entry, keys)
        this += 1
    if is_last(ticket, tl.num_programs(0) - 1):
        _count_given(entries, news, every, begin, TABLES)


def enter(plan, entries, keys, counts, news, ticket, case):
    """Give the next slots to rows without one of some neighbouring tables, in their order, and insert their entries.

    Args:
        plan, entries, keys, counts, news: see `search`, which has written them; `keys` receives the new ones.
        ticket: int32 (1,), a zeroed counter, zero again afterwards.
        case: of the tables, see `gate.VerdictCase`: without a step, no row of a table gets a slot.
    """
    args = *plan[:-1], entries, keys, counts, news, ticket, *case[:4]
    launch(_enter, counts.shape[0], *args, LANES=LANES, TABLES=lanes_of(entries.shape[0]))


@kernel("size", "seed")
def _file(used, table, ids, size, seed: tl.uint64, LANES: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    new = slot < tl.load(used)
    claim(tl.load(ids + slot, mask=new, other=0), slot, new, table, seed, size)


def file(used, most, entries):
    """Insert entries for the ids in all given slots. None of them may have one yet.

    Args:
        used: int64 (), number of slots given.
        most: upper bound of the slots given.
        entries: see `HashIndexTensors`.
    """
    table, ids, seed = entries
    launch(_file, blocks(most), used, table, ids, table.shape[0], seed, LANES=LANES)
