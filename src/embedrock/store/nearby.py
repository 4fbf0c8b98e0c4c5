"""Whether there is a table at a path, and what somebody may have meant where there is none."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator

from embedrock.errors import TableFileError
from embedrock.machine.vfs import System
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.wording import nearest

CHECKPOINT = re.compile(r"step-\d+-[0-9a-f]{8}\..+")  # how `ert.save` and Keras' `TableCheckpoint` name files
SHARDED = "SHARDED"  # the file in the folder of a table in parts
VOCABULARY = "vocabulary"  # the folder of a vocabulary's commits
LOOKED_AT = 1000  # names in a folder, at most
SHOWN = 3


def holds_table(system: System, folder: str) -> bool:
    """Return whether there is a table, which has a commit from the moment that it is made."""
    return system.exists(f"{folder}/manifest") and bool(manifests.numbers(system, folder))


def what_is_at(system: System, folder: str) -> str:
    """Return what of ours a folder holds, in sentences that say how to open it; "" where there is nothing of ours."""
    with contextlib.suppress(OSError):  # not ours to look into
        if system.exists(f"{folder}/{SHARDED}"):
            return (
                "It holds a table in parts, which as many processes write, each by a layer with sharded=True. To read "
                f'it: er.open({folder!r}, mode="r")'
            )
        if holds_table(system, folder):
            return f"It holds a table, or a group of tables: er.open({folder!r})"
        if holds_vocabulary(system, folder):
            return f"It holds a vocabulary: er.Vocabulary({folder!r})"
        if any(map(CHECKPOINT.fullmatch, system.listdir(folder))):
            return "It has checkpoints of a model, whose tables lie where its layers' path= says"
    return ""


def holds_vocabulary(system: System, folder: str) -> bool:
    """Return whether there is a vocabulary, which has a commit from the moment that it is made."""
    inside = f"{folder}/{VOCABULARY}"
    return system.exists(inside) and bool(publishing.numbers(system, inside))


def check_table(system: System, path: str) -> None:
    """Raise `TableFileError` if there is no table; it says what may be meant instead."""
    if not holds_table(system, path):
        hint = _hint(system, os.path.abspath(path))
        expected = ": a folder with manifest/*.json was expected"
        make = "Make one: er.Table(rows, dim, path=...), or look for a typing error"
        text = f"there is no table here{'' if hint else expected}. {hint or make}"
        raise TableFileError(errno.ENOENT, text, path)


def table_around(system: System, path: str) -> str | None:
    """Return the folder of the table that a path is inside of, None if it is in none."""
    return next((folder for folder in _parents(path) if _is_table(system, folder)), None)


def _parents(path: str) -> Iterator[str]:
    while (parent := os.path.dirname(path)) != path:
        yield parent
        path = parent


def _hint(system: System, path: str) -> str:
    if (around := table_around(system, path)) is not None:
        return f"It lies inside of one: {around}"
    folder, name = os.path.split(path)
    try:
        system.listdir(path)
    except FileNotFoundError:
        tables = tables_in(system, folder)
        meant = nearest(name, tables)
        return f"Did you mean {folder}/{meant}?" if meant else _listed(folder, tables)
    except NotADirectoryError:
        return _what_file_is(name)
    except OSError:  # not ours to look into
        return ""
    return what_is_at(system, path) or _listed(path, tables_in(system, path))


def _what_file_is(name: str) -> str:
    if CHECKPOINT.fullmatch(name):
        return (
            "This is a checkpoint of a model: load it with the model, by ert.load(model, folder) or Keras. Its tables "
            "lie where the layers' path= says"
        )
    return "A table is a folder, and this is a file. To make a table of a file of vectors: embedrock import FILE TABLE"


def _listed(folder: str, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(f"{folder}/{name}" for name in names[:SHOWN])
    more = ", ..." if len(names) > SHOWN else ""
    return f"There {'is one' if len(names) == 1 else 'are some'} in {folder}: {shown}{more}"


def tables_in(system: System, folder: str) -> list[str]:
    """Return the names of the tables in a folder, of its first entries."""
    try:
        names = sorted(system.listdir(folder))[:LOOKED_AT]
    except OSError:  # not there, or not ours to look into
        return []
    return [name for name in names if _is_table(system, f"{folder}/{name}")]


def _is_table(system: System, folder: str) -> bool:
    with contextlib.suppress(OSError):  # not ours to look into
        return holds_table(system, folder)
    return False
