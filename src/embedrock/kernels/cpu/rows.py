"""Reading, summing and stepping rows on the CPU: see ``tests/reference/rows.py`` for the specification."""

from numba import types

from embedrock.kernels.cpu.codec import decode, nearest, store_row
from embedrock.kernels.cpu.directory import find
from embedrock.kernels.cpu.lanes import square_sum
from embedrock.kernels.cpu.packed import ask_for_row, read_row, write_row
from embedrock.kernels.cpu.prefetch import prefetch, prefetch_to_write
from embedrock.kernels.cpu.rules import refresh_row, update_row
from embedrock.kernels.cpu.runtime import by_types, kernel

# Rows are copied by loops: an assignment of slices checks for overlap each time.

# Prefetch distance in rows: 8 to 32 measured alike (a record of 768 bytes, 2 cores, Zipf ids), 4 slower.
AHEAD = 16
STEP_GRAIN = 512  # fewest rows of a part of a step
BLOCK = 512  # ids found before their rows are read: slots stay in the core's first cache


@kernel(over="out", reads=("slots", "positions"), grain=2048, work=("out", "out"))
def gather(weights, slots, positions, fresh, out, lo, hi):
    dim = out.shape[1]
    for i in range(lo, hi):
        if i + AHEAD < hi and slots[positions[i + AHEAD]] >= 0:
            ask_for_row(weights, slots[positions[i + AHEAD]], dim)
        slot = slots[positions[i]]
        if slot >= 0:
            read_row(weights, slot, out[i])
        else:
            row = fresh[-1 - slot]
            for d in range(dim):
                out[i, d] = row[d]


@kernel(over="ids", reads=("ids", "positions"), grain=2048, work=("out", "out"))
def look_up(direct, entries, ids, slots, weights, positions, fresh, out, lo, hi):
    for start in range(lo, hi, BLOCK):
        end = min(start + BLOCK, hi)
        find(direct, entries, ids, slots, start, end)
        gather(weights, slots, positions, fresh, out, start, end)


@kernel(over="values", work=("values", "values"))
def to_nearest(values, words, lo, hi):
    for i in range(lo, hi):
        for d in range(values.shape[1]):
            values[i, d] = decode(nearest(values[i, d], words))


@kernel(over="slots", reads=("slots",), work=("slots", "values"))
def scatter(weights, slots, values, lo, hi):
    for i in range(lo, hi):
        write_row(weights, slots[i], values[i])


@kernel(over="slots", reads=("slots",))
def reset_state(records, slots, state_start, first_state, lo, hi):
    for i in range(lo, hi):
        for d in range(first_state.shape[0]):
            records[slots[i], state_start + d] = first_state[d]


@kernel(over="slots", reads=("slots",), grain=512, work=("slots", "values"))
def put(records, slots, start, values, lo, hi):
    nbytes = records.shape[1] * records.itemsize
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch_to_write(records, slots[i + AHEAD], nbytes)
        row = records[slots[i], start : start + values.shape[1]]
        for d in range(values.shape[1]):
            row[d] = values[i, d]


@kernel(over="values")
def row_squares(values, squares, lo, hi):
    for k in range(lo, hi):
        squares[k] = square_sum(values[k])


@by_types
def _step_words(words, state, grad, numbers, scratch, part, row_id, seed, step):
    """Step one row of words, which the last three round."""
    return _step_in_place if words.dtype == types.float32 else _step_and_round


def _step_in_place(words, state, grad, numbers, scratch, part, row_id, seed, step):
    update_row(words, state, grad, numbers)


def _step_and_round(words, state, grad, numbers, scratch, part, row_id, seed, step):
    weights = scratch[part]
    for d in range(words.shape[0]):
        weights[d] = decode(words[d])
    update_row(weights, state, grad, numbers)
    store_row(words, weights, row_id, seed, step)


@kernel(over="slots", reads=("slots", "ids"), grain=STEP_GRAIN, cuts=4, work=("slots", "records"))
def step(words, records, slots, state_start, state_width, values, numbers, scratch, ids, seed, step, lo, hi):
    dim, nbytes, part = values.shape[1], records.shape[1] * 4, lo // STEP_GRAIN
    for i in range(lo, hi):
        if i + AHEAD < hi:
            prefetch_to_write(records, slots[i + AHEAD], nbytes)
        state = records[slots[i], state_start : state_start + state_width]
        _step_words(words[slots[i], :dim], state, values[i], numbers, scratch, part, ids[i], seed, step)


@kernel(over="slots", reads=("slots",), grain=64)
def refresh(weights, records, slots, state_start, scratch, numbers, lo, hi):
    width, nbytes = scratch.shape[1], records.shape[1] * records.itemsize
    for i in range(lo, hi):
        if i + AHEAD < hi and slots[i + AHEAD] >= 0:
            prefetch(records, slots[i + AHEAD], nbytes)
        if slots[i] >= 0:
            for d in range(width):
                scratch[i, d] = records[slots[i], state_start + d]
        else:
            for d in range(width):
                scratch[i, d] = 0.0
        refresh_row(weights[i], scratch[i], numbers)
