"""The model of cost: what a step of a table takes, from what it has to do and what the machine needs for that.

The time of a step (one lookup of n ids and one update by their gradients) is a sum. Each term is an amount of work
times a constant of the machine, which `embedrock machine` finds by running steps of real tables and fitting:

    first           1 / tables        Python, checks, threads that wake up
    next            1 - 1 / tables    the same for a table that is not the only one
    position        n                 hashing ids, positions by row
    position_byte   n * dim * 4       rows copied to where they are wanted, gradients summed
    cold_byte       of those          that the processor's cache does not hold, with those of all tables
    row             u                 directory, a row's share of the rule
    row_byte        u * record bytes  records read and written at random
    new_call        1                 if there are new rows
    new             w                 directory, first state
    new_number      w * dim           first values
    alone_number    of those          of so few rows that one thread draws them
    grown_byte      pages             memory that is written for the first time
    first_disk      as first          on disk: more Python, and what watches the cache
    next_disk       as next           on disk
    come            m + w, on disk    a slot of the cache, and what is remembered of the row
    trial           u, on disk        showing ids to small caches, by which a cache finds out how long to remember uses
    trial_call      batches of those  that each of them is fed: few where a cache holds many batches
    leave_call      2, 1 or 0         making room: for rows that are read, and for those that are new
    leave           s                 finding those that are worth least
    moved_byte      (m + s) * record  records that come and go
    spill_call      as leave_call     appending rows that leave to a log
    spill           s                 its index
    spill_byte      s * record bytes  checksums, and writing
    read_call       1                 if there are reads
    read            m                 finding and checking them
    read_byte       m * record bytes  checksums, and copying to the cache
    reader          requests          of files so small that the system keeps them in its page cache: threads that wake
                                      up, no more than there are
    cached_request  requests          of these files
    disk_read       seconds           that the disk needs, as it was measured: for other files, and for pages of a base
                                      that nobody has read since it was written
    written_read    requests          of other files that are being written: what was written last has to get there

where n are the ids of the batch, u the different ones, w those of them that have no record yet, m those that are read
from files and s the rows that leave a cache to make room. They come from a curve (`embedrock.tiers.curve`), by the
policy in use. Records that lie close to each other in a file are one request. "1 if" is as often as that happens: less
than one row a step is a part of a call. While logs are folded, what is read from a log and what is read from the base
are requests of their own (`embedrock.planner.logs`). A step that waits for nothing else is the sum over tables. With
prefetch, reading overlaps with the rest and with the dense model: a step is the larger of both.

Bytes need no constants but one, what the process takes without tables: see `embedrock.planner.peak`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from embedrock.machine.readers import THREADS
from embedrock.machine.vfs import BLOCK, DIRECT_BYTES
from embedrock.store.compaction import chunk_rows
from embedrock.store.reading import CACHED_GAP, GAP
from embedrock.store.runs import CRC_BYTES
from embedrock.tiers.cache import tried

REST: tuple[str, ...] = (
    "first",
    "next",
    "position",
    "position_byte",
    "cold_byte",
    "row",
    "row_byte",
    "new_call",
    "new",
    "new_number",
    "alone_number",
    "grown_byte",
    "first_disk",
    "next_disk",
    "come",
    "trial",
    "trial_call",
    "leave_call",
    "leave",
    "moved_byte",
)
SPILLING = "spill_call", "spill", "spill_byte"
READING = "read_call", "read", "read_byte", "reader", "cached_request", "disk_read", "written_read"
TERMS = (*REST, *SPILLING, *READING)
UNSURE = 1.02  # a log told so much smaller or larger than `DIRECT_BYTES` is so
SHARED_ROWS = 512  # new ones that more than one thread draws first values for
WARM_BYTES = 4 << 20  # of a batch, that a processor's caches hold from one phase of a step to the next


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
        file_bytes: of the files that they are read from, together.
        run_bytes: of one of these files.
        is_written: whether rows that leave the cache are appended to the file that others are read from.
        grown_bytes: of memory that was never written before.
        tables: that a step has.
        batch_bytes: of the values of a batch, of all tables.
        log_reads: of `reads`, those from one log, where others are from the files of a base.
        log_bytes: of that log.
        slots: of the cache.
        cold: of the rows read from a base, the share that the page cache does not have yet.
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
    run_bytes: float = float("inf")
    is_written: bool = False
    grown_bytes: float = 0.0
    tables: int = 1
    batch_bytes: float = 0.0
    log_reads: float = 0.0
    log_bytes: float = 0.0
    slots: int = 0
    cold: float = 0.0

    @property
    def sources(self) -> tuple[Work, ...]:
        """The same with the reads of each kind of file: of a base, and of a log beside it."""
        if not self.log_reads:
            return (self,)
        log = self._replace(reads=self.log_reads, file_bytes=self.log_bytes, run_bytes=self.log_bytes, cold=0.0)
        return self._replace(reads=self.reads - self.log_reads, is_written=False), log

    @property
    def direct(self) -> float:
        """The share of steps in which a file is so large that it is read past the page cache."""
        if not self.on_disk:
            return 0.0
        return float(np.clip(0.5 + np.log(self.run_bytes / DIRECT_BYTES) / (2 * np.log(UNSURE)), 0.0, 1.0))

    def requests(self, gap: int) -> float:
        """Return the reads that are asked for: of records at random places, those further apart than a gap."""
        if self.reads <= 1:
            return self.reads
        return 1 + (self.reads - 1) * float(np.exp(-self.reads * gap / self.file_bytes))

    @property
    def bytes_read(self) -> float:
        """Bytes of requests past the page cache: whole blocks, and what lies between records that are read together."""
        requests, apart = self.requests(GAP), self.file_bytes / max(self.reads, 1.0)
        if requests >= self.reads:
            return requests * (self.record_bytes + BLOCK)
        gap = min(GAP, apart)  # on average between those that are less than a gap apart: less than half of it
        return requests * (self.record_bytes + BLOCK) + (self.reads - requests) * max(self.record_bytes, gap / 2)


def run_bytes(rows: float, record_bytes: int) -> float:
    """Return the bytes of one file of a table with so many rows, once it is compacted."""
    stride = record_bytes + CRC_BYTES
    return stride * min(rows, chunk_rows(int(rows), stride))


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

    def faster(self, other: Disk) -> Disk:
        """Return the better of each number of two measurements."""
        if self.at_once != other.at_once:
            return self
        seconds = tuple(map(min, self.seconds, other.seconds))
        return Disk(self.at_once, seconds, max(self.append, other.append), max(self.stream, other.stream))

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


MOST_ROUNDS, TOLERANCE = 4, 1e-9  # of the search for constants
ROUNDS, USUAL = 6, 0.04  # of it; relative errors up to which a run counts in full: of larger ones, by their size
Runs = Sequence[tuple[Work, Taken]]  # the mean work of a step for a table, and what that takes
NO_DISK = Disk((1,), (0.0,), float("inf"))


def terms(work: Work, disk: Disk) -> dict[str, float]:
    """Return the amounts of work of a step."""
    record = work.record_bytes
    values, is_new = work.positions * work.dim * 4, min(1.0, work.new)
    reads, trials = min(1.0, work.reads), tried(work.slots, work.rows) if work.on_disk else 0.0
    leaves = min(work.spilled, reads + is_new)
    first = 1 / work.tables
    return {
        "first": first,
        "next": 1 - first,
        "position": work.positions,
        "position_byte": values,
        "cold_byte": values * max(0.0, 1 - WARM_BYTES / max(values, work.batch_bytes)),
        "row": work.rows,
        "row_byte": work.rows * record,
        "new_call": is_new,
        "new": work.new,
        "new_number": work.new * work.dim,
        "alone_number": work.new * work.dim * (work.new < SHARED_ROWS),
        "grown_byte": work.grown_bytes,
        "first_disk": first * work.on_disk,
        "next_disk": (1 - first) * work.on_disk,
        "come": work.reads + work.new if work.on_disk else 0.0,
        "trial": work.rows * (trials > 0),
        "trial_call": trials,
        "leave_call": leaves,
        "leave": work.spilled,
        "moved_byte": (work.reads + work.spilled) * record,
        "spill_call": leaves,
        "spill": work.spilled,
        "spill_byte": work.spilled * record,
        "read_call": reads,
        "read": work.reads,
        "read_byte": work.reads * record,
        **_requests(work, disk),
    }


def _requests(work: Work, disk: Disk) -> dict[str, float]:
    cached = written = seconds = 0.0
    for part in work.sources:
        requests, direct = part.requests(GAP), part.direct
        cached += (1 - direct) * part.requests(CACHED_GAP)
        written += direct * part.is_written * requests
        seconds += direct * max(disk.read_seconds(requests), part.bytes_read / disk.stream)
        seconds += (1 - direct) * disk.read_seconds(part.cold * part.requests(CACHED_GAP))
    readers = float(min(THREADS, cached))
    return {"reader": readers, "cached_request": cached, "written_read": written, "disk_read": seconds}


def seconds_of(work: Work, disk: Disk, constants: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each term of a step."""
    return {name: amount * constants[name] for name, amount in terms(work, disk).items()}


