"""Batches of tables with one lock: those of one record layout are planned, read and summed at once."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import are_ids, check_ids
from embedrock.batch.plan import Plan, bounds_of, plan_tables, sources_of
from embedrock.batch.pooling import ONES, Bags, PooledSource
from embedrock.errors import check_choice
from embedrock.storage.backend import Backend
from embedrock.storage.table_lock import TableLock
from embedrock.system import forks
from embedrock.system.buffers import address_of, buffers
from embedrock.system.spans import spanned
from embedrock.table import reading
from embedrock.table.rows import TableState, check_owned
from embedrock.table.table import Table, rows_of

_INT64 = np.dtype(np.int64)
MODES = ("sum", "mean", "max")
MOST_ROUTES = 64  # of batches with different features


class BatchFeature(NamedTuple):
    """One feature of a batch: ids of a table, alone or in bags.

    Attributes:
        table: of the batch.
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

    @staticmethod
    def each(*columns: Iterable[Any]) -> list[BatchFeature]:
        """Return features of columns, in the order above, without a call of Python for each."""
        return list(map(_new_feature, zip(*columns, strict=True)))

    @property
    def kind(self) -> str:
        """Way to read it: "rows", or bags by "sum" (used for means too) or "max"."""
        return _KINDS[self.mode]


_new_feature = functools.partial(tuple.__new__, BatchFeature)
_KINDS = {None: "rows", "sum": "sum", "mean": "sum", "max": "max"}


