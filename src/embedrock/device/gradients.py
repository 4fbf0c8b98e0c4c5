"""`DeviceRowGradients`: the gradients of a batch on a GPU, summed to one for each row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from embedrock.device.plan import DevicePlan, aligned
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.binding import TensorPart, as_tensor

Place = tuple[int, tuple[int, ...]]  # of a part of memory: where it begins, and its shape


class SummedRows(Protocol):
    """One gradient for each row of a plan, wherever they lie: see `RowSums`."""

    @property
    def plan(self) -> Any: ...
    @property
    def values(self) -> Any: ...
    @property
    def most_rows(self) -> int: ...


class RowSums(NamedTuple):
    """One gradient for each row of a plan.

    Attributes:
        plan: whose rows.
        values: float32 (n, dim), anything beyond the rows that there are.
    """

    plan: DevicePlan
    values: Tensor

    @property
    def most_rows(self) -> int:
        """No more rows have gradients."""
        return len(self.plan.ids)


@dataclass(eq=False)  # not frozen, which would take four times as long to make
class DeviceRowGradients:
    """One gradient for each row of a plan, on a device.

    Attributes:
        sums: the rows and their gradients, before whatever the number tells.
        shown: float32 (), their L2 norm, which stands for them outside; Inf where one of them is not finite.
        number: float32 (), what became of `shown` since: whoever scaled it scaled the gradients. It may be that of a
            handle, and is followed anew before each use.
        spare: float32 () each, 0 and `shown` again, for a handle to keep.
        clip_value: what they are clamped to after that, None: nothing.
    """

    sums: SummedRows
    shown: Tensor
    number: Tensor
    spare: Sequence[Tensor]
    clip_value: float | None = None

    @staticmethod
    def of(plan: DevicePlan, values: Tensor, norms: Tensor) -> DeviceRowGradients:
        """Take summed gradients, and their norm, 0, and the norm again, float32 (3,)."""
        shown, *spare = norms.unbind()
        return DeviceRowGradients(RowSums(plan, values), shown, shown, spare)

    @property
    def plan(self) -> DevicePlan:
        """Whose rows."""
        return self.sums.plan

    @property
    def values(self) -> Tensor:
        """The gradients as they were summed: float32 (n, dim), anything beyond the rows that there are."""
        return self.sums.values

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows. It waits for the device."""
        return self.plan.ids[: int(self.plan.count)].cpu().numpy()

    def rescaled_by(self, number: Tensor) -> DeviceRowGradients:
        """Return them with another `number`."""
        return DeviceRowGradients(self.sums, self.shown, number.detach(), self.spare, self.clip_value)

    def nothing(self) -> Tensor:
        """Return a 0 that whoever gets it may keep and change. There is one."""
        return self.spare[0].detach()

    def instead_of(self, nothing: Tensor) -> Tensor | None:
        """Return `shown` for a handle to keep in the place of what `nothing` returned; None in that of any other 0."""
        zero, shown = self.spare
        return shown.detach() if nothing.data_ptr() == zero.data_ptr() else None

    def vector_norm(self, order: float) -> Tensor:
        """Return the norm of any order from 0 to Inf of all their elements: float64 (). Nothing waits for it."""
        return torch.linalg.vector_norm(self.whole(), order, dtype=torch.float64)

    def clamped(self, low: float | None, high: float | None) -> DeviceRowGradients:
        """Return them with every element clamped to ``[low, high]``."""
        return self._with_values(self.scaled().clamp(low, high))

    def growth_since(self, earlier: DeviceRowGradients | None) -> Tensor:
        """Return by how much `shown` is more than that of the gradients before, which these contain."""
        if earlier is None:
            return self.shown.clone()
        return torch.where(earlier.shown.isfinite(), self.shown - earlier.shown, 0.0)

    def by_frequency(self) -> DeviceRowGradients:
        """Return each row's gradient divided by how often its id occurs in the plan."""
        starts = as_tensor(self.plan.starts)
        occurrences = (starts[1:] - starts[:-1]).clamp(min=1)  # beyond the rows that there are: anything
        values = self.values.clone()
        values[: len(occurrences)] /= occurrences[:, None]
        return self._with_values(values)

    def _with_values(self, values: Tensor) -> DeviceRowGradients:
        """Return other values for the same rows."""
        squares = torch.empty(sums.square_sums(*values.shape), dtype=torch.float64, device=values.device)
        norms = torch.empty(3, dtype=torch.float32, device=values.device)
        sums.norm(values, self.plan.count, squares, self.plan.pins, norms)
        return DeviceRowGradients.of(self.plan, values, norms)

    def whole(self) -> Tensor:
        """Return the values, scaled as the number was, with zeros beyond the rows that there are."""
        values = self.scaled()
        there = torch.arange(len(values), device=values.device) < self.plan.count
        return torch.where(there[:, None], values, 0.0)

    def clipped(self, clip_value: float | None) -> DeviceRowGradients:
        """Return them with another `clip_value`."""
        if clip_value == self.clip_value:
            return self
        return replace(self, clip_value=clip_value)

    def scaled(self) -> Tensor:
        """Return the values, scaled as the number was. Those that it zeroed are zeros where there are rows."""
        if self.number is self.shown:
            return self.values
        factor = torch.where(self.shown != 0, self.number / self.shown, self.number)
        return torch.where(factor != 0, self.values * factor, 0.0)

    @property
    def is_dropped(self) -> Tensor:
        """Whether they were zeroed: bool ()."""
        return (self.number == 0) & (self.shown != 0)


def sum_rows(grads: Tensor, plan: DevicePlan, skip: Tensor) -> DeviceRowGradients:
    """Sum gradients (n, dim) of positions by row.

    Args:
        grads: of any float dtype, in the order of the positions.
        plan: of the positions.
        skip: int32 (1,), a row that gets none, -1 for no such row.
    """
    values, norms, scratch = room_for_sums(plan, grads.shape[1])
    sums.sum_segments(grads, plan.starts, plan.order, plan.inverse, plan.count, skip, scratch, values, norms)
    return DeviceRowGradients.of(plan, values, norms)


def room_for_sums(
    plan: DevicePlan, dim: int, squares: int | None = None, norms: int = 3
) -> tuple[Tensor, Tensor, sums.SumScratch]:
    """Return room for sums by row, float32 (n, dim), for their norms, float32 (norms,), and scratch.

    Args:
        plan: of the positions.
        dim: of the rows.
        squares: sums of squares in the scratch; None: as many as one norm is made of.
        norms: see above.
    """
    n, device = plan.order.shape[0], plan.order.device
    lines, (at, shape), (of_rows, count) = _room_of(n, dim, squares)
    whole = torch.empty(lines, dim, dtype=torch.float32, device=device)
    room = torch.empty(norms, dtype=torch.float32, device=device)  # handles may keep it, and nothing else
    partial, squared = TensorPart(whole, at, shape, torch.float32), TensorPart(whole, of_rows, count, torch.float64)
    return whole[:n], room, sums.SumScratch(partial, squared, plan.pins)


@functools.lru_cache(maxsize=256)
def _room_of(n: int, dim: int, squares: int | None) -> tuple[int, Place, Place]:
    """Return how many lines hold sums by row and scratch, and where its two parts are."""
    later = sums.partial_rows(n)
    squares = sums.square_sums(n, dim) if squares is None else squares
    partial = aligned(n * dim)
    of_rows = partial + aligned(later * dim)
    return -(-(of_rows + 2 * squares) // dim), (partial, (later, dim)), (of_rows, (squares,))
