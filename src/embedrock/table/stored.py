"""`StoredVerbs`: what a table and a group do with their files: commits, rollback, compaction, snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

from embedrock.errors import UnsupportedError
from embedrock.storage.table_lock import TableLock
from embedrock.store.verify import Verification
from embedrock.table import opened
from embedrock.table.location import ChangeCounter
from embedrock.table.options import index
from embedrock.table.storage import StorageManager


class StoredVerbs(ABC):
    """A table alone, a member of a group, or a group, whose changes become durable by commits where it is on disk.

    Attributes:
        storage: manages the files; None of what lives in RAM.
        turn: the lock of the table, or of all tables of the group.
    """

    storage: StorageManager | None
    table_lock: TableLock

    @property
    @abstractmethod
    def subject(self) -> str:
        """What error messages call it."""

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise what keeps it from being used: it is closed, say."""

    @abstractmethod
    def _versions(self) -> Sequence[ChangeCounter]:
        """Return what says whether there are changes that no commit has."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @property
    @abstractmethod
    def is_open_here(self) -> bool:
        """Whether it is open, and by this process, not by one whose child this is."""

    def _note(self) -> None:
        """Let this process find it by its path."""
        if self.mode == "w":
            opened.note(self, self.path)

    def _on_disk(self) -> StorageManager:
        if self.storage is None:
            raise UnsupportedError(
                f"{self.subject} lives in RAM and has no commits. Make it with path=..., or save what {self._saved} "
                "returns."
            )
        return self.storage

    _saved = "state()"

    # ---------------------------------------------------------------- what it is

    @property
    def path(self) -> str | None:
        """The folder of a table or group on disk, absolute; None in RAM."""
        return None if self.storage is None else self.storage.opening.path

    @property
    def is_on_disk(self) -> bool:
        """Whether its rows live on disk."""
        return self.storage is not None

    @property
    def mode(self) -> str:
        """ "w", or "r" for a snapshot."""
        return "w" if self.storage is None else self.storage.opening.mode

    @property
    def uuid(self) -> str:
        """An identifier of its files that no others have, wherever they are moved: 32 hexadecimal digits."""
        return self._on_disk().uuid

    @property
    def last_commit(self) -> int:
        """Number of the last commit that is durable."""
        return self._on_disk().last_commit

    @property
    def last_step(self) -> int | None:
        """The `step` that was given to the last commit."""
        return self._on_disk().last_step

    @property
    def uncommitted(self) -> bool:
        """Whether it is on disk and has changes that no commit has. A commit under way is waited for.

        So ask it before `last_commit`, which is that one then.
        """
        if self.storage is None:
            return False
        return not all(version.is_committed for version in self._versions()) or not self.storage.is_durable()

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first: dicts of commit, step, name, time, rows and bytes."""
        return self._on_disk().commits()

    def verify(self) -> Verification:
        """Read all files of all commits, and check every checksum: see `Verification`."""
        return self._on_disk().verify()

    # ---------------------------------------------------------------- what is done to it

    def commit(self, step: int | None = None, name: str | None = None, wait: bool = True) -> int:
        """Make all changes so far durable, as one; return the commit's number. A group's has those of all members.

        After a crash at any instant the table opens as of the last commit, or of one made since.

        Args:
            step: the caller's step number, to go on from.
            name: keeps the commit until `release`; others are dropped when `keep` newer ones are there.
            wait: return when it is durable. False: it is written in the background, with the values of now, while
                training goes on; what goes wrong is raised by the next call that changes, commits or closes the table.

        Raises:
            CommitError: it failed (disk full, I/O error). The last commit is whole, and so are the rows in RAM.
            ReadOnlyTableError: it was opened with ``mode="r"``.
            UnsupportedError: it lives in RAM.
        """
        with self.table_lock.whole():
            self._check_usable()
            return self._on_disk().commit(index(step), name, wait)

    def release(self, name: str) -> None:
        """Let retention drop the commits called `name`. Nothing happens where there are none."""
        self._on_disk().release(name)

    def rollback(self, commit: int) -> int:
        """Go back to an earlier commit: its content becomes a new one, whose number is returned.

        Changes that no commit has are dropped, but for rows that were forgotten: these stay away, whether a commit
        knows or not. No earlier commit is lost. Tables that the commit does not have are closed.

        Raises:
            ArgumentError: there is no such commit.
        """
        with self.table_lock.whole():
            self._check_usable()
            return self._on_disk().rollback(index(commit))

    def refresh(self) -> bool:
        """Let a snapshot (``mode="r"``) go on with the newest commit; return whether there was a newer one.

        Layers that have the table go on with it. Others wait while it changes; its cache is empty then. Tables that
        the commit does not have are closed.

        Raises:
            UnsupportedError: it is no snapshot, or lies in parts.
            TableFileError: another table lies at its path now, or none. The snapshot stays.
        """
        self._check_usable()
        return self._on_disk().refresh()

    def compact(self) -> int:
        """Fold the changes of past commits into the base, and commit that; return the last commit's number.

        Changes that no commit has are not in it. It happens by itself in the background after commits, as often as the
        disk's and the RAM's use ask for it.
        """
        self._check_usable()
        self._on_disk().compact()
        with self.table_lock.whole():
            return self._on_disk().commit_base()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
