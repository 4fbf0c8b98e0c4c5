"""`HostBatch`: a batch of a table that the host plans."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.plan import Plan
from embedrock.device.batch import DeviceBatch, SteppedTables, tickets_of
from embedrock.device.cache import NO_TIME, load_rows, times_of
from embedrock.device.copies import uploaded_together
from embedrock.device.features import FeatureLayout
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.addresses import BatchTime

FIRST_KEY = 1  # of slot 0, as in any batch: see `DeviceBatch`


class SteppedRows(NamedTuple):
    """The stepped rows of a host-planned batch.

    Attributes:
        plan: of the rows.
        rows: positions of the rows in the batch, int64; None: all of them.
    """

    plan: Plan
    rows: np.ndarray | None

    @staticmethod
    def of(batch: Plan, rows: np.ndarray) -> SteppedRows:
        """Return the stepped rows at some positions of a batch."""
        return SteppedRows(batch.of_rows(rows), rows)


class HostBatch(DeviceBatch):
    """Batch of one table that the host has planned: see `DeviceBatch`.

    Args:
        layout: of the lookup.
        host: the host's plan.
        time: of the batch in a device cache.
        counts: hits and misses are counted.

    Attributes:
        host: see above.
        stepped: the stepped rows; None: all of them.
        padding: the row of the padding id; -1: none.
    """

    stepped: SteppedRows | None = None

    def __init__(self, layout: FeatureLayout, host: Plan, time: BatchTime = NO_TIME, counts: bool = True) -> None:
        executor = layout.first
        self.layout, self.executors, self.family, self.host = layout, layout.executors, executor.family, host
        self.sizes, self.stamps = layout.sizes((len(host.order),)), [executor.clock.stamp]
        is_cached = self.family.kind == "cached" and time is not NO_TIME
        self.tables, self.firsts = layout.of_words(layout.uncounted((counts,)) if is_cached and not counts else None)
        (padding,) = layout.paddings
        found = np.flatnonzero(host.ids == padding) if padding is not None else np.empty(0, np.int64)
        self.padding = int(found[0]) if len(found) else -1
        if (spec := executor.rows.spec).frozen:
            self.frozen = np.flatnonzero(~spec.are_trained(host.ids))
        self._upload(host)
        executor.leave_out(self, self.padding)
        if is_cached:
            self._moves = torch.empty(6 * self.sizes.n, dtype=torch.int32, device=self.family.device)
            self._search = *layout.search(self.sizes.positions), times_of([time], self.family.device)

    def _upload(self, host: Plan) -> None:
        n, count = len(host.order), len(host.ids)
        numbers = np.array([count], np.int32), np.zeros(tickets_of(n, 1), np.int32)
        bounds = np.array([0, count, self.padding], np.int32)
        parts = host.slots + FIRST_KEY, host.ids, host.starts, host.order.astype(np.int64), host.inverse
        found = uploaded_together((*parts, *numbers, bounds), self.family.device)
        self.keys, self.ids, self.starts, self.order, self.inverse, self.count, self.tickets, self.bounds = found
        self.placed = self.sizes.placed
        self.ends, self.paddings = self.bounds[1:2], self.bounds[2:]

    def load(self) -> None:
        """Load the rows into the device cache, if there is one."""
        search = self._victims() if self._search else None
        if search is not None:
            cache.touch(self.tables, search, self.keys, len(self.keys))
            load_rows(self.tables, search, self.keys, len(self.keys))

    def for_layout(self, layout: FeatureLayout, host: Plan) -> HostBatch:
        """Return the same batch in the layout of its lookup."""
        if layout.paddings == self.layout.paddings:
            self.host = host
            return self
        return HostBatch(layout, host)

    def of(self, table: int, executor: Any) -> DeviceBatch:
        own = copy.copy(self)
        own.layout = FeatureLayout([executor], self.layout.paddings)
        own.executors, own.family = own.layout.executors, executor.family
        own.take_words()
        return own

    def read(self) -> Tensor:
        return self.read_rows().index_select(0, self.inverse)

    def read_rows(self) -> Tensor:
        return self.layout.first.read_by_host(self)

    def ready(self, which: tuple[int, int], values: Tensor, case: Any, clip: float | None) -> SteppedTables:
        return self.layout.first.ready_by_host(self, values, case, clip)
