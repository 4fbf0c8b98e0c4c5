"""Filling: records that come in the order of their ids go straight into chunks of the base, each written once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from embedrock.machine.vfs import retried
from embedrock.store import folder as folders
from embedrock.store.base import Base, Chunk
from embedrock.store.compaction import chunk_rows, remove_chunks
from embedrock.store.runs import CRC_BYTES, ChunkWriter, Run
from embedrock.store.store import Store, chunk_of, open_run

Batch = tuple[np.ndarray, np.ndarray]


def fill(store: Store, batches: Iterable[Batch], most: int) -> int:
    """Give an empty store its records; return how many. The next commit publishes them.

    Args:
        store: of the table, which has no records yet, and which nobody else uses.
        batches: ids int64 (n,) that ascend, also from batch to batch, and records uint8 (n, record_bytes).
        most: records that they have together, at most.

    Raises:
        OSError: the disk. Nothing has changed.
    """
    writer = _Filling(store, most)
    try:
        for ids, records in batches:
            writer.append(ids, records)
        writer.end_chunk()
        retried(store.system.fsync_folder, folders.join(store.folder, "base"))
    except BaseException:
        writer.give_up()
        raise
    with store.lock:
        for run, _ in writer.made:
            store.take(run)
        store.base, store.base_runs = Base([chunk for _, chunk in writer.made]), [run for run, _ in writer.made]
        store.base_is_ahead = True
    return store.base.count


class _Filling:
    """Writes chunks, one after the other.

    Attributes:
        made: those that are whole, with their files.
    """

    def __init__(self, store: Store, most: int) -> None:
        self._store, self._folder = store, store.free_name("base")
        retried(store.system.mkdir, folders.join(store.folder, self._folder))
        self._writer: ChunkWriter | None = None
        self._rows = chunk_rows(most, store.content.record_bytes + CRC_BYTES)
        self._first_kept = store.next_run()
        self._lo = self._last = 0
        self.made: list[tuple[Run, Chunk]] = []

    def append(self, ids: np.ndarray, records: np.ndarray) -> None:
        """Write records behind those that are there."""
        while len(ids):
            writer = self._writer or self._begin(int(ids[0]))
            part = slice(0, self._rows - writer.count)
            slots = np.arange(len(ids[part]))
            sealed = self._store.seal(records[part], slots, ids[part])
            writer.append(sealed, ids[part])
            self._store.add(bytes_written=sealed.nbytes)
            self._last = int(ids[part][-1])
            ids, records = ids[part.stop :], records[part.stop :]
            if writer.count == self._rows:
                self.end_chunk()

    def _begin(self, lo: int) -> ChunkWriter:
        store, name = self._store, f"{self._folder}/c{lo & (2**64 - 1):x}.rows"
        self._lo = lo
        content = store.content
        self._writer = ChunkWriter.create(store.system, store.folder, name, content.uuid, content.record_bytes)
        return self._writer

    def end_chunk(self) -> None:
        """Make the chunk that is being written durable."""
        if self._writer is None:
            return
        store = self._store
        entry = self._writer.finish(self._lo, self._last + 1)
        self._writer = None
        run = open_run(store.system, store.folder, entry, store.content, store.next_run())
        run.folded_below = self._first_kept
        self.made.append((run, chunk_of(run)))

    def give_up(self) -> None:
        """Remove what was written."""
        if self._writer is not None:
            self._writer.close()
        for run, _ in self.made:
            run.close()
        remove_chunks(self._store, self._folder)
