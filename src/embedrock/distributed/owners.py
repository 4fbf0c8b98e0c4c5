"""Who has which rows of a table that is sharded by id.

A row is with the rank that owns its id:

    owner(id) = ((id * 0x9E3779B97F4A7C15 mod 2**64) >> 32) * ranks >> 32

That is multiplicative hashing: multiples of some number are spread as evenly as all other ids. First values depend on
the seed, the id and the column only, so that they are those of a table that is not sharded. The owners cut the space
of hashes into ranges, so that those of any two numbers of ranks nest or overlap by neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.plan import Plan, by_owner, make_plan, owned, plan_by_owner

MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def owners(ids: np.ndarray, ranks: int) -> np.ndarray:
    """Return the ranks that have the rows of ids, int64 (n,).

    Example:
        >>> owners(np.arange(8), 2).tolist()
        [0, 1, 0, 1, 0, 0, 1, 0]
    """
    mixed = np.asarray(ids, np.int64).view(np.uint64) * MULTIPLIER
    return (((mixed >> np.uint64(32)) * np.uint64(ranks)) >> np.uint64(32)).astype(np.int64)


class Split(NamedTuple):
    """Positions of a batch by the rank that they go to.

    Attributes:
        order: int64 (n,), those of a rank together, in order of occurrence; None: that is how they come.
        bounds: int64 (ranks + 1,), where those of each rank begin in `order`.
    """

    order: np.ndarray | None
    bounds: np.ndarray

    @property
    def places(self) -> list[Any]:
        """The positions of each rank: an index."""
        if self.order is not None:
            return np.split(self.order, self.bounds[1:-1])
        bounds = self.bounds.tolist()
        return [slice(start, end) for start, end in itertools.pairwise(bounds)]

    def parts(self, values: np.ndarray) -> list[np.ndarray]:
        """Return the values of the positions, (n, ...), as those of each rank."""
        return [values[places] for places in self.places]


class Shard(NamedTuple):
    """The part of a table that one rank has.

    Attributes:
        rank: whose part it is.
        ranks: how many there are.
        holder: the one rank that has all rows; None: they are shared out by the hash of their ids.
    """

    rank: int
    ranks: int
    holder: int | None = None

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """Return the ranks that have the rows of ids, int64 (n,)."""
        return owners(ids, self.ranks) if self.holder is None else np.full(len(ids), self.holder, np.int64)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Return of ids, int64 (n,), which rows are here."""
        if self.holder is not None:
            return np.full(len(ids), self.holder == self.rank)
        return owned(ids, self.rank, self.ranks)

    def destinations(self, ids: np.ndarray) -> Sequence[Any]:
        """Return for each rank which positions of ids, int64 (n,), go to it: an index."""
        return self.split(ids).places

    def total(self, squares: np.ndarray) -> float:
        """Return the square norm of all rows, of those that each rank has: float64 (ranks,)."""
        return float(sum(squares.tolist()))  # in the order of the ranks

    def split(self, ids: np.ndarray) -> Split:
        """Return the positions of ids, int64 (n,), by owner."""
        if self.holder is not None:
            return Split(None, len(ids) * (np.arange(self.ranks + 1) > self.holder))
        places, moved, bounds = by_owner(ids, np.empty(0, np.int32), self.ranks)
        if np.array_equal(moved, ids):  # as `plan_by_owner` leaves them
            return Split(None, bounds)
        return Split(np.argsort(places), bounds)

    def plan(self, ids: np.ndarray) -> Plan:
        """Decide what a batch of ids needs, those of one owner together."""
        return make_plan(ids) if self.holder is not None else plan_by_owner(ids, self.ranks)


class Replica(NamedTuple):
    """All rows of a table, which each rank has: its copy is that of the others, byte for byte.

    Attributes:
        rank: whose copy it is.
        ranks: how many there are.
    """

    rank: int
    ranks: int

    def destinations(self, ids: np.ndarray) -> Sequence[Any]:
        """Return for each rank which positions of ids go to it: all of them."""
        return [slice(None)] * self.ranks

    def total(self, squares: np.ndarray) -> float:
        """Return the square norm of all rows, which each rank has."""
        return float(squares[self.rank])


Placement = Shard | Replica
