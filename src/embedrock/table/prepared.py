"""Work that `read` or `check` did for a batch and that its step can reuse."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.admission.lifecycle import AdmissionDecision
from embedrock.batch.plan import MAX_PARTS, Plan, counting
from embedrock.storage.records import SharedRow
from embedrock.system.buffers import buffers

# Limit for several reads that wait for a step; a single one may take more.
KEPT_BYTES = 1 << 25
NOBODY = np.empty(0, np.int64)


class CaughtUpRows(NamedTuple):
    """Stale rows of a batch that a read caught up.

    The step of the same batch would compute the same bits again. So it takes these.

    Attributes:
        version: of the table.
        had_record: bool (unique,), rows with a record.
        weights, state: float32 (unique, dim) and (unique, state_width).
    """

    version: int
    had_record: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.state.nbytes


class PreparedStep(NamedTuple):
    """All that a step of a batch needs, as of a version of the table.

    Attributes:
        version: of the table.
        plan: with the slots of that version.
        fresh: float32 (missing, dim), initial weights of its rows without records.
        decision: of a table with dynamic rows: the rows of the batch that the plan has.
        left: ids of the rows that are evicted for it.
    """

    version: int
    plan: Plan
    fresh: np.ndarray
    decision: AdmissionDecision | None = None
    left: np.ndarray = NOBODY

    @property
    def leaving(self) -> int:
        """Least number of rows that are evicted."""
        return 0 if self.decision is None else self.decision.excess

    def taking_part(self, values: np.ndarray) -> np.ndarray:
        """Return gradients of the batch, float32 (n, dim), without rows that are not admitted."""
        if self.decision is None or self.decision.rows is None:
            return values
        rows = np.flatnonzero(self.decision.rows)
        out = buffers.empty((len(rows), values.shape[1]), np.float32)
        kernels.cpu.launch(kernels.cpu.rows.gather, values, rows, counting(len(rows)), values[:0], out)
        return out

    def gradient_of_others(self, shared: SharedRow | None, values: np.ndarray) -> np.ndarray | None:
        """Return the gradient of the default row: the sum over rows that are not admitted. None without such rows."""
        if shared is None or self.decision is None or self.decision.rows is None:
            return None
        return shared.gradient(values, np.flatnonzero(~self.decision.rows))


class PreparedSteps:
    """Work of the last check of a batch for the step of the same batch.

    A batch is identified by its ids: all plans of it, and its gradients, share that array.

    Attributes:
        prepared: the rows' slots, and room and initial weights for new ones.
        is_stepped: the batch is done.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._ids = (lambda: None) if plan is None else weakref.ref(plan.ids)
        self.prepared: PreparedStep | None = None
        self.is_stepped = False

    @property
    def unfinished(self) -> np.ndarray:
        """Ids of the batch, if it is still referenced and not stepped."""
        ids = None if self.is_stepped else self._ids()
        return NOBODY if ids is None else ids

    def is_of(self, plan: Plan) -> bool:
        return self._ids() is plan.ids


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

    def of(self, plan: Plan, version: int) -> CaughtUpRows | None:
        """Return the kept rows of a batch if the table has not changed since."""
        ids, refreshed = self._kept.get(id(plan.ids), (lambda: None, None))
        return refreshed if ids() is plan.ids and refreshed is not None and refreshed.version == version else None

    def take(self, plan: Plan, slots: np.ndarray, version: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return slots, weights and state of kept rows of a batch, or of its parts; discard all others."""
        taken = []
        for batch, its_slots in plan.batches(slots):
            kept = self.of(batch, version)
            if kept is not None:
                here = kept.had_record
                whole = its_slots, kept.weights, kept.state
                taken.append(whole if here.all() else tuple(part[here] for part in whole))
        self.clear()
        return taken

    def clear(self) -> None:
        self._kept.clear()

    def _bytes(self) -> int:
        return sum(refreshed.nbytes for _, refreshed in list(self._kept.values()))
