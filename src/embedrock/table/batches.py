"""Batches of several tables of a group: tables of the same record layout are planned, read and summed at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch import pooling, wrong_ids
from embedrock.batch.gradients import JointGradients, PartGradients, RowGradients, rejoined, sum_segments
from embedrock.batch.ids import are_ids, check_ids, check_range
from embedrock.batch.plan import JointPlan, bounds_of, joined_ids, make_joint_plan
from embedrock.batch.pooling import Bags, PooledSource, RowSources
from embedrock.errors import CacheTooSmallError, check_choice
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import RecordRange
from embedrock.storage.records import Records
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.table.reading import unrecorded
from embedrock.table.rows import TableState, part_of
from embedrock.table.stepping import keys_of
from embedrock.table.table import Table, rows_of

MODES = ("sum", "mean", "max")
MOST_ROUTES = 64  # of batches with different features


class BatchFeature(NamedTuple):
    """One feature of a batch: ids of a table, alone or in bags.

    Attributes:
        table: a member of the group.
        ids: integers of any shape; of bags (n,), or (bags, n) if all bags have the same size, or (bags,) if that is 1.
        offsets: int64 (bags + 1,), from 0 to n: the bounds of the bags of ids (n,).
        weights: float32, one per id: factors of the rows in sums of bags.
        mode: of bags: "sum", "mean" or "max"; None: no bags.
        padding: an id that counts in no bag, and whose row gets no gradient.
    """

    table: Table
    ids: Any
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    mode: str | None = None
    padding: int | None = None

    @property
    def kind(self) -> str:
        """Way to read it: "rows", or bags by "sum" (used for means too) or "max"."""
        return _KINDS[self.mode]


_KINDS = {None: "rows", "sum": "sum", "mean": "sum", "max": "max"}


@dataclass(eq=False)
class PoolLayout:
    """The part of a batch's layout that depends only on its features, for tables of one pool. Cached between batches.

    Attributes:
        pool: of the tables.
        kind: see `BatchFeature.kind`.
        tables: each once, in the order of their positions in plans.
        rows: states of the tables.
        parts: key ranges of their records.
        paddings: of each table, the id whose row gets no gradient; None for none, and for bags, which leave it out.
        numbers: of the features, in the order of their positions.
        own: int64 (tables + 1,), bounds of each table's features in `numbers`.
        modes: consecutive features of the same mode: the mode, and the bounds of the features.
        skips: some bags have a padding id.
        bases: int64 (tables,), the pool's keys of their ids 0.
    """

    pool: Backend
    kind: str
    tables: list[Table]
    rows: list[TableState]
    parts: list[RecordRange]
    paddings: list[int | None]
    numbers: list[int]
    own: np.ndarray
    modes: list[tuple[str | None, int, int]]
    skips: bool
    bases: np.ndarray
    _layout: FeatureLayout | None = None
    _limits: tuple[list[int | None], np.ndarray, np.ndarray] | None = None

    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and the highest id of each table: int64 (tables,)."""
        rows = [rows.spec.rows for rows in self.rows]
        if self._limits is None or self._limits[0] != rows:
            bounds = [wrong_ids.bounds(each) for each in rows]
            self._limits = rows, np.array([low for low, _ in bounds]), np.array([end - 1 for _, end in bounds])
        return self._limits[1:]

    @property
    def is_current(self) -> bool:
        """Return whether the tables' records are still in the planned key ranges."""
        return [rows.tier for rows in self.rows] == self.parts

    @property
    def lags(self) -> bool:
        return any(rows.lags for rows in self.rows)

    def layout(self, features: Sequence[BatchFeature]) -> FeatureLayout:
        """Return the layout of its features' ids, cached for batches of the same shapes."""
        shapes = [feature.ids.shape for feature in features]
        is_even = all(feature.offsets is None for feature in features)
        known = self._layout
        if known is not None and is_even and known.shapes == shapes:
            return known
        positions, bags, offsets = bounds_of([math.prod(shape) for shape in shapes]), _NONE, _NONE
        if self.kind != "rows":
            begins = [_begins(f.ids) if f.offsets is None else f.offsets[:-1] for f in features]
            bags = bounds_of([len(each) for each in begins])
            offsets = np.concatenate([*map(np.add, begins, positions.tolist()), positions[-1:]])
        own = shapes if is_even else [], self.numbers, positions, positions[self.own], bags, offsets
        self._layout = made = FeatureLayout(*own)
        return made


