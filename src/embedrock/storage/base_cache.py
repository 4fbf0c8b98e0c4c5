"""`BaseCache`: rows of a published table in RAM, in the form that its files have, for tables that start with them."""

from __future__ import annotations

import weakref
from collections.abc import Set
from typing import Any

import numpy as np

from embedrock import kernels
from embedrock.batch.plan import counting
from embedrock.errors import ArgumentError
from embedrock.initializers import FromSafetensors, Initializer
from embedrock.initializers.safetensors import RowFiles
from embedrock.storage.backend import Pin
from embedrock.storage.cache import SlotCache
from embedrock.storage.ram_layout import slots_in
from embedrock.system import forks
from embedrock.system.arena import reserve
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import MAP, format_bytes, parse_bytes

_caches: weakref.WeakValueDictionary[tuple[Any, ...], BaseCache] = weakref.WeakValueDictionary()
_making = forks.lock(forks.LockRank.SECTION)


class BaseCache:
    """A bounded cache of rows that are read from files, least frequently used ones leaving first.

    Any thread may use it. Files are read without its lock. Ctrl-C waits while it changes, or a slot might have an id
    without its row.

    Args:
        slots: number of rows.

    Attributes:
        hits, misses: rows that were asked for, and were here or not.
    """

    def __init__(self, files: RowFiles, slots: int) -> None:
        self.files, self.hits, self.misses = files, 0, 0
        self.lock = forks.lock(forks.LockRank.SECTION)
        self._slots, table = SlotCache(slots), files.table
        self._raw = reserve(slots * table.row_bytes, "rows of a published table").reshape(slots, table.row_bytes)
        self._rows, self._absent = table.rows_in(self._raw), np.zeros((1, table.dim), np.float32)

    @classmethod
    def of(cls, init: Initializer) -> BaseCache | None:
        """Return the cache of an initializer, which those with the same files and `memory` share; None: it has none.

        Raises:
            ArgumentError: `memory` is less than a row takes.
        """
        if not isinstance(init, FromSafetensors) or init.memory == MAP:
            return None
        if (made := vars(init).get("_cache")) is not None:
            return made
        size = parse_bytes(init.memory)
        with _making:
            stamps = tuple(shard.stamp for extents, _ in init.table.parts for shard in extents.shards)
            key = init.folder, init.tensor, size, stamps
            made = _caches.get(key)
            if made is None:
                slots = min(slots_in(size, init.table.row_bytes), init.table.rows)
                if slots < 2:
                    raise ArgumentError(
                        f"`memory` of {init} must hold two rows of {init.table.row_bytes} bytes, and their index: got "
                        f"{format_bytes(size)}. Pass more, such as 1MiB."
                    )
                made = _caches[key] = cls(init.files, slots)
            vars(init)["_cache"] = made
        return made

    def fill(self, ids: np.ndarray, key: np.uint64, out: np.ndarray) -> None:
        """Write rows, which may repeat, to `out`, float32 (n, dim): see `Initializer.fill`."""
        cpu, positions = kernels.cpu, counting(len(ids))
        with held_back(), self.lock:
            slots = self._slots.find(ids)
            cpu.launch(cpu.rows.gather, self._rows, slots, positions, self._absent, out)  # zeros for -1, at first
            absent = (slots < 0).nonzero()[0]
            self._slots.count_uses(np.delete(slots, absent) if len(absent) else slots)
            self.hits, self.misses = self.hits + len(ids) - len(absent), self.misses + len(absent)
        if len(absent):
            missing, inverse = np.unique(ids[absent], return_inverse=True)
            raw = self.files.read(missing)
            values = out if len(absent) == len(ids) else np.empty((len(absent), out.shape[1]), np.float32)
            rows, slots = self.files.table.rows_in(raw), inverse.astype(np.int64)
            cpu.launch(cpu.rows.gather, rows, slots, counting(len(slots)), self._absent, values)
            if values is not out:
                out[absent] = values
            with held_back(), self.lock:
                self._keep(missing, raw)

    def bring_ahead(self, ids: np.ndarray) -> Pin:
        """Read rows, which may repeat, and hold as many as fit until the pin is released."""
        ids, pin = np.unique(ids), _BasePin(self)
        with held_back(), self.lock:
            slots = self._slots.find(ids)
            pin.hold(slots[slots >= 0])
        missing = ids[slots < 0]
        if len(missing):
            with on_failure(pin.release):
                raw = self.files.read(missing)
                with held_back(), self.lock:
                    pin.hold(self._keep(missing, raw))
        return pin

    def _keep(self, ids: np.ndarray, raw: np.ndarray) -> np.ndarray:
        """Keep as many rows as may replace others, and return their slots. Ids do not repeat."""
        is_new = self._slots.find(ids) < 0
        is_new[is_new] = np.arange(np.count_nonzero(is_new)) < max(1, self._slots.capacity // 2)
        ids, raw = ids[is_new], raw[is_new]
        if len(ids) > self._slots.free:
            self._slots.remove(self._slots.victims(len(ids) - self._slots.free))
        slots = self._slots.insert(ids[: self._slots.free])
        self._raw[slots] = raw[: len(slots)]
        self._slots.count_uses(slots)
        return slots

    def stats(self) -> dict[str, float]:
        """Return statistics: rows that were asked for, and RAM."""
        nbytes = self._slots.used_slots * self._raw.shape[1] + self._slots.bytes_used
        return {"base_hits": self.hits, "base_misses": self.misses, "base_bytes_used": nbytes}


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    """Empty the caches that another thread may have been changing when this child was forked."""
    for cache in [each for each in _caches.values() if each.lock in missed]:
        cache._slots = SlotCache(cache._slots.capacity)


class _BasePin(Pin):
    """Rows that stay in a `BaseCache` until `release`."""

    def __init__(self, cache: BaseCache) -> None:
        self._cache, self._held = cache, list[np.ndarray]()

    def hold(self, slots: np.ndarray) -> None:
        """Keep rows. Caller holds the lock of the cache."""
        self._cache._slots.pin(slots)
        self._held.append(slots)

    def release(self) -> None:
        with held_back(), self._cache.lock:
            while self._held:
                self._cache._slots.unpin(self._held.pop())
