"""`MappedBackend`: records in files that are mapped into memory, for readers. Processes share one copy of them."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from embedrock.errors import UnsupportedError
from embedrock.spec.spec import Spec
from embedrock.storage.backend import Pin, RamLayout
from embedrock.storage.disk_backend import DiskBackend
from embedrock.storage.listeners import EvictionListener
from embedrock.storage.records import Records
from embedrock.store.mapped import MappedSegments


class MappedBackend(DiskBackend):
    """Records in mapped files, without a cache: the system keeps their pages in RAM, once for all processes.

    A batch gets copies of its records. Their seals are checked as in any read.
    """

    finds_all = True

    def __init__(self, spec: Spec, *args: Any) -> None:
        super().__init__(spec, *args)
        self._mapped = MappedSegments.of(self.store, {})

    def _placed(self, spec: Spec, nbytes: int) -> RamLayout:
        return RamLayout(nbytes, 1, False)

    @property
    def budget_bytes(self) -> int:
        return self.bytes_used

    def begin_batch(self) -> None:
        """Do nothing: no row stays from one batch to the next."""

    def bring(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        self.records, slots = self.read_through(ids)
        self.new_epoch()
        return slots

    def read_through(self, ids: np.ndarray) -> tuple[Records, np.ndarray]:
        records, locations = self._read_mapped(ids, np.empty((len(ids), 0), np.float32))
        slots = np.where(locations < 0, -1, np.arange(len(ids)))
        self._check_steps(ids[slots >= 0], records.bytes, slots[slots >= 0])
        return records, slots

    def look_up(self, ids: np.ndarray, positions: np.ndarray, out: np.ndarray) -> np.ndarray:
        return self._read_mapped(ids, out)[1]  # each position is that of its id

    def _read_mapped(self, ids: np.ndarray, out: np.ndarray) -> tuple[Records, np.ndarray]:
        copies = Records(self.spec, np.empty(len(ids) * self.spec.record_bytes, np.uint8))
        with self.store.lock:
            if self._mapped.runs is not self.store.runs:
                self._mapped = MappedSegments.of(self.store, self._mapped.files)
            return copies, self._mapped.read(self.store, ids, (copies.bytes.view(np.uint32), copies.weights), out)

    def add_listener(self, listener: EvictionListener) -> NoReturn:
        raise UnsupportedError(
            f'rows of {self.subject}, opened with memory="map", have no place in RAM that a GPU may use. Look them up '
            'on the CPU, or open it with a size, such as memory="1GiB".'
        )

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        return Pin()
