"""Ids of the next batches that go ahead to the owners of the rows: `ert.prefetch` of tables that processes share.

Each batch that is pulled from the loader is a `PrefetchedBatch`. Its ids go to their owners on a group of their own,
beside what the ranks do with the batch before, and owners bring the rows near, from disk, too. How many they are, each
rank tells
when it has pulled the batch, and they go when it has pulled the next: so nothing is waited for that takes long. The
rows come when the first layer looks one up, of all tables in one message, so that no step comes between.

What is sent when depends only on the batches that were pulled, which must be as many on all ranks, on no timing.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from embedrock.batch.ids import check_ids
from embedrock.batch.plan import Plan, make_plan
from embedrock.distributed import stages
from embedrock.distributed.exchange import IdRequest, MessageSizes
from embedrock.distributed.messages import pack_all, words_of
from embedrock.distributed.owners import Shard
from embedrock.errors import ArgumentError, CacheTooSmallError, IdError, OtherRankError
from embedrock.storage.backend import Pin
from embedrock.table.prefetch import Pins
from embedrock.torch.training.sharing import RankGroup, SharedTable

T = TypeVar("T")
IdsOf = Callable[[Any], np.ndarray]

AT_END = -1
LOOP = 2**32  # by how much the numbers of batches of two loops differ
WORDS = 6  # of what is told of a batch: its number, how long its ids are, and how long their gradients will be

_open: weakref.WeakSet[BatchPrefetcher] = weakref.WeakSet()


@dataclass(frozen=True, eq=False)
class PrefetchedRankPlan(Plan):
    """A plan of ids that went ahead.

    Attributes:
        round: with which they did.
        places: int64 (unique,), where their rows are among those of the round; None: they are all of them.
    """

    round: Any = None
    places: np.ndarray | None = None


class PrefetchedBatch:
    """The ids of a batch, on their way to the owners of their rows.

    Args:
        crew: the ranks.

    Attributes:
        number: of those that went ahead, the same on all ranks.
        plans: by table.
        flat: the ids as they came, by table.
        error: why the batch cannot be looked up, on this rank.
        others_ended: the error of a batch that others do not have.
        sent: set once nothing more of it is sent.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self.number, self._rank_group = 0, rank_group
        self.plans: dict[SharedTable, Plan] = {}
        self.flat: dict[SharedTable, np.ndarray] = {}
        self.error: Exception | None = None
        self.others_ended: OtherRankError | None = None
        self.sent = threading.Event()
        self._told: Callable[[], list[np.ndarray]] | None = None
        self._came: Callable[[], list[np.ndarray]] | None = None
        self._ask: IdRequest | None = None
        self._rows: dict[SharedTable, np.ndarray] = {}
        self._as_of = -1

    # ------------------------------------------------------------ sending

    def tell(self, number: int, gradients: Sequence[int]) -> None:
        """Begin to tell all ranks how many ids they get, and how many words of gradients will come back."""
        self.number, ranks = number, self._rank_group.ahead
        self._splits = [_shard_of(sharing).split(plan.ids) for sharing, plan in self.plans.items()]
        self._letters = stages.ask([plan.ids for plan in self.plans.values()], self._splits)
        self._messages = pack_all(self._letters, last=ranks.rank)
        self._go = list(gradients)
        numbers = zip(map(len, self._messages), gradients, strict=True)
        told = [np.array([self.number, *pair], np.int64).view(np.int32) for pair in numbers]
        self._told = ranks.begin(told, [WORDS] * ranks.ranks)

    def send(self) -> None:
        """Begin to send the ids. All ranks have told their sizes by then, or are asked for them."""
        if self._told is not None:
            told = np.stack([part.view(np.int64) for part in self._told()])
            if (told[:, 0] == AT_END).any():
                self.others_ended = _uneven(told[:, 0])
            else:
                if (told[:, 0] != self.number).any():
                    self.error = self.error or _uneven(told[:, 0])
                self._came = self._rank_group.ahead.begin(self._messages, told[:, 1].tolist())
                known = self._go[0] >= 0
                self._gradients = MessageSizes(told[:, 2].tolist(), self._go) if known else None
        self.sent.set()

    def load_near(self) -> Sequence[Pin]:
        """Wait for what the others ask for, and bring the rows that are here near."""
        self.sent.wait()
        if self.others_ended is not None:
            raise self.others_ended
        if self._came is None:
            return ()
        asked, members = self._came(), list(self.plans)
        self._ask = IdRequest(self.number, members, self._splits, asked, self._gradients)
        wanted = zip(*(stages.asked(message, len(members)) for message in asked), strict=True)
        pins: list[Pin] = []
        try:
            for sharing, ids in zip(members, wanted, strict=True):
                if sharing.table.is_on_disk:
                    pins.append(sharing.table.bring(np.concatenate(ids)))
        except CacheTooSmallError as error:  # which all have to hear of
            self.error = error
        return pins

    # ------------------------------------------------------------ lookups

    def plan(self, sharing: SharedTable, ids: np.ndarray) -> PrefetchedRankPlan:
        """Return the plan of ids of the batch, int64 of any shape.

        Raises:
            ArgumentError: `ert.prefetch` was not told of them.
        """
        own, flat = self.plans[sharing], ids.reshape(-1)
        if np.array_equal(flat, self.flat[sharing]):
            return PrefetchedRankPlan(ids.shape, own.ids, own.inverse, own.starts, own.order, round=self)
        plan = sharing.plan_here(ids)
        order = np.argsort(own.ids)
        places = order[np.searchsorted(own.ids, plan.ids, sorter=order).clip(max=max(0, len(order) - 1))]
        if len(others := plan.ids[own.ids[places] != plan.ids] if len(order) else plan.ids):
            raise ArgumentError(
                f"{sharing.label} looks up ids that ert.prefetch was not told of: got {others[:4].tolist()}. Its "
                "function of a batch must return all ids that the layer gets of it: rows of other processes come by "
                "them. Look up others under torch.no_grad(), or leave the layer out of prefetch."
            )
        return PrefetchedRankPlan(ids.shape, plan.ids, plan.inverse, plan.starts, plan.order, round=self, places=places)

    def rows(self, sharing: SharedTable, places: np.ndarray | None) -> np.ndarray:
        """Return rows of the batch as they are now: float32 (unique, dim)."""
        if self._as_of != self._rank_group.changes:
            self._as_of, members = self._rank_group.changes, list(self.plans)
            self._rows = dict(zip(members, self._fetched(members), strict=True))
        found = self._rows[sharing]
        return found if places is None else found[places]

    def _fetched(self, members: Sequence[SharedTable]) -> list[np.ndarray]:
        exchange = self._rank_group.exchange
        if self._ask is not None and not exchange.uneven.is_on:
            return exchange.answer(self._ask, self.error)
        if self.error is not None:
            exchange.refuse(members, self.error)
        return exchange.rows(members, [plan.ids for plan in self.plans.values()])


