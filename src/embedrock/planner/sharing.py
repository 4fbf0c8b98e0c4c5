"""What workers that share tables by id have of them, and send each other in a step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from embedrock.planner.zipf import expected_misses
from embedrock.spec import Spec

if TYPE_CHECKING:
    from embedrock.planner.demand import Demand

PER_BYTE = 7e-9  # seconds of a core for a byte that is sent, and received, by a socket: docs/scale.md
COUNTED = 8  # batches of a log that tell how many rows one has
MESSAGES = 6  # that a table of its own sends in a step: three to look up, three to train


def most_rows(rows: float, workers: int) -> float:
    """Return the rows of the largest of the parts that a hash cuts a table into: even but for chance.

    Example:
        >>> most_rows(1000, 1), round(most_rows(10**6, 4))
        (1000.0, 250833)
    """
    mean = rows / workers
    return mean + math.sqrt(2 * mean * math.log(workers)) if workers > 1 else mean


def exchanged_bytes(spec: Spec, rows: float) -> float:
    """Return the bytes that go and come for so many rows of others: ids, rows, ids again, and gradients."""
    return rows * (8 + spec.storage.words.itemsize * spec.dim + 8 + 4 * spec.dim)


class Network(NamedTuple):
    """What messages between two processes take, measured on this machine.

    Attributes:
        latency: seconds until a message of a few bytes is there.
        rate: bytes/s that one sends while it gets as many.
        how: what carried them.
    """

    latency: float
    rate: float
    how: str


def sent_bytes(demand: Demand) -> float:
    """Return the bytes that one of several workers sends others in a step, for the rows that it asks of them."""
    if demand.workers == 1:
        return 0.0
    if demand.log is None:
        used = expected_misses(demand.rows, demand.zipf, demand.positions, 0)
    else:
        some = demand.cut(COUNTED)
        used = float(np.mean([len(np.unique(ids)) for ids in some])) if some else 0.0
    return exchanged_bytes(demand.spec, used * (demand.workers - 1) / demand.workers)


def exchange_seconds(nbytes: float, network: Network | None) -> float:
    """Return the seconds of a step in which a worker talks to others; where nothing was measured, about."""
    per_byte, latency = (PER_BYTE, 0.0) if network is None else (1 / network.rate, network.latency)
    return nbytes * per_byte + MESSAGES * latency
