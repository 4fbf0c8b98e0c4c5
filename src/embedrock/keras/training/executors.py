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
from embedrock.keras.training.gpu_executor import warn_of_rows_elsewhere
from embedrock.system.buffers import buffers
from embedrock.table.table import Table


class ProgramExecutor(Protocol):
    """The rows of a table for programs, which call functions of the side's own arrays: of NumPy, or of PyTorch.

    Plans, bags, gradients, and what `pool` keeps are its own, too: whoever gets them from it only gives them back.

    Attributes:
        is_on_gpu: whether TensorFlow's GPU uses the rows.
        trace: the dtype in which places of maxima go through programs.
    """

    is_on_gpu: bool
    trace: tf.DType

    @property
    def call(self) -> Callable[..., list[tf.Tensor]]:
        """Calls a function of arrays from a program: see `host_calls.call`."""
        ...

    @property
    def stepped(self) -> SteppingExecutor:
        """Who steps the rows."""
        ...

    def begin(self) -> None:
        """Begin a lookup."""
        ...

    def host_array(self, array: Any) -> np.ndarray:
        """Return an array as NumPy's."""
        ...

    def joined(self, parts: Sequence[Any]) -> Any:
        """Return arrays one after the other."""
        ...

    def numbers(self, start: int, stop: int) -> Any:
        """Return the whole numbers from `start` to before `stop`, int64."""
        ...

    def ones(self, n: int) -> Any:
        """Return ones, float32 (n,)."""
        ...

    def lookup(self, ids: Any) -> Any:
        """Return rows for no gradient: float32 (n, dim).

        Raises:
            IdError: an id is outside of the table.
        """
        ...

    def plan(self, ids: Any) -> Any:
        """Decide what a batch of ids (n,) needs; raises what `lookup` does."""
        ...

    def read(self, plan: Any) -> Any:
        """Return the row of each position: float32 (n, dim)."""
        ...

    def read_rows(self, plan: Any) -> Any:
        """Return each row once: float32 (unique or more, dim)."""
        ...

    def sum(self, plan: Any, grads: Any) -> Any:
        """Return the gradients of positions, float32 (n, dim), summed to one for each row."""
        ...

    def bags(self, plan: Any, bounds: Any, mode: str) -> Any:
        """Return the positions of a plan as bags that end where the next begins: int64 (bags + 1,)."""
        ...

    def pool(self, rows: Any, weights: Any, bags: Any) -> tuple[Any, Any]:
        """Pool what `read_rows` returned; return float32 (bags, dim), and the places of maxima."""
        ...

    def unpool(self, grads: Any, weights: Any, bags: Any, places: Any) -> Any:
        """Return the gradients of the rows from those of the bags; `places` of maxima, None for sums."""
        ...

    def weight_grads(self, grads: Any, rows: Any, bags: Any) -> Any:
        """Return the gradients of the positions' weights, float32 (n,)."""
        ...

    def sum_of(self, parts: Sequence[Any]) -> Any:
        """Return the sum of gradients, one or more; in a row that more than one has, in their order."""
        ...

    def shown(self, grads: Any, is_last: bool) -> list[Any]:
        """Return gradients float32 (n, dim), which the caller may write to, and the ids of their rows, int64 (n,).

        Args:
            grads: of the side's kind.
            is_last: nobody uses them again.
        """
        ...

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> Any:
        """Return what `shown` showed, or was made of it, as gradients; `plans` may have the one of its rows."""
        ...


class ArrayExecutor:
    """Rows that the CPU reads and steps: a `ProgramExecutor`, of NumPy's arrays.

    Args:
        table: whose rows.
        label: what messages call the layer.
    """

    is_on_gpu = False
    trace: tf.DType = tf.int32
    judge = staticmethod(judge_on_host)
    call = staticmethod(host_calls.call)

    def __init__(self, table: Table, label: str) -> None:
        self.table, self._label = table, label

    @property
    def stepped(self) -> ArrayExecutor:
        """Who steps the rows: the CPU."""
        return self

    def begin(self) -> None:
        """Begin a lookup."""
        warn_of_rows_elsewhere(self.table, self._label)

    def host_array(self, array: np.ndarray) -> np.ndarray:
        """Return the array."""
        return array

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Return arrays one after the other."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def numbers(self, start: int, stop: int) -> np.ndarray:
        """Return the whole numbers from `start` to before `stop`."""
        return np.arange(start, stop)

    def ones(self, n: int) -> np.ndarray:
        """Return ones."""
        return np.ones(n, np.float32)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Return rows for no gradient."""
        return self.table.lookup(ids)

    def plan(self, ids: np.ndarray) -> Plan:
        """Decide what a batch of ids needs."""
        return self.table.plan(ids)

    def read(self, plan: Plan) -> np.ndarray:
        """Return the row of each position."""
        return self.table.read(plan)

    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return each row once."""
        return self.table.read_rows(plan)

    def sum(self, plan: Plan, grads: np.ndarray) -> RowGradients:
        """Return the gradients of positions summed to one for each row."""
        return self.table.sum(plan, grads)

    def bags(self, plan: Plan, bounds: np.ndarray, mode: str) -> Bags:
        """Return the positions of a plan as bags."""
        return Bags(plan, bounds, -1, mode)

    def pool(self, rows: np.ndarray, weights: np.ndarray | None, bags: Bags) -> tuple[np.ndarray, np.ndarray]:
        """Pool unique rows."""
        return pool(rows, weights, bags)

    def unpool(
        self, grads: np.ndarray, weights: np.ndarray | None, bags: Bags, places: np.ndarray | None
    ) -> RowGradients:
        """Return the gradients of the rows from those of the bags."""
        return unpool(grads, weights, bags, ONES if places is None else places)

    def weight_grads(self, grads: np.ndarray, rows: np.ndarray, bags: Bags) -> np.ndarray:
        """Return the gradients of the positions' weights."""
        return weight_grads(grads, rows, bags)

    def sum_of(self, parts: Sequence[RowGradients]) -> RowGradients:
        """Return the sum of gradients."""
        return RowGradients.sum_of(parts)

    def shown(self, grads: RowGradients, is_last: bool) -> list[np.ndarray]:
        """Return gradients, and the ids of their rows: see `ProgramExecutor.shown`."""
        return [grads.values if is_last else buffers.copy(grads.values), grads.plan.ids.copy()]

    def of_rows(self, values: np.ndarray, ids: np.ndarray, plans: Sequence[Plan]) -> RowGradients:
        """Return values for rows as gradients: see `ProgramExecutor.of_rows`."""
        plan = next((plan for plan in plans if np.array_equal(plan.ids, ids)), None)
        if plan is None:
            return self.table.sum(self.table.plan(ids), values)
        return RowGradients.of_rows(plan, buffers.copy(values))  # the plan knows what the lookups have found out
