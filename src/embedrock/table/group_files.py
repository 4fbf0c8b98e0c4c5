"""`GroupFiles`: the folder of a group on disk: one lock, one budget, and one commit of all its tables."""

from __future__ import annotations

import os
import uuid as uuids
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from embedrock.errors import TableFileError
from embedrock.initializers import Initializer, Zeros
from embedrock.residents.residents import Residents
from embedrock.rules import History
from embedrock.spec import Spec
from embedrock.store import publishing
from embedrock.store.manifest import GroupManifest, HistoryFile, Member
from embedrock.store.nearby import holds_table
from embedrock.store.volume import Volume
from embedrock.table.description import describe_spec, read_spec
from embedrock.table.files import open_volume
from embedrock.table.home import Version
from embedrock.table.keeper import Keeper, Opening
from embedrock.table.rows import Rows
from embedrock.tiers.disk import Disk
from embedrock.tiers.disk_pools import DiskPools
from embedrock.tiers.part import Part
from embedrock.tiers.turn import Turn

if TYPE_CHECKING:
    from embedrock.table.group import Group


@dataclass
class Resting:
    """A member that nobody has open: as the last commit has it, or as it was closed.

    Attributes:
        part: where its records are.
        spec: its description.
        steps, skipped_steps: made, and left out.
        files: of its rule's history, as the last commit has it; None: it has it not.
        history, residents: what its rule remembers, and who has a record, where that is known.
    """

    part: Part
    spec: dict[str, Any]
    steps: int
    skipped_steps: int
    files: tuple[HistoryFile, ...] | None
    history: History | None = None
    residents: Residents | None = None

    def named_by(self, name: str) -> None:
        """Let error messages call it by another name."""
        self.part.subject = f"table {name!r}"


