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
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.storage.cache import DIRTY, FROZEN, WRITING
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.slot_index import ID_BYTES
from embedrock.storage.table_lock import TableLock
from embedrock.store.history import Written
from embedrock.store.manifest import HistoryFile, TableEntry
from embedrock.store.record_store import CommitSnapshot
from embedrock.store.segments import CRC_BYTES
from embedrock.store.table_folder import TableFolder
from embedrock.system import platform
from embedrock.system.arena import cut
from embedrock.system.scopes import on_failure
from embedrock.system.spans import spanned

AT_END = "interpreter shutdown"  # in the error of Python 3.12 and newer for threads that start too late
PIECE_BYTES = 6 << 20  # size of a write buffer
PIECES_AHEAD = 2  # write buffers sealed ahead of the disk
QUIET_BYTES = 512 << 10  # size of a write buffer if no thread waits for the end; larger ...
QUIET_PIECES = 64  # ... if that makes more buffers than these: two steps may be waited for per buffer ...
QUIET_SHARE = 1 / 8  # ... and share of the time: training has the table and the processors for the rest
SHORT_SHARE = 1 / 4  # share of the time for all else, which is less work, while changed rows take RAM
QUIET_END, LATE_END = 1 / 2, 3 / 4  # share of the interval by which rows are written, and by which all else is done
SAVED_SHARE = 3 / 4  # share of the buffers' RAM for rows that changed first, and wait for the disk
LARGE_BYTES = 32 << 20  # size of a commit after which memory is given back, which takes some milliseconds
PART_SLOTS = 1 << 20  # most slots whose rows are sorted at a time ...
PART_SLOT_BYTES = 256  # ... so that sorting fits the buffers' share of the budget ...
LEAST_PART_SLOTS = 1 << 14  # ... except in very small ones


class _WriteBuffer:
    """Rows on their way to the file.

    Attributes:
        slots: cache slots of the rows, which must not be evicted yet.
        sealed: the bytes to write, until they are written.
        locations: places of the rows in files, once they are written.
    """

    locations: np.ndarray

    def __init__(self, slots: np.ndarray, ids: np.ndarray, sealed: np.ndarray) -> None:
        self.slots, self.ids, self.sealed, self.nbytes = slots, ids, sealed, sealed.nbytes


class _HandOver:
    """The queues between the thread that seals buffers and the one that writes them.

    Attributes:
        sealed: buffers to be written, and None behind the last one.
        written: buffers to be indexed.
        room: permits for more buffers, which bound their RAM.
        is_over: no more buffers are written.
    """

    def __init__(self) -> None:
        self.sealed: SimpleQueue[_WriteBuffer | None] = SimpleQueue()
        self.written: SimpleQueue[_WriteBuffer] = SimpleQueue()
        self.room, self.is_over = threading.Semaphore(PIECES_AHEAD), False


def _rough_order(ids: np.ndarray) -> np.ndarray:
    """Return an order in which ids ascend except within small ranges. It takes a tenth of the time of sorting."""
    if not len(ids):
        return np.empty(0, np.int64)
    first, last = int(ids.min()), int(ids.max())
    above = ids.view(np.uint64) - np.uint64(first % 2**64)
    return np.argsort((above >> np.uint64(max(0, (last - first).bit_length() - 16))).astype(np.uint16), kind="stable")


