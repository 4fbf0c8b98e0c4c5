"""`StorageCommit`: writes changed rows to disk while training goes on. `CommitWriter`: writes those of one backend."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.storage.cache import DIRTY, FROZEN, WRITING
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.slot_index import ID_BYTES
from embedrock.storage.table_lock import TableLock
from embedrock.store.history import PiecewiseArray, Written
from embedrock.store.manifest import HistoryFile
from embedrock.store.record_store import CommitSnapshot
from embedrock.store.segments import CRC_BYTES
from embedrock.store.table_folder import TableFolder
from embedrock.system import platform
from embedrock.system.spans import spanned

AT_END = "interpreter shutdown"  # what Python 3.12 and newer say of threads that none may start any more
PIECE_BYTES = 6 << 20  # sealed, and written, at a time
PIECES_AHEAD = 2  # sealed before they are written
QUIET_BYTES = 512 << 10  # where nobody waits for the end; more ...
QUIET_PIECES = 64  # ... where that would be more pieces than so many, for each of which two steps may be waited for ...
QUIET_SHARE = 1 / 8  # ... and of the time, so that training has the table and the processors for the rest
SHORT_SHARE = 1 / 4  # of the time, for what else there is: it is less, and what changes meanwhile takes RAM
QUIET_END, LATE_END = 1 / 2, 3 / 4  # of the time until the next commit, by which rows are written, and all else is done
SAVED_SHARE = 3 / 4  # of the RAM for buffers, that rows may take which changed first, and wait for the disk
LARGE_BYTES = 32 << 20  # of rows in a commit, after which memory is given back: that takes some milliseconds
PART_SLOTS = 1 << 20  # whose rows are put in order at a time, at most ...
PART_SLOT_BYTES = 256  # ... so that the buffers' part of the budget has room for what that takes ...
LEAST_PART_SLOTS = 1 << 14  # ... but for very small ones


class _WriteBuffer:
    """Rows on their way to the file.

    Attributes:
        slots: in the cache, whose rows must not leave it yet.
        ids: of the rows.
        sealed: the bytes to be written, until they are.
        nbytes: of them.
        locations: where they are, once they are written.
    """

    locations: np.ndarray

    def __init__(self, slots: np.ndarray, ids: np.ndarray, sealed: np.ndarray) -> None:
        self.slots, self.ids, self.sealed, self.nbytes = slots, ids, sealed, sealed.nbytes


class _HandOver:
    """What two threads hand to each other.

    Attributes:
        sealed: pieces to be written, and None behind the last one.
        written: pieces to be placed.
        room: for more of them, so that they never take up much RAM.
        is_over: no more are written.
    """

    def __init__(self) -> None:
        self.sealed: SimpleQueue[_WriteBuffer | None] = SimpleQueue()
        self.written: SimpleQueue[_WriteBuffer] = SimpleQueue()
        self.room, self.is_over = threading.Semaphore(PIECES_AHEAD), False


def _rough_order(ids: np.ndarray) -> np.ndarray:
    """Return an order in which ids ascend, but for small parts of their range: a tenth of the time of sorting them."""
    if not len(ids):
        return np.empty(0, np.int64)
    first, last = int(ids.min()), int(ids.max())
    above = ids.view(np.uint64) - np.uint64(first % 2**64)
    return np.argsort((above >> np.uint64(max(0, (last - first).bit_length() - 16))).astype(np.uint16), kind="stable")


def _cut(slots: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    return (slots[start : start + rows] for start in range(0, len(slots), rows))


class CommitWriter:
    """The part of a commit that rows in one tier are: those that are dirty when it begins, as they are then, or all.

    They are *frozen* until they are on their way to the file. Who changes a frozen row first hands it over as it is
    (`save`), so that the commit has the value of the moment that it began, and needs no memory but for pieces. Where
    too many wait for the disk, he writes it himself.

    Attributes:
        tier: whose rows.
        rows: that it writes.

    Args:
        commit: the whole.
        tier: see above.
        freeze: what the commit will publish of its store.
    """

    def __init__(self, commit: StorageCommit, tier: DiskBackend, freeze: CommitSnapshot) -> None:
        self._commit, self.tier, self._freeze = commit, tier, freeze
        self._writing, self._awaited = threading.Lock(), commit.awaited
        self._saved: SimpleQueue[_WriteBuffer | None] = SimpleQueue()  # to be written; None: somebody waits for the end
        self._handed_bytes, self._taken_bytes, self._takes_more = 0, 0, True  # each is counted by one thread
        self.rows = self._freeze_all() if freeze.is_whole else sum(self._freeze_rows(part) for _, part in self._parts())

    @property
    def is_done(self) -> bool:
        """Whether the commit has ended, well or not."""
        return self._commit.is_done

    def flush(self) -> None:
        """Make the commit end soon."""
        self._commit.flush()

    def wake(self) -> None:
        """End the pause between two pieces."""
        self._saved.put(None)

    def wait(self) -> None:
        """Return once the commit has ended; others may have the table meanwhile, but neither close nor drop it."""
        self._commit.wait()

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Go through the flags, some at a time: what is made of them takes little RAM, however many there are."""
        flags = self.tier.cache.flags[: self.tier.cache.used_slots]  # there may be far more that no row ever had
        size = min(PART_SLOTS, max(LEAST_PART_SLOTS, self.tier.store.buffer_bytes // PART_SLOT_BYTES))
        for start in range(0, len(flags), size):
            yield start, flags[start : start + size]

    def _freeze_all(self) -> int:
        cache = self.tier.cache
        for _, slots in cache.batches(LEAST_PART_SLOTS):
            cache.flags[slots] = FROZEN
        return cache.count

    def _freeze_rows(self, flags: np.ndarray) -> int:
        is_dirty = (flags & DIRTY) != 0
        flags[is_dirty] = FROZEN  # those of clean rows stay 0
        return int(np.count_nonzero(is_dirty))

    def save(self, slots: np.ndarray) -> None:
        """Hand over those of `slots` that are frozen, and are about to change. The caller has the table for itself."""
        flags = self.tier.cache.flags
        frozen = slots[(flags[slots] & FROZEN) != 0]
        if frozen.size:
            ids = self.tier.cache.ids_in(frozen)
            piece = _WriteBuffer(frozen, ids, self.tier.store.seal(self.tier.records.bytes, frozen, ids))
            if self._has_room:
                self._handed_bytes += piece.nbytes
                self._saved.put(piece)  # before it is no longer frozen, or it might be the last one, and be missed
                flags[frozen] ^= FROZEN | WRITING
            else:
                with self._writing:
                    locations = self.tier.store.append_sealed(self._freeze.log, piece.sealed, ids)
                self.tier.store.place(ids, locations)
                flags[frozen] &= ~np.uint8(FROZEN)

    @property
    def _has_room(self) -> bool:
        waiting = self._handed_bytes - self._taken_bytes
        return self._takes_more and waiting < self.tier.store.buffer_bytes * SAVED_SHARE

    def write(self) -> None:
        """Write all of them."""
        self._write_frozen()
        self.pause(0.0)  # for what was saved last

    def _write_frozen(self) -> None:
        parts, rows = self._frozen_slots(), self.tier.store.piece_rows(PIECE_BYTES)
        left = self._write_quietly(parts)
        pieces = (piece for part in chain((left,), parts) for piece in _cut(part, rows))
        if self.rows > rows:
            self._write_together(pieces)
        else:
            self._write_one_by_one(pieces)

    def give_back(self) -> None:
        """Make the rows that were not written dirty again; the caller has the table."""
        self._takes_more = False
        with contextlib.suppress(Empty):
            while True:
                if (piece := self._saved.get_nowait()) is not None:
                    self._thaw(piece, DIRTY)
        for _, flags in self._parts():
            flags[(flags & FROZEN) != 0] ^= np.uint8(FROZEN | DIRTY)

    def _frozen_slots(self) -> Iterator[np.ndarray]:
        """Yield the slots of frozen rows, some at a time, in about the order of their ids. They stay where they are."""
        for start, flags in self._parts():
            slots = start + np.flatnonzero(flags & FROZEN)
            yield slots[_rough_order(self.tier.cache.ids_in(slots))]

    def _write_quietly(self, parts: Iterator[np.ndarray]) -> np.ndarray:
        """Write pieces, with pauses between them, until somebody waits for the end; return what is left of a part."""
        nbytes = min(PIECE_BYTES, max(QUIET_BYTES, self.nbytes // QUIET_PIECES))
        rows, rest = self.tier.store.piece_rows(nbytes), 0.0
        room = self.tier.store.room_for(min(rows, self.rows))  # new memory takes longer to fill, and steps wait
        for part in parts:
            for done in range(0, len(part), rows):
                if self.pause(rest):
                    return part[done:]
                started = time.thread_time()
                self._write(self._sealed(part[done : done + rows], room))
                rest = self._commit.pause_after(started)
        return np.empty(0, np.int64)

    def pause(self, seconds: float) -> bool:
        """Wait, and write meanwhile what is handed over; return whether somebody waits for the end."""
        until = time.monotonic() + seconds
        with contextlib.suppress(Empty):
            while True:
                left = until - time.monotonic()
                piece = self._saved.get(block=left > 0 and not self._awaited.is_set(), timeout=max(left, 0.0))
                if piece is not None:
                    self._write(piece)
                    self._taken_bytes += piece.nbytes
        return self._awaited.is_set()

    def _write_one_by_one(self, pieces: Iterable[np.ndarray]) -> None:
        for slots in pieces:
            self._write(self._sealed(slots))

    def _write_together(self, pieces: Iterable[np.ndarray]) -> None:
        """Write pieces while another thread seals the next ones, so that the disk never waits."""
        line = _HandOver()
        sealing = kernels.cpu.threads.BackgroundCall(self._seal_all, (pieces, line))
        try:
            threading.Thread(target=sealing.run_once, name="embedrock-commit-2", daemon=True).start()
        except RuntimeError:  # the system allows no more threads, or Python is about to end
            return self._write_one_by_one(pieces)
        try:
            while (piece := line.sealed.get()) is not None:
                self._append(piece)
                line.written.put(piece)
                line.room.release()
        finally:
            line.is_over = True
            line.room.release()
            error = sealing.wait()
            self._finish(line)
        if error is not None:
            raise error

    def _finish(self, line: _HandOver) -> None:
        try:
            self._place_all(line.written)
        finally:
            for pieces in (line.written, line.sealed):
                while not pieces.empty():
                    self._give_up(pieces.get())

    def _seal_all(self, pieces: Iterable[np.ndarray], line: _HandOver) -> None:
        try:
            for slots in pieces:
                line.room.acquire()
                if line.is_over:
                    break
                line.sealed.put(self._sealed(slots))
                self._place_all(line.written)
        finally:
            line.sealed.put(None)

    def _place_all(self, written: SimpleQueue[_WriteBuffer]) -> None:
        while not written.empty():
            self._place(written.get())

    def _sealed(self, slots: np.ndarray, room: np.ndarray | None = None) -> _WriteBuffer:
        """Copy rows that are frozen still, to memory if it is given; from now on they may change."""
        tier, flags = self.tier, self.tier.cache.flags
        with tier.table_lock.ahead():
            tier.table_lock.settle_steps()  # no side has newer records of rows that are frozen
            slots = slots[(flags[slots] & FROZEN) != 0]
            ids = tier.cache.ids_in(slots)
            sealed = tier.store.seal(tier.records.bytes, slots, ids, room)
            flags[slots] ^= FROZEN | WRITING
        return _WriteBuffer(slots, ids, sealed)

    def _write(self, piece: _WriteBuffer) -> None:
        self._append(piece)
        self._place(piece)

    def _append(self, piece: _WriteBuffer) -> None:
        try:
            with self._writing:
                piece.locations = self.tier.store.append_sealed(self._freeze.log, piece.sealed, piece.ids)
        except BaseException:
            self._give_up(piece)
            raise
        del piece.sealed

    def _place(self, piece: _WriteBuffer) -> None:
        # Each id once, and none of them leaves the cache before it can be found: so the order is of no account.
        try:
            self.tier.store.place(piece.ids, piece.locations)
        except BaseException:
            self._give_up(piece)
            raise
        self._free(piece)

    def _give_up(self, piece: _WriteBuffer | None) -> None:
        if piece is not None:
            self._free(piece, DIRTY)

    def _free(self, piece: _WriteBuffer, more: int = 0) -> None:
        with self.tier.table_lock.ahead():
            self._thaw(piece, more)

    def _thaw(self, piece: _WriteBuffer, more: int) -> None:
        flags = self.tier.cache.flags
        slots = piece.slots[(flags[piece.slots] & WRITING) != 0]  # rows may have left for good meanwhile
        flags[slots] = flags[slots] & ~np.uint8(WRITING) | np.uint8(more)

    @property
    def nbytes(self) -> int:
        """About how many bytes of files the rows need."""
        return bytes_for(self.tier, self.rows)

    def free(self) -> None:
        """Forget the files."""
        del self._freeze


class _PacedArray:
    """An array that changes while it is written, with a pause after each piece.

    Args:
        array: the same.
        rest: pauses after work that began at a time of this thread.
    """

    def __init__(self, array: PiecewiseArray, rest: Callable[[float], None]) -> None:
        self._array, self._rest = array, rest
        self.dtype, self.shape = array.dtype, array.shape

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield it, some rows at a time."""
        started = time.thread_time()
        for piece in self._array.pieces():
            yield piece
            self._rest(started)
            started = time.thread_time()


class NewHistory(NamedTuple):
    """What a table remembers besides records, for a commit to write.

    Attributes:
        arrays: by name, for a new file.
        after: files of earlier commits, of which they are changes; none where they are all.
    """

    arrays: Mapping[str, Written]
    after: tuple[HistoryFile, ...]


class StorageCommit:
    """One commit under way, of all tiers of a table or group.

    Attributes:
        number: of the commit.
        parts: of the tiers; none once it has ended.
        awaited: somebody waits for its end.
        is_done: it has ended, well or not.
        error: what went wrong.

    Args:
        volume: that it is of.
        tiers: one for each of its stores. The caller has them for itself.
        turn: who has them.
        changes: fields of the manifest.
        histories: what tables remember besides records, by the member's name; "" of a table alone.
        keep: commits to retain.
        after: called once it is published.
    """

    def __init__(
        self,
        table_folder: TableFolder,
        tiers: Sequence[DiskBackend],
        table_lock: TableLock,
        changes: Mapping[str, Any],
        histories: Mapping[str, NewHistory],
        keep: int,
        after: Callable[[], None],
    ) -> None:
        self._table_folder, self._table_lock, self._changes, self._keep, self._after = (
            table_folder,
            table_lock,
            changes,
            keep,
            after,
        )
        self._histories, self._files = dict(histories), dict[str, tuple[HistoryFile, ...]]()
        self._written: list[HistoryFile] = []
        self.awaited, self._ending, self._is_over = threading.Event(), threading.Lock(), False
        self._thread: threading.Thread | None = None
        self.is_done = False
        self.error: BaseException | None = None
        self.number = table_folder.manifest.commit + 1
        self._freezes = table_folder.freeze([functools.partial(_are_in_cache, tier) for tier in tiers])
        self.parts = [CommitWriter(self, tier, freeze) for tier, freeze in zip(tiers, self._freezes, strict=True)]

    @property
    def nbytes(self) -> int:
        """About how many bytes of files its rows need."""
        return sum(part.nbytes for part in self.parts)

    def flush(self) -> None:
        """Make it end soon, as somebody waits for that, at the cost of all else that goes on."""
        with self._ending:
            if not self._is_over:
                self._await(True)
        self.awaited.set()
        for part in self.parts:
            part.wake()

    def _await(self, is_awaited: bool) -> None:
        for part in self.parts:
            part.tier.store.commit_is_awaited = is_awaited

    def _patience(self, end: float) -> float:
        """Return how much of its pauses it takes: none from `end` of the interval on, less in the quarter before."""
        return min(1.0, max(0.0, 4.0 * (end - (time.monotonic() - self._begun) / self._interval)))

    def start(self, interval: float) -> None:
        """Do the rest in the background; another commit may come after so many seconds."""
        self._begun, self._interval = time.monotonic(), interval
        thread = threading.Thread(target=self._run, name="embedrock-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            if self.awaited.is_set() and AT_END in str(error):
                return self._run()
            self._give_back()
            self._end()
            self.error, self.is_done = error, True
            self._forget_rows()
        else:
            self._thread = thread

    def _end(self) -> None:
        with self._ending:
            self._await(False)
            self._is_over = True
        self._freezes = ()  # who has the commit still need not have its files
        for part in self.parts:
            part.free()

    def _forget_rows(self) -> None:
        """Let go of the rows: a table that is closed, and that somebody has still, has no RAM for them."""
        self.parts, self._after = [], _nothing

    def join(self) -> None:
        """Return once it has ended, without a claim to the table."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self.flush()
            self._thread.join()

    def _run(self) -> None:
        """Write all rows and publish them. What goes wrong is in `error` afterwards, and the rows are dirty again."""
        try:
            self._write_and_publish()
        finally:
            self._end()
            nbytes = self.nbytes
            # With the lock, or who sees it might, holding that, wait for this thread, and this one for the lock.
            with self._table_lock.ahead():
                self.is_done = True
                self._table_lock.notify()
            self._forget_rows()
            if nbytes >= LARGE_BYTES:
                platform.give_back_memory()  # or each of the threads of commits leaves some behind

    @spanned("commit")
    def _write_and_publish(self) -> None:
        try:
            self._write_histories()
            for part in self.parts:
                part.write()
            changes = with_histories(self._changes, self._files)
            self._table_folder.publish(self._freezes, changes, self._keep, self._rest_late)
        except BaseException as error:
            self.error = error
            self._give_back()
        else:
            self._after()  # what goes wrong there is no failure of the commit

    def _write_histories(self) -> None:
        while self._histories:  # each is gone once it is written: it may take some RAM
            name, new = self._histories.popitem()
            self._written.append(
                self._table_folder.write_history({key: self._slowed(each) for key, each in new.arrays.items()})
            )
            self._files[name] = (*new.after, self._written[-1])
            del new

    def _slowed(self, array: Written) -> Written:
        return array if isinstance(array, np.ndarray) else _PacedArray(array, self.rest)

    def rest(self, started: float, end: float = QUIET_END) -> None:
        """Pause after work that began at such a time of this thread, unless somebody waits for the end."""
        seconds = self.pause_after(started, SHORT_SHARE, end) / len(self.parts)
        for part in self.parts:  # which write what was handed over meanwhile, or it would come to a lot
            part.pause(seconds)

    def _rest_late(self, started: float) -> None:
        self.rest(started, LATE_END)

    def pause_after(self, started: float, share: float = QUIET_SHARE, end: float = QUIET_END) -> float:
        """Return how long to pause after work that began at such a time of this thread, and takes a share of all.

        There are no pauses any more from the moment on at which so much is over of the time until the next commit.
        """
        return (time.thread_time() - started) * (1 / share - 1) * self._patience(end)

    def _give_back(self) -> None:
        """Make the rows that were not written dirty again; those that were are in a log that the next commit takes."""
        with self._table_lock.lock:
            for part in self.parts:
                part.give_back()
        self._table_folder.undo_steps(self._written)

    def wait(self) -> None:
        """Return once it has ended; others may have the table meanwhile, but neither close it nor drop its rows."""
        self.flush()
        with contextlib.ExitStack() as users:
            for part in self.parts:
                users.enter_context(part.tier.in_use())
            self._table_lock.wait_for(lambda: self.is_done)


def _nothing() -> None:
    """Do nothing."""


def _are_in_cache(tier: DiskBackend, ids: np.ndarray) -> np.ndarray:
    return tier.cache.find(ids) >= 0


def bytes_for(tier: DiskBackend, rows: int) -> int:
    """Return about how many bytes of files so many rows of a tier need."""
    return rows * (tier.spec.record_bytes + CRC_BYTES + ID_BYTES)


def with_histories(changes: Mapping[str, Any], files: Mapping[str, tuple[HistoryFile, ...]]) -> Mapping[str, Any]:
    """Return fields of a manifest with files of histories, by the member's name; "" for those of a table alone."""
    members, alone = changes.get("members", ()), {"history": files[""]} if "" in files else {}
    found = [replace(each, history=files[each.name]) if each.name in files else each for each in members]
    return {**changes, **alone, **({"members": tuple(found)} if found else {})}
