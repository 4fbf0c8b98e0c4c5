"""The files behind a table on disk, for tests that make them fail, or look at them."""

from __future__ import annotations

import embedrock as er
from embedrock.machine.vfs import System
from embedrock.store import folder as folders
from embedrock.store import manifest as manifests
from embedrock.store.manifest import AnyManifest, Manifest
from embedrock.store.store import Store
from embedrock.table.files import Files
from embedrock.table.keeper import Keeper
from embedrock.table.rows import Rows
from embedrock.table.table import rows_of
from embedrock.tiers.disk import Disk
from embedrock.tiers.part import Part


def files_of(table: er.Table) -> Files:
    """Return a table's files."""
    home = rows_of(table).home
    assert isinstance(home, Files)
    return home


def keeper_of(folder: er.Table | er.Group) -> Keeper:
    """Return who keeps the files of a table alone, or of a group or its member."""
    group = folder.group if isinstance(folder, er.Table) else folder
    files = files_of(folder) if isinstance(folder, er.Table) and group is None else group.files
    assert files is not None
    return files


def store_of(table: er.Table) -> Store:
    """Return where the records of a table on disk are, those of a member with those of others."""
    tier = rows_of(table).tier
    if isinstance(tier, Part):
        tier = tier.pool.tier
    assert isinstance(tier, Disk)
    return tier.store


def rows_in(folder: er.Table | er.Group) -> Rows | None:
    """Return what a keeper is given for it: the rows of a table alone."""
    return rows_of(folder) if isinstance(folder, er.Table) else None


def newest_manifest(system: System, folder: str) -> Manifest:
    """Return the manifest of the newest commit of a table alone."""
    return of_a_table(folders.newest(system, folder))


def of_a_table(manifest: AnyManifest) -> Manifest:
    """Return a manifest that is one of a table alone."""
    assert isinstance(manifest, Manifest)
    return manifest


def manifest_of(system: System, folder: str, commit: int) -> Manifest:
    """Return the manifest of a commit of a table alone."""
    return of_a_table(manifests.read(system, folder, commit))
