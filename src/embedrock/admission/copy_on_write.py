"""`CopyOnWriteArrays`: arrays as they are now, for a commit to write while training goes on to change them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels.constants import SKETCH_LINE_BYTES
from embedrock.store.history import Written
from embedrock.system.arena import reserve, taken

Arrays = Mapping[str, np.ndarray]
Columns = Mapping[str, Written]  # arrays, some of them to be written while they change
LINE_WORDS = SKETCH_LINE_BYTES // 8
CHANGED = "changed_"  # names of arrays that say what has changed begin so


def merged(saved: Sequence[Arrays], parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return as a whole what was saved: whole first, and then as changes of what is before.

    Args:
        saved: arrays by name, in the order in which they were saved.
        parts: prefixes of the names of arrays that may be changes; of others the last one counts.

    Raises:
        ArgumentError: the changes are not those of what is before.
    """
    whole = dict(saved[0])
    for later in saved[1:]:
        for prefix in parts:
            own = own_arrays(later, prefix)
            if own:
                before = own_arrays(whole, prefix)
                now = _changed(before, own) if any(name.startswith(CHANGED) for name in own) else own
                whole = {name: array for name, array in whole.items() if not name.startswith(prefix)}
                whole |= {f"{prefix}{name}": array for name, array in now.items()}
        whole |= {name: array for name, array in later.items() if not name.startswith(tuple(parts))}
    return whole


