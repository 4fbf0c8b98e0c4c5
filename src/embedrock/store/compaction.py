"""Compaction: the logs of past commits, folded into new base chunks. Filling: chunks of records in order of ids."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from embedrock.io.vfs import retried
from embedrock.store import folder as folders
from embedrock.store.base import Base
from embedrock.store.manifest import PART_BITS
from embedrock.store.pieces import CompactionGoal, KeyRange, bounds, choose, cut
from embedrock.store.record_store import INDEX_BITS, SCAN_ROWS, RecordStore, is_gone, keys_of_part, open_run
from embedrock.store.segments import CRC_BYTES, Log, Segment
from embedrock.system.arena import returned, taken
from embedrock.system.spans import spanned

CHUNK_BYTES = 128 << 20  # of records in a base chunk, at most
# Less in a smaller base, so that it has so many: with 8 chunks instead of 61, room in the overlay was made in such
# large parts that folding wrote a fifth more.
CHUNKS, SMALL_CHUNK_BYTES = 64, 8 << 20
LEAST_CHUNK_ROWS = 64  # a chunk may have so many, however large they are; a power of two
PARTS = 16  # of the rows that the overlay has room for, one is folded at a time
NO_AGE = 1 << 62  # of a goal that is about rows only
SUBJECT = "compaction"
PAUSE_SECONDS = 0.002  # between two looks at whether a commit has ended
PROCESSOR_SHARE = 1 / 2  # of the time, where there is a rate: else steps of training meet one piece after another


class CompactionStopped(Exception):
    """Compaction was told to stop. Nothing has changed."""


def let_commits_pass(store: RecordStore, stops: Callable[[], bool]) -> None:
    """Leave the disk to a commit that somebody waits for."""
    while store.commit_is_awaited and not store.flush and not stops():
        time.sleep(PAUSE_SECONDS)


class CompactionSource(NamedTuple):
    """What is folded: rows of logs, over the base.

    Attributes:
        base: the old chunks.
        first_kept: number of the first run that stays as it is.
        ranges: of ids, ascending; what a chunk covers is in one of them, or in none.
        ids: of the rows in logs and in these ranges, ascending; `locations` says where.
        fresh: those of them that are not in the base.
        gone: ids in the base, ascending, that have no record any more.
        needed: numbers of runs below `first_kept` that have rows in other ranges.
        taken: all rows of logs in the ranges, those without a record too, with their locations.
        is_ahead: no commit has these rows, or some of the records.
        dropped: of a pool, the numbers of members whose records are left out.
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
        """Return whether records of ids in ``[lo, hi)`` may be left out."""
        return any(first < hi and lo < end for first, end in map(keys_of_part, self.dropped))

    def count_within(self, lo: int, hi: int) -> int:
        """Return how many ids in ``[lo, hi)`` have records, those of dropped members among them."""
        fresh, gone = _between(self.fresh, lo, hi), _between(self.gone, lo, hi)
        return self.base.rank(hi) - self.base.rank(lo) + fresh.stop - fresh.start - (gone.stop - gone.start)

    def is_untouched(self, lo: int, hi: int) -> bool:
        """Return whether nothing in ``[lo, hi)`` is another than in the base."""
        parts = self.part(lo, hi), _between(self.gone, lo, hi)
        return all(part.start == part.stop for part in parts) and not self.lacks_records_in(lo, hi)

    def part(self, lo: int, hi: int) -> slice:
        """Return which of `ids` lie in ``[lo, hi)``; `hi` may be 2**63."""
        return _between(self.ids, lo, hi)

    def within(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids in ``[lo, hi)`` that have records, ascending, and the locations of the newest ones."""
        part = self.part(lo, hi)
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

    def has_range(self, chunk: Segment) -> bool:
        """Return whether a chunk is in one of the ranges."""
        return any(lo <= chunk.lo and chunk.hi <= hi for lo, hi in self.ranges)


def compact(store: RecordStore, rate: float | None, stops: Callable[[], bool]) -> None:
    """Fold the logs of past commits into base chunks. The next commit publishes them; until then old files stay.

    Args:
        store: of the table; others may use it meanwhile.
        rate: bytes written in a second, at most; None: as fast as the disk.
        stops: asked every few MB.

    Raises:
        Stopped: `stops` said so.
        OSError: the disk. Nothing has changed.
    """
    with store.compacting, _chosen(store, lambda: (_first_unpublished(store), store.content.rows), None) as source:
        _compact(store, source, rate, stops)


def compact_in_pieces(store: RecordStore, goal: CompactionGoal, rate: float | None, stops: Callable[[], bool]) -> None:
    """Fold the logs of past commits into some chunks of the base, a few at a time, until they are as `goal` says.

    See `compact`. What was folded before it raises stays folded.
    """
    is_left = True
    while is_left:
        while store.flush and not stops():  # whoever waits for room goes first
            time.sleep(PAUSE_SECONDS)
        with store.compacting:
            part = CompactionGoal(max(goal.rows, store.log_index.count - _part_rows(store)), goal.age)
            with _chosen(store, lambda: (_first_unpublished(store), store.content.rows), part) as source:
                _compact(store, source, rate, stops)
        is_left = len(source.taken[0]) > 0 and store.log_index.count > goal.rows


def relieve(store: RecordStore, rows: int | None, is_crowded: Callable[[], bool]) -> None:
    """Make room in the overlay: let what is being folded be folded, or fold a few pieces.

    The logs of the commit in the making are folded too. No rows may be written and no commit be under way meanwhile.

    Args:
        store: of the table.
        rows: that it has now, None for open ids: no commit may have so many yet.
        is_crowded: asked whether that is needed still.
    """
    store.flush = True  # to a compaction that is under way
    try:
        with store.compacting:
            while store.log_index.count and is_crowded():
                store.close_logs()
                part = CompactionGoal(store.log_index.count - _part_rows(store), NO_AGE)
                with _chosen(store, lambda: (store.next_run(), rows), part) as source:
                    _compact(store, source, None, lambda: False)
    finally:
        store.flush = False


def _part_rows(store: RecordStore) -> int:
    # How many rows of the overlay are folded at a time.
    return max(1, store.overlay_rows // PARTS)


@spanned("compaction")
def _compact(store: RecordStore, source: CompactionSource, rate: float | None, stops: Callable[[], bool]) -> None:
    if not len(source.taken[0]) and not source.dropped:
        return
    with _new_chunks(store, source.first_kept) as chunks:
        base = Base(sorted(_SegmentWriter(store, source, chunks, rate, stops).chunks(), key=lambda run: run.lo))
    _install(store, source, base)


def _first_unpublished(store: RecordStore) -> int:
    with store.lock:
        return min((log.number for log in store.logs), default=store.next_run())


@contextmanager
def _chosen(
    store: RecordStore, choose: Callable[[], tuple[int, int | None]], goal: CompactionGoal | None
) -> Iterator[CompactionSource]:
    """Choose what is folded: runs up to a number, of so many rows. Meanwhile nobody makes one of them."""
    try:
        with store.folding:
            store.compacted_below, rows = choose()
            source = _source(store, store.compacted_below, rows, goal)
        yield source
    finally:
        store.compacted_below = 0


def _source(store: RecordStore, first_kept: int, rows: int | None, goal: CompactionGoal | None) -> CompactionSource:
    """Return what is folded so that the overlay is as `goal` says; None: all."""
    first, end = (-(2**63), 2**63) if rows is None else (0, rows)
    if store.some_are_gone or store.content.dropped:
        # What an older log has of a row that is gone must not come back, so these logs go together.
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
    """Return what `are` says of items, bool (n,): it is asked of some at a time, and so needs little RAM."""
    chosen = np.empty(len(array), bool)
    for start in range(0, len(array), SCAN_ROWS):
        chosen[start : start + SCAN_ROWS] = are(array[start : start + SCAN_ROWS])
    return chosen


def _picked(array: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    made, end = returned(int(np.count_nonzero(chosen)), np.int64, SUBJECT), 0
    for start in range(0, len(array), SCAN_ROWS):
        part = array[start : start + SCAN_ROWS][chosen[start : start + SCAN_ROWS]]
        made[end : end + len(part)], end = part, end + len(part)
    return made


def _joined(pieces: Sequence[KeyRange]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for piece in sorted(pieces):
        lo = ranges.pop()[0] if ranges and ranges[-1][1] == piece.lo else piece.lo
        ranges.append((lo, piece.hi))
    return tuple(ranges)


class _LogScan:
    """Goes through the rows in logs that can be folded, while others have the store.

    Args:
        store: whose overlay has them.
        first_kept: number of the first run that stays as it is.
        cuts: ids at which a piece begins, ascending, and the end of the last.
    """

    def __init__(self, store: RecordStore, first_kept: int, cuts: Sequence[int]) -> None:
        self._store, self._first_kept, self._cuts = store, first_kept, cuts
        with store.lock:
            self._logs = [(run.number, run.file.size) for run in (*store.delta, *store.logs) if run.number < first_kept]
        self._low = min((number for number, _ in self._logs), default=first_kept)
        self._of_runs = np.zeros(max(first_kept - self._low, 0), np.int64)

    def pieces(self) -> list[KeyRange]:
        """Count the rows of each piece, and those of each run."""
        starts, waiting = np.array(self._cuts[:-1], np.int64), np.zeros(len(self._cuts) - 1, np.int64)
        for ids, locations in self._parts():
            waiting += np.bincount(np.searchsorted(starts, ids, side="right") - 1, minlength=len(waiting))
            self._of_runs += self._by_run(locations)
        return cut(self._store.base, self._cuts, waiting, self._logs)

    def rows_in(self, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of rows in ranges, ascending, and their locations."""
        starts, lasts = (np.array(each, np.int64) for each in ([lo for lo, _ in ranges], [hi - 1 for _, hi in ranges]))
        count, most = 0, self._store.log_index.count if len(ranges) else 0  # rows that come meanwhile are not chosen
        found = returned((2, most), np.int64, SUBJECT)
        for part, at in self._parts() if len(ranges) else ():
            place = np.searchsorted(starts, part, side="right") - 1
            chosen = (place >= 0) & (part <= lasts[place])
            end = count + int(np.count_nonzero(chosen))
            found[0, count:end], found[1, count:end], count = part[chosen], at[chosen], end
        order = np.argsort(found[0, :count])
        return taken(found[0], order, SUBJECT), taken(found[1], order, SUBJECT)

    def runs_without(self, locations: np.ndarray) -> frozenset[int]:
        """Return the numbers of runs that have other rows than those at locations."""
        return frozenset((self._low + np.flatnonzero(self._of_runs - self._by_run(locations))).tolist())

    def _by_run(self, locations: np.ndarray) -> np.ndarray:
        return np.bincount((locations >> INDEX_BITS) - self._low, minlength=len(self._of_runs))

    def _parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        last = None
        while True:
            with self._store.lock:  # in between, others have it: rows that change meanwhile need not be folded
                ids, locations = self._store.log_index.behind(last, SCAN_ROWS)
            if not len(ids):
                return
            last = int(ids[-1])
            chosen = locations >> INDEX_BITS < self._first_kept
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
        self._started, self._written, self._fullness = time.monotonic(), 0, store.fullness
        self._worked = time.thread_time()
        records = sum(source.count_within(lo, hi) for lo, hi in source.ranges)
        self._total = records * (store.content.record_bytes + CRC_BYTES)

    def chunks(self) -> Iterator[Segment]:
        """Go through the chunks of the new base: old ones that nothing is folded into, and new ones."""
        source, old = self._source, dict[tuple[int, int], Segment]()
        for run in source.base.runs:
            if source.has_range(run):
                old[run.lo, run.hi] = run
            else:
                yield run
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
        """Cut ids into ranges of up to a chunk of records each, ascending.

        They are halves of halves of all ids there could be: where no row is new, the next compaction cuts as this one.
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
        if self._rate is not None and not self._store.flush and not self._is_late():
            early = self._written / self._rate - (time.monotonic() - self._started)
            time.sleep(max(0.0, early, worked * (1 / PROCESSOR_SHARE - 1)))
        let_commits_pass(self._store, self._stops)
        self._check_stop()

    def _check_stop(self) -> None:
        if self._stops():
            raise CompactionStopped

    def _is_late(self) -> bool:
        """Return whether training fills the overlay faster than this will empty it: it would have to wait then."""
        filled = self._store.fullness - self._fullness
        return filled * self._total >= self._written * (1 - self._fullness)


def chunk_rows(rows: int, stride: int) -> int:
    """Return how many records a chunk has, at most: a power of two.

    Args:
        rows: in the base.
        stride: bytes of a record.

    Example:
        >>> chunk_rows(10**5, 772), chunk_rows(10**6, 772), chunk_rows(10**9, 772)
        (8192, 8192, 131072)
    """
    nbytes = min(CHUNK_BYTES, max(SMALL_CHUNK_BYTES, rows * stride // CHUNKS))
    return max(LEAST_CHUNK_ROWS, (1 << (nbytes // stride).bit_length()) // 2)


class _NewSegments:
    """Base chunks in the making, in a folder of their own.

    Attributes:
        log: that is being written; None between two chunks.
        made: those that are whole.
    """

    def __init__(self, store: RecordStore, first_kept: int) -> None:
        self._store, self._first_kept, self._folder = store, first_kept, store.free_name("base")
        self.log: Log | None = None
        self.made = list[Segment]()
        retried(store.system.mkdir, folders.join(store.folder, self._folder))

    def begin(self, lo: int) -> Log:
        """Begin the chunk of the ids from `lo` on, and return the log that takes its records in their order."""
        store, name = self._store, f"{self._folder}/c{lo & (2**64 - 1):x}.rows"
        self.log = Log.create(store.system, store.folder, name, store.content.uuid, store.content.record_bytes, -1)
        return self.log

    def end(self, lo: int, hi: int) -> Segment:
        """Make the chunk durable, which covers the ids in ``[lo, hi)``."""
        assert self.log is not None
        entry, store = self.log.seal_as_chunk(lo, hi), self._store
        self.log.close()
        self.log = None
        run = open_run(store.system, store.folder, entry, store.content, store.next_run())
        run.folded_below = self._first_kept
        self.made.append(run)
        return run

    def remove(self) -> None:
        """Remove all of them. What cannot be removed now, the next writer removes as an orphan."""
        for run in (*self.made, *([self.log] if self.log else [])):
            run.close()
        where = folders.join(self._store.folder, self._folder)
        with contextlib.suppress(OSError):
            for name in self._store.system.listdir(where):
                self._store.system.unlink(f"{where}/{name}")
            self._store.system.rmdir(where)


@contextmanager
def _new_chunks(store: RecordStore, first_kept: int) -> Iterator[_NewSegments]:
    """Make chunks, with runs below `first_kept` folded into them, and their names durable; or leave none of them."""
    chunks = _NewSegments(store, first_kept)
    try:
        yield chunks
        retried(store.system.fsync_folder, folders.join(store.folder, "base"))
    except BaseException:
        chunks.remove()
        raise


def fill(store: RecordStore, batches: Iterable[tuple[np.ndarray, np.ndarray]], most: int) -> int:
    """Give an empty store its records; return how many. The next commit publishes them.

    Args:
        store: of the table, which has no records yet, and which nobody else uses.
        batches: ids int64 (n,) that ascend, also from batch to batch, and records uint8 (n, record_bytes).
        most: records that they have together, at most.

    Raises:
        OSError: the disk. Nothing has changed.
    """
    rows = chunk_rows(most, store.content.record_bytes + CRC_BYTES)
    with _new_chunks(store, store.next_run()) as chunks:
        for ids, records in batches:
            while len(ids):
                log = chunks.log or chunks.begin(int(ids[0]))
                count = min(rows - log.count, len(ids))
                sealed = store.seal(records[:count], np.arange(count), ids[:count])
                log.append(sealed, ids[:count])
                store.add(bytes_written=sealed.nbytes)
                ids, records = ids[count:], records[count:]
                if log.count == rows:
                    chunks.end(log.lo, log.hi)
        if chunks.log is not None:
            chunks.end(chunks.log.lo, chunks.log.hi)
        base = Base(chunks.made)
    with store.lock:
        _use(store, base)
        store.base_is_ahead = True
    return store.base.count


def _use(store: RecordStore, base: Base) -> None:
    for run in base.runs:
        store.take(run)
    store.base = base


def _install(store: RecordStore, source: CompactionSource, base: Base) -> None:
    replaced = [run for run in source.base.runs if run not in base.runs]
    with store.lock:
        _use(store, base)
        store.base_is_ahead = store.base_is_ahead or source.is_ahead
    ids, locations = source.taken
    for start in range(0, len(ids), SCAN_ROWS):  # until then, they are found in logs
        with store.lock:
            store.log_index.remove(ids[start : start + SCAN_ROWS], locations[start : start + SCAN_ROWS])
    with store.lock:
        store.log_index.fit()
        logs = [run for run in (*store.delta, *store.logs) if run.number < source.first_kept]
        folded = [run for run in logs if run.number not in source.needed]
        store.delta = [run for run in store.delta if run not in folded]
        store.look_for_gone()
        store.forget_parts(source.dropped)
        store.forget([*folded, *replaced])  # before a commit is published that no longer names them
