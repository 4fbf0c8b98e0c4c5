"""`Executor`: reads and steps rows of a table for lookups, gradients and optimizers, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from embedrock.table.stepping import CheckedStep


class Gradients(Protocol):
    """One gradient for each row of a batch, on the device of the rows. Values of this type are immutable."""

    @property
    def shown(self) -> float | Tensor:
        """L2 norm of the gradients, which outside code sees; Inf if an element is not finite."""
        ...

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows: int64 (n,). It waits for a GPU."""
        ...

    def rescaled_by(self, number: Tensor) -> Self | None:
        """Return the gradients, scaled as other code scaled `shown` to get `number`; None if the factor is zero."""
        ...

    def clipped(self, clip_value: float | None) -> Any:
        """Return gradients for a step, with every element clamped to ``[-clip_value, clip_value]``."""
        ...

    def vector_norm(self, order: float) -> float | Tensor:
        """Return the norm of any order from 0 to Inf of all elements, as `torch.linalg.vector_norm` does."""
        ...

    def clamped(self, low: float | None, high: float | None) -> Self:
        """Return gradients with every element clamped to ``[low, high]``. The interval contains 0."""
        ...

    def nothing(self) -> Tensor | None:
        """Return a 0 on the device of the rows, which autograd may keep; None: the gradients have none."""
        ...

    def instead_of(self, nothing: Tensor) -> Tensor | None:
        """Return `shown` as a tensor that replaces the result of `nothing` in a handle; None for any other 0."""
        ...

    def growth_since(self, earlier: Self | None) -> float | Tensor:
        """Return the growth of `shown` over that of earlier gradients, which these gradients contain."""
        ...


class Executor(Protocol):
    """Executor of a table's rows: `CpuExecutor`, or `GpuExecutor` of `embedrock.device`.

    `ArrayExecutor` describes the verbs without a docstring. Plans, bags, and rows that are no tensors belong to the
    executor. Callers only pass them back to it.
    """

    @property
    def is_current(self) -> bool:
        """True while this executor holds the table's rows."""
        ...

    def is_used_on(self, device: torch.device) -> bool:
        """Return whether this executor still holds the rows on a GPU."""
        ...

    @property
    def joins(self) -> Any:
        """Key that executors share if one call can look up their tables together; None: no table joins.

        It is a `TableLock`, or belongs to a GPU.
        """
        ...

    @property
    def judge(self) -> Callable[[Sequence[Any], bool], Sequence[CheckedStep]]:
        """Function that prepares a step of tables: it steps all of them or, after an error, none.

        The arguments are the tables, all of this type, and whether no other tables are stepped with them.
        """
        ...

    def lookup(self, ids: Tensor) -> Tensor: ...
    def plan(self, ids: Tensor, trains: bool) -> Any: ...
    def read(self, plan: Any) -> Tensor: ...
    def read_rows(self, plan: Any) -> Any: ...
    def sum(self, plan: Any, grads: Tensor, padding: int | None, by_frequency: bool) -> Gradients: ...

    def merge(self, earlier: Any, later: Any) -> Any:
        """Return the sum of two gradients. In a row of both, the earlier gradient comes first."""
        ...

    def bounds(self, offsets: Tensor, n: int) -> Any: ...
    def bags(self, plan: Any, bounds: Any, mode: str, padding: int | None) -> Any: ...
    def pool(self, rows: Any, weights: Tensor | None, bags: Any) -> tuple[Tensor, Any]: ...
    def unpool(self, grads: Tensor, weights: Tensor | None, bags: Any, trace: Any, by_frequency: bool) -> Gradients: ...
    def weight_grads(self, grads: Tensor, rows: Any, bags: Any) -> Tensor: ...

    def prepare(self, grads: Any) -> Any:
        """Raise the errors of a step by these gradients. No row changes."""
        ...
