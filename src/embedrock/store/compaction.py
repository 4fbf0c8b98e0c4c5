"""Compaction of the logs of past commits into new sorted segments, and bulk load of sorted records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from embedrock.io.vfs import retried
from embedrock.kernels.constants import RUN_SHIFT
from embedrock.kernels.keys import PART_BITS
from embedrock.store import folder as folders
from embedrock.store import pieces
from embedrock.store.base import Base
from embedrock.store.pieces import CompactionGoal, KeyRange, bounds, choose
from embedrock.store.record_store import SCAN_ROWS, RecordStore, is_gone, keys_of_part, open_run
from embedrock.store.segments import CRC_BYTES, Log, Segment
from embedrock.system.arena import cut, joined, returned, taken
from embedrock.system.scopes import on_failure
from embedrock.system.spans import spanned

CHUNK_BYTES = 128 << 20  # bytes of records in a sorted segment, at most
# Smaller bases have smaller segments, and so the same number. With 8 segments instead of 61, each compaction freed
# large parts of the log index, and wrote a fifth more.
CHUNKS, SMALL_CHUNK_BYTES = 64, 8 << 20
LEAST_CHUNK_ROWS = 64  # rows that a segment may have, however large they are; a power of two
PARTS = 16  # steps in which a full log index is compacted
NO_AGE = 1 << 62  # for a goal about rows only
SUBJECT = "compaction"
PAUSE_SECONDS = 0.002  # seconds between two checks whether a commit has ended
PROCESSOR_SHARE = 1 / 2  # of the time, if a rate is set: otherwise training steps meet one key range after another


class CompactionStopped(Exception):
    """Stop of a compaction on request. Nothing has changed."""


def let_commits_pass(store: RecordStore, stops: Callable[[], bool]) -> None:
    """Wait while another thread waits for a commit, which then has the disk."""
    while store.commit_is_awaited and not store.flush and not stops():
        time.sleep(PAUSE_SECONDS)


class CompactionSource(NamedTuple):
    """Input of a compaction: rows of logs, over the base.

    Attributes:
        base: the old sorted segments.
        first_kept: number of the first segment that is not compacted.
        ranges: ranges of ids, ascending. Each sorted segment lies in one of them, or outside all.
        ids: ids of rows in logs and in these ranges, ascending.
        locations: the locations of `ids`.
        fresh: those of `ids` that the base does not have.
        gone: ids in the base that were deleted, ascending.
        needed: numbers of segments below `first_kept` that have rows in other ranges.
        taken: ids and locations of all rows of logs in the ranges, with deleted rows.
        is_ahead: whether no commit has these rows, or some of the records.
        dropped: numbers of dropped members of a pool, whose records are left out.
    """

    base: Base
    first_kept: int
    ranges: tuple[tuple[int, int], ...]
    ids: np.ndarray
    locations: np.ndarray
    fresh: np.ndarray
    gone: np.ndarray
    needed: frozenset[int]
    taken: tuple[np.ndarray, np.ndarray]
    is_ahead: bool
    dropped: frozenset[int]

    def lacks_records_in(self, lo: int, hi: int) -> bool:
        """Return whether some records of ids in ``[lo, hi)`` may be left out."""
        return any(first < hi and lo < end for first, end in map(keys_of_part, self.dropped))

    def count_within(self, lo: int, hi: int) -> int:
        """Return the number of records with ids in ``[lo, hi)``, with those of dropped members."""
        fresh, gone = _between(self.fresh, lo, hi), _between(self.gone, lo, hi)
        return self.base.rank(hi) - self.base.rank(lo) + fresh.stop - fresh.start - (gone.stop - gone.start)

    def is_untouched(self, lo: int, hi: int) -> bool:
        parts = _between(self.ids, lo, hi), _between(self.gone, lo, hi)
        return all(part.start == part.stop for part in parts) and not self.lacks_records_in(lo, hi)

    def within(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids in ``[lo, hi)`` that have records, ascending, and the locations of their newest records."""
        part = _between(self.ids, lo, hi)
        below, below_at = self.base.within(lo, hi)
        ids = np.union1d(below, self.ids[part])
        locations = np.empty(len(ids), np.int64)
        locations[np.searchsorted(ids, below)] = below_at
        locations[np.searchsorted(ids, self.ids[part])] = self.locations[part]
        gone = self.gone[_between(self.gone, lo, hi)]
        if not len(gone) and not self.lacks_records_in(lo, hi):
            return ids, locations
        kept = _are_kept(ids, self.dropped)
        kept[np.searchsorted(ids, gone)] = False
        return ids[kept], locations[kept]


