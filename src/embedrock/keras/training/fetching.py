"""Lookups in sharded tables: the workers of a cluster fetch rows from each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import keeper_of
from embedrock.keras.training.requests import Request, TableLookup
from embedrock.keras.workers.exchange import MessageReader, gather, pack
from embedrock.keras.workers.shards import Shard, owners, shard_of


class Fetching:
    """How the workers look up rows of sharded tables for each other, at one place of a program.

    Each tells all others which ids it needs, unique ones; each tells all others the rows that it owns of those.

    Args:
        lookups: on sharded tables.
    """

    def __init__(self, lookups: Sequence[TableLookup]) -> None:
        self._lookups = lookups
        self._shard = shard_of(lookups[0].handle.table) or Shard(0, 1)

    def fetch(self, values: Sequence[tf.Tensor], ids: tf.Tensor) -> list[tf.Tensor]:
        """Return, in a program, what `rows` takes.

        Args:
            values: of the handles, which order this among the steps.
            ids: what `ask` returned.
        """
        asked = gather(ids)
        keeper = keeper_of(one.handle for one in self._lookups)
        served = host_calls.call(self.serve, [asked, *values], [tf.int32], keeper=keeper, stateful=False)
        return [asked, gather(served[0])]

    def ask(self, requests: Sequence[Request]) -> np.ndarray:
        """Return a message with the unique ids that each lookup needs."""
        ids = [one.plan(requests).ids for one in self._lookups]
        return pack([np.array([len(part) for part in ids], np.int64), *ids])

    def serve(self, asked: np.ndarray, *values: np.ndarray) -> np.ndarray:
        """Return a message with the rows that all workers ask for and that are here."""
        found = []
        for ids in self._needs(asked):
            for one, part in zip(self._lookups, ids, strict=True):
                found.append(one.handle.table.lookup(part[self._shard.owns(part)]))
        return pack(found)

    def rows(self, asked: np.ndarray, served: np.ndarray) -> list[np.ndarray]:
        """Return the unique rows that each lookup has asked for, of the messages of all workers."""
        reader, needs = MessageReader(served), self._needs(asked)
        mine = needs[self._shard.rank]
        rows = [
            np.empty((len(ids), one.handle.table.dim), np.float32) for one, ids in zip(self._lookups, mine, strict=True)
        ]
        for owner in range(self._shard.workers):
            for asker, ids in enumerate(needs):
                for k, part in enumerate(ids):
                    is_here = owners(part, self._shard.workers) == owner
                    found = reader.rows(int(is_here.sum()), rows[k].shape[1])
                    if asker == self._shard.rank:
                        rows[k][is_here] = found
        return rows

    def _needs(self, asked: np.ndarray) -> list[list[np.ndarray]]:
        """Return, for each worker, the ids of each lookup."""
        reader, needs = MessageReader(asked), []
        for _ in range(self._shard.workers):
            counts = reader.ints(len(self._lookups)).tolist()
            needs.append([reader.ints(count) for count in counts])
        return needs
