"""The host part of a lookup: rows of tables, pooled bags, and all tables of a group at once."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from embedrock.batch.ids import check_range
from embedrock.batch.plan import Plan
from embedrock.batch.wrong_ids import Place, in_array
from embedrock.distributed import stages
from embedrock.distributed.owners import Shard, Split
from embedrock.distributed.transport import addressed, taken
from embedrock.errors import ArgumentError, IdError, counted
from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import TableHandle, functions_of
from embedrock.keras.workers.cluster import gather
from embedrock.keras.workers.shards import shard_of, wire_of
from embedrock.system import forks
from embedrock.table import batches
from embedrock.table.batches import BatchFeature, PoolLookup, unread
from embedrock.table.group import Group

T = TypeVar("T")


class LookupRequest(NamedTuple):
    """One input of a lookup: tensors in a program, arrays on the host.

    Attributes:
        handle: handle of the table.
        ids: int32 or int64; of any shape, or (n,) if rows are pooled.
        offsets: int64 (bags + 1,): bag b holds the ids ``offsets[b]`` to ``offsets[b + 1]``. The last bag ends at n.
            None for the rows themselves.
        weights: float32 (n,), factors of the rows of bags; None for ones.
        is_max: pool by the largest values of each column instead of sums. It goes without weights.
        is_masked: padding was removed from the ids.
    """

    handle: TableHandle
    ids: Any
    offsets: Any = None
    weights: Any = None
    is_max: bool = False
    is_masked: bool = False

    def parts(self) -> list[Any]:
        return [part for part in self[1:4] if part is not None]

    def of(self, parts: Iterator[Any]) -> LookupRequest:
        """Return a request like this one of other tensors or arrays, in the order of `parts`."""
        ids, offsets, weights = (None if part is None else next(parts) for part in self[1:4])
        return LookupRequest(self.handle, ids, offsets, weights, self.is_max, self.is_masked)

    def place(self) -> Place:
        """Return a function that describes the position of one of its ids."""
        if self.offsets is None:
            return in_array(self.ids.shape)
        starts, note = self.offsets, ", padding not counted" * self.is_masked

        def in_bag(position: int) -> str:
            bag = int(np.searchsorted(starts, position, side="right")) - 1
            return f"at [{position - int(starts[bag])}] of bag {bag}{note}"

        return in_bag


class TableLookup:
    """The requests of a lookup for one table that share a plan. Maxima have a plan of their own.

    If some of them are bags, requests for rows become bags of one.

    Attributes:
        handle: handle of the table.
        which: the indices of its requests in the lookup.
        is_max: as in `LookupRequest`.
        pools: whether any of them are bags.
        saves: whether a backward pass needs an array of its forward pass besides the plan.
        trace: the dtype of that array for maxima.
    """

    def __init__(self, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        mine = [requests[k] for k in which]
        self.handle, self.which, self.is_max = mine[0].handle, list(which), mine[0].is_max
        self._executor = self.handle.executor
        self.trace = self._executor.trace
        self.pools = any(request.offsets is not None for request in mine)
        self.saves = self.is_max or any(request.weights is not None for request in mine)

    def ids(self, requests: Sequence[LookupRequest]) -> Any:
        return self._executor.joined([requests[k].ids.reshape(-1) for k in self.which])

    def plan(self, requests: Sequence[LookupRequest]) -> Any:
        return self._asking(self._executor.plan, requests)

    def _asking(self, ask: Callable[[Any], T], requests: Sequence[LookupRequest]) -> T:
        """Call a method of the executor with all ids. The `IdError` of a wrong id names its position."""
        try:
            return ask(self.ids(requests))
        except IdError:
            mine = [requests[k] for k in self.which]
            _refuse_outside([one.of(map(self._executor.host_array, one.parts())) for one in mine])
            raise

    def read(self, requests: Sequence[LookupRequest], plan: Any, rows: Any = None) -> tuple[list[Any], Any]:
        """Read rows, and pool bags.

        Args:
            requests: requests of the lookup.
            plan: plan of its own ones; None if they pool nothing, and get no gradients.
            rows: the plan's rows, if they were read already.

        Returns:
            The rows or bags of each request. `sum_gradients` needs the second value: unique rows, or positions of
            maxima.
        """
        executor = self._executor
        if not self.pools:
            if plan is None:
                found = self._asking(executor.lookup, requests)
            else:
                found = executor.stepped.read(plan) if rows is None else rows[plan.inverse]
            return self._split(found, requests), None
        assert plan is not None  # the caller plans all pooled requests
        rows = executor.stepped.read_rows(plan) if rows is None else rows
        bags, weights = self._bags(requests, plan)
        out, trace = executor.stepped.pool(rows, weights, bags)
        return self._split(out, requests), (trace if self.is_max else rows) if self.saves else None

    def sum_gradients(
        self, requests: Sequence[LookupRequest], plan: Any, grads: Sequence[Any], saved: Any
    ) -> tuple[list[tuple[TableHandle, Any]], list[Any]]:
        """Sum the gradients of all rows and bags that were read.

        Args:
            requests: requests of the lookup.
            plan: plan of its own ones.
            grads: gradients of the rows and bags of the lookup.
            saved: the array that `read` returned.

        Returns:
            The gradients of the rows of each table, and of the weights of the requests with weights.
        """
        executor = self._executor
        flat = executor.joined([grads[k].reshape(-1, self.handle.table.dim) for k in self.which])
        if not self.pools:
            return [(self.handle, executor.stepped.sum(plan, flat, None, by_frequency=False))], []
        bags, weights = self._bags(requests, plan)
        summed = [(self.handle, executor.unpool(flat, weights, bags, saved if self.is_max else None))]
        if weights is None or saved is None:
            return summed, []
        of_positions = executor.stepped.weight_grads(flat, saved, bags)
        of_positions = _cut(of_positions, [_count(requests[k].ids) for k in self.which])
        weighted = [requests[k].weights is not None for k in self.which]
        return summed, [part for part, is_weighted in zip(of_positions, weighted, strict=True) if is_weighted]

    def _bags(self, requests: Sequence[LookupRequest], plan: Any) -> tuple[Any, Any]:
        """Return the bags of its own requests, concatenated, and the weights of their positions."""
        mine, executor = [requests[k] for k in self.which], self._executor
        bounds, start = [executor.numbers(0, 1)], 0
        for request in mine:
            bounds.append(start + self._ends(request))
            start += _count(request.ids)
        stepped = executor.stepped
        placed = stepped.bounds(executor.joined(bounds), start)
        bags = stepped.bags(plan, placed, "max" if self.is_max else "sum", None)
        if self.is_max or not self.saves:
            return bags, None
        ones = (executor.ones(_count(request.ids)) if request.weights is None else request.weights for request in mine)
        return bags, executor.joined(list(ones))

    def _ends(self, request: LookupRequest) -> Any:
        """Return the end of each bag, int64; a row is a bag of one."""
        ids, weights = _count(request.ids), request.weights
        if request.offsets is None:
            return self._executor.numbers(1, ids + 1)
        if weights is not None and _count(weights) != ids:
            raise ArgumentError(
                f"`weights` of {request.handle.label} must have one weight for each id: got {_count(weights)} for "
                f"{counted(ids, 'id')}. Give them the shape of the ids."
            )
        return request.offsets[1:]

    def _split(self, found: Any, requests: Sequence[LookupRequest]) -> list[Any]:
        """Return the rows or bags of each request in its shape."""
        mine = [requests[k] for k in self.which]
        shapes = [one.ids.shape if one.offsets is None else (len(one.offsets) - 1,) for one in mine]
        parts = _cut(found, [math.prod(shape) for shape in shapes])
        return [part.reshape(*shape, found.shape[1]) for part, shape in zip(parts, shapes, strict=True)]


class GroupLookup:
    """The requests of a lookup for rows, or sums without weights, of several tables of a group.

    It gives the bits of a `TableLookup` for each of the tables. The plans are lookups of the group without their
    arrays.

    Attributes:
        handles: handles of the tables.
        which, pools, saves, is_max, trace: as in `TableLookup`.
    """

    pools, saves, is_max, trace = True, False, False, tf.int32

    def __init__(self, group: Group, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        self._group, self.which = group, list(which)
        self.handles = list(dict.fromkeys(requests[k].handle for k in which))

    def plan(self, requests: Sequence[LookupRequest]) -> PoolLookup:
        mine = [requests[k] for k in self.which]
        features = [
            BatchFeature(r.handle.table, r.ids, r.offsets, mode=None if r.offsets is None else "sum") for r in mine
        ]
        try:
            return unread(self._group.plan(features))
        except IdError:
            for handle in self.handles:
                _refuse_outside([request for request in mine if request.handle is handle])
            raise

    def read(
        self, requests: Sequence[LookupRequest], plan: Any, rows: np.ndarray | None = None
    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        plan = self.plan(requests) if plan is None else plan
        found = self._group.read(plan.batch)
        plan.batch, plan.traces = found.batch, found.traces
        return found.outputs, None

    def sum_gradients(
        self, requests: Sequence[LookupRequest], plan: Any, grads: Sequence[np.ndarray], saved: np.ndarray | None
    ) -> tuple[list[tuple[TableHandle, Any]], list[np.ndarray]]:
        handles = {handle.table: handle for handle in self.handles}
        found = batches.sum_gradients(plan, [grads[k] for k in self.which])
        return [(handles[table], summed) for table, summed in found], []


PartLookup = TableLookup | GroupLookup


def by_table(requests: Sequence[LookupRequest]) -> list[PartLookup]:
    """Return a lookup's requests in parts that are planned together: of one table, or of tables of a group."""
    of_tables: dict[TableHandle, list[int]] = {}
    for k, request in enumerate(requests):
        of_tables.setdefault(request.handle, []).append(k)
    groups: dict[Group, list[int]] = {}
    for handle, which in of_tables.items():
        group = None if handle.executor.is_on_gpu else handle.table.group
        if group is not None and _is_plain([requests[k] for k in which]):
            groups.setdefault(group, []).extend(which)
    joint = [GroupLookup(group, requests, sorted(which)) for group, which in groups.items()]
    joint = [one for one in joint if len(one.handles) > 1]
    done = {handle for one in joint for handle in one.handles}
    alone: dict[tuple[TableHandle, bool], list[int]] = {}
    for k, request in enumerate(requests):
        if request.handle not in done:
            alone.setdefault((request.handle, request.is_max), []).append(k)
    return [*joint, *(TableLookup(requests, which) for which in alone.values())]


