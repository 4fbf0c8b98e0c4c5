"""`copy_table`: a copy of a table on disk, sharded or not, or of a group, while others train it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from typing import Any

from embedrock.distributed.commits import last_of, layout_of, make_parts
from embedrock.errors import TableFileError, counted
from embedrock.io.vfs import OS_SYSTEM, System
from embedrock.store import folder as folders
from embedrock.store.copying import ELSEWHERE, FolderCopy


def copy_table(source: str, target: str, system: System = OS_SYSTEM) -> dict[str, Any]:
    """Copy the last commit of a table, sharded or not, or of a group. Its writers go on meanwhile.

    A process may be killed at any moment: the target then has its earlier commit, or the new one, or no table. The same
    call continues.

    Args:
        source: its folder.
        target: a new folder, or an earlier copy.

    Returns:
        The number of the commit, and `FolderCopy.counts`.

    Raises:
        TableFileError: the target has something else, or changes of its own.
        TableLockedError: a writer has the target open.
    """
    while True:
        numbers = _newest(system, source)
        try:
            return _copied(system, source, target, numbers)
        except FileNotFoundError:  # the writer may have dropped this commit meanwhile
            if _newest(system, source) == numbers:
                raise


def _newest(system: System, source: str) -> tuple[int, ...]:
    """Return the numbers of the last commit in each part."""
    layout = layout_of(source)
    return (folders.newest(system, source).commit,) if layout is None else last_of(layout).numbers


def _copied(system: System, source: str, target: str, numbers: tuple[int, ...]) -> dict[str, Any]:
    pairs = [(source, target)] if (layout := layout_of(source)) is None else _part_pairs(layout.parts, target)
    with contextlib.ExitStack() as held:
        parts = list[FolderCopy]()
        for (its, own), number in zip(pairs, numbers, strict=True):
            parts.append(FolderCopy(system, its, own, number))
            held.callback(parts[-1].close)
        for verb in (FolderCopy.take, FolderCopy.publish, FolderCopy.tidy):  # until all parts have the new commit,
            for part in parts:  # all have the earlier one
                verb(part)
    counts = sum((part.counts for part in parts), Counter[str]())
    return {"commit": numbers[0], **{key: counts[key] for key in ("linked", "written", "there", "bytes")}}


def _part_pairs(parts: list[str], target: str) -> list[tuple[str, str]]:
    found = layout_of(target) or make_parts(target, len(parts))
    if found.ranks != len(parts):
        text = f"the table here is in {counted(found.ranks, 'part')}, and the one to copy in {len(parts)}. {ELSEWHERE}"
        raise TableFileError(errno.EEXIST, text, target)
    return [(part, os.path.join(target, os.path.basename(part))) for part in parts]