def compact(
    store: RecordStore, rate: float | None, stops: Callable[[], bool], goal: CompactionGoal | None = None
) -> None:
    """Compact the logs of past commits into sorted segments. The next commit publishes them. Until then old files stay.

    Args:
        store: the record store. Other threads may use it meanwhile.
        rate: limit of bytes written per second. None: no limit.
        stops: returns whether to stop. Called every few MB.
        goal: a few key ranges are compacted at a time, until it is reached. None: all at once.

    Raises:
        CompactionStopped: `stops` returned True.
        OSError: the disk failed. Completed key ranges stay compacted, and nothing else has changed.
    """
    is_left, part = True, goal
    while is_left:
        while goal is not None and store.flush and not stops():  # a thread that waits for room goes first
            time.sleep(PAUSE_SECONDS)
        with store.compacting:
            if goal is not None:
                part = goal._replace(rows=max(goal.rows, store.log_index.count - _rows_per_step(store)))
            is_left = _compact(store, lambda: _past_commits(store), part, rate, stops) > 0
        is_left = is_left and goal is not None and store.log_index.count > goal.rows


def relieve(store: RecordStore, rows: int | None, is_crowded: Callable[[], bool]) -> None:
    """Make room in the log index by compaction. Wait for a running one, or compact a few key ranges.

    The logs of the next commit are compacted too. Callers write no rows, and no commit is running.

    Args:
        rows: current rows of the table, or None for open ids. The last commit may have fewer.
        is_crowded: returns whether room is still missing.
    """
    store.flush = True  # for a running compaction
    try:
        with store.compacting:
            while store.log_index.count and is_crowded():
                store.close_logs()
                part = CompactionGoal(store.log_index.count - _rows_per_step(store), NO_AGE)
                _compact(store, lambda: (store.next_run(), rows), part, None, lambda: False)
    finally:
        store.flush = False


def compact_all(store: RecordStore, rows: int | None) -> None:
    """Compact all logs, those of the next commit too, into sorted segments. No commit is running.

    `rows`: see `relieve`.

    Raises:
        OSError: the disk failed. Nothing has changed.
    """
    store.close_logs()
    with store.compacting:
        _compact(store, lambda: (store.next_run(), rows), None, None, lambda: False)


