"""Messages between ranks: arrays, packed into one message for each receiver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from embedrock.system.buffers import buffers

WORD = np.int32
Room = Callable[[int], np.ndarray]  # returns memory for n words, int32 (words,)


class MessageRows:
    """Rows that are written straight into a message, once it is packed.

    Args:
        shape: shape of the rows.
        dtype: their dtype in the message.
        outs: receives their memory at index `number`: float32, or uint16 for 16-bit dtypes.
        write: writes all rows that belong together, to `outs`.

    Attributes:
        nbytes: their size.
    """

    def __init__(
        self, shape: tuple[int, int], dtype: str, outs: list[np.ndarray], number: int, write: Callable[[], None]
    ) -> None:
        self._shape, self._outs, self._number, self.write = shape, outs, number, write
        self._words = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        self.nbytes = shape[0] * shape[1] * self._words.itemsize

    def lie_in(self, memory: np.ndarray) -> None:
        """Take memory in a message, uint8 (nbytes,)."""
        self._outs[self._number] = memory.view(self._words).reshape(self._shape)


Part = np.ndarray | MessageRows
Letter = list[Part]  # an item of a message


class Mail(NamedTuple):
    """Messages to all ranks, one after the other. A rank's message to itself is empty.

    Attributes:
        flat: all messages, int32 (words,).
        bounds: where the message to each rank begins in it, and where the last one ends.
    """

    flat: np.ndarray
    bounds: list[int]

    @property
    def sizes(self) -> list[int]:
        """Sizes of the messages in words, by rank."""
        return [end - start for start, end in itertools.pairwise(self.bounds)]


def length(letter: Sequence[Part]) -> int:
    """Return the length of the packed message, in words."""
    return sum([-(-part.nbytes // 4) for part in letter])


def _room(words: int) -> np.ndarray:
    return buffers.empty((words,), WORD)


def pack_all(letters: Sequence[Sequence[Part]], room: Room = _room) -> Mail:
    """Pack messages into one block of memory, which `room` returns. Arrays of 2-byte elements are padded to words.

    Example:
        >>> pack_all([[np.zeros(3, np.float16)], [], [np.ones(1, np.int64)]]).bounds
        [0, 2, 2, 4]
    """
    bounds, places, end = [0], list[tuple[Part, int]](), 0
    for letter in letters:
        for part in letter:
            places.append((part, end))
            end += -part.nbytes // 4 * -4
        bounds.append(end // 4)
    flat, writes = room(end // 4), dict[Callable[[], None], None]()
    memory = flat.view(np.uint8)
    for part, start in places:
        stop = start + part.nbytes
        if type(part) is MessageRows:
            part.lie_in(memory[start:stop])
            writes[part.write] = None
        else:
            memory[start:stop] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if stop % 4:
            memory[stop : stop + -stop % 4] = 0
    for write in writes:
        write()
    return Mail(flat, bounds)


class MessageReader:
    """A reader of a message's arrays in the order of packing. Callers know the sizes."""

    def __init__(self, words: np.ndarray) -> None:
        self._words, self._at = words, 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._words)

    def ints(self, count: int) -> np.ndarray:
        """Return the next `count` int64, aligned at any offset."""
        start, self._at = self._at, self._at + 2 * count
        return self._words[start : self._at].copy().view(np.int64)

    def sent(self, count: int, dim: int, dtype: str) -> np.ndarray:
        """Return the next rows that `as_sent` encoded, float32 (count, dim)."""
        if dtype == "float32":
            return self.words(count * dim).view(np.float32).reshape(count, dim)  # words are aligned for floats
        halves = self.words(words_of(count * dim, dtype)).view(np.uint16)[: count * dim].reshape(count, dim)
        return decoded(halves, dtype)

    def words(self, count: int) -> np.ndarray:
        """Return the next `count` words, int32."""
        start, self._at = self._at, self._at + count
        return self._words[start : self._at]


def words_of(weights: int, dtype: str) -> int:
    """Return how many words of a message `weights` numbers of `dtype` take."""
    return weights if dtype == "float32" else (weights + 1) // 2


def decoded(halves: np.ndarray, dtype: str) -> np.ndarray:
    """Decode 16-bit numbers of `as_sent` to float32."""
    if dtype == "float16":
        return halves.view(np.float16).astype(np.float32)
    return (halves.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_sent(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 numbers in the bytes of `dtype`, rounded to the nearest one, ties to even."""
    if dtype == "float32":
        return rows
    if dtype == "float16":
        return rows.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    kept = bits >> np.uint32(16)
    kept &= np.uint32(1)
    kept += np.uint32(0x7FFF)
    kept += bits
    kept >>= np.uint32(16)
    kept[np.isnan(rows)] = 0x7FC0  # rounding might turn NaN into a number
    return kept.astype(np.uint16)


def as_received(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 numbers as the receiver of a message gets them, which has them in `dtype`."""
    return values if dtype == "float32" else decoded(as_sent(values, dtype), dtype)
