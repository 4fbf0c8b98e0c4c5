"""`bring`: loads rows from disk ahead of their batch. `prefetch`: does so for the next items of a source.

The caller's thread pulls items from the source and requests their ids, at fixed moments. So random numbers are drawn in
an order that no timing changes. One thread only loads rows, item by item. A loaded row stays until its item is done. So
within the window the cache evicts only rows that no item in the window uses.
"""

from __future__ import annotations

import atexit
import operator
import queue
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from embedrock.errors import ArgumentError, CacheTooSmallError, IdError, counted
from embedrock.storage.backend import Backend, Pin
from embedrock.storage.ram_layout import memory_for
from embedrock.storage.table_lock import TableLock
from embedrock.system.interrupts import held_back
from embedrock.system.scopes import on_failure
from embedrock.system.sizes import format_bytes
from embedrock.table.rows import TableState

# Longest wait of a loop's end for its thread, which unpins the rows. It is limited because garbage collection may close
# an iterator inside of a call that holds the table for which the thread waits.
CLOSING_SECONDS = 2.0

WATCHED = 3  # first items, whose loaded rows must be looked up

_open: weakref.WeakSet[_Window[Any]] = weakref.WeakSet()  # windows with running threads, and some ended ones

T = TypeVar("T")
B = TypeVar("B", bound="Prefetcher")


class Prefetcher(Protocol):
    """A loader of rows: a `Table`, or a `Group` for all of its members at once."""

    def bring(self, ids: Any) -> Pin:
        """Load the rows of a batch, and pin them."""
        ...

    def room_for(self, batches: Sequence[Any]) -> tuple[int, int]:
        """Return the number of different rows in all batches, and the smallest `memory` that holds them."""
        ...


Wanted = Sequence[tuple[Prefetcher, Any]]  # a batch's ids, by the loader of their rows


def joined(wanted: Wanted) -> Wanted:
    """Return a batch's ids with all members of a group merged: {table: ids}, which the group loads."""
    found: dict[Prefetcher, Any] = {}
    for bringer, ids in wanted:
        group = getattr(bringer, "group", None)
        if group is None:
            found[bringer] = ids
        else:
            found.setdefault(group, {})[bringer] = ids
    return list(found.items())


def crowded(
    error: CacheTooSmallError, kept: str, bringer: Prefetcher, windows: Iterable[Sequence[Wanted]], some: str = ""
) -> CacheTooSmallError:
    """Return the error with the memory that the batches of a window need together, which the table does not know.

    Args:
        kept: a clause that says how many batches are kept.
        bringer: the loader that failed.
        windows: batches that are loaded at once.
        some: a clause that says of how many batches the rows are counted.
    """
    own = ([ids for wanted in window for each, ids in wanted if each is bringer] for window in windows)
    rows, memory = max(map(bringer.room_for, own))
    return CacheTooSmallError(
        f"{error} {kept} in the cache at once, here {counted(rows, 'row')}{some}: memory={memory} "
        f"({format_bytes(memory)}) is enough for them, and a lower `depth` needs less."
    )


def bring(table_lock: TableLock, wanted: Mapping[TableState, np.ndarray]) -> Pin:
    """Load rows of tables that share a table lock: one read for each backend.

    Any thread may call it: the disk is read while other threads use the tables.

    Args:
        wanted: checked ids of each table.

    Raises:
        CacheTooSmallError: they do not fit the cache together with the rows in use. None is pinned.
    """
    pins, left = list[Pin](), dict(wanted)
    with on_failure(lambda: Pin(pins).release()):
        while left:
            with ExitStack() as users:
                with table_lock.lock:
                    tier, keys, done = _first(left)
                    users.enter_context(tier.in_use())
                left = {rows: ids for rows, ids in left.items() if rows not in done}
                pins.append(tier.bring_ahead(keys))
        for rows, ids in wanted.items():
            if (base := rows.base) is not None:
                with table_lock.lock:
                    missing = (flat := ids.reshape(-1))[~rows.tier.holds(flat)]
                pins.append(base.bring_ahead(missing))
    return pins[0] if len(pins) == 1 else Pin(pins)


def _first(wanted: Mapping[TableState, np.ndarray]) -> tuple[Backend, np.ndarray, set[TableState]]:
    """Return the first table's backend, the keys there of all its tables, and these tables."""
    tiers = {rows: rows.tier for rows in wanted}
    pool = next(iter(tiers.values())).pool
    own = {rows: tier.keys(wanted[rows].reshape(-1)) for rows, tier in tiers.items() if tier.pool is pool}
    return pool, np.concatenate(list(own.values())), set(own)


def room_for(batches: Sequence[Mapping[TableState, np.ndarray]]) -> tuple[int, int]:
    """Return the number of different rows in all batches, and the smallest `memory` that holds them."""
    keys: dict[Backend, list[np.ndarray]] = {}
    for batch in batches:
        for rows, ids in batch.items():
            keys.setdefault(rows.tier.pool, []).append(rows.tier.keys(np.asarray(ids).reshape(-1)))
    counts = {tier: len(np.unique(np.concatenate(parts))) for tier, parts in keys.items()}
    return sum(counts.values()), sum(memory_for(tier.spec, count) for tier, count in counts.items())


