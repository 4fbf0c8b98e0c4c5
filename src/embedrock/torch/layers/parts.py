"""Shards of a table on disk: ranks open the same commit, and reshard if the number of ranks changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from embedrock.distributed import commits
from embedrock.distributed.commits import layout_of, part_to_open
from embedrock.distributed.exchange import Exchange
from embedrock.distributed.resharding import Resharding, reshard
from embedrock.errors import ArgumentError, check_choice
from embedrock.system.log import tell
from embedrock.table.table import Table
from embedrock.torch.training.sharing import RankGroup

Result = TypeVar("Result")
RESHARD = ("error", "auto")


def part_here(path: str, group: dist.ProcessGroup | None, label: str, how: str) -> str:
    """Return the folder of this rank's shard of a table.

    Args:
        path: folder of the table.
        group: group of the ranks; None: this process is alone.
        label: name of the layer in error messages.
        how: action if the table has another number of shards, one of `RESHARD`.

    Raises:
        ArgumentError: the table has another number of shards, or a damaged one.
    """
    check_choice("reshard", how, RESHARD)
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    found = layout_of(path)
    if how == "auto" and group is not None:
        _share_out_anew(path, RankGroup.of(group).exchange)
    elif how == "auto" and found is not None and found.ranks != 1:
        _tell(path, found.ranks, reshard(path, 1).after)
    return part_to_open(path, rank, ranks, label)


def _share_out_anew(path: str, exchange: Exchange) -> None:
    """Reshard a table over the current ranks. Each rank makes its own shard."""
    rank, ranks = exchange.transport.rank, exchange.transport.ranks
    found = layout_of(path)
    parts = exchange.numbers(f"how many parts {path!r} has", 0 if found is None else found.ranks).astype(int)
    if set(parts.tolist()) <= {0, ranks}:
        return
    if found is None or len(set(parts.tolist())) > 1:
        raise ArgumentError(
            f'reshard="auto" needs all parts of a table on a disk that all ranks see: {path!r} has {parts.tolist()} '
            "parts, as each rank sees it. Bring them together, and share the rows out by `embedrock reshard`."
        )
    work = Resharding(found, ranks)
    with contextlib.ExitStack() as held:
        for what, act in (
            ("begin", lambda: held.enter_context(work.locked()) if rank == 0 else None),
            ("the commits", work.begin),
            ("the room", lambda: work.check() if rank == 0 else None),
        ):
            _on_all(exchange, f"reshard {path!r}, {what}", act)
        with work.undone_on_full_disk([rank]):
            _on_all(exchange, f"reshard {path!r}, {ranks} parts", lambda: work.make(rank))
        _on_all(exchange, f"reshard {path!r}, the end", lambda: work.publish() if rank == 0 else None)
    if rank == 0:
        _tell(path, found.ranks, ranks)


def _on_all(exchange: Exchange, what: str, act: Callable[[], Result]) -> Result:
    """Call a function on all ranks. An error on one rank is raised on all."""
    done = list[Result]()

    def made() -> np.ndarray:
        done.append(act())
        return np.empty(0, np.int64)

    exchange.tell(what, made)
    return done[0]


def _tell(path: str, before: int, after: int) -> None:
    tell(f"{path} was shared out anew: {before} parts before, {after} now")


def open_together(make: Callable[[], Table], path: str, group: dist.ProcessGroup) -> Table:
    """Open this rank's shard of a table at the newest commit that all shards have. Later commits are incomplete.

    Args:
        make: opens the shard.
        path: folder of the table.
        group: group of the ranks.

    Raises:
        ArgumentError: no commit is common to all shards, or a shard has more than one commit that others lack.
        OtherRankError: another rank cannot open its shard.
    """
    exchange, what = RankGroup.of(group).exchange, f"the commits of {path!r}"
    table = _on_all(exchange, f"opening {path!r}", make)
    own = commits.marks_of(str(table.path))
    of_all = exchange.tell(what, lambda: np.array([mark.known_as for mark in own], np.int64))
    common, ahead = commits.since(own, commits.agreed(path, [part.tolist() for part in of_all]))
    commits.check_ahead(path, exchange.numbers(f"{what}, later ones", ahead).astype(int).tolist())
    if ahead:
        table.rollback(common.number)
        at = "" if common.step is None else f", of step {common.step}"
        tell(
            f"{table.path} goes back to commit {common.number}{at}, the newest that all {len(of_all)} parts have: a "
            "later one was cut short"
        )
    return table
