"""What contenders with many tables are given: the tables of a DLRM, and bags of ids for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embedrock.bench.harness.workload import SCATTER, bounded_zipf

# Of MLPerf's DLRM on Criteo's terabyte of clicks: rows of each table, and how many ids a sample looks up in it.
CARDINALITIES = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)
BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class ManyTables:
    """Several tables, and a fixed set of batches with a bag of ids for each sample and table, of Zipf popularity.

    Args:
        cardinalities: rows of each table, where `max_rows` does not cut them.
        bag_sizes: ids of each sample in each table, where `max_bag` does not cut them.
        max_rows, max_bag: the most rows of a table, and ids of a bag.
        dim: columns of a row, float32.
        batch: samples in a batch.
        zipf: exponent of the popularity law (0: uniform).
        batches: number of different batches; steps go round them.
        seed: of ids and gradients.

    Example:
        >>> workload = ManyTables(max_rows=1000, batch=2)
        >>> sum(workload.bags), [ids.shape for ids in workload.batch_at(0)][:3]
        (214, [(2, 3), (2, 2), (2, 1)])
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
        """Rows of each table."""
        return tuple(min(rows, self.max_rows) for rows in self.cardinalities)

    @cached_property
    def bags(self) -> tuple[int, ...]:
        """Ids of each sample in each table."""
        return tuple(min(bag, self.max_bag) for bag in self.bag_sizes)

    @property
    def lookups(self) -> int:
        """Ids in one batch, all tables together, repeats included."""
        return self.batch * sum(self.bags)

    @property
    def table_bytes(self) -> int:
        """Bytes of the float32 weights of all rows of all tables."""
        return sum(self.rows) * self.dim * 4

    def batch_at(self, index: int) -> list[npt.NDArray[np.int64]]:
        """Return batch `index` of an endless stream of different ones: for each table (batch, bag) int64."""
        return self.draw(np.random.default_rng((self.seed, index)), self.batch)

    def draw(self, random: np.random.Generator, samples: int) -> list[npt.NDArray[np.int64]]:
        """Draw the ids of some samples: for each table (samples, bag) int64."""
        shapes = [(samples, bag) for bag in self.bags]
        # The multiplicative hash puts the popular ids far apart, as they are in real logs. The last rank is never
        # drawn, which a table of 3 rows would notice, so there is one more.
        return [
            bounded_zipf(random.random(shape), rows + 1, self.zipf) * SCATTER % rows
            for shape, rows in zip(shapes, self.rows, strict=True)
        ]

    def ids(self) -> list[list[npt.NDArray[np.int64]]]:
        """Return the batches."""
        return [self.batch_at(index) for index in range(self.batches)]

    def gradient(self) -> npt.NDArray[np.float32]:
        """Return the gradient of every batch's pooled rows, (tables, batch, dim) float32."""
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal((len(self.rows), self.batch, self.dim), dtype=np.float32)

    def unique_ids(self) -> float:
        """Return the mean number of different rows in a batch."""
        return float(np.mean([sum(np.unique(ids).size for ids in batch) for batch in self.ids()]))
