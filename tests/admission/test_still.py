"""Arrays as they are at a moment, written while they change."""

from __future__ import annotations

import numpy as np
import pytest

import embedrock.admission.copy_on_write as stills
from embedrock.admission.copy_on_write import CopyOnWriteArrays

PLACES = 40


@pytest.mark.parametrize("seed", range(8))
def test_a_still_is_what_arrays_were_when_it_was_made(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stills, "PIECE_BYTES", 8 * 7)  # a piece of a column has 7 places, one of lines 1 to 3
    rng = np.random.default_rng(seed)
    arrays = {"ids": rng.integers(0, 99, PLACES), "lines": rng.integers(0, 99, (PLACES, 2 + seed % 4))}
    chosen = rng.random(PLACES) < (1.0, 0.6)[seed % 2]
    expected = {name: array[chosen].reshape(-1) for name, array in arrays.items()} | {"": np.flatnonzero(chosen)}
    still = CopyOnWriteArrays(arrays, chosen.copy())
    assert still.nbytes == 2 * PLACES
    for name in ("ids", "", "lines"):
        column, parts = still.column(name), [np.empty(0, np.int64)]
        for piece in column.pieces():
            parts.append(piece.reshape(-1))
            places = rng.integers(0, PLACES + 9, 5)  # some twice, and some that came since
            still.keep(places)
            for array in arrays.values():
                array[places[places < PLACES]] = -1
        np.testing.assert_array_equal(np.concatenate(parts), expected[name])
        assert column.shape == expected[name].shape
        assert still.is_done == (name == "lines")
        assert (still.nbytes > 2 * PLACES) != still.is_done  # nothing is kept that nobody will write
    assert (arrays["ids"] == -1).any()
