"""The files of a vocabulary: who may write, what is committed, which runs are merged."""

from __future__ import annotations

import contextlib
import errno
import re
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from embedrock.errors import CommitError, EmbedrockError, MissingFileError, TableFileError
from embedrock.machine.space import NO_SPACE
from embedrock.machine.vfs import System
from embedrock.store import folder as folders
from embedrock.store import publishing
from embedrock.store.nearby import VOCABULARY, holds_vocabulary, what_is_at
from embedrock.store.runs import HEADER_BYTES, Log, owner_of, read_start
from embedrock.vocabulary import manifest as manifests
from embedrock.vocabulary.blocks import PAGE_BYTES
from embedrock.vocabulary.fresh import Fresh
from embedrock.vocabulary.manifest import Manifest, StringFile
from embedrock.vocabulary.runs import StringRun, merge, write_fresh

KIND = folders.Kind("vocabulary", 'er.Vocabulary(path, mode="r")', (VOCABULARY, "runs"))
HEAD_BYTES = 24 << 20  # of RAM for each of the first files: what came first is seen most, and is kept there where ...
HEADS = 2  # ... there is some: one of them, or both
GROWTH = 2  # a file is merged with those behind it once they have half as many strings
_RUN = re.compile(r"\d{10}-([0-9a-f]{8})-\d+\.voc", re.ASCII)


