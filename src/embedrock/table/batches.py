"""Batches of several tables of a group: planned, read and summed in one go for all that are laid out alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embedrock.batch import pooling
from embedrock.batch.gradients import RowGradients, sum_segments
from embedrock.batch.ids import check_ids, check_range
from embedrock.batch.joint import JointPlan, make_joint_plan, plan_of_rows, rejoined
from embedrock.batch.plan import bounds_of
from embedrock.batch.pooling import Bags, Source
from embedrock.machine.buffers import buffers
from embedrock.table.member import part_of
from embedrock.table.rows import Rows
from embedrock.table.table import Table, rows_of
from embedrock.tiers.part import Part, Pool
from embedrock.wording import check_choice

MODES = ("sum", "mean", "max")


class Feature(NamedTuple):
    """One feature of a batch: ids of a table, alone or in bags.

    Attributes:
        table: a member of the group.
        ids: integers of any shape; of bags (n,).
        offsets: int64 (bags + 1,), from 0 to n, where the bags begin and end; None: there are none.
        weights: float32 (n,), by which rows of bags are multiplied that are summed.
        mode: of bags: "sum", "mean" or "max".
        padding: an id that counts in no bag, and whose row gets no gradient.
    """

    table: Table
    ids: npt.ArrayLike
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    mode: str = "sum"
    padding: int | None = None

    @property
    def kind(self) -> str:
        """How it is read: "rows", or bags by "sum", which serves means too, or "max"."""
        if self.offsets is None:
            return "rows"
        return "max" if self.mode == "max" else "sum"


class MemberGradients(NamedTuple):
    """The gradients of one table of a group.

    Attributes:
        table: a member.
        grads: of its rows.
    """

    table: Table
    grads: RowGradients


@dataclass(eq=False)
class Share:
    """What tables of one pool have of a batch: their features of one kind.

    Attributes:
        pool: of the tables.
        kind: see `Feature.kind`.
        tables: each once, in the order of the positions in `plan`.
        parts: where their records are.
        paddings: of each table, the id whose row gets no gradient; None also for bags, in which it is not planned.
        plan: of all their ids.
        slots: int64 (unique,), of the rows, as of `epoch`; -1 for none.
        numbers: of the features, in the order of their positions.
        positions: int64 (features + 1,), where the positions of each feature begin.
        bags: int64 (features + 1,), where its bags begin; empty where there are none.
        offsets: int64 (bags + 1,), where the positions of each bag begin.
        weights: float32 (n,) of the positions; None for ones.
        kept: of bags with padding, which positions of a feature are in the plan, bool; None: all.
    """

    pool: Pool
    kind: str
    tables: list[Table]
    parts: list[Part]
    paddings: list[int | None]
    plan: JointPlan
    slots: np.ndarray
    epoch: int
    numbers: list[int]
    positions: np.ndarray
    bags: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None
    kept: list[np.ndarray | None]

    def keys(self) -> np.ndarray:
        """Return the pool's keys of the rows."""
        return np.concatenate([part.keys(self.plan.ids[self.plan.of(k)]) for k, part in enumerate(self.parts)])

    @property
    def is_current(self) -> bool:
        """Whether the tables' records still are in the same parts, whose keys are planned."""
        return all(part_of(rows_of(table)) is part for table, part in zip(self.tables, self.parts, strict=True))


@dataclass(eq=False)
class GroupPlan:
    """What one batch of several tables of a group needs.

    Attributes:
        features: of the batch.
        shares: what tables of a pool have of it.
    """

    features: Sequence[Feature]
    shares: list[Share]

    @property
    def tables(self) -> list[Table]:
        """The tables in the batch, each once."""
        return list(dict.fromkeys(feature.table for feature in self.features))


