"""Files of vectors. A new format is a file here, and a row in `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from embedrock.cli.formats import arrays, columns, words
from embedrock.cli.formats.base import Output, ReadOptions, Sink, Spool, VectorSource, fail
from embedrock.cli.formats.delimited import Delimited, DelimitedSink
from embedrock.cli.formats.files import OPENERS, check_kind, is_packed, plain_suffix
from embedrock.errors import did_you_mean, with_article


class Format(NamedTuple):
    """A file format."""

    name: str  # on the command line
    suffix: str
    read: Callable[[Path, ReadOptions], VectorSource]
    sink: Callable[[Output, int], Sink] | None  # None: the format is read only
    has_words: bool = False
    packed: bool = False  # whether compressed files can be read
    others: tuple[str, ...] = ()  # further suffixes
    kind: str = ""  # expected first bytes, in words for people; "": the reader checks them


def _columns(file: type[columns.ColumnFile], *others: str) -> Format:
    name, read = file.kind.lower(), partial(columns.ColumnFormat, open_file=file)
    sink = partial(columns.columns_sink, file=file)
    return Format(name, f".{name}", read, sink, others=others, kind=f"{with_article(file.kind)} file")


FORMATS = (
    Format("npy", ".npy", arrays.read_npy, arrays.NpySink),
    Format("npz", ".npz", arrays.read_npz, partial(Spool, pack=arrays.pack_npz), kind="a .npz file"),
    Format("raw", ".raw", arrays.read_raw, partial(arrays.NpySink, is_raw=True), kind="raw numbers"),
    *(
        Format(
            name, f".{name}", partial(Delimited, separator=sign), partial(DelimitedSink, separator=sign), packed=True
        )
        for name, sign in (("csv", ","), ("tsv", "\t"))
    ),
    _columns(columns.ParquetFile),
    _columns(columns.ArrowFile, ".feather", ".ipc", ".arrows"),
    Format("safetensors", ".safetensors", arrays.read_safetensors, arrays.SafetensorsSink, kind="a safetensors file"),
    Format("glove", ".txt", words.read_glove, words.TextSink, has_words=True, packed=True),
    Format(
        "word2vec", ".vec", words.read_word2vec, partial(words.TextSink, has_counts=True), has_words=True, packed=True
    ),
    Format("word2vec-binary", ".bin", words.Word2vecBinary, None, has_words=True, packed=True),
)
NAMES = {one.name: one for one in FORMATS}
TEXTS = ("glove", "word2vec")  # distinguished by the first line, whatever the suffix


def format_to_read(path: Path, name: str | None) -> Format:
    """Return the format of a file by its name, or else by the file's suffix and first line."""
    found = _by_suffix(path) if name is None else NAMES[name]
    if found is None:
        _refuse(path, FORMATS)
    if found.kind:
        check_kind(path, found.kind, (found.suffix, *(".zip" for _ in range(found.name == "npz"))))
    if name is None and found.name in TEXTS:
        return NAMES["word2vec" if words.has_counts(path) else "glove"]
    return found


def format_to_write(path: Path, name: str | None) -> Format:
    """Return the format to write a file in, by its name, or else by the file's suffix."""
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
