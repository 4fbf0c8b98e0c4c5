"""Kinds of files, known by their first bytes: an error names the kind that was given in place of another one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from embedrock.cli.formats._source import fail

HEAD_BYTES = 1 << 16  # of a file, that are looked at
TEXT_BYTES = 64  # numbers hardly ever look like so much text
BOM_OR_BLANKS = rb"(?:\xef\xbb\xbf)?\s*"
CONTROLS = bytes({*range(32), 127} - set(b"\t\n\v\f\r\x1b"))
GET_AGAIN = "Servers answer so where they do not give the file: get it again."
UNPACK = "Unpack it."
AS_CSV = "Save the sheet as CSV, and take that."
NO_PICKLE = "Nothing is unpickled: save its array by numpy.save or as safetensors, and take that."
CHECK = "Check that it is the right file."


class Signature(NamedTuple):
    """How a kind of file begins.

    Attributes:
        name: for people.
        begins: a pattern of its first bytes.
        remedy: what to do with it.
        suffix: of such files, where something reads them.
    """

    name: str
    begins: bytes
    remedy: str = ""
    suffix: str = ""


ZIP = rb"PK\x03\x04[\s\S]{26}"  # then the name of the first member
KINDS = (
    Signature(
        "an HTML page", BOM_OR_BLANKS + rb"<(?i:!doctype\s+html|(?:html|head|body)(?=[\s>])(?!>? [-+.\d]))", GET_AGAIN
    ),
    Signature("XML", BOM_OR_BLANKS + rb"<\?xml\s", GET_AGAIN),
    Signature(
        "JSON",
        BOM_OR_BLANKS + rb'\[?\s*\{\s*"[^"\n]*"\s*:',
        "Take the file itself, or write what is in it as CSV.",
        ".json",
    ),
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
    Signature("a PDF", rb"%PDF-", CHECK),
)
WORD2VEC_BINARY = Signature("word2vec's binary format", rb"\d{1,18} \d{1,18}\n", suffix=".bin")


def kind_of(head: bytes) -> Signature | None:
    """Return what begins so; None where nobody knows."""
    return next((kind for kind in KINDS if re.match(kind.begins, head)), None)


def refuse_others(path: Path, head: bytes, expected: str, suffixes: Sequence[str] = ()) -> None:
    """Refuse a file that is another, by its first bytes, than one of those that have these suffixes.

    Raises:
        FileError: it is another, or empty.
    """
    if not head:
        fail(path, expected, "an empty file", "Get or write it again.")
    kind = kind_of(head)
    if kind is not None and kind.suffix not in suffixes:
        refuse(path, kind, expected)


def check_kind(path: Path, expected: str, suffixes: Sequence[str]) -> None:
    """Refuse a file that is another than of the kinds that have these suffixes, all of them binary.

    Raises:
        FileError: it is another, or empty.
    """
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    refuse_others(path, head, expected, suffixes)
    if len(head) >= TEXT_BYTES and is_text(head):
        fail(path, expected, f"text: {head[:60]!r}", "Check that it is the right file, and its --format.")


def refuse(path: Path, kind: Signature, expected: str) -> NoReturn:
    """Raise a `FileError` that says what a file is, and what to do with it."""
    named = path.suffix.lower() == kind.suffix
    remedy = kind.remedy or ("Leave --format out." if named else f"Call it *{kind.suffix}, to have it read as that.")
    fail(path, expected, kind.name, remedy)


def refuse_binary(path: Path, head: bytes, expected: str) -> NoReturn:
    """Raise a `FileError` about bytes that are no text."""
    if re.match(WORD2VEC_BINARY.begins, head):
        refuse(path, WORD2VEC_BINARY, expected)
    fail(path, expected, "binary data", CHECK)


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text, and no numbers in binary."""
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # the last letter may be cut off
            return False
    return len(head) == len(head.translate(None, CONTROLS))
