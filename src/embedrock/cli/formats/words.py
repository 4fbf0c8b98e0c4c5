"""Words and their vectors: GloVe's text, word2vec's (and fastText's) as text and in binary; and a word for each row."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import IO

import numpy as np

from embedrock.cli.formats.arrays import as_id, is_number
from embedrock.cli.formats.base import (
    BLOCK_BYTES,
    ROW_NUMBERS,
    LineSink,
    Output,
    ReadOptions,
    RowBatch,
    VectorSource,
    fail,
)
from embedrock.cli.formats.files import HEAD_BYTES, TEXT_BYTES, bytes_at_most, is_text, opened, opened_text
from embedrock.cli.terminal.tables import format_count

MAX_LINE_BYTES = 1 << 24
COUNTS = re.compile(rb"(\d{1,18})[ \t](\d{1,18})\s*")  # the first line of word2vec's formats: rows, columns
NUMBER_BYTES = b"0123456789+-.eE "
WORDS = "word"  # as a name of ids: words are ids
REMEDY = "Fix or remove the line."
SAY_DIM = "If a word ends in a number, --dim N says how many numbers follow."
EXPECTED = "a word and its numbers"
MAX_WORD_BYTES = 4096
EXPECTED_BINARY = "word2vec's binary format"
REMEDY_BINARY = "Check that it is the right file and format (--format raw?), or get it again."


class VocabularyFormat:
    """Words by id, from a file; takes 8 bytes of RAM per word."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open(path, "rb")  # noqa: SIM115  (closed by `close`)
        self._starts = np.cumsum(np.fromiter(chain([0], map(len, self._file)), np.int64))
        self._file.seek(0)
        if self._file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            self._starts[0] = len(codecs.BOM_UTF8)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def of(self, ids: np.ndarray) -> list[bytes]:
        """Return the words of ids.

        Raises:
            FileError: the file has fewer.
        """
        outside = (ids < 0) | (ids >= len(self))
        if outside.any():
            got = f"{format_count(len(self), 'word')}, and a row of id {ids[np.argmax(outside)]}"
            fail(self._path, "a word for each row", got, "Name another file by --words, or '' to write ids as words.")
        bounds = self._starts[ids].tolist(), self._starts[ids + 1].tolist()
        return [self._word(start, end) for start, end in zip(*bounds, strict=True)]

    def close(self) -> None:
        self._file.close()

    def _word(self, start: int, end: int) -> bytes:
        if self._file.tell() != start:
            self._file.seek(start)
        return self._file.read(end - start).rstrip(b"\r\n")


def read_glove(path: Path, options: ReadOptions) -> Text:
    """Open GloVe's text."""
    with opened_text(path, EXPECTED) as file:
        first = file.readline(MAX_LINE_BYTES)
    fields = first.decode("latin-1").split()[1:]  # the word may have blanks, and so further fields
    dim = options.dim or sum(1 for _ in takewhile(is_number, reversed(fields)))
    if dim < 1:
        fail(path, EXPECTED, repr(first[:60]), "Check that it is the right file.", "line 1")
    return Text(path, count_lines(path), dim, False, options)


def read_word2vec(path: Path, options: ReadOptions) -> Text:
    """Open word2vec's text."""
    with opened_text(path, EXPECTED) as file:
        rows, dim = read_counts(file, path, least_bytes=2)
    return Text(path, rows, dim, True, options)


def read_counts(file: IO[bytes], path: Path, least_bytes: int) -> tuple[int, int]:
    """Read the first line of word2vec's formats: rows and columns of numbers of at least `least_bytes` bytes each."""
    first = file.readline(64)
    match = COUNTS.fullmatch(first)
    if match is None:
        remedy = "Check that it is the right file, and its --format."
        fail(path, 'the numbers of rows and columns, such as "400000 300"', repr(first[:60]), remedy, "line 1")
    rows, dim = int(match[1]), int(match[2])
    if rows < 1 or dim < 1 or rows * dim * least_bytes > bytes_at_most(path):
        got = f"{rows} and {dim} in a file of {format_count(path.stat().st_size, 'byte')}"
        fail(path, "numbers of rows and columns that fit the file", got, "Get the file again.", "line 1")
    return rows, dim


def has_counts(path: Path) -> bool:
    """Return whether a file begins like word2vec's formats."""
    with opened_text(path, EXPECTED) as file:
        return COUNTS.fullmatch(file.readline(64)) is not None


