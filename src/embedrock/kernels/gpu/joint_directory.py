"""Joint plans and hash indexes of several tables of open ids: see `joint` and `directory`.

The references in ``tests/reference/device.py`` end in ``_tables`` where they differ from one table's. Rows are in the
order of tables, and then of ids. Keys are slots, counted in the table's range of keys. The key before the first slot is
of rows without a slot.
"""

import triton.language as tl

from embedrock.kernels.gpu import gate
from embedrock.kernels.gpu.addresses import WORDS
from embedrock.kernels.gpu.directory import LANES, claim, seek
from embedrock.kernels.gpu.plan import BLOCK, clear, first_from, lanes_of, sum_before
from embedrock.kernels.gpu.plan import blocks as blocks_of_positions
from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import is_last

_WORDS, _LINE, _LIVE = tl.constexpr(WORDS), tl.constexpr(gate.LINE), tl.constexpr(gate.LIVE)
_PADDING, _DIRECTORY = tl.constexpr(11), tl.constexpr(18)  # words of an entry


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
def _ids_at(ids, second, i, here):
    place = tl.load(second + i, mask=here, other=0)
    return tl.load(ids + place, mask=here, other=0), place


@kernel("size", "n")
def _mark_tables(ids, first, second, tables, ordered, order, counts, tickets, size, n, LANES: tl.constexpr):
    program = tl.program_id(0)
    i = program * LANES + tl.arange(0, LANES)
    here, after = i < n, (i < n) & (i > 0)
    id, place = _ids_at(ids, second, i, here)  # noqa: A001
    before, _ = _ids_at(ids, second, i - 1, after)
    table, last = tl.load(tables + i, mask=here, other=0), tl.load(tables + i - 1, mask=after, other=0)
    heads = here & ((i == 0) | (id != before) | (table != last))
    tl.store(ordered + i, id, mask=here)
    tl.store(order + i, tl.load(first + place, mask=here, other=0), mask=here)
    tl.store(counts + program, tl.sum(heads.to(tl.int32), axis=0), mask=n > 0)
    clear(tickets, size, program, LANES)


def mark(ids, first, second, tables, ordered, order, counts, tickets):
    """Reorder positions that were sorted by id, and then by table; count the rows that begin in each block.

    Args:
        ids, first: int64 (n,), sorted ids, and their positions.
        second: int64 (n,), places in `ids`, sorted by table.
        tables: (n,), the table of each, sorted.
        ordered, order: int64 (n,) receive the ids, and their positions.
        counts, tickets: int32, see `plan.mark`.
    """
    n = ids.shape[0]
    args = ids, first, second, tables, ordered, order, counts, tickets, tickets.shape[0], n
    launch(_mark_tables, blocks_of_positions(n) or 1, *args, LANES=BLOCK)


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
    table = tl.load(tables + tl.load(starts + u, mask=here, other=0), mask=here, other=0).to(tl.int32)
    return u, here, id, table, tl.min(tl.where(here, table, 2**30), axis=0), tl.max(tl.where(here, table, -1), axis=0)


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


@kernel("count_of_tables", anywhere=("cuts", "news"))
def _search_tables(
    ids,
    starts,
    tables,
    count,
    entries,
    cuts,
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
        entry = entries + this * _WORDS
        of_slots, of_ids, size, seed, _ = _directory(entry)
        mine = here & (table == this)
        slot = seek(id, mine, of_slots, of_ids, seed, size)
        tl.store(keys + u, tl.load(entry) + slot, mask=mine)
        new = tl.sum((mine & (slot < 0) & (padding == 0)).to(tl.int32), axis=0)
        if new > 0:
            tl.atomic_add(news + this, new, sem="relaxed")
        total += new
        this += 1
    tl.store(counts + program, total)
    if program == 0:
        _write_bounds(ids, starts, count, entries, cuts, bounds, count_of_tables, TABLES)


def search(plan, entries, keys, counts, news, bounds):
    """Write the keys of rows of several tables, the numbers of rows without a slot, and the bounds of tables.

    Args:
        plan: ids int64 (n,), starts, tables int (n,) of the sorted positions, count, and `cuts` as for `tables`.
        entries: see `addresses.DeviceTables`.
        keys: int64 (n,), see above; unchanged beyond the existing rows.
        counts: int32, see `blocks`.
        news: int32 (k,), zeros, receives each table's number of rows without a slot, except its padding.
        bounds: see `joint.bounds`.
    """
    ids, starts, tables, count, cuts = plan
    k = entries.shape[0]
    args = ids, starts, tables, count, entries, cuts, keys, counts, news, bounds, k
    launch(_search_tables, counts.shape[0], *args, LANES=LANES, TABLES=lanes_of(k))


@inlined
def _count_given(entries, news, verdicts, begin, end, TABLES: tl.constexpr):
    t = tl.arange(0, TABLES)
    here = (t >= begin) & (t < end)
    here &= tl.load(verdicts + (t - begin) * _LINE + _LIVE, mask=here, other=0) != 0
    used = tl.load(entries + t * _WORDS + _DIRECTORY + 4, mask=here, other=0).to(tl.pointer_type(tl.int64))
    given = tl.load(used, mask=here, other=0) + tl.load(news + t, mask=here, other=0)
    tl.debug_barrier()  # the store overwrites the numbers read above
    tl.store(used, given, mask=here)


@kernel("begin", "end", anywhere=("news", "ticket"))
def _enter_tables(
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
    begin,
    end,
    LANES: tl.constexpr,
    TABLES: tl.constexpr,
):
    program = tl.program_id(0)
    u, here, id, table, this, last = _rows_of(program, ids, starts, tables, count, LANES)  # noqa: A001
    padding = _is_padding(id, entries + table * _WORDS, here)
    key = tl.load(keys + u, mask=here, other=0)
    before = sum_before(counts, program)
    this, last = tl.maximum(this, begin), tl.minimum(last, end - 1)
    while this <= last:
        entry = entries + this * _WORDS
        first = tl.load(entry)
        if tl.load(verdicts + (this - begin) * _LINE + _LIVE) != 0:
            of_slots, of_ids, size, seed, used = _directory(entry)
            new = here & (table == this) & (key < first) & (padding == 0)
            # The table's new rows in earlier programs: none if its rows begin in this one.
            rank = tl.maximum(before - sum_before(news, this), 0) + tl.cumsum(new.to(tl.int32), axis=0) - 1
            slot = tl.load(used) + rank
            tl.store(keys + u, first + slot, mask=new)
            tl.store(of_ids + slot, id, mask=new)
            claim(id, slot, new, of_slots, seed, size)
        this += 1
    if is_last(ticket, tl.num_programs(0) - 1):
        _count_given(entries, news, verdicts, begin, end, TABLES)


def enter(plan, entries, keys, counts, news, ticket, which, verdicts):
    """Give slots to the rows of some neighbouring tables that have none: see `directory.enter`.

    Args:
        plan, entries, keys, counts, news: see `search`, which has written them.
        ticket: int32 (1,), a zeroed counter, zero again afterwards.
        which: the first of the tables, and the one after the last.
        verdicts: int32 (tables, LINE), of `gate.judge`.
    """
    ids, starts, tables, count, _ = plan
    args = ids, starts, tables, count, entries, keys, counts, news, ticket, verdicts, *which
    launch(_enter_tables, counts.shape[0], *args, LANES=LANES, TABLES=lanes_of(entries.shape[0]))
