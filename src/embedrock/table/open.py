"""Open a table on disk, or a group, as of a commit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Unpack

from embedrock.errors import ArgumentError, UnknownArgumentError, did_you_mean
from embedrock.store.table_folder import TableFolder
from embedrock.system.interrupts import held_back
from embedrock.system.sizes import parse_device_memory
from embedrock.table.group import Group
from embedrock.table.opened import open_alone
from embedrock.table.opening import check_options, opening_of, rows_in
from embedrock.table.options import OpenArguments, OpenOptions, declared, filled, shows
from embedrock.table.storage import open_volume
from embedrock.table.table import Table


@shows(OpenArguments)
def open_table(
    path: str | os.PathLike[str], mode: str = "w", at: int | None = None, **options: Unpack[OpenArguments]
) -> Any:
    """Open a table alone on disk, or a group, as of a commit: `er.open`, except for sharded tables."""
    given, opening = asked(path, mode, at, options)
    with held_back():  # or Ctrl-C may leave files open without a table
        table_folder = open_alone(opening.path, lambda: open_volume(opening))
        if table_folder.manifest.is_group:
            return _group(table_folder, opening, given)
        return Table.over(*rows_in(table_folder, opening, given), given)


def asked(
    path: str | os.PathLike[str], mode: str, at: int | None, options: Mapping[str, Any]
) -> tuple[dict[str, Any], OpenOptions]:
    """Return all options of `er.open`, checked, and how to open the files."""
    given = filled(OpenArguments, options, refuse)
    given |= {"path": path, "mode": mode, "directory": "auto"}
    given["device_memory"] = parse_device_memory(given["device_memory"])
    check_options(given, "auto")
    return given, opening_of(given, at)


def _group(table_folder: TableFolder, opening: OpenOptions, given: Mapping[str, Any]) -> Group:
    if given["init"] is not None:
        table_folder.close()
        raise ArgumentError(
            f"`init` is of one table, and {opening.path!r} holds a group: pass it to group.table(name, ...)."
        )
    return Group.over(table_folder, opening, given["on_nonfinite"], given["device_memory"])


def refuse(unknown: list[str]) -> None:
    """Raise `UnknownArgumentError` for names that `er.open` does not take."""
    names = ["mode", "at", *(name for name, option in declared(OpenArguments).items() if not option.is_internal)]
    raise UnknownArgumentError(
        f"er.open has no argument {unknown[0]!r}: it takes path, {', '.join(names[:-1])} and {names[-1]}."
        f"{did_you_mean(unknown[0], names)}"
    )
