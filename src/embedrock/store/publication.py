"""`Publication`: what the manifest of a published folder has beside its tables: source, chain, dense weights."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from embedrock.io.vfs import System
from embedrock.store.publishing import NUMBER, OBJECT, SHA, TIME, UUID, FieldCheck, check_fields, or_null, text, whole
from embedrock.store.segments import damaged, open_needed


@dataclass(frozen=True)
class SourceEntry:
    """Entry of the commit that the rows of a table, or of a part of it, were published from.

    Attributes:
        uuid: of the source's folder.
        commit: number of the commit.
        sha256: of its manifest.
        table: name of the table there, "" for a table alone.
    """

    uuid: str
    commit: int
    sha256: str
    table: str


@dataclass(frozen=True)
class DenseEntry:
    """Entry of the file of dense weights.

    Attributes:
        file: path relative to the folder.
        size: bytes of the file.
        sha256: of the file.
    """

    file: str
    size: int
    sha256: str


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of bytes in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def read_dense(system: System, folder: str, entry: DenseEntry) -> bytes:
    """Return the bytes of a file of dense weights.

    Raises:
        CorruptTableError: the file is missing, shorter or damaged.
    """
    where = f"{folder}/{entry.file}"
    with contextlib.closing(open_needed(system, where, "its dense weights")) as file:
        if file.size != entry.size:
            raise damaged(where, f"{entry.size} bytes", file.size)
        data = file.read(0, file.size)
    if sha256_of(data) != entry.sha256:
        raise damaged(where, f"bytes with SHA-256 {entry.sha256}", sha256_of(data))
    return data


@dataclass(frozen=True)
class Publication:
    """Publication of one step, beside its tables.

    Attributes:
        chain: 32 hexadecimal digits, drawn anew where the rows do not follow from those published before. "": the
            folder is trained, and has no published rows.
        began: time of the first manifest of the chain. A chain that began later is newer.
        previous: SHA-256 of the manifest before, number `parent`, in the same chain. None: the first of its chain.
        sources: by table, one for each part.
        dense: the dense weights of the same step. None: none were given.
    """

    chain: str = ""
    began: str = "1970-01-01T00:00:00Z"
    previous: str | None = None
    sources: Mapping[str, Sequence[SourceEntry]] = field(default_factory=dict)
    dense: DenseEntry | None = None


_DENSE_NAME = text(re.compile(r"dense/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII), "a path below dense/")
_SOURCE = {
    "uuid": UUID,
    "commit": NUMBER,
    "sha256": SHA,
    "table": FieldCheck(lambda value: isinstance(value, str), "a text"),
}
_DENSE = {"file": _DENSE_NAME, "size": whole(0, 2**63), "sha256": SHA}
_PARTS = FieldCheck(lambda value: isinstance(value, list) and len(value) > 0, "a list of commits")
_FIELDS = {"chain": UUID, "began": TIME, "previous": or_null(SHA), "sources": OBJECT, "dense": or_null(OBJECT)}


def parse(values: Any, where: str) -> Publication:
    """Return the publication of a manifest's field.

    Raises:
        CorruptTableError: it is malformed. The message names `where`.
    """
    check_fields(values, _FIELDS, where, "`published`")
    dense = values["dense"]
    if dense is not None:
        check_fields(dense, _DENSE, where, "`dense`")
    check_fields(values["sources"], dict.fromkeys(values["sources"], _PARTS), where, "`sources`")
    for source in chain.from_iterable(values["sources"].values()):
        check_fields(source, _SOURCE, where, "an entry of `sources`")
    sources = {name: [SourceEntry(**part) for part in parts] for name, parts in values["sources"].items()}
    return Publication(**{**values, "sources": sources, "dense": None if dense is None else DenseEntry(**dense)})
