"""Commits of a sharded table: a commit exists if and only if every shard has it, durably.

No file lists the commits, so no list can be lost. Each shard commits by itself. A commit is identified by its name, its
training step and the number of steps of the rule. All three are the same on all ranks. Commits that only some shards
have belong to a commit that was cut short.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from embedrock.errors import ArgumentError, CorruptTableError, NewerFormatError, TableFileError, counted
from embedrock.io.vfs import OS_SYSTEM, System, opened, write_whole
from embedrock.store import folder as folders
from embedrock.store.manifest import Manifest
from embedrock.store.reading import SHARDED, what_is_at

FILE, FORMAT = SHARDED, 1
Result = TypeVar("Result")
FOLDER = re.compile(r"shard-(\d{1,6})-of-(\d{1,6})")


class ShardFolders(NamedTuple):
    """The folders of a sharded table on disk.

    Attributes:
        path: folder that contains the shards.
        ranks: number of shards.
    """

    path: str
    ranks: int

    def part(self, rank: int) -> str:
        """Return the folder of one shard, a table."""
        return os.path.join(self.path, f"shard-{rank}-of-{self.ranks}")

    @property
    def parts(self) -> list[str]:
        return [self.part(rank) for rank in range(self.ranks)]

    def publish(self) -> None:
        """Make the shards the table, durably."""
        content = json.dumps({"format": FORMAT, "ranks": self.ranks}).encode()
        draft = os.path.join(self.path, f"{FILE}.{secrets.token_hex(4)}.tmp")
        write_whole(OS_SYSTEM, draft, [content])
        os.replace(draft, os.path.join(self.path, FILE))
        OS_SYSTEM.fsync_folder(self.path)


def layout_of(path: str) -> ShardFolders | None:
    """Return the folders of the sharded table at a path; None where there is none.

    Raises:
        CorruptTableError: the file that describes the shards is damaged.
        NewerFormatError: a newer release wrote it.
    """
    file = Path(path, FILE)
    try:
        content = opened(file.read_bytes)
    except (FileNotFoundError, NotADirectoryError):
        # Folder names tell the layout: early tables of Keras workers have no file that describes them.
        names = os.listdir(path) if os.path.isdir(path) else []
        counts = [int(match[2]) for name in names if (match := FOLDER.fullmatch(name))]
        return ShardFolders(path, max(counts)) if counts else None
    try:
        described = json.loads(content)
        number, ranks = int(described["format"]), int(described.get("ranks", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        number, ranks = FORMAT, 0
    if number > FORMAT:
        raise NewerFormatError(
            f"{str(file)!r} is of format {number}, and this release reads {FORMAT}. Install another."
        )
    if not 1 <= ranks < 10**6:
        raise CorruptTableError(f"{str(file)!r} must say how many parts the table has: got {content[:80]!r}.")
    return ShardFolders(path, ranks)


def is_part_of(path: str, folder: str) -> bool:
    """Return whether a folder is that of a shard of the table at a path."""
    return os.path.dirname(folder) == os.path.abspath(path) and FOLDER.fullmatch(os.path.basename(folder)) is not None


def part_to_open(path: str, rank: int, ranks: int, label: str) -> str:
    """Return the folder of a rank's shard, and register the sharded table where there is none.

    Args:
        path: folder of the table.
        rank, ranks: rank of the shard, and number of ranks now.
        label: name of the layer, for error messages.

    Raises:
        ArgumentError: the existing table was made by another number of ranks.
        TableFileError: the path has something else, or no folder can be made in it.
    """
    found = layout_of(path)
    if found is None:
        found = make_parts(path, ranks)
    if found.ranks != ranks:
        command = f"embedrock reshard {shlex.quote(path)} --shards {ranks}"
        raise ArgumentError(
            f"the table of {label} at {path!r} must be opened by as many processes as its parts, {found.ranks}: got "
            f"{ranks}. Start {found.ranks}, or share its rows out anew: `{command}`."
        )
    return found.part(rank)


def make_parts(path: str, ranks: int) -> ShardFolders:
    """Register a sharded table in a folder, new or empty. Its parts are still missing.

    Raises:
        TableFileError: the path has something else, or no folder can be made in it.
    """
    layout, folder = ShardFolders(path, ranks), Path(path)
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
    return layout


# Commits that a shard may have more than others. Ranks wait for each other in every step, and in a commit for the
# previous one. So one rank may have made two while another writes the first in the background.
AHEAD = 2
KEEP = AHEAD + 1  # of each shard; with fewer, the newest commit that all have might be gone from one
TRIES = 20  # to read a commit before its writer drops it


class ShardCommit(NamedTuple):
    """A commit of one shard, or one that all shards have.

    Attributes:
        name: its name, also if that was released since; None if it has none, or another in each shard.
        step: training step.
        made: steps of the rule so far.
        numbers: the commit's number in each of the shards.
        files: files of the commit of one shard. A rollback makes another commit with the same files.
    """

    name: str | None
    step: int | None
    made: int
    numbers: tuple[int, ...]
    files: tuple[Any, ...] = ()


def known_as(commit: ShardCommit) -> int:
    """Return the identifier of a commit, the same in all shards: 63 bits."""
    identity = repr((commit.name, commit.step, commit.made)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little") >> 1


def marks_of(part: str) -> list[ShardCommit]:
    """Return the commits of a shard, the oldest first.

    Commits that a rollback undid are left out: later commits have fewer steps.
    """
    found, least = list[ShardCommit](), np.iinfo(np.int64).max
    try:
        marks = [_mark(manifest) for manifest in folders.manifests_of(OS_SYSTEM, part)]
    except FileNotFoundError:  # no commit yet
        return found
    for mark in reversed(marks):
        if mark.made <= least:
            found.append(mark)
            least = mark.made
    return found[::-1]


def kept_of(layout: ShardFolders) -> list[ShardCommit]:
    """Return the named commits that all shards keep, the oldest first: checkpoints may refer to them.

    Commits that a rollback undid are among them.
    """
    return _in_all([kept_in(part) for part in layout.parts])


def kept_in(part: str) -> dict[int, ShardCommit]:
    """Return the named commits that a shard keeps, by `known_as`."""
    each = folders.manifests_of(OS_SYSTEM, part)
    named = [_mark(one) for one in each if folders.name_of(OS_SYSTEM, part, one) is not None]
    return {known_as(mark): mark for mark in named}


def readable_of(layout: ShardFolders) -> list[ShardCommit]:
    """Return the commits that readers can open: those of `commits_of` and of `kept_of`."""
    found = {known_as(common): common for common in (*kept_of(layout), *commits_of(layout))}
    return sorted(found.values(), key=lambda common: common.numbers)


def _mark(manifest: Manifest) -> ShardCommit:
    (member,), (pool,) = manifest.members, manifest.pools  # groups are not sharded
    files = pool.base, pool.delta, member.history, member.count
    return ShardCommit(manifest.name, manifest.step, member.steps, (manifest.commit,), files)


def commits_of(layout: ShardFolders) -> list[ShardCommit]:
    """Return the commits of a sharded table, the oldest first."""
    return _in_all([{known_as(mark): mark for mark in marks_of(part)} for part in layout.parts])  # newest of equals


def _in_all(parts: Sequence[Mapping[int, ShardCommit]]) -> list[ShardCommit]:
    found = [
        ShardCommit(*mark[:3], sum((part[known].numbers for part in parts), ()))
        for known, mark in parts[0].items()
        if all(known in part for part in parts)
    ]
    return sorted(found, key=lambda common: common.numbers)


def last_of(layout: ShardFolders) -> ShardCommit:
    """Return the newest commit that all shards of a table have.

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
    if len(steps) == 1:  # names differ, but all are of the same step
        return ShardCommit(None, last[0].step, steps[0], sum((mark.numbers for mark in last), ()))
    raise ArgumentError(
        f"the parts of the table at {layout.path!r} must have a commit in common: they have none of the same name, and "
        f"have made {steps} steps. Save by ert.save on all ranks, and then begin again."
    )


