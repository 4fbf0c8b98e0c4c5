"""`Packed`: the strings of a file in as few bits of RAM as their bytes need, found without a read."""

from __future__ import annotations

import numpy as np

from embedrock import kernels
from embedrock.vocabulary.fresh import Wanted
from embedrock.vocabulary.shape import Shape


class Packed:
    """Strings, each with its number in a file.

    Args:
        shape: of the strings that will be added.
    """

    def __init__(self, shape: Shape) -> None:
        self._codes, self._widths = shape.codes, np.array(shape.widths, np.int64)
        self._firsts, self._words = shape.empty()
        self._limit, self._state = shape.strings, np.zeros(3, np.int64)

    @property
    def nbytes(self) -> int:
        """RAM that it takes."""
        return self._firsts.nbytes + self._words.nbytes

    def add(self, columns: np.ndarray, starts: np.ndarray, data: np.ndarray) -> bool:
        """Add entries, uint32 (n, 3): tags, numbers and sizes of strings that begin so in `data`.

        They come in order of their tags, also from call to call. Returns whether they did, and had that shape.
        """
        args = columns, starts, data, self._codes, self._widths, self._limit, self._state, self._firsts, self._words
        fits = kernels.cpu.launch(kernels.cpu.vocabulary.pack_entries, *args)
        self._firsts[self._state[1] :] = self._state[0]
        return bool(fits)

    def find(self, wanted: Wanted) -> np.ndarray:
        """Return the numbers of strings, int64; -1 for those that are not there."""
        out = np.empty(len(wanted.hashes), np.int64)
        args = self._firsts, self._words, self._codes, self._widths
        kernels.cpu.launch(kernels.cpu.vocabulary.find_packed, *args, *wanted, out)
        return out
