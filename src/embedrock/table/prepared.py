"""What a read, or check, of a batch leaves to the step of the same batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.admission.lifecycle import AdmissionDecision
from embedrock.batch.plan import MAX_PARTS, Plan, counting
from embedrock.storage.records import SharedRow
from embedrock.system.buffers import buffers

# Of several reads that wait for a step; a single one may take more.
KEPT_BYTES = 1 << 25
NOBODY = np.empty(0, np.int64)


class CaughtUpRows(NamedTuple):
    """Rows of a batch that a read brought up to date, where the rule lets rows lag behind.

    The step of the same batch would compute the same again, to the bit: so it takes these.

    Attributes:
        version: of the table.
        had_record: bool (unique,), which rows had one.
        weights, state: float32 (unique, dim) and (unique, state_width).
    """

    version: int
    had_record: np.ndarray
    weights: np.ndarray
    state: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.weights.nbytes + self.state.nbytes


class PreparedStep(NamedTuple):
    """What makes a step of a batch possible, as of a version of the table.

    Attributes:
        version: of the table.
        plan: with the slots of then.
        fresh: float32 (missing, dim), first weights of its rows without records.
        ballot: of a table whose rows come and go: which rows of the batch the plan has.
        left: the ids of the rows that leave for it.
    """

    version: int
    plan: Plan
    fresh: np.ndarray
    decision: AdmissionDecision | None = None
    left: np.ndarray = NOBODY

    @property
    def leaving(self) -> int:
        """How many rows leave, at least."""
        return 0 if self.decision is None else self.decision.excess

    def taking_part(self, values: np.ndarray) -> np.ndarray:
        """Return gradients of the batch, float32 (n, dim), without those of rows that are turned away."""
        if self.decision is None or self.decision.rows is None:
            return values
        rows = np.flatnonzero(self.decision.rows)
        out = buffers.empty((len(rows), values.shape[1]), np.float32)
        kernels.cpu.launch(kernels.cpu.rows.gather, values, rows, counting(len(rows)), values[:0], out)
        return out

    def gradient_of_others(self, shared: SharedRow | None, values: np.ndarray) -> np.ndarray | None:
        """Return the gradient of the shared row from those of the batch; None: no row was turned away."""
        if shared is None or self.decision is None or self.decision.rows is None:
            return None
        return shared.gradient(values, np.flatnonzero(~self.decision.rows))


class PreparedSteps:
    """What the last check of a batch leaves to the step of the same batch.

    A batch is known by its ids: all plans of it, and its gradients, share that array.

    Attributes:
        prepared: the rows' slots, and room and first weights for new ones.
        is_stepped: the batch is done.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._ids = (lambda: None) if plan is None else weakref.ref(plan.ids)
        self.prepared: PreparedStep | None = None
        self.is_stepped = False

    @property
    def unfinished(self) -> np.ndarray:
        """The ids of the batch, where somebody has it who may still step it."""
        ids = None if self.is_stepped else self._ids()
        return NOBODY if ids is None else ids

    def is_of(self, plan: Plan) -> bool:
        """Return whether a plan is of that batch."""
        return self._ids() is plan.ids


class JointPreparedSteps:
    """The batch that tables of a group read together last, as long as somebody has it who may still step it."""

    def __init__(self) -> None:
        self._parts: list[tuple[weakref.ref[np.ndarray], Sequence[object], np.ndarray]] = []

    def begin(self, parts: Iterable[tuple[np.ndarray, Sequence[object], np.ndarray]]) -> None:
        """Note a batch: the ids of a plan, whose they are, and where those of each begin, and the last ones end."""
        self._parts = [(weakref.ref(ids), owners, bounds) for ids, owners, bounds in parts]

    def end(self) -> None:
        """Note that it is stepped."""
        self._parts = []

    def unfinished(self, owner: object) -> np.ndarray:
        """Return the ids that one of its tables has in it."""
        there = ((ref(), owners, bounds) for ref, owners, bounds in self._parts)
        found = [
            ids[bounds[k] : bounds[k + 1]]
            for ids, owners, bounds in there
            for k, each in enumerate(owners)
            if ids is not None and each is owner
        ]
        return np.concatenate(found) if found else NOBODY


class CaughtUpReads:
    """What reads leave to the step of the same batches, by batch: rows that they brought up to date.

    There may be several: those of replicas, of layers on one table, of micro-batches.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[np.ndarray], CaughtUpRows]] = {}  # in the order of the reads

    def keep(self, plan: Plan, refreshed: CaughtUpRows) -> None:
        """Keep rows of a batch as long as somebody has its plan."""
        kept, key = self._kept, id(plan.ids)
        kept.pop(key, None)
        kept[key] = weakref.ref(plan.ids, lambda _: kept.pop(key, None)), refreshed
        while len(kept) > MAX_PARTS or (len(kept) > 1 and self._bytes() > KEPT_BYTES):
            kept.pop(next(iter(kept)), None)

    def of(self, plan: Plan, version: int) -> CaughtUpRows | None:
        """Return the rows of a batch that were kept, where nothing has changed the table since."""
        ids, refreshed = self._kept.get(id(plan.ids), (lambda: None, None))
        return refreshed if ids() is plan.ids and refreshed is not None and refreshed.version == version else None

    def take(self, plan: Plan, slots: np.ndarray, version: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return slots, weights and state of rows that were kept of a batch, or of its parts; forget all others."""
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
        """Forget them."""
        self._kept.clear()

    def _bytes(self) -> int:
        return sum(refreshed.nbytes for _, refreshed in list(self._kept.values()))
