"""`Durability`: what a table on disk has beyond one in RAM: its files, commits and compaction."""

from __future__ import annotations

import errno
import os
import threading
import uuid as uuids
import warnings
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, CommitError, CorruptTableError, ReadOnlyTableError
from embedrock.initializers import Initializer
from embedrock.machine.sizes import format_bytes
from embedrock.machine.vfs import NO_SPACE, OS_SYSTEM, System
from embedrock.rules import History
from embedrock.spec import Spec
from embedrock.store import folder as folders
from embedrock.store.compaction import Stopped, compact
from embedrock.store.history import write_history
from embedrock.store.manifest import HistoryFile, Manifest, is_name
from embedrock.store.store import Store
from embedrock.table.description import check_same, describe_spec, read_spec
from embedrock.tiers.cache import DIRTY, POLICIES
from embedrock.tiers.commit import Commit
from embedrock.tiers.disk import INDEX_SHARE, Disk, plan_room
from embedrock.tiers.turn import Turn

MODES = ("w", "r")
COMPACTED_BYTES_PER_SECOND = 100e6  # in the background, so that it leaves most of a disk to training
FULLNESS = 5 / 6  # of the overlay, from which on compaction makes room. It rewrites all, so it should fold many rows.
LEAST_OVERLAY_BYTES = 64 << 10  # an overlay of fewer bytes waits, and ...
LEAST_COMPACTED_BYTES = 64 << 20  # ... so do logs


class UncommittedWarning(UserWarning):
    """A table on disk was closed, or forgotten, with changes that no commit has."""


class Changes:
    """How often a table was changed, and how often when it was last committed."""

    def __init__(self) -> None:
        self.made = self.committed = 0

    def commit(self) -> None:
        """Note that a commit has all changes so far."""
        self.committed = self.made

    @property
    def pending(self) -> bool:
        """Whether there are changes that no commit has."""
        return self.made != self.committed


class Settings(NamedTuple):
    """How a table on disk is opened.

    Attributes:
        path: its folder.
        memory: budget of RAM, None for half of the machine's.
        policy: of eviction.
        keep: commits that retention keeps.
        lock: refuse to write where the file system has no locks.
        mode: "w" or "r".
        at: number of a commit, for a reader; None: the last one.
        system: does the I/O.
    """

    path: str
    memory: int | str | None = None
    policy: str = "lfu"
    keep: int = 2
    lock: bool = True
    mode: str = "w"
    at: int | None = None
    system: System = OS_SYSTEM

    def checked(self) -> Settings:
        """Return them with an absolute path.

        Raises:
            ArgumentError: a value that cannot work.
        """
        if self.mode not in MODES:
            raise ArgumentError(f"`mode` must be one of {', '.join(map(repr, MODES))}: got {self.mode!r}.")
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
        if self.policy not in POLICIES:
            raise ArgumentError(f"`policy` must be one of {', '.join(POLICIES)}: got {self.policy!r}.")
        path = os.fspath(self.path)
        if not isinstance(path, str) or not path or "\0" in path:
            raise ArgumentError(f"`path` must be the name of a folder: got {self.path!r}.")
        return self._replace(path=os.path.abspath(path))


