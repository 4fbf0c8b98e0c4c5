"""`Upkeep`: what is done to a table's files between commits, in the background: compaction, and folding of logs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embedrock.process import platform
from embedrock.store.compaction import Stopped, compact, compact_in_pieces, let_commits_pass
from embedrock.store.folding import fold
from embedrock.store.pieces import Goal
from embedrock.store.store import PIECE_BYTES, Store

BYTES_PER_SECOND = 100e6  # written in the background, so that it leaves most of a disk to training
FOLDED_AT_ONCE = 4 << 20  # of logs, before a commit ends; more of them in the background


class Upkeep:
    """Compacts and folds the files of a table. What goes wrong is a warning: nothing has changed then.

    Args:
        path: of the table.

    Attributes:
        failed: how often something went wrong.
        compaction: the thread of the last one.
    """

    def __init__(self, path: str) -> None:
        self.failed = 0
        self.compaction: threading.Thread | None = None
        self._path, self._folding, self._stopping = path, self.compaction, threading.Event()

    def compact(self, goals: Mapping[Store, Goal | None]) -> None:
        """Fold logs into base chunks while others go on, store by store, unless that is under way.

        Args:
            goals: what each store should come down to; None: fold all.
        """
        self.compaction = self._start(self.compaction, "embedrock-compact", self._compact, goals)

    def _compact(self, goals: Mapping[Store, Goal | None]) -> None:
        args = BYTES_PER_SECOND, self._stopping.is_set
        try:
            for store, goal in goals.items():
                if goal is None:
                    compact(store, *args)
                else:
                    compact_in_pieces(store, goal, *args)
        finally:
            platform.give_back_memory()  # or each of the threads of commits and compactions leaves some behind

    def fold(self, stores: Sequence[Store]) -> None:
        """Make few logs of many, here and now where they are small."""
        self._try(self._fold, stores)

    def _fold(self, stores: Sequence[Store]) -> None:
        large = [store for store in stores if fold(store, FOLDED_AT_ONCE, lambda: None)]
        if large:
            self._folding = self._start(self._folding, "embedrock-fold", self._fold_all, large)

    def _fold_all(self, stores: Sequence[Store]) -> None:
        for store in stores:
            fold(store, None, lambda store=store: self._pace(store))

    def _pace(self, store: Store) -> None:
        """Leave the disk to others; called every few MB."""
        if not store.hurry:
            self._stopping.wait(PIECE_BYTES / BYTES_PER_SECOND)
        let_commits_pass(store, self._stopping.is_set)
        if self._stopping.is_set():
            raise Stopped

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
        except RuntimeError:  # the system allows no more threads: it is tried again after the next commit
            self.failed += 1
            return running
        return thread

    def _try(self, function: Callable[..., object], *args: Any) -> None:
        try:
            function(*args)
        except Stopped:
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
        """End what runs in the background; what it has written so far is removed."""
        threads = [each for each in (self.compaction, self._folding) if each is not None]
        if threads:
            self._stopping.set()
        for thread in threads:
            thread.join()
        self.compaction = self._folding = None
