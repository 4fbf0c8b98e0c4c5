"""word2vec's binary format: a line with rows and columns, then each word, a space, and its float32 numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np

from embedrock.cli.formats._kinds import HEAD_BYTES, TEXT_BYTES, is_text
from embedrock.cli.formats._packed import opened
from embedrock.cli.formats._source import Batch, ReadOptions, Source
from embedrock.cli.formats.text import named_batch, read_counts, wants_words_as_ids
from embedrock.terminal.tables import format_count

MAX_WORD_BYTES = 4096
BLOCK_BYTES = 1 << 20
EXPECTED = "word2vec's binary format"
REMEDY = "Check that it is the right file and format (--format raw?), or get it again."


def read(path: Path, options: ReadOptions) -> Word2vecBinary:
    """Open a word2vec binary file."""
    return Word2vecBinary(path, options.ids)


class Word2vecBinary(Source):
    """Words and their vectors."""

    def __init__(self, path: Path, ids: str | None) -> None:
        self.path = path
        with self._opened() as file:
            head = file.peek(HEAD_BYTES)
            if len(head) >= TEXT_BYTES and is_text(head):
                self.fail(EXPECTED, f"text: {head[:60]!r}", "Say --format word2vec, or glove where it has no counts.")
            self.rows, self.dim = read_counts(file, path, least_bytes=4)
            self._data = file.tell()
        self.has_ids = wants_words_as_ids(path, ids)
        self.has_words = not self.has_ids

    def _opened(self) -> AbstractContextManager[BufferedReader]:
        return opened(self.path, EXPECTED)

    def _batches(self, start: int, batch_rows: int) -> Iterator[Batch]:
        with self._opened() as file:
            file.read(self._data)
            records = self._records(file)
            for _ in islice(records, start):
                pass
            for first in range(start, self.rows, batch_rows):
                part = list(islice(records, min(batch_rows, self.rows - first)))
                vectors = np.frombuffer(b"".join(data for _, data in part), "<f4").reshape(-1, self.dim)
                yield named_batch(self, [word for word, _ in part], vectors.astype(np.float32), first)
            next(records, None)  # looks at what follows the last row

    def _records(self, file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Go through words and the bytes of their numbers."""
        buffer, at, width = b"", 0, 4 * self.dim
        for row in range(self.rows):
            if len(buffer) - at < MAX_WORD_BYTES + width:
                buffer, at = buffer[at:] + file.read(BLOCK_BYTES + width), 0
            space = buffer.find(b" ", at, at + MAX_WORD_BYTES)
            word = buffer[at:space].lstrip(b"\n") if space >= 0 else b""  # some writers end each row with a newline
            if not word or b"\n" in word:
                got = repr(buffer[at : at + 40])
                self.fail("a word and a space", got, REMEDY, self.place(row))
            at = space + 1 + width
            if at > len(buffer):
                got = f"the end of the file after {len(buffer) - space - 1}"
                self.fail(f"{format_count(width, 'byte')} of numbers", got, REMEDY, self.place(row))
            yield word, buffer[space + 1 : at]
        if (buffer[at:] + file.read(2)).strip(b"\n"):
            self.fail(f"{format_count(self.rows, 'row')}, as line 1 says", "more bytes after them", REMEDY)
