"""`open_table`: opens a table on disk, alone, of a group, or sharded."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any, Unpack

from embedrock.distributed.commits import CommonCommit, ShardFolders, last_of, layout_of, readable_of
from embedrock.distributed.reader import CONTENTS, STAY, OpenShards, ShardedTableReader
from embedrock.errors import ArgumentError, TableFileError
from embedrock.spec.description import check_same, describe_spec
from embedrock.system.interrupts import held_back
from embedrock.system.paths import local_path
from embedrock.system.sizes import parse_bytes
from embedrock.table import open as alone
from embedrock.table.options import OpenArguments, shows
from embedrock.table.table import Table


@shows(OpenArguments)
def open_table(
    path: str | os.PathLike[str], mode: str = "w", at: int | None = None, **options: Unpack[OpenArguments]
) -> Any:
    """Open a table on disk, a group, or a sharded table (see ``sharded=`` of layers), as of a commit.

    Args:
        path: its folder.
        mode: "w" for its one writer, or "r" for a snapshot, which stays the same until `refresh`. A sharded table is
            read as one table, and only its ranks can write it.
        at: number of the commit, for a reader; None: the last one. For a sharded table, the number in its first shard.
        memory, on_nonfinite, name, policy, keep, commit_every, lock, system, device_memory: as in `Table`.
        init: for a table whose initial values come from an array: that `er.FromArray`.

    Returns:
        A `Table`, or a `Group` if the folder holds one.

    Raises:
        TableFileError: there is no table, or `init` is missing or differs, or a writer opens a sharded table.
        TableLockedError: another writer has it open.
        CorruptTableError, NewerFormatError: its files are damaged, or of a newer release.
        ArgumentError: there is no commit `at`, or none that all shards have.

    Example:
        >>> import tempfile, embedrock as er
        >>> folder = tempfile.mkdtemp() + "/users.rock"
        >>> with er.Table(rows=10**9, dim=4, path=folder, rule=er.SGD(lr=0.5), init=er.Zeros()) as table:
        ...     table.update([7], [[1.0, 1.0, 1.0, 1.0]])
        ...     table.commit(step=1)
        1
        >>> with er.open(folder, mode="r") as table:
        ...     table.lookup([7])
        array([[-0.5, -0.5, -0.5, -0.5]], dtype=float32)
    """
    layout = layout_of(os.path.abspath(local_path(path)))
    if layout is None:
        return alone.open_table(path, mode, at, **options)
    given, opening = alone.asked(layout.path, mode, at, options)
    if mode != "r":
        raise TableFileError(
            errno.EISDIR,
            f"the table here is in {layout.ranks} parts, each of which one rank writes: a layer with sharded=True in "
            f'as many processes. Open it for reading: er.open({str(path)!r}, mode="r"), or a part of it, '
            f"{os.path.basename(layout.part(0))}",
            layout.path,
        )
    with held_back():  # or Ctrl-C may leave files open that belong to no table
        location = ShardedTableReader(_parts_as_of(layout, at, options), opening, lambda parts: _newer(parts, options))
        try:
            return Table.over(location.rows(given), location, given)
        except BaseException:
            location.close_all()
            raise


def _commit(layout: ShardFolders, at: int | None) -> CommonCommit:
    if at is None:
        return last_of(layout)
    found = {common.numbers[0]: common for common in readable_of(layout)}
    if at not in found:
        raise ArgumentError(
            f"{layout.path} has no commit {at} that all of its {layout.ranks} parts have: it has "
            f"{', '.join(map(str, found)) or 'none'}, by their numbers in the first part."
        )
    return found[at]


def _newer(parts: OpenShards, options: OpenArguments) -> OpenShards | None:
    """Open the shards as of the newest common commit; return None if they are open at that one."""
    layout = layout_of(parts.layout.path)
    if layout is None:
        raise TableFileError(errno.ENOENT, "there is no table in parts here any more. Open it anew", parts.layout.path)
    if (layout, last_of(layout)) == (parts.layout, parts.commit):
        return None
    newer = _parts_as_of(layout, None, options)
    try:
        _check_like(parts.tables[0], newer.tables[0], STAY)
    except BaseException:
        newer.close()
        raise
    return newer


def _parts_as_of(layout: ShardFolders, at: int | None, options: OpenArguments) -> OpenShards:
    """Open all shards as of a commit. If a writer drops that meanwhile, open the next one."""
    while True:
        common = _commit(layout, at)
        try:
            return OpenShards(layout, common, _parts(layout, common, options))
        except (ArgumentError, FileNotFoundError):
            if _commit(layout, at) == common:
                raise


def _parts(layout: ShardFolders, common: CommonCommit, options: OpenArguments) -> list[Table]:
    own: dict[str, Any] = {key: value for key, value in options.items() if key != "name"}  # of the whole table
    if own.get("memory") is not None:
        own["memory"] = max(1, parse_bytes(own["memory"]) // layout.ranks)
    opened = list[Table]()
    try:
        for part, number in zip(layout.parts, common.numbers, strict=True):
            opened.append(alone.open_table(part, "r", number, **own))
            _check_like(opened[0], opened[-1], CONTENTS)
    except BaseException:
        for table in opened:
            table.close()
        raise
    return opened


def _check_like(first: Table, other: Table, contents: Sequence[str]) -> None:
    expected, got = (describe_spec(table.spec) for table in (first, other))
    check_same({**got, **{key: expected[key] for key in contents}}, got, str(other.path))
