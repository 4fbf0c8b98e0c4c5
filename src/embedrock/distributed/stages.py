"""Stages of an exchange: requests, replies and sums of ranks, as pure functions of arrays.

A lookup is `ask`, an exchange, `asked` and `serve`, an exchange, and `receive`. Gradients travel as *blocks*: the
gradients of one backward on one rank, summed by row there. Owners add blocks with `fold`, in the order of backwards and
ranks. So the same sequence of blocks gives the same bits on any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from embedrock.batch.gradients import RowGradients
from embedrock.batch.plan import Plan, make_plan
from embedrock.distributed.messages import Letter, MessageReader, MessageRows, Part, as_sent, decoded, words_of
from embedrock.distributed.owners import Placement, Split
from embedrock.system.buffers import buffers
from embedrock.table.table import Table


class RowSource(NamedTuple):
    """A table whose rows are sent.

    Attributes:
        table: the table.
        wire: dtype of float32 numbers in messages.
    """

    table: Table
    wire: str = "float32"

    @property
    def sent_as(self) -> str:
        dtype = self.table.spec.dtype
        return self.wire if dtype == "float32" else dtype


class GradientBlock(NamedTuple):
    """Gradients of rows that came from one rank.

    Attributes:
        ids: int64 (n,).
        values: float32 (n, dim).
        split: the rows by owner, if known.
    """

    ids: np.ndarray
    values: np.ndarray
    split: Split | None = None

    def as_received(self, wire: str) -> GradientBlock:
        """Return the block as the receiver of a message with numbers in dtype `wire` gets it."""
        return self if wire == "float32" else self._replace(values=decoded(as_sent(self.values, wire), wire))


# ---------------------------------------------------------------- lookups


def ask(wanted: Sequence[np.ndarray], splits: Sequence[Split]) -> list[Letter]:
    """Return the message to each rank that requests rows of several tables.

    Args:
        wanted: unique ids by table.
        splits: the ids of each table, split by owner.
    """
    counts = np.array([split.counts for split in splits], np.int64)
    parts = [[ids[places] for places in split.places] for ids, split in zip(wanted, splits, strict=True)]
    return [[own, *of_rank] for own, *of_rank in zip(counts.T, *parts, strict=True)]


def asked(message: np.ndarray, tables: int) -> list[np.ndarray]:
    """Return the ids that a message requests, by table."""
    reader = MessageReader(message)
    return [reader.ints(count) for count in reader.ints(tables).tolist()]


def serve(wanted: Sequence[np.ndarray], sources: Sequence[RowSource]) -> Letter:
    """Return a message with the requested rows, by ids of each table."""
    return [_served(ids, source) for ids, source in zip(wanted, sources, strict=True)]


def _served(ids: np.ndarray, source: RowSource) -> Part:
    if source.sent_as == "float32":
        return MessageRows((len(ids), source.table.dim), partial(source.table.lookup, ids))
    return as_sent(source.table.lookup(ids), source.sent_as)


def served_words(counts: Sequence[int], sources: Sequence[RowSource]) -> int:
    """Return the length in words of a `serve` message, by the number of rows of each table."""
    return sum(words_of(count * one.table.dim, one.sent_as) for count, one in zip(counts, sources, strict=True))


def rows_here(
    wanted: Sequence[np.ndarray], rank: int, splits: Sequence[Split], sources: Sequence[RowSource]
) -> list[np.ndarray]:
    """Return arrays for all requested rows, float32 (n, dim) by table, with this rank's own rows filled in.

    Args:
        wanted: this rank's request to itself: ids by table.
        rank: this rank.
        splits: the requested ids, split by owner.
        sources: the tables.
    """
    found = []
    for ids, split, source in zip(wanted, splits, sources, strict=True):
        rows, place = buffers.empty((split.bounds[-1], source.table.dim), np.float32), split.places[rank]
        if split.order is None and source.wire == "float32":
            source.table.lookup(ids, rows[place])
        else:
            rows[place] = GradientBlock(ids, source.table.lookup(ids)).as_received(source.wire).values
        found.append(rows)
    return found


def receive(
    messages: Mapping[int, np.ndarray],
    splits: Sequence[Split],
    sources: Sequence[RowSource],
    found: Sequence[np.ndarray],
) -> None:
    """Write the rows that each rank served to `found`, float32 (n, dim) by table."""
    readers = [(rank, MessageReader(message)) for rank, message in messages.items()]
    for split, source, rows in zip(splits, sources, found, strict=True):
        places, counts = split.places, split.counts
        for rank, reader in readers:
            rows[places[rank]] = reader.sent(counts[rank], source.table.dim, source.sent_as)


# ---------------------------------------------------------------- gradients


def bring(block: GradientBlock, placement: Placement) -> list[GradientBlock]:
    """Return the part of a block for each rank."""
    split = block.split or placement.split(block.ids)
    if split is None:
        return [block] * placement.ranks
    return [GradientBlock(block.ids[part], block.values[part]) for part in split.places]


def fold(blocks: Sequence[GradientBlock], plan: Callable[[np.ndarray], Plan] = make_plan) -> RowGradients:
    """Return the sum of blocks, added one after the other, in order.

    Args:
        blocks: at least one.
        plan: makes the plan of all their ids.
    """
    ids = np.concatenate([block.ids for block in blocks])
    values = buffers.empty((len(ids), blocks[0].values.shape[1]), np.float32)
    return RowGradients.sum(plan(ids), np.concatenate([block.values for block in blocks], out=values))


def fold_positions(
    ranks: Sequence[Sequence[GradientBlock]], plan: Callable[[np.ndarray], Plan] = make_plan
) -> RowGradients:
    """Sum gradients of all ranks by position, as one process sums those of one batch.

    Args:
        ranks: by rank, the gradients of each lookup, in the order of the backward.
        plan: makes the plan of the ids of a lookup on all ranks.
    """
    lookups = ([block for block in of_ranks if block is not None] for of_ranks in itertools.zip_longest(*ranks))
    return RowGradients.sum_of([fold(blocks, plan) for blocks in lookups])
