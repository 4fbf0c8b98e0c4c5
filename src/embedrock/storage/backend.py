"""`Backend`: the interface of storage backends of records, as a table uses it."""

from __future__ import annotations

import itertools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.plan import SlotIndex
from embedrock.optimizers import StepHistory
from embedrock.spec.spec import Spec
from embedrock.storage.listeners import EvictionListener
from embedrock.storage.records import Records
from embedrock.system.arena import Arena, cut

SCANNED_ROWS = 1 << 16  # scanned at a time for the ids of a range

# Epochs never repeat. So slots of one backend are never valid in another one, nor later in the same one.
_epochs = itertools.count(1)


class RamLayout(NamedTuple):
    """How the records of a table use RAM.

    Attributes:
        budget_bytes: largest size of records and index.
        slots: number of records that fit.
        direct: slots are ids.
        overlay_bytes: RAM reserved for the index of rows in logs (disk only).
        is_told: the budget was given; False if it is the RAM available.
        buffer_bytes: RAM reserved for buffers of reads and writes (disk only).
    """

    budget_bytes: int
    slots: int
    direct: bool
    overlay_bytes: int = 0
    is_told: bool = True
    buffer_bytes: int = 0


class Pin:
    """Rows of other pins, which stay in place until `release`. Any thread may call it, once or more often."""

    _pins: Sequence[Pin] = ()  # of a subclass

    def __init__(self, pins: Sequence[Pin] = ()) -> None:
        self._pins = pins

    def release(self) -> None:
        for pin in self._pins:
            pin.release()

    def looked_up(self) -> tuple[int, int] | None:
        """Return how many rows their tables looked up that were in RAM, and that were not; None without a cache."""
        found = [each for pin in self._pins if (each := pin.looked_up())]
        return (sum(hits for hits, _ in found), sum(misses for _, misses in found)) if found else None


