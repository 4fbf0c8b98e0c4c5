"""Pooling of rows into bags, and the backward, on the CPU: see ``tests/reference/pooling.py``.

Work is partitioned over bags, unique rows or positions, and one thread writes each: no atomics. No result depends on
the partition.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from embedrock.kernels.cpu.codec import decode
from embedrock.kernels.cpu.lanes import NARROW, WIDE, ask_for, narrow_zeros, plus, put, square_sum, wide_zeros
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.runtime import INLINED, inlined, kernel

AHEAD = 16
# Distance of the prefetch in bags: pooled rows of several features lie side by side, far from each other.
NEXT_BAGS = 4
# Rows whose columns are summed before the next block: they stay in the core's first cache for their squares.
BLOCK = 64
# Bags differ in length, and rows in frequency: more parts than threads even that out.
CUTS = 8

f32 = np.float32
f64 = np.float64

ZERO, ONE = f32(0), f32(1)


def _sum_bags(out: Any, lo: Any, hi: Any, bags: Any, rows: Any) -> Any:
    """Write the sums of the rows of bags. Compiled code only: the dtype of the words selects the code, below."""


@overload(_sum_bags, jit_options=INLINED)
def _compile_sum_bags(out, lo, hi, bags, rows):
    return _sum_in_lanes if rows[0].dtype == types.float32 else _sum_in_loops


@inlined
def _in_lanes(columns, rest, out, lo, hi, first, second):
    # Columns first, then bags: with bags outside, a bag cost twice as much if it had one id of 16 columns.
    dim = out.shape[1]
    wide, narrow = dim - dim % WIDE, dim - dim % NARROW
    for column in range(0, wide, WIDE):
        columns(wide_zeros(), column, out, lo, hi, first, second)
    for column in range(wide, narrow, NARROW):
        columns(narrow_zeros(), column, out, lo, hi, first, second)
    if narrow < dim:
        rest(narrow, out, lo, hi, first, second)


def _sum_in_lanes(out, lo, hi, bags, rows):
    _in_lanes(_sum_columns, _sum_rest, out, lo, hi, bags, rows)


def _sum_in_loops(out, lo, hi, bags, rows):
    _sum_rest(0, out, lo, hi, bags, rows)


@inlined
def _sum_columns(zeros, column, out, lo, hi, bags, rows):
    (places, offsets), (words, slots, inverse, fresh, weights, skip) = bags, rows
    weighted, end = weights.shape[0] > 0, offsets[hi]
    for bag in range(lo, hi):
        if bag + NEXT_BAGS < hi:
            prefetch_to_write(out, places[bag + NEXT_BAGS], out.shape[1] * 4)
        total = zeros
        for j in range(offsets[bag], offsets[bag + 1]):
            if j + AHEAD < end and slots[inverse[j + AHEAD]] >= 0:
                ask_for(total, words, slots[inverse[j + AHEAD]], column)
            k = inverse[j]
            if k == skip:
                continue
            slot, weight = slots[k], weights[j] if weighted else ONE
            if slot >= 0:
                total = plus(total, weight, words, slot, column)
            else:
                total = plus(total, weight, fresh, -1 - slot, column)
        put(total, out, places[bag], column)


@inlined
def _sum_rest(column, out, lo, hi, bags, rows):
    (places, offsets), (words, slots, inverse, fresh, weights, skip) = bags, rows
    weighted, end, dim = weights.shape[0] > 0, offsets[hi], out.shape[1]
    nbytes = dim * words.itemsize
    for bag in range(lo, hi):
        if bag + NEXT_BAGS < hi:
            prefetch_to_write(out, places[bag + NEXT_BAGS], dim * 4)
        total, count = out[places[bag]], 0
        for j in range(offsets[bag], offsets[bag + 1]):
            if j + AHEAD < end and slots[inverse[j + AHEAD]] >= 0:
                prefetch(words, slots[inverse[j + AHEAD]], nbytes)
            k = inverse[j]
            if k == skip:
                continue
            count += 1
            slot, weight = slots[k], weights[j] if weighted else ONE
            if slot >= 0:
                row = words[slot]
                for d in range(column, dim):
                    total[d] = (total[d] if count > 1 else ZERO) + weight * decode(row[d])
            else:
                first = fresh[-1 - slot]
                for d in range(column, dim):
                    total[d] = (total[d] if count > 1 else ZERO) + weight * first[d]
        if count == 0:
            for d in range(column, dim):
                total[d] = ZERO


@kernel(over="places", reads=("slots", "inverse", "offsets", "places"), grain=256, cuts=CUTS)
def pool_sum(words, slots, inverse, fresh, offsets, places, weights, skip, mean, out, scale, lo, hi):
    _sum_bags(out, lo, hi, (places, offsets), (words, slots, inverse, fresh, weights, skip))
    for bag in range(lo, hi if scale.shape[0] > 0 else lo):
        place, count = places[bag], 1
        if mean:
            count = 0
            for j in range(offsets[bag], offsets[bag + 1]):
                count += inverse[j] != skip
        scale[place] = f32(1 / max(1, count))
        if count > 1:
            for d in range(out.shape[1]):
                out[place, d] *= scale[place]


@kernel(over="places", reads=("slots", "inverse", "offsets", "places"), grain=256, cuts=CUTS)
def pool_max(words, slots, inverse, fresh, offsets, places, skip, out, argmax, lo, hi):
    dim = out.shape[1]
    end = offsets[hi]
    for bag in range(lo, hi):
        best, source = out[places[bag]], argmax[places[bag]]
        best[:] = f32(0)
        source[:] = -1
        for j in range(offsets[bag], offsets[bag + 1]):
            if j + AHEAD < end and slots[inverse[j + AHEAD]] >= 0:
                prefetch(words, slots[inverse[j + AHEAD]], dim * words.itemsize)
            k = inverse[j]
            if k == skip:
                continue
            slot = slots[k]
            for d in range(dim):
                value = decode(words[slot, d]) if slot >= 0 else fresh[-1 - slot, d]
                if source[d] < 0 or value > best[d]:
                    best[d] = value
                    source[d] = j


@inlined
def _gather_columns(zeros, column, values, lo, hi, segments, bags):
    (starts, order, skip), (grads, places, weights, scale) = segments, bags
    weighted, scaled, end = weights.shape[0] > 0, scale.shape[0] > 0, order.shape[0]
    for k in range(lo, hi):
        total = zeros
        for j in range(starts[k], starts[k + 1] if k != skip else starts[k]):
            if j + AHEAD < end:
                ask_for(total, grads, places[order[j + AHEAD]], column)
            bag = places[order[j]]
            factor = scale[bag] if scaled else ONE
            factor = weights[order[j]] * factor if weighted else factor
            total = plus(total, factor, grads, bag, column)
        put(total, values, k, column)


@inlined
def _gather_rest(column, values, lo, hi, segments, bags):
    (starts, order, skip), (grads, places, weights, scale) = segments, bags
    weighted, scaled, end, dim = weights.shape[0] > 0, scale.shape[0] > 0, order.shape[0], values.shape[1]
    for k in range(lo, hi):
        total = values[k]
        for d in range(column, dim):
            total[d] = ZERO
        for j in range(starts[k], starts[k + 1] if k != skip else starts[k]):
            if j + AHEAD < end:
                prefetch(grads, places[order[j + AHEAD]], dim * 4)
            bag = places[order[j]]
            factor, row = scale[bag] if scaled else ONE, grads[bag]
            factor = weights[order[j]] * factor if weighted else factor
            for d in range(column, dim):
                total[d] += factor * row[d]


@kernel(over="values", reads=("bags", "starts", "order"), grain=256, cuts=CUTS)
def pool_sum_backward(grads, bags, starts, order, weights, scale, skip, values, squares, lo, hi):
    segments, given = (starts, order, skip), (grads, bags, weights, scale)
    for start in range(lo, hi, BLOCK):
        end = min(start + BLOCK, hi)
        _in_lanes(_gather_columns, _gather_rest, values, start, end, segments, given)
        for k in range(start, end):
            squares[k] = square_sum(values[k])


@kernel(over="values", reads=("bags", "starts", "order"), grain=256, cuts=CUTS)
def pool_max_backward(grads, bags, starts, order, argmax, values, squares, lo, hi):
    dim = values.shape[1]
    for k in range(lo, hi):
        total = values[k]
        total[:] = f32(0)
        for j in range(starts[k], starts[k + 1]):
            position = order[j]
            row, source = grads[bags[position]], argmax[bags[position]]
            for d in range(dim):
                if source[d] == position:
                    total[d] += row[d]
        squares[k] = square_sum(total)


@kernel(over="out")
def weight_grads(grads, rows, inverse, bags, skip, out, lo, hi):
    dim = rows.shape[1]
    for j in range(lo, hi):
        k = inverse[j]
        if k == skip:
            out[j] = f32(0)
            continue
        if j + AHEAD < hi:
            prefetch(rows, inverse[j + AHEAD], dim * 4)
        out[j] = f32(_dot(grads[bags[j]], rows[k]))


@kernel()
def _dot(a, b):
    """Return the inner product in float64, by four running sums: a single sum would wait for each addition."""
    s0 = s1 = s2 = s3 = 0.0
    whole = a.shape[0] // 4 * 4
    for d in range(0, whole, 4):
        s0 += f64(a[d]) * f64(b[d])
        s1 += f64(a[d + 1]) * f64(b[d + 1])
        s2 += f64(a[d + 2]) * f64(b[d + 2])
        s3 += f64(a[d + 3]) * f64(b[d + 3])
    for d in range(whole, a.shape[0]):
        s0 += f64(a[d]) * f64(b[d])
    return (s0 + s1) + (s2 + s3)
