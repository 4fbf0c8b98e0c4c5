"""Pooling rows into bags, and its backward: the specification of ``kernels/cpu/pooling.py``.

A batch of bags is a plan of n positions (``inverse``, ``starts``, ``order``), cut by ``offsets`` int64 (bags + 1,): bag
b holds positions ``offsets[b]`` to ``offsets[b + 1]``. Row k of the plan is the weights in ``words[slots[k]]``, or
``fresh[-1 - slots[k]]`` where it has no record, as `rows.gather` reads them. ``places`` int32 (bags,), no two alike,
says which row of pooled rows, and of what goes with them, is whose; ``bags`` int32 (n,) is the place of each position's
bag. Positions of unique row `skip` (-1: no row) belong to no bag. ``weights`` float32 is (n,), or (0,) for ones.
Everything is summed in order of occurrence.
"""

from __future__ import annotations

import numpy as np

from reference.rows import gather, row_squares


def _members(inverse: np.ndarray, offsets: np.ndarray, skip: int, bag: int) -> np.ndarray:
    positions = np.arange(offsets[bag], offsets[bag + 1])
    return positions[inverse[positions] != skip]


def _rows(words: np.ndarray, slots: np.ndarray, inverse: np.ndarray, fresh: np.ndarray, dim: int) -> np.ndarray:
    """Return the row of each position: float32 (n, dim)."""
    rows = np.empty((inverse.size, dim), np.float32)
    gather(words, slots, inverse, fresh, rows)
    return rows


def pool_sum(
    words: np.ndarray,
    slots: np.ndarray,
    inverse: np.ndarray,
    fresh: np.ndarray,
    offsets: np.ndarray,
    places: np.ndarray,
    weights: np.ndarray,
    skip: int,
    mean: bool,
    out: np.ndarray,
    scale: np.ndarray,
) -> None:
    """Sum, or average, the rows of each bag; an empty bag gives zeros.

    Args:
        words, slots, fresh: where the rows are; slots int64 (unique,), fresh float32 (new, dim).
        mean: divide each sum by the number of positions in the bag.
        out: float32 (places, dim).
        scale: float32 (places,) receives what a sum was multiplied by: 1, or one over the number of positions; (0,)
            where that is 1 for all.
    """
    rows = _rows(words, slots, inverse, fresh, out.shape[1])
    for bag, place in enumerate(places):
        members = _members(inverse, offsets, skip, bag)
        out[place] = 0
        for position in members:
            weight = weights[position] if weights.size else np.float32(1)
            out[place] += weight * rows[position]
        if scale.size:
            scale[place] = 1 / max(1, members.size) if mean else 1
            out[place] *= scale[place]


def pool_max(
    words: np.ndarray,
    slots: np.ndarray,
    inverse: np.ndarray,
    fresh: np.ndarray,
    offsets: np.ndarray,
    places: np.ndarray,
    skip: int,
    out: np.ndarray,
    argmax: np.ndarray,
) -> None:
    """Take the largest value of each column of each bag, the first of equal ones; an empty bag gives zeros.

    Args:
        words, slots, fresh: as of `pool_sum`.
        out: float32 (places, dim).
        argmax: int32 (places, dim) receives the position that each value came from, -1 in empty bags.
    """
    rows = _rows(words, slots, inverse, fresh, out.shape[1])
    for bag, place in enumerate(places):
        out[place], argmax[place] = 0, -1
        for position in _members(inverse, offsets, skip, bag):
            row = rows[position]
            better = (argmax[place] < 0) | (row > out[place])
            out[place, better], argmax[place, better] = row[better], position


def pool_sum_backward(
    grads: np.ndarray,
    bags: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    weights: np.ndarray,
    scale: np.ndarray,
    skip: int,
    values: np.ndarray,
    squares: np.ndarray,
) -> None:
    """Sum, for each unique row, the gradients of the bags that it is in.

    Args:
        grads: float32 (places, dim).
        scale: float32 (places,), as `pool_sum` left it.
        values: float32 (unique, dim) receives the gradients; zeros for row `skip`.
        squares: float64 (unique,) receives their squared norms.
    """
    for k in range(values.shape[0]):
        values[k] = 0
        for position in order[starts[k] : starts[k + 1]] if k != skip else []:
            bag = bags[position]
            weight = weights[position] if weights.size else np.float32(1)
            factor = scale[bag] if scale.size else np.float32(1)
            values[k] += (weight * factor) * grads[bag]
    row_squares(values, squares)


def pool_max_backward(
    grads: np.ndarray,
    bags: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    argmax: np.ndarray,
    values: np.ndarray,
    squares: np.ndarray,
) -> None:
    """Give each column of a bag's gradient to the position that its value came from, summed by unique row.

    Args:
        grads: float32 (places, dim).
        argmax: int32 (places, dim), as `pool_max` left it.
        values: float32 (unique, dim) receives the gradients.
        squares: float64 (unique,) receives their squared norms.
    """
    for k in range(values.shape[0]):
        values[k] = 0
        for position in order[starts[k] : starts[k + 1]]:
            bag = bags[position]
            values[k] += np.where(argmax[bag] == position, grads[bag], np.float32(0))
    row_squares(values, squares)


def weight_grads(
    grads: np.ndarray, rows: np.ndarray, inverse: np.ndarray, bags: np.ndarray, skip: int, out: np.ndarray
) -> None:
    """Write the gradient of each position's weight in a sum: the inner product of row and gradient.

    Args:
        grads: float32 (places, dim).
        rows: float32 (unique, dim), as they were pooled.
        out: float32 (n,); zeros where the row is `skip`.
    """
    for position, k in enumerate(inverse):
        product = np.multiply(grads[bags[position]], rows[k], dtype=np.float64)
        out[position] = 0 if k == skip else product.sum()
