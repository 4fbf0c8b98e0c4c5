"""Summing gradients of equal ids: see ``kernels/reference/rows.py`` and ``pooling.py`` for what is summed.

Segments of up to `CHUNK` positions are summed in order of occurrence, bit for bit as the CPU does. A longer one is cut
into chunks, whose sums are then added up, always in the same way: so the hottest id of a batch does not keep a program
busy when all others are done. Nothing depends on the order in which programs run.

The first chunk of a segment is summed by the program of its row. Each window of `CHUNK` positions, in the order of the
plan, has at most one start of a later chunk, and a row of `partial` for its sum.
"""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined, kernel, launch

CHUNK = 64
PLAIN, POOLED, MAXIMA = 0, 1, 2  # what is summed: see `_share`
TILE = 1024  # elements that a program sums at once
COLUMNS = 1024  # of which in one row
WARPS = 4

_CHUNK = tl.constexpr(CHUNK)
_PLAIN = tl.constexpr(PLAIN)
_POOLED = tl.constexpr(POOLED)
_MAXIMA = tl.constexpr(MAXIMA)
_AHEAD = tl.constexpr(4)  # rows asked for before the first of them is added


def partial_rows(n):
    """Return how many rows of scratch the sums over n positions need."""
    return -(-n // CHUNK)


def tile(dim):
    """Return the shape of what a program works on at once: rows and columns, constexprs of kernels."""
    width = min(COLUMNS, 1 << (dim - 1).bit_length())
    return {"DIM": dim, "ROWS": TILE // width, "WIDTH": width}


@inlined
def square_sum(values):
    """Sum the squares of each row, in float64."""
    return tl.sum(values.to(tl.float64) * values.to(tl.float64), axis=1)


@inlined
def _share(grads, stride, bags, weights, scale, argmax, position, here, column, WHAT, WEIGHTED, DIM):
    """Load what positions, (rows, 1), give to their rows: gradients, or shares of their bags'."""
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
def _window(window, inside, starts, order, inverse, skip):
    """Return the chunk that starts in a window, if there is one: its row, begin, end, and which of the row's it is."""
    q = window * _CHUNK
    row = tl.load(inverse + tl.load(order + q, mask=inside, other=0), mask=inside, other=0)
    first, end = tl.load(starts + row, mask=inside, other=0), tl.load(starts + row + 1, mask=inside, other=0)
    number = tl.maximum(1, tl.cdiv(q - first, _CHUNK))
    begin = first + number * _CHUNK
    here = inside & (begin < end) & (begin < q + _CHUNK) & (row != skip)
    return row, begin, tl.where(here, tl.minimum(end, begin + _CHUNK), begin), number


@inlined
def _piece(program, starts, order, inverse, count, skip, n, blocks, ROWS):
    """Return what each line of a program sums, as begin and end, and where its sum goes."""
    is_row = program < blocks
    target = tl.where(is_row, program, program - blocks) * ROWS + tl.arange(0, ROWS)
    whole = is_row & (target < count) & (target != skip)
    first = tl.load(starts + target, mask=whole, other=0)
    last = tl.load(starts + target + 1, mask=whole, other=0)
    inside = (program >= blocks) & (target < tl.cdiv(n, _CHUNK))
    _, begin, end, _ = _window(target, inside, starts, order, inverse, skip)
    return target, tl.where(is_row, first, begin), tl.where(is_row, tl.minimum(last, first + _CHUNK), end)


@kernel("n", "blocks")
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
    values,
    squares,
    n,
    blocks,
    WHAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    program, count, skip = tl.program_id(0), tl.load(counts), tl.load(skips)
    target, begin, end = _piece(program, starts, order, inverse, count, skip, n, blocks, ROWS)
    longest = tl.max(end - begin, axis=0)
    is_row, begin, end = program < blocks, begin[:, None], end[:, None]
    total_squares = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        if WHAT == _PLAIN:
            total = total * -1.0  # -0.0: the first gradient is taken as it is, by its bits
        j = 0
        while j < longest:
            for ahead in tl.static_range(_AHEAD):
                here = begin + j + ahead < end
                position = tl.load(order + begin + j + ahead, mask=here, other=0)
                share = _share(grads, stride, bags, weights, scale, argmax, position, here, column, WHAT, WEIGHTED, DIM)
                total = tl.where(here, total + share, total)
            j += _AHEAD
        total = tl.where(begin < end, total, 0.0)
        total_squares += square_sum(total)
        place = target.to(tl.int64)[:, None] * DIM + column
        tl.store(values + place, total, mask=(column < DIM) & (is_row & (target < n))[:, None])
        tl.store(partial + place, total, mask=(column < DIM) & (program >= blocks) & (begin < end))
    tl.store(squares + target, total_squares, mask=is_row & (target < n))


@kernel()
def _add_chunks(
    starts,
    order,
    inverse,
    skips,
    partial,
    values,
    squares,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    window = tl.program_id(0) + tl.zeros([1], tl.int32)
    row, begin, end, number = _window(window, window >= 0, starts, order, inverse, tl.load(skips))
    is_second = (begin < end) & (number == 1)
    if tl.sum(is_second.to(tl.int32), axis=0) == 1:
        chunks = tl.sum(tl.cdiv(tl.load(starts + row + 1) - begin, _CHUNK), axis=0)
        total_squares = tl.zeros([1], tl.float64)
        for start in range(0, DIM, WIDTH):
            column = start + tl.arange(0, WIDTH)[None, :]
            inside = column < DIM
            place = values + row.to(tl.int64)[:, None] * DIM + column
            total = tl.load(place, mask=inside, other=0.0)
            j = 0
            while j < chunks:
                line = j + tl.arange(0, ROWS)[:, None]
                source = partial + (window + line).to(tl.int64) * DIM + column
                total += tl.sum(tl.load(source, mask=(line < chunks) & inside, other=0.0), axis=0)[None, :]
                j += ROWS
            total_squares += square_sum(total)
            tl.debug_barrier()  # what was read is overwritten
            tl.store(place, total, mask=inside)
        tl.store(squares + row, total_squares)


def sum_shares(what, grads, share, plan, skip, scratch, values, squares):
    """Sum what each position gives to its row.

    Args:
        what: `PLAIN`, `POOLED` or `MAXIMA`.
        grads: of positions, or of bags.
        share: bags, weights, scale and argmax, or None for those that are not needed.
        plan: starts, order, inverse and count.
        skip: int32 (1,), a row whose sum is zero, -1: none.
        scratch: float32 (partial_rows(n), dim).
        values: float32 (n, dim) receives the sums; zeros beyond count.
        squares: float64 (n,) receives their squared norms; zeros beyond count.
    """
    starts, order, inverse, count = plan
    n, form = order.shape[0], tile(values.shape[1])
    blocks = -(-n // form["ROWS"])
    later = -(-partial_rows(n) // form["ROWS"]) if n > CHUNK else 0
    weighted = share[1] is not None and share[1].shape[0] > 0
    known = (given if given is not None else inverse for given in share)
    args = grads, grads.stride(0), *known, starts, order, inverse, count, skip, scratch, values, squares, n, blocks
    launch(_sum, blocks + later, *args, num_warps=WARPS, WHAT=what, WEIGHTED=weighted, **form)
    if later:
        args = starts, order, inverse, skip, scratch, values, squares
        form["ROWS"] *= 4
        launch(_add_chunks, partial_rows(n), *args, num_warps=WARPS, **form)


def sum_segments(grads, starts, order, inverse, count, skip, partial, values, squares):
    """Sum the gradients of equal ids.

    Args:
        grads: float32, bfloat16 or float16 (m, dim), of positions; any row stride, contiguous columns.
        starts, order, inverse, count: of the plan.
        skip, partial, values, squares: as in `sum_shares`.
    """
    nothing = None, None, None, None
    sum_shares(PLAIN, grads, nothing, (starts, order, inverse, count), skip, partial, values, squares)


@kernel("n")
def _row_squares(values, counts, squares, n, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, count = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.load(counts)
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        place = values + row.to(tl.int64)[:, None] * DIM + column
        total += square_sum(tl.load(place, mask=(row < count)[:, None] & (column < DIM), other=0.0))
    tl.store(squares + row, total, mask=row < n)


def row_squares(values, count, squares):
    """Write the sum of squares of each row, in float64; zeros beyond count."""
    n, form = squares.shape[0], tile(values.shape[1])
    launch(_row_squares, -(-n // form["ROWS"]), values, count, squares, n, num_warps=WARPS, **form)


@kernel()
def _norm(total, out):
    norm = tl.sqrt(tl.load(total)).to(tl.float32)
    norm = tl.where(norm == norm, norm, float("inf"))
    tl.store(out, norm)
    tl.store(out + 1, norm)


def norm(total, out):
    """Write the root of `total` float64 () twice to `out` float32 (2,), infinity where it is not finite."""
    launch(_norm, 1, total, out, num_warps=1)
