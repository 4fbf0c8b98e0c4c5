"""`MappedBackend`: records in files that are mapped into memory, for readers. Processes share one copy of them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, NoReturn

import numpy as np

from embedrock import kernels
from embedrock.errors import UnsupportedError
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin, RamLayout
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.listeners import EvictionListener
from embedrock.storage.records import Records
from embedrock.store.reading import Runs, corrupt
from embedrock.store.record_store import RecordStore
from embedrock.system.buffers import address_of


class MappedSegments(NamedTuple):
    """Segments of a store in memory.

    Files of commits never change. If another program truncates one, the system ends this process (SIGBUS).

    Attributes:
        runs: the segments by number. Their files keep the memory.
        memory: uint32, from the first mapped byte to the last one. Other memory lies between files.
        places: by number of a segment, the position of its first record in `memory`, its salt and step: int64 (n, 3).
    """

    runs: Runs
    memory: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, store: RecordStore) -> MappedSegments:
        """Map the segments of a store."""
        runs = store.runs
        starts = {number: address_of(run.file.mapped) for number, run in runs.items()}
        low = min(starts.values(), default=0)
        high = max((start + runs[number].file.size for number, start in starts.items()), default=0)
        memory = np.ctypeslib.as_array((ctypes.c_uint32 * ((high - low) // 4)).from_address(low))
        places = np.zeros((max(runs, default=-1) + 1, 3), np.int64)
        for number, run in runs.items():
            places[number] = (starts[number] - low + run.first) // 4, run.salt, run.step
        return cls(runs, memory, places)


class MappedBackend(DiskBackend):
    """Records in mapped files, without a cache: the system keeps their pages in RAM, once for all processes.

    A batch gets copies of its records. Their seals are checked as in any read.
    """

    finds_all = True

    def __init__(self, spec: Spec, *args: Any) -> None:
        super().__init__(spec, *args)
        self._copy = self._empty(1)
        self._mapped = MappedSegments.of(self.store)

    def _placed(self, spec: Spec, nbytes: int) -> RamLayout:
        return RamLayout(nbytes, 1, False)

    @property
    def budget_bytes(self) -> int:
        return self.bytes_used

    def begin_batch(self) -> None:
        """Do nothing: no row stays from one batch to the next."""

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        return self._bring_copies(ids)

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        locations = self._read_mapped(ids, records := self._empty(len(ids)), np.empty((len(ids), 0), np.float32))
        slots = np.where(locations < 0, -1, np.arange(len(ids)))
        self._check_steps(ids[slots >= 0], records.bytes, slots[slots >= 0])
        return records, slots

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        parts = len(ids) // kernels.cpu.mapped.PART
        return self._read_mapped(ids, self._empty(parts + 1) if parts else self._copy, out)

    def _read_mapped(self, ids: np.ndarray, copies: Records, out: np.ndarray) -> np.ndarray:
        """Return the locations of records, -1 for none. Decode weights to `out`; `copies` have all, or one a part."""
        found = np.empty(len(ids), np.int64)
        with (store := self.store).lock:
            if self._mapped.runs is not store.runs:
                self._mapped = MappedSegments.of(store)
            places = store.log_index.place, store.base.index, *self._mapped[1:]
            kernels.cpu.launch(kernels.cpu.mapped.read, *places, ids, found, copies.bytes, copies.weights, out)
            bad = (found < -1).nonzero()[0]
            if len(bad):
                raise corrupt(store.runs, -2 - found[bad], ids[bad])
        return found

    def add_listener(self, listener: EvictionListener) -> NoReturn:
        raise UnsupportedError(
            f'rows of {self.subject}, opened with memory="map", have no place in RAM that a GPU may use. Look them up '
            'on the CPU, or open it with a size, such as memory="1GiB".'
        )

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        return Pin()
