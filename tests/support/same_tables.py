"""What says that a table on disk is the same, byte by byte, as one in RAM, and the rules by which they are stepped."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

import embedrock as er
from embedrock import optimizers as rules
from embedrock.table.table import rows_of
from suites import records_of

LAZY = tuple(cast(Any, kind)(lr=0.1) for kind in rules.RULES)
LAGGING = (  # which also move rows that a batch does not touch
    er.Adam(lr=0.1, dense=True),
    er.AdamW(lr=0.1, weight_decay=0.1, dense=True, eps_hat=True),
    er.Momentum(lr=0.1, nesterov=True, lr_inside=True, dense=True),
    er.Ftrl(lr=0.1, dense=True),
)
RULES = (*LAZY, er.RMSprop(lr=0.1, eps_inside=True, dense=True), *LAGGING)  # every rule, and all that have a history


def check_same(table: er.Table, ram: er.Table) -> None:
    """Fail unless two tables have the same rows, byte by byte, and will step alike."""
    (ids, records), (expected_ids, expected) = records_of(table), records_of(ram)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(records, expected)
    assert table.stats()["rows_touched"] == len(ids)
    assert (table.steps, table.rule) == (ram.steps, ram.rule)
    kept = [rows_of(t).history for t in (table, ram)]
    histories = [{} if history is None else history.state() for history in kept]
    assert histories[0].keys() == histories[1].keys()
    for name, array in histories[0].items():
        np.testing.assert_array_equal(array, histories[1][name])
    who = [rows_of(t).lifecycle for t in (table, ram)]
    states = [{} if lifecycle is None else lifecycle.state() for lifecycle in who]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name], name)
    for got, wanted in zip(table.export(), ram.export(), strict=True):
        np.testing.assert_array_equal(got, wanted)


def check_changes(table: er.Table, since: int, before: er.Table, now: er.Table) -> None:
    """Fail unless changes name all rows that differ between two tables in RAM, or are refused in words."""
    is_dense = now.rule is not None and now.rule.history() is not None
    try:
        found = [*table.changes(since)]
    except er.HistoryDroppedError:
        return
    except er.UnsupportedError:
        if is_dense:
            return
        raise
    assert not is_dense
    old, new = _weights_of(before), _weights_of(now)
    told = {row: weights for ids, rows, _ in found for row, weights in zip(ids.tolist(), map(bytes, rows), strict=True)}
    gone = {row for *_, ids in found for row in ids.tolist()}
    assert {row for row in old.keys() | new.keys() if old.get(row) != new.get(row)} <= told.keys() | gone
    assert told == {row: new[row] for row in told}
    assert gone.isdisjoint(new)


def _weights_of(table: er.Table) -> dict[int, bytes]:
    return {row: bytes(weights) for row, weights in zip(table.export()[0].tolist(), table.export()[1], strict=True)}
