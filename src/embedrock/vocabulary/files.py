"""Files of a vocabulary: its writer's lock, its commits, and merges of its files."""

from __future__ import annotations

import errno
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from embedrock.errors import CommitError, EmbedrockError, MissingFileError, TableFileError
from embedrock.io.vfs import NO_SPACE, System
from embedrock.store import publishing
from embedrock.store.folder import Folder
from embedrock.store.publishing import FolderKind
from embedrock.store.reading import holds_vocabulary, what_is_at
from embedrock.store.segments import Log
from embedrock.system.scopes import on_failure
from embedrock.vocabulary.blocks import PAGE_BYTES, MemTable, Recent, StringQuery
from embedrock.vocabulary.manifest import KIND, MOST_STEPS, StringFile, VocabularyManifest
from embedrock.vocabulary.runs import StringRun, merge, write_fresh

HEAD_BYTES = 24 << 20  # RAM for each of the first files: early strings are the most frequent, and stay in RAM ...
HEADS = 2  # ... if it has room for one or both
GROWTH = 2  # a file is merged with later files once they have half as many strings


class StringFiles(Folder[VocabularyManifest]):
    """Files of a vocabulary.

    Attributes:
        runs: files in order of their ids, with those that no commit has yet.
        recent: cache of ids of strings that were read from the files.
    """

    folder_kind: ClassVar[FolderKind[VocabularyManifest]] = KIND

    def __init__(self, system: System, folder: str, manifest: VocabularyManifest, held: int | None) -> None:
        super().__init__(system, folder, manifest, held)
        self._broken = False
        self.runs = [StringRun(system, folder, entry, manifest.uuid) for entry in manifest.runs]
        self.recent = Recent(0)

    # ------------------------------------------------------------ opening

    @classmethod
    def open_or_make(cls, system: System, folder: str) -> StringFiles:
        """Open the last commit of a vocabulary as its only writer, or create an empty vocabulary."""
        if not holds_vocabulary(system, folder):
            salt = np.random.SeedSequence().generate_state(2, np.uint64).tolist()
            manifest = VocabularyManifest(uuids.uuid4().hex, 0, None, publishing.now(), (salt[0], salt[1]), 0)
            try:
                return cls.create(system, folder, manifest, True)
            except FileExistsError:  # perhaps of another process that was faster
                if not holds_vocabulary(system, folder):
                    raise
        return cls.open_to_write(system, folder, True)

    @classmethod
    def open(cls, system: System, folder: str) -> StringFiles:
        """Open the last commit of a vocabulary for reading. Open files stay readable after the writer removes them."""
        if not holds_vocabulary(system, folder):
            held = what_is_at(system, folder)
            make = "Make one, er.Vocabulary(path) or `embedrock vocabulary build FILE`, or look for a typing error"
            expected = "there is no vocabulary here: a folder with vocabulary/*.json was expected"
            raise TableFileError(errno.ENOENT, f"{expected}. {held or make}", folder)
        while True:
            newest = KIND.numbers(system, folder)[-1]
            try:
                return cls(system, folder, KIND.read(system, folder, newest), None)
            except MissingFileError:
                if newest == KIND.numbers(system, folder)[-1]:
                    raise

    # ------------------------------------------------------------ strings

    @property
    def count(self) -> int:
        return self.runs[-1].end if self.runs else 0

    @property
    def nbytes(self) -> int:
        return self.recent.nbytes + sum(run.nbytes for run in self.runs)

    @property
    def index_bytes(self) -> int:
        return sum(run.index_bytes for run in self.runs)

    def keep_resident(self, nbytes: int) -> None:
        """Allow files to keep their strings in RAM, within `nbytes` bytes. Small files come first."""
        for run in sorted(self.runs, key=lambda run: run.entry.shape.nbytes):
            nbytes -= run.entry.shape.nbytes
            run.keep(nbytes >= 0)

    def find(self, query: StringQuery) -> np.ndarray:
        """Return the ids of strings, int64 (n,). -1: in no file."""
        ids, read = self.recent.find(query), [np.empty(0, np.int64)]
        left = np.flatnonzero(ids < 0)
        left = left[np.argsort(query.hashes[left])]
        # Resident files first, then the largest.
        for run in sorted(self.runs, key=lambda run: (not run.is_resident, -run.entry.count)):
            if not len(left):
                break
            ids[left] = run.find(query.some(left))
            if not run.is_resident:
                read.append(left[ids[left] >= 0])
            left = left[ids[left] < 0]
        found = np.concatenate(read)
        self.recent.add(query.some(found), ids[found])
        return ids

    def write(self, memtable: MemTable) -> None:
        """Write the strings in RAM to new files, which no commit has yet.

        Raises:
            OSError: nothing has changed.
        """
        made, first = list[StringRun](), self.count
        with on_failure(lambda: self._drop(made)):
            for lo, hi in self._cuts(memtable):
                made.append(self._write(lambda log, lo=lo, hi=hi: write_fresh(log, memtable, first, lo, hi)))
        self.runs = [*self.runs, *made]

    def _cuts(self, memtable: MemTable) -> list[tuple[int, int]]:
        """Return the range of strings of each new file. The first strings of a vocabulary get their own files."""
        if len(self.runs) > HEADS:
            return [(0, memtable.count)]
        room = HEAD_BYTES - (self.runs[-1].entry.shape.nbytes if self.runs else 0)
        heads = HEADS - max(0, len(self.runs) - 1)
        ends = memtable.shape.first_in(room + HEAD_BYTES * np.arange(heads), memtable.bounds)
        cuts = np.unique(np.append(ends[ends > 0], memtable.count)).tolist()
        return list(zip([0, *cuts], cuts, strict=False))

    def merge(self, first: int, end: int | None = None) -> None:
        """Merge the files from `first` on, or up to `end`, into one.

        Raises:
            OSError: nothing has changed.
        """
        old = self.runs[first:end]
        if len(old) > 1:
            made = self._write(lambda log: merge(log, old, self.manifest.salt))
            self.runs = [*self.runs[:first], made, *self.runs[first + len(old) :]]
            committed = self.manifest.files
            self._drop([run for run in old if run.entry.file not in committed])

    def merge_small(self) -> None:
        """Fill the first files, and merge files at the end. Then each has over twice the strings of all behind it.

        Raises:
            OSError: completed merges stay, and no string is lost.
        """
        for number in range(min(HEADS, len(self.runs) - 1)):
            if self._exceed_a_head(number) and not self._exceed_a_head(number, number + 2):
                self.merge(number, number + 2)
        if not self.runs:
            return
        first, count = len(self.runs) - 1, self.runs[-1].entry.count
        while first > 0 and self._is_small(first - 1, count):
            first -= 1
            count += self.runs[first].entry.count
        self.merge(first)

    def _is_small(self, number: int, count: int) -> bool:
        """Return whether a file should be merged with later files of `count` strings."""
        if number < HEADS and self._exceed_a_head(number):
            return False
        return self.runs[number].entry.count <= GROWTH * count

    @property
    def head(self) -> int:
        """Return the number of first files that a merge of all files leaves alone."""
        staying = 0
        while staying < min(HEADS, len(self.runs) - 1) and self._exceed_a_head(staying):
            staying += 1
        return staying

    def _exceed_a_head(self, number: int, end: int | None = None) -> bool:
        return sum(run.entry.shape.nbytes for run in self.runs[number:end]) > HEAD_BYTES

    def _write(self, write: Callable[[Log], StringFile]) -> StringRun:
        """Create a file that `write` fills and seals, and open it."""
        name = self.free_name(f"runs/{self.manifest.commit + 1:010d}", ".voc")
        log = Log.create(self.system, self.folder, name, self.manifest.uuid, PAGE_BYTES, 0)
        with on_failure(lambda: self.unlink([name], lambda: False)), on_failure(log.close):
            entry = write(log)
            log.close()
            return StringRun(self.system, self.folder, entry, self.manifest.uuid)

    def _drop(self, runs: Sequence[StringRun]) -> None:
        for run in runs:
            run.close()
        self.unlink([run.entry.file for run in runs], lambda: False)

    def needed(self) -> set[str]:
        return {run.entry.file for run in self.runs}

    # ------------------------------------------------------------ commits

    def commit(self, step: int | None = None) -> int:
        """Publish the strings in files as one commit, and return its number. A step replaces itself and later ones.

        Raises:
            CommitError: the last commit is intact, and nothing has changed.
        """
        before, runs = self.manifest, tuple(run.entry for run in self.runs)
        steps = before.steps
        if step is not None:  # later steps belong to a training that was cut off
            earlier = [pair for pair in steps if pair[0] < step]
            steps = (*earlier, (step, self.count))[-MOST_STEPS:]
        if (runs, steps) == (before.runs, before.steps):
            return before.commit
        changes = {"time": publishing.now(), "count": self.count, "runs": runs, "steps": steps}
        made = replace(before, commit=before.commit + 1, parent=before.commit, **changes)
        self.check_commits()
        try:
            KIND.publish(self.system, self.folder, made)
        except OSError as error:
            try:
                self._broken = self.is_published(made.commit)
            except (OSError, EmbedrockError):
                self._broken = True
            raise self.commit_error(error) from error
        self.manifest = made
        self.collect(1)
        return made.commit

    def check_commits(self) -> None:
        if self._broken:
            text = "a commit failed before so that nobody knows whether it is there"
        elif self.is_moved:
            text = "the folder was moved or replaced while it was open"
        else:
            return
        raise CommitError(errno.EIO, f"{text}. Close the vocabulary, and open it again", self.folder)

    def commit_error(self, error: OSError) -> CommitError:
        remedy = "Free some space, and commit again. " if error.errno in NO_SPACE else ""
        return CommitError(
            error.errno,
            f"commit {self.manifest.commit + 1} failed: {error.strerror or error}. {remedy}Commit "
            f"{self.manifest.commit} is whole, and so are the strings in RAM",
            self.folder,
        )

    # ------------------------------------------------------------ closing

    def close(self, in_child: bool) -> None:
        """Close all files, and release the lock. A child leaves the lock to its parent."""
        for run in self.runs:
            run.close()
        self.runs = []
        if not in_child:
            self.unlock()
