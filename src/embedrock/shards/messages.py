"""Messages between ranks: arrays, packed into one for each receiver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embedrock.machine.buffers import buffers

WORD = np.int32
Letter = list[np.ndarray]  # what becomes a message


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays as one message, int32 (words,). Those of 2-byte elements are filled up to whole words."""
    return np.concatenate([np.empty(0, WORD), *map(_words, arrays)])


def length(letter: Letter) -> int:
    """Return how long a letter is as a message, in words."""
    return sum(-(-array.nbytes // 4) for array in letter)


def pack_all(letters: Sequence[Letter]) -> list[np.ndarray]:
    """Return messages, that lie in memory one after the other: see `joined`."""
    sizes = [length(letter) for letter in letters]
    flat = buffers.empty((sum(sizes),), WORD)
    np.concatenate([_words(array) for letter in letters for array in letter] or [flat[:0]], out=flat)
    return np.split(flat, np.cumsum(sizes)[:-1])


def joined(messages: Sequence[np.ndarray]) -> np.ndarray:
    """Return messages as one array, without a copy if `pack_all` made them."""
    memory, begin = messages[0].base, messages[0].ctypes.data
    ends = np.cumsum([0, *(one.nbytes for one in messages)])
    if isinstance(memory, np.ndarray) and [one.ctypes.data - begin for one in messages] == ends[:-1].tolist():
        start = begin - memory.ctypes.data
        return memory.view(np.uint8)[start : start + ends[-1]].view(WORD)
    return np.concatenate(messages)


def _words(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.nbytes % 4:
        flat = np.append(flat, flat.dtype.type(0))
    return flat.view(WORD)


class MessageReader:
    """Reads arrays of messages, in the order in which they were packed; who reads knows how long they are."""

    def __init__(self, words: np.ndarray) -> None:
        self._words, self._at = words, 0

    @property
    def is_at_end(self) -> bool:
        """Whether everything was read."""
        return self._at == len(self._words)

    def ints(self, count: int) -> np.ndarray:
        """Return the next `count` int64."""
        return self.words(2 * count).view(np.int64)

    def rows(self, count: int, dim: int) -> np.ndarray:
        """Return the next float32 (count, dim)."""
        return self._next(count * dim).view(np.float32).reshape(count, dim)  # of words, which are aligned for floats

    def part(self, count: int) -> MessageReader:
        """Return a reader of the next `count` words."""
        return MessageReader(self._next(count))

    def sent(self, count: int, dim: int, dtype: str) -> np.ndarray:
        """Return the next rows that `as_sent` made smaller, float32 (count, dim)."""
        if dtype == "float32":
            return self.rows(count, dim)
        halves = self.words(words_of(count * dim, dtype)).view(np.uint16)[: count * dim].reshape(count, dim)
        if dtype == "float16":
            return halves.view(np.float16).astype(np.float32)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

    def words(self, count: int) -> np.ndarray:
        """Return the next `count` words, int32."""
        return self._next(count).copy()  # aligned, whatever came before

    def _next(self, count: int) -> np.ndarray:
        start, self._at = self._at, self._at + count
        return self._words[start : self._at]


def words_of(weights: int, dtype: str) -> int:
    """Return how many words so many numbers take in a message that are sent as `dtype`."""
    return weights if dtype == "float32" else (weights + 1) // 2


def as_sent(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 numbers in the bytes of `dtype`, rounded to the nearest one, ties to even."""
    if dtype == "float32":
        return rows
    if dtype == "float16":
        return rows.astype(np.float16)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    kept = bits >> np.uint32(16)
    kept &= np.uint32(1)
    kept += np.uint32(0x7FFF)
    kept += bits
    kept >>= np.uint32(16)
    kept[np.isnan(rows)] = 0x7FC0  # of which rounding might make a number
    return kept.astype(np.uint16)
