"""`RecordStore`: files of records of one size, and the location of each row's newest record."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.io.vfs import DIRECT_BYTES, System
from embedrock.kernels.constants import RUN_SHIFT
from embedrock.kernels.keys import PART_BITS
from embedrock.store import manifest as manifests
from embedrock.store.base import Base
from embedrock.store.change_lists import decode, distinct, encode
from embedrock.store.folder import Folder
from embedrock.store.log_index import LogIndex
from embedrock.store.manifest import KEYS, SegmentEntry, StoreEntry
from embedrock.store.reading import read_records
from embedrock.store.segments import CRC_BYTES, Log, Segment, damaged, piece_rows
from embedrock.system.arena import cut, joined, returned
from embedrock.system.scopes import on_failure

ALL_IDS = -(2**63), 2**63
GONE = (1 << RUN_SHIFT) - 1  # stands for a position in a segment: the row was deleted when that segment was the newest


class CommitSnapshot:
    """Snapshot of a store, which a running commit publishes.

    Attributes:
        base, delta: the segments of earlier commits.
        logs: open logs of this commit. Dirty rows that are still in the cache go to the last one.
        is_whole: whether the logs have all rows, so that the commit needs no earlier segment.
        replaced: segments without use once the commit is published, empty logs too.
        parts, dropped: see `StoreEntry`.
        changed_ids: ids of the rows that changed, if it is whole: its logs get others too.
    """

    def __init__(self, store: RecordStore, logs: Sequence[Log], is_whole: bool = False) -> None:
        self.store, self.logs, self.is_whole = store, list(logs), is_whole
        self.replaced: Sequence[Segment] = ()
        self.changed_ids = list(ids_of_logs(logs)) if is_whole else []
        self.handed = len(store.handed)
        self.base = () if is_whole else store.base.runs
        self.delta = () if is_whole else tuple(store.delta)
        self.parts, self.dropped = store.parts, store.dropped
        store.snapshot_files = {segment.path for segment in (*self.base, *self.delta, *self.logs)}

    @property
    def log(self) -> Log:
        """Return the log that takes the commit's rows."""
        return self.logs[-1]

    def content(self) -> StoreEntry:
        """Return the store's entry in the commit, once its logs are sealed."""
        entries = [log.entry or log.seal() for log in self.logs if not log.is_empty]
        logs = [*(segment.number for segment in self.delta), *(log.number for log in self.logs if not log.is_empty)]
        delta = tuple(segment.entry for segment in self.delta if segment.entry)
        files = {"base": tuple(_entry_of(segment, logs) for segment in self.base), "delta": (*delta, *entries)}
        return replace(self.store.content, **files, parts=self.parts, dropped=tuple(sorted(self.dropped)))

    def changed(self) -> np.ndarray | None:
        """Return the ids of rows that it writes or deletes, int64 (n,), ascending, before its logs are sealed.

        None: any row may have changed.
        """
        handed = self.store.handed[: self.handed]
        if None in handed:
            return None
        of_base = [decode(*one) for one in handed if one]
        return distinct([*of_base, *(self.changed_ids if self.is_whole else ids_of_logs(self.logs))])

    def rewrite(self, only_broken: bool) -> None:
        """Rewrite the rows of its logs to new logs: of all logs, or of broken ones."""
        for number, log in enumerate(self.logs):
            if log.broken or not only_broken:
                self.logs[number] = self._rewritten(log)

    def _rewritten(self, log: Log) -> Log:
        """Return a new log that replaces another, with its number and the newest record of each of its rows."""
        store = self.store
        with store.lock:
            made = store.create_log(log.number)
            # Rows with newer records in a later log count too: this commit needs the records of its snapshot.
            ids, old = newest_of([log], store.base)
            ids, old = ids[~is_gone(old)], old[~is_gone(old)]
            with on_failure(lambda: store.table_folder.unlink([made.path], lambda: False)), on_failure(made.close):
                store.copy(ids, old, made)
                store.move(ids, old, made.locations())
                made.gone = log.gone
                made.noted.append(log.gone)
            store.logs[store.logs.index(log)] = made
            store.take(made)
            store.table_folder.unlink([log.path], lambda: log.entry is not None)
            return made

    def take_published(self, content: StoreEntry) -> None:
        """Register the snapshot as published. Caller holds the store's lock."""
        store = self.store
        if self.is_whole:
            self.replaced = [*store.base.runs, *store.delta]
            store.base, store.delta = Base([]), []
        self.replaced = [*self.replaced, *(log for log in self.logs if log.is_empty)]
        for log in self.logs:  # their indexes have all that is needed
            log.noted.clear()
        store.delta = [*store.delta, *(log for log in self.logs if not log.is_empty)]
        store.logs = [log for log in store.logs if log not in self.logs]
        store.content, store.snapshot_files = content, set()
        store.handed = store.handed[self.handed :]
        store.base_is_ahead = store.base_is_ahead and store.base.runs != self.base

    def forget_traces(self, rest: Callable[[float], None]) -> None:
        """Remove deleted rows from the log index, after the published snapshot has all rows.

        Their older records are dropped too. Other threads may use the store meanwhile. `rest` is called between parts,
        with the time when the part began.
        """
        store = self.store
        if self.is_whole:
            gone = self._deleted_before(rest)
            # Not in the index's order: inserts of others would crowd the rest of it.
            parts = -(-len(gone) // SCAN_ROWS)
            for first in range(parts):
                started, ids = time.thread_time(), np.ascontiguousarray(gone[first::parts])
                with store.lock:
                    locations = store.log_index.find(ids)
                    is_old = self._are_before(locations)
                    store.log_index.remove(ids[is_old], locations[is_old])
                rest(started)
            with store.lock:  # the index keeps its memory, because it fills again until the next such commit
                store.look_for_gone()
        store.unblock_compaction()

    def _deleted_before(self, rest: Callable[[float], None]) -> np.ndarray:
        def parts() -> Iterator[np.ndarray]:
            started = time.thread_time()
            for ids, locations in self.store.log_parts():
                yield ids[self._are_before(locations)]
                rest(started)
                started = time.thread_time()

        return joined(parts(), self.store.log_index.count, "rows without a record")

    def _are_before(self, locations: np.ndarray) -> np.ndarray:
        return (locations >= 0) & (locations >> RUN_SHIFT < self.logs[0].number)


class LocatedRecords(NamedTuple):
    """Locations of records, with the segments to read them from. The files stay open meanwhile.

    Attributes:
        positions: positions of the found ids among the requested ones.
    """

    positions: np.ndarray
    ids: np.ndarray
    locations: np.ndarray
    runs: Mapping[int, Segment]


class RecordStore:
    """Log-structured store of records of one size, of a table alone or of a pool. Any thread may call it.

    Args:
        content: its entry in the commit to start from.
        before: the store of an earlier commit, whose open files and indexes are used. It stays as it is.

    Attributes:
        lock: lock of all attributes, that of the folder.
        content: its entry in the last commit.
        compacting: lock held by the running compaction.
        folding: lock held while logs are merged, or chosen for a compaction.
        compacted_below: logs below this number belong to the running compaction.
        flush: whether the compaction ignores its rate limit and waiting commits.
        commit_is_awaited: whether a thread waits for a commit. Compaction then leaves the disk to it.
        base_is_ahead: whether the base lacks committed records of rows with newer ones, or has the newer ones. The next
            commit publishes both.
        some_are_gone: whether the log index has deleted rows.
        parts: number of members that a pool has ever had. None for a table alone.
        dropped: numbers of a pool's dropped members. Some of their records may remain.
        counts: records and bytes read and written since the store was opened.
        buffer_bytes: limit of RAM for rows on their way to or between files.
        snapshot_files: names of files that the running commit may publish.
        withheld: ids, ascending, that have a record in the commit to start from, and were deleted since.
        handed: encoded ids, and their number, of rows whose uncommitted records were compacted into the base. None: of
            any rows.
    """

    def __init__(self, table_folder: Folder[Any], content: StoreEntry, before: RecordStore | None = None) -> None:
        self.table_folder, self.lock = table_folder, table_folder.lock
        self.system, self.folder = table_folder.system, table_folder.folder
        self.compacting, self.flush, self.commit_is_awaited = threading.Lock(), False, False
        self.folding, self.compacted_below = threading.Lock(), 0
        self._is_compaction_blocked, self.buffer_bytes = False, 1 << 62
        self.counts = {"reads": 0, "read_requests": 0, "bytes_read": 0, "bytes_written": 0, "read_seconds": 0.0}
        self.counts |= {"bytes_compacted": 0}
        self.withheld = np.empty(0, np.int64)
        self.snapshot_files = set[str]()
        self.handed = list[tuple[bytes, int] | None]()
        segments: dict[int, Segment] = {}
        known = {} if before is None else {one.path: one for one in (*before.base.runs, *before.delta)}
        base, delta = (
            [self._open_segment(entry, content, segments, known) for entry in entries]
            for entries in (content.base, content.delta)
        )
        named = sum(entry.gone for entry in content.delta)
        if before is not None and before.is_continued_by(content):
            index, log_index, new = before.base, before.log_index.copy(), delta[len(before.delta) :]
        else:
            for segment, entry in zip(base, content.base, strict=True):
                segment.folded_below = delta[entry.folded].number if entry.folded < len(delta) else len(segments)
            most = min(sum(entry.count for entry in content.delta), content.count) + named
            index, log_index, new = Base(base), LogIndex(most), delta
        for segment in new:
            for part in _index_of(segment):
                log_index.insert(*newer_than(index, segment, *part))
        log_index.fit()
        self._check_count(content, index, log_index, named)
        self.content, self.runs, self.log_index, self._segments_made = content, segments, log_index, len(segments)
        self.base, self.delta = index, delta
        self.logs: list[Log] = []
        self._active: Log | None = None
        self.base_is_ahead, self.some_are_gone = False, named > 0
        self.parts, self.dropped = content.parts, frozenset(content.dropped)

    def _check_count(self, content: StoreEntry, base: Base, log_index: LogIndex, gone: int) -> None:
        """Raise `CorruptTableError` if the files cannot hold as many rows as the commit says.

        An exact count of rows in both indexes needs a pass over all rows. So other code checks it in its own pass.
        """
        low, high = max(base.count, log_index.count, gone) - gone, base.count + log_index.count
        low = low if content.parts is None else 0  # records of dropped members may remain
        if not low <= content.count <= high:
            where = manifests.path_of(self.folder, content.commit)
            raise damaged(where, f"`count` in [{low}, {high}], as the indexes of its files say", content.count)

    def _open_segment(
        self, entry: SegmentEntry, content: StoreEntry, segments: dict[int, Segment], known: Mapping[str, Segment]
    ) -> Segment:
        segment, number = known.get(entry.file), len(segments)
        if segment is None or segment.entry != entry:
            segment = open_run(self.system, self.folder, entry, content, number)
        elif segment.number != number:
            segment = copy.copy(segment)
            segment.number = number
        segments[number] = segment
        return segment

    def is_continued_by(self, content: StoreEntry) -> bool:
        """Return whether a later commit has the same sorted segments, and the same logs and more."""
        own, logs = self.content, len(self.content.delta)
        is_same = own.base == content.base and own.delta == content.delta[:logs] and len(self.delta) == logs
        numbers = [segment.number for segment in (*self.base.runs, *self.delta)]
        return is_same and numbers == list(range(len(numbers))) and not len(self.withheld)

    def close(self, but: Iterable[RecordStore] = ()) -> None:
        """Close its files, except those that other stores use."""
        kept = {id(segment.file) for store in but for segment in store.runs.values()}
        with self.lock:
            for segment in self.runs.values():
                if id(segment.file) not in kept:
                    segment.file.close()
            self.runs = {}

    # ---------------------------------------------------------------- records

    def locate(self, ids: np.ndarray) -> np.ndarray:
        """Return the location of each id's newest record, int64 (n,). -1: none."""
        with self.lock:
            locations = self.base.find(ids, self.log_index.find(ids))
            if self.some_are_gone:
                locations[is_gone(locations)] = -1
            return locations

    def located(self, ids: np.ndarray) -> LocatedRecords:
        """Return the locations of the ids that have records, for `read`."""
        with self.lock:
            locations = self.locate(ids)
            there = (locations >= 0).nonzero()[0]
            return LocatedRecords(there, ids[there], locations[there], self.runs)  # `runs` never changes in place

    def read(self, found: LocatedRecords, records: np.ndarray, slots: np.ndarray) -> None:
        """Copy records to ``records[slots]``, uint8 (n, record_bytes)."""
        started = time.perf_counter()
        requests, nbytes = read_records(self.system, found.runs, found.locations, found.ids, records, slots)
        self.add(
            reads=len(slots), read_requests=requests, bytes_read=nbytes, read_seconds=time.perf_counter() - started
        )

    def add(self, **counts: float) -> None:
        with self.lock:
            for name, count in counts.items():
                self.counts[name] += count

    def piece_rows(self, most_bytes: int) -> int:
        """Return the rows to copy at a time: about `most_bytes`, or fewer if RAM is short."""
        nbytes = max(self.buffer_bytes // PIECES, LEAST_PIECE_BYTES)
        return piece_rows(self.content.record_bytes, min(most_bytes, nbytes))

    def copy(
        self, ids: np.ndarray, locations: np.ndarray, log: Log, pace: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Append records to a log, copied from other segments.

        Args:
            log: a log that only the caller uses.
            pace: called every few MB with the number of bytes written, and may raise.
        """
        rows = self.piece_rows(PIECE_BYTES)
        for start in range(0, len(ids), rows):
            part, slots = ids[start : start + rows], np.arange(len(ids[start : start + rows]))
            records = returned((len(part), self.content.record_bytes), np.uint8, "copies of records")
            # Short-lived threads have their own staging memory.
            staging = STAGED_PIECES * records.nbytes
            read_records(self.system, self.runs, locations[start : start + rows], part, records, slots, staging)
            sealed = self.seal(records, slots, part)
            log.append(sealed, part)
            self.add(bytes_written=sealed.nbytes)
            pace(sealed.nbytes)

    def append(self, records: np.ndarray, slots: np.ndarray, ids: np.ndarray) -> None:
        """Append ``records[slots]``, the newest records of `ids`, to the log of the next commit."""
        sealed = self.seal(records, slots, ids)
        with self.lock:
            self.place(ids, self.append_sealed(self._open_log(), sealed, ids))

    def seal(
        self, records: np.ndarray, slots: np.ndarray, ids: np.ndarray, room: np.ndarray | None = None
    ) -> np.ndarray:
        """Return ``records[slots]`` in the format of files, uint8 (n, record_bytes + 4).

        `room` is memory of `room_for`.
        """
        room = self.room_for(len(slots)) if room is None else room
        sealed = room[: len(slots)]
        kernels.cpu.launch(kernels.cpu.storage.seal, records, slots, ids, sealed)
        return sealed

    def room_for(self, rows: int) -> np.ndarray:
        """Return memory for some sealed rows."""
        stride = self.content.record_bytes + CRC_BYTES
        return returned((rows, stride), np.uint8, "a copy of records")

    def append_sealed(self, log: Log, sealed: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Append sealed records to a log, and return their locations. One thread at a time may do so."""
        return log.locations(log.append(sealed, ids), len(ids))

    def place(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Register the locations of newest records that were just appended."""
        with self.lock:
            self.counts["bytes_written"] += len(ids) * (self.content.record_bytes + CRC_BYTES)
            if self.some_are_gone and len(ids):  # skip rows deleted since the commit wrote them
                here = self.log_index.find(ids) >> RUN_SHIFT <= locations >> RUN_SHIFT
                ids, locations = ids[here], locations[here]
            self.log_index.insert(ids, locations)

    def discard(self, ids: np.ndarray) -> None:
        """Delete rows, without repeats. The next commit's files have no records of them."""
        if not len(ids):
            return
        with self.lock:
            log, self.some_are_gone = self._open_log(), True
            log.noted.append(ids)
            self.log_index.insert(ids, np.full(len(ids), gone_at(log.number)))

    def withhold(self, ids: np.ndarray, is_writer: bool) -> np.ndarray:
        """Hide rows that were deleted after the commit to start from. Return the ids that had a record."""
        with self.lock:
            ids = ids[self.locate(ids) >= 0]
            self.withheld = np.union1d(self.withheld, ids)
            if is_writer:
                self.discard(ids)
            elif len(ids):  # a reader makes no commit, so no log needs the ids
                self.some_are_gone = True
                self.log_index.insert(ids, np.full(len(ids), gone_at(self.next_run())))
            return ids

    def look_for_gone(self) -> None:
        named = (segment.entry.gone for segment in self.delta if segment.entry is not None)
        self.some_are_gone = any(named) or any(log.noted.count for log in self.logs)

    def _tombstones_of(self, log: Log, have_newer: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the deleted ids of a log that have no newer record."""
        # Ids are unordered until the log is sealed, and others may change the index. Parts save RAM: all rows may be
        # deleted.
        parts = (part for ids in log.noted for part in cut(ids, SCAN_ROWS))
        gone = (part[self.log_index.find(part) == gone_at(log.number)] for part in parts)
        return joined((part[~have_newer(part)] for part in gone), log.noted.count, "rows without a record")

    def _open_log(self) -> Log:
        """Return the log of the next commit, new or with earlier rows of it."""
        if self._active is None:
            log = self.create_log(self.next_run())
            self.take(log)
            self.logs.append(log)
            self._active = log
        return self._active

    def create_log(self, number: int) -> Log:
        """Return a new log with a number. No reader knows it yet."""
        name = self.free_name("delta", ".dlt")
        return Log.create(self.system, self.folder, name, self.content.uuid, self.content.record_bytes, number)

    def next_run(self) -> int:
        with self.lock:
            self._segments_made += 1
            return self._segments_made

    def take(self, segment: Segment) -> None:
        """Register a segment for reads."""
        with self.lock:
            self.runs = self.runs | {segment.number: segment}

    def drop(self, segments: Sequence[Segment]) -> None:
        """Unregister segments. Files close after the last read."""
        numbers = {segment.number for segment in segments}
        with self.lock:
            self.runs = {number: segment for number, segment in self.runs.items() if number not in numbers}

    def free_name(self, kind: str, suffix: str = "") -> str:
        """Return an unused file name of the next commit. See `Folder.free_name`."""
        return self.table_folder.free_name(f"{kind}/{self.content.commit + 1:010d}", suffix)

    def log_parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the ids and locations of rows in the log index. Other threads may change it between the parts."""
        last = None
        while True:
            with self.lock:
                ids, locations = self.log_index.behind(last, SCAN_ROWS)
            if not len(ids):
                return
            last = int(ids[-1])
            yield ids, locations

    def all_ids(
        self, lo: int, end: int, size: int, others: Iterable[np.ndarray] = ()
    ) -> tuple[int, Iterator[np.ndarray]]:
        """Return the number of ids that have records, and iterate over those in ``[lo, end)``, ascending.

        Ids of `others` without a record count too. At most `size` come at a time. Later changes are not in them.
        """
        above, gone = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        with self.lock:  # or a commit or a compaction might move rows from one to another meanwhile
            base = self.base
            for ids, at in self.log_parts():
                in_base, are_gone = base.find(ids) >= 0, is_gone(at)
                above.append(ids[~in_base & ~are_gone])
                gone.append(ids[in_base & are_gone])
            above += [ids[self.locate(ids) < 0] for ids in others]
        rest, without, below = distinct(above), np.concatenate(gone), base.id_batches(lo, end, size)
        return base.count + len(rest) - len(without), _merged(below, without, within(rest, lo, end), size)

    @property
    def disk_bytes(self) -> int:
        with self.lock:
            return sum(segment.file.size for segment in (*self.base.runs, *self.delta, *self.logs))

    # ---------------------------------------------------------------- commits

    def keep_unfolded(self) -> bool:
        """Block compaction and merges until the next commit ends. Return False if one is running."""
        if not self.compacting.acquire(blocking=False):
            return False
        if not self.folding.acquire(blocking=False):
            self.compacting.release()
            return False
        self._is_compaction_blocked = True
        return True

    def unblock_compaction(self) -> None:
        if self._is_compaction_blocked:
            self._is_compaction_blocked = False
            self.folding.release()
            self.compacting.release()

    def freeze(self, have_newer: Callable[[np.ndarray], np.ndarray]) -> CommitSnapshot:
        """Begin a commit. Records appended from now on belong to the next one.

        After `keep_unfolded`, the commit writes all rows.

        Args:
            have_newer: returns which ids have records that this commit writes, bool (n,).
        """
        with self.lock:
            for log in self.logs:
                if log.noted.count and log.entry is None:
                    log.gone = self._tombstones_of(log, have_newer)
            self._open_log()
            self._active = None
            return CommitSnapshot(self, self.logs, self._is_compaction_blocked)

    def as_committed(self) -> CommitSnapshot:
        """Return a snapshot without uncommitted rows."""
        with self.lock:
            made = CommitSnapshot(self, ())
            made.handed = 0
            made.parts, made.dropped = self.content.parts, self.dropped.intersection(self.content.dropped)
            return made

    def undo_steps(self) -> None:
        """Clean up after a failed commit. The next commit takes the rows that it wrote."""
        with self.lock:
            empty = [log for log in self.logs if log.is_unused and log is not self._active]
            self.logs = [log for log in self.logs if log not in empty]
            last = self.logs[-1] if self.logs else None
            # A log that was compacted into a sorted segment takes no rows: they would count as older than the segment.
            if self._active is None and last is not None and last.can_grow:
                is_newest = all(segment.folded_below <= last.number for segment in self.base.runs)
                self._active = last if is_newest else None
            spared, self.snapshot_files = self.snapshot_files - self.needed(), set()
            self.unblock_compaction()
            self.drop(empty)
            for log in empty:  # no reader knows it, and the traceback of an error would keep it open
                log.close()
            self.table_folder.unlink([*spared, *(log.path for log in empty)])

    def give_up(self) -> None:
        """Discard everything uncommitted."""
        with self.lock:
            logs, self.logs, self._active = self.logs, [], None
        self.remove(logs)

    def forget(self, segments: Sequence[Segment]) -> None:
        """Remove compacted segments that no commit names. Retention removes the others."""
        with self.lock:
            self._hand_over(ids_of_logs(log for log in self.logs if log in segments))
            self.logs = [log for log in self.logs if log not in segments]
            self._active = self._active if self._active in self.logs else None
            self.drop(segments)
            self.table_folder.unlink([segment.path for segment in segments if segment.path not in self.snapshot_files])

    def _hand_over(self, parts: Iterable[np.ndarray]) -> None:
        """Keep the ids of logs that no commit will name, for its list of changes."""
        ids = distinct(parts)
        if not len(ids):
            return
        if not self.snapshot_files and None not in self.handed:  # no running commit counts them
            ids, self.handed = distinct([ids, *(decode(*one) for one in self.handed if one)]), []
        coded = encode(ids), len(ids)
        is_too_much = sum(len(data) for data, _ in filter(None, [*self.handed, coded])) > self.buffer_bytes
        self.handed.append(None if is_too_much else coded)

    def close_logs(self) -> None:
        """Close the open log for appends. Later records are newer than all logs."""
        with self.lock:
            self._active = None

    def replace(
        self, segments: Sequence[Segment], made: Segment, ids: np.ndarray, old: np.ndarray, gone: np.ndarray
    ) -> None:
        """Replace neighbours in `delta` by one segment made from them.

        Args:
            segments: the old segments. Files that no commit names are removed.
            made: the new segment, with the number of the last old one.
            ids: ids of its records, without repeats.
            old: their old locations.
            gone: ids of its tombstones.
        """
        with self.lock:
            for segment in segments:
                self.move(gone, np.full(len(gone), gone_at(segment.number)), np.full(len(gone), gone_at(made.number)))
            self.move(ids, old, made.locations())
            first = self.delta.index(segments[0])
            self.delta[first : first + len(segments)] = [made]
            self.drop(segments)
            self.take(made)
            committed = {entry.file for entry in self.content.delta}
            self.table_folder.unlink(
                [segment.path for segment in segments if segment.path not in committed | self.snapshot_files]
            )

    def move(self, ids: np.ndarray, old: np.ndarray, new: np.ndarray) -> None:
        """Change the locations of ids that still have the old ones. Others have newer records."""
        here = self.log_index.find(ids) == old
        self.log_index.insert(ids[here], new[here])

    def remove(self, segments: Sequence[Segment]) -> None:
        """Unregister segments, and remove their files unless a commit names them."""
        self.drop(segments)
        self.table_folder.unlink(
            [segment.path for segment in segments], lambda: any(segment.entry for segment in segments)
        )

    def needed(self) -> set[str]:
        with self.lock:
            return {segment.path for segment in (*self.base.runs, *self.delta, *self.logs)}


def _merged(parts: Iterable[np.ndarray], gone: np.ndarray, rest: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield the ids of `parts` that are not gone, and those of `rest`: all ascend."""
    for ids in parts:
        below = int(np.searchsorted(rest, ids[-1]))
        ids = ids[~np.isin(ids, gone)] if len(gone) else ids
        yield from cut(np.sort(np.concatenate([ids, rest[:below]])) if below else ids, size)
        rest = rest[below:]
    yield from cut(rest, size)


def ids_of_logs(logs: Iterable[Log]) -> Iterator[np.ndarray]:
    """Iterate over the ids of records in logs and over the deleted ids, in any order."""
    for log in logs:
        yield from log.id_parts()
        yield from log.noted


def within(ids: np.ndarray, lo: int, end: int) -> np.ndarray:
    """Return the ascending ids in [lo, end)."""
    return ids[np.searchsorted(ids, lo) : np.searchsorted(ids, end - 1, side="right")]


def keys_of_part(number: int) -> tuple[int, int]:
    """Return the first key of a pool's member, and the end of its keys, at most `KEYS`."""
    return number << PART_BITS, min((number + 1) << PART_BITS, KEYS)


PIECE_BYTES = 4 << 20  # bytes of records copied at a time
STAGED_PIECES = 2  # blocks read at a time, in pieces: other records lie between
PIECES = 4  # pieces that a commit or compaction has in RAM, about
LEAST_PIECE_BYTES = 512 << 10  # the least direct write, see `io/vfs.py`; smaller pieces cost too many calls
SCAN_ROWS = 1 << 13  # rows scanned under the lock at a time: half a millisecond


def open_run(system: System, folder: str, entry: SegmentEntry, content: StoreEntry, number: int) -> Segment:
    """Open a segment of a commit. Large files bypass the page cache, because reads are random."""
    direct = entry.size >= DIRECT_BYTES
    return Segment.open(system, folder, entry, content.uuid, content.record_bytes, number, direct)


def newer_than(base: Base, log: Segment, ids: np.ndarray, locations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and locations of a log that were not compacted into the base."""
    folded = base.has_folded(ids, log.number)
    return (ids[~folded], locations[~folded]) if folded.any() else (ids, locations)


def newest_of(logs: Sequence[Segment], base: Base) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of logs, ascending, and the newest location of each in these logs.

    Rows that were compacted into the base are left out.
    """
    parts = [newer_than(base, log, *part) for log in logs for part in _index_of(log)]
    ids, where = (np.concatenate(each) for each in zip(*parts, strict=True))
    ids, index = np.unique(ids[::-1], return_index=True)
    return ids, where[::-1][index]


def _index_of(log: Segment) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    # Ids and locations of its records, then its tombstones.
    ids, gone = (log.ids(), log.gone) if isinstance(log, Log) else (log.index(), log.gone_ids())
    yield ids, log.locations()
    yield gone, np.full(len(gone), gone_at(log.number))


def _entry_of(segment: Segment, logs: Sequence[int]) -> SegmentEntry:
    # Entry of a sorted segment in a commit with these logs.
    assert segment.entry is not None
    return replace(segment.entry, folded=sum(number < segment.folded_below for number in logs))


def gone_at(number: int) -> int:
    """Return the location of a row that was deleted when the segment of that number was the newest."""
    return number << RUN_SHIFT | GONE


def is_gone(locations: np.ndarray) -> np.ndarray:
    """Return which locations belong to deleted rows, bool (n,)."""
    return (locations >= 0) & (locations & GONE == GONE)
