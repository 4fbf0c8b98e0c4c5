"""Pooling of rows into bags, and sums of gradients by row, on the CPU: see ``tests/reference/pooling.py``.

Work is partitioned over bags, unique rows or positions, and one thread writes each: no atomics. No result depends on
the partition. Outputs and gradients lie where the caller says, feature by feature: `places` has the address and the
stride in bytes of each feature's rows, and `bounds` where its bags begin among all. The dtype of `like`, an empty
array, is theirs: copies are rounded to nearest.
"""

import numpy as np

from embedrock.kernels.cpu.addresses import address_of, float32s, words_at
from embedrock.kernels.cpu.codec import decode, nearest
from embedrock.kernels.cpu.lanes import NARROW, WIDE, narrow, plus, put, size_of, square_sum, wide
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_at, prefetch_to_write_at
from embedrock.kernels.cpu.runtime import inlined, kernel

AHEAD = 16
# Distance of the prefetch in bags: pooled rows of several features lie side by side, far from each other.
NEXT_BAGS = 4
# Rows whose columns are summed before the next block: four rows of 400 bytes took 0.8 of the time of 64.
BLOCK = 4
# Bags differ in length, and rows in frequency: more parts than threads even that out.
CUTS = 8

f32 = np.float32
f64 = np.float64

ZERO, ONE = f32(0), f32(1)
NOTHING = f32(-0.0)  # what is added to it keeps every bit


@inlined
def _place(places, bounds, feature, item):
    """Return the address of a bag's row."""
    return places[feature, 0] + places[feature, 1] * (item - bounds[feature])


@inlined
def _origin(places, bounds, feature):
    """Return the address that bag 0 would have in a feature, the stride of its bags, and one past its last one."""
    return places[feature, 0] - places[feature, 1] * bounds[feature], places[feature, 1], bounds[feature + 1]


@inlined
def _feature_of(bounds, feature, item):
    """Return the feature of a bag, from `feature` on."""
    while item >= bounds[feature + 1]:
        feature += 1
    return feature


@inlined
def _bag_of(bags, position):
    """Return the bag of a position: the position itself if `bags` is empty."""
    return bags[position] if bags.shape[0] > 0 else position


@inlined
def _in_lanes(columns, rest, itemsize, start, dim, lo, hi, first, second):
    # Columns first, then bags: with bags outside, a bag cost twice as much if it had one id of 16 columns. The last
    # columns overlap the ones before, which are summed to the same bits again.
    if dim < NARROW or itemsize < 4:  # lanes are of float32
        return rest(start, dim, lo, hi, first, second)
    many = dim - dim % WIDE if dim % WIDE <= NARROW or dim < WIDE else dim
    for column in range(0, many, WIDE):
        columns(wide(start), min(column, dim - WIDE), lo, hi, first, second)
    for column in range(many, dim, NARROW):
        columns(narrow(start), min(column, dim - NARROW), lo, hi, first, second)


@kernel(over="inverse", reads=("slots", "inverse"), grain=2048, work=("inverse", "fresh"))
def copy_rows(words, slots, inverse, fresh, places, like, bounds, start, dim, lo, hi):
    """Write bags of one id each, plus `start`, to their places."""
    nbytes = dim * words.itemsize
    for f in range(places.shape[0]):
        end = min(hi, bounds[f + 1])
        for i in range(max(lo, bounds[f]), end):
            if i + AHEAD < hi and slots[inverse[i + AHEAD]] >= 0:
                prefetch(words, slots[inverse[i + AHEAD]], nbytes)
            slot, out = slots[inverse[i]], words_at(_place(places, bounds, f, i), dim, like)
            if slot >= 0:
                row = words[slot]
                for d in range(dim):
                    out[d] = nearest(start + decode(row[d]), out)
            else:
                first = fresh[-1 - slot]
                for d in range(dim):
                    out[d] = nearest(start + first[d], out)


@inlined
def _sum_columns(start, column, lo, hi, bags, rows):
    (places, bounds, begins, ends), (words, slots, inverse, fresh, weights) = bags, rows
    weighted, last, offset = weights.shape[0] > 0, ends[hi - 1] if hi > lo else 0, 4 * column
    stored, drawn = address_of(words) + offset, address_of(fresh) + offset
    width, narrower = words.strides[0], fresh.strides[0]
    for f in range(places.shape[0]):
        end = min(hi, bounds[f + 1])
        for bag in range(max(lo, bounds[f]), end):
            place, total = _place(places, bounds, f, bag) + offset, start
            if bag + NEXT_BAGS < end:
                prefetch_to_write_at(place + NEXT_BAGS * places[f, 1], size_of(total))
            for j in range(begins[bag], ends[bag]):
                if j + AHEAD < last and slots[inverse[j + AHEAD]] >= 0:
                    prefetch_at(stored + slots[inverse[j + AHEAD]] * width, size_of(total))
                slot, weight = slots[inverse[j]], weights[j] if weighted else ONE
                if slot >= 0:
                    total = plus(total, weight, stored + slot * width)
                else:
                    total = plus(total, weight, drawn + (-1 - slot) * narrower)
            put(total, place)


