"""Plans of batches of several tables on a GPU, as if they were one table: see `joint`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from embedrock.device.cache import load_rows, scratch_of, shares_of, times_of
from embedrock.device.device_planned import DevicePlannedExecutor
from embedrock.device.executor import NO_PADDING
from embedrock.device.features import TableFamily
from embedrock.device.plan import DeviceBatchPlan, PrefetchedPlan, SteppedTables, collect, sorted_plan, version_of
from embedrock.device.stream_order import InStreamOrder
from embedrock.kernels.gpu import joint as kernels
from embedrock.kernels.gpu import plan as plan_kernels
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.addresses import DeviceTables, TableEntryWords
from embedrock.kernels.gpu.binding import TensorPart, as_tensor
from embedrock.storage.table_lock import together


def working(executors: Sequence[DevicePlannedExecutor]) -> InStreamOrder:
    """Return a context that holds the locks of tables and orders device work after all of theirs."""
    return InStreamOrder(
        [executor.timeline for executor in executors], together([executor.rows.table_lock for executor in executors])
    )


@functools.lru_cache(maxsize=64)
def entries_of(
    known: tuple[tuple[TableEntryWords, int | None], ...], device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the entries of tables with their paddings, their first keys, and the end of the last table."""
    firsts, words = [1], []
    for table, padding in known:
        pads = padding is not None
        directory = *table.directory[:-1], int(pads)
        given = {"first": firsts[-1], "padding": padding if pads else NO_PADDING, "directory": directory}
        words.append(table._replace(**given).words)
        firsts.append(firsts[-1] + table.rows + 2)
    return torch.tensor(words, dtype=torch.int64, device=device), tuple(firsts)


class DeviceFeatureLayout(NamedTuple):
    """Features that several tables look up together, table by table.

    Attributes:
        executors: of the tables.
        tables: index of each feature's table, ascending.
        sizes: ids of each feature.
        paddings: the id of each table that gets no gradient, or None.
        bags: words about the bags of the features; empty: each feature is rows.
        recurs: the next batch may have the same words. Bags of different sizes hardly ever recur.
    """

    executors: tuple[DevicePlannedExecutor, ...]
    tables: tuple[int, ...]
    sizes: tuple[int, ...]
    paddings: tuple[int | None, ...]
    bags: tuple[int, ...] = ()
    recurs: bool = True

    @property
    def words(self) -> tuple[int, ...]:
        """The words about the features that kernels read."""
        return 0, *itertools.accumulate(self.sizes), *self.tables, *self.bags

    @property
    def positions(self) -> list[int]:
        """The number of positions of each table."""
        found = [0] * len(self.executors)
        for table, size in zip(self.tables, self.sizes, strict=True):
            found[table] += size
        return found

    def placed(self, words: tuple[int, ...], recurs: bool = True) -> Tensor:
        """Return words on the device, int64, cached if the next batch may have the same words."""
        return self.executors[0].placed(words, recurs and self.recurs)


