"""Blocks of CSV and TSV read by pyarrow: many times as fast as Python, and to the same bits."""

from __future__ import annotations

import codecs
from typing import Any

import numpy as np

from embedrock.cli.formats._layout import Layout, split
from embedrock.cli.formats._lines import Block

CHUNK_BYTES = 1 << 20  # that one thread of pyarrow parses at a time

Rows = tuple[np.ndarray | None, np.ndarray]  # ids int64 (n,), if there are; vectors float32 (n, dim)


class FastReader:
    """Reads blocks by pyarrow.

    Args:
        arrow: pyarrow, with its part for CSV.
        layout: of the lines.
    """

    def __init__(self, arrow: Any, layout: Layout) -> None:
        self._arrow, self._layout = arrow, layout
        self._names = [str(number) for number in range(len(layout.names))]  # the file's may occur twice
        self._parsing = arrow.csv.ParseOptions(delimiter=layout.separator)
        self._conversion = self._convert_options()

    def _convert_options(self) -> Any:
        arrow, layout = self._arrow, self._layout
        # float64, as Python reads numbers: so both round to the same float32.
        kinds = {str(number): arrow.float64() for number in layout.vectors}
        ids = {} if layout.ids is None else {str(layout.ids): arrow.int64()}
        used = [*ids, *kinds]
        return arrow.csv.ConvertOptions(column_types=ids | kinds, include_columns=used, null_values=[])

    def read(self, block: Block) -> Rows | None:
        """Return the rows of a block; None where pyarrow refuses anything in it, or might understand it otherwise."""
        arrow, data = self._arrow, block.data
        quoted = b'"' in data
        if _is_odd(data) or (quoted and not self._closes_quotes(data)):
            return None
        # A chunk ends at any newline, which might be a quoted one.
        chunk = len(data) if quoted else CHUNK_BYTES
        reading = arrow.csv.ReadOptions(column_names=self._names, block_size=chunk)
        try:
            table = arrow.csv.read_csv(arrow.BufferReader(data), reading, self._parsing, self._conversion)
        except arrow.ArrowInvalid:
            return None
        if table.num_rows != block.rows:
            return None
        vectors = _matrix(table, len(self._layout.vectors))
        if not np.isfinite(vectors).all():  # a "nan(x)" is no number to Python
            return None
        return None if self._layout.ids is None else table.column(0).to_numpy(), vectors

    def _closes_quotes(self, data: bytes) -> bool:
        # Of the last line only: after any other that leaves a quote open, there are fewer rows than lines.
        lines = data.rstrip(b"\r\n")
        try:
            split(lines[lines.rfind(b"\n") + 1 :], self._layout.separator)
        except ValueError:
            return False
        return True


def _is_odd(data: bytes) -> bool:
    # pyarrow ends lines also at a lone carriage return, skips a byte order mark, and takes 0x1F for a number.
    # (To look for one byte takes a thirtieth of the time for two.)
    returns = b"\r" in data and data.count(b"\r") != data.count(b"\r\n")
    return (
        returns or data.startswith(codecs.BOM_UTF8) or any(one in data and b"0" + one in data for one in (b"x", b"X"))
    )


def _matrix(table: Any, dim: int) -> np.ndarray:
    """Return the last `dim` columns, rows first."""
    vectors, row = np.empty((table.num_rows, dim), np.float32), 0
    with np.errstate(over="ignore"):  # what is too large becomes Inf, which is refused
        for part in table.to_batches():  # small enough for the processor's cache
            rows = vectors[row : row + part.num_rows]
            for column, values in enumerate(part.columns[-dim:]):
                rows[:, column] = values.to_numpy()
            row += part.num_rows
    return vectors
