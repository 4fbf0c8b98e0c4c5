"""Files in the folder of a table that no commit names: what writers left behind, and what others put there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from embedrock.errors import EmbedrockError
from embedrock.machine.vfs import System
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store import publishing
from embedrock.store.runs import HEADER_BYTES, owner_of, read_start

# The names that are given (by 0.1, without the uuid's first digits), and no others.
_RUNS = re.compile(
    r"(?:delta|history|base)/\d{10}-(?:([0-9a-f]{8})-)?\d+(?:\.dlt|\.his|/c[0-9a-f]{1,16}\.rows)", re.ASCII
)
_COMPACTION = re.compile(r"base/\d{10}-(?:[0-9a-f]{8}-)?\d+", re.ASCII)
_RELEASED = re.compile(r"(\d{10})\.released", re.ASCII)


def remove_orphans(system: System, folder: str, uuid: str) -> int:
    """Remove what a writer that did not live to commit left behind; return how many files. Only a writer may.

    That are files that no commit names, and that were provably begun for this table. A failure costs disk space only.
    """
    removed = 0
    for name in _unnamed(system, folder):
        if _is_own(system, folder, name, uuid):
            with contextlib.suppress(OSError):
                folders.remove(system, folder, name)
                removed += 1
    with contextlib.suppress(OSError):
        _remove_empty(system, folder)
        _remove_remains(system, folder)
    return removed


def strange_files(system: System, folder: str) -> list[str]:
    """Return the names of files that no commit names, and that no writer removes, as they may be somebody's."""
    try:
        uuid = folders.newest(system, folder).uuid
    except (EmbedrockError, OSError):
        return []
    found = [name for name in _unnamed(system, folder) if not _is_own(system, folder, name, uuid)]
    return [name for name in found if system.exists(folders.join(folder, name))]  # a writer may be at work


def _is_own(system: System, folder: str, name: str, uuid: str) -> bool:
    """Return whether a file was begun for this table under this name, so that without a commit it is worth nothing.

    Its first page says so. Where a crash has left that torn, its name does, which has the uuid's first digits; or it is
    empty.
    """
    found = _RUNS.fullmatch(name)
    if found is None:
        return False
    try:
        page = read_start(system, folders.join(folder, name), HEADER_BYTES)
    except OSError:
        return False
    owner = owner_of(page, name)
    return owner == uuid if owner is not None else not page or found[1] == uuid[:8]


def _unnamed(system: System, folder: str) -> list[str]:
    try:
        named = folders.named_files(system, folder)
        return [name for name in _names(system, folder) if name not in named]
    except (EmbedrockError, OSError):
        return []  # what a damaged commit names is not known


def _names(system: System, folder: str) -> Iterator[str]:
    for kind in ("base", "delta", "history"):
        for name in _listed(system, folders.join(folder, kind)):
            path = f"{kind}/{name}"
            inside = _listed(system, folders.join(folder, path)) if _COMPACTION.fullmatch(path) else None
            yield from (path,) if inside is None else (f"{path}/{chunk}" for chunk in inside)


def _listed(system: System, folder: str) -> list[str]:
    try:
        return sorted(system.listdir(folder))
    except NotADirectoryError:  # somebody else's file
        return []


def _remove_empty(system: System, folder: str) -> None:
    """Remove folders that a compaction made and put nothing in."""
    for name in _listed(system, folders.join(folder, "base")):
        path = folders.join(folder, f"base/{name}")
        if _COMPACTION.fullmatch(f"base/{name}") and not _listed(system, path):
            with contextlib.suppress(OSError):
                system.rmdir(path)


def _remove_remains(system: System, folder: str) -> None:
    """Remove releases of commits that are gone, and manifests that were not published."""
    there = set(manifests.numbers(system, folder))
    for name in _listed(system, folders.join(folder, "manifest")):
        found = _RELEASED.fullmatch(name)
        if (found and int(found[1]) not in there) or publishing.is_unpublished(name):
            system.unlink(folders.join(folder, f"manifest/{name}"))
