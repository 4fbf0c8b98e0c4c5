"""`DeviceGradients`: the gradients of a batch on a GPU, summed to one for each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from embedrock.device.plan import DevicePlan
from embedrock.kernels.gpu import sums


@dataclass(frozen=True, eq=False)
class DeviceGradients:
    """One gradient for each row of a plan, on a device.

    Attributes:
        plan: whose rows.
        values: float32 (n, dim), zeros beyond the rows that there are.
        shown: float32 (), their L2 norm, which stands for them outside; Inf where one of them is not finite.
        growth: float32 (), the norm once more, for autograd to keep.
        number: float32 (), what became of `shown` since: whoever scaled it scaled the gradients.
        clip_value: what they are clamped to after that, None: nothing.
    """

    plan: DevicePlan
    values: Tensor
    shown: Tensor
    number: Tensor
    growth: Tensor
    clip_value: float | None = None

    @staticmethod
    def of(plan: DevicePlan, values: Tensor, squares: Tensor) -> DeviceGradients:
        """Take summed gradients, and the float64 (n,) squared norms of the rows."""
        norms = torch.empty(2, dtype=torch.float32, device=values.device)
        sums.norm(squares.sum(), norms)
        return DeviceGradients(plan, values, norms[0], norms[0], norms[1])

    def row_ids(self) -> np.ndarray:
        """Return the ids of the rows. It waits for the device."""
        return self.plan.ids[: int(self.plan.count)].cpu().numpy()

    def seen_as(self, number: Tensor) -> DeviceGradients:
        """Return them with another `number`."""
        return replace(self, number=number.detach().clone())  # autograd adds to that of a handle in place

    def vector_norm(self, order: float) -> Tensor:
        """Return the norm of any order from 0 to Inf of all their elements: float64 (). Nothing waits for it."""
        return torch.linalg.vector_norm(self.scaled(), order, dtype=torch.float64)

    def clamped(self, low: float | None, high: float | None) -> DeviceGradients:
        """Return them with every element clamped to ``[low, high]``."""
        return self._with_values(self.scaled().clamp(low, high))

    def growth_since(self, earlier: DeviceGradients | None) -> Tensor:
        """Return by how much `shown` is more than that of the gradients before, which these contain."""
        if earlier is None:
            return self.growth
        return torch.where(earlier.shown.isfinite(), self.shown - earlier.shown, 0.0)

    def by_frequency(self) -> DeviceGradients:
        """Return each row's gradient divided by how often its id occurs in the plan."""
        plan = self.plan
        occurrences = (plan.starts[1:] - plan.starts[:-1]).clamp(min=1)  # beyond the rows that there are: anything
        values = self.values.clone()
        values[: len(occurrences)] /= occurrences[:, None]
        return self._with_values(values)

    def _with_values(self, values: Tensor) -> DeviceGradients:
        """Return other values for the same rows."""
        squares = torch.empty(len(values), dtype=torch.float64, device=values.device)
        sums.row_squares(values, self.plan.count, squares)
        return DeviceGradients.of(self.plan, values, squares)

    def clipped(self, clip_value: float | None) -> DeviceGradients:
        """Return them with another `clip_value`."""
        return replace(self, clip_value=clip_value)

    def scaled(self) -> Tensor:
        """Return the values, scaled as the number was. Those that it zeroed are zeros."""
        if self.number is self.shown:
            return self.values
        factor = torch.where(self.shown != 0, self.number / self.shown, self.number)
        return torch.where(factor != 0, self.values * factor, 0.0)

    @property
    def is_dropped(self) -> Tensor:
        """Whether they were zeroed: bool ()."""
        return (self.number == 0) & (self.shown != 0)


def sum_rows(grads: Tensor, plan: DevicePlan, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Sum gradients (n, dim) of positions by row: float32 (n, dim), and the float64 (n,) squared norms of the rows.

    Args:
        grads: of any float dtype, in the order of the positions.
        plan: of the positions.
        skip: int32 (1,), a row that gets none, -1 for no such row.
    """
    partial, values, squares = scratch_for(plan, grads.shape[1])
    args = plan.starts, plan.order, plan.inverse, plan.count, skip, partial, values, squares
    sums.sum_segments(grads, *args)
    return values, squares


def scratch_for(plan: DevicePlan, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return room for sums by row: partial ones, float32 (n, dim) sums, and float64 (n,) for their squared norms."""
    n, device = len(plan.order), plan.order.device
    partial = torch.empty(sums.partial_rows(n), dim, dtype=torch.float32, device=device)
    values = torch.empty(n, dim, dtype=torch.float32, device=device)
    return partial, values, torch.empty(n, dtype=torch.float64, device=device)