@dataclass(eq=False)
class PoolLayout:
    """The part of a batch's layout that depends only on its features, for tables of one pool. Cached between batches.

    Attributes:
        dim: of the tables.
        kind: see `BatchFeature.kind`.
        tables: each once, in the order of their positions in plans.
        rows: states of the tables.
        parts: backends of the tables, which may go meanwhile.
        paddings: of each table, the id whose row gets no gradient; None for none, and for bags, which leave it out.
        numbers: of the features, in the order of their positions.
        own: int64 (tables + 1,), bounds of each table's features in `numbers`.
        modes: consecutive features of the same mode: the mode, and the bounds of the features.
        skips: some bags have a padding id.
        has_padding: some table has one in `paddings`.
        columns: int64 (features,), where those of each feature begin if all outputs of a batch are side by side.
        width: number of all of these columns.
        goes_on: an earlier layout of the same batch has some of the tables, too.
    """

    dim: int
    kind: str
    tables: list[Table]
    rows: list[TableState]
    parts: list[weakref.ref[Backend]]
    paddings: list[int | None]
    numbers: list[int]
    own: np.ndarray
    modes: list[tuple[str | None, int, int]]
    skips: bool
    has_padding: bool
    columns: np.ndarray
    width: int
    goes_on: bool = False
    _layout: FeatureLayout | None = None
    _described: tuple[list[int | None], np.ndarray] | None = None

    def described(self) -> np.ndarray:
        """Return the tables as `plan_tables` takes them."""
        rows = [rows.spec.rows for rows in self.rows]
        if self._described is None or self._described[0] != rows:
            self._described = rows, reading.described(self.rows, self.own.tolist())
        return self._described[1]

    @property
    def is_current(self) -> bool:
        """Return whether the tables still have these backends, and can be used."""
        for rows, part in zip(self.rows, self.parts, strict=True):
            backend = rows.backend
            if backend is None or part() is not backend or rows.process != forks.process:
                return [rows.tier for rows in self.rows] == [part() for part in self.parts]  # or it raises why not
        return self.rows[0].table_lock.failure is None or self.rows[0].tier is None

    def layout(self, features: Sequence[BatchFeature]) -> FeatureLayout:
        """Return the layout of its features' ids, cached for batches of the same shapes."""
        shapes = [feature.ids.shape for feature in features]
        is_even, known = True, self._layout
        for feature in features:
            if feature.offsets is not None:
                is_even = False
                break
        if known is not None and is_even and known.shapes == shapes:
            return known
        positions, bags, offsets = bounds_of([math.prod(shape) for shape in shapes]), _NONE, _NONE
        if self.kind != "rows":
            begins = [_begins(f.ids) if f.offsets is None else f.offsets[:-1] for f in features]
            bags = bounds_of([len(each) for each in begins])
            offsets = np.concatenate([*map(np.add, begins, positions.tolist()), positions[-1:]])
        items = bags if len(bags) else positions
        are_alone = is_even and np.array_equal(items, positions)
        own = shapes if is_even else [], self.numbers, positions, positions[self.own], bags, offsets, items, are_alone
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
        items: `bags`; without bags, `positions`.
        are_alone: each item is one position.
        places: of its rows in an array at address 0: see `PoolPlan.places`.
    """

    shapes: list[tuple[int, ...]]
    numbers: list[int]
    positions: np.ndarray
    tables: np.ndarray
    bags: np.ndarray
    offsets: np.ndarray
    items: np.ndarray
    are_alone: bool
    places: dict[tuple[bool, int], np.ndarray] = field(default_factory=dict)

    @forks.cached_property
    def bags_of_each(self) -> int | None:
        """Number of bags of each feature; None if numbers differ, and without bags."""
        counts = set(np.diff(self.bags).tolist())
        return counts.pop() if len(counts) == 1 else None

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
    def of_positions(self) -> np.ndarray:
        """The item of each position: int32 (n,); empty if each item is one position."""
        return pooling.NO_BAGS if self.are_alone else pooling.bag_of_position(self.offsets)


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

    def places(self, array: np.ndarray, side_by_side: bool) -> np.ndarray:
        """Return where the rows of its features are: see `pooling.places_of`.

        Args:
            array: float32, of its features one after the other, or of all features of the batch side by side.
            side_by_side: says which.
        """
        stride, layout = array.strides[0], self.layout
        known = layout.places.get((side_by_side, stride))
        if known is None:
            begins = self.route.columns * array.itemsize if side_by_side else layout.items[:-1] * stride
            known = layout.places[side_by_side, stride] = np.stack([begins, np.full_like(begins, stride)], axis=1)
        places = known.copy()
        places[:, 0] += address_of(array)
        return places

    @property
    def bags(self) -> Bags:
        """All items, as `pooling.sum_bags` takes them."""
        layout, route = self.layout, self.route
        mode = None if route.kind == "rows" else route.kind
        items = layout.items, route.own, layout.of_positions, layout.are_alone
        return Bags(self.plan, layout.offsets, -1, mode, *items)

    def spans(self, bounds: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the number and the bounds of each feature."""
        cuts = bounds.tolist()
        return list(zip(self.route.numbers, cuts[:-1], cuts[1:], strict=True))


@dataclass(eq=False)
class GroupPlan:
    """The plan of a batch of tables with one lock: of a group, or a table alone.

    Attributes:
        features: of the batch.
        shares: one plan for each pool and kind.
        routes: layouts of such batches.
        table_lock: of the tables.
    """

    features: Sequence[BatchFeature]
    shares: list[PoolPlan]
    routes: PoolLayouts
    table_lock: TableLock

    @property
    def tables(self) -> list[Table]:
        return list(dict.fromkeys(feature.table for feature in self.features))

    @property
    def nbytes(self) -> int:
        return sum(share.plan.nbytes for share in self.shares)


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

    def parts(self) -> Iterator[tuple[Sequence[int], np.ndarray, list[int]]]:
        """Iterate over arrays of outputs: the numbers of their features, the array, and the lines of each output."""
        for share, array in zip(self.batch.shares, self.arrays, strict=True):
            lines = share.layout.lines
            if lines is not None:
                yield share.route.numbers, array.reshape(*lines.shape, array.shape[-1]), lines.counts
                continue
            for number, start, stop in share.spans(share.layout.positions):
                shape = *self.batch.features[number].ids.shape, share.route.dim
                yield (number,), array[start:stop].reshape(shape), [shape[0]]

    @property
    def outputs(self) -> list[np.ndarray]:
        """Output of each feature, float32 ``ids.shape + (dim,)`` or (bags, dim): views of `arrays`."""
        found = dict[int, np.ndarray]()
        for share in self.batch.shares if self.side_by_side else ():
            for number, column in zip(share.route.numbers, share.route.columns.tolist(), strict=True):
                found[number] = self.arrays[0][:, column : column + share.route.dim]
        for share, array in () if self.side_by_side else zip(self.batch.shares, self.arrays, strict=True):
            for number, start, stop in share.spans(share.layout.items):
                own = array[start:stop]
                if share.route.kind == "rows":
                    own = own.reshape(*self.batch.features[number].ids.shape, share.route.dim)
                found[number] = own
        return [found[number] for number in range(len(found))]


