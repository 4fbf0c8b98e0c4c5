"""`BackgroundCompaction`: compacts and merges a table's files in the background, between commits."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from embedrock.storage.cache import DIRTY
from embedrock.storage.commit import bytes_for
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.ram_layout import INDEX_SHARE
from embedrock.store.compaction import CompactionStopped, compact, let_commits_pass
from embedrock.store.folding import fold
from embedrock.store.pieces import CompactionGoal, mean_age
from embedrock.store.record_store import PIECE_BYTES, RecordStore
from embedrock.system import platform
from embedrock.system.sizes import format_bytes

FULLNESS = 0.95  # of the log index: compaction begins if the next commit would exceed it
PART_FULLNESS = 1 / 16  # of the log index, freed each time
LOG_SHARE = 1.5  # largest size of logs, over that of the base
WHOLE_LOG_SHARE = 0.6  # largest excess of files over rows, if all is compacted at once ...
REPLACED_SHARE = 0.8  # ... or, with the next commit's bytes, if a commit may write all rows
LEAST_CHANGED = 4  # a commit writes all rows if at least 1/LEAST_CHANGED of them has changed
LEAST_OVERLAY_BYTES = 64 << 10  # smaller log indexes wait, and ...
LEAST_COMPACTED_BYTES = 64 << 20  # ... so do smaller logs
BYTES_PER_SECOND = 100e6  # of background writes, which leaves most of a disk to training
FOLDED_AT_ONCE = 4 << 20  # of logs, merged before a commit ends; larger ones are merged in the background


class BackgroundCompaction:
    """Background compaction and merging of a table's files. An error is reported as a warning: nothing has changed.

    Attributes:
        failed: number of errors.
        compaction: thread of the last compaction.
    """

    def __init__(self, path: str) -> None:
        self.failed = 0
        self.compaction: threading.Thread | None = None
        self._path, self._merging, self._stopping = path, self.compaction, threading.Event()
        self._has_warned = False  # that the index is too large
        self._rows_in_logs = WeakKeyDictionary[RecordStore, int]()  # as of the last commit

    def after_commit(self, tiers: Sequence[DiskBackend]) -> None:
        """Compact in the background if logs take too much RAM or disk."""
        goals = {tier.store: self._goal(tier) for tier in tiers}
        if due := {store: goal for store, goal in goals.items() if goal is not None}:
            self.compact(due)
        self.fold([tier.store for tier in tiers])
        for tier in tiers:
            self._check_index(tier)

    def compact(self, goals: Mapping[RecordStore, CompactionGoal | None]) -> None:
        """Compact logs into sorted segments in the background, store by store, unless it already runs.

        Args:
            goals: goal of each store; None: compact all logs.
        """
        self.compaction = self._start(self.compaction, "embedrock-compact", self._compact, goals)

    def _compact(self, goals: Mapping[RecordStore, CompactionGoal | None]) -> None:
        try:
            for store, goal in goals.items():
                compact(store, BYTES_PER_SECOND, self._stopping.is_set, goal)
        finally:
            platform.give_back_memory()  # or each thread of commits and compactions leaves some behind

    def fold(self, stores: Sequence[RecordStore]) -> None:
        """Merge many logs into few: small ones directly, large ones in the background."""
        self._try(self._merge, stores)

    def _merge(self, stores: Sequence[RecordStore]) -> None:
        large = [store for store in stores if fold(store, FOLDED_AT_ONCE, lambda: None)]
        if large:
            self._merging = self._start(self._merging, "embedrock-fold", self._merge_large, large)

    def _merge_large(self, stores: Sequence[RecordStore]) -> None:
        for store in stores:
            fold(store, None, lambda store=store: self._pace(store))

    def _pace(self, store: RecordStore) -> None:
        """Pause to leave the disk to other work; called every few MB."""
        if not store.flush:
            self._stopping.wait(PIECE_BYTES / BYTES_PER_SECOND)
        let_commits_pass(store, self._stopping.is_set)
        if self._stopping.is_set():
            raise CompactionStopped

    def _start(
        self, running: threading.Thread | None, name: str, function: Callable[..., object], *args: Any
    ) -> threading.Thread | None:
        """Call a function in a thread of that name, unless one is running, and return the thread."""
        if running is not None and running.is_alive():
            return running
        self._stopping.clear()
        thread = threading.Thread(target=self._try, args=(function, *args), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads: the next commit tries again
            self.failed += 1
            return running
        return thread

    def _try(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except CompactionStopped:
            pass
        except Exception as error:
            self.failed += 1
            warnings.warn(
                f"{self._path} could not be compacted, and is as it was: {error}. It is tried again after the next "
                "commit.",
                RuntimeWarning,
                stacklevel=1,
            )

    def stop(self) -> None:
        """Stop background work, and remove its unfinished files."""
        threads = [each for each in (self.compaction, self._merging) if each is not None]
        if threads:
            self._stopping.set()
        for thread in threads:
            thread.join()
        self.compaction = self._merging = None

    def _goal(self, tier: DiskBackend) -> CompactionGoal | None:
        """Return the goal of compaction; None: neither the log index nor the logs are too large."""
        store = tier.store
        with store.lock:
            rows, base = store.log_index.count, sum(run.file.size for run in store.base.runs)
            logs = [(run.number, run.file.size) for run in store.delta]
            age, nbytes = mean_age(store.base, logs, store.content.count), store.log_index.nbytes
        room, before = store.log_index.most_rows, self._rows_in_logs.get(store, rows)
        self._rows_in_logs[store] = rows
        most = FULLNESS * room - min(max(0, rows - before), room // 2)  # as many may come until the next commit
        # Logs that are dropped one after another have half the age of the oldest, on average.
        goal = CompactionGoal(
            max(0, int(most - PART_FULLNESS * room)), int(LOG_SHARE * max(base, LEAST_COMPACTED_BYTES) / 2)
        )
        is_crowded = nbytes > LEAST_OVERLAY_BYTES and rows > most
        is_old = _should_compact_all(tier) if store.some_are_gone else age > goal.age
        return goal if is_crowded or is_old or store.content.dropped else None

    def _check_index(self, tier: DiskBackend) -> None:
        """Warn once if the index of stored rows is larger than the RAM reserved for it."""
        index, kept = tier.store.base.nbytes, max(tier.budget_bytes // INDEX_SHARE, LEAST_OVERLAY_BYTES)
        if index > kept and not self._has_warned:
            self._has_warned = True
            setting = tier.budget.pool.setting(tier.budget.nbytes, index * INDEX_SHARE)
            warnings.warn(
                f"{self._path}: the index of {tier.store.base.count:,} rows takes {format_bytes(index)} of RAM, "
                f"more than the {format_bytes(kept)} that are kept for it of {tier.budget}."
                + (f" {setting.remedy}" if setting else ""),
                RuntimeWarning,
                stacklevel=1,
            )


def replaces_files(tier: DiskBackend) -> bool:
    """Return whether the next commit should write all rows of a backend, so that it needs no older file.

    It should if all rows are in RAM, many have changed, and compaction would otherwise rewrite all of them.
    """
    if not _may_be_written_whole(tier):
        return False
    changed = int(np.count_nonzero(tier.cache.flags[: tier.cache.used_slots] & DIRTY))
    # Counts its own log, and that of the next commit. Otherwise that commit would write all rows.
    return LEAST_CHANGED * changed >= tier.count and _is_wasteful(tier, REPLACED_SHARE, 2 * changed)


def _may_be_written_whole(tier: DiskBackend) -> bool:
    rows, store = tier.count, tier.store
    return store.some_are_gone and tier.cache.count >= rows and 2 * rows <= store.log_index.most_rows


def _is_wasteful(tier: DiskBackend, share: float, written: int = 0) -> bool:
    """Return whether files exceed the bytes of the rows by a share, once `written` rows are in a log."""
    least = max(tier.count * tier.spec.record_bytes, LEAST_COMPACTED_BYTES)
    return tier.store.disk_bytes + bytes_for(tier, written - tier.count) > share * least


def _should_compact_all(tier: DiskBackend) -> bool:
    """Return whether the files of a backend with deleted rows are too large, and there is no second base."""
    share = WHOLE_LOG_SHARE if _may_be_written_whole(tier) else WHOLE_LOG_SHARE / 2
    with tier.store.lock:
        base, published = tier.store.base.runs, tier.store.content.base
        is_published = [segment.path for segment in base] == [entry.file for entry in published]
    return is_published and _is_wasteful(tier, share)
