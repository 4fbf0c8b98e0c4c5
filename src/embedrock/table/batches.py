"""Batches of several tables of a group: tables of the same record layout are planned, read and summed at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock.batch import pooling, wrong_ids
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import are_ids, check_ids, check_range
from embedrock.batch.plan import Plan, bounds_of, plan_tables, sources_of
from embedrock.batch.pooling import ALONE, ONES, Bags, PooledSource, places_of
from embedrock.errors import CacheTooSmallError, check_choice
from embedrock.storage.backend import Backend
from embedrock.storage.record_pools import RecordRange
from embedrock.storage.records import Records
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.system.spans import span
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
        ids: integers of any shape; of bags (n,), or (bags, n) if all bags have the same size.
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
    _described: tuple[list[int | None], np.ndarray] | None = None

    def described(self) -> np.ndarray:
        """Return the tables as `plan_tables` takes them."""
        rows = [rows.spec.rows for rows in self.rows]
        if self._described is None or self._described[0] != rows:
            low, end = zip(*map(wrong_ids.bounds, rows), strict=True)
            columns = self.own[:-1], self.own[1:], low, [each - 1 for each in end], self.bases
            self._described = rows, np.array(columns, np.int64).T.copy()
        return self._described[1]

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
            begins = [np.arange(len(f.ids)) * f.ids.shape[1] if f.offsets is None else f.offsets[:-1] for f in features]
            bags = bounds_of([len(each) for each in begins])
            offsets = np.concatenate([*map(np.add, begins, positions.tolist()), positions[-1:]])
        own = shapes if is_even else [], self.numbers, positions, positions[self.own], bags, offsets
        self._layout = made = FeatureLayout(*own)
        return made


PoolLayouts = dict[tuple[Any, ...], list[PoolLayout]]  # of a group's batches, cached by their features


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
        items: bounds of each feature's bags; without bags, of its positions.
    """

    shapes: list[tuple[int, ...]]
    numbers: list[int]
    positions: np.ndarray
    tables: np.ndarray
    bags: np.ndarray
    offsets: np.ndarray

    @property
    def items(self) -> np.ndarray:
        return self.bags if len(self.bags) else self.positions

    @forks.cached_property
    def of_positions(self) -> np.ndarray:
        """The bag of each position: see `Bags`."""
        if not len(self.bags) or (self.shapes and np.array_equal(self.bags, self.positions)):
            return ALONE
        return pooling.bag_of_position(self.offsets)


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
    plan: Plan
    slots: np.ndarray
    epoch: int
    weights: np.ndarray | None
    kept: list[np.ndarray | None]

    @property
    def current(self) -> Plan:
        """Return the plan with the present slots."""
        if self.slots is self.plan.slots:
            return self.plan
        return replace(self.plan, slots=self.slots, missing=int(np.count_nonzero(self.slots < 0)), epoch=self.epoch)

    def keys(self) -> np.ndarray:
        """Return the pool's keys of the rows."""
        rows = self.plan.rows
        return self.plan.ids + self.route.bases.repeat(rows[1:] - rows[:-1])

    def places(self, array: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
        """Return where the rows of its features are: see `pooling.places_of`.

        Args:
            array: float32, of all features one after the other, or side by side.
            columns: where those of each feature of the batch begin, if they are side by side.
        """
        start, stride = places_of([array])[0].tolist()
        places = np.empty((len(self.route.numbers), 2), np.int64)
        if columns is None:
            np.multiply(self.layout.items[:-1], stride, out=places[:, 0])
        else:
            np.multiply(columns[self.route.numbers], array.itemsize, out=places[:, 0])
        places[:, 0] += start
        places[:, 1] = stride
        return places

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

    @forks.cached_property
    def columns(self) -> np.ndarray:
        """Where the columns of each feature begin if all are side by side: int64 (features + 1,)."""
        return bounds_of([feature.table.dim for feature in self.features])


@dataclass(eq=False)
class PoolLookup:
    """The rows and bags that were read for a batch.

    Attributes:
        batch: its plan.
        arrays: output of each pool plan, float32 (positions, dim) or (bags, dim).
        traces: of `pooling.sum_bags`, for each pool plan.
        values: rows of each pool plan, float32 (unique, dim), if weights get gradients.
        side_by_side: the only array has the bags of a sample one after the other, float32 (bags, sum of dims).
    """

    batch: GroupPlan
    arrays: list[np.ndarray] = field(default_factory=list)
    traces: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray | None] = field(default_factory=list)
    side_by_side: bool = False

    @property
    def nbytes(self) -> int:
        return sum(share.plan.nbytes for share in self.batch.shares)

    @property
    def outputs(self) -> list[np.ndarray]:
        """Output of each feature, float32 ``ids.shape + (dim,)`` or (bags, dim): views of `arrays`."""
        if self.side_by_side:
            return np.split(self.arrays[0], self.batch.columns[1:-1], axis=1)
        found = dict[int, np.ndarray]()
        for share, array in zip(self.batch.shares, self.arrays, strict=True):
            for number, start, stop in share.spans(share.layout.items):
                own = array[start:stop]
                if share.route.kind == "rows":
                    own = own.reshape(*self.batch.features[number].ids.shape, share.route.pool.spec.dim)
                found[number] = own
        return [found[number] for number in range(len(found))]

    def places(self, number: int) -> np.ndarray:
        """Return where the outputs of a pool plan are: see `pooling.places_of`."""
        share, array = self.batch.shares[number], self.arrays[0 if self.side_by_side else number]
        return share.places(array, self.batch.columns if self.side_by_side else None)


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
    ids = [feature.ids for feature in own]
    made = plan_tables(sources_of(ids), route.described(), layout.tables, tier.index, tier.epoch)
    if made is None:
        _refuse(own)
    return PoolPlan(route, layout, made, made.slots, tier.epoch, _weights(own), kept)


