"""Verification of all checksums of all commits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable
from contextlib import closing
from typing import NamedTuple

import numpy as np

from embedrock.errors import CorruptTableError, EmbedrockError, counted
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.store import change_lists
from embedrock.store import manifest as manifests
from embedrock.store.base import Base
from embedrock.store.folder import newest_readable, strange_files
from embedrock.store.history import read_history
from embedrock.store.manifest import StoreEntry
from embedrock.store.publication import read_dense
from embedrock.store.reading import NAMED, marks_of, unseal
from embedrock.store.segments import Segment, SegmentEntry

PIECE_BYTES = 4 << 20


class Verification(NamedTuple):
    """Result of a verification.

    Attributes:
        problems: a sentence per damaged file, with its name and rows.
        newest_good: number of the newest intact commit, or None.
        files: number of files read.
        records: number of records read.
        strange: unknown files in the folder. No commit names them, and no writer removes them: users may own them.
    """

    problems: list[str]
    newest_good: int | None
    files: int
    records: int
    strange: list[str]


def verify(system: System, folder: str) -> Verification:
    """Read all files of all commits of a table, and check every checksum.

    Commits that a writer drops meanwhile are left out. Commits made meanwhile may be left out too.
    """
    return verify_commits(folder, system)[0]


def verify_commits(folder: str, system: System = OS_SYSTEM) -> tuple[Verification, list[int]]:
    """Verify a table. Return also the numbers of its good commits."""
    problems: dict[Hashable, list[str]] = {}
    needs: dict[int, set[Hashable]] = {}
    records, found = 0, set[int]()
    while not found and (numbers := manifests.numbers(system, folder)):
        for number in numbers:
            needs[number], count = _check_commit(system, folder, number, problems)
            records += count
        found = needs.keys() & set(manifests.numbers(system, folder))
    needed = set[Hashable]().union(*(needs[number] for number in found))
    of_lists = _problems_of_lists(system, folder)
    bad = [part for part, texts in problems.items() if texts and part in needed]
    good = [number for number in found if needs[number].isdisjoint(bad)]
    messages = [*(text for part in bad for text in problems[part]), *of_lists]
    whole = Verification(messages, max(good, default=None), len(problems), records, strange_files(system, folder))
    return whole, good


def _problems_of_lists(system: System, folder: str) -> list[str]:
    """Return the problems of lists of changes. No commit needs them."""
    try:
        newest = newest_readable(system, folder)  # a list of a later commit is on its way, or was left by a crash
    except (EmbedrockError, OSError, IndexError):
        return []
    files = change_lists.files_in(system, folder, newest.uuid)
    files = [file for file in files if file.commit <= newest.commit]
    found = [(file, _problems_of(functools.partial(change_lists.read, system, folder, file))) for file in files]
    # A writer may have removed a file meanwhile.
    return [text for file, texts in found for text in texts if system.exists(f"{folder}/{file.name}")]


def _check_commit(
    system: System, folder: str, number: int, problems: dict[Hashable, list[str]]
) -> tuple[set[Hashable], int]:
    """Add the problems of a commit's files to `problems`, except of files checked before.

    Keys are entries of a manifest, because another commit may describe the same file differently.

    Returns:
        the entries of all its files, and the number of records read.
    """
    try:
        manifest = manifests.read(system, folder, number)
    except (EmbedrockError, OSError) as error:
        problems[f"commit {number}"] = [str(error)]
        return {f"commit {number}"}, 0
    checks: dict[Hashable, Callable[[], object]] = {
        entry: functools.partial(_check_segment, system, folder, entry, content)
        for content in manifest.pools
        for entry in (*content.base, *content.delta)
    }
    checks |= {one: functools.partial(read_history, system, folder, one, manifest.uuid) for one in manifest.histories}
    if (dense := manifest.published.dense) is not None:
        checks[dense] = functools.partial(read_dense, system, folder, dense)
    new = [entry for entry in checks if entry not in problems]
    problems |= {entry: _problems_of(checks[entry]) for entry in new}
    return set(checks), sum(entry.count for entry in new if isinstance(entry, SegmentEntry))


def _problems_of(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except (EmbedrockError, OSError) as error:
        return [str(error)]
    return []


def _check_segment(system: System, folder: str, entry: SegmentEntry, content: StoreEntry) -> None:
    with closing(Segment.open(system, folder, entry, content.uuid, content.record_bytes, 0)) as segment:
        check_seals(segment)


def check_seals(segment: Segment) -> None:
    """Raise `CorruptTableError` unless all records of an open segment fit their checksums."""
    bad = _bad_ids(segment)
    if len(bad):
        named = ", ".join(map(str, bad[:NAMED].tolist())) + (", ..." if len(bad) > NAMED else "")
        raise CorruptTableError(
            f"{segment.file.path} is damaged: the checksums of {len(bad)} of {counted(segment.count, 'record')} do not "
            f"fit, of ids {named}."
        )


def _bad_ids(segment: Segment) -> np.ndarray:
    ids_of, bad = _ids_of(segment), [np.empty(0, np.int64)]
    piece = max(1, PIECE_BYTES // segment.stride)
    records = np.empty((min(piece, segment.count), segment.record_bytes), np.uint8)
    for start in range(0, segment.count, piece):
        count = min(piece, segment.count - start)
        data = segment.file.read(segment.first + start * segment.stride, count * segment.stride)
        ids, slots = ids_of(start, start + count), np.arange(count)
        marks = marks_of([segment], np.array([segment.number]), segment.locations(start, count))
        bad.append(ids[unseal(np.frombuffer(data, np.uint8), slots * segment.stride, ids, marks, records, slots)])
    return np.concatenate(bad)


def _ids_of(segment: Segment) -> Callable[[int, int], np.ndarray]:
    if segment.kind != "ids":
        return functools.partial(Base([copy.copy(segment)]).ids_of, 0)  # its store keeps the index that it has
    index = segment.index()
    return lambda start, stop: index[start:stop].copy()
