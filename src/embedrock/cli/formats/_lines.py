"""Text files in blocks of whole lines, and `LineSink`, which writes a line for each row."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from embedrock.cli.formats._sink import Output, Sink, part_of, publish
from embedrock.cli.formats._source import fail
from embedrock.cli.formats.vocabulary import keep_lines
from embedrock.process import platform

MAX_LINE_BYTES = 1 << 24
BLOCK_BYTES = 4 << 20  # of 8 MiB, pages that are new each time would cost a sixth more
PIECE_NUMBERS = 1 << 16  # written at a time: Python's own floats take 32 bytes each
NEWLINE = b"\n"
RETURN = ord("\r")
BLANK = (b"", b"\r")  # lines without their ends


class Block(NamedTuple):
    """Whole lines of a file.

    Attributes:
        data: the lines, each with its end.
        line: number of the first one, from 1.
        rows: how many of them are not blank.
    """

    data: bytes
    line: int
    rows: int

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Go through the lines that are not blank, with their numbers and without their ends."""
        for number, line in enumerate(self.data.split(NEWLINE)[:-1], self.line):
            if line not in BLANK:
                yield number, line


def blocks(file: IO[bytes], path: Path, line: int) -> Iterator[Block]:
    """Go through the rest of a file, whose next line has number `line`; the last one may lack its end.

    Raises:
        FileError: a line is longer than any row.
    """
    while data := file.read(BLOCK_BYTES):
        rest = b"" if data.endswith(NEWLINE) else file.readline(MAX_LINE_BYTES)
        if len(rest) == MAX_LINE_BYTES and not rest.endswith(NEWLINE):
            where = f"line {line + data.count(NEWLINE)}"
            got = f"more than {MAX_LINE_BYTES} bytes without its end"
            fail(path, "a line of text", got, "Check that it is the right file.", where)
        data += rest
        if not data.endswith(NEWLINE):
            data += NEWLINE
        lines, rows = _rows_in(data)
        yield Block(data, line, rows)
        line += lines


def _rows_in(data: bytes) -> tuple[int, int]:
    """Return the number of lines, and of those that are not blank. (`bytes.count` takes several times as long.)"""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == NEWLINE[0])
    lengths = np.diff(ends, prepend=-1)
    blank = int((lengths == 1).sum())
    if b"\r" in data:
        blank += sum(data[end - 1] == RETURN for end in ends[lengths == 2].tolist())
    return len(ends), len(ends) - blank


class LineSink(Sink):
    """Writes a line for each row."""

    def __init__(self, output: Output, done: int) -> None:
        super().__init__(output, done)
        part, header = part_of(output.path), self._header()
        if done:
            keep_lines(part, done + header.count(NEWLINE))
        self._file = open(part, "r+b" if done else "w+b")  # noqa: SIM115  (closed by `close`)
        self._file.seek(0, os.SEEK_END)
        if not done:
            self._file.write(header)

    @abstractmethod
    def _header(self) -> bytes:
        """Return the lines before the first row."""

    @abstractmethod
    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes:
        """Return the lines of some rows."""

    def write(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        piece = max(1, PIECE_NUMBERS // self.output.dim)
        for start in range(0, len(ids), piece):
            self._file.write(self._lines(ids[start : start + piece], vectors[start : start + piece]))
        self.done += len(ids)

    def holds(self, ids: np.ndarray, vectors: np.ndarray) -> bool:
        wanted = self._lines(ids, vectors)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - len(wanted)))
        return self._file.read() == wanted

    def sync(self) -> None:
        self._file.flush()
        platform.sync(self._file.fileno())

    def finish(self) -> list[Path]:
        self.sync()
        return [publish(part_of(self.output.path), self.output.path)]

    def close(self) -> None:
        self._file.close()


def numbers_format(dim: int, separator: str) -> str:
    """Return what formats a row's numbers with the 9 digits that tell any float32."""
    return separator.join(["%.9g"] * dim)
