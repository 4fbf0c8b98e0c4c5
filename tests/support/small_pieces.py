"""Sizes with which small tables are cut into as many pieces as large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from embedrock.io import vfs
from embedrock.storage import commit
from embedrock.storage import disk_backend as disk
from embedrock.store import compaction, folding, reading
from embedrock.store import record_store as store
from embedrock.store import segments as runs
from embedrock.store.pieces import CompactionGoal
from embedrock.table import reading as row_reading
from embedrock.table import storage, upkeep

SIZES: dict[ModuleType, dict[str, int]] = {
    compaction: {"CHUNK_BYTES": 1, "LEAST_CHUNK_ROWS": 16, "SCAN_ROWS": 16},
    commit: {"PIECE_BYTES": 300, "QUIET_BYTES": 100, "PART_SLOTS": 12},
    folding: {"FAN": 3, "MORE": 6, "LEVEL_BYTES": 1 << 13},
    disk: {"LEAST_OVERLAY_BYTES": 4096},
    upkeep: {"LEAST_COMPACTED_BYTES": 1 << 14, "FOLDED_AT_ONCE": 1 << 11},
    reading: {"STAGING_BYTES": 1 << 15, "LONGEST_REQUEST": 1 << 13},
    runs: {"_BEHIND_BYTES": 1 << 12, "_BLOCK_IDS": 12, "_BLOCK_ROWS": 2},
    store: {"SCAN_ROWS": 64, "PIECE_BYTES": 300},
    row_reading: {"EXPORT_BATCH_ROWS": 50},
    vfs: {
        "DIRECT_BYTES": 3 << 12,
        "DIRECT_WRITE_BYTES": 1 << 12,
        "BOUNCE_BYTES": 1 << 13,
        "WRITE_BEHIND_BYTES": 1 << 12,
        "DIRTY_BYTES": 1 << 14,
    },
}


@contextmanager
def cut_small() -> Iterator[None]:
    """Cut tables into many pieces for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for module, sizes in SIZES.items():
            for name, size in sizes.items():
                patch.setattr(module, name, size)
        yield


@contextmanager
def files_replaced() -> Iterator[None]:
    """Let commits write all rows, where these are in RAM, however little has changed and is gained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "replaces_files", lambda tier: tier.cache.count >= tier.count)
        yield


def some_goal(of: store.RecordStore, draw: float) -> CompactionGoal | None:
    """Return a goal of a compaction, by a number in [0, 1): all, or some of the pieces, for their rows or their age."""
    if draw < 0.3:
        return None
    share = (draw - 0.3) / 0.7
    logs = sum(run.file.size for run in of.delta)
    return CompactionGoal(int(share * of.log_index.count), compaction.NO_AGE if draw < 0.8 else int(share * logs))
