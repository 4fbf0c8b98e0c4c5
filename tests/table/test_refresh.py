"""`refresh` of a reader: it reads new logs only, keeps the unchanged rows of its cache, and says what changed."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.store.table_folder import TableFolder
from embedrock.table.storage import StorageManager
from slow import slow

ROWS, DIM = 500, 4


def writer(path: Path, **options: Any) -> er.Table:
    table = er.Table(rows=ROWS, dim=DIM, path=path, rule=er.SGD(lr=1.0), seed=3, **options)
    table.update(np.arange(ROWS), np.ones((ROWS, DIM)))
    table.commit()
    return table


def told(changes: er.RowChanges) -> dict[int, bytes | None]:
    found = dict[int, bytes | None]()
    for ids, rows, gone in changes:
        found |= {int(i): row.tobytes() for i, row in zip(ids, rows, strict=True)} | dict.fromkeys(gone.tolist())
    return found


def test_unchanged_rows_stay_in_the_cache(tmp_path: Path) -> None:
    table = writer(tmp_path / "t")
    with er.open(tmp_path / "t", mode="r") as reader:
        reader.lookup(np.arange(100))
        reads = reader.stats()["reads"]
        table.update([3, 4, 400], np.ones((3, DIM)))
        table.commit()
        assert reader.refresh()
        assert not reader.refresh()
        np.testing.assert_array_equal(reader.lookup(np.arange(100)), table.lookup(np.arange(100)))
        assert reader.stats()["reads"] == reads + 2
    table.close()


@pytest.mark.parametrize("seed", [*range(3), *slow(*range(3, 100))])
def test_a_reader_follows_any_life(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = writer(tmp_path / "t", keep=2)
    mirror = dict[int, bytes]()
    with er.open(tmp_path / "t", mode="r", memory="1MiB") as reader:
        mirror = {i: row.tobytes() for i, row in enumerate(reader.lookup(np.arange(ROWS)))}
        for _ in range(40):
            ids = np.unique(rng.integers(0, ROWS, rng.integers(1, 30)))
            match rng.choice(
                ["update", "update", "forget", "commit", "compact", "rollback", "look", "refresh", "rule"]
            ):
                case "update":
                    table.update(ids, rng.normal(size=(len(ids), DIM)))
                case "forget" if rng.random() < 0.4:
                    table.forget(ids)
                case "commit":
                    table.commit()
                case "compact":
                    table.compact()
                case "rollback" if rng.random() < 0.4:
                    table.rollback(table.commits()[0]["commit"])
                case "rule" if rng.random() < 0.2:
                    table.set_rule(er.Adagrad() if table.rule == er.SGD(lr=1.0) else er.SGD(lr=1.0), reset_state=True)
                case "look":
                    expected = np.stack([np.frombuffer(mirror[i], np.float32) for i in ids.tolist()])
                    np.testing.assert_array_equal(reader.lookup(ids), expected)
                case "refresh":
                    changes = reader.refresh(changes=True)
                    with er.open(tmp_path / "t", mode="r") as fresh:
                        now = {i: row.tobytes() for i, row in enumerate(fresh.lookup(np.arange(ROWS)))}
                        assert reader.last_commit == fresh.last_commit
                    found = told(changes)
                    if changes.since is not None:
                        assert {i for i in now if now[i] != mirror[i]} <= found.keys()
                    assert all(row is None or row == now[i] for i, row in found.items())
                    mirror = now
                    rows = reader.lookup(np.arange(ROWS))
                    assert {i: row.tobytes() for i, row in enumerate(rows)} == now
                case _:
                    pass
        table.commit()
    table.close()


def test_members_of_a_group_refresh_as_one(tmp_path: Path) -> None:
    with er.Group(path=tmp_path / "g") as group:
        for name in "ab":
            group.table(name, rows=ROWS, dim=DIM, rule=er.SGD(lr=1.0), init=er.Zeros())
        group.commit()
        with er.open(tmp_path / "g", mode="r", kind=er.Group) as reader:
            a, b = reader["a"], reader["b"]
            a.lookup([1, 2])
            b.lookup([1, 2])
            group.update({"a": [1], "b": [2]}, {"a": np.ones((1, DIM)), "b": np.ones((1, DIM))})
            group.commit()
            changes = reader.refresh(changes=True)
            assert {name: [*told(each)] for name, each in changes.items()} == {"a": [1], "b": [2]}
            assert a.lookup([1, 2])[:, 0].tolist() == [-1, 0]
            assert b.lookup([1, 2])[:, 0].tolist() == [0, -1]
            assert reader["a"] is a
            group.table("c", rows=9, dim=2)  # all caches begin anew
            group.commit()
            assert a.refresh()
            assert a.lookup([1, 2])[:, 0].tolist() == [-1, 0]
            assert reader["c"].rows == 9


def test_lookups_beside_refreshes_are_of_one_commit(tmp_path: Path) -> None:
    # Each commit sets all rows to its number.
    table = er.Table(rows=2000, dim=2, path=tmp_path / "t", rule=er.SGD(lr=1.0), init=er.Zeros())
    ids, seen, ended, errors = np.arange(0, 2000, 7), list[float](), threading.Event(), list[BaseException]()
    table.assign(np.arange(2000), np.zeros((2000, 2)))
    table.commit()
    with er.open(tmp_path / "t", mode="r", memory="1MiB") as reader:

        def look() -> None:
            try:
                while not ended.is_set():
                    values = np.unique(reader.lookup(ids))
                    assert len(values) == 1
                    seen.append(float(values[0]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(1, 30):
            table.assign(np.arange(2000), np.full((2000, 2), float(number)))
            table.commit()
            assert reader.refresh()
        ended.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert seen == sorted(seen) or len(threads) > 1
    table.close()


def test_changes_read_the_commit_that_they_are_of(tmp_path: Path) -> None:
    table = writer(tmp_path / "t")
    with er.open(tmp_path / "t", mode="r") as reader:
        table.update([1], np.full((1, DIM), 5.0))
        table.commit()
        changes = reader.refresh(changes=True)
        expected = table.lookup([1])[0].tobytes()
        for _ in range(3):
            table.update([1], np.ones((1, DIM)))
            table.commit()
            table.compact()
            reader.refresh()
        assert told(changes) == {1: expected}
    table.close()


def test_two_tables_that_are_no_group_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "ab":
        writer(tmp_path / name).close()
    with caplog.at_level("INFO", "embedrock"), er.open(tmp_path / "a", mode="r"), er.open(tmp_path / "b", mode="r"):
        assert "are read each by itself, so that after refresh() one may be of a later step" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "embedrock"), er.open(tmp_path / "a", mode="r"), er.open(tmp_path / "b", mode="r"):
        assert "each by itself" not in caplog.text


def test_a_writer_and_a_dense_rule_are_refused(tmp_path: Path) -> None:
    with er.Table(rows=9, dim=2, path=tmp_path / "t", rule=er.AdamW(dense=True)) as table:
        table.update([1], [[1.0, 1.0]])
        table.commit()
        with pytest.raises(er.UnsupportedError, match="is open for writing"):
            table.refresh(changes=True)
        with er.open(tmp_path / "t", mode="r") as reader:
            reader.lookup([1, 2])
            table.update([2], [[1.0, 1.0]])
            table.commit()
            with pytest.raises(er.UnsupportedError, match="also moves rows without a gradient"):
                reader.refresh(changes=True)
            assert reader.last_commit == 1
            assert reader.refresh()
            np.testing.assert_array_equal(reader.lookup([1, 2, 3]), table.lookup([1, 2, 3]))


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_another_life_of_the_table_leaves_no_row_in_the_cache(tmp_path: Path, commits: int) -> None:
    """A copy that trained on lies at the path now: its commits have the numbers of others that the reader saw."""
    ids, path = np.arange(ROWS), tmp_path / "t"
    with writer(path) as table:
        shutil.copytree(path, tmp_path / "copy", ignore=shutil.ignore_patterns("LOCK"))
        table.update(ids[:50], np.full((50, DIM), 5.0))
        table.commit()
    with er.open(path, mode="r") as reader:
        reader.lookup(ids)
        with er.open(tmp_path / "copy") as copied:
            for step in range(commits):
                copied.update(ids[60:70], np.full((10, DIM), float(step)))
                copied.commit()
            expected = copied.lookup(ids)
        path.rename(tmp_path / "before")
        (tmp_path / "copy").rename(path)
        assert reader.refresh(changes=True).since is None
        np.testing.assert_array_equal(reader.lookup(ids), expected)


@pytest.mark.parametrize("dim", [4, 5])
def test_a_name_that_another_member_has_now(tmp_path: Path, dim: int) -> None:
    group = er.Group(path=tmp_path / "g", memory="2MiB")
    for name, size, init in (("old", 4, er.Zeros()), ("new", dim, er.Normal())):
        group.table(name, 10, size, rule=er.SGD(lr=1.0), init=init, seed=1).assign([1], np.ones((1, size)))
    group.commit()
    reader = er.open(tmp_path / "g", mode="r", memory="2MiB", kind=er.Group)
    assert (reader["old"].lookup([2]) == 0).all()
    group.drop("old")
    group.rename("new", "old")
    group.commit()
    changes = reader.refresh(changes=True)
    assert list(reader) == ["old"]
    assert changes["old"].since is None  # what follows "old" by its name has rows of another table
    assert np.array_equal(reader["old"].lookup([1, 2]), group["old"].lookup([1, 2]))
    reader.close()
    group.close()


@pytest.mark.parametrize("fails", ["wait_for_quiet", "_go_on_with", "_changed_ids"])
def test_a_refresh_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    table, opened = writer(tmp_path / "t"), list[TableFolder]()
    with er.open(tmp_path / "t", mode="r", memory="1MiB") as reader:
        before = reader.lookup(np.arange(ROWS))
        table.update([3, 4], np.ones((2, DIM)))
        table.commit()

        def newest(self: StorageManager) -> TableFolder:
            opened.append(own(self))
            return opened[-1]

        def fail(*args: object) -> None:
            raise RuntimeError("on purpose")

        own = StorageManager._newest
        monkeypatch.setattr(StorageManager, "_newest", newest)
        with monkeypatch.context() as patched:
            patched.setattr(StorageManager, fails, fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                reader.refresh()
            assert not opened[0].stores[0].runs  # it is closed
            assert reader.last_commit == 1
            np.testing.assert_array_equal(reader.lookup(np.arange(ROWS)), before)
        assert reader.refresh()
        np.testing.assert_array_equal(reader.lookup(np.arange(ROWS)), table.lookup(np.arange(ROWS)))
    table.close()
