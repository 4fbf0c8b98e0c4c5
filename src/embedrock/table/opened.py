"""Tables, groups and vocabularies on disk that this process writes, found by their path; and tables by their name.

A path has one writer. In a notebook that is often the table of a cell that ran before. The old model, or the traceback
of an error, still has it while the new one is made. Sharing that table can be wrong: two layers with one path by
mistake would train the same rows. Closing it can be wrong, too: uncommitted steps would be lost. So a second opening is
an error, and these functions state the choice.
"""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from embedrock.errors import ArgumentError, TableLockedError, UnsupportedError
from embedrock.system.log import caller
from embedrock.system.paths import local_path

T = TypeVar("T")


class OpenWriter(Protocol):
    """A table, group or vocabulary that this process writes."""

    @property
    def subject(self) -> str: ...

    @property
    def uncommitted(self) -> bool: ...

    @property
    def is_open_here(self) -> bool: ...

    def close(self) -> None: ...


_tables: weakref.WeakSet[OpenWriter] = weakref.WeakSet()
_writers: weakref.WeakValueDictionary[str, OpenWriter] = weakref.WeakValueDictionary()
_named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()  # pickled by reference
_since: weakref.WeakKeyDictionary[OpenWriter, str] = weakref.WeakKeyDictionary()  # the lines of code that opened them


def note(table: OpenWriter, path: str | None) -> None:
    """Register a table alone, or a group, that this process may change; None: it is in RAM."""
    _tables.add(table)
    if path is not None:
        note_writer(table, path)


def note_writer(writer: OpenWriter, path: str) -> None:
    """Register a writer that was opened at a path."""
    _writers[os.path.realpath(path)], _since[writer] = writer, caller()


def opened(path: str | os.PathLike[str]) -> Any:
    """Return the `Table`, `Group` or `Vocabulary` that this process has open for writing at a path; None without one.

    Args:
        path: folder of a table, group or vocabulary.

    Example:
        >>> import tempfile, embedrock as er
        >>> path = tempfile.mkdtemp() + "/users.rock"
        >>> table = er.opened(path) or er.Table(rows=100, dim=4, path=path)
        >>> er.opened(path) is table
        True
        >>> er.close(path)
        >>> er.opened(path) is None
        True
    """
    table = _writers.get(os.path.realpath(local_path(path)))
    return table if table is not None and table.is_open_here else None


def all_open() -> list[OpenWriter]:
    """Return the tables and groups that this process may change, in RAM and on disk."""
    while True:
        try:
            return [table for table in list(_tables) if table.is_open_here]
        except RuntimeError:  # another thread made one meanwhile
            continue


def close(path: str | os.PathLike[str]) -> None:
    """Close the writer of this process at a path, see `opened`. Does nothing without one.

    As by its own `close`, uncommitted changes are lost, with an `UncommittedWarning`. A notebook cell that begins with
    it can be run again.

    Args:
        path: folder of a table, group or vocabulary.

    Example:
        >>> import tempfile, embedrock as er
        >>> path = tempfile.mkdtemp() + "/users.rock"
        >>> for run in range(2):  # a cell that is run twice
        ...     er.close(path)
        ...     table = er.Table(rows=100, dim=4, path=path)
        >>> er.close(path)
    """
    writer = opened(path)
    if writer is not None:
        writer.close()


def open_alone(path: str | os.PathLike[str], open_it: Callable[[], T]) -> T:
    """Return the result of `open_it`, which opens a path for writing. Unreferenced writers of it are closed first.

    Raises:
        TableLockedError: another writer has the table open, here or elsewhere.
    """
    try:
        return open_it()
    except TableLockedError:
        if opened(path) is None:
            raise
    gc.collect()  # models are reference cycles, which are collected late
    try:
        return open_it()
    except TableLockedError as error:
        table = opened(path)
        if table is None:
            raise
        raise _taken(table, str(error.filename)) from None


def _taken(writer: OpenWriter, path: str) -> TableLockedError:
    changes = ", and it has changes that no commit has" * writer.uncommitted
    commit = f"er.opened({path!r}).commit(); " * writer.uncommitted  # closing alone would lose them
    return TableLockedError(
        errno.EWOULDBLOCK,
        f"this process has it open for writing already: {writer.subject}, since {_since[writer]}{changes}. Go "
        f"on with it, er.opened({path!r}), or close it first, {commit}er.close({path!r}). (A notebook's cell that "
        'begins with either can be run again.) Or open it for reading, mode="r"',
        path,
    )


# ---------------------------------------------------------------- by name


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

    `reader`, of a table on disk, is the expression that opens it for reading in another process.

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
