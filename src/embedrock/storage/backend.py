"""`Backend`: a place where records live, as a table sees it."""

from __future__ import annotations

import itertools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from embedrock.optimizers import StepHistory
from embedrock.spec.spec import Spec
from embedrock.storage.listeners import EvictionListener
from embedrock.storage.records import Records
from embedrock.system.arena import Arena

SCANNED_ROWS = 1 << 16  # looked through at a time for those of a range

# Never twice the same, so that slots of one tier are not taken for those of another, or of the same one later.
_epochs = itertools.count(1)


class RamLayout(NamedTuple):
    """How the records of a table are spread in RAM.

    Attributes:
        budget_bytes: the most that they and what finds them may take.
        slots: how many records there is room for.
        direct: slots are ids.
        overlay_bytes: of a table on disk, what is kept for the index of rows in logs.
        is_told: whether the budget was given, and is not just what there is.
        buffer_bytes: of a table on disk, what is kept for rows on their way from and to files.
    """

    budget_bytes: int
    slots: int
    direct: bool
    overlay_bytes: int = 0
    is_told: bool = True
    buffer_bytes: int = 0


class Pin:
    """Rows that stay where they are until it is released, by any thread, once or more often."""

    def release(self) -> None:
        """Let the rows go."""

    def looked_up(self) -> tuple[int, int] | None:
        """Return how many rows its table was asked for that were in RAM, and that were not; None: it keeps no rows."""
        return None


