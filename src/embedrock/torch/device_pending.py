"""`DevicePending`: what `Pending` is, for rows on a GPU, where no number is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from embedrock.device.gradients import DeviceGradients
from embedrock.device.side import DeviceSide


class DevicePending:
    """Row gradients since the last zeroing, and the number shown for them, which stays on the GPU.

    Args:
        side: the rows.

    Attributes:
        grads: the gradients, None when there are none.
    """

    def __init__(self, side: DeviceSide) -> None:
        self.side = side
        self.grads: DeviceGradients | None = None

    def drop(self) -> None:
        """Forget the gradients."""
        self.grads = None

    def follow(self, shown: Tensor | None) -> None:
        """Do to the gradients what was done to the number since it was shown (None: it is gone)."""
        if self.grads is not None:
            # A copy, because autograd adds to the handle's gradient in place.
            self.grads = None if shown is None else self.grads.seen_as(shown.detach().clone())

    def add(self, grads: DeviceGradients) -> Tensor:
        """Add gradients, and return the number to show from now on."""
        self.grads = grads if self.grads is None else self.side.merge(self.grads, grads)
        return self.grads.shown

    def arrive(self, earlier: DeviceGradients | None, grads: DeviceGradients) -> tuple[DeviceGradients, Tensor]:
        """Add gradients to those that arrived earlier in the same backward: see `Pending.arrive`."""
        if earlier is None:
            return grads, grads.growth
        both = self.side.merge(earlier, grads)
        return both, torch.where(earlier.shown.isfinite(), both.shown - earlier.shown, 0.0)

    def nothing(self, dim: int) -> DeviceGradients:
        """Return gradients of no row."""
        plan = self.side.plan(torch.empty(0, dtype=torch.int64))
        return self.side.sum(plan, torch.empty(0, dim, device=self.side.device))
