"""`Executor`: the rows of a table as lookups, gradients and optimizers use them, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from embedrock.table.stepping import CheckedStep


class Gradients(Protocol):
    """One gradient for each row of a batch, where the rows are used. Values of this kind do not change."""

    @property
    def shown(self) -> float | Tensor:
        """The number that stands for them outside, their L2 norm; Inf where one of them is not finite."""
        ...

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows: int64 (n,). It waits for a GPU."""
        ...

    def rescaled_by(self, number: Tensor) -> Self | None:
        """Return them scaled as `shown` was by whoever made it `number`; None where that zeroed them."""
        ...

    def clipped(self, clip_value: float | None) -> Any:
        """Return them with every element clamped to ``[-clip_value, clip_value]``, for a step."""
        ...

    def vector_norm(self, order: float) -> float | Tensor:
        """Return the norm of any order from 0 to Inf of all their elements, as `torch.linalg.vector_norm` does."""
        ...

    def clamped(self, low: float | None, high: float | None) -> Self:
        """Return them with every element clamped to ``[low, high]``, which has 0 in it."""
        ...

    def nothing(self) -> Tensor | None:
        """Return a 0 that autograd may keep, where the rows are used; None: there is none of their own."""
        ...

    def instead_of(self, nothing: Tensor) -> Tensor | None:
        """Return `shown` for a handle to keep in the place of what `nothing` returned; None in that of any other 0."""
        ...

    def growth_since(self, earlier: Self | None) -> float | Tensor:
        """Return by how much `shown` is more than that of the gradients before, which these contain."""
        ...


class Executor(Protocol):
    """The rows of a table on the CPU or on a GPU: `CpuExecutor`, and `GpuExecutor` of `embedrock.device`.

    Plans, bags, and rows that are no tensors are its own: whoever gets them from it only gives them back.
    """

    @property
    def is_current(self) -> bool:
        """Whether the table's rows still are used here."""
        ...

    def is_used_on(self, device: torch.device) -> bool:
        """Return whether rows on a GPU that this is still are used there."""
        ...

    @property
    def joins(self) -> Any:
        """What tables that can be looked up with this one in one call have as well; None: it is looked up alone.

        It is a `Group`, or of a GPU.
        """
        ...

    def feature(self, ids: Tensor, padding: int | None) -> Any:
        """Return ids that are looked up together with those of others; the row of `padding` gets no gradient."""
        ...

    @property
    def judge(self) -> Callable[[Sequence[Any], bool], Sequence[CheckedStep]]:
        """Prepares a step of tables: all of them are stepped or, where it raises an error, none.

        It takes the tables, all of this kind, and whether no other tables are stepped with them.
        """
        ...

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows for no gradient: float32 ``ids.shape + (dim,)``."""
        ...

    def plan(self, ids: Tensor, trains: bool) -> Any:
        """Decide what a batch of ids needs; `trains`: a step may follow."""
        ...

    def read(self, plan: Any) -> Tensor:
        """Return the row of each position: float32 ``plan.shape + (dim,)``."""
        ...

    def read_rows(self, plan: Any) -> Any:
        """Return each row once: float32 (n, dim)."""
        ...

    def sum(self, plan: Any, grads: Tensor, padding: int | None, by_frequency: bool) -> Gradients:
        """Return the gradients of positions, ``plan.shape + (dim,)``, summed to one for each row.

        Args:
            plan: of the positions.
            grads: of any float dtype.
            padding: id whose row gets none.
            by_frequency: divide a row's gradient by how often its id occurs.
        """
        ...

    def merge(self, earlier: Any, later: Any) -> Any:
        """Return the sum of two gradients; in a row that both have, the earlier one comes first."""
        ...

    def bounds(self, offsets: Tensor, n: int) -> Any:
        """Return where bags of n positions start and end, int64 (bags + 1,), as `bags` takes them."""
        ...

    def bags(self, plan: Any, bounds: Any, mode: str, padding: int | None) -> Any:
        """Return the positions of a plan as bags, in which the id `padding` does not count."""
        ...

    def pool(self, rows: Any, weights: Tensor | None, bags: Any) -> tuple[Tensor, Any]:
        """Pool what `read_rows` returned, times the weights (n,) of the positions.

        Returns:
            The bags, float32 (bags, dim), and what `unpool` needs.
        """
        ...

    def unpool(self, grads: Tensor, weights: Tensor | None, bags: Any, trace: Any, by_frequency: bool) -> Gradients:
        """Return the gradients of the rows from those of the bags, (bags, dim): see `pool` and `sum`."""
        ...

    def weight_grads(self, grads: Tensor, rows: Any, bags: Any) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,)."""
        ...

    def prepare(self, grads: Any) -> Any:
        """Raise what a step by these gradients would raise. No row changes."""
        ...
