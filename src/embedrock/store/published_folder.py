"""`PublishedFolder`: a folder of published rows as its writer has it open. Other programs carry its files elsewhere."""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from embedrock.errors import CorruptTableError, TableFileError
from embedrock.io.vfs import System
from embedrock.store import change_lists, publishing
from embedrock.store import folder as folders
from embedrock.store.folder import join
from embedrock.store.manifest import PUBLISHED, Manifest
from embedrock.store.publication import Publication
from embedrock.store.reading import what_is_at
from embedrock.store.table_folder import TableFolder

HOUR = 3600.0
TIDY_STEPS = 256  # steps between two looks through all manifests, for the files of a publisher that was killed
_NOTHING = Publication("0" * 32)


class PublishedFolder(TableFolder):
    """Folder of published rows, open for its one writer.

    No name of a file is used twice, and none is changed. A manifest may be torn: it is not there yet.

    Attributes:
        is_torn: a newer manifest was there, which could not be read. Its number is left out.
    """

    folder_kind = PUBLISHED

    def __init__(self, system: System, folder: str, manifest: Manifest, held: int | None) -> None:
        super().__init__(system, folder, manifest, held)
        self._last_number, self._serial, self._purges = manifest.commit, secrets.randbits(48), False

    @classmethod
    def open_or_make(cls, system: System, folder: str, locked: bool = True) -> PublishedFolder:
        """Open a folder to publish in, or make it.

        Raises:
            TableFileError: something else lies there.
            TableLockedError: another process publishes there.
        """
        inside = join(folder, PUBLISHED.inside)
        numbers = PUBLISHED.numbers(system, folder) if system.exists(inside) else []
        if any(_whole_of(system, folder, numbers)):
            cls.newest_of(system, folder)  # an error before the lock of a table that is trained
            return cls.open_to_write(system, folder, locked)
        if numbers:  # the first one was interrupted, or is being written
            with folders.locked_by(system, folder, locked, PUBLISHED):
                for number in numbers:
                    system.unlink(PUBLISHED.path_of(folder, number))
        first = Manifest(secrets.token_hex(16), 0, None, None, None, publishing.now(), published=_NOTHING)
        return cls.create(system, folder, first, locked)

    @classmethod
    def newest_of(cls, system: System, folder: str) -> Manifest:
        found = next(_whole_of(system, folder, reversed(PUBLISHED.numbers(system, folder))))
        if not found.published.chain:
            held = what_is_at(system, folder)
            raise TableFileError(errno.EEXIST, f"{held}. Publish its rows in a folder of their own", folder)
        return found

    def prepare_to_write(self) -> None:
        """Remove torn manifests and orphans."""
        numbers = PUBLISHED.numbers(self.system, self.folder)
        self._last_number = numbers[-1]
        for number in numbers:
            if number > self.manifest.commit:
                self.system.unlink(PUBLISHED.path_of(self.folder, number))
        super().prepare_to_write()
        if any(file.forgets for file in change_lists.files_in(self.system, self.folder, self.manifest.uuid)):
            self._purge()  # its publisher was killed before the end of this

    def tidy(self) -> None:
        # A step that was not published has a later number. Looking through all manifests would take longer than a step.
        last = f"/{self.manifest.commit:010d}-~"
        is_due = self.manifest.commit % TIDY_STEPS == 0
        if is_due or any(
            name[name.index("/") :] > last for name in folders.names_in(self.system, self.folder, PUBLISHED)
        ):
            super().tidy()

    @property
    def next_commit(self) -> int:
        return max(self._last_number, self.manifest.commit) + 1

    @property
    def is_torn(self) -> bool:
        return self._last_number > self.manifest.commit

    def publish_rows(self, changes: dict[str, Any], keep_hours: float, purges: bool) -> None:
        """Publish the present records of all stores as one step. See `publish`.

        `purges`: old files have forgotten rows, and leave at once.
        """
        snapshots = self.freeze([lambda ids: np.zeros(len(ids), bool)] * len(self.stores))  # all records are in logs
        self._purges = purges
        self.publish(snapshots, {**changes, "name": None, "parent": self.manifest.commit}, keep_hours)
        if purges:
            self._purge()

    def _publish_with_list(self, manifest: Manifest, tables: Any, renamed: Any, forgets: bool) -> None:
        super()._publish_with_list(manifest, tables, renamed, forgets or self._purges)

    def _purge(self) -> None:
        """Remove the files that only older steps need. The list of changes says that this is due, and leaves last."""
        self.collect(-math.inf)  # whatever the clock says
        if PUBLISHED.numbers(self.system, self.folder) == [self.manifest.commit]:
            super().tidy()
            lists = change_lists.files_in(self.system, self.folder, self.manifest.uuid)
            self.unlink([file.name for file in lists], lambda: False)

    def divided(self, keep: float) -> tuple[dict[int, Manifest | None], list[Manifest | None]]:
        # Manifests are dropped `keep` hours after the next one came.
        numbers, dropped = PUBLISHED.numbers(self.system, self.folder), dict[int, Manifest | None]()
        for number, after in pairwise(numbers):
            later = self._manifest(after)
            if later is not None and publishing.age_of(later.time) < keep * HOUR:
                break
            dropped[number] = self._manifest(number)
        # A file is named by manifests in a row. So the oldest one left names all that others still need.
        return dropped, [self._manifest(numbers[len(dropped)])]

    def _manifest(self, number: int) -> Manifest | None:
        return self.manifest if number == self.manifest.commit else folders.readable(self.system, self.folder, number)

    def needed(self) -> set[str]:
        return super().needed().union(self.manifest.files)


def _whole_of(system: System, folder: str, numbers: Iterable[int]) -> Iterator[Manifest]:
    """Iterate over the manifests that are not torn."""
    for number in numbers:
        with contextlib.suppress(CorruptTableError):
            yield PUBLISHED.read(system, folder, number)
