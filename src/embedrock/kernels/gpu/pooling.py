"""Pooling of rows into bags on the GPU: see ``tests/reference/pooling.py``. `sums.sum_shares` is its backward.

One line of one program handles a bag, a row or a position, so there are no atomics. `words` (bags,) are those of
`joint.bags`.
"""

import triton.language as tl

from embedrock.kernels.gpu.runtime import inlined, kernel, launch
from embedrock.kernels.gpu.sums import MAXIMA, WARPS, tile

_MAXIMA = tl.constexpr(MAXIMA)
_AHEAD = tl.constexpr(4)  # rows loaded before the first of them is added


@inlined
def _member(rows, inverse, skip, position, end, column, DIM):
    """Return a mask of positions that exist and are not skipped, and the row of each."""
    row = tl.load(inverse + position, mask=position < end, other=0)
    here = (position < end) & (row != skip)
    place = rows + row.to(tl.int64)[:, None] * DIM + column
    return here, tl.load(place, mask=here[:, None] & (column < DIM), other=0.0)


@kernel("bags")
def _pool(
    rows,
    inverse,
    offsets,
    weights,
    words,
    out,
    trace,
    bags,
    WHAT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
):
    bag = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    word = tl.load(words + bag, mask=bag < bags, other=-2)
    skip, is_mean = word >> 1, word & 1
    begin = tl.load(offsets + bag, mask=bag < bags, other=0)
    end = tl.load(offsets + bag + 1, mask=bag < bags, other=0)
    longest = tl.max(end - begin, axis=0)
    for start in range(0, TILE.dim, TILE.width):
        column = start + tl.arange(0, TILE.width)[None, :]
        pooled = tl.full([TILE.rows, TILE.width], 0.0, tl.float32)
        source, members = tl.full([TILE.rows, TILE.width], -1, tl.int32), tl.full([TILE.rows], 0, tl.int32)
        j = 0
        while j < longest:
            for ahead in tl.static_range(_AHEAD):
                position = begin + j + ahead
                here, row = _member(rows, inverse, skip, position, end, column, TILE.dim)
                if WHAT == _MAXIMA:
                    better = here[:, None] & ((source < 0) | (row > pooled))
                    pooled = tl.where(better, row, pooled)
                    source = tl.where(better, position.to(tl.int32)[:, None], source)
                else:
                    if WEIGHTED:
                        row = tl.load(weights + position, mask=here, other=0.0)[:, None] * row
                    pooled = tl.where(here[:, None], pooled + row, pooled)
                    members += here.to(tl.int32)
            j += _AHEAD
        place, inside = bag.to(tl.int64)[:, None] * TILE.dim + column, (bag < bags)[:, None] & (column < TILE.dim)
        if WHAT == _MAXIMA:
            tl.store(trace + place, source, mask=inside)
        else:
            one = tl.full([TILE.rows], 1.0, tl.float32)
            factor = tl.where(is_mean != 0, tl.div_rn(one, tl.maximum(members, 1).to(tl.float32)), one)
            pooled = pooled * factor[:, None]
            tl.store(trace + bag, factor, mask=bag < bags)
        tl.store(out + place, pooled, mask=inside)


def pool(what, rows, inverse, offsets, weights, words, out, trace):
    """Pool the rows of each bag.

    Args:
        what: `sums.POOLED`: sums or means, `trace` float32 (bags,) receives their factors. Or `sums.MAXIMA`: the
            largest value of each column, the first of equal ones, `trace` int32 (bags, dim) receives their positions.
        rows: float32 (n, dim).
        inverse: int32 (n,), the row of each position.
        offsets, words: see `joint.bags`.
        weights: float32 (n,), of the positions; (0,): all are 1.
        out: float32 (bags, dim).
        trace: see above.
    """
    bags, form = out.shape[0], tile(out.shape[1])
    args = rows, inverse, offsets, weights, words, out, trace, bags
    constexprs = {"WHAT": what, "WEIGHTED": weights.shape[0] > 0, "TILE": form}
    launch(_pool, -(-bags // form.rows), *args, num_warps=WARPS, **constexprs)


@kernel("n")
def _weight_grads(grads, stride, rows, inverse, bags, words, out, n, TILE: tl.constexpr):
    position = tl.program_id(0) * TILE.rows + tl.arange(0, TILE.rows)
    bag = tl.load(bags + position, mask=position < n, other=0).to(tl.int64)
    skip = tl.load(words + bag, mask=position < n, other=-2) >> 1
    total = tl.full([TILE.rows], 0.0, tl.float64)
    for start in range(0, TILE.dim, TILE.width):
        column = start + tl.arange(0, TILE.width)[None, :]
        here, row = _member(rows, inverse, skip, position, n, column, TILE.dim)
        grad = tl.load(grads + bag[:, None] * stride + column, mask=here[:, None] & (column < TILE.dim), other=0.0)
        total += tl.sum(grad.to(tl.float64) * row.to(tl.float64), axis=1)
    tl.store(out + position, total.to(tl.float32), mask=position < n)


def weight_grads(grads, rows, inverse, bags, words, out):
    """Write the gradient of each position's weight in a sum: the inner product of row and gradient."""
    n, form = out.shape[0], tile(rows.shape[1])
    args = grads, grads.stride(0), rows, inverse, bags, words, out, n
    launch(_weight_grads, -(-n // form.rows), *args, num_warps=WARPS, TILE=form)
