"""`MemoryBudget`: the RAM of a table on disk with a ``memory=``. `BudgetShare`: that of a table without one, or with
"auto".

Tables on disk without ``memory=`` have half of the machine's RAM together (`SharedBudget`). They share it evenly. A
table never gets more than it can use. A batch may borrow from other tables, except what their running batches need. The
budgets in
force never add up to more than the whole: a table grows only into RAM that others have given up. The pools of a group
share the group's budget in the same way.

A table gives up what is over its share with its own next batch. A thread that opens a table, or needs room, makes idle
tables give up theirs: a table that is never used again keeps nothing from the others.

Tables with ``memory="auto"`` share the RAM that the machine has left (`AutoSharedBudget`), each as much as pays. A
table's claim follows its miss-ratio curve: it grows while its cache is full and a larger one would miss less, and
shrinks where half of it misses as little. A thread looks four times a second, so that idle tables give RAM back, too.
No result depends on that.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import NamedTuple, Protocol

from embedrock.errors import counted
from embedrock.storage.table_lock import TableLock
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.ram import available_bytes, memory_limit, pressure
from embedrock.system.sizes import AUTO, Size, format_at_least, format_bytes, parse_bytes

DEFAULT_SHARE = 2  # of the machine's RAM, one part in so many is what tables without a budget have together
GROWTH = 1.25  # a cache that will not be whole is made larger by this at least, as its rows move then
FIRST_BYTES = 64 << 20  # that a table asks for before anything is known
EVERY_S = 0.25
RESERVE = 8  # one part in so many of the RAM of this process is left to others
STALLED = 0.1  # of the time that processes wait for RAM: then there is too little, whatever is said to be free
KEPT = 7 / 8  # then, each time somebody looks


class BudgetHint(NamedTuple):
    """Another budget.

    Attributes:
        more: bytes, over what is in force.
        share: of that, how much more.
        remedy: how to have it, a sentence.
    """

    more: int
    share: float
    remedy: str


class MemoryBudget:
    """The most RAM that a table on disk may take: a number that it was given.

    Attributes:
        nbytes: that is in force: what the table may grow to now.
        due: that it should be, and becomes with the next batch or so.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self.due = nbytes

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)}{self.note}"

    @property
    def note(self) -> str:
        """Why it is so much, for error messages."""
        return ""

    @property
    def is_being_shared(self) -> bool:
        """Whether this thread is in the middle of sharing it with others."""
        return False

    @property
    def may_double(self) -> bool:
        """Whether it may take as much again for the moment in which rows move to where slots are ids."""
        return True

    def setting(self, nbytes: int) -> BudgetHint | None:
        """Return how to have so many bytes instead; None where nobody can set it."""
        return _setting(self.nbytes, nbytes, "Set")

    def offer(self, claim: BudgetRequest) -> int:
        """Return the budget of a tier that asks for so much, should it `join`."""
        return self.nbytes

    def join(self, tier: ResizableCache, claim: BudgetRequest) -> None:
        """Begin, or go on, with a tier that asks for so much."""

    def grow(self) -> bool:
        """Take what is due and free, where it is so much that a larger cache is worth its making; return whether."""
        return False

    def shrink_to(self, nbytes: int) -> None:
        """Give up what is over so many bytes."""

    def need(self, nbytes: int, tier: ResizableCache) -> bool:
        """Ask for so many bytes, as a batch needs them; return whether they are in force now.

        The caller has the table, and others may have it meanwhile.
        """
        return False

    def hold(self, nbytes: Callable[[], int]) -> None:
        """Keep so many bytes, for a step that was prepared, from those who `need` some."""

    def free(self) -> None:
        """Keep no more than is due from others: the batch is done."""

    def leave(self) -> None:
        """Give all of it back."""


def _setting(now: int, then: int, verb: str) -> BudgetHint:
    asked = f'{verb} memory="{format_at_least(then)}" instead of {format_bytes(now)}.'
    return BudgetHint(then - now, then / now - 1, asked)


class ResizableCache(Protocol):
    """A tier as budgets see it."""

    table_lock: TableLock

    @property
    def bytes_used(self) -> int:
        """RAM that it takes now."""
        ...

    @property
    def wanted_bytes(self) -> int:
        """A budget with which its cache would be as large as pays."""
        ...

    def give_up_excess(self, waits: bool) -> None:
        """Give up what is over the budget that is due. The caller has the table.

        Args:
            waits: also for a commit under way, whose rows cannot leave.
        """
        ...


