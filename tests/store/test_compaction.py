"""Lives of a store whose logs are folded in pieces, beside a dict: no record is lost, and logs go."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedrock.io.vfs import OS_SYSTEM, File
from embedrock.store import manifest as manifests
from embedrock.store.compaction import NO_AGE, compact, relieve
from embedrock.store.folding import fold
from embedrock.store.manifest import Manifest, StoreEntry, TableEntry
from embedrock.store.pieces import CompactionGoal
from embedrock.store.publishing import FolderKind
from embedrock.store.record_store import RecordStore
from embedrock.store.segments import Log
from embedrock.store.table_folder import TableFolder
from format_reader import read_table
from small_pieces import cut_small
from table_files import pool_of

ROWS, WIDTH, UUID, NOW = 130, 8, "0123456789abcdef" * 2, "2026-11-23T02:00:00Z"


class Life:
    """A store, and what it holds.

    Attributes:
        newest: the record of each row, `committed` those of the last commit.
        done: how often something happened.
        member: the entry of the table in the first commit.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.done = folder / f"{seed}.rock", np.random.default_rng(seed), Counter[str]()
        self.rows = None if seed % 3 == 0 else ROWS
        pool, self.member = (
            StoreEntry(UUID, 0, WIDTH, self.rows, 0),
            TableEntry("", 0, None, {"rows": self.rows}, 0, 0, 0),
        )
        plain = Manifest(UUID, 0, None, None, None, NOW, (pool,), (self.member,))
        self.table_folder = TableFolder.create(OS_SYSTEM, str(self.folder), plain, locked=True)
        self.store.log_index.most_bytes = 4096
        self.newest, self.committed = dict[int, bytes](), dict[int, bytes]()
        self.kept = dict[int, dict[int, bytes]]()

    @property
    def store(self) -> RecordStore:
        """The one of a table alone."""
        return self.table_folder.stores[0]

    def write(self) -> None:
        count = int(self.rng.integers(1, 25))
        ids = self.rng.permutation(ROWS)[:count] - (0 if self.rows else 60)
        records = self.rng.integers(0, 256, (count, WIDTH), np.uint8)
        self.store.append(records, np.arange(count), ids)
        self.newest |= dict(zip(ids.tolist(), map(bytes, records), strict=True))

    def forget(self) -> None:
        if self.rng.random() < 0.5:  # else most lives would have rows that are gone all the time
            ids = self.rng.permutation([*self.newest])[:5]
            self.store.discard(ids.astype(np.int64))
            self.newest = {row: record for row, record in self.newest.items() if row not in ids}

    def changes(self, rows: Sized) -> dict[str, Any]:
        return {"members": (replace(self.member, count=len(rows)),)}

    def commit(self) -> None:
        freeze = self.table_folder.freeze([none_has_newer])
        self.table_folder.publish(freeze, self.changes(self.newest), 1 + int(self.rng.integers(3)))
        self.committed = dict(self.newest)
        self.kept[self.table_folder.manifest.commit] = self.committed

    def commit_beside(self) -> None:
        """Fold, and write rows of the next commit, while one is under way."""
        if not self.newest:
            return
        frozen, freeze = dict(self.newest), self.table_folder.freeze([none_has_newer])
        self.write()
        self.some_pieces()
        self.table_folder.publish(freeze, self.changes(frozen), 2)
        self.committed = self.kept[self.table_folder.manifest.commit] = frozen

    def fail(self, errors: int) -> None:
        """Fail to commit, as the disk is full; or write logs anew, whose first sync fails."""
        if not self.newest:
            return
        with pytest.MonkeyPatch.context() as patch:
            if errors == errno.ENOSPC:
                self.write()
                self._relieve()
                place, name = ((FolderKind, "publish"), (Log, "seal"))[int(self.rng.integers(2))]
                patch.setattr(place, name, raising(OSError(errno.ENOSPC, "No space left on device")))
                try:
                    self.commit()  # works where no log is left that would have to be sealed
                except OSError:
                    self.table_folder.undo_steps()
                    self.done["commits taken back"] += 1
                self.write()  # to a log that is in no chunk yet
            else:
                sync, failed = File.sync, list[str]()

                def fail_once(file: File) -> None:
                    if file.path.endswith(".dlt") and not failed:
                        failed.append(file.path)
                        raise OSError(errno.EIO, "Input/output error")
                    sync(file)

                patch.setattr(File, "sync", fail_once)
                self.commit()
                self.done["logs written anew"] += len(failed)

    def some_pieces(self) -> None:
        goal = CompactionGoal(int(self.rng.integers(0, self.store.log_index.count + 1)), NO_AGE)
        if self.rng.random() < 0.3:
            goal = CompactionGoal(0, int(self.rng.integers(0, 30_000)))
        compact(self.store, None, lambda: False, goal)

    def relieve(self) -> None:
        """Make room while the log of the next commit is written."""
        self.write()
        self._relieve()
        self.write()

    def _relieve(self) -> None:
        answers = [True] * int(self.rng.integers(1, 4)) + [False]
        relieve(self.store, self.rows, lambda: answers.pop(0) if answers else False)

    def fold_logs(self) -> None:
        fold(self.store, None, lambda: None)

    def commit_base(self) -> None:
        number = self.table_folder.manifest.commit
        self.table_folder.commit_base(NOW, 2)
        if self.table_folder.manifest.commit > number:
            self.kept[self.table_folder.manifest.commit] = self.committed

    def reopen(self) -> None:
        self.store.give_up()
        self.table_folder.close()
        self.table_folder = TableFolder.open(OS_SYSTEM, str(self.folder), None, write=True, locked=True)
        self.store.log_index.most_bytes = 4096
        self.newest = dict(self.committed)

    def go_back(self) -> None:
        numbers = manifests.numbers(OS_SYSTEM, str(self.folder))
        target = manifests.read(OS_SYSTEM, str(self.folder), int(self.rng.choice(numbers)))
        self.table_folder.rollback(target, NOW, 3)
        self.newest = self.committed = self.kept[self.table_folder.manifest.commit] = self.kept.get(target.commit, {})
        self.newest = dict(self.newest)

    def check(self) -> None:
        assert read_all(self.store, [*self.newest]) == self.newest
        assert [run.number for run in self.store.delta] == sorted(run.number for run in self.store.delta)
        marks = [entry.folded for entry in self.store.content.base]
        self.done["marks"] += any(marks)
        self.done["marks of some logs"] += any(0 < mark < len(self.store.content.delta) for mark in marks)

    def check_rows_in_logs(self, reader: RecordStore) -> None:
        """Check that who opens the last commit finds rows where the writer does."""
        ours, theirs = ([run.path for run in (*each.base.runs, *each.delta)] for each in (self.store, reader))
        if ours == theirs and all(log.is_unused for log in self.store.logs):
            assert rows_in_logs(reader) == rows_in_logs(self.store)
            self.done["rows in logs are the same"] += 1

    def check_files(self) -> None:
        """Check what each commit that is kept holds, as another program reads it, and as a reader does."""
        for number in manifests.numbers(OS_SYSTEM, str(self.folder)):
            expected = self.kept.get(number, {})
            assert read_table(self.folder, number)[1] == expected
            reader = TableFolder.open(OS_SYSTEM, str(self.folder), number, write=False, locked=True)
            assert read_all(reader.stores[0], [*expected]) == expected
            self.check_rows_in_logs(reader.stores[0])
            reader.close()


