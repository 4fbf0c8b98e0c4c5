"""`Files`: where a table on disk lives: its files, commits and compaction."""

from __future__ import annotations

import errno
import os
import threading
import uuid as uuids
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np

from embedrock.errors import ArgumentError, CommitError, CorruptTableError, ReadOnlyTableError, UnsupportedError
from embedrock.initializers import Initializer
from embedrock.machine.paths import local_path
from embedrock.machine.sizes import Size, format_bytes
from embedrock.machine.space import NO_SPACE
from embedrock.machine.vfs import System
from embedrock.process import forks
from embedrock.process.callers import caller_level
from embedrock.residents.residents import PREFIX, Residents
from embedrock.rules import History
from embedrock.spec import Spec
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.compaction import compact
from embedrock.store.history import write_history
from embedrock.store.manifest import HistoryFile, Manifest, is_name
from embedrock.store.nearby import holds_table
from embedrock.store.runs import damaged
from embedrock.store.store import Store
from embedrock.table.description import check_same, describe_spec, read_spec
from embedrock.table.home import Home, Version
from embedrock.table.rows import Rows
from embedrock.table.saved import remembered
from embedrock.table.upkeep import Upkeep
from embedrock.tiers.budget import budget_of
from embedrock.tiers.cache import DIRTY, POLICIES
from embedrock.tiers.commit import Commit
from embedrock.tiers.disk import Disk
from embedrock.tiers.placing import INDEX_SHARE, check_budget, claim_of
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn
from embedrock.wording import check_choice, counted

MODES = ("w", "r")
FULLNESS = 5 / 6  # of the overlay, from which on compaction makes room. It rewrites all, so it should fold many rows.
LEAST_OVERLAY_BYTES = 64 << 10  # an overlay of fewer bytes waits, and ...
LEAST_COMPACTED_BYTES = 64 << 20  # ... so do logs


class UncommittedWarning(UserWarning):
    """A table on disk was closed, or forgotten, with changes that no commit has."""