class GroupFiles(Keeper):
    """The files of a group, and who changes them.

    Args:
        volume: the files.
        opening: how they were opened.
        group: whose; it has them, they only know it.

    Attributes:
        pools: the tiers of all members.
        changed: how often members came, went, or were closed with changes.
        versions: of the members that are open, by name.
    """

    def __init__(self, volume: Volume, opening: Opening, group: Group) -> None:
        super().__init__(volume, opening)
        self._group, self._turn = weakref.ref(group), group.turn
        self.changed, self.versions = Version(), dict[str, Version]()
        self.pools = self._new_pools()

    def _new_pools(self) -> DiskPools:
        opening = self.opening
        return DiskPools(self.volume, opening.memory, opening.policy, self._turn, self.subject)

    # ---------------------------------------------------------------- what its keeper has to know

    def tiers(self, rows: Rows | None) -> Sequence[Disk]:
        return self.pools.tiers

    def turn(self, rows: Rows | None = None) -> Turn:
        return self._turn

    def _open_rows(self, rows: Rows | None) -> Sequence[Rows] | None:
        group = self._group()
        return None if group is None else [each for _, each in group.members() if isinstance(each, Rows)]

    def _versions(self, rows: Rows | None) -> Sequence[Version]:
        return self.all_versions

    @property
    def all_versions(self) -> list[Version]:
        """What tells whether there are changes that no commit has."""
        return [self.changed, *self.versions.values()]

    def _described(self, rows: Rows | None) -> dict[str, Any]:
        group = self._group()
        assert group is not None  # who calls has it, or a member, which has it
        return {"members": tuple(self._member(name, each) for name, each in group.members())}

    def _member(self, name: str, member: Rows | Resting) -> Member:
        if isinstance(member, Rows):
            part, spec = member.tier, _described(member)
        else:
            part, spec = member.part, member.spec
        assert isinstance(part, Part)  # members have no other tiers
        number = part.number if part.pool.is_shared else None
        files = member.files if isinstance(member, Resting) else None
        if files is None:
            before = next((each.history for each in self.last().members if each.name == name), ())
            self._remember(name, member, before)
        counts = member.steps, member.skipped_steps, part.count
        return Member(name, self.pools.index_of(part), number, spec, *counts, files or ())

    def stats(self) -> dict[str, float]:
        return {**self.pools.stats(), **super().stats()}

    @property
    def _is_being_shared(self) -> bool:
        return self.pools.is_being_shared

    def _leave_budget(self) -> None:
        self.pools.leave()

    # ---------------------------------------------------------------- members as of a commit

    def resume(self) -> dict[str, Resting]:
        """Return the members as of the last commit, with new tiers."""
        manifest = self.last()
        members = [(member, _plain_spec(member, self.opening.path)) for member in manifest.members]
        for member, spec in members:
            member.check_spec(spec.rows, spec.record_bytes, manifest.pools[member.pool], self.opening.path)
        self.pools = self._new_pools()
        parts = self.pools.open(members)
        self._commit = self._pending = None  # what became of it has no say about these rows
        self.changed.commit()
        self.tell_withheld()
        return {
            member.name: self._resting(member, spec, part) for (member, spec), part in zip(members, parts, strict=True)
        }

    def _resting(self, member: Member, spec: Spec, part: Part) -> Resting:
        files, history, residents = member.history, None, None
        if spec.has_residents and member.name in self.volume.withheld:  # the files know rows that were forgotten since
            files, history = None, self.history(spec, member)
            residents = self.residents(spec, member, part.subject)
        return Resting(part, member.spec, member.steps, member.skipped_steps, files, history, residents)

    def wake(self, rows: Rows, name: str, member: Resting, init: Initializer | None) -> None:
        """Let a table go on from a member that nobody had open. Where that fails, all stays as it is."""
        spec = read_spec(member.spec, init, f"{self.opening.path}#{name}")
        history, residents = member.history, member.residents
        if history is None and residents is None:
            steps = member.steps, member.skipped_steps
            known = Member(name, 0, None, member.spec, *steps, member.part.count, member.files or ())
            history, residents = self.history(spec, known), self.residents(spec, known, rows.subject)
        member.part.spec = spec
        rows.install(spec, member.part, history, member.steps, member.skipped_steps, residents=residents)
        rows.version.commit()
        self.versions[name] = rows.version

    def rest(self, rows: Rows, name: str, part: Part) -> Resting:
        """Return a member whose table is closed: the next commit still has it, with all of its changes."""
        files: tuple[HistoryFile, ...] | None = None
        if self.versions.pop(name).is_committed:
            files = next((member.history for member in self.last().members if member.name == name), None)
        else:
            self.changed.advance()
        known = rows.history, rows.residents
        return Resting(part, _described(rows), rows.steps, rows.skipped_steps, files, *known)

    def drop(self, member: Resting) -> None:
        """Forget a member and its rows; the next commit does. It is quiet."""
        self.pools.release(member.part)
        self.changed.advance()

    def last(self) -> GroupManifest:
        """Return the last commit."""
        assert isinstance(self.volume.manifest, GroupManifest)  # who opens a table alone has no `GroupFiles`
        return self.volume.manifest

    def rollback(self, rows: Rows | None, commit: int) -> int:
        group = self._group()
        assert group is not None  # who calls has it, or a member, which has it
        self.check_writable()
        self.wait_for_quiet(None)
        manifest = self.manifest(commit)
        group.wake_mirrored()
        self.stop_compaction()
        self.volume.rollback(manifest, publishing.now(), self.opening.keep)
        try:
            self._go_on(rows)
        except BaseException:  # the records in RAM are not those of the files
            group.lose()
            self.close_all()
            raise
        self.went_back_to = commit
        group.tell_after_rollback()
        return self.volume.manifest.commit

    def _go_on(self, rows: Rows | None) -> None:
        group = self._group()
        assert group is not None  # who calls has it, or a member, which has it
        self.pools.leave()
        group.take_over(self.resume())

    def begin_child(self) -> None:
        """Go on in a child process, with caches of its own: see `Files.after_fork`."""
        if self.is_of_this_process:
            return
        self.check_process()
        self._process = os.getpid()
        group = self._group()
        assert group is not None
        group.take_over(self.resume())


def _described(rows: Rows) -> dict[str, Any]:
    return describe_spec(rows.spec) | rows.kept_options


def _plain_spec(member: Member, path: str) -> Spec:
    """Return the description of a member without its first values, which an array may be needed for."""
    return read_spec({**member.spec, "init": Zeros().describe()}, None, f"{path}#{member.name}")


def open_or_make_group(opening: Opening) -> Volume:
    """Open the group at a path, or make it."""
    if opening.mode == "r" or holds_table(opening.system, opening.path):
        return _open(opening)
    manifest = GroupManifest(uuids.uuid4().hex, 0, None, None, None, publishing.now())
    try:
        return Volume.create(opening.system, opening.path, manifest, opening.lock)
    except FileExistsError:
        if not holds_table(opening.system, opening.path):
            raise
        return _open(opening)  # somebody else was faster


def _open(opening: Opening) -> Volume:
    volume = open_volume(opening)
    if isinstance(volume.manifest, GroupManifest):
        return volume
    volume.close()
    raise TableFileError(
        f"{opening.path} holds a table alone, no group. Open it by er.open({opening.path!r}), or choose another path. "
        "A member takes its rows over by load_state(table)."
    )
