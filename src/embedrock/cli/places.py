"""The meaning of a command's TABLE: a table alone, a group, or a table of a group, FOLDER#NAME."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import embedrock as er
from embedrock.distributed.commits import layout_of
from embedrock.io.vfs import OS_SYSTEM
from embedrock.store.reading import check_table


class Place(NamedTuple):
    """The place of a table."""

    folder: str  # of the table, or of its group
    member: str | None  # name of the table in the group; None: the whole folder


def place_of(text: str | os.PathLike[str]) -> Place:
    """Parse a TABLE. An existing folder is taken by its full name, with a # in it or without.

    Example:
        >>> place_of("model.rock#users")
        Place(folder='model.rock', member='users')
    """
    path = os.fspath(text)
    folder, mark, member = path.rpartition("#")
    if not mark or not folder or not member or os.path.exists(path):
        return Place(path, None)
    return Place(folder, member)


def check_there(text: str) -> None:
    """Raise `TableFileError` unless there is a table, sharded or not, or a group."""
    for folder in folders_of(place_of(text).folder):
        check_table(OS_SYSTEM, folder)


def folders_of(folder: str) -> list[str]:
    """Return the folders of a table's shards, or its own folder if it is not sharded."""
    layout = layout_of(folder)
    return [folder] if layout is None else layout.parts


def whole_folder(text: str, verb: str) -> str:
    """Return the folder of a table alone or of a group, or raise `ArgumentError` for one table of a group."""
    place = place_of(text)
    if place.member is not None:
        raise er.ArgumentError(
            f"`embedrock {verb}` is for all tables of a group at once, as its commits are: pass {place.folder}, "
            f"without #{place.member}."
        )
    return place.folder


@contextmanager
def opened(text: str | os.PathLike[str], or_group: bool = False, **how: Any) -> Iterator[Any]:
    """Open a table alone, or one of a group, and close it, or the group, afterwards.

    With `or_group`, the text may also name a group. `how` is as for `er.open`.
    """
    place = place_of(text)
    with er.open(place.folder, **how) as found:
        is_group = isinstance(found, er.Group)
        if place.member is not None and not is_group:
            raise er.ArgumentError(f"{place.folder} holds a table alone, no group: leave #{place.member} out.")
        if place.member is None and is_group and not or_group:
            names = ", ".join(f"{place.folder}#{name}" for name in found) or "it has none yet"
            raise er.ArgumentError(f"{place.folder} holds a group of tables. Name one of them: {names}.")
        yield found if place.member is None else found[place.member]
