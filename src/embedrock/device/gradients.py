"""`DeviceRowGradients`: the gradients of a batch on a GPU, summed to one for each row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.device.plan import DeviceBatchPlan, aligned
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.binding import TensorPart, as_tensor

Place = tuple[int, tuple[int, ...]]  # of a part of an allocation: its begin and its shape


class RowSums(NamedTuple):
    """One gradient for each row of a plan.

    Attributes:
        plan: of the rows.
        values: float32 (n, dim), undefined beyond the existing rows.
    """

    plan: DeviceBatchPlan
    values: Tensor

    @property
    def most_rows(self) -> int:
        """Upper bound of the number of rows with gradients."""
        return len(self.plan.ids)


@dataclass(eq=False)  # a frozen dataclass would take four times as long to create
class DeviceRowGradients:
    """One gradient for each row of a plan, on a device: `Gradients` of the PyTorch front end.

    Attributes:
        sums: the rows and their gradients, before scaling by `number`: `RowSums`, or `TableRowSums` of a joint sum.
        shown: float32 (), L2 norm of the gradients, which represents them outside; Inf if one of them is not finite.
        number: float32 (), the current value of `shown`. A caller scales the gradients by scaling this number. A
            handle's gradient may share it, so it is read before each use.
        spare: float32 () each, 0 and `shown` again, for a handle to keep.
        clip_value: limit of the gradients' absolute values after the scaling; None: no limit.
    """

    sums: Any
    shown: Tensor
    number: Tensor
    spare: Sequence[Tensor]
    clip_value: float | None = None

    @staticmethod
    def of(plan: DeviceBatchPlan, values: Tensor, norms: Tensor) -> DeviceRowGradients:
        """Return gradients from summed values and float32 (3,): their norm, 0, and the norm again."""
        shown, *spare = norms.unbind()
        return DeviceRowGradients(RowSums(plan, values), shown, shown, spare)

    @property
    def plan(self) -> DeviceBatchPlan:
        """The plan of the rows."""
        return self.sums.plan

    @property
    def values(self) -> Tensor:
        """The unscaled sums: float32 (n, dim), undefined beyond the existing rows."""
        return self.sums.values

    def row_ids(self) -> np.ndarray:
        return self.plan.ids[: int(self.plan.count)].cpu().numpy()

    def rescaled_by(self, number: Tensor) -> DeviceRowGradients:
        return DeviceRowGradients(self.sums, self.shown, number.detach(), self.spare, self.clip_value)

    def vector_norm(self, order: float) -> Tensor:
        return torch.linalg.vector_norm(self.whole(), order, dtype=torch.float64)

    def clamped(self, low: float | None, high: float | None) -> DeviceRowGradients:
        return self._with_values(self.scaled().clamp(low, high))

    def growth_since(self, earlier: DeviceRowGradients | None) -> Tensor:
        if earlier is None:
            return self.shown.clone()
        return torch.where(earlier.shown.isfinite(), self.shown - earlier.shown, 0.0)

    def by_frequency(self) -> DeviceRowGradients:
        """Return each row's gradient divided by the number of its id's occurrences."""
        starts = as_tensor(self.plan.starts)
        occurrences = (starts[1:] - starts[:-1]).clamp(min=1)  # undefined beyond the existing rows
        values = self.values.clone()
        values[: len(occurrences)] /= occurrences[:, None]
        return self._with_values(values)

    def _with_values(self, values: Tensor) -> DeviceRowGradients:
        squares = torch.empty(sums.square_sums(*values.shape), dtype=torch.float64, device=values.device)
        norms = torch.empty(3, dtype=torch.float32, device=values.device)
        sums.norm(values, self.plan.count, squares, self.plan.tickets, norms)
        return DeviceRowGradients.of(self.plan, values, norms)

    def whole(self) -> Tensor:
        """Return the scaled values, with zeros beyond the existing rows."""
        values = self.scaled()
        there = torch.arange(len(values), device=values.device) < self.plan.count
        return torch.where(there[:, None], values, 0.0)

    def clipped(self, clip_value: float | None) -> DeviceRowGradients:
        if clip_value == self.clip_value:
            return self
        return replace(self, clip_value=clip_value)

    def scaled(self) -> Tensor:
        """Return the scaled values. If `number` is zero, the values of all existing rows are zero."""
        if self.number is self.shown:
            return self.values
        factor = torch.where(self.shown != 0, self.number / self.shown, self.number)
        return torch.where(factor != 0, self.values * factor, 0.0)

    @property
    def is_dropped(self) -> Tensor:
        """True if `number` zeroed the gradients: bool ()."""
        return (self.number == 0) & (self.shown != 0)


def sum_rows(
    grads: Tensor, plan: DeviceBatchPlan, skip: Tensor | TensorPart, what: int = sums.PLAIN, share: Any = None
) -> DeviceRowGradients:
    """Sum gradients (n, dim) of positions, or of bags, by row.

    Args:
        grads: of any float dtype.
        plan: of the positions.
        skip: int32 (1,), a row that gets no gradient, -1 for none.
        what, share: the shares of positions in gradients of bags, see `sums.sum_shares`.
    """
    values, norms, scratch = room_for_sums(plan, grads.shape[1])
    sums.sum_shares(what, grads, share, plan.arrays, skip, scratch, values, norms)
    return DeviceRowGradients.of(plan, values, norms)


def room_for_sums(plan: DeviceBatchPlan, dim: int, tables: int = 1) -> tuple[Tensor, Tensor, sums.SumScratch]:
    """Return memory for sums by row, float32 (n, dim), for norms, float32 (3 * tables,), and scratch."""
    n, device = plan.order.shape[0], plan.order.device
    lines, (at, shape), (of_rows, count) = _room_of(n, dim, tables)
    whole = torch.empty(lines, dim, dtype=torch.float32, device=device)
    room = torch.empty(3 * tables, dtype=torch.float32, device=device)  # an own allocation, as handles may keep it
    partial, squared = TensorPart(whole, at, shape, torch.float32), TensorPart(whole, of_rows, count, torch.float64)
    return whole[:n], room, sums.SumScratch(partial, squared, plan.tickets)


@functools.lru_cache(maxsize=256)
def _room_of(n: int, dim: int, tables: int) -> tuple[int, Place, Place]:
    """Return the lines that hold sums by row and scratch, and the places of the scratch's two parts."""
    later, squares = sums.partial_rows(n, tables), sums.square_sums(n, dim, tables)
    partial = aligned(n * dim)
    of_rows = partial + aligned(later * dim)
    return -(-(of_rows + 2 * squares) // dim), (partial, (later, dim)), (of_rows, (squares,))
