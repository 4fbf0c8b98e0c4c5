"""The commits of a table in parts: one exists if and only if every part has it, durably.

There is no file that lists them, so none can be lost. Each part commits by itself; a commit is told by its name, its
step and the steps that the rule has made, which are the same on all ranks. What a part has and others have not belongs
to a commit that was cut short.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from embedrock.errors import ArgumentError, CorruptTableError, NewerFormatError, TableFileError, counted
from embedrock.io.vfs import OS_SYSTEM, opened, write_whole
from embedrock.store import folder as folders
from embedrock.store.manifest import AnyManifest, Manifest
from embedrock.store.reading import SHARDED, what_is_at

FILE, FORMAT = SHARDED, 1
FOLDER = re.compile(r"shard-(\d{1,6})-of-(\d{1,6})")


class ShardFolders(NamedTuple):
    """A table on disk in parts.

    Attributes:
        path: of the folder that they are in.
        ranks: how many there are.
    """

    path: str
    ranks: int

    def part(self, rank: int) -> str:
        """Return the folder of one part, a table."""
        return os.path.join(self.path, f"shard-{rank}-of-{self.ranks}")

    @property
    def parts(self) -> list[str]:
        """The folders of all parts, by rank."""
        return [self.part(rank) for rank in range(self.ranks)]

    def publish(self) -> None:
        """Let the parts be the table from now on, durably."""
        content = json.dumps({"format": FORMAT, "ranks": self.ranks}).encode()
        draft = os.path.join(self.path, f"{FILE}.{secrets.token_hex(4)}.tmp")
        write_whole(OS_SYSTEM, draft, content)
        os.replace(draft, os.path.join(self.path, FILE))
        OS_SYSTEM.fsync_folder(self.path)


def layout_of(path: str) -> ShardFolders | None:
    """Return the table in parts at a path; None where there is none.

    Raises:
        CorruptTableError: the file that says so is damaged.
        NewerFormatError: a newer release wrote it.
    """
    file = Path(path, FILE)
    try:
        content = opened(file.read_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return _of_names(path)
    try:
        told = json.loads(content)
        number, ranks = int(told["format"]), int(told.get("ranks", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        number, ranks = FORMAT, 0
    if number > FORMAT:
        raise NewerFormatError(
            f"{str(file)!r} is of format {number}, and this release reads {FORMAT}. Install another."
        )
    if not 1 <= ranks < 10**6:
        raise CorruptTableError(f"{str(file)!r} must say how many parts the table has: got {content[:80]!r}.")
    return ShardFolders(path, ranks)


def _of_names(path: str) -> ShardFolders | None:
    """Return what the names in a folder tell: that of Keras' workers has had no file, before there was one."""
    names = os.listdir(path) if os.path.isdir(path) else []
    counts = [int(match[2]) for name in names if (match := FOLDER.fullmatch(name))]
    return ShardFolders(path, max(counts)) if counts else None


def is_part_of(path: str, folder: str) -> bool:
    """Return whether a folder is that of a part of the table at a path."""
    return os.path.dirname(folder) == os.path.abspath(path) and FOLDER.fullmatch(os.path.basename(folder)) is not None


def part_to_open(path: str, rank: int, ranks: int, label: str) -> str:
    """Return the folder of a rank's part of a table, which is made known where there is none.

    Args:
        path: of the table.
        rank, ranks: whose part, and how many there are now.
        label: of the layer, for error messages.

    Raises:
        ArgumentError: the table there was made by another number of ranks.
        TableFileError: there is something else, or no folder to make it in.
    """
    found = layout_of(path)
    if found is None:
        found = ShardFolders(path, ranks)
        _make(found)
    if found.ranks != ranks:
        command = f"embedrock reshard {shlex.quote(path)} --shards {ranks}"
        raise ArgumentError(
            f"the table of {label} at {path!r} must be opened by as many processes as its parts, {found.ranks}: got "
            f"{ranks}. Start {found.ranks}, or share its rows out anew: `{command}`."
        )
    return found.part(rank)


def _make(layout: ShardFolders) -> None:
    folder = Path(layout.path)
    try:
        folder.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        missing = "a table needs a folder to lie in. Make this one first"
        raise TableFileError(errno.ENOENT, missing, str(folder.parent)) from error
    others = [name for name in os.listdir(layout.path) if not name.startswith(FILE) and not FOLDER.fullmatch(name)]
    if others:
        held = what_is_at(OS_SYSTEM, layout.path)
        text = f"parts of a table go to a folder of their own: this one has {others[0]!r}. {held and f'{held}. '}"
        text += "For a new table choose another path"
        raise TableFileError(errno.EEXIST, text, layout.path)
    layout.publish()


# Commits that a part may have more than others. Ranks wait for each other in every step, and a commit for the one
# before: so one rank may have made two while another writes the first of them in the background.
AHEAD = 2
KEEP = AHEAD + 1  # of each part, or the newest that all have might be gone from one of them


class ShardCommit(NamedTuple):
    """A commit of one part.

    Attributes:
        number: of it there.
        name: that it was given, also where that was released.
        step: of the training.
        made: steps of the rule so far.
        files: that it is made of: who goes back to it makes another commit of the same ones.
    """

    number: int
    name: str | None
    step: int | None
    made: int
    files: tuple[Any, ...]

    @property
    def known_as(self) -> int:
        """What tells it from others, the same in all parts: 63 bits."""
        return _known_as(self.name, self.step, self.made)


class CommonCommit(NamedTuple):
    """A commit that all parts have.

    Attributes:
        name: what it is called; None where it has no name, or another in each.
        step: of the training.
        made: steps of the rule so far.
        numbers: of the commit in each part.
    """

    name: str | None
    step: int | None
    made: int
    numbers: tuple[int, ...]

    @property
    def known_as(self) -> int:
        """See `ShardCommit.known_as`."""
        return _known_as(self.name, self.step, self.made)


