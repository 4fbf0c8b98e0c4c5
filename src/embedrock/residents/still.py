"""`CopyOnWriteArrays`: arrays as they are now, for a commit to write while training goes on to change them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from embedrock.machine.arena import reserve
from embedrock.residents.changes import copied

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
        >>> still = Still({"last": (last := np.array([7, 8, 9]))}, np.array([True, False, True]))
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
