"""`Ahead`: a batch that was planned before it is looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device.plan import DevicePlan

if TYPE_CHECKING:
    from embedrock.device.joint_plan import PartAhead


class Ahead(NamedTuple):
    """A batch that was planned ahead.

    Attributes:
        ids: as they were given.
        version: of them, see `version_of`.
        plan: of the batch, on the device; None where only the host has planned it, or it was planned with others.
        host: the host's plan of it; None where the device plans.
        fault: int64 (4,), see `Faults`, of ids outside of the table; None where the host has seen them.
        part: of a plan of several tables, which is the table's; None where it was planned alone.
    """

    ids: Tensor
    version: int
    plan: DevicePlan | None
    host: Plan | None
    fault: Tensor | None
    part: PartAhead | None = None

    @property
    def stamp(self) -> int | None:
        """The number of the batch; None where only the host has planned it."""
        made = self.part if self.plan is None else self.plan
        return None if made is None else made.stamp

    def is_of(self, ids: Tensor) -> bool:
        """Whether these ids are the same memory, and nobody has written there since."""
        mine = self.ids
        same = mine.device == ids.device and mine.dtype == ids.dtype and mine.numel() == ids.numel()
        same = same and mine.data_ptr() == ids.data_ptr() and ids.is_contiguous()
        return same and self.version >= 0 and self.version == version_of(ids)


def version_of(ids: Tensor) -> int:
    """Return what a change in place raises; -1 where nobody counts."""
    return -1 if ids.is_inference() or not ids.is_contiguous() else ids._version
