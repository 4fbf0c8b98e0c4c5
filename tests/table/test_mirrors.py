"""Mirrors of a table hear of every row that leaves, by whatever door, and of those that a rollback brings back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.__main__ import main


class Mirror:
    """Has the ids of the rows of a table, by what it was told: rows come by whoever trains them."""

    def __init__(self) -> None:
        self.ids = set[int]()

    def eviction(self, max_rows: int = 10) -> er.Eviction:
        return er.Eviction(max_rows=max_rows, by="recency", evicted=self._left, returned=self._back)

    def _left(self, ids: np.ndarray) -> None:
        assert len(set(ids.tolist())) == len(ids)
        self.ids -= set(ids.tolist())

    def _back(self, ids: np.ndarray) -> None:
        self.ids |= set(ids.tolist())

    def train(self, table: er.Table, ids: Any) -> None:
        self.ids |= set(ids)  # before the step, which tells who left
        table.update(list(ids), np.ones((len(ids), 2), np.float32))

    def check(self, table: er.Table) -> None:
        assert self.ids == set(table.export()[0].tolist())


def opened(location: Path, mirror: Mirror | None, in_group: bool) -> tuple[er.Table | er.Group, er.Table]:
    """Return what is to be closed, and the table: alone, or a member of a group."""
    eviction = None if mirror is None else mirror.eviction()
    options: dict[str, Any] = {"rows": None, "dim": 2, "rule": er.SGD(lr=0.1), "eviction": eviction}
    if in_group:
        group = er.Group(path=location, keep=5)
        return group, group.table("users", **options)
    table = er.Table(path=location, keep=5, **options)
    return table, table


@pytest.mark.parametrize("in_group", [False, True])
def test_a_mirror_has_the_rows_of_the_table(in_group: bool, tmp_path: Path):
    mirror = Mirror()
    whole, table = opened(tmp_path / "t", mirror, in_group)
    with whole:
        mirror.train(table, range(5))
        first = whole.commit(name="first")
        assert table.forget([1, 2, 77]) == 2
        mirror.check(table)
        mirror.train(table, range(10, 19))
        mirror.check(table)
        whole.commit()
        whole.rollback(first)  # some are back, some have left, and who was forgotten stays away
        mirror.check(table)
        assert sorted(mirror.ids) == [0, 3, 4]
        mirror.train(table, [3, 50])
        mirror.check(table)
        whole.commit()


@pytest.mark.parametrize("in_group", [False, True])
def test_a_mirror_hears_at_the_next_open_what_another_process_has_done(in_group: bool, tmp_path: Path):
    mirror, name = Mirror(), f"{tmp_path / 't'}{'#users' if in_group else ''}"
    whole, table = opened(tmp_path / "t", mirror, in_group)
    mirror.train(table, range(8))
    whole.commit(name="first")
    whole.close()
    (tmp_path / "ids.txt").write_text("1\n2\n900\n")
    assert main(["forget", name, str(tmp_path / "ids.txt"), "--keep", "3"]) == 0
    with er.open(tmp_path / "t") as again:  # without it: rows that leave are kept for it
        member = again["users"] if isinstance(again, er.Group) else again
        member.update(np.arange(20, 26), np.ones((6, 2), np.float32))
        again.commit()
    mirror.ids |= set(range(20, 26))  # as it may read from the table
    whole, table = opened(tmp_path / "t", mirror, in_group)
    mirror.check(table)
    whole.commit()
    whole.close()
    assert main(["rollback", str(tmp_path / "t"), "1"]) == 0
    whole, table = opened(tmp_path / "t", mirror, in_group)
    mirror.check(table)
    assert sorted(mirror.ids) == [0, 3, 4, 5, 6, 7]
    whole.commit()
    whole.close()


def test_what_a_mirror_could_not_take_it_hears_again(tmp_path: Path):
    left, fails = list[int](), [True]

    def evicted(ids: np.ndarray) -> None:
        if fails[0]:
            raise OSError("the mirror is away")
        left.extend(ids.tolist())

    def made() -> er.Table:
        eviction = er.Eviction(max_rows=10, evicted=evicted)
        return er.Table(None, 2, rule=er.SGD(lr=0.1), path=tmp_path / "t", eviction=eviction)

    with made() as table:
        table.update([1, 2, 3], np.ones((3, 2), np.float32))
        with pytest.raises(OSError, match="the mirror is away"):
            table.forget([1, 2])
        assert table.export()[0].tolist() == [3]
        table.commit()
    with pytest.raises(OSError, match="the mirror is away"):
        made()
    fails[0] = False
    with made() as table:
        assert left == [1, 2]
        table.commit()
    made().close()
    assert left == [1, 2]


def test_an_eviction_that_tells_nobody_ends_a_mirror(tmp_path: Path):
    mirror = Mirror()
    whole, table = opened(tmp_path / "t", mirror, False)
    with whole:
        mirror.train(table, range(5))
        table.commit()
    with er.Table(None, 2, path=tmp_path / "t", eviction=er.Eviction(max_rows=10)) as table:
        table.forget([1])
        table.commit()
    whole, table = opened(tmp_path / "t", mirror, False)
    whole.close()
    assert mirror.ids == set(range(5))
