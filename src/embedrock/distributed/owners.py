"""Owners of the rows of a table that is sharded by id.

The owner of a row is a function of its id:

    owner(id) = ((id * 0x9E3779B97F4A7C15 mod 2**64) >> 32) * ranks >> 32

This is multiplicative hashing: it spreads multiples of a number as evenly as other ids. Initial values depend on seed,
id and column only, so sharding does not change them. Each owner has a range of hashes. For any two numbers of ranks,
these ranges nest or overlap by neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.plan import Plan, by_owner, make_plan, owned, plan_by_owner

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def owners(ids: np.ndarray, ranks: int) -> np.ndarray:
    """Return the ranks that own the rows of ids, int64 (n,).

    Example:
        >>> owners(np.arange(8), 2).tolist()
        [0, 1, 0, 1, 0, 0, 1, 0]
    """
    mixed = np.asarray(ids, np.int64).view(np.uint64) * MULTIPLIER
    return (((mixed >> np.uint64(32)) * np.uint64(ranks)) >> np.uint64(32)).astype(np.int64)


class Split(NamedTuple):
    """Positions of a batch by destination rank.

    Attributes:
        order: int64 (n,), positions grouped by rank, in order of occurrence; None: positions are grouped already.
        bounds: int64 (ranks + 1,), where the positions of each rank begin in `order`.
    """

    order: np.ndarray | None
    bounds: np.ndarray

    @property
    def places(self) -> list[Any]:
        """The positions of each rank, as an index."""
        if self.order is not None:
            return np.split(self.order, self.bounds[1:-1])
        bounds = self.bounds.tolist()
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]


class Shard(NamedTuple):
    """The shard of a table that one rank has.

    Attributes:
        rank: rank of the shard.
        ranks: number of shards.
        holder: the one rank that has all rows; None: rows are distributed by the hash of their ids.
    """

    rank: int
    ranks: int
    holder: int | None = None

    def owners(self, ids: np.ndarray) -> np.ndarray:
        return owners(ids, self.ranks) if self.holder is None else np.full(len(ids), self.holder, np.int64)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Return which of the ids, int64 (n,), this shard owns."""
        if self.holder is not None:
            return np.full(len(ids), self.holder == self.rank)
        return owned(ids, self.rank, self.ranks)

    def destinations(self, ids: np.ndarray) -> Sequence[Any]:
        """Return for each rank the positions of ids, int64 (n,), to send to it: an index."""
        return self.split(ids).places

    def total(self, squares: np.ndarray) -> float:
        """Sum the square norms of all ranks, float64 (ranks,)."""
        return float(sum(squares.tolist()))  # in the order of the ranks

    def split(self, ids: np.ndarray) -> Split:
        """Split the positions of ids, int64 (n,), by owner."""
        if self.holder is not None:
            return Split(None, len(ids) * (np.arange(self.ranks + 1) > self.holder))
        places, moved, bounds = by_owner(ids, np.empty(0, np.int32), self.ranks)
        if np.array_equal(moved, ids):  # as `plan_by_owner` leaves them
            return Split(None, bounds)
        return Split(np.argsort(places), bounds)

    def plan(self, ids: np.ndarray) -> Plan:
        """Plan a batch of ids, with the ids of one owner together."""
        return make_plan(ids) if self.holder is not None else plan_by_owner(ids, self.ranks)


class Replica(NamedTuple):
    """All rows of a table on each rank: all copies are equal, byte for byte.

    Attributes:
        rank: rank of this copy.
        ranks: number of copies.
    """

    rank: int
    ranks: int

    def destinations(self, ids: np.ndarray) -> Sequence[Any]:
        """Return for each rank the positions of ids to send to it: all of them."""
        return [slice(None)] * self.ranks

    def total(self, squares: np.ndarray) -> float:
        """Return the square norm of all rows, which is the same on each rank."""
        return float(squares[self.rank])


Placement = Shard | Replica
