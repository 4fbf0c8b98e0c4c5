"""Checkpoints in a folder. Each has one file, and one commit of each table on disk, named after the checkpoint.

Four steps in this order make a checkpoint atomic:

1. A draft of the file is created. From now on, commits of that name may exist.
2. Every table on disk commits under the name ``<folder>-<step>-<token>``, which retention leaves alone.
3. The file is written, with dense weights and references to those commits, and synced.
4. The file is renamed. From now on the checkpoint exists.

After a crash, the newest file and its commits are complete and belong together. Every draft names commits without a
checkpoint. An old checkpoint is dropped by the same steps backwards.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, CommitError
from embedrock.frontend.references import ReferenceRemedies, check_state, go_to, reference_at
from embedrock.frontend.row_files import check_rows, read_rows, write_rows
from embedrock.io.vfs import OS_SYSTEM, explained_if_full, full_disk
from embedrock.storage.commit import StorageCommit
from embedrock.system import platform
from embedrock.table.group import Group
from embedrock.table.table import Table, rows_of

FILE_NAME = re.compile(r"step-(\d{1,18})-([0-9a-f]{8})(\..+)")
_NONE_BEFORE = "There is no checkpoint before it."


class CheckpointSuffixes(NamedTuple):
    """The suffixes of a front end's checkpoint files."""

    file: str  # such as ".weights.h5"
    draft: str  # of a checkpoint that is unfinished or dropped