def count_lines(path: Path) -> int:
    """Count the lines of a file. The last one may lack its end, and blank ones at the end do not count."""
    lines = 1
    with opened_text(path, EXPECTED) as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            if not line.isspace():
                lines = number
    return lines


class WordSource(VectorSource):
    """A source of rows with words, which become ids if the user wants that."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        if options.ids not in (None, WORDS, ROW_NUMBERS):
            got = f"--ids {options.ids}"
            fail(path, f"--ids {WORDS} or --ids {ROW_NUMBERS}", got, "Text has words, and no other ids.")
        self.path, self.has_ids, self.has_words = path, options.ids == WORDS, options.ids is None

    def _named(self, words: list[bytes], vectors: np.ndarray, first: int) -> RowBatch:
        if not self.has_ids:
            return RowBatch(np.arange(first, first + len(words)), vectors, words)
        ids = np.empty(len(words), np.int64)
        for row, word in enumerate(words):
            try:
                ids[row] = as_id(word.decode("latin-1"))
            except ValueError:
                remedy = f"Leave --ids {WORDS} out: rows are then numbered, and the words kept beside the table."
                self.fail("an int64 as word, for it is the id", f"{word[:60]!r}", remedy, self.place(first + row))
        return RowBatch(ids, vectors)


class Text(WordSource):
    """A source of lines with a word and its numbers."""

    def __init__(self, path: Path, rows: int, dim: int, header: bool, options: ReadOptions) -> None:
        super().__init__(path, options)
        self.rows, self.dim, self._header = rows, dim, int(header)
        self._has_dim = options.dim is not None
        self._remedy = REMEDY if header or self._has_dim else f"{REMEDY} {SAY_DIM}"

    def place(self, row: int, column: int | None = None) -> str:
        return f"line {row + self._header + 1}"

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        with opened_text(self.path, EXPECTED) as file:
            lines = iter(partial(file.readline, MAX_LINE_BYTES), b"")
            skipped = sum(1 for _ in islice(lines, start + self._header))
            self._check_end(skipped - self._header, start)
            for first in range(start, self.rows, batch_rows):
                wanted = min(batch_rows, self.rows - first)
                part = list(islice(lines, wanted))
                yield self._named(*self._parse(part, first), first)
                self._check_end(first + len(part), first + wanted)
            if any(line.strip() for line in lines):
                expected = f"{format_count(self.rows, 'row')}, as line 1 says"
                self.fail(expected, "more", "Correct line 1.", self.place(self.rows))

    def _check_end(self, rows: int, wanted: int) -> None:
        if rows < wanted:
            got = f"the end of the file after {rows}"
            self.fail(format_count(self.rows, "row"), got, "Get the file again.", self.place(rows))

    def _parse(self, lines: list[bytes], first: int) -> tuple[list[bytes], np.ndarray]:
        parts = [line.rstrip().partition(b" ") for line in lines]
        words = [word for word, _, _ in parts]
        vectors = self._fast(words, [numbers for _, _, numbers in parts])
        return (words, vectors) if vectors is not None else self._slow(lines, first)

    def _fast(self, words: list[bytes], numbers: list[bytes]) -> np.ndarray | None:
        """Return the numbers of ordinary lines; None if any line is not ordinary.

        Each ordinary line has `dim` texts between single spaces. If one reads as two numbers ("1-2"), the count is
        wrong.
        """
        text = b" ".join(numbers)
        if b"  " in text or not all(words) or text.translate(None, NUMBER_BYTES):
            return None
        if any(one.count(b" ") != self.dim - 1 for one in numbers):
            return None
        try:
            values = np.fromstring(text, np.float32, sep=" ")
        except ValueError:
            return None
        return values.reshape(-1, self.dim) if values.size == len(words) * self.dim else None

    def _slow(self, lines: list[bytes], first: int) -> tuple[list[bytes], np.ndarray]:
        """Read lines one by one: words may have spaces, and errors name their place."""
        words, vectors = [], np.empty((len(lines), self.dim), np.float32)
        for number, line in enumerate(lines):
            try:
                word, numbers = split_word(line, self.dim, self._has_dim)
                if any(b"_" in field for field in numbers):  # Python would accept it
                    raise ValueError("no number")
                with np.errstate(over="ignore"):
                    vectors[number] = [float(field) for field in numbers]
            except ValueError as error:
                expected = f"a word and {format_count(self.dim, 'number')} between spaces"
                self.fail(expected, f"{error}: {line[:60]!r}", self._remedy, self.place(first + number))
            words.append(word)
        return words, vectors


def split_word(line: bytes, dim: int, any_word: bool = False) -> tuple[bytes, list[bytes]]:
    """Return the word of a line, and its last `dim` fields. The separator before the fields is no part of the word.

    Args:
        line: with or without its end.
        dim: number of fields.
        any_word: a word may end in a blank and a number, which otherwise looks like one number too many.

    Raises:
        ValueError: there are fewer fields, or more that are numbers.

    Example:
        >>> split_word(b". . . 0.5 1e-3", 2)
        (b'. . .', [b'0.5', b'1e-3'])
    """
    line = line.rstrip()
    fields = line.rsplit(None, dim)
    joined = b" ".join(fields[-dim:])
    # Aligned columns have several blanks between them: those around the word belong to none.
    word = line[: -len(joined) - 1] if line.endswith(joined) else b"".join(fields[:-dim]).strip()
    parts = word.split()
    has_more = len(parts) > 1 and not any_word and is_number(parts[-1].decode("latin-1"))
    if not word or len(fields) < dim or has_more:
        raise ValueError(f"{len(line.split())} fields")
    return word, fields[-dim:]


class TextSink(LineSink):
    """A sink with a line for each row: its word, or id, and its numbers; in word2vec's text, rows and columns first."""

    def __init__(self, output: Output, done: int, has_counts: bool = False) -> None:
        self.header = b"%d %d\n" % (output.rows, output.dim) if has_counts else b""
        self._words = VocabularyFormat(output.words) if output.words else None
        self._format = " " + " ".join(["%.9g"] * output.dim) + "\n"  # enough digits for any float32
        super().__init__(output, done)

    def _lines(self, ids: np.ndarray, vectors: np.ndarray) -> bytes:
        words = self._words.of(ids) if self._words is not None else [b"%d" % one for one in ids.tolist()]
        rows = vectors.tolist()
        return b"".join([word + (self._format % tuple(row)).encode() for word, row in zip(words, rows, strict=True)])

    def close(self) -> None:
        super().close()
        if self._words is not None:
            self._words.close()


