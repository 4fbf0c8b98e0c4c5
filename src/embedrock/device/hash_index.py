"""`DeviceHashIndex`: the slots of open ids, in GPU memory."""

from __future__ import annotations

import secrets
from typing import Any

import torch
from torch import Tensor

from embedrock.device.copies import HostCopy
from embedrock.device.stream_order import StreamOrder
from embedrock.kernels.gpu import directory as kernels
from embedrock.storage.device_layout import OPEN_ENTRIES

ASKED_AHEAD = 8  # steps before room might run out, at which the device is asked for the number of slots given
NEVER = -1


class DeviceHashIndex:
    """Hash index that gives slots in order of arrival, and within a step in order of ids.

    An id gets a slot at its first step, and keeps it. No method waits for the device unless it says so.

    Args:
        slots: initial capacity.
        device: of the memory.
        timeline: order of the work on it.
        limit: maximum number of rows.

    Attributes:
        most: upper bound of the slots given; only the device knows the exact number.
        epoch: changes when ids get slots.
        room: number of rows that have room, on the device and in RAM.
        prepared: the last gradients whose new rows got room, and the epoch then.
    """

    def __init__(self, slots: int, device: torch.device, timeline: StreamOrder, limit: int) -> None:
        self.most = self.epoch = self.room = self._positions = 0
        self.prepared: tuple[Any, int] | None = None
        self._limit = limit
        self._device, self._timeline, self._seed = device, timeline, secrets.randbits(63)
        self._used = torch.zeros((), dtype=torch.int64, device=device)
        self._answer, self._asked_at = HostCopy((), device), NEVER
        self._entries = self._empty(slots)

    def _empty(self, slots: int) -> kernels.HashIndexTensors:
        ids = torch.empty(slots, dtype=torch.int64, device=self._device)
        table = torch.zeros(OPEN_ENTRIES * slots, dtype=torch.int64, device=self._device)
        # The seed is random, so nobody can construct colliding ids. Results do not depend on places in the table.
        return kernels.HashIndexTensors(table, ids, self._seed)

    @property
    def ids(self) -> Tensor:
        """The ids, in the order of their slots."""
        return self._entries.ids

    @property
    def words(self) -> tuple[int, ...]:
        """The words about it in a `TableEntryWords`: see `kernels.search`."""
        table, ids, seed = self._entries
        return table.data_ptr(), ids.data_ptr(), len(table), seed, self._used.data_ptr(), 0

    def begin(self, ids: Tensor) -> None:
        """Give the first slots to ids, in their order, and discard all others. The capacity must suffice."""
        self.most, self.epoch, self._asked_at = len(ids), self.epoch + 1, NEVER
        self._used.fill_(len(ids))
        self.ids[: len(ids)] = ids
        self._entries.table.zero_()
        most = max(1, len(ids))  # even of no ids, so that the kernel is compiled here, not in a step
        kernels.file(self._used, most, self._entries)

    def grow(self, slots: int) -> None:
        """Raise the capacity to a number of slots. All ids keep theirs."""
        entries, known = self._empty(slots), self._entries
        entries.ids[: len(known.ids)] = known.ids
        kernels.file(self._used, min(self.most, len(known.ids)), entries)
        self._timeline.uses(known.ids, known.table)
        self._entries = entries

    def free(self) -> None:
        """Release the GPU memory. Nothing may use it any more."""
        self._entries = self._empty(0)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory."""
        return sum(part.numel() * part.element_size() for part in (self.ids, self._entries.table, self._used))

    def most_with(self, grads: Any) -> int:
        """Return the maximum number of rows after a step by gradients."""
        return min(self.most + grads.most_rows, self._limit)

    def has_room(self, grads: Any) -> bool:
        """Return whether the new rows of gradients have room."""
        if self.most_with(grads) <= self.room:
            return True
        prepared, epoch = self.prepared or (None, -1)
        return prepared is grads.sums and epoch == self.epoch

    def count(self) -> int:
        """Return the number of slots given. Waits for the device."""
        self.most = int(self._used)
        return self.most

    def poll(self) -> None:
        """Lower `most` if the device has answered with the number of slots given."""
        if self._asked_at != NEVER and self._answer.has_come():
            self.most = min(self.most, int(self._answer.lines) + self._positions - self._asked_at)
            self._asked_at = NEVER

    def ask(self) -> None:
        """Request the number of slots given from the device, unless a request is under way."""
        if self._asked_at == NEVER:
            self._answer.come(self._used)
            self._asked_at = self._positions

    def record_inserts(self, most: int) -> None:
        """Record that up to `most` rows may have got slots, and ask how many did if room might run out."""
        self.epoch, self.most, self._positions = self.epoch + 1, self.most + most, self._positions + most
        self.prepared = None
        if self.most + ASKED_AHEAD * most > self.room:
            self.poll()
            self.ask()
