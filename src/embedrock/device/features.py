"""`FeatureLayout`: features of tables that a GPU looks up together, as rows or in bags."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, call
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock.device import cache, device_errors
from embedrock.device.copies import uploaded
from embedrock.device.stream_order import InStreamOrder
from embedrock.device.workspace import Workspace, aligned
from embedrock.kernels.gpu import sums
from embedrock.kernels.gpu.addresses import BatchTime, DeviceTables, TableEntryWords
from embedrock.kernels.gpu.binding import TensorPart
from embedrock.kernels.gpu.runtime import RecordForm
from embedrock.storage.table_lock import together
from embedrock.system import forks

MOST_KEYS = 2**31 - 2  # of all tables in a batch: int32
KEPT_SIZES = 64  # of one layout
KEPT_BYTES = 16 << 20  # of one workspace: larger ones return to PyTorch, as allocating takes no time beside their use
KEPT_FORMS = 8  # of workspaces of one layout
NO_PADDING = -2
NORMS_AT_ONCE = 64  # norms of as many batches are allocated together

# Many tables are read by one call of `map`.
_STATE = attrgetter("backend", "process", "executor", "history", "table_lock.failure", "table_lock.running")
_HISTORY, _LOOKED_UP, _EXPECTED = attrgetter("history"), attrgetter("is_looked_up"), attrgetter("expected")
_FAMILY = attrgetter("family")
_SEEN, _NOW, _PROCESS = attrgetter("_seen"), attrgetter("version.now"), attrgetter("process")
_STAMP, _KNOWN = attrgetter("stamp"), attrgetter("known")
_EPOCH, _MEMORY = attrgetter("_epoch"), attrgetter("_memory.epoch")
_CACHE, _SLOTS = attrgetter("cache"), attrgetter("cache.slot_count")
_COPIED, _AHEAD, _FORM = attrgetter("copied"), attrgetter("ahead"), attrgetter("device", "dtype")


class FeatureBags(NamedTuple):
    """The bags of a feature's ids.

    Attributes:
        mode: "sum", "mean" or "max".
        size: ids of each bag; 0 if `starts` is given.
        starts: first position of each bag, int32 or int64 (bags,), on either device; host tensors are already checked.
        weights: of the ids, float32 (n,), on the device; None for ones.
    """

    mode: str
    size: int
    starts: Tensor | None
    weights: Tensor | None

    def count(self, n: int) -> int:
        """Return the number of bags that n ids are in."""
        return n // self.size if self.starts is None else len(self.starts)

    @property
    def are_rows(self) -> bool:
        """True if each bag is the row of its id, as long as no id is left out."""
        return self.size == 1 and self.weights is None


def bag_words(all_bags: Sequence[FeatureBags], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the words about the bags of features of given sizes, for kernels: see `kernels.bags`.

    The bags of the features lie one after the other. The kernels read these words after the words of the ids.
    """
    firsts, begins = [0], [0]
    for bags, n in zip(all_bags, sizes, strict=True):
        count = bags.count(n)
        firsts.append(firsts[-1] + count)
        begins.append(begins[-1] + (0 if bags.starts is None else count))
    means = [int(bags.mode == "mean") for bags in all_bags]
    return *firsts, *[bags.size for bags in all_bags], *begins[:-1], *means


class TableFamily(NamedTuple):
    """Properties that all tables of a batch have in common.

    Attributes:
        device: that uses the tables.
        form: layout of the records.
        kind: of the record addresses, see `DeviceTables`.
        draw: generator of initial values; None: the host creates records.
        is_open: hash indexes on the device have the slots.
    """

    device: torch.device
    form: RecordForm
    kind: str
    draw: str | None
    is_open: bool = False


_families: dict[TableFamily, TableFamily] = {}  # one object a family makes the checks of each step fast


def family_of(executor: Any) -> TableFamily:
    """Return an executor's table family: one object for all tables of the family."""
    draw = None if executor.first is None else executor.first.drawn[0]
    is_open = executor.plans and executor.room is not None
    family = TableFamily(executor.device, executor.form, executor.cache.kind, draw, is_open)
    return _families.setdefault(family, family)


def shares_of(
    executors: Sequence[Any], all_bags: Sequence[FeatureBags | None], paddings: Sequence[Any]
) -> list[list[int]]:
    """Return lists of features, rows or bags, that are looked up together, within the limit of keys.

    Bags of mode "max" have a kernel of their own. So they are separate, unless all bags are rows. A table has one
    padding in a batch. So its features with another one are separate.
    """
    are_max = [bags is not None and bags.mode == "max" for bags in all_bags]
    if len(set(are_max)) > 1 and are_rows(all_bags, paddings):
        are_max = [False] * len(are_max)
    apart, known = dict[tuple[bool, int], list[int]](), dict[Any, list[int | None]]()
    for number, (executor, is_max, padding) in enumerate(zip(executors, are_max, paddings, strict=True)):
        own = known.setdefault(executor, [])
        if padding not in own:
            own.append(padding)
        apart.setdefault((is_max, own.index(padding)), []).append(number)
    return [share for numbers in apart.values() for share in _that_fit(executors, numbers)]


