"""What somebody may have meant by a path where there is no table: one that is near, or something else of ours."""

from __future__ import annotations

import errno
import re
from itertools import islice
from pathlib import Path

from embedrock.errors import TableFileError
from embedrock.machine.vfs import OS_SYSTEM
from embedrock.store.folder import check_table, holds_table
from embedrock.wording import nearest

CHECKPOINT = re.compile(r"step-\d+-[0-9a-f]{8}\..+")  # how `ert.save` and Keras' `TableCheckpoint` name files
LOOKED_AT = 1000  # names in a folder, at most
SHOWN = 3


def check_there(path: str) -> None:
    """Raise what `er.open` would if there is no table, with what may have been meant instead."""
    try:
        check_table(OS_SYSTEM, path)
    except TableFileError:
        hint = _hint(Path(path).absolute())
        if not hint:
            raise
        raise TableFileError(errno.ENOENT, f"there is no table here. {hint}", path) from None


def _hint(path: Path) -> str:
    above = next((folder for folder in islice(path.parents, 2) if _is_table(folder)), None)
    if above is not None:
        return f"It lies inside of one: {above}"
    if path.is_file():
        return _what_file_is(path)
    if not path.exists():
        tables = [one.name for one in _tables_in(path.parent)]
        name = nearest(path.name, tables)
        return f"Did you mean {path.with_name(name)}?" if name else _listed(path.parent, tables)
    hint = _listed(path, [one.name for one in _tables_in(path)])
    if any(CHECKPOINT.fullmatch(one.name) for one in _inside(path)):
        return f"It has checkpoints of a model, whose tables lie where its layers' path= says. {hint}".rstrip()
    return hint


def _what_file_is(path: Path) -> str:
    if CHECKPOINT.fullmatch(path.name):
        return (
            "This is a checkpoint of a model: load it with the model, by ert.load(model, folder) or Keras. Its tables "
            "lie where the layers' path= says"
        )
    return "A table is a folder, and this is a file. To make a table of a file of vectors: embedrock import FILE TABLE"


def _listed(folder: Path, names: list[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(str(folder / name) for name in names[:SHOWN])
    more = ", ..." if len(names) > SHOWN else ""
    return f"There {'is one' if len(names) == 1 else 'are some'} in {folder}: {shown}{more}"


def _tables_in(folder: Path) -> list[Path]:
    return sorted(one for one in _inside(folder) if _is_table(one))


def _inside(folder: Path) -> list[Path]:
    try:
        return list(islice(folder.iterdir(), LOOKED_AT))
    except OSError:  # not there, or not ours to look into
        return []


def _is_table(folder: Path) -> bool:
    try:
        return holds_table(OS_SYSTEM, str(folder))
    except OSError:
        return False
