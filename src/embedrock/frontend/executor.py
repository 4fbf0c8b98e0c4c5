"""`ArrayExecutor`: reads and steps rows of a table on the CPU, over NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan
from embedrock.batch.pooling import Bags
from embedrock.frontend.steps import judge_on_host
from embedrock.table.table import Table


class ArrayExecutor:
    """Executor on the CPU, with the verbs of a GPU's `GpuExecutor`, for arrays. Front ends build theirs on it.

    Args:
        table: the rows.
    """

    judge = staticmethod(judge_on_host)

    def __init__(self, table: Table) -> None:
        self.table = table

    def lookup(self, ids: Any) -> Any:
        """Return rows without gradients: float32 ``ids.shape + (dim,)``."""
        return self.table.lookup(ids)

    def plan(self, ids: Any, trains: bool) -> Plan:
        """Plan a batch of ids. With `trains`, a step may follow."""
        return self.table.plan(ids)

    def read(self, plan: Plan) -> Any:
        """Return the row of each position: float32 ``plan.shape + (dim,)``."""
        return self.table.read(plan)

    def read_rows(self, plan: Plan) -> np.ndarray:
        """Return each row once: float32 (unique, dim)."""
        return self.table.read_rows(plan)

    def sum(self, plan: Plan, grads: Any, padding: int | None, by_frequency: bool) -> Any:
        """Sum the gradients of positions, ``plan.shape + (dim,)``, to one gradient for each row.

        Args:
            plan: plan of the positions.
            grads: gradients of any float dtype.
            padding: id of the row without a gradient.
            by_frequency: divide a row's gradient by the number of times its id occurs.
        """
        grads = self.table.sum(plan, grads)
        return _weighted(grads, padding, by_frequency) if by_frequency or padding is not None else grads

    def bounds(self, offsets: Any, n: int) -> np.ndarray:
        """Return the bounds of bags of n positions, int64 (bags + 1,), in the form that `bags` takes."""
        return offsets

    def bags(self, plan: Plan, bounds: np.ndarray, mode: str, padding: int | None) -> Bags:
        """Return the positions of a plan as bags. The id `padding` does not count."""
        return Bags.of(plan, bounds, pooling.index_of(plan, padding), mode)

    def pool(self, rows: np.ndarray, weights: Any, bags: Bags) -> tuple[Any, np.ndarray]:
        """Pool rows of `read_rows`, times the weights (n,) of the positions.

        Returns:
            The bags, float32 (bags, dim), and a value for `unpool`.
        """
        return pooling.pool(rows, weights, bags)

    def unpool(self, grads: Any, weights: Any, bags: Bags, trace: np.ndarray, by_frequency: bool) -> Any:
        """Return the gradients of the rows, from the gradients of the bags (bags, dim): see `pool` and `sum`."""
        padding = None if bags.skip < 0 else int(bags.plan.ids[bags.skip])
        given = [np.ascontiguousarray(grads, np.float32)]
        return _weighted(RowGradients.of_bags(given, weights, bags, trace), padding, by_frequency)

    def weight_grads(self, grads: Any, rows: np.ndarray, bags: Bags) -> Any:
        """Return the gradients of the positions' weights, float32 (n,)."""
        return pooling.weight_grads(pooling.places_of([grads]), rows, bags)


def _weighted(grads: RowGradients, padding: int | None, by_frequency: bool) -> RowGradients:
    if by_frequency:
        counts = np.diff(grads.plan.starts).astype(np.float32)
        grads = grads.with_values(grads.values / counts[:, None])
    return grads if padding is None else grads.kept(grads.plan.ids != padding)
