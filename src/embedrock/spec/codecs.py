"""`Codec`: the form of rows that are only read, with weights in 8 or 4 bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from embedrock.kernels.packed import PackedRows


class Codec(NamedTuple):
    """The form of weights in a record: ``[codes | scale of each group | offset of each group]``.

    Attributes:
        bits: of a code, 8 or 4. See `PackedRows`.
        group: columns that share a scale. None: all of a row.
        words: dtype of scales and offsets in a record. Scales begin at a multiple of its size.
        has_offsets: groups have an offset.
    """

    bits: int
    group: int | None
    words: np.dtype
    has_offsets: bool

    def _starts(self, dim: int) -> tuple[int, int, int]:
        """Return where scales and offsets begin and where they end, in words."""
        groups = 1 if self.group is None else -(-dim // self.group)
        scales = -(-dim * self.bits // (8 * self.words.itemsize))
        return scales, scales + groups, scales + groups * (1 + self.has_offsets)

    def nbytes(self, dim: int) -> int:
        """Return the bytes of a row's weights."""
        return self._starts(dim)[-1] * self.words.itemsize

    def rows_of(self, records: np.ndarray, dim: int) -> PackedRows:
        """Return the rows in records, uint8 (slots, record_bytes)."""
        scale_start, offset_start, _ = self._starts(dim)
        codes, words = records.view(np.int8 if self.bits == 8 else np.uint8), records.view(self.words)
        # The views are whole records, not parts of them: then kernels are compiled for one layout of memory.
        return PackedRows(codes, words, words, scale_start, offset_start if self.has_offsets else -1, self.group or dim)


# A bfloat16 has the range of float32, and float16 has not: a scale of float16 would underflow below 6e-8.
CODECS = {
    "int8": Codec(8, None, np.dtype(np.float32), False),
    "int4": Codec(4, 32, np.dtype(np.uint16), True),
}