class BatchPrefetcher:
    """Brings the rows near that processes share, for the batches of a loop: a `Prefetcher`, whose ids are rounds.

    Args:
        crew: the ranks.
        ids_of: of tables that are shared out, what a batch looks up in them.
        paddings: the ids of each table that get no gradient, of all its layers.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        ids_of: Mapping[SharedTable, IdsOf],
        paddings: Mapping[SharedTable, set[int | None]],
    ) -> None:
        self._rank_group, self._ids_of, self._paddings = rank_group, ids_of, paddings
        self._copies: dict[SharedTable, int] = {}
        self._rounds: deque[PrefetchedBatch] = deque()
        self._last: PrefetchedBatch | None = None
        rank_group.loops += 1
        self._told = rank_group.loops * LOOP
        rank_group.exchange.expects = True
        _open.add(self)

    def counted(self, sharing: SharedTable, ids_of: IdsOf) -> IdsOf:
        """Return a function of a batch that lets this one know how many rows of a replicated table it looks up."""
        return _BatchCount(self, sharing, ids_of)

    def count(self, sharing: SharedTable, ids: np.ndarray) -> None:
        """Note what a batch looks up in a replicated table, int64 of any shape."""
        ids = np.ascontiguousarray(ids, np.int64)
        brought = ids.reshape(-1) if sharing.sums_positions else make_plan(ids).ids
        self._copies[sharing] = len(brought) - len(self._dropped(sharing, brought))

    def __call__(self, batch: Any) -> PrefetchedBatch:
        """Let the ids of the batch that was pulled go ahead."""
        made = PrefetchedBatch(self._rank_group)
        for sharing, ids_of in self._ids_of.items():
            try:
                ids = _checked(sharing, ids_of, batch)
            except Exception as error:  # all hear of it when they look up
                made.error, ids = error, np.empty(0, np.int64)
            made.flat[sharing], made.plans[sharing] = ids, sharing.plan_here(ids)
        self._rounds.append(made)
        self._send_last()
        if not self._rank_group.exchange.uneven.is_on:
            self._told += 1
            made.tell(self._told, self._gradient_words(made))
        self._last = made
        return made

    def batches(self, source: Iterable[T]) -> Iterator[T]:
        """Go through a loader, and see to it at its end that the others are at theirs."""
        yield from source
        last = self._send_last()
        has_said = last is not None and last.others_ended is not None  # which they have heard
        if not (has_said or self._rank_group.exchange.uneven.is_on):
            ranks = self._rank_group.ahead
            end = np.array([AT_END, 0, 0], np.int64).view(np.int32)
            theirs = ranks.begin([end] * ranks.ranks, [WORDS] * ranks.ranks)()
            numbers = np.array([part.view(np.int64)[0] for part in theirs])
            if (numbers != AT_END).any():
                raise _uneven(numbers)

    def advance(self) -> None:
        """Let layers look up the next batch."""
        self._rank_group.current[torch.is_grad_enabled()] = self._rounds.popleft()

    def close(self) -> None:
        """Forget the batches."""
        for each in self._rounds:
            each.sent.set()
        self._rounds.clear()
        self._rank_group.current.clear()

    def bring(self, ids: PrefetchedBatch) -> Pin:
        """Wait for what the others ask for, and bring the rows that are here near."""
        return Pins(ids.load_near())

    def room_for(self, batches: Sequence[PrefetchedBatch]) -> tuple[int, int]:
        """Return how many rows batches have of this rank's own ids, and the `memory` that holds those of each table."""
        told = [sharing.table.room_for([each.flat[sharing] for each in batches]) for sharing in self._ids_of]
        return sum(rows for rows, _ in told), max(memory for _, memory in told)

    def _send_last(self) -> PrefetchedBatch | None:
        last, self._last = self._last, None
        if last is not None:
            last.send()
        return last

    def _gradient_words(self, made: PrefetchedBatch) -> list[int]:
        """Return how long the messages to each rank will be that bring the gradients; -1: there will be none."""
        ranks = self._rank_group.ahead.ranks
        trains = [sharing for sharing in self._paddings if sharing.handle.requires_grad]
        if not (torch.is_grad_enabled() and trains):
            return [-1] * ranks
        words = np.full(ranks, 2 + 6 * len(trains))
        for sharing in trains:
            if sharing in made.plans:
                shard, ids = _shard_of(sharing), made.plans[sharing].ids
                ids = made.flat[sharing] if sharing.sums_positions else ids
                counts = np.diff(shard.split(ids).bounds)
                np.subtract.at(counts, shard.owners(self._dropped(sharing, ids)), 1)
            else:
                counts = np.full(ranks, self._copies[sharing])
            weights = (count * sharing.table.dim for count in counts.tolist())
            words += 2 * counts + np.array([words_of(each, sharing.wire) for each in weights])
        words[self._rank_group.ahead.rank] = 0  # which go nowhere
        return words.tolist()

    def _dropped(self, sharing: SharedTable, ids: np.ndarray) -> np.ndarray:
        """Return those of ids that get no gradient."""
        paddings = self._paddings[sharing]
        padding = next(iter(paddings)) if len(paddings) == 1 else None  # else another layer brings it
        return ids[:0] if padding is None else ids[ids == padding]


