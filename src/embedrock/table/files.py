"""`Files`: where a table alone lives on disk."""

from __future__ import annotations

import os
import uuid as uuids
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from embedrock.errors import TableFileError, UnsupportedError
from embedrock.initializers import Initializer
from embedrock.spec import Spec
from embedrock.store import publishing
from embedrock.store.manifest import GroupManifest, Manifest
from embedrock.store.nearby import holds_table
from embedrock.store.store import Store
from embedrock.store.volume import Volume, emptied
from embedrock.table.description import check_same, describe_spec, read_spec
from embedrock.table.home import Home, Version
from embedrock.table.keeper import Keeper, Opening
from embedrock.table.rows import Rows
from embedrock.tiers.budget import budget_of
from embedrock.tiers.disk import Disk
from embedrock.tiers.placing import check_budget, claim_of
from embedrock.tiers.tier import Tier
from embedrock.tiers.turn import Turn


class Files(Keeper, Home):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The files of a table alone, and who changes them.

    Args:
        volume: the files.
        opening: how they were opened.

    Attributes:
        budget: the RAM that its tiers may take.
    """

    def __init__(self, volume: Volume, opening: Opening) -> None:
        super().__init__(volume, opening)
        self.budget = budget_of(opening.memory)

    @property
    def store(self) -> Store:
        """Where its records are."""
        (store,) = self.volume.stores
        return store

    @property
    def reopening(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"Open it again, er.open({self.opening.path!r}), or make its layer anew."

    # ---------------------------------------------------------------- what its keeper has to know

    def tiers(self, rows: Rows | None) -> Sequence[Disk]:
        assert rows is not None  # its callers have a table
        return (_disk(rows),)

    def turn(self, rows: Rows | None = None) -> Turn:
        return Turn() if rows is None else rows.turn

    def _open_rows(self, rows: Rows | None) -> Sequence[Rows] | None:
        return None if rows is None or rows.is_closed else (rows,)

    def _versions(self, rows: Rows | None) -> Sequence[Version]:
        assert rows is not None
        return (rows.version,)

    def _described(self, rows: Rows | None) -> dict[str, Any]:
        assert rows is not None
        self._remember("", rows, self.last().history)
        return {
            "count": rows.tier.count,
            "spec": describe_spec(rows.spec),
            "steps": rows.steps,
            "skipped_steps": rows.skipped_steps,
            "history": (),
        }

    @property
    def _is_being_shared(self) -> bool:
        return self.budget.is_being_shared

    def _leave_budget(self) -> None:
        self.budget.leave()

    # ---------------------------------------------------------------- what rows ask of their home

    def named_by(self, layer: str) -> str:
        self.subject = f"{layer} at {self.opening.path!r}"
        return self.subject

    @property
    def where(self) -> str:
        return f"on disk at {self.opening.path!r}{'' if self.writes else ' (read only)'} behind a cache in RAM"

    def after_fork(self, rows: Rows) -> None:
        """Go on in a child process: a reader with a cache of its own. A writer's child must not write.

        Raises:
            ReadOnlyTableError: it is a writer's.
        """
        self.check_process()
        self._process = os.getpid()
        self.resume(rows, rows.spec)

    def replaced(self, rows: Rows, spec: Spec, fill: Callable[[Tier], None]) -> Disk:
        """Replace the records; the first commit from then on replaces all there is in the files."""
        self.check_writable()
        self.be_quiet(rows)
        self.stop_compaction()
        store, before = emptied(self.store, spec.record_bytes), _disk(rows)
        try:
            made = self._tier(spec, rows.turn, store)
            fill(made)
        except BaseException:
            store.give_up()
            self.budget.join(before, claim_of(before.spec))
            raise
        self.volume.replace(self.store, store)
        return made

    def bury(self, rows: Rows, ids: np.ndarray, count: int) -> bool:
        return self.forget("", rows, ids, count)

    def be_quiet(self, rows: Rows) -> None:
        """Wait for all that uses a tier whose rows are about to leave it, and might write some of them."""
        self.wait_for_quiet(rows)

    def is_quiet(self, rows: Rows) -> bool:
        return _disk(rows).is_quiet

    def grown(self, rows: Rows, spec: Spec) -> Disk:
        self.stop_compaction()
        tier = _disk(rows)
        tier.grow(spec)
        return tier

    def check_in_ram(self, verb: str) -> NoReturn:
        refuse_state(verb, self.subject)

    def close(self, rows: Rows, tier: Tier) -> None:
        disk = cast(Disk, tier)
        try:
            rows.turn.wait_for(disk.becomes_quiet)
            self.end_commit(rows)
        finally:
            self.abandon([rows.version])

    # ---------------------------------------------------------------- rows as of a commit

    def resume(self, rows: Rows, spec: Spec) -> None:
        """Give a table the state of the last commit."""
        manifest, tier = self.last(), self._tier(spec, rows.turn, self.store)
        history, residents = self.history(spec, manifest), self.residents(spec, manifest, self.subject)
        rows.install(spec, tier, history, manifest.steps, manifest.skipped_steps, residents=residents)
        rows.version.commit()
        self._commit = self._pending = None  # what became of it has no say about these rows
        self.tell_withheld()

    def _go_on(self, rows: Rows | None) -> None:
        assert rows is not None
        spec = read_spec(self.last().spec, rows.spec.init, self.opening.path)
        self.last().check_spec(spec.rows, spec.record_bytes, self.opening.path)
        self.resume(rows, spec)

    def last(self) -> Manifest:
        """Return the last commit."""
        assert isinstance(self.volume.manifest, Manifest)  # who opens a group has no `Files`
        return self.volume.manifest

    def _tier(self, spec: Spec, turn: Turn, store: Store) -> Disk:
        """Return a new, empty cache over files."""
        return Disk(spec, store, self.budget, self.opening.policy, turn, self.subject)

    def rollback(self, rows: Rows, commit: int) -> int:
        self.check_writable()
        self.be_quiet(rows)
        manifest = self.manifest(commit)
        assert isinstance(manifest, Manifest)  # as all of one folder
        spec = read_spec(manifest.spec, rows.spec.init, self.opening.path)
        manifest.check_spec(spec.rows, spec.record_bytes, self.opening.path)
        check_budget(spec, self.budget, self.subject)  # before anything has changed
        self.stop_compaction()
        self.volume.rollback(manifest, publishing.now(), self.opening.keep)
        try:
            self.resume(rows, spec)
        except BaseException:  # the records in RAM are not those of the files
            rows.drop()
            self.close_all()
            raise
        self.went_back_to = commit
        rows.tell_after_rollback()
        return self.volume.manifest.commit


def refuse_state(verb: str, subject: str) -> NoReturn:
    """Raise the error of a table on disk that should be saved, or loaded, by its state."""
    raise UnsupportedError(
        f"{verb}() is for tables in RAM, and {subject} is on disk, where it may be larger than RAM. "
        "commit() saves it, er.open(path) opens it, rollback(commit) goes back; load_state(table) of a table in "
        "RAM takes its rows over."
    )


def open_volume(opening: Opening) -> Volume:
    """Open a table or a group at a path."""
    return Volume.open(opening.system, opening.path, opening.at, opening.mode == "w", opening.lock)


def files_in(volume: Volume, opening: Opening, init: Initializer | None) -> tuple[Files, Spec]:
    """Return the files of a table alone, once they are open; where it cannot be used, they are closed."""
    try:
        manifest = volume.manifest
        if isinstance(manifest, GroupManifest):
            raise TableFileError(
                f"{opening.path} holds a group of {len(manifest.members)} tables, not one alone. Open it by "
                f"er.open({opening.path!r}), or er.Group(path=...), which has each by its name."
            )
        spec = read_spec(manifest.spec, init, opening.path)
        manifest.check_spec(spec.rows, spec.record_bytes, opening.path)
        return Files(volume, opening), spec
    except BaseException:
        volume.close()
        raise


def open_or_make_files(opening: Opening, spec: Spec, given: dict[str, Any]) -> tuple[Files, Spec]:
    """Open the table at a path, or make it.

    Args:
        opening: how.
        spec: of a new table.
        given: what the caller asked for, by the names of `describe_spec`; an existing table must agree.
    """
    if opening.mode == "r" or holds_table(opening.system, opening.path):
        return _open_given(opening, spec, given)
    check_budget(spec, budget_of(opening.memory), f"table {opening.path!r}")  # what cannot be opened is not made
    manifest = Manifest(
        uuid=uuids.uuid4().hex,
        commit=0,
        parent=None,
        step=None,
        name=None,
        time=publishing.now(),
        spec=describe_spec(spec),
        record_bytes=spec.record_bytes,
        steps=0,
        skipped_steps=0,
        count=0,
    )
    try:
        return Files(Volume.create(opening.system, opening.path, manifest, opening.lock), opening), spec
    except FileExistsError:
        if not holds_table(opening.system, opening.path):
            raise
        return _open_given(opening, spec, given)  # somebody else was faster


def _open_given(opening: Opening, spec: Spec, given: dict[str, Any]) -> tuple[Files, Spec]:
    files, found = files_in(open_volume(opening), opening, spec.init if given.get("init") is not None else None)
    try:
        check_same(given, describe_spec(found), opening.path)
    except BaseException:
        files.close_all()
        raise
    return files, found


def _disk(rows: Rows) -> Disk:
    return cast(Disk, rows.tier)  # `Files` makes no other
