"""`HashedGpuExecutor`: a table of open ids with its hash index on the GPU, which plans."""

from __future__ import annotations

import bisect
import functools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device import joint_hashed as joint_open
from embedrock.device import joint_plan
from embedrock.device.cache import BatchNumbers, DeviceCache
from embedrock.device.dense import COPIED_BYTES, COPIED_ROWS
from embedrock.device.executor import GpuExecutor, ReadyPlan, drawn_by, form_of
from embedrock.device.features import TableFamily, kind_of
from embedrock.device.gradients import DeviceRowGradients, sum_rows
from embedrock.device.hash_index import DeviceHashIndex
from embedrock.device.host_planned import HostPlannedExecutor, are_dropped
from embedrock.device.joint_plan import PrefetchedPlan, version_of
from embedrock.device.mirror import DeviceMirror
from embedrock.device.plan import DevicePlan, SteppedRows, make_open_plan
from embedrock.errors import MemoryBudgetError
from embedrock.kernels.constants import MOST_SLOTS
from embedrock.kernels.gpu import cache, rows
from embedrock.kernels.gpu import plan as kernels
from embedrock.kernels.gpu.addresses import ABSENT, CHANGED, FAR
from embedrock.kernels.gpu.binding import as_tensor
from embedrock.kernels.gpu.directory import DROPPED
from embedrock.kernels.gpu.joint import TableEntryWords
from embedrock.kernels.gpu.rows import InitialRecord
from embedrock.spec.spec import Spec
from embedrock.storage import device_layout as device_placing
from embedrock.storage.device_layout import DeviceLayout
from embedrock.storage.ram_backend import RamBackend
from embedrock.system.spans import spanned
from embedrock.table.rows import TableState
from embedrock.table.stepping import DeferredInserts

FIRST_SLOTS = 1024  # initial capacity of the hash index, if records are in RAM
SPARE_SHARE = 8  # one part in `SPARE_SHARE` of the RAM for rows is reserved for future steps
ASKED_AHEAD = 8  # steps before room might run out, at which the device is polled for the slots given


