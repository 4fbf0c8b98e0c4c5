"""Cache insertions of several tables at once: see `joint`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.device.cache import BatchNumbers, BatchNumbersInMemory, as_written_back
from embedrock.device.interfaces import JointExecutor
from embedrock.device.plan import DevicePlan, carved, layout
from embedrock.kernels.gpu import cache
from embedrock.kernels.gpu import joint_cache as kernels
from embedrock.kernels.gpu.binding import TensorPart
from embedrock.kernels.gpu.joint import DeviceTables


class VictimSearch(NamedTuple):
    """Layout of a joint search for victims.

    Attributes:
        words: of each table, see `kernels.VictimShare`.
        blocks: of all windows.
        victims: maximum number.
    """

    words: tuple[int, ...]
    blocks: int
    victims: int


def shares_of(executors: Sequence[JointExecutor], positions: Sequence[int]) -> VictimSearch:
    """Return the joint search of tables with caches, given the positions of each in the batch."""
    searches = [executor.near.search_of(n) for executor, n in zip(executors, positions, strict=True)]
    return _shares(tuple((*search, kernels.blocks(search[0])) for search in searches))


@functools.lru_cache(maxsize=64)
def _shares(searches: tuple[tuple[int, int, float, int], ...]) -> VictimSearch:
    words, block, victim = list[int](), 0, 0
    for window, size, half_life, blocks in searches:
        fading = int(np.float32(1.0 / half_life).view(np.int32))
        words += kernels.VictimShare(fading, window, size, block, victim)
        block, victim = block + blocks, victim + size
    return VictimSearch(tuple(words), block, victim)


def times_of(stamps: Sequence[BatchNumbers]) -> list[int]:
    """Return the batch numbers of each table as int64 words for kernels."""
    words = list[int]()
    for each in stamps:
        stamp, span, _ = each.time(1.0).numbers()
        words += stamp, 0, span, 0, each.hand, 0
    return words


class CacheInsertions:
    """Cache insertions of a batch of several tables.

    Args:
        shares: of the tables.
        placed: words of the shares on the device, int64, followed by `times_of` the batch unless `stamps` are in
            memory.
        stamps: of the batch, of each table. Stamps in memory are adjacent, in order.
    """

    def __init__(
        self, shares: VictimSearch, placed: Tensor, stamps: Sequence[BatchNumbers | BatchNumbersInMemory]
    ) -> None:
        self._shares, count = shares, len(shares.words)
        self._words = placed[:count]
        first = stamps[0]
        self._times = first.stamp if isinstance(first, BatchNumbersInMemory) else placed[count:].view(torch.int32)

    def bring(self, plan: DevicePlan, tables: DeviceTables, misses: Tensor | TensorPart) -> None:
        """Load the rows of a plan into the caches where they score higher than the rows they replace.

        Args:
            plan: of all tables.
            tables: see `DeviceTables`.
            misses: int32 (k,), zeros.
        """
        n, (_, block, size), device = len(plan.keys), self._shares, plan.keys.device
        if not size:
            return
        sizes = kernels.blocks(n), block * kernels.BINS, tables.entries.shape[0] * kernels.BINS
        room = carved(device, layout((2 * size, 6 * size), sizes))
        (victims, moves), (counts, table, histogram) = (part.view(torch.int64) for part in room[:2]), room[2:]
        bins = torch.empty(block * kernels.BLOCK, dtype=torch.uint8, device=device)
        scratch = misses, counts, bins, table, histogram, victims
        search = kernels.JointVictimScratch(self._words, self._times, *scratch)
        kernels.touch(tables, search, plan.keys, plan.count)
        kernels.offer(tables, search)
        kernels.choose(tables, search)
        search = search._replace(victims=as_written_back(search.victims))
        moves = moves.view(size, 3)
        kernels.swap(tables, search, plan.keys, plan.count, moves)
        cache.exchange(moves, tables.form.record_bytes)
