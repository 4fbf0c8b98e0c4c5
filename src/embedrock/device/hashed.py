"""`HashedGpuExecutor`: a table of open ids with its hash index on the GPU, which plans."""

from __future__ import annotations

import bisect
import functools
import sys
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device.cache import DeviceCache
from embedrock.device.copies import uploaded
from embedrock.device.device_planned import COPIED_ROWS, DevicePlannedExecutor
from embedrock.device.executor import GpuExecutor, form_of
from embedrock.device.features import TableFamily
from embedrock.device.gradients import DeviceRowGradients, RowSums, sum_rows
from embedrock.device.hash_index import DeviceHashIndex
from embedrock.device.hashed_batch import HashedBatch
from embedrock.device.host_planned import FIRST_KEY, HostPlannedExecutor, are_dropped
from embedrock.device.mirror import DeviceMirror
from embedrock.errors import MemoryBudgetError
from embedrock.kernels.constants import MOST_SLOTS
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.addresses import ABSENT, CHANGED, FAR, TableEntryWords
from embedrock.kernels.gpu.binding import as_tensor
from embedrock.spec.spec import Spec
from embedrock.storage import device_layout as device_placing
from embedrock.storage.device_layout import DeviceLayout
from embedrock.storage.ram_backend import RamBackend
from embedrock.table.rows import TableState
from embedrock.table.stepping import DeferredInserts

FIRST_SLOTS = 1024  # initial capacity of the hash index, if records are in RAM
SPARE_SHARE = 8  # one part in `SPARE_SHARE` of the RAM for rows is reserved for future steps