def copied(array: np.ndarray, at: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Return items of an array, as one of its own, for as long as a commit takes."""
    return taken(array, at, "a copy for a commit")


def own_arrays(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _changed(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    for name, change in _KINDS.items():
        if f"{CHANGED}{name}" in changes:
            return change(before, changes)
    raise damaged(f"changes of {', '.join(_KINDS)}")


def _lines(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return a sketch some of whose lines are others."""
    words, at = int64(before, "sketch").copy(), int64(changes, "changed_lines")
    lines, rest = divmod(len(words), LINE_WORDS)
    new = int64(changes, "changed_sketch")
    if rest or not _ascend(at, lines) or len(new) != len(at) * LINE_WORDS:
        raise damaged("lines of the sketch that ascend, each with its bytes")
    words.reshape(lines, LINE_WORDS)[at] = new.reshape(-1, LINE_WORDS)
    return {"sketch": words}


def _places(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return arrays of rows in some of whose places there are others, or none any more."""
    had, at, numbers = int64(before, "ids"), int64(changes, "changed_at"), int64(changes, "count")
    count = int(numbers[0]) if len(numbers) == 1 else -1
    made = {name: array for name, array in changes.items() if not name.startswith(CHANGED) and name != "count"}
    if not _ascend(at, count) or count - len(had) > np.count_nonzero(at >= len(had)):
        raise damaged(f"places of rows that ascend, below {count}, with all that are new")
    for name in ("ids", "last", "marks"):
        old, new = int64(before, name), int64(changes, f"{CHANGED}{name}")
        if len(new) != len(at) or len(old) != len(had):
            raise damaged("what is known of rows for each place")
        made[name] = np.concatenate([old, np.zeros(max(0, count - len(old)), np.int64)])[:count]
        made[name][at] = new
    return made


def _counts(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return counts of ids some of which are others; 0: it is no more."""
    ids, counts = int64(changes, "changed_ids"), int64(changes, "changed_counts")
    old, old_counts = int64(before, "ids"), int64(before, "counts")
    if len(ids) != len(counts) or len(old) != len(old_counts) or (ids[1:] <= ids[:-1]).any():
        raise damaged("ids that ascend, each with a count")
    stays, is_there = ~np.isin(old, ids), counts != 0
    all_ids = np.concatenate([old[stays], ids[is_there]])
    order = np.argsort(all_ids)
    return {"ids": all_ids[order], "counts": np.concatenate([old_counts[stays], counts[is_there]])[order]}


_KINDS: dict[str, Callable[[Arrays, Arrays], dict[str, np.ndarray]]] = {
    "lines": _lines,
    "at": _places,
    "counts": _counts,
}


def _ascend(places: np.ndarray, end: int) -> bool:
    if not len(places):
        return end >= 0
    return bool((places[1:] > places[:-1]).all()) and places[0] >= 0 and places[-1] < end


def int64(arrays: Arrays, name: str) -> np.ndarray:
    """Return an array of int64 (n,); an empty one where there is none.

    Raises:
        ArgumentError: it is another.
    """
    array = np.asarray(arrays.get(name, np.empty(0, np.int64)))
    if array.dtype != np.int64 or array.ndim != 1:
        raise damaged(f"`{name}` as int64 (n,)")
    return np.ascontiguousarray(array)


def damaged(expected: str) -> ArgumentError:
    """Return the error of a saved state that says something else of who has a record."""
    return ArgumentError(f"what is saved of a table's admission and eviction must be {expected}: it is damaged.")


PIECE_BYTES = 512 << 10  # copied at a time, while who changes them waits: a tenth of a millisecond


class CopyOnWriteArrays:
    """Some places of arrays, as they are when it is made.

    Whoever changes one of them first has it kept (`keep`). So a commit has no copy but of the places that change while
    it writes them, and begins at once.

    Args:
        arrays: int64 (n, ...), by name, which only change where `keep` was called before.
        chosen: bool (n,), the places; its own.

    Attributes:
        count: of the places.

    Example:
        >>> still = CopyOnWriteArrays({"last": (last := np.array([7, 8, 9]))}, np.array([True, False, True]))
        >>> still.keep(np.array([1, 2]))
        >>> last[2] = 0
        >>> [piece.tolist() for piece in still.column("last").pieces()]
        [[7, 9]]
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> None:
        self._arrays, self._chosen, self.count = dict(arrays), chosen, int(np.count_nonzero(chosen))
        self._waits = copied(chosen)  # of the places: those that nobody has changed yet
        # What is kept, in the order in which it came: the place, and what was there. It takes RAM as far as it is
        # written to, a small page at a time (a huge one may take longer than a step), and none once it is of no use.
        first = np.cumsum([1, *map(self.words, self._arrays)]).tolist()
        self._parts = {name: slice(*ends) for name, *ends in zip(self._arrays, first, first[1:], strict=False)}
        room = reserve(8 * self.count * first[-1], "what a commit keeps", scattered=True)
        self._kept, self._kept_count = room.view(np.int64)[: self.count * first[-1]].reshape(-1, first[-1]), 0
        self._unwritten, self._lock = set(self._arrays) if self.count else set[str](), threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether all of it is written, so that nothing has to be kept any more."""
        return not self._unwritten

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes besides the arrays."""
        return self._chosen.nbytes + self._waits.nbytes + 8 * self._kept.shape[1] * self._kept_count

    def keep(self, places: np.ndarray) -> None:
        """Keep what is at places, int64, that are about to change; they may repeat."""
        places = places[places < len(self._waits)]
        with self._lock:
            places = places[self._waits[places]]
            if not len(places) or not self._unwritten:
                return
            places.sort()
            places = places[np.append(True, places[1:] != places[:-1])]
            self._waits[places] = False
            now = self._kept[self._kept_count : self._kept_count + len(places)]
            now[:, 0] = places
            for name, part in self._parts.items():
                now[:, part] = self._arrays[name][places].reshape(len(places), -1)
            self._kept_count += len(places)

    def column(self, name: str) -> SnapshotColumn:
        """Return an array at the places, flat, to be gone through once; "": the places themselves, ascending."""
        return SnapshotColumn(self, name)

    def words(self, name: str) -> int:
        """Return how many numbers such a column has for a place."""
        return prod(self._arrays[name].shape[1:]) if name else 1

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield what `column` returns, some at a time."""
        size = PIECE_BYTES // (8 * self.words(name))
        for first in range(0, len(self._chosen), size):
            at = np.flatnonzero(self._chosen[first : first + size])
            if len(at):
                yield self._piece(name, slice(first, first + size), at) if name else first + at
        with self._lock:
            self._unwritten.discard(name)
            if not self._unwritten:
                self._kept, self._kept_count = self._kept[:0].copy(), 0

    def _piece(self, name: str, part: slice, at: np.ndarray) -> np.ndarray:
        with self._lock:
            piece, kept = self._arrays[name][part][at], self._kept[: self._kept_count]
        own = np.flatnonzero((kept[:, 0] >= part.start) & (kept[:, 0] < part.stop))
        values = kept[own, self._parts[name]]
        piece[np.searchsorted(at, kept[own, 0] - part.start)] = values.reshape(-1, *piece.shape[1:])
        return piece


class SnapshotColumn:
    """An array of a `CopyOnWriteArrays`, or its places: what `store.history.Written` asks for."""

    dtype: np.dtype[Any] = np.dtype("<i8")

    def __init__(self, still: CopyOnWriteArrays, name: str) -> None:
        self._still, self._name, self.shape = still, name, (still.count * still.words(name),)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield it, some rows at a time."""
        return self._still.pieces(self._name)


class LastCopy:
    """The last `CopyOnWriteArrays` of some arrays, for as long as a commit writes it, which alone keeps it."""

    def __init__(self) -> None:
        self._last: weakref.ref[CopyOnWriteArrays] | None = None

    def made(self, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> CopyOnWriteArrays:
        """Return a new one: see `CopyOnWriteArrays`."""
        still = CopyOnWriteArrays(arrays, chosen)
        self._last = weakref.ref(still)
        return still

    @property
    def now(self) -> CopyOnWriteArrays | None:
        """What is still being written, to be told what is about to change; None: nothing is."""
        still = None if self._last is None else self._last()
        return None if still is None or still.is_done else still

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that it takes besides the arrays."""
        still = self.now
        return 0 if still is None else still.nbytes
