"""`HostedSide`: a table whose directory is on the host: that plans, and the GPU uses the records in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from embedrock.device.gradients import DeviceGradients, sum_rows
from embedrock.device.pinned import Pinned
from embedrock.device.plan import DevicePlan
from embedrock.device.side import DeviceSide, Room
from embedrock.errors import CacheTooSmallError
from embedrock.kernels.gpu import rows
from embedrock.plan import Plan, make_plan
from embedrock.table import Table
from embedrock.tiers.disk import Disk
from embedrock.tiers.tier import Tier

DROPPED = -2  # key of a row that is not stepped


class HostedSide(DeviceSide):
    """Rows in pinned RAM, read and stepped there by the GPU: of hashed tables, and of the cache of a table on disk.

    The host waits for the GPU: for ids that are there, and for the gradients of a step that makes records. A table on
    disk moves records, so it also waits for the step before.

    Args:
        table: whose rows.
        tier: of the table.
        device: the GPU.

    Raises:
        PinningError: the system does not let the tier's RAM be pinned.
    """

    def __init__(self, table: Table, tier: Tier, device: torch.device) -> None:
        super().__init__(table, tier, device)
        self._pinned = Pinned(tier.records.bytes, device)
        self._host_waits = 0
        self._cover()

    def _cover(self, more: int = 0) -> None:
        """Pin the records that there are, and room for `more`."""
        all_slots = len(self.tier.records.bytes)
        slots = all_slots if isinstance(self.tier, Disk) or self.tier.is_direct else self.tier.count + more
        self._pinned.cover(min(slots, all_slots) * self.spec.record_bytes)

    def finish(self) -> None:
        with self.timeline.ordered():
            self.timeline.finish()
            self.faults.look()

    def close(self) -> None:
        self._pinned.close()

    def stats(self) -> dict[str, float]:
        return {"device_slots": 0, "device_bytes": 0, "device_host_waits": self._host_waits}

    def __repr__(self) -> str:
        return f"on {self.device}: rows used in RAM, planned by the host"

    @contextmanager
    def _turn(self) -> Iterator[None]:
        turn = self.table.turn
        with turn.alone() if isinstance(self.tier, Disk) else turn.lock:
            self.begin()
            self._cover()
            with self.timeline.ordered():
                yield

    # ------------------------------------------------------------ lookups and steps

    def plan(self, ids: Tensor, trains: bool = True) -> DevicePlan:
        self._host_waits += ids.device.type != "cpu"
        self.check()
        host = self.table.plan(ids.cpu().numpy())
        with self._turn():
            return self._planned(host)

    def read(self, plan: DevicePlan) -> Tensor:
        with self._turn():
            return super().read(replace(plan, host=self._located(self._host(plan))))

    def _located(self, host: Plan) -> Plan:
        try:
            return self.table.located(host)
        except CacheTooSmallError:  # it is read wherever it is; a step of it is refused
            return replace(host, slots=np.full(len(host.ids), -1, np.int64), missing=len(host.ids), epoch=-1)

    def _planned(self, host: Plan) -> DevicePlan:
        self._stamp += 1
        return DevicePlan(
            host.shape,
            keys=self.uploaded(host.slots),
            ids=self.uploaded(host.ids),
            starts=self.uploaded(host.starts),
            order=self.uploaded(host.order.astype(np.int64)),
            inverse=self.uploaded(host.inverse),
            count=self.uploaded(np.array([len(host.ids)], np.int32)),
            stamp=self._stamp,
            host=host,
        )

    def places(self, plan: DevicePlan) -> Tensor:
        host = self._host(plan)
        return self.uploaded(self._addresses(host.slots, np.cumsum(host.slots < 0)))

    def _addresses(self, slots: np.ndarray, number: np.ndarray) -> np.ndarray:
        return np.where(slots >= 0, self._pinned.address + slots * self.spec.record_bytes, -number)

    def gather(self, plan: DevicePlan, places: Tensor, out: Tensor) -> None:
        host = self._host(plan)
        fresh = self.table.values_of(host.ids[host.slots < 0], here=host.epoch >= 0)
        rows.gather(places, self.uploaded(fresh), plan.count, self.form, out)

    def prepare(self, plan: DevicePlan) -> Room:
        with self._turn():
            self.table.check_beside(self._host(plan))
            self._cover(len(self._host(plan).ids))
        return Room(plan.keys, plan.keys)  # its addresses are uploaded

    def ready(self, plan: DevicePlan, live: Tensor, room: Room) -> Tensor:
        host = self._host(plan)
        if host.missing and not bool(live):  # the host makes records, so it waits to know whether the step is made
            return torch.full_like(plan.keys, -1)
        with self._turn():
            slots = self.table.admitted(host)
        places = self.uploaded(self._addresses(slots, slots))
        return torch.where(plan.keys == DROPPED, -1, places)

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
        with self._turn():
            plan = self._planned(self._located(make_plan(ids)))
        plan = self.masked(plan, dropped[plan.order[plan.starts[:-1].long()]])
        return DeviceGradients.of(plan, *sum_rows(values, plan, self._none))
