"""The read phase: weights of a plan's rows, in RAM or on disk, stale or not.

Functions of `tables` work on states of tables in one pool, in the order of the plan's rows: of one table, or several.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from embedrock import kernels
from embedrock.batch.ids import check_range
from embedrock.batch.plan import Plan, bounds_of, counting, plan_of_rows, plan_tables, sources_of
from embedrock.batch.pooling import PooledSource
from embedrock.batch.wrong_ids import bounds
from embedrock.errors import CacheTooSmallError
from embedrock.storage.backend import Backend
from embedrock.storage.records import Records
from embedrock.system.buffers import buffers
from embedrock.system.spans import spanned
from embedrock.table.caught_up import CaughtUpRows
from embedrock.table.missing import Missing, no_row
from embedrock.table.rows import TableState

EXPORT_BATCH_ROWS = 65_536

Tables = Sequence[TableState]
Choices = Mapping[TableState, Missing]  # for rows that are not there
OWN_CHOICES: Choices = {}  # those of the tables
# Many tables are read by one call of `map`.
BACKEND, HISTORY, _OWNS = attrgetter("backend"), attrgetter("history"), attrgetter("owns")


# -------------------------------------------------------------------- rows and their slots


def pool_of(tables: Tables) -> Backend:
    """Return the pool of open tables."""
    pool = tables[0].tier.pool
    if not all(map(BACKEND, tables)):
        for rows in tables:
            rows.check_open()
    return pool


def keys_of(tables: Tables, plan: Plan) -> np.ndarray:
    """Return the pool's keys of a plan's rows."""
    bases = [tier.base for rows in tables if (tier := rows.backend) is not None]
    if len(bases) == 1:
        return plan.ids + bases[0] if bases[0] else plan.ids
    return plan.ids + np.array(bases).repeat(plan.rows[1:] - plan.rows[:-1])


def own_parts(tables: Tables, plan: Plan) -> Iterator[tuple[TableState, slice]]:
    """Iterate over tables, each with its rows of the plan."""
    bounds = plan.rows.tolist()
    return zip(tables, map(slice, bounds[:-1], bounds[1:]), strict=True)


def is_reading(tables: Tables, plan: Plan) -> bool:
    """Return whether the plan is that of the tables' last read batch, which is not stepped yet."""
    last = tables[0].last_read
    return bool(last) and last[0][0]() is plan.ids


def present_slots(pool: Backend, tables: Tables, plan: Plan, keys: np.ndarray) -> np.ndarray:
    """Return the slots of a plan's rows in a pool now. Slots never move within an epoch."""
    if plan.epoch != pool.epoch:
        for rows, own in own_parts(tables, plan):
            check_range(plan.ids[own], rows.spec.rows, rows.subject)
        return pool.find(keys)
    if not plan.missing:
        return plan.slots
    slots, unknown = plan.slots.copy(), plan.slots < 0
    slots[unknown] = pool.find(keys[unknown])
    return slots


def located(tables: Tables, plan: Plan) -> Plan:
    """Return a plan with present slots, and its rows loaded.

    Raises:
        CacheTooSmallError: they do not fit the cache.
    """
    pool = pool_of(tables)
    if not is_reading(tables, plan):
        ids = weakref.ref(plan.ids)
        for rows, own in own_parts(tables, plan):
            rows.last_read = ((ids, own),)
        pool.begin_batch()  # may begin an epoch
    if plan.epoch == pool.epoch and not plan.missing and not pool.evicts:
        return plan  # as nearly always
    keys = keys_of(tables, plan)
    slots = pool.bring(keys, present_slots(pool, tables, plan, keys))
    return plan.with_slots(slots, pool.epoch)


def note_all(batch: Sequence[tuple[Tables, Plan]]) -> None:
    """Note the rows of all plans of a batch, in which some tables have several plans."""
    parts: dict[TableState, list[tuple[weakref.ref[np.ndarray], slice]]] = {}
    for tables, plan in reversed(batch):
        for rows, own in own_parts(tables, plan):
            parts.setdefault(rows, []).append((weakref.ref(plan.ids), own))
    for rows, several in parts.items():
        rows.last_read = tuple(several)


