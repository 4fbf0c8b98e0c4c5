"""`HostedSide`: a table whose directory is on the host: that plans, and the GPU uses the records in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan, make_plan
from embedrock.device.ahead import Ahead, version_of
from embedrock.device.gradients import DeviceGradients, sum_rows
from embedrock.device.near import Near, Stamps
from embedrock.device.pinned import Pinned
from embedrock.device.plan import DevicePlan
from embedrock.device.side import DeviceSide, uploaded_together
from embedrock.errors import CacheTooSmallError, IdError, IdTypeError
from embedrock.kernels.gpu import cache, gate, rows
from embedrock.kernels.gpu.homes import FAR
from embedrock.kernels.gpu.sums import partial_rows
from embedrock.process.spans import spanned
from embedrock.table.rows import Rows
from embedrock.tiers.device_placing import DevicePlacement
from embedrock.tiers.tier import Tier

DROPPED = -2  # key of a row that is not stepped
FIRST_MAP = 1024  # slots


class HostedSide(DeviceSide):
    """Rows in pinned RAM, read and stepped there by the GPU: of hashed tables, and of the cache of a table on disk.

    There may be a cache of them in GPU memory, as of tables that the GPU plans. Its map has 4 bytes for each record
    that is in RAM, not for each that there could be.

    A row of a table on disk has a slot in RAM as long as it is near. Before it leaves that for the disk, the tier asks
    (`leave`): the record comes back if it is newer here, and is near no longer.

    The host waits for the GPU: for ids that are there, for the gradients of a step that makes records, and as rows
    leave RAM for the disk.

    Args:
        rows: of the table.
        tier: of the rows.
        device: the GPU.
        placement: how many of them are near, or none.

    Raises:
        PinningError: the system does not let the tier's RAM be pinned.
    """

    def __init__(self, rows: Rows, tier: Tier, device: torch.device, placement: DevicePlacement) -> None:
        super().__init__(rows, tier, device)
        if tier.is_direct:  # all of it is pinned
            tier.arena.expect_all()
        self._host_waits, self._is_at_work = 0, False
        with rows.turn.lock:  # so that no record moves until it is let in, and nobody asks it before it is whole
            self._pinned = Pinned(tier.records.bytes, device, self.timeline.finish)
            slots = tier.used_slots if tier.evicts else FIRST_MAP
            where = self._map(slots if placement.near_rows else 0)
            self.near = Near(where, placement, self.form, self._pinned.address)
            self._cover()
            tier.let_in(self)

    def _map(self, slots: int) -> Tensor:
        return torch.full((slots,), FAR, dtype=torch.int32, device=self.device)

    def _follow(self) -> None:
        """Take over what the CPU changed, and new slots. It has changed nothing before `finish`."""
        if self.near.is_cache and len(self.near.slots.where) < self.tier.used_slots:
            self.near.grow(self._map(max(self.tier.used_slots, 2 * len(self.near.slots.where))), self.timeline)
        if self.near.is_cache and self._seen != self.rows.version.now:
            self.near.clear()
            self.near.slots.where.fill_(FAR)
        self._seen = self.rows.version.now

    def _cover(self, more: int = 0) -> None:
        """Pin the records that there are, and room for `more`."""
        slots = min(self.tier.used_slots + more, len(self.tier.records.bytes))
        self._pinned.cover(slots * self.spec.record_bytes)

    def _finish(self) -> None:
        self.timeline.finish()
        self.faults.look()
        self.near.write_back()
        self.timeline.finish()
        self._is_at_work = False

    def leave(self, slots: np.ndarray) -> None:
        """See `Guest`. The caller has the table. Waits for the device, if it may be at work with the records."""
        if self._is_at_work or self.near.is_cache:
            self._host_waits += 1
            with self.timeline.ordered():
                self.timeline.wait_for_copies()
                if self.near.is_cache:
                    self.near.leave(self.uploaded(slots))
                self.timeline.finish()

    def close(self) -> None:
        self.tier.let_out(self)
        super().close()
        self._pinned.close()

    def stats(self) -> dict[str, float]:
        used = {"device_slots": self.near.placement.near_rows, "device_bytes": self.near.nbytes}
        return {**used, "device_host_waits": self._host_waits, **self.near.stats()}

    def __repr__(self) -> str:
        return f"on {self.device}: {self.near.placement}, planned by the host"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self.rows.turn.beside_sides():
            self.rows.check_open()
            yield

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Do work on the device with records in RAM, in the table's order. The caller has the table."""
        with self.timeline.ordered():
            self._cover()
            self._is_at_work = True
            self.timeline.wait_for_copies()
            self._follow()
            yield

    @contextmanager
    def _located(self, host: Plan) -> Iterator[Plan]:
        """Bring the rows of a plan to RAM, and do work with them: see `_at_work`.

        Others may have the table, and change rows, while some are brought. So what they did is looked at after that.
        """
        with self._turn():
            try:
                located = self.rows.located(host)
            except CacheTooSmallError:  # it is read wherever it is; a step of it is refused
                none = np.full(len(host.ids), -1, np.int64)
                located = replace(host, slots=none, missing=len(host.ids), epoch=-1)
            with self._at_work():
                yield located

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def plan(self, ids: Tensor, trains: bool) -> DevicePlan:
        self.check()
        ahead, self._ahead = self._ahead, None
        known = ahead if ahead is not None and trains and ahead.is_of(ids) else None
        if known is None:
            self._host_waits += ids.device.type != "cpu"
            host = self._host_planned(ids)
        else:
            assert known.host is not None  # it planned
            host = replace(known.host, shape=tuple(ids.shape))
        with self._located(host) as located:
            if known is not None and known.plan is not None:
                self.timeline.uses(known.plan.keys)  # all of it is one part of memory
                if not self.tier.evicts or np.array_equal(located.slots, host.slots):
                    return replace(known.plan, shape=tuple(ids.shape), host=host)
            # Of a batch that was brought ahead it was counted then what was near.
            return self._brought(located, trains, counts=ahead is None or ahead.plan is None)

    def _host_planned(self, ids: Tensor) -> Plan:
        with self.rows.turn.lock:
            return self.rows.plan(check_ids(ids.cpu().numpy(), self.spec.rows, self.rows.subject))

    def _brought(self, host: Plan, trains: bool, counts: bool) -> DevicePlan:
        """Upload a plan, and bring its rows near."""
        plan = self._planned(host)
        count, time = len(plan.keys), Stamps(plan.stamp, self.oldest(trains))
        arrival = self.near.arrival(count, time, self.timeline, counts)
        if arrival is not None:
            cache.touch(*arrival, plan.keys, count, len(self.near.slots.where))
            self.near.bring(arrival, plan.keys, count)
        return plan

    def _plan_ahead(self, ids: Tensor) -> None:
        """Plan the next batch while the device is at work; upload the plan, too, and bring rows near that are in RAM.

        Rows that get a record until then are looked for when they are read. Of a table on disk, all is planned anew if
        some of the rows come to RAM, or leave it, until then.
        """
        if ids.device.type != "cpu":
            return  # the host would wait for them, and for what the device does now
        try:
            host = self._host_planned(ids)
        except (IdError, IdTypeError):
            return  # it is one when they are looked up
        if self.tier.evicts and not self.near.is_cache:
            self._ahead = Ahead(ids, version_of(ids), None, host, None)
            return
        with self.timeline.aside():
            self._ahead = Ahead(ids, version_of(ids), self._brought(host, True, True), host, None)

    def read_rows(self, plan: DevicePlan) -> Tensor:
        with self._located(self._host(plan)) as host:
            if host is not plan.host:  # records of it have been made since, or moved
                plan = replace(plan, host=host, keys=self.uploaded(host.slots))
            return super().read_rows(plan)

    def _planned(self, host: Plan) -> DevicePlan:
        self._stamp += 1
        count = np.array([len(host.ids)], np.int32)
        tickets = np.zeros(1 + partial_rows(len(host.order)), np.int32)
        parts = host.slots, host.ids, host.starts, host.order.astype(np.int64), host.inverse, count, tickets
        keys, ids, starts, order, inverse, *rest = uploaded_together(parts, self.device)
        return DevicePlan(host.shape, keys, ids, starts, order, inverse, rest[0], rest[1], self._stamp, host=host)

    def gather(self, plan: DevicePlan, positions: Tensor | None, out: Tensor) -> None:
        host, keys, fresh = self._host(plan), plan.keys, out  # of which nothing is read where all have records
        absent = np.flatnonzero(host.slots < 0)
        if len(absent):
            if host.epoch < 0:  # they are read wherever they are
                self.rows.turn.settle()
            values_of = self.rows.first_values if host.epoch >= 0 else self.rows.weights_of
            fresh = self.uploaded(values_of(host.ids[absent]))
            slots = host.slots.copy()
            slots[absent] = -1 - np.arange(len(absent))
            keys = self.uploaded(slots)
        rows.gather(keys, fresh, plan.count, self.near.homes, self.form, out)

    def prepare(self, grads: DeviceGradients) -> None:
        host = self._host(grads.plan)
        with self._turn():
            self.rows.check_commit()
            self.rows.prepare(host)
            with self.timeline.ordered():
                self._cover(len(host.ids))

    def ready(self, plan: DevicePlan, verdict: Tensor) -> DevicePlan:
        host = self._host(plan)
        if host.missing and not bool(verdict[gate.LIVE]):  # records are to be made, so the host waits to know
            return plan  # nothing will be stepped
        with self._turn():
            slots = self.rows.admit(host)
            with self._at_work():
                if slots is host.slots:
                    return plan
                return replace(plan, keys=torch.where(plan.keys == DROPPED, DROPPED, self.uploaded(slots)))

    @staticmethod
    def _host(plan: DevicePlan) -> Plan:
        assert plan.host is not None  # it was made here
        return plan.host

    # ------------------------------------------------------------ gradients

    def masked(self, plan: DevicePlan, drop: Tensor) -> DevicePlan:
        return replace(plan, keys=torch.where(drop, DROPPED, plan.keys))

    def _merged(self, earlier: DeviceGradients, later: DeviceGradients) -> DeviceGradients:
        # The host plans, so it has to know whether the earlier gradients still are there.
        if earlier.number is not earlier.shown and bool(earlier.is_dropped):
            return later
        parts = [(self._host(earlier.plan), earlier.scaled()), (self._host(later.plan), later.values)]
        ids = np.concatenate([host.ids for host, _ in parts])
        values = torch.cat([values[: len(host.ids)] for host, values in parts])
        dropped = torch.cat([grads.plan.keys == DROPPED for grads in (earlier, later)])
        with self._located(make_plan(ids)) as host:
            plan = self._planned(host)
        plan = self.masked(plan, dropped[plan.order[plan.starts[:-1].long()]])
        return sum_rows(values, plan, self.no_row)
