"""Tables that have a name, found by it in this process: they are pickled by reference."""

from __future__ import annotations

import weakref
from typing import Any

from embedrock.errors import ArgumentError

_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(name: str, table: object) -> None:
    """Make a table the one of its name."""
    _named[name] = table


def is_registered(name: str, table: object) -> bool:
    """Return whether a table is the one of its name."""
    return _named.get(name) is table


def table_named(name: str) -> Any:
    """Return the open table of that name in this process (what unpickling a table does)."""
    table = _named.get(name)
    if table is None:
        raise ArgumentError(
            f"no table named {name!r} is open in this process, and tables are pickled by reference. Make it first: "
            f"er.Table(..., name={name!r})."
        )
    return table