def with_last_commit(system: System, path: str, call: Callable[[tuple[int, ...]], Result]) -> Result:
    """Call a function with the numbers of the last commit in each part of a table, sharded or not.

    If the writer drops this commit meanwhile, call it again with the next one.
    """
    for _ in range(TRIES - 1):
        numbers = _last_numbers(system, path)
        try:
            return call(numbers)
        except (ArgumentError, FileNotFoundError):
            if _last_numbers(system, path) == numbers:
                raise
    return call(_last_numbers(system, path))


def _last_numbers(system: System, path: str) -> tuple[int, ...]:
    layout = layout_of(path)
    return (folders.newest(system, path).commit,) if layout is None else last_of(layout).numbers


def agreed(path: str, parts: Sequence[Sequence[int]]) -> int:
    """Return the commit to open all shards at: the newest that all have.

    Args:
        path: folder of the table.
        parts: `known_as` of the commits of each shard, the oldest first.

    Raises:
        ArgumentError: there is none.
    """
    shared = set(parts[0]).intersection(*parts[1:])
    newest = next((one for one in reversed(parts[0]) if one in shared), None)
    if newest is None:
        has = "; ".join(f"rank {rank} {counted(len(part), 'commit')}" for rank, part in enumerate(parts))
        raise ArgumentError(
            f"the parts of the table at {path!r} must have a commit in common: got {has}, and none of all. A part may "
            "be another table's, or a new one in place of one that was lost. Put back the folder that is missing, or "
            "begin a new table."
        )
    return newest


def since(own: Sequence[ShardCommit], commit: int) -> tuple[ShardCommit, int]:
    """Find a commit of a shard by its identifier; also count later commits with other files."""
    place = max(place for place, mark in enumerate(own) if known_as(mark) == commit)
    later = [mark for mark in own[place + 1 :] if mark.files != own[place].files]
    return own[place], len(later) if own[-1].files != own[place].files else 0


def check_ahead(path: str, ahead: Sequence[int]) -> None:
    """Raise `ArgumentError` if a shard has more commits since the newest common one than a cut-short commit leaves."""
    if max(ahead) > AHEAD:
        raise ArgumentError(
            f"the parts of the table at {path!r} must have the same commits but for the last two, as all ranks commit: "
            f"got {list(ahead)} after the newest that all have, by rank. Nothing was dropped. Give the part that has "
            "too few its folder back, or drop those that are too many by `embedrock rollback` of the others."
        )
