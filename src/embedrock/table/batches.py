"""Batches of several tables of a group: tables of the same record layout are planned, read and summed at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.batch import pooling, wrong_ids
from embedrock.batch.gradients import RowGradients, rejoined, sum_segments
from embedrock.batch.ids import are_ids, check_ids, check_range
from embedrock.batch.plan import Plan, bounds_of, joined_ids
from embedrock.batch.pooling import Bags, PooledSource, RowSources
from embedrock.errors import check_choice
from embedrock.storage.backend import Backend
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.table import reading
from embedrock.table.reading import joint_plan
from embedrock.table.rows import TableState
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
        parts: backends of the tables.
        paddings: of each table, the id whose row gets no gradient; None for none, and for bags, which leave it out.
        numbers: of the features, in the order of their positions.
        own: int64 (tables + 1,), bounds of each table's features in `numbers`.
        modes: consecutive features of the same mode: the mode, and the bounds of the features.
        skips: some bags have a padding id.
    """

    pool: Backend
    kind: str
    tables: list[Table]
    rows: list[TableState]
    parts: list[Backend]
    paddings: list[int | None]
    numbers: list[int]
    own: np.ndarray
    modes: list[tuple[str | None, int, int]]
    skips: bool
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
        """Return whether the tables still have these backends."""
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
    """

    shapes: list[tuple[int, ...]]
    numbers: list[int]
    positions: np.ndarray
    tables: np.ndarray
    bags: np.ndarray
    offsets: np.ndarray

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
        weights: float32 (n,) of the positions; None for ones.
        kept: of bags with padding, the positions of a feature that are in the plan, bool; None: all.
    """

    route: PoolLayout
    layout: FeatureLayout
    plan: Plan
    weights: np.ndarray | None
    kept: list[np.ndarray | None]

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
        return sum(share.plan.nbytes for share in self.batch.shares)

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
        pool, known = rows_of(feature.table).tier.pool, paddings.setdefault(feature.table, [])
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
    parts = [each.tier for each in rows]
    return PoolLayout(pool, kind, list(asked), rows, parts, paddings, numbers, own, modes, skips)


def _share(route: PoolLayout, features: Sequence[BatchFeature]) -> PoolPlan:
    own = [features[number] for number in route.numbers]
    kept: list[np.ndarray | None] = [None] * len(own)
    if route.skips:
        left = [_without_padding(feature) for feature in own]
        own, kept = [feature for feature, _ in left], [each for _, each in left]
    layout, ids = route.layout(own), joined_ids([feature.ids for feature in own])
    _check_range(ids, layout, route, own)
    return PoolPlan(route, layout, joint_plan(route.rows, ids, layout.tables), _weights(own), kept)


_NONE = np.empty(0, np.int64)


def _check_range(ids: np.ndarray, layout: FeatureLayout, route: PoolLayout, features: Sequence[BatchFeature]) -> None:
    lowest, highest = np.empty((2, len(route.tables)), np.int64)
    kernels.cpu.launch(kernels.cpu.plan.extremes, ids, layout.tables, lowest, highest)
    low, high = route.limits()
    for k in ((lowest < low) | (highest > high)).nonzero()[0].tolist():
        for feature in features[route.own[k] : route.own[k + 1]]:
            check_range(feature.ids, feature.table.rows, feature.table.subject)


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


def look_up(features: Sequence[BatchFeature]) -> list[np.ndarray]:
    """Return the rows of ids, float32 ``ids.shape + (dim,)``, for each feature: one of each table, without bags.

    Caller holds the table lock exclusively.
    """
    checked = [feature._replace(ids=_checked(feature)) for feature in features]
    pools: dict[Backend, list[int]] = {}
    for number, feature in enumerate(checked):
        rows = rows_of(feature.table)
        rows.check()
        pools.setdefault(rows.tier.pool, []).append(number)
    found: dict[int, np.ndarray] = {}
    for pool, numbers in pools.items():
        flat = [checked[number].ids.reshape(-1) for number in numbers]
        bounds = bounds_of([ids.size for ids in flat]).tolist()
        out = buffers.empty((bounds[-1], pool.spec.dim), np.float32)
        reading.look_up([rows_of(checked[number].table) for number in numbers], flat, out)
        for number, start, stop in zip(numbers, bounds[:-1], bounds[1:], strict=True):
            found[number] = out[start:stop].reshape(*checked[number].ids.shape, pool.spec.dim)
    return [found[number] for number in range(len(checked))]


def unread(batch: GroupPlan) -> PoolLookup:
    """Return the lookup of a batch that is only stepped: of rows, and of sums of them without weights."""
    lookup = PoolLookup(batch)
    for share in batch.shares:
        is_summed = share.route.kind != "rows"
        lookup.places.append(share.layout.in_order if is_summed else None)
        lookup.traces.append(pooling.ONES if is_summed else None)
    return lookup