_NONE = np.empty(0, np.int64)


def _refuse(features: Sequence[BatchFeature]) -> NoReturn:
    """Raise the error of the first ids outside their table, which the plan has found."""
    for feature in features:
        check_range(feature.ids, feature.table.rows, feature.table.subject)
    raise AssertionError("all ids are inside")


def _without_padding(feature: BatchFeature) -> tuple[BatchFeature, np.ndarray | None]:
    """Return a feature of bags without padding ids, and a mask of the remaining positions; None: all."""
    ids, offsets = feature.ids, feature.offsets
    is_kept = ids.reshape(-1) != feature.padding
    if feature.padding is None or is_kept.all():
        return feature, None
    if offsets is None:
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
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
    return PoolLookup(batch, traces=[ONES] * len(batch.shares))


def read(batch: GroupPlan, for_weights: bool, side_by_side: bool = False) -> PoolLookup:
    """Return the rows and bags of a batch. Caller holds the table lock exclusively.

    Args:
        batch: its plan.
        for_weights: `weight_gradients` will be called.
        side_by_side: the only array is (batch, sum of dims). The batch must be `may_be_side_by_side`.
    """
    if not all(share.route.is_current for share in batch.shares):
        batch = plan(batch.features, batch.routes)  # records have moved to other key ranges
    for share in batch.shares:
        for rows in share.route.rows:
            rows.check()
    reading = PoolLookup(batch, _room(batch, side_by_side), side_by_side=side_by_side)
    for number, share in enumerate(batch.shares):
        values = _values(share) if for_weights or share.route.lags else None
        source = _source(share) if values is None else PooledSource.of(values)
        reading.traces.append(_pool(share, source, reading.places(number)))
        reading.values.append(values if for_weights else None)
    return reading


def _room(batch: GroupPlan, side_by_side: bool) -> list[np.ndarray]:
    """Return memory for the arrays of a lookup."""
    if side_by_side:
        count = batch.shares[0].layout.bags[1]
        return [buffers.empty((int(count), int(batch.columns[-1])), np.float32)]
    shapes = [(int(share.layout.items[-1]), share.route.pool.spec.dim) for share in batch.shares]
    return [buffers.empty(shape, np.float32) for shape in shapes]


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


