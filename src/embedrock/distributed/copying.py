"""`copy_table`: a copy of a table on disk, sharded or not, or of a group, while others train it.

Files become hard links where possible, else their bytes are copied. Files of commits never change. So a second copy to
the same folder takes new files only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from typing import Any

from embedrock.distributed.commits import layout_of, make_parts, with_last_commit
from embedrock.errors import TableFileError, counted
from embedrock.io.vfs import OS_SYSTEM, File, System, open_file, read_whole, retried, write_whole
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.manifest import TABLE
from embedrock.store.publishing import MAX_BYTES
from embedrock.store.segments import HEADER_BYTES, open_needed

PIECE_BYTES = 8 << 20
# Two file systems, one without links, another user's file, too many links; or the writer has removed this name. The
# bytes of a removed file are there while it is open.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)
ELSEWHERE = "Copy to another folder, or move this one away"
COUNTS = ("linked", "written", "there", "bytes")  # files that came in these ways, and the bytes written


def copy_table(source: str, target: str, system: System = OS_SYSTEM) -> dict[str, Any]:
    """Copy the last commit of a table, sharded or not, or of a group. Its writers go on meanwhile.

    A process may be killed at any moment: the target then has its earlier commit, or the new one, or no table. The same
    call continues.

    Args:
        source: its folder.
        target: a new folder, or an earlier copy.

    Returns:
        The number of the commit, and `COUNTS`.

    Raises:
        TableFileError: the target has something else, or changes of its own.
        TableLockedError: a writer has the target open.
    """
    return with_last_commit(system, source, lambda numbers: _copied(system, source, target, numbers))


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
    return {"commit": numbers[0], **{key: counts[key] for key in COUNTS}}


def _part_pairs(parts: list[str], target: str) -> list[tuple[str, str]]:
    found = layout_of(target) or make_parts(target, len(parts))
    if found.ranks != len(parts):
        text = f"the table here is in {counted(found.ranks, 'part')}, and the one to copy in {len(parts)}. {ELSEWHERE}"
        raise TableFileError(errno.EEXIST, text, target)
    return [(part, os.path.join(target, os.path.basename(part))) for part in parts]


class FolderCopy:
    """Copy of one commit of a folder. Callers `take`, then `publish`, then `tidy`: parts of a table do each together.

    It holds the files of the commit open, so that a writer may remove them, and the target locked.

    Raises:
        MissingFileError: the commit is incomplete. Its writer may have dropped it meanwhile.
    """

    def __init__(self, system: System, source: str, target: str, commit: int) -> None:
        self._system, self._source, self._target, self.counts = system, source, target, Counter[str]()
        with contextlib.ExitStack() as held:
            self._manifest = manifests.read(system, source, commit)
            self._bytes = read_whole(system, manifests.path_of(source, commit), MAX_BYTES)
            self._files = dict[str, File]()
            for name in self._manifest.files:
                self._files[name] = open_needed(system, folders.join(source, name), "it", direct=True)
                held.callback(self._files[name].close)
            if not self._commits():
                folders.make(system, target)
            held.callback(folders.unlock, system, folders.lock(system, target, locked=False))
            self._check_target()
            folders.make_folders(system, target)
            self.close = held.pop_all().close

    def _commits(self) -> list[int]:
        inside = folders.join(self._target, TABLE.inside)
        return manifests.numbers(self._system, self._target) if self._system.exists(inside) else []

    def _check_target(self) -> None:
        """Raise `TableFileError` unless the newest commit of the target is a copy of this or an earlier one."""
        number, commit = max(self._commits(), default=-1), self._manifest.commit
        if number < 0:
            return
        found = manifests.read(self._system, self._target, number)
        if found.uuid != self._manifest.uuid:
            text = f"another table lies here, {found.uuid}, and not a copy of {self._source!r}, {self._manifest.uuid}"
        elif not self._system.exists(folders.copied(self._target, number)):
            text = f"`embedrock copy` did not make commit {number} here: this table has changes of its own"
        elif number > commit or (number == commit and found != self._manifest):
            text = f"{self._source!r} has another history than commit {number} here: its last commit is {commit}"
        else:
            return
        raise TableFileError(errno.EEXIST, f"{text}. {ELSEWHERE}", self._target)

    def take(self) -> None:
        """Bring all files to the target, durably. Files that a killed copy has left there are used."""
        parents = {os.path.dirname(name) for name in self._files}
        for parent in sorted(parents):
            if not self._system.exists(folders.join(self._target, parent)):
                retried(self._system.mkdir, folders.join(self._target, parent))
        for name, file in self._files.items():
            self.counts[self._taken(name, file, folders.join(self._target, name))] += 1
        for parent in sorted(parents | {parent.partition("/")[0] for parent in parents}):
            retried(self._system.fsync_folder, folders.join(self._target, parent))

    def _taken(self, name: str, file: File, path: str) -> str:
        """Bring a file to a path, and return how."""
        if self._system.exists(path):
            with contextlib.closing(open_file(self._system, path)) as there:
                if (there.size, _start(there)) == (file.size, _start(file)):  # a header has random bytes
                    return "there"
            text = f"this is another file than that of {self._source!r} under the same name. {ELSEWHERE}"
            raise TableFileError(errno.EEXIST, text, path)
        try:
            retried(self._system.link, folders.join(self._source, name), path)
            return "linked"
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
        starts = range(0, file.size, PIECE_BYTES)
        pieces = (file.read(start, min(PIECE_BYTES, file.size - start)) for start in starts)
        draft = folders.join(self._target, f"manifest/.{self._manifest.commit:010d}.tmp")  # writers remove an old one
        write_whole(self._system, draft, pieces, link_to=path)
        self.counts["bytes"] += file.size
        return "written"

    def publish(self) -> None:
        """Make the commit the newest of the target, with the bytes of its manifest in the source."""
        commit = self._manifest.commit
        if self._system.exists(manifests.path_of(self._target, commit)):
            return
        if not self._system.exists(mark := folders.copied(self._target, commit)):
            write_whole(self._system, mark, [])
        TABLE.publish(self._system, self._target, self._manifest, self._bytes)

    def tidy(self) -> None:
        """Drop earlier commits of the target, and files that only they need: these may have forgotten rows."""
        for number in self._commits():
            if number != self._manifest.commit:
                self._system.unlink(manifests.path_of(self._target, number))
        retried(self._system.fsync_folder, folders.join(self._target, TABLE.inside))
        folders.remove_orphans(self._system, self._target, self._manifest.uuid, TABLE)


def _start(file: File) -> bytes:
    return file.read(0, min(HEADER_BYTES, file.size))