class Checkpoint(NamedTuple):
    """A checkpoint, by its place."""

    folder: Path  # of the checkpoints
    step: int  # of the training
    token: str  # unique number of the checkpoint, which survives a rename of the folder
    endings: CheckpointSuffixes

    @classmethod
    def new(cls, folder: Path, step: int, endings: CheckpointSuffixes) -> Checkpoint:
        """Return a checkpoint that is still to be made."""
        return cls(folder, step, secrets.token_hex(4), endings)

    @property
    def file(self) -> Path:
        """The file with everything but the rows on disk."""
        return self.folder / f"step-{self.step}-{self.token}{self.endings.file}"

    @property
    def draft(self) -> Path:
        """The name of the file before the checkpoint exists and after it is dropped."""
        return self.folder / f"step-{self.step}-{self.token}{self.endings.draft}"

    @property
    def commit_name(self) -> str:
        """The name of the checkpoint's commits."""
        folder = "".join(letter if letter.isprintable() else "?" for letter in self.folder.resolve().name)
        return f"{folder[:64]}-{self.step}-{self.token}"

    def owns(self, commit: dict[str, Any]) -> bool:
        """Return whether a commit belongs to this checkpoint, even if the folder was renamed since."""
        return str(commit["name"]).endswith(f"-{self.step}-{self.token}")

    def begin(self) -> None:
        """Create the draft, which announces commits of this checkpoint's name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.draft.touch()
        OS_SYSTEM.fsync_folder(str(self.folder))

    def publish(self) -> None:
        """Rename the draft to the file. The draft is complete and the commits are durable."""
        with self.draft.open("rb+") as file:
            platform.sync(file.fileno())
        self.draft.rename(self.file)
        OS_SYSTEM.fsync_folder(str(self.folder))

    def explained_if_full(self, needed: Callable[[], int], rows: str = "") -> AbstractContextManager[None]:
        """Explain an error of a full disk, by the bytes of the file, and free the space of the draft."""

        def explain() -> OSError:
            if self.draft.exists():
                self.draft.write_bytes(b"")
            found = checkpoints(self.folder, self.endings)
            last = f"The last checkpoint, {str(found[-1].file)!r}, is whole." if found else _NONE_BEFORE
            remedy = f"Free some space, or save to a folder on another disk. {last}"
            what = f"the checkpoint of step {self.step}{rows} could not be saved"
            return full_disk(str(self.file), what, needed(), remedy)

        return explained_if_full(explain)


def checkpoints(folder: Path, endings: CheckpointSuffixes) -> list[Checkpoint]:
    """Return the checkpoints in a folder, oldest first."""
    return _listed(folder, endings, endings.file)


def drafts(folder: Path, endings: CheckpointSuffixes) -> list[Checkpoint]:
    """Return the checkpoints in a folder that are unfinished or dropped."""
    return _listed(folder, endings, endings.draft)


def one_of_each(tables: Iterable[Table]) -> list[Table]:
    """Return the tables on disk, only one of each group. A commit of one table is a commit of its whole group."""
    return list({str(table.path): table for table in tables}.values())


def _listed(folder: Path, endings: CheckpointSuffixes, ending: str) -> list[Checkpoint]:
    matches = [FILE_NAME.fullmatch(name) for name in (os.listdir(folder) if folder.is_dir() else ())]
    found = [match for match in matches if match and match[3] == ending]
    return sorted(Checkpoint(folder, int(match[1]), match[2], endings) for match in found)


def older(before: Sequence[Checkpoint], made: Checkpoint, keep: int | None) -> list[Checkpoint]:
    """Return the checkpoints that a new one replaces: others of its step, and the oldest beyond `keep` (None: none)."""
    others = [each for each in before if each.step != made.step]
    kept = others if keep is None else others[max(len(others) - keep + 1, 0) :]
    return [each for each in before if each not in kept]


def drop(old: Sequence[Checkpoint], tables: Iterable[Table]) -> None:
    """Drop checkpoints of one folder, and release their commits."""
    retire(old)
    _remove(old, tables)


def retire(old: Sequence[Checkpoint]) -> None:
    """Rename the files of checkpoints of one folder to drafts, which name the commits to release."""
    for each in old:
        each.file.rename(each.draft)
    if old:
        OS_SYSTEM.fsync_folder(str(old[0].folder))


def collect(folder: Path, endings: CheckpointSuffixes, tables: Iterable[Table]) -> None:
    """Release the commits of unfinished or dropped checkpoints. No checkpoint may be in progress."""
    _remove(drafts(folder, endings), tables)


def _remove(gone: Sequence[Checkpoint], tables: Iterable[Table]) -> None:
    free(gone, tables)
    for each in gone:
        each.draft.unlink()


def free(gone: Sequence[Checkpoint], tables: Iterable[Table]) -> None:
    """Release the commits of checkpoints that do not exist."""
    for table in tables:
        for commit in table.commits() if gone else ():
            if any(each.owns(commit) for each in gone):
                table.release(commit["name"])


def save_tables(
    tables: Mapping[str, Table], folder: Path, prefix: str, held: Collection[str], step: int | None
) -> tuple[StorageCommit, ...]:
    """Begin a commit of each table on disk, and write the rows of others to a folder.

    A file in the folder gets the name of the commits. Its checkpoint may exist once they have ended. Older commits are
    released if their names begin with `prefix` and are not in `held`, the names of the files of all such checkpoints.
    """
    on_disk = one_of_each(table for table in tables.values() if table.is_on_disk and table.mode == "w")
    for table in on_disk:
        for old in {str(commit["name"]) for commit in table.commits()}.difference(held):
            if old.startswith(prefix):
                table.release(old)
    name, states = f"{prefix}{secrets.token_hex(4)}", dict[str, Any]()
    begun = dict[str | None, int]()
    for table in on_disk:
        try:
            begun[table.path] = table.commit(step, name, wait=False)
        except CommitError:  # of the commit before, whose rows this one has
            begun[table.path] = table.commit(step, name, wait=False)
    for label, table in tables.items():
        if table.is_on_disk:
            states[label] = reference_at(table, begun.get(table.path, table.last_commit), step)
        else:
            states[label] = {"rows": f"rows-{len(states)}"}
            write_rows(table, str(folder / states[label]["rows"]))
    (folder / f"{name}.json").write_text(json.dumps(states))
    return tuple(table.storage.last_begun for table in on_disk if table.storage)


def load_tables(tables: Mapping[str, Table], folder: Path, names: str, remedies: ReferenceRemedies) -> None:
    """Take tables back to a folder of `save_tables`, all of them or none. The name of its file fits `names`."""
    states = {key: value for file in folder.glob(names) for key, value in json.loads(file.read_text()).items()}
    if states.keys() != tables.keys():
        had, got = (", ".join(name or "one table" for name in each) or "no table" for each in (states, tables))
        raise ArgumentError(f"tables of {str(folder)!r} must be named as they were, {had}: got {got}.")
    rows = {label: str(folder / state["rows"]) for label, state in states.items() if "rows" in state}
    for label, table in tables.items():
        check_state(table, states[label], label or "the table", remedies)
        if label in rows:
            check_rows(table, rows[label])
        elif states[label]["commit"] != table.last_commit:
            rows_of(table).check_writable()
    for label, table in tables.items():
        read_rows(table, rows[label]) if label in rows else go_to(table, states[label])


COME_AND_GONE = ("admitted", "evicted", "gradients_dropped", "gradients_shared")


class TableNumbers:
    """Numbers about tables for logs. `erk.TableStats` and `ert.log_stats` explain each."""

    def __init__(self) -> None:
        # Cache hits and misses since a table or group was opened.
        self._counted: weakref.WeakKeyDictionary[Table | Group, tuple[float, float]] = weakref.WeakKeyDictionary()

    def begin(self, tables: Iterable[Table]) -> None:
        """Count row requests from now on."""
        for each in {each for table in tables for each in (table, table.group) if each is not None}:
            self._counted[each] = _counts(each.stats())

    def of(self, layers: Iterable[tuple[str, Table]], per_table: bool) -> dict[str, float]:
        """Return ``{"tables/<what>": number}`` of the tables of layers together, or of each, by its first layer."""
        names = {table: name for name, table in reversed([*layers])}
        parts = {name: [table] for table, name in reversed(names.items())} if per_table else {"tables": [*names]}
        named = {name: self._of_all(part) for name, part in parts.items() if part}
        return {f"{name}/{what}": float(value) for name, numbers in named.items() for what, value in numbers.items()}

    def _of_all(self, tables: Sequence[Table]) -> dict[str, float]:
        all_stats = [table.stats() for table in tables]
        numbers = {"rows": _total(all_stats, "rows_touched"), "ram_bytes": _total(all_stats, "bytes_used")}
        numbers |= {what: _total(all_stats, what) for what in COME_AND_GONE if any(what in own for own in all_stats)}
        # Members of a group share their files and their cache.
        owners = {table if len(tables) == 1 else table.group or table for table in tables if table.is_on_disk}
        if not owners:
            return numbers
        all_stats = [owner.stats() for owner in owners]
        counts = [_counts(stats) for stats in all_stats]
        hits, misses = np.sum(counts, 0) - np.sum([self._counted.get(owner, (0, 0)) for owner in owners], 0)
        self._counted.update(zip(owners, counts, strict=True))
        if hits + misses:
            numbers["hit_rate"] = hits / (hits + misses)
        committed = min(datetime.fromisoformat(owner.commits()[-1]["time"]) for owner in owners)
        age_s = max(0.0, (datetime.now(UTC) - committed).total_seconds())
        return {**numbers, "disk_bytes": _total(all_stats, "disk_bytes"), "commit_age_s": age_s}


def _total(all_stats: Sequence[Mapping[str, float]], what: str) -> float:
    return sum(stats.get(what, 0) for stats in all_stats)


def _counts(stats: dict[str, float]) -> tuple[float, float]:
    return stats.get("hits", 0), stats.get("misses", 0)
