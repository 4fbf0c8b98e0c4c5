"""`StaleExecutor`: rows of a table that are in another memory, such as a GPU's, as the table sees it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


class PlacementWarning(UserWarning):
    """Rows of a model on a GPU are used by the CPU, or where it was not asked for."""


@runtime_checkable
class StaleExecutor(Protocol):
    """Rows in another memory, which may be newer than those of the table's tier.

    After each change that it makes to them it is the table's `TableLock.running`: so whatever reads records waits for
    `finish`, which brings those of the tier up to date.
    """

    def finish(self) -> None:
        """Bring the tier's records up to date.

        Raises:
            EmbedrockError: it cannot be done now. No row is lost; it may be asked for again.
        """
        ...

    def check(self) -> None:
        """Raise what went wrong since the last check."""
        ...

    def may_forget(self) -> bool:
        """Return whether the table may forget rows meanwhile: it knows which of them a batch has that is not stepped.

        Where the tier is asked to discard their records, it asks its guests.
        """
        ...

    def stats(self) -> dict[str, float]:
        """Return numbers about it."""
        ...

    def close(self) -> None:
        """Give its memory back. The tier's records are up to date."""
        ...


class EvictionListener(Protocol):
    """Who uses the records of a tier where they are, without its turn, and may have newer ones of its own."""

    def leave(self, slots: np.ndarray) -> None:
        """Bring the records in `slots` up to date, and use them no more: other rows will be there.

        Raises:
            EmbedrockError: it cannot be done now. The rows have not left.
        """
        ...

    def move_out(self) -> None:
        """Bring all records up to date, and let go of their memory: the tier's `arena` will be another one.

        Raises:
            EmbedrockError: it cannot be done now. Nothing has moved.
        """
        ...

    def give_room_back(self) -> None:
        """Let others have the room that it was promised, and has no rows for: see `RamBackend.promised`."""
        ...
