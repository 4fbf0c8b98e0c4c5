"""Features of batches, described one by one, for tests of `embedrock.table.batches`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.table import batches
from embedrock.table.batches import Batch, FeatureLayout
from embedrock.table.table import Table, rows_of


class BatchFeature(NamedTuple):
    """One feature of a batch: see `FeatureLayout` and `Batch`."""

    table: Table
    ids: Any
    offsets: np.ndarray | None = None
    weights: np.ndarray | None = None
    mode: str | None = None
    padding: int | None = None


Layouts = dict[Any, FeatureLayout]


def arguments(features: Sequence[BatchFeature], known: Layouts | None = None) -> tuple[FeatureLayout, Any, Any, Any]:
    """Return features as `batches.plan` and `batches.read` take them. All have the lock of the first table.

    `known` keeps layouts for later batches.
    """
    tables, ids, offsets, weights, modes, paddings = map(list, zip(*features, strict=True))
    layout = FeatureLayout(rows_of(tables[0]).table_lock, tables, modes, paddings)
    if known is not None:
        layout = known.setdefault(tuple(map(tuple, (tables, modes, paddings))), layout)
    return layout, ids, offsets, weights


def plan(features: Sequence[BatchFeature], known: Layouts | None = None) -> Batch:
    return batches.plan(*arguments(features, known))


def read(features: Sequence[BatchFeature], **options: Any) -> Batch:
    return batches.read(*arguments(features), **options)


def sum_gradients(batch: Batch, grads: Sequence[np.ndarray | None]) -> list[tuple[Table, RowGradients]]:
    """Return the result of `batches.sum_blocks` for each table."""
    found: dict[Table, list[RowGradients]] = {}
    for tables, summed in batches.sum_blocks(batch, grads):
        for number, table in enumerate(tables):
            found.setdefault(table, []).append(summed.of(number))
    return [(table, RowGradients.sum_of(parts)) for table, parts in found.items()]
