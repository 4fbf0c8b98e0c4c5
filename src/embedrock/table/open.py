"""`open_table`: a table on disk, or a group, as of a commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

from embedrock.errors import ArgumentError, UnknownArgumentError
from embedrock.machine.sizes import parse_device_memory
from embedrock.process.interrupts import held_back
from embedrock.store.manifest import GroupManifest
from embedrock.store.volume import Volume
from embedrock.table.files import open_volume
from embedrock.table.group import Group
from embedrock.table.keeper import Opening
from embedrock.table.opened import open_alone
from embedrock.table.opening import check_options, opening_of, rows_in
from embedrock.table.options import OpenOptions, declared, filled, shows
from embedrock.table.table import Table
from embedrock.wording import did_you_mean


@shows(OpenOptions)
def open_table(
    path: str | os.PathLike[str], mode: str = "w", at: int | None = None, **options: Unpack[OpenOptions]
) -> Any:
    """Open a table on disk, or a group, as of a commit.

    Args:
        path: its folder.
        mode: "w" to be its one writer, or "r" for a snapshot that never moves, whatever a writer does meanwhile.
        at: number of the commit, for a reader; None: the last one.
        memory, on_nonfinite, name, policy, keep, lock, system, device_memory: as in `Table`.
        init: for a table whose first values come from an array: that `er.FromArray`.

    Returns:
        A `Table`; a `Group`, where there is one.

    Raises:
        TableFileError: there is no table, or `init` is missing or another one.
        TableLockedError: another writer has it open.
        CorruptTableError, NewerFormatError: its files are damaged, or of a newer release.
        ArgumentError: there is no commit `at`.

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
    given = filled(OpenOptions, options, refuse)
    given |= {"path": path, "mode": mode, "directory": "auto"}
    given["device_memory"] = parse_device_memory(given["device_memory"])
    check_options(given, "auto")
    opening = opening_of(given, at)
    with held_back():  # or Ctrl-C may leave files open that no table has
        volume = open_alone(opening.path, lambda: open_volume(opening))
        if isinstance(volume.manifest, GroupManifest):
            return _group(volume, opening, given)
        return Table.over(*rows_in(volume, opening, given), given)


def _group(volume: Volume, opening: Opening, given: Mapping[str, Any]) -> Group:
    refused = [name for name in ("init", "device_memory") if given[name] is not None]
    if refused:
        volume.close()
        raise ArgumentError(
            f"`{refused[0]}` is of one table, and {opening.path!r} holds a group: pass it to group.table(name, ...)."
        )
    return Group.over(volume, opening, given["on_nonfinite"])


def refuse(unknown: list[str]) -> None:
    """Raise `UnknownArgumentError` for names that `er.open` does not take."""
    names = ["mode", "at", *(name for name, option in declared(OpenOptions).items() if not option.is_internal)]
    raise UnknownArgumentError(
        f"er.open has no argument {unknown[0]!r}: it takes path, {', '.join(names[:-1])} and {names[-1]}."
        f"{did_you_mean(unknown[0], names)}"
    )
