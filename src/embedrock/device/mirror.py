"""`DeviceMirror`: a device's copy of host-planned records. All are pinned in RAM, some are cached on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.device.cache import BatchCounter, DeviceCache
from embedrock.device.copies import uploaded
from embedrock.device.pinned import PinnedRecords
from embedrock.device.stream_order import StreamOrder
from embedrock.kernels.gpu.addresses import FAR
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.storage.backend import Backend
from embedrock.storage.device_layout import DeviceLayout

FIRST_MAP = 1024  # slots of the first map


class DeviceMirror:
    """Eviction listener of a backend that pins its records in RAM, and may cache some of them in GPU memory.

    The executors of all tables of the backend share it: of one table, or of the members of a pool. So one cache serves
    them all.

    Caller holds the table lock.

    Args:
        backend: backend of the records.
        device: the GPU.
        place: maps a number of slots in RAM to the placement of records on the device.
        form: layout of the records.

    Attributes:
        backend, device, place: see above.
        timeline, clock: shared by all executors.
        host_waits: number of times the host waited for the device.
        is_at_work: the device may use records since the last `finish`.
        leaving: slots that are about to be evicted, already written back, and unused since: also as keys on the device.

    Raises:
        PinningError: the system refuses to pin the backend's RAM.
    """

    def __init__(
        self, backend: Backend, device: torch.device, place: Callable[[int], DeviceLayout], form: RecordForm
    ) -> None:
        self.backend, self.device, self.place, self._form = backend, device, place, form
        self.timeline, self.clock = StreamOrder(device, backend.subject), BatchCounter()
        self.host_waits, self.is_at_work = 0, False
        self._executors, self._seen = weakref.WeakSet[Any](), 0
        self.leaving: tuple[np.ndarray, Tensor] | None = None
        self._known: tuple[PinnedRecords, DeviceCache] | None = self._begun()
        backend.add_listener(self)  # last, as a listener must be complete

    def _begun(self) -> tuple[PinnedRecords, DeviceCache]:
        """Pin the records at their current place, and create an empty cache."""
        backend = self.backend
        if backend.is_direct:  # all of it is pinned
            backend.arena.expect_all()
        pinned = PinnedRecords(backend.records.bytes, self.device, self.timeline.finish)
        pinned.cover(self._covered(0))
        placement = self.place(backend.used_slots)
        slots = backend.used_slots if backend.evicts else FIRST_MAP
        with torch.inference_mode(False):
            where = self._map(slots if placement.near_rows else 0)
            return pinned, DeviceCache(where, placement, self._form, pinned.address)

    @property
    def _parts(self) -> tuple[PinnedRecords, DeviceCache]:
        """The pinned records and the cache, created again after the records have moved."""
        if self._known is None:
            self._known = self._begun()
            self._tell()
        return self._known

    def _tell(self) -> None:
        """Make the executors use the records at their current places."""
        for executor in self._executors:
            if not executor.plans:
                executor.use(self.cache)

    @property
    def cache(self) -> DeviceCache:
        """The cache of records in GPU memory, which may have no slots."""
        return self._parts[1]

    def _map(self, slots: int) -> Tensor:
        return torch.full((slots,), FAR, dtype=torch.int32, device=self.device)

    def _covered(self, more: int) -> int:
        slots = min(self.backend.used_slots + more, len(self.backend.records.bytes))
        return slots * self.backend.spec.record_bytes

    def cover(self, more: int = 0) -> None:
        """Pin the existing records and room for `more`, and extend the map to all of them."""
        with self.timeline.ordered():
            pinned, cache = self._parts
            covered = self._covered(more)
            pinned.cover(covered)
            slots, mapped = covered // self.backend.spec.record_bytes, cache.slots.where.shape[0]
            if cache.is_cache and mapped < slots:
                self.timeline.wait_for_copies()
                cache.grow(self._map(max(slots, 2 * mapped)), self.timeline)
                self._tell()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Work on the device with records in RAM, after all earlier work. Caller holds the table lock."""
        with self.timeline.ordered():
            self.cover()
            self.is_at_work = True
            self.timeline.wait_for_copies()
            self._follow()
            yield

    # ------------------------------------------------------------ changes by others

    def _follow(self) -> None:
        """Load the CPU's changes. The CPU changes rows only after `finish`."""
        if self._seen != self._now():
            self._empty()

    def mark_changed(self) -> None:
        """Record that the cache is as new as the tables."""
        self._seen = self._now()

    def _now(self) -> int:
        return sum(executor.rows.version.now for executor in self._executors)

    def _empty(self) -> None:
        if self.cache.is_cache:
            self.cache.clear()
            self.cache.slots.where.fill_(FAR)
        self.mark_changed()

    # ------------------------------------------------------------ as an eviction listener

    def leave(self, slots: np.ndarray) -> None:
        """Write back and forget rows before their eviction: see `EvictionListener`. Caller holds the table lock.

        Waits for the device if it may use the records.
        """
        if len(slots) and self._known is not None and (self.is_at_work or self.cache.is_cache):
            self.host_waits += 1
            with self.timeline.ordered():
                leaving = self.leaving
                if leaving is None or not np.array_equal(leaving[0], slots):
                    leaving = self.write_back_slots(slots)
                self.cache.forget(leaving[1])
                self.timeline.finish()

    def write_back_slots(self, slots: np.ndarray) -> tuple[np.ndarray, Tensor]:
        """Write back the records of slots that are about to be evicted, in the caller's order: see `leaving`.

        All allocations happen here; `leave` waits for the copies.
        """
        self.timeline.wait_for_copies()
        keys = uploaded(slots, self.device)
        if self.cache.is_cache:
            self.cache.write_back_rows(keys)
        return slots, keys

    def move_out(self) -> None:
        """Write back and unpin the records before they move: see `EvictionListener`. Caller holds the table lock.

        Waits for the device.
        """
        if self._known is not None:
            with self.timeline.ordered():
                self.timeline.finish()
                self.finish()
            self._free()
            self._known = None

    def give_room_back(self) -> None:
        for executor in list(self._executors):
            executor.give_room_back()

    def finish(self) -> None:
        """Write dirty records back to RAM. Waits for the device."""
        if self.is_at_work:
            self.cache.write_back()
            self.timeline.finish()
            self.is_at_work = False

    def _free(self) -> None:
        if self._known is not None:
            pinned, cache = self._known
            cache.free()
            pinned.close()

    # ------------------------------------------------------------ executors

    def join(self, executor: Any) -> None:
        """Add a table's `HostPlannedExecutor`. None of its rows is in the cache."""
        self._executors.add(executor)
        self.clock.tables = len(self._executors)
        self.mark_changed()
        self._tell()

    def part(self, executor: Any) -> None:
        """Remove a table's executor with up-to-date records in RAM. The last one releases the memory."""
        self._executors.discard(executor)
        self.clock.tables = max(1, len(self._executors))
        if self._executors:
            with self.timeline.ordered():
                self._empty()
            return
        self.backend.remove_listener(self)
        self.timeline.finish()
        self._free()
