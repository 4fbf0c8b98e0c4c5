"""`SharedRow`: the row that rows without a record are read as, and that trains for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.spec import Spec
from embedrock.tiers.records import Records

BEGINS_AS = 0  # the row whose first value it has: one that any table has
_SLOT, _POSITION = np.zeros(1, np.int64), np.zeros(1, np.int32)
_MOST = float(np.finfo(np.float32).max)


class SharedRow:
    """A record outside of the tier, stepped by the table's rule, in the steps that turn rows away.

    Args:
        spec: of the table.
        record: uint8 (record_bytes,), which it lies in.
    """

    def __init__(self, spec: Spec, record: np.ndarray) -> None:
        self._spec, self._records = spec, Records(spec, record)

    @staticmethod
    def begun(spec: Spec, weights: np.ndarray) -> np.ndarray:
        """Return a new record of weights float32 (dim,), with its first optimizer state."""
        record = np.zeros(spec.record_bytes, np.uint8)
        Records(spec, record).begin(_SLOT, weights[None], spec.first_state)
        return record

    def weights(self) -> np.ndarray:
        """Return its weights, float32 (dim,)."""
        out = np.empty((1, self._spec.dim), np.float32)
        self._records.read(_SLOT, _POSITION, out[:0], out)
        return out[0]

    def gradient(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the sum of some rows of gradients float32 (n, dim), in their order: float32 (1, dim), finite.

        What is finite alone may overflow in a sum. The largest number there is goes for that: such a step throws the
        row as far as any.
        """
        total, square = np.empty((1, self._spec.dim), np.float32), np.empty(1, np.float64)
        ends, order = np.array([0, len(positions)], np.int32), positions.astype(np.int32)
        kernels.cpu.launch(kernels.cpu.rows.sum_segments, values, ends, order, total, square)
        return np.nan_to_num(total, copy=False, posinf=_MOST, neginf=-_MOST)

    def step(self, gradient: np.ndarray, numbers: Any, step: int) -> None:
        """Step it by float32 (1, dim), in the step of a number; `numbers` are the kernel's arguments."""
        ids = np.array([BEGINS_AS])
        self._records.step(ids, _SLOT, gradient, numbers, step, self._records.scratch(1))
