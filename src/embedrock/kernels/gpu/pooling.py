"""Pooling of rows into bags on the GPU: see ``tests/reference/pooling.py``. `sums.sum_shares` is its backward.

One line of one program handles a bag, a row or a position, so there are no atomics. `words` (bags,) are those of
`joint.bags`.
"""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import WARPS, tile

_AHEAD = tl.constexpr(4)  # rows loaded before the first of them is added


@inlined
def _member(rows, inverse, skip, position, end, column, DIM):
    """Return a mask of positions that exist and are not skipped, and the row of each."""
    row = tl.load(inverse + position, mask=position < end, other=0)
    here = (position < end) & (row != skip)
    place = rows + row.to(tl.int64)[:, None] * DIM + column
    return here, tl.load(place, mask=here[:, None] & (column < DIM), other=0.0)


@inlined
def _skip(words, bag, here):
    """Return the row that does not count in each bag, and whether the bag is a mean."""
    word = tl.load(words + bag, mask=here, other=-2)
    return word >> 1, word & 1


@inlined
def _bounds(offsets, bag, bags):
    begin = tl.load(offsets + bag, mask=bag < bags, other=0)
    return begin, tl.load(offsets + bag + 1, mask=bag < bags, other=0)


@kernel("bags")
def _pool_sum(
    rows,
    inverse,
    offsets,
    weights,
    words,
    out,
    scale,
    bags,
    WEIGHTED: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    skip, is_mean = _skip(words, bag, bag < bags)
    begin, end = _bounds(offsets, bag, bags)
    longest = tl.max(end - begin, axis=0)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        total, members = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS], tl.int32)
        j = 0
        while j < longest:
            for ahead in tl.static_range(_AHEAD):
                position = begin + j + ahead
                here, row = _member(rows, inverse, skip, position, end, column, DIM)
                if WEIGHTED:
                    row = tl.load(weights + position, mask=here, other=0.0)[:, None] * row
                total = tl.where(here[:, None], total + row, total)
                members += here.to(tl.int32)
            j += _AHEAD
        one = tl.full([ROWS], 1.0, tl.float32)
        factor = tl.where(is_mean != 0, tl.div_rn(one, tl.maximum(members, 1).to(tl.float32)), one)
        total = total * factor[:, None]
        place = out + bag.to(tl.int64)[:, None] * DIM + column
        tl.store(place, total, mask=(bag < bags)[:, None] & (column < DIM))
        tl.store(scale + bag, factor, mask=bag < bags)


def pool_sum(rows, inverse, offsets, weights, words, out, scale):
    """Sum or average the rows of each bag."""
    bags, form = out.shape[0], tile(out.shape[1])
    args = rows, inverse, offsets, weights, words, out, scale, bags
    weighted = weights.shape[0] > 0
    launch(_pool_sum, -(-bags // form["ROWS"]), *args, num_warps=WARPS, WEIGHTED=weighted, **form)


@kernel("bags")
def _pool_max(
    rows,
    inverse,
    offsets,
    words,
    out,
    argmax,
    bags,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    skip, _ = _skip(words, bag, bag < bags)
    begin, end = _bounds(offsets, bag, bags)
    longest = tl.max(end - begin, axis=0)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        best, source = tl.zeros([ROWS, WIDTH], tl.float32), tl.full([ROWS, WIDTH], -1, tl.int32)
        j = 0
        while j < longest:
            for ahead in tl.static_range(_AHEAD):
                position = begin + j + ahead
                here, row = _member(rows, inverse, skip, position, end, column, DIM)
                better = here[:, None] & ((source < 0) | (row > best))
                best = tl.where(better, row, best)
                source = tl.where(better, position.to(tl.int32)[:, None], source)
            j += _AHEAD
        place = bag.to(tl.int64)[:, None] * DIM + column
        tl.store(out + place, best, mask=(bag < bags)[:, None] & (column < DIM))
        tl.store(argmax + place, source, mask=(bag < bags)[:, None] & (column < DIM))


def pool_max(rows, inverse, offsets, words, out, argmax):
    """Take the largest value of each column of each bag, the first of equal ones."""
    bags, form = out.shape[0], tile(out.shape[1])
    args = rows, inverse, offsets, words, out, argmax, bags
    launch(_pool_max, -(-bags // form["ROWS"]), *args, num_warps=WARPS, **form)


@kernel("n")
def _weight_grads(
    grads,
    stride,
    rows,
    inverse,
    bags,
    words,
    out,
    n,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bag = tl.load(bags + position, mask=position < n, other=0).to(tl.int64)
    skip, _ = _skip(words, bag, position < n)
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        here, row = _member(rows, inverse, skip, position, n, column, DIM)
        grad = tl.load(grads + bag[:, None] * stride + column, mask=here[:, None] & (column < DIM), other=0.0)
        total += tl.sum(grad.to(tl.float64) * row.to(tl.float64), axis=1)
    tl.store(out + position, total.to(tl.float32), mask=position < n)


def weight_grads(grads, rows, inverse, bags, words, out):
    """Write the gradient of each position's weight in a sum: the inner product of row and gradient."""
    n, form = out.shape[0], tile(rows.shape[1])
    args = grads, grads.stride(0), rows, inverse, bags, words, out, n
    launch(_weight_grads, -(-n // form["ROWS"]), *args, num_warps=WARPS, **form)
