"""`FrequencyCounter`: how often ids without a record were seen, by exact counts or by a sketch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from embedrock import kernels
from embedrock.admission.copy_on_write import (
    LINE_WORDS,
    Arrays,
    Columns,
    CopyOnWriteArrays,
    LastCopy,
    copied,
    damaged,
    int64,
)
from embedrock.admission.usage import IdNumbers
from embedrock.kernels.constants import SKETCH_DEPTH, SKETCH_LINE_BYTES
from embedrock.spec.admission import Admission
from embedrock.system.arena import Arena

SCANNED_BYTES = 1 << 20  # of a sketch, looked through at a time
LEAST_CHANGES = 4096  # of ids, that are noted one by one however few are counted


class FrequencyCounter(ABC):
    """How often ids were seen in one period, or for ever."""

    @abstractmethod
    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return how often each id was seen, int64; ids do not repeat."""

    @abstractmethod
    def see(self, ids: np.ndarray) -> None:
        """Count each id once more."""

    def drop(self, ids: np.ndarray) -> None:  # noqa: B027  # a sketch cannot
        """Forget ids."""

    def emptied(self) -> FrequencyCounter | None:
        """Return it, or one like it, after it has forgotten everything; None: a new one is as good."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of RAM that it takes."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """How many ids it knows; -1 where that is not known."""

    def share_of(self, count: int) -> float:
        """Return how probable it is that an id which was never seen seems to have been seen so often."""
        return 0.0

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Return what `load` needs, as arrays of int64 of their own."""

    def whole(self) -> Columns:
        """Return what `state` does, to be written while it changes."""
        return self.state()

    @abstractmethod
    def load(self, arrays: Arrays) -> None:
        """Take over what `state` returned, into one that is empty.

        Raises:
            ArgumentError: it cannot be.
        """

    @abstractmethod
    def changes(self) -> Columns | None:
        """Return what has changed since `saved`, for `changes.merged`; None: that is not known, or it is most of it."""

    @property
    @abstractmethod
    def changed_bytes(self) -> int:
        """How large `changes` would be, or `state` where that is to be saved, about."""

    @abstractmethod
    def saved(self) -> None:
        """Note that what it is now is saved."""

    @abstractmethod
    def unsaved(self) -> None:
        """Note that it is not saved under this name."""


class ExactCounter(FrequencyCounter):
    """Counts of ids in a hash table."""

    def __init__(self) -> None:
        self._counts = IdNumbers()
        self._changed: list[np.ndarray] | None = None  # ids whose counts have changed; None: nobody knows
        self._noted = 0  # how many these are, with repeats

    def of(self, ids: np.ndarray) -> np.ndarray:
        return np.maximum(self._counts.find(ids), 0)

    def see(self, ids: np.ndarray) -> None:
        self._note(ids)
        counts = self._counts.find(ids)
        known = counts >= 0
        self._counts.set(ids[known], counts[known] + 1)
        self._counts.put(ids[~known], np.ones(len(ids) - int(np.count_nonzero(known)), np.int64))

    def drop(self, ids: np.ndarray) -> None:
        there = ids[self._counts.find(ids) >= 0]
        self._note(there)
        self._counts.remove(there)

    def _note(self, ids: np.ndarray) -> None:
        if self._changed is None:
            return
        most = max(LEAST_CHANGES, self._counts.count)
        self._changed, self._noted = [*self._changed, ids], self._noted + len(ids)
        if self._noted > most:
            distinct = np.unique(np.concatenate(self._changed))
            self._changed, self._noted = [distinct] if 2 * len(distinct) <= most else None, len(distinct)

    def changes(self) -> dict[str, np.ndarray] | None:
        if self._changed is None:
            return None
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *self._changed]))
        return {"changed_ids": ids, "changed_counts": self.of(ids)}

    @property
    def changed_bytes(self) -> int:
        return 16 * (self._counts.count if self._changed is None else self._noted)

    def saved(self) -> None:
        self._changed, self._noted = [], 0

    def unsaved(self) -> None:
        self._changed = None

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + (0 if self._changed is None else 8 * self._noted)

    @property
    def pending(self) -> int:
        return self._counts.count

    def state(self) -> dict[str, np.ndarray]:
        ids, counts = self._counts.items()
        return {"ids": ids, "counts": counts}

    def load(self, arrays: Arrays) -> None:
        ids, counts = (int64(arrays, name) for name in ("ids", "counts"))
        if len(ids) != len(counts) or (ids[1:] <= ids[:-1]).any() or (counts < 1).any():
            raise damaged("ids that ascend, each with a count")
        self._counts.put(ids, counts)