class Word2vecBinary(WordSource):
    """A source of words and their vectors."""

    def __init__(self, path: Path, options: ReadOptions) -> None:
        super().__init__(path, options)
        with opened(path, EXPECTED_BINARY) as file:
            head = file.peek(HEAD_BYTES)
            if len(head) >= TEXT_BYTES and is_text(head):
                remedy = "Say --format word2vec, or glove where it has no counts."
                self.fail(EXPECTED_BINARY, f"text: {head[:60]!r}", remedy)
            self.rows, self.dim = read_counts(file, path, least_bytes=4)
            self._data = file.tell()

    def _batches(self, start: int, batch_rows: int) -> Iterator[RowBatch]:
        with opened(self.path, EXPECTED_BINARY) as file:
            file.read(self._data)
            records = self._records(file)
            for _ in islice(records, start):
                pass
            for first in range(start, self.rows, batch_rows):
                part = list(islice(records, min(batch_rows, self.rows - first)))
                vectors = np.frombuffer(b"".join(data for _, data in part), "<f4").reshape(-1, self.dim)
                yield self._named([word for word, _ in part], vectors.astype(np.float32), first)
            next(records, None)  # checks the bytes after the last row

    def _records(self, file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
        buffer, at, width = b"", 0, 4 * self.dim
        for row in range(self.rows):
            if len(buffer) - at < MAX_WORD_BYTES + width:
                buffer, at = buffer[at:] + file.read(BLOCK_BYTES + width), 0
            space = buffer.find(b" ", at, at + MAX_WORD_BYTES)
            word = buffer[at:space].lstrip(b"\n") if space >= 0 else b""  # some writers end each row with a newline
            if not word or b"\n" in word:
                got = repr(buffer[at : at + 40])
                self.fail("a word and a space", got, REMEDY_BINARY, self.place(row))
            at = space + 1 + width
            if at > len(buffer):
                got = f"the end of the file after {len(buffer) - space - 1}"
                self.fail(f"{format_count(width, 'byte')} of numbers", got, REMEDY_BINARY, self.place(row))
            yield word, buffer[space + 1 : at]
        if (buffer[at:] + file.read(2)).strip(b"\n"):
            self.fail(f"{format_count(self.rows, 'row')}, as line 1 says", "more bytes after them", REMEDY_BINARY)
