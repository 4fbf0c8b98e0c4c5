"""Lookups in sharded tables: the workers of a cluster fetch rows from each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from embedrock.batch.plan import Plan
from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import keeper_of
from embedrock.keras.training.requests import LookupRequest, TableLookup
from embedrock.keras.workers.exchange import gather
from embedrock.keras.workers.shards import shard_of, wire_of
from embedrock.shards import stages
from embedrock.shards.owners import Shard, Split
from embedrock.shards.transport import addressed, taken


class WorkerLookup:
    """How the workers look up rows of sharded tables for each other, at one place of a program.

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
        manager = keeper_of(one.handle for one in self._lookups)
        served = host_calls.call(self.serve, [asked, *values], [tf.int32], manager=manager, stateful=False)
        return [gather(served[0])]

    def plans(self, requests: Sequence[LookupRequest]) -> list[Plan]:
        """Return the plan of each lookup."""
        return [one.plan(requests) for one in self._lookups]

    def ask(self, requests: Sequence[LookupRequest]) -> np.ndarray:
        """Return a message with the unique ids that each lookup needs."""
        plans = self.plans(requests)
        return addressed(stages.ask([plan.ids for plan in plans], self._splits(plans)))

    def serve(self, asked: np.ndarray, *values: np.ndarray) -> np.ndarray:
        """Return a message with the rows that all workers ask for and that are here."""
        sources = self._sources()
        return addressed([stages.serve(message, sources) for message in self._taken(asked)])

    def rows(self, plans: Sequence[Plan], served: np.ndarray) -> list[np.ndarray]:
        """Return the unique rows of each lookup, of the messages of all workers."""
        found = [np.empty((len(plan.ids), one.handle.table.dim), np.float32) for one, plan in self._with(plans)]
        stages.receive(dict(enumerate(self._taken(served))), self._splits(plans), self._sources(), found)
        return found

    def _with(self, plans: Sequence[Plan]) -> list[tuple[TableLookup, Plan]]:
        return list(zip(self._lookups, plans, strict=True))

    def _sources(self) -> list[stages.RowSource]:
        return [stages.RowSource(table, wire_of(table)) for table in (one.handle.table for one in self._lookups)]

    def _splits(self, plans: Sequence[Plan]) -> list[Split]:
        return [self._shard.split(plan.ids) for plan in plans]

    def _taken(self, messages: np.ndarray) -> list[np.ndarray]:
        return taken(messages, self._shard.rank, self._shard.ranks)
