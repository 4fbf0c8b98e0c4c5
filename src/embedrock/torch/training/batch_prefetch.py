"""`ert.prefetch` of shared tables: ids of the next batches go ahead to the owners of the rows.

Each batch pulled from the loader is a `PrefetchedBatch`. A separate group sends the ids to their owners, while the
ranks work on the batch before. Owners load the rows, also from disk. Each rank announces the number of ids when it has
pulled the batch. It sends the ids when it has pulled the next one, so no rank waits long. The rows of all tables arrive
in one message, when the first layer looks one up. So no step comes between.

The order of messages depends only on the pulled batches, never on timing. All ranks must pull the same number of
batches.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import make_plan
from embedrock.distributed import stages
from embedrock.distributed.exchange import IdRequest, MessageSizes
from embedrock.distributed.messages import pack_all, words_of
from embedrock.distributed.owners import SharedPlan
from embedrock.errors import ArgumentError, CacheTooSmallError, IdError, OtherRankError
from embedrock.storage.backend import Pin
from embedrock.torch.training.sharing import RankGroup, SharedTable

T = TypeVar("T")

AT_END = -1
LOOP = 2**32  # difference between the batch numbers of two loops
ROW = 3  # numbers that go ahead of ids: the batch's, length of the ids, length of their gradients

_open: weakref.WeakSet[BatchPrefetcher] = weakref.WeakSet()


class PrefetchedBatch:
    """Ids of a batch on their way to the owners of their rows.

    Attributes:
        number: number of the batch, the same on all ranks.
        plans: plans by table.
        flat: ids in their original order, by table.
        error: error of a lookup of this batch on this rank.
        others_ended: error if other ranks do not have this batch.
        sent: event, set when nothing more of the batch is sent.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self.number, self._rank_group = 0, rank_group
        self.plans: dict[SharedTable, SharedPlan] = {}
        self.flat: dict[SharedTable, np.ndarray] = {}
        self.error: Exception | None = None
        self.others_ended: OtherRankError | None = None
        self.sent = threading.Event()
        self._told: Callable[[], np.ndarray] | None = None
        self._received: Callable[[], list[np.ndarray]] | None = None
        self._ask: IdRequest | None = None
        self._rows: dict[SharedTable, np.ndarray] = {}
        self._as_of = -1

    def tell(self, number: int, gradients: Sequence[int]) -> None:
        """Begin to send all ranks the number of their ids, and the length of the gradients that will come back."""
        self.number, self._go, ranks = number, list(gradients), self._rank_group.ahead
        letters = stages.ask([plan.ids for plan in self.plans.values()], [plan.split for plan in self.plans.values()])
        self._mail = pack_all([[] if to == ranks.rank else letter for to, letter in enumerate(letters)])
        told = np.array([[number] * ranks.ranks, self._mail.sizes, self._go], np.int64)
        self._told = ranks.begin_rows(told.T)

    def send(self) -> None:
        """Begin to send the ids. If some ranks have not sent their sizes yet, wait for them."""
        if self._told is not None:
            numbers, words, gradients = self._told().T
            if (numbers == AT_END).any():
                self.others_ended = _uneven(numbers)
            else:
                if (numbers != self.number).any():
                    self.error = self.error or _uneven(numbers)
                self._received = self._rank_group.ahead.begin(self._mail, words.tolist())
                known = self._go[0] >= 0
                self._gradients = MessageSizes(gradients.tolist(), self._go) if known else None
        self.sent.set()

    def load_near(self) -> Sequence[Pin]:
        """Wait for the requests of the other ranks, and load the rows of this rank."""
        self.sent.wait()
        if self.others_ended is not None:
            raise self.others_ended
        if self._received is None:
            return ()
        members, plans = list(self.plans), list(self.plans.values())
        asked = stages.asked_by_rank(self._received(), plans, self._rank_group.ranks.rank)
        self._ask = IdRequest(self.number, members, plans, asked, self._gradients)
        pins: list[Pin] = []
        try:
            for sharing, ids in zip(members, zip(*asked, strict=True), strict=True):
                if sharing.table.is_on_disk:
                    pins.append(sharing.table.bring(np.concatenate(ids)))
        except CacheTooSmallError as error:  # every rank must get the error
            self.error = error
        return pins

    def plan(self, sharing: SharedTable, ids: np.ndarray) -> SharedPlan:
        """Return the plan of ids of the batch, int64 of any shape.

        Raises:
            ArgumentError: `ert.prefetch` did not get all of the ids.
        """
        own, flat = self.plans[sharing], ids.reshape(-1)
        if np.array_equal(flat, self.flat[sharing]):
            return replace(own, shape=ids.shape, fetch=lambda _: self.rows(sharing))
        order = np.argsort(own.ids)

        def fetch(plan: SharedPlan) -> np.ndarray:
            return self.rows(sharing)[order[np.searchsorted(own.ids, plan.ids, sorter=order)]]

        plan = sharing.shard.plan(ids, fetch)
        if len(others := plan.ids[~np.isin(plan.ids, own.ids)]):
            raise ArgumentError(
                f"{sharing.label} looks up ids that ert.prefetch was not told of: got {others[:4].tolist()}. Its "
                "function of a batch must return all ids that the layer gets of it: rows of other processes come by "
                "them. Look up others under torch.no_grad(), or leave the layer out of prefetch."
            )
        return plan

    def rows(self, sharing: SharedTable) -> np.ndarray:
        """Return the current rows of the batch: float32 (unique, dim)."""
        if self._as_of != self._rank_group.changes:
            self._as_of, members = self._rank_group.changes, list(self.plans)
            self._rows = dict(zip(members, self._fetched(members), strict=True))
        return self._rows[sharing]

    def _fetched(self, members: Sequence[SharedTable]) -> list[np.ndarray]:
        exchange = self._rank_group.exchange
        if self._ask is not None and not exchange.uneven.is_on:
            return exchange.answer(self._ask, self.error)
        if self.error is not None:
            exchange.refuse(members, self.error)
        return exchange.rows(members, list(self.plans.values()))


