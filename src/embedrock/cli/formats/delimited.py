"""CSV and TSV: a line for each row, with its id and its numbers. pyarrow reads them fast, where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from embedrock.batch.wrong_ids import OF_STRINGS
from embedrock.cli.formats._arrays import OF_BITS
from embedrock.cli.formats._fast_csv import FastReader, Rows
from embedrock.cli.formats._layout import FIX_LINE, IDS, MOST_ID, WHOLE, as_id, as_number, is_number, read_layout, split
from embedrock.cli.formats._lines import Block, LineSink, blocks, numbers_format
from embedrock.cli.formats._packed import opened_text
from embedrock.cli.formats._pyarrow import find_pyarrow
from embedrock.cli.formats._sink import Output
from embedrock.cli.formats._source import ROW_NUMBERS, Batch, ReadOptions, Source
from embedrock.terminal.tables import format_count


class Delimited(Source):
    """Lines of an id and numbers, read block by block: by pyarrow, and by Python where pyarrow will not have one.

    Args:
        path: of the file.
        options: what the user says about it.
        separator: between columns, if the first line has it.
    """

    def __init__(self, path: Path, options: ReadOptions, separator: str) -> None:
        self.path = path
        with opened_text(path, "rows") as file:
            self._layout = read_layout(file, path, separator, options)
        arrow = find_pyarrow("csv")
        self._fast = None if arrow is None else FastReader(arrow, self._layout)
        self.has_ids = self._layout.ids is not None
        self.dim = len(self._layout.vectors)
        self.rows = sum(block.rows for block in self._blocks())
        if not self.rows:
            self.fail("rows", "none", "Check that it is the right file.")

    def place(self, row: int, column: int | None = None) -> str:
        for block in self._blocks():
            if row < block.rows:
                line, _ = list(block.lines())[row]
                return self._layout.place(line, None if column is None else self._layout.vectors[column])
            row -= block.rows
        return "its end"

    def _blocks(self) -> Iterator[Block]:
        """Go through the lines of the rows."""
        with opened_text(self.path, "rows") as file:
            for _ in range(self._layout.lines):
                file.readline()
            yield from blocks(file, self.path, self._layout.lines + 1)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        first = 0
        for block in self._blocks():
            end = first + block.rows
            if start < end:
                ids, vectors = self._read(block)
                ids = np.arange(first, end) if ids is None else ids
                for at in range(max(0, start - first), block.rows, batch_rows):
                    yield Batch(ids[at : at + batch_rows], vectors[at : at + batch_rows])
            first = end

    def _read(self, block: Block) -> Rows:
        rows = None if self._fast is None else self._fast.read(block)
        return self._slow(block) if rows is None else rows

    def _slow(self, block: Block) -> Rows:
        """Read a block line by line; what is wrong is named."""
        layout, vectors = self._layout, np.empty((block.rows, self.dim), np.float32)
        ids = None if layout.ids is None else np.empty(block.rows, np.int64)
        for row, (line, data) in enumerate(block.lines()):
            fields = self._fields(data, line)
            if ids is not None and layout.ids is not None:
                ids[row] = self._value(as_id, fields, layout.ids, line)
            with np.errstate(over="ignore"):
                vectors[row] = [self._value(as_number, fields, column, line) for column in layout.vectors]
        return ids, vectors

    def _fields(self, data: bytes, line: int) -> list[str]:
        columns = len(self._layout.names)
        try:
            fields = split(data, self._layout.separator)
        except ValueError as error:
            self.fail("columns, and quotes in pairs", f"{error}", FIX_LINE, self._layout.place(line))
        if len(fields) != columns:
            self.fail(
                f"{format_count(columns, 'column')}, as in the first line",
                f"{len(fields)}",
                FIX_LINE,
                self._layout.place(line),
            )
        return fields

    def _value(self, read: Callable[[str], Any], fields: list[str], column: int, line: int) -> Any:
        text = fields[column]
        try:
            return read(text)
        except ValueError as error:
            got = repr(text[:60]) if text.strip() else "an empty field"
            self.fail(f"{error}", got, self._remedy(text, column), self._layout.place(line, column))

    def _remedy(self, text: str, column: int) -> str:
        if column == self._layout.ids:
            if WHOLE.fullmatch(text.strip()) and MOST_ID < int(text) < 2**64:
                return OF_BITS
            words = "" if is_number(text) or not text.strip() else f" {OF_STRINGS}"
            return f"{FIX_LINE} Another column may have the ids: --ids NAME; or none: --ids {ROW_NUMBERS}.{words}"
        return f"{FIX_LINE} Where only some columns are numbers, --vectors NAME takes NAME0, NAME1, ..."


class DelimitedSink(LineSink):
    """Writes a line with the names of the columns, then one with the id and the numbers of each row."""

    def __init__(self, output: Output, done: int, separator: str) -> None:
        self._separator = separator
        self._format = f"%d{separator}{numbers_format(output.dim, separator)}\n"
        super().__init__(output, done)

    def _header(self) -> bytes:
        names = [IDS[0], *(f"v{column}" for column in range(self.output.dim))]
        return (self._separator.join(names) + "\n").encode()

    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes:
        rows = zip(ids.tolist(), vectors.tolist(), strict=True)
        return "".join([self._format % (one, *row) for one, row in rows]).encode()
