"""`OpenSide`: a table of open ids whose rows are all near: the GPU plans, and has the directory."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device.ahead import Ahead, version_of
from embedrock.device.annex import Annex
from embedrock.device.direct import COPIED_BYTES, COPIED_ROWS
from embedrock.device.gradients import DeviceGradients, sum_rows
from embedrock.device.hosted import HostedSide, are_dropped
from embedrock.device.near import Near
from embedrock.device.open_directory import OpenDirectory
from embedrock.device.plan import DevicePlan, Stepped, make_open_plan
from embedrock.device.side import Ready, drawn_by, form_of
from embedrock.kernels.gpu import cache, rows
from embedrock.kernels.gpu.directory import DROPPED
from embedrock.kernels.gpu.homes import ABSENT, CHANGED
from embedrock.kernels.gpu.rows import First
from embedrock.kernels.gpu.runtime import as_tensor
from embedrock.process.spans import spanned
from embedrock.spec import Spec
from embedrock.table.rows import Rows
from embedrock.tiers import device_placing
from embedrock.tiers.device_placing import DevicePlacement
from embedrock.tiers.memory import Memory


class OpenSide(HostedSide):
    """All rows near, and a directory of their ids on the device, so that new rows wait for nobody.

    A row has the slot that the tier will give it, to which `finish` brings its record. Once the rows outgrow the GPU
    memory, or the RAM that the table may take, the host plans, and what was planned here is planned by it: then this
    is what it inherits from.

    Args:
        rows: of the table.
        tier: of the rows, whose slots are in order of arrival.
        device: the GPU.
        budget: bytes of GPU memory.
    """

    def __init__(self, rows: Rows, tier: Memory, device: torch.device, budget: int) -> None:
        self._cache = _Cache(rows.spec)
        with rows.turn.lock:
            annex = Annex(tier, device, self._cache, form_of(rows.spec))
        super().__init__(rows, annex)
        drawn = drawn_by(self.spec.init)
        assert drawn is not None  # or the host plans, and draws
        self._memory, self._budget, self._drawn = tier, budget, drawn
        placement = device_placing.all_open(self.spec, budget)
        room = range(1, placement.near_rows - tier.count + 1)
        self._rows_at_most = tier.count + bisect.bisect_left(room, True, key=lambda more: not tier.has_room(more))
        where = torch.full((placement.near_rows,), ABSENT, dtype=torch.int32, device=device)
        self._all_near = Near(where, placement, self.form, annex.near.memory.far)
        self.first = First(drawn, self.uploaded(self.spec.first_state))
        self._directory: OpenDirectory | None = OpenDirectory(placement.near_rows, device)
        self._has_room_for: tuple[DevicePlan, int] | None = None  # and the epoch then
        self._is_newer = False  # than the tier

    @property
    def near(self) -> Near:
        """Records in GPU memory: all, or those of a cache."""
        return self.annex.near if self._directory is None else self._all_near

    # ------------------------------------------------------------ what the tier has

    def _open(self) -> OpenDirectory | None:
        """Return the directory as of now; None: the host plans."""
        self.begin()
        self._follow()
        return self._directory

    def _follow(self) -> None:
        """Take over what the CPU changed. It has changed nothing before `finish`."""
        if self._directory is None or self._seen == self.rows.version.now:
            return
        count = self._memory.count
        if count != self._memory.used_slots or count > self._rows_at_most:  # the next rows get slots of others
            return self._give_up()
        ids = np.concatenate([np.empty(0, np.int64), *self._memory.id_batches(COPIED_ROWS)])
        self._directory.begin(self.uploaded(ids))
        where, records = self.near.slots.where, self._memory.records.bytes
        where[count:] = ABSENT
        for start in range(0, count, self._copied()):
            stop = min(start + self._copied(), count)
            self.near.records[start:stop] = self.uploaded(records[start:stop])
            where[start:stop] = torch.arange(start, stop, dtype=torch.int32, device=self.device)
        self._seen = self.rows.version.now

    def _copied(self) -> int:
        """Return how many records are copied at a time."""
        return max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))

    def _finish(self) -> None:
        if self._directory is None:
            return super()._finish()
        self.timeline.finish()
        self.faults.look()
        if self._is_newer:
            self._bring_back(self._directory)
            self.timeline.finish()
            self._is_newer = False
        return None

    def _bring_back(self, directory: OpenDirectory) -> None:
        tier, size = self._memory, self.spec.record_bytes
        before, count = tier.used_slots, directory.count()
        tier.check_room(count - before)
        self.annex.cover(count - before)
        tier.enter(directory.ids[before:count].cpu().numpy())
        for start in range(0, count, self._copied()):
            words = self.near.slots.where[start : start + self._copied()]
            slots = (words >= CHANGED).nonzero()[:, 0] + start
            if len(slots):
                cache.copy_records(self.near.memory.near + slots * size, self.near.memory.far + slots * size, size)
                self.near.slots.where[slots] = slots.to(torch.int32)

    def _give_up(self) -> None:
        """Let the host plan from now on, with a cache of as many bytes. The tier's records are up to date."""
        self.timeline.finish()
        self._directory = self.first = self._ahead = self._has_room_for = None
        self._all_near.let_go()
        self._cache.budget = self._budget
        self.annex.move_out()  # and in again, with that cache

    def _let_go(self) -> None:
        self._directory = self._has_room_for = None
        self._all_near.let_go()
        super()._let_go()

    def may_forget(self) -> bool:
        return self._directory is None

    def stats(self) -> dict[str, float]:
        """Return numbers about it, and how many rows have records, which only it knows. Waits for the device."""
        if self._directory is None:
            return super().stats()
        touched = {"rows_touched": self._directory.count()} if self._is_newer else {}
        return {**super().stats(), **touched, "device_bytes": self.near.nbytes + self._directory.nbytes}

    def __repr__(self) -> str:
        return super().__repr__() if self._directory is None else f"on {self.device}: {self.near.placement}, open ids"

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        with self.working():
            if (directory := self._open()) is not None:
                self.check()
                self.timeline.wait_for_copies()
                plan = self._taken_or_made(ids, trains)
                directory.find(plan)
                return plan
        return super().plan(ids, trains)

    def _taken_or_made(self, ids: Tensor, trains: bool) -> DevicePlan:
        ahead, self._ahead = self._ahead, None
        if ahead is None or not trains or not ahead.is_of(ids):
            return self._sorted(self.on_device(ids))
        assert ahead.plan is not None  # it was made here
        self.timeline.uses(ahead.plan.keys, ahead.plan.order)  # one of each part of memory
        return replace(ahead.plan, shape=tuple(ids.shape))

    def _sorted(self, ids: Tensor) -> DevicePlan:
        self.clock.stamp += 1
        return make_open_plan(ids.to(torch.int64), self.clock.stamp)

    def _plan_ahead(self, ids: Tensor) -> None:
        if self._directory is None:
            return super()._plan_ahead(ids)
        placed = self.on_device(ids)
        with self.timeline.aside(placed):
            self._ahead = Ahead(ids, version_of(ids), self._sorted(placed), None, None)
        return None

    def read_rows(self, plan: DevicePlan) -> Tensor:
        return super().read_rows(plan) if self._directory is None else self._read(plan, None)

    def gather(self, plan: DevicePlan, positions: Tensor | None, out: Tensor) -> None:
        if self._directory is None:
            return super().gather(plan, positions, out)
        if plan.epoch != self._directory.epoch:  # some of its rows may have got slots since
            plan.keys, plan.new = self._directory.search(plan)
            plan.epoch = self._directory.epoch
        key = int(self.spec.key)
        return rows.read(plan.keys, plan.count, self.near.homes, key, self._drawn, self.form, out, plan.ids)

    def prepare_all(self, parts: Sequence[tuple[Any, DeviceGradients]]) -> None:
        with self.working():
            for _, grads in parts:
                directory = self._open()
                if directory is not None and not self._has_room(directory, grads.plan):
                    self._finish()
                    self._give_up()
        if self._directory is None:
            super().prepare_all(parts)

    def _has_room(self, directory: OpenDirectory, plan: DevicePlan) -> bool:
        """Return whether there are slots for a plan's new rows. Waits for the device where few are left."""
        if directory.most + len(plan.ids) <= self._rows_at_most or self._has_room_for == (plan, directory.epoch):
            return True
        self.annex.host_waits += 1
        given = directory.count()
        has_room = given + len(plan.ids) <= self._rows_at_most or (
            given + int(directory.search(plan).counts.sum()) <= self._rows_at_most
        )
        self._has_room_for = (plan, directory.epoch) if has_room else None
        return has_room

    def is_prepared(self, grads: DeviceGradients) -> bool:
        directory = self._open()
        return super().is_prepared(grads) if directory is None else self._has_room(directory, grads.plan)

    def plan_in_ram(self, grads: DeviceGradients) -> Plan | None:
        return super().plan_in_ram(grads) if self._directory is None else None

    def cover_all(self, parts: Sequence[tuple[Any, DeviceGradients]]) -> None:
        if self._directory is None:
            super().cover_all(parts)

    def ready(self, plan: DevicePlan, verdict: Tensor | None, grads: DeviceGradients) -> Ready:
        directory = self._open()
        if directory is None:
            return super().ready(plan, verdict, grads)
        assert verdict is not None  # it was judged before
        self.timeline.wait_for_copies()
        self._has_room_for = None
        search = directory.search(plan)
        return Ready(replace(plan, keys=search.keys), functools.partial(directory.enter, plan, search, verdict))

    def note_change(self) -> None:
        super().note_change()
        self._is_newer = True

    def _host(self, plan: DevicePlan) -> Plan:
        if plan.host is None:  # it was made before the host began to plan
            self._hand_over(plan)
        return super()._host(plan)

    def _hand_over(self, plan: DevicePlan) -> None:
        """Make a plan what the host would have made. Waits for the device."""
        count = int(plan.count)
        plan.ids, plan.starts = plan.ids[:count], as_tensor(plan.starts)[: count + 1]
        parts = plan.ids, plan.inverse, as_tensor(plan.starts), plan.order.to(torch.int32)
        ids, inverse, starts, order = (part.cpu().numpy() for part in parts)
        with self._located(Plan(plan.shape, ids, inverse, starts, order)) as host:
            stepped = (plan.keys[:count] != DROPPED).cpu().numpy()
            plan.host, plan.keys = host, self.uploaded(np.where(stepped, host.slots, DROPPED))
            if not stepped.all():
                plan.stepped = Stepped.of(host, np.flatnonzero(stepped))

    # ------------------------------------------------------------ gradients

    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        return replace(super().masked(plan, drop), new=None)

    def _without(self, plan: DevicePlan, padding: int | None) -> tuple[Tensor, DevicePlan]:
        if padding is None or self._directory is None or not plan.ids.numel():
            return super()._without(plan, padding)
        there = torch.arange(len(plan.ids), device=self.device) < plan.count  # beyond, any id may be
        found = (plan.ids == padding) & there
        row = torch.where(found.any(), found.to(torch.int32).argmax(), -1)
        return row.to(torch.int32).reshape(1), self.masked(plan, found)

    def _merged(self, earlier: DeviceGradients, later: DeviceGradients) -> DeviceGradients:
        if self._directory is None:
            return super()._merged(earlier, later)
        if are_dropped(earlier):
            return later
        (ids, values), (more_ids, more) = _stepped(earlier), _stepped(later)
        plan = self._sorted(torch.cat([ids, more_ids]))
        self._directory.find(plan)
        return sum_rows(torch.cat([values, more]), plan, self.no_row)


class _Cache:
    """Places the records of a table: in RAM, until there is a budget for a cache in GPU memory."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self.budget = spec, 0

    def __call__(self, slots: int) -> DevicePlacement:
        return device_placing.cached(self._spec, self.budget // device_placing.slot_bytes(self._spec))


def _stepped(grads: DeviceGradients) -> tuple[Tensor, Tensor]:
    """Return the ids of rows that are stepped, and their gradients. Waits for the device."""
    plan = grads.plan
    rows = (plan.keys[: int(plan.count)] != DROPPED).nonzero()[:, 0]
    return plan.ids[rows], grads.scaled()[rows]
