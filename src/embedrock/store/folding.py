"""Merging of logs: many small logs of past commits become one, so that few files are open.

Compaction rewrites each sorted segment once per about as many bytes of logs as the base has. Until then each commit
leaves a file. So as soon as `FAN` logs have about the same size, they are merged into a larger one. Each row is
rewritten once or twice for each factor of `FAN` by which logs grow. Few logs stay open: 32 of up to 1 MiB. There may be
`MORE` of larger ones, as compaction removes nearly all of them before a merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from embedrock.store.record_store import RecordStore, is_gone, newest_of, open_run
from embedrock.store.segments import Segment
from embedrock.system.scopes import on_failure

FAN = 16  # logs of one size that are merged
LARGE, MORE = 2, 3 * FAN  # from level LARGE on, MORE logs may exist: compaction removes most of them
LEVEL_BYTES = 64 << 10  # largest log of level 0; each level has logs `FAN` times as large


def due(sizes: Sequence[int]) -> int:
    """Return how many of the newest logs to merge. `sizes` has the oldest log first.

    Example:
        >>> due([10**9] + [5000] * 15), due([10**9] + [5000] * 16)
        (0, 16)
    """
    levels = [_level(size) for size in sizes]
    for level in range(max(levels, default=-1) + 1):
        tail = next((number for number, each in enumerate(reversed(levels)) if each > level), len(levels))
        if tail >= FAN * (level + 1) + (MORE if level >= LARGE else 0):
            return tail
    return 0


def _level(nbytes: int) -> int:
    level = 0
    while nbytes > LEVEL_BYTES * FAN**level:
        level += 1
    return level


def fold(store: RecordStore, most_bytes: int | None, pace: Callable[[], None]) -> bool:
    """Merge the logs that are `due` into one. The next commit publishes it. Until then the old files stay.

    Logs of a running compaction are left out. Return whether larger merges are left.

    Args:
        store: the record store. Other threads may use it meanwhile.
        most_bytes: limit of bytes to merge. Larger merges are left to another call. None: no limit.
        pace: called every few MB, and may raise.

    Raises:
        OSError: the disk failed. Nothing has changed.
    """
    if not store.folding.acquire(blocking=most_bytes is None):
        return False
    try:
        with store.lock:
            logs = [segment for segment in store.delta if segment.number >= store.compacted_below]
        logs = logs[len(logs) - due([segment.file.size for segment in logs]) :]
        is_left = most_bytes is not None and sum(segment.file.size for segment in logs) > most_bytes
        if logs and not is_left:
            _fold(store, logs, pace)
        return is_left
    finally:
        store.folding.release()


def _fold(store: RecordStore, logs: Sequence[Segment], pace: Callable[[], None]) -> None:
    ids, old = newest_of(logs, store.base)
    if not len(ids):
        return
    gone = is_gone(old)
    gone_ids, ids, old = ids[gone], ids[~gone], old[~gone]
    log = store.create_log(-1)

    def count(nbytes: int) -> None:
        store.add(bytes_compacted=nbytes)
        pace()

    with closing(log), on_failure(lambda: store.table_folder.unlink([log.path], lambda: False)):
        store.copy(ids, old, log, count)
        log.gone = gone_ids
        # The new log replaces the newest of them in the order of segments. So later segments stay newer.
        segment = open_run(store.system, store.folder, log.seal(), store.content, logs[-1].number)
    store.replace(logs, segment, ids, old, gone_ids)