# -------------------------------------------------------------------- ahead of a loop


def prefetch(source: Iterable[T], ids_of: Mapping[B, Callable[[T], Any]], depth: int = 2) -> Iterator[T]:
    """Iterate over the items of `source` while the rows of the next items are loaded from disk.

    Results are those of a loop without it, bit by bit. When an item is returned, `depth` more have been pulled from the
    source. A loop that is left early leaves them unused. Errors of the source, and of loading rows, are raised in the
    place of their item. Tables in RAM are allowed, and need no loading.

    Args:
        source: any iterable, read once. Items must not change while they wait.
        ids_of: for each table, a function that returns an item's ids in it, integers of any shape. Ids that it leaves
            out are read when they are looked up.
        depth: number of items to look ahead; the cache must hold the rows of ``depth + 1`` items. 0: none.

    Raises:
        ArgumentError: an invalid argument.
        CacheTooSmallError: (from the loop) the tables' `memory` cannot hold the rows of ``depth + 1`` items.

    Example:
        >>> import embedrock as er
        >>> from embedrock.table.prefetch import prefetch
        >>> users = er.Table(rows=None, dim=4, rule=er.SGD(lr=0.1))
        >>> batches = [{"user": [3, 1]}, {"user": [1, 4]}]
        >>> for batch in prefetch(batches, {users: lambda batch: batch["user"]}, depth=1):
        ...     users.update(batch["user"], users.lookup(batch["user"]))
    """
    check_ids_of(ids_of)
    return look_ahead(source, dict(ids_of), depth)


def look_ahead(
    source: Iterable[T], ids_of: Mapping[B, Callable[[T], Any]], depth: int, note: Callable[[T], None] | None = None
) -> Iterator[T]:
    """Do the same as `prefetch`, with checked `ids_of`, which may be empty. `note` gets each item once it is pulled."""
    if not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        raise ArgumentError(f"`source` of prefetch must be something to loop over: got {source!r}.")
    if isinstance(depth, bool) or not hasattr(depth, "__index__") or operator.index(depth) < 0:
        raise ArgumentError(f"`depth` of prefetch must be a whole number of items, 0 or more: got {depth!r}.")
    return _look_ahead(source, ids_of, operator.index(depth), note)


def check_ids_of(ids_of: Mapping[Any, Any]) -> None:
    """Raise `ArgumentError` unless `ids_of` is a dict from tables to functions."""
    example = 'Pass, for example, {table: lambda batch: batch["user"]}.'
    if not isinstance(ids_of, Mapping) or not ids_of:
        raise ArgumentError(f"`ids_of` of prefetch must be a dict from tables to functions: got {ids_of!r}. {example}")
    for table, function in ids_of.items():
        if not callable(getattr(table, "bring", None)):
            raise ArgumentError(f"`ids_of` of prefetch must have tables as its keys: got {table!r}. {example}")
        if not callable(function):
            raise ArgumentError(
                f"`ids_of` of prefetch must have functions of an item as its values: got {function!r} for {table!r}. "
                f"{example}"
            )


def _look_ahead(source: Iterable[T], ids_of: Mapping[B, Callable[[T], Any]], depth: int, note: Any) -> Iterator[T]:
    if depth == 0:
        yield from source
        return
    window = _Window(iter(source), ids_of, depth, note)
    try:
        while window.advance():
            yield window.items[0].value
    finally:
        window.close()
        window.join(CLOSING_SECONDS)


class _Item(Generic[T]):
    """An item of the source on its way to the caller.

    Attributes:
        wanted: ids of the item, by the loader of their rows.
        pins: of the rows that were loaded for it.
        error: raised in its place.
    """

    value: T

    def __init__(self) -> None:
        self.wanted: Wanted = ()
        self.pins: list[Pin] = []
        self.error: BaseException | None = None
        # Held until the item is ready, or has failed. An Event would not do: Ctrl-C may interrupt its wait while its
        # inner lock is released, and is then replaced by a RuntimeError of that lock.
        self.unready = threading.Lock()
        self.unready.acquire()

    def bring(self) -> None:
        try:
            for bringer, ids in self.wanted:
                self.pins.append(bringer.bring(ids))
        except BaseException as error:
            self.error = error
        self.unready.release()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.unready.release()

    def release(self) -> None:
        for pin in self.pins:
            pin.release()