@inlined
def _sum_rest(start, dim, lo, hi, bags, rows):
    (places, bounds, begins, ends), (words, slots, inverse, fresh, weights) = bags, rows
    weighted, last, nbytes = weights.shape[0] > 0, ends[hi - 1] if hi > lo else 0, dim * words.itemsize
    for f in range(places.shape[0]):
        end = min(hi, bounds[f + 1])
        for bag in range(max(lo, bounds[f]), end):
            place, first = _place(places, bounds, f, bag), begins[bag]
            if bag + NEXT_BAGS < end:
                prefetch_to_write_at(place + NEXT_BAGS * places[f, 1], dim * 4)
            total = float32s(place, dim)
            for j in range(begins[bag], ends[bag]):
                if j + AHEAD < last and slots[inverse[j + AHEAD]] >= 0:
                    prefetch(words, slots[inverse[j + AHEAD]], nbytes)
                slot, weight = slots[inverse[j]], weights[j] if weighted else ONE
                if slot >= 0:
                    row = words[slot]
                    for d in range(dim):
                        total[d] = (total[d] if j > first else start) + weight * decode(row[d])
                else:
                    drawn = fresh[-1 - slot]
                    for d in range(dim):
                        total[d] = (total[d] if j > first else start) + weight * drawn[d]
            if first == ends[bag]:
                for d in range(dim):
                    total[d] = start


@kernel(over="ends", reads=("slots", "inverse", "begins", "ends"), grain=256, cuts=CUTS, work=("inverse", "fresh"))
def pool_sum(words, slots, inverse, fresh, begins, ends, weights, mean, places, bounds, dim, scale, lo, hi):
    bags, rows = (places, bounds, begins, ends), (words, slots, inverse, fresh, weights)
    _in_lanes(_sum_columns, _sum_rest, words.itemsize, ZERO, dim, lo, hi, bags, rows)
    for f in range(places.shape[0] if scale.shape[0] > 0 else 0):
        for bag in range(max(lo, bounds[f]), min(hi, bounds[f + 1])):
            count = ends[bag] - begins[bag] if mean else 1
            scale[bag] = f32(1 / max(1, count))
            if count > 1:
                out = float32s(_place(places, bounds, f, bag), dim)
                for d in range(dim):
                    out[d] *= scale[bag]


@kernel(over="ends", reads=("slots", "inverse", "begins", "ends"), grain=256, cuts=CUTS, work=("inverse", "fresh"))
def pool_max(words, slots, inverse, fresh, begins, ends, places, bounds, argmax, lo, hi):
    dim, last = argmax.shape[1], ends[hi - 1] if hi > lo else 0
    for f in range(places.shape[0]):
        for bag in range(max(lo, bounds[f]), min(hi, bounds[f + 1])):
            best, source = float32s(_place(places, bounds, f, bag), dim), argmax[bag]
            best[:] = ZERO
            source[:] = -1
            for j in range(begins[bag], ends[bag]):
                if j + AHEAD < last and slots[inverse[j + AHEAD]] >= 0:
                    prefetch(words, slots[inverse[j + AHEAD]], dim * words.itemsize)
                slot = slots[inverse[j]]
                for d in range(dim):
                    value = decode(words[slot, d]) if slot >= 0 else fresh[-1 - slot, d]
                    if source[d] < 0 or value > best[d]:
                        best[d] = value
                        source[d] = j


@inlined
def _gather_columns(start, column, lo, hi, segments, given):
    (starts, order, end, values, first, last), (places, _, bounds, bags, weights, scale) = segments, given
    weighted, scaled, is_one = weights.shape[0] > 0, scale.shape[0] > 0, last - first == 1
    out, (origin, stride, limit) = address_of(values) + 4 * column, _origin(places, bounds, first)
    origin += 4 * column
    if is_one and bags.shape[0] == 0 and not (weighted or scaled):  # with fewer loads, a tenth faster
        for k in range(lo, hi):
            total = start
            for i in range(starts[k], starts[k + 1]):
                if i + AHEAD < end:
                    prefetch_at(origin + stride * order[i + AHEAD], size_of(total))
                total = plus(total, ONE, origin + stride * order[i])
            put(total, out + k * values.strides[0])
        return
    for k in range(lo, hi):
        total, j, stop = start, starts[k], starts[k + 1]
        while j < stop:
            until = stop
            if not is_one:  # the positions of a row are in order: those of a feature one after the other
                origin, stride, limit = _origin(places, bounds, _feature_of(bounds, first, _bag_of(bags, order[j])))
                origin += 4 * column
                until = j + 1
                while until < stop and _bag_of(bags, order[until]) < limit:
                    until += 1
            for i in range(j, until):
                if i + AHEAD < end:  # of no use if it is another feature's
                    prefetch_at(origin + stride * _bag_of(bags, order[i + AHEAD]), size_of(total))
                bag = _bag_of(bags, order[i])
                factor = scale[bag] if scaled else ONE
                factor = weights[order[i]] * factor if weighted else factor
                total = plus(total, factor, origin + stride * bag)
            j = until
        put(total, out + k * values.strides[0])


