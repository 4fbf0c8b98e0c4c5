"""Sums of the gradients of equal ids: see ``tests/reference/rows.py`` and ``pooling.py`` for the definition.

Segments of up to `CHUNK` positions are summed in order of occurrence, bit for bit as on the CPU. A longer segment is
split into chunks, and their sums are added up in a fixed order. So the hottest id of a batch does not occupy one
program after all others are done. The result does not depend on the order of programs.

The program of a row sums the first chunk of its segment. Windows of `CHUNK` positions follow the order of the plan. In
each window, at most one later chunk starts, and `partial` has one row for its sum. The last program of a row adds up
the chunks, and the last one of a table computes the norm. Atomic counters identify them.

Programs, windows, squares and counters are in the order of tables, and none is of two tables. So each table's sums and
norm have the bits that they would have alone.
"""

import functools
import itertools
from typing import NamedTuple

import triton.language as tl

from embedrock.kernels.gpu.addresses import last_begun
from embedrock.kernels.gpu.runtime import ReadyKernel, inlined, kernel, launch

CHUNK = 64
PLAIN, POOLED, MAXIMA = 0, 1, 2  # kinds of summands: see `_share`
TILE = 1024  # elements that a program sums at once
COLUMNS = 1024  # maximum number of them in one row
WARPS = 4

_CHUNK = tl.constexpr(CHUNK)
_PLAIN = tl.constexpr(PLAIN)
_POOLED = tl.constexpr(POOLED)
_MAXIMA = tl.constexpr(MAXIMA)
_TILE = tl.constexpr(TILE)
_AHEAD = tl.constexpr(4)  # rows loaded before the first of them is added