class Backend(ABC):
    """Where a table's records live. Ids are int64 arrays that the table has checked.

    A slot is where a record lies in `records`. While `epoch` stays the same, a slot that was found is still that of
    its row.

    Args:
        spec: of the table.
        placement: how the records are spread.
        subject: the table, for error messages.

    Attributes:
        arena: the memory of its records.
        records: what can be read and stepped in place.
        history: what the rule remembers of past steps, to which records may refer.
        epoch: changes when slots do.
        evicts: whether records leave their slots for elsewhere, so that rows without a slot may have one all the same.
        batch_rows: how many rows it is good for at once.
    """

    evicts = False
    batch_rows = sys.maxsize

    def __init__(self, spec: Spec, placement: RamLayout, subject: str) -> None:
        self.spec, self.placement, self.subject = spec, placement, subject
        self.arena, self.records = self._allocated(placement)
        self._guests = weakref.WeakSet[EvictionListener]()
        self.history: StepHistory | None = None
        self._guests = weakref.WeakSet[EvictionListener]()
        self.new_epoch()

    def _allocated(self, placement: RamLayout) -> tuple[Arena, Records]:
        """Return memory for so many records, and the records in it."""
        nbytes = placement.slots * self.spec.record_bytes
        arena = Arena(nbytes, self.subject, scattered=placement.direct)
        return arena, Records(self.spec, arena.memory)

    def add_listener(self, listener: EvictionListener) -> None:
        """Ask a guest before rows leave their slots, or move to another arena."""
        self._guests.add(listener)

    def remove_listener(self, listener: EvictionListener) -> None:
        """Ask a guest no more. It uses no record."""
        self._guests.discard(listener)

    def _ask_guests(self, leaving: np.ndarray) -> None:
        """Get what guests know of the records in slots whose rows are about to leave."""
        for listener in list(self._guests):
            listener.leave(leaving)

    def _move_guests_out(self) -> None:
        """Get what guests know of all records, which are about to move."""
        for listener in list(self._guests):
            listener.move_out()

    def new_epoch(self) -> None:
        """Make all slots that were found before invalid."""
        self.epoch = next(_epochs)

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows that have records."""

    @property
    def resident_rows(self) -> int:
        """Rows whose records are in RAM."""
        return self.count

    @abstractmethod
    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, int64; -1 where there is none. Ids may repeat."""

    def begin_batch(self) -> None:
        """Note that the next call of `bring` is for another batch than the one before."""
        self.arena.densify(self.resident_rows * self.spec.record_bytes)

    def goes_on_with(self, ids: np.ndarray) -> bool:
        """Return whether a step of `ids` belongs to the batch that `bring` was called for, so that none begins."""
        return False

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return slots for those of `ids` (without repeats) that have records; `slots` are as found, and stay."""
        return slots

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        """Return records in which those of `ids` can be read, wherever they are, and their slots there; -1 for none."""
        return self.records, self.find(ids)

    @abstractmethod
    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the weights of `ids`, which may repeat, to `out`, and return their slots; -1 where `out` has zeros."""

    def make_room(self, ids: np.ndarray, slots: np.ndarray, leaving: int = 0) -> np.ndarray:
        """See to it that a step of `ids` cannot fail for lack of room, and return their slots.

        So many others are `leaving` before it.

        Raises:
            MemoryBudgetError: the new records do not fit.
        """
        self.check_room(max(0, int(np.count_nonzero(slots < 0)) - leaving))
        return slots

    @abstractmethod
    def has_room(self, rows: int) -> bool:
        """Return whether `admit` can take so many new rows as it is."""

    @abstractmethod
    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        """Make records for the ids (without repeats) whose slot is negative, and return all slots: all, or none.

        Args:
            ids: (n,).
            slots: (n,), as `make_room` returned them; it stays as it is.
            fresh: (missing, dim) float32, first weights of the missing ids, in order.
            first_state: (state_width,) float32.
        """

    def copy_before_write(self, slots: np.ndarray) -> None:  # noqa: B027  # most tiers need not, as with other verbs below
        """Save what others still need of the records in `slots`, which may change afterwards. It may fail."""

    def mark_dirty(self, slots: np.ndarray) -> None:  # noqa: B027
        """Note that the records in `slots`, which were preserved or just made, are about to change."""

    @abstractmethod
    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        """Go through the ids of all rows that have records, at most `size` at a time."""

    def ascending_ids(self, size: int) -> Iterator[np.ndarray]:
        """Go through those of `id_batches` in the order of the ids."""
        ids = np.sort(np.concatenate([np.empty(0, np.int64), *self.id_batches(max(size, SCANNED_ROWS))]))
        return (ids[start : start + size] for start in range(0, len(ids), size))

    def ids_within(self, lo: int, hi: int, size: int) -> Iterator[np.ndarray]:
        """Go through those in ``[lo, hi)`` of `id_batches`."""
        for ids in self.id_batches(max(size, SCANNED_ROWS)):
            own = ids[(ids >= lo) & (ids <= hi - 1)]
            for start in range(0, len(own), size):
                yield own[start : start + size]

    def record_batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Go through all (ids, records uint8 (n, record_bytes)), at most `size` at a time."""
        for ids in self.id_batches(size):
            records, slots = self.read_through(ids)
            yield ids, records.bytes[slots]

    def paste_ascending(self, batches: Iterable[tuple[np.ndarray, np.ndarray]], most: int) -> None:
        """Paste all the records that there are, at most so many, in the order of their ids: see `bulk_insert`."""
        for ids, records in batches:
            self.bulk_insert(ids, records)

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids int64 (n,) and records uint8 (n, record_bytes), as views where records lie densely."""
        batches = list(self.record_batches(max(1, self.count)))
        ids = [np.empty(0, np.int64), *(ids for ids, _ in batches)]
        records = [np.empty((0, self.spec.record_bytes), np.uint8), *(records for _, records in batches)]
        return np.concatenate(ids), np.concatenate(records)

    def beneath(self, ids: np.ndarray) -> tuple[Backend, np.ndarray]:
        """Return the tier that has the records, and what it calls the rows of ids: for several tables, a pool's."""
        return self, ids

    def begin_bring(self) -> None:  # noqa: B027
        """Announce a call of `bring_ahead`, so that files stay open for it. The caller holds the table's lock."""

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        """Bring up the records of a later batch, and hold them until its ticket is released. Ids may repeat.

        Any thread may call it, after `begin_bring`: others go on with the table meanwhile.
        """
        return Pin()

    def check_room(self, more: int) -> None:  # noqa: B027  # what is written to files needs none
        """Raise `MemoryBudgetError` unless `more` new records fit the budget."""

    def check_ram(self, more: int) -> None:  # noqa: B027
        """Raise `MemoryBudgetError` where nobody said how much RAM may be taken, and so many records find none."""

    @abstractmethod
    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Return which ids have a record, wherever it is: bool (n,)."""

    @abstractmethod
    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        """Forget the records of `ids` (without repeats), all of which have one. Slots of others stay as they are.

        Args:
            ids: whose rows have their first values again.
            is_final: leave no byte of their records in RAM.
        """

    @abstractmethod
    def bulk_insert(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Make records for new ids (without repeats) as `record_batches` returned them."""

    @property
    def is_direct(self) -> bool:
        """Whether slots are ids."""
        return self.placement.direct

    @property
    def budget_bytes(self) -> int:
        """The most RAM that records and directory may take."""
        return self.placement.budget_bytes

    @property
    def used_slots(self) -> int:
        """How many slots, from the first on, may have records."""
        return self.placement.slots

    def record_bytes_in(self, slots: int) -> int:
        """Return the RAM that records take, the first `slots` of which may exist: whole pages where slots are ids."""
        taken = self.arena.resident_bytes if self.is_direct else slots * self.spec.record_bytes
        return min(taken, self.records.bytes.nbytes)

    @property
    @abstractmethod
    def bytes_used(self) -> int:
        """RAM that records and directory take."""

    def stats(self) -> dict[str, float]:
        """Return further numbers about the tier."""
        return {}