# -------------------------------------------------------------------- weights


def source_of(
    tables: Tables, plan: Plan, is_copy: bool = False, choices: Choices = OWN_CHOICES
) -> tuple[PooledSource, Plan]:
    """Return the rows of a plan, in their records if possible, and the plan with present slots.

    With `is_copy`, the words are the weights of the rows, float32 (unique, dim).
    """
    try:
        here = located(tables, plan)
    except CacheTooSmallError:  # reads may have any size
        parts = [weights_of(rows, plan.ids[own], choices) for rows, own in own_parts(tables, plan)]
        return PooledSource.of(np.concatenate(parts)), plan
    lag = any(map(HISTORY, tables)) and any(rows.lags for rows in tables)
    if is_copy or lag or tables[0].spec.codec is not None:  # a packed row is decoded once, and then pooled as float32
        return PooledSource.of(_values(tables, here, plan.epoch >= 0, choices)), here
    return PooledSource(tables[0].tier.pool.records.weights, *_with_fresh(tables, here, choices)), here


@spanned("gather")
def gather(source: PooledSource, positions: np.ndarray, out: np.ndarray) -> None:
    """Write the weights of positions, int32 (n,), to `out`, float32 (n, dim)."""
    words, slots, fresh = source
    kernels.cpu.launch(kernels.cpu.rows.gather, words, slots, positions, fresh, out)


