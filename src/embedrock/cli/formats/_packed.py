"""Files that are compressed as a whole: ``vectors.csv.gz``."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embedrock.cli.formats._pyarrow import import_pyarrow
from embedrock.cli.formats._source import fail

BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def _open_zstd(path: Path) -> io.BufferedReader:
    arrow = import_pyarrow("A file compressed by zstd")
    return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))


# Each returns a file with the methods of a `BufferedReader`.
OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file as if it were not compressed, in lower case: ``.csv`` of ``A.CSV.gz``."""
    name = Path(path.stem) if is_packed(path) else path
    return name.suffix.lower()


def is_packed(path: Path) -> bool:
    """Return whether a file is called as compressed ones are."""
    return path.suffix.lower() in OPENERS


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file to read what it holds, unpacked.

    Raises:
        FileError: it is damaged, or no such file.
    """
    with OPENERS.get(path.suffix.lower(), _open)(path) as file:
        try:
            yield file
        except BROKEN as error:
            fail(path, "a whole compressed file", f"{error}", "Get it again.")
        except OSError as error:
            if error.errno is not None or not is_packed(path):
                raise
            fail(path, "a whole compressed file", f"{error}", "Get it again.")


def _open(path: Path) -> io.BufferedReader:
    return open(path, "rb")
