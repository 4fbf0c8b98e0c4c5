"""Cache insertions of several tables at once: see `joint`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.device.device_planned import DevicePlannedExecutor
from embedrock.device.plan import DeviceBatchPlan, carved, layout
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu.addresses import BINS, SHARE_WORDS, BatchTime
from embedrock.kernels.gpu.binding import TensorPart


class VictimSearch(NamedTuple):
    """Layout of a joint search for victims.

    Attributes:
        words: of each table, see `cache.VictimShare`.
        blocks: of all windows.
        victims: maximum number.
    """

    words: tuple[int, ...]
    blocks: int
    victims: int


def shares_of(executors: Sequence[DevicePlannedExecutor], positions: Sequence[int]) -> VictimSearch:
    """Return the joint search of tables with caches, given the positions of each in the batch."""
    searches = [executor.cache.search_of(n) for executor, n in zip(executors, positions, strict=True)]
    return _shares(tuple((*search, cache.blocks(search[0])) for search in searches))


@functools.lru_cache(maxsize=64)
def _shares(searches: tuple[tuple[int, int, float, int], ...]) -> VictimSearch:
    words, block, victim = list[int](), 0, 0
    for window, size, half_life, blocks in searches:
        fading = int(np.float32(1.0 / half_life).view(np.int32))
        words += cache.VictimShare(fading, window, size, block, victim)
        block, victim = block + blocks, victim + size
    return VictimSearch(tuple(words), block, victim)


def times_of(times: Sequence[BatchTime]) -> list[int]:
    """Return the times of a batch, of each table, as int64 words for kernels; none for times in memory."""
    return [word for time in times if type(time.stamp) is int for word in (time.stamp, 0, time.span, 0, time.hand, 0)]


def scratch_of(
    plan: DeviceBatchPlan, search: tuple[VictimSearch, Tensor, BatchTime], misses: Tensor | TensorPart
) -> cache.VictimScratch | None:
    """Return scratch for the search of several tables; None without positions.

    Args:
        plan: of all tables.
        search: of the tables; its words on the device, int64, followed by `times_of` the batch; time of the batch, of
            the first table. Times in memory are adjacent, in the order of tables.
        misses: int32 (k,), zeros.
    """
    (words, block, size), placed, first = search
    n, device = len(plan.keys), plan.keys.device
    if not size:
        return None
    times = placed[len(words) :].view(torch.int32) if type(first.stamp) is int else first.stamp
    sizes = cache.blocks(n), block * BINS, len(words) // SHARE_WORDS * BINS
    room = carved(device, layout((2 * size, 6 * size), sizes))
    (victims, moves), (counts, table, histogram) = (part.view(torch.int64) for part in room[:2]), room[2:]
    bins = torch.empty(block * cache.BLOCK, dtype=torch.uint8, device=device)
    of_tables = placed[: len(words)], times, misses
    return cache.VictimScratch(counts, bins, table, histogram, victims, *of_tables, moves=moves.view(size, 3))
