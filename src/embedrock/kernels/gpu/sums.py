"""Sums of the gradients of equal ids: see ``tests/reference/rows.py`` and ``pooling.py`` for the definition.

Segments of up to `CHUNK` positions are summed in order of occurrence, bit for bit as on the CPU. A longer segment is
split into chunks, and their sums are added up in a fixed order. So the hottest id of a batch does not occupy one
program after all others are done. The result does not depend on the order of programs.

The program of a row sums the first chunk of its segment. Windows of `CHUNK` positions follow the order of the plan. In
each window, at most one later chunk starts, and `partial` has one row for its sum. The last program of a row adds up
the chunks, and the last one of all computes the norm. Atomic counters identify them.
"""

import functools
from typing import Any, NamedTuple

import triton.language as tl

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


def partial_rows(n):
    """Return the number of scratch rows for sums over n positions."""
    return -(-n // CHUNK)


def tile(dim):
    """Return the shape of a program's tile: rows and columns, constexprs of kernels."""
    width = min(COLUMNS, 1 << (dim - 1).bit_length())
    return {"DIM": dim, "ROWS": TILE // width, "WIDTH": width}


@inlined
def square_sum(values):
    """Sum the squares of each row, in float64."""
    return tl.sum(values.to(tl.float64) * values.to(tl.float64), axis=1)


@inlined
def _share(given, position, here, column, WHAT, WEIGHTED, DIM):
    """Load the summands of positions, (rows, 1): their gradients, or shares of their bags' gradients."""
    grads, stride, bags, weights, scale, argmax = given
    mask, source = here & (column < DIM), position
    if WHAT != _PLAIN:
        source = tl.load(bags + position, mask=here, other=0).to(tl.int64)
    values = tl.load(grads + source * stride + column, mask=mask, other=0.0).to(tl.float32)
    if WHAT == _POOLED:
        factor = tl.load(scale + source, mask=here, other=0.0)
        if WEIGHTED:
            factor = tl.load(weights + position, mask=here, other=0.0) * factor
        values = factor * values
    if WHAT == _MAXIMA:
        chosen = tl.load(argmax + source * DIM + column, mask=mask, other=-1)
        values = tl.where(chosen == position, values, 0.0)
    return values


@inlined
def _window(window, inside, plan):
    """Return the row, begin, end, number and count of the chunk that starts in a window, if there is one."""
    starts, order, inverse, _, skip = plan
    q = window * _CHUNK
    row = tl.load(inverse + tl.load(order + q, mask=inside, other=0), mask=inside, other=0)
    first, end = tl.load(starts + row, mask=inside, other=0), tl.load(starts + row + 1, mask=inside, other=0)
    number = tl.maximum(1, tl.cdiv(q - first, _CHUNK))
    begin = first + number * _CHUNK
    here = inside & (begin < end) & (begin < q + _CHUNK) & (row != skip)
    chunks = tl.where(here, tl.cdiv(end - first, _CHUNK), 0)
    return row, begin, tl.where(here, tl.minimum(end, begin + _CHUNK), begin), number, chunks


@inlined
def _piece(program, plan, n, blocks, ROWS):
    """Return the work of each line of a program.

    It consists of the target, begin and end of its sum, its row, the row's chunks, and their second window.
    """
    starts, _, _, count, skip = plan
    is_row = program < blocks
    target = tl.where(is_row, program, program - blocks) * ROWS + tl.arange(0, ROWS)
    whole = is_row & (target < count) & (target != skip)
    first = tl.load(starts + target, mask=whole, other=0)
    last = tl.load(starts + target + 1, mask=whole, other=0)
    inside = (program >= blocks) & (target < tl.cdiv(n, _CHUNK))
    row, begin, end, number, chunks = _window(target, inside, plan)
    begin, end = tl.where(is_row, first, begin), tl.where(is_row, tl.minimum(last, first + _CHUNK), end)
    chunks = tl.where(is_row, tl.cdiv(last - first, _CHUNK), chunks)
    second = tl.where(is_row, first // _CHUNK + 1, target - number + 1)
    return target, begin, end, tl.where(is_row, target, row), chunks, second


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
def _add_chunks(row, chunks, second, partial, values, DIM, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Add the sums of a row's later chunks to that of the first; return the sum of squares."""
    squares = tl.zeros([1], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        inside = column < DIM
        place = values + row.to(tl.int64) * DIM + column
        total = tl.load(place, mask=inside, other=0.0)
        j = 0
        while j < chunks - 1:
            line = j + tl.arange(0, LINES)[:, None]
            source = partial + (second + line).to(tl.int64) * DIM + column
            total += tl.sum(tl.load(source, mask=(line < chunks - 1) & inside, other=0.0), axis=0)[None, :]
            j += LINES
        squares += square_sum(total)
        tl.debug_barrier()  # the store overwrites the values read above
        tl.store(place, total, mask=inside)
    return squares


@inlined
def _norm_by_the_last(squares, size, tickets, norms):
    """Add up the squares of all programs, and write the norm (Inf where not finite), 0, and the norm."""
    if is_last(tickets, tl.num_programs(0) - 1):
        lane = tl.arange(0, _TILE)
        total = tl.zeros([_TILE], tl.float64)
        start = 0
        while start < size:
            total += tl.load(squares + start + lane, mask=start + lane < size, other=0.0)
            start += _TILE
        norm = tl.sqrt(tl.sum(total, axis=0)).to(tl.float32)
        norm = tl.where(norm == norm, norm, float("inf"))
        tl.store(norms, norm)
        tl.store(norms + 1, 0.0)
        tl.store(norms + 2, norm)


@inlined
def _sum_of(given, order, spans, column, WHAT, WEIGHTED, DIM, ROWS, WIDTH):
    """Return the sums of some columns: (rows, columns).

    `spans`: begin and end of the positions of each line, (rows, 1), and the largest number of them.
    """
    begin, end, longest = spans
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    if WHAT == _PLAIN:
        total = total * -1.0  # -0.0 leaves the first gradient's bits unchanged
    j = 0
    while j < longest:
        for ahead in tl.static_range(_AHEAD):
            here = begin + j + ahead < end
            position = tl.load(order + begin + j + ahead, mask=here, other=0)
            share = _share(given, position, here, column, WHAT, WEIGHTED, DIM)
            total = tl.where(here, total + share, total)
        j += _AHEAD
    return tl.where(begin < end, total, 0.0)


@inlined
def _leave_squares(squares, own, program, piece, blocks, size, EACH, ROWS):
    """Write the squares of a program's sums, except for rows of several chunks.

    Each program writes their sum, and each window that of the row with its second chunk there. With `EACH`, there is
    one for each row.
    """
    target, is_there, chunks, second = piece
    if EACH:
        tl.store(squares + target, own, mask=is_there & (chunks < 2))
    elif program < blocks:
        tl.store(squares + program, tl.sum(tl.where(chunks < 2, own, 0.0), axis=0))
    else:
        is_other = (target < size - blocks) & ((chunks < 2) | (second != target))
        tl.store(squares + blocks + target, tl.zeros([ROWS], tl.float64), mask=is_other)


@inlined
def _join_chunks(row, chunks, second, scratch, values, blocks, EACH, DIM, ROWS, WIDTH):
    """Add up the chunks of each row of which this program was the last to sum a chunk."""
    partial, squares, tickets = scratch
    line = 0
    while line < ROWS:
        mine = tl.arange(0, ROWS) == line
        pieces = tl.sum(tl.where(mine, chunks, 0), axis=0)
        if pieces > 1:
            window = tl.sum(tl.where(mine, second, 0), axis=0)
            if is_last(tickets + 1 + window, pieces - 1):
                whose = tl.sum(tl.where(mine, row, 0), axis=0)
                of_row = _add_chunks(whose, pieces, window, partial, values, DIM, 4 * ROWS, WIDTH)
                place = whose if EACH else blocks + window
                tl.store(squares + place + tl.arange(0, 1), of_row)
        line += 1


@kernel("n", "blocks", "size")
def _sum(
    grads,
    stride,
    bags,
    weights,
    scale,
    argmax,
    starts,
    order,
    inverse,
    counts,
    skips,
    partial,
    squares,
    tickets,
    values,
    norms,
    n,
    blocks,
    size,
    WHAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
):
    program, count = tl.program_id(0), tl.load(counts)
    given, scratch = (grads, stride, bags, weights, scale, argmax), (partial, squares, tickets)
    plan = starts, order, inverse, count, tl.load(skips)
    target, begin, end, row, chunks, second = _piece(program, plan, n, blocks, ROWS)
    longest, is_row = tl.max(end - begin, axis=0), program < blocks
    begin, end = begin[:, None], end[:, None]
    own = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        total = _sum_of(given, order, (begin, end, longest), column, WHAT, WEIGHTED, DIM, ROWS, WIDTH)
        own += square_sum(total)
        place = target.to(tl.int64)[:, None] * DIM + column
        tl.store(values + place, total, mask=(column < DIM) & (is_row & (target < count))[:, None])
        tl.store(partial + place, total, mask=(column < DIM) & (program >= blocks) & (begin < end))
    piece = target, is_row & (target < count), chunks, second
    _leave_squares(squares, own, program, piece, blocks, size, EACH, ROWS)
    if tl.max(chunks, axis=0) > 1:
        _join_chunks(row, chunks, second, scratch, values, blocks, EACH, DIM, ROWS, WIDTH)
    if not EACH:
        _norm_by_the_last(squares, size, tickets, norms)


class SumScratch(NamedTuple):
    """Scratch of sums over n positions.

    Attributes:
        partial: float32 (partial_rows(n), dim).
        squares: float64 (square_sums(n, dim),), or (n,) if each row's sum is needed.
        tickets: int32 (1 + partial_rows(n),), zeroed counters, zero again afterwards.
    """

    partial: Any
    squares: Any
    tickets: Any


def square_sums(n, dim):
    """Return the number of sums of squares that the norm consists of."""
    return _programs(n, dim)[2]


@functools.lru_cache(maxsize=256)
def _programs(n, dim):
    """Return the programs for first chunks of rows, the programs for later ones, and `square_sums`."""
    rows, later = tile(dim)["ROWS"], partial_rows(n) if n > CHUNK else 0
    return -(-n // rows), -(-later // rows), -(-n // rows) + later


@functools.cache
def _to_sum(what, weighted, dim, each):
    return ReadyKernel(_sum, num_warps=WARPS, WHAT=what, WEIGHTED=weighted, EACH=each, **tile(dim))


_NO_SHARE = None, None, None, None


def sum_shares(what, grads, share, plan, skip, scratch, values, norms, each=False):
    """Sum the summands of each row's positions.

    Args:
        what: `PLAIN`, `POOLED` or `MAXIMA`.
        grads: of positions, or of bags: float32, bfloat16 or float16 (m, dim); any row stride, contiguous columns.
        share: bags, weights, scale and argmax, each None if not needed; None: none is.
        plan: starts, order, inverse and count.
        skip: int32 (1,), a row with the sum zero, -1: none.
        scratch: see `SumScratch`.
        values: float32 (n, dim) receives the sums; unchanged beyond count.
        norms: float32 (3,) receives the norm of all sums (Inf where not finite), 0, and the norm again. The last two
            are for handles to keep.
        each: instead, ``scratch.squares`` receives the sum of each row.
    """
    n, dim = plan[1].shape[0], values.shape[1]
    if n == 0:
        norms.zero_()
        return
    blocks, later, size = _programs(n, dim)
    weighted = share is not None and share[1] is not None and share[1].shape[0] > 0
    args = grads, grads.stride(0), *(share or _NO_SHARE), *plan, skip, *scratch, values, norms, n, blocks, size
    _to_sum(what, weighted, dim, each).launch(blocks + later, *args)


@kernel("size")
def _norm(values, counts, squares, tickets, norms, size, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, count = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.load(counts)
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        place = values + row.to(tl.int64)[:, None] * DIM + column
        total += square_sum(tl.load(place, mask=(row < count)[:, None] & (column < DIM), other=0.0))
    tl.store(squares + tl.program_id(0), tl.sum(total, axis=0))
    _norm_by_the_last(squares, size, tickets, norms)


def norm(values, count, squares, tickets, norms):
    """Write the norm of the first `count` rows (n, dim), with scratch, as `sum_shares` does."""
    n, form = values.shape[0], tile(values.shape[1])
    if n == 0:
        norms.zero_()
        return
    blocks = -(-n // form["ROWS"])
    args = values, count, squares, tickets, norms, blocks
    launch(_norm, blocks, *args, num_warps=WARPS, **form)