class JointBatchPlan:
    """Plan of one batch of several tables, with rows and positions table by table.

    It joins the ids of all tables as if they were of one. `make` plans them. The caller holds `working` of all tables.

    Args:
        batch: layout of the lookup.
        given: ids of each feature, on the host or the device.
        trains: a step may follow.
        counts: for each table, whether hits and misses are counted.

    Attributes:
        batch: see above.
        executors: of the tables.
        kind: family of the tables.
        stamps: the number of the batch, for each table.
        tables: the tables for kernels.
        firsts: the key of each table's first row.
        cuts: begin of each table's positions, and the end of the last.
        programs: that sum the gradients.
        ids: of all features, concatenated, on the device: int64 or int32.
        placed: words about the features on the device; others may follow.
        plan: of all positions.
        bounds: int32 (2 * k + 1,), begin of each table's rows, the end of the last, and each table's padding row.
    """

    plan: DeviceBatchPlan
    bounds: Tensor

    def __init__(
        self, batch: DeviceFeatureLayout, given: Sequence[Tensor], trains: bool, counts: Sequence[bool]
    ) -> None:
        self.batch, self.executors, first = batch, batch.executors, batch.executors[0]
        positions, kind = batch.positions, first.joins
        times = [executor.begin_batch(n, trains) for executor, n in zip(batch.executors, positions, strict=True)]
        assert kind is not None  # it is the family of all
        self.kind: TableFamily = kind
        self.stamps = tuple([executor.clock.stamp for executor in batch.executors])
        is_cached = kind.kind.is_cached
        known = [
            executor.known if counted or not is_cached else executor.known.uncounted(executor.cache.not_counted)
            for executor, counted in zip(batch.executors, counts, strict=True)
        ]
        entries, self.firsts = entries_of(tuple(zip(known, batch.paddings, strict=True)), first.device)
        first.timeline.keep(entries)
        self.tables = DeviceTables(entries, kind.kind, kind.draw, kind.form)
        self.ids = _joined(given, first)
        self.cuts, self._search = (0, *itertools.accumulate(positions)), None
        of_sums = sums.layout_of(self.cuts, kind.form.dim)
        words, self.programs = (*batch.words, *of_sums), of_sums[-1]
        if not is_cached:
            self.placed = batch.placed(words)
            return
        shares = shares_of(batch.executors, positions)
        self.placed = batch.placed((*words, *shares.words, *times_of(times)), recurs=False)
        self._search = shares, self.placed[len(words) :], times[0]

    def make(self, is_ahead: bool = False) -> Self:
        """Plan the batch, and load its rows; `is_ahead`: the caller calls `write_bounds` when it looks them up."""
        self.bounds = torch.empty(2 * len(self.executors) + 1, dtype=torch.int32, device=self.ids.device)
        self._make(is_ahead)
        return self

    def _make(self, is_ahead: bool) -> None:
        ids, tables = self.ids, self.tables
        keys = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        kernels.join(ids, self.placed, len(self.batch.tables), tables, keys)
        k = len(self.executors)
        self.plan = sorted_plan(keys, self.stamps[0], self.tickets(k), k if tables.kind.is_cached else 0)
        search = None if self._search is None else scratch_of(self.plan, self._search, self.misses)
        found = None if is_ahead else (ids, self.bounds, self.stamps[0])
        collect(self.plan, self.firsts[-1] - 1, tables, search, found)
        if search is not None:
            assert self.plan.ordered is not None  # the device planned
            load_rows(tables, search, self.plan.ordered, len(ids))

    def write_bounds(self) -> None:
        """Write `bounds`, and record ids that are outside of their table."""
        plan = self.plan
        args = self.tables, plan.keys, plan.count, self.ids, plan.order, plan.starts, self.bounds, plan.stamp
        plan_kernels.bounds(*args)

    @property
    def known(self) -> tuple[DeviceTables, Tensor, Tensor | None]:
        """The tables for kernels, the current keys of their rows, and the ids; None: the keys determine these."""
        return self.tables, self.plan.keys, None

    def ready(self, which: tuple[int, int], values: Tensor, verdicts: Any) -> SteppedTables:
        """Return consecutive tables that have begun a step, for their verdicts.

        Args:
            which: the first of the tables, and the one after the last.
            values: gradients of the rows of all tables.
            verdicts: see `rows.step`.
        """
        tables, keys, ids = self.known
        return SteppedTables(tables, keys, ids, self.plan.count, self.bounds, values, which[0], self.plan.found)

    @property
    def layout(self) -> TensorPart:
        """The words of `sums.layout_of`: int64 (2 * (k + 1),)."""
        return TensorPart(self.placed, 2 * len(self.batch.words), (2 * len(self.executors) + 2,), torch.int64)

    # Zeroed counters, by which programs find the last one, or count. The counters of sums come before them.
    @staticmethod
    def tickets(k: int) -> int:
        """Return the number of counters for k tables, beside those for sums of one."""
        return 3 * k - 1

    @property
    def ends(self) -> TensorPart:
        """The end of each table's rows: int32 (k,)."""
        return TensorPart(self.bounds, 1, (len(self.executors),), torch.int32)

    @property
    def paddings(self) -> TensorPart:
        """The padding row of each table: int32 (k,)."""
        k = len(self.executors)
        return TensorPart(self.bounds, k + 1, (k,), torch.int32)

    @property
    def tickets_of_bags(self) -> Tensor | TensorPart:
        """Counters of `kernels.bags`: int32 (1 + k,)."""
        k = len(self.executors)
        return self.plan.tickets[-k - 1 :]

    @property
    def misses(self) -> TensorPart:
        """Number of rows to load of each table: int32 (k,)."""
        k, scan = len(self.executors), self.plan.scan
        assert scan is not None  # the device planned
        return TensorPart(scan, scan.shape[0] - k, (k,), torch.int32)

    def of(self, table: int) -> DeviceBatchPlan:
        """Return the plan of one table, equal to a plan of it alone."""
        whole, begin, stop = self.plan, self.cuts[table], self.cuts[table + 1]
        n = stop - begin
        lane = torch.arange(n + 1, device=self.bounds.device)
        place = lane + self.bounds[table]
        count = (self.bounds[table + 1] - self.bounds[table]).reshape(1)
        padded = self.bounds[len(self.executors) + 1 + table] - self.bounds[table]  # negative: none
        is_none = (lane[:n] >= count) | (lane[:n] == padded)
        keys, ids = self._named(table, place[:n].clamp(max=len(whole.ids) - 1), is_none)
        starts = as_tensor(whole.starts)[place.clamp(max=len(whole.ids))] - begin
        order, inverse = whole.order[begin:stop] - begin, whole.inverse[begin:stop] - self.bounds[table]
        tickets = torch.zeros(1 + sums.partial_rows(n), dtype=torch.int32, device=count.device)
        return DeviceBatchPlan((n,), keys, ids, starts, order, inverse, count, tickets, self.stamps[table], epoch=-1)

    def _named(self, table: int, place: Tensor, is_none: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and ids of a table's rows at given places; `is_none`: rows without a step."""
        keys = torch.where(is_none, self.executors[table].nobody, self.plan.keys[place] - self.firsts[table])
        return keys, keys


def _joined(given: Sequence[Tensor], executor: DevicePlannedExecutor) -> Tensor:
    parts = [ids if ids.dim() == 1 else ids.reshape(-1) for ids in given]
    if len({(part.device, part.dtype) for part in parts}) > 1:
        parts = [executor.on_device(part).to(torch.int64) for part in parts]
    return executor.on_device(torch.cat(parts))


# ---------------------------------------------------------------- prefetching


def plan_ahead(plan: JointBatchPlan) -> None:
    """Plan the next batch of all tables of a lookup that expect one, in parallel with the device's work.

    The plan also loads their rows. The caller holds `working` of all tables.
    """
    expected = [
        (executor, executor.take_expected(), padding)
        for executor, padding in zip(plan.executors, plan.batch.paddings, strict=True)
    ]
    known = [(executor, ids, padding) for executor, ids, padding in expected if ids is not None]
    if not known:
        return
    executors, given, paddings = (tuple(each) for each in zip(*known, strict=True))
    batch = DeviceFeatureLayout(executors, tuple(range(len(executors))), tuple(ids.numel() for ids in given), paddings)
    timeline = executors[0].timeline
    made = executors[0].batch_plan(batch, given, True, [True] * len(executors))
    try:
        with timeline.aside(made.ids, made.placed, made.tables.entries):
            made.make(is_ahead=True)
    finally:  # part of the work may be under way
        for executor in executors[1:]:
            executor.timeline.wait_for(timeline)
    for executor, ids, stamp in zip(executors, given, made.stamps, strict=True):
        executor.keep_ahead(PrefetchedPlan(ids, version_of(ids), stamp, joint=made))


def taken_ahead(
    batch: DeviceFeatureLayout, given: Sequence[Tensor], aheads: Sequence[PrefetchedPlan | None]
) -> JointBatchPlan | None:
    """Return the prefetched plan of a batch; None if there is none.

    Args:
        batch: layout of the lookup, which trains.
        given: ids of each feature.
        aheads: prefetched plan of each table.
    """
    plan: JointBatchPlan | None = None if aheads[0] is None else aheads[0].joint
    if plan is None or plan.executors != batch.executors or len(given) != len(aheads):
        return None
    is_whole = all(ahead is not None and ahead.joint is plan for ahead in aheads)
    if not is_whole or plan.batch.paddings != batch.paddings:
        return None
    if not all(ahead is not None and ahead.is_of(ids) for ahead, ids in zip(aheads, given, strict=True)):
        return None
    batch.executors[0].timeline.uses(*plan.plan.allocations, plan.ids, plan.bounds)
    return plan
