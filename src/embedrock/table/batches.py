"""Batches of tables with one lock: those of one record layout are planned, read and summed at once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients
from embedrock.batch.ids import are_ids, check_ids
from embedrock.batch.plan import Plan, bounds_of, plan_of_rows, plan_tables, sources_of
from embedrock.batch.pooling import ONES, Bags, PooledSource
from embedrock.errors import check_choice
from embedrock.optimizers import Rule
from embedrock.storage.backend import Backend
from embedrock.storage.table_lock import TableLock
from embedrock.system import forks
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned
from embedrock.table import reading
from embedrock.table.missing import Missing
from embedrock.table.rows import TableState
from embedrock.table.stepping import StepRequest
from embedrock.table.table import Table, rows_of

_ARRAYS, _NOTHING = {np.ndarray}, type(None)
# Many arrays are read by one call of `map`.
_FORM, _SHAPE = attrgetter("dtype", "flags.c_contiguous", "flags.aligned"), attrgetter("shape")
_STRIDES, _OWNS = attrgetter("strides"), attrgetter("owns")
_IDS = {(np.dtype(np.int64), True, True)}
_NONE, FLOAT32 = np.empty(0, np.int64), np.dtype(np.float32)
MODES = ("sum", "mean", "max")
_KINDS = {None: "rows", "sum": "sum", "mean": "sum", "max": "max"}  # ways to read a feature

Arrays = Sequence[np.ndarray | None]
Planner = Callable[[np.ndarray], Plan]  # of the ids of a feature


class FeatureLayout:
    """Common facts of batches of the same features, resolved once. Table states and pools may change meanwhile.

    Args:
        table_lock: of all tables.
        tables: of the features.
        modes: of bags, "sum", "mean" or "max"; None: the rows themselves.
        paddings: ids that count in no bag, and whose rows get no gradient; None: none.
        missing: values of rows that are not there; None: those of each table.
    """

    def __init__(
        self,
        table_lock: TableLock,
        tables: Sequence[Table],
        modes: Sequence[str | None] | None = None,
        paddings: Sequence[int | None] | None = None,
        missing: Missing | None = None,
    ) -> None:
        none = [None] * len(tables)
        self.table_lock, self.tables, self.missing = table_lock, tables, missing
        self.modes, self.paddings = modes or none, paddings or none
        for mode in self.modes:
            if mode not in _KINDS:
                check_choice("mode", mode, MODES)
        self._pools: list[PoolLayout] = []
        self._rests_on: tuple[int, int] | None = None

    def pools(self) -> list[PoolLayout]:
        """Return the part of each pool and kind, if all tables can be used. Caller holds the table lock."""
        table_lock = self.table_lock
        if self._rests_on == (table_lock.generation, forks.process) and table_lock.failure is None:
            return self._pools
        self._pools, has_executor = self._resolved(), False
        for pool in self._pools:
            for rows in pool.rows:
                rows.check()
                has_executor |= rows.executor is not None
        self._rests_on = None if has_executor else (table_lock.generation, forks.process)
        return self._pools

    def _resolved(self) -> list[PoolLayout]:
        kinds: dict[tuple[Backend, str, int], dict[Table, list[int]]] = {}
        known: dict[Table, list[int | None]] = {}
        for number, (table, mode, padding) in enumerate(zip(self.tables, self.modes, self.paddings, strict=True)):
            own, kind, level = known.setdefault(table, []), _KINDS[mode], 0
            if kind == "rows":  # the padding row of one feature may get gradients from another one of the same table
                if padding not in own:
                    own.append(padding)
                level = own.index(padding)
            found = kinds.setdefault((rows_of(table).tier.pool, kind, level), {})
            found.setdefault(table, []).append(number)
        columns = bounds_of([table.dim for table in self.tables])
        pools = [self._part(kind, tables, columns) for (_, kind, _), tables in kinds.items()]
        seen = set[Table]()
        for pool in pools:
            pool.goes_on = not seen.isdisjoint(pool.tables)
            seen.update(pool.tables)
        return pools

    def _part(self, kind: str, tables: dict[Table, list[int]], columns: np.ndarray) -> PoolLayout:
        numbers = [number for own in tables.values() for number in own]
        rows, own = [rows_of(table) for table in tables], bounds_of([len(each) for each in tables.values()])
        modes, start = list[tuple[str | None, int, int]](), 0
        for mode, alike in itertools.groupby(self.modes[number] for number in numbers):
            modes.append((mode, start, start := start + len(list(alike))))
        padded = [number for number in numbers if self.paddings[number] is not None]
        return PoolLayout(
            dim=rows[0].spec.dim,
            kind=kind,
            tables=list(tables),
            rows=rows,
            described=reading.described(rows, own.tolist()),
            paddings=[self.paddings[each[0]] for each in tables.values()] if padded and kind == "rows" else [],
            leaves_out=bool(padded and kind == "rows") or any(each.spec.frozen for each in rows),
            skips=[self.paddings[number] for number in numbers] if padded and kind != "rows" else [],
            numbers=numbers,
            is_whole=numbers == list(range(len(self.tables))),
            own=own,
            modes=modes,
            columns=4 * columns[numbers],
            width=int(columns[-1]),
        )


@dataclass(eq=False)
class PoolLayout:
    """The part of a `FeatureLayout` for tables of one pool, and features of one kind.

    Attributes:
        dim: of the tables.
        kind: "rows", or bags by "sum" (used for means too) or "max".
        tables: each once, in the order of their positions in plans.
        rows: states of the tables.
        described: the tables as `plan_tables` takes them.
        paddings: of each table of rows, the id whose row gets no gradient; empty without paddings.
        leaves_out: some rows get no gradient: those of paddings, and frozen ones.
        skips: of each feature of bags, the id that is left out; empty without paddings.
        numbers: of the features, in the order of their positions.
        is_whole: these are all features, in their order.
        own: int64 (tables + 1,), bounds of each table's features in `numbers`.
        modes: consecutive features of the same mode: the mode, and the bounds of the features.
        columns: int64 (features,), bytes to those of each feature if all outputs of a batch are side by side.
        width: number of all of these columns.
        goes_on: an earlier part of the same batch has some of the tables, too.
    """

    dim: int
    kind: str
    tables: list[Table]
    rows: list[TableState]
    described: np.ndarray
    paddings: list[int | None]
    leaves_out: bool
    skips: list[int | None]
    numbers: list[int]
    is_whole: bool
    own: np.ndarray
    modes: list[tuple[str | None, int, int]]
    columns: np.ndarray
    width: int
    goes_on: bool = False
    _positions: PositionLayout | None = None

    def are_trained(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Return which rows of a table get gradients: bool (n,)."""
        trained = self.rows[table].spec.are_trained(ids)
        return trained & (ids != self.paddings[table]) if self.paddings else trained

    def positions(self, ids: Sequence[np.ndarray], offsets: Arrays | None) -> PositionLayout:
        """Return the layout of its features' ids, cached for batches of the same shapes."""
        shapes, known = list(map(_SHAPE, ids)), self._positions
        if offsets is None and known is not None and known.shapes == shapes:
            return known
        positions, mode = bounds_of([own.size for own in ids]), None if self.kind == "rows" else self.kind
        ends, bounds = _NONE, positions
        if mode is not None:
            each = offsets or [None] * len(ids)
            begins = [_begins(own) if at is None else at[:-1] for own, at in zip(ids, each, strict=True)]
            bounds = bounds_of([len(own) for own in begins])
            ends = np.concatenate([*map(np.add, begins, positions.tolist()), positions[-1:]])
        are_alone = offsets is None and np.array_equal(bounds, positions)
        of_positions = pooling.NO_BAGS if are_alone else pooling.bag_of_position(ends)
        bags = Bags(ends, mode, bounds, self.own, of_positions, are_alone)
        known_by, begins = shapes if offsets is None else [], bounds[:-1] * (4 * self.dim)
        made = PositionLayout(known_by, positions, positions[self.own], bags, begins)
        if offsets is None:
            self._positions = made
        return made


