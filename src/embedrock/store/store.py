"""`Store`: the files of one table, and where in them the newest record of each row is."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.errors import ArgumentError, CommitError, EmbedrockError
from embedrock.machine.space import NO_SPACE
from embedrock.machine.vfs import DIRECT_BYTES, System, aligned_empty
from embedrock.process import forks
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.base import Base, Chunk
from embedrock.store.history import read_history
from embedrock.store.manifest import HistoryFile, Manifest, RunFile
from embedrock.store.nearby import check_table
from embedrock.store.orphans import remove_orphans
from embedrock.store.overlay import BYTES_A_ROW, Overlay
from embedrock.store.reading import read_records
from embedrock.store.runs import CRC_BYTES, Log, Run, damaged

INDEX_BITS = 40  # of a location; the bits above them are the number of the run
GONE = (1 << INDEX_BITS) - 1  # in the place of an index: the row has had no record since that run was the newest


@dataclass(frozen=True)
class Freeze:
    """What a commit under way will publish.

    Attributes:
        base, delta: the runs of earlier commits.
        logs: those in the making, of which the last one takes the rows that are still in RAM.
    """

    base: tuple[Run, ...]
    delta: tuple[Run, ...]
    logs: tuple[Log, ...]

    @property
    def log(self) -> Log:
        """Where the rows of the commit go."""
        return self.logs[-1]


class Located(NamedTuple):
    """Where records are, and the files to read them from, which stay open for it.

    Attributes:
        positions: of the ids that have records, among those asked for.
        ids: they themselves.
        locations: of their records.
        runs: by number.
    """

    positions: np.ndarray
    ids: np.ndarray
    locations: np.ndarray
    runs: Mapping[int, Run]


class Store:
    """The files of a table. Any thread may call it.

    Args:
        system: does the I/O.
        folder: of the table.
        manifest: the commit to start from.
        lock: descriptor of the lock that is held; None for a reader.

    Attributes:
        lock: held wherever its attributes change.
        manifest: the last commit.
        history: arrays of the rule's, as of the commit that it was opened at; nothing, or one item.
        compacting: held by the one compaction under way.
        folding: held by who makes one of several logs, or chooses those that a compaction folds.
        compacted_below: logs of less than this number belong to the compaction under way.
        hurry: it is not to mind its limit of rate, nor commits.
        overlay_bytes: how large the overlay may become.
        commit_is_awaited: somebody waits for a commit, so that compaction leaves the disk to it.
        base_is_ahead: the base lacks committed records of rows that have newer ones, or has those; the next commit
            publishes both.
        some_are_gone: the index of rows in logs has some that have no record any more.
        broken: why no further commit is taken; None where all is well.
        counts: records and bytes read and written since it was opened.
    """

    def __init__(self, system: System, folder: str, manifest: Manifest, lock: int | None) -> None:
        self.system, self.folder, self._held = system, folder, lock
        self.lock = forks.lock(forks.Rank.SECTION)
        self.compacting, self.hurry, self.commit_is_awaited = threading.Lock(), False, False
        self.folding, self.compacted_below = threading.Lock(), 0
        self.overlay_bytes = 1 << 62
        self.broken: str | None = None
        self.counts = {"reads": 0, "read_requests": 0, "bytes_read": 0, "bytes_written": 0, "read_seconds": 0.0}
        self.counts |= {"bytes_compacted": 0, "collections_failed": 0}
        self._serial = 0
        self._frozen: set[str] = set()  # names of files that the commit under way may publish
        self.load(manifest)

    # ---------------------------------------------------------------- opening

    @classmethod
    def create(cls, system: System, folder: str, manifest: Manifest, locked: bool) -> Store:
        """Make an empty table, and publish it as commit 0. `locked`: see `open`."""
        folders.make(system, folder)
        held = folders.lock(system, folder, locked)
        try:
            manifests.publish(system, folder, manifest)
            return cls(system, folder, manifest, held)
        except BaseException:
            folders.unlock(system, held)
            raise

    @classmethod
    def open(cls, system: System, folder: str, at: int | None, write: bool, locked: bool) -> Store:
        """Open a table.

        Args:
            system: does the I/O.
            folder: of the table.
            at: number of a commit, for a reader; None: the last one.
            write: become its one writer.
            locked: refuse to write where the file system has no locks.
        """
        check_table(system, folder)
        if not write:
            return cls._open_to_read(system, folder, at)
        held = folders.lock(system, folder, locked)
        try:
            store = cls(system, folder, folders.newest(system, folder), held)
            folders.make_folders(system, folder)
            remove_orphans(system, folder, store.manifest.uuid)
            return store
        except BaseException:
            folders.unlock(system, held)
            raise

    @classmethod
    def _open_to_read(cls, system: System, folder: str, at: int | None) -> Store:
        """Open all files of a snapshot: from then on they stay, whatever the writer removes."""
        while True:
            commit = manifests.numbers(system, folder)[-1] if at is None else at
            try:
                return cls(system, folder, folders.manifest_at(system, folder, commit), None)
            except (FileNotFoundError, ArgumentError) as error:
                # The writer may have dropped this commit meanwhile. If it did not, a file is missing.
                is_told = at is not None and isinstance(error, ArgumentError)
                if is_told or commit in manifests.numbers(system, folder):
                    raise

    def load(self, manifest: Manifest, accept: Callable[[], None] = lambda: None) -> None:
        """Start from a commit; whatever was not committed is forgotten.

        Args:
            manifest: the commit.
            accept: called when all its files are open, and nothing has changed yet.
        """
        runs: dict[int, Run] = {}
        base = [self._open_run(entry, manifest, runs) for entry in manifest.base]
        delta = [self._open_run(entry, manifest, runs) for entry in manifest.delta]
        overlay = Overlay()
        for run in delta:
            overlay.insert(run.index(), locations_of(run.number, 0, run.count))
            overlay.insert(gone := run.gone_ids(), np.full(len(gone), gone_at(run.number)))
        history = [read_history(self.system, self.folder, part, manifest.uuid) for part in manifest.history]
        index = base_of(base)
        gone = sum(entry.gone for entry in manifest.delta)
        self._check_count(manifest, index, overlay, gone)
        accept()
        with self.lock:
            self.history = history
            self.manifest, self.runs, self.overlay, self._runs_made = manifest, runs, overlay, len(runs)
            self.base, self.base_runs, self.delta = index, base, delta
            self.logs: list[Log] = []
            self._active: Log | None = None
            self.base_is_ahead, self.some_are_gone = False, gone > 0

    def _check_count(self, manifest: Manifest, base: Base, overlay: Overlay, gone: int) -> None:
        """Refuse a commit whose files cannot hold as many rows as it says.

        How many rows are in base and overlay takes a look at each. So that is checked where all rows are gone through.
        """
        low, high = max(base.count, overlay.count, gone) - gone, base.count + overlay.count
        if not low <= manifest.count <= high:
            where = manifests.path_of(self.folder, manifest.commit)
            raise damaged(where, f"`count` in [{low}, {high}], as the indexes of its files say", manifest.count)

    def _open_run(self, entry: RunFile, manifest: Manifest, runs: dict[int, Run]) -> Run:
        run = open_run(self.system, self.folder, entry, manifest, len(runs))
        runs[run.number] = run
        return run

    def close(self) -> None:
        """Close all files, and let another writer in."""
        with self.lock:
            for run in self.runs.values():
                run.file.close()
            self.runs = {}
            held, self._held = self._held, None
            if held is not None:
                folders.unlock(self.system, held)

    # ---------------------------------------------------------------- records

    def locate(self, ids: np.ndarray) -> np.ndarray:
        """Return where the newest record of each id is, int64; -1 for none."""
        with self.lock:
            locations = self.overlay.find(ids)
            below = np.flatnonzero(locations < 0)
            if below.size:
                locations[below] = self.base.find(ids[below])
            if self.some_are_gone:
                locations[is_gone(locations)] = -1
            return locations

    def located(self, ids: np.ndarray) -> Located:
        """Return what reads the newest records of those ids that have one."""
        with self.lock:
            locations = self.locate(ids)
            there = np.flatnonzero(locations >= 0)
            return Located(there, ids[there], locations[there], self.runs)  # runs never change in place

    def read(self, found: Located, records: np.ndarray, slots: np.ndarray) -> None:
        """Copy records to ``records[slots]``, uint8 (n, record_bytes)."""
        started = time.perf_counter()
        requests, nbytes = read_records(self.system, found.runs, found.locations, found.ids, records, slots)
        self.add(
            reads=len(slots), read_requests=requests, bytes_read=nbytes, read_seconds=time.perf_counter() - started
        )

    def add(self, **counts: float) -> None:
        """Count."""
        with self.lock:
            for name, count in counts.items():
                self.counts[name] += count

    def append(self, records: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> None:
        """Write ``records[slots]``, the newest of `ids`, to the log of the next commit."""
        sealed = self.seal(records, slots, ids)
        with self.lock:
            if self._active is None:
                self._active = self._new_log()
            self.place(ids, self.append_sealed(self._active, sealed, ids))

    def seal(self, records: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return ``records[slots]`` as they stand in a file: uint8 (n, record_bytes + 4)."""
        stride = self.manifest.record_bytes + CRC_BYTES
        sealed = aligned_empty(len(slots) * stride).reshape(-1, stride)
        kernels.cpu.launch(kernels.cpu.storage.seal, records, slots, ids, sealed)
        return sealed

    def append_sealed(self, log: Log, sealed: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Append what `seal` returned to a log, one thread at a time, and return where its records are now."""
        return locations_of(log.number, log.append(sealed, ids), len(ids))

    def place(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Note where the newest records of ids are, which were just appended."""
        with self.lock:
            self.counts["bytes_written"] += len(ids) * (self.manifest.record_bytes + CRC_BYTES)
            if self.some_are_gone and len(ids):  # those that a commit has written, and that went meanwhile
                now = self.overlay.find(ids)
                here = ~(is_gone(now) & (now >> INDEX_BITS > locations >> INDEX_BITS))
                ids, locations = ids[here], locations[here]
            self.overlay.insert(ids, locations)

    def discard(self, ids: np.ndarray) -> None:
        """Let rows, without repeats, have no records from now on, and from the next commit on in its files."""
        if not len(ids):
            return
        with self.lock:
            if self._active is None:
                self._active = self._new_log()
            self._active.noted.append(ids)
            self.some_are_gone = True
            self.overlay.insert(ids, np.full(len(ids), gone_at(self._active.number)))

    def look_for_gone(self) -> None:
        """Note whether the index of rows in logs still has some without a record."""
        named = (run.entry.gone for run in self.delta if run.entry is not None)
        self.some_are_gone = any(named) or any(log.noted for log in self.logs)

    def _name_gone(self, have_newer: Callable[[np.ndarray], np.ndarray]) -> None:
        """Decide which ids logs are to name as gone: those that have no newer record."""
        for log in self.logs:
            if log.noted and log.entry is None:
                ids = np.unique(np.concatenate(log.noted))
                ids = ids[self.overlay.find(ids) == gone_at(log.number)]
                log.gone = ids[~have_newer(ids)]

    def _new_log(self) -> Log:
        name = self.free_name(f"delta/{self.manifest.commit + 1:010d}", ".dlt")
        args = name, self.manifest.uuid, self.manifest.record_bytes, self.next_run()
        log = Log.create(self.system, self.folder, *args)
        self.take(log)
        self.logs.append(log)
        return log

    def next_run(self) -> int:
        """Return a number for one more run."""
        with self.lock:
            self._runs_made += 1
            return self._runs_made

    def take(self, run: Run) -> None:
        """Let records be read from a run."""
        with self.lock:
            self.runs = self.runs | {run.number: run}

    def drop(self, runs: Sequence[Run]) -> None:
        """Read no more records from runs. Their files are closed when the last read has ended."""
        numbers = {run.number for run in runs}
        with self.lock:
            self.runs = {number: run for number, run in self.runs.items() if number not in numbers}

    def free_name(self, stem: str, suffix: str = "") -> str:
        """Return the name of a file that is not there."""
        while True:
            self._serial += 1
            # With some of the uuid, so that a file whose first page a crash has torn is known for this table's.
            name = f"{stem}-{self.manifest.uuid[:8]}-{self._serial}{suffix}"
            if not self.system.exists(folders.join(self.folder, name)):
                return name

    def ids_above_base(self) -> np.ndarray:
        """Return the ids that have records in logs only."""
        with self.lock:
            parts = [ids[(self.base.find(ids) < 0) & ~is_gone(at)] for ids, at in self.overlay.items(SCAN_ROWS)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def ids_gone_from_base(self) -> np.ndarray:
        """Return the ids, ascending, whose records in the base are of no account: the rows have none any more."""
        if not self.some_are_gone:
            return np.empty(0, np.int64)
        with self.lock:
            parts = [ids[is_gone(at)] for ids, at in self.overlay.items(SCAN_ROWS)]
            ids = np.concatenate([np.empty(0, np.int64), *parts])
            return np.sort(ids[self.base.find(ids) >= 0])

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files that the table is read from."""
        with self.lock:
            return sum(run.file.size for run in (*self.base_runs, *self.delta, *self.logs))

    @property
    def fullness(self) -> float:
        """The share of the room for it that the overlay takes up, 1 at the latest when it has to be made."""
        return self.overlay.count * BYTES_A_ROW / self.overlay_bytes

    # ---------------------------------------------------------------- commits

    def freeze(self, have_newer: Callable[[np.ndarray], np.ndarray]) -> Freeze:
        """Begin a commit: records that are appended from now on belong to the one after it.

        Args:
            have_newer: tells which ids have records that this commit is going to write, bool (n,).
        """
        self.check_commits()
        with self.lock:
            self._name_gone(have_newer)
            if self._active is None:
                self._new_log()
            self._active = None
            self._frozen = {run.path for run in (*self.base_runs, *self.delta, *self.logs)}
            return Freeze(tuple(self.base_runs), tuple(self.delta), tuple(self.logs))

    def check_commits(self) -> None:
        """Raise `CommitError` if commits are no longer taken, or would go to another table."""
        if self._held is not None and not folders.is_held(self.system, self.folder, self._held):
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

    def publish(self, freeze: Freeze, changes: dict[str, Any], keep: int) -> None:
        """Make the rows of a freeze durable, as one. Then remove files that no retained commit needs.

        Args:
            freeze: from `freeze`; its log has the rows that were in RAM.
            changes: fields of the manifest.
            keep: commits to retain.

        Raises:
            OSError: the disk is full, or it failed twice. The last commit is whole.
        """
        try:
            freeze = replace(freeze, logs=tuple(self._rewritten(log) if log.broken else log for log in freeze.logs))
            manifest = self._publish(freeze, changes)
        except OSError as error:
            self._check_unpublished()
            if error.errno in NO_SPACE:
                raise
            freeze, manifest = self._publish_again(freeze, changes)
        with self.lock:
            self.delta = [*self.delta, *(log for log in freeze.logs if not log.is_empty)]
            self.logs = [log for log in self.logs if log not in freeze.logs]
            self.manifest, self._frozen = manifest, set()
            self.base_is_ahead = self.base_is_ahead and tuple(self.base_runs) != freeze.base
        self._remove([log for log in freeze.logs if log.is_empty])
        self.collect(keep)

    def commit_base(self, time: str, keep: int) -> None:
        """Publish the content of the last commit as it lies in files now, if that has changed (by compaction).

        Where rows that were not committed lay in logs when the base was made, it goes with the next commit only.
        """
        self.check_commits()
        with self.lock:
            if self.base_is_ahead:
                return
            freeze, last = Freeze(tuple(self.base_runs), tuple(self.delta), ()), self.manifest
            if [run.entry for run in (*freeze.base, *freeze.delta)] == [*last.base, *last.delta]:
                return
            self._frozen = {run.path for run in (*freeze.base, *freeze.delta)}  # a compaction may end meanwhile
        try:
            self.publish(freeze, {"time": time, "name": None}, keep)
        except BaseException:
            self.take_back()
            raise

    def _publish(self, freeze: Freeze, changes: dict[str, Any]) -> Manifest:
        entries = [log.entry or log.seal() for log in freeze.logs if not log.is_empty]
        manifest = replace(
            self.manifest,
            commit=self.manifest.commit + 1,
            parent=self.manifest.commit,
            base=tuple(run.entry for run in freeze.base),
            delta=(*(run.entry for run in freeze.delta), *entries),
            **changes,
        )
        manifests.publish(self.system, self.folder, manifest)
        return manifest

    def _publish_again(self, freeze: Freeze, changes: dict[str, Any]) -> tuple[Freeze, Manifest]:
        """Retry once, in new files: what became of the old ones after a failed write or sync is not known."""
        try:
            freeze = replace(freeze, logs=tuple(self._rewritten(log) for log in freeze.logs))
            return freeze, self._publish(freeze, changes)
        except OSError as error:
            if error.errno not in NO_SPACE:
                self.broken = str(error)
            raise

    def take_back(self, history: Iterable[HistoryFile] = ()) -> None:
        """Clear up after a commit that failed: what it has written of rows, the next one takes; its history goes."""
        with self.lock:
            empty = [log for log in self.logs if not log.count and not log.noted and log is not self._active]
            self.logs = [log for log in self.logs if log not in empty]
            if self._active is None and self.logs and self.logs[-1].can_grow:
                self._active = self.logs[-1]
            spared, self._frozen = self._frozen - self._needed(), set()
            self.drop(empty)
            for log in empty:  # nobody reads it, and an error's traceback would keep it open
                log.close()
            self._unlink([*spared, *(log.path for log in empty), *(part.file for part in history)])

    def rollback(self, target: Manifest, time: str, keep: int) -> None:
        """Publish the content of an earlier commit as a new one. What was not committed is forgotten.

        Raises:
            OSError: the disk. Nothing has changed.
        """
        self.check_commits()
        commit = self.manifest.commit
        manifest = replace(target, commit=commit + 1, parent=commit, name=None, time=time)
        logs = self.logs
        try:  # what cannot be opened must not become the last commit
            self.load(manifest, lambda: manifests.publish(self.system, self.folder, manifest))
        except OSError:
            self._check_unpublished()
            raise
        # from here on, numbers of runs mean others
        self._unlink([log.path for log in logs])
        self.collect(keep)

    def emptied(self, record_bytes: int) -> Store:
        """Return a store of the same files that holds no records yet, of another size: its next commit replaces all."""
        self.check_commits()
        manifest = replace(self.manifest, record_bytes=record_bytes, base=(), delta=(), history=(), count=0)
        return Store(self.system, self.folder, manifest, self._held)

    def give_up(self) -> None:
        """Forget what was not committed."""
        with self.lock:
            logs, self.logs, self._active = self.logs, [], None
        self._remove(logs)

    def _check_unpublished(self) -> None:
        number = self.manifest.commit + 1
        if number in manifests.numbers(self.system, self.folder):
            self.broken = f"commit {number} was made, but may not survive a loss of power"
            raise OSError(errno.EIO, self.broken, self.folder)

    def _rewritten(self, log: Log) -> Log:
        """Return a new log in place of another, with the newest record of each of its rows."""
        with self.lock:
            made = self._new_log()
            self.logs.remove(made)
            # Those, too, that have a newer record in a later log: this commit needs the one that it froze.
            ids, index = np.unique(log.ids()[::-1], return_index=True)
            old = locations_of(log.number, 0, log.count)[::-1][index]
            try:
                new = self._copied(ids, old, made)
                newest = self.overlay.find(ids) == old
                self.overlay.insert(ids[newest], new[newest])
                made.gone, made.noted = log.gone, [log.gone]
                self._move_gone(log.gone, log, made)
            except BaseException:
                self._remove([made])
                raise
            self.logs[self.logs.index(log)] = made
            self._remove([log])
            return made

    def _copied(self, ids: np.ndarray, locations: np.ndarray, log: Log) -> np.ndarray:
        """Append records that are elsewhere to a log, and return where they are in it."""
        for start in range(0, len(ids), REWRITE_ROWS):
            part, old = ids[start : start + REWRITE_ROWS], locations[start : start + REWRITE_ROWS]
            slots, records = np.arange(len(part)), np.empty((len(part), self.manifest.record_bytes), np.uint8)
            self.read(Located(slots, part, old, self.runs), records, slots)
            sealed = self.seal(records, slots, part)
            log.append(sealed, part)
            self.add(bytes_written=sealed.nbytes)
        return locations_of(log.number, 0, len(ids))

    def _move_gone(self, ids: np.ndarray, before: Run, after: Run) -> None:
        same = ids[self.overlay.find(ids) == gone_at(before.number)]
        self.overlay.insert(same, np.full(len(same), gone_at(after.number)))

    def forget(self, runs: Sequence[Run]) -> None:
        """Remove runs that were folded into others, and were in no commit: what is in one, retention removes."""
        with self.lock:
            self.logs = [log for log in self.logs if log not in runs]
            self._active = self._active if self._active in self.logs else None
            self.drop(runs)
            self._unlink([run.path for run in runs if run.path not in self._frozen])

    def replace(
        self, runs: Sequence[Run], made: Run, ids: np.ndarray, old: np.ndarray, new: np.ndarray, gone: np.ndarray
    ) -> None:
        """Read records from a run in place of those that it was made of, neighbours in `delta`.

        Args:
            runs: whose files no longer are of use, unless a commit names them.
            made: of the number of the last of them.
            ids: without repeats.
            old, new: their locations before and now.
            gone: ids that it names as gone.
        """
        with self.lock:
            for run in runs:
                self._move_gone(gone, run, made)
            newest = self.overlay.find(ids) == old  # others have newer records elsewhere
            self.overlay.insert(ids[newest], new[newest])
            first = self.delta.index(runs[0])
            self.delta[first : first + len(runs)] = [made]
            self.drop(runs)
            self.take(made)
            committed = {entry.file for entry in self.manifest.delta}
            self._unlink([run.path for run in runs if run.path not in committed | self._frozen])

    def _remove(self, logs: Sequence[Log]) -> None:
        """Remove logs that hold nothing of use."""
        self.drop(logs)
        self._unlink([log.path for log in logs], [log for log in logs if log.entry])

    def _unlink(self, paths: Iterable[str], sealed: Sequence[Run] | None = None) -> None:
        """Remove those files that no commit names. A failure costs disk space only.

        Args:
            paths: of the files, relative to the folder.
            sealed: those runs that a commit could name; None: it could name any of the files.
        """
        paths = list(paths)
        try:
            named = folders.named_files(self.system, self.folder) if paths and sealed != [] else set()
        except (EmbedrockError, OSError):  # what a damaged commit needs is not known, so nothing is removed
            self.add(collections_failed=1)
            return
        for path in paths:
            if path in named:
                continue
            try:
                self.system.unlink(folders.join(self.folder, path))
            except OSError:
                self.add(collections_failed=1)

    # ---------------------------------------------------------------- retention

    def collect(self, keep: int) -> None:
        """Drop all commits but the newest `keep` and those with a name, and the files that only they need.

        A failure costs disk space only, which the next writer gives back.
        """
        try:
            folders.collect(self.system, self.folder, keep, self._needed())
        except OSError:
            self.add(collections_failed=1)

    def _needed(self) -> set[str]:
        """Return the names of the files that this process reads or writes."""
        with self.lock:
            return {run.path for run in (*self.base_runs, *self.delta, *self.logs)}


REWRITE_ROWS = 8192
SCAN_ROWS = 1 << 16


def open_run(system: System, folder: str, entry: RunFile, manifest: Manifest, number: int) -> Run:
    """Open a file of a commit: past the page cache, if it is large, as its records are read one by one."""
    direct = entry.size >= DIRECT_BYTES
    return Run.open(system, folder, entry, manifest.uuid, manifest.record_bytes, number, direct)


def base_of(runs: Sequence[Run]) -> Base:
    """Return the index of base chunks, whose ids ascend from run to run."""
    return Base([Chunk(r.lo, r.hi, r.kind, r.number, r.count, None if r.kind == "full" else r.index()) for r in runs])


def gone_at(number: int) -> int:
    """Return the location of a row that has had no record since the run of that number was the newest."""
    return number << INDEX_BITS | GONE


def is_gone(locations: np.ndarray) -> np.ndarray:
    """Return which locations are those of rows without a record, though logs or the base have one: bool (n,)."""
    return (locations >= 0) & (locations & GONE == GONE)


def locations_of(number: int, first: int, count: int) -> np.ndarray:
    """Return the locations of so many records of a run, from one on: int64 (count,)."""
    start = (number << INDEX_BITS) + first
    return np.arange(start, start + count)