@inlined
def _gather_rest(start, dim, lo, hi, segments, given):
    (starts, order, end, values, first, _), (places, like, bounds, bags, weights, scale) = segments, given
    weighted, scaled = weights.shape[0] > 0, scale.shape[0] > 0
    for k in range(lo, hi):
        total, (origin, stride, limit) = values[k], _origin(places, bounds, first)
        for d in range(dim):
            total[d] = start
        for j in range(starts[k], starts[k + 1]):
            if j + AHEAD < end:
                prefetch_at(origin + stride * _bag_of(bags, order[j + AHEAD]), dim * like.itemsize)
            bag = _bag_of(bags, order[j])
            if bag >= limit:
                origin, stride, limit = _origin(places, bounds, _feature_of(bounds, first, bag))
            factor, row = scale[bag] if scaled else ONE, words_at(origin + stride * bag, dim, like)
            factor = weights[order[j]] * factor if weighted else factor
            for d in range(dim):
                total[d] += factor * decode(row[d])


@kernel(over="values", reads=("rows", "bags", "starts", "order"), grain=256, cuts=CUTS, work=("order", "values"))
def pool_sum_backward(
    places, like, bounds, own, rows, bags, starts, order, weights, scale, start, values, squares, lo, hi
):
    dim, given = values.shape[1], (places, like, bounds, bags, weights, scale)
    for t in range(own.shape[0] - 1):
        last = min(hi, rows[t + 1])
        for first in range(max(lo, rows[t]), last, BLOCK):
            end = min(first + BLOCK, last)
            segments = starts, order, starts[last], values, own[t], own[t + 1]
            _in_lanes(_gather_columns, _gather_rest, like.itemsize, start, dim, first, end, segments, given)
            for k in range(first, end):
                squares[k] = square_sum(values[k])


@kernel(over="values", reads=("rows", "bags", "starts", "order"), grain=256, cuts=CUTS, work=("order", "values"))
def pool_max_backward(places, like, bounds, own, rows, bags, starts, order, argmax, values, squares, lo, hi):
    dim = values.shape[1]
    for t in range(own.shape[0] - 1):
        for k in range(max(lo, rows[t]), min(hi, rows[t + 1])):
            total, f = values[k], own[t]
            total[:] = ZERO
            for j in range(starts[k], starts[k + 1]):
                position = order[j]
                bag = _bag_of(bags, position)
                f = _feature_of(bounds, f, bag)
                row, source = words_at(_place(places, bounds, f, bag), dim, like), argmax[bag]
                for d in range(dim):
                    if source[d] == position:
                        total[d] += decode(row[d])
            squares[k] = square_sum(total)


@kernel()
def sum_squares(squares, rows, sums):
    """Add up the squares of each table."""
    for t in range(sums.shape[0]):
        sums[t] = _pairwise(squares[rows[t] : rows[t + 1]])


@kernel()
def _pairwise(numbers):
    """Return the sum, with the bits of NumPy's ``numbers.sum()``: eight sums of 128 numbers, halves before."""
    count = numbers.shape[0]
    if count > 128:
        half = count // 2 - count // 2 % 8
        return _pairwise(numbers[:half]) + _pairwise(numbers[half:])
    whole, total = count - count % 8, 0.0
    if whole:
        a = b = c = d = e = f = g = h = f64(NOTHING)
        for i in range(0, whole, 8):
            a += numbers[i]
            b += numbers[i + 1]
            c += numbers[i + 2]
            d += numbers[i + 3]
            e += numbers[i + 4]
            f += numbers[i + 5]
            g += numbers[i + 6]
            h += numbers[i + 7]
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(whole, count):
        total += numbers[i]
    return total


@kernel(over="out", reads=("inverse", "bags"), work=("out", "rows"))
def weight_grads(places, like, bounds, rows, inverse, bags, out, lo, hi):
    dim, f = rows.shape[1], 0
    for j in range(lo, hi):
        bag = _bag_of(bags, j)
        if j + AHEAD < hi:
            prefetch(rows, inverse[j + AHEAD], dim * 4)
        f = _feature_of(bounds, f, bag)
        out[j] = f32(_dot(words_at(_place(places, bounds, f, bag), dim, like), rows[inverse[j]]))


@kernel()
def _dot(a, b):
    """Return the inner product in float64, by four running sums: a single sum would wait for each addition."""
    s0 = s1 = s2 = s3 = 0.0
    whole = a.shape[0] // 4 * 4
    for d in range(0, whole, 4):
        s0 += f64(decode(a[d])) * f64(b[d])
        s1 += f64(decode(a[d + 1])) * f64(b[d + 1])
        s2 += f64(decode(a[d + 2])) * f64(b[d + 2])
        s3 += f64(decode(a[d + 3])) * f64(b[d + 3])
    for d in range(whole, a.shape[0]):
        s0 += f64(decode(a[d])) * f64(b[d])
    return (s0 + s1) + (s2 + s3)