class Lines(NamedTuple):
    """Outputs of features as parts of one array.

    Attributes:
        counts: lines of each feature's output.
        shape: of the array, except for `dim`.
    """

    counts: list[int]
    shape: tuple[int, ...]


@dataclass(eq=False)
class PositionLayout:
    """Positions of the ids of a pool's features.

    Attributes:
        shapes: of the ids, if they determine the layout; else empty.
        positions: int64 (features + 1,), bounds of each feature's positions.
        tables: int64 (tables + 1,), bounds of each table's positions.
        bags: all of them; without bags, each position alone.
        begins: int64 (features,), bytes from the start of the array of its outputs to the first row of each feature.
    """

    shapes: list[tuple[int, ...]]
    positions: np.ndarray
    tables: np.ndarray
    bags: Bags
    begins: np.ndarray

    @forks.cached_property
    def bags_of_each(self) -> int | None:
        """Number of bags of each feature; None if numbers differ, and without bags."""
        counts = set(np.diff(self.bags.bounds).tolist())
        return counts.pop() if len(counts) == 1 and self.bags.mode is not None else None

    @forks.cached_property
    def lines(self) -> Lines | None:
        """The lines of the outputs, feature after feature; None if rows of ids have several forms."""
        if self.bags.mode is not None:
            counts = np.diff(self.bags.bounds).tolist()
            return Lines(counts, (sum(counts),))
        rests = {shape[1:] if shape else None for shape in self.shapes}
        rest = rests.pop()
        if rests or rest is None:
            return None
        counts = [shape[0] for shape in self.shapes]
        return Lines(counts, (sum(counts), *rest))


