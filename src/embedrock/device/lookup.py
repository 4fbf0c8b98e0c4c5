"""`DeviceLookup`: a lookup of one feature or several on a GPU, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embedrock.device.batch import DeviceBatch
from embedrock.device.features import FeatureBags, FeatureLayout, are_rows, bag_words
from embedrock.device.gradients import RowSums, sum_rows
from embedrock.device.pooling import DeviceBags
from embedrock.device.prefetched import plan_ahead, taken_ahead
from embedrock.system.spans import spanned

Block = tuple[RowSums, list[Any]]  # sums, and the executor of each table; None: nothing came for the table


class DeviceLookup:
    """Lookup of features of one table family, and the sums of the gradients that come back.

    Args:
        layout: of the features.
        ids: of each feature, of any shape, on the host or the device.
        all_bags: of each feature, rows or bags, all of mode "max" or none; None: the lookup returns rows.
        trains: a step may follow.
        by_frequency: divide a row's gradient by the number of times its id occurs. Of one feature.

    Attributes:
        trace: of the pooling, see `DeviceBags.pool`.
        rows: unique rows of bags, if `read` kept them.
    """

    trace: Any = None
    rows: Any = None
    _words: tuple[int, ...] = ()  # about the bags, once the device has planned them

    def __init__(
        self,
        layout: FeatureLayout,
        ids: Sequence[Tensor],
        all_bags: Sequence[FeatureBags | None] | None = None,
        trains: bool = False,
        by_frequency: bool = False,
    ) -> None:
        self._layout, self._trains, self._by_frequency, self._ids = layout, trains, by_frequency, ids
        self._is_pooled = all_bags is not None
        order = layout.order
        self._given = [ids[k] for k in order] if len(order) > 1 else ids
        self._all_bags: list[Any] | None = None if all_bags is None else [all_bags[k] for k in order]
        self._outputs = self._sizes = list(map(Tensor.numel, self._given))  # output lines of each feature
        self._bags: DeviceBags | None = None
        self._batch: DeviceBatch | None = None
        self._alone: list[DeviceLookup] | None = None

    # ------------------------------------------------------------ plans

    def plan(self) -> DeviceBatch | None:
        """Plan the batch, once, and return it; None if the features are looked up one by one."""
        if self._batch is None and self._alone is None:
            layout = self._layout
            if layout.first.plans:
                with layout.working:
                    self._batch = self._planned()
            if self._batch is None and len(self._given) == 1:
                self._batch = batch = layout.first.planned_by_host(layout, self._given[0], self._trains)
                if self._all_bags is not None:
                    with layout.working:
                        self._pool(batch)
                        layout.first.faults.ask_again()
            if self._batch is None:
                self._alone = self._features()
        return self._batch

    @spanned("plan")
    def _planned(self) -> DeviceBatch | None:
        """Plan on the device. Return None if the host has to, or if the tables are of one family no longer."""
        layout, trains = self._layout, self._trains
        aheads = layout.begin()
        if not layout.first.plans or (len(layout.executors) > 1 and not layout.are_joined()):
            return None
        batch = None
        if aheads is not None and trains:
            batch = taken_ahead(layout, self._given, aheads)
        if batch is None:
            counts = None if aheads is None else [ahead is None for ahead in aheads]
            if self._all_bags is not None:
                self._words = bag_words(self._all_bags, self._sizes)
            sizes = layout.sizes(tuple(self._sizes), self._words)
            batch = layout.first.batch(layout, sizes, trains, counts).make(layout.joined(self._given))
        else:
            batch.look_up()
        if self._all_bags is not None:
            self._pool(batch)
        layout.end(trains)
        return batch

    def _pool(self, batch: DeviceBatch) -> None:
        """Find the bags of the positions, unless each bag is the row of its id."""
        assert self._all_bags is not None
        layout = self._layout
        if are_rows(self._all_bags, [layout.paddings[table] for table in layout.tables]):
            self._all_bags = None
            return
        words = self._words or bag_words(self._all_bags, self._sizes)
        self._bags = DeviceBags(self._all_bags, self._sizes, batch, layout.sizes(tuple(self._sizes), words).placed)
        self._outputs = self._bags.counts

    def _features(self) -> list[DeviceLookup]:
        return [self._feature(k) for k in range(len(self._ids))]

    def _feature(self, number: int) -> DeviceLookup:
        """Return the lookup of one of the features by itself."""
        layout = self._layout
        place = layout.order.index(number)
        table = layout.tables[place]
        own = FeatureLayout([layout.executors[table]], [layout.paddings[table]])
        bags = None if self._all_bags is None else [self._all_bags[place]]
        return DeviceLookup(own, [self._ids[number]], bags, self._trains, self._by_frequency)

    # ------------------------------------------------------------ reads

    def read(self, keeps_rows: bool = False) -> list[Tensor]:
        """Return each feature's rows, float32 ``ids.shape + (dim,)``, or its bags, (bags, dim).

        `keeps_rows`: keep the rows for `weight_grads`.
        """
        layout, out = self._layout, None
        if layout.first.plans and self._alone is None:
            with layout.working:
                if self._batch is None:
                    self._batch = self._planned()
                if self._batch is not None and layout.first.plans:
                    out = self._read(self._batch, keeps_rows)
        if out is None and (batch := self.plan()) is not None and not layout.first.plans:
            out = self._read(batch, keeps_rows)
        if out is not None:
            return self._shaped(out)
        if self._alone is None:
            self._batch, self._alone = None, self._features()
        return [one.read(keeps_rows)[0] for one in self._alone]

    def _read(self, batch: DeviceBatch, keeps_rows: bool) -> Tensor | None:
        """Return the lines of all features; None if the tables are of one family no longer."""
        layout = self._layout
        if batch.family.is_open and not layout.are_joined():
            return None
        if self._bags is None:
            out = batch.read()
        else:
            rows = batch.read_rows()
            with layout.working:
                out, self.trace = self._bags.pool(rows)
            self.rows = rows if keeps_rows else None
        if layout.expects():
            with layout.working:
                plan_ahead(layout)
        return out

    def _shaped(self, out: Tensor) -> list[Tensor]:
        """Return the lines of each feature, in the shape of its output."""
        order, parts = self._layout.order, [out]
        if len(order) > 1:
            found = dict(zip(order, torch.split_with_sizes(out, self._outputs), strict=True))
            parts = list(map(found.__getitem__, range(len(order))))
        for number, ids in enumerate(() if self._is_pooled else self._ids):
            if ids.dim() != 1:
                parts[number] = parts[number].view(*ids.shape, out.shape[1])
        return parts

    # ------------------------------------------------------------ gradients

    @spanned("sum")
    def sums(self, grads: Sequence[Tensor | None]) -> list[Block]:
        """Return the sums of the features' gradients, of any float dtype, with the executor of each table.

        Rows of a feature without a gradient stay untouched.
        """
        batch, layout = self._batch or self.plan(), self._layout
        if batch is None:
            return self._summed_alone(grads)
        came: list[Any] = [None] * len(layout.executors)
        missing = set[Any]()
        for feature, table in zip(layout.order, layout.tables, strict=True):
            executor = layout.executors[table]
            if grads[feature] is None:
                missing.add(executor)
            else:
                came[table] = executor
        if missing and not missing.isdisjoint(came):
            return self._summed_alone(grads)
        if len(missing) == len(came):
            return []
        with layout.working:
            of_bags: tuple[Any, ...] = () if self._bags is None else self._bags.shares(self.trace)
            summed = sum_rows(self._joined_grads(grads), batch, *of_bags)
            summed = summed.by_frequency() if self._by_frequency else summed
            return [(summed.without(batch.frozen) if len(batch.frozen) else summed, came)]

    def _joined_grads(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of all outputs: (lines, dim)."""
        form, order = self._layout.first.form, self._layout.order
        if len(order) == 1 and (only := grads[0]) is not None:
            return only if only.dim() == 2 else only.reshape(-1, form.dim)
        given = [grads[k] for k in order]
        dtypes = {part.dtype for part in given if part is not None}
        dtype, device = dtypes.pop() if len(dtypes) == 1 else torch.float32, self._layout.first.device
        return torch.cat([
            torch.zeros(size, form.dim, dtype=dtype, device=device) if part is None
            else part if part.dim() == 2 and part.dtype is dtype
            else part.reshape(size, form.dim).to(dtype)
            for part, size in zip(given, self._outputs, strict=True)
        ])  # fmt: skip

    def _summed_alone(self, grads: Sequence[Tensor | None]) -> list[Block]:
        """Sum feature by feature."""
        return [block for k, own in enumerate(grads) if own is not None for block in self._sum_alone(k, own)]

    def _sum_alone(self, number: int, grads: Tensor) -> list[Block]:
        if self._alone is not None:
            return self._alone[number].sums([grads])
        one = self._feature(number)
        if self._bags is not None:
            one.trace = self._bags.trace_of(self._layout.order.index(number), self.trace)
        return one.sums([grads])

    def weight_grads(self, grads: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return the gradients of the positions' weights, float32 (n,), for each weighted feature."""
        self.plan()
        if self._alone is not None:
            parts = enumerate(zip(self._alone, grads, strict=True))
            return {k: own for k, (one, given) in parts for own in one.weight_grads([given]).values()}
        order, device = self._layout.order, self._layout.first.device
        if self._bags is None or all(own is None for own in grads):
            found = {k: torch.zeros(n, device=device) for k, n in zip(order, self._sizes, strict=True)}
        else:
            with self._layout.working:
                whole = self._bags.weight_grads(self._joined_grads(grads).contiguous(), self.rows)
            found = dict(zip(order, torch.split_with_sizes(whole, self._sizes), strict=True))
        bags = self._all_bags or [None] * len(order)
        return {k: found[k] for k, own in zip(order, bags, strict=True) if own is not None and own.weights is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of the large arrays."""
        batch = self.plan()
        return 0 if batch is None else batch.nbytes
