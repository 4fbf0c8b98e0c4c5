"""The words of a table's rows: a text file with a word per line, that of id 0 first."""

from __future__ import annotations

import codecs
from pathlib import Path

import numpy as np

from embedrock.cli.formats._source import fail
from embedrock.process import platform
from embedrock.terminal.tables import format_count

BLOCK_BYTES = 1 << 20
END = ord("\n")


class Vocabulary:
    """Words by id, from a file; takes 8 bytes of RAM for a word."""

    def __init__(self, path: Path) -> None:
        self._path = path
        ends = _line_ends(path)
        self._file = open(path, "rb")  # noqa: SIM115  (closed by `close`)
        has_mark = self._file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
        self._starts = np.concatenate([[len(codecs.BOM_UTF8) if has_mark else 0], ends])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def of(self, ids: np.ndarray) -> list[bytes]:
        """Return the words of ids.

        Raises:
            FileError: there are not so many.
        """
        outside = (ids < 0) | (ids >= len(self))
        if outside.any():
            got = f"{format_count(len(self), 'word')}, and a row of id {ids[np.argmax(outside)]}"
            fail(self._path, "a word for each row", got, "Name another file by --words, or '' to write ids as words.")
        return [self._word(start, end) for start, end in zip(*self._bounds(ids), strict=True)]

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _bounds(self, ids: np.ndarray) -> tuple[list[int], list[int]]:
        return self._starts[ids].tolist(), self._starts[ids + 1].tolist()

    def _word(self, start: int, end: int) -> bytes:
        if self._file.tell() != start:
            self._file.seek(start)
        return self._file.read(end - start).rstrip(b"\r\n")


class VocabularyWriter:
    """Writes a vocabulary as rows come.

    Args:
        path: of the file.
        done: words that are in it already.
    """

    def __init__(self, path: Path, done: int) -> None:
        if done:
            keep_lines(path, done)
        self._file = open(path, "ab" if done else "wb")  # noqa: SIM115  (closed by `close`)

    def write(self, words: list[bytes]) -> None:
        """Append words."""
        self._file.write(b"".join([word + b"\n" for word in words]))

    def sync(self) -> None:
        """Make durable what was written."""
        self._file.flush()
        platform.sync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def keep_lines(path: Path, count: int) -> None:
    """Cut a file off after so many lines.

    Raises:
        FileError: it has not so many.
    """
    seen = size = 0
    if not path.exists():
        fail(path, f"{format_count(count, 'line')} from an earlier run", "no such file", "Begin anew: --restart.")
    with open(path, "r+b") as file:
        while seen < count and (block := file.read(BLOCK_BYTES)):
            here = block.count(b"\n")
            if seen + here >= count:
                size += int(_ends_in(block)[count - seen - 1]) + 1
            else:
                size += len(block)
            seen += here
        if seen < count:
            fail(path, f"{format_count(count, 'line')} from an earlier run", f"{seen}", "Begin anew: --restart.")
        file.truncate(size)


def _line_ends(path: Path) -> np.ndarray:
    """Return where the next line begins, for each line; the last one may lack its end."""
    parts, offset, last = [np.empty(0, np.int64)], 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            parts.append(_ends_in(block) + offset + 1)
            offset, last = offset + len(block), block[-1:]
    if last != b"\n":
        parts.append(np.array([offset]))
    return np.concatenate(parts)


def _ends_in(block: bytes) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(block, np.uint8) == END)