def _rows_per_step(store: RecordStore) -> int:
    # Number of rows of the log index that are compacted at a time.
    return max(1, store.log_index.most_rows // PARTS)


def _past_commits(store: RecordStore) -> tuple[int, int | None]:
    with store.lock:
        return min((log.number for log in store.logs), default=store.next_run()), store.content.rows


def _compact(
    store: RecordStore,
    choose: Callable[[], tuple[int, int | None]],
    goal: CompactionGoal | None,
    rate: float | None,
    stops: Callable[[], bool],
) -> int:
    """Compact rows of logs, and return their number.

    Args:
        store: the record store, whose `compacting` the caller holds. No other thread merges the chosen logs.
        choose: returns the number of the first segment that is not compacted, and the rows of the table.
        goal: see `_source`.
        rate, stops: see `compact`.
    """
    try:
        with store.folding:
            store.compacted_below, rows = choose()
            source = _source(store, store.compacted_below, rows, goal)
        if len(source.taken[0]) or source.dropped:
            _rewrite(store, source, rate, stops)
        return len(source.taken[0])
    finally:
        store.compacted_below = 0


@spanned("compaction")
def _rewrite(store: RecordStore, source: CompactionSource, rate: float | None, stops: Callable[[], bool]) -> None:
    with _new_segments(store, source.first_kept) as segments:
        chunks = _SegmentWriter(store, source, segments, rate, stops).chunks()
        base = Base(sorted(chunks, key=lambda segment: segment.lo))
    _install(store, source, base)


def _source(store: RecordStore, first_kept: int, rows: int | None, goal: CompactionGoal | None) -> CompactionSource:
    """Return the rows to compact, so that the log index reaches the goal. None: all rows."""
    first, end = (-(2**63), 2**63) if rows is None else (0, rows)
    if store.some_are_gone or store.content.dropped:
        # An older log may have a record of a deleted row. So these logs are compacted together.
        goal = None
    scan, ranges = _LogScan(store, first_kept, [first, end]), ((first, end),)
    if goal is not None:
        scan = _LogScan(store, first_kept, bounds(store.base, first, end))
        chosen = choose(scan.pieces(), goal)
        ranges = _joined(chosen)
    ids, locations = scan.rows_in(ranges)
    with store.lock:
        dropped = store.dropped.intersection(store.content.dropped) if goal is None else frozenset[int]()
        base, is_ahead = store.base, not all(log.is_unused for log in store.logs)
        is_ahead |= rows != store.content.rows
    needed, of_logs = frozenset[int]() if goal is None else scan.runs_without(locations), (ids, locations)
    kept, gone = _are_kept(ids, dropped), _chosen_of(is_gone, locations)
    gone_ids, here = ids[kept & gone], kept & ~gone
    ids, locations = _picked(ids, here), _picked(locations, here)
    fresh = _picked(ids, _chosen_of(lambda part: base.find(part) < 0, ids))
    in_base = gone_ids[base.find(gone_ids) >= 0]
    return CompactionSource(
        base, first_kept, ranges, ids, locations, fresh, in_base, needed, of_logs, is_ahead, dropped
    )


def _chosen_of(are: Callable[[np.ndarray], np.ndarray], array: np.ndarray) -> np.ndarray:
    """Apply a predicate to an array in parts, to save RAM, and return its result, bool (n,)."""
    chosen = np.empty(len(array), bool)
    for start in range(0, len(array), SCAN_ROWS):
        chosen[start : start + SCAN_ROWS] = are(array[start : start + SCAN_ROWS])
    return chosen


def _picked(array: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    parts = zip(cut(array, SCAN_ROWS), cut(chosen, SCAN_ROWS), strict=True)
    return joined((part[here] for part, here in parts), int(np.count_nonzero(chosen)), SUBJECT)


def _joined(key_ranges: Sequence[KeyRange]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for key_range in sorted(key_ranges):
        lo = ranges.pop()[0] if ranges and ranges[-1][1] == key_range.lo else key_range.lo
        ranges.append((lo, key_range.hi))
    return tuple(ranges)


class _LogScan:
    """Scan of the rows in logs that a compaction may take. Other threads may use the store meanwhile.

    Args:
        first_kept: number of the first segment that is not compacted.
        cuts: ids at which the key ranges begin, ascending, and the end of the last one.
    """

    def __init__(self, store: RecordStore, first_kept: int, cuts: Sequence[int]) -> None:
        self._store, self._first_kept, self._cuts = store, first_kept, cuts
        with store.lock:
            self._logs = [
                (segment.number, segment.file.size)
                for segment in (*store.delta, *store.logs)
                if segment.number < first_kept
            ]
        self._low = min((number for number, _ in self._logs), default=first_kept)
        self._of_runs = np.zeros(max(first_kept - self._low, 0), np.int64)

    def pieces(self) -> list[KeyRange]:
        """Count the rows of each key range and of each segment, and return the key ranges."""
        starts, waiting = np.array(self._cuts[:-1], np.int64), np.zeros(len(self._cuts) - 1, np.int64)
        for ids, locations in self._parts():
            waiting += np.bincount(np.searchsorted(starts, ids, side="right") - 1, minlength=len(waiting))
            self._of_runs += self._by_run(locations)
        return pieces.cut(self._store.base, self._cuts, waiting, self._logs)

    def rows_in(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of rows in ranges, ascending, and their locations."""
        starts, lasts = (np.array(each, np.int64) for each in ([lo for lo, _ in ranges], [hi - 1 for _, hi in ranges]))
        count, most = 0, self._store.log_index.count if len(ranges) else 0  # rows that arrive meanwhile are not chosen
        found = returned((2, most), np.int64, SUBJECT)
        for part, at in self._parts() if len(ranges) else ():
            place = np.searchsorted(starts, part, side="right") - 1
            chosen = (place >= 0) & (part <= lasts[place])
            end = count + int(np.count_nonzero(chosen))
            found[0, count:end], found[1, count:end], count = part[chosen], at[chosen], end
        order = np.argsort(found[0, :count])
        return taken(found[0], order, SUBJECT), taken(found[1], order, SUBJECT)

    def runs_without(self, locations: np.ndarray) -> frozenset[int]:
        """Return the numbers of segments that have rows at other locations."""
        return frozenset((self._low + np.flatnonzero(self._of_runs - self._by_run(locations))).tolist())

    def _by_run(self, locations: np.ndarray) -> np.ndarray:
        return np.bincount((locations >> RUN_SHIFT) - self._low, minlength=len(self._of_runs))

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for ids, locations in self._store.log_parts():  # rows that come in between need no compaction
            chosen = locations >> RUN_SHIFT < self._first_kept
            yield ids[chosen], locations[chosen]


def _between(ids: np.ndarray, lo: int, hi: int) -> slice:
    return slice(int(np.searchsorted(ids, lo)), int(np.searchsorted(ids, hi - 1, side="right")))


def _are_kept(ids: np.ndarray, dropped: frozenset[int]) -> np.ndarray:
    return ~np.isin(ids >> PART_BITS, list(dropped)) if dropped else np.ones(len(ids), bool)


class _SegmentWriter:
    def __init__(
        self,
        store: RecordStore,
        source: CompactionSource,
        new: _NewSegments,
        rate: float | None,
        stops: Callable[[], bool],
    ) -> None:
        self._store, self._source, self._new, self._rate, self._stops = store, source, new, rate, stops
        self._started, self._written, self._fullness = time.monotonic(), 0, store.log_index.fullness
        self._worked = time.thread_time()
        records = sum(source.count_within(lo, hi) for lo, hi in source.ranges)
        self._total = records * (store.content.record_bytes + CRC_BYTES)

    def chunks(self) -> Iterator[Segment]:
        """Yield the segments of the new base: untouched old ones, and new ones."""
        source, old = self._source, dict[tuple[int, int], Segment]()
        for segment in source.base.runs:
            if any(lo <= segment.lo and segment.hi <= hi for lo, hi in source.ranges):
                old[segment.lo, segment.hi] = segment
            else:
                yield segment
        for lo, hi in (part for within in source.ranges for part in self._ranges(*within)):
            if source.is_untouched(lo, hi) and (lo, hi) in old:
                yield old[lo, hi]
                continue
            ids, locations = source.within(lo, hi)
            if len(ids):
                self._check_stop()
                self._store.copy(ids, locations, self._new.begin(lo), self._pace)
                yield self._new.end(lo, hi)

    def _ranges(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut a range of ids into ranges of at most a segment's records, ascending.

        Cuts are repeated halves of the range of all possible ids. Without new rows, the next compaction cuts the same.
        """
        stride, rows = self._store.content.record_bytes + CRC_BYTES, self._source.base.count + len(self._source.fresh)
        size = chunk_rows(rows, stride)
        root = 0 if first >= 0 else -(2**63)
        waiting = [(root, max(size, 1 << (end - root - 1).bit_length()))]
        while waiting:
            start, span = waiting.pop()
            lo, hi = max(start, first), min(start + span, end)
            count = self._source.count_within(lo, hi) if lo < hi else 0
            if count > size:
                waiting += [(start + span // 2, span // 2), (start, span // 2)]
            elif count:
                yield lo, hi

    def _pace(self, nbytes: int) -> None:
        self._store.add(bytes_compacted=nbytes)
        self._written += nbytes
        worked, self._worked = time.thread_time() - self._worked, time.thread_time()
        # Late: training fills the log index faster than compaction empties it, so that it would wait.
        filled = self._store.log_index.fullness - self._fullness
        is_late = filled * self._total >= self._written * (1 - self._fullness)
        if self._rate is not None and not self._store.flush and not is_late:
            early = self._written / self._rate - (time.monotonic() - self._started)
            time.sleep(max(0.0, early, worked * (1 / PROCESSOR_SHARE - 1)))
        let_commits_pass(self._store, self._stops)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stops():
            raise CompactionStopped


def chunk_rows(rows: int, stride: int) -> int:
    """Return the most records of a sorted segment, a power of two.

    Args:
        rows: records in the base.
        stride: bytes of a record.

    Example:
        >>> chunk_rows(10**5, 772), chunk_rows(10**6, 772), chunk_rows(10**9, 772)
        (8192, 8192, 131072)
    """
    nbytes = min(CHUNK_BYTES, max(SMALL_CHUNK_BYTES, rows * stride // CHUNKS))
    return max(LEAST_CHUNK_ROWS, (1 << (nbytes // stride).bit_length()) // 2)


class _NewSegments:
    """New sorted segments in their own folder.

    Attributes:
        log: the segment that is being written. None between two segments.
        made: the complete segments.
    """

    def __init__(self, store: RecordStore, first_kept: int) -> None:
        self._store, self._first_kept, self._folder = store, first_kept, store.free_name("base")
        self.log: Log | None = None
        self.made = list[Segment]()
        retried(store.system.mkdir, folders.join(store.folder, self._folder))

    def begin(self, lo: int) -> Log:
        """Create the segment of ids from `lo` on, and return its log. Callers append records in order of ids."""
        store, name = self._store, f"{self._folder}/c{lo & (2**64 - 1):x}.rows"
        self.log = Log.create(store.system, store.folder, name, store.content.uuid, store.content.record_bytes, -1)
        return self.log

    def end(self, lo: int, hi: int) -> Segment:
        """Seal the segment of ids in ``[lo, hi)``, durably."""
        assert self.log is not None
        entry, store = self.log.seal((lo, hi)), self._store
        self.log.close()
        self.log = None
        segment = open_run(store.system, store.folder, entry, store.content, store.next_run())
        segment.folded_below = self._first_kept
        self.made.append(segment)
        return segment

    def remove(self) -> None:
        """Remove all new segments. The next writer removes the remaining ones as orphans."""
        for segment in (*self.made, *([self.log] if self.log else [])):
            segment.close()
        where = folders.join(self._store.folder, self._folder)
        with contextlib.suppress(OSError):
            for name in self._store.system.listdir(where):
                self._store.system.unlink(f"{where}/{name}")
            self._store.system.rmdir(where)


@contextmanager
def _new_segments(store: RecordStore, first_kept: int) -> Iterator[_NewSegments]:
    """Create sorted segments that replace logs below `first_kept`.

    Make their names durable, or remove all after an error.
    """
    segments = _NewSegments(store, first_kept)
    with on_failure(segments.remove):
        yield segments
        retried(store.system.fsync_folder, folders.join(store.folder, "base"))


def fill(store: RecordStore, batches: Iterable[tuple[np.ndarray, np.ndarray]], most: int) -> int:
    """Bulk-load records into an empty store, and return their number. The next commit publishes them.

    Args:
        store: an empty record store that no other thread uses.
        batches: ids, int64 (n,), ascending within and across batches, and records, uint8 (n, record_bytes).
        most: number of all records, at most.

    Raises:
        OSError: the disk failed. Nothing has changed.
    """
    rows = chunk_rows(most, store.content.record_bytes + CRC_BYTES)
    with _new_segments(store, store.next_run()) as segments:
        for ids, records in batches:
            while len(ids):
                log = segments.log or segments.begin(int(ids[0]))
                count = min(rows - log.count, len(ids))
                sealed = store.seal(records[:count], np.arange(count), ids[:count])
                log.append(sealed, ids[:count])
                store.add(bytes_written=sealed.nbytes)
                ids, records = ids[count:], records[count:]
                if log.count == rows:
                    segments.end(log.lo, log.hi)
        if segments.log is not None:
            segments.end(segments.log.lo, segments.log.hi)
        base = Base(segments.made)
    with store.lock:
        _use(store, base)
        store.base_is_ahead = True
        store.handed.append(None)
    return store.base.count


def _use(store: RecordStore, base: Base) -> None:
    for segment in base.runs:
        store.take(segment)
    store.base = base


def _install(store: RecordStore, source: CompactionSource, base: Base) -> None:
    replaced = [segment for segment in source.base.runs if segment not in base.runs]
    with store.lock:
        _use(store, base)
        store.base_is_ahead = store.base_is_ahead or source.is_ahead
    ids, locations = source.taken
    for start in range(0, len(ids), SCAN_ROWS):  # until then, lookups find these rows in logs
        with store.lock:
            store.log_index.remove(ids[start : start + SCAN_ROWS], locations[start : start + SCAN_ROWS])
    with store.lock:
        store.log_index.fit()
        logs = [segment for segment in (*store.delta, *store.logs) if segment.number < source.first_kept]
        folded = [segment for segment in logs if segment.number not in source.needed]
        store.delta = [segment for segment in store.delta if segment not in folded]
        store.look_for_gone()
        store.dropped -= source.dropped
        store.forget([*folded, *replaced])  # before a commit is published that does not name them
