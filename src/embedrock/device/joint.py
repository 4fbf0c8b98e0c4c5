"""Lookups and steps of several tables on a GPU in joint kernels, as if they were one table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embedrock.device.device_planned import DevicePlannedExecutor
from embedrock.device.features import DeviceFeature, FeatureBags, bag_words
from embedrock.device.gradients import DeviceRowGradients, room_for_sums, sum_rows
from embedrock.device.joint_plan import (
    DeviceFeatureLayout,
    JointBatchPlan,
    plan_ahead,
    taken_ahead,
    working,
)
from embedrock.device.plan import DeviceBatchPlan, FoundWeights
from embedrock.device.pooling import DeviceBags, PlannedTables
from embedrock.kernels.gpu import rows, sums
from embedrock.system.spans import spanned


class DeviceLookup:
    """Lookup of features of one table family, and the sums of the gradients that come back.

    Args:
        features: rows, or bags, from one list of `TableFamily.shares`. Bags of one id each count as rows if there are
            no others.
        trains: a step may follow.
    """

    def __init__(self, features: Sequence[DeviceFeature], trains: bool) -> None:
        self._features, self._trains = features, trains
        executors = tuple(dict.fromkeys([feature.executor for feature in features]))
        self._table_of = [executors.index(feature.executor) for feature in features]
        # Sorted by table, so that the positions of each table are adjacent.
        self._order = sorted(range(len(features)), key=self._table_of.__getitem__)
        self._sizes = [features[k].ids.numel() for k in self._order]
        self._outputs = self._sizes  # output lines of each feature
        self._bags: DeviceBags | None = None
        self._trace: Any = None  # of the pooling
        self._kept: Any = None  # rows that were pooled
        self._working, self._kind = working(executors), features[0].executor.joins
        self._plan = self._planned(executors)
        self._alone = self._each_alone() if self._plan is None else None

    @property
    def plan(self) -> JointBatchPlan:
        """The plan of all features."""
        assert self._plan is not None  # the tables are of one family
        return self._plan

    def _are_of_one_kind(self, executors: Sequence[DevicePlannedExecutor]) -> bool:
        """Return whether all tables are of the lookup's family. Open ids may outgrow theirs."""
        return self._kind is not None and {executor.joins for executor in executors} == {self._kind}

    def _each_alone(self) -> list[SingleLookup]:
        as_rows = self._all_bags() is None
        return [SingleLookup(feature, as_rows, self._trains) for feature in self._features]

    @spanned("plan")
    def _planned(self, executors: tuple[DevicePlannedExecutor, ...]) -> JointBatchPlan | None:
        paddings: list[int | None] = [None] * len(executors)
        for feature, table in zip(self._features, self._table_of, strict=True):
            paddings[table] = feature.padding
        self._are_alike = len({(feature.executor, feature.padding) for feature in self._features}) == len(executors)
        all_bags, tables = self._all_bags(), tuple([self._table_of[k] for k in self._order])
        bags = () if all_bags is None else bag_words(all_bags, self._sizes)
        recurs = all_bags is None or all(each.starts is None for each in all_bags)
        batch = DeviceFeatureLayout(executors, tables, tuple(self._sizes), tuple(paddings), bags, recurs)
        given = [self._features[k].ids for k in self._order]
        with self._working:
            aheads = [executor.take_ahead() for executor in executors]
            if not self._are_of_one_kind(executors):
                return None
            plan = taken_ahead(batch, given, aheads) if self._trains else None
            placed = None if plan is None or not bags else batch.placed(batch.words)
            if plan is None:
                counts = [ahead is None for ahead in aheads]
                plan = executors[0].batch_plan(batch, given, self._trains, counts).make()
                placed = plan.placed
            else:
                plan.write_bounds()
            if all_bags is not None and placed is not None:
                of = PlannedTables(executors[0], plan.plan, plan.tables, plan.paddings, plan.tickets_of_bags)
                self._bags = DeviceBags(all_bags, self._sizes, of, placed)
                self._outputs = self._bags.counts
            for executor in executors:
                executor.end_batch(self._trains)
        return plan

    def _all_bags(self) -> list[FeatureBags] | None:
        """Return the bags of the features, in order; None if each bag is the row of its id."""
        features = [self._features[k] for k in self._order]
        all_bags = [feature.bags for feature in features if feature.bags is not None]
        return all_bags if all_bags and not all(feature.is_row for feature in features) else None

    def read(self, keeps_rows: bool = False) -> list[Tensor]:
        """Return each feature's rows, float32 ``ids.shape + (dim,)``, or its bags, (bags, dim).

        `keeps_rows`: keep the rows for `weight_grads`.
        """
        found = self._read_together(keeps_rows) if self._alone is None else None
        if found is not None:
            return found
        if self._alone is None:
            self._alone = self._each_alone()
        return [one.read() for one in self._alone]

    def _read_together(self, keeps_rows: bool) -> list[Tensor] | None:
        """Return the same as `read` by joint kernels; None if the tables have changed families."""
        plan, dim = self.plan, self.plan.tables.form.dim
        with self._working:
            if plan.kind.is_open and not self._are_of_one_kind(plan.executors):
                return None
            for executor in plan.executors:
                executor.timeline.wait_for_copies()
            if self._bags is not None:
                unique = self._rows()
                out, self._trace = self._bags.pool(unique)
                self._kept = unique if keeps_rows else None
            elif plan.tables.kind.is_identity and plan.plan.positions is not None:
                # One kernel reads device rows into their final places.
                out = torch.empty(len(plan.plan.positions), dim, dtype=torch.float32, device=plan.bounds.device)
                rows.read(plan.plan.positions, len(out), plan.tables, out)
            else:
                out = self._rows().index_select(0, plan.plan.inverse)
            for executor in plan.executors:
                executor.rows.table_lock.use(executor)
            plan_ahead(plan)
        found = dict(zip(self._order, torch.split_with_sizes(out, self._outputs), strict=True))
        return [
            found[k] if feature.ids.dim() == 1 or feature.bags is not None else found[k].view(*feature.ids.shape, dim)
            for k, feature in enumerate(self._features)
        ]

    def _rows(self) -> Tensor:
        plan = self.plan
        tables, keys, ids = plan.known
        out = torch.empty(len(keys), tables.form.dim, dtype=torch.float32, device=keys.device)
        rows.read(keys, plan.plan.count, tables, out, ids)
        if all(executor.keeps_weights for executor in plan.executors):
            plan.plan.found = FoundWeights(out, tuple(executor.rows.version.of_rows for executor in plan.executors))
        return out

    @spanned("sum")
    def sum(self, grads: Sequence[Tensor | None]) -> dict[DevicePlannedExecutor, DeviceRowGradients]:
        """Return the gradients of each table, from the gradients of the features, of any float dtype.

        Tables without any gradient are left out.
        """
        if self._alone is not None or not self._are_alike:
            return self._summed_alone(grads)
        plan = self.plan
        came, missing = set[int](), set[int]()  # tables with and without a gradient
        for table, given in zip(self._table_of, grads, strict=True):
            (missing if given is None else came).add(table)
        if came & missing:
            return self._summed_alone(grads)
        with self._working:
            joined = self._joined_grads(grads)
            k = len(plan.executors)
            values, numbers, scratch = room_for_sums(plan.plan, joined.shape[1], k)
            what, share = sums.PLAIN, None
            if self._bags is not None:
                what, share = self._bags.shares(self._trace)
            *arrays, _ = plan.plan.arrays
            given = (*arrays, plan.ends), plan.paddings, scratch, values, numbers, plan.layout, plan.programs
            sums.sum_shares(what, joined, share, *given)
        numbers = numbers.unbind()
        found = {}
        for t, executor in enumerate(plan.executors):
            if t in came:
                shown = numbers[t]
                found[executor] = DeviceRowGradients(
                    TableRowSums(plan, values, t), shown, shown, (numbers[k + t], numbers[2 * k + t])
                )
        return found

    def _joined_grads(self, grads: Sequence[Tensor | None]) -> Tensor:
        dim = self.plan.tables.form.dim
        given = [grads[k] for k in self._order]
        dtypes = {part.dtype for part in given if part is not None}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        device = self.plan.bounds.device
        return torch.cat([
            torch.zeros(size, dim, dtype=dtype, device=device) if part is None
            else part if part.dim() == 2 and part.dtype is dtype
            else part.reshape(size, dim).to(dtype)
            for part, size in zip(given, self._outputs, strict=True)
        ])  # fmt: skip

    def weight_grads(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return the gradients of the positions' weights, float32 (n,), for each weighted feature."""
        if self._alone is not None:
            parts = enumerate(zip(self._alone, grads, strict=True))
            return {k: one.weight_grads(given) for k, (one, given) in parts if one.weights is not None}
        assert self._bags is not None  # the bags have weights
        with self._working:
            whole = self._bags.weight_grads(self._joined_grads(grads), self._kept)
        found = dict(zip(self._order, torch.split_with_sizes(whole, self._sizes), strict=True))
        return {k: found[k] for k, f in enumerate(self._features) if f.bags is not None and f.bags.weights is not None}

    def _summed_alone(self, grads: Sequence[Tensor | None]) -> dict[DevicePlannedExecutor, DeviceRowGradients]:
        """Sum feature by feature. The rows of a feature without a gradient stay untouched."""
        found: dict[DevicePlannedExecutor, DeviceRowGradients] = {}
        for number, given in enumerate(grads):
            if given is not None:
                executor, more = self._features[number].executor, self._sum_alone(number, given)
                found[executor] = executor.merge(found[executor], more) if executor in found else more
        return found

    def _sum_alone(self, number: int, grads: Tensor) -> DeviceRowGradients:
        if self._alone is not None:
            return self._alone[number].sum(grads)
        alone = SingleLookup(self._features[number], self._bags is None, self._trains)
        if self._bags is not None:
            alone.trace = self._bags.trace_of(self._order.index(number), self._trace)
        return alone.sum(grads)


class SingleLookup:
    """Lookup of one feature by itself.

    Args:
        feature: rows, or bags.
        as_rows: bags are the rows of their ids.
        trains: a step may follow.
        by_frequency: divide a row's gradient by the number of times its id occurs.

    Attributes:
        rows: unique rows of bags, after `read`.
        trace: of the pooling, see `DeviceBags.pool`.
        weights: of the positions; None for ones.
    """

    trace: Any = None
    rows: Any = None

    def __init__(self, feature: DeviceFeature, as_rows: bool, trains: bool, by_frequency: bool = False) -> None:
        self._by_frequency = by_frequency
        self._feature, (executor, ids, padding, bags) = feature, feature
        self._plan = executor.plan(ids, trains)
        self.weights = None if bags is None else bags.weights
        self._bags: DeviceBags | None = None if bags is None or as_rows else executor.bags(self._plan, bags, padding)

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes

    def read(self) -> Tensor:
        """Return the row of each position, float32 ``ids.shape + (dim,)``, or the bags, (bags, dim)."""
        executor = self._feature.executor
        if self._bags is None:
            return executor.read(self._plan)
        self.rows = executor.read_rows(self._plan)
        with executor.working:
            out, self.trace = self._bags.pool(self.rows)
        return out

    def sum(self, grads: Tensor) -> DeviceRowGradients:
        """Return the gradients of the rows from the gradients of the output, of any float dtype."""
        executor, padding = self._feature.executor, self._feature.padding
        if self._bags is None:
            return executor.sum(self._plan, grads, padding, self._by_frequency)
        return self._sum_bags(self._bags, grads)

    @spanned("sum")
    def _sum_bags(self, bags: DeviceBags, grads: Tensor) -> DeviceRowGradients:
        with self._feature.executor.working:
            summed = sum_rows(grads.contiguous(), bags.of.plan, bags.of.paddings, *bags.shares(self.trace))
            return summed.by_frequency() if self._by_frequency else summed

    def weight_grads(self, grads: Tensor | None) -> Tensor:
        """Return the gradients of the positions' weights, float32 (n,), after `read`."""
        executor, ids, _, _ = self._feature
        if grads is None or self._bags is None:
            return torch.zeros(ids.numel(), dtype=torch.float32, device=executor.device)
        with executor.working:
            return self._bags.weight_grads(grads.contiguous(), self.rows)


class TableRowSums:
    """Gradients of one of several tables, as `RowSums`, with a plan and values made at first use.

    Args:
        joint: plan of all tables.
        joint_values: gradients of all tables, summed to one for each row: float32 (n, dim).
        table: index of the table.
    """

    def __init__(self, joint: JointBatchPlan, joint_values: Tensor, table: int) -> None:
        self.joint, self.joint_values, self.table = joint, joint_values, table

    @property
    def most_rows(self) -> int:
        """Upper bound of the number of the table's rows with gradients."""
        return self.joint.cuts[self.table + 1] - self.joint.cuts[self.table]

    def follows(self, other: TableRowSums) -> bool:
        """Return whether it is of the next table of the same joint sum."""
        return self.joint_values is other.joint_values and self.table == other.table + 1

    @functools.cached_property
    def plan(self) -> DeviceBatchPlan:
        """The plan of the table's rows."""
        with self.joint.executors[self.table].working:
            return self.joint.of(self.table)

    @functools.cached_property
    def values(self) -> Tensor:
        """The gradients of the table's rows: float32 (n, dim)."""
        plan, joint, executor = self.plan, self.joint, self.joint.executors[self.table]
        with executor.working:
            rows = torch.arange(len(plan.keys), device=plan.keys.device) + joint.bounds[self.table]
            values = self.joint_values[rows.clamp(max=len(self.joint_values) - 1)]
            return torch.where((plan.keys == executor.nobody)[:, None], 0.0, values)
