"""`DeviceBatch`: the ids of one table or several, planned on a GPU as if they were of one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from embedrock.device.cache import load_rows, times_of
from embedrock.device.features import BatchSizes, FeatureLayout, TableFamily
from embedrock.device.workspace import carved, layout
from embedrock.kernels.gpu import joint as kernels
from embedrock.kernels.gpu import plan as plan_kernels
from embedrock.kernels.gpu import rows
from embedrock.kernels.gpu.addresses import DeviceTables, TableEntryWords
from embedrock.kernels.gpu.binding import TensorPart, as_tensor
from embedrock.kernels.gpu.cache import VictimSearch
from embedrock.kernels.gpu.sums import partial_rows


@dataclass(eq=False)
class FoundWeights:
    """Weights of a batch's rows as a lookup read them, for the next step.

    Attributes:
        weights: float32 (n, dim), without other references.
        versions: of the rows of each table at the read, see `ChangeCounter`.
    """

    weights: Tensor | None
    versions: tuple[int, ...]


class SteppedTables(NamedTuple):
    """Neighbouring tables of one batch that are ready to be stepped: see `rows.step`.

    Attributes:
        tables, keys, ids, row_count, bounds: for the kernel, valid once records are created.
        found: weights of the rows that a lookup has read.
        admit: creates records, or gives slots to new rows; None: nothing is new, or the step's kernel does so.
    """

    tables: DeviceTables
    keys: Tensor
    ids: Tensor | None
    row_count: Tensor
    bounds: Tensor | TensorPart
    found: FoundWeights | None = None
    admit: Callable[[], object] | None = None


_FAMILY, _KEEPS = attrgetter("family"), attrgetter("keeps_weights")


class DeviceBatch:
    """Ids of one table or several of a family, planned on a device. Rows and positions lie table by table.

    Only the device knows the number of rows, so arrays have room for n. The key of a row is the one of its table's
    first row plus its slot. This class is of tables whose slots are ids.

    Args:
        features: layout of the lookup.
        sizes: of the batch.
        trains: a step may follow.
        counts: for each table, whether hits and misses are counted; None: they are.

    Attributes:
        layout, executors, family: of the tables.
        sizes: see above.
        stamps: the number of the batch, for each table.
        tables: the tables for kernels.
        firsts: the key of each table's first row.
        placed: words about the features on the device.
        given: ids of all positions (n,), on the device: int64 or int32.
        keys: int64 (n,), of the rows, ascending in each table.
        ids: int64 (n,), of the rows; None: the keys determine them.
        starts: int32 (n + 1,); positions ``order[starts[k] : starts[k + 1]]`` hold row k.
        order: int64 (n,), all positions, grouped by row, in order of occurrence.
        inverse: int32 (n,), the row of each position.
        count: int32 (1,), number of rows.
        tickets: int32, zeros, counters by which programs find the last one.
        positions: int32 (n,), the key of each position; None: unknown.
        bounds: int32 (2 * k + 1,), begin of each table's rows, the end of the last, and each table's padding row.
        ends, paddings: int32 (k,), parts of it: the end of each table's rows, and its padding row, -1 for none.
        found: weights that a lookup has read from RAM, for a step of the same rows.
        frozen: positions of frozen rows among the rows, if the host plans.
        norms: memory for the norms of the first sums, see `RowSums`; None: it is taken.
        newest_event: time of its step, if the host plans that: see `StepRequest`.
    """

    keys: Tensor
    starts: Tensor | TensorPart
    order: Tensor
    inverse: Tensor
    count: Tensor
    tickets: Tensor | TensorPart
    bounds: Tensor | TensorPart
    ends: Tensor | TensorPart
    paddings: Tensor | TensorPart
    ids: Any = None
    positions: Tensor | None = None
    found: FoundWeights | None = None
    frozen: Any = ()
    norms: Tensor | None = None
    newest_event: float | None = None
    placed: Tensor
    _space: Any = None
    _search: tuple[Any, ...] = ()
    _moves: Tensor

    def __init__(self, features: FeatureLayout, sizes: BatchSizes, trains: bool, counts: Sequence[bool] | None) -> None:
        self.layout, self.sizes, self.executors = features, sizes, features.executors
        self.family: TableFamily = features.first.family
        times, self.stamps = features.begin_batch(sizes.positions, trains)
        is_cached = self.family.kind == "cached"
        known = None if not is_cached or counts is None or False not in counts else features.uncounted(counts)
        self.tables, self.firsts = features.of_words(known)
        self.placed = sizes.placed
        self.norms = features.norms(len(self.executors), self.family.device) if trains else None
        if is_cached:
            self._search = *features.search(sizes.positions), times_of(times, self.family.device)
        if features.first.timeline.captured is not None:
            features.first.timeline.keep(self.placed, self.tables.entries, *self._search[:1])

    # ------------------------------------------------------------ plans

    def make(self, given: Tensor, is_ahead: bool = False) -> Self:
        """Plan the batch of ids (n,), and load its rows; `is_ahead`: `look_up` follows when they are looked up."""
        self.given = given
        n, k, family = self.sizes.n, len(self.executors), self.family
        is_cached = bool(self._search)
        form = n, k, is_cached, is_ahead  # prefetched batches are made on a stream of their own
        self._space = self.layout.take(form, 44 * n, _space, family.device, n, k, is_cached)
        arrays, self.bounds, self.ends, self.paddings = self._space.arrays
        self.keys, self.inverse, positions, self.count, self._moves, self.starts, self.tickets, scan = arrays
        kernels.join(given, self.placed, len(self.layout.tables), self.tables, positions)
        ordered, self.order = torch.sort(positions, stable=True)
        self.positions = positions
        search = self._victims() if is_cached else None
        found = None if is_ahead else (given, self.bounds)
        plan = self.keys, self.starts, self.inverse, self.count, self.tickets
        plan_kernels.collect(ordered, self.firsts[-1] - 1, self.order, scan, plan, self.tables, search, found)
        if search is not None:
            load_rows(self.tables, search, ordered, n)
        return self

    def _victims(self) -> VictimSearch | None:
        """Return the search for victims in the tables' caches; None without positions."""
        shares, programs, times = self._search
        if not programs:
            return None
        return VictimSearch(self._moves.view(torch.int64).view(-1, 3), programs, shares, times)

    def look_up(self) -> None:
        """Write `bounds` of a batch that was planned ahead, and record ids that are outside of their table."""
        args = self.tables, self.keys, self.count, self.given, self.order, self.starts, self.bounds
        plan_kernels.bounds(*args)

    @property
    def allocations(self) -> list[Tensor]:
        """One tensor of each allocation."""
        return [self.placed, self.given, self.keys, self.order]

    # ------------------------------------------------------------ rows

    def read(self) -> Tensor:
        """Return the weights of the row of each position, float32 (n, dim). The caller holds `working`."""
        if self.family.kind != "device" or self.layout.first.lags:
            return self.read_rows().index_select(0, self.inverse)
        self.layout.begin_read()
        out = self.out()  # one kernel reads device rows into their final places
        keys, of = (self.keys, self.inverse) if self.positions is None else (self.positions, None)
        rows.read(keys, self.sizes.n, self.tables, out, self.ids, of=of)
        return out

    def read_rows(self) -> Tensor:
        """Return the weights of the rows: float32 (n, dim), undefined beyond the existing ones."""
        self.layout.begin_read()
        out = self.out()
        rows.read(self.keys, self.count, self.tables, out, self.ids, stale=self.stale)
        self.keep_weights(out)
        return out

    @property
    def stale(self) -> Any:
        """Step constants by which copies of weights catch up, see `rows.read`. (Rows that lag are of one table.)"""
        return self.layout.first.stale if len(self.executors) == 1 else None

    def out(self) -> Tensor:
        """Return memory for a line of each position: float32 (n, dim)."""
        return torch.empty(self.sizes.n, self.family.form.dim, dtype=torch.float32, device=self.family.device)

    def keep_weights(self, out: Tensor) -> None:
        """Keep weights that were read, float32 (n, dim), for a step if it can use them."""
        if self.family.kind not in ("device", "cached") and all(map(_KEEPS, self.executors)):
            self.found = FoundWeights(out, tuple([executor.rows.version.of_rows for executor in self.executors]))

    def is_of_family(self) -> bool:
        """Return whether all tables still are of the family. Open ids may outgrow theirs."""
        return list(map(_FAMILY, self.executors)).count(self.family) == len(self.executors)

    # ------------------------------------------------------------ steps

    def has_room(self, which: tuple[int, int]) -> bool:
        """Return whether the new rows of some tables have room, with nothing to do. Caller holds the table locks.

        `which`: the first of the tables, and the one after the last.
        """
        return True

    def ready(self, which: tuple[int, int], values: Tensor, case: Any, clip: float | None) -> SteppedTables:
        """Return the tables from the first to the last of `which`, which have begun a step. No row changes.

        Args:
            which: the first table, and the one after the last.
            values: gradients of the rows of all tables.
            case: of these tables, see `gate.VerdictCase`.
            clip: limit of the gradients.
        """
        return self.as_ready()

    def as_ready(self, admit: Callable[[], object] | None = None) -> SteppedTables:
        """Return the tables as their current records can be stepped; `admit`: see `SteppedTables`."""
        return SteppedTables(self.tables, self.keys, self.ids, self.count, self.bounds, self.found, admit)

    # ------------------------------------------------------------ batches of one table

    @classmethod
    def of_one(cls, executor: Any, padding: int | None, n: int, stamp: int) -> Self:
        """Return the batch of n positions of one table, without arrays."""
        own = object.__new__(cls)
        own.layout = features = FeatureLayout([executor], [padding])
        own.executors, own.family = features.executors, executor.family
        own.sizes, own.stamps = features.sizes((n,)), [stamp]
        own.placed = own.sizes.placed
        return own

    def take_words(self, known: tuple[TableEntryWords, ...] | None = None) -> None:
        """Take words about the tables, as they are now: see `FeatureLayout.known`."""
        self.family = self.layout.first.family
        self.tables, self.firsts = self.layout.of_words(known)

    def of(self, table: int, executor: Any) -> DeviceBatch:
        """Return the batch of one of the tables, for the executor that has its rows now."""
        begin, n = self.sizes.cuts[table], self.sizes.positions[table]
        own = executor.batch.of_one(executor, self.layout.paddings[table], n, self.stamps[table])
        own.take_words()
        bounds, k = as_tensor(self.bounds), len(self.executors)
        row, stop, padding = bounds[table], bounds[table + 1], bounds[k + 1 + table]
        own.count = (stop - row).reshape(1)
        own.bounds = torch.stack([torch.zeros_like(row), stop - row, torch.where(padding < 0, -1, padding - row)])
        own.ends, own.paddings = own.bounds[1:2], own.bounds[2:]
        lane = torch.arange(n + 1, device=row.device)
        place = lane + row
        own._take_keys(self, table, place[:n].clamp(max=len(self.keys) - 1), lane[:n] >= own.count)
        own.starts = as_tensor(self.starts)[place.clamp(max=self.sizes.n)] - begin
        own.order = self.order[begin : begin + n] - begin
        own.inverse = self.inverse[begin : begin + n] - row
        own.tickets = torch.zeros(tickets_of(n, 1), dtype=torch.int32, device=row.device)
        return own

    def _take_keys(self, whole: DeviceBatch, table: int, place: Tensor, is_none: Tensor) -> None:
        """Take the keys of a table's rows at places in a batch of several; `is_none`: no rows."""
        keys = whole.keys[place] - whole.firsts[table] + self.firsts[0]
        self.keys = torch.where(is_none, self.nobody, keys)

    @property
    def nobody(self) -> int:
        """The key of no row."""
        return self.firsts[-1] - 1

    @classmethod
    def of_rows(cls, executor: Any, parts: Sequence[tuple[DeviceBatch, Tensor]], stamp: int) -> Self:
        """Return the batch of the rows of earlier batches of one table, without those that are dropped, bool ()."""
        ids = torch.cat([
            torch.where(batch._is_padding() | dropped, executor.spec.rows, batch.keys - batch.firsts[0])
            for batch, dropped in parts
        ])  # fmt: skip
        own = cls.of_one(executor, None, len(ids), stamp)
        own.take_words((executor.known._replace(fault=executor.no_fault.data_ptr()),))
        own.make(ids)
        own.take_words()  # a step records its errors
        own.keys = own.keys[: executor.spec.rows + 1]  # a bound for any number of accumulated batches
        own.count = (own.keys < own.firsts[0] + executor.spec.rows).sum(dtype=torch.int32).reshape(1)
        return own

    def _is_padding(self) -> Tensor:
        return torch.arange(len(self.keys), device=self.keys.device) == as_tensor(self.paddings)

    # ------------------------------------------------------------ for other code

    def row_ids(self) -> Tensor:
        """Return the ids of the rows of one table. Waits for the device."""
        count = int(self.count)
        return self.keys[:count] - self.firsts[0] if self.ids is None else self.ids[:count].clone()

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory of the large arrays."""
        return sum(array.nbytes for array in (self.keys, self.order, self.inverse))


def tickets_of(n: int, k: int) -> int:
    """Return the number of counters for n positions of k tables."""
    return k + partial_rows(n, k) + 1 + k


def space_of(device: torch.device, wide: int, n: int, k: int, narrow: tuple[int, ...], tickets: int) -> Any:
    """Return memory of a batch of n positions of k tables, in one allocation.

    Args:
        device, n, k: see above.
        wide: number of int64 tensors with n elements.
        narrow: sizes of int32 tensors.
        tickets: number of counters.

    Returns:
        The tensors; `starts`, `tickets` and a scan (see `plan.collect`), as parts; `bounds`, `ends` and `paddings`.
    """
    words = plan_kernels.scan_words(n)
    arrays = carved(device, layout((*(2 * n,) * wide, *narrow), (n + 1, tickets, words, 2 * k + 1)))
    as_tensor(arrays[-2]).zero_()
    arrays[:wide] = [part.view(torch.int64) for part in arrays[:wide]]
    *arrays, bounds = arrays
    return arrays, bounds, bounds[1 : k + 1], bounds[k + 1 :]


def _space(device: torch.device, n: int, k: int, is_cached: bool) -> Any:
    """Return keys, inverse, positions, count and moves of rows into a cache; see `space_of`."""
    return space_of(device, 1, n, k, (n, n, 1, 6 * n if is_cached else 0), tickets_of(n, k))
