"""Who has a record in a table that is opened again with another admission or eviction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError, ReadOnlyTableError
from embedrock.residents.residents import RowLifecycle
from embedrock.table.reading import EXPORT_BATCH_ROWS
from embedrock.table.rows import TableState


def change_policies(rows: TableState, given: Mapping[str, Any], writes: bool) -> None:
    """Let rows come by another admission and leave by another eviction: those that are given.

    Raises:
        ArgumentError: ids were counted by another admission.
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
    assert made is not None  # as something was given
    if had is not None:
        if "eviction" in changed and not changed["eviction"].has_mirror:
            had.end_mirror()
        made.take_over(had, keeps_counts=not is_other)
    if made.knows_rows and not made.row_count and rows.tier.count:
        made.adopt(np.concatenate([np.empty(0, np.int64), *rows.tier.id_batches(EXPORT_BATCH_ROWS)]))
    rows.spec = replace(spec, **changed)
    rows.let(made)
