"""Bringing rows up from disk ahead of the batch that uses them: those of all tables of a pool in one read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from embedrock.table.rows import Rows
from embedrock.tiers.placing import memory_for
from embedrock.tiers.tier import Ticket, Tier
from embedrock.tiers.turn import Turn


class Bringer(Protocol):
    """What rows are brought up by: a `Table`, or a `Group` for all of its members at once."""

    def bring(self, ids: Any) -> Ticket:
        """Bring up the rows of a batch, and keep them."""
        ...

    def room_for(self, batches: Sequence[Any]) -> tuple[int, int]:
        """Return how many different rows batches have together, and the smallest `memory` that holds these."""
        ...


Wanted = Sequence[tuple[Bringer, Any]]  # a batch's ids, by who brings their rows


def joined(wanted: Wanted) -> Wanted:
    """Return a batch's ids with those of all members of a group as one: {table: ids}, which the group brings."""
    found: dict[Bringer, Any] = {}
    for bringer, ids in wanted:
        group = getattr(bringer, "group", None)
        if group is None:
            found[bringer] = ids
        else:
            found.setdefault(group, {})[bringer] = ids
    return list(found.items())


def of_bringer(bringer: Bringer, batches: Sequence[Wanted]) -> list[Any]:
    """Return what batches want of a bringer."""
    return [ids for wanted in batches for each, ids in wanted if each is bringer]


class Tickets(Ticket):
    """Those of several tiers."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def release(self) -> None:
        for ticket in self._tickets:
            ticket.release()

    def looked_up(self) -> tuple[int, int] | None:
        found = [each for ticket in self._tickets if (each := ticket.looked_up())]
        return (sum(hits for hits, _ in found), sum(misses for _, misses in found)) if found else None


def bring(turn: Turn, wanted: Mapping[Rows, np.ndarray]) -> Ticket:
    """Bring up rows of tables that have one turn: one read for each tier that has records of theirs.

    Args:
        turn: of the tables. Any thread may call: the disk is read while others go on with them.
        wanted: checked ids of each.

    Raises:
        CacheTooSmallError: they do not fit the cache together with those in use. None is kept.
    """
    tickets, left = list[Ticket](), dict(wanted)
    try:
        while left:
            with turn.lock:
                tier, keys, done = _first(left)
                tier.begin_bring()
            left = {rows: ids for rows, ids in left.items() if rows not in done}
            tickets.append(tier.bring_ahead(keys))
    except BaseException:
        Tickets(tickets).release()
        raise
    return tickets[0] if len(tickets) == 1 else Tickets(tickets)


def _first(wanted: Mapping[Rows, np.ndarray]) -> tuple[Tier, np.ndarray, set[Rows]]:
    """Return the tier that has the first table's records, the keys there of all tables in it, and which these are."""
    beneath = [(rows, *rows.tier.beneath(ids.reshape(-1))) for rows, ids in wanted.items()]
    tier = beneath[0][1]
    own = [(rows, keys) for rows, each, keys in beneath if each is tier]
    return tier, np.concatenate([keys for _, keys in own]), {rows for rows, _ in own}


def room_for(batches: Sequence[Mapping[Rows, np.ndarray]]) -> tuple[int, int]:
    """Return how many different rows batches have together, and the smallest `memory` that holds these."""
    keys: dict[Tier, list[np.ndarray]] = {}
    for batch in batches:
        for rows, ids in batch.items():
            tier, own = rows.tier.beneath(np.asarray(ids).reshape(-1))
            keys.setdefault(tier, []).append(own)
    counts = {tier: len(np.unique(np.concatenate(parts))) for tier, parts in keys.items()}
    return sum(counts.values()), sum(memory_for(tier.spec, count) for tier, count in counts.items())
