"""`StoredVerbs`: the verbs of files of a table or group: commits, rollback, compaction, snapshots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from typing import Any, Literal, overload

from embedrock.errors import UnsupportedError
from embedrock.storage.table_lock import TableLock
from embedrock.store import folder as folders
from embedrock.store.verify import Verification, verify
from embedrock.system.notebook import PublicNames
from embedrock.system.scopes import ClosedAtEnd
from embedrock.system.sizes import format_bytes
from embedrock.table import opened
from embedrock.table.changed_rows import RowChanges
from embedrock.table.options import index
from embedrock.table.rows import ChangeCounter
from embedrock.table.storage import StorageManager


class StoredVerbs(PublicNames, ClosedAtEnd, ABC):
    """A table alone, a member of a group, or a group. On disk, commits make its changes durable.

    Attributes:
        storage: manages the files; None in RAM.
        table_lock: the lock of the table, or of all tables of the group.
    """

    storage: StorageManager | None
    table_lock: TableLock
    _unlisted = "_[!_]* is_open_here storage subject table_lock"

    @property
    @abstractmethod
    def subject(self) -> str:
        """Name of the table or group in error messages."""

    @abstractmethod
    def _check_usable(self) -> None: ...

    @abstractmethod
    def _versions(self) -> Sequence[ChangeCounter]: ...

    @property
    @abstractmethod
    def is_open_here(self) -> bool:
        """Return whether it is open, and this process opened it, not a parent process."""

    @abstractmethod
    def _html(self) -> str: ...

    def _repr_html_(self) -> str:
        """Return a table of facts, for notebooks."""
        return self._html() if self.is_open_here else escape(repr(self))

    def _committed(self, numbers: dict[str, float]) -> str:
        """Text about the last commit, for people."""
        if self.storage is None:
            return ""
        step = "" if self.last_step is None else f" (step {self.last_step:,})"
        return f", {format_bytes(numbers.get('disk_bytes', 0))} of files, last commit {self.last_commit:,}{step}"

    def _note(self) -> None:
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
        """Return whether its rows live on disk."""
        return self.storage is not None

    @property
    def mode(self) -> str:
        """ "w", or "r" for a snapshot."""
        return "w" if self.storage is None else self.storage.opening.mode

    @property
    def uuid(self) -> str:
        """A unique identifier of its files, wherever they are moved: 32 hexadecimal digits."""
        return self._on_disk().table_folder.manifest.uuid

    @property
    def last_commit(self) -> int:
        """Number of the last durable commit."""
        return self._on_disk().last_commit

    @property
    def last_step(self) -> int | None:
        """The `step` that was given to the last commit."""
        return self._on_disk().table_folder.manifest.step

    @property
    def uncommitted(self) -> bool:
        """Return whether it is on disk and has uncommitted changes. Waits for a running commit.

        So read it before `last_commit`, which is then that commit.
        """
        if self.storage is None:
            return False
        if not all(version.is_committed for version in self._versions()):
            return True
        commit = self.storage.pending
        if commit is not None:
            commit.join()
        return commit is not None and commit.error is not None

    def commits(self) -> list[dict[str, Any]]:
        """Return the existing commits, the oldest first: dicts of commit, step, name, time, rows and bytes."""
        return self._on_disk().commits()

    def verify(self) -> Verification:
        """Read all files of all commits, and check every checksum: see `Verification`."""
        where = self._on_disk().table_folder
        return verify(where.system, where.folder)

    # ---------------------------------------------------------------- what is done to it

    def commit(self, step: int | None = None, name: str | None = None, wait: bool = True) -> int:
        """Make all changes so far durable, as one; return the commit's number. A group commits all members.

        After a crash at any instant the table opens as of the last commit, or of one made since.

        Args:
            step: the caller's step number, for resuming.
            name: tag that keeps the commit until `release`. Other commits are deleted once `keep` newer ones exist.
            wait: return when it is durable. False: write it in the background, with the present values, while training
                goes on. The next call that changes, commits or closes the table raises its error.

        Raises:
            CommitError: it failed (disk full, I/O error). The last commit is whole, and so are the rows in RAM.
            ReadOnlyTableError: it was opened with ``mode="r"``.
            UnsupportedError: it lives in RAM.
        """
        with self.table_lock.whole():
            self._check_usable()
            return self._on_disk().commit(index(step), name, wait)

    def release(self, name: str) -> None:
        """Allow retention to delete commits with a tag, if there are any.

        Args:
            name: the tag, as given to `commit`.
        """
        storage = self._on_disk()
        storage.check_writable()
        folders.release(storage.table_folder.system, storage.table_folder.folder, name)

    def rollback(self, commit: int) -> int:
        """Go back to an earlier commit: its content becomes a new one, whose number is returned.

        Uncommitted changes are lost, except deletions by `forget`: these rows stay deleted in any case. No earlier
        commit is lost. Tables that the commit does not have are closed.

        Args:
            commit: number of the commit.

        Raises:
            ArgumentError: there is no such commit.
        """
        with self.table_lock.whole():
            self._check_usable()
            return self._on_disk().rollback(index(commit))

    @overload
    def refresh(self, changes: Literal[False] = False) -> bool: ...

    @overload
    def refresh(self, changes: bool) -> Any: ...

    def refresh(self, changes: bool = False) -> Any:
        """Move a snapshot (``mode="r"``) to the newest commit; return whether there was a newer one.

        Layers that have the table continue with it. Only rows that changed leave its cache. Other threads wait for
        less than a millisecond, unless a table came, went or changed its rule: then all caches are empty afterwards.
        Tables that the commit does not have are closed.

        Args:
            changes: return the changes since the commit before, as `Table.changes` or `Group.changes` does. They are
                false if there are none, and have all rows (`since` is None) if nothing says which ones changed.

        Raises:
            UnsupportedError: it is no snapshot. With `changes`: its rule moves rows without a gradient.
            TableFileError: its path has another table now, or none. The snapshot stays.
        """
        self._check_usable()
        found = self._on_disk().refresh(changes)
        return self._own(found) if changes else found

    def _own(self, changes: dict[str, RowChanges]) -> Any:
        """Return the changes of what it is: of a table, or of the members of a group."""
        return changes

    def compact(self) -> int:
        """Compact the changes of past commits into the base, and commit that; return the last commit's number.

        Uncommitted changes are not in it. Compaction also runs in the background after commits, as often as use of disk
        and RAM requires.
        """
        self._check_usable()
        return self._on_disk().compact()