class Opening(NamedTuple):
    """How the files of a table are opened.

    Attributes:
        path: their folder.
        memory: budget of RAM, None for a share of half of the machine's.
        policy: of eviction.
        keep: commits that retention keeps.
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
        path = os.path.abspath(local_path(self.path))
        self.system.check_usable(f"table {self.name or path!r}")
        return self._replace(path=path)


class Files(Home):
    """The files of a table, and who changes them.

    Args:
        store: the files.
        opening: how they were opened.

    Attributes:
        subject: what error messages call the table.
        budget: the RAM that its tiers may take.
        upkeep: of the files, in the background.
    """

    def __init__(self, store: Store, opening: Opening) -> None:
        self.store, self.opening = store, opening
        self.subject = f"table {opening.name or opening.path!r}"
        self.budget = budget_of(opening.memory)
        self.upkeep = Upkeep(opening.path)
        self._commit: Commit | None = None
        self._process = os.getpid()
        self._told = self._closed = False

    @property
    def reopening(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"Open it again, er.open({self.opening.path!r}), or make its layer anew."

    @property
    def writes(self) -> bool:
        """Whether this is the table's writer."""
        return self.opening.mode == "w"

    # ---------------------------------------------------------------- what rows ask of their home

    def named_by(self, layer: str) -> str:
        self.subject = f"{layer} at {self.opening.path!r}"
        return self.subject

    @property
    def where(self) -> str:
        return f"on disk at {self.opening.path!r}{'' if self.writes else ' (read only)'} behind a cache in RAM"

    def check_writable(self) -> None:
        if not self.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f'{self.subject} was opened with mode="r" and cannot change. Open it with mode="w"',
                self.opening.path,
            )

    def raise_commit_failure(self, rows: Rows) -> None:
        self._take_end_of_done(rows.version, _disk(rows))

    def after_fork(self, rows: Rows) -> None:
        """Go on in a child process: a reader with a cache of its own. A writer's child must not write.

        Raises:
            ReadOnlyTableError: it is a writer's.
        """
        if self.writes:
            raise ReadOnlyTableError(
                errno.EROFS,
                f"{self.subject} is written by process {self._process}, and this is its child {os.getpid()}. Open it "
                'here with mode="r", or use it in the parent only',
                self.opening.path,
            )
        self._process = os.getpid()
        self.resume(rows, rows.spec)

    def replaced(self, rows: Rows, spec: Spec, fill: Callable[[Tier], None]) -> Disk:
        """Replace the records; the first commit from then on replaces all there is in the files."""
        self.check_writable()
        self.be_quiet(rows)
        self.stop_compaction()
        store, before = self.store.emptied(spec.record_bytes), _disk(rows)
        try:
            made = self._tier(spec, rows.turn, store)
            fill(made)
        except BaseException:
            store.give_up()
            self.budget.join(before, claim_of(before.spec))
            raise
        self.store.give_up()
        self.store = store
        return made

    def be_quiet(self, rows: Rows) -> None:
        """Wait for all that uses a tier whose rows are about to leave it, and might write some of them."""
        self._wait_for_quiet(rows, _disk(rows))

    def is_quiet(self, rows: Rows) -> bool:
        return _disk(rows).is_quiet

    def grown(self, rows: Rows, spec: Spec) -> Disk:
        self.stop_compaction()
        tier = _disk(rows)
        tier.grow(spec)
        return tier

    def check_in_ram(self, verb: str) -> NoReturn:
        raise UnsupportedError(
            f"{verb}() is for tables in RAM, and {self.subject} is on disk, where it may be larger than RAM. "
            "commit() saves it, er.open(path) opens it, rollback(commit) goes back; load_state(table) of a table in "
            "RAM takes its rows over."
        )

    def close(self, rows: Rows, tier: Tier) -> None:
        try:
            self._wait_for_quiet(rows, cast(Disk, tier))
        finally:
            self.abandon(rows.version)

    def stats(self) -> dict[str, float]:
        return {"compactions_failed": self.upkeep.failed}

    # ---------------------------------------------------------------- rows as of a commit

    def resume(self, rows: Rows, spec: Spec) -> None:
        """Give a table the state of the last commit."""
        manifest, tier = self.store.manifest, self._tier(spec, rows.turn, self.store)
        history, residents = self.history(spec), self.residents(spec)
        rows.install(spec, tier, history, manifest.steps, manifest.skipped_steps, residents=residents)
        rows.version.commit()
        self._commit = None  # what became of it has no say about these rows

    def _tier(self, spec: Spec, turn: Turn, store: Store) -> Disk:
        """Return a new, empty cache over files."""
        return Disk(spec, store, self.budget, self.opening.policy, turn, self.subject)

    def history(self, spec: Spec) -> History | None:
        """Return the history of the table's rule as of the last commit."""
        manifest, history = self.store.manifest, None if spec.rule is None else spec.rule.history()
        is_due = history is not None or spec.has_residents
        if bool(manifest.history) != is_due and (manifest.history or (manifest.steps and manifest.commit)):
            expected, got = ("one", "none") if is_due else ("none", "one")
            where = manifests.path_of(self.opening.path, manifest.commit)
            raise damaged(where, f"{expected} `history` after {counted(manifest.steps, 'step')} of {spec.rule}", got)
        if history is not None and manifest.history:
            arrays = {name: a for name, a in self.store.history[0].items() if not name.startswith(PREFIX)}
            with self._reading_history():
                history.load(arrays, manifest.steps)
        return history

    def residents(self, spec: Spec) -> Residents | None:
        """Return who has a record as of the last commit."""
        manifest, made = self.store.manifest, Residents.of(spec, self.subject)
        if made is not None and manifest.history:
            with self._reading_history():
                made.load(self.store.history[0])
                if made.knows_rows and made.row_count != manifest.count:
                    raise ArgumentError(f"it names {made.row_count} rows that have records, of {manifest.count}.")
        return made

    @contextmanager
    def _reading_history(self) -> Iterator[None]:
        try:
            yield
        except ArgumentError as error:
            where = f"{self.opening.path}/{self.store.manifest.history[0].file}"
            raise CorruptTableError(f"{where} is damaged: {error}") from error

    # ---------------------------------------------------------------- commits

    def commit(self, rows: Rows, step: int | None, name: str | None, wait: bool) -> int:
        """Make all changes so far durable, as one; return the commit's number: see `Table.commit`."""
        tier = _disk(rows)
        self.check_writable()
        _check_name(step, name)
        self.end_commit(rows)
        commit = self._begin(rows, tier, {"step": step, "name": name})
        rows.version.commit()
        if wait:
            commit.hurry()
        commit.start()
        if wait:
            commit.wait()
            self._take_end(rows.version, tier, commit)
        return commit.number

    def _begin(self, rows: Rows, tier: Disk, fields: dict[str, Any]) -> Commit:
        """Freeze the rows that changed, and return the commit that will write them."""
        history = {key: array.copy() if array.base is not None else array for key, array in remembered(rows).items()}
        try:
            fields |= {
                "time": publishing.now(),
                "count": tier.count,
                "spec": describe_spec(rows.spec),
                "steps": rows.steps,
                "skipped_steps": rows.skipped_steps,
                "history": self._write_history(history),
            }
            self._commit = tier.commit = Commit(tier, fields, self.opening.keep, self._after_commit)
        except BaseException as error:
            self.store.take_back(fields.get("history", ()))
            if not isinstance(error, OSError):
                raise
            dirty = len(tier.cache.flagged(DIRTY))
            raise self._commit_error(error, self.store.manifest.commit + 1, dirty) from error
        return self._commit

    def is_durable(self, rows: Rows) -> bool:
        """Return whether nothing went wrong with the commit under way, if there is one, once it has ended."""
        commit = self._commit
        if commit is None or rows.is_closed or _disk(rows).commit is not commit:
            return True
        commit.join()
        return commit.error is None

    def end_commit(self, rows: Rows) -> None:
        """Wait for the commit under way, and raise what went wrong with it."""
        self._end_commit(rows.version, _disk(rows))

    def _end_commit(self, version: Version, tier: Disk) -> None:
        while tier.commit is not None:  # another thread may begin one while this one waits
            tier.commit.wait()
            self._take_end_of_done(version, tier)

    def _take_end_of_done(self, version: Version, tier: Disk) -> None:
        commit = self._commit
        if commit is not None and tier.commit is commit and commit.is_done:
            self._take_end(version, tier, commit)

    def _take_end(self, version: Version, tier: Disk, commit: Commit) -> None:
        """Raise what went wrong with a commit that has ended."""
        if tier.commit is commit:
            tier.commit = None
        if commit.error is not None:
            version.committed = -1
            raise self._error_of(commit)

    def _wait_for_quiet(self, rows: Rows, tier: Disk) -> None:
        rows.turn.wait_for(tier.becomes_quiet)
        self._end_commit(rows.version, tier)

    def _write_history(self, arrays: dict[str, np.ndarray]) -> tuple[HistoryFile, ...]:
        if not arrays:
            return ()
        store = self.store
        name = store.free_name(f"history/{store.manifest.commit + 1:010d}", ".his")
        return (write_history(store.system, store.folder, name, store.manifest.uuid, arrays),)

    def release(self, rows: Rows, name: str) -> None:
        """Let retention drop the commits called `name`."""
        rows.check_writable()
        folders.release(self.store.system, self.store.folder, name)

    def rollback(self, rows: Rows, commit: int) -> int:
        """Make the content of an earlier commit the newest; return its number."""
        self.check_writable()
        self.be_quiet(rows)
        manifest = self.manifest(commit)
        spec = read_spec(manifest.spec, rows.spec.init, self.opening.path)
        manifest.check_spec(spec.rows, spec.record_bytes, self.opening.path)
        check_budget(spec, self.budget, self.subject)  # before anything has changed
        self.stop_compaction()
        self.store.rollback(manifest, publishing.now(), self.opening.keep)
        try:
            self.resume(rows, spec)
        except BaseException:  # the records in RAM are not those of the files
            rows.drop()
            self.close_all()
            raise
        return self.store.manifest.commit

    def _after_commit(self, tier: Disk) -> None:
        """Compact in the background where logs take more RAM or disk than they should."""
        base, delta = (sum(run.file.size for run in runs) for runs in (self.store.base_runs, self.store.delta))
        crowded = self.store.overlay.nbytes > LEAST_OVERLAY_BYTES and self.store.fullness > FULLNESS
        if crowded or delta > max(base, LEAST_COMPACTED_BYTES):
            self.compact_in_background()
        self.upkeep.fold(self.store)
        self._check_index(tier)

    def _check_index(self, tier: Disk) -> None:
        """Say once that the rows are so many that to know which are there takes more RAM than was kept for it."""
        index, kept = self.store.base.nbytes, max(tier.budget_bytes // INDEX_SHARE, LEAST_OVERLAY_BYTES)
        if index > kept and not self._told:
            self._told = True
            warnings.warn(
                f"{self.opening.path}: the index of {self.store.base.count} rows takes {format_bytes(index)} of RAM, "
                f"more than the {format_bytes(kept)} that memory={format_bytes(tier.budget_bytes)} leaves for it. "
                f"Raise memory= to {format_bytes(index * INDEX_SHARE)} or more.",
                RuntimeWarning,
                stacklevel=1,
            )

    def _error_of(self, commit: Commit) -> BaseException:
        """Return what went wrong with a commit, as the caller should see it."""
        error = commit.error
        assert error is not None  # the caller has looked
        return self._commit_error(error, commit.number, commit.rows) if isinstance(error, OSError) else error

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
        made = CommitError(error.errno, kept, self.opening.path)
        made.__cause__ = error
        return made

    def manifest(self, commit: int) -> Manifest:
        """Return a commit by its number."""
        return folders.manifest_at(self.store.system, self.store.folder, commit)

    def commits(self) -> list[dict[str, Any]]:
        """Return the commits that there are, the oldest first."""
        return [_line(self.store, manifest) for manifest in folders.manifests_of(self.store.system, self.store.folder)]

    # ---------------------------------------------------------------- compaction

    def compact_in_background(self) -> None:
        """Fold logs into base chunks while others go on, unless that is under way."""
        self.upkeep.compact(self.store)

    def compact(self, rows: Rows) -> None:
        """Fold logs into base chunks, while others have the table."""
        tier = _disk(rows)
        self.check_writable()
        with rows.turn.lock:
            self.end_commit(rows)
        with tier.in_use():
            self.stop_compaction()
            compact(self.store, None, lambda: False)

    def commit_base(self, rows: Rows) -> int:
        """Commit what compaction has made, unless that is done; return the last commit's number."""
        self.end_commit(rows)
        self.store.commit_base(publishing.now(), self.opening.keep)
        return self.store.manifest.commit

    def stop_compaction(self) -> None:
        """End what compacts or folds in the background; what that has written so far is removed."""
        self.upkeep.stop()

    def abandon(self, version: Version) -> None:
        """Close all files of a table that is closed, or that nobody has any more, and say what is lost with it."""
        if self._process != os.getpid() or self._closed:
            return
        self._closed = True
        is_inside = threading.current_thread().name.startswith("embedrock-") or self.budget.is_being_shared
        if is_inside or forks.is_under_way():
            # Garbage was collected inside of what has to end before the files are closed.
            threading.Thread(target=self._abandon, args=(version,), name="close-embedrock").start()
        else:
            self._abandon(version)

    def _abandon(self, version: Version) -> None:
        commit, last = self._commit, self.store.manifest
        self.close_all()
        if commit is not None and commit.error is not None:
            version.committed = -1
        if not version.is_committed and self.writes:
            warnings.warn(
                f"{self.subject} is closed with changes since commit {last.commit}, which are lost. Call "
                "commit() before.",
                UncommittedWarning,
                stacklevel=caller_level(),
            )

    def close_all(self) -> None:
        """Close all files, once what runs in the background has ended, and let another writer in."""
        if self._process != os.getpid():
            return  # a child's: they are the parent's
        if self._commit is not None:
            self._commit.join()
        self.stop_compaction()
        self.store.close()
        self.budget.leave()


def open_files(opening: Opening, init: Initializer | None) -> tuple[Files, Spec]:
    """Open the table at a path."""
    store = Store.open(opening.system, opening.path, opening.at, opening.mode == "w", opening.lock)
    try:
        spec = read_spec(store.manifest.spec, init, opening.path)
        store.manifest.check_spec(spec.rows, spec.record_bytes, opening.path)
        return Files(store, opening), spec
    except BaseException:
        store.close()
        raise


def open_or_make_files(opening: Opening, spec: Spec, given: dict[str, Any]) -> tuple[Files, Spec]:
    """Open the table at a path, or make it.

    Args:
        opening: how.
        spec: of a new table.
        given: what the caller asked for, by the names of `describe_spec`; an existing table must agree.
    """
    if opening.mode == "r" or holds_table(opening.system, opening.path):
        return _open_given(opening, spec, given)
    check_budget(spec, budget_of(opening.memory), f"table {opening.path!r}")  # what cannot be opened is not made
    manifest = Manifest(
        uuid=uuids.uuid4().hex,
        commit=0,
        parent=None,
        step=None,
        name=None,
        time=publishing.now(),
        spec=describe_spec(spec),
        record_bytes=spec.record_bytes,
        steps=0,
        skipped_steps=0,
        count=0,
    )
    try:
        return Files(Store.create(opening.system, opening.path, manifest, opening.lock), opening), spec
    except FileExistsError:
        if not holds_table(opening.system, opening.path):
            raise
        return _open_given(opening, spec, given)  # somebody else was faster


def _open_given(opening: Opening, spec: Spec, given: dict[str, Any]) -> tuple[Files, Spec]:
    files, found = open_files(opening, spec.init if given.get("init") is not None else None)
    try:
        check_same(given, describe_spec(found), opening.path)
    except BaseException:
        files.close_all()
        raise
    return files, found


def _disk(rows: Rows) -> Disk:
    return cast(Disk, rows.tier)  # `Files` makes no other


def _check_name(step: Any, name: Any) -> None:
    """Raise `ArgumentError` where a commit cannot be called so."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not -(2**63) <= step < 2**63):
        raise ArgumentError(f"`step` of a commit must be a whole number of 64 bits or None: got {step!r}.")
    if name is not None and not is_name(name):
        raise ArgumentError(f"`name` of a commit must be 1 to 100 printable characters, or None: got {name!r}.")


def _line(store: Store, manifest: Manifest) -> dict[str, Any]:
    return {
        "commit": manifest.commit,
        "step": manifest.step,
        "name": folders.name_of(store.system, store.folder, manifest),
        "time": manifest.time,
        "rows": manifest.count,
        "bytes": sum(entry.size for entry in (*manifest.base, *manifest.delta, *manifest.history)),
    }
