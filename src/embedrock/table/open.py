"""`open_table`: a table on disk as of a commit."""

from __future__ import annotations

import os
from typing import Unpack

from embedrock.errors import UnknownArgumentError
from embedrock.machine.sizes import parse_device_memory
from embedrock.process.interrupts import held_back
from embedrock.table.opening import open_rows
from embedrock.table.options import OpenOptions, declared, filled, shows
from embedrock.table.table import Table
from embedrock.wording import did_you_mean


@shows(OpenOptions)
def open_table(
    path: str | os.PathLike[str], mode: str = "w", at: int | None = None, **options: Unpack[OpenOptions]
) -> Table:
    """Open a table on disk as of a commit.

    Args:
        path: its folder.
        mode: "w" to be its one writer, or "r" for a snapshot that never moves, whatever a writer does meanwhile.
        at: number of the commit, for a reader; None: the last one.
        memory, on_nonfinite, name, policy, keep, lock, system, device_memory: as in `Table`.
        init: for a table whose first values come from an array: that `er.FromArray`.

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
    given = filled(OpenOptions, options, _refuse)
    given |= {"path": path, "mode": mode, "directory": "auto"}
    given["device_memory"] = parse_device_memory(given["device_memory"])
    with held_back():  # or Ctrl-C may leave files open that no table has
        return Table.over(*open_rows(at, given), given)


def _refuse(unknown: list[str]) -> None:
    names = ["mode", "at", *(name for name, option in declared(OpenOptions).items() if not option.is_internal)]
    raise UnknownArgumentError(
        f"er.open has no argument {unknown[0]!r}: it takes path, {', '.join(names[:-1])} and {names[-1]}."
        f"{did_you_mean(unknown[0], names)}"
    )
