"""Users' files of any kind: detected by their first bytes, compressed, in UTF-16, with a byte order mark."""

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
from typing import IO, Any, NamedTuple, NoReturn

from embedrock.cli.formats.base import fail, import_pyarrow

HEAD_BYTES = 1 << 16  # of a file, to detect its kind
TEXT_BYTES = 64  # numbers hardly ever look like this much text
BOM_OR_BLANKS = rb"(?:\xef\xbb\xbf)?\s*"
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
GET_AGAIN = "Servers answer so where they do not give the file: get it again."
UNPACK = "Unpack it."
AS_LINES = "Take the file itself, or write what is in it as CSV."
AS_CSV = "Save the sheet as CSV, and take that."
NO_PICKLE = "Nothing is unpickled: save its array by numpy.save or as safetensors, and take that."
CHECK_FILE = "Check that it is the right file."


class Signature(NamedTuple):
    """The first bytes of a kind of file."""

    name: str  # for people
    begins: bytes  # a pattern
    remedy: str = ""
    suffix: str = ""  # of such files, if something reads them


HTML = rb"<(?i:!doctype\s+html|(?:html|head|body)(?=[\s>])(?!>? [-+.\d]))"
ZIP = rb"PK\x03\x04[\s\S]{26}"  # then the name of the first member
KINDS = (
    Signature("an HTML page", BOM_OR_BLANKS + HTML, GET_AGAIN),
    Signature("XML", BOM_OR_BLANKS + rb"<\?xml\s", GET_AGAIN),
    Signature("JSON", BOM_OR_BLANKS + rb'\[?\s*\{\s*"[^"\n]*"\s*:', AS_LINES, ".json"),
    Signature("a pointer of Git LFS", rb"version https://git-lfs\.", "Get the file itself: git lfs pull."),
    Signature(
        "a pointer of git-annex", rb"(?:\.\./)*(?:\.git/|/)annex/objects/", "Get the file itself: git annex get."
    ),
    Signature(
        "a model of fastText",
        rb"\xba\x16\x4f\x2f",
        "Take its .vec file: it is published beside it, or written by "
        "gensim.models.fasttext.load_facebook_vectors(FILE).save_word2vec_format('FILE.vec').",
    ),
    Signature("an Excel or Office file", ZIP + rb"(?:\[Content_Types\]|_rels/|docProps/|xl/)", AS_CSV),
    Signature("an Excel or Office file", rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", AS_CSV),
    Signature(
        "a checkpoint of PyTorch", ZIP + rb"[^/\0]{1,99}/(?:data\.pkl|\.format_version|byteorder|version)", NO_PICKLE
    ),
    Signature("a .npz file", ZIP + rb"[^\0]{1,200}?\.npy", suffix=".npz"),
    Signature("a zip archive", rb"PK(?:\x03\x04|\x05\x06)", f"{UNPACK} If it is a sheet of Excel: {AS_CSV}", ".zip"),
    Signature("data compressed by gzip", rb"\x1f\x8b\x08", UNPACK, ".gz"),
    Signature("data compressed by bzip2", rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)", UNPACK, ".bz2"),
    Signature("data compressed by xz", rb"\xfd7zXZ\0", UNPACK, ".xz"),
    Signature("data compressed by zstd", rb"\x28\xb5\x2f\xfd", UNPACK, ".zst"),
    Signature("data compressed by lz4", rb"\x04\x22\x4d\x18", UNPACK),
    Signature("a 7z archive", rb"7z\xbc\xaf\x27\x1c", UNPACK),
    Signature("a RAR archive", rb"Rar!\x1a\x07", UNPACK),
    Signature("a tar archive", rb"[\s\S]{257}ustar", UNPACK),
    Signature(
        "a pickle of Python",
        rb"\x80[\x04\x05]\x95[\s\S]{5}\0\0\0|\x80[\x02\x03](?:c[\w.]+\n|\x8a\x0al|[\]})]q\0)",
        NO_PICKLE,
    ),
    Signature("a .npy file", rb"\x93NUMPY", suffix=".npy"),
    Signature("Parquet", rb"PAR[1E](?!\s)", suffix=".parquet"),
    Signature("an Arrow file", rb"ARROW1\0\0|FEA1(?!\s)", suffix=".arrow"),
    Signature("a safetensors file", rb'[\s\S]{5}\0\0\0\{\s*["}]', suffix=".safetensors"),
    Signature("an HDF5 file", rb"\x89HDF\r\n\x1a\n", "Read it by h5py, and save its array by numpy.save."),
    Signature("a database of SQLite", rb"SQLite format 3\0", "Write what is in it as CSV."),
    Signature("a PDF", rb"%PDF-", CHECK_FILE),
)
WORD2VEC_BINARY = Signature("word2vec's binary format", rb"\d{1,18} \d{1,18}\n", suffix=".bin")


def kind_of(head: bytes) -> Signature | None:
    """Return the kind of file with these first bytes; None if it is unknown."""
    return next((kind for kind in KINDS if re.match(kind.begins, head)), None)


def refuse_others(path: Path, head: bytes, expected: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse an empty file, and one whose first bytes are of another kind than those of these suffixes."""
    if not head:
        fail(path, expected, "an empty file", "Get or write it again.")
    kind = kind_of(head)
    if kind is not None and kind.suffix not in suffixes:
        refuse(path, kind, expected)


def check_kind(path: Path, expected: str, suffixes: Sequence[str]) -> None:
    """Refuse an empty file, and one of another kind than those of these suffixes, all of them binary."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    refuse_others(path, head, expected, suffixes)
    if len(head) >= TEXT_BYTES and is_text(head):
        fail(path, expected, f"text: {head[:60]!r}", "Check that it is the right file, and its --format.")


def refuse(path: Path, kind: Signature, expected: str) -> NoReturn:
    """Raise a `FileError` that names the kind of the file and the remedy."""
    named = path.suffix.lower() == kind.suffix
    remedy = kind.remedy or ("Leave --format out." if named else f"Call it *{kind.suffix}, to have it read as that.")
    fail(path, expected, kind.name, remedy)


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text, rather than binary numbers."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # the last character may be cut off
            return False
    # Numbers with few different bytes may look like letters.
    return len(set(head)) > 8 and len(head) == len(head.translate(None, CONTROLS))


BROKEN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
MOST_PACKED = 1000  # most bytes per byte of a compressed file, as of zeros


def _open_zstd(file: IO[bytes]) -> io.BufferedReader:
    arrow = import_pyarrow("A file compressed by zstd")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"))


# Each returns a file with the methods of a `BufferedReader`.
OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd
}  # fmt: skip
# In UTF-16 without a mark, each letter of the languages of Western Europe has a zero beside it.
ENCODINGS = (
    ("utf-32", rb"\xff\xfe\0\0|\0\0\xfe\xff"),
    ("utf-16", rb"\xff\xfe|\xfe\xff"),
    ("utf-16-le", rb"(?:[\t\n\r -~\xa0-\xff]\0){2}"),
    ("utf-16-be", rb"(?:\0[\t\n\r -~\xa0-\xff]){2}"),
    ("utf-8", rb"[^\n]*\r[^\n]+\Z"),  # line ends of an old Mac
)


def plain_suffix(path: Path) -> str:
    """Return the suffix of a file without that of its compression, in lower case: ``.csv`` of ``A.CSV.gz``."""
    name = Path(path.stem) if is_packed(path) else path
    return name.suffix.lower()


def is_packed(path: Path) -> bool:
    """Return whether a file has a suffix of compressed files."""
    return path.suffix.lower() in OPENERS


@contextmanager
def opened(path: Path, expected: str) -> Iterator[io.BufferedReader]:
    """Open a file to read its unpacked content. Compression is detected by the first bytes, not by the name.

    A damaged file, or one of a kind that is detected by its first bytes, is a `FileError`.
    """
    plain: Any = open(path, "rb", HEAD_BYTES)  # noqa: SIM115  # closed by the next line
    with plain:
        kind = kind_of(plain.peek(HEAD_BYTES))
        unpack = None if kind is None else OPENERS.get(kind.suffix)
        with plain if unpack is None else unpack(plain) as file:
            try:
                refuse_others(path, file.peek(HEAD_BYTES), expected)
                yield file
            except (*BROKEN, OSError) as error:
                if isinstance(error, OSError) and (error.errno is not None or unpack is None):
                    raise
                fail(path, "a whole compressed file", f"{error}", "Get it again.")


@contextmanager
def opened_text(path: Path, expected: str) -> Iterator[io.BufferedReader]:
    """Open a text to read it in UTF-8, without a byte order mark, in lines that end with a newline.

    Raises:
        FileError: it is damaged, or no text.
    """
    with opened(path, expected) as file:
        head = file.peek(HEAD_BYTES)
        if head.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        encoding = next((name for name, begins in ENCODINGS if re.match(begins, head)), None)
        if encoding is not None:
            recoded: Any = _Recoded(file, path, encoding)
            file = io.BufferedReader(recoded, HEAD_BYTES)
        if b"\0" in (head := file.peek(HEAD_BYTES)):
            if re.match(WORD2VEC_BINARY.begins, head):
                refuse(path, WORD2VEC_BINARY, expected)
            fail(path, expected, "binary data", CHECK_FILE)
        yield file


def text_of(path: Path, expected: str) -> str:
    """Return the content of a text."""
    with opened_text(path, expected) as file:
        data = file.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(path, expected, f"{error}", "Save it in UTF-8.")


def bytes_at_most(path: Path) -> int:
    """Return the maximum size of a file's unpacked content in bytes."""
    with open(path, "rb") as file:
        kind = kind_of(file.peek(HEAD_BYTES))
    return path.stat().st_size * (MOST_PACKED if kind is not None and kind.suffix in OPENERS else 1)


class _Recoded(io.RawIOBase):
    """A text in UTF-8, with newlines, converted from another encoding, or from other line ends."""

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
