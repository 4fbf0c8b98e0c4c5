"""Copies of folders beside their writers: files by hard links where possible, else their bytes, the manifest last.

Files of commits never change. So a second copy to the same folder takes new files only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter

from embedrock.errors import TableFileError
from embedrock.io.vfs import File, System, open_file, read_whole, retried, write_whole
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.publishing import MAX_BYTES
from embedrock.store.segments import HEADER_BYTES, open_needed

PIECE_BYTES = 8 << 20
# Two file systems, one without links, another user's file, too many links; or the writer has removed this name. The
# bytes of a removed file are there while it is open.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT)
ELSEWHERE = "Copy to another folder, or move this one away"


class FolderCopy:
    """Copy of one commit of a folder. Callers `take`, then `publish`, then `tidy`: parts of a table do each together.

    It holds the files of the commit open. So a writer may remove them meanwhile.

    Args:
        source: a folder with commits. Nothing is written to it.
        target: a folder without a commit, or with an earlier copy. It is locked until `close`.
        commit: number of the commit.

    Attributes:
        manifest: of the commit.
        counts: files that were "linked", "written" or "there" already, and the "bytes" written.

    Raises:
        TableFileError: the target has something else, or changes of its own.
        TableLockedError: a writer has the target open.
        MissingFileError: the commit is incomplete. Its writer may have dropped it meanwhile.
    """

    def __init__(self, system: System, source: str, target: str, commit: int) -> None:
        self._system, self._source, self._target, self.counts = system, source, target, Counter[str]()
        self._where = manifests.path_of(target, commit)
        self._draft = folders.join(target, f"manifest/.{commit:010d}.tmp")  # writers remove one that is left behind
        with contextlib.ExitStack() as held:
            self.manifest = manifests.read(system, source, commit)
            self._bytes = read_whole(system, manifests.path_of(source, commit), MAX_BYTES)
            self._files = dict[str, File]()
            for name in self.manifest.files:
                self._files[name] = open_needed(system, folders.join(source, name), "it", direct=True)
                held.callback(self._files[name].close)
            if not self._commits():
                folders.make(system, target)
            held.callback(folders.unlock, system, folders.lock(system, target, locked=False))
            self._check_target()
            folders.make_folders(system, target)
            self.close = held.pop_all().close

    def _commits(self) -> list[int]:
        inside = folders.join(self._target, manifests.TABLE.inside)
        return manifests.numbers(self._system, self._target) if self._system.exists(inside) else []

    def _check_target(self) -> None:
        """Raise `TableFileError` unless the newest commit of the target is a copy of this or an earlier one."""
        number, commit = max(self._commits(), default=-1), self.manifest.commit
        if number < 0:
            return
        found = manifests.read(self._system, self._target, number)
        if found.uuid != self.manifest.uuid:
            text = f"another table lies here, {found.uuid}, and not a copy of {self._source!r}, {self.manifest.uuid}"
        elif not self._system.exists(folders.copied(self._target, number)):
            text = f"`embedrock copy` did not make commit {number} here: this table has changes of its own"
        elif number > commit or (number == commit and found != self.manifest):
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
        for name in self._files:
            self.counts[self._taken(name)] += 1
        for parent in sorted(parents | {parent.partition("/")[0] for parent in parents}):
            retried(self._system.fsync_folder, folders.join(self._target, parent))

    def _taken(self, name: str) -> str:
        """Bring a file to the target, and return how."""
        system, file, path = self._system, self._files[name], folders.join(self._target, name)
        if system.exists(path):
            with contextlib.closing(open_file(system, path)) as there:
                if (there.size, _start(there)) == (file.size, _start(file)):  # a header has random bytes
                    return "there"
            text = f"this is another file than that of {self._source!r} under the same name. {ELSEWHERE}"
            raise TableFileError(errno.EEXIST, text, path)
        try:
            retried(system.link, folders.join(self._source, name), path)
            return "linked"
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
        starts = range(0, file.size, PIECE_BYTES)
        pieces = (file.read(start, min(PIECE_BYTES, file.size - start)) for start in starts)
        write_whole(system, self._draft, pieces, link_to=path)
        self.counts["bytes"] += file.size
        return "written"

    def publish(self) -> None:
        """Make the commit the newest of the target, with the bytes of its manifest in the source."""
        if self._system.exists(self._where):
            return
        mark = folders.copied(self._target, self.manifest.commit)
        if not self._system.exists(mark):
            write_whole(self._system, mark, [])
        write_whole(self._system, self._draft, [self._bytes], link_to=self._where)

    def tidy(self) -> None:
        """Drop earlier commits of the target, and files that only they need: these may have forgotten rows."""
        for number in self._commits():
            if number != self.manifest.commit:
                self._system.unlink(manifests.path_of(self._target, number))
        retried(self._system.fsync_folder, folders.join(self._target, manifests.TABLE.inside))
        folders.remove_orphans(self._system, self._target, self.manifest.uuid, manifests.TABLE)


def _start(file: File) -> bytes:
    return file.read(0, min(HEADER_BYTES, file.size))
