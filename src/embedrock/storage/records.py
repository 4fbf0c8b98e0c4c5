"""`Records`: records in RAM, read, stepped and overwritten by slot. `SharedRow`: the default row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.batch.gradients import counted_in_units, largest_of, sum_of_units
from embedrock.batch.plan import Plan, counting
from embedrock.batch.pooling import ONES, Bags, places_of, sum_bags
from embedrock.errors import GradientError, counted
from embedrock.optimizers import LAST_STEP
from embedrock.spec.spec import STATE_BYTES, Spec
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned

BEGINS_AS = 0  # id whose initial value the default row has; every table has it
_SLOT, _POSITION = np.zeros(1, np.int64), np.zeros(1, np.int32)
_MOST = float(np.finfo(np.float32).max)


def wrong_last_steps(spec: Spec, records: np.ndarray, slots: np.ndarray, steps: int | np.ndarray) -> np.ndarray:
    """Return the indexes in `slots` of records, uint8 (n, record_bytes), whose last step is not in [0, steps].

    Kernels use it as an index of the rule's history.
    """
    if spec.rule is None or LAST_STEP not in spec.rule.state():
        return np.empty(0, np.int64)
    end = (spec.layout.state_start + spec.layout.state_width) * STATE_BYTES
    last = np.ascontiguousarray(records[slots, end - STATE_BYTES : end]).view(np.int32)[:, 0]
    return np.flatnonzero((last < 0) | (last > steps))


class Records:
    """Records in one piece of memory.

    Args:
        memory: uint8 (slots * record_bytes,), the memory of the records.

    Attributes:
        bytes: uint8 (slots, record_bytes), the same memory.
    """

    def __init__(self, spec: Spec, memory: np.ndarray) -> None:
        self._spec = spec
        self.bytes = memory.reshape(-1, spec.record_bytes)  # possibly empty
        codec, self._floats = spec.codec, self.bytes.view(np.float32)
        self.weights: Any = self.bytes.view(spec.words) if codec is None else codec.rows_of(self.bytes, spec.dim)

    @spanned("gather")
    def read(self, slots: np.ndarray, positions: np.ndarray, fresh: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of ``slots[positions]`` to `out` float32 (n, dim); slot ``-1 - k`` means ``fresh[k]``."""
        kernels.cpu.launch(kernels.cpu.rows.gather, self.weights, slots, positions, fresh, out)

    def refresh(self, slots: np.ndarray, rows: np.ndarray, numbers: Any) -> np.ndarray:
        """Catch up copies `rows` float32 (n, dim) of stale weights. The records do not change.

        Returns:
            The optimizer state that belongs to them: float32 (n, state_width).
        """
        layout, cpu = self._spec.layout, kernels.cpu
        scratch = buffers.empty((len(slots), layout.state_width), np.float32)
        cpu.launch(cpu.rows.refresh, rows, self._floats, slots, layout.state_start, scratch, numbers)
        return scratch

    def begin(self, slots: np.ndarray, weights: np.ndarray, first_state: np.ndarray) -> None:
        """Make records of initial `weights` float32 (n, dim) and optimizer state float32 (state_width,)."""
        self.write(slots, weights)
        layout, cpu = self._spec.layout, kernels.cpu
        if layout.state_width:
            cpu.launch(cpu.rows.reset_state, self._floats, slots, layout.state_start, first_state)
        for start, end in layout.gaps:  # bytes of the slot's previous record
            self.bytes[slots, start:end] = 0

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Overwrite weights with `values` float32 (n, dim), rounded to nearest."""
        kernels.cpu.launch(kernels.cpu.rows.scatter, self.weights, slots, values)

    def scratch(self, count: int) -> np.ndarray | None:
        """Return the buffers for a step of `count` rows. No later part of the step can fail.

        In them 16-bit weights are stepped as float32, before they are rounded: float32 (parts, dim), a row for each
        part of the kernel's call. None for float32.
        """
        if self._spec.dtype == "float32":
            return None
        return np.empty((count // kernels.cpu.rows.STEP_GRAIN + 1, self._spec.dim), np.float32)

    @spanned("rule")
    def step(
        self,
        ids: np.ndarray,
        slots: np.ndarray,
        grads: np.ndarray,
        numbers: Any,
        step: int,
        scratch: np.ndarray | None,
        refreshed: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]] = (),
    ) -> None:
        """Step the records in `slots` (ids `ids`, without repeats) by summed gradients float32 (n, dim).

        Args:
            numbers: the kernel's arguments.
            scratch: from `scratch`, for as many rows.
            refreshed: slots of float32 records, with the weights and state that `refresh` returned. A row may repeat.
        """
        layout, cpu = self._spec.layout, kernels.cpu
        for known, values, state in refreshed:
            for start, columns in ((0, values), (layout.state_start, state)):
                cpu.launch(cpu.rows.put, self._floats, known, start, columns)
        given = slots, layout.state_start, layout.state_width, grads, numbers, scratch, ids, self._spec.key, step
        cpu.launch(cpu.rows.step, self.weights, self._floats, *given)


def encode(spec: Spec, ids: np.ndarray, values: np.ndarray, subject: str = "a table") -> np.ndarray:
    """Return new records of rows, uint8 (n, record_bytes), with initial optimizer state.

    Args:
        ids: int64 (n,), for the error.
        values: weights, float32 (n, dim), rounded to nearest.
        subject: the table's name in the error.

    Raises:
        GradientError: NaN or Inf, or a value that is too large as the table's dtype.
    """
    made = Records(spec, np.zeros(len(ids) * spec.record_bytes, np.uint8))
    slots, kept = np.arange(len(ids)), values
    made.begin(slots, values, spec.first_state)
    if spec.dtype != "float32":  # others may overflow
        made.read(slots, counting(len(ids)), values[:0], kept := np.empty((len(ids), spec.dim), np.float32))
    wrong = np.flatnonzero(~(np.isfinite(values).all(axis=1) & np.isfinite(kept).all(axis=1)))
    if len(wrong):
        raise GradientError(
            f"rows of {subject} must be finite as {spec.dtype}: got NaN, Inf or values too large in "
            f"{counted(len(wrong), 'row')}, first ids {ids[wrong[:8]].tolist()}. Nothing has changed. Assign other "
            "values to them, or forget them."
        )
    return made.bytes


class SharedRow:
    """The default row, outside of the backend: rows that are not admitted read it, and their gradients train it.

    The table's rule steps it, in the steps that have rows that are not admitted.

    Args:
        record: uint8 (record_bytes,), its record.
    """

    def __init__(self, spec: Spec, record: np.ndarray) -> None:
        self._spec, self._records = spec, Records(spec, record)

    @staticmethod
    def begun(spec: Spec, weights: np.ndarray) -> np.ndarray:
        """Return a new record of weights float32 (dim,), with its initial optimizer state."""
        record = np.zeros(spec.record_bytes, np.uint8)
        Records(spec, record).begin(_SLOT, weights[None], spec.first_state)
        return record

    def weights(self) -> np.ndarray:
        """Return its weights, float32 (dim,)."""
        out = np.empty((1, self._spec.dim), np.float32)
        self._records.read(_SLOT, _POSITION, out[:0], out)
        return out[0]

    def gradient(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the sum of some rows of gradients float32 (n, dim): float32 (1, dim), finite.

        In a table without segments they are added in their order. A sum of finite values may overflow. It is then the
        largest float32, and the step moves the row as far.
        """
        if self._spec.segments > 1:
            own, largest = values[positions], largest_of(values[positions])
            return sum_of_units(counted_in_units(own, largest), largest)
        order = positions.astype(np.int32)
        plan = Plan(order.shape, np.zeros(1, np.int64), order, np.array([0, len(order)], np.int32), order)
        bags = Bags.of_rows(plan)._replace(bounds=np.array([0, len(values)]))
        total, _ = sum_bags(plan, places_of([values]), self._spec.dim, None, bags, ONES)
        return np.nan_to_num(total, copy=False, posinf=_MOST, neginf=-_MOST)

    def step(self, gradient: np.ndarray, numbers: Any, step: int) -> None:
        """Step the row by float32 (1, dim), in step number `step`; `numbers` are the kernel's arguments."""
        ids = np.array([BEGINS_AS])
        self._records.step(ids, _SLOT, gradient, numbers, step, self._records.scratch(1))