class HashedGpuExecutor(DevicePlannedExecutor, HostPlannedExecutor):
    """Executor of open ids with a hash index on the device, so that new rows wait for nobody.

    Rows are on device, in a cache or in RAM. A row has the same slot on the device as later in the backend. If records
    are in RAM, a row has it there from its first step. If all records are on device, `finish` copies them there.

    The host knows an upper bound of the slots given. Before each step it makes room in the index and in pinned RAM. If
    the rows outgrow the GPU's memory, the executor continues with a cache. If they outgrow the table's RAM, the host
    plans, and takes over existing plans. The executor then acts as its base class.

    Tables of a group share their RAM. So each one has promised room for future rows (`RamBackend.promised`), a little
    above the bound. A table returns unused room when another table needs it.

    Args:
        rows: of the table.
        backend: backend of the records, with slots in order of arrival: the table's, or its pool's.
        device: the GPU.
        budget: bytes of GPU memory for records; 0: none on device.

    Attributes:
        budget: see above.
        index: the hash index. Empty once the host plans.
    """

    batch = HashedBatch

    def __init__(self, rows: TableState, backend: RamBackend, device: torch.device, budget: int) -> None:
        with rows.table_lock.lock:
            mirror = DeviceMirror(backend, device, functools.partial(_cached, rows.spec, 0), form_of(rows.spec))
        super().__init__(rows, mirror)
        self._memory, self.budget = backend, budget
        self._far, self._epoch = mirror.cache.memory.far, backend.epoch
        self._draw_on_device()
        placement = self._placed(backend.count)
        slots = placement.near_rows if placement.mode == "device" else max(1, min(FIRST_SLOTS, self._most_rows()))
        limit = sys.maxsize if self.spec.rows is None else self.spec.rows
        self.index = DeviceHashIndex(slots, device, self.timeline, limit)
        self.use(DeviceCache(absent(slots, device), placement, self.form, self._far))
        self.not_captured = "the host counts its rows, to have room for them"

    def _placed(self, count: int) -> DeviceLayout:
        all_near = device_placing.all_open(self.spec, self.budget)
        if all_near.near_rows and count <= all_near.near_rows:
            return all_near
        return _cached(self.spec, self.budget, count)

    # ------------------------------------------------------------ copies between device and backend

    def begin(self) -> None:
        self._check_open()
        self._follow()

    def _follow(self) -> None:
        """Load the CPU's changes. The CPU changes rows only after `finish`."""
        if not self.plans or (self._seen, self._epoch) == (self.rows.version.now, self._memory.epoch):
            return
        count = self._memory.count
        if count != self._memory.used_slots or self._epoch != self._memory.epoch:
            return self._give_up()  # new rows reuse slots, or records have moved
        self.timeline.wait_for_copies()
        if self.cache.is_identity and count > self.cache.placement.near_rows:
            self._switch_to_cache(count)
        self._take_over(count)
        self._seen = self.rows.version.now

    def _take_over(self, count: int) -> None:
        """Copy the backend's slots to the hash index, and its records to the device."""
        self.mirror.cover()
        self._fit(count)
        # In a group, others may need the room first.
        is_whole = self.cache.is_identity and self.backend is self._memory
        self._have_room(min(self.cache.placement.near_rows, self._most_rows()) if is_whole else count)
        ids = np.concatenate([np.empty(0, np.int64), *self._memory.id_batches(COPIED_ROWS)])
        self.index.begin(uploaded(ids, self.device))
        self.cache.clear()
        where, records = self.cache.slots.where, self._memory.records.bytes
        where[:count], where[count:] = FAR, ABSENT
        for start in range(0, count if self.cache.is_identity else 0, self._rows_at_a_time):
            stop = min(start + self._rows_at_a_time, count)
            self.cache.records[start:stop] = uploaded(records[start:stop], self.device)
            where[start:stop] = torch.arange(start, stop, dtype=torch.int32, device=self.device)

    def _finish(self) -> None:
        if not self.plans:
            return super()._finish()
        self.timeline.finish()
        self.faults.look()
        if self.is_newer:
            self._write_back()
            self.timeline.finish()
            self.is_newer = False
        return None

    def _write_back(self) -> None:
        backend, before, count = self._memory, self._memory.used_slots, self.index.count()
        if self.cache.is_identity:  # else RAM was taken before the step
            self.backend.check_ram(count - before)
            self.mirror.cover(count - before)
        backend.directory.insert(self.index.ids[before:count].cpu().numpy())
        if not self.cache.is_identity:
            return self.cache.write_back()
        size = self.spec.record_bytes
        for start in range(0, count, self._rows_at_a_time):
            words = self.cache.slots.where[start : start + self._rows_at_a_time]
            slots = (words >= CHANGED).nonzero()[:, 0] + start
            if len(slots):
                cache.copy_records(self.cache.memory.near + slots * size, self.cache.memory.far + slots * size, size)
                self.cache.slots.where[slots] = slots.to(torch.int32)
        return None

    def _switch_to_cache(self, count: int) -> None:
        """Switch to a cache, as the rows outgrow the GPU's memory. The backend must be up to date."""
        self.timeline.finish()
        self.timeline.uses(self.cache.records, *self.cache.slots)
        self.cache.free()  # both might not fit
        where = absent(len(self.index.ids), self.device)
        self._seen = -1
        self.use(DeviceCache(where, self._placed(count), self.form, self._far))

    def _give_up(self) -> None:
        """Switch to host planning, with a cache of the same bytes."""
        self._finish()
        self._free_index()
        self.first = self._ahead = None
        self.not_captured = GpuExecutor.not_captured
        self.use(self.cache)
        self.mirror.place = functools.partial(_cached, self.spec, self.budget)
        self.mirror.move_out()  # the next use creates the mirror again, with that cache

    def _free(self) -> None:
        if self.plans:
            self._free_index()
        super()._free()

    def _free_index(self) -> None:
        self._have_room(0)
        self.plans = False
        self.index.free()
        self.cache.free()

    def may_forget(self) -> bool:
        return not self.plans

    def stats(self) -> dict[str, float]:
        """Return statistics, and the number of rows with records if only the device knows it. Waits for the device."""
        if not self.plans:
            return super().stats()
        touched = {"rows_touched": self.index.count()} if self.is_newer else {}
        return {**super().stats(), **touched, "device_bytes": self.cache.nbytes + self.index.nbytes}

    def __repr__(self) -> str:
        if not self.plans:
            return super().__repr__()
        return f"on {self.device}: {self.cache.placement}, {'open' if self.spec.rows is None else 'hashed'} ids"

    # ------------------------------------------------------------ lookups and steps

    @property
    def joins(self) -> TableFamily | None:
        is_plain = self.spec.rows is None and self.rows.history is None
        return self.family if is_plain and self.plans and not self.family.kind.is_cached else None

    def entry_words(self) -> TableEntryWords:
        words = super().entry_words()
        return words._replace(directory=self.index.words) if self.plans else words

    def finds_room(self, grads: DeviceRowGradients) -> bool:
        with self.working:
            self.begin()
            if self.plans and not self._makes_room(grads):
                self._give_up()
            return self.plans

    def _makes_room(self, grads: DeviceRowGradients) -> bool:
        index = self.index
        index.poll()
        if index.has_room(grads):
            return True
        try:
            most = self._most_rows()
            needed = self._needed(grads, most)
            if needed > most:
                self.backend.check_room(needed - self._memory.count)  # makes others give room back, or raises
                most = needed
            self._cover(needed, min(most, index.room + index.room // SPARE_SHARE))
        except (torch.OutOfMemoryError, MemoryBudgetError):
            return False  # the host takes exactly the room it needs, or raises
        index.prepared = grads.sums, index.epoch
        return True

    def _needed(self, grads: DeviceRowGradients, most: int) -> int:
        """Return the number of rows that need room, at most `most` if possible.

        Waits for the device if room is short.
        """
        index, count = self.index, grads.most_rows
        if self.cache.is_identity:
            most = min(most, self.cache.placement.near_rows)
        if index.most_with(grads) <= most:
            return index.most_with(grads)
        self.mirror.host_waits += 1
        given = index.count()
        return given + (count if given + count <= most else cast("HashedBatch", grads.batch).count_new())

    def _cover(self, needed: int, wanted: int) -> None:
        """Make room for the needed rows, and for the wanted ones if that is more.

        The RAM for them exists. It is pinned here if rows are used zero-copy, and the index gets slots for them.
        """
        if needed <= self.index.room:
            return
        if self.cache.is_identity and needed > self.cache.placement.near_rows:
            self._finish()
            self._switch_to_cache(needed)
            self._follow()
        room = max(needed, wanted)
        if self.cache.is_identity:
            return self._have_room(min(room, self.cache.placement.near_rows))
        self.backend.check_ram(room - self.index.room)
        self.mirror.cover(room - self._memory.used_slots)
        self.timeline.wait_for_copies()
        self._fit(room)
        self._have_room(room)

    def _have_room(self, rows: int) -> None:
        """Reserve room for a number of rows against other tables. Discards what was prepared for a step."""
        self.index.room, self.index.prepared = rows, None
        if self.backend is not self._memory:  # others share it
            self._memory.promised = rows

    def give_room_back(self) -> None:
        if self.plans and self.index.room and self.rows.is_of_this_process:
            self.mirror.host_waits += 1
            with self.timeline.ordered():
                self._have_room(self.index.count())

    def _most_rows(self) -> int:
        """Return how many rows fit in the RAM that the table may take now."""
        backend, count = self.backend, self.backend.count
        most = min(backend.placement.slots, MOST_SLOTS, self.spec.rows or MOST_SLOTS)
        room = range(1, most - count + 1)
        return count + bisect.bisect_left(room, True, key=lambda more: not backend.has_room(more))

    def elsewhere(self, grads: DeviceRowGradients) -> list[DeferredInserts]:
        if not self.plans:
            return []
        count = functools.partial(_count_new, self, grads)
        return [DeferredInserts(self.rows, count, functools.partial(_keep_room, self, grads.sums))]

    def _fit(self, slots: int) -> None:
        """Raise the capacity of the index and the row map to at least `slots`."""
        there = len(self.index.ids)
        if slots > there:
            more = min(max(slots, 2 * there), max(slots, self._most_rows()))
            if more > len(self.cache.slots.where):  # else an earlier try grew it, and memory ran out for the index
                self.cache.grow(absent(more, self.device), self.timeline)
                self.use(self.cache)
            self.index.grow(more)
            self.use(self.cache)

    def is_prepared(self, grads: DeviceRowGradients) -> bool:
        self.begin()
        return self.index.has_room(grads) if self.plans else super().is_prepared(grads)

    def plan_in_ram(self, grads: DeviceRowGradients) -> Plan | None:
        return None if self.plans else super().plan_in_ram(grads)

    def host_of(self, batch: Any) -> Plan:
        if batch.host is not None:
            return batch.host
        count = int(batch.count)  # the batch is older than host planning: it waits for the device
        batch.ids, batch.starts = batch.ids[:count], as_tensor(batch.starts)[: count + 1]
        parts = batch.ids, batch.inverse, as_tensor(batch.starts), batch.order.to(torch.int32)
        ids, inverse, starts, order = (part.cpu().numpy() for part in parts)
        padding = int(as_tensor(batch.paddings))
        with self._located(Plan((len(order),), ids, inverse, starts, order)) as host:
            batch.host, batch.keys = host, uploaded(host.slots + FIRST_KEY, self.device)
            batch.take_words()
            self.leave_out(batch, padding)
        return host

    # ------------------------------------------------------------ gradients

    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> RowSums:
        if not self.plans:
            return super()._merged(earlier, later)
        if are_dropped(earlier):
            return later.alone
        self.clock.stamp += 1
        parts = [_stepped(grads) for grads in (earlier, later)]
        batch = HashedBatch.of_ids(self, torch.cat([ids for ids, _ in parts]), self.clock.stamp)
        return sum_rows(torch.cat([values for _, values in parts]), batch)


def _count_new(executor: HashedGpuExecutor, grads: DeviceRowGradients) -> int:
    """Return the number of records that a step by gradients creates. Waits for the device."""
    with executor.working:
        executor.begin()
        if not executor.plans:
            return 0  # the host has begun to plan
        executor.mirror.host_waits += 1
        batch = cast("HashedBatch", grads.batch)
        return executor.index.count() + batch.count_new() - executor._memory.count


def _keep_room(executor: HashedGpuExecutor, sums: Any, new: int) -> None:
    """Keep room for exactly `new` new rows of gradients."""
    with executor.working:
        executor.begin()
        if not executor.plans:
            return
        needed, index = executor._memory.count + new, executor.index
        try:
            executor._cover(needed, needed)
            index.prepared = sums, index.epoch
        except (torch.OutOfMemoryError, MemoryBudgetError):
            executor._give_up()


def absent(slots: int, device: torch.device) -> Tensor:
    """Return the address words of slots without records: int32 (slots,)."""
    return torch.full((slots,), ABSENT, dtype=torch.int32, device=device)


def _cached(spec: Spec, budget: int, slots: int) -> DeviceLayout:
    """Return the layout of a cache of any number of slots in RAM; without a budget, of none."""
    return device_placing.cached(spec, budget // device_placing.slot_bytes(spec))


def _stepped(grads: DeviceRowGradients) -> tuple[Tensor, Tensor]:
    """Return the ids of stepped rows, and their gradients. Waits for the device."""
    batch = grads.batch
    assert batch.ids is not None
    there = torch.arange(int(batch.count), device=batch.ids.device)
    rows = there[there != as_tensor(batch.paddings)]
    return batch.ids[rows], grads.scaled()[rows]
