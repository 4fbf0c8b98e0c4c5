"""`TableFolder`: the folder of one table or of a group, with its writer, its commits and its record stores."""

from __future__ import annotations

import contextlib
import errno
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from embedrock.errors import (
    ArgumentError,
    CommitError,
    EmbedrockError,
    HistoryDroppedError,
    MissingFileError,
    ReadOnlyTableError,
    TableFileError,
)
from embedrock.io.vfs import NO_SPACE, System, read_whole
from embedrock.kernels.keys import PART_BITS
from embedrock.store import change_lists
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.change_lists import ChangedIds, ChangeList, ListFile, distinct
from embedrock.store.folder import Folder
from embedrock.store.forgotten import MOST_FILES, Tombstones, old_name
from embedrock.store.history import Written, read_history, write_history
from embedrock.store.manifest import HistoryFile, Manifest, StoreEntry
from embedrock.store.publishing import MAX_BYTES, sha_of
from embedrock.store.reading import check_table
from embedrock.store.record_store import CommitSnapshot, RecordStore, keys_of_part, within
from embedrock.system.scopes import on_failure


class TableFolder(Folder[Manifest]):
    """Folder of one table or of a group. Any thread may call it.

    A table alone has one store, and a group has one per pool. A commit contains all stores.

    Attributes:
        stores: record stores in the order of the manifest. Stores that no commit has yet come last.
        histories: arrays of the step histories by file name, as of the opened commit.
        withheld: pairs of ids by table name ("" for a table alone). The first ids were deleted after the opened or
            restored commit. The second ids are those of them with a record in that commit.
        broken: reason why commits are refused. None: they are accepted.
        readers: users of its files beside the tables. The files stay open for them.
        sha: SHA-256 of the manifest.

    Args:
        before: the same folder as of an earlier commit, for reading: see `RecordStore`.
    """

    def __init__(
        self, system: System, folder: str, manifest: Manifest, held: int | None, before: TableFolder | None = None
    ) -> None:
        super().__init__(system, folder, manifest, held)
        self.broken: str | None = None
        self.readers = weakref.WeakSet[Any]()
        stores = [] if before is None else before.stores
        self.stores = [RecordStore(self, *each) for each in zip_longest(manifest.pools, stores[: len(manifest.pools)])]
        self.histories = self._histories_of(manifest)
        self.withheld = dict[str, tuple[np.ndarray, np.ndarray]]()
        # Deleted ids and renamed members that no commit has yet, and those of the running commit.
        self._deleted, self._deleting = list[tuple[str, np.ndarray]](), list[tuple[str, np.ndarray]]()
        self._renamed, self._renaming = list[tuple[str, str]](), list[tuple[str, str]]()
        self._begun = list[str]()  # names of files of the running commit
        self.sha = sha_of(manifest.to_bytes())

    @property
    def next_commit(self) -> int:
        """Return the number of the next commit."""
        return self.manifest.commit + 1

    @property
    def kind(self) -> str:
        return "group" if self.manifest.is_group else "table"

    # ---------------------------------------------------------------- opening

    @classmethod
    def open(cls, system: System, folder: str, at: int | None, write: bool, locked: bool) -> TableFolder:
        """Open a table or a group.

        Args:
            at: number of a commit, for a reader. None: the last one.
            write: open as the only writer.
            locked: refuse to write if the file system has no locks.
        """
        check_table(system, folder)
        if not write:
            return cls._open_to_read(system, folder, at)
        return cls.open_to_write(system, folder, locked)

    @classmethod
    def newest_of(cls, system: System, folder: str) -> Manifest:
        found = folders.newest(system, folder)
        if not found.published.chain:
            return found
        raise ReadOnlyTableError(
            errno.EROFS,
            "rows were published here, and only er.publish changes them. Train the table that they come from, or read "
            f"them: er.Subscriber({folder!r})",
            folder,
        )

    def prepare_to_write(self) -> None:
        super().prepare_to_write()
        if self.manifest.origin is not None:
            self.withheld = self._withhold(self.manifest, self.stores, self._forgotten(self.manifest))
        lists = change_lists.files_in(self.system, self.folder, self.manifest.uuid)
        orphans = [file.name for file in change_lists.orphans(lists, self.manifest.commit)]
        has_draft = self.system.exists(f"{self.folder}/{change_lists.DRAFT}")
        self.unlink([*orphans, *[change_lists.DRAFT] * has_draft], lambda: False)

    @classmethod
    def _open_to_read(
        cls, system: System, folder: str, at: int | None, before: TableFolder | None = None
    ) -> TableFolder:
        """Open all files of a commit. Open files stay readable after the writer removes them."""
        while True:
            commit = manifests.numbers(system, folder)[-1] if at is None else at
            try:
                table_folder = cls(system, folder, folders.manifest_at(system, folder, commit), None, before)
                if at is not None or table_folder.manifest.origin is not None:
                    forgotten = table_folder._newest_forgotten()
                    withhold = table_folder._withhold
                    table_folder.withheld = withhold(table_folder.manifest, table_folder.stores, forgotten)
                return table_folder
            except (FileNotFoundError, ArgumentError) as error:
                # The writer may have dropped this commit meanwhile. Otherwise a file is missing. Only the newest commit
                # must have the files of tombstones.
                is_told = at is not None and isinstance(error, ArgumentError)
                if is_told or commit in manifests.numbers(system, folder):
                    raise

    def newest(self) -> TableFolder | None:
        """Open the newest commit for reading. Return None if this folder has it already.

        Raises:
            TableFileError: the folder has another table now, or none.
        """
        check_table(self.system, self.folder)
        with contextlib.suppress(FileNotFoundError):  # a writer has dropped it meanwhile: then a newer one exists
            number = manifests.numbers(self.system, self.folder)[-1]
            where = manifests.path_of(self.folder, number)
            if number == self.manifest.commit and sha_of(read_whole(self.system, where, MAX_BYTES)) == self.sha:
                return None
        made = self._open_to_read(self.system, self.folder, None, self)
        if made.manifest.uuid == self.manifest.uuid:
            return made
        made.close(self)
        raise TableFileError(
            errno.ESTALE,
            f"another {made.kind} lies here now, {made.manifest.uuid}, not the one that was opened, "
            f"{self.manifest.uuid}. Open it anew",
            self.folder,
        )

    # ---------------------------------------------------------------- deleted rows

    def bury(self, table: str, ids: np.ndarray) -> None:
        """Record deleted rows. From the next commit on, no earlier commit restores them.

        Args:
            table: name of a member, or "" for a table alone.
            ids: int64 (n,). Some rows may be in earlier commits only.
        """
        with self.lock:
            self._deleted.append((old_name(table, self._renamed), ids.copy()))

    def rename(self, old: str, new: str) -> None:
        with self.lock:
            self._renamed.append((old, new))

    def committed_name(self, name: str) -> str:
        """Return the name of a member in the last commit."""
        with self.lock:
            return old_name(name, [*self._renaming, *self._renamed])

    def _forgotten(self, manifest: Manifest) -> Tombstones:
        files = [read_history(self.system, self.folder, part, manifest.uuid) for part in manifest.forgotten]
        return Tombstones.of_files(files, manifests.path_of(self.folder, manifest.commit))

    def _newest_forgotten(self) -> Tombstones:
        while True:
            newest = folders.newest_readable(self.system, self.folder)
            try:
                return self._forgotten(newest)
            except MissingFileError:  # a writer has dropped it meanwhile: then a newer one exists
                if folders.newest_readable(self.system, self.folder).commit == newest.commit:
                    raise

    def _withhold(
        self, manifest: Manifest, stores: Sequence[RecordStore], forgotten: Tombstones
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        withheld, is_writer = dict[str, tuple[np.ndarray, np.ndarray]](), self._held is not None
        members = {member.name: member for member in manifest.members}
        for name, ids in forgotten.before(manifest.content_commit).items():
            if (member := members.get(name)) is not None:
                base = (member.part or 0) << PART_BITS
                withheld[name] = ids, stores[member.pool].withhold(ids + base, is_writer) - base
        return withheld

    def _next_forgotten(self, number: int, new: Tombstones) -> tuple[HistoryFile, ...]:
        """Return the tombstone files of the next commit, with a new file if `new` is not empty."""
        if not (self.manifest.forgotten or new):
            return ()
        kept = [one.content_commit for one in folders.manifests_of(self.system, self.folder)]
        oldest = min([*kept, self.manifest.commit])
        files = tuple(part for part in self.manifest.forgotten if part.count > oldest)
        if not new:
            return files
        if len(files) >= MOST_FILES:
            new, files = self._forgotten(self.manifest).since(oldest).joined(new), ()
        name = self.free_name(f"history/{number:010d}", ".his")
        self._begun.append(name)
        made = write_history(self.system, self.folder, name, self.manifest.uuid, new.arrays())
        return (*files, replace(made, count=number))

    def _histories_of(self, manifest: Manifest) -> dict[str, dict[str, np.ndarray]]:
        return {part.file: read_history(self.system, self.folder, part, manifest.uuid) for part in manifest.history}

    def close(self, but: TableFolder | None = None) -> None:
        """Close its files, except those of another commit that is open."""
        with self.lock:
            for store in self.stores:
                store.close(() if but is None else but.stores)
            self.unlock()

    # ---------------------------------------------------------------- stores

    def add(self, content: StoreEntry) -> RecordStore:
        """Return a new, empty store that the next commit contains."""
        made = RecordStore(self, content)
        with self.lock:
            self.stores = [*self.stores, made]
        return made

    def discard(self, store: RecordStore) -> None:
        """Discard a store. The next commit does not contain it. No commit is running."""
        with self.lock:
            self.stores = [each for each in self.stores if each is not store]
        store.give_up()

    def replace(self, store: RecordStore, by: RecordStore) -> None:
        """Replace a store in the next commit. No commit is running."""
        with self.lock:
            self.stores = [by if each is store else each for each in self.stores]
        store.give_up()

    # ---------------------------------------------------------------- commits

    def freeze(self, have_newer: Sequence[Callable[[np.ndarray], np.ndarray]]) -> tuple[CommitSnapshot, ...]:
        """Begin a commit. Records appended from now on belong to the next one.

        Args:
            have_newer: a function per store that returns which ids have records that this commit writes, bool (n,).
        """
        self.check_commits()
        with self.lock:
            made = tuple(store.freeze(newer) for store, newer in zip(self.stores, have_newer, strict=True))
            self._deleting, self._deleted = self._deleted, []
            self._renaming, self._renamed = self._renamed, []
            return made

    def check_commits(self) -> None:
        if self.is_moved:
            raise CommitError(
                errno.ESTALE,
                "the table was moved or removed while it was open for writing, so nothing is committed here. Move it "
                f"back; commit {self.manifest.commit} is whole, wherever it is",
                self.folder,
            )
        if self.broken is not None:
            raise CommitError(
                errno.EIO,
                f"commits are no longer taken after one that failed twice to reach the disk ({self.broken}). Commit "
                f"{self.manifest.commit} is whole. Look after the disk, close the table and open it again",
                self.folder,
            )

    def publish(
        self,
        snapshots: Sequence[CommitSnapshot],
        changes: Mapping[str, Any],
        keep: float,
        rest: Callable[[float], None] = lambda started: None,
    ) -> None:
        """Publish snapshots as one commit, durably. Then remove files that no retained commit needs.

        Args:
            snapshots: the snapshots of `freeze`, with the rows that were in RAM in their logs.
            changes: fields of the manifest.
            keep: number of commits to retain.
            rest: called between parts of the clean-up, with this thread's time when the part began.

        Raises:
            OSError: the disk is full, or failed twice. The last commit is intact.
        """
        changed = [snapshot.changed() for snapshot in snapshots]  # before their logs are sealed, or written anew
        try:
            manifest = self._publish(snapshots, changes, changed, only_broken=True)
        except OSError as error:
            self._check_unpublished()
            if error.errno in NO_SPACE:
                raise
            self._drop_begun()
            try:  # once with new files: after a failed write or sync, the content of the old ones is unknown
                manifest = self._publish(snapshots, changes, changed, only_broken=False)
            except OSError as again:
                if again.errno not in NO_SPACE:
                    self.broken = str(again)
                raise
        with self.lock:
            for snapshot, content in zip(snapshots, manifest.pools, strict=True):
                snapshot.take_published(content)
            self._take(manifest)
        for snapshot in snapshots:
            snapshot.store.remove(snapshot.replaced)
        self.collect(keep)
        self._collect_lists()
        for snapshot in snapshots:
            snapshot.forget_traces(rest)

    def _take(self, manifest: Manifest) -> None:
        """Register a published manifest."""
        self.manifest, self.sha = manifest, sha_of(manifest.to_bytes())
        self._deleting, self._renaming, self._begun = [], [], []

    def _publish(
        self,
        snapshots: Sequence[CommitSnapshot],
        changes: Mapping[str, Any],
        changed: Sequence[np.ndarray | None],
        only_broken: bool,
    ) -> Manifest:
        for snapshot in snapshots:
            snapshot.rewrite(only_broken)
        contents, number = [snapshot.content() for snapshot in snapshots], self.next_commit
        new = Tombstones.at(number, self._deleting, self._renaming)
        changes = {"origin": None, **changes, "forgotten": self._next_forgotten(number, new)}
        manifest = self.manifest.after(number, contents, changes)
        tables = self._changes_of(manifest, [snapshot.store for snapshot in snapshots], changed)
        self._publish_with_list(manifest, tables, self._renaming, bool(self._deleting))
        return manifest

    # ---------------------------------------------------------------- change lists

    def _changes_of(
        self, manifest: Manifest, stores: Sequence[RecordStore], changed: Sequence[np.ndarray | None]
    ) -> ChangedIds:
        """Return the changed ids of each table of the next commit, from those of its stores."""
        before = {each.name: (id(self.manifest.pools[each.pool]), each.part) for each in self.manifest.members}
        tables = dict[str, np.ndarray | None]()
        for member in manifest.members:
            keys, place = changed[member.pool], (id(stores[member.pool].content), member.part)
            if keys is None or before.get(old_name(member.name, self._renaming)) != place:
                tables[member.name] = None  # it is new, or was written anew
            elif member.part is None:
                tables[member.name] = keys
            else:
                lo, end = keys_of_part(member.part)
                tables[member.name] = within(keys, lo, end) - lo
        return {name: ids for name, ids in tables.items() if ids is None or len(ids)}

    def _publish_with_list(
        self, manifest: Manifest, tables: ChangedIds, renamed: Sequence[tuple[str, str]], forgets: bool
    ) -> None:
        """Publish a manifest, after the list of its changes. Without that list, readers must read all rows."""
        data, old = manifest.to_bytes(), self.manifest.commit
        with contextlib.suppress(OSError):
            shas = sha_of(data), self.sha
            self._write_list(ChangeList(manifest.uuid, manifest.commit, old, *shas, tables, tuple(renamed), forgets))
        self.folder_kind.publish(self.system, self.folder, manifest, data)

    def _write_list(self, made: ChangeList, joins: bool = False) -> None:
        data = made.to_bytes()
        name = self.free_name(made.stem(len(data)), ".ids")
        self._begun.append(name)
        change_lists.write(self.system, self.folder, name, data, joins)

    def _changes_back_to(self, target: Manifest, withheld: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> ChangedIds:
        """Return the ids that a rollback changes, by name of the target's tables, with those that it withholds."""
        tables: dict[str, np.ndarray | None] = {member.name: None for member in target.members}
        with contextlib.suppress(HistoryDroppedError):
            lists = self.lists_since(target.commit, sha_of(target.to_bytes()))  # names are of exactly that commit
            for member in self.manifest.members:
                ids, _, name = change_lists.ids_of(lists, member.name)
                if name in tables and ids is not None:
                    tables[name] = distinct([ids, *withheld.get(name, ())[1:]])
        return tables

    def changed_ids(self, since: int, lists: Sequence[ChangeList], names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return the ids that a result of `lists_since` names, by table: int64 (n,), ascending.

        Raises:
            HistoryDroppedError: nothing says which rows.
        """
        found = dict[str, np.ndarray]()
        for name in names:
            ids, reached, _ = change_lists.ids_of(lists, name)
            if ids is None:
                raise HistoryDroppedError(f"{self.folder}{f'#{name}' * bool(name)}", since, reached)
            found[name] = distinct([ids, *self.withheld.get(name, ())[1:]])  # later commits forgot some of its rows
        return found

    def lists_since(self, commit: int, sha: str | None = None) -> list[ChangeList]:
        """Return the lists of changes from an earlier commit to this one, the newest first.

        Args:
            sha: SHA-256 of that commit's manifest. Other lives of the folder may have commits of the same numbers.

        Raises:
            HistoryDroppedError: they do not reach back so far.
        """
        last, own = (self.manifest.commit, self.sha), self.manifest.uuid
        lists = change_lists.chain(self.system, self.folder, (own, *last), commit)
        if sha is not None and ((lists[-1].since, lists[-1].parent) if lists else last) != (commit, sha):
            raise HistoryDroppedError(self.folder, commit, self.manifest.commit)
        return lists

    def _collect_lists(self) -> None:
        """Remove lists of changes that are too old, and join old ones. A failure costs disk space or a list."""
        try:
            files = change_lists.files_in(self.system, self.folder, self.manifest.uuid)
            numbers = manifests.numbers(self.system, self.folder)
            nbytes = sum(entry.size for pool in self.manifest.pools for entry in (*pool.base, *pool.delta))
            gone = change_lists.superfluous(files, numbers[0], nbytes)
            self.unlink([file.name for file in gone], lambda: False)
            single = [file for file in files if file not in gone and file.is_single]
            if len(single) >= change_lists.SINGLE:
                self._join_lists(single[: change_lists.JOINED])
        except (OSError, EmbedrockError):
            self._count_failure()

    def _join_lists(self, files: Sequence[ListFile]) -> None:
        with contextlib.suppress(EmbedrockError):  # no chain goes past a damaged list
            lists = [change_lists.read(self.system, self.folder, file) for file in reversed(files)]
            if all(one.parent == before.manifest for one, before in pairwise(lists)):
                self._write_list(change_lists.joined(lists), joins=True)
                self._begun = []
        self.unlink([file.name for file in files], lambda: False)

    def commit_base(self, time: str, keep: int) -> None:
        """Publish the last commit's content in its current files, if compaction has changed them.

        If the base was made from logs with uncommitted rows, only the next commit can publish it.
        """
        self.check_commits()
        self.collect(keep)  # commits may have lost their tags since the last call
        with self.lock:
            is_ahead = any(store.base_is_ahead for store in self.stores)
            if is_ahead or [store.content for store in self.stores] != list(self.manifest.pools):
                return
            snapshots, none = [store.as_committed() for store in self.stores], Tombstones()
            is_same = [snapshot.content() for snapshot in snapshots] == list(self.manifest.pools)
            if is_same and self._next_forgotten(self.manifest.commit + 1, none) == self.manifest.forgotten:
                return
        with on_failure(self.undo_steps):
            self.publish(snapshots, {"time": time, "name": None, "origin": self.manifest.origin}, keep)

    def write_history(self, arrays: Mapping[str, Written]) -> HistoryFile:
        """Write the step history and other arrays of a table to a new file, for the next commit."""
        name = self.free_name(f"history/{self.manifest.commit + 1:010d}", ".his")
        return write_history(self.system, self.folder, name, self.manifest.uuid, arrays)

    def history(self, part: HistoryFile) -> dict[str, np.ndarray]:
        """Return the arrays of a file of the last commit. A reader keeps them from its opening on, as files may go."""
        kept = self.histories.get(part.file) if self._held is None else self.histories.pop(part.file, None)
        return read_history(self.system, self.folder, part, self.manifest.uuid) if kept is None else kept

    def undo_steps(self, history: Iterable[HistoryFile] = ()) -> None:
        """Clean up after a failed commit: remove its history files, and leave its rows to the next commit."""
        for store in self.stores:
            store.undo_steps()
        with self.lock:
            later = [(old_name(name, self._renaming), ids) for name, ids in self._deleted]
            self._deleted, self._deleting = [*self._deleting, *later], []
            self._renamed, self._renaming = [*self._renaming, *self._renamed], []
        self._drop_begun(part.file for part in history)

    def _drop_begun(self, others: Iterable[str] = ()) -> None:
        """Remove the files of a commit that failed."""
        begun, self._begun = self._begun, []
        self.unlink([*others, *begun])

    def rollback(self, target: Manifest, time: str, keep: int) -> None:
        """Publish the content of an earlier commit as a new one. Uncommitted changes are lost.

        The stores are replaced by new ones.

        Raises:
            OSError: the disk failed. Nothing has changed.
        """
        self.check_commits()
        number, stores = self.next_commit, list[RecordStore]()
        try:  # a commit that cannot be opened must not become the last one
            since = [one for one in self._forgotten(self.manifest).renamings if one.commit > target.content_commit]
            deleted, back = [*self._deleting, *self._deleted], [(one.new, one.old) for one in reversed(since)]
            new = Tombstones.at(number, deleted, back, target.content_commit)
            told = {"origin": target.content_commit, "forgotten": self._next_forgotten(number, new)}
            manifest = target.after(number, target.pools, {"name": None, "time": time, **told})
            stores += [RecordStore(self, content) for content in manifest.pools]
            histories = self._histories_of(manifest)
            withheld = self._withhold(manifest, stores, self._forgotten(manifest))
            self._publish_with_list(manifest, self._changes_back_to(target, withheld), back, bool(deleted))
        except BaseException as error:
            if isinstance(error, OSError):
                self._check_unpublished()
            for store in stores:
                store.give_up()
            self._drop_begun()
            raise
        logs = [log.path for store in self.stores for log in store.logs]
        with self.lock:
            for before, store in zip(self.stores, stores, strict=False):
                store.counts = before.counts
            self.stores, self.histories = stores, histories
            self._take(manifest)
            self.withheld, self._deleted, self._renamed = withheld, [], []
        self.unlink(logs)
        self.collect(keep)

    def _check_unpublished(self) -> None:
        number = self.next_commit
        if self.is_published(number):
            self.broken = f"commit {number} was made, but may not survive a loss of power"
            raise OSError(errno.EIO, self.broken, self.folder)

    def needed(self) -> set[str]:
        with self.lock:
            return set[str]().union(*(store.needed() for store in self.stores))


def emptied(store: RecordStore, record_bytes: int) -> RecordStore:
    """Return an empty store for records of another size, which `TableFolder.replace` takes."""
    store.table_folder.check_commits()
    return RecordStore(
        store.table_folder, replace(store.content, record_bytes=record_bytes, base=(), delta=(), count=0)
    )
