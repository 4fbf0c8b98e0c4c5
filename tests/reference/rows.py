"""Reading, summing and stepping rows: the specification of ``kernels/cpu/rows.py``.

``weights`` (slots, >= dim) are storage words and ``records`` (slots, record_floats) float32: two views of the same
records, whose state columns start at ``state_start``. Rows that are only read may be `PackedRows` instead of words.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock.kernels.packed import PackedRows
from reference import codec, directory, packed, rules


def gather(weights: Any, slots: np.ndarray, positions: np.ndarray, fresh: np.ndarray, out: np.ndarray) -> None:
    """Copy the weights of ``slots[positions]`` to ``out`` (n, dim).

    A slot ``-1 - k`` stands for ``fresh[k]``, a row that has no record yet.
    """
    dim, wanted = out.shape[1], slots[positions]
    here = wanted >= 0
    if isinstance(weights, PackedRows):
        out[here] = packed.unpack(weights, wanted[here], dim)
    else:
        out[here] = codec.decode(weights[wanted[here], :dim])
    out[~here] = fresh[-1 - wanted[~here]]


def look_up(
    direct: np.ndarray,
    entries: np.ndarray,
    ids: np.ndarray,
    slots: np.ndarray,
    weights: np.ndarray,
    positions: np.ndarray,
    fresh: np.ndarray,
    out: np.ndarray,
) -> None:
    """Find ids in an index and copy their rows; ``positions`` count from 0, missing rows are ``fresh[0]``."""
    directory.find(direct, entries, ids, slots)
    gather(weights, slots, positions, fresh, out)


def to_nearest(values: np.ndarray, words: np.ndarray) -> None:
    """Round ``values`` (n, dim) to what the nearest words of the dtype of ``words`` mean."""
    values[:] = codec.decode(codec.encode_nearest(values, words.dtype))


def scatter(weights: Any, slots: np.ndarray, values: np.ndarray) -> None:
    """Overwrite weights by ``values`` (n, dim), rounded to nearest. Slots do not repeat."""
    if isinstance(weights, PackedRows):
        return packed.pack(weights, slots, values)
    weights[slots, : values.shape[1]] = codec.encode_nearest(values, weights.dtype)


def reset_state(records: np.ndarray, slots: np.ndarray, state_start: int, first_state: np.ndarray) -> None:
    """Set the optimizer state of records to its first value ``first_state`` (state_width,)."""
    records[slots, state_start : state_start + first_state.shape[0]] = first_state


def put(records: np.ndarray, slots: np.ndarray, start: int, values: np.ndarray) -> None:
    """Write ``values`` (n, width) to the columns of ``records[slots]`` from ``start`` on."""
    records[slots, start : start + values.shape[1]] = values


def sum_segments(
    grads: np.ndarray, starts: np.ndarray, order: np.ndarray, values: np.ndarray, squares: np.ndarray
) -> None:
    """Sum the gradients of equal ids in order of occurrence; ``squares`` are the sums' squared norms, float64."""
    for k in range(values.shape[0]):
        first, *rest = order[starts[k] : starts[k + 1]]
        values[k] = grads[first]
        for position in rest:
            values[k] += grads[position]
    row_squares(values, squares)


def row_squares(values: np.ndarray, squares: np.ndarray) -> None:
    """Write the sum of squares of each row, in float64."""
    squares[:] = np.square(values, dtype=np.float64).sum(axis=1)


def step(
    weights: np.ndarray,
    records: np.ndarray,
    slots: np.ndarray,
    state_start: int,
    state_width: int,
    values: np.ndarray,
    numbers: Any,
    scratch: np.ndarray | None,
    ids: np.ndarray,
    seed: int | np.uint64,
    step: int,
) -> None:
    """Update weights and state of records by summed gradients ``values``.

    16-bit weights are rounded stochastically by (seed, id, column, step). ``scratch`` is memory of the fast form.
    """
    dim = values.shape[1]
    w, s = codec.decode(weights[slots, :dim]), records[slots, state_start : state_start + state_width]
    rules.UPDATES[type(numbers)](w, s, values, numbers)
    weights[slots, :dim] = codec.encode_stochastic(w, ids, seed, step, weights.dtype)
    records[slots, state_start : state_start + state_width] = s


def refresh(
    weights: np.ndarray,
    records: np.ndarray,
    slots: np.ndarray,
    state_start: int,
    scratch: np.ndarray,
    numbers: Any,
) -> None:
    """Bring copies ``weights`` (n, dim) of rows up to date. The records stay as they are.

    Slots < 0 mean rows that were never stepped: their state is 0. ``scratch`` (n, state_width) receives the state as it
    would be.
    """
    here = slots >= 0
    scratch[here] = records[slots[here], state_start : state_start + scratch.shape[1]]
    scratch[~here] = 0
    rules.REFRESHES[type(numbers)](weights, scratch, numbers)
