"""`LogIndex`: where the newest record of each row is that logs hold and no base chunk does yet, in RAM."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError, MemoryBudgetError
from embedrock.system import platform
from embedrock.system.sizes import format_bytes

ENTRY_BYTES = 16
PAGE = 4096
FULLEST = 0.92  # share of entries in use at which an overlay grows
GROWTH = 1.25  # so an entry in use costs at most 16 * 1.25 / 0.92 = 21.7 bytes, and a page
BYTES_A_ROW = 24  # more than that, and a page, is given back
SHRUNK = 0.75  # share in use after that


def _whole_pages(entries: float) -> int:
    return -(-int(entries) * ENTRY_BYTES // PAGE) * PAGE // ENTRY_BYTES


def _most(total: int) -> int:
    return int(total * FULLEST)


def _last(nbytes: int) -> int:
    return nbytes // PAGE * PAGE // ENTRY_BYTES


def room(nbytes: int) -> int:
    """Return how many rows an overlay of at most so many bytes holds."""
    return _most(_last(nbytes))


class LogIndex:
    """A hash table id -> location. It grows in place by small steps, so that it never needs twice its memory.

    Its memory is moved by the system when it grows (pages, not bytes): whoever uses it holds the store's lock. Only
    `count`, `nbytes` and `bytes_with` may be asked for without it, by those who count.
    It grows up to `most_bytes` by a step as large as is left, and beyond where more is inserted all the same.
    A row took 57 ns to insert (10 M at once), a pause to grow 14 ms at 1 M rows and 62 ms at 4.4 M.
    """

    def __init__(self, most_bytes: int = 1 << 62) -> None:
        self.count, self.most_bytes = 0, most_bytes
        self._salt = np.uint64(int.from_bytes(os.urandom(8), "little"))
        self._memory = platform.private_memory(PAGE)
        self._map()
        self._homes = self._rebuild(len(self._entries))

    def _map(self) -> None:
        self._entries = np.frombuffer(self._memory, np.uint64).reshape(-1, 2)
        self._total = len(self._entries)

    def _rebuild(self, total: int) -> int:
        homes = kernels.cpu.storage.rebuild_overlay(self._entries, total, self.count)
        self._is_damaged = homes < 0
        self._check()
        return homes

    def _check(self) -> None:
        """Raise `CorruptTableError` once a rebuild has found entries that are not those that were made."""
        if self._is_damaged:
            raise CorruptTableError(
                f"the index in RAM of {self.count} rows that are not compacted yet is damaged: so many entries that "
                "ascend were expected. The files are as they were: close the table without a commit, and open it "
                "again. Please report this."
            )

    def _resize(self, total: int) -> None:
        del self._entries  # memory with a view of it cannot be resized
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
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""
        return self._total * ENTRY_BYTES

    def bytes_with(self, more: int) -> int:
        """Return the most RAM that it takes while `more` rows are inserted."""
        return self._total_with(more) * ENTRY_BYTES

    def _total_with(self, more: int) -> int:
        total, last = self._total, _last(self.most_bytes)
        while self.count + more > _most(total):
            grown = _whole_pages(total * GROWTH)
            total = last if total < last < grown else grown
        return total

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the location of each id, int64; -1 where it has none. Ids may repeat."""
        self._check()
        cpu, locations = kernels.cpu, np.empty(len(ids), np.int64)
        cpu.launch(cpu.storage.find_overlay, self._entries, self._homes, self._salt, ids, locations)
        return locations

    def insert(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Set the locations of ids, in place of those they had; of equal ids, the last one's counts."""
        self._check()
        done, has_grown = self._insert(ids, locations, 0), False
        while done < len(ids):
            if self.count == _most(len(self._entries)):
                self._resize(self._total_with(len(ids) - done))
                has_grown = True
            self._homes = self._rebuild(len(self._entries))
            done = self._insert(ids, locations, done)
        if has_grown:
            self.fit()  # many ids may have been there already

    def _insert(self, ids: np.ndarray, locations: np.ndarray, start: int) -> int:
        # Insert from `start` on, and return how far there was room.
        place = self._entries, self._homes, self._salt
        args = self.count, _most(len(self._entries)), ids, locations, start
        done, self.count = kernels.cpu.launch(kernels.cpu.storage.insert_overlay, *place, *args)
        return done

    def remove(self, ids: np.ndarray, locations: np.ndarray) -> None:
        """Forget ids whose locations are still these. Its memory stays; see `fit`.

        Where others insert in between, ids must not come in its own order (`behind`, `items`): one end would be empty
        and the other too full, where each insert then moves thousands of entries.
        """
        self._check()
        storage, place = kernels.cpu.storage, (self._entries, self._homes, self._salt)
        self.count -= kernels.cpu.launch(storage.remove_overlay, *place, ids, locations)

    def fit(self) -> None:
        """Give memory back that is more than a row may take."""
        if self.nbytes > BYTES_A_ROW * self.count + PAGE:
            # To what its rows need.
            total = min(max(_whole_pages(self.count / SHRUNK), PAGE // ENTRY_BYTES), len(self._entries))
            self._homes = self._rebuild(total)
            self._resize(total)

    def behind(self, row: int | None, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return up to so many (ids, locations) that come next in its order behind those of a row; None: the first.

        It may change between two calls: what is there all the while is returned once. Nothing: that was all.
        """
        self._check()
        storage, ids, locations = kernels.cpu.storage, np.empty(batch, np.int64), np.empty(batch, np.int64)
        start = 0 if row is None else storage.behind_overlay(self._entries, self._homes, self._salt, row)
        _, count = storage.list_overlay(self._entries, self._salt, start, ids, locations)
        return ids[:count], locations[:count]

    def items(self, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Go through all (ids, locations), in no particular order, at most `batch` at a time.

        It must not change meanwhile.
        """
        self._check()
        position = 0
        while position < len(self._entries):
            ids, locations = np.empty(batch, np.int64), np.empty(batch, np.int64)
            position, count = kernels.cpu.storage.list_overlay(self._entries, self._salt, position, ids, locations)
            if count:
                yield ids[:count], locations[:count]