def raising(error: OSError) -> Callable[..., None]:
    def fail(*args: object) -> None:
        raise error

    return fail


def none_has_newer(ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids), bool)


def rows_in_logs(store: RecordStore) -> set[int]:
    return {int(row) for ids, _ in store.log_parts() for row in ids}


def read_all(store: RecordStore, ids: list[int]) -> dict[int, bytes]:
    found = store.located(np.array(ids, np.int64))
    records = np.empty((len(found.ids), WIDTH), np.uint8)
    store.read(found, records, np.arange(len(found.ids)))
    return dict(zip(found.ids.tolist(), map(bytes, records), strict=True))


ACTS: dict[Callable[[Life], None], int] = {
    Life.write: 8,
    Life.forget: 1,
    Life.commit: 6,
    Life.commit_beside: 2,
    lambda life: life.fail(errno.ENOSPC): 3,
    lambda life: life.fail(errno.EIO): 1,
    Life.some_pieces: 4,
    Life.relieve: 2,
    Life.fold_logs: 4,
    Life.commit_base: 1,
    lambda life: compact(life.store, None, lambda: False): 1,
    Life.reopen: 1,
    Life.go_back: 1,
}


def live(folder: Path, seed: int, acts: int) -> Counter[str]:
    with cut_small():
        life = Life(folder, seed)
        weights = np.array([*ACTS.values()]) / sum(ACTS.values())
        for act in life.rng.choice(np.array([*ACTS], object), acts, p=weights):
            act(life)
            life.check()
            if life.rng.random() < 0.2:
                life.check_files()
        life.check_files()
        life.table_folder.close()
    return life.done


def test_no_record_is_lost(tmp_path: Path):
    done = Counter[str]()
    for seed in range(3):
        done += live(tmp_path, seed, 80)
    assert done["marks"] > 20
    assert done["marks of some logs"] > 3
    assert done["logs written anew"] > 0
    assert done["commits taken back"] > 3
    assert done["rows in logs are the same"] > 5


@pytest.mark.slow
def test_no_record_is_lost_in_many_lives(tmp_path: Path):
    for seed in range(4, 30):
        live(tmp_path, seed, 250)


def test_logs_go_when_all_their_rows_are_folded(tmp_path: Path):
    with cut_small():
        life, lengths = Life(tmp_path, 1), list[int]()
        for _ in range(60):
            life.write()
            life.commit()
            compact(life.store, None, lambda: False, CompactionGoal(60, NO_AGE))
            lengths.append(len(life.store.delta))
            assert life.store.log_index.count <= 60
        life.commit()
        life.check_files()
        assert max(lengths) < 25
        assert life.done["marks"] == 0 < max(entry.folded for entry in life.store.content.base)
        files = {path.name for path in (life.folder / "delta").iterdir()}
        kept = [
            pool_of(manifests.read(OS_SYSTEM, str(life.folder), number))
            for number in manifests.numbers(OS_SYSTEM, str(life.folder))
        ]
        assert files == {entry.file.removeprefix("delta/") for pool in kept for entry in pool.delta}
        life.table_folder.close()
