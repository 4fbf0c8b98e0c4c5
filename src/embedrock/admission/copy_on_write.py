"""`CopyOnWriteArrays`: a snapshot of arrays that a commit writes while training changes them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from embedrock.errors import ArgumentError
from embedrock.kernels.constants import SKETCH_LINE_BYTES
from embedrock.store.history import PiecewiseArray, Written
from embedrock.system.arena import reserve, taken

Arrays = Mapping[str, np.ndarray]
Columns = Mapping[str, Written]  # arrays by name; a `Written` may change while a commit writes it
LINE_WORDS = SKETCH_LINE_BYTES // 8
CHANGED = "changed_"  # prefix of arrays that hold changes since the last commit


def merged(saved: Sequence[Arrays], parts: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the saved arrays with all later changes applied.

    Args:
        saved: arrays by name, in the order of their commits. The first is complete, later ones may hold changes.
        parts: name prefixes of the arrays that may be changes. Of other arrays, the last one counts.

    Raises:
        ArgumentError: the changes do not fit the arrays before them.
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
    """Return a private copy of an array's items, for the duration of a commit."""
    return taken(array, at, "a copy for a commit")


def own_arrays(arrays: Arrays, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays with a name prefix, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _changed(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    for name, change in _KINDS.items():
        if f"{CHANGED}{name}" in changes:
            return change(before, changes)
    raise damaged(f"changes of {', '.join(_KINDS)}")


def _lines(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    had, at, new = int64(before, "sketch"), int64(changes, "changed_lines"), int64(changes, "changed_sketch")
    of_segments = {name: int64(changes, name) for name in ("segments", "lines") if name in changes}
    lines, rest = divmod(len(had), LINE_WORDS)
    if (each := of_segments.get("lines")) is not None and each.size:  # new segments come after those before
        lines = max(lines, len(of_segments["segments"]) * int(each[0]))
    if rest or not _ascend(at, lines) or len(new) != len(at) * LINE_WORDS:
        raise damaged("lines of the sketch that ascend, each with its bytes")
    words = np.zeros((lines, LINE_WORDS), np.int64)
    words.reshape(-1)[: len(had)] = had
    words[at] = new.reshape(-1, LINE_WORDS)
    return {"sketch": words.reshape(-1), **of_segments}


def _places(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return the arrays of rows with the changed places applied and deleted rows cut off, segment by segment."""
    had, at, counts = (int64(*each) for each in ((before, "ids"), (changes, "changed_at"), (changes, "count")))
    is_one = "segments" not in changes
    old = np.array([len(had)]) if is_one else int64(before, "count")
    room = int(int64(changes, "room")[0]) if len(int64(changes, "room")) else 1 << 62
    made = {name: array for name, array in changes.items() if not name.startswith(CHANGED)}
    if is_one:
        made.pop("count", None)
    if room < 1 or len(old) > len(counts) or (counts < 0).any() or not _ascend(at, room * len(counts)):
        raise damaged("places of rows that ascend, of segments with a count")
    old = np.append(old, np.zeros(len(counts) - len(old), np.int64))
    number, nth = at // room, at % room
    is_new = nth >= old[number]
    more = np.bincount(number[is_new], minlength=len(counts))
    if sum(old.tolist()) != len(had) or (nth >= counts[number]).any() or (counts - old > more).any():
        raise damaged(f"places of rows below {counts.tolist()[:4]}, with all that are new")
    starts, old_starts = np.cumsum(counts) - counts, np.cumsum(old) - old
    of = np.repeat(np.arange(len(old)), old)
    stays = (place := np.arange(len(had)) - old_starts[of]) < counts[of]
    for name in ("ids", "last", "marks"):
        were, new = int64(before, name), int64(changes, f"{CHANGED}{name}")
        if len(new) != len(at) or len(were) != len(had):
            raise damaged("what is known of rows for each place")
        made[name] = np.zeros(int(counts.sum()), np.int64)
        made[name][(starts[of] + place)[stays]] = were[stays]
        made[name][starts[number] + nth] = new
    return made


def _counts(before: Arrays, changes: Arrays) -> dict[str, np.ndarray]:
    """Return the counts with the changes applied. A new count of 0 deletes the id."""
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
    """Return an array as int64 (n,), or an empty one if the name is missing.

    Raises:
        ArgumentError: the array has another dtype or shape.
    """
    array = np.asarray(arrays.get(name, np.empty(0, np.int64)))
    if array.dtype != np.int64 or array.ndim != 1:
        raise damaged(f"`{name}` as int64 (n,)")
    return np.ascontiguousarray(array)


def damaged(expected: str) -> ArgumentError:
    """Return the error of a damaged saved state of admission and eviction."""
    return ArgumentError(f"what is saved of a table's admission and eviction must be {expected}: it is damaged.")


PIECE_BYTES = 512 << 10  # copied under the lock: a writer waits for at most 0.1 ms


class CopyOnWriteArrays:
    """Snapshot of chosen places of arrays, with copy on write.

    Writers call `keep` before they change a place. So a commit begins at once, and copies only the places that change
    while it writes.

    Args:
        arrays: int64 (n, ...), by name. Writers change them only after a call of `keep`.
        chosen: bool (n,), the places. The snapshot takes the array over.

    Attributes:
        count: number of chosen places.

    Example:
        >>> still = CopyOnWriteArrays({"last": (last := np.array([7, 8, 9]))}, np.array([True, False, True]))
        >>> still.keep(np.array([1, 2]))
        >>> last[2] = 0
        >>> [piece.tolist() for piece in still.column("last").pieces()]
        [[7, 9]]
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> None:
        self._arrays, self._chosen, self.count = dict(arrays), chosen, int(np.count_nonzero(chosen))
        self._waits = copied(chosen)  # chosen places that have not changed yet
        # Kept values in order of arrival: the place, then its values. The buffer takes RAM as it fills, in small pages:
        # a huge page may take longer than a step. It is released once all columns are written.
        first = np.cumsum([1, *map(self._words, self._arrays)]).tolist()
        self._parts = {name: slice(*ends) for name, *ends in zip(self._arrays, first, first[1:], strict=False)}
        room = reserve(8 * self.count * first[-1], "what a commit keeps", scattered=True)
        self._kept, self._kept_count = room.view(np.int64)[: self.count * first[-1]].reshape(-1, first[-1]), 0
        self._unwritten, self._lock = set(self._arrays) if self.count else set[str](), threading.Lock()

    @property
    def is_done(self) -> bool:
        """Return whether all columns are written, so that `keep` has nothing more to do."""
        return not self._unwritten

    @property
    def nbytes(self) -> int:
        """Return the bytes of RAM besides the arrays."""
        return self._chosen.nbytes + self._waits.nbytes + 8 * self._kept.shape[1] * self._kept_count

    def keep(self, places: np.ndarray) -> None:
        """Copy the values at places that are about to change. Places are int64 and may repeat."""
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

    def column(self, name: str) -> PiecewiseArray:
        """Return a flat column of one array at the chosen places, to be read once. "" names the places, ascending."""
        shape = (self.count * self._words(name),)
        return PiecewiseArray(np.dtype("<i8"), shape, functools.partial(self._pieces, name))

    def _words(self, name: str) -> int:
        """Return the number of int64 values per place in a column."""
        return prod(self._arrays[name].shape[1:]) if name else 1

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        size = PIECE_BYTES // (8 * self._words(name))
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


class LastCopy:
    """Weak reference to the newest `CopyOnWriteArrays` of some arrays. The commit that writes the snapshot owns it."""

    def __init__(self) -> None:
        self._last: weakref.ref[CopyOnWriteArrays] | None = None

    def made(self, arrays: Mapping[str, np.ndarray], chosen: np.ndarray) -> CopyOnWriteArrays:
        """Return a new snapshot and remember it."""
        snapshot = CopyOnWriteArrays(arrays, chosen)
        self._last = weakref.ref(snapshot)
        return snapshot

    @property
    def now(self) -> CopyOnWriteArrays | None:
        """Return the snapshot that a commit is writing, or None. Writers call its `keep` before they change a place."""
        snapshot = None if self._last is None else self._last()
        return None if snapshot is None or snapshot.is_done else snapshot

    @property
    def nbytes(self) -> int:
        """Return the bytes of RAM of the snapshot besides its arrays."""
        snapshot = self.now
        return 0 if snapshot is None else snapshot.nbytes