class _BatchCount:
    def __init__(self, ahead: BatchPrefetcher, sharing: SharedTable, ids_of: IdsOf) -> None:
        self._ahead, self._sharing, self._ids_of = ahead, sharing, ids_of

    def __call__(self, batch: Any) -> np.ndarray:
        ids = self._ids_of(batch)
        self._ahead.count(self._sharing, ids)
        return ids

    def refuse_outside(self, batch: Any) -> None:
        """Raise the `IdError` of a batch with ids outside of the table."""
        self._ids_of.refuse_outside(batch)  # pyright: ignore[reportFunctionMemberAccess]


def _checked(sharing: SharedTable, ids_of: Any, batch: Any) -> np.ndarray:
    table = sharing.table
    try:
        return check_ids(ids_of(batch), table.rows, table.subject)
    except IdError:
        ids_of.refuse_outside(batch)  # which says where in the batch
        raise


def _shard_of(sharing: SharedTable) -> Shard:
    assert isinstance(sharing.placement, Shard)
    return sharing.placement


def _uneven(numbers: np.ndarray) -> OtherRankError:
    """Return the error of ranks whose loaders are not as long, or that are not at the same batch."""
    told = [f"rank {rank} {'has none' if n == AT_END else f'is at batch {n % LOOP}'}" for rank, n in enumerate(numbers)]
    return OtherRankError(
        f"ert.prefetch of tables that processes share needs as many batches on all ranks: {', '.join(told)}. Where "
        "loaders differ in length, train inside of `with net.join(), ert.uneven(model):`."
    )


@atexit.register
def _close_all() -> None:
    """Wake the threads of loops that a program leaves open, which others wait for as Python ends."""
    for ahead in list(_open):
        ahead.close()
