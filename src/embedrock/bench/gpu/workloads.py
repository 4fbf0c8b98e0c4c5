"""What the contenders of ``bench gpu`` work on: several tables, their batches, and the rows that these touch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embedrock.bench.harness.workload import Workload

ADAM_COLUMNS = 3  # float32 numbers of a record for each weight: it, and Adam's two states
FLOAT_BYTES = 4
# The cache workload's tables take this share of the host's RAM, so that several contenders' fit at once, and of the
# GPU's memory, so that mode a fits, over which its ratios are taken.
HOST_SHARE, DEVICE_SHARE = 0.2, 0.25
MAX_CACHE_ROWS = 10_000_000  # of one table: more would take longer to make than to measure
CACHE_TABLES, CACHE_DIM, CACHE_BATCH, CACHE_BATCHES = 10, 128, 104_857, 40


@dataclass(frozen=True)
class GpuWorkload:
    """Tables that are trained together, and the fixed batches that steps go round.

    Args:
        name: "forum" or "cache".
        tables: rows, dim and ids of each table, one feature each; all have the same `dim`, `batch` and `batches`.
        has_model: a model follows the rows and learns labels; otherwise a gradient is given to the rows.
    """

    name: str
    tables: tuple[Workload, ...]
    has_model: bool

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.tables[0].dim

    @property
    def batch(self) -> int:
        """Samples in a batch: ids of each table."""
        return self.tables[0].batch

    @property
    def batches(self) -> int:
        """Number of different batches."""
        return self.tables[0].batches

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def lookups(self) -> int:
        """Ids in one batch, repeats included."""
        return sum(table.lookups for table in self.tables)

    @property
    def weight_bytes(self) -> int:
        """Bytes of a row's weights."""
        return self.dim * FLOAT_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes of a row's weights and Adam's state."""
        return ADAM_COLUMNS * self.weight_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the weights of all rows of all tables."""
        return self.rows * self.weight_bytes

    def ids(self) -> npt.NDArray[np.int64]:
        """Return all batches, int64 (batches, tables, batch)."""
        by_table = [np.stack(table.ids())[:, :, 0] for table in self.tables]
        return np.ascontiguousarray(np.stack(by_table, axis=1))

    @cached_property
    def touched(self) -> tuple[int, ...]:
        """How many rows of each table the batches touch: its working set."""
        ids = self.ids()
        return tuple(_count_different(ids[:, k], table.rows) for k, table in enumerate(self.tables))

    @cached_property
    def unique(self) -> float:
        """How many rows a batch touches, on average, all tables together."""
        ids = self.ids()
        pairs = ((batch[k], table.rows) for batch in ids for k, table in enumerate(self.tables))
        return sum(_count_different(one, rows) for one, rows in pairs) / self.batches

    def with_dim(self, dim: int) -> GpuWorkload:
        """Return the same workload with rows of another width."""
        return replace(self, tables=tuple(replace(table, dim=dim) for table in self.tables))

    def describe(self) -> str:
        """Return one line for people."""
        sizes = " and ".join(dict.fromkeys(f"{table.rows:,}" for table in self.tables))
        return (
            f"{self.name} workload: {len(self.tables)} tables of {sizes} rows x {self.dim} float32, Adam; "
            f"{self.lookups:,} ids a step, Zipf({self.tables[0].zipf:g}), {self.unique:,.0f} unique; "
            f"{self.batches} batches touch {sum(self.touched):,} rows"
        )


def _count_different(ids: npt.NDArray[np.int64], rows: int) -> int:
    seen = np.zeros(rows, np.bool_)
    seen[ids] = True
    return int(np.count_nonzero(seen))


def forum(toy: bool) -> GpuWorkload:
    """Return the workload of the forum thread: users and items, and a model that ranks pairs of them."""
    if toy:
        return GpuWorkload("forum", _tables((400, 60), dim=8, batch=8, batches=2), has_model=True)
    return GpuWorkload("forum", _tables((10_000_000, 1_000_000), dim=64, batch=8192, batches=60), has_model=True)


def cache(toy: bool, host_bytes: int, device_bytes: int) -> GpuWorkload:
    """Return the published cache workload, with as many rows as the machine allows.

    Args:
        toy: so small that the interpreter steps it in a second.
        host_bytes: RAM that is available.
        device_bytes: memory of the GPU.
    """
    if toy:
        return GpuWorkload("cache", _tables((300, 300), dim=16, batch=12, batches=2), has_model=False)
    budget = min(HOST_SHARE * host_bytes, DEVICE_SHARE * device_bytes)
    rows = int(budget / (CACHE_TABLES * CACHE_DIM * FLOAT_BYTES * ADAM_COLUMNS))
    rows = max(CACHE_BATCH, min(rows, MAX_CACHE_ROWS))
    tables = _tables((rows,) * CACHE_TABLES, dim=CACHE_DIM, batch=CACHE_BATCH, batches=CACHE_BATCHES)
    return GpuWorkload("cache", tables, has_model=False)


def _tables(sizes: tuple[int, ...], **options: int) -> tuple[Workload, ...]:
    return tuple(Workload(rows=rows, features=1, seed=seed, **options) for seed, rows in enumerate(sizes))
