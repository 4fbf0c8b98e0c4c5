"""Files of vectors. A new format is a file here, and a row in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from embedrock.cli.formats import columns, delimited, npy, npz, raw, safetensors, text, word2vec_binary
from embedrock.cli.formats._arrays import FLOATS
from embedrock.cli.formats._kinds import check_kind
from embedrock.cli.formats._packed import OPENERS, is_packed, plain_suffix
from embedrock.cli.formats._pyarrow import ArrowFile, ParquetFile
from embedrock.cli.formats._sink import CHECKED_ROWS, PART, Output, Sink, part_of, publish
from embedrock.cli.formats._source import (
    ROW_NUMBERS,
    Batch,
    FileError,
    ReadOptions,
    Source,
    fail,
    rows_at_once,
)
from embedrock.wording import did_you_mean


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        name: on the command line.
        suffix: of files of this kind.
        read: opens one.
        sink: writes one; None: it is only read.
        has_words: rows have words.
        packed: it may be read compressed.
        others: further suffixes.
        kind: what its first bytes have to be, for people; "": its reader looks at them.
    """

    name: str
    suffix: str
    read: Callable[[Path, ReadOptions], Source]
    sink: Callable[[Output, int], Sink] | None
    has_words: bool = False
    packed: bool = False
    others: tuple[str, ...] = ()
    kind: str = ""


def _delimited(name: str, separator: str) -> Format:
    read = partial(delimited.Delimited, separator=separator)
    return Format(name, f".{name}", read, partial(delimited.DelimitedSink, separator=separator), packed=True)


FORMATS = (
    Format("npy", ".npy", npy.read, npy.NpySink),
    Format("npz", ".npz", npz.read, npz.NpzSink, kind="a .npz file"),
    Format("raw", ".raw", raw.read, raw.RawSink, kind="raw numbers"),
    _delimited("csv", ","),
    _delimited("tsv", "\t"),
    Format(
        "parquet",
        ".parquet",
        partial(columns.Columns, open_file=ParquetFile),
        columns.ParquetSink,
        kind="a Parquet file",
    ),
    Format(
        "arrow",
        ".arrow",
        partial(columns.Columns, open_file=ArrowFile),
        columns.ArrowSink,
        others=(".feather", ".ipc", ".arrows"),
        kind="an Arrow file",
    ),
    Format("safetensors", ".safetensors", safetensors.read, safetensors.SafetensorsSink, kind="a safetensors file"),
    Format("glove", ".txt", text.read_glove, text.GloveSink, has_words=True, packed=True),
    Format("word2vec", ".vec", text.read_word2vec, text.Word2vecSink, has_words=True, packed=True),
    Format("word2vec-binary", ".bin", word2vec_binary.read, None, has_words=True, packed=True),
)
NAMES = {one.name: one for one in FORMATS}
TEXTS = ("glove", "word2vec")  # told apart by the first line, whatever the suffix


def format_to_read(path: Path, name: str | None) -> Format:
    """Return the format of a file: the one of that name, or what its suffix and first line say."""
    found = _by_suffix(path) if name is None else NAMES[name]
    if found is None:
        _refuse(path, FORMATS)
    if found.kind:
        check_kind(path, found.kind, (found.suffix, *(".zip" for _ in range(found.name == "npz"))))
    if name is None and found.name in TEXTS:
        return NAMES["word2vec" if text.has_counts(path) else "glove"]
    return found


def format_to_write(path: Path, name: str | None) -> Format:
    """Return the format to write a file in: the one of that name, or what its suffix says."""
    found = _by_suffix(path) if name is None else NAMES[name]
    if is_packed(path):
        fail(path, "a file that is not compressed", repr(path.suffix), "Write it plain, and compress it then.")
    if found is None or found.sink is None:
        _refuse(path, [one for one in FORMATS if one.sink is not None])
    return found


def _by_suffix(path: Path) -> Format | None:
    suffix, packed = plain_suffix(path), is_packed(path)
    return next((one for one in FORMATS if suffix in (one.suffix, *one.others) and one.packed >= packed), None)


def _refuse(path: Path, formats: list[Format] | tuple[Format, ...]) -> NoReturn:
    listed = ", ".join(f"{one.suffix} ({one.name})" for one in formats)
    if path.is_file():
        check_kind(path, f"one of {listed}", [one.suffix for one in formats])
    packed = path.suffix.lower() in (*OPENERS, ".zip")
    remedy = "Unpack it." if packed else f"Pass --format NAME.{did_you_mean(path.suffix, [f.suffix for f in formats])}"
    fail(path, f"one of {listed}", repr(path.suffix), remedy)


__all__ = [
    "CHECKED_ROWS",
    "FLOATS",
    "FORMATS",
    "NAMES",
    "PART",
    "ROW_NUMBERS",
    "Batch",
    "FileError",
    "Format",
    "Output",
    "ReadOptions",
    "Sink",
    "Source",
    "fail",
    "format_to_read",
    "format_to_write",
    "part_of",
    "publish",
    "rows_at_once",
]