class Backend(ABC):
    """A storage backend of a table's records. Ids are int64 arrays that the table has checked.

    A slot is the place of a record in `records`. Slots stay valid while `epoch` stays the same.

    Args:
        placement: RAM layout of the records.
        subject: the table, for error messages.

    Attributes:
        arena: memory of the records.
        records: records that can be read and stepped in place.
        history: the rule's memory of past steps, to which records may refer.
        epoch: number that changes when slots do.
        evicts: records may leave their slots for files. So a row without a slot may have a record.
        finds_all: `look_up` finds records without a slot, too.
        base: key of id 0 in `pool`.
        number: of its range of keys there.
        is_shared: it is a pool, of all tables with the same record layout. Each has a range of its keys.
        parts: key ranges of a group's tables, by number; None for a table alone.
        batch_rows: rows that fit the backend at once.
    """

    evicts = is_shared = finds_all = False
    base = number = 0
    parts: dict[int, Any] | None = None
    batch_rows = sys.maxsize

    def __init__(self, spec: Spec, placement: RamLayout, subject: str) -> None:
        self.spec, self.placement, self.subject = spec, placement, subject
        self.arena, self.records = self._allocated(placement)
        self.history: StepHistory | None = None
        self._listeners = weakref.WeakSet[EvictionListener]()
        self.new_epoch()

    def _allocated(self, placement: RamLayout) -> tuple[Arena, Records]:
        nbytes = placement.slots * self.spec.record_bytes
        arena = Arena(nbytes, self.subject, scattered=placement.direct)
        return arena, Records(self.spec, arena.memory)

    def add_listener(self, listener: EvictionListener) -> None:
        """Register a listener. The backend calls it before it evicts or moves rows."""
        self._listeners.add(listener)

    def remove_listener(self, listener: EvictionListener) -> None:
        """Unregister a listener. It uses no record."""
        self._listeners.discard(listener)

    def _write_back(self, leaving: np.ndarray) -> None:
        for listener in list(self._listeners):
            listener.leave(leaving)

    def _move_listeners_out(self) -> None:
        for listener in list(self._listeners):
            listener.move_out()

    def new_epoch(self) -> None:
        """Invalidate all slots found so far."""
        self.epoch = next(_epochs)

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of rows that have records."""

    @property
    def index(self) -> SlotIndex:
        """The slot index, for kernels that plan a batch. Its key of id k is ``base + k``."""
        raise NotImplementedError

    @abstractmethod
    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, int64; -1 where there is none. Ids may repeat."""

    def begin_batch(self) -> None:
        """Announce that the next call of `bring` begins another batch."""
        self.arena.densify(self.count * self.spec.layout.record_bytes)

    def goes_on_with(self, ids: np.ndarray) -> bool:
        """Return whether a step of `ids` belongs to the batch of the last `bring`, so that no new one begins."""
        return False

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Load the records of `ids` (without repeats) and return their slots; `slots` are as found, and stay valid."""
        return slots

    def _bring_copies(self, ids: np.ndarray) -> np.ndarray:
        """Replace all records by copies of those of `ids`, and return their slots."""
        self.records, slots = self.read_through(ids)
        self.new_epoch()
        return slots

    def _empty(self, rows: int) -> Records:
        return Records(self.spec, np.empty(rows * self.spec.record_bytes, np.uint8))

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        """Return records from which `ids` can be read without loading them, and their slots there; -1 for none."""
        return self.records, self.find(ids)

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the weights of `ids`, which may repeat, to `out`, and return their slots; -1 where `out` has zeros."""
        raise NotImplementedError

    def make_room(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Evict rows for a step of `ids`, and return their slots. The step cannot fail for lack of room afterwards."""
        return slots

    def has_room(self, rows: int) -> bool:
        """Return whether `admit` can take `rows` new rows without making room."""
        return False

    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        """Make records for the ids (without repeats) whose slot is negative, and return all slots. Makes all, or none.

        Args:
            ids: (n,).
            slots: (n,), as `make_room` returned them; not changed.
            fresh: (missing, dim) float32, initial weights of the missing ids, in order.
            first_state: (state_width,) float32.
        """
        raise NotImplementedError

    def copy_before_write(self, slots: np.ndarray) -> None:  # noqa: B027  # most backends need not, as with other verbs below
        """Copy the records in `slots` if others still need them. They may change afterwards. May fail."""

    def mark_dirty(self, slots: np.ndarray) -> None:  # noqa: B027
        """Mark records as about to change. They were copied before, or are new."""

    @abstractmethod
    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        """Iterate over the ids of all rows that have records, at most `size` at a time."""

    def ascending_ids(self, size: int) -> Iterator[np.ndarray]:
        """Iterate over the ids of `id_batches` in ascending order."""
        yield from cut(np.sort(np.concatenate([np.empty(0, np.int64), *self.id_batches(size)])), size)

    def ids_within(self, lo: int, hi: int, size: int) -> Iterator[np.ndarray]:
        """Iterate over the ids of `id_batches` in ``[lo, hi)``."""
        for ids in self.id_batches(max(size, SCANNED_ROWS)):
            own = ids[(ids >= lo) & (ids <= hi - 1)]
            yield from cut(own, size)

    def record_batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Iterate over all (ids, records uint8 (n, record_bytes)), at most `size` at a time."""
        for ids in self.id_batches(size):
            records, slots = self.read_through(ids)
            yield ids, records.bytes[slots]

    def paste_ascending(self, batches: Iterable[tuple[np.ndarray, np.ndarray]], most: int) -> None:
        """Insert all records, at most `most`, in the order of their ids: see `bulk_insert`."""
        for ids, records in batches:
            self.bulk_insert(ids, records)

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids int64 (n,) and records uint8 (n, record_bytes). They are views where records lie densely."""
        batches = list(self.record_batches(max(1, self.count)))
        ids = [np.empty(0, np.int64), *(ids for ids, _ in batches)]
        records = [np.empty((0, self.spec.record_bytes), np.uint8), *(records for _, records in batches)]
        return np.concatenate(ids), np.concatenate(records)

    @property
    def pool(self) -> Backend:
        """Return the backend that holds the records. Tables of one pool share it."""
        return self

    def keys(self, ids: np.ndarray) -> np.ndarray:
        """Return the keys of ids in `pool`."""
        return ids + self.base if self.base else ids

    def admitted(self, rows: int) -> None:  # noqa: B027
        """Count records that `pool` has made (below 0: deleted) for this table."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return a context that keeps files and rows in place while the table lock may be released."""
        return nullcontext()

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        """Load the records of a later batch, and hold them until their pin is released. Ids may repeat.

        Any thread may call it, while the backend is `in_use`. Other threads may use the table meanwhile.
        """
        return Pin()

    def check_room(self, more: int) -> None:  # noqa: B027  # a backend on disk evicts instead
        """Raise `MemoryBudgetError` unless `more` new records fit the budget."""

    def check_ram(self, more: int) -> None:  # noqa: B027
        """Raise `MemoryBudgetError` if no budget was given and the machine lacks RAM for `more` records."""

    @abstractmethod
    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have a record, in RAM or in files: bool (n,)."""

    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        """Delete the records of `ids` (without repeats), all of which have one. Other slots stay valid.

        Args:
            ids: rows that return to their initial values.
            is_final: leave no byte of their records in RAM.
        """
        raise NotImplementedError

    def remove(self, ids: np.ndarray) -> None:
        """Delete the records of `ids`, without repeats, that were just made. Slots may change."""
        self.discard(ids)

    def bulk_insert(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Make records for new ids (without repeats) as `record_batches` returned them."""
        raise NotImplementedError

    @property
    def is_direct(self) -> bool:
        """Return whether slots are ids."""
        return self.placement.direct

    @property
    def budget_bytes(self) -> int:
        """Largest RAM of records and index, in bytes."""
        return self.placement.budget_bytes

    @property
    def used_slots(self) -> int:
        """Number of slots, from the first on, that may have records."""
        return self.placement.slots

    def record_bytes_in(self, slots: int) -> int:
        """Return the RAM of the first `slots` records: whole pages where slots are ids."""
        taken = self.arena.resident_bytes if self.is_direct else slots * self.spec.record_bytes
        return min(taken, self.records.bytes.nbytes)

    @property
    @abstractmethod
    def bytes_used(self) -> int:
        """RAM of records and index now, in bytes."""

    def stats(self) -> dict[str, float]:
        """Return further statistics of the backend."""
        return {}