class BatchPrefetcher:
    """`Prefetcher` of shared tables' rows for the batches of a loop. The ids that it prefetches are whole batches.

    Args:
        rank_group: the ranks.
        ids_of: functions from a batch to its ids, for sharded tables.
        paddings: padding ids of all layers of each table.
        pooled: tables with layers of bags only, which do not look up padding.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        ids_of: Mapping[SharedTable, Callable[[Any], np.ndarray]],
        paddings: Mapping[SharedTable, set[int | None]],
        pooled: Collection[SharedTable],
    ) -> None:
        self._rank_group, self._ids_of, self._paddings, self._pooled = rank_group, ids_of, paddings, pooled
        self._copies: dict[SharedTable, int] = {}
        self._batches: deque[PrefetchedBatch] = deque()
        self._last: PrefetchedBatch | None = None
        rank_group.loops += 1
        self._told = rank_group.loops * LOOP
        rank_group.exchange.expects = True
        _open.add(self)

    def count(self, sharing: SharedTable, ids: np.ndarray) -> None:
        """Count the rows that a batch looks up in a replicated table. Ids are int64 of any shape."""
        ids = np.ascontiguousarray(ids, np.int64)
        brought = ids.reshape(-1) if sharing.sums_positions else make_plan(ids).ids
        self._copies[sharing] = len(brought) - len(self._dropped(sharing, brought))

    def __call__(self, batch: Any) -> PrefetchedBatch:
        """Send the ids of the pulled batch ahead."""
        made = PrefetchedBatch(self._rank_group)
        for sharing, ids_of in self._ids_of.items():
            try:
                ids = _checked(sharing, ids_of, batch)
                if sharing in self._pooled and len(dropped := self._dropped(sharing, ids)):
                    ids = ids[ids != dropped[0]]
            except Exception as error:  # all ranks get the error at the lookup
                made.error, ids = error, np.empty(0, np.int64)
            made.flat[sharing], made.plans[sharing] = ids, sharing.shard.plan(ids)
        self._batches.append(made)
        self._send_last()
        if not self._rank_group.exchange.uneven.is_on:
            self._told += 1
            made.tell(self._told, self._gradient_words(made))
        self._last = made
        return made

    def batches(self, source: Iterable[T]) -> Iterator[T]:
        """Iterate over a loader. At its end, check that the loaders of all ranks have ended."""
        yield from source
        last = self._send_last()
        has_said = last is not None and last.others_ended is not None  # the other ranks have the error already
        if not (has_said or self._rank_group.exchange.uneven.is_on):
            ranks = self._rank_group.ahead
            numbers = ranks.begin_rows(np.full((ranks.ranks, ROW), AT_END, np.int64))()[:, 0]
            if (numbers != AT_END).any():
                raise _uneven(numbers)

    def advance(self) -> None:
        """Make the next batch the current one for lookups."""
        self._rank_group.current[torch.is_grad_enabled()] = self._batches.popleft()

    def close(self) -> None:
        for each in self._batches:
            each.sent.set()
        self._batches.clear()
        self._rank_group.current.clear()

    def bring(self, ids: PrefetchedBatch) -> Pin:
        return Pin(ids.load_near())

    def room_for(self, batches: Sequence[PrefetchedBatch]) -> tuple[int, int]:
        """Return the number of this rank's own rows in batches, and the `memory` that holds them in each table."""
        told = [sharing.table.room_for([each.flat[sharing] for each in batches]) for sharing in self._ids_of]
        return sum(rows for rows, _ in told), max(memory for _, memory in told)

    def _send_last(self) -> PrefetchedBatch | None:
        last, self._last = self._last, None
        if last is not None:
            last.send()
        return last

    def _gradient_words(self, made: PrefetchedBatch) -> list[int]:
        """Return the length of the gradient message to each rank; -1: there will be no message."""
        ranks = self._rank_group.ahead.ranks
        trains = [sharing for sharing in self._paddings if sharing.handle.requires_grad]
        if not (torch.is_grad_enabled() and trains):
            return [-1] * ranks
        words = np.full(ranks, 2 + 8 * len(trains))
        for sharing in trains:
            if sharing in made.plans:
                shard, plan = sharing.shard, made.plans[sharing]
                ids = made.flat[sharing] if sharing.sums_positions else plan.ids
                counts = np.array((shard.split(ids) if sharing.sums_positions else plan.split).counts)
                np.subtract.at(counts, shard.owners(self._dropped(sharing, ids)), 1)
            else:
                counts = np.full(ranks, self._copies[sharing])
            weights = (count * sharing.table.dim for count in counts.tolist())
            words += 2 * counts + np.array([words_of(each, sharing.wire) for each in weights])
        words[self._rank_group.ahead.rank] = 0  # a rank sends itself nothing
        return words.tolist()

    def _dropped(self, sharing: SharedTable, ids: np.ndarray) -> np.ndarray:
        paddings = self._paddings[sharing]
        padding = next(iter(paddings)) if len(paddings) == 1 else None  # of several, another layer trains it
        return ids[:0] if padding is None else ids[ids == padding]


def _checked(sharing: SharedTable, ids_of: Any, batch: Any) -> np.ndarray:
    table = sharing.table
    try:
        return check_ids(ids_of(batch), table.rows, table.subject)
    except IdError:
        ids_of.refuse_outside(batch)  # its error names the position in the batch
        raise


def _uneven(numbers: np.ndarray) -> OtherRankError:
    """Return the error for ranks with loaders of different lengths, or at different batches."""
    told = [f"rank {rank} {'has none' if n == AT_END else f'is at batch {n % LOOP}'}" for rank, n in enumerate(numbers)]
    return OtherRankError(
        f"ert.prefetch of tables that processes share needs as many batches on all ranks: {', '.join(told)}. Where "
        "loaders differ in length, train inside of `with net.join(), ert.uneven(model):`."
    )


@atexit.register
def _close_all() -> None:
    """Wake the threads of unfinished loops. Other threads wait for them when Python ends."""
    for ahead in list(_open):
        ahead.close()
