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
from embedrock.distributed.messages import Letter, MessageReader, MessageRows, as_received, as_sent, words_of
from embedrock.distributed.owners import Placement, SharedPlan, Split
from embedrock.table.table import Table


class RowSource(NamedTuple):
    """A table whose rows are sent.

    Attributes:
        table: the table.
        dim: its number of columns.
        sent_as: dtype of its rows in messages.
        wire: dtype of float32 numbers in messages.
    """

    table: Table
    dim: int
    sent_as: str
    wire: str

    @staticmethod
    def of(table: Table, wire: str = "float32") -> RowSource:
        spec = table.spec
        return RowSource(table, spec.dim, wire if spec.value_dtype == "float32" else spec.dtype, wire)

    def words(self, rows: int) -> int:
        """Return the size of rows in words."""
        return words_of(rows * self.dim, self.sent_as)

    def write(self, plan: Plan, outs: Sequence[np.ndarray], own: int) -> None:
        """Write the rows of a plan's positions, rank by rank, as they are sent; those of rank `own` as they arrive."""
        is_exact = self.sent_as == "float32"
        each = outs if is_exact else [np.empty(out.shape, np.float32) for out in outs]
        self.table.read_parts(plan, each)
        if not is_exact:
            for rank, (out, rows) in enumerate(zip(outs, each, strict=True)):
                out[:] = as_received(rows, self.wire) if rank == own else as_sent(rows, self.sent_as)


_NONE = np.empty((0, 0), np.float32)
NO_TIME = -1


class GradientBlock(NamedTuple):
    """Gradients of rows that came from one rank.

    Attributes:
        ids: int64 (n,).
        values: float32 (n, dim).
        split: the rows by owner, if known.
        time: of the newest event, whole seconds since 1970; `NO_TIME`: it is not known.
    """

    ids: np.ndarray
    values: np.ndarray
    split: Split | None = None
    time: int = NO_TIME


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


def asked_by_rank(messages: Sequence[np.ndarray], plans: Sequence[SharedPlan], rank: int) -> list[Sequence[np.ndarray]]:
    """Return by rank the ids that it requests, by table. This rank, `rank`, has its own in `plans`."""
    here = [plan.ids[plan.split.places[rank]] for plan in plans]
    return [here if sender == rank else asked(message, len(plans)) for sender, message in enumerate(messages)]


def serve(
    asked: Sequence[Sequence[np.ndarray]], sources: Sequence[RowSource], own: int = -1, here: Sequence[np.ndarray] = ()
) -> tuple[list[Letter], list[Plan]]:
    """Return the message to each rank with the rows that it requests, and by table the plan of all requests.

    Args:
        asked: by rank, ids of each table.
        sources: the tables.
        own: this rank, which gets no message.
        here: memory for its rows instead, float32 (n, dim) by table. They are rounded as if they were sent, when the
            messages are packed.
    """
    letters, plans = [Letter() for _ in asked], list[Plan]()
    for k, source in enumerate(sources):
        parts = [of_rank[k] for of_rank in asked]
        plan, outs = source.table.plan(np.concatenate(parts)), [_NONE] * len(parts)
        write = partial(source.write, plan, outs, own)
        for to, ids in enumerate(parts):
            if to == own:
                outs[to] = here[k]
            else:
                letters[to].append(MessageRows((len(ids), source.dim), source.sent_as, outs, to, write))
        plans.append(plan)
    return letters, plans


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
            rows[places[rank]] = reader.sent(counts[rank], source.dim, source.sent_as)


# ---------------------------------------------------------------- gradients


def bring(block: GradientBlock, placement: Placement, wire: str = "float32") -> list[GradientBlock]:
    """Return the part of a block for each rank. This rank's own is rounded as if it were sent."""
    split = placement.split(block.ids) if block.split is None else block.split
    if split is None:
        return [block] * placement.ranks
    parts = [GradientBlock(block.ids[own], block.values[own], time=block.time) for own in split.places]
    if wire != "float32":
        own = parts[placement.rank]
        parts[placement.rank] = own._replace(values=as_received(own.values, wire))
    return parts


def fold(blocks: Sequence[GradientBlock], plan: Callable[[Sequence[np.ndarray]], Plan] | None = None) -> RowGradients:
    """Return the sum of blocks, added one after the other, in order.

    Args:
        blocks: at least one.
        plan: makes the plan of all their ids, one block after the other.
    """
    ids = [block.ids for block in blocks]
    made = make_plan(np.concatenate(ids)) if plan is None else plan(ids)
    return RowGradients.sum_parts(made, [block.values for block in blocks])


def fold_positions(
    ranks: Sequence[Sequence[GradientBlock]], plan: Callable[[Sequence[np.ndarray]], Plan] | None = None
) -> RowGradients:
    """Sum gradients of all ranks by position, as one process sums those of one batch.

    Args:
        ranks: by rank, the gradients of each lookup, in the order of the backward.
        plan: makes the plan of the ids of a lookup on all ranks.
    """
    lookups = ([block for block in of_ranks if block is not None] for of_ranks in itertools.zip_longest(*ranks))
    return RowGradients.sum_of([fold(blocks, plan) for blocks in lookups])
