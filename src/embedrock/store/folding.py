"""Folding: many small logs of past commits become one, so that few files are open, however many commits were made.

Compaction folds each chunk of the base once for about as many bytes in logs as the base has. Until then each commit
leaves a file. So logs of about one size become one larger one as soon as there are `FAN` of them. Each row is written
again once or twice for each factor of `FAN` by which logs grow, and few are open: 32 of up to 1 MiB. Of larger ones
there may be `MORE`, as compaction makes nearly all of them useless before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from embedrock.store.record_store import RecordStore, is_gone, locations_of, newest_of, open_run
from embedrock.store.segments import Segment

FAN = 16  # logs of a size that become one
LARGE, MORE = 2, 3 * FAN  # of logs of this level and above there may be so many more: most go before they become one
LEVEL_BYTES = 64 << 10  # logs of up to so many bytes are of level 0; of the next one up to `FAN` times as many


def due(sizes: Sequence[int]) -> int:
    """Return how many of the newest logs should become one, by their sizes, the oldest first.

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
    """Make one log of those that are `due`. The next commit publishes it; until then the old files stay.

    Logs that a compaction is folding meanwhile stay as they are. Returns whether there are larger ones to be folded.

    Args:
        store: of the table; others may use it meanwhile.
        most_bytes: leave more than that for another call; None: as many as are due.
        pace: called every few MB; it may raise.

    Raises:
        OSError: the disk. Nothing has changed.
    """
    if not store.folding.acquire(blocking=most_bytes is None):
        return False
    try:
        with store.lock:
            logs = [run for run in store.delta if run.number >= store.compacted_below]
        logs = logs[len(logs) - due([run.file.size for run in logs]) :]
        is_left = most_bytes is not None and sum(run.file.size for run in logs) > most_bytes
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

    try:
        store.copy(ids, old, log, count)
        log.gone = gone_ids
        # It takes the place of the newest of them among the runs, so that all that is newer stays newer.
        run = open_run(store.system, store.folder, log.seal(), store.content, logs[-1].number)
    except BaseException:
        store.table_folder.unlink([log.path], lambda: False)
        raise
    finally:
        log.close()
    store.replace(logs, run, ids, old, locations_of(run.number, 0, run.count), gone_ids)