def _pool(share: PoolPlan, source: PooledSource, places: np.ndarray) -> np.ndarray:
    """Write the rows and bags of a pool plan to their places, and return their trace."""
    layout, modes = share.layout, share.route.modes
    if layout.of_positions is ALONE and share.weights is None and share.route.kind != "max":
        with span("gather"):
            pooling.pool_into(source, None, _bags(share), places, ONES)
        return ONES
    trace = pooling.trace_of(int(layout.items[-1]), share.route.pool.spec.dim, {mode for mode, _, _ in modes})
    for mode, first, last in modes:
        bounds = layout.bags[first : last + 1]
        start, stop = bounds[[0, -1]].tolist()
        bags = Bags(share.plan, layout.offsets[start : stop + 1], -1, mode, bounds - start)
        pooling.pool_into(source, share.weights, bags, places[first:last], trace[start:stop])
    return trace


def may_be_side_by_side(batch: GroupPlan) -> bool:
    """Return whether `read` can give all outputs side by side: bags, equally many for each feature."""
    if any(share.route.kind == "rows" for share in batch.shares):
        return False
    sizes = [bags[1:] - bags[:-1] for bags in [share.layout.bags for share in batch.shares]]
    return len({count for each in sizes for count in each.tolist()}) == 1


# -------------------------------------------------------------------- gradients


def sum_gradients(reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        reading: lookup of the batch.
        grads: for each feature, float32 of its output's shape; None without gradients: it touches no row.
    """
    places, _kept = _places(reading, grads)
    touched = None
    if any(given is None for given in grads):
        touched = [_touched(share, grads) for share in reading.batch.shares]
    return sum_places(reading, places, touched)


def _touched(share: PoolPlan, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a pool plan belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(share.plan.ids), bool)
    for number, start, stop in share.spans(share.layout.positions):
        if grads[number] is not None:
            touched[share.plan.inverse[start:stop]] = True
    return touched


def sum_array(reading: PoolLookup, grads: np.ndarray) -> list[tuple[Table, RowGradients]]:
    """Return the result of `sum_gradients` from that of an output side by side, float32 with contiguous rows."""
    places = np.empty((len(reading.batch.features), 2), np.int64)
    for share in reading.batch.shares:
        places[share.route.numbers] = share.places(grads, reading.batch.columns)
    return sum_places(reading, places)


def sum_places(
    reading: PoolLookup, places: np.ndarray, touched: Sequence[np.ndarray] | None = None
) -> list[tuple[Table, RowGradients]]:
    """Return the result of `sum_gradients` from where the gradients of each feature are: see `pooling.places_of`.

    `touched` has the result's rows of each pool plan, bool (unique,); None: all.
    """
    found: dict[Table, list[RowGradients]] = {}
    for number, (share, trace) in enumerate(zip(reading.batch.shares, reading.traces, strict=True)):
        dim, own = share.route.pool.spec.dim, places[share.route.numbers]
        values, squares = pooling.sum_bags(own, dim, share.weights, _bags(share), trace)
        norms = squares.tolist()
        whole = RowGradients(share.current, values, sum(norms), norms)
        for k, (table, padding) in enumerate(zip(share.route.tables, share.route.paddings, strict=True)):
            summed = whole.of(k)
            if touched is not None:
                summed = summed.kept(touched[number][share.plan.of(k)])
            found.setdefault(table, []).append(summed if padding is None else summed.kept(summed.plan.ids != padding))
    return [(table, RowGradients.sum_of(parts)) for table, parts in found.items()]


def _bags(share: PoolPlan) -> Bags:
    layout, route = share.layout, share.route
    mode = None if route.kind == "rows" else route.kind
    return Bags(share.plan, layout.offsets, -1, mode, layout.items, route.own, layout.of_positions)


def _places(reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return where the gradients of each output are, and the arrays that have them. A missing one is a row of zeros."""
    given = list[np.ndarray]()
    for feature, own in zip(reading.batch.features, grads, strict=True):
        dim = feature.table.dim
        rows = np.zeros((1, dim), np.float32) if own is None else own.reshape(-1, dim)
        given.append(rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows))
    places = places_of(given)
    places[[own is None for own in grads], 1] = 0
    return places, given


def weight_gradients(reading: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature with weights; else None."""
    found: list[np.ndarray | None] = [None] * len(reading.batch.features)
    places, _kept = _places(reading, grads)
    for share, values in zip(reading.batch.shares, reading.values, strict=True):
        if share.weights is None:
            continue
        assert values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(places[share.route.numbers], values, _bags(share))
        for (number, start, stop), kept in zip(share.spans(share.layout.positions), share.kept, strict=True):
            weights = reading.batch.features[number].weights
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
