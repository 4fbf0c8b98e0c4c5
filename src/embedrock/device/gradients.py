"""`RowSums`: the gradients of a batch on a GPU, one for each row; `DeviceRowGradients`: those of one table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device.batch import DeviceBatch
from embedrock.device.copies import uploaded
from embedrock.device.workspace import aligned
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.binding import TensorPart, as_tensor

_GENERATION = attrgetter("generation")


class RowSums:
    """One gradient for each row of a batch of one table or several.

    Args:
        batch: of the rows.
        values: float32 (n, dim), undefined beyond the existing rows.
        norms: float32 (3 * k,): each table's L2 norm (Inf where not finite), zeros, and the norms again.
        space: memory of the values.

    Attributes:
        batch, values, norms: see above.
        count_of_tables: number of the tables.
        executor: of the first table: it checks steps of all.
    """

    def __init__(self, batch: DeviceBatch, values: Tensor, norms: Tensor, space: Any = None) -> None:
        self.batch, self.values, self.norms, self._space = batch, values, norms, space
        self.count_of_tables, self.executor = len(batch.executors), batch.executors[0]
        self._generations = list(map(_GENERATION, batch.layout.locks))

    @property
    def is_current(self) -> bool:
        """True if the executors still have the rows of all tables."""
        return list(map(_GENERATION, self.batch.layout.locks)) == self._generations

    def of(self, table: int) -> DeviceRowGradients:
        """Return the gradients of one table."""
        return DeviceRowGradients(self, table)

    @functools.cached_property
    def numbers(self) -> Sequence[Tensor]:
        """The norms as float32 () each."""
        return self.norms.unbind()

    @functools.cached_property
    def _alone(self) -> dict[int, RowSums]:
        return {}

    def alone(self, table: int, executor: Any) -> RowSums:
        """Return the sums of one table by themselves, for the executor that has its rows now."""
        if self.count_of_tables == 1 and executor is self.executor:
            return self
        known = self._alone.get(table)
        if known is None or known.executor is not executor:
            with executor.working:
                known = self._alone[table] = self._cut(table, executor)
        return known

    def _cut(self, table: int, executor: Any) -> RowSums:
        batch, k = self.batch.of(table, executor), self.count_of_tables
        rows = torch.arange(len(batch.keys), device=self.values.device) + as_tensor(self.batch.bounds)[table]
        values = self.values[rows.clamp(max=len(self.values) - 1)] if len(self.values) else self.values
        return RowSums(batch, values, self.norms[table::k])

    def by_frequency(self) -> RowSums:
        """Return each row's gradient divided by the number of its id's occurrences. Of one table."""
        starts = as_tensor(self.batch.starts)
        occurrences = (starts[1:] - starts[:-1]).clamp(min=1)  # undefined beyond the existing rows
        values = self.values.clone()
        values[: len(occurrences)] /= occurrences[:, None]
        return self.with_values(values)

    def without(self, rows: np.ndarray) -> RowSums:
        """Return gradients that are zero for some rows, int64 (m,). Of one table."""
        values = self.values.clone()
        values[uploaded(rows, values.device)] = 0.0
        return self.with_values(values)

    def with_values(self, values: Tensor) -> RowSums:
        """Return other gradients of the same rows, of one table."""
        batch = self.batch
        squares = torch.empty(sums.square_sums(*values.shape), dtype=torch.float64, device=values.device)
        norms = torch.empty(3, dtype=torch.float32, device=values.device)
        sums.norm(values, batch.count, squares, batch.tickets, norms)
        return RowSums(batch, values, norms)


@dataclass(eq=False)  # a frozen dataclass would take four times as long to create
class DeviceRowGradients:
    """One gradient for each row of a table in a batch, on a device: `Gradients` of the PyTorch front end.

    Attributes:
        sums: the rows and their gradients, of one table or several, before scaling by `number`.
        table: index of the table.
        scaled_to: float32 (), to which a caller has scaled `shown`, and so the gradients. A handle's gradient may share
            it, so it is read before each use. None: not scaled.
        clip_value: limit of the gradients' absolute values after the scaling; None: no limit.
    """

    sums: RowSums
    table: int = 0
    scaled_to: Tensor | None = None
    clip_value: float | None = None
    count_of_tables, plan = 1, None  # the host has no plan that others may take

    @property
    def shown(self) -> Tensor:
        """L2 norm of the gradients, which represents them outside; Inf if one of them is not finite: float32 ()."""
        return self.sums.numbers[self.table]

    @property
    def number(self) -> Tensor:
        """The current value of `shown`: float32 ()."""
        return self.shown if self.scaled_to is None else self.scaled_to

    @property
    def spare(self) -> Sequence[Tensor]:
        """0 and `shown` again, float32 () each, for a handle to keep."""
        k = self.sums.count_of_tables
        return self.sums.numbers[k + self.table], self.sums.numbers[2 * k + self.table]

    @property
    def executor(self) -> Any:
        return self.sums.batch.executors[self.table]

    @property
    def is_current(self) -> bool:
        return self.sums.is_current

    @staticmethod
    def sum_of(parts: Sequence[DeviceRowGradients]) -> Any:
        """Sum gradients of one table. A row of several is summed in their order."""
        return functools.reduce(lambda one, other: one.executor.merge(one, other), parts)

    @property
    def alone(self) -> RowSums:
        """The sums of the table by themselves."""
        return self.sums.alone(self.table, self.executor)

    @property
    def batch(self) -> DeviceBatch:
        """The batch of the table by itself."""
        return self.alone.batch

    @property
    def most_rows(self) -> int:
        """Upper bound of the number of rows with gradients."""
        batch = self.sums.batch
        return batch.sizes.positions[self.table] if len(batch.executors) > 1 else batch.keys.shape[0]

    def of(self, table: int) -> DeviceRowGradients:
        return self

    def for_executor(self, executor: Any) -> DeviceRowGradients:
        """Return the gradients for the executor that has the rows now."""
        if executor is self.executor:
            return self
        return replace(self, sums=self.sums.alone(self.table, executor), table=0)

    def row_ids(self) -> np.ndarray:
        return self.batch.row_ids().cpu().numpy()

    def rescaled_by(self, number: Tensor) -> DeviceRowGradients:
        return DeviceRowGradients(self.sums, self.table, number.detach(), self.clip_value)

    def vector_norm(self, order: float) -> Tensor:
        return torch.linalg.vector_norm(self.whole(), order, dtype=torch.float64)

    def clamped(self, low: float | None, high: float | None) -> DeviceRowGradients:
        with self.executor.working:
            return self.alone.with_values(self.scaled().clamp(low, high)).of(0)

    def growth_since(self, earlier: DeviceRowGradients | None) -> Tensor:
        if earlier is None:
            return self.shown.clone()
        return torch.where(earlier.shown.isfinite(), self.shown - earlier.shown, 0.0)

    def whole(self) -> Tensor:
        """Return the scaled values of the table, with zeros beyond the existing rows: float32 (n, dim)."""
        values, batch = self.scaled(), self.batch
        there = torch.arange(len(values), device=values.device) < batch.count
        return torch.where(there[:, None], values, 0.0)

    def clipped(self, clip_value: float | None) -> DeviceRowGradients:
        if clip_value == self.clip_value:
            return self
        return replace(self, clip_value=clip_value)

    def scaled(self) -> Tensor:
        """Return the scaled values of the table. If `number` is zero, the values of all existing rows are zero."""
        values = self.alone.values
        if self.scaled_to is None:
            return values
        factor = torch.where(self.shown != 0, self.number / self.shown, self.number)
        return torch.where(factor != 0, values * factor, 0.0)

    @property
    def is_dropped(self) -> Tensor:
        """True if `number` zeroed the gradients: bool ()."""
        return (self.number == 0) & (self.shown != 0)


def sum_rows(grads: Tensor, batch: DeviceBatch, what: int = sums.PLAIN, share: Any = sums.NO_SHARE) -> RowSums:
    """Sum gradients (n, dim) of positions, or of bags, by row.

    Args:
        grads: of any float dtype.
        batch: of the positions.
        what, share: the shares of positions in gradients of bags, see `sums.sum_shares`.
    """
    (n, k), dim, device = (batch.sizes.n, len(batch.executors)), grads.shape[1], batch.order.device
    if grads.stride(1) != 1:  # expanded (as of a sum) or transposed; kernels read contiguous rows
        grads = grads.contiguous()
    form = "sums", n, dim, k
    space = batch.layout.take(form, 4 * n * dim, _space, device, *form[1:])
    values, partial, squares = space.arrays
    norms, batch.norms = batch.norms, None  # handles may keep them
    if norms is None:
        norms = batch.layout.norms(k, device)
    plan = batch.starts, batch.order, batch.inverse, batch.ends
    scratch = partial, squares, batch.tickets
    sums.sum_shares(what, grads, share, plan, batch.paddings, scratch, values, norms, *batch.sizes.of_sums)
    return RowSums(batch, values, norms, space)


def _space(device: torch.device, n: int, dim: int, k: int) -> tuple[Tensor, TensorPart, TensorPart]:
    """Return memory for sums by row of k tables, float32 (n, dim), for partial sums, and for sums of squares."""
    later, squares = sums.partial_rows(n, k), sums.square_sums(n, dim, k)
    partial = aligned(n * dim)
    of_rows = partial + aligned(later * dim)
    whole = torch.empty(-(-(of_rows + 2 * squares) // dim), dim, dtype=torch.float32, device=device)
    of_squares = TensorPart(whole, of_rows, (squares,), torch.float64)
    return whole[:n], TensorPart(whole, partial, (later, dim), torch.float32), of_squares