@dataclass(eq=False)
class Reading:
    """What was read for a batch.

    Attributes:
        batch: its plan.
        outputs: for each feature, float32 ``ids.shape + (dim,)`` or (bags, dim): views of `arrays`.
        arrays: what was read of each share, float32 (positions, dim) or (bags, dim).
        places: int32 (bags,), which row there each bag of a share is; None for shares of no bags.
        traces: what `pooling.unpool` needs, of each share.
        values: the rows of each share, float32 (unique, dim), where weights get gradients.
        side_by_side: the bags of a sample are one after the other in the only array.
    """

    batch: GroupPlan
    outputs: list[np.ndarray] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    places: list[np.ndarray | None] = field(default_factory=list)
    traces: list[np.ndarray | None] = field(default_factory=list)
    values: list[np.ndarray | None] = field(default_factory=list)
    side_by_side: bool = False


def keys_of(parts: Sequence[tuple[Rows, np.ndarray]]) -> np.ndarray:
    """Return the keys of the rows of several members of a pool, one after the other."""
    return np.concatenate([part_of(rows).keys(ids) for rows, ids in parts])


# -------------------------------------------------------------------- plans


def plan(features: Sequence[Feature]) -> GroupPlan:
    """Decide what a batch needs. The caller has the lock of the group; a step may be running.

    Raises:
        IdError, IdTypeError: as for `Table.lookup`.
    """
    checked = [_checked(feature) for feature in features]
    kinds: dict[tuple[Pool, str, int], dict[Table, list[int]]] = {}
    paddings: dict[Table, list[int | None]] = {}
    for number, feature in enumerate(checked):
        pool, known = part_of(rows_of(feature.table)).pool, paddings.setdefault(feature.table, [])
        if feature.kind == "rows" and feature.padding not in known:
            known.append(feature.padding)
        # Rows that pad one feature of a table may have gradients from another one.
        level = known.index(feature.padding) if feature.kind == "rows" else 0
        kinds.setdefault((pool, feature.kind, level), {}).setdefault(feature.table, []).append(number)
    return GroupPlan(checked, [_share(pool, kind, checked, asked) for (pool, kind, _), asked in kinds.items()])


def _checked(feature: Feature) -> Feature:
    table = feature.table
    if feature.offsets is not None:
        check_choice("mode", feature.mode, MODES)
    return feature._replace(ids=check_ids(feature.ids, table.rows, table.subject))


def _share(pool: Pool, kind: str, features: Sequence[Feature], asked: dict[Table, list[int]]) -> Share:
    numbers = [number for own in asked.values() for number in own]
    parts = [_positions(features[number]) for number in numbers]
    flat = iter(parts)
    ids = [rejoined([next(flat).ids for _ in own]) for own in asked.values()]
    plan = make_joint_plan(ids)
    positions = bounds_of([len(part.ids) for part in parts])
    bags = offsets = _NONE
    if kind != "rows":
        bags = bounds_of([len(part.offsets) - 1 for part in parts])
        begins = [part.offsets[:-1] + start for part, start in zip(parts, positions.tolist(), strict=False)]
        offsets = np.concatenate([*begins, positions[-1:]])
    weights, kept = _weights(parts), [part.kept for part in parts]
    members = [part_of(rows_of(table)) for table in asked]
    paddings = [features[own[0]].padding if kind == "rows" else None for own in asked.values()]
    share = Share(
        pool, kind, list(asked), members, paddings, plan, _NONE, -1, numbers, positions, bags, offsets, weights, kept
    )
    share.slots, share.epoch = pool.tier.find(share.keys()), pool.tier.epoch
    return share


class _Positions(NamedTuple):
    """The positions of a feature that are planned: all, but for padding in bags."""

    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray | None
    kept: np.ndarray | None


_NONE = np.empty(0, np.int64)


def _positions(feature: Feature) -> _Positions:
    ids, offsets = np.asarray(feature.ids).reshape(-1), feature.offsets
    if offsets is None:
        return _Positions(ids, _NONE, None, None)
    is_padding = None if feature.padding is None else ids == feature.padding
    if is_padding is None or not is_padding.any():
        return _Positions(ids, offsets, feature.weights, None)
    kept = ~is_padding
    weights = None if feature.weights is None else feature.weights[kept]
    return _Positions(ids[kept], bounds_of(kept)[offsets], weights, kept)


