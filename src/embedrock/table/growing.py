"""Grow a table to more rows, or to open ids, and delete rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embedrock.admission.lifecycle import RowLifecycle
from embedrock.errors import ArgumentError, ReadOnlyTableError, UnsupportedError, counted
from embedrock.initializers import FromArray, Initializer
from embedrock.spec.spec import OPEN_IDS, Spec, check_count
from embedrock.table.reading import EXPORT_BATCH_ROWS
from embedrock.table.rows import TableState


def forget(rows: TableState, ids: np.ndarray) -> int:
    """Delete rows for good: see `Table.forget`."""
    rows.check()
    rows.check_commit()
    if rows.executor is not None and not rows.executor.may_forget():  # it plans: the rows of a batch are not known
        raise UnsupportedError(
            f"{rows.subject} cannot forget rows while they are used {rows.executor!r}: the host does not know which of "
            "them a batch has that is not stepped yet. Call forget(ids) of a layer, which brings them back to the CPU "
            "first, and to the GPU again at its next call."
        )
    ids = np.unique(ids)
    unfinished = np.intersect1d(ids, rows.unfinished)
    if len(unfinished):
        raise ArgumentError(
            f"{rows.subject} cannot forget rows of a batch that was read and is not stepped yet: got "
            f"{counted(len(unfinished), 'row')}, first ids {unfinished[:8].tolist()}. Step the batch first, or "
            "drop its plan and what was computed from it."
        )
    count = _discard(rows, ids, ids[rows.tier.holds(ids)])
    rows.tell()
    return count


def _discard(rows: TableState, ids: np.ndarray, there: np.ndarray) -> int:
    if len(there):
        rows.tier.discard(there, is_final=True)
    if rows.lifecycle is not None:
        rows.lifecycle.forget(ids, there)
        rows.lifecycle.leave(there)
    is_told = bool(len(ids)) and rows.location.bury(rows.name, rows.version, ids, len(there))
    if len(there) or rows.lifecycle is not None or is_told:
        rows.forget_batches()
        rows.version.advance()
    return len(there)


def grow(rows: TableState, count: int | None, init: Initializer | None) -> None:
    """Grow to `count` rows, None for open ids: see `Table.grow`."""
    rows.check_commit()
    if rows.executor is not None:
        raise UnsupportedError(
            f"{rows.subject} cannot grow while its rows are used {rows.executor!r}. Call grow({count}) of a layer, "
            "which "
            "brings them back to the CPU first, and to the GPU again at its next call."
        )
    rows.location.wait_for_quiet()  # the lock may have been released meanwhile
    if count == rows.spec.rows and init is None:
        return
    rows.grow(grown_spec(rows.spec, count, init, rows.subject))


def grown_spec(spec: Spec, count: int | None, init: Initializer | None, subject: str) -> Spec:
    """Return the spec of a table with more rows, None for open ids.

    Raises:
        ArgumentError: it already has as many, or its initial values do not cover them.
    """
    had = spec.rows
    if count is not None:
        check_count("`rows`", count, OPEN_IDS)
    if had is None or (count is not None and count < had):
        has = "takes any int64 as an id" if had is None else f"has {had}"
        raise ArgumentError(
            f"`rows` of {subject} can only grow: got {count}, and it {has}. For fewer, make a new table, and write the "
            "rows that are to stay by assign(ids, values)."
        )
    return replace(spec, rows=count, init=_first_values(spec.init, had, count, init, subject))


def _first_values(own: Initializer, had: int, count: int | None, init: Initializer | None, subject: str) -> Initializer:
    if not isinstance(own, FromArray):
        if init is not None:
            raise ArgumentError(f"`init` of {subject} stays {own} when it grows: got {init}. Leave it out.")
        return own
    if isinstance(init, FromArray) and type(init) is type(own) and len(init.array) == count:
        first = type(init)(init.array[:had])
        if first.describe() == own.describe() and first.digest == own.digest:
            return init
    rows, got = "any id" if count is None else counted(count, "row"), "no other one" if init is None else init
    raise ArgumentError(
        f"first values of {subject} come from an array of {counted(had, 'row')}: got {got} for {rows}. Pass "
        f"init=er.{type(own).__name__}(array) with an array of {count or 'so many'} rows, of which the first {had} are "
        "those of the old one."
    )


def change_policies(rows: TableState, given: Mapping[str, Any], writes: bool) -> None:
    """Replace the admission, the eviction, or both.

    Raises:
        ArgumentError: the counts belong to another admission.
        ReadOnlyTableError: the table cannot change.
    """
    spec, changed = rows.spec, {name: policy for name, policy in given.items() if policy is not None}
    if not changed:
        return
    if not writes:
        raise ReadOnlyTableError(
            f'`{next(iter(changed))}` is for training, and {rows.subject} was opened with mode="r". Leave it out, or '
            'open it with mode="w".'
        )
    wanted, had = changed.get("admission", spec.admission), rows.lifecycle
    is_other = wanted != spec.admission
    if is_other and had is not None and spec.admission is not None and had.has_counts:
        raise ArgumentError(
            f"`admission` of {rows.subject} must be that by which it has counted ids, {spec.admission}: got {wanted}. "
            "Leave it out; or make a new table, of which the weights of rows that have a record are taken over, and "
            'nothing else: table.assign(*er.open(path, mode="r").export()).'
        )
    made = RowLifecycle.of(replace(spec, **changed), rows.subject)
    assert made is not None  # at least one policy was given
    if had is not None:
        if "eviction" in changed and not changed["eviction"].has_mirror:
            had.end_mirror()
        made.take_over(had, keeps_counts=not is_other)
    if made.usage is not None and not made.usage.count and rows.tier.count:
        ids = np.concatenate([np.empty(0, np.int64), *rows.tier.id_batches(EXPORT_BATCH_ROWS)])
        made.usage.adopt(ids, made.steps)
    rows.spec = replace(spec, **changed)
    rows.let(made)
