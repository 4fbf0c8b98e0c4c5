"""Messages that all ranks receive, and announcements of operations to ranks that have left."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from embedrock.distributed.messages import Letter, MessageReader, length, pack_all
from embedrock.errors import (
    MemoryBudgetError,
    NonFiniteGradientError,
    OtherRankError,
    UnsupportedError,
    WorkerLostError,
)


def addressed(letters: Sequence[Letter]) -> np.ndarray:
    """Pack the messages to all ranks into one message that all receive. `taken` extracts a rank's own."""
    sizes = np.array([*map(length, letters)], np.int64)
    return pack_all([[sizes], *letters]).flat


def taken(messages: np.ndarray, rank: int, ranks: int) -> list[np.ndarray]:
    """Extract, from all messages that `addressed` made, each rank's message to one rank."""
    reader, found = MessageReader(messages), []
    for _ in range(ranks):
        sizes = reader.ints(ranks).tolist()
        found.append([reader.words(size) for size in sizes][rank])
    return found


Op = Mapping[str, Any]  # an operation: "do", "said" in words, "mark" the same on all ranks, and its arguments

SERVE, FAILED = "serve", "failed"
# Errors that all ranks raise together, without any change.
_RAISED_BY_ALL = (OtherRankError, NonFiniteGradientError, MemoryBudgetError, UnsupportedError)


class UnevenRanks:
    """An announcer of operations between ranks before they run, while some ranks may have left.

    Args:
        say: sends all ranks a text; returns the text of each.

    Attributes:
        is_on: whether operations are announced.
    """

    def __init__(self, say: Callable[[str], Sequence[str]]) -> None:
        self._say, self.is_on = say, False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def enter(self) -> None:
        """Announce all operations from now on. All ranks call it."""
        self.settle()
        self.is_on = True

    def announce(self, make: Callable[[], Op]) -> None:
        """Announce the next operation of this rank, which `make` returns, if operations are announced.

        If this rank has left, wait first until all have left.

        Raises:
            OtherRankError: other ranks are at another operation, or one has failed.
        """
        if self._thread is not None:
            if threading.current_thread() is self._thread:  # runs what was announced
                return
            self.settle()
        if self.is_on:
            self._announced(make())

    def leave(self, take_part: Callable[[Sequence[Op]], None], end: Callable[[], None]) -> None:
        """Take part in the operations that the others announce, in a thread, until all ranks have left.

        Args:
            take_part: does the announced operations of the remaining ranks. They are the same in all but their
                arguments.
            end: called when all have left.
        """
        if self.is_on:
            self._thread = threading.Thread(
                target=self._serve, args=(take_part, end), name="embedrock-uneven", daemon=True
            )
            self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Report to the others that this rank has failed and stops."""
        if self.is_on:
            self.is_on = False
            said = f"has failed: {type(error).__name__}: {error}"
            self._say(json.dumps({"do": FAILED, "said": said, "mark": FAILED}))

    def settle(self) -> None:
        """If this rank has left, wait until the others have left too."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _serve(self, take_part: Callable[[Sequence[Op]], None], end: Callable[[], None]) -> None:
        try:
            while busy := self._announced({"do": SERVE, "said": "has left", "mark": SERVE}):
                with suppress(*_RAISED_BY_ALL):
                    take_part(busy)
            end()
        except Exception as error:
            self._error = error
            if not isinstance(error, WorkerLostError):
                self.fail(error)
        self.is_on = False

    def _announced(self, op: Op) -> list[Op]:
        """Announce this rank's operation; return the operations of the ranks that have not left."""
        said: list[Op] = [json.loads(text) for text in self._say(json.dumps(op))]
        busy = [one for one in said if one["do"] != SERVE]
        states = "; ".join(f"rank {rank} {one['said']}" for rank, one in enumerate(said))
        if any(one["do"] == FAILED for one in busy):
            self.is_on = False
            raise OtherRankError(f"a rank has failed inside of ert.uneven: {states}. Start all again.")
        if len({one["mark"] for one in busy}) <= 1:
            return busy
        if op["do"] == SERVE:
            return self._announced(op)  # the others raise it
        raise OtherRankError(
            f"ranks that have not left ert.uneven must do the same: got {states}. Nothing has changed. Tables that a "
            "batch does not use are looked up by empty ids."
        )
