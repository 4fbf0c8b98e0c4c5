"""The model of cost: what a step of a table takes, from what it has to do and what the machine needs for that.

The time of a step (one lookup of n ids and one update by their gradients) is a sum. Each term is an amount of work
times a constant of the machine, which `embedrock machine` finds by running steps of real tables and fitting:

    call              1                          Python, checks, threads
    position          n                          hashing ids, positions by row
    position_byte     n * dim * 4                rows copied to where they are wanted, gradients summed
    row               u                          directory, a row's share of the rule
    row_byte          u * record bytes           records read and written at random
    new               w                          directory, first state
    new_number        w * dim                    first values
    grown_byte        (w + m - s) * record bytes memory that is written for the first time
    disk_call         1, on disk
    new_call          1, on disk, if there are new rows
    miss              m + w, on disk             room in the cache: who leaves, who comes
    spill_call        1, if rows leave           appending them to a log
    spill             s                          its index
    spill_byte        s * record bytes           checksums, and writing
    read_call         1, if there are reads
    read              m                          finding and checking them
    read_byte         m * record bytes           checksums, and copying to the cache
    cached_request    requests                   of files so small that the system keeps them in its page cache
    disk_read         seconds                    of other files: that the disk needs, as it was measured

where u are the different ids of the batch, w those of them that have no record yet, m those that are read from files
and s the rows that leave a cache to make room. They come from a curve (`embedrock.tiers.curve`), by the policy in use.
Records that lie close to each other in a file are one request. A step that waits for nothing else is the sum over
tables. With prefetch, reading overlaps with the rest and with the dense model: a step is the larger of both.

Bytes need no constants but one, what the process takes without tables: see `embedrock.planner.peak`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from embedrock.machine.vfs import BLOCK, DIRECT_BYTES
from embedrock.store.reading import CACHED_GAP, GAP

REST: tuple[str, ...] = (
    "call",
    "position",
    "position_byte",
    "row",
    "row_byte",
    "new",
    "new_number",
    "grown_byte",
    "disk_call",
    "new_call",
    "miss",
)
SPILLING = "spill_call", "spill", "spill_byte"
READING = "read_call", "read", "read_byte", "cached_request", "disk_read"
TERMS = (*REST, *SPILLING, *READING)


class Taken(NamedTuple):
    """Seconds of a step.

    Attributes:
        total: all of it.
        reading: of that, reading files.
        spilling: and writing rows that leave a cache.
    """

    total: float
    reading: float = 0.0
    spilling: float = 0.0


class Work(NamedTuple):
    """What one step of a table has to do.

    Attributes:
        positions: ids of the batch.
        rows: different ones.
        dim: weights in a row.
        record_bytes: of a row, optimizer state included.
        new: rows that get a record.
        on_disk: whether the table is there.
        reads: rows read from files.
        spilled: rows that leave the cache.
        file_bytes: of the files that they are read from.
    """

    positions: float
    rows: float
    dim: int
    record_bytes: int
    new: float = 0.0
    on_disk: bool = False
    reads: float = 0.0
    spilled: float = 0.0
    file_bytes: float = float("inf")

    @property
    def is_cached(self) -> bool:
        """Whether the system's page cache has the files."""
        return self.file_bytes < DIRECT_BYTES

    @property
    def requests(self) -> float:
        """The reads that are asked for: of records at random places, those further apart than a gap."""
        if self.reads <= 1:
            return self.reads
        gap = CACHED_GAP if self.is_cached else GAP
        return 1 + (self.reads - 1) * float(np.exp(-self.reads * gap / self.file_bytes))

    @property
    def bytes_read(self) -> float:
        """Bytes of all requests: whole blocks, and what lies between records that are read together."""
        requests, apart = self.requests, self.file_bytes / max(self.reads, 1.0)
        if requests >= self.reads:
            return requests * (self.record_bytes + BLOCK)
        gap = min(GAP, apart)  # on average between those that are less than a gap apart: less than half of it
        return requests * (self.record_bytes + BLOCK) + (self.reads - requests) * max(self.record_bytes, gap / 2)


