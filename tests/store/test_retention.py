"""No file that a commit names is ever removed, whoever commits, compacts and rolls back at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.storage.commit import StorageCommit
from embedrock.store import folder as folders
from embedrock.store import publishing
from embedrock.store.compaction import compact
from embedrock.store.publishing import FolderKind
from embedrock.store.record_store import RecordStore
from embedrock.store.segments import Segment
from on_system import on
from same_tables import check_same
from slow import slow
from table_files import files_of, store_of

ROWS, DIM = 300, 3


class Watched(System):
    """A system that notes which files were removed while a commit named them."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []
        self.folded = False

    def unlink(self, path: str) -> None:
        table, kind, name = path.rpartition("/delta/") if "/delta/" in path else path.partition("/base/")
        if kind and kind[1:] + name in folders.named_files(OS_SYSTEM, table):
            self.lost.append(kind[1:] + name)
        super().unlink(path)


def table_at(path: Path, **options: Any) -> er.Table:
    return er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=0, path=path / "t.rock", memory="1MiB", **options)


def train(table: er.Table, *seeds: int) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        table.update(rng.integers(0, ROWS, 40), rng.standard_normal((40, DIM)).astype(np.float32))


def trained(*seeds: int) -> er.Table:
    table = er.Table(ROWS, DIM, rule=er.Adam(lr=0.1), seed=0)
    train(table, *seeds)
    return table


def same_at(path: Path, commit: int, *seeds: int) -> None:
    """Check that a commit opens, and holds what training by these seeds gives."""
    with er.open(path / "t.rock", mode="r", at=commit) as found, trained(*seeds) as expected:
        check_same(found, expected)


def commit_before_forgetting(table: er.Table, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> threading.Thread:
    """Let the next compaction find a commit that was begun when its base was there, before its logs are forgotten."""
    forget = RecordStore.forget
    thread = threading.Thread(target=lambda: (train(table, 2), table.commit()))

    def late(store: RecordStore, runs: Any) -> None:
        if not thread.ident:
            thread.start()
            thread.join(seconds)
        forget(store, runs)

    monkeypatch.setattr(RecordStore, "forget", late)
    return thread


def test_a_commit_keeps_its_files_while_another_is_published_beside_a_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Watched()
    with on(system)(table_at, tmp_path) as table:
        train(table, 1)
        kept = table.commit(name="kept")
        thread = commit_before_forgetting(table, monkeypatch, seconds=1.0)
        table.compact()
        thread.join()
        assert system.lost == []
        assert table.verify().problems == []
        same_at(tmp_path, kept, 1)
        same_at(tmp_path, table.last_commit, 1, 2)


def test_the_watch_sees_a_file_that_is_forgotten_too_early(tmp_path: Path) -> None:
    system = Watched()
    with on(system)(table_at, tmp_path) as table:
        train(table, 1)
        table.commit()
        for name in folders.named_files(OS_SYSTEM, str(tmp_path / "t.rock")):
            system.unlink(str(tmp_path / "t.rock" / name))
        assert len(system.lost) == 1


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_commits_and_compactions_at_once_keep_all_files(tmp_path: Path, seed: int) -> None:
    system, rng, made = Watched(), np.random.default_rng(seed), dict[int, tuple[int, ...]]()
    with on(system)(table_at, tmp_path, keep=3) as table:
        done: list[int] = []
        for step in range(12):
            compaction = threading.Thread(target=table.compact)
            for part in range(2):
                train(table, number := 2 * step + part)
                done.append(number)
                if part == 0:
                    compaction.start()
                made[table.commit(name=f"{number}" if rng.random() < 0.3 else None, wait=bool(rng.random() < 0.5))] = (
                    *done,
                )
            compaction.join()
        table.commit()
        there = {line["commit"] for line in table.commits()} & made.keys()
        assert len(there) >= 3
        assert system.lost == []
        assert table.verify().problems == []
        for commit in there:
            same_at(tmp_path, commit, *made[commit])


def test_a_table_whose_last_commit_is_uncertain_is_not_laid_out_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with table_at(tmp_path) as table:
        train(table, 1)
        table.commit()
        monkeypatch.setattr(files_of(table).table_folder, "broken", "the disk failed twice")
        with pytest.raises(er.CommitError, match="commits are no longer taken"):
            table.set_rule(er.SGD(lr=0.1), reset_state=True)
        assert table.verify().problems == []
        monkeypatch.undo()


def fold(table: er.Table) -> None:
    """Compact as the thread in the background does."""
    compact(store_of(table), None, lambda: False)


def test_a_compaction_that_ends_while_the_last_ones_base_is_published_leaves_that_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, held = Watched(), list[tuple[StorageCommit, float]]()
    with on(system)(table_at, tmp_path) as table:
        files = files_of(table)
        train(table, 1)
        table.commit()
        train(table, 2)
        with monkeypatch.context() as patch:  # a commit that was begun before there was a base
            patch.setattr(StorageCommit, "start", lambda *args: held.append(args))
            table.commit(wait=False)
        try:
            fold(table)
        finally:
            commit, interval = held[0]
            commit.start(interval)
        files.end_commit()
        publish = FolderKind.publish

        def late(*args: Any) -> None:
            if not system.folded:
                system.folded = True
                fold(table)
            publish(*args)

        monkeypatch.setattr(FolderKind, "publish", late)
        files.table_folder.commit_base(publishing.now(), 2)
        assert system.folded
        assert system.lost == []
        assert table.verify().problems == []
        same_at(tmp_path, table.last_commit, 1, 2)
        train(table, 3)
        table.commit()
        same_at(tmp_path, table.last_commit, 1, 2, 3)


def test_a_reader_is_told_which_commits_there_are_if_its_own_goes_while_it_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with table_at(tmp_path, keep=1) as table:
        train(table, 1)
        first = table.commit()
        opens = Segment.open

        def late(*args: Any, **options: Any) -> Segment:
            monkeypatch.setattr(Segment, "open", opens)
            train(table, 2)
            table.commit()
            table.compact()
            return opens(*args, **options)

        monkeypatch.setattr(Segment, "open", late)
        with pytest.raises(er.ArgumentError, match=rf"has no commit {first}: it has \d+\. Older ones are dropped"):
            er.open(tmp_path / "t.rock", mode="r", at=first)
        monkeypatch.setattr(Segment, "open", late)
        with er.open(tmp_path / "t.rock", mode="r") as found:
            assert found.last_commit > first