class Files:
    """The files of a vocabulary.

    Args:
        system: does the I/O.
        folder: of the vocabulary.
        manifest: the last commit.
        lock: descriptor of the lock that is held; None for a reader.

    Attributes:
        manifest: the last commit.
        runs: in order of their ids; also those that no commit has yet.
    """

    def __init__(self, system: System, folder: str, manifest: Manifest, lock: int | None) -> None:
        self.system, self.folder, self.manifest, self._held = system, folder, manifest, lock
        self._serial, self._broken = 0, False
        self.runs = list[StringRun]()
        try:
            for entry in manifest.runs:
                self.runs.append(self._opened(entry))
        except BaseException:
            self._close_runs()
            raise

    # ------------------------------------------------------------ opening

    @classmethod
    def create(cls, system: System, folder: str) -> Files:
        """Make an empty vocabulary, and publish it as commit 0."""
        folders.make(system, folder, KIND)
        salt = np.random.SeedSequence().generate_state(2, np.uint64).tolist()
        manifest = Manifest(uuids.uuid4().hex, 0, None, publishing.now(), (salt[0], salt[1]), 0)
        held = folders.lock(system, folder, True, KIND)
        try:
            if holds_vocabulary(system, folder):  # somebody else was faster
                return cls._open_to_write(system, folder, held)
            manifests.publish(system, folder, manifest)
            return cls(system, folder, manifest, held)
        except BaseException:
            folders.unlock(system, held)
            raise

    @classmethod
    def open(cls, system: System, folder: str, write: bool) -> Files:
        """Open a vocabulary as of its last commit, as its one writer or as a reader."""
        if not holds_vocabulary(system, folder):
            held = what_is_at(system, folder)
            make = "Make one, where there is nothing yet: er.Vocabulary(path), or look for a typing error"
            expected = "there is no vocabulary here: a folder with vocabulary/*.json was expected"
            raise TableFileError(errno.ENOENT, f"{expected}. {held or make}", folder)
        if not write:
            return cls._open_to_read(system, folder)
        held = folders.lock(system, folder, True, KIND)
        try:
            return cls._open_to_write(system, folder, held)
        except BaseException:
            folders.unlock(system, held)
            raise

    @classmethod
    def _open_to_write(cls, system: System, folder: str, held: int) -> Files:
        files = cls(system, folder, newest(system, folder), held)
        try:
            folders.make_folders(system, folder, KIND)
            files._remove_orphans()
        except BaseException:
            files._close_runs()
            raise
        return files

    @classmethod
    def _open_to_read(cls, system: System, folder: str) -> Files:
        """Open all files of the last commit: from then on they stay, whatever the writer removes."""
        while True:
            manifest = newest(system, folder)
            try:
                return cls(system, folder, manifest, None)
            except MissingFileError:
                if manifest.commit == publishing.numbers(system, manifests.inside(folder))[-1]:
                    raise

    def _opened(self, entry: StringFile) -> StringRun:
        return StringRun.open(self.system, self.folder, entry, self.manifest.uuid)

    # ------------------------------------------------------------ strings

    @property
    def count(self) -> int:
        """Strings in files."""
        return self.runs[-1].end if self.runs else 0

    @property
    def nbytes(self) -> int:
        """RAM that is taken."""
        return sum(run.nbytes for run in self.runs)

    @property
    def index_bytes(self) -> int:
        """RAM that it takes to know which page to read."""
        return sum(run.index_bytes for run in self.runs)

    def keep_resident(self, nbytes: int) -> None:
        """Keep in RAM what finds the strings of those files that fit so many bytes; the small ones first."""
        for run in sorted(self.runs, key=lambda run: run.packed_bytes):
            nbytes -= run.packed_bytes
            run.keep(nbytes >= 0)

    def write(self, fresh: Fresh) -> None:
        """Write strings that are in RAM to files, which no commit has yet.

        Raises:
            OSError: nothing has changed.
        """
        made, first = list[StringRun](), self.count
        try:
            for lo, hi in self._cuts(fresh):
                made.append(self._write(lambda log, lo=lo, hi=hi: write_fresh(log, fresh, first, lo, hi)))
        except BaseException:
            self._drop(made)
            raise
        self.runs = [*self.runs, *made]

    def _cuts(self, fresh: Fresh) -> list[tuple[int, int]]:
        """Return which strings go to which file: the first ones of all to some of their own."""
        if len(self.runs) > HEADS:
            return [(0, fresh.count)]
        room = HEAD_BYTES - (self.runs[-1].packed_bytes if self.runs else 0)
        heads = HEADS - max(0, len(self.runs) - 1)
        ends = fresh.shape.first_in(room + HEAD_BYTES * np.arange(heads), fresh.bounds)
        cuts = np.unique(np.append(ends[ends > 0], fresh.count)).tolist()
        return list(zip([0, *cuts], cuts, strict=False))

    def merge(self, first: int, end: int | None = None) -> None:
        """Make one file of all from one on, or up to another one.

        Raises:
            OSError: nothing has changed.
        """
        old = self.runs[first:end]
        if len(old) > 1:
            made = self._write(lambda log: merge(log, old, self.manifest.salt))
            self.runs = [*self.runs[:first], made, *self.runs[first + len(old) :]]
            committed = {entry.file for entry in self.manifest.runs}
            self._drop([run for run in old if run.entry.file not in committed])

    def merge_small(self) -> None:
        """Fill the first files, and merge those at the end: each has more than twice the strings of all behind it.

        Raises:
            OSError: what was merged stays so, and all strings are there.
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
        """Return whether a run should be merged with those behind it, of so many strings."""
        if number < HEADS and self._exceed_a_head(number):
            return False
        return self.runs[number].entry.count <= GROWTH * count

    @property
    def head(self) -> int:
        """How many files at the beginning stay as they are when all are merged."""
        staying = 0
        while staying < min(HEADS, len(self.runs) - 1) and self._exceed_a_head(staying):
            staying += 1
        return staying

    def _exceed_a_head(self, number: int, end: int | None = None) -> bool:
        return sum(run.packed_bytes for run in self.runs[number:end]) > HEAD_BYTES

    def _write(self, write: Callable[[Log], StringFile]) -> StringRun:
        """Return a new file, open, that `write` fills and seals."""
        name = self._free_name()
        log = Log.create(self.system, self.folder, name, self.manifest.uuid, PAGE_BYTES, 0)
        try:
            entry = write(log)
            log.close()
            return self._opened(entry)
        except BaseException:
            log.close()
            with contextlib.suppress(OSError):  # then the next writer removes it
                self.system.unlink(folders.join(self.folder, name))
            raise

    def _free_name(self) -> str:
        while True:
            self._serial += 1
            name = f"runs/{self.manifest.commit + 1:010d}-{self.manifest.uuid[:8]}-{self._serial}.voc"
            if not self.system.exists(folders.join(self.folder, name)):
                return name

    def _drop(self, runs: Sequence[StringRun]) -> None:
        for run in runs:
            run.close()
            with contextlib.suppress(OSError):  # then the next writer removes it
                self.system.unlink(folders.join(self.folder, run.entry.file))

    # ------------------------------------------------------------ commits

    def commit(self, step: int | None = None) -> int:
        """Make what is in files durable as one; return the commit's number. A step replaces itself and later ones.

        Raises:
            CommitError: the last commit is whole, and nothing has changed.
        """
        before, runs = self.manifest, tuple(run.entry for run in self.runs)
        steps = before.steps
        if step is not None:  # those from it on were of a run that was cut off
            earlier = [pair for pair in steps if pair[0] < step]
            steps = (*earlier, (step, self.count))[-manifests.MOST_STEPS :]
        if (runs, steps) == (before.runs, before.steps):
            return before.commit
        changes = {"time": publishing.now(), "count": self.count, "runs": runs, "steps": steps}
        made = replace(before, commit=before.commit + 1, parent=before.commit, **changes)
        self._check_lock()
        try:
            manifests.publish(self.system, self.folder, made)
        except OSError as error:
            self._broken = self._may_be_there(made.commit)
            raise self.commit_error(error) from error
        self.manifest = made
        with contextlib.suppress(OSError):  # the next writer removes them
            self._collect()
        return made.commit

    def _check_lock(self) -> None:
        if self._broken:
            text = "a commit failed before so that nobody knows whether it is there"
        elif self._held is not None and not folders.is_held(self.system, self.folder, self._held):
            text = "the folder was moved or replaced while it was open"
        else:
            return
        raise CommitError(errno.EIO, f"{text}. Close the vocabulary, and open it again", self.folder)

    def commit_error(self, error: OSError) -> CommitError:
        """Return what a commit raises where the system has failed."""
        remedy = "Free some space, and commit again. " if error.errno in NO_SPACE else ""
        return CommitError(
            error.errno,
            f"commit {self.manifest.commit + 1} failed: {error.strerror or error}. {remedy}Commit "
            f"{self.manifest.commit} is whole, and so are the strings in RAM",
            self.folder,
        )

    def _may_be_there(self, number: int) -> bool:
        try:
            return number in publishing.numbers(self.system, manifests.inside(self.folder))
        except (OSError, EmbedrockError):
            return True

    def _collect(self) -> None:
        """Remove older manifests, and files that the last one does not name."""
        inside = manifests.inside(self.folder)
        there = publishing.numbers(self.system, inside)
        for number in there[:-1]:
            self.system.unlink(publishing.path_of(inside, number))
        if there[:-1]:
            self.system.fsync_folder(inside)  # or a crash might leave commits without their files
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """Remove files that were begun for this vocabulary, and that neither a commit nor this process needs."""
        inside = manifests.inside(self.folder)
        try:
            kept = [manifests.read(self.system, self.folder, n) for n in publishing.numbers(self.system, inside)]
        except (OSError, EmbedrockError):
            return  # what a damaged commit names is not known
        needed = {entry.file for manifest in kept for entry in manifest.runs} | {run.entry.file for run in self.runs}
        for name in sorted(self.system.listdir(folders.join(self.folder, "runs"))):
            if f"runs/{name}" not in needed and self._is_own(name):
                with contextlib.suppress(OSError):
                    self.system.unlink(folders.join(self.folder, f"runs/{name}"))
        for name in self.system.listdir(inside):
            if publishing.is_unpublished(name):
                with contextlib.suppress(OSError):
                    self.system.unlink(f"{inside}/{name}")

    def _is_own(self, name: str) -> bool:
        """Return whether a file was begun for this vocabulary: its first page says so; where it is torn, its name."""
        found = _RUN.fullmatch(name)
        if found is None:
            return False
        page = read_start(self.system, folders.join(self.folder, f"runs/{name}"), HEADER_BYTES)
        owner = owner_of(page, f"runs/{name}")
        return owner == self.manifest.uuid if owner is not None else found[1] == self.manifest.uuid[:8]

    # ------------------------------------------------------------ closing

    def close(self, in_child: bool) -> None:
        """Close all files, and let another writer in; a child's are the parent's."""
        self._close_runs()
        held, self._held = self._held, None
        if held is not None and not in_child:
            folders.unlock(self.system, held)

    def _close_runs(self) -> None:
        for run in self.runs:
            run.close()
        self.runs = []


def newest(system: System, folder: str) -> Manifest:
    """Return the last commit.

    Raises:
        CorruptTableError: it is damaged; older ones are never taken silently.
    """
    while True:
        number = publishing.numbers(system, manifests.inside(folder))[-1]
        try:
            return manifests.read(system, folder, number)
        except MissingFileError:
            if number == publishing.numbers(system, manifests.inside(folder))[-1]:
                raise