def _known_as(name: str | None, step: int | None, made: int) -> int:
    told = repr((name, step, made)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little") >> 1


def marks_of(part: str) -> list[ShardCommit]:
    """Return the commits of a part, the oldest first, but for those that were gone back from: later ones made less."""
    found, least = list[ShardCommit](), np.iinfo(np.int64).max
    try:
        marks = [_mark(manifest) for manifest in folders.manifests_of(OS_SYSTEM, part)]
    except FileNotFoundError:  # nobody has made it yet
        return found
    for mark in reversed(marks):
        if mark.made <= least:
            found.append(mark)
            least = mark.made
    return found[::-1]


def kept_of(layout: ShardFolders) -> list[CommonCommit]:
    """Return the commits that all parts of a table keep under a name, the oldest first: checkpoints may refer to them.

    Those that were gone back from are among them.
    """
    return _in_all([kept_in(part) for part in layout.parts])


def kept_in(part: str) -> dict[int, ShardCommit]:
    """Return the commits that a part keeps under a name, by `ShardCommit.known_as`."""
    each = folders.manifests_of(OS_SYSTEM, part)
    named = [_mark(one) for one in each if folders.name_of(OS_SYSTEM, part, one) is not None]
    return {mark.known_as: mark for mark in named}


def readable_of(layout: ShardFolders) -> list[CommonCommit]:
    """Return the commits that the table can be read as of: those of `commits_of`, and of `kept_of`."""
    found = {common.known_as: common for common in (*kept_of(layout), *commits_of(layout))}
    return sorted(found.values(), key=lambda common: common.numbers)


def _mark(manifest: AnyManifest) -> ShardCommit:
    assert isinstance(manifest, Manifest)  # groups are not shared out
    files = manifest.base, manifest.delta, manifest.history, manifest.count
    return ShardCommit(manifest.commit, manifest.name, manifest.step, manifest.steps, files)


def newest_of_all(parts: Sequence[Sequence[int]]) -> int | None:
    """Return the newest commit that all parts have, of what each has, the oldest first: see `ShardCommit.known_as`."""
    shared = set(parts[0]).intersection(*parts[1:])
    return next((one for one in reversed(parts[0]) if one in shared), None)


def commits_of(layout: ShardFolders) -> list[CommonCommit]:
    """Return the commits of a table in parts, the oldest first."""
    return _in_all([{mark.known_as: mark for mark in marks_of(part)} for part in layout.parts])  # of equal the newest


def _in_all(parts: Sequence[Mapping[int, ShardCommit]]) -> list[CommonCommit]:
    found = [
        CommonCommit(mark.name, mark.step, mark.made, tuple(part[known].number for part in parts))
        for known, mark in parts[0].items()
        if all(known in part for part in parts)
    ]
    return sorted(found, key=lambda common: common.numbers)


def last_of(layout: ShardFolders) -> CommonCommit:
    """Return the newest commit that all parts of a table have.

    Raises:
        ArgumentError: there is none, or only one from before the first step.
    """
    marks = {part: marks_of(part) for part in layout.parts}
    if unmade := [os.path.basename(part) for part, its_marks in marks.items() if not its_marks]:
        raise ArgumentError(
            f"the table in parts at {layout.path!r} must have a commit in each of them: got none in "
            f"{', '.join(unmade)}. Where its ranks were ended as they made it, start them again, and they make what is "
            "missing; a folder that was lost has to be put back."
        )
    last = [its_marks[-1] for its_marks in marks.values()]
    steps = sorted({mark.made for mark in last})
    common = commits_of(layout)
    if common and (common[-1].made or steps == [0]):
        return common[-1]
    if len(steps) == 1:  # what they are called tells them apart, but they are as of the same step
        return CommonCommit(None, last[0].step, steps[0], tuple(mark.number for mark in last))
    raise ArgumentError(
        f"the parts of the table at {layout.path!r} must have a commit in common: they have none of the same name, and "
        f"have made {steps} steps. Save by ert.save on all ranks, and then begin again."
    )


def agreed(path: str, parts: Sequence[Sequence[int]]) -> int:
    """Return the commit that parts are opened at, which is the newest that all have: see `newest_of_all`.

    Raises:
        ArgumentError: there is none.
    """
    newest = newest_of_all(parts)
    if newest is None:
        has = "; ".join(f"rank {rank} {counted(len(part), 'commit')}" for rank, part in enumerate(parts))
        raise ArgumentError(
            f"the parts of the table at {path!r} must have a commit in common: got {has}, and none of all. A part may "
            "be another table's, or a new one in place of one that was lost. Put back the folder that is missing, or "
            "begin a new table."
        )
    return newest


def since(own: Sequence[ShardCommit], commit: int) -> tuple[ShardCommit, int]:
    """Return a commit of a part by what it is known as, and how many others it has made since that are not the same."""
    place = max(place for place, mark in enumerate(own) if mark.known_as == commit)
    later = [mark for mark in own[place + 1 :] if mark.files != own[place].files]
    return own[place], len(later) if own[-1].files != own[place].files else 0


def check_ahead(path: str, ahead: Sequence[int]) -> None:
    """Raise `ArgumentError` where a part has more since the newest commit of all than one that was cut short leaves."""
    if max(ahead) > AHEAD:
        raise ArgumentError(
            f"the parts of the table at {path!r} must have the same commits but for the last two, as all ranks commit: "
            f"got {list(ahead)} after the newest that all have, by rank. Nothing was dropped. Give the part that has "
            "too few its folder back, or drop those that are too many by `embedrock rollback` of the others."
        )
