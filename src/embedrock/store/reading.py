"""Reading stored records: sorted, in whole blocks, neighbours together, each checked by its CRC."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from embedrock import kernels
from embedrock.errors import CorruptTableError
from embedrock.machine.arena import reserve
from embedrock.machine.vfs import System

STAGING_BYTES = 8 << 20
LONGEST_REQUEST = 256 << 10
GAP = 16 << 10  # bytes between two records that are read along rather than asked for apart
NAMED = 8  # ids that an error names


class OpenFile(Protocol):
    """What is read: a file of a `System`."""

    @property
    def fd(self) -> int: ...
    @property
    def path(self) -> str: ...


class ReadableRun(Protocol):
    """A run as the reader sees it."""

    @property
    def file(self) -> OpenFile: ...
    @property
    def first(self) -> int: ...
    @property
    def salt(self) -> int: ...
    @property
    def step(self) -> int: ...


class Counts(NamedTuple):
    """What a read cost."""

    requests: int
    nbytes: int


class _Staging(threading.local):
    # Memory of each thread that reads: whole blocks lie here before their records are copied out.
    memory: np.ndarray | None = None

    def take(self, nbytes: int) -> np.ndarray:
        if self.memory is None or len(self.memory) < nbytes:
            self.memory = reserve(nbytes, "reading records")
        return self.memory


_staging = _Staging()


def read_records(
    system: System,
    runs: Sequence[ReadableRun] | Mapping[int, ReadableRun],
    locations: np.ndarray,
    ids: np.ndarray,
    records: np.ndarray,
    slots: np.ndarray,
) -> Counts:
    """Read stored records into slots. Threads may do so at once, into slots of their own.

    Args:
        system: reads the files.
        runs: by number.
        locations: int64 (n,), all >= 0, in any order; they may repeat.
        ids: int64 (n,): the rows that they belong to.
        records: uint8 (slots, record_bytes).
        slots: int64 (n,), without repeats.

    Raises:
        CorruptTableError: a record is not what was written for that row. What slots hold is undefined then.
        OSError: the system could not read.
    """
    order = np.argsort(locations)
    locations, ids, slots = locations[order], ids[order], slots[order]
    done = requests = nbytes = 0
    while done < len(order):
        piece = _Piece(runs, locations[done:], records.shape[1] + kernels.reference.storage.CRC_BYTES)
        piece.read(system)
        part = slice(done, done + piece.count)
        bad = piece.unseal(ids[part], records, slots[part])
        if len(bad):
            raise _corrupt(runs, locations[part][bad], ids[part][bad])
        done, requests, nbytes = done + piece.count, requests + piece.requests.shape[1], nbytes + piece.nbytes
    return Counts(requests, nbytes)


class _Piece:
    """As many records as fit this thread's staging memory."""

    def __init__(
        self, runs: Sequence[ReadableRun] | Mapping[int, ReadableRun], locations: np.ndarray, stride: int
    ) -> None:
        storage = kernels.cpu.storage
        room = max(STAGING_BYTES, stride + 2 * storage.BLOCK)
        locations = locations[: room // stride + 1]
        requests, self.starts = np.empty((4, len(locations)), np.int64), np.empty(len(locations), np.int64)
        first = runs[int(locations[0]) >> storage.RUN_SHIFT].first
        args = locations, first, stride, (GAP, LONGEST_REQUEST, room), requests, self.starts
        self.count, count, self.nbytes = storage.plan_reads(*args)
        self.starts, self.requests = self.starts[: self.count], requests[:, :count]
        self._numbers, self._of_request = np.unique(self.requests[0], return_inverse=True)
        self._runs = [runs[number] for number in self._numbers.tolist()]
        self._locations, self._memory = locations[: self.count], _staging.take(room)

    def read(self, system: System) -> None:
        fds = np.array([run.file.fd for run in self._runs], np.int64)[self._of_request]
        offsets, sizes, starts = (np.ascontiguousarray(row) for row in self.requests[1:])
        system.read_many(fds, offsets, sizes, self._memory, starts)

    def unseal(self, ids: np.ndarray, records: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Copy the records out, and return which ones are damaged."""
        good = np.empty(self.count, np.uint8)
        args = self._memory, self.starts, ids, self._marks(), records, slots, good
        kernels.cpu.launch(kernels.cpu.storage.unseal, *args)
        return np.flatnonzero(good == 0)

    def _marks(self) -> np.ndarray:
        marks = np.empty(self.count, np.uint32)
        salts, steps = (np.array([getattr(run, name) for run in self._runs], np.uint32) for name in ("salt", "step"))
        kernels.cpu.launch(kernels.cpu.storage.mark, self._locations, self._numbers, salts, steps, marks)
        return marks


def _corrupt(
    runs: Sequence[ReadableRun] | Mapping[int, ReadableRun], locations: np.ndarray, ids: np.ndarray
) -> CorruptTableError:
    numbers = locations >> kernels.reference.storage.RUN_SHIFT
    rows = np.sort(ids[numbers == numbers[0]])
    named = ", ".join(map(str, rows[:NAMED].tolist())) + (", ..." if len(rows) > NAMED else "")
    return CorruptTableError(
        f"{runs[int(numbers[0])].file.path} is damaged: {len(rows)} record(s) do not fit their checksums, ids {named}. "
        "`embedrock verify` lists all damage and the newest good commit; open that one with at=, or roll back to it."
    )
