"""`Memory`: records in RAM, in one arena whose pages exist once they are written to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.arena import reserve
from embedrock.directory import ID_BYTES, Direct, Directory, Hashed
from embedrock.errors import ArgumentError, MemoryBudgetError
from embedrock.sizes import format_bytes, memory_limit, parse_bytes
from embedrock.spec import Spec

# Up to this size, about that of a last-level cache, a direct table is the faster one. Above it a hashed one is, besides
# using less RAM: records lie in order of first touch, so hot rows, which come early, share pages and DRAM rows. A step
# of 16,384 Zipf ids took 1.3 ms hashed and 1.7 ms direct at 1 M rows of 768 bytes, 1.4 and 2.2 ms at 4 M.
SMALL_BYTES = 32 << 20
DIRECTORIES = ("auto", "direct", "hashed")


class Choice(NamedTuple):
    """How a table uses RAM: which directory, and the most bytes it may take."""

    direct: bool
    budget_bytes: int


def choose(spec: Spec, memory: int | str | None, directory: str, subject: str) -> Choice:
    """Decide how a table of `spec` uses RAM.

    Raises:
        ArgumentError: `memory` or `directory` is not understood, or a direct directory is asked for open ids.
        MemoryBudgetError: a direct directory is asked for, and the table does not fit.
    """
    if directory not in DIRECTORIES:
        raise ArgumentError(f"`directory` must be one of {', '.join(DIRECTORIES)}: got {directory!r}.")
    limit = memory_limit()
    budget = limit if memory is None else parse_bytes(memory)
    if spec.table_bytes is None or spec.rows is None:
        if directory == "direct":
            raise ArgumentError(f"{subject} has open ids (rows=None), which only a hashed directory can hold.")
        return Choice(False, budget)
    needed = spec.table_bytes + Direct.bytes_for(spec.rows)
    if directory == "direct" and needed > min(budget, limit):
        raise MemoryBudgetError(
            f"{subject} needs {format_bytes(needed)} for {spec.rows} rows of {spec.record_bytes} bytes in a direct "
            f"directory: {format_bytes(min(budget, limit))} may be used. "
            'Pass directory="hashed", whose RAM follows the rows touched, or fewer rows.'
        )
    fits = needed <= min(budget, limit)
    better = needed <= SMALL_BYTES or Hashed.bytes_for(spec.rows) + spec.table_bytes > min(budget, limit)
    return Choice(directory == "direct" or (directory == "auto" and fits and better), budget)


class Memory:
    """Records in RAM. Ids are int64 arrays that the table has checked.

    Args:
        spec: of the table.
        choice: how it uses RAM.
        subject: the table, for error messages.
    """

    def __init__(self, spec: Spec, choice: Choice, subject: str) -> None:
        self._spec, self._choice, self._subject = spec, choice, subject
        self.directory, capacity = self._make_directory()
        arena = reserve(capacity * spec.record_bytes, subject)
        self._weights = arena.view(spec.storage.words).reshape(capacity, -1)
        self._records = arena.view(np.float32).reshape(capacity, -1)

    def _make_directory(self) -> tuple[Directory, int]:
        if self._choice.direct:
            rows = self._spec.rows
            assert rows is not None  # `choose` made it direct, so its ids are not open
            return Direct(rows), rows
        capacity = self._choice.budget_bytes // (self._spec.record_bytes + ID_BYTES)
        if not capacity:
            raise MemoryBudgetError(
                f"a row of {self._subject} takes {self._spec.record_bytes + ID_BYTES} bytes: budget "
                f"{self._choice.budget_bytes} bytes. Raise memory=, or use a smaller dim, dtype or rule state."
            )
        if self._spec.rows is not None:
            capacity = min(capacity, self._spec.rows)
        return Hashed(capacity), capacity

    @property
    def is_direct(self) -> bool:
        """Whether slots are ids."""
        return self._choice.direct

    @property
    def budget_bytes(self) -> int:
        """The most RAM that records and directory may take."""
        return self._choice.budget_bytes

    @property
    def bytes_used(self) -> int:
        """RAM that records and directory take (a direct table is counted whole)."""
        return self._bytes_with(0)

    def _bytes_with(self, more: int) -> int:
        rows = self._spec.rows if self._choice.direct else self.directory.count + more
        return (rows or 0) * self._spec.record_bytes + self.directory.bytes_with(more)

    def check_room(self, more: int) -> None:
        """Raise `MemoryBudgetError` unless `more` new records fit the budget."""
        needed = self._bytes_with(more)
        if more and needed > self._choice.budget_bytes:
            raise MemoryBudgetError(
                f"{self._subject} has {self.directory.count} rows in RAM and this batch touches {more} new ones: "
                f"{format_bytes(needed)} ({needed} bytes) needed, budget {format_bytes(self._choice.budget_bytes)}. "
                "Raise memory=, touch fewer rows, or use a smaller dim, dtype or rule state."
            )

    def read(self, slots: np.ndarray, positions: np.ndarray, fresh: np.ndarray, out: np.ndarray) -> None:
        """Write the weights of ``slots[positions]`` to `out` float32 (n, dim); slot ``-1 - k`` means ``fresh[k]``."""
        cpu, slots = kernels.cpu, kernels.cpu.runtime.read_only(slots)
        args = self._weights, slots, cpu.runtime.read_only(positions), fresh, out
        cpu.runtime.run(cpu.rows.gather, len(out), *args, grain=2048)

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the weights of `ids`, which may repeat, to `out`, and return their slots; -1 where `out` has zeros."""
        return self.directory.look_up(ids, self._weights, positions, out)

    def refresh(self, slots: np.ndarray, rows: np.ndarray, numbers: Any) -> None:
        """Bring copies `rows` float32 (n, dim) of records up to date; the records stay as they are."""
        layout, cpu = self._spec.layout, kernels.cpu
        scratch = np.empty((len(slots), layout.state_width), np.float32)
        args = rows, self._records, cpu.runtime.read_only(slots), layout.state_start, scratch, numbers
        cpu.runtime.run(cpu.rows.refresh, len(slots), *args, grain=64)

    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        """Make records for the ids (without repeats) whose slot is negative, and return all slots.

        Args:
            ids: (n,).
            slots: (n,), as found; it stays as it is.
            fresh: (missing, dim) float32, first weights of the missing ids, in order.
            first_state: (state_width,) float32.
        """
        missing = slots < 0
        slots = np.where(missing, -1, slots)
        self.directory.insert(ids, slots)
        made, layout, cpu = slots[missing], self._spec.layout, kernels.cpu
        self.write(made, fresh)
        if layout.state_width:
            args = self._records, cpu.runtime.read_only(made), layout.state_start, first_state
            cpu.runtime.run(cpu.rows.reset_state, len(made), *args)
        return slots

    def write(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Overwrite weights by `values` float32 (n, dim), rounded to nearest."""
        cpu, slots = kernels.cpu, kernels.cpu.runtime.read_only(slots)
        cpu.runtime.run(cpu.rows.scatter, len(slots), self._weights, slots, values)

    def step(self, ids: np.ndarray, slots: np.ndarray, grads: np.ndarray, numbers: Any, step: int) -> None:
        """Step the records in `slots` (ids `ids`, without repeats) by summed gradients float32 (n, dim)."""
        layout, cpu = self._spec.layout, kernels.cpu
        exact, read_only = self._spec.dtype == "float32", cpu.runtime.read_only
        slots = read_only(slots)
        weights, rows = (self._weights, slots) if exact else (np.empty_like(grads), read_only(np.arange(len(slots))))
        if not exact:
            self.read(slots, np.arange(len(slots), dtype=np.int32), grads[:0], weights)
        args = weights, rows, self._records, slots, layout.state_start, layout.state_width, grads, numbers
        cpu.runtime.run(cpu.rows.step, len(slots), *args, grain=512, cuts=4)
        if not exact:
            args = self._weights, slots, weights, read_only(ids), self._spec.key, step
            cpu.runtime.run(cpu.rows.scatter_stochastic, len(slots), *args, grain=512)

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Go through all (ids, slots), at most `size` at a time."""
        return self.directory.batches(size)

    def snapshot(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids int64 (n,) and records uint8 (n, record_bytes), as views where records lie densely."""
        ids, slots = zip(*self.batches(max(1, self.directory.count)), strict=True) if self.directory.count else ([], [])
        where = np.concatenate([np.empty(0, np.int64), *slots])
        records = self._weights.view(np.uint8)
        records = records[where] if self._choice.direct else records[: len(where)]
        return np.concatenate([np.empty(0, np.int64), *ids]), records

    def paste_records(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Make records for new ids (without repeats) as `snapshot` returned them."""
        slots = np.full(len(ids), -1, np.int64)
        self.directory.insert(ids, slots)
        self._weights.view(np.uint8)[slots] = records