# -------------------------------------------------------------------- plans


def plan(features: Sequence[BatchFeature], routes: PoolLayouts, table_lock: TableLock) -> GroupPlan:
    """Plan a batch of tables with one lock: of a group, or a table alone. The last step may still be running.

    Args:
        features: of the batch.
        routes: layouts of earlier batches, which the caller keeps.
        table_lock: of the tables.

    Raises:
        IdError, IdTypeError: as for `Table.lookup`.
    """
    with table_lock.lock:  # not exclusively: a step moves no record
        return _planned(_given(features), routes, table_lock)


def _planned(given: Sequence[BatchFeature], routes: PoolLayouts, table_lock: TableLock) -> GroupPlan:
    key = tuple([(feature.table, feature.mode, feature.padding) for feature in given])
    found = routes.get(key)
    if found is None or not _are_current(found):
        if len(routes) >= MOST_ROUTES:
            routes.clear()
        found = routes[key] = _routes(given)
    for route in found:
        _check(route.rows)
        for rows in route.rows:
            if rows.owns is not None:
                _check_owned(rows, given)
    return GroupPlan(given, [_share(route, given) for route in found], routes, table_lock)


def _are_current(layouts: Sequence[PoolLayout]) -> bool:
    return False not in [layout.is_current for layout in layouts]


def _check(tables: Iterable[TableState]) -> None:
    for rows in tables:
        if rows.executor is not None:
            rows.check()


def _check_owned(rows: TableState, features: Sequence[BatchFeature]) -> None:
    assert rows.owns is not None
    for feature in features:
        if rows_of(feature.table) is rows:
            check_owned(feature.ids, rows.owns, rows.subject)


def _given(features: Sequence[BatchFeature]) -> Sequence[BatchFeature]:
    """Return features with ids as arrays of int64, whose range is not checked yet."""
    for feature in features:
        ids = feature.ids
        if type(ids) is not np.ndarray or ids.dtype is not _INT64 or feature.mode not in _KINDS:
            break
        flags = ids.flags
        if not (flags.c_contiguous and flags.aligned):
            break
    else:
        return features
    return [_converted(feature) for feature in features]


def _converted(feature: BatchFeature) -> BatchFeature:
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
    columns = bounds_of([feature.table.dim for feature in features])
    routes = [_route(pool.spec.dim, kind, features, asked, columns) for (pool, kind, _), asked in kinds.items()]
    seen = set[Table]()
    for route in routes:
        route.goes_on = not seen.isdisjoint(route.tables)
        seen.update(route.tables)
    return routes


def _route(
    dim: int, kind: str, features: Sequence[BatchFeature], asked: dict[Table, list[int]], columns: np.ndarray
) -> PoolLayout:
    numbers = [number for own in asked.values() for number in own]
    rows = [rows_of(table) for table in asked]
    paddings = [features[own[0]].padding if kind == "rows" else None for own in asked.values()]
    modes, start = list[tuple[str | None, int, int]](), 0
    for mode, alike in itertools.groupby(features[number].mode for number in numbers):
        modes.append((mode, start, start := start + len(list(alike))))
    skips = kind != "rows" and any(features[number].padding is not None for number in numbers)
    own = bounds_of([len(each) for each in asked.values()])
    parts = [weakref.ref(each.tier) for each in rows]
    has_padding = any(padding is not None for padding in paddings)
    about = skips, has_padding, columns[numbers], int(columns[-1])
    return PoolLayout(dim, kind, list(asked), rows, parts, paddings, numbers, own, modes, *about)


