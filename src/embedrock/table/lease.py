"""`Lease`: what the last read, or check, of a batch leaves to the step of the same batch."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from embedrock.batch.plan import Plan


class Refreshed(NamedTuple):
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


class Prepared(NamedTuple):
    """What makes a step of a batch possible, as of a version of the table.

    Attributes:
        version: of the table.
        plan: with the slots of then.
        fresh: float32 (missing, dim), first weights of its rows without records.
    """

    version: int
    plan: Plan
    fresh: np.ndarray


class Lease:
    """What the last read, or check, of a batch leaves to the step of the same batch.

    A batch is known by its ids: all plans of it, and its gradients, share that array.

    Attributes:
        refreshed: rows that were brought up to date.
        prepared: the rows' slots, and room and first weights for new ones.
    """

    def __init__(self, plan: Plan | None = None) -> None:
        self._ids = (lambda: None) if plan is None else weakref.ref(plan.ids)
        self.refreshed: Refreshed | None = None
        self.prepared: Prepared | None = None

    def is_of(self, plan: Plan) -> bool:
        """Return whether a plan is of that batch."""
        return self._ids() is plan.ids
