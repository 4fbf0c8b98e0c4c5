"""Named tables of this process, which are pickled by reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from embedrock.errors import ArgumentError, UnsupportedError

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(name: str, table: object) -> None:
    """Register a table under its name."""
    _named[name] = table


def table_named(name: str, remedy: str | None = None) -> Any:
    """Return the open table of that name in this process. Unpickling a table calls it."""
    table = _named.get(name)
    if table is None:
        raise ArgumentError(
            f"no table named {name!r} is open in this process, and tables are pickled by reference. Make it first: "
            f"{remedy or f'er.Table(..., name={name!r})'}."
        )
    return table


def reference_to(
    table: object, name: str | None, subject: str, reader: str | None
) -> tuple[Callable[..., Any], tuple[str, str | None]]:
    """Return the pickled form of a table: how to find it by its name.

    Args:
        table: the table.
        name: of it.
        subject: its name in error messages.
        reader: of a table on disk, the expression that opens it for reading in another process.

    Raises:
        UnsupportedError: it has no name, or another table has that name now.
    """
    if name is None or _named.get(name) is not table:
        remedy = "a name (name='users')" if name is None else f"a name of its own, as another table got {name!r} since,"
        instead = "save its rows: table.state(), in PyTorch model.state_dict()"
        if reader is not None:
            instead = (
                f"open it for reading where it is needed, as of its last commit: {reader}. Layers are made of what "
                "that returns, such as ert.Embedding(table)"
            )
        raise UnsupportedError(
            f"{subject} cannot be pickled: rows may be larger than memory. Give it {remedy} to "
            f"pickle it by reference inside this process, or {instead}."
        )
    return table_named, (name, reader)