def faster(runs: Runs, others: Runs) -> Runs:
    """Return of each run of two turns the one that took less; of turns of different runs, the first ones."""
    if len(runs) != len(others):
        return runs
    return [min(pair, key=lambda run: run[1].total) for pair in zip(runs, others, strict=True)]


def fit(runs: Runs, disk: Disk) -> dict[str, float]:
    """Return the constants by which steps took the seconds that were measured: by the least sum of relative
    errors, or nearly, so that a run that something disturbed counts little.

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
    columns, weights, found = columns / sizes, np.ones(len(wanted)), np.zeros(len(sizes))
    for _ in range(ROUNDS):
        found = _not_negative(columns * weights[:, None], wanted * weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ found - wanted), USUAL))
    return found / sizes


def _not_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the numbers, none negative, by which columns come closest to what is wanted (Lawson and Hanson, 1974)."""
    found, used = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(MOST_ROUNDS * len(found)):
        gain = np.where(used, -np.inf, matrix.T @ (wanted - matrix @ found))
        if gain.max(initial=-np.inf) <= TOLERANCE:
            break
        used[gain.argmax()] = True
        while used.any():
            best = np.zeros(len(found))
            best[used] = np.linalg.lstsq(matrix[:, used], wanted, rcond=1e-9)[0]
            wrong = used & (best <= 0)
            if not wrong.any():
                found = best
                break
            steps = np.where(wrong, found / np.maximum(found - best, 1e-300), np.inf)
            found = np.maximum(found + steps.min() * (best - found), 0.0)
            found[steps <= steps.min()] = 0.0
            used &= found > 0
    return found