class CommitWriter:
    """The part of a commit in one backend: dirty rows as they are when it begins, or all rows.

    Copy on write: rows are *frozen* until they are written. Before a frozen row changes, `save` copies it for the
    commit. So the commit holds the values of the moment it began, and needs RAM only for write buffers. If too many
    copies wait for the disk, `save` writes them itself.

    Attributes:
        rows: number of rows to write.

    Args:
        snapshot: the snapshot of its store that the commit will publish.
    """

    def __init__(self, commit: StorageCommit, tier: DiskBackend, snapshot: CommitSnapshot) -> None:
        self._commit, self.tier, self._snapshot = commit, tier, snapshot
        self._writing, self._awaited = threading.Lock(), commit.awaited
        self.flush, self.wait = commit.flush, commit.wait
        self._saved: SimpleQueue[_WriteBuffer | None] = SimpleQueue()  # to be written; None: a thread waits for the end
        self._handed_bytes, self._taken_bytes, self._takes_more = 0, 0, True  # each is counted by one thread
        self.rows = self._freeze()

    @property
    def is_done(self) -> bool:
        return self._commit.is_done

    def wake(self) -> None:
        """End the pause between two write buffers."""
        self._saved.put(None)

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """Iterate over parts of the flags, which bounds the RAM of working on them."""
        flags = self.tier.cache.flags[: self.tier.cache.used_slots]  # the others never had a row
        size = min(PART_SLOTS, max(LEAST_PART_SLOTS, self.tier.store.buffer_bytes // PART_SLOT_BYTES))
        for start in range(0, len(flags), size):
            yield start, flags[start : start + size]

    def _freeze(self) -> int:
        cache, rows = self.tier.cache, 0
        if self._snapshot.is_whole:
            for ids, slots in cache.batches(LEAST_PART_SLOTS):
                self._snapshot.changed_ids.append(ids[(cache.flags[slots] & DIRTY) != 0])
                cache.flags[slots] = FROZEN
            return cache.count
        for _, flags in self._parts():
            is_dirty = (flags & DIRTY) != 0
            flags[is_dirty] = FROZEN  # flags of clean rows stay 0
            rows += int(np.count_nonzero(is_dirty))
        return rows

    def save(self, slots: np.ndarray) -> None:
        """Copy the rows of `slots` that are frozen, and are about to change. Caller holds the table lock."""
        flags = self.tier.cache.flags
        frozen = slots[(flags[slots] & FROZEN) != 0]
        if frozen.size:
            ids = self.tier.cache.ids_in(frozen)
            piece = _WriteBuffer(frozen, ids, self.tier.store.seal(self.tier.records.bytes, frozen, ids))
            waiting = self._handed_bytes - self._taken_bytes
            if self._takes_more and waiting < self.tier.store.buffer_bytes * SAVED_SHARE:
                self._handed_bytes += piece.nbytes
                self._saved.put(piece)  # before the flag goes, or the last buffer might be missed
                flags[frozen] ^= FROZEN | WRITING
            else:
                with self._writing:
                    locations = self.tier.store.append_sealed(self._snapshot.log, piece.sealed, ids)
                self.tier.store.place(ids, locations)
                flags[frozen] &= ~np.uint8(FROZEN)

    def write(self) -> None:
        parts, rows = self._frozen_slots(), self.tier.store.piece_rows(PIECE_BYTES)
        left = self._write_quietly(parts)
        pieces = (piece for part in chain((left,), parts) for piece in cut(part, rows))
        (self._write_together if self.rows > rows else self._write_one_by_one)(pieces)
        self.pause(0.0)  # writes the rows that were saved last

    def give_back(self) -> None:
        """Mark the rows that were not written as dirty again. Caller holds the table lock."""
        self._takes_more = False
        with contextlib.suppress(Empty):
            while True:
                if (piece := self._saved.get_nowait()) is not None:
                    self._thaw(piece, DIRTY)
        for _, flags in self._parts():
            flags[(flags & FROZEN) != 0] ^= np.uint8(FROZEN | DIRTY)

    def _frozen_slots(self) -> Iterator[np.ndarray]:
        """Yield the slots of frozen rows, part by part, roughly in the order of their ids. The rows stay."""
        for start, flags in self._parts():
            slots = start + np.flatnonzero(flags & FROZEN)
            yield slots[_rough_order(self.tier.cache.ids_in(slots))]

    def _write_quietly(self, parts: Iterator[np.ndarray]) -> np.ndarray:
        """Write buffers with pauses until a thread waits for the end; return the remaining slots of a part."""
        nbytes = min(PIECE_BYTES, max(QUIET_BYTES, self.nbytes // QUIET_PIECES))
        rows, rest = self.tier.store.piece_rows(nbytes), 0.0
        room = self.tier.store.room_for(min(rows, self.rows))  # filling new memory takes longer, and steps wait for it
        for part in parts:
            for done in range(0, len(part), rows):
                if self.pause(rest):
                    return part[done:]
                started = time.thread_time()
                self._write(self._sealed(part[done : done + rows], room))
                rest = self._commit.pause_after(started)
        return np.empty(0, np.int64)

    def pause(self, seconds: float) -> bool:
        """Wait, and write the rows saved meanwhile; return whether a thread waits for the end."""
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
        """Write buffers while another thread seals the next ones, so that the disk never waits."""
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
                    if (piece := pieces.get()) is not None:
                        self._free(piece, DIRTY)

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
        """Copy rows that are still frozen, to `room` if given. From now on they may change."""
        tier, flags = self.tier, self.tier.cache.flags
        with tier.table_lock.ahead():
            tier.table_lock.settle_steps()  # no executor has newer records of frozen rows
            slots = slots[(flags[slots] & FROZEN) != 0]
            ids = tier.cache.ids_in(slots)
            sealed = tier.store.seal(tier.records.bytes, slots, ids, room)
            flags[slots] ^= FROZEN | WRITING
        return _WriteBuffer(slots, ids, sealed)

    def _write(self, piece: _WriteBuffer) -> None:
        self._append(piece)
        self._place(piece)

    def _append(self, piece: _WriteBuffer) -> None:
        with on_failure(lambda: self._free(piece, DIRTY)), self._writing:
            piece.locations = self.tier.store.append_sealed(self._snapshot.log, piece.sealed, piece.ids)
        del piece.sealed

    def _place(self, piece: _WriteBuffer) -> None:
        # The order is free: each id comes once, and no row leaves the cache before the files have it.
        with on_failure(lambda: self._free(piece, DIRTY)):
            self.tier.store.place(piece.ids, piece.locations)
        self._free(piece)

    def _free(self, piece: _WriteBuffer, more: int = 0) -> None:
        with self.tier.table_lock.ahead():
            self._thaw(piece, more)

    def _thaw(self, piece: _WriteBuffer, more: int) -> None:
        flags = self.tier.cache.flags
        slots = piece.slots[(flags[piece.slots] & WRITING) != 0]  # rows may have been deleted meanwhile
        flags[slots] = flags[slots] & ~np.uint8(WRITING) | np.uint8(more)

    @property
    def nbytes(self) -> int:
        """Approximate bytes of files for the rows."""
        return bytes_for(self.tier, self.rows)

    def free(self) -> None:
        """Release the files."""
        del self._snapshot


# Arrays of a new file by name, and the files of earlier commits that it continues; none if it is complete.
NewHistory = tuple[Mapping[str, Written], tuple[HistoryFile, ...]]


class StorageCommit:
    """A running commit of all backends of a table or group.

    Attributes:
        parts: one writer for each backend; none once it has ended.
        awaited: set once a thread waits for its end.
        is_done: it has ended, with or without an error.

    Args:
        tiers: one for each of its stores. Caller holds the table lock.
        changes: fields of the manifest.
        members: entries of the tables.
        histories: state of tables outside of records, by the member's name; "" for a table alone.
        keep: commits to retain.
        after: called once it is published.
    """

    def __init__(
        self,
        table_folder: TableFolder,
        tiers: Sequence[DiskBackend],
        table_lock: TableLock,
        changes: Mapping[str, Any],
        members: Sequence[TableEntry],
        histories: Mapping[str, NewHistory],
        keep: int,
        after: Callable[[], None],
    ) -> None:
        self._table_folder, self._table_lock, self._keep, self._after = table_folder, table_lock, keep, after
        self._changes, self._members = changes, members
        self._histories, self._files = dict(histories), dict[str, tuple[HistoryFile, ...]]()
        self._written: list[HistoryFile] = []
        self.awaited, self._ending, self._is_over = threading.Event(), threading.Lock(), False
        self._thread: threading.Thread | None = None
        self.is_done = False
        self.error: BaseException | None = None
        self.number = table_folder.manifest.commit + 1
        self._snapshots = table_folder.freeze([lambda ids, tier=tier: tier.cache.find(ids) >= 0 for tier in tiers])
        self.parts = [CommitWriter(self, tier, snapshot) for tier, snapshot in zip(tiers, self._snapshots, strict=True)]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def flush(self) -> None:
        """End it soon, because a thread waits for it, at the cost of all other work."""
        with self._ending:
            if not self._is_over:
                self._await(True)
        self.awaited.set()
        for part in self.parts:
            part.wake()

    def _await(self, is_awaited: bool) -> None:
        for part in self.parts:
            part.tier.store.commit_is_awaited = is_awaited

    def start(self, interval: float) -> None:
        """Write the rest in the background; the next commit is expected after `interval` seconds."""
        self._begun, self._interval = time.monotonic(), interval
        thread = threading.Thread(target=self._run, name="embedrock-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            if self.awaited.is_set() and AT_END in str(error):
                return self._run()
            self._give_back()
            self._end()
            self.error, self.is_done, self.parts = error, True, []
            del self._after
        else:
            self._thread = thread

    def _end(self) -> None:
        with self._ending:
            self._await(False)
            self._is_over = True
        self._snapshots = ()  # an ended commit holds no files
        for part in self.parts:
            part.free()

    def join(self) -> None:
        """Wait for its end without using the table."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self.flush()
            self._thread.join()

    def _run(self) -> None:
        """Write all rows and publish them. An error is stored in `error`, and the rows are dirty again."""
        try:
            self._write_and_publish()
        finally:
            self._end()
            nbytes = self.nbytes
            # Under the lock. Otherwise a thread that holds it might wait for this thread, and this thread for the lock.
            with self._table_lock.ahead():
                self.is_done = True
                self._table_lock.notify()
            self.parts = []  # a closed table holds no RAM for rows
            del self._after
            if nbytes >= LARGE_BYTES:
                platform.give_back_memory()  # or each commit thread leaves some behind

    @spanned("commit")
    def _write_and_publish(self) -> None:
        try:
            self._write_histories()
            for part in self.parts:
                part.write()
            members = (replace(each, history=self._files.get(each.name, each.history)) for each in self._members)
            changes = {**self._changes, "members": tuple(members)}
            self._table_folder.publish(self._snapshots, changes, self._keep, functools.partial(self.rest, end=LATE_END))
        except BaseException as error:
            self.error = error
            self._give_back()
        else:
            self._after()  # an error there is no failure of the commit

    def _write_histories(self) -> None:
        while self._histories:  # each is released once it is written: it may take some RAM
            name, (arrays, after) = self._histories.popitem()
            slowed = {key: self._slowed(each) for key, each in arrays.items()}
            self._written.append(self._table_folder.write_history(slowed))
            self._files[name] = (*after, self._written[-1])
            del arrays

    def _slowed(self, array: Written) -> Written:
        if isinstance(array, np.ndarray):
            return array

        def pieces() -> Iterator[np.ndarray]:
            started = time.thread_time()
            for piece in array.pieces():
                yield piece
                self.rest(started)
                started = time.thread_time()

        return array._replace(pieces=pieces)

    def rest(self, started: float, end: float = QUIET_END) -> None:
        """Pause after work that began at thread time `started`, unless a thread waits for the end."""
        seconds = self.pause_after(started, SHORT_SHARE, end) / len(self.parts)
        for part in self.parts:  # each writes the rows saved meanwhile, which would take much RAM
            part.pause(seconds)

    def pause_after(self, started: float, share: float = QUIET_SHARE, end: float = QUIET_END) -> float:
        """Return the pause after work that began at thread time `started` and may take `share` of the time.

        Pauses end at the share `end` of the interval to the next commit, and are shorter in the quarter before.
        """
        patience = min(1.0, max(0.0, 4.0 * (end - (time.monotonic() - self._begun) / self._interval)))
        return (time.thread_time() - started) * (1 / share - 1) * patience

    def _give_back(self) -> None:
        """Mark the rows that were not written as dirty again. The next commit takes the log of the written ones."""
        with self._table_lock.lock:
            for part in self.parts:
                part.give_back()
        self._table_folder.undo_steps(self._written)

    def wait(self) -> None:
        """Wait for its end. The table lock is released meanwhile, but the table is neither closed nor dropped."""
        self.flush()
        with contextlib.ExitStack() as users:
            for part in self.parts:
                users.enter_context(part.tier.in_use())
            self._table_lock.wait_for(lambda: self.is_done)


def bytes_for(tier: DiskBackend, rows: int) -> int:
    """Return the approximate bytes of files for `rows` rows of a backend."""
    return rows * (tier.spec.record_bytes + CRC_BYTES + ID_BYTES)
