"""Read the weights of rows, in RAM or on disk, stale or not."""

from __future__ import annotations

import numpy as np

from embedrock.batch.plan import Plan, counting, make_plan
from embedrock.errors import CacheTooSmallError
from embedrock.storage.records import Records
from embedrock.system.buffers import buffers
from embedrock.table.prepared import CaughtUpRows
from embedrock.table.rows import TableState, check_owned

EXPORT_BATCH_ROWS = 65_536


def look_up(rows: TableState, ids: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return the weights of rows: float32 of shape ``ids.shape + (dim,)``, in `out` if it is given."""
    if rows.owns is not None:
        check_owned(ids, rows.owns, rows.subject)
    if rows.lags:
        return read(rows, make_plan(ids), out)
    if out is None:
        out = buffers.empty((*ids.shape, rows.spec.dim), np.float32)
    flat, values, tier = ids.reshape(-1), out.reshape(-1, rows.spec.dim), rows.tier
    missing = tier.look_up(flat, counting(flat.size), values) < 0
    if np.logical_or.reduce(missing):
        absent = flat[missing]
        values[missing] = read(rows, make_plan(absent)) if tier.evicts else unrecorded(rows, absent)
    return out


def read(rows: TableState, plan: Plan, out: np.ndarray | None = None) -> np.ndarray:
    """Return the weights of a plan's positions: float32 of shape ``plan.shape + (dim,)``."""
    if out is None:
        out = buffers.empty((*plan.shape, rows.spec.dim), np.float32)
    flat, here = out.reshape(-1, rows.spec.dim), _brought(rows, plan)
    if here is not None and not rows.lags:
        _read_rows(rows, rows.tier.records, here.ids, here.slots, here.inverse, flat)
        return out
    if here is None:
        values = weights_of(rows, plan.ids)
    else:
        values, state = _weights_at(rows, rows.tier.records, plan.ids, here.slots)
        # A plan without other references gets no step. A step rounds 16-bit weights itself.
        if state is not None and plan.epoch >= 0 and rows.spec.dtype == "float32":
            rows.reads.keep(plan, CaughtUpRows(rows.version.now, here.slots >= 0, values, state))
    np.take(values, plan.inverse, axis=0, out=flat, mode="clip")
    return out


def read_unique(rows: TableState, plan: Plan) -> np.ndarray:
    """Return the weights of a plan's rows: float32 (unique, dim)."""
    here = _brought(rows, plan)
    if here is None:
        return weights_of(rows, plan.ids)
    return _weights_at(rows, rows.tier.records, plan.ids, here.slots)[0]


def _brought(rows: TableState, plan: Plan) -> Plan | None:
    """Return a plan with all rows loaded; None if they do not fit the cache."""
    try:
        return rows.located(plan)
    except CacheTooSmallError:
        return None


def weights_of(rows: TableState, ids: np.ndarray) -> np.ndarray:
    """Return the weights of any number of rows, without loading them."""
    values = np.empty((len(ids), rows.spec.dim), np.float32)
    for start in range(0, len(ids), EXPORT_BATCH_ROWS):
        part = ids[start : start + EXPORT_BATCH_ROWS]
        records, slots = rows.tier.read_through(part)
        values[start : start + EXPORT_BATCH_ROWS] = _weights_at(rows, records, part, slots)[0]
    return values


def _weights_at(
    rows: TableState, records: Records, ids: np.ndarray, slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return weights as of the last step, and the optimizer state that belongs to them if they were stale."""
    values = buffers.empty((len(ids), rows.spec.dim), np.float32)
    _read_rows(rows, records, ids, slots, counting(len(ids)), values)
    if rows.history is None or not rows.history.moves_weights:
        return values, None
    return values, records.refresh(slots, values, rows.history.numbers())


def _read_rows(
    rows: TableState, records: Records, ids: np.ndarray, slots: np.ndarray, positions: np.ndarray, out: np.ndarray
) -> None:
    """Write the weights of ``ids[positions]`` to `out`; their records are in ``slots[positions]``."""
    missing, fresh = slots < 0, np.empty((0, rows.spec.dim), np.float32)
    if missing.any():
        fresh = unrecorded(rows, ids[missing])
        slots = slots.copy()
        slots[missing] = -1 - np.arange(len(fresh))
    records.read(slots, positions, fresh, out)


def unrecorded(rows: TableState, ids: np.ndarray) -> np.ndarray:
    """Return the values of rows without records, float32 (n, dim)."""
    row = rows.default_row()
    return rows.first_values(ids) if row is None else np.repeat(row[None], len(ids), axis=0)
