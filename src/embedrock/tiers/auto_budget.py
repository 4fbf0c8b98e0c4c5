"""``memory="auto"``: the RAM that pays, of what the machine has left, and less again where others need it.

Tables that were told so share what is left as others share the default (`Pool`). What each asks for is what its curve
says: it grows while its cache is full and a larger one would miss less, and shrinks where half of it does as well. A
thread looks four times a second, so that a table which nobody uses gives back, too. One that trains follows with its
next batch. Nothing of that changes a bit of any result.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Set

from embedrock.machine.ram import available_bytes, memory_limit, pressure
from embedrock.machine.sizes import AUTO, Size, format_bytes, parse_bytes
from embedrock.process import forks
from embedrock.tiers import budget as budgets
from embedrock.tiers.budget import Budget, Claim, Pool, Resizable, Setting, Share

FIRST_BYTES = 64 << 20  # that a table asks for before anything is known
EVERY_S = 0.25
RESERVE = 8  # one part in so many of the RAM of this process is left to others
STALLED = 0.1  # of the time that processes wait for RAM: then there is too little, whatever is said to be free
KEPT = 7 / 8  # then, each time somebody looks


class AutoPool(Pool):
    """What the machine has left, for tables that take what pays."""

    def __init__(self) -> None:
        super().__init__()
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()

    def note(self, others: int) -> str:
        return f', of the {format_bytes(self.total)} that there are for memory="auto"'

    def share(self) -> AutoShare:
        return AutoShare(self)

    def setting(self, now: int, then: int) -> Setting | None:
        return None  # it is found out

    def enter(self, share: Share) -> None:
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
            if isinstance(share, AutoShare):
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


class AutoShare(Share):
    """A table's part of what the machine has left."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._wanted = FIRST_BYTES

    @property
    def claim(self) -> Claim:
        asked = super().claim
        return asked._replace(most=max(asked.least, min(asked.most, self._wanted)))

    def join(self, tier: Resizable, claim: Claim) -> None:
        self._wanted = max(self._wanted, claim.least)
        super().join(tier, claim)
        self.nbytes = max(self.nbytes, claim.least)

    @property
    def may_double(self) -> bool:
        return _left() > self.nbytes

    def offer(self, claim: Claim) -> int:
        return max(claim.least, super().offer(claim))

    def need(self, nbytes: int, tier: Resizable) -> bool:
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

    def _others(self) -> list[Share]:
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


def pool_of(memory: Size | None) -> Pool:
    """Return what the pools of a group have together that was given `memory`.

    Raises:
        ArgumentError: it is no size.
    """
    if memory is None or memory == AUTO:
        return budgets.POOL if memory is None else AUTO_POOL
    return Pool(parse_bytes(memory))


def budget_of(memory: Size | None) -> Budget:
    """Return the budget of a table that was given `memory`.

    Raises:
        ArgumentError: it is no size.
    """
    return pool_of(memory).share() if memory is None or memory == AUTO else Budget(parse_bytes(memory))


AUTO_POOL = AutoPool()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    AUTO_POOL.begin_child()


@atexit.register
def _stop() -> None:
    """End the thread before Python does."""
    AUTO_POOL.stop()
