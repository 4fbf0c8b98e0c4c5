"""Frozen rows in published folders: they are there, also without a record."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import embedrock as er


def test_a_subscriber_reads_frozen_rows_as_the_trainer_does(tmp_path: Path):
    with er.Table(None, 2, rule=er.SGD(1.0), frozen=[5, range(100, 103)], seed=0, path=tmp_path / "t") as table:
        table.assign([5], np.ones((1, 2)))
        table.update([1, 2, 100], np.ones((3, 2), np.float32))
        table.commit()
        er.publish(table, tmp_path / "served")
        with er.Subscriber(tmp_path / "served", missing="zeros") as served:
            served.refresh()
            with served.step() as step:
                (name,) = step
                rows = step[name].lookup([5, 100, 102, 1, 3])
        np.testing.assert_array_equal(rows, table.lookup([5, 100, 102, 1, 3], missing="zeros"))
        assert np.flatnonzero((rows == 0).all(1)).tolist() == [4]
