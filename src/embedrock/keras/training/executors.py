"""Executors of TensorFlow programs: `ArrayExecutor` on the CPU, `TensorFlowGpuExecutor` on TensorFlow's GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan
from embedrock.batch.pooling import ONES, Bags, pool, unpool, weight_grads
from embedrock.frontend.steps import SteppingExecutor, judge_on_host
from embedrock.keras.training import host_calls
from embedrock.keras.training.placement import warn_of_rows_elsewhere
from embedrock.system.buffers import buffers
from embedrock.table.table import Table


class ProgramExecutor(Protocol):
    """An executor of a table's rows for programs. Functions take the executor's own arrays, of NumPy or PyTorch.

    Plans, bags, gradients, and the traces of `pool` are opaque: callers only pass them back.

    Attributes:
        is_on_gpu: whether TensorFlow's GPU uses the rows.
        trace: the dtype in which places of maxima go through programs.
    """

    is_on_gpu: bool
    trace: tf.DType

    @property
    def call(self) -> Callable[..., list[tf.Tensor]]:
        """A function that calls a function of arrays from a program: see `host_calls.call`."""
        ...

    @property
    def stepped(self) -> SteppingExecutor:
        """The executor that steps the rows."""
        ...

    def begin(self) -> None:
        """Begin a lookup."""
        ...

    def host_array(self, array: Any) -> np.ndarray:
        """Return an array as NumPy's."""
        ...

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return the concatenation of arrays."""
        ...

    def numbers(self, start: int, stop: int) -> Any:
        """Return the integers from `start` to before `stop`, int64."""
        ...

    def ones(self, n: int) -> Any:
        """Return ones, float32 (n,)."""
        ...

    def lookup(self, ids: Any) -> Any:
        """Return rows without gradients: float32 (n, dim).

        Raises:
            IdError: an id is outside of the table.
        """
        ...

    def plan(self, ids: Any) -> Any:
        """Return the plan of a batch of ids (n,). Raises as `lookup` does."""
        ...

    def read(self, plan: Any) -> Any:
        """Return the row of each position: float32 (n, dim)."""
        ...

    def read_rows(self, plan: Any) -> Any:
        """Return each row once: float32 (unique or more, dim)."""
        ...

    def sum(self, plan: Any, grads: Any) -> Any:
        """Return the gradients of positions, float32 (n, dim), summed by row."""
        ...

    def bags(self, plan: Any, bounds: Any, mode: str) -> Any:
        """Return the positions of a plan as bags with the given bounds: int64 (bags + 1,)."""
        ...

    def pool(self, rows: Any, weights: Any, bags: Any) -> tuple[Any, Any]:
        """Pool the rows of `read_rows`; return float32 (bags, dim), and the places of maxima."""
        ...

    def unpool(self, grads: Any, weights: Any, bags: Any, places: Any) -> Any:
        """Return the gradients of the rows from those of the bags; `places` of maxima, None for sums."""
        ...

    def weight_grads(self, grads: Any, rows: Any, bags: Any) -> Any:
        """Return the gradients of the positions' weights, float32 (n,)."""
        ...

    def sum_of(self, parts: Sequence[Any]) -> Any:
        """Return the sum of one or more gradients. A row's gradients are added in the order of `parts`."""
        ...

    def shown(self, grads: Any, is_last: bool) -> list[Any]:
        """Return gradients float32 (n, dim), which the caller may write to, and the ids of their rows, int64 (n,).

        Args:
            grads: gradients of the executor's kind.
            is_last: no later call uses them.
        """
        ...

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> Any:
        """Return values and ids, from `shown` or derived from it, as gradients. `plans` may contain their plan."""
        ...


class ArrayExecutor:
    """An executor on the CPU: a `ProgramExecutor` of NumPy arrays.

    Args:
        table: the table.
        label: name of the layer in messages.
    """

    is_on_gpu = False
    trace: tf.DType = tf.int32
    judge = staticmethod(judge_on_host)
    call = staticmethod(host_calls.call)

    def __init__(self, table: Table, label: str) -> None:
        self.table, self._label = table, label

    @property
    def stepped(self) -> ArrayExecutor:
        return self

    def begin(self) -> None:
        """Do nothing: the CPU has no earlier errors to report."""
        warn_of_rows_elsewhere(self.table, self._label)

    def host_array(self, array: np.ndarray) -> np.ndarray:
        return array

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def numbers(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop)

    def ones(self, n: int) -> np.ndarray:
        return np.ones(n, np.float32)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return self.table.lookup(ids)

    def plan(self, ids: np.ndarray) -> Plan:
        return self.table.plan(ids)

    def read(self, plan: Plan) -> np.ndarray:
        return self.table.read(plan)

    def read_rows(self, plan: Plan) -> np.ndarray:
        return self.table.read_rows(plan)

    def sum(self, plan: Plan, grads: np.ndarray) -> RowGradients:
        return self.table.sum(plan, grads)

    def bags(self, plan: Plan, bounds: np.ndarray, mode: str) -> Bags:
        return Bags(plan, bounds, -1, mode)

    def pool(self, rows: np.ndarray, weights: np.ndarray | None, bags: Bags) -> tuple[np.ndarray, np.ndarray]:
        return pool(rows, weights, bags)

    def unpool(
        self, grads: np.ndarray, weights: np.ndarray | None, bags: Bags, places: np.ndarray | None
    ) -> RowGradients:
        return unpool(grads, weights, bags, ONES if places is None else places)

    def weight_grads(self, grads: np.ndarray, rows: np.ndarray, bags: Bags) -> np.ndarray:
        return weight_grads(grads, rows, bags)

    def sum_of(self, parts: Sequence[RowGradients]) -> RowGradients:
        return RowGradients.sum_of(parts)

    def shown(self, grads: RowGradients, is_last: bool) -> list[np.ndarray]:
        return [grads.values if is_last else buffers.copy(grads.values), grads.plan.ids.copy()]

    def of_rows(self, values: np.ndarray, ids: np.ndarray, plans: Sequence[Plan]) -> RowGradients:
        plan = next((plan for plan in plans if np.array_equal(plan.ids, ids)), None)
        if plan is None:
            return self.table.sum(self.table.plan(ids), values)
        return RowGradients.of_rows(plan, buffers.copy(values))  # the plan keeps the results of the lookups
