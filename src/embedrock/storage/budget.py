"""`MemoryBudget`: the RAM of a table on disk, its share of a `SharedBudget`. A table with ``memory=`` has one alone.

Tables on disk without ``memory=`` share half of the machine's RAM (`SharedBudget`). They share it evenly. A table never
gets more than it can use. A batch may borrow from other tables, except what their running batches need. The budgets in
force never exceed the total: a table grows only into RAM that others have released. The pools of a group share the
group's budget in the same way.

A table releases its excess with its own next batch. A thread that opens a table, or needs room, shrinks idle tables. So
a table that is never used again keeps nothing from the others.

Tables with ``memory="auto"`` share the RAM that the machine has left (`AutoSharedBudget`), each as much as pays. A
table's request follows its miss-ratio curve. It grows while its cache is full and a larger one would miss less. It
shrinks if half of it misses as little. A thread polls four times a second, so that idle tables release RAM, too. No
result depends on it.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, NamedTuple

from embedrock.errors import counted
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.ram import available_bytes, memory_limit, pressure
from embedrock.system.sizes import AUTO, MAP, Size, format_at_least, format_bytes, parse_bytes

DEFAULT_SHARE = 2  # tables without a budget share 1/DEFAULT_SHARE of the machine's RAM
GROWTH = 1.25  # least growth of a cache that does not hold all rows: each growth moves its rows
FIRST_BYTES = 64 << 20  # first request of a table, before anything is known
EVERY_S = 0.25
RESERVE = 8  # 1/RESERVE of this process's RAM is left to others
STALLED = 0.1  # share of the time that processes wait for RAM, from which there is too little of it
KEPT = 7 / 8  # share of the RAM that is kept then, at each poll


class BudgetHint(NamedTuple):
    """A larger or smaller budget, and how to set it.

    Attributes:
        more: bytes above the budget in force.
        share: the same as a share of that budget.
        remedy: a sentence that says how to set it.
    """

    more: int
    share: float
    remedy: str


class BudgetRequest(NamedTuple):
    """A table's request to a shared budget: its least and its largest size."""

    least: int
    most: int


