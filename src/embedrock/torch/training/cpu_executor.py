"""`CpuExecutor`: reads and steps rows of a table on the CPU; and gradients and weights as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan, make_plan
from embedrock.spec.spec import STORAGES
from embedrock.storage.table_lock import TableLock
from embedrock.table.batches import FLOAT32
from embedrock.table.table import Table, rows_of


@dataclass(eq=False)
class CpuExecutor:
    """`Executor` that reads and steps rows on the CPU."""

    table: Table
    # Plans ids, and is told whether a step may follow; None: the table plans them.
    planner: Callable[[np.ndarray, bool], Plan] | None = None
    rows: Callable[[Any], np.ndarray] | None = None  # of a plan, float32 (unique, dim); None: the table reads them
    sums_positions: bool = False  # gradients are `PositionGradients`

    is_current, judge = True, None

    def is_used_on(self, device: torch.device) -> bool:
        return False

    @property
    def joins(self) -> TableLock | None:
        """Lock of the table; None for gradients by position, for rows of other processes, and for averages."""
        return None if self.sums_positions or self.rows is not None else rows_of(self.table).table_lock

    def no_gradients(self) -> RowGradients:
        return RowGradients.sum(make_plan(np.empty(0, np.int64)), np.empty((0, self.table.dim), np.float32))

    def merge(self, earlier: RowGradients, later: RowGradients) -> RowGradients:
        return earlier.merge(later)

    def prepare(self, grads: RowGradients) -> None:
        self.table.check_step(grads)


_FORM, _AS_READ = attrgetter("dtype", "is_cpu"), {(torch.float32, True)}
_AS_ARRAY: Callable[[Any], np.ndarray] = Tensor.numpy
# NumPy's dtypes of the words of PyTorch's, for kernels.
WORDS = {torch.float32: FLOAT32, torch.bfloat16: STORAGES["bfloat16"], torch.float16: STORAGES["float16"]}


def tensor_of(words: np.ndarray) -> Tensor:
    """Return an array of words as a tensor, of the same memory."""
    if words.dtype == FLOAT32:
        return torch.from_numpy(words)
    dtype = torch.bfloat16 if words.dtype == STORAGES["bfloat16"] else torch.float16
    return torch.from_numpy(words.view(np.int16)).view(dtype)


def host_grads(grads: Sequence[Tensor | None]) -> list[np.ndarray | None]:
    """Return gradients of outputs, of any strides: where they lie, if kernels can read them there; else as float32."""
    try:
        forms = set(map(_FORM, grads))
        if forms == _AS_READ:
            return list(map(_AS_ARRAY, grads))
        ((dtype, is_cpu),) = forms
        if is_cpu and dtype in WORDS:
            return [own.view(torch.int16).numpy().view(WORDS[dtype]) for own in grads if own is not None]
    except (AttributeError, RuntimeError, ValueError):  # None, a negating view, or several dtypes
        pass
    return [None if own is None else own.resolve_neg().to("cpu", torch.float32).numpy() for own in grads]


def host_weights(weights: Tensor | None) -> np.ndarray | None:
    """Return the positions' weights, of any dtype and on any device, as float32; None means ones."""
    return None if weights is None else weights.detach().to("cpu", torch.float32).contiguous().numpy()
