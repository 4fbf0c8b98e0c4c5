"""Tables that have a name, found by it in this process: they are pickled by reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from embedrock.errors import ArgumentError, UnsupportedError

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(name: str, table: object) -> None:
    """Make a table the one of its name."""
    _named[name] = table


def table_named(name: str) -> Any:
    """Return the open table of that name in this process (what unpickling a table does)."""
    table = _named.get(name)
    if table is None:
        raise ArgumentError(
            f"no table named {name!r} is open in this process, and tables are pickled by reference. Make it first: "
            f"er.Table(..., name={name!r})."
        )
    return table


def reference_to(table: object, name: str | None, subject: str) -> tuple[Callable[[str], Any], tuple[str]]:
    """Return what pickling makes of a table: how to find it by its name.

    Raises:
        UnsupportedError: it has no name, or another table has it now.
    """
    if name is None or _named.get(name) is not table:
        remedy = "a name (name='users')" if name is None else f"a name of its own, as another table got {name!r} since,"
        path = getattr(table, "path", None)  # of a table on disk, which has no state()
        elsewhere = (
            "or save its rows: table.state(), in PyTorch model.state_dict()"
            if path is None
            else f'or open what is committed in the other process: er.open({path!r}, mode="r"), for its layer'
        )
        raise UnsupportedError(
            f"{subject} cannot be pickled: rows may be larger than memory. Give it {remedy} to "
            f"pickle it by reference inside this process, {elsewhere}."
        )
    return table_named, (name,)