class HashedGpuExecutor(HostPlannedExecutor):
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
        tier: backend of the records, with slots in order of arrival: the table's, or its pool's.
        device: the GPU.
        budget: bytes of GPU memory for records; 0: none on device.

    Attributes:
        budget: see above.
    """

    def __init__(self, rows: TableState, tier: RamBackend, device: torch.device, budget: int) -> None:
        self._cache = _CachePlacement(rows.spec)
        with rows.table_lock.lock:
            mirror = DeviceMirror(tier, device, self._cache, form_of(rows.spec))
        super().__init__(rows, mirror)
        drawn = drawn_by(self.spec.init)
        assert drawn is not None  # else the host plans, and draws
        self._memory, self.budget, self.drawn = tier, budget, drawn
        self._far, self._epoch = mirror.near.memory.far, tier.epoch
        self.first = InitialRecord(drawn, self.uploaded(self.spec.first_state))
        placement = self._placed(tier.count)
        slots = placement.near_rows if placement.mode == "device" else max(1, min(FIRST_SLOTS, self._most_rows()))
        self._here, self._room = self._made(placement, slots), 0  # number of rows with room
        self._directory: DeviceHashIndex | None = DeviceHashIndex(slots, device, self.timeline)
        self._kind: TableFamily | None = None
        self._kind_of: Any = None  # the addresses' kind that `_kind` was made for
        self._has_room_for: tuple[Any, int] | None = None  # the last prepared gradients, and their epoch
        self._known: tuple[Any, TableEntryWords] | None = None  # and the key that it was made for
        self._is_newer = False  # the device's records, compared to the backend's

    def _placed(self, count: int) -> DeviceLayout:
        """Return the placement for a number of records and future ones."""
        all_near = device_placing.all_open(self.spec, self.budget)
        if all_near.near_rows and count <= all_near.near_rows:
            return all_near
        return device_placing.cached(self.spec, self.budget // device_placing.slot_bytes(self.spec))

    def _made(self, placement: DeviceLayout, slots: int) -> DeviceCache:
        return DeviceCache(self._absent(slots), placement, self.form, self._far)

    def _absent(self, slots: int) -> Tensor:
        return torch.full((slots,), ABSENT, dtype=torch.int32, device=self.device)

    @property
    def near(self) -> DeviceCache:
        return self.mirror.near if self._directory is None else self._here

    # ------------------------------------------------------------ copies between device and backend

    def _open(self) -> DeviceHashIndex | None:
        """Return the current hash index; None: the host plans."""
        self.begin()
        self._follow()
        return self._directory

    def _follow(self) -> None:
        """Load the CPU's changes. The CPU changes rows only after `finish`."""
        if self._directory is None or (self._seen, self._epoch) == (self.rows.version.now, self._memory.epoch):
            return
        count = self._memory.count
        if count != self._memory.used_slots or self._epoch != self._memory.epoch:
            return self._give_up()  # new rows reuse slots, or records have moved
        self.timeline.wait_for_copies()
        if self.near.is_identity and count > self.near.placement.near_rows:
            self._switch_to_cache(self._directory, count)
        self._take_over(self._directory, count)
        self._seen = self.rows.version.now

    def _take_over(self, directory: DeviceHashIndex, count: int) -> None:
        """Copy the backend's slots to the hash index, and its records to the device."""
        self.mirror.cover()
        self._fit(directory, count)
        # In a group, others may need the room first.
        is_whole = self.near.is_identity and not self._shares_room
        self._have_room(min(self.near.placement.near_rows, self._most_rows()) if is_whole else count)
        ids = np.concatenate([np.empty(0, np.int64), *self._memory.id_batches(COPIED_ROWS)])
        directory.begin(self.uploaded(ids))
        self.near.clear()
        where, records = self.near.slots.where, self._memory.records.bytes
        where[:count], where[count:] = FAR, ABSENT
        for start in range(0, count if self.near.is_identity else 0, self._copied()):
            stop = min(start + self._copied(), count)
            self.near.records[start:stop] = self.uploaded(records[start:stop])
            where[start:stop] = torch.arange(start, stop, dtype=torch.int32, device=self.device)

    def _copied(self) -> int:
        """Return how many records are copied at a time."""
        return max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))

    def _finish(self) -> None:
        if self._directory is None:
            return super()._finish()
        self.timeline.finish()
        self.faults.look()
        if self._is_newer:
            self._write_back(self._directory)
            self.timeline.finish()
            self._is_newer = False
        return None

    def _write_back(self, directory: DeviceHashIndex) -> None:
        tier, before, count = self._memory, self._memory.used_slots, directory.count()
        if self.near.is_identity:  # else RAM was taken before the step
            self.tier.check_ram(count - before)
            self.mirror.cover(count - before)
        tier.directory.insert(directory.ids[before:count].cpu().numpy())
        if not self.near.is_identity:
            return self.near.write_back()
        size = self.spec.record_bytes
        for start in range(0, count, self._copied()):
            words = self.near.slots.where[start : start + self._copied()]
            slots = (words >= CHANGED).nonzero()[:, 0] + start
            if len(slots):
                cache.copy_records(self.near.memory.near + slots * size, self.near.memory.far + slots * size, size)
                self.near.slots.where[slots] = slots.to(torch.int32)
        return None

    def _switch_to_cache(self, directory: DeviceHashIndex, count: int) -> None:
        """Switch to a cache, as the rows outgrow the GPU's memory. The backend must be up to date."""
        self.timeline.finish()
        self.timeline.uses(self._here.records, *self._here.slots)
        self._here.free()  # both might not fit
        self._here, self._seen = self._made(self._placed(count), len(directory.ids)), -1

    def _give_up(self) -> None:
        """Switch to host planning, with a cache of the same bytes. The backend must be up to date."""
        self.timeline.finish()
        self._have_room(0)
        self._directory = self.first = self._ahead = self._known = None
        self._here.free()
        self._cache.budget = self.budget
        self.mirror.move_out()  # the next use creates the mirror again, with that cache

    def _free(self) -> None:
        self._have_room(0)
        self._directory = self._known = None
        self._here.free()
        super()._free()

    def may_forget(self) -> bool:
        return self._directory is None

    @property
    def not_captured(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (
            GpuExecutor.not_captured if self._directory is None else "the host counts its rows, to have room for them"
        )

    def stats(self) -> dict[str, float]:
        """Return statistics, and the number of rows with records if only the device knows it. Waits for the device."""
        if self._directory is None:
            return super().stats()
        touched = {"rows_touched": self._directory.count()} if self._is_newer else {}
        return {**super().stats(), **touched, "device_bytes": self.near.nbytes + self._directory.nbytes}

    def __repr__(self) -> str:
        if self._directory is None:
            return super().__repr__()
        return f"on {self.device}: {self.near.placement}, {'open' if self.spec.rows is None else 'hashed'} ids"

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        with self.working:
            if (directory := self._open()) is not None:
                plan = self._taken_or_made(directory, ids, trains)
                if self.spec.rows is not None:  # else no id is wrong
                    self.end_batch(trains)
                return plan
        return super().plan(ids, trains)

    def _taken_or_made(self, directory: DeviceHashIndex, ids: Tensor, trains: bool) -> DevicePlan:
        ahead = self._take()
        if ahead is None or ahead.plan is None or not trains or not ahead.is_of(ids):
            plan = self._sorted(self.on_device(ids), self.faults.tensor)
            directory.find(plan)  # a prefetched batch was counted when it was loaded
            self.bring(plan, plan.count, trains, counts=ahead is None)
            return plan
        assert ahead.fault is not None
        self.timeline.uses(ahead.plan.keys, ahead.plan.order, ahead.fault)  # one tensor of each allocation
        if self.spec.rows is not None:
            kernels.adopt(self.faults.tensor, ahead.fault)
        plan = replace(ahead.plan, shape=tuple(ids.shape))
        if plan.epoch != directory.epoch:
            directory.find(plan)
        return plan

    def _take(self) -> PrefetchedPlan | None:
        """Begin a lookup that the device plans; return its prefetched plan, once."""
        self.check()
        self.timeline.wait_for_copies()
        ahead, self._ahead = self._ahead, None
        return ahead

    def _sorted(self, ids: Tensor, fault: Tensor) -> DevicePlan:
        self.clock.stamp += 1
        return make_open_plan(ids.to(torch.int64), self.clock.stamp, self.spec.rows, fault)

    def _plan_ahead(self, ids: Tensor) -> None:
        if self._directory is None:
            return super()._plan_ahead(ids)
        placed = self.on_device(ids)
        with self.timeline.aside(placed):
            fault = torch.zeros_like(self.faults.tensor)  # bad ids become an error only when the batch is looked up
            plan = self._sorted(placed, fault)
            if self.near.is_cache:  # else the lookup finds the slots
                self._directory.find(plan)
                self.bring(plan, plan.count, trains=True, counts=True)
            self._ahead = PrefetchedPlan(ids, version_of(ids), plan, None, fault)
        return None

    def read_rows(self, plan: DevicePlan) -> Tensor:
        return super().read_rows(plan) if self._directory is None else GpuExecutor.read_rows(self, plan)

    def gather(self, plan: DevicePlan, positions: Tensor | None, out: Tensor) -> None:
        if self._directory is None:
            return super().gather(plan, positions, out)
        if plan.epoch != self._directory.epoch:  # rows may have got slots since
            plan.keys, plan.new = self._directory.search(plan)
            plan.epoch = self._directory.epoch
        key = int(self.spec.key)
        return rows.read(plan.keys, plan.count, self.near.homes, key, self.drawn, self.form, out, plan.ids)

    def finds_room(self, grads: DeviceRowGradients) -> bool:
        with self.working:
            if self._open() is not None and not self._makes_room(grads):
                self._let_host_plan()
            return self._directory is not None

    def _let_host_plan(self) -> None:
        self._finish()
        self._give_up()

    def _makes_room(self, grads: DeviceRowGradients) -> bool:
        """Make room for new rows of these gradients; return whether that succeeded."""
        directory, count = self._directory, grads.sums.most_rows
        assert directory is not None  # the caller has checked it
        directory.poll()
        if directory.most + ASKED_AHEAD * count > self._room:
            directory.ask()
        if self._has_room(directory, grads):
            return True
        try:
            most = self._most_rows()
            needed = self._needed(directory, grads, most)
            if needed > most:
                self.tier.check_room(needed - self._memory.count)  # makes others give room back, or raises
                most = needed
            self._cover(directory, needed, min(most, self._room + self._room // SPARE_SHARE))
        except (torch.OutOfMemoryError, MemoryBudgetError):
            return False  # the host takes exactly the room it needs, or raises
        self._has_room_for = grads.sums, directory.epoch
        return True

    def _has_room(self, directory: DeviceHashIndex, grads: DeviceRowGradients) -> bool:
        """Return whether room is already reserved for the new rows of these gradients."""
        if self._most_with(directory, grads) <= self._room:
            return True
        sums, epoch = self._has_room_for or (None, -1)
        return sums is grads.sums and epoch == directory.epoch

    def _most_with(self, directory: DeviceHashIndex, grads: DeviceRowGradients) -> int:
        """Return the maximum number of rows after a step by these gradients."""
        return min(directory.most + grads.sums.most_rows, self.spec.rows or sys.maxsize)

    def _needed(self, directory: DeviceHashIndex, grads: DeviceRowGradients, most: int) -> int:
        """Return the number of rows that need room, at most `most` if possible.

        Waits for the device if room is short.
        """
        count = grads.sums.most_rows
        if self.near.is_identity:
            most = min(most, self.near.placement.near_rows)
        if self._most_with(directory, grads) <= most:
            return self._most_with(directory, grads)
        self.mirror.host_waits += 1
        given = directory.count()
        return given + (count if given + count <= most else int(directory.search(grads.plan).counts.sum()))

    def _cover(self, directory: DeviceHashIndex, needed: int, wanted: int) -> None:
        """Make room for the needed rows, and for the wanted ones if that is more.

        The RAM for them exists. It is pinned here if rows are used zero-copy, and the index gets slots for them.
        """
        if needed <= self._room:
            return
        if self.near.is_identity and needed > self.near.placement.near_rows:
            self._finish()
            self._switch_to_cache(directory, needed)
            self._follow()
        room = max(needed, wanted)
        if self.near.is_identity:
            return self._have_room(min(room, self.near.placement.near_rows))
        self.tier.check_ram(room - self._room)
        self.mirror.cover(room - self._memory.used_slots)
        self.timeline.wait_for_copies()
        self._fit(directory, room)
        self._have_room(room)

    @property
    def _shares_room(self) -> bool:
        return self.tier is not self._memory

    def _have_room(self, rows: int) -> None:
        """Reserve room for a number of rows against other tables. Discards what was prepared for a step."""
        self._room, self._has_room_for = rows, None
        if self._shares_room:
            self._memory.promised = rows

    def give_room_back(self) -> None:
        if self._directory is not None and self._room and self.rows.is_of_this_process:
            self.mirror.host_waits += 1
            with self.timeline.ordered():
                self._have_room(self._directory.count())

    def _most_rows(self) -> int:
        """Return how many rows fit in the RAM that the table may take now."""
        tier, count = self.tier, self.tier.count
        most = min(tier.placement.slots, MOST_SLOTS, self.spec.rows or MOST_SLOTS)
        room = range(1, most - count + 1)
        return count + bisect.bisect_left(room, True, key=lambda more: not tier.has_room(more))

    def elsewhere(self, grads: DeviceRowGradients) -> list[DeferredInserts]:
        if self._directory is None:
            return []
        count, keep_room = functools.partial(self.count_new, grads.plan), functools.partial(self.keep_room, grads)
        return [DeferredInserts(self.rows, count, keep_room)]

    def count_new(self, plan: DevicePlan) -> int:
        """Return the number of records that a step of a plan creates. Waits for the device."""
        with self.working:
            directory = self._open()
            if directory is None:
                return 0  # the host has begun to plan
            self.mirror.host_waits += 1
            return directory.count() + int(directory.search(plan).counts.sum()) - self._memory.count

    def keep_room(self, grads: DeviceRowGradients, new: int) -> None:
        """Keep room for exactly `new` new rows of these gradients."""
        with self.working:
            directory, needed = self._open(), self._memory.count + new
            if directory is None:
                return
            try:
                self._cover(directory, needed, needed)
                self._has_room_for = grads.sums, directory.epoch
            except (torch.OutOfMemoryError, MemoryBudgetError):
                self._let_host_plan()

    def _fit(self, directory: DeviceHashIndex, slots: int) -> None:
        """Raise the capacity of the index and the row map to at least `slots`."""
        there = len(directory.ids)
        if slots > there:
            more = min(max(slots, 2 * there), max(slots, self._most_rows()))
            if more > len(self._here.slots.where):  # else an earlier try grew it, and memory ran out for the index
                self._here.grow(self._absent(more), self.timeline)
            directory.grow(more)

    def is_prepared(self, grads: DeviceRowGradients) -> bool:
        directory = self._open()
        return super().is_prepared(grads) if directory is None else self._has_room(directory, grads)

    def plan_in_ram(self, grads: DeviceRowGradients) -> Plan | None:
        return super().plan_in_ram(grads) if self._directory is None else None

    def begin_together(self) -> DeviceHashIndex | None:
        """Begin a step that may include other tables; return the hash index, None: the host plans."""
        directory = self._open()
        self.timeline.wait_for_copies()
        self._has_room_for = None
        return directory

    def ready(self, plan: DevicePlan, verdict: Tensor | None, grads: DeviceRowGradients) -> ReadyPlan:
        directory = self.begin_together()
        if directory is None:
            return super().ready(plan, verdict, grads)
        assert verdict is not None  # the step was checked before
        search = directory.search(plan)
        return ReadyPlan(replace(plan, keys=search.keys), functools.partial(directory.enter, plan, search, verdict))

    def note_change(self) -> None:
        super().note_change()
        self._is_newer = True

    def _host(self, plan: DevicePlan) -> Plan:
        if plan.host is None:  # the plan is older than host planning
            self._hand_over(plan)
        return super()._host(plan)

    def _hand_over(self, plan: DevicePlan) -> None:
        """Convert a device plan to a host plan. Waits for the device."""
        count = int(plan.count)
        plan.ids, plan.starts = plan.ids[:count], as_tensor(plan.starts)[: count + 1]
        parts = plan.ids, plan.inverse, as_tensor(plan.starts), plan.order.to(torch.int32)
        ids, inverse, starts, order = (part.cpu().numpy() for part in parts)
        with self._located(Plan(plan.shape, ids, inverse, starts, order)) as host:
            stepped = (plan.keys[:count] != DROPPED).cpu().numpy()
            plan.host, plan.keys = host, self.uploaded(np.where(stepped, host.slots, DROPPED))
            if not stepped.all():
                plan.stepped = SteppedRows.of(host, np.flatnonzero(stepped))

    # ------------------------------------------------------------ together with other tables

    @property
    def joins(self) -> TableFamily | None:
        is_plain = self.spec.rows is None and self.rows.history is None
        if not is_plain or self._directory is None or self.near.is_cache:
            return None
        homes = self.near.homes.kind_to_step  # the kind alone, as the addresses would keep their memory alive
        if self._kind_of is not homes:  # rows may have outgrown the placement
            self._kind, self._kind_of = kind_of(self, is_open=True), homes
        return self._kind

    @property
    def key_count(self) -> int:
        return len(self.near.slots.where) + 2

    @property
    def nobody(self) -> int:
        return DROPPED

    @property
    def epoch(self) -> int:
        """A number that changes when ids get slots."""
        assert self._directory is not None  # the device plans
        return self._directory.epoch

    @property
    def known(self) -> TableEntryWords:
        assert self._directory is not None  # the device plans
        place = self.near.homes, *self._directory.words
        if self._known is None or self._known[0] != place:
            self._known = place, joint_plan.known_of(self)._replace(directory=(*place[1:], 0))
        return self._known[1]

    def take_ahead(self) -> PrefetchedPlan | None:
        self._open()
        return self._take()

    def note_ahead(self, ids: Tensor, part: joint_plan.PrefetchedPart) -> None:
        self._ahead = PrefetchedPlan(ids, version_of(ids), None, None, None, part)

    def begin_batch(self, n: int, trains: bool) -> BatchNumbers:
        self.clock.stamp += 1
        return self.near.stamps(n, self.clock.stamp, self.oldest(trains))

    def plan_together(self, joined: joint_plan.JoinedIds) -> joint_plan.DeviceBatchPlan:
        return joint_open.planned(joined)

    def note_entered(self, most: int) -> None:
        assert self._directory is not None  # the device plans
        self._directory.note_entered(most)

    # ------------------------------------------------------------ gradients

    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        return replace(super().masked(plan, drop), new=None)

    def _without(self, plan: DevicePlan, padding: int | None) -> tuple[Tensor, DevicePlan]:
        if padding is None or self._directory is None or not plan.ids.numel():
            return super()._without(plan, padding)
        there = torch.arange(len(plan.ids), device=self.device) < plan.count  # beyond, ids are undefined
        found = (plan.ids == padding) & there
        row = torch.where(found.any(), found.to(torch.int32).argmax(), -1)
        return row.to(torch.int32).reshape(1), self.masked(plan, found)

    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> DeviceRowGradients:
        if self._directory is None:
            return super()._merged(earlier, later)
        if are_dropped(earlier):
            return later
        (ids, values), (more_ids, more) = _stepped(earlier), _stepped(later)
        plan = self._sorted(torch.cat([ids, more_ids]), self.faults.tensor)
        self._directory.find(plan)
        return sum_rows(torch.cat([values, more]), plan, self.no_row)


class _CachePlacement:
    """Placement of a table's records: in RAM, until there is a budget for a cache in GPU memory."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.budget = spec, 0

    def __call__(self, slots: int) -> DeviceLayout:
        return device_placing.cached(self._spec, self.budget // device_placing.slot_bytes(self._spec))


def _stepped(grads: DeviceRowGradients) -> tuple[Tensor, Tensor]:
    """Return the ids of stepped rows, and their gradients. Waits for the device."""
    plan = grads.plan
    rows = (plan.keys[: int(plan.count)] != DROPPED).nonzero()[:, 0]
    return plan.ids[rows], grads.scaled()[rows]
