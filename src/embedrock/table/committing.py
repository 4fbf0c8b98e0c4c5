"""`Committing`: a table on disk: its commits, which one it is as of, and what is done to its files."""

from __future__ import annotations

from embedrock.store.verify import Verification
from embedrock.table.facts import Facts, whole
from embedrock.table.opening import index


class Committing(Facts):
    """A table on disk, whose changes become durable by commits."""

    @whole
    def commit(self, step: int | None = None, name: str | None = None, wait: bool = True) -> int:
        """Make all changes so far durable, as one; return the commit's number.

        After a crash at any instant the table opens as of the last commit, or of one made since.

        Args:
            step: the caller's step number, to go on from.
            name: keeps the commit until `release`; others are dropped when `keep` newer ones are there.
            wait: return when it is durable. False: it is written in the background, with the values of now, while
                training goes on; what goes wrong is raised by the next call that changes, commits or closes the table.

        Raises:
            CommitError: it failed (disk full, I/O error). The last commit is whole, and so are the rows in RAM.
            ReadOnlyTableError: the table was opened with ``mode="r"``.
            UnsupportedError: the table lives in RAM.
        """
        return self._on_disk().commit(self._checked_rows(), index(step), name, wait)

    def release(self, name: str) -> None:
        """Let retention drop the commits called `name`. Nothing happens where there are none."""
        self._on_disk().release(self._checked_rows(), name)

    @whole
    def rollback(self, commit: int) -> int:
        """Go back to an earlier commit: its content becomes a new one, whose number is returned.

        Changes that no commit has are dropped, but for rows that were forgotten: these stay away, whether a commit
        knows or not. No earlier commit is lost.

        Raises:
            ArgumentError: there is no such commit.
        """
        return self._on_disk().rollback(self._checked_rows(), index(commit))

    def refresh(self) -> bool:
        """Let a snapshot (``mode="r"``) go on with the newest commit; return whether there was a newer one.

        Layers that have the table go on with it. Others wait while it changes; its cache is empty then.

        Raises:
            UnsupportedError: the table is no snapshot, or lies in parts.
            TableFileError: another table lies at its path now, or none. The snapshot stays.
        """
        self._rows.check_open()
        return self._on_disk().refresh(self._checked_rows())

    def compact(self) -> int:
        """Fold the changes of past commits into the table's base, and commit that; return the last commit's number.

        Changes that no commit has are not in it. It happens by itself in the background after commits, as often as the
        disk's and the RAM's use ask for it.
        """
        self._on_disk().compact(self._checked_rows())
        return self._commit_base()

    @whole
    def _commit_base(self) -> int:
        return self._on_disk().commit_base(self._checked_rows())

    def verify(self) -> Verification:
        """Read all files of all commits, and check every checksum: see `Verification`."""
        return self._on_disk().verify()
