"""Stale rows that a read caught up, for the step of the same batch."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from embedrock.batch.plan import MAX_PARTS, Plan

# Limit for several reads that wait for a step; a single one may take more.
KEPT_BYTES = 1 << 25


class CaughtUpRows(NamedTuple):
    """Stale rows of a batch that a read caught up.

    The step of the same batch would compute the same bits again. So it takes these.

    Attributes:
        versions: of the tables of the rows: the counters of changes, and their values.
        own: which rows of the batch they are.
        had_record: bool (n,), rows with a record.
        weights, state: float32 (n, dim) and (n, state_width).
    """

    versions: list[tuple[Any, int]]
    own: slice
    had_record: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.state.nbytes


class CaughtUpReads:
    """Rows that reads caught up, kept by batch for the steps of the same batches.

    There may be several batches: of replicas, of layers on one table, of micro-batches.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[np.ndarray], CaughtUpRows]] = {}  # in order of the reads

    def keep(self, plan: Plan, refreshed: CaughtUpRows) -> None:
        """Keep rows of a batch while its plan is referenced."""
        kept, key = self._kept, id(plan.ids)
        kept.pop(key, None)
        kept[key] = weakref.ref(plan.ids, lambda _: kept.pop(key, None)), refreshed
        while len(kept) > MAX_PARTS or (len(kept) > 1 and self._bytes() > KEPT_BYTES):
            kept.pop(next(iter(kept)), None)

    def of(self, plan: Plan) -> CaughtUpRows | None:
        """Return the kept rows of a batch if their tables have not changed since."""
        ids, refreshed = self._kept.get(id(plan.ids), (lambda: None, None))
        if refreshed is None or ids() is not plan.ids:
            return None
        return None if any(counter.now != then for counter, then in refreshed.versions) else refreshed

    def take(self, plan: Plan, slots: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return slots, weights and state of kept rows of a batch, or of its parts; discard all others."""
        if not self._kept:
            return []
        taken = []
        for batch, its_slots in plan.batches(slots):
            kept = self.of(batch)
            if kept is not None:
                here = kept.had_record
                whole = its_slots[kept.own], kept.weights, kept.state
                taken.append(whole if here.all() else tuple(part[here] for part in whole))
        self.clear()
        return taken

    def clear(self) -> None:
        self._kept.clear()

    def _bytes(self) -> int:
        return sum(refreshed.nbytes for _, refreshed in list(self._kept.values()))