def dues(claims: Sequence[BudgetRequest], total: int) -> list[int]:
    """Share `total` evenly: all get the same, but at least their `least` and at most their `most`.

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
    """The budget of all tables on disk without one of their own, of the pools of a group, or of a table alone.

    Args:
        given: bytes; None: half of the machine's RAM.
        is_alone: it is of one table, which gets all of it.

    Attributes:
        lock: held wherever shares change. A thread that holds it waits for no other thread.
        total: bytes.
        shares: of the tables that are open.
    """

    def __init__(self, given: int | None = None, is_alone: bool = False) -> None:
        self.lock = forks.lock(forks.LockRank.SECTION)
        self.given, self.is_alone, self.total = given, is_alone, given or 0
        self.shares: list[MemoryBudget] = []

    def note(self, others: int) -> str:
        """Return a clause that names the budget of a share, which `others` other tables share."""
        if self.is_alone:
            return ""
        if self.given is None:
            whole = format_bytes(self.total)
            return f", its share of the {whole} that it has with {counted(others, 'other table')} without memory="
        return f", its share of the group's {format_bytes(self.total)}" if others else ", the group's"

    def share(self) -> MemoryBudget:
        return MemoryBudget(self)

    def setting(self, now: int, then: int) -> BudgetHint | None:
        """Return how to set another share; None if it cannot be set."""
        verb = "Give it"
        if self.given is not None:
            now, then, verb = self.total, self.total * then // now, "Set" if self.is_alone else "Give the group"
        remedy = f'{verb} memory="{format_at_least(then)}" instead of {format_bytes(now)}.'
        return BudgetHint(then - now, then / now - 1, remedy)

    def enter(self, share: MemoryBudget) -> None:
        with self.lock:
            if share not in self.shares:
                share.nbytes = 0
                self.shares.append(share)
            self.measure()
            self.divide()

    def divide(self) -> None:
        """Compute the target of each share."""
        shares = list(self.shares)
        for share, due in zip(shares, dues([share.claim for share in shares], self.total), strict=True):
            share.due = due

    @property
    def free(self) -> int:
        """Bytes that are in no share."""
        return self.total - sum(share.nbytes for share in list(self.shares))

    def excessive(self, but: MemoryBudget) -> list[MemoryBudget]:
        """Return the shares that are above their target."""
        return [share for share in list(self.shares) if share is not but and share.nbytes > share.due]

    def measure(self) -> None:
        """Set `total`. Caller holds the lock."""
        self.total = self.given or memory_limit() // DEFAULT_SHARE


POOL = SharedBudget()


class MemoryBudget:
    """The largest RAM of a table on disk: its share of a shared budget.

    Attributes:
        nbytes: the budget in force, to which the table may grow now.
        due: the target, which comes into force with one of the next batches.
        floor: size of a cache of one row, which later tables never take.
        least: need of a running batch.
        most: largest size of use.
    """

    def __init__(self, pool: SharedBudget) -> None:
        self.nbytes = self.due = self.floor = self.least = self.most = 0
        self.pool = pool
        self._tier: weakref.ref[Any] | None = None

    def __str__(self) -> str:
        return f"{format_bytes(self.nbytes)}{self.note}"

    @property
    def claim(self) -> BudgetRequest:
        """The share's request to the shared budget."""
        return BudgetRequest(max(self.floor, self.least), self.most)

    @property
    def note(self) -> str:
        """A clause for error messages that explains the size."""
        return self.pool.note(len(self._others()))

    def _others(self) -> list[MemoryBudget]:
        return [share for share in list(self.pool.shares) if share is not self]

    @property
    def may_double(self) -> bool:
        """Return whether it may double briefly while rows move to slots that are ids."""
        return True

    def offer(self, claim: BudgetRequest) -> int:
        """Return the budget that a backend with this request would get from `join`. Others keep their least."""
        with self.pool.lock:
            self.pool.measure()
            claims = [share.claim for share in self._others()]
            return dues([*claims, BudgetRequest(self.claim.least, self._most(claim))], self.pool.total)[-1]

    def _most(self, claim: BudgetRequest) -> int:
        return self.pool.total if self.pool.is_alone else claim.most

    def join(self, tier: Any, claim: BudgetRequest) -> None:
        """Register a backend, a `DiskBackend`, with its request, or replace its request."""
        pool, self._tier, self.floor, self.most = self.pool, weakref.ref(tier), claim.least, self._most(claim)
        pool.enter(self)
        self._relieve(waits=not tier.table_lock.lock._is_owned())
        with pool.lock:
            self.nbytes = min(self.due, self.nbytes + max(0, pool.free))

    def grow(self) -> bool:
        """Take the free RAM up to the target if it is worth a larger cache; return whether it was taken."""
        worth = int(GROWTH * self.nbytes)
        worth = min(worth, self.due) if self.due == self.most else worth
        return self.nbytes < worth <= self.due and self._grow_to(worth)

    def _grow_to(self, least: int) -> bool:
        """Take the free RAM up to the target if that gives at least `least`; return whether it does."""
        self._relieve(waits=False)
        with self.pool.lock:
            there = min(self.due, self.nbytes + self.pool.free)
            if there >= least:
                self.nbytes = there
            return there >= least

    def shrink_to(self, nbytes: int) -> None:
        with self.pool.lock:
            self.nbytes = min(self.nbytes, nbytes)

    def need(self, nbytes: int, tier: Any) -> bool:
        """Request `nbytes` for a batch; return whether they are in force now.

        Caller holds the table lock. It may be released and reacquired meanwhile.
        """
        with self.pool.lock:
            claims = [*(share.claim for share in self._others()), BudgetRequest(nbytes, nbytes)]
            if nbytes <= self.nbytes or sum(dues(claims, self.pool.total)) > self.pool.total:
                return False
            self.least, self.most = nbytes, max(self.most, nbytes)
            self.pool.divide()
        if not self._grow_to(nbytes) and self.pool.excessive(self):
            self._wait_for_others(tier)
        return self._grow_to(nbytes)

    def _wait_for_others(self, tier: Any) -> None:
        """Release the table lock while a thread waits for tables above their target."""
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
        """Reserve bytes for a prepared step, against other tables' `need`."""
        if not self.pool.is_alone:
            self.least = nbytes()

    def free(self) -> None:
        """End the reservation beyond the target: the batch is done."""
        self.least = 0  # the target stays until others request more

    def leave(self) -> None:
        with self.pool.lock:
            self.pool.shares = self._others()
            self.nbytes, self._tier = 0, None
            self.pool.divide()

    # ---------------------------------------------------------------- what others do to it

    def _relieve(self, waits: bool) -> None:
        own = self.tier
        for share in self.pool.excessive(self):
            share.give_up_excess(waits, own)

    @property
    def tier(self) -> Any:
        """Backend of the share; None if no table has it any more."""
        return None if self._tier is None else self._tier()

    def give_up_excess(self, waits: bool, asker: Any) -> None:
        """Make its backend release the RAM above its share, for the backend `asker`."""
        tier = self.tier
        if tier is None:
            return
        if tier.table_lock.lock._is_owned():  # this thread is inside a call of it, or of another pool of its group
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

    def _shrink(self, tier: Any, waits: bool) -> None:
        # The table's own next call raises the error, and the table keeps its RAM.
        with suppress(Exception):
            tier.table_lock.wait_for_step()
            if self.tier is tier:  # it may have been replaced, or closed, meanwhile
                tier.give_up_excess(waits)


