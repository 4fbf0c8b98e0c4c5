"""`OpenDirectory`: which slots open ids have, in GPU memory."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.plan import DevicePlan, carved
from embedrock.kernels.gpu import directory as kernels
from embedrock.tiers.device_placing import OPEN_ENTRIES


class Search(NamedTuple):
    """What was found of a plan's rows that are to be stepped.

    Attributes:
        keys: int64 (n,), their slots.
        counts: of those that have none, see `directory.search`.
    """

    keys: Tensor
    counts: Tensor


class OpenDirectory:
    """Slots of ids, given in order of arrival, and in one step in order of the ids. Nothing waits for the device.

    Ids get slots where they are stepped, and keep them.

    Args:
        slots: how many there are.
        device: where they are.

    Attributes:
        most: no more slots have been given; how many were, the device knows.
        epoch: changes when ids get slots.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.most = self.epoch = self._turn = 0
        self.ids = torch.empty(slots, dtype=torch.int64, device=device)
        table = torch.zeros(OPEN_ENTRIES * slots, dtype=torch.int64, device=device)
        # Nobody can make ids that all collide: nothing but places depends on it.
        self._entries = kernels.Entries(table, self.ids, secrets.randbits(63))
        self._used = torch.zeros(2, dtype=torch.int64, device=device)

    def begin(self, ids: Tensor) -> None:
        """Give the first slots to ids, in their order, and forget all others."""
        self.most, self.epoch = len(ids), self.epoch + 1
        self._used.fill_(len(ids))
        self.ids[: len(ids)] = ids
        self._entries.table.zero_()
        kernels.file(0, len(ids), self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(part.numel() * part.element_size() for part in (self.ids, self._entries.table, self._used))

    def count(self) -> int:
        """Return how many slots were given. Waits for the device."""
        self.most = int(self._used[self._turn])
        return self.most

    def find(self, plan: DevicePlan) -> None:
        """Write the slots that the rows of a new plan have now to its keys, and how many have none."""
        kernels.search(plan.ids, plan.count, None, self._entries, plan.keys, plan.new)
        plan.epoch = self.epoch

    def search(self, plan: DevicePlan) -> Search:
        """Return the slots that a plan's rows have now, but of those that are not stepped, and how many have none."""
        if plan.epoch == self.epoch and plan.new is not None:
            return Search(plan.keys, plan.new)
        n = len(plan.ids)
        keys, counts = carved(torch.int32, plan.ids.device, (2 * n, kernels.blocks(n)))
        keys = keys.view(torch.int64)
        kernels.search(plan.ids, plan.count, plan.keys, self._entries, keys, counts)
        return Search(keys, counts)

    def enter(self, plan: DevicePlan, search: Search, verdict: Tensor) -> None:
        """Give slots to those rows that have none, if the step is made, and write them to the keys."""
        if not len(plan.ids):
            return  # no program would carry over how many slots were given
        keys, counts = search
        kernels.enter(plan.ids, plan.count, keys, counts, verdict, self._used, self._turn, self._entries)
        self._turn, self.epoch, self.most = 1 - self._turn, self.epoch + 1, self.most + len(plan.ids)
