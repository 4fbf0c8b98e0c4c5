"""`FrequencyCounter`: how often ids without a record were seen, exactly or in a sketch."""

from __future__ import annotations

from typing import TypeAlias

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
from embedrock.batch.id_table import IdNumbers
from embedrock.kernels.constants import SKETCH_DEPTH, SKETCH_LINE_BYTES
from embedrock.spec.admission import Admission
from embedrock.system.arena import Arena

SCANNED_BYTES = 1 << 20  # bytes of a sketch scanned at a time
LEAST_CHANGES = 4096  # changed ids are recorded one by one up to this number, however few ids are counted


class ExactCounter:
    """Exact counts of ids in a hash table, for one period or without end."""

    def __init__(self) -> None:
        self._counts = IdNumbers()
        self._changed: list[np.ndarray] | None = None  # ids with changed counts; None: unknown
        self._changed_count = 0  # number of changed ids, with repeats

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Return the count of each id, int64 (n,). Ids do not repeat."""
        return np.maximum(self._counts.find(ids), 0)

    def see(self, ids: np.ndarray) -> None:
        """Count each id once more."""
        self._mark_changed(ids)
        counts = self._counts.find(ids)
        known = counts >= 0
        self._counts.set(ids[known], counts[known] + 1)
        self._counts.put(ids[~known], np.ones(len(ids) - int(np.count_nonzero(known)), np.int64))

    def drop(self, ids: np.ndarray) -> None:
        """Delete the counts of ids."""
        there = ids[self._counts.find(ids) >= 0]
        self._mark_changed(there)
        self._counts.remove(there)

    def _mark_changed(self, ids: np.ndarray) -> None:
        if self._changed is None:
            return
        most = max(LEAST_CHANGES, self._counts.count)
        self._changed, self._changed_count = [*self._changed, ids], self._changed_count + len(ids)
        if self._changed_count > most:
            distinct = np.unique(np.concatenate(self._changed))
            self._changed, self._changed_count = [distinct] if 2 * len(distinct) <= most else None, len(distinct)

    def emptied(self) -> None:
        """Clear the counter and return it for reuse. Return None if a new counter is as good."""

    def changes(self) -> Columns | None:
        """Return the changes since `saved`, for `merged`. Return None if unknown or if most counts changed."""
        if self._changed is None:
            return None
        ids = np.unique(np.concatenate([np.empty(0, np.int64), *self._changed]))
        return {"changed_ids": ids, "changed_counts": self.of(ids)}

    @property
    def changed_bytes(self) -> int:
        """Return about how many bytes the next save needs, as `changes` or as `state`."""
        return 16 * (self._counts.count if self._changed is None else self._changed_count)

    def saved(self) -> None:
        """Mark the current state as saved."""
        self._changed, self._changed_count = [], 0

    def unsaved(self) -> None:
        """Mark the state as not saved under its current name."""
        self._changed = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of RAM in use."""
        return self._counts.nbytes + (0 if self._changed is None else 8 * self._changed_count)

    @property
    def pending(self) -> int:
        """Return the number of counted ids, or -1 if unknown."""
        return self._counts.count

    def share_of(self, count: int) -> float:
        """Return the probability that an unseen id seems to have been seen `count` times."""
        return 0.0

    def state(self) -> dict[str, np.ndarray]:
        """Return the arrays that `load` needs, as private int64 copies."""
        ids, counts = self._counts.items()
        return {"ids": ids, "counts": counts}

    def whole(self) -> Columns:
        """Return the arrays of `state` as columns, to write while the counter changes."""
        return self.state()

    def load(self, arrays: Arrays) -> None:
        """Restore an empty counter from the arrays of `state`.

        Raises:
            ArgumentError: the arrays are damaged.
        """
        ids, counts = (int64(arrays, name) for name in ("ids", "counts"))
        if len(ids) != len(counts) or (ids[1:] <= ids[:-1]).any() or (counts < 1).any():
            raise damaged("ids that ascend, each with a count")
        self._counts.put(ids, counts)


class CountMinSketch:
    """Count-min sketch of fixed size, with the methods of `ExactCounter`.

    The reference is ``tests/reference/residents.py``.
    """

    def __init__(self, admission: Admission, key: np.uint64) -> None:
        self._bits, self._key = admission.cell_bits, key
        arena = Arena(admission.lines * SKETCH_LINE_BYTES, "the sketch of a table's admission")
        arena.expect_all()  # a few steps write to all of its pages
        self._lines = arena.memory.reshape(-1, SKETCH_LINE_BYTES)
        self._changed, self._is_saved = np.zeros(admission.lines, np.uint8), False
        self._snapshot = LastCopy()

    def of(self, ids: np.ndarray) -> np.ndarray:
        counts = np.empty(len(ids), np.int64)
        kernels.cpu.launch(kernels.cpu.residents.count_seen, self._lines, self._bits, self._key, ids, counts)
        return counts

    def see(self, ids: np.ndarray) -> None:
        if (snapshot := self._snapshot.now) is not None:
            lines = np.empty(len(ids), np.int64)
            kernels.cpu.launch(kernels.cpu.residents.lines_of, len(self._lines), self._key, ids, lines)
            snapshot.keep(lines)
        kernels.cpu.launch(kernels.cpu.residents.see, self._lines, self._changed, self._bits, self._key, ids)

    def drop(self, ids: np.ndarray) -> None:
        """Do nothing: a sketch cannot delete counts."""

    def emptied(self) -> CountMinSketch | None:
        """Clear the counts in place and return the sketch: new memory takes ten times as long.

        Return None if a commit is still writing the sketch.
        """
        if self._snapshot.now is not None:
            return None
        self._lines[:], self._is_saved = 0, False
        return self

    def whole(self) -> Columns:
        return {"sketch": self._snapshot_of(np.ones(len(self._lines), bool)).column("sketch")}

    def changes(self) -> Columns | None:
        if not self._is_saved or 2 * np.count_nonzero(self._changed) > len(self._lines):
            return None
        snapshot = self._snapshot_of(copied(self._changed.view(bool)))
        return {"changed_lines": snapshot.column(""), "changed_sketch": snapshot.column("sketch")}

    def _snapshot_of(self, chosen: np.ndarray) -> CopyOnWriteArrays:
        return self._snapshot.made({"sketch": self._lines.view(np.int64)}, chosen)

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
        return self._lines.nbytes + self._changed.nbytes + self._snapshot.nbytes

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


FrequencyCounter: TypeAlias = ExactCounter | CountMinSketch
