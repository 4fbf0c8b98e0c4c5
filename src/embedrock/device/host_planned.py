"""`HostPlannedExecutor`: a table whose slot index is on the host, which plans. The GPU uses the records in RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.admission.lifecycle import AdmissionDecision
from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan, make_plan
from embedrock.device.batch import DeviceBatch, SteppedTables
from embedrock.device.copies import uploaded
from embedrock.device.executor import GpuExecutor
from embedrock.device.features import FeatureLayout
from embedrock.device.gradients import DeviceRowGradients, RowSums, sum_rows
from embedrock.device.host_batch import FIRST_KEY, HostBatch, SteppedRows
from embedrock.device.mirror import DeviceMirror
from embedrock.device.prefetched import PrefetchedBatch, versions_of
from embedrock.device.steps import judge
from embedrock.errors import CacheTooSmallError, IdError, IdTypeError, MemoryBudgetError
from embedrock.kernels.gpu import gate, rows
from embedrock.kernels.gpu.directory import DROPPED
from embedrock.system.spans import spanned
from embedrock.table import reading, stepping
from embedrock.table.rows import NOBODY, TableState


class HostPlannedExecutor(GpuExecutor):
    """Executor of rows that the GPU reads and steps in pinned RAM: of hashed tables, and of disk tables' caches.

    GPU memory may hold a cache of them. The map of this cache has 4 bytes for each record in RAM.

    A row on disk keeps its slot in RAM while it is in the device cache. Before the backend evicts a row to disk, it
    calls `DeviceMirror.leave`. That writes a newer record back, and removes it from the device cache.

    The host waits for the GPU in three cases. They are ids on the device, gradients of a step that creates records, and
    evictions from RAM.

    Args:
        rows: of the table.
        mirror: the device's copy of the records: the table's own, or that of its pool.
    """

    judge = staticmethod(judge)
    batch: type[DeviceBatch] = HostBatch

    def __init__(self, rows: TableState, mirror: DeviceMirror) -> None:
        super().__init__(rows, rows.tier, mirror.device, mirror.timeline, mirror.clock)
        self.mirror, self.room = mirror, rows.table_lock.lock  # members of a group share one
        self._of_shared: np.ndarray | None = None  # the default row's gradient in the current step
        with rows.table_lock.lock:
            mirror.join(self)

    def _write_back(self) -> None:
        self.mirror.finish()

    def _free(self) -> None:
        self.mirror.part(self)

    def may_forget(self) -> bool:
        return True

    def stats(self) -> dict[str, float]:
        cache = self.cache if self.plans else self.mirror.cache
        used = {"device_slots": cache.placement.near_rows, "device_bytes": cache.nbytes}
        return {**used, "device_host_waits": self.mirror.host_waits, **cache.stats()}

    def __repr__(self) -> str:
        return f"on {self.device}: {self.mirror.cache.placement}, planned by the host"

    @contextmanager
    def _table_lock(self) -> Iterator[None]:
        with self.rows.table_lock.alone(beside_executors=True):
            self.rows.check_open()
            yield

    @contextmanager
    def _located(self, host: Plan) -> Iterator[Plan]:
        """Load the rows of a plan into RAM, and work with them: see `DeviceMirror.at_work`.

        While rows are loaded, other threads may hold the lock and change rows. So the mirror follows their changes
        afterwards.
        """
        with self._table_lock():
            try:
                located = reading.located((self.rows,), host)
            except CacheTooSmallError:  # a lookup reads rows through the cache; a step is refused
                none = np.full(len(host.ids), -1, np.int64)
                located = replace(host, slots=none, missing=len(host.ids), epoch=-1)
            with self.mirror.at_work():
                yield located

    # ------------------------------------------------------------ lookups and steps

    @spanned("plan")
    def planned_by_host(self, layout: FeatureLayout, ids: Tensor, trains: bool) -> HostBatch:
        """Plan a batch of the table alone on the host, and load its rows."""
        self.check()
        ahead, self.ahead = self.ahead, None
        known = ahead if ahead is not None and trains and ahead.is_of([ids]) else None
        if known is None:
            self.mirror.host_waits += ids.device.type != "cpu"
            host = self._host_planned(ids)
        else:
            assert known.host is not None  # the host planned
            host = known.host
        with self._located(host) as located:
            batch: Any = None if known is None else known.batch
            if batch is not None:
                self.timeline.uses(batch.keys)  # one allocation holds all of the batch
                if not self.backend.evicts or np.array_equal(located.slots, host.slots):
                    return batch.for_layout(layout, host)
            # A prefetched batch was counted when it was loaded.
            return self._planned_and_loaded(layout, located, trains, ahead is None or ahead.batch is None)

    def _host_planned(self, ids: Tensor) -> Plan:
        with self.rows.table_lock.lock:
            return reading.planned((self.rows,), [check_ids(ids.cpu().numpy(), self.spec.rows, self.rows.subject)])

    def _planned_and_loaded(self, layout: FeatureLayout, host: Plan, trains: bool, counts: bool) -> HostBatch:
        batch = HostBatch(layout, host, self.begin_batch(len(host.order), trains), counts)
        batch.load()
        return batch

    def leave_out(self, batch: Any, padding: int) -> None:
        """Leave the padding row (-1: there is none) and frozen rows out of the stepped rows."""
        left = [*batch.frozen, padding] if padding >= 0 else batch.frozen
        if len(left):
            batch.stepped = SteppedRows.of(batch.host, np.delete(np.arange(len(batch.host.ids)), left))

    def plan_ahead_by_host(self, ids: Tensor) -> None:
        """Plan and upload the next batch while the device works, and load its rows from RAM into the cache.

        The read looks up rows that get a record in the meantime. A table on disk plans again if some of the rows enter
        or leave RAM in the meantime. The caller holds `working`.
        """
        if ids.device.type != "cpu":
            return  # the host would wait for the ids, and for the device's current work
        try:
            host = self._host_planned(ids)
        except (IdError, IdTypeError):
            return  # the lookup raises it
        self.ahead = PrefetchedBatch([ids], versions_of([ids]), host=host)
        if not self.mirror.cache.is_cache and self.backend.evicts:
            return
        with self.timeline.aside():
            batch = self._planned_and_loaded(self.layout(), host, True, True)
            self.ahead.batch, self.ahead.stamps = batch, {self: batch.stamps[0]}

    def read_by_host(self, batch: Any) -> Tensor:
        """Return the weights of a batch's rows: see `DeviceBatch.read_rows`."""
        with self._located(self.host_of(batch)) as host, self.working:
            batch.take_words()
            batch.layout.begin_read()
            out, keys = batch.out(), batch.keys
            fresh = out  # unused if all rows have records
            absent = np.flatnonzero(host.slots < 0)
            if len(absent):
                if host.epoch < 0:  # rows are read through the cache
                    self.rows.table_lock.wait_for_step()
                values_of = reading.unrecorded if host.epoch >= 0 else reading.weights_of
                fresh = uploaded(values_of(self.rows, host.ids[absent]), self.device)
                slots = host.slots.copy()
                slots[absent] = -1 - np.arange(len(absent))
                keys = uploaded(slots + FIRST_KEY, self.device)
            elif host is not batch.host:  # records were created or moved since
                keys = uploaded(host.slots + FIRST_KEY, self.device)
            rows.read(keys, batch.count, batch.tables, out, fresh=fresh, stale=self.stale)
            batch.keep_weights(out)
            return out

    def prepare(self, grads: DeviceRowGradients) -> None:
        self.prepare_all([(self, grads)])

    def prepare_all(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        """Do the same as `prepare` for a step of all tables with this `room`; `parts` has their executors."""
        hosted = [part for part in parts if not part[0].finds_room(part[1])]
        try:
            if hosted:
                self._prepare(hosted)
        except MemoryBudgetError:
            self._prepare_together(parts)
        if len(parts) > max(1, len(hosted)):
            with self._table_lock():  # another one may have taken the room that an executor found
                are_prepared = all(executor.is_prepared(grads) for executor, grads in parts)
            if not are_prepared:
                self._prepare_together(parts)

    def _prepare_together(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        """Find exact room for the rows of all tables at once, or raise. Waits for the device."""
        with self._table_lock():
            self.rows.table_lock.wait_for_step()
            self._prepare(parts)

    def finds_room(self, grads: DeviceRowGradients) -> bool:
        """Make room for the rows of a step; return False where the host does that."""
        return False

    def give_room_back(self) -> None:
        """Do nothing: the host has no promised room."""

    def elsewhere(self, grads: DeviceRowGradients) -> list[stepping.DeferredInserts]:
        """Return the inserts of new rows that share room with other tables; empty if no room is shared."""
        return []

    def _prepare(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        due = [each for executor, grads in parts for each in executor.due(grads)]
        with self._table_lock():
            for (rows,), *_ in due:
                rows.check_commit()
            stepping.prepare_each(
                due, elsewhere=[each for executor, grads in parts for each in executor.elsewhere(grads)]
            )
            self.cover_all(parts)

    def cover_all(self, parts: Sequence[tuple[Any, DeviceRowGradients]]) -> None:
        """Make new records of a step usable by the device, as `prepare_all` does."""
        more: dict[DeviceMirror, int] = {}
        for executor, grads in parts:
            if (plan := executor.plan_in_ram(grads)) is not None:
                more[executor.mirror] = more.get(executor.mirror, 0) + len(plan.ids)
        for mirror, count in more.items():
            mirror.cover(count)

    def is_prepared(self, grads: DeviceRowGradients) -> bool:
        """Return whether the results of `prepare` still hold. Caller holds the table lock."""
        batch = grads.batch
        return stepping.known(self.rows, self._stepped(batch).plan, time=batch.newest_event) is not None

    def due(self, grads: DeviceRowGradients) -> list[stepping.Due]:
        """Return the batch of a step that the host prepares; empty if the host does not plan."""
        plan = self.plan_in_ram(grads)
        return [] if plan is None else [((self.rows,), plan, grads.batch.newest_event)]

    def plan_in_ram(self, grads: DeviceRowGradients) -> Plan | None:
        """Return the host plan of the rows that a step needs in RAM; None if the host does not plan."""
        return self._stepped(grads.batch).plan

    def ready_by_host(self, batch: Any, values: Tensor, case: Any, clip: float | None) -> SteppedTables:
        """Prepare a step of a batch: see `DeviceBatch.ready`."""
        self._of_shared, verdict = None, case.numbers[0]
        with self._table_lock(), self.mirror.at_work():
            due = self._due(batch, verdict)
            batch.take_words()
            stepped = batch.as_ready()
            if due is None:
                return stepped
            is_zeroed = due.rows is not None and not len(due.rows)
            now = stepping.prepare(self.rows, due.plan, time=None if is_zeroed else batch.newest_event)
            slots = self.backend.find(now.left)
            here = slots[slots >= 0]  # of rows that the step evicts: written back before any table is stepped
            leaving = self.mirror.write_back_slots(here) if len(here) else None
            if now.plan.slots is due.plan.slots and not now.plan.missing and not len(batch.frozen):
                return stepped._replace(admit=lambda: self._begin(now, leaving))
            self._of_shared = self._shared_gradient(due, now.decision, values, clip, verdict)
            keys, fill = _slot_buffer(batch.keys.shape[0], _taking_part(due, now.decision), self.device)
            return stepped._replace(keys=keys, admit=lambda: fill(self._begin(now, leaving)))

    def _begin(self, now: stepping.PoolStep, leaving: tuple[np.ndarray, Tensor] | None) -> np.ndarray:
        """Begin a step; return the slots of its rows. Allocates no device memory."""
        self.mirror.leaving = leaving
        try:
            return now.begin()
        finally:
            self.mirror.leaving = None

    def _due(self, batch: Any, verdict: Tensor) -> SteppedRows | None:
        """Return the rows that a verdict allows to step; None: no rows. Waits for it if records may be created."""
        stepped = self._stepped(batch)
        if self.rows.lifecycle is None:
            return stepped if not stepped.plan.missing or bool(verdict[gate.LIVE]) else None
        self.mirror.host_waits += 1
        if bool(verdict[gate.LIVE]):
            return stepped
        is_refused = bool(self.faults.tensor[0])
        return None if is_refused else SteppedRows.of(stepped.plan, NOBODY)  # its gradients were zeroed

    def _shared_gradient(
        self, due: SteppedRows, decision: AdmissionDecision | None, values: Tensor, clip: float | None, verdict: Tensor
    ) -> np.ndarray | None:
        """Return the gradient of the default row: the sum over rows that were not admitted. None without one."""
        if self.rows.shared is None or decision is None or decision.rows is None:
            return None
        rows = np.flatnonzero(~decision.rows)
        values = values[uploaded(rows if due.rows is None else due.rows[rows], self.device)]
        values = values * verdict[gate.FACTOR : gate.FACTOR + 1].view(torch.float32)
        if clip is not None:
            values = values.clamp(-clip, clip)
        return self.rows.shared.gradient(values.cpu().numpy(), np.arange(len(rows)))

    def step_beside(self, numbers: Any) -> None:
        """Do the host's part of a counted step; `numbers` are the rule's step constants."""
        self.mirror.mark_changed()
        gradient, self._of_shared = self._of_shared, None
        if gradient is not None and (shared := self.rows.shared) is not None:
            shared.step(gradient, numbers, self.rows.steps)

    @property
    def keeps_weights(self) -> bool:
        # A new record begins with the row's initial value, even if the lookup read the default row.
        return super().keeps_weights and self.rows.default_row() is None

    def _stepped(self, batch: Any) -> SteppedRows:
        host = self.host_of(batch)  # which may have to be made
        return batch.stepped or SteppedRows(host, None)

    def host_of(self, batch: Any) -> Plan:
        """Return the host's plan of a batch."""
        return batch.host

    # ------------------------------------------------------------ gradients

    def _merged(self, earlier: DeviceRowGradients, later: DeviceRowGradients) -> RowSums:
        if are_dropped(earlier):
            return later.alone
        due = [self._stepped(grads.batch) for grads in (earlier, later)]
        values = [
            values[: len(stepped.plan.ids)] if stepped.rows is None else values[uploaded(stepped.rows, self.device)]
            for stepped, values in zip(due, (earlier.scaled(), later.alone.values), strict=True)
        ]
        with self._located(make_plan(np.concatenate([stepped.plan.ids for stepped in due]))) as host:
            self.clock.stamp += 1
            return sum_rows(torch.cat(values), HostBatch(FeatureLayout([self], [None]), host))


def _taking_part(due: SteppedRows, decision: AdmissionDecision | None) -> np.ndarray | slice:
    """Return the positions of a batch's rows that an admission decision allows to step."""
    rows = slice(None) if due.rows is None else due.rows
    if decision is None or decision.rows is None:
        return rows
    return decision.rows if isinstance(rows, slice) else rows[decision.rows]


def _slot_buffer(
    count: int, stepped: np.ndarray | slice, device: torch.device
) -> tuple[Tensor, Callable[[np.ndarray], None]]:
    """Return device memory int64 (count,) for keys of rows whose records will be created later, and how to fill it.

    The function takes the slots of the `stepped` rows. It allocates no memory, and the host does not wait.
    """
    tensor = torch.empty(count, dtype=torch.int64, device=device)
    host = torch.full((count,), DROPPED, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")

    def fill(slots: np.ndarray) -> None:
        host.numpy()[stepped] = slots + FIRST_KEY
        tensor.copy_(host, non_blocking=True)

    return tensor, fill


def are_dropped(grads: DeviceRowGradients) -> bool:
    """Return whether the gradients were zeroed. Waits for the device."""
    return grads.number is not grads.shown and bool(grads.is_dropped)
