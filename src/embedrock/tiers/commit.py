"""`Commit`: the rows that changed, on their way to disk while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from embedrock import kernels
from embedrock.cache import DIRTY, FROZEN, WRITING

if TYPE_CHECKING:
    from embedrock.tiers.disk import Disk

PIECE_ROWS = 4096  # sealed, and written, at a time


class Commit:
    """One commit under way: the rows that are dirty when it begins, as they are then.

    Its rows are *frozen* until they are on their way to the file. Who changes a frozen row first writes it itself
    (`save`), so that the commit has the value of the moment that it began, and needs no memory but a piece.

    Attributes:
        number: of the commit.
        rows: that were dirty in the cache.
        is_done: it has ended, well or not.
        error: what went wrong.

    Args:
        tier: of the table; the caller has it for itself.
        changes: fields of the manifest.
        keep: commits to retain.
        after: called once it is published.
    """

    def __init__(self, tier: Disk, changes: dict[str, Any], keep: int, after: Callable[[Disk], None]) -> None:
        self._tier, self._changes, self._keep, self._after = tier, changes, keep, after
        self._freeze = tier.store.freeze()
        self.number = tier.store.manifest.commit + 1
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_done = self._failed = False
        self.error: BaseException | None = None
        flags = tier.cache.flags
        self._slots = tier.cache.flagged(DIRTY)
        flags[self._slots] = FROZEN  # those of clean rows stay 0
        self.rows = len(self._slots)

    def save(self, slots: np.ndarray) -> None:
        """Write those of `slots` that are frozen, which are about to change. The caller has the table for itself."""
        flags = self._tier.cache.flags
        frozen = slots[(flags[slots] & FROZEN) != 0]
        if frozen.size:
            ids = self._tier.cache.ids[frozen]
            sealed = self._tier.store.seal(self._tier.records.bytes, frozen, ids)
            with self._writing:
                self._tier.store.append_sealed(self._freeze.log, sealed, ids)
            flags[frozen] &= ~np.uint8(FROZEN)

    def start(self) -> None:
        """Do the rest in the background."""
        thread = threading.Thread(target=self._run, name="embedrock-commit", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._thaw()
            self.error, self.is_done = error, True
        else:
            self._thread = thread

    def join(self) -> None:
        """Return once it has ended, without a claim to the table."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """Write all rows and publish them. What goes wrong is in `error` afterwards, and the rows are dirty again."""
        tier = self._tier
        try:
            self._write_all()
            tier.store.publish(self._freeze, self._changes, self._keep)
        except BaseException as error:
            self.error = error
            self._thaw()
        try:
            if self.error is None:
                self._after(tier)  # what goes wrong there is no failure of the commit
        finally:
            with tier.turn.lock:  # or who sees it might, with the lock, wait for this thread, and this one for the lock
                self.is_done = True
                tier.turn.notify()

    def _write_all(self) -> None:
        slots = self._slots[np.argsort(self._tier.cache.ids[self._slots])]  # frozen rows stay where they are
        pieces = iter([slots[start : start + PIECE_ROWS] for start in range(0, len(slots), PIECE_ROWS)])
        if len(slots) <= PIECE_ROWS:
            return self._write_pieces(pieces)
        # Two threads, so that one seals a piece while the other's is written.
        helper = kernels.cpu.runtime.Call(self._write_pieces, (pieces,))
        threading.Thread(target=helper.run_once, name="embedrock-commit-2", daemon=True).start()
        try:
            self._write_pieces(pieces)
        finally:
            error = helper.wait()
        if error is not None:
            raise error

    def _write_pieces(self, pieces: Iterator[np.ndarray]) -> None:
        for slots in pieces:
            if self._failed:
                return
            try:
                self._write(slots)
            except BaseException:
                self._failed = True
                raise

    def _write(self, slots: np.ndarray) -> None:
        tier = self._tier
        flags = tier.cache.flags
        with tier.turn.alone():
            slots = slots[(flags[slots] & FROZEN) != 0]
            ids = tier.cache.ids[slots]
            sealed = tier.store.seal(tier.records.bytes, slots, ids)
            flags[slots] ^= FROZEN | WRITING
        try:
            with self._writing:
                tier.store.append_sealed(self._freeze.log, sealed, ids)
        except BaseException:
            with tier.turn.lock:
                flags[slots] |= DIRTY
            raise
        finally:
            with tier.turn.lock:
                flags[slots] &= ~np.uint8(WRITING)

    def _thaw(self) -> None:
        """Make the rows that were not written dirty again; those that were are in a log that the next commit takes."""
        with self._tier.turn.lock:
            flags, frozen = self._tier.cache.flags, self._tier.cache.flagged(FROZEN)
            flags[frozen] ^= FROZEN | DIRTY

    def wait(self) -> None:
        """Return once it has ended; others may have the table meanwhile, but neither close it nor drop its rows."""
        with self._tier.in_use():
            self._tier.turn.wait_for(lambda: self.is_done)
