"""`Keeper`: who keeps the files of a folder, those of a table alone or of a group: commits, compaction, the end."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from embedrock.errors import ArgumentError, CommitError, CorruptTableError, ReadOnlyTableError, UnsupportedError
from embedrock.machine.durations import parse_seconds
from embedrock.machine.paths import local_path
from embedrock.machine.sizes import Size, format_bytes
from embedrock.machine.space import NO_SPACE, told
from embedrock.machine.vfs import System
from embedrock.process import forks
from embedrock.process.callers import caller, caller_level, is_interrupted
from embedrock.process.log import tell
from embedrock.residents.residents import PREFIX, Residents
from embedrock.rules import History
from embedrock.spec import Spec
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.compaction import compact
from embedrock.store.manifest import AnyManifest, HistoryFile, Manifest, Member, histories_of, is_name, origin_of
from embedrock.store.pieces import Goal, mean_age
from embedrock.store.runs import damaged
from embedrock.store.store import Store
from embedrock.store.verify import Verification, verify
from embedrock.store.volume import Volume
from embedrock.table.home import NEVER, Version
from embedrock.table.rows import Rows
from embedrock.table.saved import Remembering
from embedrock.table.upkeep import Upkeep
from embedrock.tiers.cache import DIRTY, POLICIES
from embedrock.tiers.commit import Commit, NewHistory, bytes_for
from embedrock.tiers.disk import Disk
from embedrock.tiers.placing import INDEX_SHARE
from embedrock.tiers.turn import Turn
from embedrock.wording import check_choice, counted

MODES = ("w", "r")
FULLNESS = 0.95  # of the overlay, which it should not reach before the next commit: then compaction makes room
PART_FULLNESS = 1 / 16  # of the overlay, made free each time
LOG_SHARE = 1.5  # of the bytes of the base, that logs may come to
WHOLE_LOG_SHARE = 0.6  # of the rows, that files may have beyond them where all is folded at once ...
REPLACED_SHARE = 0.8  # ... or, with what the next commit will add, where a commit may write all rows
LEAST_CHANGED = 4  # one row in so many, at least, has changed where a commit writes all of them
MOST_CHANGES = 32  # files of changes of who has a record, before it is written whole again ...
WHOLE_OVER_CHANGES = 2  # ... as it is where they come to so great a part of the whole
LEAST_OVERLAY_BYTES = 64 << 10  # an overlay of fewer bytes waits, and ...
LEAST_COMPACTED_BYTES = 64 << 20  # ... so do logs
LOOK_STEPS = 16  # after so many it is looked whether ...
PATIENCE_SECONDS = 600.0  # ... so long nobody has committed


REMEDY = 'Pass commit_every="5min" where it is made, or its layer, or call commit() before.'


class UncommittedWarning(UserWarning):
    """A table on disk was closed, or forgotten, with changes that no commit has."""


class Opening(NamedTuple):
    """How the files of a table are opened.

    Attributes:
        path: their folder.
        memory: budget of RAM, None for a share of half of the machine's.
        policy: of eviction.
        keep: commits that retention keeps.
        commit_every: steps, or a duration as text, after which it commits by itself; None: it does not.
        lock: refuse to write where the file system has no locks.
        mode: "w" or "r".
        at: number of a commit, for a reader; None: the last one.
        system: does the I/O.
        name: of the table, for error messages.
    """

    path: str
    memory: Size | None
    policy: str
    keep: int
    commit_every: int | str | None
    lock: bool
    mode: str
    at: int | None
    system: System
    name: str | None

    def checked(self) -> Opening:
        """Return them with an absolute path.

        Raises:
            ArgumentError: a value that cannot work.
            UnsupportedError: there are no tables on disk here.
        """
        check_choice("mode", self.mode, MODES)
        if self.at is not None and self.mode != "r":
            raise ArgumentError(
                f'`at` ({self.at!r}) goes with mode="r": a writer works on the last commit. '
                f"Call rollback({self.at!r}) to go on from an earlier one."
            )
        for name, value in (("keep", self.keep), ("at", self.at)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < (name == "keep")
            ):
                raise ArgumentError(
                    f"`{name}` must be a whole number of at least {int(name == 'keep')}: got {value!r}."
                )
        check_choice("policy", self.policy, POLICIES)
        every = checked_every(self.commit_every, self.mode)
        path = os.path.abspath(local_path(self.path))
        self.system.check_usable(f"table {self.name or path!r}")
        return self._replace(path=path, commit_every=every)


class Closable(Protocol):
    """Files that are open."""

    def close(self) -> None:
        """Close them."""
        ...


class Keeper(ABC):
    """Who keeps the files of a table alone, or of a group.

    Whoever calls it for a table gives the rows of that. They are not kept: only who has a table keeps it.

    Args:
        volume: the files.
        opening: how they were opened.

    Attributes:
        subject: what error messages call it.
        upkeep: of the files, in the background.
        went_back_to: the commit whose content the last one has, where that was a rollback.
    """

    went_back_to: int | None

    def __init__(self, volume: Volume, opening: Opening) -> None:
        self.volume, self.opening = volume, opening
        self.subject = f"{volume.kind} {opening.name or opening.path!r}"
        self.upkeep = Upkeep(opening.path)
        self.went_back_to = None
        self._commit: Commit | None = None  # the last one
        self._pending: Commit | None = None  # whose end nobody has seen yet
        self._process = os.getpid()
        self._told = self._closed = self._is_told_of_none = False
        self._begun, self._opened = -math.inf, time.monotonic()  # the last commit, by the clock, and the first look
        self._opened_at = caller()
        self._refused: Exception | None = None  # what kept a commit from beginning that nobody had asked for
        self._gave_up = False  # on what no commit has
        self._rows_in_logs = WeakKeyDictionary[Store, int]()  # as of the last commit
        self._saving: list[Residents] = []  # of which the last commit that began has what they were

    @property
    def writes(self) -> bool:
        """Whether this is the one writer."""
        return self.opening.mode == "w"

    @property
    def uuid(self) -> str:
        """What tells the files from all others."""
        return self.volume.manifest.uuid

    @property
    def last_commit(self) -> int:
        """Number of the last commit."""
        return self.volume.manifest.commit

    @property
    def last_step(self) -> int | None:
        """The step that was given to it."""
        return self.volume.manifest.step

    def verify(self) -> Verification:
        """Read all files of all commits, and check every checksum."""
        return verify(self.volume.system, self.volume.folder)

    # ---------------------------------------------------------------- what is kept

    @abstractmethod
    def tiers(self, rows: Rows | None) -> Sequence[Disk]:
        """Return the tier of each store."""

    @abstractmethod
    def turn(self, rows: Rows | None) -> Turn:
        """Return who has them."""

    @abstractmethod
    def _versions(self, rows: Rows | None) -> Sequence[Version]:
        """Return what tells whether there are changes that no commit has."""

    @abstractmethod
    def _open_rows(self, rows: Rows | None) -> Sequence[Rows] | None:
        """Return the rows of tables that are open; None where nobody has any of it any more."""

    @abstractmethod
    def _described(self, rows: Rows | None) -> dict[str, Any]:
        """Return what a commit of now says of them, as fields of its manifest; see `_remember`."""

    @abstractmethod
    def rollback(self, rows: Rows, commit: int) -> int:
        """Make the content of an earlier commit the newest; return its number."""

    @abstractmethod
    def _go_on(self, rows: Rows | None) -> None:
        """Give all tables that are open the state of the last commit. They are quiet."""

    @abstractmethod
    def _leave_budget(self) -> None:
        """Give the RAM back."""

    # ---------------------------------------------------------------- commits

    def commit(self, rows: Rows | None, step: int | None, name: str | None, wait: bool) -> int:
        """Make all changes so far durable, as one; return the commit's number: see `Table.commit`."""
        self.check_writable()
        _check_name(step, name)
        self.end_commit(rows)
        commit = self._begin(rows, {"step": step, "name": name})
        for version in self._versions(rows):
            version.commit()
        if wait:
            commit.hurry()
        commit.start(self._interval())
        if wait:
            commit.wait()
            self._take_end(rows, commit)
        return commit.number

    @property
    def steps_to_look(self) -> int:
        """After so many steps of a table `look` is called."""
        every = self.opening.commit_every
        if every is None:
            return NEVER if self._is_told_of_none or self.last_commit else LOOK_STEPS
        return every if isinstance(every, int) else 1

    def look(self, rows: Rows | None) -> None:
        """Commit in the background where that is due, after a step; or say once that nobody commits.

        What goes wrong is raised by the next call that changes the table, before that changes anything.
        """
        ahead = 0
        if self._is_due():
            with self.turn(rows).whole():
                due = self._open_rows(rows) or ()
                if any(each.steps >= each.due for each in due) and not self._commit_by_itself(rows, due):
                    ahead = 1
        for each in self._open_rows(rows) or ():
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
        return every is not None and (isinstance(every, int) or seconds >= seconds_of(every))

    def _commit_by_itself(self, rows: Rows | None, due: Sequence[Rows]) -> bool:
        try:
            if (before := self._pending) is not None:
                before.wait()
                if before.error is not None:
                    return False
            self.commit(rows, max(each.steps for each in due), None, wait=False)
        except Exception as error:
            self._refused = error
        return self._refused is None

    def commit_rest(self, rows: Rows | None) -> None:
        """Commit what no commit has, where that is done by itself: the files are about to be closed.

        Where it fails once, it is not tried again, so that they can be closed all the same.
        """
        if self.opening.commit_every is None or self._gave_up or self._closed or not self.is_of_this_process:
            return
        with self.turn(rows).whole():
            with contextlib.suppress(CommitError):
                self.end_commit(rows)
            if (there := self._open_rows(rows)) is None or not any(each.can_be_lost for each in self._versions(rows)):
                return
            try:
                self.commit(rows, max((each.steps for each in there), default=None), None, wait=True)
            except BaseException:
                self._gave_up = True
                raise

    def _interval(self) -> float:
        """Return the seconds since the commit before; infinite for the first."""
        before, self._begun = self._begun, time.monotonic()
        return max(self._begun - before, 1e-9)

    def check_writable(self) -> None:
        """Raise `ReadOnlyTableError` where nothing may be changed."""
        self.check_process()
        if not self.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f'{self.subject} was opened with mode="r" and cannot change. Open it with mode="w"',
                self.opening.path,
            )

    def check_process(self) -> None:
        """Raise `ReadOnlyTableError` in a child of the process that writes."""
        if self.writes and not self.is_of_this_process:
            raise ReadOnlyTableError(
                errno.EROFS,
                f"{self.subject} is written by process {self._process}, and this is its child {os.getpid()}. Open it "
                'here with mode="r", or use it in the parent only',
                self.opening.path,
            )

    def _begin(self, rows: Rows | None, fields: dict[str, Any]) -> Commit:
        """Freeze the rows that changed, and return the commit that will write them."""
        tiers, self._histories, self._saving = self.tiers(rows), dict[str, NewHistory](), []
        try:
            fields |= {"time": publishing.now(), **self._described(rows)}
            if replaced := [tier.store for tier in tiers if replaces_files(tier)]:
                self.stop_compaction()  # what that would make, the commit makes
                for store in replaced:
                    store.keep_unfolded()
            args = self.volume, tiers, self.turn(rows), fields, self._histories, self.opening.keep
            commit = Commit(*args, self._after_commit_of(tiers))
            self._histories = {}  # they are the commit's, which lets them go
        except BaseException as error:
            self.volume.take_back()
            self._lose_saved()
            if not isinstance(error, OSError):
                raise
            dirty = sum(bytes_for(tier, len(tier.cache.flagged(DIRTY))) for tier in tiers)
            raise self._commit_error(error, self.volume.manifest.commit + 1, dirty) from error
        for tier, part in zip(tiers, commit.parts, strict=True):
            tier.commit = part
        self._commit = self._pending = commit
        self.went_back_to = None
        return commit

    def _remember(self, name: str, table: Remembering, before: Sequence[HistoryFile]) -> None:
        """Let the commit write what a table remembers besides records, if it remembers anything.

        Args:
            name: of a member; "" for a table alone.
            table: which it is.
            before: its files as of the last commit: of who has a record, changes of them may do.
        """
        residents, after = table.residents, tuple(before)
        arrays = None if residents is None else residents.changes(_room_for_changes(after))
        if arrays is None:
            history = {} if table.history is None else table.history.state()
            who = {} if residents is None else residents.whole()
            arrays, after = {**{key: array.copy() for key, array in history.items()}, **who}, ()
        if arrays:
            self._histories[name] = NewHistory(arrays, after)
        if residents is not None:
            residents.saved()
            self._saving.append(residents)

    def _lose_saved(self) -> None:
        """Note that a commit failed, whose files may not have what they should."""
        for residents in self._saving:
            residents.unsaved()
        self._saving = []

    def history(self, spec: Spec, of: Manifest | Member) -> History | None:
        """Return the history of a table's rule as of the last commit, which says `of` it."""
        history, last = None if spec.rule is None else spec.rule.history(), self.volume.manifest
        is_due = history is not None or spec.has_residents
        if bool(of.history) != is_due and (of.history or (of.steps and last.commit)):
            expected, got = ("one", "none") if is_due else ("none", "one")
            where = manifests.path_of(self.opening.path, last.commit)
            raise damaged(where, f"{expected} `history` after {counted(of.steps, 'step')} of {spec.rule}", got)
        if history is not None and of.history:
            (part,) = of.history  # no rule has one whose rows come and go
            arrays = {name: array for name, array in self.volume.history(part).items() if not name.startswith(PREFIX)}
            with self._reading_history(of):
                history.load(arrays, of.steps)
        return history

    def residents(self, spec: Spec, of: Manifest | Member, subject: str) -> Residents | None:
        """Return who has a record in a table as of the last commit, which says `of` it."""
        made = Residents.of(spec, subject)
        if made is not None and of.history:
            with self._reading_history(of):
                made.resume([self.volume.history(part) for part in of.history])
                if made.knows_rows and made.row_count != of.count:
                    raise ArgumentError(f"it names {made.row_count} rows that have records, of {of.count}.")
            name = of.name if isinstance(of, Member) else ""
            if (withheld := self.volume.withheld.get(name)) is not None:
                made.forget(*withheld)
        return made

    @contextlib.contextmanager
    def _reading_history(self, of: Manifest | Member) -> Iterator[None]:
        try:
            yield
        except ArgumentError as error:
            where = f"{self.opening.path}/{of.history[-1].file}"
            raise CorruptTableError(f"{where} is damaged: {error}") from error

    def forget(self, name: str, rows: Rows, ids: np.ndarray, count: int) -> bool:
        """Let no earlier commit bring ids back, from the next one on: see `Home.bury`."""
        is_as_committed = not count and rows.version.is_committed and self._pending is None
        if is_as_committed and len(manifests.numbers(self.volume.system, self.volume.folder)) == 1:
            return False  # no commit has a record of them
        self.volume.bury(name, ids)
        return True

    def tell_withheld(self) -> None:
        """Say how many rows of the commit are left out, as they were forgotten after it."""
        last, count = self.volume.manifest, sum(len(store.withheld) for store in self.volume.stores)
        if count:
            tell(f"{self.subject}: {counted(count, 'row')} of commit {origin_of(last)} left out, forgotten since")

    @property
    def is_of_this_process(self) -> bool:
        """Whether this is no child of the process that opened it."""
        return self._process == os.getpid()

    def stats(self) -> dict[str, float]:
        """Return numbers about what is done to the files."""
        return {"compactions_failed": self.upkeep.failed}

    def end(self, rows: Rows | None) -> None:
        """Wait for what uses rows in the background, before they are closed."""
        if self.is_of_this_process:
            self.wait_for_quiet(rows)

    def is_durable(self, rows: Rows | None) -> bool:
        """Return whether nothing went wrong with the commit under way, if there is one, once it has ended."""
        commit = self._pending
        if commit is None or (rows is not None and rows.is_closed):
            return True
        commit.join()
        return commit.error is None

    def end_commit(self, rows: Rows | None) -> None:
        """Wait for the commit under way, and raise what went wrong with it."""
        while self._pending is not None:  # another thread may begin one while this one waits
            self._pending.wait()
            self.raise_commit_failure(rows)

    def raise_commit_failure(self, rows: Rows | None) -> None:
        """Raise what went wrong with a commit that has ended, once."""
        if self._pending is not None and self._pending.is_done:
            self._take_end(rows, self._pending)
        if self._refused is not None:
            error, self._refused = self._refused, None
            raise error

    def _take_end(self, rows: Rows | None, commit: Commit) -> None:
        if self._pending is commit:
            self._pending = None
            for part in commit.parts:
                part.leave()
        if commit.error is not None:
            self._lose_saved()
            for version in self._versions(rows):
                version.committed = -1
            raise self._error_of(commit)

    def wait_for_quiet(self, rows: Rows | None) -> None:
        """Wait for what uses rows in the background, and let others have the table meanwhile."""
        tiers = self.tiers(rows)
        self.turn(rows).wait_for(lambda: all(list(map(Disk.becomes_quiet, tiers))))
        self.end_commit(rows)

    def release(self, rows: Rows | None, name: str) -> None:
        """Let retention drop the commits called `name`."""
        self.check_writable()
        folders.release(self.volume.system, self.volume.folder, name)

    def _after_commit_of(self, tiers: Sequence[Disk]) -> Callable[[], None]:
        return lambda: self._after_commit(tiers)

    def _after_commit(self, tiers: Sequence[Disk]) -> None:
        """Compact in the background where logs take more RAM or disk than they should."""
        goals = {tier.store: self._goal(tier) for tier in tiers}
        if due := {store: goal for store, goal in goals.items() if goal is not None}:
            self.upkeep.compact(due)
        self.upkeep.fold([tier.store for tier in tiers])
        for tier in tiers:
            self._check_index(tier)

    def _goal(self, tier: Disk) -> Goal | None:
        """Return what compaction should come down to; None: neither the overlay nor logs are too large."""
        store = tier.store
        with store.lock:
            rows, base = store.overlay.count, sum(run.file.size for run in store.base_runs)
            logs = [(run.number, run.file.size) for run in store.delta]
            age, nbytes = mean_age(store.base, logs, store.content.count), store.overlay.nbytes
        room, before = store.overlay_rows, self._rows_in_logs.get(store, rows)
        self._rows_in_logs[store] = rows
        most = FULLNESS * room - min(max(0, rows - before), room // 2)  # as many may come until the next commit
        # Logs that are dropped one after another are half as old as the oldest of them, on average.
        goal = Goal(max(0, int(most - PART_FULLNESS * room)), int(LOG_SHARE * max(base, LEAST_COMPACTED_BYTES) / 2))
        is_crowded = nbytes > LEAST_OVERLAY_BYTES and rows > most
        is_old = self._should_fold_all(tier) if store.some_are_gone else age > goal.age
        return goal if is_crowded or is_old or store.content.dropped else None

    def _should_fold_all(self, tier: Disk) -> bool:
        """Return whether files of a tier, some of whose rows are gone, are too large, and there is no second base."""
        share = WHOLE_LOG_SHARE if _may_be_written_whole(tier) else WHOLE_LOG_SHARE / 2
        return tier.store.base_is_published and _is_wasteful(tier, share)

    def _check_index(self, tier: Disk) -> None:
        """Say once that the rows are so many that to know which are there takes more RAM than was kept for it."""
        index, kept = tier.store.base.nbytes, max(tier.budget_bytes // INDEX_SHARE, LEAST_OVERLAY_BYTES)
        if index > kept and not self._told:
            self._told = True
            setting = tier.budget.setting(index * INDEX_SHARE)
            warnings.warn(
                f"{self.opening.path}: the index of {tier.store.base.count:,} rows takes {format_bytes(index)} of RAM, "
                f"more than the {format_bytes(kept)} that are kept for it of {tier.budget}."
                + (f" {setting.remedy}" if setting else ""),
                RuntimeWarning,
                stacklevel=1,
            )

    def _error_of(self, commit: Commit) -> BaseException:
        """Return what went wrong with a commit, as the caller should see it."""
        error = commit.error
        assert error is not None  # the caller has looked
        return self._commit_error(error, commit.number, commit.nbytes) if isinstance(error, OSError) else error

    def _commit_error(self, error: OSError, number: int, needed: int) -> CommitError:
        if isinstance(error, CommitError):
            return error
        text = f"commit {number} failed: {error.strerror or error}"
        if error.errno in NO_SPACE:
            missing = told(needed, self.volume.system.free_bytes, os.path.join(self.volume.folder, ""))
            text = f"commit {number} failed, the disk is full: {missing}. Free some and commit again"
        kept = f"{text}. Commit {self.volume.manifest.commit} is whole, and so are the rows in RAM"
        made = CommitError(error.errno, kept, self.opening.path)
        made.__cause__ = error
        return made

    def manifest(self, commit: int) -> AnyManifest:
        """Return a commit by its number."""
        return folders.manifest_at(self.volume.system, self.volume.folder, commit)

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first."""
        system, folder = self.volume.system, self.volume.folder
        return [_line(self.volume, manifest) for manifest in folders.manifests_of(system, folder)]

    def refresh(self, rows: Rows | None) -> bool:
        """Let a snapshot go on with the newest commit, if that is another one; return whether: see `Table.refresh`."""
        if self.writes:
            raise UnsupportedError(
                f"{self.subject} is open for writing, and its rows are newer than any commit. refresh() is for "
                f'snapshots, er.open({self.opening.path!r}, mode="r").'
            )
        newest = self._newest()  # opened before others wait
        if newest is None:
            return False
        with self.turn(rows).whole():
            self.wait_for_quiet(rows)
            before = self._exchange(newest)
            try:
                self._go_on(rows)
            except BaseException:
                self._exchange(before)
                self._go_on(rows)
                newest.close()
                raise
            before.close()
        return True

    def _newest(self) -> Closable | None:
        """Open what a snapshot is as of the newest commit; return None where it is that already."""
        return self.volume.newest()

    def _exchange(self, opened: Any) -> Closable:
        """Take what `_newest` returned in place of what there is, and return that."""
        before, self.volume = self.volume, opened
        return before

    # ---------------------------------------------------------------- compaction

    def compact_in_background(self, goal: Goal | None = None) -> None:
        """Fold logs into base chunks while others go on, unless that is under way: all, or down to a goal."""
        self.upkeep.compact(dict.fromkeys(self.volume.stores, goal))

    def compact(self, rows: Rows | None) -> None:
        """Fold logs into base chunks, while others have the table."""
        self.check_writable()
        with self.turn(rows).lock:
            self.end_commit(rows)
        with contextlib.ExitStack() as users:
            for tier in self.tiers(rows):
                users.enter_context(tier.in_use())
            self.stop_compaction()
            for store in self.volume.stores:
                compact(store, None, lambda: False)

    def commit_base(self, rows: Rows | None) -> int:
        """Commit what compaction has made, unless that is done; return the last commit's number."""
        self.end_commit(rows)
        self.volume.commit_base(publishing.now(), self.opening.keep)
        return self.volume.manifest.commit

    def stop_compaction(self) -> None:
        """End what compacts or folds in the background; what that has written so far is removed."""
        self.upkeep.stop()

    # ---------------------------------------------------------------- the end

    @property
    def _is_being_shared(self) -> bool:
        """Whether this thread is in the middle of sharing budgets with others."""
        return False

    def abandon(self, versions: Sequence[Version], rows: Callable[[], Rows | None] | None = None) -> None:
        """Close all files of a table that is closed, or that nobody has any more, and say what is lost with it.

        Args:
            versions: what tells whether something is.
            rows: returns the rows as long as somebody has them, where the table was not closed: the program ends, say.
        """
        if not self.is_of_this_process or self._closed:
            return
        if rows is not None and not is_interrupted() and not forks.is_under_way():
            with contextlib.suppress(Exception):  # then it is said what is lost
                self.commit_rest(rows())
        self._closed = True
        is_inside = threading.current_thread().name.startswith("embedrock-") or self._is_being_shared
        if is_inside or forks.is_under_way():
            # Garbage was collected inside of what has to end before the files are closed.
            threading.Thread(target=self._abandon, args=(versions,), name="close-embedrock").start()
        else:
            self._abandon(versions)

    def _abandon(self, versions: Sequence[Version]) -> None:
        commit, last = self._commit, self.volume.manifest
        self.close_all()
        is_lost = commit is not None and commit is self._pending and commit.error is not None
        if self.writes and (is_lost or any(version.can_be_lost for version in versions)):
            warnings.warn(
                f"{self.subject} is closed with changes since commit {last.commit}, which are lost. It was opened at "
                f"{self._opened_at}. {REMEDY}",
                UncommittedWarning,
                stacklevel=caller_level(),
            )

    def close_all(self) -> None:
        """Close all files, once what runs in the background has ended, and let another writer in."""
        if not self.is_of_this_process:
            return  # a child's: they are the parent's
        if self._commit is not None:
            self._commit.join()
        self.stop_compaction()
        self.volume.close()
        self._leave_budget()


def _room_for_changes(files: Sequence[HistoryFile]) -> int:
    """Return how many bytes changes of who has a record may take, or else it is written whole: half of that in all."""
    if not 0 < len(files) <= MOST_CHANGES:
        return -1
    return files[0].size // WHOLE_OVER_CHANGES - sum(part.size for part in files[1:])


def replaces_files(tier: Disk) -> bool:
    """Return whether the next commit had better write all rows of a tier, and so need no older file.

    That is where all of them would have to be folded after it, and are in RAM, and many of them have changed.
    """
    if not _may_be_written_whole(tier):
        return False
    changed = int(np.count_nonzero(tier.cache.flags[: tier.cache.used_slots] & DIRTY))
    # Its own log, and that of the next commit: were this one not to write all rows, that one would.
    return LEAST_CHANGED * changed >= tier.count and _is_wasteful(tier, REPLACED_SHARE, 2 * changed)


def _may_be_written_whole(tier: Disk) -> bool:
    rows, store = tier.count, tier.store
    return store.some_are_gone and tier.resident_rows >= rows and 2 * rows <= store.overlay_rows


def _is_wasteful(tier: Disk, share: float, written: int = 0) -> bool:
    """Return whether files are larger than those of the rows alone by a share of these, once `written` are in a log."""
    least = max(tier.count * tier.spec.record_bytes, LEAST_COMPACTED_BYTES)
    return tier.store.excess_bytes(tier.count, written) > share * least


def checked_every(every: Any, mode: str) -> int | str | None:
    """Return `commit_every` as steps, or as text.

    Raises:
        ArgumentError: it is neither steps nor a duration, or the table is only read.
    """
    if every is None:
        return None
    text = f"{every.total_seconds()}s" if isinstance(every, timedelta) else every
    is_steps = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if not is_steps and not (isinstance(text, str) and parse_seconds(text)):
        raise ArgumentError(
            f'`commit_every` must be steps, at least 1, or a time such as "30s" or "5min": got {every!r}.'
        )
    if mode == "r":
        raise ArgumentError(
            f'`commit_every` ({every!r}) goes with mode="w": a snapshot has nothing to commit. Leave it out.'
        )
    return text


def seconds_of(every: str) -> float:
    """Return how long that is, which was checked."""
    return parse_seconds(every) or math.inf


def check_step(step: Any) -> None:
    """Raise `ArgumentError` where a commit cannot be of such a step."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63):
        raise ArgumentError(f"`step` of a commit must be a whole number of 64 bits or None: got {step!r}.")


def _check_name(step: Any, name: Any) -> None:
    """Raise `ArgumentError` where a commit cannot be called so."""
    check_step(step)
    if name is not None and not is_name(name):
        raise ArgumentError(f"`name` of a commit must be 1 to 100 printable characters, or None: got {name!r}.")


def _line(volume: Volume, manifest: AnyManifest) -> dict[str, Any]:
    entries = [entry for content in manifest.contents for entry in (*content.base, *content.delta)]
    return {
        "commit": manifest.commit,
        "step": manifest.step,
        "name": folders.name_of(volume.system, volume.folder, manifest),
        "time": manifest.time,
        "rows": manifest.count,
        "bytes": sum(entry.size for entry in (*entries, *histories_of(manifest))),
    }
