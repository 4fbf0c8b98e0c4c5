"""The host part of a lookup: the requests for several tables, and the plans until the backward pass."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from embedrock.batch.ids import check_range
from embedrock.batch.wrong_ids import Place, in_array
from embedrock.distributed import stages
from embedrock.distributed.owners import Shard, Split
from embedrock.distributed.transport import addressed, taken
from embedrock.errors import ArgumentError, IdError, UnsupportedError, counted
from embedrock.keras.training import host_calls
from embedrock.keras.training.handle import TableHandle, functions_of
from embedrock.keras.workers.cluster import gather
from embedrock.keras.workers.shards import wire_of
from embedrock.system import forks
from embedrock.table import batches
from embedrock.table.batches import Batch, FeatureLayout
from embedrock.table.missing import Missing, check_reads

T = TypeVar("T")


class LookupRequest(NamedTuple):
    """One input of a lookup: tensors in a program, their numbers among the inputs of host functions, or arrays.

    Bag b holds the ids ``offsets[b]`` to ``offsets[b + 1]``. The last bag ends at n.
    """

    handle: TableHandle
    ids: Any  # int32 or int64; of any shape, or (n,) if rows are pooled
    offsets: Any = None  # int64 (bags + 1,); None for the rows themselves
    weights: Any = None  # float32 (n,), factors of the rows of bags; None for ones
    is_max: bool = False  # pool by the largest values of each column instead of sums, without weights
    is_masked: bool = False  # padding was removed from the ids
    layer: weakref.ref[Any] | None = None  # asks, and may be gone before the program; None: no layer asks

    def parts(self) -> list[Any]:
        return [part for part in self[1:4] if part is not None]

    def of(self, parts: Iterator[Any]) -> LookupRequest:
        """Return a request like this one of other parts, in the order of `parts`."""
        ids, offsets, weights = (None if part is None else next(parts) for part in self[1:4])
        return self._replace(ids=ids, offsets=offsets, weights=weights)

    @property
    def missing(self) -> Missing | None:
        """The layer's choice of the values of rows that are not there, now; None: the table's."""
        layer = None if self.layer is None else self.layer()
        return None if layer is None else layer.missing

    def check_missing(self, is_training: bool) -> None:
        """Raise `UnsupportedError` unless rows can be read by `missing` now: see `check_reads`."""
        if missing := self.missing:
            handle = self.handle
            is_elsewhere = handle.executor.is_on_gpu or handle.shard is not None
            check_reads(missing, handle.label, is_training and handle.variable.trainable, is_elsewhere)

    def place(self) -> Place:
        """Return a function that describes the position of one of its ids."""
        if self.offsets is None:
            return in_array(self.ids.shape)
        starts, note = self.offsets, ", padding not counted" * self.is_masked

        def in_bag(position: int) -> str:
            bag = int(np.searchsorted(starts, position, side="right")) - 1
            return f"at [{position - int(starts[bag])}] of bag {bag}{note}"

        return in_bag


def planned_apart(requests: Sequence[LookupRequest]) -> list[list[int]]:
    """Return which requests of a lookup are planned together: for one table, or for the tables of a group.

    Results of maxima, and of weights, go through the program. So they have a plan for each table. A GPU plans each
    table alone, and so do shards.
    """
    weighted = {request.handle for request in requests if request.is_max or request.weights is not None}
    parts: dict[Any, list[int]] = {}
    for number, request in enumerate(requests):
        handle, group = request.handle, request.handle.table.group
        is_alone = group is None or handle in weighted or handle.executor.is_on_gpu or handle.shard is not None
        together = (handle, request.is_max) if is_alone else group
        parts.setdefault((together, request.missing), []).append(number)
    return list(parts.values())


class HostLookup:
    """The requests of a lookup that are planned together on the CPU. Rows of a table with bags become bags of one.

    The parts of requests are numbers of inputs. `which` are their indices in the lookup. `saved` is the dtype of an
    array that a backward pass needs besides the plan, or None.
    """

    def __init__(self, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        self.requests, self.which = requests, which
        self._handles = {request.handle.table: request.handle for request in requests}
        self._pooled = {request.handle for request in requests if request.offsets is not None}
        self._is_max = requests[0].is_max
        self._is_weighted = any(request.weights is not None for request in requests)
        self.saved = tf.int32 if self._is_max else tf.float32 if self._is_weighted else None
        tables = [request.handle.table for request in requests]
        mode = "max" if self._is_max else "sum"
        modes = [mode if request.handle in self._pooled else None for request in requests]
        self._layout = FeatureLayout(requests[0].handle.state.table_lock, tables, modes)

    def plan(self, inputs: Sequence[Any]) -> Batch:
        return self._asking(batches.plan, inputs)

    def read(
        self, inputs: Sequence[Any], keep: bool, plan: Any = None, rows: np.ndarray | None = None
    ) -> tuple[list[Any], Any, Any]:
        """Return the rows or bags of each request, the array to save, and the plan.

        Args:
            inputs: the parts of all requests.
            keep: gradients may follow.
            plan, rows: of a shard, the plan and its rows; None: they are to be found here.
        """
        if len(choices := {request.missing for request in self.requests}) > 1:
            raise UnsupportedError(
                f"layers that one call looks up in {self.requests[0].handle.table.subject} must have one `missing`: "
                f"got {', '.join(sorted(map(repr, choices)))}. Set it before the model is called, or compile it again."
            )
        self._layout.missing = choices.pop()
        if plan is None and not keep and not self._pooled and len(self._handles) == len(self.requests):
            with self._layout.table_lock.alone():
                return self._asking(lambda layout, ids, *_: batches.look_up(layout, ids), inputs), None, None
        batch = batches.read_planned(self.plan(inputs) if plan is None else plan, self._is_weighted, rows)
        outputs, part = batch.outputs, batch.parts[0]
        for k, request in enumerate(self.requests if self._pooled else ()):
            if request.offsets is None:
                outputs[k] = outputs[k].reshape(*inputs[request.ids].shape, request.handle.table.dim)
        saved = part.trace if self._is_max else part.values if self._is_weighted else None
        batch.arrays, part.values = [], None  # the program has them
        return outputs, saved, batch

    def sum_gradients(
        self, inputs: Sequence[Any], plan: Any, grads: Sequence[Any], saved: Any
    ) -> tuple[list[tuple[TableHandle, Any]], list[Any]]:
        """Sum the gradients of all rows and bags that were read.

        Args:
            inputs: the parts of all requests.
            plan: from `read`; None: it is no longer kept.
            grads: gradients of the rows and bags of the lookup.
            saved: the array from `read`.

        Returns:
            The gradients of the rows of each table, and of the weights of the requests with weights.
        """
        batch = self.plan(inputs) if plan is None else plan
        own = [grads[k] for k in self.which]
        if self._is_max:
            batch.parts[0].trace = saved
        summed = [
            (self._handles[table], joint.of(number))
            for tables, joint in batches.sum_blocks(batch, own)
            for number, table in enumerate(tables)
        ]
        if not self._is_weighted:
            return summed, []
        batch.parts[0].values = saved
        return summed, [part for part in batches.weight_gradients(batch, own) if part is not None]

    def _asking(self, ask: Callable[..., T], inputs: Sequence[Any]) -> T:
        """Call a function with the layout, and its ids, offsets and weights. An `IdError` names the id's position."""
        ids, offsets, weights = zip(*[self._feature(request, inputs) for request in self.requests], strict=True)
        try:
            return ask(self._layout, ids, offsets, weights)
        except IdError:
            array = self.requests[0].handle.executor.host_array
            refuse_outside([one.of(iter([array(inputs[k]) for k in one.parts()])) for one in self.requests])
            raise

    def _feature(self, request: LookupRequest, inputs: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Return the ids, offsets and weights of a request: see `Batch`."""
        handle, ids = request.handle, inputs[request.ids]
        if handle not in self._pooled:
            return ids, None, None
        offsets, weights = (None if part is None else inputs[part] for part in request[2:4])
        if weights is not None and len(weights) != len(ids):
            raise ArgumentError(
                f"`weights` of {handle.label} must have one weight for each id: got {len(weights)} for "
                f"{counted(len(ids), 'id')}. Give them the shape of the ids."
            )
        return ids.reshape(-1), offsets, weights


def refuse_outside(requests: Sequence[LookupRequest]) -> None:
    """Raise the `IdError` of the first request that has an id outside of its table."""
    of_tables: dict[TableHandle, list[LookupRequest]] = {}
    for request in requests:
        of_tables.setdefault(request.handle, []).append(request)
    for handle, own in of_tables.items():
        for number, request in enumerate(own, 1):
            place, more = request.place(), f" of input {number} of {len(own)}" * (len(own) > 1)
            told = lambda at, place=place, more=more: place(at) + more  # noqa: E731
            check_range(request.ids, handle.table.rows, handle.table.subject, told)


# If plans are no longer kept when gradients arrive, they are made again.
KEPT_BYTES = 1 << 27


class KeptPlans:
    """The plans of each lookup, kept until its backward pass, but not longer than the lookup.

    The backward pass finds them by a number, which goes through the graph.
    """

    def __init__(self) -> None:
        self._lock = forks.lock(forks.LockRank.SECTION)
        self._numbers = itertools.count(1)
        self._plans: OrderedDict[int, tuple[weakref.ref[Any], int]] = OrderedDict()
        self._bytes = 0

    def grant(self, lookup: Any, plans: list[Any]) -> int:
        """Keep plans in a lookup's dict ``kept``, and return their number."""
        dropped, own = list[Any](), sum([plan.nbytes for plan in plans])  # dropped when the lock is free
        with self._lock:
            number = next(self._numbers)
            lookup.kept[number] = plans
            self._plans[number] = weakref.ref(lookup), own
            self._bytes += own
            while self._bytes > KEPT_BYTES and len(self._plans) > 1:
                oldest, (owner, size) = self._plans.popitem(last=False)
                self._bytes -= size
                if (last := owner()) is not None:
                    dropped += [last, last.kept.pop(oldest)]
            return number

    def end(self, lookup: Any, number: int) -> list[Any] | None:
        """Return and drop the plans of a number; None if they are no longer kept, or were returned before."""
        with self._lock:
            self._bytes -= self._plans.pop(number, (None, 0))[1]
            return lookup.kept.pop(number, None)


KEPT_PLANS = KeptPlans()


class WorkerLookup:
    """A lookup of sharded tables' rows by all workers for each other, at one place of a program."""

    def __init__(self, parts: Sequence[HostLookup]) -> None:
        self._parts = parts
        self._handles = [part.requests[0].handle for part in parts]
        self._shard = self._handles[0].shard or Shard(0, 1)

    def fetch(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return, in a program, the argument `served` of `rows`, given the parts of all requests."""
        call = functools.partial(host_calls.call, functions=functions_of(self._handles), stateful=False)
        asked = gather(call(self.ask, parts, [tf.int32])[0])
        with tf.control_dependencies(host_calls.after_earlier_steps()):
            return [gather(call(self.serve, [asked], [tf.int32])[0])]

    def ask(self, *inputs: np.ndarray) -> np.ndarray:
        """Return a message with the unique ids that each lookup needs."""
        ids = self._ids([part.plan(inputs) for part in self._parts])
        return addressed(stages.ask(ids, self._splits(ids)))

    def serve(self, asked: np.ndarray) -> np.ndarray:
        """Return a message with this worker's rows for the requests of all workers."""
        sources = self._sources()
        wanted = [stages.asked(message, len(sources)) for message in self._taken(asked)]
        return addressed(stages.serve(wanted, sources)[0])

    def rows(self, inputs: Sequence[Any], served: np.ndarray) -> list[tuple[Batch, np.ndarray]]:
        """Return the plan of each lookup, and its unique rows from the messages of all workers."""
        plans = [part.plan(inputs) for part in self._parts]
        ids = self._ids(plans)
        found = [
            np.empty((len(own), handle.table.dim), np.float32) for own, handle in zip(ids, self._handles, strict=True)
        ]
        stages.receive(dict(enumerate(self._taken(served))), self._splits(ids), self._sources(), found)
        return list(zip(plans, found, strict=True))

    @staticmethod
    def _ids(plans: Sequence[Batch]) -> list[np.ndarray]:
        return [plan.parts[0].plan.ids for plan in plans]

    def _sources(self) -> list[stages.RowSource]:
        return [stages.RowSource.of(handle.table, wire_of(handle.table)) for handle in self._handles]

    def _splits(self, ids: Sequence[np.ndarray]) -> list[Split]:
        return [(each.shard or self._shard).split(own) for each, own in zip(self._handles, ids, strict=True)]

    def _taken(self, messages: np.ndarray) -> list[np.ndarray]:
        return taken(messages, self._shard.rank, self._shard.ranks)
