"""`ProgramExecutor`: reads and sums rows of a table for TensorFlow programs, on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from embedrock.batch.gradients import RowGradients
from embedrock.keras.training import host_calls
from embedrock.storage.listeners import PlacementWarning
from embedrock.system.buffers import buffers
from embedrock.table.table import Table

BY_HOST = "TensorFlow's programs look rows up, and step them, by calls of the host, in RAM or on disk"


class ProgramExecutor:
    """An executor of a table's rows for programs: on the CPU, with NumPy arrays. The GPU's executor derives from it.

    Functions take and return arrays of the executor's kind. Gradients are opaque: callers only pass them back.

    Args:
        table: the table.
        label: name of the layer in messages.

    Attributes:
        is_on_gpu: whether TensorFlow's GPU uses the rows.
        call: a function that calls a function of arrays from a program: see `host_calls.call`.
    """

    is_on_gpu = False
    call: Callable[..., list[tf.Tensor]] = staticmethod(host_calls.call)

    def __init__(self, table: Table, label: str) -> None:
        self.table, self._label = table, label

    @property
    def stepped(self) -> Any:
        """The `GpuExecutor` that reads and steps the rows; None: the CPU does."""
        return None

    def begin(self) -> None:
        """Begin a lookup of rows that a GPU has. Here: warn that they are copied to RAM from PyTorch's layers."""
        warnings.warn(
            f"rows of {self._label} are {self.table.executor!r}, where layers of PyTorch use them: {BY_HOST}. So each "
            "lookup waits for the GPU and brings back the rows that changed there, and all of them go back when "
            "PyTorch goes on. No row is lost. Use the table in one framework at a time, and put PyTorch's layers on "
            'the CPU, model.to("cpu"), before Keras goes on with it.',
            PlacementWarning,
            stacklevel=2,
        )

    def host_array(self, array: Any) -> np.ndarray:
        return array

    def sum_of(self, parts: Sequence[Any]) -> Any:
        """Return the sum of one or more gradients. A row's gradients are added in the order of `parts`."""
        return RowGradients.sum_of(parts)

    def shown(self, grads: Any, is_last: bool) -> list[Any]:
        """Return gradients float32 (n, dim), which the caller may write to, and the ids of their rows, int64 (n,).

        Args:
            grads: gradients of the executor's kind.
            is_last: no later call uses them.
        """
        return [grads.values if is_last else buffers.copy(grads.values), grads.plan.ids.copy()]

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> Any:
        """Return values and ids, from `shown` or derived from it, as gradients. `plans` may contain their plan."""
        plan = next((plan for plan in plans if np.array_equal(plan.ids, ids)), None)
        if plan is None:
            return self.table.sum(self.table.plan(ids), values)
        return RowGradients.of_rows(plan, buffers.copy(values))  # the plan keeps the results of the lookups
