"""Pooling rows into bags, and its backward, on the CPU: see ``kernels/reference/pooling.py``.

Partitioned over bags, unique rows or positions, each of which one thread writes: no atomics, and no result
depends on the parts.
"""

import numpy as np

from embedrock.kernels.cpu.codec import decode
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.rules import square_sum
from embedrock.kernels.cpu.runtime import kernel

AHEAD = 16
# Bags ahead of which the place is asked for: pooled rows of several features lie side by side, far from each other.
NEXT_BAGS = 4
# Bags differ in their lengths, and rows in how often they occur: more parts than threads even that out.
CUTS = 8

f32 = np.float32
f64 = np.float64

ZERO = f32(0)  # that a sum begins with, in one pass with its first row, which alone might be -0


@kernel(over="places", reads=("slots", "inverse", "offsets", "places"), grain=256, cuts=CUTS)
def pool_sum(words, slots, inverse, fresh, offsets, places, weights, skip, mean, out, scale, lo, hi):
    dim = out.shape[1]
    nbytes = dim * words.itemsize
    weighted = weights.shape[0] > 0
    end = offsets[hi]
    for bag in range(lo, hi):
        place = places[bag]
        if bag + NEXT_BAGS < hi:
            prefetch_to_write(out, places[bag + NEXT_BAGS], dim * 4)
        total = out[place]
        count = 0
        for j in range(offsets[bag], offsets[bag + 1]):
            if j + AHEAD < end and slots[inverse[j + AHEAD]] >= 0:
                prefetch(words, slots[inverse[j + AHEAD]], nbytes)
            k = inverse[j]
            if k == skip:
                continue
            count += 1
            slot, weight = slots[k], weights[j] if weighted else f32(1)
            if slot >= 0:
                row = words[slot]
                for d in range(dim):
                    total[d] = (total[d] if count > 1 else ZERO) + weight * decode(row[d])
            else:
                first = fresh[-1 - slot]
                for d in range(dim):
                    total[d] = (total[d] if count > 1 else ZERO) + weight * first[d]
        scale[place] = f32(1 / max(1, count)) if mean else f32(1)
        if mean or count == 0:
            for d in range(dim):
                total[d] = total[d] * scale[place] if count > 0 else ZERO


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


@kernel(over="values", reads=("bags", "starts", "order"), grain=256, cuts=CUTS)
def pool_sum_backward(grads, bags, starts, order, weights, scale, skip, values, squares, lo, hi):
    dim = values.shape[1]
    weighted = weights.shape[0] > 0
    end = starts[hi]
    for k in range(lo, hi):
        total = values[k]
        total[:] = f32(0)
        if k != skip:
            for j in range(starts[k], starts[k + 1]):
                if j + AHEAD < end:
                    prefetch(grads, bags[order[j + AHEAD]], dim * 4)
                position = order[j]
                bag = bags[position]
                factor = weights[position] * scale[bag] if weighted else scale[bag]
                row = grads[bag]
                for d in range(dim):
                    total[d] += factor * row[d]
        squares[k] = square_sum(total)


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
    """The inner product in float64, by four running sums: a single one would wait for each addition."""
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