def are_rows(all_bags: Sequence[FeatureBags | None], paddings: Sequence[Any]) -> bool:
    """Return whether a lookup of all features returns the row of each id."""
    pairs = zip(all_bags, paddings, strict=True)
    return all(bags is None or (bags.are_rows and padding is None) for bags, padding in pairs)


def _that_fit(executors: Sequence[Any], numbers: Iterable[int]) -> list[list[int]]:
    seen: set[Any] = set()
    keys, shares = 0, list[list[int]]([[]])
    for number in numbers:
        executor = executors[number]
        own = executor.cache.slots.where.shape[0] + 2  # keys of ids outside, too
        keys += 0 if executor in seen else own
        if keys > MOST_KEYS:
            seen, keys = set(), own
            shares.append([])
        seen.add(executor)
        shares[-1].append(number)
    return [share for share in shares if share]


def working(executors: Sequence[Any]) -> InStreamOrder:
    """Return a context that holds the locks of tables and orders device work after all of theirs."""
    locks = {executor.rows.table_lock for executor in executors}
    lock = locks.pop().lock if len(locks) == 1 else together(locks)
    return InStreamOrder([executor.timeline for executor in executors], lock)


@functools.lru_cache(maxsize=64)
def entries_of(
    known: tuple[tuple[TableEntryWords, int | None], ...], device: torch.device
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the entries of tables with their paddings, their first keys, and the end of the last table."""
    firsts, words = [1], []
    for table, padding in known:
        pads = padding is not None
        directory = *table.directory[:-1], int(pads)
        given = {"first": firsts[-1], "padding": padding if pads else NO_PADDING, "directory": directory}
        words.append(table._replace(**given).words)
        firsts.append(firsts[-1] + table.rows + 2)
    return torch.tensor(words, dtype=torch.int64, device=device), tuple(firsts)


class BatchSizes(NamedTuple):
    """Sizes of a batch, and what follows from them.

    Attributes:
        n: number of positions.
        positions: of each table.
        cuts: begin of each table's positions, and the end of the last.
        placed: words for kernels, on the device, int64: about the features (`joint.join` and, for bags, `joint.bags`),
            then about the tables (`sums.layout_of`).
        of_sums: the latter, int64 (2 * (k + 1),), and the last of them.
    """

    n: int
    positions: tuple[int, ...]
    cuts: tuple[int, ...]
    placed: Tensor
    of_sums: tuple[TensorPart, int]


class FeatureLayout:
    """Features of tables of one family that are looked up together: what recurs from batch to batch.

    Args:
        executors: of the features.
        paddings: for each feature, the id that gets no gradient, and counts in no bag; all features of a table have the
            same.

    Attributes:
        executors: of the tables, each once.
        paddings: of the tables.
        order: the features, table by table.
        tables: index of the table of each feature in `order`.
        locks: of the tables.
        working: a context that holds the locks, and orders work on the device after all of theirs.
    """

    def __init__(self, executors: Sequence[Any], paddings: Sequence[int | None]) -> None:
        self.executors = tuple(dict.fromkeys(executors))
        self.first: Any = self.executors[0]
        table_of = [self.executors.index(executor) for executor in executors]
        self.order = sorted(range(len(executors)), key=table_of.__getitem__)
        self.tables = tuple([table_of[feature] for feature in self.order])
        padded = dict(zip(table_of, paddings, strict=True))
        self.paddings = tuple([padded[table] for table in range(len(self.executors))])
        self._spaces: dict[Any, list[Any]] = {}  # free arrays of workspaces, by form
        self._sizes, self._searches = dict[Any, BatchSizes](), dict[Any, tuple[Tensor, int]]()
        self._norms: tuple[int, list[Tensor]] = 0, []  # of which turn, and those
        self.locks = [executor.rows.table_lock for executor in self.executors]
        self.working = working(self.executors)
        self._rows_of = [executor._rows_of for executor in self.executors]  # weak, as rows own executors
        self._clocks = [executor.clock for executor in self.executors]
        self._faults = [executor.faults for executor in self.executors]
        self._timelines = [executor.timeline for executor in self.executors]
        self._parts = dict[tuple[Any, ...], FeatureLayout]()  # of some of the tables
        self._quiet: list[Any] | None = None
        self._tables: Any = None  # words about the tables, and what kernels get for them

    def sizes(self, sizes: tuple[int, ...], bags: tuple[int, ...] = ()) -> BatchSizes:
        """Return the sizes of a batch, from the ids of each feature in `order`, and the words of `bag_words`."""
        form = sizes, bags, self.first.timeline.turn
        known = self._sizes.get(form)
        if known is None:
            if len(self._sizes) >= KEPT_SIZES:
                self._sizes.clear()
            known = self._sizes[form] = self._of_sizes(sizes, bags)
        return known

    def _of_sizes(self, sizes: tuple[int, ...], bags: tuple[int, ...]) -> BatchSizes:
        positions = [0] * len(self.executors)
        for table, size in zip(self.tables, sizes, strict=True):
            positions[table] += size
        cuts = 0, *itertools.accumulate(positions)
        layout = sums.layout_of(cuts, self.first.form.dim)
        words = 0, *itertools.accumulate(sizes), *self.tables, *bags, *layout
        placed, start = uploaded(np.array(words, np.int64), self.first.device), 2 * (len(words) - len(layout))
        of_sums = TensorPart(placed, start, (len(layout),), torch.int64), layout[-1]
        return BatchSizes(sum(sizes), tuple(positions), cuts, placed, of_sums)

    # ------------------------------------------------------------ lookups. Callers hold `working`.

    def begin(self) -> list[Any] | None:
        """Begin a lookup: check the tables, and load changes of the CPU.

        Returns:
            The prefetched batch of each table, or None; None if no table has one.

        Raises:
            ClosedTableError: a table is closed.
            NonFiniteGradientError, IdError, ArgumentError: of earlier lookups and steps.
        """
        if self.first.timeline.captured is not None:  # a captured step has none, and does the rest before each replay
            return None
        if self.is_quiet():
            device_errors.check(self._faults)
        else:
            for executor in self.executors:
                executor.check()
                executor.begin()
            self._quiet = [(*state, list(running)) for *state, running in map(_STATE, self.rows())]
        if any(map(_COPIED, self._timelines)):
            self.wait_for_copies()
        aheads = list(map(_AHEAD, self.executors))
        if not any(aheads):
            return None
        for executor in self.executors:
            executor.ahead = None
        return aheads

    def rows(self) -> list[Any]:
        """Return the states of the tables."""
        return list(map(call, self._rows_of))

    def is_quiet(self) -> bool:
        """Return whether nothing has changed since the last lookup that the executors' `begin` would look at."""
        rows = list(map(call, self._rows_of))
        if not self.first.plans or list(map(_SEEN, self.executors)) != list(map(_NOW, rows)):
            return False
        if list(map(_EPOCH, self.executors)) != list(map(_MEMORY, self.executors)):
            return False
        return list(map(_STATE, rows)) == self._quiet and {forks.process}.issuperset(map(_PROCESS, rows))

    def begin_batch(self, positions: Sequence[int], trains: bool) -> tuple[Sequence[BatchTime], Sequence[int]]:
        """Begin a batch with positions of each table. Return its times in caches, and its number for each table."""
        times: Sequence[BatchTime] = ()
        captured = self.first.timeline.captured
        if captured is not None:
            times = [captured.begin_batch(own, n, trains) for own, n in zip(self.executors, positions, strict=True)]
        else:
            for clock in self._clocks:
                clock.stamp += 1
            if self.first.family.kind == "cached":
                of_tables = zip(self.executors, positions, self._clocks, strict=True)
                times = [executor.cache.begin_batch(n, clock, trains) for executor, n, clock in of_tables]
        return times, list(map(_STAMP, self._clocks))

    def search(self, positions: tuple[int, ...]) -> tuple[Tensor, int]:
        """Return the results of `cache.shares_of` for positions of each table, on the device."""
        form = positions, self.first.timeline.turn, *map(_SLOTS, self.executors)
        known = self._searches.get(form)
        if known is None:
            if len(self._searches) >= KEPT_SIZES:
                self._searches.clear()
            shares, programs = cache.shares_of(map(_CACHE, self.executors), positions)
            known = self._searches[form] = uploaded(shares, self.first.device), programs
        return known

    def uncounted(self, counts: Sequence[bool]) -> tuple[TableEntryWords, ...]:
        """Return the words about the tables; `counts`: for each table, whether hits and misses are counted."""
        pairs = zip(self.executors, counts, strict=True)
        return tuple([e.known if counted else e.known.uncounted(e.cache.not_counted) for e, counted in pairs])

    def of_words(self, known: tuple[TableEntryWords, ...] | None = None) -> tuple[DeviceTables, tuple[int, ...]]:
        """Return the tables for kernels, and their first keys, from words about them; None: as they are now."""
        family = self.first.family
        if known is None:
            known = tuple(map(_KNOWN, self.executors))
        if self._tables is None or self._tables[0] != (known, family):
            entries, firsts = entries_of(tuple(zip(known, self.paddings, strict=True)), self.first.device)
            self._tables = (known, family), (DeviceTables(entries, family.kind, family.draw, family.form), firsts)
        return self._tables[1]

    def are_joined(self) -> bool:
        """Return whether the tables can be looked up together. Open ids may outgrow the family, rules become dense."""
        family, k = self.first.family, len(self.executors)
        if k == 1:
            return True
        outgrown = family.is_open and (family.kind == "cached" or list(map(_FAMILY, self.executors)).count(family) < k)
        return not outgrown and not any(map(_HISTORY, self.rows()))

    def end(self, trains: bool) -> None:
        """Record that a batch was planned, in which ids may be wrong; `trains`: a step may follow."""
        if self.first.timeline.is_recorded:
            return
        if not trains or any(map(_LOOKED_UP, self.executors)):  # else the following step asks
            device_errors.ask([executor.faults for executor in self.executors if executor.is_looked_up or not trains])
        for executor in self.executors:
            executor.is_looked_up = trains

    def wait_for_copies(self) -> None:
        """Order later work after the copies of prefetched rows, once. The host does not wait."""
        waited = None
        for timeline in self._timelines:
            if timeline.copied is not waited:  # tables that were planned together have one event
                waited = timeline.copied
                timeline.wait_for_copies()
            timeline.copied = None

    def begin_read(self) -> None:
        """Begin to read rows, after copies. Readers of the records wait for the executors: see `TableLock.use`."""
        if any(map(_COPIED, self._timelines)):
            self.wait_for_copies()
        for table_lock, executor in zip(self.locks, self.executors, strict=True):
            if executor not in table_lock.running:
                table_lock.use(executor)

    def expects(self) -> bool:
        """Return whether a table expects a batch."""
        return not {NoneType}.issuperset(map(type, map(_EXPECTED, self.executors)))

    def of_tables(self, executors: Sequence[Any]) -> FeatureLayout:
        """Return the layout of lookups of one feature of each of these tables, which are in order."""
        if len(executors) == len(self.tables):
            return self
        known = self._parts.get(tables := tuple(executors))
        if known is None:
            paddings = [padding for e, padding in zip(self.executors, self.paddings, strict=True) if e in tables]
            known = self._parts[tables] = FeatureLayout(tables, paddings)
        return known

    # ------------------------------------------------------------ memory

    def joined(self, given: Sequence[Tensor]) -> Tensor:
        """Return the ids of all features, in `order`, on the device: (n,)."""
        if len(given) == 1:
            ids = given[0]
            if ids.dim() != 1 or not ids.is_contiguous():  # kernels read neighbours
                ids = ids.reshape(-1).contiguous()
            return ids if ids.device == self.first.device else self.first.on_device(ids)
        parts = [ids if ids.dim() == 1 else ids.reshape(-1) for ids in given]
        if len(set(map(_FORM, parts))) > 1:
            parts = [self.first.on_device(part).to(torch.int64) for part in parts]
        return self.first.on_device(torch.cat(parts))

    def take(self, form: Any, nbytes: int, make: Callable[..., Any], *args: Any) -> Workspace:
        """Return a workspace of a form on the caller's stream, of about `nbytes`.

        If none is free, `make` creates its arrays from `args`. A CUDA graph has its own.
        """
        timeline = self.first.timeline
        form = *form, timeline.turn
        free = self._spaces.get(form)
        if timeline.captured is not None:
            free = None
        elif free is None and nbytes <= KEPT_BYTES:
            if len(self._spaces) >= KEPT_FORMS:
                del self._spaces[next(iter(self._spaces))]
            free = self._spaces[form] = []
        arrays, space = free.pop() if free else make(*args), Workspace()
        space.arrays, space.free = arrays, free
        return space

    def norms(self, k: int, device: torch.device) -> Tensor:
        """Return memory for the norms of k tables, float32 (3 * k,), which handles may keep."""
        timeline, (turn, some) = self.first.timeline, self._norms
        if timeline.captured is not None:
            return torch.empty(3 * k, dtype=torch.float32, device=device)
        if not some or turn != timeline.turn:
            some = list(torch.empty(NORMS_AT_ONCE, aligned(3 * k), dtype=torch.float32, device=device).unbind())
            self._norms = timeline.turn, some
        return some.pop()[: 3 * k]
