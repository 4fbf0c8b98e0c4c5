"""`DeviceHashIndex`: which slots open ids have, in GPU memory."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch
from torch import Tensor

from embedrock.device.answer import HostCopy
from embedrock.device.plan import DevicePlan, carved, layout
from embedrock.device.stream_order import StreamOrder
from embedrock.kernels.gpu import directory as kernels
from embedrock.storage.device_layout import OPEN_ENTRIES

NEVER = -1


class NewRowSearch(NamedTuple):
    """What was found of a plan's rows that are to be stepped.

    Attributes:
        keys: int64 (n,), their slots.
        counts: of those that have none, see `directory.search`.
    """

    keys: Tensor
    counts: Tensor


class DeviceHashIndex:
    """Slots of ids, given in order of arrival, and in one step in order of the ids. Nothing waits for the device.

    Ids get slots where they are stepped, and keep them.

    Args:
        slots: how many there are room for, at first.
        device: where they are.
        timeline: in which order they are used.

    Attributes:
        most: no more slots have been given; how many were, the device knows.
        epoch: changes when ids get slots.
    """

    def __init__(self, slots: int, device: torch.device, timeline: StreamOrder) -> None:
        self.most = self.epoch = self._table_lock = self._positions = 0
        self._device, self._timeline, self._seed = device, timeline, secrets.randbits(63)
        self._used = torch.zeros(2, dtype=torch.int64, device=device)
        self._answer, self._asked_at = HostCopy((), device.type == "cuda"), NEVER
        self._entries = self._empty(slots)

    def _empty(self, slots: int) -> kernels.HashIndexTensors:
        ids = torch.empty(slots, dtype=torch.int64, device=self._device)
        table = torch.zeros(OPEN_ENTRIES * slots, dtype=torch.int64, device=self._device)
        # Nobody can make ids that all collide: nothing but places depends on it.
        return kernels.HashIndexTensors(table, ids, self._seed)

    @property
    def ids(self) -> Tensor:
        """Those of the slots, in their order."""
        return self._entries.ids

    @property
    def words(self) -> tuple[int, ...]:
        """What kernels of several tables know of it: see `joint_directory`."""
        table, ids, seed = self._entries
        used = self._used.data_ptr() + self._table_lock * self._used.element_size()
        return table.data_ptr(), ids.data_ptr(), len(table), seed, used

    def begin(self, ids: Tensor) -> None:
        """Give the first slots, of which there are enough, to ids, in their order, and forget all others."""
        self.most, self.epoch, self._asked_at = len(ids), self.epoch + 1, NEVER
        self._used.fill_(len(ids))
        self.ids[: len(ids)] = ids
        self._entries.table.zero_()
        most = max(1, len(ids))  # of none too: the kernel is compiled here, and not in the step that makes room
        kernels.file(self._used, self._table_lock, most, self._entries)

    def grow(self, slots: int) -> None:
        """Make room for so many slots. All ids keep theirs."""
        entries, known = self._empty(slots), self._entries
        entries.ids[: len(known.ids)] = known.ids
        kernels.file(self._used, self._table_lock, min(self.most, len(known.ids)), entries)
        self._timeline.uses(known.ids, known.table)
        self._entries = entries

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(part.numel() * part.element_size() for part in (self.ids, self._entries.table, self._used))

    def count(self) -> int:
        """Return how many slots were given. Waits for the device."""
        self.most = int(self._used[self._table_lock])
        return self.most

    def hear(self) -> None:
        """Lower `most`, if the device has answered how many slots were given."""
        if self._asked_at != NEVER and self._answer.has_come():
            self.most = min(self.most, int(self._answer.lines) + self._positions - self._asked_at)
            self._asked_at = NEVER

    def ask(self) -> None:
        """Let the device tell how many slots were given so far, if it is not asked."""
        if self._asked_at == NEVER:
            self._answer.come(self._used[self._table_lock])
            self._asked_at = self._positions

    def find(self, plan: DevicePlan) -> None:
        """Write the slots that the rows of a new plan have now to its keys, and how many have none."""
        kernels.search(plan.ids, plan.count, None, self._entries, plan.keys, plan.new)
        plan.epoch = self.epoch

    def search(self, plan: DevicePlan) -> NewRowSearch:
        """Return the slots that a plan's rows have now, but of those that are not stepped, and how many have none."""
        if plan.epoch == self.epoch and plan.new is not None:
            return NewRowSearch(plan.keys, plan.new)
        n = len(plan.ids)
        keys, counts = carved(plan.ids.device, layout((2 * n, kernels.blocks(n))))
        keys = keys.view(torch.int64)
        kernels.search(plan.ids, plan.count, plan.keys, self._entries, keys, counts)
        return NewRowSearch(keys, counts)

    def enter(self, plan: DevicePlan, search: NewRowSearch, verdict: Tensor) -> None:
        """Give slots to those rows that have none, if the step is made, and write them to the keys."""
        if not len(plan.ids):
            return  # no program would carry over how many slots were given
        keys, counts = search
        kernels.enter(plan.ids, plan.count, keys, counts, verdict, self._used, self._table_lock, self._entries)
        self._table_lock = 1 - self._table_lock
        self.note_entered(len(plan.ids))

    def note_entered(self, most: int) -> None:
        """Note that rows may have got slots, so many at most."""
        self.epoch, self.most, self._positions = self.epoch + 1, self.most + most, self._positions + most