@dataclass(eq=False)
class PoolBatch:
    """The part of a batch in one pool: its plan, and the data of a lookup for later sums.

    Attributes:
        layout: of the pool's features.
        positions: of their ids.
        plan: of all their ids.
        weights: float32 (n,) of the positions; None for ones.
        kept: of bags with padding, the positions of a feature that are in the plan, bool; None: all.
        trace: see `pooling.sum_bags`.
        values: its rows, float32 (unique, dim), if weights get gradients.
        unstepped: ids of tables without gradients: see `bind_unstepped`.
    """

    layout: PoolLayout
    positions: PositionLayout
    plan: Plan
    weights: np.ndarray | None
    kept: list[np.ndarray | None]
    trace: np.ndarray
    values: np.ndarray | None = None
    unstepped: list[np.ndarray] = field(default_factory=list)

    def spans(self, bounds: np.ndarray) -> list[tuple[int, int, int]]:
        """Return the number and the bounds of each feature."""
        cuts = bounds.tolist()
        return list(zip(self.layout.numbers, cuts[:-1], cuts[1:], strict=True))


@dataclass(eq=False)
class Batch:
    """A batch of features: its plans, and its rows and bags once they are read.

    Attributes:
        layout: of the features.
        ids: of the features, of any shape; of bags (n,), or (bags, n) if all bags have the same size, or (bags,) if
            that is 1.
        offsets: int64 (bags + 1,) for ids (n,), from 0 to n: the bounds of the bags; None: no feature has some.
        weights: float32, one per id: factors of the rows in sums of bags; None: no feature has some.
        parts: one for each pool and kind.
        arrays: output of each part, (positions, dim) or (bags, dim), once it is read: float32, or `words`.
        side_by_side: the only array has the bags of a sample one after the other, float32 (bags, sum of dims).
        words: dtype of arrays of rows that are only copied: float32, or that of words of 16 bits.
        by_frequency: divide a row's gradient by the number of times its id occurs. Of one table.
    """

    layout: FeatureLayout
    ids: Sequence[np.ndarray]
    offsets: Arrays | None
    weights: Arrays | None
    parts: list[PoolBatch]
    arrays: list[np.ndarray] = field(default_factory=list)
    side_by_side: bool = False
    words: np.dtype = FLOAT32
    by_frequency: bool = False

    @property
    def nbytes(self) -> int:
        return sum([part.plan.nbytes for part in self.parts])

    @property
    def may_be_side_by_side(self) -> bool:
        """True if its outputs can be side by side: bags, equally many for each feature."""
        counts = {part.positions.bags_of_each for part in self.parts}
        return len(counts) == 1 and None not in counts

    def take_blocks(self) -> Iterator[tuple[Sequence[int], np.ndarray, list[int]]]:
        """Take the arrays of outputs out of the batch.

        Returns:
            For each array the numbers of its features, the array, and the lines of each output.
        """
        arrays, self.arrays = self.arrays, []
        for part, array in zip(self.parts, arrays, strict=True):
            lines = part.positions.lines
            if lines is not None:
                yield part.layout.numbers, array.reshape(*lines.shape, array.shape[-1]), lines.counts
                continue
            for number, start, stop in part.spans(part.positions.positions):
                shape = *self.ids[number].shape, part.layout.dim
                yield (number,), array[start:stop].reshape(shape), [shape[0]]

    @property
    def outputs(self) -> list[np.ndarray]:
        """Output of each feature, float32 ``ids.shape + (dim,)`` or (bags, dim): views of `arrays`."""
        found = dict[int, np.ndarray]()
        for k, part in enumerate(self.parts):
            layout = part.layout
            if self.side_by_side:
                for number, column in zip(layout.numbers, (layout.columns // 4).tolist(), strict=True):
                    found[number] = self.arrays[0][:, column : column + layout.dim]
                continue
            for number, start, stop in part.spans(part.positions.bags.bounds):
                own = self.arrays[k][start:stop]
                found[number] = own.reshape(*self.ids[number].shape, layout.dim) if layout.kind == "rows" else own
        return [found[number] for number in range(len(found))]


# -------------------------------------------------------------------- plans


def plan(
    layout: FeatureLayout,
    ids: Sequence[Any],
    offsets: Arrays | None = None,
    weights: Arrays | None = None,
    planner: Planner | None = None,
) -> Batch:
    """Plan a batch. The last step may still be running.

    Args:
        layout, ids, offsets, weights: see `Batch`.
        planner: plans the ids of the only feature, whose rows other processes have; None: the tables have them.

    Raises:
        IdError, IdTypeError: as for `Table.lookup`.
    """
    if planner is not None:
        return _planned(layout, ids, offsets, weights, planner)
    with layout.table_lock.lock:  # not exclusively: a step moves no record
        return _planned(layout, ids, offsets, weights)


def _planned(
    layout: FeatureLayout,
    given: Sequence[Any],
    offsets: Arrays | None,
    weights: Arrays | None,
    planner: Planner | None = None,
) -> Batch:
    ids = _as_ids(layout, given)
    parts = [_part(pool, ids, offsets, weights, planner) for pool in layout.pools()]
    return Batch(layout, ids, offsets, weights, parts)


def _current(batch: Batch) -> Batch:
    """Return a batch with plans for the present records of its tables."""
    if [part.layout for part in batch.parts] == batch.layout.pools():
        return batch
    return _planned(batch.layout, batch.ids, batch.offsets, batch.weights)


def _as_ids(layout: FeatureLayout, ids: Sequence[Any]) -> Sequence[np.ndarray]:
    """Return ids as arrays of int64, whose range is not checked yet."""
    if set(map(type, ids)) == _ARRAYS and set(map(_FORM, ids)) == _IDS:
        return ids
    pairs = zip(layout.tables, ids, strict=True)
    return [own if are_ids(own) else check_ids(own, table.rows, table.subject) for table, own in pairs]


def _part(
    pool: PoolLayout,
    ids: Sequence[np.ndarray],
    offsets: Arrays | None,
    weights: Arrays | None,
    planner: Planner | None,
) -> PoolBatch:
    kept, numbers = list[np.ndarray | None](), pool.numbers
    if not pool.is_whole:
        ids = [ids[number] for number in numbers]
        offsets = offsets and [offsets[number] for number in numbers]
        weights = weights and [weights[number] for number in numbers]
    if offsets is not None and all(own is None for own in offsets):
        offsets = None
    if pool.skips:
        ids, offsets, weights, kept = _without_paddings(pool.skips, ids, offsets, weights)
    at = pool.positions(ids, offsets)
    made = _plan_of(pool, at, ids) if planner is None else planner(ids[0])
    return PoolBatch(pool, at, made, None if weights is None else _joined_weights(ids, weights), kept, ONES)


def _plan_of(pool: PoolLayout, at: PositionLayout, ids: Sequence[np.ndarray]) -> Plan:
    if any(map(_OWNS, pool.rows)):
        reading.check_owned(_rows_of_features(pool), ids)
    backend = pool.rows[0].tier.pool
    made = plan_tables(sources_of(ids), pool.described, at.tables, backend.index, backend.epoch)
    return reading.refuse(_rows_of_features(pool), ids) if made is None else made


def _rows_of_features(pool: PoolLayout) -> list[TableState]:
    return [rows for rows, count in zip(pool.rows, np.diff(pool.own).tolist(), strict=True) for _ in range(count)]


def _begins(ids: np.ndarray) -> np.ndarray:
    """Return the start of each bag of ids without offsets: (bags,), or (bags, n)."""
    return np.arange(len(ids)) * (ids.shape[1] if ids.ndim > 1 else 1)


def _without_paddings(
    paddings: Sequence[int | None], ids: Sequence[np.ndarray], offsets: Arrays | None, weights: Arrays | None
) -> tuple[list[np.ndarray], Arrays | None, Arrays | None, list[np.ndarray | None]]:
    """Return bags without their paddings, and masks of the remaining positions; None: all."""
    masks = [
        None if padding is None else own.reshape(-1) != padding for padding, own in zip(paddings, ids, strict=True)
    ]
    kept = [None if mask is None or mask.all() else mask for mask in masks]
    if all(mask is None for mask in kept):
        return list(ids), offsets, weights, kept
    none: Arrays = [None] * len(ids)
    ends, flat = list(offsets or none), list(ids)
    left = None if weights is None else list(weights)
    for k, mask in enumerate(kept):
        if mask is not None:
            bounds = ends[k]
            bounds = np.append(_begins(ids[k]), ids[k].size) if bounds is None else bounds
            flat[k], ends[k] = ids[k].reshape(-1)[mask], bounds_of(mask)[bounds]
            if left is not None and (own := left[k]) is not None:
                left[k] = own[mask]
    return flat, ends, left, kept


def _joined_weights(ids: Sequence[np.ndarray], weights: Arrays) -> np.ndarray | None:
    """Return the weights of all positions: 1 for features without weights."""
    if all(own is None for own in weights):
        return None
    pairs = zip(ids, weights, strict=True)
    return np.concatenate([np.ones(of.size, np.float32) if own is None else own for of, own in pairs])


# -------------------------------------------------------------------- reading


def look_up(layout: FeatureLayout, ids: Sequence[Any]) -> list[np.ndarray]:
    """Return the rows of ids, float32 ``ids.shape + (dim,)``: one feature of each table, without bags or a plan.

    Caller holds the table lock exclusively.
    """
    checked = [check_ids(own, table.rows, table.subject) for table, own in zip(layout.tables, ids, strict=True)]
    found: dict[int, np.ndarray] = {}
    for pool in layout.pools():
        flat = [checked[number].reshape(-1) for number in pool.numbers]
        bounds = bounds_of([own.size for own in flat]).tolist()
        out = buffers.empty((bounds[-1], pool.dim), np.float32)
        reading.look_up(pool.rows, flat, out, reading.choices_of(pool.rows, layout.missing))
        for number, start, stop in zip(pool.numbers, bounds[:-1], bounds[1:], strict=True):
            found[number] = out[start:stop].reshape(*checked[number].shape, pool.dim)
    return [found[number] for number in range(len(checked))]


def read(
    layout: FeatureLayout,
    ids: Sequence[Any],
    offsets: Arrays | None = None,
    weights: Arrays | None = None,
    for_weights: bool = False,
    side_by_side: bool = False,
    words: np.dtype = FLOAT32,
) -> Batch:
    """Plan a batch and read its rows and bags.

    Args:
        layout, ids, offsets, weights: see `plan`.
        for_weights: `weight_gradients` will be called.
        side_by_side: the only array is (batch, sum of dims), if the batch `may_be_side_by_side`.
        words: see `Batch`.
    """
    table_lock = layout.table_lock  # as `TableLock.alone`, without a generator
    table_lock.queue()
    with table_lock.lock:
        batch = _planned(layout, ids, offsets, weights)  # a step may still be running
        if table_lock.running:
            table_lock.wait_for_step()
            batch = _current(batch)
        batch.side_by_side, batch.words = side_by_side and batch.may_be_side_by_side, words
        return _read(batch, for_weights)


def read_planned(batch: Batch, for_weights: bool = False, values: np.ndarray | None = None) -> Batch:
    """Return a batch from `plan` with its rows and bags read. See `read`.

    `values` are the rows, float32 (unique, dim), of a batch of one table and kind, if they are known. Its plan stays.
    """
    with batch.layout.table_lock.alone():
        return _read(_current(batch) if values is None else batch, for_weights, values)


def each_once(batch: Batch) -> Batch:
    """Return the batch of the rows of a planned batch, each once: the ids of a table are the unique ones, in its order.

    The planned batch has one feature of each table, without bags.
    """
    parts, ids = list[PoolBatch](), dict[int, np.ndarray]()
    for part in batch.parts:
        layout, plan = part.layout, part.plan
        ids |= {number: plan.ids[plan.of(k)] for k, number in enumerate(layout.numbers)}
        once = plan_of_rows(plan.ids, plan.slots, plan.epoch, plan.rows, plan.missing > 0)
        bags = Bags(_NONE, None, plan.rows, layout.own, pooling.NO_BAGS, are_alone=True)
        at = PositionLayout([], plan.rows, plan.rows, bags, plan.rows[:-1] * (4 * layout.dim))
        parts.append(PoolBatch(layout, at, once, None, [], ONES))
    return Batch(batch.layout, [ids[number] for number in range(len(ids))], None, None, parts)


def rows_of_ids(batch: Batch) -> list[np.ndarray]:
    """Return the row of each id in `each_once` of a planned batch, int32 (n,) of each feature."""
    found = dict[int, np.ndarray]()
    for part in batch.parts:
        for k, (number, start, stop) in enumerate(part.spans(part.positions.positions)):
            first, rows = int(part.plan.rows[k]), part.plan.inverse[start:stop]
            found[number] = rows - np.int32(first) if first else rows
    return [found[number] for number in range(len(found))]


def read_once(batch: Batch, once: Batch, outs: Sequence[np.ndarray]) -> tuple[Batch, Batch]:
    """Write the rows of a batch from `plan` to `outs`, float32 (unique, dim) of each feature. `once`: see `each_once`.

    Returns:
        The two batches with present plans, for sums of either.
    """
    with batch.layout.table_lock.alone():
        if [part.layout for part in batch.parts] != batch.layout.pools():
            # By the ids that were planned: the caller may have overwritten its arrays.
            ids = [own[at] for own, at in zip(once.ids, rows_of_ids(batch), strict=True)]
            batch = _planned(batch.layout, ids, None, None)
            once = each_once(batch)
        return batch, _read(once, False, outs=outs)


def _read(
    batch: Batch, for_weights: bool, known: np.ndarray | None = None, outs: Sequence[np.ndarray] | None = None
) -> Batch:
    goes_on, arrays, side_by_side = False, batch.arrays, batch.side_by_side
    if side_by_side:
        first = batch.parts[0]
        arrays.append(buffers.empty((int(first.positions.bags.bounds[1]), first.layout.width), np.float32))
    for part in batch.parts:
        layout = part.layout
        if known is None:
            choices = reading.choices_of(layout.rows, batch.layout.missing, layout.paddings)
            source, part.plan = reading.source_of(layout.rows, part.plan, for_weights, choices)
        else:
            source = PooledSource.of(known)
        begins, bags = layout.columns, part.positions.bags
        if outs is not None:
            _pool(part, source, pooling.places_of([outs[number] for number in layout.numbers]))
            continue
        if not side_by_side:
            dtype = batch.words if bags.are_copies(part.weights) else FLOAT32
            arrays.append(buffers.empty((int(bags.bounds[-1]), layout.dim), dtype))
            begins = part.positions.begins // FLOAT32.itemsize * dtype.itemsize
        _pool(part, source, pooling.places_of(arrays[-1:], begins))
        if for_weights:
            part.values = source.words
        goes_on |= layout.goes_on
    if goes_on:
        reading.note_all([(part.layout.rows, part.plan) for part in batch.parts])
    return batch


@spanned("gather")
def _pool(part: PoolBatch, source: PooledSource, places: pooling.Places) -> None:
    """Write the rows and bags of a part to their places, and keep their trace."""
    of_all, modes = part.positions.bags, part.layout.modes
    if of_all.are_copies(part.weights):
        pooling.pool_into(part.plan, source, None, of_all, places, ONES)
        return
    part.trace = pooling.trace_of(int(of_all.bounds[-1]), part.layout.dim, {mode for mode, _, _ in modes})
    for mode, first, last in modes:
        bounds = of_all.bounds[first : last + 1]
        start, stop = bounds[[0, -1]].tolist()
        bags = Bags(of_all.offsets[start : stop + 1], mode, bounds - start, of_all.own, _NONE)
        pooling.pool_into(part.plan, source, part.weights, bags, places.of(slice(first, last)), part.trace[start:stop])


# -------------------------------------------------------------------- gradients

Block = tuple[list[Table], RowGradients]  # tables whose rows were summed together, and the sums


def sum_blocks(batch: Batch, grads: Sequence[np.ndarray | None]) -> list[Block]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        batch: that was read, or whose features are rows, or sums of them without weights.
        grads: for each feature, of its output's shape, float32 or all words of 16 bits; None without gradients: it
            touches no row.

    Returns:
        The sums of tables that were summed together. A table may be in several blocks.
    """
    places, _kept = _places(batch, grads)
    parts = batch.parts
    of_parts = [places] if parts[0].layout.is_whole else [places.of(part.layout.numbers) for part in parts]
    if _NOTHING not in map(type, grads):
        return _summed(batch, of_parts)
    return _summed(batch, of_parts, [_touched(part, grads) for part in parts])


def _touched(part: PoolBatch, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a part belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(part.plan.ids), bool)
    for number, start, stop in part.spans(part.positions.positions):
        if grads[number] is not None:
            touched[part.plan.inverse[start:stop]] = True
    return touched


def sum_array(batch: Batch, grads: np.ndarray) -> list[Block]:
    """Return the result of `sum_blocks` from that of an output side by side."""
    if grads.strides[1] != grads.itemsize:
        grads = np.ascontiguousarray(grads)
    columns = [part.layout.columns // FLOAT32.itemsize * grads.itemsize for part in batch.parts]
    return _summed(batch, [pooling.places_of((grads,), begins) for begins in columns])


def _summed(batch: Batch, places: Sequence[pooling.Places], touched: Sequence[np.ndarray] | None = None) -> list[Block]:
    """Return the result of `sum_blocks` from where the gradients of each part are.

    `touched` has the result's rows of each part, bool (unique,); None: all.
    """
    found: list[Block] = []
    for number, part in enumerate(batch.parts):
        layout = part.layout
        about = places[number], layout.dim, part.weights, part.positions.bags, part.trace
        values, squares = pooling.sum_bags(part.plan, *about)
        norms = squares.tolist()
        whole = RowGradients(part.plan, values, sum(norms), norms)
        if batch.by_frequency:
            whole = whole.with_values(values / np.diff(part.plan.starts).astype(np.float32)[:, None])
        if touched is None and not layout.leaves_out:
            found.append((layout.tables, whole))
            continue
        for k, table in enumerate(layout.tables):
            summed = whole.of(k)
            if touched is not None:
                summed = summed.kept(touched[number][part.plan.of(k)])
            found.append(([table], summed.kept(layout.are_trained(k, summed.plan.ids))))
    return found


def requests_of(blocks: Iterable[Block], rules: Mapping[Table, Rule], time: float | None) -> list[StepRequest]:
    """Return the steps of tables by their rules: see `StepRequest.of_joint`."""
    parts = [
        (summed, rules[table], time, number, rows_of(table))
        for tables, summed in blocks
        for number, table in enumerate(tables)
    ]
    return StepRequest.of_joint(parts)


def bind_unstepped(batch: Batch, stepped: Container[Table]) -> None:
    """Note that the rows of tables without gradients are read, and not stepped, only as long as the batch lives.

    The sums of the other tables keep the ids of the plan longer: see `TableState.last_read`.
    """
    for part in batch.parts:
        for number, (table, rows) in enumerate(zip(part.layout.tables, part.layout.rows, strict=True)):
            if table not in stepped:
                ids = part.plan.ids[part.plan.of(number)]
                part.unstepped.append(ids)
                own = weakref.ref(ids), slice(None)
                rows.last_read = tuple([own if each[0]() is part.plan.ids else each for each in rows.last_read])


def by_position(batch: Batch, grads: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """Return id and gradient, float32 (n, dim), of positions of a batch of one feature, without those left out."""
    (part,), (places, _kept) = batch.parts, _places(batch, grads)
    ids = part.plan.ids[part.plan.inverse]
    about = places, part.layout.dim, part.weights, part.positions.bags, part.trace
    values, _squares = pooling.sum_bags(plan_of_rows(ids, ids, -1), *about)
    counts = part.layout.are_trained(0, ids) if part.layout.leaves_out else slice(None)
    return ids[counts], values[counts]


def _places(batch: Batch, grads: Sequence[np.ndarray | None]) -> tuple[pooling.Places, list[np.ndarray]]:
    """Return where the gradients of each output are, and the arrays that have them. A missing one is a row of zeros."""
    kept: list[Any] = list(grads)
    dtype = next((own.dtype for own in kept if own is not None), FLOAT32)
    forms = () if _NOTHING in map(type, grads) else set(map(_STRIDES, kept))
    if forms and all(len(strides) == 2 and strides[1] == dtype.itemsize for strides in forms):  # as nearly always
        return pooling.places_of(kept), kept
    for number, own in enumerate(kept):
        if own is None:
            dim = max(part.layout.dim for part in batch.parts)
            kept[number] = np.broadcast_to(np.zeros(dim, dtype), (1, dim))
        elif own.ndim != 2 or own.strides[1] != own.itemsize:
            rows = own.reshape(-1, own.shape[-1])
            kept[number] = rows if rows.strides[1] == rows.itemsize else np.ascontiguousarray(rows)
    return pooling.places_of(kept), kept


def weight_gradients(batch: Batch, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature with weights; else None."""
    found: list[np.ndarray | None] = [None] * len(batch.ids)
    places, _kept = _places(batch, grads)
    for part in batch.parts:
        if part.weights is None or batch.weights is None:
            continue
        assert part.values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(part.plan, places.of(part.layout.numbers), part.values, part.positions.bags)
        masks = part.kept or [None] * len(part.layout.numbers)
        for (number, start, stop), kept in zip(part.spans(part.positions.positions), masks, strict=True):
            weights = batch.weights[number]
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