class AutoSharedBudget(SharedBudget):
    """The RAM that the machine has left, for tables that take as much as pays."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    def note(self, others: int) -> str:
        return f', of the {format_bytes(self.total)} that there are for memory="auto"'

    def share(self) -> AutoMemoryBudget:
        return AutoMemoryBudget(self)

    def setting(self, now: int, then: int) -> BudgetHint | None:
        return None  # the curve decides

    def enter(self, share: MemoryBudget) -> None:
        super().enter(share)
        with self.lock:
            if self._thread is None:
                self._stops.clear()
                self._thread = threading.Thread(target=self._run, name="embedrock-memory", daemon=True)
                self._thread.start()

    def measure(self) -> None:
        tiers = [share.tier for share in list(self.shares)]
        used = sum(tier.bytes_used for tier in tiers if tier is not None)
        self.total = used + max(0, _left())
        if pressure() > STALLED:
            self.total = min(self.total, int(used * KEPT))
        self.total = max(self.total, sum(share.claim.least for share in self.shares))  # or no batch could be stepped

    def look(self) -> None:
        """Measure free memory, recompute each target, and shrink the caches that are above it and can shrink now."""
        shares = list(self.shares)
        for share in shares:
            if isinstance(share, AutoMemoryBudget):
                share.ask()
        with self.lock:
            self.measure()
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
        self._stops.set()
        if (thread := self._thread) is not None:
            thread.join()


class AutoMemoryBudget(MemoryBudget):
    """A table's share of the RAM that the machine has left."""

    def __init__(self, pool: SharedBudget) -> None:
        super().__init__(pool)
        self._wanted = FIRST_BYTES

    @property
    def claim(self) -> BudgetRequest:
        asked = super().claim
        return asked._replace(most=max(asked.least, min(asked.most, self._wanted)))

    def join(self, tier: Any, claim: BudgetRequest) -> None:
        self._wanted = max(self._wanted, claim.least)
        super().join(tier, claim)
        self.nbytes = max(self.nbytes, claim.least)

    @property
    def may_double(self) -> bool:
        return _left() > self.nbytes

    def offer(self, claim: BudgetRequest) -> int:
        return max(claim.least, super().offer(claim))

    def need(self, nbytes: int, tier: Any) -> bool:
        # A running batch is not refused because others need memory, too, or have rows that cannot leave now.
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

    def _count_in(self, nbytes: int, others: list[int]) -> None:
        with self.pool.lock:
            self.pool.total = max(self.pool.total, sum(others) + nbytes)

    def ask(self) -> None:
        """Request the size that the table's curve suggests."""
        tier = self.tier
        if tier is not None and self.nbytes <= self.due:  # it has its target
            self._wanted = tier.wanted_bytes


def _left() -> int:
    """Return the bytes of RAM that tables may take in addition; negative: too much is taken."""
    return available_bytes() - memory_limit() // RESERVE


def pool_of(memory: Size | None, is_alone: bool = False) -> SharedBudget:
    """Return the shared budget of a group's pools, or of a table alone, for a value of `memory`.

    Raises:
        ArgumentError: `memory` is no size.
    """
    if memory is None or memory == AUTO:
        return POOL if memory is None else AUTO_POOL
    return SharedBudget(1 if memory == MAP else parse_bytes(memory), is_alone)


AUTO_POOL = AutoSharedBudget()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    # A child cannot use writers. A reader joins when it is used.
    POOL.shares, AUTO_POOL.shares = [], []
    AUTO_POOL._thread, AUTO_POOL._stops = None, threading.Event()


atexit.register(lambda: AUTO_POOL.stop())  # before Python ends
