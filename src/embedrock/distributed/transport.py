"""`Transport`: what carries messages between ranks. All ranks must ask it for the same, in the same order."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from embedrock.distributed.messages import Letter, MessageReader, pack
from embedrock.errors import (
    MemoryBudgetError,
    NonFiniteGradientError,
    OtherRankError,
    UnsupportedError,
    WorkerLostError,
)


class Transport(Protocol):
    """Carries messages between ranks: torch.distributed, or TensorFlow's collective operations.

    Attributes:
        rank: of this process, from 0.
        ranks: how many there are.
        at: what this rank is at, in words, for errors.
    """

    at: str

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def room(self, words: int) -> np.ndarray:
        """Return memory for the messages of the next `swap`, int32 (words,), which then carries them as they lie."""
        ...

    def swap(self, parts: Sequence[np.ndarray], sizes: Sequence[int] | None = None) -> list[np.ndarray]:
        """Give each rank its message, int32 (words,); return what each has for this one, to read before the next swap.

        Args:
            parts: the messages.
            sizes: how long those of the others are, in words, where that is known.

        Raises:
            WorkerLostError: a rank is gone, or did not answer in time.
        """
        ...

    def begin(self, parts: Sequence[np.ndarray], sizes: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Begin to do what `swap` does; return what waits until it is done, and returns what it returns."""
        ...

    def gather(self, facts: np.ndarray) -> list[np.ndarray]:
        """Give all ranks an array of one dimension, as long on each, of numbers of 8 bytes; return that of each."""
        ...

    def leave(self) -> None:
        """Carry no more: this rank cannot go on, and what the others do with it raises `WorkerLostError` at once."""
        ...


def addressed(letters: Sequence[Letter]) -> np.ndarray:
    """Return letters to each rank as one message that all get, from which each takes its own by `taken`."""
    parts = [pack(letter) for letter in letters]
    return pack([np.array([len(part) for part in parts], np.int64), *parts])


def taken(messages: np.ndarray, rank: int, ranks: int) -> list[np.ndarray]:
    """Return what each rank has for one of them, of all that `addressed` returned, one after the other."""
    reader, found = MessageReader(messages), []
    for _ in range(ranks):
        sizes = reader.ints(ranks).tolist()
        found.append([reader.words(size) for size in sizes][rank])
    return found


Op = Mapping[str, Any]  # what is done: "do", "said" in words, "mark" the same on all ranks, and what goes with it

SERVE, FAILED = "serve", "failed"
# What is refused on one rank is refused on all, and nothing has changed.
_RAISED_BY_ALL = (OtherRankError, WorkerLostError, NonFiniteGradientError, MemoryBudgetError, UnsupportedError)


class UnevenRanks:
    """What ranks announce to each other before they do it, while some of them may have left.

    Args:
        say: tells all ranks something; returns what each has said.

    Attributes:
        is_on: everything is announced.
    """

    def __init__(self, say: Callable[[str], Sequence[str]]) -> None:
        self._say, self.is_on = say, False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def enter(self) -> None:
        """Announce everything from now on. All ranks do so."""
        self.settle()
        self.is_on = True

    def announce(self, op: Op) -> None:
        """Announce what this rank is about to do, once those that it has left to are done.

        Raises:
            OtherRankError: others are at something else, or one has failed.
        """
        if threading.current_thread() is self._thread:  # which does what was announced
            return
        self.settle()
        if self.is_on:
            self._announced(op)

    def leave(self, take_part: Callable[[Sequence[Op]], None], end: Callable[[], None]) -> None:
        """Take part in all that others announce, in a thread, until all have left.

        Args:
            take_part: does what the ranks that have not left say, the same in all but what goes with it.
            end: is called when all have left.
        """
        if self.is_on:
            self._thread = threading.Thread(
                target=self._serve, args=(take_part, end), name="embedrock-uneven", daemon=True
            )
            self._thread.start()

    def fail(self, error: BaseException) -> None:
        """Let the others know that this rank has failed, and goes on no more."""
        if self.is_on:
            self.is_on = False
            said = f"has failed: {type(error).__name__}: {error}"
            self._say(json.dumps({"do": FAILED, "said": said, "mark": FAILED}))

    def settle(self) -> None:
        """Wait until the others have left, too, if this rank has."""
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
                try:
                    take_part(busy)
                except _RAISED_BY_ALL as error:
                    if isinstance(error, WorkerLostError):
                        raise
            end()
        except Exception as error:
            self._error = error
            if not isinstance(error, WorkerLostError):
                self.fail(error)
        self.is_on = False

    def _announced(self, op: Op) -> list[Op]:
        """Say what this rank does; return what those do that have not left."""
        said: list[Op] = [json.loads(text) for text in self._say(json.dumps(op))]
        busy = [one for one in said if one["do"] != SERVE]
        told = "; ".join(f"rank {rank} {one['said']}" for rank, one in enumerate(said))
        if any(one["do"] == FAILED for one in busy):
            self.is_on = False
            raise OtherRankError(f"a rank has failed inside of ert.uneven: {told}. Start all again.")
        if len({one["mark"] for one in busy}) <= 1:
            return busy
        if op["do"] == SERVE:
            return self._announced(op)  # the others raise it
        raise OtherRankError(
            f"ranks that have not left ert.uneven must do the same: got {told}. Nothing has changed. Tables that a "
            "batch does not use are looked up by empty ids."
        )