def _weights(parts: Sequence[_Positions]) -> np.ndarray | None:
    """Return the weights of all positions: 1 for those of features that have none."""
    if all(part.weights is None for part in parts):
        return None
    return np.concatenate([np.ones(len(p.ids), np.float32) if p.weights is None else p.weights for p in parts])


# -------------------------------------------------------------------- reading


def look_up(features: Sequence[Feature]) -> list[np.ndarray]:
    """Return the rows of ids, float32 ``ids.shape + (dim,)``, for each feature. The caller has the group alone."""
    checked = [_checked(feature) for feature in features]
    pools: dict[Pool, list[int]] = {}
    found: dict[int, np.ndarray] = {}
    for number, feature in enumerate(checked):
        rows = rows_of(feature.table)
        rows.check()
        if rows.lags:
            found[number] = rows.look_up(np.asarray(feature.ids))
        else:
            pools.setdefault(part_of(rows).pool, []).append(number)
    for pool, numbers in pools.items():
        asked = [(rows_of(checked[number].table), np.asarray(checked[number].ids)) for number in numbers]
        for number, out in zip(numbers, _looked_up(pool, asked), strict=True):
            found[number] = out
    return [found[number] for number in range(len(checked))]


def _looked_up(pool: Pool, asked: Sequence[tuple[Rows, np.ndarray]]) -> Iterator[np.ndarray]:
    """Go through what `look_up` returns for tables of one pool."""
    keys = keys_of([(rows, ids.reshape(-1)) for rows, ids in asked])
    all_rows = buffers.empty((len(keys), pool.dim), np.float32)
    is_missing = pool.tier.look_up(keys, np.arange(len(keys), dtype=np.int32), all_rows) < 0
    any_missing, start = is_missing.any(), 0
    for rows, ids in asked:
        own = slice(start, start + ids.size)
        out, missing = all_rows[own], is_missing[own]
        if any_missing:
            out[missing] = rows.first_values(ids.reshape(-1)[missing])
        start += ids.size
        yield out.reshape(*ids.shape, pool.dim)


def unread(batch: GroupPlan) -> Reading:
    """Return the reading of a batch of rows that is only stepped."""
    none: list[None] = [None] * len(batch.shares)
    return Reading(batch, places=[*none], traces=[*none])


def read(batch: GroupPlan, for_weights: bool, side_by_side: bool = False) -> Reading:
    """Return the rows and bags of a batch. The caller has the group alone.

    Args:
        batch: its plan.
        for_weights: `weight_gradients` will be asked for.
        side_by_side: the array of the only share is (batch, features, dim), of a batch that `may_be_side_by_side`.
    """
    if not all(share.is_current for share in batch.shares):
        batch = plan(batch.features)  # as records were laid out anew
    reading, outputs = Reading(batch, side_by_side=side_by_side), dict[int, np.ndarray]()
    for table in batch.tables:
        rows_of(table).check()
    for share in batch.shares:
        values = _values(share) if for_weights or _lags(share) else None
        trace = places = None
        if share.kind == "rows":
            found = _positions_of(share, values)
            for number, start, stop in _spans(share, share.positions):
                outputs[number] = found[start:stop].reshape(*np.shape(batch.features[number].ids), share.pool.dim)
        else:
            places = _places(share, side_by_side)
            found, trace = _pooled(batch, share, _source(share) if values is None else Source.of(values), places)
            for number, start, stop in _spans(share, share.bags):
                outputs[number] = found[places[start] :: len(share.numbers)] if side_by_side else found[start:stop]
        reading.arrays.append(found)
        reading.places.append(places)
        reading.traces.append(trace)
        reading.values.append(values if for_weights else None)
    reading.outputs = [outputs[number] for number in range(len(outputs))]
    return reading


