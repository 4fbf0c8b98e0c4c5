"""`changes` and `refresh(changes=True)` of a sharded table that is read as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.distributed.commits import part_to_open
from embedrock.distributed.owners import Shard

DIM, RANKS = 2, 3


def step(tables: list[er.Table], ids: np.ndarray, number: int) -> None:
    for rank, table in enumerate(tables):
        own = ids[Shard(rank, RANKS).owns(ids)]
        table.update(own, np.ones((len(own), DIM)))
        table.commit(step=number)


def told(changes: er.RowChanges) -> dict[int, list[float]]:
    return {int(i): row.tolist() for ids, rows, _ in changes for i, row in zip(ids, rows, strict=True)}


def test_changes_of_all_shards_are_in_it(tmp_path: Path) -> None:
    path = str(tmp_path / "users.rock")
    parts = [part_to_open(path, rank, RANKS, "users") for rank in range(RANKS)]
    tables = [er.Table(None, DIM, path=part, rule=er.SGD(lr=1.0), init=er.Zeros(), seed=1, keep=3) for part in parts]
    step(tables, np.arange(20), 1)
    with er.open(path, mode="r") as reader:
        first = reader.last_commit
        assert told(reader.changes(None)) == {i: [-1.0, -1.0] for i in range(20)}
        assert not reader.refresh(changes=True)
        step(tables, np.array([3, 4, 900]), 2)
        found = told(reader.refresh(changes=True))
        assert found == {3: [-2.0, -2.0], 4: [-2.0, -2.0], 900: [-1.0, -1.0]}
        step(tables, np.array([5]), 3)
        reader.refresh()
        changes = reader.changes(first)
        assert told(changes).keys() == {3, 4, 5, 900}
        assert changes.ids is not None
        assert changes.ids.tolist() == [3, 4, 5, 900]
        assert repr(changes) == f"RowChanges(4 rows of commit {reader.last_commit} since {first})"
        assert repr(reader.changes(None)).startswith("RowChanges(all rows of commit")
        with pytest.raises(er.HistoryDroppedError, match="has no list of the rows that changed since commit 17"):
            reader.changes(17)
        for number in range(4, 9):
            step(tables, np.array([number]), number)
        changes = reader.refresh(changes=True)  # the shards have dropped the commit before: all rows
        assert changes.since is None
        assert told(changes).keys() == {*range(20), 900}
    for table in tables:
        table.close()
