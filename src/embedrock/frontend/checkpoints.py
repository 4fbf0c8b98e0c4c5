"""Checkpoints in a folder: of each a file and, of each table on disk, a commit that bears its name.

The order of things makes them one:

1. A draft of the file appears: a checkpoint is in the making, and commits of that name may be.
2. Every table on disk commits under the name ``<folder>-<step>-<token>``, which retention leaves alone.
3. The file is written, with dense weights and references to those commits, and synced.
4. It is renamed. From now on the checkpoint exists.

After a crash the newest file and the commits that it refers to are whole and belong together, and every draft tells
which commits belong to nothing. An old checkpoint is dropped by the same steps backwards.
"""

from __future__ import annotations

import os
import re
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from embedrock.io.vfs import OS_SYSTEM
from embedrock.system import platform
from embedrock.table.table import Table

FILE_NAME = re.compile(r"step-(\d{1,18})-([0-9a-f]{8})(\..+)")


class CheckpointSuffixes(NamedTuple):
    """How the files of a front end's checkpoints end.

    Attributes:
        file: of a checkpoint, such as ".weights.h5".
        draft: of one that does not exist yet, or no longer.
    """

    file: str
    draft: str


class Checkpoint(NamedTuple):
    """A checkpoint, by its place.

    Attributes:
        folder: of the checkpoints.
        step: of the training.
        token: tells it from all other checkpoints, whatever their folder is called.
        endings: of its files.
    """

    folder: Path
    step: int
    token: str
    endings: CheckpointSuffixes

    @classmethod
    def new(cls, folder: Path, step: int, endings: CheckpointSuffixes) -> Checkpoint:
        """Return one that is still to be made."""
        return cls(folder, step, secrets.token_hex(4), endings)

    @property
    def file(self) -> Path:
        """Everything but the rows on disk."""
        return self.folder / f"step-{self.step}-{self.token}{self.endings.file}"

    @property
    def draft(self) -> Path:
        """That file, before the checkpoint exists and after it is dropped."""
        return self.folder / f"step-{self.step}-{self.token}{self.endings.draft}"

    @property
    def commit_name(self) -> str:
        """The name of its commits."""
        folder = "".join(letter if letter.isprintable() else "?" for letter in self.folder.resolve().name)
        return f"{folder[:64]}-{self.step}-{self.token}"

    def owns(self, commit: dict[str, Any]) -> bool:
        """Return whether a commit is of this checkpoint, whatever its folder was called then."""
        return str(commit["name"]).endswith(f"-{self.step}-{self.token}")

    def begin(self) -> None:
        """Leave the sign that commits of its name may be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.draft.touch()
        OS_SYSTEM.fsync_folder(str(self.folder))

    def publish(self) -> None:
        """Make it exist: its draft is written, and its commits are durable."""
        with self.draft.open("rb+") as file:
            platform.sync(file.fileno())
        self.draft.rename(self.file)
        OS_SYSTEM.fsync_folder(str(self.folder))


def checkpoints(folder: Path, endings: CheckpointSuffixes) -> list[Checkpoint]:
    """Return the checkpoints in a folder, the last one last."""
    return _listed(folder, endings, endings.file)


def drafts(folder: Path, endings: CheckpointSuffixes) -> list[Checkpoint]:
    """Return those that do not exist yet, or no longer."""
    return _listed(folder, endings, endings.draft)


def one_of_each(tables: Iterable[Table]) -> list[Table]:
    """Return tables on disk, of each group only one: a commit of it is one of all."""
    return list({str(table.path): table for table in tables}.values())


def _listed(folder: Path, endings: CheckpointSuffixes, ending: str) -> list[Checkpoint]:
    matches = [FILE_NAME.fullmatch(name) for name in (os.listdir(folder) if folder.is_dir() else ())]
    found = [match for match in matches if match and match[3] == ending]
    return sorted(Checkpoint(folder, int(match[1]), match[2], endings) for match in found)


def older(before: Sequence[Checkpoint], made: Checkpoint, keep: int | None) -> list[Checkpoint]:
    """Return checkpoints that one takes the place of: others of its step, and all but the `keep` newest (None: none).

    Args:
        before: those that there were before it was made, the last one last.
        made: the new one, which counts.
        keep: how many to keep.
    """
    others = [each for each in before if each.step != made.step]
    kept = others if keep is None else others[max(len(others) - keep + 1, 0) :]
    return [each for each in before if each not in kept]


def drop(old: Sequence[Checkpoint], tables: Iterable[Table]) -> None:
    """Drop checkpoints of one folder, and let go of their commits."""
    retire(old)
    free(old, tables)
    _forget(old)


def retire(old: Sequence[Checkpoint]) -> None:
    """Rename the files of checkpoints of one folder to drafts, which name the commits to release."""
    for each in old:
        each.file.rename(each.draft)
    if old:
        OS_SYSTEM.fsync_folder(str(old[0].folder))


def collect(folder: Path, endings: CheckpointSuffixes, tables: Iterable[Table]) -> None:
    """Let go of the commits of checkpoints that do not exist: never finished, or dropped. None may be in the making."""
    drafted = drafts(folder, endings)
    free(drafted, tables)
    _forget(drafted)


def free(gone: Sequence[Checkpoint], tables: Iterable[Table]) -> None:
    """Release the commits of checkpoints that do not exist."""
    for table in tables:
        for commit in table.commits() if gone else ():
            if any(each.owns(commit) for each in gone):
                table.release(commit["name"])


def _forget(drafted: Sequence[Checkpoint]) -> None:
    for each in drafted:
        each.draft.unlink()


def told_last(made: Checkpoint) -> str:
    """Return which checkpoint is whole where one could not be made: a sentence."""
    found = checkpoints(made.folder, made.endings)
    return f"The last checkpoint, {str(found[-1].file)!r}, is whole." if found else "There is no checkpoint before it."


COME_AND_GONE = ("admitted", "evicted", "gradients_dropped", "gradients_shared")


class _Counts(NamedTuple):
    """Rows that were asked for since a table was opened, by whether they were in its cache."""

    hits: float
    misses: float


class TableNumbers:
    """Numbers about tables, as logs show them: ``"<name>/<what>"``.

    - ``rows``: rows that were ever stepped, and so are stored;
    - ``ram_bytes``: RAM that they take now (for a table on disk, its cache and its index);

    for a table whose rows come and go,

    - ``admitted``, ``evicted``: rows that got a record, and that lost it, so far;
    - ``gradients_dropped``: of rows that had no record yet;
    - ``gradients_shared``: of such rows, where they train a shared one;

    and for a table on disk,

    - ``disk_bytes``: its files;
    - ``hit_rate``: how many of the rows that were asked for since the last time were in the cache; left out where none
      were asked for;
    - ``commit_age_s``: seconds since its last commit.
    """

    def __init__(self) -> None:
        self._counted: weakref.WeakKeyDictionary[Table, _Counts] = weakref.WeakKeyDictionary()

    def begin(self, tables: Iterable[Table]) -> None:
        """Count what is asked for from now on."""
        for table in tables:
            self._counted[table] = _counts(table.stats())

    def of(self, tables: Mapping[str, Table]) -> dict[str, float]:
        """Return the numbers of tables, by their names."""
        return {
            f"{name}/{what}": float(value)
            for name, table in tables.items()
            for what, value in self._of_one(table).items()
        }

    def _of_one(self, table: Table) -> dict[str, float]:
        stats = table.stats()
        numbers = {"rows": stats["rows_touched"], "ram_bytes": stats["bytes_used"]}
        numbers |= {what: stats[what] for what in COME_AND_GONE if what in stats}
        if not table.is_on_disk:
            return numbers
        before, now = self._counted.get(table, _Counts(0, 0)), _counts(stats)
        self._counted[table] = now
        hits, misses = now.hits - before.hits, now.misses - before.misses
        if hits + misses:
            numbers["hit_rate"] = hits / (hits + misses)
        return {**numbers, "disk_bytes": stats["disk_bytes"], "commit_age_s": _age_s(table)}


def _counts(stats: dict[str, float]) -> _Counts:
    return _Counts(stats.get("hits", 0), stats.get("misses", 0))


def _age_s(table: Table) -> float:
    """Return the seconds since a table's last commit."""
    made = datetime.fromisoformat(table.commits()[-1]["time"])
    return max(0.0, (datetime.now(UTC) - made).total_seconds())