def _is_plain(requests: Sequence[LookupRequest]) -> bool:
    """Return whether requests of a table are all for rows, or all for sums without weights."""
    if any(request.is_max or request.weights is not None for request in requests):
        return False
    return len({request.offsets is None for request in requests}) == 1


def _refuse_outside(requests: Sequence[LookupRequest]) -> None:
    """Raise the `IdError` of the first of a table's requests that has an id outside of it."""
    for number, request in enumerate(requests, 1):
        table, place = request.handle.table, request.place()
        more = f" of input {number} of {len(requests)}" * (len(requests) > 1)
        check_range(request.ids, table.rows, table.subject, lambda at, place=place, more=more: place(at) + more)


def _count(array: Any) -> int:
    """Return the number of elements of an array of NumPy or PyTorch."""
    return math.prod(array.shape)


def _cut(whole: Any, sizes: Sequence[int]) -> list[Any]:
    return [whole[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]


# If plans are no longer kept when gradients arrive, they are made again.
KEPT_BYTES = 1 << 27


class KeptPlans:
    """The plans of each lookup, kept until its backward pass.

    The backward pass finds them by a number, which goes through the graph.
    """

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        self._numbers = itertools.count(1)
        self._plans: OrderedDict[int, list[Any]] = OrderedDict()
        self._bytes = 0

    def grant(self, plans: list[Any]) -> int:
        """Keep the plans of a lookup, and return their number."""
        with self._lock:
            number = next(self._numbers)
            self._plans[number] = plans
            self._bytes += _size(plans)
            while self._bytes > KEPT_BYTES and len(self._plans) > 1:
                self._bytes -= _size(self._plans.popitem(last=False)[1])
            return number

    def end(self, number: int) -> list[Any] | None:
        """Return and drop the plans of a number; None if they are no longer kept, or were returned before."""
        with self._lock:
            plans = self._plans.pop(number, None)
            self._bytes -= 0 if plans is None else _size(plans)
            return plans


def _size(plans: list[Any]) -> int:
    return sum(plan.nbytes for plan in plans)


KEPT_PLANS = KeptPlans()


class WorkerLookup:
    """A lookup of sharded tables' rows by all workers for each other, at one place of a program."""

    def __init__(self, lookups: Sequence[TableLookup]) -> None:
        self._lookups = lookups
        self._shard = shard_of(lookups[0].handle.table) or Shard(0, 1)

    def fetch(self, ids: tf.Tensor) -> list[tf.Tensor]:
        """Return, in a program, the argument `served` of `rows`, given the message of `ask`."""
        asked = gather(ids)
        functions = functions_of(one.handle for one in self._lookups)
        with tf.control_dependencies(host_calls.after_earlier_steps()):
            served = host_calls.call(self.serve, [asked], [tf.int32], functions=functions, stateful=False)
        return [gather(served[0])]

    def plans(self, requests: Sequence[LookupRequest]) -> list[Plan]:
        return [one.plan(requests) for one in self._lookups]

    def ask(self, requests: Sequence[LookupRequest]) -> np.ndarray:
        """Return a message with the unique ids that each lookup needs."""
        plans = self.plans(requests)
        return addressed(stages.ask([plan.ids for plan in plans], self._splits(plans)))

    def serve(self, asked: np.ndarray) -> np.ndarray:
        """Return a message with this worker's rows for the requests of all workers."""
        sources = self._sources()
        wanted = [stages.asked(message, len(sources)) for message in self._taken(asked)]
        return addressed(stages.serve(wanted, sources)[0])

    def rows(self, plans: Sequence[Plan], served: np.ndarray) -> list[np.ndarray]:
        """Return the unique rows of each lookup from the messages of all workers."""
        dims = [one.handle.table.dim for one in self._lookups]
        found = [np.empty((len(plan.ids), dim), np.float32) for plan, dim in zip(plans, dims, strict=True)]
        stages.receive(dict(enumerate(self._taken(served))), self._splits(plans), self._sources(), found)
        return found

    def _sources(self) -> list[stages.RowSource]:
        return [stages.RowSource.of(table, wire_of(table)) for table in (one.handle.table for one in self._lookups)]

    def _splits(self, plans: Sequence[Plan]) -> list[Split]:
        return [self._shard.split(plan.ids) for plan in plans]

    def _taken(self, messages: np.ndarray) -> list[np.ndarray]:
        return taken(messages, self._shard.rank, self._shard.ranks)
