"""Owners of the rows of a table that is sharded by id.

The owner of a row is a function of its id:

    owner(id) = ((id * 0x9E3779B97F4A7C15 mod 2**64) >> 32) * ranks >> 32

This is multiplicative hashing: it spreads multiples of a number as evenly as other ids. Initial values depend on seed,
id and column only, so sharding does not change them. Each owner has a range of hashes. For any two numbers of ranks,
these ranges nest or overlap by neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.ids import owners
from embedrock.batch.plan import Plan, by_owner, make_plan, moved, owned


class Split(NamedTuple):
    """Positions of a batch by destination rank.

    Attributes:
        order: int32 (n,), positions grouped by rank, in order of occurrence; None: positions are grouped already.
        bounds: where the positions of each rank begin in `order`, and where the last ones end.
    """

    order: np.ndarray | None
    bounds: list[int]

    @property
    def counts(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.bounds)]

    @property
    def places(self) -> list[Any]:
        """The positions of each rank, as an index."""
        own = [slice(start, end) for start, end in itertools.pairwise(self.bounds)]
        return own if self.order is None else [self.order[each] for each in own]


@dataclass(frozen=True, eq=False)
class SharedPlan(Plan):
    """The plan of a batch for rows that ranks share.

    Attributes:
        split: the rows by owner.
        fetch: returns the plan's rows from their owners, float32 (unique, dim).
    """

    split: Split = Split(None, [0])  # noqa: RUF009  # immutable
    fetch: Callable[[SharedPlan], np.ndarray] | None = None


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

    @property
    def is_elsewhere(self) -> bool:
        """True if one other rank has all rows."""
        return self.holder not in (None, self.rank)

    def owners(self, ids: np.ndarray) -> np.ndarray:
        return owners(ids, self.ranks) if self.holder is None else np.full(len(ids), self.holder, np.int64)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Return which of the ids, int64 (n,), this shard owns."""
        if self.holder is not None:
            return np.full(len(ids), self.holder == self.rank)
        return owned(ids, self.rank, self.ranks)

    def total(self, squares: np.ndarray) -> float:
        """Sum the square norms of all ranks, float64 (ranks,)."""
        return float(sum(squares.tolist()))  # in the order of the ranks

    def split(self, ids: np.ndarray) -> Split:
        """Split the positions of ids, int64 (n,), by owner."""
        if self.holder is not None:
            return Split(None, [len(ids) * (rank > self.holder) for rank in range(self.ranks + 1)])
        return Split(*by_owner(ids, self.ranks))

    def plan(self, ids: np.ndarray, fetch: Callable[[SharedPlan], np.ndarray] | None = None) -> SharedPlan:
        """Plan a batch of ids, with the ids of one owner together."""
        plan = make_plan(ids)
        order, bounds = self.split(plan.ids)
        fields = vars(plan) if order is None else vars(plan) | moved(plan, order)
        return SharedPlan.made(**fields, split=Split(None, bounds), fetch=fetch)


class Replica(NamedTuple):
    """All rows of a table on each rank: all copies are equal, byte for byte.

    Attributes:
        rank: rank of this copy.
        ranks: number of copies.
    """

    rank: int
    ranks: int

    def split(self, ids: np.ndarray) -> None:
        """Return nothing to split by: each rank gets all positions."""

    def total(self, squares: np.ndarray) -> float:
        """Return the square norm of all rows, which is the same on each rank."""
        return float(squares[self.rank])


Placement = Shard | Replica
