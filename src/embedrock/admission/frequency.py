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
from embedrock.admission.hash_segments import HashSegments
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

    def __init__(self, admission: Admission, key: np.uint64, segments: int = 1) -> None:
        self._bits, self._key, self._segments = admission.cell_bits, key, HashSegments(segments)
        self._each = max(1, admission.lines // segments)  # lines of a segment
        self._changed, self._is_saved = np.zeros(0, np.uint8), False
        self._lines, self._snapshot = np.empty((0, SKETCH_LINE_BYTES), np.uint8), LastCopy()
        self._make_lines()

    def _make_lines(self) -> None:
        """Make the lines of segments that have none."""
        before, lines = self._lines, self._each * len(self._segments.known)
        arena = Arena(lines * SKETCH_LINE_BYTES, "the sketch of a table's admission")
        arena.expect_all()  # a few steps write to all of its pages
        self._lines = arena.memory.reshape(-1, SKETCH_LINE_BYTES)
        self._lines[: len(before)] = before
        self._changed = np.append(self._changed, np.zeros(lines - len(before), np.uint8))

    def _firsts(self, ids: np.ndarray) -> np.ndarray:
        """Return the first line of each id's segment, int64 (n,)."""
        firsts = self._each * self._segments.numbers_of(ids)
        if len(self._lines) < self._each * len(self._segments.known):
            self._make_lines()
        return firsts

    def of(self, ids: np.ndarray) -> np.ndarray:
        counts, firsts = np.empty(len(ids), np.int64), self._firsts(ids)
        seen = kernels.cpu.residents.count_seen
        kernels.cpu.launch(seen, self._lines, self._each, self._bits, self._key, firsts, ids, counts)
        return counts

    def see(self, ids: np.ndarray) -> None:
        ids = ids if self._segments.is_one else np.sort(ids)  # their order in a batch depends on the number of ranks
        firsts, residents = self._firsts(ids), kernels.cpu.residents
        if (snapshot := self._snapshot.now) is not None:
            lines = np.empty(len(ids), np.int64)
            kernels.cpu.launch(residents.lines_of, self._each, self._key, firsts, ids, lines)
            snapshot.keep(lines)
        kernels.cpu.launch(residents.see, self._lines, self._changed, self._each, self._bits, self._key, firsts, ids)

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
        return {"sketch": self._snapshot_of(np.ones(len(self._lines), bool)).column("sketch"), **self._small}

    @property
    def _small(self) -> dict[str, np.ndarray]:
        return (
            {} if self._segments.is_one else {"segments": self._segments.known.copy(), "lines": np.array([self._each])}
        )

    def changes(self) -> Columns | None:
        if not self._is_saved or 2 * np.count_nonzero(self._changed) > len(self._lines):
            return None
        snapshot = self._snapshot_of(copied(self._changed.view(bool)))
        return {"changed_lines": snapshot.column(""), "changed_sketch": snapshot.column("sketch"), **self._small}

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
        return {"sketch": copied(self._lines.reshape(-1).view(np.int64)), **self._small}

    def load(self, arrays: Arrays) -> None:
        words = int64(arrays, "sketch")
        if not self._segments.is_one:
            self._segments.load(int64(arrays, "segments"))
            self._make_lines()
        if words.nbytes != self._lines.nbytes:
            raise damaged(f"a sketch of {self._lines.nbytes} bytes, as its admission says")
        self._lines.reshape(-1).view(np.int64)[:] = words


FrequencyCounter: TypeAlias = ExactCounter | CountMinSketch
