"""`Executor`: reads and steps rows of a table for lookups, gradients and optimizers, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embedrock.table.stepping import CheckedStep


class Gradients(Protocol):
    """One gradient for each row of a batch, on the device of the rows: `RowGradients`, which describes the methods, or
    `DeviceRowGradients` of `embedrock.device`. Values of this type are immutable.
    """

    @property
    def shown(self) -> float | Tensor: ...
    # A 0 that autograd may keep, and `shown`, which then replaces it in a handle; empty on the CPU.
    @property
    def spare(self) -> Sequence[Tensor]: ...
    def row_ids(self) -> np.ndarray: ...
    def rescaled_by(self, number: Tensor) -> Any: ...
    def clipped(self, clip_value: float | None) -> Any: ...
    def vector_norm(self, order: float) -> float | Tensor: ...
    def clamped(self, low: float | None, high: float | None) -> Any: ...
    def growth_since(self, earlier: Any) -> float | Tensor: ...


class JointGradients(Protocol):
    """Gradients of tables that were summed together: `RowGradients`, or `RowSums` of `embedrock.device`."""

    @property
    def count_of_tables(self) -> int: ...
    # The `GpuExecutor` of the first table; None: the CPU has the rows.
    @property
    def executor(self) -> Any: ...
    # A step can take them as they are.
    @property
    def is_current(self) -> bool: ...
    def of(self, table: int) -> Gradients: ...  # those of one table


class Executor(Protocol):
    """Executor of a table's rows: `CpuExecutor`, or `GpuExecutor` of `embedrock.device`."""

    # This executor holds the table's rows.
    @property
    def is_current(self) -> bool: ...
    def is_used_on(self, device: torch.device) -> bool: ...  # it still holds the rows on a GPU
    # Key that executors share if one call can look up their tables together; None: no table joins. It is a `TableLock`,
    # or belongs to a GPU.
    @property
    def joins(self) -> Any: ...
    # Prepares a step of tables: it steps all of them or, after an error, none. None: the CPU steps. The arguments are
    # the tables, all of this type, and whether no other tables are stepped with them.
    @property
    def judge(self) -> Callable[[Sequence[Any], bool], Sequence[CheckedStep]] | None: ...
    def no_gradients(self) -> Gradients: ...  # of no rows
    def merge(self, earlier: Any, later: Any) -> Any: ...  # their sum; in a row of both, the earlier comes first
    def prepare(self, grads: Any) -> Any: ...  # raises the errors of a step by them, and changes no row
