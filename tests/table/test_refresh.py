"""Snapshots that go on with the newest commit: `refresh`, for services that follow a table that is trained."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import embedrock as er
from embedrock.table import storage
from embedrock.table.storage import StorageManager

IDS = np.arange(40) * 23 % 1000


def trained(path: Path, steps: int = 1, **options) -> er.Table:
    """Return a table on disk whose rows of `IDS` are the number of its steps, as of its last commit."""
    table = er.Table(rows=1000, dim=3, path=path, rule=er.SGD(lr=1.0), init=er.Zeros(), **options)
    for _ in range(steps):
        step(table)
    return table


def step(table: er.Table) -> None:
    table.update(IDS, -np.ones((len(IDS), table.dim), np.float32))
    table.commit(step=table.steps)


def looked_up(table: er.Table) -> float:
    found = np.unique(table.lookup(IDS))
    assert len(found) == 1
    return float(found[0])


def test_a_snapshot_moves_when_it_is_told_to(tmp_path: Path):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        assert not snapshot.refresh()
        step(table)
        step(table)
        assert (looked_up(snapshot), snapshot.last_step) == (1, 1)
        assert snapshot.refresh()
        assert not snapshot.refresh()
        assert (looked_up(snapshot), snapshot.last_step, snapshot.steps) == (3, 3, 3)
        assert snapshot.last_commit == table.last_commit
        assert not snapshot.uncommitted


def test_a_snapshot_of_an_earlier_commit_moves_to_the_newest(tmp_path: Path):
    with trained(tmp_path / "t", steps=2) as table, er.open(tmp_path / "t", mode="r", at=1) as snapshot:
        assert looked_up(snapshot) == 1
        assert snapshot.refresh()
        assert looked_up(snapshot) == looked_up(table) == 2


def test_what_a_table_has_become(tmp_path: Path):
    with trained(tmp_path / "t", steps=2) as table, er.open(tmp_path / "t", mode="r") as snapshot:
        table.rollback(1)
        assert snapshot.refresh()
        assert looked_up(snapshot) == 1
        table.grow(5000)
        table.set_rule(er.Adam(), reset_state=True)
        table.assign([4999], [[7.0, 8.0, 9.0]])
        table.commit()
        table.compact()
        assert snapshot.refresh()
        assert (snapshot.rows, snapshot.rule) == (5000, er.Adam())
        assert snapshot.lookup([4999]).tolist() == [[7, 8, 9]]
        assert looked_up(snapshot) == 1


def test_threads_see_one_commit_or_another(tmp_path: Path):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        seen, done = [1.0], threading.Event()

        def serve() -> None:
            while not done.is_set():
                seen.append(looked_up(snapshot))

        service = threading.Thread(target=serve)
        service.start()
        try:
            for _ in range(10):
                step(table)
                assert snapshot.refresh()
        finally:
            done.set()
            service.join()
        assert seen == sorted(seen)
        assert looked_up(snapshot) == 11


def test_a_table_of_a_group_that_no_commit_has_yet(tmp_path: Path):
    with er.Group(path=tmp_path / "g", memory="1MiB") as group:
        group.table("users", rows=10, dim=2)
        with er.open(tmp_path / "g", mode="r") as snapshot:
            later = (
                r"This reader shows commit 0: a table that was made since comes by refresh\(\), once its writer has com"
            )
            with pytest.raises(er.UnknownTableError, match=rf"has no table 'users': it is empty\. {later}"):
                snapshot["users"]
            group.commit()
            assert snapshot.refresh()
            assert snapshot["users"].rows == 10
            with pytest.raises(er.UnknownTableError, match=r"has 'users'\. Did you mean 'users'\?$"):
                snapshot["user"]
        with pytest.raises(er.UnknownTableError, match=r"no table 'items': it has 'users'\.$"):
            group["items"]


def test_batches_that_were_asked_for_before(tmp_path: Path):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        found = []
        for ids in snapshot.prefetch([IDS[:9]] * 5, depth=2):
            found.append(float(snapshot.lookup(ids)[0, 0]))
            step(table)
            assert snapshot.refresh()
        assert found == [1, 2, 3, 4, 5]
        old = snapshot.plan(IDS)
        step(table)
        assert snapshot.refresh()
        assert snapshot.read(old)[0, 0] == 7


def test_files_of_the_commit_before_are_closed(tmp_path: Path):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        for _ in range(3):
            step(table)
            assert snapshot.refresh()
        named = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        logs = {re.sub(r" \(deleted\)$", "", name) for name in named if f"{tmp_path}/t/delta" in name}
        assert logs <= {str(log) for log in (tmp_path / "t" / "delta").iterdir()}


def test_a_commit_that_is_damaged_leaves_the_snapshot_as_it_is(tmp_path: Path):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        step(table)
        newest = max((tmp_path / "t" / "manifest").iterdir())
        newest.write_bytes(newest.read_bytes()[:-40])
        with pytest.raises(er.CorruptTableError, match=r"\d+"):
            snapshot.refresh()
        assert (looked_up(snapshot), snapshot.last_commit) == (1, 1)


def test_a_failure_on_the_way_leaves_the_snapshot_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with trained(tmp_path / "t") as table, er.open(tmp_path / "t", mode="r") as snapshot:
        looked_up(snapshot)
        step(table)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "history_of", failing := Failing(storage.history_of))
            with pytest.raises(MemoryError):
                snapshot.refresh()
        assert failing.calls == 2
        assert (looked_up(snapshot), snapshot.last_commit) == (1, 1)
        assert snapshot.refresh()
        assert looked_up(snapshot) == 2


class Failing:
    """A method that fails the first time."""

    def __init__(self, method) -> None:
        self.method, self.calls = method, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == 1:
            raise MemoryError
        return self.method(*args)

    def __get__(self, instance, owner):
        return lambda *args: self(instance, *args)


def test_another_table_at_its_path(tmp_path: Path):
    trained(tmp_path / "t").close()
    with er.open(tmp_path / "t", mode="r") as snapshot:
        shutil.rmtree(tmp_path / "t")
        with pytest.raises(er.TableFileError, match="there is no table here"):
            snapshot.refresh()
        with trained(tmp_path / "t", steps=1, seed=2) as other:
            expected = re.escape(f"another table lies here now, {other.uuid}, not the one that was opened")
            with pytest.raises(er.TableFileError, match=expected + ".*Open it anew"):
                snapshot.refresh()
        assert looked_up(snapshot) == 1


def test_tables_that_are_no_snapshots(tmp_path: Path):
    with trained(tmp_path / "t") as table:
        refused = r"table '.*' is open for writing, .*refresh\(\) is for snapshots, er\.open\('.*', mode=\"r\"\)"
        with pytest.raises(er.UnsupportedError, match=refused):
            table.refresh()
    with pytest.raises(er.UnsupportedError, match="lives in RAM and has no commits"):
        er.Table(rows=10, dim=2).refresh()
    with pytest.raises(er.UnsupportedError, match="the group lives in RAM and has no commits"):
        er.Group().refresh()
    with er.open(tmp_path / "t", mode="r") as snapshot:
        pass
    with pytest.raises(er.ClosedTableError):
        snapshot.refresh()


def test_a_group(tmp_path: Path):
    with er.Group(path=tmp_path / "g") as group:
        for name in ("users", "items", "old"):
            group.table(name, rows=1000, dim=3, rule=er.SGD(lr=1.0), init=er.Zeros())
        group.commit(step=0)
        with er.open(tmp_path / "g", mode="r") as snapshot:
            users, old = snapshot["users"], snapshot["old"]
            assert not snapshot.refresh()
            for name in ("users", "items"):
                group[name].update(IDS, -np.ones((len(IDS), 3), np.float32))
            group.drop("old")
            group.table("new", rows=10, dim=2, init=er.Constant(5.0))
            group.commit(step=1)
            assert looked_up(users) == 0
            assert users.refresh()
            assert (looked_up(users), looked_up(snapshot["items"]), snapshot.last_step) == (1, 1, 1)
            assert list(snapshot) == ["users", "items", "new"]
            assert snapshot["users"] is users
            assert snapshot["new"].lookup([3]).tolist() == [[5, 5]]
            with pytest.raises(er.ClosedTableError):
                old.lookup([1])
            assert not users.refresh()


def test_a_failure_on_the_way_leaves_all_members_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with er.Group(path=tmp_path / "g") as group:
        for name in ("users", "items"):
            group.table(name, rows=1000, dim=3, rule=er.SGD(lr=1.0), init=er.Zeros())
        group.commit(step=0)
        with er.open(tmp_path / "g", mode="r") as snapshot:
            users, items = snapshot["users"], snapshot["items"]
            group["items"].update(IDS, -np.ones((len(IDS), 3), np.float32))
            group.drop("users")
            group.commit(step=1)
            with monkeypatch.context() as patch:
                patch.setattr(StorageManager, "_wake", Failing(StorageManager._wake))
                with pytest.raises(MemoryError):
                    snapshot.refresh()
            assert (looked_up(users), looked_up(items), snapshot.last_step) == (0, 0, 0)
            assert snapshot.refresh()
            assert looked_up(items) == 1
