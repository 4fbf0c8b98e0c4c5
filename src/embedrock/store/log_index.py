"""`LogIndex`: hash index in RAM of the newest records in logs that are not compacted yet."""

from __future__ import annotations

import copy
import mmap
import os

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError, MemoryBudgetError
from embedrock.system import platform
from embedrock.system.arena import HUGE_PAGE
from embedrock.system.sizes import format_bytes

ENTRY_BYTES = 16
PAGE = 4096
FULLEST = 0.92  # load factor at which the index grows
GROWTH = 1.25  # an entry in use costs at most 16 * 1.25 / 0.92 = 21.7 bytes, plus a page
BYTES_A_ROW = 24  # memory beyond that, plus a page, is released
SHRUNK = 0.75  # load factor after a release


def _whole_pages(entries: float) -> int:
    return -(-int(entries) * ENTRY_BYTES // PAGE) * PAGE // ENTRY_BYTES


def _most(total: int) -> int:
    return int(total * FULLEST)


def _last(nbytes: int) -> int:
    return nbytes // PAGE * PAGE // ENTRY_BYTES


def room(nbytes: int) -> int:
    """Return how many rows fit a log index of `nbytes` bytes."""
    return _most(_last(nbytes))


class LogIndex:
    """Hash table from id to location. Growth is in place, by small steps, and never needs twice the memory.

    Callers hold the store's lock, because the system moves the memory when it grows. Only `count`, `nbytes` and
    `bytes_with` need no lock.

    The table grows up to `most_bytes`, with a smaller last step. Further inserts grow the table beyond that.

    Room for `rows` rows at once halves the time to fill it, as a table that grows is crowded in between. An insert took
    57 ns per row (10 M at once). A growth took 14 ms at 1 M rows, and 62 ms at 4.4 M.
    """

    def __init__(self, rows: int = 0) -> None:
        self.count, self.most_bytes = 0, 1 << 62
        self._salt = np.uint64(int.from_bytes(os.urandom(8), "little"))
        self._memory = platform.private_memory(PAGE)
        self._map()
        if rows:
            self._resize(_whole_pages(rows / SHRUNK))
        self._homes = self._rebuild(len(self._entries))

    def copy(self) -> LogIndex:
        """Return another index of the same rows, which may take further ones."""
        made = copy.copy(self)
        made._memory = platform.private_memory(len(self._memory))
        made._map()
        made._entries[:] = self._entries
        return made

    def _map(self) -> None:
        if platform.HAS_HUGE_PAGES and len(self._memory) > HUGE_PAGE:  # all of it is in use: 700,000 inserts took half
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._entries = np.frombuffer(self._memory, np.uint64).reshape(-1, 2)
        self._total = len(self._entries)

    def _rebuild(self, total: int) -> int:
        homes = kernels.cpu.storage.rebuild_overlay(self._entries, total, self.count)
        self._is_damaged = homes < 0
        self._check()
        return homes

    def _check(self) -> None:
        if self._is_damaged:
            raise CorruptTableError(
                f"the index in RAM of {self.count} rows that are not compacted yet is damaged: so many entries that "
                "ascend were expected. The files are as they were: close the table without a commit, and open it "
                "again. Please report this."
            )

    def _resize(self, total: int) -> None:
        del self._entries  # a view of the memory prevents a resize
        try:
            self._memory = platform.resized(self._memory, total * ENTRY_BYTES)
        except OSError as error:
            raise MemoryBudgetError(
                f"the index of {self.count} rows that are not compacted yet needs {format_bytes(total * ENTRY_BYTES)}, "
                f"and the system refused: {error}. Call compact() more often, or lift the limit (ulimit -v)."
            ) from error
        finally:
            self._map()

    @property
    def most_rows(self) -> int:
        return max(1, room(self.most_bytes))

    @property
    def fullness(self) -> float:
        """Return the used share. At 1, compaction must make room."""
        return self.count / self.most_rows

    @property
    def nbytes(self) -> int:
        return self._total * ENTRY_BYTES

    def bytes_with(self, more: int) -> int:
        """Return the most RAM that inserting `more` rows takes, in bytes."""
        return self._total_with(more) * ENTRY_BYTES

    def _total_with(self, more: int) -> int:
        total, last = self._total, _last(self.most_bytes)
        while self.count + more > _most(total):
            grown = _whole_pages(total * GROWTH)
            total = last if total < last < grown else grown
        return total

    @property
    def place(self) -> tuple[np.ndarray, int, np.uint64]:
        """Return the first arguments of the kernel `find_overlay`. No reference may outlast the store's lock."""
        self._check()
        return self._entries, self._homes, self._salt

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the location of each id, int64 (n,). -1: not found. Ids may repeat."""
        cpu, locations = kernels.cpu, np.empty(len(ids), np.int64)
        cpu.launch(cpu.storage.find_overlay, *self.place, ids, locations)
        return locations

    def insert(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Set the locations of ids. Of equal ids, the last one counts."""
        done, has_grown = self._insert(ids, locations, 0), False
        while done < len(ids):
            if self.count == _most(len(self._entries)):
                self._resize(self._total_with(len(ids) - done))
                has_grown = True
            self._homes = self._rebuild(len(self._entries))
            done = self._insert(ids, locations, done)
        if has_grown:
            self.fit()  # many of the ids may have been known

    def _insert(self, ids: np.ndarray, locations: np.ndarray, start: int) -> int:
        # Insert from `start` on, and return the end of the inserted part.
        args = self.count, _most(len(self._entries)), ids, locations, start
        done, self.count = kernels.cpu.launch(kernels.cpu.storage.insert_overlay, *self.place, *args)
        return done

    def remove(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Remove ids that still have these locations. The memory stays, see `fit`.

        If others insert meanwhile, ids must not come in the order of the index (`behind`). Removal in that
        order empties one end, and crowds the other. Each insert there then moves thousands of entries.
        """
        self.count -= kernels.cpu.launch(kernels.cpu.storage.remove_overlay, *self.place, ids, locations)

    def fit(self) -> None:
        """Release memory beyond the limit per row."""
        if self.nbytes > BYTES_A_ROW * self.count + PAGE:
            # Keep what the rows need.
            total = min(max(_whole_pages(self.count / SHRUNK), PAGE // ENTRY_BYTES), len(self._entries))
            self._homes = self._rebuild(total)
            self._resize(total)

    def behind(self, row: int | None, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return at most `batch` ids and locations behind an id, in the index's order. None: from the start.

        The index may change between calls. Entries present all the time are returned once. An empty result is the end.
        """
        storage, ids, locations = kernels.cpu.storage, np.empty(batch, np.int64), np.empty(batch, np.int64)
        entries, homes, salt = self.place
        start = 0 if row is None else storage.behind_overlay(entries, homes, salt, row)
        _, count = storage.list_overlay(entries, salt, start, ids, locations)
        return ids[:count], locations[:count]
