"""Messages between ranks: arrays, packed into one message for each receiver."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from embedrock.system.buffers import buffers

WORD = np.int32
Room = Callable[[int], np.ndarray]  # returns memory for n words, int32 (words,)


class MessageRows(NamedTuple):
    """Rows that are written straight into a message.

    Attributes:
        shape: shape of the rows, which are float32.
        write: writes the rows to an array.
    """

    shape: tuple[int, int]
    write: Callable[[np.ndarray], object]

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0] * self.shape[1]


Part = np.ndarray | MessageRows
Letter = list[Part]  # an item of a message


def pack(letter: Sequence[Part]) -> np.ndarray:
    """Pack items into one message, int32 (words,). Arrays of 2-byte elements are padded to whole words."""
    return pack_all([letter])[0]


def length(letter: Sequence[Part]) -> int:
    """Return the length of the packed message, in words."""
    return sum(-(-part.nbytes // 4) for part in letter)


def _room(words: int) -> np.ndarray:
    return buffers.empty((words,), WORD)


def pack_all(letters: Sequence[Sequence[Part]], room: Room = _room, last: int = -1) -> list[np.ndarray]:
    """Pack messages into one block of memory, one after the other: see `joined`.

    Args:
        letters: items of each message.
        room: returns the memory.
        last: index of the message to place last.
    """
    sizes = [length(letter) for letter in letters]
    flat, at, messages = room(sum(sizes)), 0, [np.empty(0, WORD)] * len(letters)
    for place in sorted(range(len(letters)), key=lambda place: place == last % len(letters)):
        messages[place] = flat[at : at + sizes[place]]
        at += sizes[place]
        ends = list(itertools.accumulate((-(-part.nbytes // 4) for part in letters[place]), initial=0))
        for part, start, end in zip(letters[place], ends[:-1], ends[1:], strict=True):
            _write(part, messages[place][start:end])
    return messages


def joined(messages: Sequence[np.ndarray]) -> np.ndarray:
    """Return messages as one array, without a copy if `pack_all` made them."""
    memory, begin = messages[0].base, messages[0].ctypes.data
    ends = np.cumsum([0, *(one.nbytes for one in messages)])
    if isinstance(memory, np.ndarray) and [one.ctypes.data - begin for one in messages] == ends[:-1].tolist():
        start = begin - memory.ctypes.data
        return memory.view(np.uint8)[start : start + ends[-1]].view(WORD)
    return np.concatenate(messages)


def _write(part: Part, words: np.ndarray) -> None:
    if isinstance(part, MessageRows):
        part.write(words.view(np.float32).reshape(part.shape))
        return
    flat = np.ascontiguousarray(part).reshape(-1)
    if flat.nbytes % 4:
        flat = np.append(flat, flat.dtype.type(0))
    words[:] = flat.view(WORD)


class MessageReader:
    """A reader of a message's arrays in the order of packing. Callers know the sizes."""

    def __init__(self, words: np.ndarray) -> None:
        self._words, self._at = words, 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._words)

    def ints(self, count: int) -> np.ndarray:
        """Return the next `count` int64."""
        return self.words(2 * count).view(np.int64)

    def rows(self, count: int, dim: int) -> np.ndarray:
        """Return the next float32 (count, dim)."""
        return self._next(count * dim).view(np.float32).reshape(count, dim)  # in words, which are aligned for floats

    def part(self, count: int) -> MessageReader:
        """Return a reader of the next `count` words."""
        return MessageReader(self._next(count))

    def sent(self, count: int, dim: int, dtype: str) -> np.ndarray:
        """Return the next rows that `as_sent` encoded, float32 (count, dim)."""
        if dtype == "float32":
            return self.rows(count, dim)
        halves = self.words(words_of(count * dim, dtype)).view(np.uint16)[: count * dim].reshape(count, dim)
        return decoded(halves, dtype)

    def words(self, count: int) -> np.ndarray:
        """Return the next `count` words, int32."""
        return self._next(count).copy()  # aligned at any offset

    def _next(self, count: int) -> np.ndarray:
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
        return rows.astype(np.float16)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    kept = bits >> np.uint32(16)
    kept &= np.uint32(1)
    kept += np.uint32(0x7FFF)
    kept += bits
    kept >>= np.uint32(16)
    kept[np.isnan(rows)] = 0x7FC0  # rounding might turn NaN into a number
    return kept.astype(np.uint16)
