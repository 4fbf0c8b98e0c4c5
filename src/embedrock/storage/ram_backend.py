"""`RamBackend`: records in RAM, in one arena whose pages exist once they are written to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from embedrock.batch.plan import SlotIndex
from embedrock.errors import ArgumentError, MemoryBudgetError, check_choice, counted
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Backend, RamLayout
from embedrock.storage.slot_index import ID_BYTES, MOST_ROWS, DenseIndex, HashIndex
from embedrock.system.ram import FreeMemory, available_bytes, memory_limit
from embedrock.system.sizes import Size, format_bytes, parse_bytes

# Up to this size, about that of a last-level cache, a direct table is faster. Above it a hashed one is faster, and uses
# less RAM. Its records lie in order of first touch. So hot rows, which come early, share pages and DRAM rows. A step of
# 16,384 Zipf ids took 1.3 ms hashed and 1.7 ms direct at 1 M rows of 768 bytes, 1.4 and 2.2 ms at 4 M.
SMALL_BYTES = 32 << 20
MOVED_ROWS = 4096  # moved at a time to larger memory
DIRECTORIES = ("auto", "direct", "hashed")
_headroom = FreeMemory()  # of all tables of this process


def place(spec: Spec, memory: Size | None, directory: str, subject: str) -> RamLayout:
    """Choose the RAM layout of a table of `spec`.

    Raises:
        ArgumentError: `memory` or `directory` is not understood, or a direct directory is requested for open ids.
        MemoryBudgetError: a direct directory is requested and the table does not fit; or no row fits.
    """
    check_choice("directory", directory, DIRECTORIES)
    limit, is_told = memory_limit(), memory is not None
    budget = parse_bytes(memory) if memory is not None else limit
    most = min(budget, limit)
    if spec.table_bytes is None or spec.rows is None:
        if directory == "direct":
            raise ArgumentError(f"{subject} has open ids (rows=None), which only a hashed directory can hold.")
    elif directory != "hashed":
        needed = spec.table_bytes + DenseIndex.bytes_for(spec.rows)
        if directory == "direct" and needed > most:
            raise MemoryBudgetError(
                f"{subject} needs {format_bytes(needed)} for {spec.rows} rows of {spec.record_bytes} bytes in a direct "
                f"directory: {format_bytes(most)} may be used. "
                'Pass directory="hashed", whose RAM follows the rows touched, or fewer rows.'
            )
        better = needed <= SMALL_BYTES or HashIndex.bytes_for(spec.rows) + spec.table_bytes > most
        if directory == "direct" or (needed <= most and better):
            return RamLayout(budget, spec.rows, direct=True, is_told=is_told)
    row_bytes = spec.record_bytes + ID_BYTES
    slots = budget // row_bytes
    if not slots:
        raise MemoryBudgetError(
            f"a row of {subject} takes {row_bytes} bytes: budget {counted(budget, 'byte')}. "
            "Raise memory=, or use a smaller dim, dtype or rule state."
        )
    return RamLayout(budget, slots if spec.rows is None else min(slots, spec.rows), direct=False, is_told=is_told)


def take_ram(nbytes: int, touched: str, remedy: str) -> None:
    """Reserve RAM of this process.

    Args:
        nbytes: bytes to reserve.
        touched: the user of the RAM, for the error message.
        remedy: the remedy, up to "may take whatever is left".

    Raises:
        MemoryBudgetError: there is less free RAM.
    """
    if not _headroom.take(nbytes):
        raise MemoryBudgetError(
            f"{touched}: {format_bytes(nbytes)} needed, and {format_bytes(available_bytes())} left of the RAM that "
            f"this process may use, some of which others need. {remedy} may take whatever is left."
        )


class RamBackend(Backend):
    """Records in RAM. Ids are int64 arrays that the table has checked.

    Attributes:
        promised: number of records that a listener may make without checking again. No other user gets their room.
    """

    def __init__(self, spec: Spec, placement: RamLayout, subject: str) -> None:
        self.directory = (DenseIndex if placement.direct else HashIndex)(placement.slots)
        self.promised = 0
        super().__init__(spec, placement, subject)
        self.set_rows(0, spec.rows)

    def set_rows(self, number: int, rows: int | None) -> None:
        """Set the rows of the table whose keys have a number; None: its ids are open, or it has left."""
        if isinstance(self.directory, HashIndex):
            self.directory.rows.pop(number, None)
            if rows is not None and rows <= MOST_ROWS:
                self.directory.rows[number] = rows

    @property
    def used_slots(self) -> int:
        return self.placement.slots if self.placement.direct else self._hashed.used

    @property
    def bytes_used(self) -> int:
        return self.record_bytes_in(self.used_slots) + self.directory.bytes_with(0)

    def bytes_with(self, more: int) -> int:
        """Return the most RAM in use while `more` records are made. A direct table counts as full."""
        more = max(more, self.promised - self.count)
        rows = self.spec.rows if self.placement.direct else self._hashed.slots_with(more)
        return (rows or 0) * self.spec.record_bytes + self.directory.bytes_with(more)

    @property
    def count(self) -> int:
        return self.directory.count

    @property
    def index(self) -> SlotIndex:
        return self.directory.index

    def find(self, ids: np.ndarray) -> np.ndarray:
        return self.directory.find(ids)

    def check_room(self, more: int) -> None:
        self._check_budget(more)
        self.check_ram(more)

    def check_ram(self, more: int) -> None:
        if more and not self.placement.is_told:
            remedy = "Put the table on disk with path=, touch fewer rows, use a smaller dim, dtype or rule state, or"
            take_ram(self.bytes_for(more), self._touched(more), f"{remedy} pass memory= to say how much the table")

    def give_room_back(self) -> None:
        """Make listeners release promised room that has no rows. It may wait for a device."""
        for listener in list(self._listeners):
            listener.give_room_back()

    def bytes_for(self, more: int) -> int:
        """Return the RAM of `more` new records and their index entries."""
        slots = more if self.is_direct else self._hashed.slots_with(more) - self._hashed.used
        return slots * self.spec.record_bytes + self.directory.bytes_with(more) - self.directory.bytes_with(0)

    def _check_budget(self, more: int) -> None:
        if not self.has_room(more):
            needed = self.bytes_with(more)
            raise MemoryBudgetError(
                f"{self._touched(more)}: {format_bytes(needed)} ({needed} bytes) needed, budget "
                f"{format_bytes(self.budget_bytes)}. Raise memory=, touch fewer rows, or use a smaller dim, dtype or "
                "rule state."
            )

    def _touched(self, more: int) -> str:
        rows = counted(self.directory.count, "row")
        return f"{self.subject} has {rows} in RAM and this batch touches {counted(more, 'new one')}"

    def has_room(self, rows: int) -> bool:
        return rows <= 0 or self.bytes_with(rows) <= self.placement.budget_bytes

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self.directory.look_up(ids, self.records.weights, positions, out)

    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        missing = slots < 0
        slots = np.where(missing, -1, slots)
        self.records.begin(self.directory.next_slots(ids[missing]), fresh, first_state)
        self.directory.insert(ids, slots)  # last, so that no record is found before it is made
        return slots

    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        return (ids for ids, _ in self.directory.batches(size))

    def record_batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((ids, self.records.bytes[slots]) for ids, slots in self.directory.batches(size))

    @property
    def dense(self) -> DenseIndex:
        """The index of a backend whose slots are ids."""
        assert isinstance(self.directory, DenseIndex)  # executors require it
        return self.directory

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        nothing, batches = np.empty(0, np.int64), list(self.directory.batches(max(1, self.count)))
        ids, slots = (np.concatenate([nothing, *(batch[k] for batch in batches)]) for k in (0, 1))
        is_dense = not self.placement.direct and self._hashed.used == len(slots)
        return ids, self.records.bytes[: len(slots)] if is_dense else self.records.bytes[slots]

    def grown(self, spec: Spec, placement: RamLayout) -> RamBackend:
        """Return a backend of the same records for more rows: this one if it has the room, otherwise another.

        Each page of RAM is released when its records have moved. So records are hardly ever in RAM twice.

        Raises:
            MemoryBudgetError: they do not fit. Nothing has changed.
        """
        if not self.is_direct and not placement.direct and placement.slots <= self.placement.slots:
            self.spec, self.placement = spec, placement
            self.set_rows(0, spec.rows)
            return self
        made = RamBackend(spec, placement, self.subject)
        made._check_budget(self.count)  # RAM is taken only as it is given back
        for ids, _ in self.directory.batches(MOVED_ROWS):
            made.directory.insert(ids)
        done = 0
        for ids, slots in self.directory.batches(MOVED_ROWS):  # which cannot fail
            made.records.bytes[made.find(ids)] = self.records.bytes[slots]
            done = self.arena.give_back(done, (int(slots[-1]) + 1) * spec.record_bytes)
        return made

    def remove(self, ids: np.ndarray) -> None:
        """Delete the records of `ids`, without repeats, of a hashed directory, and release their RAM.

        Records from the end take their slots. The cost follows the ids that remain, but only as many records move as
        were deleted.
        """
        self._move_listeners_out()
        before, count = self._hashed.used, self.directory.count - len(ids)
        has_record = np.ones(before, bool)
        has_record[self.find(ids)] = has_record[self._hashed.free] = False
        holes, moved = np.flatnonzero(~has_record[:count]), count + np.flatnonzero(has_record[count:])
        self.records.bytes[holes] = self.records.bytes[moved]
        self._hashed.keep(count, holes, moved)
        self.arena.give_back(count * self.spec.record_bytes, before * self.spec.record_bytes)
        self.new_epoch()

    @property
    def _hashed(self) -> HashIndex:
        assert isinstance(self.directory, HashIndex)  # pools require it
        return self.directory

    def holds(self, ids: np.ndarray) -> np.ndarray:
        return self.find(ids) >= 0

    def discard(self, ids: np.ndarray, is_final: bool = False) -> None:
        if self._listeners or is_final:
            slots = self.find(ids)
            self._write_back(slots)
            if is_final:
                self.records.bytes[slots] = 0
        self.directory.remove(ids)
        self.new_epoch()

    def bulk_insert(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.records.bytes[self.directory.insert(ids)] = records
        self.arena.densify(self.count * self.spec.record_bytes)
