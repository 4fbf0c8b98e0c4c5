"""`Shape`: bounds of some strings, from which their packed size follows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

BUCKET = 16  # strings per bucket, about
CHUNK = 1 << 20  # bytes scanned at once
ALL_BYTES = "ff" * 32  # `symbols` of unknown strings


class Shape(NamedTuple):
    """Bounds of some strings, which determine the bits of their packed form.

    Attributes:
        strings: number of strings.
        text_bytes: bytes of all strings, at most.
        longest: bytes of a string, at most.
        symbols: the bytes that may occur: 64 hexadecimal digits, a bit for each of 0 to 255, the lowest first.
    """

    strings: int
    text_bytes: int
    longest: int
    symbols: str

    @classmethod
    def of(cls, texts: np.ndarray, sizes: np.ndarray) -> Shape:
        seen = np.zeros(256, bool)
        for first in range(0, len(texts), CHUNK):
            seen[texts[first : first + CHUNK]] = True
        longest = int(sizes.max()) if len(sizes) else 0
        return cls(len(sizes), len(texts), longest, np.packbits(seen, bitorder="little").tobytes().hex())

    def with_more(self, more: Shape) -> Shape:
        symbols = int(self.symbols, 16) | int(more.symbols, 16)
        longest = max(self.longest, more.longest)
        return Shape(self.strings + more.strings, self.text_bytes + more.text_bytes, longest, f"{symbols:064x}")

    def allows(self, other: Shape) -> bool:
        """Return whether this shape's bounds contain another shape."""
        symbols = int(self.symbols, 16) & int(other.symbols, 16) == int(other.symbols, 16)
        return symbols and other.text_bytes <= self.text_bytes and other.longest <= self.longest

    @property
    def codes(self) -> np.ndarray:
        """Return the code of each byte, int16 (256,). -1: the byte occurs in no string."""
        seen = np.unpackbits(np.frombuffer(bytes.fromhex(self.symbols), np.uint8), bitorder="little").astype(bool)
        return np.where(seen, np.cumsum(seen) - 1, -1).astype(np.int16)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the bits of a size, of an id, and of a code."""
        most = self.longest, self.strings - 1, int(self.codes.max())
        sizes, ids, codes = (max(1, number.bit_length()) for number in most)
        return sizes, ids, codes

    @property
    def buckets(self) -> int:
        """Return the number of buckets. A bucket has strings of similar hashes."""
        return self.strings // BUCKET + 1

    @property
    def nbytes(self) -> int:
        """Return the RAM of the packed strings in bytes, at most."""
        return 8 * (self._words + self.buckets + 1)

    def first_in(self, nbytes: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Return how many of the first strings fit `nbytes` bytes. `bounds`, int64 (strings + 1,), has their ends."""
        sizes, ids, codes = self.widths
        entry = sizes + ids + 64 // BUCKET
        used = np.arange(self.strings + 1) * entry + bounds * codes
        return np.searchsorted(used, 8 * nbytes, "right") - 1

    @property
    def _words(self) -> int:
        sizes, ids, codes = self.widths
        return (self.strings * (sizes + ids) + self.text_bytes * codes) // 64 + 2

    def empty(self) -> tuple[np.ndarray, np.ndarray]:
        """Return empty arrays for the starts of buckets and for the packed bits."""
        return np.zeros(self.buckets + 1, np.int64), np.zeros(self._words, np.uint64)


NO_STRINGS = Shape(0, 0, 0, "00" * 32)