class BudgetRequest(NamedTuple):
    """What a table asks of the whole: at least this, at most that."""

    least: int
    most: int


def dues(claims: Sequence[BudgetRequest], total: int) -> list[int]:
    """Share `total` evenly: each gets the same, but no less than its `least`, and no more than its `most`.

    Example:
        >>> dues([BudgetRequest(0, 10), BudgetRequest(0, 100), BudgetRequest(60, 100)], 120)
        [10, 50, 60]
    """
    low, high = 0, total + 1
    while high - low > 1:
        level = (low + high) // 2
        low, high = (level, high) if sum(_given(claim, level) for claim in claims) <= total else (low, level)
    return [_given(claim, low) for claim in claims]


def _given(claim: BudgetRequest, level: int) -> int:
    return min(claim.most, max(claim.least, level))


class SharedBudget:
    """What tables on disk that were given no budget have together, or the pools of a group.

    Args:
        given: bytes; None: half of the machine's RAM.

    Attributes:
        lock: held wherever shares change; who has it waits for nobody.
        total: bytes.
        shares: of the tables that are open.
    """

    def __init__(self, given: int | None = None) -> None:
        self.lock = forks.lock(forks.LockRank.SECTION)
        self._given, self.total = given, given or 0
        self.shares: list[BudgetShare] = []

    @property
    def is_given(self) -> bool:
        """Whether it is a number that a group was given."""
        return self._given is not None

    def note(self, others: int) -> str:
        """Say of what a share is a part, which so many others have a part of."""
        if self._given is None:
            whole = format_bytes(self.total)
            return f", its share of the {whole} that it has with {counted(others, 'other table')} without memory="
        return f", its share of the group's {format_bytes(self.total)}" if others else ", the group's"

    def offer(self, share: BudgetShare, most: int) -> int:
        """Return what would be due to a table that could make use of `most` bytes, where others keep what they need."""
        with self.lock:
            self._measure()
            others = [each.claim for each in self.shares if each is not share]
            return dues([*others, BudgetRequest(share.claim.least, most)], self.total)[-1]

    def share(self) -> BudgetShare:
        """Return the part of a table that is to come."""
        return BudgetShare(self)

    def setting(self, now: int, then: int) -> BudgetHint | None:
        """Return how a table gets another share."""
        if self._given is None:
            return _setting(now, then, "Give it")
        return _setting(self.total, self.total * then // now, "Give the group")

    def enter(self, share: BudgetShare) -> None:
        """Let a table take part, as its claim says."""
        with self.lock:
            if share not in self.shares:
                share.nbytes = 0
                self.shares.append(share)
            self._measure()
            self.divide()

    def divide(self) -> None:
        """Compute what is due to each."""
        shares = list(self.shares)
        for share, due in zip(shares, dues([share.claim for share in shares], self.total), strict=True):
            share.due = due

    @property
    def free(self) -> int:
        """Bytes that nobody may grow into."""
        return self.total - sum(share.nbytes for share in list(self.shares))

    def excessive(self, but: BudgetShare) -> list[BudgetShare]:
        """Return the shares of which more is in force than is due."""
        return [share for share in list(self.shares) if share is not but and share.nbytes > share.due]

    def _measure(self) -> None:
        """Find out how much there is. The caller has the lock."""
        self.total = memory_limit() // DEFAULT_SHARE if self._given is None else self._given


POOL = SharedBudget()


class BudgetShare(MemoryBudget):
    """A table's part of the default.

    Attributes:
        floor: what a cache of one row needs: others that come later never take that.
        least: what a batch that is under way needs.
        most: that it could make use of.
    """

    def __init__(self, pool: SharedBudget) -> None:
        super().__init__(0)
        self.pool, self.floor, self.least, self.most = pool, 0, 0, 0
        self._tier: weakref.ref[ResizableCache] | None = None

    @property
    def claim(self) -> BudgetRequest:
        """What it asks of the whole."""
        return BudgetRequest(max(self.floor, self.least), self.most)

    @property
    def note(self) -> str:
        others = len([each for each in self.pool.shares if each is not self])
        return self.pool.note(others)

    def setting(self, nbytes: int) -> BudgetHint | None:
        return self.pool.setting(self.nbytes, nbytes)

    @property
    def is_being_shared(self) -> bool:
        return self.pool.lock._is_owned()

    def offer(self, claim: BudgetRequest) -> int:
        return self.pool.offer(self, claim.most)

    def join(self, tier: ResizableCache, claim: BudgetRequest) -> None:
        pool, self._tier, (self.floor, self.most) = self.pool, weakref.ref(tier), claim
        pool.enter(self)
        self._relieve(waits=not tier.table_lock.lock._is_owned())
        with pool.lock:
            self.nbytes = min(self.due, self.nbytes + max(0, pool.free))

    def grow(self) -> bool:
        worth = int(GROWTH * self.nbytes)
        worth = min(worth, self.due) if self.due == self.most else worth
        return self.nbytes < worth <= self.due and self._grow_to(worth)

    def _grow_to(self, least: int) -> bool:
        """Take what is due and free, if it is so much at least; return whether."""
        self._relieve(waits=False)
        with self.pool.lock:
            there = min(self.due, self.nbytes + self.pool.free)
            if there >= least:
                self.nbytes = there
            return there >= least

    def shrink_to(self, nbytes: int) -> None:
        with self.pool.lock:
            self.nbytes = min(self.nbytes, nbytes)

    def need(self, nbytes: int, tier: ResizableCache) -> bool:
        with self.pool.lock:
            claims = [share.claim for share in self.pool.shares if share is not self]
            if (
                nbytes <= self.nbytes
                or sum(dues([*claims, BudgetRequest(nbytes, nbytes)], self.pool.total)) > self.pool.total
            ):
                return False
            self.least, self.most = nbytes, max(self.most, nbytes)
            self.pool.divide()
        if not self._grow_to(nbytes) and self.pool.excessive(self):
            self._wait_for_others(tier)
        return self._grow_to(nbytes)

    def _wait_for_others(self, tier: ResizableCache) -> None:
        """Let others have the table while a thread waits for those that have too much."""
        done = threading.Event()

        def relieve() -> None:
            try:
                self._relieve(waits=True)
            finally:
                done.set()
                with tier.table_lock.ahead():
                    tier.table_lock.notify()

        try:
            threading.Thread(target=relieve, name="embedrock-share", daemon=True).start()
        except RuntimeError:  # the system allows no more threads
            return
        tier.table_lock.wait_for(done.is_set)

    def hold(self, nbytes: Callable[[], int]) -> None:
        self.least = nbytes()

    def free(self) -> None:
        self.least = 0  # what is due stays until others ask for more

    def leave(self) -> None:
        with self.pool.lock:
            self.pool.shares = [share for share in self.pool.shares if share is not self]
            self.nbytes, self._tier = 0, None
            self.pool.divide()

    # ---------------------------------------------------------------- what others do to it

    def _relieve(self, waits: bool) -> None:
        """Make others give up what is over their share."""
        own = self.tier
        for share in self.pool.excessive(self):
            share.give_up_excess(waits, own)

    @property
    def tier(self) -> ResizableCache | None:
        """Whose it is, as long as somebody has that."""
        return None if self._tier is None else self._tier()

    def give_up_excess(self, waits: bool, asker: ResizableCache | None) -> None:
        """Make its tier give up what is over its share, for another one that asks."""
        tier = self.tier
        if tier is None:
            return
        if (
            tier.table_lock.lock._is_owned()
        ):  # this thread is in the middle of a call of it, or of another pool of its group
            if asker is not None and asker.table_lock is tier.table_lock:
                self._shrink(tier, waits=False)
            return
        with held_back():
            if waits:
                with tier.table_lock.ahead():
                    self._shrink(tier, waits)
            elif tier.table_lock.lock.acquire(blocking=False):
                try:
                    self._shrink(tier, waits)
                finally:
                    tier.table_lock.lock.release()

    def _shrink(self, tier: ResizableCache, waits: bool) -> None:
        # What goes wrong is raised by the table's own next call, and it keeps what it has.
        with suppress(Exception):
            tier.table_lock.wait_for_step()
            if self.tier is tier:  # it may have been replaced, or closed, meanwhile
                tier.give_up_excess(waits)


class AutoSharedBudget(SharedBudget):
    """What the machine has left, for tables that take what pays."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    def note(self, others: int) -> str:
        return f', of the {format_bytes(self.total)} that there are for memory="auto"'

    def share(self) -> AutoBudgetShare:
        return AutoBudgetShare(self)

    def setting(self, now: int, then: int) -> BudgetHint | None:
        return None  # it is found out

    def enter(self, share: BudgetShare) -> None:
        super().enter(share)
        with self.lock:
            if self._thread is None:
                self._stops.clear()
                self._thread = threading.Thread(target=self._run, name="embedrock-memory", daemon=True)
                self._thread.start()

    def _measure(self) -> None:
        tiers = [share.tier for share in list(self.shares)]
        used = sum(tier.bytes_used for tier in tiers if tier is not None)
        self.total = used + max(0, _left())
        if pressure() > STALLED:
            self.total = min(self.total, int(used * KEPT))
        self.total = max(self.total, sum(share.claim.least for share in self.shares))  # or no batch could be stepped

    def look(self) -> None:
        """Find out what there is and what is of use, and have those give up what they have too much that can."""
        shares = list(self.shares)
        for share in shares:
            if isinstance(share, AutoBudgetShare):
                share.ask()
        with self.lock:
            self._measure()
            self.divide()
        for share in shares:
            if share.nbytes > share.due:
                share.give_up_excess(waits=False, asker=None)

    def _run(self) -> None:
        while not self._stops.wait(EVERY_S):
            with self.lock:
                if not self.shares:
                    self._thread = None
                    return
            self.look()

    def stop(self) -> None:
        """End the thread."""
        self._stops.set()
        if (thread := self._thread) is not None:
            thread.join()

    def begin_child(self) -> None:
        """Begin in a forked child, which has none of the tables, and not the thread."""
        self.shares, self._thread, self._stops = [], None, threading.Event()


class AutoBudgetShare(BudgetShare):
    """A table's part of what the machine has left."""

    def __init__(self, pool: SharedBudget) -> None:
        super().__init__(pool)
        self._wanted = FIRST_BYTES

    @property
    def claim(self) -> BudgetRequest:
        asked = super().claim
        return asked._replace(most=max(asked.least, min(asked.most, self._wanted)))

    def join(self, tier: ResizableCache, claim: BudgetRequest) -> None:
        self._wanted = max(self._wanted, claim.least)
        super().join(tier, claim)
        self.nbytes = max(self.nbytes, claim.least)

    @property
    def may_double(self) -> bool:
        return _left() > self.nbytes

    def offer(self, claim: BudgetRequest) -> int:
        return max(claim.least, super().offer(claim))

    def need(self, nbytes: int, tier: ResizableCache) -> bool:
        # A batch that was begun is not refused because others need memory, too, or have rows that cannot leave now.
        self._count_in(nbytes, [share.claim.least for share in self._others()])
        if super().need(nbytes, tier):
            return True
        with self.pool.lock:
            if nbytes <= self.nbytes:
                return False
            self.least, self.most = nbytes, max(self.most, nbytes)
            self._count_in(nbytes, [share.nbytes for share in self._others()])
            self.pool.divide()
            self.nbytes = nbytes
        return True

    def _others(self) -> list[BudgetShare]:
        return [share for share in list(self.pool.shares) if share is not self]

    def _count_in(self, nbytes: int, others: list[int]) -> None:
        with self.pool.lock:
            self.pool.total = max(self.pool.total, sum(others) + nbytes)

    def ask(self) -> None:
        """Ask for what the table's curve says."""
        tier = self.tier
        if tier is not None and self.nbytes <= self.due:  # it has what was meant for it
            self._wanted = tier.wanted_bytes


def _left() -> int:
    """Return the bytes of RAM that tables may take in addition; negative: others lack what is left to them."""
    return available_bytes() - memory_limit() // RESERVE


def pool_of(memory: Size | None) -> SharedBudget:
    """Return what the pools of a group have together that was given `memory`.

    Raises:
        ArgumentError: it is no size.
    """
    if memory is None or memory == AUTO:
        return POOL if memory is None else AUTO_POOL
    return SharedBudget(parse_bytes(memory))


def budget_of(memory: Size | None) -> MemoryBudget:
    """Return the budget of a table that was given `memory`.

    Raises:
        ArgumentError: it is no size.
    """
    return pool_of(memory).share() if memory is None or memory == AUTO else MemoryBudget(parse_bytes(memory))


AUTO_POOL = AutoSharedBudget()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    # Writers cannot be used in a child, and a reader takes part once it is used.
    POOL.shares = []
    AUTO_POOL.begin_child()


@atexit.register
def _stop() -> None:
    """End the thread before Python does."""
    AUTO_POOL.stop()
