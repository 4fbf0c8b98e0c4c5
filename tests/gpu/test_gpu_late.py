"""Copies ahead that come late: they change no bit, as all that uses rows waits for them."""

from __future__ import annotations

import late_copies
import numpy as np
import pytest
from gpu_device import INTERPRETED
from gpu_models import ROWS, SOME_NEAR, Way, batches, make, train

import embedrock.torch as ert
from embedrock.device.stream_order import StreamOrder
from embedrock.errors import NonFiniteGradientError
from slow import slow

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on_gpu.py delays the copies of a GPU")


def weights_of(way: Way | None, count: int) -> np.ndarray:
    model = make(way)
    return train(model, ert.prefetch(batches(3) * count, {model.rows: lambda ids: ids})).table.lookup(np.arange(ROWS))


@pytest.mark.parametrize(
    ("near", "seed", "count"),
    [(1, 0, 1), *slow((1, None, 3), *((near, seed, 3) for near in range(3) for seed in range(4)))],
)
def test_late_copies_change_nothing(near: int, seed: int | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = weights_of(None, count)
    copies = late_copies.install(monkeypatch, seed)
    np.testing.assert_array_equal(weights_of(SOME_NEAR[near], count), expected)
    assert copies.late > 0


def test_a_lookup_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = weights_of(None, 2)
    late_copies.install(monkeypatch, None)
    monkeypatch.setattr(StreamOrder, "wait_for_copies", lambda timeline: None)
    with pytest.raises((AssertionError, NonFiniteGradientError)):  # near memory has anything in it
        np.testing.assert_array_equal(weights_of(SOME_NEAR[1], 2), expected)
