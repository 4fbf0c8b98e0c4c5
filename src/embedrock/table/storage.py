"""`StorageManager`: the files of a folder, of a table alone or of a group: commits, rollback, compaction, closing."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import threading
import time
import uuid as uuids
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from embedrock.admission.lifecycle import PREFIX, RowLifecycle
from embedrock.errors import (
    ArgumentError,
    CommitError,
    CorruptTableError,
    HistoryDroppedError,
    ReadOnlyTableError,
    TableFileError,
    UnsupportedError,
    counted,
)
from embedrock.initializers import Given, Initializer, Zeros
from embedrock.io.vfs import NO_SPACE, told
from embedrock.optimizers import StepHistory
from embedrock.spec.description import describe_spec, read_spec
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend
from embedrock.storage.budget import pool_of
from embedrock.storage.cache import DIRTY
from embedrock.storage.commit import NewHistory, StorageCommit, bytes_for
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.disk_pools import DiskOfTable, DiskPools
from embedrock.storage.ram_layout import check_budget
from embedrock.storage.table_lock import TableLock
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.change_lists import ChangedIds
from embedrock.store.compaction import compact
from embedrock.store.manifest import HistoryFile, Manifest, StoreEntry, TableEntry, is_name
from embedrock.store.reading import holds_table
from embedrock.store.record_store import distinct, keys_of_part
from embedrock.store.segments import damaged
from embedrock.store.table_folder import TableFolder
from embedrock.system import forks
from embedrock.system.arena import cut
from embedrock.system.interrupts import held_back
from embedrock.system.log import caller, caller_level, is_interrupted, tell
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import MAP, parse_seconds
from embedrock.table.changed_rows import RowChanges, changes_in
from embedrock.table.missing import Missing
from embedrock.table.options import OpenOptions
from embedrock.table.rows import NEVER, ChangeCounter, ClosedMember, Location, TableState
from embedrock.table.upkeep import BackgroundCompaction, replaces_files

LEAVING_ROWS = 2048  # rows that leave a cache at a time: half a millisecond
MOST_CHANGES = 32  # files of lifecycle changes before a full one is written ...
WHOLE_OVER_CHANGES = 2  # ... or once they come to 1/WHOLE_OVER_CHANGES of a full one
LOOK_STEPS = 16  # steps between checks whether ...
PATIENCE_SECONDS = 600.0  # ... this time passed without a commit


REMEDY = 'Pass commit_every="5min" where it is made, or its layer, or call commit() before.'


class UncommittedWarning(UserWarning):
    """A warning that a table on disk was closed, or no longer referenced, with uncommitted changes."""


class StorageManager(Location):
    """The owner of a folder's tables, one alone or a group's: their files, commits, and RAM.

    Attributes:
        upkeep: background compaction of the files.
        changed: counter of added, removed, and closed changed members.
        versions: of the open members, by name.
        pending: a commit that is not yet checked for errors.
    """

    pools: DiskPools

    def __init__(self, table_folder: TableFolder, opening: OpenOptions) -> None:
        is_alone, table_lock = not table_folder.manifest.is_group, TableLock()
        with on_failure(table_folder.close):
            pools = (DiskOfTable if is_alone else DiskPools)(opening.memory, opening.policy, table_lock)
        super().__init__(pools, is_alone, table_lock, f"{table_folder.kind} {opening.name or opening.path!r}")
        self.table_folder, self.opening, self.writes = table_folder, opening, opening.mode == "w"
        self.missing = Missing.of(opening.missing)
        self.upkeep = BackgroundCompaction(opening.path)
        self.changed, self.versions = ChangeCounter(), dict[str, ChangeCounter]()
        self._commit: StorageCommit | None = None  # the last one
        self.pending: StorageCommit | None = None
        self._process = os.getpid()
        self._refreshing = threading.Lock()
        self._is_closing = self._closed = self._is_told_of_none = False
        self._begun, self._opened = -math.inf, time.monotonic()  # times of the last commit and of opening
        self._opened_at = caller()
        self._refused: Exception | None = None  # error that prevented an automatic commit
        self._gave_up = False  # on the remaining changes
        self._dropped = set[str]()  # names of members
        self._named_at = dict[str, int]()  # of a name that went to another table: the first commit that has this
        self._saving: list[RowLifecycle] = []  # lifecycles saved by the last started commit

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def last_commit(self) -> int:
        return self.table_folder.manifest.commit

    @property
    def last_begun(self) -> StorageCommit:
        """Return the commit that was begun last."""
        assert self._commit is not None  # callers have begun one
        return self._commit

    @property
    def all_versions(self) -> list[ChangeCounter]:
        """The change counters of all that a commit covers."""
        return [self.changed, *self.versions.values()]

    # ---------------------------------------------------------------- commits

    def commit(self, step: int | None, name: str | None, wait: bool) -> int:
        self.check_writable()
        check_step(step, name)
        self.end_commit()
        commit = self._begin({"step": step, "name": name})
        for version in self.all_versions:
            version.commit()
        if wait:
            commit.flush()
        before, self._begun = self._begun, time.monotonic()
        commit.start(max(self._begun - before, 1e-9))
        if wait:
            commit.wait()
            self._take_end(commit)
        return commit.number

    @property
    def steps_to_look(self) -> int:  # type: ignore[override]
        every = self.opening.commit_every
        if every is None:
            return NEVER if self._is_told_of_none or self.last_commit else LOOK_STEPS
        return every if isinstance(every, int) else 1

    def look(self) -> None:
        """Start a background commit if it is due after a step; or report once that no commit is made.

        The next call that changes the table raises the commit's error, before any change.
        """
        ahead = 0
        if self._is_due():
            with self.table_lock.whole():
                due = self.open_rows()
                if any(each.steps >= each.due for each in due) and not self._commit_by_itself(due):
                    ahead = 1
        for each in self.open_rows():
            each.due = each.steps + (ahead or self.steps_to_look)

    def _is_due(self) -> bool:
        every, seconds = self.opening.commit_every, time.monotonic() - max(self._begun, self._opened)
        if every is None and seconds >= PATIENCE_SECONDS and not self.last_commit:
            self._is_told_of_none = True
            tell(
                f"{self.subject}, opened at {self._opened_at}, trains for {seconds / 60:.0f} minutes now, and no "
                f"commit has its steps: they are lost when the program ends. {REMEDY}",
                logging.WARNING,
            )
        return every is not None and (isinstance(every, int) or seconds >= (parse_seconds(every) or math.inf))

    def _commit_by_itself(self, due: Sequence[TableState]) -> bool:
        try:
            if (before := self.pending) is not None:
                before.wait()
                if before.error is not None:
                    return False
            self.commit(max(each.steps for each in due), None, wait=False)
        except Exception as error:
            self._refused = error
        return self._refused is None

    def commit_rest(self) -> None:
        """Commit the remaining changes if commits are automatic: the files are about to be closed.

        After one failure it is not tried again, so that they can still be closed.
        """
        if self.opening.commit_every is None or self._gave_up or self._closed or not self.is_of_this_process:
            return
        with self.table_lock.whole():
            with contextlib.suppress(CommitError):
                self.end_commit()
            opened = [each() for each in self._members.values() if isinstance(each, weakref.ref)]
            are_there = all(rows is not None and not rows.is_closed for rows in opened)
            if not are_there or not any(each.can_be_lost for each in self.all_versions):
                return
            try:
                self.commit(max((each.steps for each in self.open_rows()), default=None), None, wait=True)
            except BaseException:
                self._gave_up = True
                raise

    def check_writable(self) -> None:
        if self.writes:
            self.after_fork(self.subject)
        else:
            raise ReadOnlyTableError(
                errno.EROFS,
                f'{self.subject} was opened with mode="r" and cannot change. Open it with mode="w"',
                self.opening.path,
            )

    def _begin(self, fields: dict[str, Any]) -> StorageCommit:
        tiers, self._histories, self._saving = self.pools.tiers, dict[str, NewHistory](), []
        try:
            fields |= {"time": publishing.now()}
            members = tuple(self._member(name, each) for name, each in self.items())
            if replaced := [tier.store for tier in tiers if replaces_files(tier)]:
                self.upkeep.stop()  # the commit replaces its result
                for store in replaced:
                    store.keep_unfolded()
            args = self.table_folder, tiers, self.table_lock, fields, members, self._histories, self.opening.keep
            commit = StorageCommit(*args, functools.partial(self.upkeep.after_commit, tiers))
            self._histories = {}  # the commit owns and releases them
        except BaseException as error:
            self.table_folder.undo_steps()
            self._lose_saved()
            if not isinstance(error, OSError):
                raise
            dirty = sum(bytes_for(tier, int(np.count_nonzero(tier.cache.flags & DIRTY))) for tier in tiers)
            raise self._commit_error(error, self.table_folder.manifest.commit + 1, dirty) from error
        for tier, part in zip(tiers, commit.parts, strict=True):
            tier.commit = part
        self._commit = self.pending = commit
        self.went_back_to = None
        return commit

    def _remember(self, name: str, table: TableState | ClosedMember, before: Sequence[HistoryFile]) -> None:
        """Add a table's state outside of its records to the commit, if there is any.

        `before` has its files in the last commit. For a row lifecycle, changes of them may suffice.
        """
        lifecycle, after, room = table.lifecycle, tuple(before), -1  # bytes of changes before a full file is written
        if 0 < len(after) <= MOST_CHANGES:
            room = after[0].size // WHOLE_OVER_CHANGES - sum(part.size for part in after[1:])
        arrays = None if lifecycle is None else lifecycle.changes(room)
        if arrays is None:
            history = {} if table.history is None else table.history.state()
            who = {} if lifecycle is None else lifecycle.whole()
            arrays, after = {**{key: array.copy() for key, array in history.items()}, **who}, ()
        if arrays:
            self._histories[name] = arrays, after
        if lifecycle is not None:
            lifecycle.saved()
            self._saving.append(lifecycle)

    def _lose_saved(self) -> None:
        for lifecycle in self._saving:
            lifecycle.unsaved()
        self._saving = []

    def bury(self, name: str, version: ChangeCounter, ids: np.ndarray, count: int) -> bool:
        is_as_committed = not count and version.is_committed and self.pending is None
        if is_as_committed and len(manifests.numbers(self.table_folder.system, self.table_folder.folder)) == 1:
            return False  # no commit has a record of them
        self.table_folder.bury(name, ids)
        return True

    @property
    def is_of_this_process(self) -> bool:
        return self._process == os.getpid()

    def end_commit(self) -> None:
        """Wait for the running commit, and raise its error, if any."""
        while self.pending is not None:  # another thread may begin one while this one waits
            self.pending.wait()
            self._raise_failure()

    def check_commit(self) -> None:
        self.check_writable()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.pending is not None and self.pending.is_done:
            self._take_end(self.pending)
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error

    def _take_end(self, commit: StorageCommit) -> None:
        if self.pending is commit:
            self.pending = None
            for part in commit.parts:
                if part.tier.commit is part:
                    part.tier.commit = None
        error = commit.error
        if error is not None:
            self._lose_saved()
            for version in self.all_versions:
                version.committed = -1
            raise self._commit_error(error, commit.number, commit.nbytes) if isinstance(error, OSError) else error

    def wait_for_quiet(self) -> None:
        tiers = self.pools.tiers
        self.table_lock.wait_for(lambda: all(list(map(DiskBackend.becomes_idle, tiers))))
        self.end_commit()

    def _commit_error(self, error: OSError, number: int, needed: int) -> CommitError:
        if isinstance(error, CommitError):
            return error
        text = f"commit {number} failed: {error.strerror or error}"
        if error.errno in NO_SPACE:
            missing = told(needed, self.table_folder.system.free_bytes, os.path.join(self.table_folder.folder, ""))
            text = f"commit {number} failed, the disk is full: {missing}. Free some and commit again"
        kept = f"{text}. Commit {self.table_folder.manifest.commit} is whole, and so are the rows in RAM"
        made = CommitError(error.errno, kept, self.opening.path)
        made.__cause__ = error
        return made

    def commits(self) -> list[dict[str, Any]]:
        place, lines = (self.table_folder.system, self.table_folder.folder), list[dict[str, Any]]()
        for manifest in folders.manifests_of(*place):
            entries = [entry for content in manifest.pools for entry in (*content.base, *content.delta)]
            lines.append(
                {
                    "commit": manifest.commit,
                    "step": manifest.step,
                    "name": folders.name_of(*place, manifest),
                    "time": manifest.time,
                    "rows": manifest.count,
                    "bytes": sum(entry.size for entry in (*entries, *manifest.histories)),
                }
            )
        return lines

    def changes(self, since: int | None, names: list[str] | None = None, ids: Any = None) -> dict[str, RowChanges]:
        """Return the changes of members, all by default, up to the last commit. See `changes_in`."""
        committed = None if names is None else [self.table_folder.committed_name(name) for name in names]
        place = self.opening.system, self.opening.path, None, False, False
        opened = TableFolder.open(*place) if self.writes else self.table_folder  # training compacts a writer's files
        found = changes_in(opened, since, committed, ids)
        return found if names is None else dict(zip(names, found.values(), strict=True))

    def refresh(self, changes: bool = False) -> Any:
        if self.writes:
            raise UnsupportedError(
                f"{self.subject} is open for writing, and its rows are newer than any commit. refresh() is for "
                f'snapshots, er.open({self.opening.path!r}, mode="r").'
            )
        with self._refreshing:
            since = self.last_commit
            if changes:
                self.changes(since)  # or its errors would come after the refresh
            newest = self._newest()  # opened before the lock is taken
            ids = {} if newest is None else self._follow(newest)
            if not changes:
                return newest is not None
            try:
                return self.changes(None if ids is None else since, None, ids or None)
            except HistoryDroppedError:
                return self.changes(None)

    def _changed_ids(self, newest: Any) -> ChangedIds | None:
        """Return the ids by member that changed up to a newer commit. None: what follows rows by name begins anew."""
        with contextlib.suppress(HistoryDroppedError):
            lists = newest.lists_since(self.last_commit, self.table_folder.sha)
            if not any(one.renamed for one in lists):
                return newest.changed_ids(self.last_commit, lists, [each.name for each in newest.manifest.members])
        return None

    def _keys(self, newest: Any, ids: Any) -> list[np.ndarray]:
        """Return the changed keys of each pool. Empty: all caches begin anew."""
        if ids is None or not self._is_like(newest):
            return []
        keys = [list[np.ndarray]() for _ in newest.stores]
        for member in newest.manifest.members:
            keys[member.pool].append(ids[member.name] + keys_of_part(member.part or 0)[0])
        return list(map(distinct, keys))

    def _is_like(self, newest: Any) -> bool:
        """Return whether the backends of an earlier commit serve a later one: the tables and pools are the same."""
        if not isinstance(newest, TableFolder):
            return False
        both = self.table_folder, newest
        members = [[(each.name, each.pool, each.part, each.spec) for each in one.manifest.members] for one in both]
        pools = [[(pool.record_bytes, pool.parts is None) for pool in one.manifest.pools] for one in both]
        is_plain = self.is_of_this_process and not any(one.withheld for one in both)
        is_same = members[0] == members[1] and pools[0] == pools[1]
        return is_plain and is_same and all(rows.executor is None for rows in self.open_rows())

    def _follow(self, newest: Any) -> ChangedIds | None:
        """Read from a newer commit, and return the changed ids: see `_changed_ids`. Caches keep all other rows."""
        tiers, left = self.pools.tiers, list[tuple[DiskBackend, np.ndarray]]()
        try:
            with on_failure(lambda: self._release(newest, self.table_folder)):
                ids = self._changed_ids(newest)
                keys = self._keys(newest, ids)
                for tier, own in zip(tiers, keys, strict=False):
                    tier.entered = []
                    for part in cut(own, LEAVING_ROWS):  # lookups go on meanwhile
                        with held_back(), self.table_lock.ahead():
                            self.table_lock.wait_for_step()
                            left.append((tier, tier.leave(part)))
                with held_back(), self.table_lock.ahead():
                    self.wait_for_quiet()
                    is_kept = bool(keys) and tiers == self.pools.tiers and self._is_like(newest)
                    left += [(tier, tier.leave_entered(own)) for tier, own in zip(tiers, keys, strict=False)]
                    before = self._exchange(newest)
                    try:
                        if is_kept:
                            self._go_on_with(newest.manifest.members)
                        else:
                            self.resume()
                    except BaseException:
                        self._exchange(before)
                        self.resume()
                        raise
        finally:
            for tier in tiers:
                tier.entered = None
        self._release(before, newest)
        for tier in tiers if is_kept else ():  # lookups will want these rows again
            for part in cut(distinct(own for each, own in left if each is tier), LEAVING_ROWS):
                tier.bring_ahead(part).release()
        return ids

    def _release(self, before: Any, newest: Any) -> None:
        """Close the files of an earlier commit, except those of the newest one."""
        if not before.readers:
            before.close(newest)

    def _go_on_with(self, members: Sequence[TableEntry]) -> None:
        """Restore the members as of a commit with the same tables, in their backends."""
        tiers = [member.tier for each in members if (member := self.get(each.name)) is not None]
        self.pools.follow(self.table_folder, members, tiers)
        found = dict[str, ClosedMember]()
        for of, tier in zip(members, tiers, strict=True):
            found[of.name] = ClosedMember(tier, of.spec, of.steps, of.skipped_steps, of.history)
        self._take_over(found)

    def _newest(self) -> Any:
        """Open the newest commit of a snapshot's table; return None if the snapshot is of that."""
        return self.table_folder.newest()

    def _exchange(self, opened: Any) -> Any:
        """Replace the open files by a result of `_newest`, and return the old ones."""
        before, self.table_folder = self.table_folder, opened
        return before

    def rollback(self, commit: int) -> int:
        self.check_writable()
        self.wait_for_quiet()
        manifest = folders.manifest_at(self.table_folder.system, self.table_folder.folder, commit)
        self._check(manifest)
        opened = self._open_mirrored()
        self.upkeep.stop()
        self.table_folder.rollback(manifest, publishing.now(), self.opening.keep)
        with on_failure(self.lose):  # the records in RAM are not those of the files
            self.resume()
        self.went_back_to = commit
        for rows in self.open_rows():
            rows.tell()
            if rows.lifecycle is not None and rows.lifecycle.is_untold:  # the next commit keeps these
                rows.version.advance(keeps_rows=True)
        for rows in opened:
            if not rows.is_closed:
                self.close_table(rows.name, rows.tier)
                rows.drop()
        return self.table_folder.manifest.commit

    def _check(self, manifest: Manifest) -> None:
        for member in manifest.members:
            rows = self.get(member.name)
            if isinstance(rows, TableState):
                spec = spec_of(member, manifest, self.opening.path, rows.spec.init)
                if isinstance(self.pools, DiskOfTable):
                    check_budget(spec, self.pools.budget, self.subject)

    def _open_mirrored(self) -> list[TableState]:
        """Open members with eviction, so that changes by a rollback are known; not those that need an array."""
        opened = list[TableState]()
        for name, member in self.items():
            if isinstance(member, ClosedMember) and member.spec.get("eviction") is not None:
                with contextlib.suppress(TableFileError):
                    opened.append(self.open_member(name, None, None, "raise"))
        return opened

    def lose(self) -> None:
        """Detach all rows, which differ from the files, and close the files."""
        for rows in self.open_rows():
            rows.drop()
            self._tell_of(rows.name)
        self._members = {}
        self.close_all()

    # ---------------------------------------------------------------- members as of a commit

    def resume(self) -> None:
        """Restore the members as of the last commit: open tables get their rows, or are closed."""
        manifest, path, withheld = self.table_folder.manifest, self.opening.path, self.table_folder.withheld
        zeros = {"init": Zeros().describe()}
        members = [
            (member, spec_of(replace(member, spec={**member.spec, **zeros}), manifest, path, None))
            for member in manifest.members
        ]
        tiers = self.pools.open(self.table_folder, members, self.subject)
        self._commit = self.pending = None  # the commit's result no longer matters
        self.changed.commit()
        if count := sum(len(store.withheld) for store in self.table_folder.stores):
            rows, commit = counted(count, "row"), manifest.content_commit
            tell(f"{self.subject}: {rows} of commit {commit} left out, forgotten since")
        found = dict[str, ClosedMember]()
        for (of, spec), tier in zip(members, tiers, strict=True):
            found[of.name] = closed = ClosedMember(tier, of.spec, of.steps, of.skipped_steps, of.history)
            if spec.has_residents and of.name in withheld:  # the files have rows that were deleted since
                closed.files, closed.history = None, history_of(self.table_folder, spec, of)
                closed.lifecycle = lifecycle_of(self.table_folder, spec, of, tier.subject)
        self._take_over(found)

    def _take_over(self, found: dict[str, ClosedMember]) -> None:
        stay = {rows.name: rows for rows in self.open_rows()}
        for name, rows in stay.items():
            if name in found:
                init = rows.spec.init  # unless another table has this name now, it is the same
                self._wake(rows, found[name], init if isinstance(init, Given) else None)
            else:
                rows.drop()
                self._tell_of(name)
        self._members = {name: weakref.ref(stay[name]) if name in stay else found[name] for name in found}
        self._dropped -= found.keys()
        self.versions = {name: stay[name].version for name in found if name in stay}

    def open_member(self, name: str, init: Initializer | None, on_nonfinite: str | None, default: str) -> TableState:
        """Open a closed member, and return its rows. On an error, nothing changes.

        `init` has initial values from an array. Without `on_nonfinite`, it is the member's own, or else the `default`.
        """
        member = self._members[name]
        assert isinstance(member, ClosedMember)  # callers have checked
        own = on_nonfinite or member.spec.get("on_nonfinite")
        rows = TableState(self, own or default, name)
        rows.kept_options = {"on_nonfinite": own} if own else {}
        self._wake(rows, member, init)
        if rows.missing is not None:
            rows.row_instead(rows.missing)  # an error, before anything reads it
        self.enter(name, rows)
        return rows

    def _wake(self, rows: TableState, member: ClosedMember, init: Initializer | None) -> None:
        name = rows.name
        spec = read_spec(member.spec, init, _place_of(self.opening.path, name))
        history, lifecycle, steps = member.history, member.lifecycle, (member.steps, member.skipped_steps)
        if history is None and lifecycle is None:
            known = TableEntry(name, 0, None, member.spec, *steps, member.tier.count, member.files or ())
            history = history_of(self.table_folder, spec, known)
            lifecycle = lifecycle_of(self.table_folder, spec, known, rows.subject)
        member.tier.spec = spec
        rows.install(spec, member.tier, history, *steps, lifecycle=lifecycle)
        rows.version.commit()

    def enter(self, name: str, rows: TableState) -> None:
        super().enter(name, rows)
        self._dropped.discard(name)
        self.versions[name] = rows.version

    def close_table(self, name: str, tier: Backend) -> None:
        """Register a table as closed. The next commit still has a member with all of its changes."""
        if self.is_alone:
            try:
                self.wait_for_quiet()
            finally:
                self.abandon()
        if self.is_alone or self._is_closing:
            return
        rows, files = self.get(name), None
        assert isinstance(rows, TableState)  # it is still open
        if self.versions.pop(name).is_committed:
            files = self._files_of(name)
        else:
            self.changed.advance()
        self._tell_of(name)
        known = rows.steps, rows.skipped_steps, files, rows.history, rows.lifecycle
        self._members[name] = ClosedMember(tier, _described(rows), *known)

    def drop(self, name: str) -> None:
        self.idle_pools()
        rows = self.get(name)
        if isinstance(rows, TableState):
            self._dropped.add(name)
            rows.close()
        member = self._members.pop(name)
        assert isinstance(member, ClosedMember)  # it was closed
        self.pools.release(member.tier)
        self.changed.advance()
        self._give_away(name)

    def rename(self, name: str, new: str) -> None:
        self.check_writable()
        self.changed.advance()
        self._give_away(name, new)
        self.table_folder.rename(name, new)
        self.versions[new] = self.versions.pop(name)
        super().rename(name, new)

    def _give_away(self, *names: str) -> None:
        """Register that these names are of other tables than in the last commit, and in the one that runs."""
        first = self.last_commit + 1 + (self.pending is not None)
        self._named_at |= dict.fromkeys(names, first)

    def _files_of(self, name: str) -> tuple[HistoryFile, ...] | None:
        """Return the history files of a table as it was last committed; None: the last commit has others, or none."""
        if self.pending is not None or self.last_commit < self._named_at.get(name, 0):
            return None
        return next((each.history for each in self.table_folder.manifest.members if each.name == name), None)

    def _member(self, name: str, member: TableState | ClosedMember) -> TableEntry:
        is_open = isinstance(member, TableState)
        spec, files = (_described(member), None) if is_open else (member.spec, member.files)
        if files is None:
            self._remember(name, member, self._files_of(name) or ())
        place, tier = self.pools.place_of(member.tier), member.tier
        return TableEntry(name, *place, spec, member.steps, member.skipped_steps, tier.count, files or ())

    def after_fork(self, subject: str) -> None:
        """Continue in a child process, as a reader with caches of its own. A writer's child must not write.

        Raises:
            ReadOnlyTableError: the parent is the writer.
        """
        if self.is_of_this_process:
            return
        if self.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f"{self.subject} is written by process {self._process}, and this is its child {os.getpid()}. Open it "
                'here with mode="r", or use it in the parent only',
                self.opening.path,
            )
        self._process, self._refreshing = os.getpid(), threading.Lock()
        self.resume()

    # ---------------------------------------------------------------- for its tables

    @property
    def where(self) -> str:
        place = f"{self.opening.path!r}{'' if self.writes else ' (read only)'}"
        through = "mapped into memory" if self.opening.memory == MAP else "behind a cache in RAM"
        return f"on disk at {place} {through}" if self.is_alone else f"in the group on disk at {place}"

    def reopening(self, name: str) -> str:
        path = self.opening.path
        if self.is_alone:
            return f"Open it again, er.open({path!r}), or make its layer anew."
        if name in self._dropped:
            return (
                f"It was dropped from the group at {path!r}: make it anew by group.table({name!r}, ...), or go back to "
                "a commit that has it, group.rollback(...)."
            )
        return f"Open the group again, er.open({path!r}), or make it anew by group.table({name!r}, ...)."

    def named_by(self, layer: str) -> str:
        if self.is_alone:
            self.subject = layer = f"{layer} at {self.opening.path!r}"
        return layer

    def idle_pools(self) -> DiskPools:
        self.check_writable()
        self.wait_for_quiet()
        self.upkeep.stop()
        return self.pools

    @property
    def is_idle(self) -> bool:
        return all(tier.is_idle for tier in self.pools.tiers)

    def check_in_ram(self, verb: str, name: str) -> None:
        subject = self.subject if self.is_alone else f"table {name!r} of the group at {self.opening.path!r}"
        raise UnsupportedError(
            f"{verb}() is for tables in RAM, and {subject} is on disk, where it may be larger than RAM. "
            "commit() saves it, er.open(path) opens it, rollback(commit) goes back; load_state(table) of a table in "
            "RAM takes its rows over."
        )

    def stats(self) -> dict[str, float]:
        return {"compactions_failed": self.upkeep.failed}

    def compact(self) -> int:
        """Compact logs into sorted segments, and commit that. Other threads may use the table meanwhile."""
        self.check_writable()
        with self.table_lock.lock:
            self.end_commit()
        with contextlib.ExitStack() as users:
            for tier in self.pools.tiers:
                users.enter_context(tier.in_use())
            self.upkeep.stop()
            for store in self.table_folder.stores:
                compact(store, None, lambda: False)
        with self.table_lock.whole():
            self.end_commit()
            self.table_folder.commit_base(publishing.now(), self.opening.keep)
            return self.table_folder.manifest.commit

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        self._is_closing = True
        try:
            if self.is_of_this_process:
                self.wait_for_quiet()
        finally:
            super().close()
            self.abandon()

    def abandon(self, is_forgotten: bool = False) -> None:
        """Close the files of closed or unreferenced tables, and warn of lost changes.

        Args:
            is_forgotten: the tables were not closed. If commits are automatic, and the tables still exist as the
                program ends, they are committed first.
        """
        if not self.is_of_this_process or self._closed:
            return
        if is_forgotten and not is_interrupted() and not forks.is_under_way():
            with contextlib.suppress(Exception):  # the loss is reported below
                self.commit_rest()
        self._closed = True
        is_inside = threading.current_thread().name.startswith("embedrock-") or self.pools.is_being_shared
        if is_inside or forks.is_under_way():
            # Garbage collection runs inside of work that must end before the files are closed.
            threading.Thread(target=self._abandon, name="close-embedrock").start()
        else:
            self._abandon()

    def _abandon(self) -> None:
        commit, last = self._commit, self.table_folder.manifest
        self.close_all()
        is_lost = commit is not None and commit is self.pending and commit.error is not None
        if self.writes and (is_lost or any(version.can_be_lost for version in self.all_versions)):
            warnings.warn(
                f"{self.subject} is closed with changes since commit {last.commit}, which are lost. It was opened at "
                f"{self._opened_at}. {REMEDY}",
                UncommittedWarning,
                stacklevel=caller_level(),
            )

    def close_all(self) -> None:
        """Wait for background work, and close all files, so that another writer can open them."""
        if not self.is_of_this_process:
            return  # in a child process, the files belong to the parent
        if self._commit is not None:
            self._commit.join()
        self.upkeep.stop()
        self.table_folder.close()
        self.pools.leave()


