"""`HashedBatch`: a batch of tables of hashed ids, each with a hash index on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter, sub
from typing import Any, Self

import torch
from torch import Tensor

from embedrock.device.batch import DeviceBatch, SteppedTables, space_of, tickets_of
from embedrock.device.cache import load_rows
from embedrock.device.workspace import carved, layout
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu import directory as kernels
from embedrock.kernels.gpu import plan as plan_kernels
from embedrock.kernels.gpu.binding import TensorPart

NARROW = 256  # maximum number of tables with indices of one byte

# Many tables are read by one call of `map`.
_STATE = attrgetter("known", "index.epoch")
_ROOM, _MOST = attrgetter("index.room"), attrgetter("index.most")


class HashedBatch(DeviceBatch):
    """Batch of tables of hashed ids: see `DeviceBatch`. A search gives the rows their keys.

    If the only table outgrows its RAM, the host plans: then its executor does what follows (`HostBatch`).

    Attributes:
        of_positions: the table of each position, in the order of `order`; None: of one table.
        host, stepped: see `HostBatch`, once the host plans.
    """

    of_positions: Tensor | None = None
    host: Any = None
    stepped: Any = None
    _states: list[Any] | None = None  # of the hash indexes at the last search

    # ------------------------------------------------------------ plans

    def make(self, given: Tensor, is_ahead: bool = False) -> Self:
        self.given, n, k = given, self.sizes.n, len(self.executors)
        is_cached = bool(self._search)
        form = n, k, is_cached, is_ahead  # prefetched batches are made on a stream of their own
        self._space = self.layout.take(form, 80 * n, _space, self.family.device, n, k, is_cached)
        arrays, self.bounds, self.ends, self.paddings = self._space.arrays
        self.keys, self.ids, self.order, self.inverse, self.count, counts, self._moves, *parts = arrays
        of_positions, self.starts, self.tickets, scan, news = parts
        ids = given.to(torch.int64)
        plan = self.ids, self.starts, self.inverse, self.count, self.tickets
        if k == 1:
            self._ordered, self.order = torch.sort(ids, stable=True)
            plan_kernels.collect(self._ordered, 0, self.order, scan, plan, checked=None if is_ahead else self._range)
        else:
            by_id, first = torch.sort(ids, stable=True)
            kernels.tables(first, self._begins, k, of_positions)
            self.of_positions, second = torch.sort(of_positions, stable=True)
            plan_kernels.collect(by_id, 0, self.order, scan, plan, of=(self.of_positions, second, first))
        self._new = counts, news
        if not is_ahead or is_cached:  # else the lookup finds the slots
            self._find()
        if is_cached and (search := self._victims()) is not None:
            cache.touch(self.tables, search, self.keys, self.count)
            load_rows(self.tables, search, self.keys, self.count)
        return self

    @property
    def _range(self) -> tuple[int, Tensor] | None:
        """The limit of the ids of one table, and its error; None: ids are open."""
        executor: Any = self.layout.first
        count = executor.spec.rows
        return None if count is None else (count, executor.faults.tensor)

    def look_up(self) -> None:
        """Find the slots of rows that were planned ahead, and record an id that is outside of its table."""
        if self._range is not None:
            plan_kernels.check(self._ordered, *self._range)
        if self._states is None:
            self.take_words()
            self._find()

    @property
    def allocations(self) -> list[Tensor]:
        return [*super().allocations, self._ordered if self.of_positions is None else self.of_positions]

    # ------------------------------------------------------------ slots

    def _find(self) -> None:
        """Find the keys of the rows, and count those without a slot."""
        self._plan = self.ids, self.starts, self.of_positions, self.count, self._begins
        self._states = list(map(_STATE, self.executors))
        kernels.search(self._plan, self.tables.entries, self.keys, *self._new, self.bounds)

    def _find_again(self) -> None:
        """Find the keys again if rows may have got slots since the last search."""
        if self._states == list(map(_STATE, self.executors)):
            return
        self.take_words()  # a table alone may have outgrown the last family
        n, device = len(self.ids), self.family.device
        keys, counts = carved(device, layout((2 * n, kernels.blocks(n + 1))))
        self.keys = keys.view(torch.int64)
        self._new = counts, torch.zeros(len(self.executors), dtype=torch.int32, device=device)
        self._find()

    @property
    def _begins(self) -> TensorPart:
        """Begin of each table's positions, and the end of the last: int64 (k + 1,)."""
        k, placed = len(self.executors), self.placed
        return TensorPart(placed, 2 * (placed.shape[0] - 2 * k - 2), (k + 1,), torch.int64)

    def count_new(self) -> int:
        """Return the number of rows of one table without a slot. Waits for the device."""
        self._find_again()
        return int(self._new[0].sum())

    def has_room(self, which: tuple[int, int]) -> bool:
        if not (self.layout.is_quiet() and self.is_of_family()):
            return False
        executors: Any = self.executors[slice(*which)]
        most = max(self.sizes.positions[slice(*which)])
        if _spare(executors) >= most:
            return True
        for executor in executors:
            executor.index.poll()
        return _spare(executors) >= most

    # ------------------------------------------------------------ rows and steps

    def read(self) -> Tensor:
        executor: Any = self.layout.first
        if not executor.plans:
            return executor.read_by_host(self).index_select(0, self.inverse)
        self._find_again()
        return super().read()

    def read_rows(self) -> Tensor:
        executor: Any = self.layout.first
        if not executor.plans:
            return executor.read_by_host(self)
        self._find_again()
        return super().read_rows()

    def ready(self, which: tuple[int, int], values: Tensor, case: Any, clip: float | None) -> SteppedTables:
        executor: Any = self.layout.first
        if not executor.plans:
            return executor.ready_by_host(self, values, case, clip)
        self._find_again()
        return self.as_ready(functools.partial(self._enter, which, case))

    def _enter(self, which: tuple[int, int], case: Any) -> None:
        """Give slots to the new rows of consecutive tables, by the verdicts of their steps."""
        kernels.enter(self._plan, self.tables.entries, self.keys, *self._new, self.tickets, case)
        for table in range(*which):
            executor: Any = self.executors[table]
            executor.index.record_inserts(self.sizes.positions[table])

    # ------------------------------------------------------------ batches of one table

    def _take_keys(self, whole: DeviceBatch, table: int, place: Tensor, is_none: Tensor) -> None:
        assert whole.ids is not None
        self.ids = whole.ids[place]  # a later search finds the slots
        self.keys = torch.zeros_like(self.ids)

    @classmethod
    def of_ids(cls, executor: Any, ids: Tensor, stamp: int) -> Self:
        """Return the batch of ids (n,) of one table, without a cache."""
        own = cls.of_one(executor, None, len(ids), stamp)
        own.take_words()
        return own.make(ids)


def _spare(executors: Sequence[Any]) -> int:
    """Return the number of new rows that each table surely has room for."""
    return min(map(sub, map(_ROOM, executors), map(_MOST, executors)))


def _space(device: torch.device, n: int, k: int, is_cached: bool) -> Any:
    """Return keys, ids, order, inverse, count, counts, moves into a cache, and tables; last news; see `space_of`."""
    narrow = n, 1, kernels.blocks(n + 1), 6 * n if is_cached else 0, n if k > 1 else 0
    (*arrays, tables, starts, tickets, scan), *bounds = space_of(device, 3, n, k, narrow, tickets_of(n, k) + k)
    if k <= NARROW:
        tables = tables.view(torch.uint8)[:n]
    return [*arrays, tables, starts, tickets, scan, tickets[-2 * k - 1 : -k - 1]], *bounds