def read(rows: TableState, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
    """Return the weights of a plan's positions: float32 of shape ``plan.shape + (dim,)``."""
    if out is None:
        out = buffers.empty((*plan.shape, rows.spec.dim), np.float32)
    gather(source_of((rows,), plan)[0], plan.inverse, out.reshape(-1, rows.spec.dim))
    return out


def _values(tables: Tables, here: Plan, keeps: bool, choices: Choices) -> np.ndarray:
    """Return the weights of the rows of a plan with present slots: float32 (unique, dim).

    With `keeps`, a step of the plan may take over rows that caught up.
    """
    records, values = pool_of(tables).records, buffers.empty((len(here.ids), tables[0].spec.dim), np.float32)
    gather(PooledSource(records.weights, *_with_fresh(tables, here, choices)), counting(len(values)), values)
    for _, run in itertools.groupby(own_parts(tables, here), lambda part: history_of(part[0])):
        alike = list(run)
        rows, own = alike[0][0], slice(alike[0][1].start, alike[-1][1].stop)
        state = _refresh(rows, records, here.slots[own], values[own])
        for each, part in alike if state is not None else ():
            _keep_instead(each, here.ids[part], here.slots[part], values[part], choices)
        # A step rounds 16-bit weights itself.
        if state is not None and keeps and rows.spec.dtype == "float32":
            versions = [(each.version, each.version.now) for each, _ in alike]
            rows.reads.keep(here, CaughtUpRows(versions, own, here.slots[own] >= 0, values[own], state))
    return values


def history_of(rows: TableState) -> Any:
    """Return what is the same for tables whose rows catch up by the same steps."""
    return rows if rows.history is None else rows.history.content


def weights_of(rows: TableState, ids: np.ndarray, choices: Choices = OWN_CHOICES) -> np.ndarray:
    """Return the weights of any number of rows, without loading them."""
    values = np.empty((len(ids), rows.spec.dim), np.float32)
    for start in range(0, len(ids), EXPORT_BATCH_ROWS):
        part = ids[start : start + EXPORT_BATCH_ROWS]
        records, slots = rows.tier.read_through(part)
        found, out = plan_of_rows(part, slots, -1), values[start : start + EXPORT_BATCH_ROWS]
        gather(PooledSource(records.weights, *_with_fresh((rows,), found, choices)), counting(len(part)), out)
        _refresh(rows, records, slots, out)
        _keep_instead(rows, part, slots, out, choices)
    return values


def _refresh(rows: TableState, records: Records, slots: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Catch up weights if they may be stale. Return the optimizer state that belongs to them; None: not stale."""
    if rows.history is None or not rows.history.moves_weights:
        return None
    return records.refresh(slots, values, rows.history.numbers())


def _with_fresh(tables: Tables, plan: Plan, choices: Choices) -> tuple[np.ndarray, np.ndarray]:
    """Return slots and the values of rows without a record, where slot ``-1 - k`` stands for value k."""
    slots = plan.slots
    if not plan.missing:
        return slots, _no_rows(tables[0].spec.dim)
    missing = (slots < 0).nonzero()[0]
    fresh = np.concatenate([unrecorded(rows, ids, choices) for rows, ids in missing_ids(tables, plan, missing)])
    slots = slots.copy()
    slots[missing] = -1 - np.arange(len(missing))
    return slots, fresh


@functools.cache
def _no_rows(dim: int) -> np.ndarray:
    return np.empty((0, dim), np.float32)


def missing_ids(tables: Tables, plan: Plan, missing: np.ndarray) -> Iterator[tuple[TableState, np.ndarray]]:
    """Iterate over the tables that have some of the `missing` rows of a plan, each with their ids."""
    cuts = missing.searchsorted(plan.rows).tolist()
    for rows, start, stop in zip(tables, cuts[:-1], cuts[1:], strict=True):
        if start < stop:
            yield rows, plan.ids[missing[start:stop]]


def unrecorded(
    rows: TableState, ids: np.ndarray, choices: Choices = OWN_CHOICES, out: np.ndarray | None = None
) -> np.ndarray:
    """Return the values of rows without records, float32 (n, dim). `out`: memory for them.

    Raises:
        IdError: there are some, and `missing` demands that there are none.
    """
    missing = _instead(rows, choices)
    values = np.empty((len(ids), rows.spec.dim), np.float32) if out is None else out
    if missing is None:
        return _as_first(rows, ids, values)
    absent = missing.absent(ids)
    if missing.choice == "raise" and absent.any():
        raise no_row(rows.subject, ids[absent])
    values[absent] = rows.row_instead(missing)
    if not absent.all():
        values[~absent] = _as_first(rows, ids[~absent], values[~absent])
    return values


def _as_first(rows: TableState, ids: np.ndarray, out: np.ndarray) -> np.ndarray:
    row = rows.default_row()
    if row is None:
        return rows.first_values(ids, out)
    out[:] = row
    return out


def _instead(rows: TableState, choices: Choices) -> Missing | None:
    """Return the choice that makes the values of a table's rows without records; None: they are as without one."""
    missing = choices.get(rows, rows.missing)
    if not missing or rows.are_all_there:
        return None
    return missing._replace(frozen=rows.spec.frozen) if rows.spec.frozen else missing


def choices_of(tables: Tables, missing: Missing | None, paddings: Sequence[int | None] = ()) -> Choices:
    """Return the choices of a lookup in tables, whose `paddings` are there; None: the tables' own.

    Raises:
        ArgumentError: a table has no such row.
    """
    if missing is None:
        return OWN_CHOICES
    for rows in tables:
        rows.row_instead(missing)
    each = paddings or [missing.padding] * len(tables)
    return {rows: missing._replace(padding=padding) for rows, padding in zip(tables, each, strict=True)}


def _keep_instead(rows: TableState, ids: np.ndarray, slots: np.ndarray, values: np.ndarray, choices: Choices) -> None:
    """Write the row of `missing` again, which a rule with ``dense=True`` has moved like initial values."""
    if (missing := _instead(rows, choices)) is not None:
        values[(slots < 0) & missing.absent(ids)] = rows.row_instead(missing)


def are_there(rows: TableState, ids: np.ndarray) -> np.ndarray:
    """Return which ids (n,) have a row: bool (n,)."""
    tier = rows.tier
    check_owned((rows,), (ids,))
    return np.ones(len(ids), bool) if rows.are_all_there else tier.holds(ids) | ~rows.spec.are_trained(ids)


# -------------------------------------------------------------------- without a plan


def planned(tables: Tables, ids: Sequence[np.ndarray]) -> Plan:
    """Return the plan of a batch of ids of each table, int64 of any shape, C-contiguous. The last step may still run.

    Raises:
        IdError: an id lies outside its table.
    """
    pool, n = pool_of(tables), [0]
    check_owned(tables, ids)
    for own in ids:
        n.append(n[-1] + own.size)
    shape, about = (ids[0].shape, _alone(tables[0])) if len(ids) == 1 else (None, described(tables, range(len(n))))
    return plan_tables(sources_of(ids), about, np.array(n), pool.index, pool.epoch, shape) or refuse(tables, ids)


def check_owned(tables: Tables, ids: Sequence[np.ndarray]) -> None:
    """Raise `ArgumentError` for rows of other processes, which would otherwise read as initial values."""
    if any(map(_OWNS, tables)):
        for rows, own in zip(tables, ids, strict=True):
            rows.check_owned(own)


def _alone(rows: TableState) -> np.ndarray:
    """Return the description of a table alone, kept for a generation of its lock."""
    generation = rows.table_lock.generation
    if rows.described is None or rows.described[0] != generation:
        rows.described = generation, described((rows,), (0, 1))
    return rows.described[1]


def described(tables: Tables, cuts: Sequence[int]) -> np.ndarray:
    """Return open tables as `plan_tables` takes them. `cuts` has the bounds of each table's features."""
    each = []
    for rows, first, last in zip(tables, cuts, cuts[1:], strict=False):
        low, end = bounds(rows.spec.rows)
        each.append((first, last, low, end - 1, rows.tier.base))
    return np.array(each, np.int64)


def refuse(tables: Tables, ids: Sequence[np.ndarray]) -> NoReturn:
    """Raise the error of the first ids outside their table, which `plan_tables` has found. One table of each ids."""
    for rows, own in zip(tables, ids, strict=True):
        check_range(own, rows.spec.rows, rows.subject)
    raise AssertionError("all ids are inside")


def look_up(tables: Tables, ids: Sequence[np.ndarray], out: np.ndarray, choices: Choices = OWN_CHOICES) -> None:
    """Write the weights of the ids (n,) of each table, one table after the other, to `out`: float32 (n, dim)."""
    pool, keys = pool_of(tables), []
    check_owned(tables, ids)
    for rows, own in zip(tables, ids, strict=True):
        if rows.history is not None and rows.lags:
            return _look_up_all(tables, ids, out, choices)
        base = 0 if rows.backend is None else rows.backend.base
        keys.append(own + base if base else own)
    joined = keys[0] if len(keys) == 1 else np.concatenate(keys)
    missing = (pool.look_up(joined, counting(len(joined)), out) < 0).nonzero()[0]
    if not len(missing):
        return None
    starts = bounds_of([len(own) for own in ids])
    cuts = missing.searchsorted(starts).tolist()
    parts = zip(ids, starts.tolist(), itertools.pairwise(cuts), strict=False)
    absent = [own[missing[lo:hi] - start] for own, start, (lo, hi) in parts]
    values = out if len(missing) == len(out) else np.empty((len(missing), out.shape[1]), np.float32)
    if pool.evicts and not pool.finds_all:
        _look_up_all(tables, absent, values, choices)
    else:
        for rows, own, (lo, hi) in zip(tables, absent, itertools.pairwise(cuts), strict=False):
            unrecorded(rows, own, choices, values[lo:hi])
    if values is not out:
        out[missing] = values


def _look_up_all(tables: Tables, ids: Sequence[np.ndarray], out: np.ndarray, choices: Choices) -> None:
    plan = planned(tables, ids)
    gather(source_of(tables, plan, choices=choices)[0], plan.inverse, out)