class _Window(Generic[T]):
    """The items between the source and the caller: the last returned one, and the ones after it.

    Attributes:
        requests: calls for the thread, in order; None ends it.
        thread: loads and unpins rows. When it ends, it unpins all remaining ones. None: no item has had any so far.
        is_closing: rows not yet loaded are no longer needed.
    """

    def __init__(self, source: Iterator[T], ids_of: Mapping[B, Callable[[T], Any]], depth: int, note: Any) -> None:
        self._source, self._ids_of, self._depth, self._note = source, ids_of, depth, note
        self._is_exhausted = False
        self.items: deque[_Item[T]] = deque()
        self.requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.is_closing = False
        self._done: deque[Wanted] = deque(maxlen=depth)  # ids of the items before the first one
        self._before: list[tuple[int, int] | None] = []  # lookups of tables when the first item was returned
        self._unused: dict[Any, int] | None = dict.fromkeys(ids_of, 0)  # items without a looked-up row; None: checked

    def advance(self) -> bool:
        """Make the next item the first one, with its rows loaded. Return False without a next item."""
        if self.items:
            if self._unused is not None:
                self._watch(self.items[0], self._unused)
            # The thread releases pins, too, and in order. So the rows in use when an item is loaded, and whether the
            # cache is large enough, depend on no timing.
            if self.items[0].wanted:
                self.requests.put(self.items[0].release)
            self._done.append(self.items.popleft().wanted)
        while len(self.items) <= self._depth and not self._is_exhausted:
            self._pull()
        if not self.items:
            return False
        if self.thread is not None and self.thread.is_alive():  # in a forked child, rows are read at their lookup
            with self.items[0].unready:
                pass
        error = self.items[0].error
        if isinstance(error, CacheTooSmallError):
            raise self._explained(error) from error
        if isinstance(error, IdError) and hasattr(self.items[0], "value"):  # not of the source itself
            for function in self._ids_of.values():  # raises an error with the position in the item, if possible
                getattr(function, "refuse_outside", lambda value: None)(self.items[0].value)
        if error is not None:
            raise error
        if self._unused is not None:
            self._before = [pin.looked_up() for pin in self.items[0].pins]
        return True

    def _watch(self, item: _Item[T], unused: dict[Any, int]) -> None:
        """Warn if none of the loaded rows was looked up, for several items: the ids are not the batch's."""
        for (bringer, _), pin, before in zip(item.wanted, item.pins, self._before, strict=False):
            after = pin.looked_up()
            if before is None or after is None or before == after:
                continue  # nothing was loaded, or nothing looked up
            if after[0] > before[0]:  # some were in RAM
                self._unused = None
                return
            unused[bringer] = unused.get(bringer, 0) + 1
            if unused[bringer] == WATCHED:
                self._unused = None
                warnings.warn(
                    f"prefetch brings rows of {bringer!r} that are not looked up: of {counted(WATCHED, 'item')}, no "
                    "row that was looked up was there. Let the function in `ids_of` return the ids that the loop looks "
                    "up.",
                    stacklevel=4,
                )

    def _explained(self, error: CacheTooSmallError) -> CacheTooSmallError:
        bringer, _ = self.items[0].wanted[len(self.items[0].pins)]
        near = [*self._done, *(item.wanted for item in self.items)]
        windows = [near[k : k + self._depth + 1] for k in range(max(1, len(near) - self._depth))]
        kept = f"Looking ahead by depth={self._depth} keeps the rows of {self._depth + 1} items"
        return crowded(error, kept, bringer, windows)

    def _pull(self) -> None:
        item: _Item[T] = _Item()
        try:
            item.value = next(self._source)
        except StopIteration:
            self._is_exhausted = True
            return
        except Exception as error:
            item.fail(error)
        else:
            try:
                item.wanted = joined([(table, function(item.value)) for table, function in self._ids_of.items()])
                if self._note is not None:
                    self._note(item.value)
            except Exception as error:
                item.fail(error)
        self._is_exhausted = item.error is not None  # after its error, no item is returned
        self.items.append(item)
        if item.error is None:
            self._load(item)

    def _load(self, item: _Item[T]) -> None:
        if not item.wanted:
            item.unready.release()
            return
        if self.thread is None:
            with held_back():  # or an interrupt may leave a registered thread that never runs
                _open.add(self)
                self.thread = threading.Thread(target=self._serve, name="embedrock-prefetch", daemon=True)
                self.thread.start()
        self.requests.put(lambda: None if self.is_closing else item.bring())

    def _serve(self) -> None:
        while (request := self.requests.get()) is not None:
            request()
        for item in self.items:
            item.release()

    def close(self) -> None:
        """End the thread, which releases the pins. Closing twice is allowed."""
        # Nothing can run between these two lines, not even Ctrl-C.
        self.is_closing = True
        self.requests.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, except while Python itself ends, when threads never do."""
        thread = self.thread
        if thread is None or sys.is_finalizing() or thread is threading.current_thread():  # modules end before `sys`
            return
        if thread.is_alive():
            thread.join(seconds)


@atexit.register
def _close_all() -> None:
    # Python would otherwise end the threads of loops that a program leaves open inside of a kernel, and abort.
    windows = list(_open)
    for window in windows:
        window.close()
    for window in windows:
        window.join()