def check_step(step: Any, name: Any = None) -> None:
    """Raise `ArgumentError` unless a commit may have this step and name."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63):
        raise ArgumentError(f"`step` of a commit must be a whole number of 64 bits or None: got {step!r}.")
    if name is not None and not is_name(name):
        raise ArgumentError(f"`name` of a commit must be 1 to 100 printable characters, or None: got {name!r}.")


def spec_of(of: TableEntry, manifest: Manifest, path: str, init: Initializer | None) -> Spec:
    """Return the spec of a table of a commit; `init` has its initial values if they are from an array.

    Raises:
        CorruptTableError: the description does not fit the records.
    """
    spec = read_spec(of.spec, init, _place_of(path, of.name))
    of.check_spec(spec.rows, spec.record_bytes, manifest.pools[of.pool], path)
    return spec


def _place_of(path: str, name: str) -> str:
    return f"{path}#{name}" if name else path


def history_of(table_folder: TableFolder, spec: Spec, of: TableEntry) -> StepHistory | None:
    """Return the history of a table's rule as of the last commit."""
    history, last = None if spec.rule is None else spec.rule.history(), table_folder.manifest
    is_due = history is not None or spec.has_residents
    if bool(of.history) != is_due and (of.history or (of.steps and last.commit)):
        expected, got = ("one", "none") if is_due else ("none", "one")
        where = manifests.path_of(table_folder.folder, last.commit)
        raise damaged(where, f"{expected} `history` after {counted(of.steps, 'step')} of {spec.rule}", got)
    if history is not None and of.history:
        (part,) = of.history  # no rule with a history has dynamic rows
        arrays = {name: array for name, array in table_folder.history(part).items() if not name.startswith(PREFIX)}
        with _reading_history(table_folder, of):
            history.load(arrays, of.steps)
    return history


