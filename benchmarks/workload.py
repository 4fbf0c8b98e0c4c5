"""The work that all implementations of a benchmark get: ids and gradients, made from a seed in each process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embedrock.planner.demand import SCATTER, bounded_zipf, expected_misses

MAX_ROWS = SCATTER - 1  # `SCATTER` is prime, so it permutes the ids of any smaller table; products stay below 2**63

# Of MLPerf's DLRM on Criteo's terabyte of clicks: rows of each table, and ids that a sample looks up in it.
CARDINALITIES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class Workload:
    """A table and a fixed set of batches of ids with bounded Zipf popularity.

    Args:
        rows: rows of the table, at most `MAX_ROWS`.
        dim: columns of a row, float32.
        batch: samples in a batch.
        features: ids of each sample, all of the one table; a batch is `batch` x `features` lookups.
        zipf: exponent of the popularity law (0: uniform).
        batches: number of different batches; steps go round them.
        seed: of ids and gradients.
        ranks: number of distinct ids to draw from, or None for all rows. With the same `ranks`, tables of any size
            have the same pattern of repeats, so the same number of unique ids.
    """

    rows: int = 4_000_000
    dim: int = 64
    batch: int = 8192
    features: int = 2
    zipf: float = 1.05
    batches: int = 60
    seed: int = 0
    ranks: int | None = None

    @property
    def lookups(self) -> int:
        """Ids in one batch, repeats included."""
        return self.batch * self.features

    @property
    def table_bytes(self) -> int:
        """Bytes of the float32 weights of all rows."""
        return self.rows * self.dim * 4

    def ids(self) -> list[npt.NDArray[np.int64]]:
        """Return the batches, each (batch, features) int64 in [0, rows)."""
        random = np.random.default_rng(self.seed)
        return [self._drawn(random) for _ in range(self.batches)]

    def batch_at(self, index: int) -> npt.NDArray[np.int64]:
        """Return batch `index` of an endless stream of different ones, (batch, features) int64 in [0, rows)."""
        return self._drawn(np.random.default_rng((self.seed, index)))

    def expected_misses(self, slots: int) -> float:
        """Return how many rows of a batch are, on average, not among the `slots` most popular ones.

        It is the fewest misses of a cache whose policy knows the popularity of each row, but not the next batches.
        """
        return expected_misses(self._ranks, self.zipf, self.lookups, slots)

    def gradient(self) -> npt.NDArray[np.float32]:
        """Return the gradient of every batch's output, (batch, features, dim) float32."""
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal((self.batch, self.features, self.dim), dtype=np.float32)

    def unique_ids(self) -> float:
        return float(np.mean([np.unique(ids).size for ids in self.ids()]))

    def touched_rows(self) -> int:
        return np.unique(np.concatenate([ids.ravel() for ids in self.ids()])).size

    def describe(self) -> str:
        return (
            f"{self.rows:,} x {self.dim} float32, batch {self.batch:,} x {self.features} = {self.lookups:,} lookups, "
            f"Zipf({self.zipf:g}), {self.unique_ids():,.0f} unique"
        )

    def _drawn(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        uniform = random.random((self.batch, self.features))
        return bounded_zipf(uniform, self._ranks, self.zipf) * SCATTER % self.rows

    @property
    def _ranks(self) -> int:
        return self.rows if self.ranks is None else self.ranks


@dataclass(frozen=True)
class ManyTables:
    """Several tables, and a fixed set of batches with a bag of ids for each sample and table, of Zipf popularity.

    Args:
        cardinalities: rows of each table, where `max_rows` does not cut them.
        bag_sizes: ids of each sample in each table, where `max_bag` does not cut them.
        max_rows, max_bag: the most rows of a table, and ids of a bag.
        dim, batch, zipf, batches, seed: as in `Workload`.
    """

    cardinalities: tuple[int, ...] = CARDINALITIES
    bag_sizes: tuple[int, ...] = BAGS
    max_rows: int = max(CARDINALITIES)
    max_bag: int = max(BAGS)
    dim: int = 64
    batch: int = 2048
    zipf: float = 1.05
    batches: int = 16
    seed: int = 0

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(min(rows, self.max_rows) for rows in self.cardinalities)

    @cached_property
    def bags(self) -> tuple[int, ...]:
        return tuple(min(bag, self.max_bag) for bag in self.bag_sizes)

    @property
    def lookups(self) -> int:
        """Ids in one batch, all tables together, repeats included."""
        return self.batch * sum(self.bags)

    @property
    def table_bytes(self) -> int:
        """Bytes of the float32 weights of all rows of all tables."""
        return sum(self.rows) * self.dim * 4

    def ids(self) -> list[list[npt.NDArray[np.int64]]]:
        """Return the batches: for each table (batch, bag) int64."""
        return [self._drawn(np.random.default_rng((self.seed, index))) for index in range(self.batches)]

    def gradient(self) -> npt.NDArray[np.float32]:
        """Return the gradient of every batch's pooled rows, side by side: (batch, tables * dim) float32."""
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal((self.batch, len(self.rows) * self.dim), dtype=np.float32)

    def describe(self) -> str:
        unique = np.mean([sum(np.unique(ids).size for ids in batch) for batch in self.ids()])
        return (
            f"{len(self.rows)} tables, {sum(self.rows):,} rows x {self.dim} float32, batch {self.batch:,} x "
            f"{sum(self.bags)} ids = {self.lookups:,} lookups, Zipf({self.zipf:g}), {unique:,.0f} unique"
        )

    def _drawn(self, random: np.random.Generator) -> list[npt.NDArray[np.int64]]:
        # The last rank is never drawn, which a table of 3 rows would notice, so there is one more.
        return [
            bounded_zipf(random.random((self.batch, bag)), rows + 1, self.zipf) * SCATTER % rows
            for bag, rows in zip(self.bags, self.rows, strict=True)
        ]
