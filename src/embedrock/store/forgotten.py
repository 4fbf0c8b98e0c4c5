"""`Tombstones`: which rows were deleted in which commit, so that no earlier commit restores them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from embedrock.store.segments import damaged

IDS, COMMITS, RENAMED = "ids", "commits", "renamed"
MOST_FILES = 32  # files per commit, before they are merged into one


class MemberRenaming(NamedTuple):
    """Renaming of a table in a group.

    Attributes:
        commit: the first commit with the new name.
        origin: the commit whose content a rollback restored, with its names. None: no rollback.
    """

    commit: int
    old: str
    new: str
    origin: int | None = None


class Tombstones:
    """Deleted rows of a table alone, or of each member of a group.

    Attributes:
        rows: ids, and the numbers of the first commits without them. The keys are the tables' names in the commit
            before, "" for a table alone.
        renamings: renamings of members, in order.
    """

    def __init__(
        self,
        rows: Iterable[tuple[str, np.ndarray, np.ndarray]] = (),
        renamings: Iterable[MemberRenaming] = (),
    ) -> None:
        parts = dict[str, list[tuple[np.ndarray, np.ndarray]]]()
        for name, ids, commits in rows:
            parts.setdefault(name, []).append((ids, commits))
        self.renamings = list(renamings)
        renamed = np.unique([one.commit for one in self.renamings])
        self.rows = {name: _latest(each, renamed) for name, each in parts.items()}

    @classmethod
    def at(
        cls,
        commit: int,
        rows: Iterable[tuple[str, np.ndarray]],
        renamings: Iterable[tuple[str, str]],
        origin: int | None = None,
    ) -> Tombstones:
        """Return the tombstones of one commit: ids by table name, and renamed members."""
        parts = [(name, ids, np.full(len(ids), commit)) for name, ids in rows]
        return cls(parts, [MemberRenaming(commit, *names, origin) for names in renamings])

    def __bool__(self) -> bool:
        return bool(self.rows or self.renamings)

    @classmethod
    def of_files(cls, files: Sequence[Mapping[str, np.ndarray]], where: str) -> Tombstones:
        """Return the tombstones of several files of `arrays`, the oldest first.

        Raises:
            CorruptTableError: a file is malformed. The message names `where`.
        """
        rows, renamings = list[tuple[str, np.ndarray, np.ndarray]](), list[MemberRenaming]()
        try:
            for arrays in files:
                for key, array in arrays.items():
                    kind, *names = json.loads(key)
                    if kind == RENAMED:
                        number, *origin = map(int, array)
                        renamings.append(MemberRenaming(number, str(names[0]), str(names[1]), *origin[:1]))
                    elif kind == IDS:
                        commits = arrays[_key(COMMITS, *names)]
                        if array.dtype != np.int64 or commits.dtype != np.int64 or array.shape != commits.shape:
                            raise ValueError(f"{array.dtype}{array.shape}, {commits.dtype}{commits.shape}")
                        rows.append((str(names[0]), array, commits))
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            raise damaged(where, "ids that were forgotten, and commits", f"{error!r:.200}") from error
        return cls(rows, renamings)

    def arrays(self) -> dict[str, np.ndarray]:
        made = dict[str, np.ndarray]()
        for name, (ids, commits) in self.rows.items():
            made |= {_key(IDS, name): ids, _key(COMMITS, name): commits}
        for number, one in enumerate(self.renamings):
            told = [one.commit] if one.origin is None else [one.commit, one.origin]
            made[_key(RENAMED, one.old, one.new, number)] = np.array(told)
        return made

    def joined(self, other: Tombstones) -> Tombstones:
        """Return these and later tombstones together."""
        parts = [(name, *each) for one in (self, other) for name, each in one.rows.items()]
        return Tombstones(parts, [*self.renamings, *other.renamings])

    def since(self, commit: int) -> Tombstones:
        newer = [(name, ids[at > commit], at[at > commit]) for name, (ids, at) in self.rows.items()]
        return Tombstones(
            [part for part in newer if len(part[1])], [one for one in self.renamings if one.commit > commit]
        )

    def before(self, commit: int) -> dict[str, np.ndarray]:
        """Return the ids that commits after a number deleted, by their table's name in that commit."""
        found = dict[str, list[np.ndarray]]()
        for name, (ids, commits) in self.since(commit).rows.items():
            for number in np.unique(commits).tolist():
                for was in _names_in(commit, name, [one for one in self.renamings if commit < one.commit < number]):
                    found.setdefault(was, []).append(ids[commits == number])
        return {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}


def old_name(name: str, renamings: Sequence[tuple[str, str]]) -> str:
    """Return the name of a table before some renamings: pairs of names, old and new, in order."""
    for old, new in reversed(renamings):
        name = old if new == name else name
    return name


def _names_in(commit: int, name: str, renamings: Sequence[MemberRenaming]) -> set[str]:
    """Return the possible names of a table in a commit, before some renamings.

    A rollback to that commit or a later one undoes the renamings between. A rollback to an earlier commit may have
    removed the table, and another one may have restored it. Then all its possible names count, so that no deleted row
    returns.
    """
    names, undone, is_sure = {name}, renamings[-1].commit if renamings else 0, True
    for one in reversed(renamings):
        if one.commit > undone:
            continue
        if one.origin is not None and one.origin >= commit:
            undone = one.origin
            continue
        is_sure = is_sure and one.origin is None
        if one.new in names:
            names = {one.old} if is_sure else names | {one.old}
    return names


def _key(kind: str, *names: object) -> str:
    return json.dumps([kind, *names])


def _latest(parts: Sequence[tuple[np.ndarray, np.ndarray]], renamed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, ascending, with the last commit that deleted each. A renaming starts a new count."""
    ids, commits = (np.concatenate(each) for each in zip(*parts, strict=True))
    since = np.searchsorted(renamed, commits)  # a name may belong to another table from then on
    order = np.lexsort((-commits, since, ids))
    ids, commits, since = ids[order], commits[order], since[order]
    is_first = np.ones(len(ids), bool)
    is_first[1:] = (ids[1:] != ids[:-1]) | (since[1:] != since[:-1])
    return ids[is_first], commits[is_first]
