"""Where the parts of a table on disk lie: ``<path>/shard-<rank>-of-<ranks>``, tables; ``<path>/SHARDED`` says how many.

That file is replaced by renaming another, and nothing else is ever changed in place. So parts of another number of
ranks, beside those that it names, are of a `reshard` that was cut short, and belong to nothing.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shlex
from pathlib import Path
from typing import NamedTuple

from embedrock.errors import ArgumentError, CorruptTableError, NewerFormatError, TableFileError
from embedrock.machine.vfs import OS_SYSTEM, opened, write_whole
from embedrock.store.nearby import SHARDED, what_is_at

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