def _share(route: PoolLayout, features: Sequence[BatchFeature]) -> PoolPlan:
    own = [features[number] for number in route.numbers]
    kept: list[np.ndarray | None] = [None] * len(own)
    if route.skips:
        left = [_without_padding(feature) for feature in own]
        own, kept = [feature for feature, _ in left], [each for _, each in left]
    layout, pool = route.layout(own), route.rows[0].tier.pool
    ids = [feature.ids for feature in own]
    made = plan_tables(sources_of(ids), route.described(), layout.tables, pool.index, pool.epoch)
    if made is None:
        reading.refuse([rows_of(feature.table) for feature in own], ids)
    return PoolPlan(route, layout, made, _weights(own), kept)


_NONE = np.empty(0, np.int64)


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
    for feature in features:
        if feature.weights is not None:
            break
    else:
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
    return PoolLookup(batch, traces=[ONES] * len(batch.shares))


def read(
    batch: GroupPlan, for_weights: bool = False, side_by_side: bool = False, values: np.ndarray | None = None
) -> PoolLookup:
    """Return the rows and bags of a batch.

    Args:
        batch: its plan.
        for_weights: `weight_gradients` will be called.
        side_by_side: the only array is (batch, sum of dims). The batch must be `may_be_side_by_side`.
        values: of a batch of one table and kind, its rows, float32 (unique, dim), if they are known.
    """
    table_lock = batch.table_lock  # as `TableLock.alone`, without a generator
    table_lock.queue()
    with table_lock.lock:
        if table_lock.running:
            table_lock.wait_for_step()
        return _read(batch, for_weights, side_by_side, values)


def _read(batch: GroupPlan, for_weights: bool, side_by_side: bool, known: np.ndarray | None) -> PoolLookup:
    if not _are_current([share.route for share in batch.shares]):
        batch = _planned(batch.features, batch.routes, table_lock=batch.table_lock)  # records have moved
    for share in batch.shares:
        _check(share.route.rows)
    lookup, goes_on = PoolLookup(batch, side_by_side=side_by_side), False
    if side_by_side:
        first = batch.shares[0]
        lookup.arrays.append(buffers.empty((int(first.layout.bags[1]), first.route.width), np.float32))
    for share in batch.shares:
        if known is None:
            source, share.plan = reading.source_of(share.route.rows, share.plan, for_weights)
        else:
            source = PooledSource.of(known)
        if not side_by_side:
            lookup.arrays.append(buffers.empty((int(share.layout.items[-1]), share.route.dim), np.float32))
        lookup.traces.append(_pool(share, source, share.places(lookup.arrays[-1], side_by_side)))
        lookup.values.append(source.words if for_weights else None)
        goes_on |= share.route.goes_on
    if goes_on:
        reading.note_all([(share.route.rows, share.plan) for share in batch.shares])
    return lookup


@spanned("gather")
def _pool(share: PoolPlan, source: PooledSource, places: np.ndarray) -> np.ndarray:
    """Write the rows and bags of a pool plan to their places, and return their trace."""
    layout, modes = share.layout, share.route.modes
    if layout.are_alone and share.weights is None and share.route.kind != "max":
        pooling.pool_into(source, None, share.bags, places, ONES)
        return ONES
    trace = pooling.trace_of(int(layout.items[-1]), share.route.dim, {mode for mode, _, _ in modes})
    for mode, first, last in modes:
        bounds = layout.bags[first : last + 1]
        start, stop = bounds[[0, -1]].tolist()
        bags = Bags(share.plan, layout.offsets[start : stop + 1], -1, mode, bounds - start, share.route.own, _NONE)
        pooling.pool_into(source, share.weights, bags, places[first:last], trace[start:stop])
    return trace


