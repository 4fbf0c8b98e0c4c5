"""`Table.changes` and `Group.changes`: every row that differs between two commits is named, whatever lies between."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow import slow

import embedrock as er
from embedrock.store import change_lists
from embedrock.store.segments import CorruptTableError

DIM = 3


def contents(table: Any) -> dict[int, bytes]:
    """Return the rows with a record, as the last commit has them."""
    with er.open(table.path, mode="r") as reader:
        return {int(i): row.tobytes() for i, row in zip(*reader.export(), strict=True)}


def told(changes: er.RowChanges) -> tuple[dict[int, bytes], set[int]]:
    """Return the rows and the gone ids of changes, each of which comes once."""
    there, gone = dict[int, bytes](), list[int]()
    for ids, rows, left in changes:
        assert rows.dtype == np.float32
        assert np.all(np.diff(ids) > 0)
        assert there.keys().isdisjoint(ids.tolist())
        there |= {int(i): row.tobytes() for i, row in zip(ids, rows, strict=True)}
        gone += left.tolist()
    assert len(set(gone)) == len(gone)
    assert there.keys().isdisjoint(gone)
    return there, set(gone)


def check(before: dict[int, bytes], now: dict[int, bytes], changes: er.RowChanges, touched: set[int]) -> None:
    there, gone = told(changes)
    assert {i for i in before.keys() | now.keys() if before.get(i) != now.get(i)} <= there.keys() | gone
    assert there.keys() | gone <= touched, "rows that nobody touched"
    assert there == {i: now[i] for i in there}
    assert gone.isdisjoint(now)


class Life:
    """A random life of a table: after each commit, the changes since each earlier one."""

    def __init__(self, path: str, seed: int, rows: int | None = 400) -> None:
        self.rng, self.rows = np.random.default_rng(seed), rows
        self.table = er.Table(rows=rows, dim=DIM, path=path, rule=er.SGD(lr=1.0), memory="2MiB", keep=2, seed=1)
        self.states, self.touched = {0: dict[int, bytes]()}, [set[int]()]
        self.forgotten = set[int]()  # a commit after a rollback may name them again, as gone

    def ids(self) -> np.ndarray:
        top = self.table.rows or 2**62
        span = min(top, int(self.rng.choice([20, 400, top])))
        return np.unique(self.rng.integers(0, span, self.rng.integers(1, 60)))

    def step(self) -> None:
        match self.rng.choice(["update"] * 4 + ["forget", "compact", "commit", "commit", "reopen", "crash", "back", "grow"]):
            case "update":
                ids = self.ids()
                self.table.update(ids, self.rng.normal(size=(len(ids), DIM)))
                self.touched[-1] |= set(ids.tolist())
            case "forget":
                ids = self.ids()
                self.table.forget(ids)
                self.touched[-1] |= set(ids.tolist())
                self.forgotten |= set(ids.tolist())
            case "compact":
                self.table.compact()
                self.committed(has_touched=False)
            case "commit":
                self.table.commit()
                self.committed()
            case "reopen":
                self.table.commit()
                self.committed()
                self.reopen()
            case "crash":
                self.reopen()
                self.touched[-1] = set()
            case "back":
                target = int(self.rng.choice([line["commit"] for line in self.table.commits()]))
                lost = {i for commit, ids in enumerate(self.touched) if commit >= target for i in ids}
                self.table.rollback(target)
                self.touched[-1] = lost
                self.committed()
            case "grow":
                if self.table.rows is not None and self.table.rows < 2000:
                    self.table.grow(self.table.rows + 50)

    def reopen(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", er.UncommittedWarning)
            self.table.close()
        self.table = er.open(self.table.path, memory="2MiB", keep=2)

    def committed(self, has_touched: bool = True) -> None:
        last = self.table.last_commit
        if last in self.states:
            return
        touched = self.touched[-1] if has_touched else set()
        self.touched[-1:] = [touched, set() if has_touched else self.touched[-1]]
        self.states[last] = contents(self.table)
        for since, before in self.states.items():
            own = {i for ids in self.touched[since:] for i in ids} | self.forgotten
            try:
                changes = self.table.changes(since)
            except er.HistoryDroppedError as error:
                assert error.oldest > since
                assert any(line["commit"] == error.oldest for line in self.table.commits()) or error.oldest > 0
                continue
            check(before, self.states[last], changes, own)


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 300))])
def test_all_that_differs_is_named_after_any_life(tmp_path: Path, seed: int) -> None:
    life = Life(str(tmp_path / "t"), seed, [400, 400, None][seed % 3])
    for _ in range(60):
        life.step()
    life.table.commit()
    life.committed()
    life.table.close()


def test_compaction_that_makes_room_before_a_commit_loses_no_id(tmp_path: Path) -> None:
    # The logs of the commit name a part of the rows only: the rest was compacted before any manifest named it.
    rows = 60_000
    rng = np.random.default_rng(0)
    with er.Table(rows=rows, dim=16, path=str(tmp_path / "t"), rule=er.SGD(lr=1.0), memory="2MiB") as table:
        table.update(np.arange(rows), np.ones((rows, 16)))
        table.commit()
        before, touched = contents(table), set[int]()
        for _ in range(60):
            ids = np.unique(rng.integers(0, rows, 2000))
            table.update(ids, np.ones((len(ids), 16)))
            touched |= set(ids.tolist())
        assert table.stats()["bytes_compacted"]
        table.commit()
        check(before, contents(table), table.changes(1), touched)
