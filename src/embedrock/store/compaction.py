"""Compaction: the logs of past commits, folded into new base chunks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from embedrock.machine.vfs import retried
from embedrock.process.spans import spanned
from embedrock.store import folder as folders
from embedrock.store.base import Base, Chunk
from embedrock.store.manifest import PART_BITS
from embedrock.store.reading import read_records
from embedrock.store.runs import CRC_BYTES, ChunkWriter, Run, piece_rows
from embedrock.store.store import INDEX_BITS, SCAN_ROWS, Store, is_gone, keys_of_part, open_run

CHUNK_BYTES = 128 << 20  # of records in a base chunk, at most
PAUSE_SECONDS = 0.002  # between two looks at whether a commit has ended
PIECE_BYTES = 4 << 20  # read and written at a time


class Stopped(Exception):
    """Compaction was told to stop. Nothing has changed."""


def let_commits_pass(store: Store, stops: Callable[[], bool]) -> None:
    """Leave the disk to a commit that somebody waits for."""
    while store.commit_is_awaited and not store.hurry and not stops():
        time.sleep(PAUSE_SECONDS)


class Source(NamedTuple):
    """What is folded: rows of logs, over the base.

    Attributes:
        base: the index of the old chunks, `runs` their files.
        first_kept: number of the first run that stays as it is.
        ids: of the rows in logs, ascending; `locations` says where.
        fresh: those of them that are not in the base.
        gone: ids in the base, ascending, that have no record any more.
        rows: of the table that the new chunks are of, None for open ids.
        is_ahead: no commit has these rows, or some of the records.
        dropped: of a pool, the numbers of members whose records are left out.
    """

    base: Base
    runs: tuple[Run, ...]
    first_kept: int
    ids: np.ndarray
    locations: np.ndarray
    fresh: np.ndarray
    gone: np.ndarray
    rows: int | None
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


def compact(store: Store, rate: float | None, stops: Callable[[], bool]) -> None:
    """Fold the logs of past commits into base chunks. The next commit publishes them; until then old files stay.

    Args:
        store: of the table; others may use it meanwhile.
        rate: bytes written in a second, at most; None: as fast as the disk.
        stops: asked every few MB.

    Raises:
        Stopped: `stops` said so.
        OSError: the disk. Nothing has changed.
    """
    with store.compacting, _chosen(store, lambda: (_first_unpublished(store), store.content.rows)) as source:
        _compact(store, source, rate, stops)


def relieve(store: Store, rows: int | None, is_crowded: Callable[[], bool]) -> None:
    """Make room in the overlay: let a compaction that is under way end, or fold all logs.

    Those of the commit in the making are folded too. No rows may be written and no commit be under way meanwhile.

    Args:
        store: of the table.
        rows: that it has now, None for open ids: no commit may have so many yet.
        is_crowded: asked whether that is needed still.
    """
    store.hurry = True  # to a compaction that is under way
    try:
        with store.compacting:
            if is_crowded():
                with _chosen(store, lambda: (store.next_run(), rows)) as source:
                    _compact(store, source, None, lambda: False)
    finally:
        store.hurry = False


@spanned("compaction")
def _compact(store: Store, source: Source, rate: float | None, stops: Callable[[], bool]) -> None:
    if not len(source.ids) and not len(source.gone) and not source.dropped:
        return
    folder = store.free_name("base")
    retried(store.system.mkdir, folders.join(store.folder, folder))
    made: list[tuple[Run, Chunk]] = []
    try:
        writer = _Writer(store, source, folder, rate, stops)
        made.extend(writer.chunks())
        retried(store.system.fsync_folder, folders.join(store.folder, "base"))
    except BaseException:
        _remove(store, folder)
        raise
    _install(store, source, made)


def _first_unpublished(store: Store) -> int:
    with store.lock:
        return min((log.number for log in store.logs), default=store.next_run())


@contextmanager
def _chosen(store: Store, choose: Callable[[], tuple[int, int | None]]) -> Iterator[Source]:
    """Choose what is folded: runs up to a number, of so many rows. Meanwhile nobody makes one of them."""
    try:
        with store.folding:
            store.compacted_below, rows = choose()
            source = _source(store, store.compacted_below, rows)
        yield source
    finally:
        store.compacted_below = 0


def _source(store: Store, first_kept: int, rows: int | None) -> Source:
    with store.lock:
        dropped = store.dropped.intersection(store.content.dropped)  # others the last commit has still
        parts = [_folded(ids, at, first_kept, dropped) for ids, at in store.overlay.items(SCAN_ROWS)]
        base, runs, is_ahead = store.base, tuple(store.base_runs), any(log.count or log.noted for log in store.logs)
        is_ahead |= rows != store.content.rows
    nothing = np.empty(0, np.int64)
    ids = np.concatenate([nothing, *(ids for ids, _ in parts)])
    order = np.argsort(ids)
    locations = np.concatenate([nothing, *(at for _, at in parts)])[order]
    ids, gone = ids[order], is_gone(locations)
    gone_ids, ids, locations = ids[gone], ids[~gone], locations[~gone]
    in_base, fresh = gone_ids[base.find(gone_ids) >= 0], ids[base.find(ids) < 0]
    return Source(base, runs, first_kept, ids, locations, fresh, in_base, rows, is_ahead, dropped)


def _between(ids: np.ndarray, lo: int, hi: int) -> slice:
    return slice(int(np.searchsorted(ids, lo)), int(np.searchsorted(ids, hi - 1, side="right")))


def _folded(
    ids: np.ndarray, locations: np.ndarray, first_kept: int, dropped: frozenset[int]
) -> tuple[np.ndarray, np.ndarray]:
    chosen = locations >> INDEX_BITS < first_kept
    if dropped:
        chosen &= _are_kept(ids, dropped)
    return ids[chosen], locations[chosen]


def _are_kept(ids: np.ndarray, dropped: frozenset[int]) -> np.ndarray:
    return ~np.isin(ids >> PART_BITS, list(dropped))


class _Writer:
    """Writes the chunks of one compaction."""

    def __init__(
        self, store: Store, source: Source, folder: str, rate: float | None, stops: Callable[[], bool]
    ) -> None:
        self._store, self._source, self._folder, self._rate, self._stops = store, source, folder, rate, stops
        self._started, self._written, self._fullness = time.monotonic(), 0, store.fullness
        self._total = (source.base.count + len(source.fresh)) * (store.content.record_bytes + CRC_BYTES)

    def chunks(self) -> Iterator[tuple[Run, Chunk]]:
        """Go through the chunks of the new base: old ones that nothing is folded into, and new ones."""
        old = {
            (chunk.lo, chunk.hi): (run, chunk)
            for run, chunk in zip(self._source.runs, self._source.base.chunks, strict=True)
        }
        for lo, hi in self._ranges(self._source.rows):
            if self._source.is_untouched(lo, hi) and (lo, hi) in old:
                yield old[lo, hi]
                continue
            ids, locations = self._source.within(lo, hi)
            if len(ids):
                yield self._chunk(lo, hi, ids, locations)

    def _ranges(self, rows: int | None) -> Iterator[tuple[int, int]]:
        """Cut the ids into ranges of up to a chunk of records each, ascending.

        They are halves of halves of all ids there could be: where no row is new, the next compaction cuts as this one.
        """
        stride = self._store.content.record_bytes + CRC_BYTES
        size = 1 << max(6, (CHUNK_BYTES // stride).bit_length() - 1)
        first, end = (-(2**63), 2**63) if rows is None else (0, rows)
        waiting = [(first, max(size, 1 << (end - first - 1).bit_length()))]
        while waiting:
            lo, span = waiting.pop()
            hi = min(lo + span, end)
            count = self._source.count_within(lo, hi) if lo < end else 0
            if count > size:
                waiting += [(lo + span // 2, span // 2), (lo, span // 2)]
            elif count:
                yield lo, hi

    def _chunk(self, lo: int, hi: int, ids: np.ndarray, locations: np.ndarray) -> tuple[Run, Chunk]:
        store = self._store
        name, uuid, record_bytes = (
            f"{self._folder}/c{lo & (2**64 - 1):x}.rows",
            store.content.uuid,
            store.content.record_bytes,
        )
        writer = ChunkWriter.create(store.system, store.folder, name, uuid, record_bytes)
        try:
            piece = piece_rows(record_bytes, PIECE_BYTES)
            for start in range(0, len(ids), piece):
                self._copy(ids[start : start + piece], locations[start : start + piece], writer)
            entry = writer.finish(lo, hi)
        except BaseException:
            writer.close()
            raise
        run = open_run(store.system, store.folder, entry, store.content, store.next_run())
        index = None if run.kind == "full" else run.index()
        return run, Chunk(lo, hi, run.kind, run.number, run.count, index)

    def _copy(self, ids: np.ndarray, locations: np.ndarray, writer: ChunkWriter) -> None:
        if self._stops():
            raise Stopped
        store, slots = self._store, np.arange(len(ids))
        records = np.empty((len(ids), store.content.record_bytes), np.uint8)
        read_records(store.system, store.runs, locations, ids, records, slots)
        sealed = store.seal(records, slots, ids)
        writer.append(sealed, ids)
        store.add(bytes_written=sealed.nbytes, bytes_compacted=sealed.nbytes)
        self._written += sealed.nbytes
        self._pause()

    def _pause(self) -> None:
        if self._rate is not None and not self._store.hurry and not self._is_late():
            early = self._written / self._rate - (time.monotonic() - self._started)
            if early > 0:
                time.sleep(early)
        let_commits_pass(self._store, self._stops)

    def _is_late(self) -> bool:
        """Return whether training fills the overlay faster than this will empty it: it would have to wait then."""
        filled = self._store.fullness - self._fullness
        return filled * self._total >= self._written * (1 - self._fullness)


def _install(store: Store, source: Source, made: list[tuple[Run, Chunk]]) -> None:
    """Look for rows in the new chunks from now on."""
    base, runs = Base([chunk for _, chunk in made]), [run for run, _ in made]
    with store.lock:
        for run in runs:
            store.take(run)
        folded = [run for run in store.delta if run.number < source.first_kept]
        replaced = [run for run in source.runs if run not in runs]
        store.base, store.base_runs = base, runs
        store.base_is_ahead = store.base_is_ahead or source.is_ahead
        store.delta = [run for run in store.delta if run not in folded]
        store.overlay.remove_runs_below(source.first_kept)
        store.look_for_gone()
        store.forget_parts(source.dropped)
        logs = [log for log in store.logs if log.number < source.first_kept]
        store.forget([*folded, *replaced, *logs])  # before a commit is published that no longer names them


def _remove(store: Store, folder: str) -> None:
    # What cannot be removed now is removed as an orphan by the next writer.
    where = folders.join(store.folder, folder)
    with contextlib.suppress(OSError):
        for name in store.system.listdir(where):
            store.system.unlink(f"{where}/{name}")
        store.system.rmdir(where)
