"""Files of users as they come: compressed as a whole (``vectors.csv.gz``), in UTF-16, with a byte order mark."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from embedrock.cli.formats._arrays import file_size
from embedrock.cli.formats._kinds import HEAD_BYTES, kind_of, refuse_binary, refuse_others
from embedrock.cli.formats._source import fail, import_pyarrow

BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
MOST_PACKED = 1000  # bytes in one of a compressed file; zeros take that


def _open_zstd(file: IO[bytes]) -> io.BufferedReader:
    arrow = import_pyarrow("A file compressed by zstd")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"))


# Each returns a file with the methods of a `BufferedReader`.
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd
}  # fmt: skip
# Of UTF-16 without a mark, each letter of the languages of Western Europe has a zero beside it.
ENCODINGS = (
    ("utf-32", rb"\xff\xfe\0\0|\0\0\xfe\xff"),
    ("utf-16", rb"\xff\xfe|\xfe\xff"),
    ("utf-16-le", rb"(?:[\t\n\r -~\xa0-\xff]\0){2}"),
    ("utf-16-be", rb"(?:\0[\t\n\r -~\xa0-\xff]){2}"),
    ("utf-8", rb"[^\n]*\r[^\n]+\Z"),  # lines that end as on an old Mac
)


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file as if it were not compressed, in lower case: ``.csv`` of ``A.CSV.gz``."""
    name = Path(path.stem) if is_packed(path) else path
    return name.suffix.lower()


def is_packed(path: Path) -> bool:
    """Return whether a file is called as compressed ones are."""
    return path.suffix.lower() in OPENERS


@contextmanager
def opened(path: Path, expected: str, suffixes: Sequence[str] = ()) -> Iterator[io.BufferedReader]:
    """Open a file to read what it holds, unpacked: whether it is, its bytes say, and not what it is called.

    Args:
        path: of the file.
        expected: what it should be, for people.
        suffixes: of the kinds that it may be, of those that are known by their first bytes.

    Raises:
        FileError: it is damaged, or something else.
    """
    plain: Any = open(path, "rb", HEAD_BYTES)  # noqa: SIM115  # closed by the next line
    with plain:
        kind = kind_of(plain.peek(HEAD_BYTES))
        unpack = None if kind is None else OPENERS.get(kind.suffix)
        with plain if unpack is None else unpack(plain) as file:
            try:
                refuse_others(path, file.peek(HEAD_BYTES), expected, suffixes)
                yield file
            except BROKEN as error:
                fail(path, "a whole compressed file", f"{error}", "Get it again.")
            except OSError as error:
                if error.errno is not None or unpack is None:
                    raise
                fail(path, "a whole compressed file", f"{error}", "Get it again.")


@contextmanager
def opened_text(path: Path, expected: str, suffixes: Sequence[str] = ()) -> Iterator[io.BufferedReader]:
    """Open a text, to read it in UTF-8, without a byte order mark, in lines that end with a newline.

    Raises:
        FileError: it is damaged, or no text.
    """
    with opened(path, expected, suffixes) as file:
        head = file.peek(HEAD_BYTES)
        if head.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        encoding = next((name for name, begins in ENCODINGS if re.match(begins, head)), None)
        if encoding is not None:
            recoded: Any = _Recoded(file, path, encoding)
            file = io.BufferedReader(recoded, HEAD_BYTES)
        if b"\0" in (head := file.peek(HEAD_BYTES)):
            refuse_binary(path, head, expected)
        yield file


def check_plain_text(path: Path, expected: str) -> None:
    """Refuse what is no text, and one that would have to be changed to be UTF-8.

    Raises:
        FileError: it is damaged, or no such text.
    """
    with opened_text(path, expected) as file:
        if not _is_plain(file):
            fail(path, expected, "a text that is compressed, or of another encoding", "Save it in UTF-8.")


def _is_plain(file: io.BufferedReader) -> bool:
    return isinstance(getattr(file, "raw", None), io.FileIO)


def text_of(path: Path, expected: str, suffixes: Sequence[str] = ()) -> str:
    """Return all of a text.

    Raises:
        FileError: it is damaged, or no text.
    """
    with opened_text(path, expected, suffixes) as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(path, expected, f"{error}", "Save it in UTF-8.")


def bytes_at_most(path: Path) -> int:
    """Return how many bytes a file can hold, unpacked."""
    with open(path, "rb") as file:
        kind = kind_of(file.peek(HEAD_BYTES))
    return file_size(path) * (MOST_PACKED if kind is not None and kind.suffix in OPENERS else 1)


class _Recoded(io.RawIOBase):
    """A text in UTF-8, with newlines, from one in another encoding, or with other ends of lines."""

    def __init__(self, file: IO[bytes], path: Path, encoding: str) -> None:
        errors = "surrogateescape" if encoding == "utf-8" else "strict"
        self._text = io.TextIOWrapper(file, encoding, errors, newline=None)
        self._path, self._encoding, self._rest = path, encoding, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._rest or self._text.read(len(buffer)).encode("utf-8", "surrogateescape")
        except UnicodeError as error:
            fail(self._path, f"text in {self._encoding}", f"{error}", "Get or write the file again.")
        buffer[: len(data)], self._rest = data[: len(buffer)], data[len(buffer) :]
        return min(len(data), len(buffer))
