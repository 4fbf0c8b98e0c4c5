"""`DevicePlannedExecutor`: base of the executors that plan on the GPU, also together with other tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from embedrock.device.copies import uploaded
from embedrock.device.executor import GpuExecutor, drawn_by
from embedrock.device.plan import DeviceBatchPlan, PrefetchedPlan, version_of
from embedrock.kernels.gpu import plan as kernels
from embedrock.kernels.gpu.addresses import BatchTime
from embedrock.kernels.gpu.rows import InitialRecord

COPIED_ROWS, COPIED_BYTES = 1 << 20, 64 << 20  # at most at a time, between GPU memory and unpinned RAM


class DevicePlannedExecutor(GpuExecutor):
    """Executor that plans on the GPU, and draws initial values there. Joint plans may include its table.

    Attributes:
        is_newer: the device's records are newer than the backend's.
        known: `TableEntryWords` of this table, that kernels of several tables read.
        batch_plan: type of the `JointBatchPlan` of several tables.
    """

    is_newer = False
    known: Any
    batch_plan: Callable[..., Any]

    def _draw_on_device(self) -> None:
        drawn = drawn_by(self.spec.init)
        assert drawn is not None  # else the host plans, and draws
        self.first = InitialRecord(drawn, uploaded(self.spec.first_state, self.device))

    def _check_open(self) -> None:
        """Begin to use rows: wait for CPU steps, and check that the table is open. Caller holds the table lock.

        Raises:
            ClosedTableError: the table is closed.
        """
        rows = self._rows_of()
        rows.table_lock.settle_steps()
        rows.tier  # noqa: B018  # it is open

    @property
    def _rows_at_a_time(self) -> int:
        return max(1, min(COPIED_ROWS, COPIED_BYTES // self.spec.record_bytes))

    def mark_changed(self) -> None:
        super().mark_changed()
        self.is_newer = True

    # ------------------------------------------------------------ plans

    def _planned_or_prefetched(self, ids: Tensor, trains: bool, ahead: PrefetchedPlan | None) -> DeviceBatchPlan:
        """Return the prefetched plan of ids, or plan them. The caller holds `working`."""
        plan = None if ahead is None else ahead.plan
        if plan is not None and ahead is not None and trains and ahead.is_of(ids):
            self.timeline.uses(*plan.allocations)
            if (rows := self.spec.rows) is not None:  # bad ids become an error only when the batch is looked up
                kernels.check(plan.ordered, rows, self.faults.tensor, plan.stamp)
            plan = self._renewed(plan, tuple(ids.shape))
        else:  # a prefetched batch was counted when it was loaded
            plan = self._made_plan(self.on_device(ids), trains, counts=ahead is None)
        if self.spec.rows is not None:  # else no id is wrong
            self.end_batch(trains)
        return plan

    @abstractmethod
    def _made_plan(self, ids: Tensor, trains: bool, counts: bool, is_ahead: bool = False) -> DeviceBatchPlan:
        """Plan a batch, and load its rows into the cache.

        Args:
            ids: on the device.
            trains: a step may follow.
            counts: hits and misses are counted.
            is_ahead: the lookup comes later, and checks the ids.
        """

    def _renewed(self, plan: DeviceBatchPlan, shape: tuple[int, ...]) -> DeviceBatchPlan:
        """Return a prefetched plan as it is valid now, for ids of a shape."""
        return replace(plan, shape=shape)

    def _plan_ahead(self, ids: Tensor) -> None:
        placed = self.on_device(ids)
        with self.timeline.aside(placed):
            plan = self._made_plan(placed, trains=True, counts=True, is_ahead=True)
            self._ahead = PrefetchedPlan(ids, version_of(ids), plan.stamp, plan)

    def begin_batch(self, n: int, trains: bool) -> BatchTime:
        """Begin a batch of n positions; return its time."""
        self.clock.stamp += 1
        return self.cache.begin_batch(n, self.clock, trains)

    # ------------------------------------------------------------ together with other tables

    @abstractmethod
    def take_ahead(self) -> PrefetchedPlan | None:
        """Begin a lookup and return its prefetched plan, once."""

    def _take(self) -> PrefetchedPlan | None:
        self.timeline.wait_for_copies()
        ahead, self._ahead = self._ahead, None
        return ahead

    def keep_ahead(self, ahead: PrefetchedPlan) -> None:
        """Keep a joint plan that was made ahead of the lookup."""
        self._ahead = ahead