class CountMinSketch(FrequencyCounter):
    """Counts in a sketch of fixed size: see ``tests/reference/residents.py``."""

    def __init__(self, admission: Admission, key: np.uint64) -> None:
        self._bits, self._key = admission.cell_bits, key
        arena = Arena(admission.lines * SKETCH_LINE_BYTES, "the sketch of a table's admission")
        arena.expect_all()  # a few steps write everywhere
        self._lines = arena.memory.reshape(-1, SKETCH_LINE_BYTES)
        self._changed, self._is_saved = np.zeros(admission.lines, np.uint8), False
        self._still = LastCopy()

    def of(self, ids: np.ndarray) -> np.ndarray:
        counts = np.empty(len(ids), np.int64)
        kernels.cpu.launch(kernels.cpu.residents.count_seen, self._lines, self._bits, self._key, ids, counts)
        return counts

    def see(self, ids: np.ndarray) -> None:
        if (still := self._still.now) is not None:
            lines = np.empty(len(ids), np.int64)
            kernels.cpu.launch(kernels.cpu.residents.lines_of, len(self._lines), self._key, ids, lines)
            still.keep(lines)
        kernels.cpu.launch(kernels.cpu.residents.see, self._lines, self._changed, self._bits, self._key, ids)

    def emptied(self) -> CountMinSketch | None:
        """Return it with no counts: new memory takes ten times as long. None where a commit still writes it."""
        if self._still.now is not None:
            return None
        self._lines[:], self._is_saved = 0, False
        return self

    def whole(self) -> Columns:
        return {"sketch": self._stilled(np.ones(len(self._lines), bool)).column("sketch")}

    def changes(self) -> Columns | None:
        if not self._is_saved or 2 * np.count_nonzero(self._changed) > len(self._lines):
            return None
        still = self._stilled(copied(self._changed.view(bool)))
        return {"changed_lines": still.column(""), "changed_sketch": still.column("sketch")}

    def _stilled(self, chosen: np.ndarray) -> CopyOnWriteArrays:
        return self._still.made({"sketch": self._lines.view(np.int64)}, chosen)

    @property
    def changed_bytes(self) -> int:
        changed = (LINE_WORDS + 1) * 8 * int(np.count_nonzero(self._changed))
        return min(changed, self._lines.nbytes) if self._is_saved else self._lines.nbytes

    def saved(self) -> None:
        self._changed[:], self._is_saved = 0, True

    def unsaved(self) -> None:
        self._is_saved = False

    @property
    def nbytes(self) -> int:
        return self._lines.nbytes + self._changed.nbytes + self._still.nbytes

    @property
    def pending(self) -> int:
        return -1

    def share_of(self, count: int) -> float:
        cells, full = self._lines.size * 8 // self._bits, 0
        flat = self._lines.reshape(-1)
        for start in range(0, len(flat), SCANNED_BYTES):
            part = flat[start : start + SCANNED_BYTES]
            for shift in range(0, 8, self._bits):
                full += int(np.count_nonzero((part >> shift & ((1 << self._bits) - 1)) >= count))
        return (full / cells) ** SKETCH_DEPTH

    def state(self) -> dict[str, np.ndarray]:
        return {"sketch": copied(self._lines.reshape(-1).view(np.int64))}

    def load(self, arrays: Arrays) -> None:
        words = int64(arrays, "sketch")
        if words.nbytes != self._lines.nbytes:
            raise damaged(f"a sketch of {self._lines.nbytes} bytes, as its admission says")
        self._lines.reshape(-1).view(np.int64)[:] = words


def counter(admission: Admission, key: np.uint64) -> FrequencyCounter:
    """Return a count of nothing yet; `key` is the table's seed."""
    return ExactCounter() if admission.sketch is None else CountMinSketch(admission, key)
