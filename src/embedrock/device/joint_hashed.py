"""Batches of several tables of open ids, each with a hash index on the device: see `joint`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.device.joint_plan import JointBatchPlan, entries_of
from embedrock.device.plan import DeviceBatchPlan, ScratchLayout, SteppedTables, carved, layout
from embedrock.kernels.gpu import directory as kernels
from embedrock.kernels.gpu import plan as plan_kernels
from embedrock.kernels.gpu.addresses import DeviceTables
from embedrock.kernels.gpu.binding import TensorPart
from embedrock.kernels.gpu.directory import DROPPED, blocks
from embedrock.kernels.gpu.sums import partial_rows

NARROW = 256  # maximum number of tables with indices of one byte


class PlanSlots(NamedTuple):
    """The slots of a plan's rows, and the state of the hash indexes they come from.

    Attributes:
        tables, keys: for kernels.
        counts, news: numbers of rows without a slot, see `directory.search`.
        states: of the hash indexes.
    """

    tables: DeviceTables
    keys: Tensor
    counts: Tensor
    news: Tensor | TensorPart
    states: list[Any]


class HashedJointPlan(JointBatchPlan):
    """Plan of one batch of several tables of open ids: see `JointBatchPlan`. A search gives the rows their keys.

    Attributes:
        of_positions: the table of each position, in the order of `plan`.
        begins: int64 (k + 1,), begin of each table's positions, and the end of the last.
        slots: of the rows, from the last search.
    """

    slots: PlanSlots | None = None

    def _make(self, is_ahead: bool) -> None:
        self.begins = self.placed[len(self.batch.words) :]
        args = self.begins, len(self.executors), self.stamps[0]
        self.plan, self.of_positions = _sorted(self.ids.to(torch.int64), *args)
        if not is_ahead:
            self.write_bounds()

    def write_bounds(self) -> None:
        """Write `bounds` and the keys of the rows. No open id is out of range."""
        assert self.plan.new is not None  # it is a plan of open ids
        counts, news = self.plan.new
        self.slots = self._searched(self.plan.keys, counts, news)

    @property
    def known(self) -> tuple[DeviceTables, Tensor, Tensor | None]:
        return *self._found()[:2], self.plan.ids

    def _found(self) -> PlanSlots:
        """Return the current slots of the rows."""
        slots = self.slots
        if slots is None or slots.states != self._states():  # rows may have got slots since
            n, device = len(self.plan.ids), self.bounds.device
            keys, counts = carved(device, layout((2 * n, blocks(n + 1))))
            news = torch.zeros(len(self.executors), dtype=torch.int32, device=device)
            slots = self.slots = self._searched(keys.view(torch.int64), counts, news)
        return slots

    def ready(self, which: tuple[int, int], values: Tensor, verdicts: Any) -> SteppedTables:
        found = self._found()
        return super().ready(which, values, verdicts)._replace(admit=lambda: self._enter(found, which, verdicts))

    def _enter(self, found: PlanSlots, which: tuple[int, int], verdicts: Any) -> None:
        """Give slots to the new rows of consecutive tables by their verdicts."""
        tables, keys, counts, news, _ = found
        kernels.enter(self._arrays, tables.entries, keys, counts, news, self.plan.tickets, which, verdicts)
        for table in range(*which):
            executor: Any = self.executors[table]
            executor.index.record_inserts(self.cuts[table + 1] - self.cuts[table])

    def _searched(self, keys: Tensor, counts: Tensor, news: Tensor | TensorPart) -> PlanSlots:
        states, device = self._states(), self.bounds.device
        entries, _ = entries_of(tuple(zip(states[::2], self.batch.paddings, strict=True)), device)
        kernels.search(self._arrays, entries, keys, counts, news, self.bounds)
        return PlanSlots(self.tables._replace(entries=entries), keys, counts, news, states)

    def _states(self) -> list[Any]:
        executors: Any = self.executors
        return [part for executor in executors for part in (executor.known, executor.index.epoch)]

    @property
    def _arrays(self) -> tuple[Any, ...]:
        plan = self.plan
        return plan.ids, plan.starts, self.of_positions, plan.count, self.begins

    def _named(self, table: int, place: Tensor, is_none: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(is_none, DROPPED, 0), self.plan.ids[place]  # a later search finds the slots


def _sorted(ids: Tensor, begins: Tensor, k: int, stamp: int) -> tuple[DeviceBatchPlan, Tensor]:
    """Plan a batch of k tables, by sorting ids, and then the sorted ids by table.

    Returns:
        The plan, without keys, and the tables of its sorted positions.
    """
    n, device = len(ids), ids.device
    room = carved(device, _room_of(n, JointBatchPlan.tickets(k) + k))
    *wide, inverse, count, new, starts, tickets = room
    keys, unique, order = (part.view(torch.int64) for part in wide)
    of_positions = torch.empty(n, dtype=torch.uint8 if k <= NARROW else torch.int32, device=device)
    by_id, first = torch.sort(ids, stable=True)
    kernels.tables(first, begins, k, of_positions)
    of_positions, second = torch.sort(of_positions, stable=True)
    scan = torch.zeros(plan_kernels.scan_words(n), dtype=torch.int32, device=device)
    of = of_positions, second, first
    plan_kernels.collect(by_id, 0, order, scan, unique, starts, inverse, count, tickets, of=of)
    arrays = keys, unique, starts, order, inverse, count, tickets[:-k]
    made = DeviceBatchPlan((n,), *arrays, stamp, new=(new, tickets[-k:]))
    return made, of_positions


@functools.lru_cache(maxsize=256)
def _room_of(n: int, tickets: int) -> ScratchLayout:
    """Return the layout of a plan.

    Tensors: keys, ids, order, inverse, count and new. Parts: starts and tickets.
    """
    wide = (2 * n,) * 3
    more = n + 1, 1 + partial_rows(n) + tickets
    return layout((*wide, n, 1, blocks(n + 1)), more)