def read(batch: GroupPlan, for_weights: bool, side_by_side: bool = False) -> PoolLookup:
    """Return the rows and bags of a batch. Caller holds the table lock exclusively.

    Args:
        batch: its plan.
        for_weights: `weight_gradients` will be called.
        side_by_side: the only array is (batch, features, dim). The batch must be `may_be_side_by_side`.
    """
    if not all(share.route.is_current for share in batch.shares):
        batch = plan(batch.features, batch.routes)  # records have moved to other key ranges
    lookup = PoolLookup(batch, side_by_side=side_by_side)
    for share in batch.shares:
        for rows in share.route.rows:
            rows.check()
    for share in batch.shares:
        of = share.route.rows, share.plan
        values = reading.read_unique(*of) if for_weights else None
        source = reading.source_of(*of) if values is None else PooledSource.of(values)
        trace = places = None
        if share.route.kind == "rows":
            found = buffers.empty((len(share.plan.inverse), share.route.pool.spec.dim), np.float32)
            reading.gather(source, share.plan.inverse, found)
        else:
            places = share.layout.side_by_side if side_by_side else share.layout.in_order
            found, trace = _pooled(share, source, places)
        lookup.arrays.append(found)
        lookup.places.append(places)
        lookup.traces.append(trace)
        lookup.values.append(values)
    return lookup


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


def sum_gradients(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        lookup: lookup of the batch.
        grads: for each feature, float32 of its output's shape; None without gradients: it touches no row.
    """
    joined = [_joined_grads(lookup, k, grads) for k in range(len(lookup.batch.shares))]
    if all(given is not None for given in grads):
        return sum_arrays(lookup, joined)
    return sum_arrays(lookup, joined, [_touched(share, grads) for share in lookup.batch.shares])


def _touched(share: PoolPlan, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a pool plan belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(share.plan.ids), bool)
    for number, start, stop in share.spans(share.layout.positions):
        if grads[number] is not None:
            touched[share.plan.inverse[start:stop]] = True
    return touched


def sum_arrays(
    lookup: PoolLookup, grads: Sequence[np.ndarray], touched: Sequence[np.ndarray] | None = None
) -> list[tuple[Table, RowGradients]]:
    """Return the result of `sum_gradients` from the gradients of ``lookup.arrays``: C-contiguous, of their shapes.

    `touched` has the result's rows of each pool plan, bool (unique,); None: all.
    """
    found: dict[Table, list[RowGradients]] = {}
    for number, (share, given) in enumerate(zip(lookup.batch.shares, grads, strict=True)):
        trace = lookup.traces[number]
        if trace is None:
            values, squares = sum_segments(share.plan, given)
        else:
            values, squares = pooling.sum_bags(given, share.weights, _bags(lookup, number), trace)
        joint = RowGradients(share.plan, values, float(np.add.reduce(squares)), squares)
        for k, (table, padding) in enumerate(zip(share.route.tables, share.route.paddings, strict=True)):
            summed = joint.of(k)
            if touched is not None:
                summed = summed.kept(touched[number][share.plan.of(k)])
            found.setdefault(table, []).append(summed if padding is None else summed.kept(summed.plan.ids != padding))
    return [(table, RowGradients.sum_of(parts)) for table, parts in found.items()]


def _bags(lookup: PoolLookup, number: int) -> Bags:
    share = lookup.batch.shares[number]
    return Bags(share.plan, share.layout.offsets, -1, share.route.kind, lookup.places[number])


def _joined_grads(lookup: PoolLookup, number: int, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return the gradients of a pool plan's array from those of its outputs: float32 (positions or bags, dim)."""
    share, places = lookup.batch.shares[number], lookup.places[number]
    dim = share.route.pool.spec.dim
    parts = []
    for feature, start, stop in share.spans(share.layout.positions if places is None else share.layout.bags):
        given = grads[feature]
        parts.append(np.zeros((stop - start, dim), np.float32) if given is None else given.reshape(-1, dim))
    joined = np.ascontiguousarray(rejoined(parts))
    if not lookup.side_by_side or places is None:
        return joined
    placed = np.empty_like(joined)
    placed[places.of_bags] = joined
    return placed


def weight_gradients(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature with weights; else None."""
    found: list[np.ndarray | None] = [None] * len(lookup.batch.features)
    for k, (share, values) in enumerate(zip(lookup.batch.shares, lookup.values, strict=True)):
        if share.weights is None:
            continue
        assert values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(_joined_grads(lookup, k, grads), values, _bags(lookup, k))
        for (number, start, stop), kept in zip(share.spans(share.layout.positions), share.kept, strict=True):
            weights = lookup.batch.features[number].weights
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