class Durability:
    """The files of a table and who changes them.

    Args:
        store: the files.
        settings: how they were opened.
        spec: of the table.

    Attributes:
        compactions_failed: in the background.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self.store, self.settings = store, settings
        self._compaction: threading.Thread | None = None
        self._stopping = threading.Event()
        self._commit: Commit | None = None
        self._process = os.getpid()
        self.compactions_failed, self._told, self._closed = 0, False, False

    @property
    def writes(self) -> bool:
        """Whether this is the table's writer."""
        return self.settings.mode == "w"

    def check_writes(self, subject: str) -> None:
        """Raise `ReadOnlyTableError` for a reader."""
        if not self.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f'{subject} was opened with mode="r" and cannot change. Open it with mode="w"',
                self.settings.path,
            )

    def tier(self, spec: Spec, turn: Turn, subject: str, store: Store | None = None) -> Disk:
        """Return a new, empty cache over the files, or over those of another store."""
        room = plan_room(spec, self.settings.memory, subject)
        return Disk(spec, store or self.store, room, self.settings.policy, turn, subject)

    def emptied(self, spec: Spec, turn: Turn, subject: str) -> Disk:
        """Return an empty tier for records of another layout, whose first commit will replace all there is."""
        self.stop_compaction()
        return self.tier(spec, turn, subject, self.store.emptied(spec.record_bytes))

    def replace_store(self, store: Store) -> None:
        """Go on with what `emptied` returned."""
        self.store.give_up()
        self.store = store

    def history(self, spec: Spec) -> History | None:
        """Return the history of the table's rule as of the last commit."""
        manifest, history = self.store.manifest, None if spec.rule is None else spec.rule.history()
        if history is not None and manifest.history:
            try:
                history.load(self.store.history[0], manifest.steps)
            except ArgumentError as error:
                where = f"{self.settings.path}/{manifest.history[0].file}"
                raise CorruptTableError(f"{where} is damaged: {error}") from error
        return history

    def after_fork(self) -> None:
        """Go on in a child process, which has none of the parent's threads."""
        self.store.lock, self.store.compacting = threading.RLock(), threading.Lock()
        self._compaction, self._process = None, os.getpid()

    def stats(self) -> dict[str, float]:
        """Return numbers about the files."""
        return {"compactions_failed": self.compactions_failed}

    # ---------------------------------------------------------------- commits

    def begin(self, tier: Disk, changes: dict[str, Any]) -> Commit:
        """Freeze the rows that changed, and return the commit that will write them."""
        try:
            changes = {
                "time": now(),
                "count": tier.count,
                **changes,
                "history": self._write_history(changes["history"]),
            }
            self._commit = tier.commit = Commit(tier, changes, self.settings.keep, self._after_commit)
        except OSError as error:
            rows = len(tier.cache.flagged(DIRTY))
            raise self._commit_error(error, self.store.manifest.commit + 1, rows) from error
        return tier.commit

    def _write_history(self, arrays: dict[str, np.ndarray]) -> tuple[HistoryFile, ...]:
        if not arrays:
            return ()
        store = self.store
        name = store.free_name(f"history/{store.manifest.commit + 1:010d}", ".his")
        return (write_history(store.system, store.folder, name, store.manifest.uuid, arrays),)

    def release(self, name: str) -> None:
        """Let retention drop the commits called `name`."""
        folders.release(self.store.system, self.store.folder, name)

    def rollback(self, commit: int, init: Initializer, subject: str) -> Spec:
        """Make the content of an earlier commit the newest, and return the table's description as of then."""
        manifest = self.manifest(commit)
        spec = read_spec(manifest.spec, init, self.settings.path)
        manifest.check_spec(spec.rows, spec.record_bytes, self.settings.path)
        plan_room(spec, self.settings.memory, subject)  # or it raises, before anything has changed
        self.stop_compaction()
        self.store.rollback(manifest, now(), self.settings.keep)
        return spec

    def _after_commit(self, tier: Disk) -> None:
        """Compact in the background where logs take more RAM or disk than they should."""
        base, delta = (sum(run.file.size for run in runs) for runs in (self.store.base_runs, self.store.delta))
        crowded = self.store.overlay.nbytes > LEAST_OVERLAY_BYTES and self.store.fullness > FULLNESS
        if crowded or delta > max(base, LEAST_COMPACTED_BYTES):
            self.compact_in_background(tier.spec.rows)
        self._check_index(tier)

    def _check_index(self, tier: Disk) -> None:
        """Say once that the rows are so many that to know which are there takes more RAM than was kept for it."""
        index, kept = self.store.base.nbytes, max(tier.room.budget_bytes // INDEX_SHARE, LEAST_OVERLAY_BYTES)
        if index > kept and not self._told:
            self._told = True
            warnings.warn(
                f"{self.settings.path}: the index of {self.store.base.count} rows takes {format_bytes(index)} of RAM, "
                f"more than the {format_bytes(kept)} that memory={format_bytes(tier.room.budget_bytes)} leaves for it. "
                f"Raise memory= to {format_bytes(index * INDEX_SHARE)} or more.",
                RuntimeWarning,
                stacklevel=1,
            )

    def check_name(self, step: Any, name: Any) -> None:
        """Raise `ArgumentError` where a commit cannot be called so."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63):
            raise ArgumentError(f"`step` of a commit must be a whole number of 64 bits or None: got {step!r}.")
        if name is not None and not is_name(name):
            raise ArgumentError(f"`name` of a commit must be 1 to 100 printable characters, or None: got {name!r}.")

    def error_of(self, commit: Commit) -> BaseException | None:
        """Return what went wrong with a commit, as the caller should see it."""
        return (
            self._commit_error(commit.error, commit.number, commit.rows)
            if isinstance(commit.error, OSError)
            else commit.error
        )

    def _commit_error(self, error: OSError, number: int, rows: int) -> CommitError:
        if isinstance(error, CommitError):
            return error
        text = f"commit {number} failed: {error.strerror or error}"
        if error.errno in NO_SPACE:
            needed = rows * (self.store.manifest.record_bytes + 12)
            free = self.store.system.free_bytes(self.store.folder)
            text = (
                f"commit {number} failed, the disk is full: it needs about {needed} bytes "
                f"({format_bytes(needed)}), and {free} ({format_bytes(free)}) are free. Free some and commit again"
            )
        kept = f"{text}. Commit {self.store.manifest.commit} is whole, and so are the rows in RAM"
        made = CommitError(error.errno, kept, self.settings.path)
        made.__cause__ = error
        return made

    def manifest(self, commit: int) -> Manifest:
        """Return a commit by its number."""
        return folders.manifest_at(self.store.system, self.store.folder, commit)

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first."""
        return [_line(self.store, manifest) for manifest in folders.manifests_of(self.store.system, self.store.folder)]

    # ---------------------------------------------------------------- compaction

    def compact_in_background(self, rows: int | None) -> None:
        """Fold logs into base chunks while others go on, unless that is under way."""
        if self._compaction is None or not self._compaction.is_alive():
            self._stopping.clear()
            thread = threading.Thread(target=self._compact, args=(rows,), name="embedrock-compact", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads: it is tried again after the next commit
                self.compactions_failed += 1
            else:
                self._compaction = thread

    def _compact(self, rows: int | None) -> None:
        try:
            compact(self.store, rows, COMPACTED_BYTES_PER_SECOND, self._stopping.is_set)
        except Stopped:
            pass
        except Exception as error:
            self.compactions_failed += 1
            warnings.warn(
                f"{self.settings.path} could not be compacted, and is as it was: {error}. It is tried again after the "
                "next commit.",
                RuntimeWarning,
                stacklevel=1,
            )

    def compact(self, rows: int | None) -> None:
        """Fold logs into base chunks."""
        self.stop_compaction()
        compact(self.store, rows, None, lambda: False)

    def commit_base(self) -> None:
        """Commit what compaction has made, unless that is done."""
        self.store.commit_base(now(), self.settings.keep)

    def stop_compaction(self) -> None:
        """End a compaction in the background; what it has written so far is removed."""
        if self._compaction is not None:
            self._stopping.set()
            self._compaction.join()
            self._compaction = None

    def abandon(self, changes: Changes, subject: str) -> None:
        """Close all files of a table that is closed, or that nobody has any more, and say what is lost with it."""
        if self._process != os.getpid() or self._closed:
            return
        self._closed = True
        if threading.current_thread().name.startswith("embedrock-"):
            # Garbage was collected inside of what has to end before the files are closed.
            threading.Thread(target=self._abandon, args=(changes, subject), name="close-embedrock").start()
        else:
            self._abandon(changes, subject)

    def _abandon(self, changes: Changes, subject: str) -> None:
        commit, last = self._commit, self.store.manifest
        self.close()
        if commit is not None and commit.error is not None:
            changes.committed = -1
        if changes.pending and self.writes:
            warnings.warn(
                f"{subject} is closed with changes since commit {last.commit}, which are lost. Call commit() before.",
                UncommittedWarning,
                stacklevel=6,
            )

    def close(self) -> None:
        """Close all files, once what runs in the background has ended, and let another writer in."""
        if self._process != os.getpid():
            return  # a child's: they are the parent's
        if self._commit is not None:
            self._commit.join()
        self.stop_compaction()
        self.store.close()


def open_files(settings: Settings, init: Initializer | None) -> tuple[Durability, Spec]:
    """Open the table at a path."""
    store = Store.open(settings.system, settings.path, settings.at, settings.mode == "w", settings.lock)
    try:
        spec = read_spec(store.manifest.spec, init, settings.path)
        store.manifest.check_spec(spec.rows, spec.record_bytes, settings.path)
        return Durability(store, settings), spec
    except BaseException:
        store.close()
        raise


def open_or_make_files(settings: Settings, spec: Spec, given: dict[str, Any]) -> tuple[Durability, Spec]:
    """Open the table at a path, or make it.

    Args:
        settings: how.
        spec: of a new table.
        given: what the caller asked for, by the names of `describe_spec`; an existing table must agree.
    """
    if settings.mode == "r" or folders.holds_table(settings.system, settings.path):
        return _open_given(settings, spec, given)
    plan_room(spec, settings.memory, f"table {settings.path!r}")  # what cannot be opened is not made
    manifest = Manifest(
        uuid=uuids.uuid4().hex,
        commit=0,
        parent=None,
        step=None,
        name=None,
        time=now(),
        spec=describe_spec(spec),
        record_bytes=spec.record_bytes,
        steps=0,
        skipped_steps=0,
        count=0,
    )
    try:
        return Durability(Store.create(settings.system, settings.path, manifest, settings.lock), settings), spec
    except FileExistsError:
        if not folders.holds_table(settings.system, settings.path):
            raise
        return _open_given(settings, spec, given)  # somebody else was faster


def _open_given(settings: Settings, spec: Spec, given: dict[str, Any]) -> tuple[Durability, Spec]:
    durability, found = open_files(settings, spec.init if given.get("init") is not None else None)
    try:
        check_same(given, describe_spec(found), settings.path)
    except BaseException:
        durability.close()
        raise
    return durability, found


def now() -> str:
    """Return the time as it stands in a manifest."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _line(store: Store, manifest: Manifest) -> dict[str, Any]:
    return {
        "commit": manifest.commit,
        "step": manifest.step,
        "name": folders.name_of(store.system, store.folder, manifest),
        "time": manifest.time,
        "rows": manifest.count,
        "bytes": sum(entry.size for entry in (*manifest.base, *manifest.delta, *manifest.history)),
    }