def _spans(share: Share, bounds: np.ndarray) -> list[tuple[int, int, int]]:
    """Return the number of each feature, and where it begins and ends."""
    return list(zip(share.numbers, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


def _lags(share: Share) -> bool:
    return any(rows_of(table).lags for table in share.tables)


def _located(share: Share) -> np.ndarray:
    """Return the slots of now of a share's rows. Slots never move within an epoch."""
    tier = share.pool.tier
    tier.begin_batch()
    if share.epoch != tier.epoch:
        for k, table in enumerate(share.tables):
            check_range(share.plan.ids[share.plan.of(k)], table.rows, table.subject)
        share.slots, share.epoch = tier.find(share.keys()), tier.epoch
    elif (share.slots < 0).any():
        share.slots = tier.find(share.keys())
    return share.slots


def _fresh(share: Share, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slots in which ``-1 - k`` stands for row k of the first values, which are returned too."""
    missing = slots < 0
    fresh = np.empty((np.count_nonzero(missing), share.pool.dim), np.float32)
    if not len(fresh):
        return slots, fresh
    slots, done = slots.copy(), 0
    slots[missing] = -1 - np.arange(len(fresh))
    for k, table in enumerate(share.tables):
        own = share.plan.of(k)
        new = share.plan.ids[own][missing[own]]
        fresh[done : done + len(new)] = rows_of(table).first_values(new)
        done += len(new)
    return slots, fresh


def _positions_of(share: Share, values: np.ndarray | None) -> np.ndarray:
    """Return the row of each position: float32 (n, dim)."""
    out = buffers.empty((len(share.plan.inverse), share.pool.dim), np.float32)
    if values is None:
        slots, fresh = _fresh(share, _located(share))
        share.pool.tier.records.read(slots, share.plan.inverse, fresh, out)
    else:
        np.take(values, share.plan.inverse, axis=0, out=out, mode="clip")
    return out


def _values(share: Share) -> np.ndarray:
    """Return the rows, each once, up to date: float32 (unique, dim)."""
    found = _located(share)
    slots, fresh = _fresh(share, found)
    values = buffers.empty((len(slots), share.pool.dim), np.float32)
    share.pool.tier.records.read(slots, np.arange(len(slots), dtype=np.int32), fresh, values)
    for k, table in enumerate(share.tables):
        rows, own = rows_of(table), share.plan.of(k)
        if rows.lags:
            part_of(rows).records.refresh(found[own], values[own], rows.numbers_now())
    return values


def _source(share: Share) -> Source:
    """Return where the rows are, of tables none of which lags behind."""
    return Source(share.pool.tier.records.weights, *_fresh(share, _located(share)))


def _pooled(batch: GroupPlan, share: Share, source: Source, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all bags of a share in their places, float32 (bags, dim), and their trace."""
    out, trace = pooling.pooled_like(len(places), share.pool.dim, share.kind)
    spans = zip((batch.features[number].mode for number in share.numbers), _spans(share, share.bags), strict=True)
    for mode, alike in itertools.groupby(spans, lambda span: span[0]):
        _, bounds = zip(*alike, strict=True)
        start, stop = bounds[0][1], bounds[-1][2]
        bags = Bags(share.plan, share.offsets[start : stop + 1], -1, mode, places[start:stop])
        pooling.pool_into(source, share.weights, bags, out, trace)
    return out, trace


def _places(share: Share, side_by_side: bool) -> np.ndarray:
    """Return where each bag of a share is among pooled rows: int32 (bags,)."""
    count = len(share.offsets) - 1
    if not side_by_side or not count:
        return np.arange(count, dtype=np.int32)
    features = len(share.numbers)
    columns = np.argsort(np.argsort(share.numbers))
    return (np.arange(count // features) * features + columns[:, None]).astype(np.int32).ravel()


def may_be_side_by_side(batch: GroupPlan) -> bool:
    """Return whether `read` can give all outputs side by side: bags in one pool, as many of each feature."""
    if len(batch.shares) != 1 or batch.shares[0].kind == "rows":
        return False
    return len(set(np.diff(batch.shares[0].bags).tolist())) == 1


# -------------------------------------------------------------------- gradients


def sum_gradients(reading: Reading, grads: Sequence[np.ndarray | None]) -> list[MemberGradients]:
    """Return the gradients of all tables from those of all outputs, summed to one for each row.

    Args:
        reading: of the batch.
        grads: for each feature, float32 of its output's shape; None where none came: it touches no row.
    """
    joined = [_joined_grads(reading, k, grads) for k in range(len(reading.batch.shares))]
    if all(given is not None for given in grads):
        return sum_arrays(reading, joined)
    return _summed(reading, joined, [_touched(share, grads) for share in reading.batch.shares])


def sum_arrays(reading: Reading, grads: Sequence[np.ndarray]) -> list[MemberGradients]:
    """Return what `sum_gradients` returns, from the gradients of ``reading.arrays``: C-contiguous, of their shapes."""
    return _summed(reading, grads, [None] * len(grads))


def _touched(share: Share, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return which rows of a share belong to features with gradients: bool (unique,)."""
    touched = np.zeros(len(share.plan.ids), bool)
    for number, start, stop in _spans(share, share.positions):
        if grads[number] is not None:
            touched[share.plan.inverse[start:stop]] = True
    return touched


def _summed(
    reading: Reading, grads: Sequence[np.ndarray], touched: Sequence[np.ndarray | None]
) -> list[MemberGradients]:
    """Return the gradients of all tables; of each share, those of the rows that were touched, of all for None."""
    found: dict[Table, list[RowGradients]] = {}
    for number, (share, given, rows_of_share) in enumerate(zip(reading.batch.shares, grads, touched, strict=True)):
        trace = reading.traces[number]
        if trace is None:
            values, squares = sum_segments(share.plan, given)
        else:
            values, squares = pooling.sum_bags(given, share.weights, _bags(reading, number), trace)
        may_miss = bool((share.slots < 0).any())
        for k, table in enumerate(share.tables):
            own = share.plan.of(k)
            rows = plan_of_rows(share.plan.ids[own], share.slots[own], share.epoch, may_miss)
            summed = RowGradients(rows, values[own], float(squares[own].sum()))
            if rows_of_share is not None:
                summed = summed.kept(rows_of_share[own])
            padding = share.paddings[k]
            found.setdefault(table, []).append(summed if padding is None else summed.without(padding))
    return [MemberGradients(table, RowGradients.sum_of(parts)) for table, parts in found.items()]


def _bags(reading: Reading, number: int) -> Bags:
    """Return the bags of a share as they were read."""
    share = reading.batch.shares[number]
    return Bags(share.plan, share.offsets, -1, share.kind, reading.places[number])


def _joined_grads(reading: Reading, number: int, grads: Sequence[np.ndarray | None]) -> np.ndarray:
    """Return the gradients of a share's array from those of its outputs: float32 (positions or bags, dim)."""
    share, places, dim = reading.batch.shares[number], reading.places[number], reading.batch.shares[number].pool.dim
    parts = []
    for feature, start, stop in _spans(share, share.positions if places is None else share.bags):
        given = grads[feature]
        parts.append(np.zeros((stop - start, dim), np.float32) if given is None else given.reshape(-1, dim))
    joined = np.ascontiguousarray(rejoined(parts))
    if not reading.side_by_side or places is None:
        return joined
    placed = np.empty_like(joined)
    placed[places] = joined
    return placed


def weight_gradients(reading: Reading, grads: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Return the gradients of positions' weights, float32 (n,), for each feature that has some; else None."""
    found: list[np.ndarray | None] = [None] * len(reading.batch.features)
    for k, (share, values) in enumerate(zip(reading.batch.shares, reading.values, strict=True)):
        if share.weights is None:
            continue
        assert values is not None  # the batch was read for weights
        of_all = pooling.weight_grads(_joined_grads(reading, k, grads), values, _bags(reading, k))
        for (number, start, stop), kept in zip(_spans(share, share.positions), share.kept, strict=True):
            weights = reading.batch.features[number].weights
            if weights is not None:
                found[number] = out = np.zeros(len(weights), np.float32)
                out[slice(None) if kept is None else kept] = of_all[start:stop]
    return found
