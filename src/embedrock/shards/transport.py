"""`Transport`: what carries messages between ranks. All ranks must ask it for the same, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from embedrock.shards.messages import Letter, MessageReader, pack


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
