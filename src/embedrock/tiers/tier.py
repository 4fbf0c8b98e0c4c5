"""`Tier`: a place where records live, as a table sees it."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from embedrock.spec import Spec
from embedrock.tiers.records import Records

# Never twice the same, so that slots of one tier are not taken for those of another, or of the same one later.
_epochs = itertools.count(1)


class Tier(ABC):
    """Where a table's records live. Ids are int64 arrays that the table has checked.

    A slot is where a record lies in `records`. While `epoch` stays the same, a slot that was found is still that of
    its row.

    Args:
        spec: of the table.
        memory: uint8, for the records.

    Attributes:
        records: what can be read and stepped in place.
        epoch: changes when slots do.
        reaches_below: whether rows that have no slot may have a record all the same.
        batch_rows: how many rows it is good for at once.
    """

    reaches_below = False
    batch_rows = sys.maxsize

    def __init__(self, spec: Spec, memory: np.ndarray) -> None:
        self.spec = spec
        self.records = Records(spec, memory)
        self.new_epoch()

    def new_epoch(self) -> None:
        """Make all slots that were found before invalid."""
        self.epoch = next(_epochs)

    @property
    @abstractmethod
    def count(self) -> int:
        """Rows that have records."""

    @abstractmethod
    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slot of each id, int64; -1 where there is none. Ids may repeat."""

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return slots for those of `ids` (without repeats) that have records; `slots` are as found, and stay."""
        return slots

    @abstractmethod
    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the weights of `ids`, which may repeat, to `out`, and return their slots; -1 where `out` has zeros."""

    @abstractmethod
    def make_room(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """See to it that a step of `ids` cannot fail for lack of room, and return their slots.

        Raises:
            MemoryBudgetError: the new records do not fit.
        """

    @abstractmethod
    def admit(self, ids: np.ndarray, slots: np.ndarray, fresh: np.ndarray, first_state: np.ndarray) -> np.ndarray:
        """Make records for the ids (without repeats) whose slot is negative, and return all slots.

        Args:
            ids: (n,).
            slots: (n,), as `make_room` returned them; it stays as it is.
            fresh: (missing, dim) float32, first weights of the missing ids, in order.
            first_state: (state_width,) float32.
        """

    def preserve(self, slots: np.ndarray) -> None:  # noqa: B027  # most tiers need not, nor do the next
        """Do all that can fail of `changing`, which may be called afterwards."""

    def changing(self, slots: np.ndarray) -> None:  # noqa: B027
        """Note that the records in `slots` are about to change."""

    @abstractmethod
    def id_batches(self, size: int) -> Iterator[np.ndarray]:
        """Go through the ids of all rows that have records, at most `size` at a time."""

    @property
    @abstractmethod
    def is_direct(self) -> bool:
        """Whether slots are ids."""

    @property
    @abstractmethod
    def budget_bytes(self) -> int:
        """The most RAM that records and directory may take."""

    @property
    @abstractmethod
    def bytes_used(self) -> int:
        """RAM that records and directory take."""

    def stats(self) -> dict[str, float]:
        """Return further numbers about the tier."""
        return {}