PoolLayouts = dict[tuple[Any, ...], list[PoolLayout]]  # of a group's batches, cached by their features


class Lines(NamedTuple):
    """Outputs of features as parts of one array.

    Attributes:
        counts: lines of each feature's output.
        shape: of the array, except for `dim`.
    """

    counts: list[int]
    shape: tuple[int, ...]


@dataclass(eq=False)
class FeatureLayout:
    """Positions of the ids of a pool's features.

    Attributes:
        shapes: of the ids, if they determine the layout; else empty.
        numbers: of the features.
        positions: int64 (features + 1,), bounds of each feature's positions.
        tables: int64 (tables + 1,), bounds of each table's positions.
        bags: int64 (features + 1,), bounds of each feature's bags; empty without bags.
        offsets: int64 (bags + 1,), bounds of each bag's positions.
    """

    shapes: list[tuple[int, ...]]
    numbers: list[int]
    positions: np.ndarray
    tables: np.ndarray
    bags: np.ndarray
    offsets: np.ndarray

    @forks.cached_property
    def lines(self) -> Lines | None:
        """The lines of the outputs, feature after feature; None if rows of ids have several forms."""
        if len(self.bags):
            counts = np.diff(self.bags).tolist()
            return Lines(counts, (sum(counts),))
        rests = {shape[1:] if shape else None for shape in self.shapes}
        rest = rests.pop()
        if rests or rest is None:
            return None
        counts = [shape[0] for shape in self.shapes]
        return Lines(counts, (sum(counts), *rest))

    @forks.cached_property
    def in_order(self) -> RowSources:
        """The places of bags, feature after feature."""
        return RowSources(np.arange(len(self.offsets) - 1, dtype=np.int32), self.offsets)

    @forks.cached_property
    def side_by_side(self) -> RowSources:
        """The places of bags, sample after sample. All features have the same number of bags."""
        columns, count = np.argsort(self.numbers).argsort(), len(self.offsets) - 1
        samples = np.arange(count // len(columns)) * len(columns)
        return RowSources((samples + columns[:, None]).astype(np.int32).ravel(), self.offsets)


@dataclass(eq=False)
class PoolPlan:
    """The plan of a batch for tables of one pool, and features of one kind.

    Attributes:
        route: the pool's layout.
        layout: positions of the features.
        plan: of all their ids.
        slots: int64 (unique,), of the rows, as of `epoch`; -1 for none.
        weights: float32 (n,) of the positions; None for ones.
        kept: of bags with padding, the positions of a feature that are in the plan, bool; None: all.
    """

    route: PoolLayout
    layout: FeatureLayout
    plan: JointPlan
    slots: np.ndarray
    epoch: int
    weights: np.ndarray | None
    kept: list[np.ndarray | None]

    def keys(self) -> np.ndarray:
        """Return the pool's keys of the rows."""
        rows = self.plan.rows
        return self.plan.ids + self.route.bases.repeat(rows[1:] - rows[:-1])

    def spans(self, bounds: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the number and the bounds of each feature."""
        cuts = bounds.tolist()
        return list(zip(self.route.numbers, cuts[:-1], cuts[1:], strict=True))


@dataclass(eq=False)
class GroupPlan:
    """The plan of one batch of several tables of a group.

    Attributes:
        features: of the batch.
        shares: one plan for each pool and kind.
        routes: layouts of the group.
    """

    features: Sequence[BatchFeature]
    shares: list[PoolPlan]
    routes: PoolLayouts

    @property
    def tables(self) -> list[Table]:
        return list(dict.fromkeys(feature.table for feature in self.features))


@dataclass(eq=False)
class PoolLookup:
    """The rows and bags that were read for a batch.

    Attributes:
        batch: its plan.
        arrays: output of each pool plan, float32 (positions, dim) or (bags, dim).
        places: of each pool plan's bags there; None without bags.
        traces: input of `pooling.unpool`, for each pool plan.
        values: rows of each pool plan, float32 (unique, dim), if weights get gradients.
        side_by_side: the only array has the bags of a sample one after the other.
    """

    batch: GroupPlan
    arrays: list[np.ndarray] = field(default_factory=list)
    places: list[RowSources | None] = field(default_factory=list)
    traces: list[np.ndarray | None] = field(default_factory=list)
    values: list[np.ndarray | None] = field(default_factory=list)
    side_by_side: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for share in self.batch.shares for part in (*share.plan, share.slots))

    def parts(self) -> Iterator[tuple[Sequence[int], np.ndarray, list[int]]]:
        """Iterate over arrays of outputs: the numbers of their features, the array, and the lines of each output."""
        for share, array in zip(self.batch.shares, self.arrays, strict=True):
            lines = share.layout.lines
            if lines is not None:
                yield share.route.numbers, array.reshape(*lines.shape, array.shape[-1]), lines.counts
                continue
            for number, start, stop in share.spans(share.layout.positions):
                shape = *self.batch.features[number].ids.shape, share.route.pool.spec.dim
                yield (number,), array[start:stop].reshape(shape), [shape[0]]

    @property
    def outputs(self) -> list[np.ndarray]:
        """Output of each feature, float32 ``ids.shape + (dim,)`` or (bags, dim): views of `arrays`."""
        found = dict[int, np.ndarray]()
        for share, array, places in zip(self.batch.shares, self.arrays, self.places, strict=True):
            if places is None:
                for number, start, stop in share.spans(share.layout.positions):
                    found[number] = array[start:stop].reshape(
                        *self.batch.features[number].ids.shape, share.route.pool.spec.dim
                    )
                continue
            for number, start, stop in share.spans(share.layout.bags):
                first, step = (places.of_bags[start], len(share.route.numbers)) if self.side_by_side else (start, 1)
                found[number] = array[first : None if self.side_by_side else stop : step]
        return [found[number] for number in range(len(found))]


# -------------------------------------------------------------------- plans


def plan(features: Sequence[BatchFeature], routes: PoolLayouts) -> GroupPlan:
    """Plan a batch. Caller holds the group's table lock; a step may be running.

    Raises:
        IdError, IdTypeError: as for `Table.lookup`.
    """
    given = [_given(feature) for feature in features]
    key = tuple([(feature.table, feature.mode, feature.padding) for feature in given])
    found = routes.get(key)
    if found is None or not all(route.is_current for route in found):
        if len(routes) >= MOST_ROUTES:
            routes.clear()
        found = routes[key] = _routes(given)
    return GroupPlan(given, [_share(route, given) for route in found], routes)


def _given(feature: BatchFeature) -> BatchFeature:
    """Return a feature with ids as an array of int64, whose range is not checked yet."""
    if feature.mode not in _KINDS:
        check_choice("mode", feature.mode, MODES)
    if are_ids(feature.ids):
        return feature
    return feature._replace(ids=_checked(feature))


def _routes(features: Sequence[BatchFeature]) -> list[PoolLayout]:
    kinds: dict[tuple[Backend, str, int], dict[Table, list[int]]] = {}
    paddings: dict[Table, list[int | None]] = {}
    for number, feature in enumerate(features):
        pool, known = part_of(rows_of(feature.table)).pool, paddings.setdefault(feature.table, [])
        if feature.kind == "rows" and feature.padding not in known:
            known.append(feature.padding)
        # The padding row of one feature may get gradients from another feature of the same table.
        level = known.index(feature.padding) if feature.kind == "rows" else 0
        kinds.setdefault((pool, feature.kind, level), {}).setdefault(feature.table, []).append(number)
    return [_route(pool, kind, features, asked) for (pool, kind, _), asked in kinds.items()]


def _route(pool: Backend, kind: str, features: Sequence[BatchFeature], asked: dict[Table, list[int]]) -> PoolLayout:
    numbers = [number for own in asked.values() for number in own]
    rows = [rows_of(table) for table in asked]
    paddings = [features[own[0]].padding if kind == "rows" else None for own in asked.values()]
    modes, start = list[tuple[str | None, int, int]](), 0
    for mode, alike in itertools.groupby(features[number].mode for number in numbers):
        modes.append((mode, start, start := start + len(list(alike))))
    skips = kind != "rows" and any(features[number].padding is not None for number in numbers)
    own = bounds_of([len(each) for each in asked.values()])
    parts = [*map(part_of, rows)]
    bases = np.array([part.base for part in parts])
    return PoolLayout(pool, kind, list(asked), rows, parts, paddings, numbers, own, modes, skips, bases)


def _share(route: PoolLayout, features: Sequence[BatchFeature]) -> PoolPlan:
    own = [features[number] for number in route.numbers]
    kept: list[np.ndarray | None] = [None] * len(own)
    if route.skips:
        left = [_without_padding(feature) for feature in own]
        own, kept = [feature for feature, _ in left], [each for _, each in left]
    layout, tier = route.layout(own), route.pool
    keys = joined_ids([feature.ids for feature in own])
    _check_range(keys, layout, route, own)
    share = PoolPlan(route, layout, make_joint_plan(keys, layout.tables), _NONE, tier.epoch, _weights(own), kept)
    share.slots = tier.find(share.keys())
    return share


_NONE = np.empty(0, np.int64)


def _check_range(ids: np.ndarray, layout: FeatureLayout, route: PoolLayout, features: Sequence[BatchFeature]) -> None:
    lowest, highest = np.empty((2, len(route.tables)), np.int64)
    kernels.cpu.launch(kernels.cpu.plan.extremes, ids, layout.tables, lowest, highest)
    low, high = route.limits()
    for k in ((lowest < low) | (highest > high)).nonzero()[0].tolist():
        for feature in features[route.own[k] : route.own[k + 1]]:
            check_range(feature.ids, feature.table.rows, feature.table.subject)


def _begins(ids: np.ndarray) -> np.ndarray:
    """Return the start of each bag of ids without offsets: (bags,), or (bags, n)."""
    return np.arange(len(ids)) * (ids.shape[1] if ids.ndim > 1 else 1)


def _without_padding(feature: BatchFeature) -> tuple[BatchFeature, np.ndarray | None]:
    """Return a feature of bags without padding ids, and a mask of the remaining positions; None: all."""
    ids, offsets = feature.ids, feature.offsets
    is_kept = ids.reshape(-1) != feature.padding
    if feature.padding is None or is_kept.all():
        return feature, None
    if offsets is None:
        offsets = np.append(_begins(ids), ids.size)
    weights = None if feature.weights is None else feature.weights[is_kept]
    changed = {"ids": ids.reshape(-1)[is_kept], "offsets": bounds_of(is_kept)[offsets], "weights": weights}
    return feature._replace(**changed), is_kept


def _weights(features: Sequence[BatchFeature]) -> np.ndarray | None:
    """Return the weights of all positions: 1 for features without weights."""
    if all(feature.weights is None for feature in features):
        return None
    ones = (np.ones(f.ids.size, np.float32) if f.weights is None else f.weights for f in features)
    return np.concatenate(list(ones))


# -------------------------------------------------------------------- reading


def _checked(feature: BatchFeature) -> np.ndarray:
    return check_ids(feature.ids, feature.table.rows, feature.table.subject)


def look_up(features: Sequence[BatchFeature], routes: PoolLayouts) -> list[np.ndarray]:
    """Return the rows of ids, float32 ``ids.shape + (dim,)``, for each feature: one of each table, without bags.

    Caller holds the table lock exclusively.
    """
    checked = [feature._replace(ids=_checked(feature)) for feature in features]
    pools: dict[Backend | None, list[int]] = {}
    for number, feature in enumerate(checked):
        rows = rows_of(feature.table)
        rows.check()
        pools.setdefault(None if rows.lags else part_of(rows).pool, []).append(number)
    found: dict[int, np.ndarray] = {}
    for pool, numbers in pools.items():
        asked = [checked[number] for number in numbers]
        if pool is None:
            read_rows = read(plan(asked, routes), for_weights=False).outputs
        else:
            read_rows = _looked_up(pool, asked, routes)
        found |= dict(zip(numbers, read_rows, strict=True))
    return [found[number] for number in range(len(checked))]


def _looked_up(pool: Backend, asked: Sequence[BatchFeature], routes: PoolLayouts) -> list[np.ndarray]:
    flat = [np.asarray(feature.ids).reshape(-1) for feature in asked]
    cuts = bounds_of([ids.size for ids in flat])[1:-1]
    keys = keys_of([(part_of(rows_of(feature.table)), ids) for feature, ids in zip(asked, flat, strict=True)])
    out = buffers.empty((len(keys), pool.spec.dim), np.float32)
    missing = pool.look_up(keys, np.arange(len(keys), dtype=np.int32), out) < 0
    if missing.any():
        absent = [ids[own] for ids, own in zip(flat, np.split(missing, cuts), strict=True)]
        out[missing] = _absent(pool, [feature.table for feature in asked], absent, routes)
    parts = zip(asked, np.split(out, cuts), strict=True)
    return [own.reshape(*np.shape(feature.ids), pool.spec.dim) for feature, own in parts]


def _absent(pool: Backend, tables: Sequence[Table], ids: Sequence[np.ndarray], routes: PoolLayouts) -> np.ndarray:
    """Return the rows of ids that are not in RAM, those of all tables: float32 (n, dim)."""
    pairs = zip(tables, ids, strict=True)
    if not pool.evicts:
        return np.concatenate([unrecorded(rows_of(table), own) for table, own in pairs])
    return read(plan([BatchFeature(table, own) for table, own in pairs], routes), for_weights=False).arrays[0]


def unread(batch: GroupPlan) -> PoolLookup:
    """Return the lookup of a batch that is only stepped: of rows, and of sums of them without weights."""
    reading = PoolLookup(batch)
    for share in batch.shares:
        is_summed = share.route.kind != "rows"
        reading.places.append(share.layout.in_order if is_summed else None)
        reading.traces.append(pooling.ONES if is_summed else None)
    return reading


def read(batch: GroupPlan, for_weights: bool, side_by_side: bool = False) -> PoolLookup:
    """Return the rows and bags of a batch. Caller holds the table lock exclusively.

    Args:
        batch: its plan.
        for_weights: `weight_gradients` will be called.
        side_by_side: the only array is (batch, features, dim). The batch must be `may_be_side_by_side`.
    """
    if not all(share.route.is_current for share in batch.shares):
        batch = plan(batch.features, batch.routes)  # records have moved to other key ranges
    reading = PoolLookup(batch, side_by_side=side_by_side)
    for share in batch.shares:
        for rows in share.route.rows:
            rows.check()
    for share in batch.shares:
        values = _values(share) if for_weights or share.route.lags else None
        trace = places = None
        if share.route.kind == "rows":
            found = _positions_of(share, values)
        else:
            places = share.layout.side_by_side if side_by_side else share.layout.in_order
            found, trace = _pooled(share, _source(share) if values is None else PooledSource.of(values), places)
        reading.arrays.append(found)
        reading.places.append(places)
        reading.traces.append(trace)
        reading.values.append(values if for_weights else None)
    return reading


def _located(share: PoolPlan) -> np.ndarray:
    """Return the present slots of a pool plan's rows. Slots never move within an epoch."""
    tier = share.route.pool
    tier.begin_batch()
    if share.epoch != tier.epoch:
        for k, table in enumerate(share.route.tables):
            check_range(share.plan.ids[share.plan.of(k)], table.rows, table.subject)
        share.slots, share.epoch = tier.find(share.keys()), tier.epoch
    elif (share.slots < 0).any():
        share.slots = tier.find(share.keys())
    return share.slots


def _found(share: PoolPlan) -> tuple[Records, np.ndarray]:
    """Return records with the rows of a pool plan, and their slots there; -1 for rows without a record."""
    slots, tier = _located(share), share.route.pool
    if not tier.evicts:
        return tier.records, slots
    keys = share.keys()
    try:
        share.slots = tier.bring(keys, slots)
    except CacheTooSmallError:  # reads may have any size
        return tier.read_through(keys)
    share.epoch = tier.epoch
    return tier.records, share.slots


def _fresh(share: PoolPlan, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slots and the values of rows without a record, where slot ``-1 - k`` stands for value k."""
    missing = slots < 0
    fresh = np.empty((np.count_nonzero(missing), share.route.pool.spec.dim), np.float32)
    if not len(fresh):
        return slots, fresh
    slots, done = slots.copy(), 0
    slots[missing] = -1 - np.arange(len(fresh))
    for k, table in enumerate(share.route.tables):
        own = share.plan.of(k)
        new = share.plan.ids[own][missing[own]]
        fresh[done : done + len(new)] = unrecorded(rows_of(table), new)
        done += len(new)
    return slots, fresh


def _positions_of(share: PoolPlan, values: np.ndarray | None) -> np.ndarray:
    out = buffers.empty((len(share.plan.inverse), share.route.pool.spec.dim), np.float32)
    if values is None:
        records, slots = _found(share)
        slots, fresh = _fresh(share, slots)
        records.read(slots, share.plan.inverse, fresh, out)
    else:
        np.take(values, share.plan.inverse, axis=0, out=out, mode="clip")
    return out


def _values(share: PoolPlan) -> np.ndarray:
    """Return each row once, caught up: float32 (unique, dim)."""
    records, found = _found(share)
    slots, fresh = _fresh(share, found)
    values = buffers.empty((len(slots), share.route.pool.spec.dim), np.float32)
    records.read(slots, np.arange(len(slots), dtype=np.int32), fresh, values)
    for k, table in enumerate(share.route.tables):
        rows, own = rows_of(table), share.plan.of(k)
        if rows.lags and rows.history is not None:
            records.refresh(found[own], values[own], rows.history.numbers())
    return values


def _source(share: PoolPlan) -> PooledSource:
    """Return the source of the rows, of tables without stale rows."""
    records, slots = _found(share)
    return PooledSource(records.weights, *_fresh(share, slots))


def _pooled(share: PoolPlan, source: PooledSource, places: RowSources) -> tuple[np.ndarray, np.ndarray]:
    """Return all bags of a pool plan in their places, float32 (bags, dim), and their trace."""
    modes = {mode for mode, _, _ in share.route.modes}
    out, trace = pooling.pooled_like(len(places.of_bags), share.route.pool.spec.dim, modes)
    for mode, first, last in share.route.modes:
        assert mode is not None  # of bags
        start, stop = share.layout.bags[[first, last]].tolist()
        bags = Bags(share.plan, share.layout.offsets[start : stop + 1], -1, mode, places.part(start, stop))
        pooling.pool_into(source, share.weights, bags, out, trace)
    return out, trace


def may_be_side_by_side(batch: GroupPlan) -> bool:
    """Return whether `read` can give all outputs side by side: bags in one pool, equally many for each feature."""
    if len(batch.shares) != 1 or batch.shares[0].route.kind == "rows":
        return False
    bags = batch.shares[0].layout.bags
    return len(set((bags[1:] - bags[:-1]).tolist())) == 1


# -------------------------------------------------------------------- gradients


def sum_gradients(reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        reading: lookup of the batch.
        grads: for each feature, float32 of its output's shape; None without gradients: it touches no row.
    """
    joined = [_joined_grads(reading, k, grads) for k in range(len(reading.batch.shares))]
    if all(given is not None for given in grads):
        return sum_arrays(reading, joined)
    return sum_arrays(reading, joined, [_touched(share, grads) for share in reading.batch.shares])


def _touched(share: PoolPlan, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a pool plan belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(share.plan.ids), bool)
    for number, start, stop in share.spans(share.layout.positions):
        if grads[number] is not None:
            touched[share.plan.inverse[start:stop]] = True
    return touched


def sum_arrays(
    reading: PoolLookup, grads: Sequence[np.ndarray], touched: Sequence[np.ndarray] | None = None
) -> list[tuple[Table, RowGradients]]:
    """Return the result of `sum_gradients` from the gradients of ``reading.arrays``: C-contiguous, of their shapes.

    `touched` has the result's rows of each pool plan, bool (unique,); None: all.
    """
    found: dict[Table, list[RowGradients]] = {}
    for number, (share, given) in enumerate(zip(reading.batch.shares, grads, strict=True)):
        trace = reading.traces[number]
        if trace is None:
            values, squares = sum_segments(share.plan, given)
        else:
            values, squares = pooling.sum_bags(given, share.weights, _bags(reading, number), trace)
        may_miss, cuts = bool((share.slots < 0).any()), share.plan.rows.tolist()
        joint = JointGradients(share.plan.ids, share.slots, share.epoch, may_miss, values, cuts)
        for k, (table, padding) in enumerate(zip(share.route.tables, share.route.paddings, strict=True)):
            start, stop = cuts[k], cuts[k + 1]
            summed: RowGradients = PartGradients(joint, k, float(np.add.reduce(squares[start:stop])))
            if touched is not None:
                summed = summed.kept(touched[number][start:stop])
            found.setdefault(table, []).append(summed if padding is None else summed.kept(summed.plan.ids != padding))
    return [(table, RowGradients.sum_of(parts)) for table, parts in found.items()]


def _bags(reading: PoolLookup, number: int) -> Bags:
    share = reading.batch.shares[number]
    return Bags(share.plan, share.layout.offsets, -1, share.route.kind, reading.places[number])


def _joined_grads(reading: PoolLookup, number: int, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return the gradients of a pool plan's array from those of its outputs: float32 (positions or bags, dim)."""
    share, places = reading.batch.shares[number], reading.places[number]
    dim = share.route.pool.spec.dim
    parts = []
    for feature, start, stop in share.spans(share.layout.positions if places is None else share.layout.bags):
        given = grads[feature]
        parts.append(np.zeros((stop - start, dim), np.float32) if given is None else given.reshape(-1, dim))
    joined = np.ascontiguousarray(rejoined(parts))
    if not reading.side_by_side or places is None:
        return joined
    placed = np.empty_like(joined)
    placed[places.of_bags] = joined
    return placed


def weight_gradients(reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature with weights; else None."""
    found: list[np.ndarray | None] = [None] * len(reading.batch.features)
    for k, (share, values) in enumerate(zip(reading.batch.shares, reading.values, strict=True)):
        if share.weights is None:
            continue
        assert values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(_joined_grads(reading, k, grads), values, _bags(reading, k))
        for (number, start, stop), kept in zip(share.spans(share.layout.positions), share.kept, strict=True):
            weights = reading.batch.features[number].weights
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
