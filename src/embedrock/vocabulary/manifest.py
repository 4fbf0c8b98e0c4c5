"""`VocabularyManifest`: the content of one commit of a vocabulary. Parsing trusts no input."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from embedrock.store import publishing
from embedrock.store.publishing import COMMIT, LIST, check_fields, text, whole
from embedrock.store.reading import VOCABULARY
from embedrock.store.segments import CRC_BYTES, HEADER_BYTES, damaged
from embedrock.vocabulary.blocks import HASHED, PAGE_BYTES
from embedrock.vocabulary.shape import ALL_BYTES, Shape

FORMAT = 3
STEPS_FORMAT, SHAPE_FORMAT = 2, 3  # first formats with steps, and with shapes of files
MOST_STEPS = 1000
MOST_STRINGS = 2**32 - 1  # strings of a vocabulary: an id is one word of an entry
MOST_BYTES = 1 << 20  # bytes of a string
MOST_PAGES = 1 << 39
INDEX_BYTES = 16  # bytes per block
_SYMBOLS = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FILE = re.compile(r"runs/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class StringFile:
    """Entry of a file of strings in a manifest.

    Attributes:
        file: path relative to the vocabulary's folder.
        size: bytes of the whole file.
        salt: CRC-32 of its header, which all seals of its pages include.
        first: id of its first string.
        count: number of strings.
        string_blocks, string_pages: blocks and pages in order of ids.
        hash_blocks, hash_pages: blocks and pages in order of hashes.
        text_bytes: bytes of all strings, at most.
        longest: bytes of a string, at most.
        symbols: the bytes that strings may have, as in `Shape`.
    """

    file: str
    size: int
    salt: int
    first: int
    count: int
    string_blocks: int
    string_pages: int
    hash_blocks: int
    hash_pages: int
    text_bytes: int
    longest: int
    symbols: str

    @property
    def pages(self) -> int:
        return self.string_pages + self.hash_pages + self.index_pages

    @property
    def index_pages(self) -> int:
        return -(-INDEX_BYTES * (self.string_blocks + self.hash_blocks) // PAGE_BYTES)

    @property
    def shape(self) -> Shape:
        return Shape(self.count, self.text_bytes, self.longest, self.symbols)


@dataclass(frozen=True)
class VocabularyManifest(publishing.BaseManifest):
    """Manifest of one commit of a vocabulary.

    Attributes:
        time: ISO 8601, UTC.
        salt: key of the hashes: two random words of 64 bits.
        count: number of strings.
        runs: files in order of their ids, without gaps.
        steps: pairs (step, number of strings), ascending: a table's commit of the step uses that many strings.
    """

    time: str
    salt: tuple[int, int]
    count: int
    runs: tuple[StringFile, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    name: ClassVar[None] = None  # only commits of tables have tags
    format: ClassVar[int] = FORMAT  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def files(self) -> list[str]:
        return [entry.file for entry in self.runs]

    @classmethod
    def parse(cls, data: bytes, where: str) -> VocabularyManifest:
        """Return the manifest of a file's bytes. Malformed bytes cause no large allocation.

        Raises:
            CorruptTableError: the bytes differ from all output of `to_bytes`. The message names `where`.
            NewerFormatError: the format is newer.
        """
        version, body = publishing.parse(data, where, range(1, FORMAT + 1))
        check_fields(body, _FIELDS | ({"steps": LIST} if version >= STEPS_FORMAT else {}), where, "the manifest")
        if "steps" in body:
            body["steps"] = _steps(body["steps"], body["count"], where, 1 if version < SHAPE_FORMAT else 0)
        if len(body["salt"]) != 2 or not all(_WORD.holds(word) for word in body["salt"]):
            raise damaged(where, "`salt` of two words of 64 bits", repr(body["salt"])[:80])
        body["salt"] = tuple(body["salt"])
        body["runs"] = tuple(_entry(item, version, where) for item in body["runs"])
        manifest = cls(**body)
        _check_runs(manifest, where)
        return manifest


def _steps(pairs: list[Any], strings: int, where: str, least: int) -> tuple[tuple[int, int], ...]:
    are_pairs = all(isinstance(pair, list) and len(pair) == 2 and all(map(_STEP.holds, pair)) for pair in pairs)
    found = tuple((pair[0], pair[1]) for pair in pairs) if are_pairs else ()
    known = [count for _, count in found]
    ascends = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(found))
    bounded = all(0 <= count <= strings for count in known)
    if not (are_pairs and least <= len(found) <= MOST_STEPS and ascends and bounded):
        raise damaged(where, f"`steps` that ascend, each with up to {strings} strings", repr(pairs)[:80])
    return found


def _entry(values: Any, version: int, where: str) -> StringFile:
    has_shape = version >= SHAPE_FORMAT
    check_fields(values, _ENTRY | (_SHAPE if has_shape else {}), where, "an entry of `runs`")
    words = values["hash_blocks"] + HASHED * values["count"]
    room = max(0, PAGE_BYTES * values["hash_pages"] - 4 * words)
    # The shape of an old file, whose entry has none, allows all strings.
    shape = {} if has_shape else {"text_bytes": room, "longest": min(room, MOST_BYTES), "symbols": ALL_BYTES}
    entry = StringFile(**values, **shape)
    size = HEADER_BYTES + entry.pages * (PAGE_BYTES + CRC_BYTES)
    if entry.size != size:
        raise damaged(where, f"{entry.file} of {size} bytes, as its pages take", entry.size)
    for blocks, pages in ((entry.string_blocks, entry.string_pages), (entry.hash_blocks, entry.hash_pages)):
        if not blocks <= min(pages, entry.count):
            raise damaged(where, f"{entry.file} to have no more blocks than pages and strings", blocks)
    if not entry.longest <= entry.text_bytes <= room:
        raise damaged(where, f"{entry.file} to have strings of at most {room} bytes", entry.text_bytes)
    return entry


def _check_runs(manifest: VocabularyManifest, where: str) -> None:
    first = 0
    for entry in manifest.runs:
        if entry.first != first:
            raise damaged(where, f"{entry.file} to begin with id {first}", entry.first)
        first += entry.count
    if first != manifest.count:
        raise damaged(where, f"`count` {first}, as its files say", manifest.count)
    if len(set(manifest.files)) != len(manifest.runs):
        raise damaged(where, "each file once", "one of them again")


_WORD, _STEP = whole(0, 2**64), whole(-(2**63), 2**63)
_FIELDS = COMMIT | {"salt": LIST, "count": whole(0, MOST_STRINGS + 1), "runs": LIST}
_ENTRY = {
    "file": text(_FILE, "a path below runs/"),
    "size": whole(0, 2**63),
    "salt": whole(0, 2**32),
    "first": whole(0, MOST_STRINGS),
    "count": whole(1, MOST_STRINGS + 1),
    **dict.fromkeys(("string_blocks", "string_pages", "hash_blocks", "hash_pages"), whole(1, MOST_PAGES)),
}
_SHAPE = {
    "text_bytes": whole(0, 2**63),
    "longest": whole(0, MOST_BYTES + 1),
    "symbols": text(_SYMBOLS, "64 hexadecimal digits"),
}


KIND = publishing.FolderKind(
    "vocabulary", 'er.Vocabulary(path, mode="r")', VOCABULARY, ("runs",), VocabularyManifest.parse
)
