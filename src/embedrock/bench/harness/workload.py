"""What every contender is given: the same ids and gradients, made from a seed in each process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embedrock.planner.zipf import bounded_zipf, expected_misses

# Knuth's multiplicative hash. The factor is prime, so that it permutes the ids of any table with fewer rows;
# hot ids end up far apart in memory, as they do in real logs.
SCATTER = 2_654_435_761
MAX_ROWS = SCATTER - 1  # also keeps the products below 2**63


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
        ranks: number of distinct ids that are drawn from, or None for all rows. With the same `ranks`, tables
            of any size see the same pattern of repeats, and so the same number of unique ids.
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
        shape = (self.batch, self.features)
        return [self._scattered(random.random(shape)) for _ in range(self.batches)]

    def batch_at(self, index: int) -> npt.NDArray[np.int64]:
        """Return batch `index` of an endless stream of different ones, (batch, features) int64 in [0, rows)."""
        random = np.random.default_rng((self.seed, index))
        return self._scattered(random.random((self.batch, self.features)))

    def expected_misses(self, slots: int) -> float:
        """Return how many rows of a batch are, on average, not among the `slots` most popular ones.

        It is the fewest misses that a cache of so many slots can have whose policy knows the popularity of every
        row, but not the batches to come. With 0 slots: how many different rows a batch has.
        """
        return expected_misses(self._ranks, self.zipf, self.lookups, slots)

    def gradient(self) -> npt.NDArray[np.float32]:
        """Return the gradient of every batch's output, (batch, features, dim) float32."""
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal((self.batch, self.features, self.dim), dtype=np.float32)

    def unique_ids(self) -> float:
        """Return the mean number of different ids in a batch."""
        return float(np.mean([np.unique(ids).size for ids in self.ids()]))

    def touched_rows(self) -> int:
        """Return the number of different ids in all batches together."""
        return np.unique(np.concatenate([ids.ravel() for ids in self.ids()])).size

    def _scattered(self, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        return bounded_zipf(uniform, self._ranks, self.zipf) * SCATTER % self.rows

    @property
    def _ranks(self) -> int:
        return self.rows if self.ranks is None else self.ranks
