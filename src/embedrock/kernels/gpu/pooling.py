"""Pooling of rows into bags on the GPU: see ``tests/reference/pooling.py``. `sums.sum_shares` is its backward.

One line of one program handles a bag, a row or a position, so there are no atomics. `skip` is int32 (1,), on the
device.
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
def _skip(skips, bag, here, EACH: tl.constexpr):
    """Return the row that does not count in bags, and whether they are means.

    Each bag has a word, or all bags have one row.
    """
    if EACH:
        word = tl.load(skips + bag, mask=here, other=-2)
        return word >> 1, word & 1
    else:  # Triton compiles one of the two
        return tl.load(skips), 0


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
    skips,
    out,
    scale,
    bags,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    skip, is_mean = _skip(skips, bag, bag < bags, EACH)
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
        factor = tl.full([ROWS], 1.0, tl.float32)
        if MEAN or EACH:
            share = tl.div_rn(factor, tl.maximum(members, 1).to(tl.float32))
            factor = tl.where(is_mean != 0, share, factor) if EACH else share
            total = total * factor[:, None]
        place = out + bag.to(tl.int64)[:, None] * DIM + column
        tl.store(place, total, mask=(bag < bags)[:, None] & (column < DIM))
        tl.store(scale + bag, factor, mask=bag < bags)


def pool_sum(rows, inverse, offsets, weights, skip, mean, out, scale):
    """Sum or average the rows of each bag; `mean` None: by each bag's word in `skip`, see `joint.bags`."""
    bags, form = out.shape[0], tile(out.shape[1])
    args = rows, inverse, offsets, weights, skip, out, scale, bags
    constexprs = {"WEIGHTED": weights.shape[0] > 0, "MEAN": bool(mean), "EACH": mean is None, **form}
    launch(_pool_sum, -(-bags // form["ROWS"]), *args, num_warps=WARPS, **constexprs)


@kernel("bags")
def _pool_max(
    rows,
    inverse,
    offsets,
    skips,
    out,
    argmax,
    bags,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    skip, _ = _skip(skips, bag, bag < bags, EACH)
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


def pool_max(rows, inverse, offsets, skip, out, argmax, each=False):
    """Take the largest value of each column of each bag, the first of equal ones.

    With `each`, `skip` has a word for each bag: see `joint.bags`.
    """
    bags, form = out.shape[0], tile(out.shape[1])
    args = rows, inverse, offsets, skip, out, argmax, bags
    launch(_pool_max, -(-bags // form["ROWS"]), *args, num_warps=WARPS, EACH=each, **form)


@kernel("n")
def _weight_grads(
    grads,
    stride,
    rows,
    inverse,
    bags,
    skips,
    out,
    n,
    EACH: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bag = tl.load(bags + position, mask=position < n, other=0).to(tl.int64)
    skip, _ = _skip(skips, bag, position < n, EACH)
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, DIM, WIDTH):
        column = start + tl.arange(0, WIDTH)[None, :]
        here, row = _member(rows, inverse, skip, position, n, column, DIM)
        grad = tl.load(grads + bag[:, None] * stride + column, mask=here[:, None] & (column < DIM), other=0.0)
        total += tl.sum(grad.to(tl.float64) * row.to(tl.float64), axis=1)
    tl.store(out + position, total.to(tl.float32), mask=position < n)


def weight_grads(grads, rows, inverse, bags, skip, out, each=False):
    """Write the gradient of each position's weight in a sum: the inner product of row and gradient.

    With `each`, `skip` has a word for each bag: see `joint.bags`.
    """
    n, form = out.shape[0], tile(rows.shape[1])
    args = grads, grads.stride(0), rows, inverse, bags, skip, out, n
    launch(_weight_grads, -(-n // form["ROWS"]), *args, num_warps=WARPS, EACH=each, **form)