def partial_rows(n, tables=1):
    """Return the number of scratch rows for sums over n positions of some tables."""
    return -(-n // CHUNK) + tables - 1


class Tile(NamedTuple):
    """Shape of a program's tile, a constexpr: of columns `width` at a time of `rows` rows with `dim` columns."""

    dim: int
    rows: int
    width: int


def tile(dim):
    """Return the shape of a program's tile for rows of some columns."""
    width = min(COLUMNS, 1 << (dim - 1).bit_length())
    return Tile(dim, TILE // width, width)


@inlined
def square_sum(values):
    """Sum the squares of each row, in float64."""
    return tl.sum(values.to(tl.float64) * values.to(tl.float64), axis=1)


@inlined
def _share(given, position, here, column, WHAT, WEIGHTED, DIM):
    """Load the summands of positions, (rows, 1): their gradients, or shares of their bags' gradients."""
    grads, stride, bags, weights, trace = given
    mask, source = here & (column < DIM), position
    if WHAT != _PLAIN:
        source = tl.load(bags + position, mask=here, other=0).to(tl.int64)
    values = tl.load(grads + source * stride + column, mask=mask, other=0.0).to(tl.float32)
    if WHAT == _POOLED:
        factor = tl.load(trace + source, mask=here, other=0.0)
        if WEIGHTED:
            factor = tl.load(weights + position, mask=here, other=0.0) * factor
        values = factor * values
    if WHAT == _MAXIMA:
        chosen = tl.load(trace + source * DIM + column, mask=mask, other=-1)
        values = tl.where(chosen == position, values, 0.0)
    return values


@inlined
def _own_table(layout, tables, ends):
    """Return the table of this program: its number, first program and programs, its positions, and its first row.

    Positions are the first one and their number.
    """
    begins = layout + tables + 1
    table = last_begun(begins, tables, tl.program_id(0), 1)
    first, begin = tl.load(begins + table).to(tl.int32), tl.load(layout + table).to(tl.int32)
    programs = tl.load(begins + table + 1).to(tl.int32) - first
    n = tl.load(layout + table + 1).to(tl.int32) - begin
    row = tl.load(ends + table - 1, mask=table > 0, other=0)
    return table, first, programs, begin, n, row


@inlined
def _window(window, inside, plan):
    """Return the row, begin, end, number and count of the chunk that starts in a window, if there is one."""
    starts, order, inverse, start, _, _, skip = plan
    q = start + window * _CHUNK
    row = tl.load(inverse + tl.load(order + q, mask=inside, other=0), mask=inside, other=0)
    first, end = tl.load(starts + row, mask=inside, other=0), tl.load(starts + row + 1, mask=inside, other=0)
    number = tl.maximum(1, tl.cdiv(q - first, _CHUNK))
    begin = first + number * _CHUNK
    here = inside & (begin < end) & (begin < q + _CHUNK) & (row != skip)
    chunks = tl.where(here, tl.cdiv(end - first, _CHUNK), 0)
    return row, begin, tl.where(here, tl.minimum(end, begin + _CHUNK), begin), number, chunks


@inlined
def _piece(program, plan, later, blocks, ROWS):
    """Return the work of each line of a program.

    It consists of the window, begin and end of its sum, its row, the row's chunks, and their second window.
    """
    starts, _, _, start, first_row, end_row, skip = plan
    is_row = program < blocks
    window = (program - blocks) * ROWS + tl.arange(0, ROWS)
    own = first_row + program * ROWS + tl.arange(0, ROWS)
    whole = is_row & (own < end_row) & (own != skip)
    first = tl.load(starts + own, mask=whole, other=0)
    last = tl.load(starts + own + 1, mask=whole, other=0)
    row, begin, end, number, chunks = _window(window, (is_row == 0) & (window < later), plan)
    begin, end = tl.where(is_row, first, begin), tl.where(is_row, tl.minimum(last, first + _CHUNK), end)
    chunks = tl.where(is_row, tl.cdiv(last - first, _CHUNK), chunks)
    second = tl.where(is_row, (first - start) // _CHUNK + 1, window - number + 1)
    return window, begin, end, tl.where(is_row, own, row), chunks, second


@inlined
def is_last(ticket, others):
    """Return whether all other programs came here before. Their stores are then visible."""
    tl.debug_barrier()  # all stores of this program's threads go first
    came = tl.atomic_add(ticket, 1, sem="acq_rel")
    tl.debug_barrier()
    if came == others:
        tl.store(ticket, 0)  # for the next launch
    return came == others


@inlined
def _add_chunks(row, chunks, second, partial, values, TILE):
    """Add the sums of a row's later chunks to that of the first; return the sum of squares."""
    squares = tl.zeros([1], tl.float64)
    for start in range(0, TILE.dim, TILE.width):
        column = start + tl.arange(0, TILE.width)[None, :]
        inside = column < TILE.dim
        place = values + row.to(tl.int64) * TILE.dim + column
        total = tl.load(place, mask=inside, other=0.0)
        j = 0
        while j < chunks - 1:
            line = j + tl.arange(0, 4 * TILE.rows)[:, None]
            source = partial + (second + line).to(tl.int64) * TILE.dim + column
            total += tl.sum(tl.load(source, mask=(line < chunks - 1) & inside, other=0.0), axis=0)[None, :]
            j += 4 * TILE.rows
        squares += square_sum(total)
        tl.debug_barrier()  # the store overwrites the values read above
        tl.store(place, total, mask=inside)
    return squares


@inlined
def _norm_by_the_last(squares, size, ticket, others, norms, tables):
    """Add up the squares of a table's programs, and write the norm (Inf where not finite), 0, and the norm."""
    if is_last(ticket, others):
        lane = tl.arange(0, _TILE)
        total = tl.zeros([_TILE], tl.float64)
        start = 0
        while start < size:
            total += tl.load(squares + start + lane, mask=start + lane < size, other=0.0)
            start += _TILE
        norm = tl.sqrt(tl.sum(total, axis=0)).to(tl.float32)
        norm = tl.where(norm == norm, norm, float("inf"))
        tl.store(norms, norm)
        tl.store(norms + tables, 0.0)
        tl.store(norms + 2 * tables, norm)


@inlined
def _sum_of(given, order, spans, column, WHAT, WEIGHTED, TILE):
    """Return the sums of some columns: (rows, columns).

    `spans`: begin and end of the positions of each line, (rows, 1), and the largest number of them.
    """
    begin, end, longest = spans
    total = tl.full([TILE.rows, TILE.width], 0.0, tl.float32)
    if WHAT == _PLAIN:
        total = total * -1.0  # -0.0 leaves the first gradient's bits unchanged
    j = 0
    while j < longest:
        for ahead in tl.static_range(_AHEAD):
            here = begin + j + ahead < end
            position = tl.load(order + begin + j + ahead, mask=here, other=0)
            share = _share(given, position, here, column, WHAT, WEIGHTED, TILE.dim)
            total = tl.where(here, total + share, total)
        j += _AHEAD
    return tl.where(begin < end, total, 0.0)


@inlined
def _leave_squares(squares, own, program, piece, blocks, later, ROWS):
    """Write the squares of a program's sums, except for rows of several chunks.

    Each program of rows writes their sum, and each window that of the row with its second chunk there.
    """
    window, chunks, second = piece
    if program < blocks:
        tl.store(squares + program, tl.sum(tl.where(chunks < 2, own, 0.0), axis=0))
    else:
        is_other = (window < later) & ((chunks < 2) | (second != window))
        tl.store(squares + blocks + window, tl.zeros([ROWS], tl.float64), mask=is_other)


@inlined
def _join_chunks(row, chunks, second, scratch, values, blocks, TILE):
    """Add up the chunks of each row of which this program was the last to sum a chunk."""
    partial, squares, tickets = scratch
    line = 0
    while line < TILE.rows:
        mine = tl.arange(0, TILE.rows) == line
        pieces = tl.sum(tl.where(mine, chunks, 0), axis=0)
        if pieces > 1:
            window = tl.sum(tl.where(mine, second, 0), axis=0)
            if is_last(tickets + window, pieces - 1):
                whose = tl.sum(tl.where(mine, row, 0), axis=0)
                of_row = _add_chunks(whose, pieces, window, partial, values, TILE)
                tl.store(squares + blocks + window + tl.arange(0, 1), of_row)
        line += 1


@kernel("tables", anywhere=("layout", "ends", "skips"))
def _sum(
    grads,
    stride,
    bags,
    weights,
    trace,
    starts,
    order,
    inverse,
    ends,
    skips,
    layout,
    partial,
    squares,
    tickets,
    values,
    norms,
    tables,
    WHAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    table, first, programs, start, n, first_row = _own_table(layout, tables, ends)
    program, first_window = tl.program_id(0) - first, start // _CHUNK + table
    blocks, later = tl.cdiv(n, TILE.rows), tl.where(n > _CHUNK, tl.cdiv(n, _CHUNK), 0)
    given, squares = (grads, stride, bags, weights, trace), squares + first + first_window
    end_row = tl.load(ends + table)
    plan = starts, order, inverse, start, first_row, end_row, tl.load(skips + table)
    window, begin, end, row, chunks, second = _piece(program, plan, later, blocks, TILE.rows)
    longest, is_row = tl.max(end - begin, axis=0), program < blocks
    of_row = (is_row & (row < end_row))[:, None]
    begin, end = begin[:, None], end[:, None]
    own = tl.full([TILE.rows], 0.0, tl.float64)
    for column_start in range(0, TILE.dim, TILE.width):
        column = column_start + tl.arange(0, TILE.width)[None, :]
        total = _sum_of(given, order, (begin, end, longest), column, WHAT, WEIGHTED, TILE)
        own += square_sum(total)
        tl.store(values + row.to(tl.int64)[:, None] * TILE.dim + column, total, mask=(column < TILE.dim) & of_row)
        place = (window + first_window).to(tl.int64)[:, None] * TILE.dim + column
        tl.store(partial + place, total, mask=(column < TILE.dim) & (is_row == 0) & (begin < end))
    _leave_squares(squares, own, program, (window, chunks, second), blocks, later, TILE.rows)
    if tl.max(chunks, axis=0) > 1:
        scratch = partial, squares - first_window, tickets + tables
        _join_chunks(row, chunks, second + first_window, scratch, values, blocks, TILE)
    _norm_by_the_last(squares, blocks + later, tickets + table, programs - 1, norms + table, tables)


def square_sums(n, dim, tables=1):
    """Return an upper bound of the number of sums of squares that the norms of some tables consist of."""
    return _programs(n, dim) + partial_rows(n, tables) + 3 * tables


@functools.lru_cache(maxsize=256)
def layout_of(cuts, dim):
    """Return words about tables: ``cuts``, where the positions of each begin and the last end, and their programs."""
    programs = [max(1, _programs(stop - begin, dim)) for begin, stop in itertools.pairwise(cuts)]
    return *cuts, *itertools.accumulate(programs, initial=0)


@functools.lru_cache(maxsize=256)
def _programs(n, dim):
    """Return the number of programs for first chunks of rows, and for later ones."""
    rows, later = tile(dim).rows, partial_rows(n) if n > CHUNK else 0
    return -(-n // rows) - (-later // rows)


@functools.cache
def _to_sum(what, weighted, dim):
    return ReadyKernel(_sum, num_warps=WARPS, WHAT=what, WEIGHTED=weighted, TILE=tile(dim))


NO_SHARE = None, None, None


def sum_shares(what, grads, share, plan, skip, scratch, values, norms, layout, programs):
    """Sum the summands of each row's positions, and compute each table's norm of the sums.

    Args:
        what: `PLAIN`, `POOLED` or `MAXIMA`.
        grads: of positions, or of bags: float32, bfloat16 or float16 (m, dim); any row stride, contiguous columns.
        share: the bag and the weight of each position, and the trace of `pooling.pool`, each None if not needed.
        plan: starts, order, inverse, and int32 (k,), the end of each table's rows. One table's is the count.
        skip: int32 (k,), a row of each table with the sum zero, -1: none.
        scratch: float32 (partial_rows(n, k), dim); float64 (square_sums(n, dim, k),) for sums of squares; and int32
            (k + partial_rows(n, k),), zeroed counters, zero again afterwards.
        values: float32 (n, dim) receives the sums; unchanged beyond the rows.
        norms: float32 (3, k) receives the norm of all sums (Inf where not finite), 0, and the norm again. The last two
            are for handles to keep.
        layout: int64 (2 * (k + 1),), the words of `layout_of`.
        programs: the last of these words.
    """
    if plan[1].shape[0] == 0:
        norms.zero_()
        return
    weighted = share[1] is not None and share[1].shape[0] > 0
    k = layout.shape[0] // 2 - 1
    args = grads, grads.stride(0), *share, *plan, skip, layout, *scratch, values, norms, k
    _to_sum(what, weighted, values.shape[1]).launch(programs, *args)


@kernel("size")
def _norm(values, counts, squares, tickets, norms, size, TILE: tl.constexpr):
    row, count = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows), tl.load(counts)
    total = tl.full([TILE.rows], 0.0, tl.float64)
    for start in range(0, TILE.dim, TILE.width):
        column = start + tl.arange(0, TILE.width)[None, :]
        place = values + row.to(tl.int64)[:, None] * TILE.dim + column
        total += square_sum(tl.load(place, mask=(row < count)[:, None] & (column < TILE.dim), other=0.0))
    tl.store(squares + tl.program_id(0), tl.sum(total, axis=0))
    _norm_by_the_last(squares, size, tickets, tl.num_programs(0) - 1, norms, 1)


def norm(values, count, squares, tickets, norms):
    """Write the norm of the first `count` rows (n, dim), with scratch, as `sum_shares` does."""
    n, form = values.shape[0], tile(values.shape[1])
    if n == 0:
        norms.zero_()
        return
    blocks = -(-n // form.rows)
    launch(_norm, blocks, values, count, squares, tickets, norms, blocks, num_warps=WARPS, TILE=form)
