"""The files behind a table on disk, for tests that make them fail, or look at them."""

from __future__ import annotations

import embedrock as er
from embedrock.io.vfs import System
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.record_pools import RecordRange
from embedrock.store import change_lists
from embedrock.store import folder as folders
from embedrock.store.manifest import TABLE, Manifest, StoreEntry
from embedrock.store.pieces import CompactionGoal
from embedrock.store.record_store import RecordStore
from embedrock.table.storage import StorageManager
from embedrock.table.table import rows_of

FOLDERS = (*TABLE.folders, change_lists.FOLDER)  # in the folder of a table


def files_of(folder: er.Table | er.Group) -> StorageManager:
    """Return the manager of the files of a table alone, or of a group or its member."""
    assert folder.storage is not None
    return folder.storage


def compact_in_background(folder: er.Table | er.Group, goal: CompactionGoal | None = None) -> None:
    """Compact logs in the background, all of them or down to a goal, unless it already runs."""
    files = files_of(folder)
    files.upkeep.compact(dict.fromkeys(files.table_folder.stores, goal))


def store_of(table: er.Table) -> RecordStore:
    """Return where the records of a table on disk are, those of a member with those of others."""
    tier = rows_of(table).tier
    if isinstance(tier, RecordRange):
        tier = tier.pool
    assert isinstance(tier, DiskBackend)
    return tier.store


def lists_of_commits(system: System, folder: str) -> set[str]:
    """Return the names of lists of changes that may be there: one of each commit."""
    newest = folders.newest(system, folder)
    files = change_lists.files_in(system, folder, newest.uuid)
    return {*{file.commit: file.name for file in files if file.commit <= newest.commit}.values()}


def newest_pool(system: System, folder: str) -> StoreEntry:
    """Return the entry of the records of a table alone in its newest commit."""
    return pool_of(folders.newest(system, folder))


def pool_of(manifest: Manifest) -> StoreEntry:
    """Return the entry of the records of a table alone."""
    assert not manifest.is_group
    (pool,) = manifest.pools
    return pool
