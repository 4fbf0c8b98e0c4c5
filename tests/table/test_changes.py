"""`Table.changes` and `Group.changes`: every row that differs between two commits is named, whatever lies between."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store import change_lists
from embedrock.store.forgotten import Tombstones
from embedrock.store.segments import CorruptTableError
from embedrock.store.table_folder import TableFolder
from slow import slow

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


def opened_alone(path: Any, **options: Any) -> er.Table:
    return er.open(path, kind=er.Table, **options)


class Life:
    """A random life of a table: after each commit, the changes since each earlier one."""

    def __init__(self, path: str, seed: int, rows: int | None = 400) -> None:
        self.rng, self.rows = np.random.default_rng(seed), rows
        self.table = er.Table(rows=rows, dim=DIM, path=path, rule=er.SGD(lr=1.0), memory="2MiB", keep=2, seed=1)
        self.states, self.touched = {0: dict[int, bytes]()}, [set[int]()]
        self.forgotten = set[int]()  # a commit after a rollback may name them again, as gone
        self.forgot, self.forgets, self.checked = 0, False, 0  # the last commit that forgot rows

    def ids(self) -> np.ndarray:
        top = self.table.rows or 2**62
        span = min(top, int(self.rng.choice([20, 400, top])))
        return np.unique(self.rng.integers(0, span, self.rng.integers(1, 60)))

    def step(self) -> None:
        match self.rng.choice(
            ["update"] * 4 + ["forget", "compact", "commit", "commit", "reopen", "crash", "back", "grow"]
        ):
            case "update":
                ids = self.ids()
                self.table.update(ids, self.rng.normal(size=(len(ids), DIM)))
                self.touched[-1] |= set(ids.tolist())
            case "forget":
                ids = self.ids()
                self.table.forget(ids)
                self.touched[-1] |= set(ids.tolist())
                self.forgotten |= set(ids.tolist())
                self.forgets = True
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
        self.table = opened_alone(self.table.path, memory="2MiB", keep=2)

    def committed(self, has_touched: bool = True) -> None:
        last = self.table.last_commit
        if last in self.states:
            return
        touched = self.touched[-1] if has_touched else set()
        self.touched[-1:] = [touched, set() if has_touched else self.touched[-1]]
        self.states[last] = contents(self.table)
        if has_touched and self.forgets:
            self.forgot, self.forgets = last, False
        for since, before in self.states.items():
            own = {i for ids in self.touched[since:] for i in ids} | self.forgotten
            if since < self.forgot:  # the lists of that commit are gone
                continue
            check(before, self.states[last], self.table.changes(since), own)
            self.checked += since < last


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 300))])
def test_all_that_differs_is_named_after_any_life(tmp_path: Path, seed: int) -> None:
    life = Life(str(tmp_path / "t"), seed, [400, 400, None][seed % 3])
    for _ in range(60):
        life.step()
    life.table.commit()
    life.committed()
    assert life.checked > 5
    life.table.close()


def test_compaction_that_makes_room_before_a_commit_loses_no_id(tmp_path: Path) -> None:
    # The logs of the commit name a part of the rows only: the rest was compacted before any manifest named it.
    rows = 60_000
    rng = np.random.default_rng(0)
    with er.Table(rows=rows, dim=16, path=str(tmp_path / "t"), rule=er.SGD(lr=1.0), memory="2MiB") as table:
        for start in range(0, rows, 5000):
            table.update(np.arange(start, start + 5000), np.ones((5000, 16)))
        table.commit()
        before, touched = contents(table), set[int]()
        for _ in range(40):
            ids = np.unique(rng.integers(0, rows, 3000))
            table.update(ids, np.ones((len(ids), 16)))
            touched |= set(ids.tolist())
        assert table.stats()["bytes_compacted"]
        table.commit()
        check(before, contents(table), table.changes(1), touched)


class GroupLife:
    """A random life of a group, whose members come, go, and get other names."""

    def __init__(self, path: str, seed: int) -> None:
        self.rng, self.path, self.serial, self.checked = np.random.default_rng(seed), path, 0, 0
        self.group = er.Group(path=path, keep=2)
        for name, dim in (("a", DIM), ("b", DIM), ("c", 2)):
            self.group.table(name, rows=50, dim=dim, rule=er.SGD(lr=1.0))
        self.names = {name: name for name in "abc"}  # of the tables now, by the names that they had first
        self.now, self.touched = {name: set[int]() for name in self.names}, list[dict[str, set[int]]]()
        self.states = dict[int, dict[str, dict[int, bytes]]]()
        self.forgot = self.forgets = 0  # the last commit that forgot rows, so that older lists may go

    def touch(self, forget: bool) -> None:
        first = str(self.rng.choice([*self.names]))
        table, ids = self.group[self.names[first]], np.unique(self.rng.integers(0, 50, 8))
        self.now[first] |= set(ids.tolist())
        if forget:
            table.forget(ids)
            self.forgets = 1
        else:
            table.update(ids, self.rng.normal(size=(len(ids), table.dim)))

    def rename(self) -> None:
        first, self.serial = str(self.rng.choice([*self.names])), self.serial + 1
        self.group.rename(self.names[first], f"n{self.serial}")
        self.names[first] = f"n{self.serial}"

    def replace(self) -> None:
        """Drop a table, and make another one under its name."""
        first, self.serial = str(self.rng.choice([*self.names])), self.serial + 1
        old = self.names.pop(first)
        self.group.drop(old)
        self.group.table(old, rows=50, dim=DIM, rule=er.SGD(lr=1.0))
        self.names[f"m{self.serial}"], self.now[f"m{self.serial}"] = old, set()

    def commit(self, reopens: bool) -> None:
        last = self.group.commit()
        if reopens:
            self.group.close()
            self.group = er.open(self.path, keep=2, kind=er.Group)
        self.forgot, self.forgets = last if self.forgets else self.forgot, 0
        with er.open(self.path, mode="r", kind=er.Group) as reader:
            tables = {first: zip(*reader[name].export(), strict=True) for first, name in self.names.items()}
            self.states[last] = {first: {int(i): row.tobytes() for i, row in all_} for first, all_ in tables.items()}
        self.touched.append(self.now)
        self.now = {name: set[int]() for name in self.names}
        for since in self.states:
            for first, name in self.names.items():
                if first in self.states[since] and since >= self.forgot:
                    own = {i for one in self.touched[since:] for i in one.get(first, ())}
                    check(self.states[since][first], self.states[last][first], self.group[name].changes(since), own)
                    self.checked += since < last
        assert self.group.changes(last).keys() == set(self.names.values())


@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 150))])
def test_members_of_a_group_are_named_under_their_names(tmp_path: Path, seed: int) -> None:
    life = GroupLife(str(tmp_path / "g"), seed)
    for _ in range(50):
        match life.rng.choice(["touch"] * 4 + ["forget", "commit", "commit", "rename", "replace", "reopen"]):
            case "touch" | "forget" as what:
                life.touch(what == "forget")
            case "rename":
                life.rename()
            case "replace" if life.rng.random() < 0.3:
                life.replace()
            case "commit" | "reopen" as what:
                life.commit(what == "reopen")
            case _:
                pass
    life.commit(reopens=False)
    assert life.checked > 5
    life.group.close()


@pytest.mark.parametrize("target", [25, 40])
def test_a_rollback_takes_no_ids_of_a_table_that_had_the_name_before(tmp_path: Path, target: int) -> None:
    """Lists of commits 17 to 32 are joined, and say only that "a" got the name "b": not when."""
    with er.Group(path=tmp_path / "g", keep=100) as group:
        group.table("a", rows=100, dim=DIM, rule=er.SGD(lr=1.0))
        for number in range(60):
            if number == 20:
                group.rename("a", "b")
                group.table("a", rows=100, dim=DIM, rule=er.SGD(lr=1.0))
            group["a"].update([number], np.ones((1, DIM)))
            group.commit()
        last = group.last_commit
        group.rollback(target)
        if target < 2 * change_lists.JOINED:
            with pytest.raises(er.HistoryDroppedError):
                group["a"].changes(last)
        else:
            assert told(group["a"].changes(last))[1] == {*range(target, 60)}
            assert not group["b"].changes(last)


# ---------------------------------------------------------------- what breaks a chain


def made(path: str, commits: int = 3, **options: Any) -> er.Table:
    table = er.Table(rows=100, dim=DIM, path=path, rule=er.SGD(lr=1.0), **options)
    for number in range(commits):
        table.update([number], np.ones((1, DIM)))
        table.commit()
    return table


def test_a_list_that_is_gone_or_damaged_breaks_the_chain_and_no_commit(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    (second,) = (tmp_path / "t" / "changes").glob("0000000002-*")
    data = second.read_bytes()
    for broken in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), b"", data + b"x"):
        second.write_bytes(broken)
        with pytest.raises(er.HistoryDroppedError) as caught:
            table.changes(1)
        assert caught.value.oldest == 2
        assert str(caught.value) == (
            f"{table.path} has no list of the rows that changed since commit 1: its lists reach back to commit 2. Ask "
            "for changes since that one or a later one, or read all rows: changes(None)."
        )
        assert told(table.changes(2))[0].keys() == {2}
        assert not table.verify().problems == bool(broken)  # noqa: SIM201
    second.write_bytes(data)
    assert told(table.changes(1))[0].keys() == {1, 2}
    assert not table.verify().problems
    table.close()


def test_a_commit_of_an_older_release_breaks_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It writes no list; nor may the lists of another history with the same numbers be taken.
    table = made(str(tmp_path / "t"))
    with monkeypatch.context() as patched:
        patched.setattr(change_lists, "write", lambda *args: None)
        table.update([50], np.ones((1, DIM)))
        table.commit()
    table.update([51], np.ones((1, DIM)))
    table.commit()
    assert told(table.changes(4))[0].keys() == {51}
    with pytest.raises(er.HistoryDroppedError):
        table.changes(3)
    table.close()


def test_lists_of_another_history_are_not_taken(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    table.close()
    shutil.copytree(tmp_path / "t", tmp_path / "copy")
    for path, row in ((tmp_path / "t", 10), (tmp_path / "copy", 20)):
        with er.open(path) as each:
            each.update([row], np.ones((1, DIM)))
            each.commit()
    for file in (tmp_path / "copy" / "changes").glob("0000000004-*"):
        shutil.copy(file, tmp_path / "t" / "changes" / f"{file.stem}9.ids")
    with er.open(tmp_path / "t") as each:
        assert told(each.changes(3))[0].keys() == {10}


def test_a_disk_that_takes_no_list_fails_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(str(tmp_path / "t"))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(change_lists, "write", full)
        table.update([5], np.ones((1, DIM)))
        assert table.commit() == 4
    with pytest.raises(er.HistoryDroppedError):
        table.changes(3)
    table.close()


def test_forgotten_ids_leave_the_lists_with_their_tombstones(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"), keep=1)
    table.update([77], np.ones((1, DIM)))
    table.commit()
    table.forget([77])
    commit = table.commit()
    assert told(table.changes(commit - 1))[1] == {77}
    for number in range(3):
        table.update([number], np.ones((1, DIM)))
        table.commit()
    kept = [change_lists.read(OS_SYSTEM, str(table.path), file).tables[""] for file in files_of(table)]
    assert kept
    assert all(ids is not None and 77 not in ids for ids in kept)
    assert told(table.changes(commit))[0].keys() == {0, 1, 2}
    table.close()


def files_of(table: er.Table) -> list[change_lists.ListFile]:
    return change_lists.files_in(OS_SYSTEM, str(table.path), table.uuid)


def test_old_lists_are_joined_and_then_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = made(str(tmp_path / "t"), commits=80)
    files = files_of(table)
    assert len(files) < 40
    assert files[0].commit - files[0].since == change_lists.JOINED
    assert told(table.changes(66))[0].keys() == set(range(66, 80))
    assert told(table.changes(3))[0].keys() == set(range(80))  # inside of a joined list: a few too many
    monkeypatch.setattr(change_lists, "_LEAST_BYTES", sum(file.nbytes for file in files[-10:]))
    table.update([0], np.ones((1, DIM)))
    table.commit()
    assert len(files_of(table)) in range(8, 13)
    with pytest.raises(er.HistoryDroppedError) as caught:
        table.changes(3)
    assert told(table.changes(caught.value.oldest))[0]
    table.close()


def test_lists_of_commits_that_were_not_published_are_removed(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    (last,) = (tmp_path / "t" / "changes").glob("0000000003-*")
    table.close()
    orphan = last.with_name(last.name.replace("0000000003-0000000002", "0000000004-0000000003"))
    orphan.write_bytes(last.read_bytes())
    with er.open(tmp_path / "t"):
        assert not orphan.exists()
        assert last.exists()


def test_what_a_crash_while_lists_are_joined_leaves_is_removed_by_the_next_writer_only(tmp_path: Path) -> None:
    folder, count = tmp_path / "t" / "changes", 2 * change_lists.JOINED
    table = made(str(tmp_path / "t"), commits=count - 1)
    parts = {file: file.read_bytes() for file in folder.iterdir()}
    table.update([77], np.ones((1, DIM)))
    table.commit()
    table.close()
    (joint,) = {*folder.glob(f"{change_lists.JOINED:010d}-*")}
    after = {file: file.read_bytes() for file in folder.iterdir()}
    assert joint not in parts
    assert len(after) == change_lists.JOINED + 1
    parts = [*parts.items()]
    for left in (parts, parts[::2], [(folder / ".tmp", joint.read_bytes())], [(folder / ".tmp", b"{"), *parts[-20:]]):
        for file, data in left:
            file.write_bytes(data)
        crashed = {file: file.read_bytes() for file in folder.iterdir()}
        assert len(crashed) > len(after)
        for mode, there in (("r", crashed), ("w", after)):
            with er.open(tmp_path / "t", mode=mode) as opened:
                assert told(opened.changes(20))[0].keys() == {*range(20, count - 1), 77}
                assert told(opened.changes(0))[0] == contents(opened)
                assert opened.verify().problems == []
                assert opened.stats()["collections_failed"] == 0
            assert {file: file.read_bytes() for file in folder.iterdir()} == there


# ---------------------------------------------------------------- what is refused, and what reads all rows


def test_since_must_be_a_commit(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    text = f"`since` must be a commit of {table.path}, 0 to 3, or None for all rows: got 4."
    with pytest.raises(er.ArgumentError) as caught:
        table.changes(4)
    assert str(caught.value) == text
    assert told(table.changes(3)) == ({}, set())
    assert told(table.changes(None))[0] == contents(table)
    table.close()


def test_a_new_rule_means_all_rows(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    table.set_rule(er.Adam())
    commit = table.commit()
    with pytest.raises(er.HistoryDroppedError) as caught:
        table.changes(commit - 1)
    assert caught.value.oldest == commit
    table.update([9], np.ones((1, DIM)))
    table.commit()
    assert told(table.changes(commit))[0].keys() == {9}
    table.close()


def test_a_rule_that_moves_all_rows_is_refused(tmp_path: Path) -> None:
    with er.Table(rows=9, dim=2, path=str(tmp_path / "t"), rule=er.AdamW(dense=True)) as table:
        table.update([1], [[1.0, 1.0]])
        table.commit()
        with pytest.raises(er.UnsupportedError, match="also moves rows without a gradient") as caught:
            table.changes(0)
        assert f'er.open({table.path!r}, mode="r")' in str(caught.value)


def test_a_table_in_ram_has_no_commits() -> None:
    with pytest.raises(er.UnsupportedError, match="lives in RAM"):
        er.Table(rows=9, dim=2).changes(0)


def test_a_member_without_a_commit_is_named(tmp_path: Path) -> None:
    with er.Group(path=str(tmp_path / "g")) as group:
        table = group.table("a", rows=9, dim=2)
        with pytest.raises(er.ArgumentError, match=r"no commit of .* has table 'a' yet. Call commit\(\) before"):
            table.changes(None)
        group.commit()
        assert told(table.changes(None)) == ({}, set())


def test_uncommitted_rows_are_not_in_it(tmp_path: Path) -> None:
    table = made(str(tmp_path / "t"))
    changes = table.changes(2)
    table.update([2], np.ones((1, DIM)))
    assert told(changes)[0] == {2: contents(table)[2]}
    assert table.uncommitted
    table.commit()
    assert told(table.changes(3))[0].keys() == {2}
    table.close()


def test_evicted_rows_are_gone(tmp_path: Path) -> None:
    policies: Any = {"eviction": er.Eviction(max_rows=2, by="recency")}
    with er.Table(rows=None, dim=DIM, rule=er.SGD(lr=1.0), path=tmp_path / "t", **policies) as table:
        table.update([7, 8], np.ones((2, DIM)))
        table.commit()
        table.update([9], np.ones((1, DIM)))
        table.commit()
        assert told(table.changes(1)) == ({9: contents(table)[9]}, {7})


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 20))])
def test_ids_survive_their_encoding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    span = int(rng.choice([2000, 10**5, 10**9, 2**62]))
    ids = np.unique(rng.integers(-span, span, int(rng.integers(0, 5000))))
    if seed == 0:
        ids = np.array([-(2**63), -1, 0, 2**63 - 1])
    data = change_lists.encode(ids)
    assert np.array_equal(change_lists.decode(data, len(ids), "here"), ids)
    if len(ids):
        for wrong in (len(ids) + change_lists.BLOCK_IDS, 2**60):
            with pytest.raises(CorruptTableError, match="here is damaged"):
                change_lists.decode(data, wrong, "here")


def test_dense_ids_take_one_byte_each() -> None:
    assert len(change_lists.encode(np.arange(0, 10**6, 10))) < 1.01 * 10**5
    ids = np.unique(np.random.default_rng(0).integers(0, 10**7, 10**5))
    assert len(change_lists.encode(ids)) <= 2.1 * len(ids)


def test_a_row_that_is_forgotten_while_a_reader_opens_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with er.Table(20, 2, path=tmp_path / "t", rule=er.SGD(lr=1.0), init=er.Zeros(), keep=5) as table:
        table.assign([1, 2], np.ones((2, 2)))
        table.commit()
        table.assign([2], np.full((1, 2), 2.0))
        table.commit()
        with er.open(tmp_path / "t", mode="r") as reader:
            table.rollback(1)
            first = TableFolder._newest_forgotten

            def newest_forgotten(folder: TableFolder) -> Tombstones:
                table.forget([1])
                table.commit()
                return first(folder)

            monkeypatch.setattr(TableFolder, "_newest_forgotten", newest_forgotten)
            changes = reader.refresh(changes=True)
            assert reader.last_commit == 3
            assert changes.ids.tolist() == [1, 2]
            assert 1 not in reader
