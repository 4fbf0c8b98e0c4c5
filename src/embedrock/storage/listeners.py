"""`StaleExecutor`: rows of a table in another memory, such as a GPU's, as the table sees it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np


class PlacementWarning(UserWarning):
    """A warning that the CPU uses rows of a model on a GPU, or rows where that was not requested."""


@runtime_checkable
class StaleExecutor(Protocol):
    """Rows in another memory, which may be newer than those of the table's backend.

    After each change of them, the executor is in the table's `TableLock.running`. So readers of records wait for
    `finish`, which writes them back to the backend.
    """

    def finish(self) -> None:
        """Write changed records back to the backend.

        Raises:
            EmbedrockError: it is not possible now. No row is lost, and a later call may succeed.
        """

    def check(self) -> None:
        """Raise the error of an earlier call, if any."""

    def may_forget(self) -> bool:
        """Return whether the table may delete rows now: it knows the rows of a batch that is not stepped.

        Before their records are deleted, the backend calls its listeners.
        """
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None:
        """Release its memory. The backend's records are up to date."""


class EvictionListener(Protocol):
    """A user of a backend's records in place, without the table lock. It may have newer ones of its own."""

    def leave(self, slots: np.ndarray) -> None:
        """Write the records in `slots` back, and stop using them: the slots get other rows.

        Raises:
            EmbedrockError: it is not possible now. The rows have not left.
        """

    def move_out(self) -> None:
        """Write all records back, and release their memory: the backend's `arena` will change.

        Raises:
            EmbedrockError: it is not possible now. Nothing has moved.
        """

    def give_room_back(self) -> None:
        """Release the promised room that has no rows: see `RamBackend.promised`."""