class Disk(NamedTuple):
    """What a disk gives.

    Attributes:
        at_once: numbers of random reads of 4 KiB that are asked for together, ascending.
        seconds: that each of those takes, all reads together.
        append: bytes/s of a long write.
        stream: bytes/s of long reads.
    """

    at_once: tuple[int, ...]
    seconds: tuple[float, ...]
    append: float
    stream: float = float("inf")

    def read_seconds(self, reads: float) -> float:
        """Return the seconds of so many reads at once; beyond those measured, at the same rate.

        Example:
            >>> Disk((1, 100), (1e-4, 1e-3), 1e9).read_seconds(200)
            0.002
        """
        if reads <= 0:
            return 0.0
        if reads < 1:
            return reads * self.seconds[0]
        if reads > self.at_once[-1]:
            return reads * self.seconds[-1] / self.at_once[-1]
        return float(np.exp(np.interp(np.log(reads), np.log(self.at_once), np.log(self.seconds))))


NO_DISK = Disk((1,), (0.0,), float("inf"))


def terms(work: Work, disk: Disk) -> dict[str, float]:
    """Return the amounts of work of a step."""
    record, waits = work.record_bytes, work.on_disk and not work.is_cached
    return {
        "call": 1.0,
        "position": work.positions,
        "position_byte": work.positions * work.dim * 4,
        "row": work.rows,
        "row_byte": work.rows * record,
        "new": work.new,
        "new_number": work.new * work.dim,
        "grown_byte": max(0.0, work.new + work.reads - work.spilled) * record,
        "disk_call": float(work.on_disk),
        "new_call": min(1.0, work.new) if work.on_disk else 0.0,
        "miss": work.reads + work.new if work.on_disk else 0.0,
        "spill_call": min(1.0, work.spilled),
        "spill": work.spilled,
        "spill_byte": work.spilled * record,
        "read_call": min(1.0, work.reads),
        "read": work.reads,
        "read_byte": work.reads * record,
        "cached_request": 0.0 if waits else work.requests,
        "disk_read": max(disk.read_seconds(work.requests), work.bytes_read / disk.stream) if waits else 0.0,
    }


def seconds_of(work: Work, disk: Disk, constants: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each term of a step."""
    return {name: amount * constants[name] for name, amount in terms(work, disk).items()}


def fit(runs: Sequence[tuple[Work, Taken]], disk: Disk) -> dict[str, float]:
    """Return the constants by which steps took the seconds that were measured: least squares of relative errors.

    None is negative. Those of reading and of spilling are found from the seconds of these.
    """
    amounts = [terms(work, disk) for work, _ in runs]
    stages = (
        (REST, [taken.total - taken.reading - taken.spilling for _, taken in runs]),
        (SPILLING, [taken.spilling for _, taken in runs]),
        (READING, [taken.reading for _, taken in runs]),
    )
    constants: dict[str, float] = {}
    for names, seconds in stages:
        matrix = np.array([[each[name] for name in names] for each in amounts])
        has = matrix.any(axis=1)
        totals = np.array([taken.total for _, taken in runs])
        found = _fitted(matrix[has], np.array(seconds)[has], totals[has]) if has.any() else np.zeros(len(names))
        constants |= dict(zip(names, found.tolist(), strict=True))
    return constants


def _fitted(amounts: np.ndarray, seconds: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return numbers that are not negative, by which amounts (n, terms) add up to seconds; each error over `scale`."""
    columns, wanted = amounts / scale[:, None], seconds / scale
    sizes = np.maximum(columns.max(axis=0), 1e-300)  # so that all columns count alike
    columns = columns / sizes
    found, used = np.zeros(columns.shape[1]), np.ones(columns.shape[1], bool)
    while used.any():
        part = np.linalg.lstsq(columns[:, used], wanted, rcond=1e-9)[0]
        if (part >= 0).all():
            found[used] = part
            break
        used[np.flatnonzero(used)[part.argmin()]] = False
    return found / sizes
