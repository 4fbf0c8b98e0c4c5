"""The model of cost: what a step of a table takes, from what it has to do and what the machine needs for that.

The time of a step (one lookup of n ids and one update by their gradients) is a sum. Each term is an amount of work
times a constant of the machine, which `embedrock machine` finds by running steps of real tables and fitting:

    call              1                          Python, checks, threads
    position          n                          hashing ids, positions by row
    position_byte     n * dim * 4                rows copied to where they are wanted, gradients summed
    row               u                          directory, first values, a row's share of the rule
    row_byte          u * record bytes           records read and written at random
    disk_call         1, on disk
    disk_read         seconds that the disk needs for m reads at once, as it was measured for 4 KiB
    miss              m + new                    room in the cache: who leaves, who comes
    miss_byte         (m + new) * record bytes   checksums, and rows that leave, appended to a log

where u are the different ids of the batch, m those of them that are read from disk, and new those that have no record
yet. m comes from a curve (`embedrock.tiers.curve`), by the policy in use. A step that waits for nothing else is the sum
over tables. With prefetch, reading overlaps with the rest and with the dense model: a step is the larger of both.

Bytes need no constants but one, what the process takes without tables: a table's records and directory are told by
the code that places them, and never take more than `memory=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

TERMS: tuple[str, ...] = (
    "call",
    "position",
    "position_byte",
    "row",
    "row_byte",
    "disk_call",
    "disk_read",
    "miss",
    "miss_byte",
)
OF_DISK = TERMS.index("disk_call")  # from here on


class Work(NamedTuple):
    """What one step of a table has to do.

    Attributes:
        positions: ids of the batch.
        rows: different ones.
        dim: weights in a row.
        record_bytes: of a row, optimizer state included.
        on_disk: whether the table is there.
        reads: rows read from files.
        new: rows on disk that get a record.
    """

    positions: float
    rows: float
    dim: int
    record_bytes: int
    on_disk: bool = False
    reads: float = 0.0
    new: float = 0.0


class Disk(NamedTuple):
    """What a disk gives.

    Attributes:
        at_once: numbers of random reads of 4 KiB that are asked for together, ascending.
        seconds: that each of those takes, all reads together.
        append: bytes/s of a long write.
    """

    at_once: tuple[int, ...]
    seconds: tuple[float, ...]
    append: float

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


def terms(work: Work, disk: Disk) -> np.ndarray:
    """Return the amounts of work of a step, in the order of `TERMS`."""
    moved = work.reads + work.new
    amounts = (
        1.0,
        work.positions,
        work.positions * work.dim * 4,
        work.rows,
        work.rows * work.record_bytes,
        *((1.0, disk.read_seconds(work.reads), moved, moved * work.record_bytes) if work.on_disk else (0.0,) * 4),
    )
    return np.array(amounts)


def seconds_of(work: Work, disk: Disk, constants: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each term of a step."""
    amounts = terms(work, disk)
    return {name: float(amount * constants[name]) for name, amount in zip(TERMS, amounts, strict=True)}


def fit(runs: Sequence[tuple[Work, float]], disk: Disk) -> dict[str, float]:
    """Return the constants by which steps took the seconds that were measured: least squares of relative errors.

    None is negative. Those of tables in RAM are found first, and do not change by what tables on disk took.
    """
    in_ram = [run for run in runs if not run[0].on_disk]
    on_disk = [run for run in runs if run[0].on_disk]
    first = _fitted(np.array([terms(work, disk)[:OF_DISK] for work, _ in in_ram]), np.array([s for _, s in in_ram]))
    constants = np.concatenate([first, np.zeros(len(TERMS) - OF_DISK)])
    if on_disk:
        amounts, taken = np.array([terms(work, disk) for work, _ in on_disk]), np.array([s for _, s in on_disk])
        rest = taken - amounts @ constants
        constants[OF_DISK:] = _fitted(amounts[:, OF_DISK:], rest, taken)
    return dict(zip(TERMS, constants.tolist(), strict=True))


def _fitted(amounts: np.ndarray, seconds: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Return numbers that are not negative, by which amounts (n, terms) add up to seconds; each error over `scale`."""
    per = (seconds if scale is None else scale)[:, None]
    sizes = np.maximum((amounts / per).max(axis=0), 1e-300)  # so that all columns count alike
    columns, wanted = amounts / per / sizes, seconds / per[:, 0]
    found, used = np.zeros(columns.shape[1]), np.ones(columns.shape[1], bool)
    while used.any():
        part = np.linalg.lstsq(columns[:, used], wanted, rcond=1e-9)[0]
        if (part >= 0).all():
            found[used] = part
            break
        used[np.flatnonzero(used)[part.argmin()]] = False
    return found / sizes
