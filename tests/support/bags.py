"""Bags of one feature alone, pooled by the kernels, for tests."""

from __future__ import annotations

import numpy as np

from embedrock.batch.plan import Plan
from embedrock.batch.pooling import Bags, PooledSource, bag_of_position, places_of, pool_into, trace_of


def bags_of(offsets: np.ndarray, mode: str) -> Bags:
    return Bags(offsets, mode, np.array([0, len(offsets) - 1]), np.array([0, 1]), bag_of_position(offsets))


def pooled(plan: Plan, rows: np.ndarray, weights: np.ndarray | None, bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """Return the bags of unique rows float32 (unique, dim), and their trace: see `pool_into`."""
    count, dim = len(bags.offsets) - 1, rows.shape[1]
    out, trace = np.empty((count, dim), np.float32), trace_of(count, dim, {bags.mode})
    pool_into(plan, PooledSource.of(rows), weights, bags, places_of([out]), trace)
    return out, trace
