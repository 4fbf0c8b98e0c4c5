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
