"""`MappedSegments`: segments of a store in memory, whose pages all processes of the machine share."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from embedrock import kernels
from embedrock.store.reading import Runs, corrupt
from embedrock.store.record_store import RecordStore
from embedrock.system.buffers import address_of


class MappedSegments(NamedTuple):
    """Segments of a store in memory.

    Files of commits never change. If another program truncates one, the system ends this process (SIGBUS).

    Attributes:
        runs: the segments by number.
        files: the bytes of each, by path.
        memory: uint32, from the first mapped byte to the last one. Other memory lies between files.
        places: by number of a segment, the position of its first record in `memory`, its salt and step: int64 (n, 3).
    """

    runs: Runs
    files: dict[str, np.ndarray]
    memory: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, store: RecordStore, known: dict[str, np.ndarray]) -> MappedSegments:
        """Map the segments of a store, except those whose bytes are known by path."""
        runs, files = store.runs, dict[str, np.ndarray]()
        for run in runs.values():
            files[run.path] = known[run.path] if run.path in known else store.system.map(run.file.fd)
        starts = {path: address_of(file) for path, file in files.items()}
        low = min(starts.values(), default=0)
        high = max((starts[path] + file.nbytes for path, file in files.items()), default=0)
        memory = np.ctypeslib.as_array((ctypes.c_uint32 * ((high - low) // 4)).from_address(low))
        places = np.zeros((max(runs, default=-1) + 1, 3), np.int64)
        for number, run in runs.items():
            places[number] = (starts[run.path] - low + run.first) // 4, run.salt, run.step
        return cls(runs, files, memory, places)

    def read(
        self, store: RecordStore, ids: np.ndarray, copies: tuple[np.ndarray, np.ndarray], out: np.ndarray
    ) -> np.ndarray:
        """Copy the records of ids, and decode their first weights. Caller holds the store's lock.

        Args:
            ids: int64 (n,), which may repeat.
            copies: room for n records as uint32, and the same memory as weights.
            out: float32 (n, m), of m weights. Rows without a record get zeros.

        Returns:
            The location of each record, -1 for none: int64 (n,).

        Raises:
            CorruptTableError: a record is damaged.
        """
        found, index = np.empty((2, len(ids)), np.int64), (store.log_index.place, store.base.index)
        kernels.cpu.launch(kernels.cpu.mapped.read, *index, self.memory, self.places, ids, found, *copies, out)
        bad = (found[0] < -1).nonzero()[0]
        if len(bad):
            raise corrupt(self.runs, -2 - found[0, bad], ids[bad])
        return found[0]