def lifecycle_of(table_folder: TableFolder, spec: Spec, of: TableEntry, subject: str) -> RowLifecycle | None:
    """Return the row lifecycle of a table as of the last commit."""
    made = RowLifecycle.of(spec, subject)
    if made is not None and of.history:
        with _reading_history(table_folder, of):
            made.resume([table_folder.history(part) for part in of.history])
            if made.usage is not None and made.usage.count != of.count:
                raise ArgumentError(f"it names {made.usage.count} rows that have records, of {of.count}.")
        if (withheld := table_folder.withheld.get(of.name)) is not None:
            made.forget(*withheld)
    return made


@contextlib.contextmanager
def _reading_history(table_folder: TableFolder, of: TableEntry) -> Iterator[None]:
    try:
        yield
    except ArgumentError as error:
        raise CorruptTableError(f"{table_folder.folder}/{of.history[-1].file} is damaged: {error}") from error


def _described(rows: TableState) -> dict[str, Any]:
    return describe_spec(rows.spec) | rows.kept_options


def open_volume(opening: OpenOptions) -> TableFolder:
    """Open a table or a group at a path."""
    return TableFolder.open(opening.system, opening.path, opening.at, opening.mode == "w", opening.lock)


def open_or_make(opening: OpenOptions, spec: Spec | None) -> TableFolder:
    """Open the table or group at a path, or make a table of `spec`; None: a group."""
    if opening.mode == "r" or holds_table(opening.system, opening.path):
        return _open(opening, is_group=spec is None)
    begin = uuids.uuid4().hex, 0, None, None, None, publishing.now()
    manifest = Manifest(*begin)
    if spec is not None:
        budget = pool_of(opening.memory, is_alone=True).share()
        check_budget(spec, budget, f"table {opening.path!r}")  # fails before anything is made
        pool = StoreEntry(begin[0], 0, spec.record_bytes, spec.rows, 0)
        manifest = Manifest(*begin, (pool,), (TableEntry("", 0, None, describe_spec(spec), 0, 0, 0),))
    try:
        return TableFolder.create(opening.system, opening.path, manifest, opening.lock)
    except FileExistsError:
        if not holds_table(opening.system, opening.path):
            raise
        return _open(opening, is_group=spec is None)  # another process was faster


def _open(opening: OpenOptions, is_group: bool) -> TableFolder:
    table_folder, path = open_volume(opening), opening.path
    manifest = table_folder.manifest
    if manifest.is_group == is_group:
        return table_folder
    table_folder.close()
    if manifest.is_group:
        raise TableFileError(
            f"{path} holds a group of {len(manifest.members)} tables, not one alone. Open it by er.open({path!r}), or "
            "er.Group(path=...), which has each by its name."
        )
    raise TableFileError(
        f"{path} holds a table alone, no group. Open it by er.open({path!r}), or choose another path. "
        "A member takes its rows over by load_state(table)."
    )
