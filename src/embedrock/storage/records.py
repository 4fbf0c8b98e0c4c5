"""`Records`: records in RAM, found by slot, which every tier reads, steps and overwrites. `SharedRow`: one for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.optimizers import LAST_STEP
from embedrock.spec.spec import STATE_BYTES, Spec
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned

BEGINS_AS = 0  # the row whose first value a shared row has: one that any table has
_SLOT, _POSITION = np.zeros(1, np.int64), np.zeros(1, np.int32)
_MOST = float(np.finfo(np.float32).max)


def wrong_last_steps(spec: Spec, records: np.ndarray, slots: np.ndarray, steps: int | np.ndarray) -> np.ndarray:
    """Return which of ``records[slots]``, uint8 (n, record_bytes), name a step as their last that is not in [0, steps].

    Kernels look it up among the steps that the rule remembers.
    """
    if spec.rule is None or LAST_STEP not in spec.rule.state():
        return np.empty(0, np.int64)
    end = (spec.layout.state_start + spec.layout.state_width) * STATE_BYTES
    last = np.ascontiguousarray(records[slots, end - STATE_BYTES : end]).view(np.int32)[:, 0]
    return np.flatnonzero((last < 0) | (last > steps))


class StepScratch(NamedTuple):
    """Where weights of 16 bits are stepped as float32, before they are rounded.

    Attributes:
        weights: float32 (n, dim).
        rows, positions: int64 and int32 (n,), from 0 on.
    """

    weights: np.ndarray
    rows: np.ndarray
    positions: np.ndarray


class Records:
    """Records in one piece of memory.

    Args:
        spec: of the table.
        memory: uint8 (slots * record_bytes,), which they lie in.

    Attributes:
        bytes: uint8 (slots, record_bytes), the same memory.
    """

    def __init__(self, spec: Spec, memory: np.ndarray) -> None:
        self._spec = spec
        self.bytes = memory.reshape(-1, spec.record_bytes)  # there may be none
        self.weights, self._floats = self.bytes.view(spec.storage.words), self.bytes.view(np.float32)

    @spanned("gather")
    def read(self, slots: np.ndarray, positions: np.ndarray, fresh: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of ``slots[positions]`` to `out` float32 (n, dim); slot ``-1 - k`` means ``fresh[k]``."""
        kernels.cpu.launch(kernels.cpu.rows.gather, self.weights, slots, positions, fresh, out)

    def refresh(self, slots: np.ndarray, rows: np.ndarray, numbers: Any) -> np.ndarray:
        """Bring copies `rows` float32 (n, dim) of weights up to date; the records stay as they are.

        Returns:
            The optimizer state that goes with them: float32 (n, state_width).
        """
        layout, cpu = self._spec.layout, kernels.cpu
        scratch = buffers.empty((len(slots), layout.state_width), np.float32)
        cpu.launch(cpu.rows.refresh, rows, self._floats, slots, layout.state_start, scratch, numbers)
        return scratch

    def begin(self, slots: np.ndarray, weights: np.ndarray, first_state: np.ndarray) -> None:
        """Make records of first `weights` float32 (n, dim) and optimizer state float32 (state_width,)."""
        self.write(slots, weights)
        layout, cpu = self._spec.layout, kernels.cpu
        if layout.state_width:
            cpu.launch(cpu.rows.reset_state, self._floats, slots, layout.state_start, first_state)
        for start, end in layout.gaps:  # of the record that was in the slot before
            self.bytes[slots, start:end] = 0

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Overwrite weights by `values` float32 (n, dim), rounded to nearest."""
        kernels.cpu.launch(kernels.cpu.rows.scatter, self.weights, slots, values)

    def scratch(self, count: int) -> StepScratch | None:
        """Return what a step of so many rows needs besides: nothing for float32. It is the last that can fail of it."""
        if self._spec.dtype == "float32":
            return None
        weights = np.empty((count, self._spec.dim), np.float32)
        return StepScratch(weights, np.arange(count), np.arange(count, dtype=np.int32))

    @spanned("rule")
    def step(
        self,
        ids: np.ndarray,
        slots: np.ndarray,
        grads: np.ndarray,
        numbers: Any,
        step: int,
        scratch: StepScratch | None,
        refreshed: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]] = (),
    ) -> None:
        """Step the records in `slots` (ids `ids`, without repeats) by summed gradients float32 (n, dim).

        Args:
            ids, slots, grads: of the rows.
            numbers: the kernel's arguments.
            step: the step's number.
            scratch: from `scratch`, for as many rows.
            refreshed: slots of float32 records, and their weights and state as `refresh` brought them up to date; one
                row may be there more than once.
        """
        layout, cpu = self._spec.layout, kernels.cpu
        for known, values, state in refreshed:
            for start, columns in ((0, values), (layout.state_start, state)):
                cpu.launch(cpu.rows.put, self._floats, known, start, columns)
        state = layout.state_start, layout.state_width
        if scratch is None:
            cpu.launch(cpu.rows.step, self.weights, slots, self._floats, slots, *state, grads, numbers)
            return
        weights, rows, positions = scratch
        self.read(slots, positions, grads[:0], weights)
        cpu.launch(cpu.rows.step, weights, rows, self._floats, slots, *state, grads, numbers)
        cpu.launch(cpu.rows.scatter_stochastic, self.weights, slots, weights, ids, self._spec.key, step)


class SharedRow:
    """The row that rows without a record are read as, and that trains for them: a record outside of the tier.

    It is stepped by the table's rule, in the steps that turn rows away.

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