def may_be_side_by_side(batch: GroupPlan) -> bool:
    """Return whether `read` can give all outputs side by side: bags, equally many for each feature."""
    counts = {share.layout.bags_of_each for share in batch.shares}
    return len(counts) == 1 and None not in counts


# -------------------------------------------------------------------- gradients

Block = tuple[list[Table], RowGradients]  # tables whose rows were summed together, and the sums


def sum_gradients(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        lookup: lookup of the batch.
        grads: for each feature, float32 of its output's shape; None without gradients: it touches no row.
    """
    found: dict[Table, list[RowGradients]] = {}
    for tables, summed in sum_blocks(lookup, grads):
        for number, table in enumerate(tables):
            found.setdefault(table, []).append(summed.of(number))
    return [(table, RowGradients.sum_of(parts)) for table, parts in found.items()]


def sum_blocks(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[Block]:
    """Return the result of `sum_gradients` by tables that were summed together. A table may be in several blocks."""
    places, _kept = _places(lookup, grads)
    of_shares = [places[share.route.numbers] for share in lookup.batch.shares]
    if type(None) not in set(map(type, grads)):
        return _summed(lookup, of_shares)
    return _summed(lookup, of_shares, [_touched(share, grads) for share in lookup.batch.shares])


def _touched(share: PoolPlan, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a pool plan belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(share.plan.ids), bool)
    for number, start, stop in share.spans(share.layout.positions):
        if grads[number] is not None:
            touched[share.plan.inverse[start:stop]] = True
    return touched


def sum_array(lookup: PoolLookup, grads: np.ndarray) -> list[Block]:
    """Return the result of `sum_blocks` from that of an output side by side, float32."""
    if grads.strides[1] != grads.itemsize:
        grads = np.ascontiguousarray(grads)
    return _summed(lookup, [share.places(grads, side_by_side=True) for share in lookup.batch.shares])


def _summed(
    lookup: PoolLookup, places: Sequence[np.ndarray], touched: Sequence[np.ndarray] | None = None
) -> list[Block]:
    """Return the result of `sum_blocks` from where the gradients of each pool plan are: see `pooling.places_of`.

    `touched` has the result's rows of each pool plan, bool (unique,); None: all.
    """
    found: list[Block] = []
    for number, (share, trace) in enumerate(zip(lookup.batch.shares, lookup.traces, strict=True)):
        route = share.route
        values, squares = pooling.sum_bags(places[number], route.dim, share.weights, share.bags, trace)
        norms = squares.tolist()
        whole = RowGradients(share.plan, values, sum(norms), norms)
        if touched is None and not route.has_padding:
            found.append((route.tables, whole))
            continue
        for k, (table, padding) in enumerate(zip(route.tables, route.paddings, strict=True)):
            summed = whole.of(k)
            if touched is not None:
                summed = summed.kept(touched[number][share.plan.of(k)])
            found.append(([table], summed if padding is None else summed.kept(summed.plan.ids != padding)))
    return found


def _places(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return where the gradients of each output are, and the arrays that have them. A missing one is a row of zeros."""
    kept: list[Any] = list(grads)
    for number, own in enumerate(kept):
        if own is None:
            dim = max(share.route.dim for share in lookup.batch.shares)
            kept[number] = np.broadcast_to(np.zeros(dim, np.float32), (1, dim))
        elif own.ndim != 2 or own.strides[1] != own.itemsize:
            rows = own.reshape(-1, own.shape[-1])
            kept[number] = rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows)
    return pooling.places_of(kept), kept


def weight_gradients(lookup: PoolLookup, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature with weights; else None."""
    found: list[np.ndarray | None] = [None] * len(lookup.batch.features)
    places, _kept = _places(lookup, grads)
    for share, values in zip(lookup.batch.shares, lookup.values, strict=True):
        if share.weights is None:
            continue
        assert values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(places[share.route.numbers], values, share.bags)
        for (number, start, stop), kept in zip(share.spans(share.layout.positions), share.kept, strict=True):
            weights = lookup.batch.features[number].weights
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
