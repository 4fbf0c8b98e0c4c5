"""`TableLock`: one thread at a time has a table, and no step is running then."""

from __future__ import annotations

import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from embedrock import kernels
from embedrock.errors import EmbedrockError
from embedrock.storage.listeners import StaleExecutor
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.spans import span

if TYPE_CHECKING:
    from embedrock.kernels.cpu.threads import BackgroundCall


class ExecutorGroup:
    """Sides of several tables that have one turn.

    Args:
        sides: which may be newer than their tables' tiers.
    """

    def __init__(self, executors: Iterable[StaleExecutor]) -> None:
        self.executors = list(executors)

    def finish(self) -> None:
        """Bring the tiers' records up to date. Those that could not be are left."""
        while self.executors:
            self.executors[-1].finish()
            self.executors.pop()


class TableLock:
    """The lock of a table, and the step that runs in the background.

    It does not know the table: threads that wait here must not be the last that hold it.

    Attributes:
        lock: held by whoever has the table.
        running: the step.
        failure: what a step raised: records may be half changed.
        number: of its own.
        is_torn: so they may, as this process was forked while another thread had the table.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.running: BackgroundCall | StaleExecutor | ExecutorGroup | None = None
        self.failure: BaseException | None = None
        self.is_torn = False
        self.lock, self._next = forks.lock(forks.LockRank.TABLE), forks.lock(forks.LockRank.QUEUE)
        self._changed = threading.Condition(self.lock)
        _turns.add(self)

    def wait_for_step(self) -> None:
        """Return once no step is running."""
        running = self.running
        if running is None:
            return
        with span("wait"), held_back():
            try:
                running.finish()
            except BaseException as error:
                # A side that tells what it lacks has all rows still, and can be asked again.
                if not (isinstance(error, EmbedrockError) and isinstance(running, StaleExecutor | ExecutorGroup)):
                    self.failure, self.running = error, None
                raise
            self.running = None

    def settle_steps(self) -> None:
        """Return once no step of the CPU is running; what sides do goes on."""
        if self.running is not None and isinstance(self.running, kernels.cpu.threads.BackgroundCall):
            self.wait_for_step()

    def use(self, executor: StaleExecutor) -> None:
        """Let whoever reads the records of the table, or of those that have this turn too, wait for a side as well.

        No step of the CPU is running.
        """
        running = self.running
        if running is executor:
            return
        if isinstance(running, ExecutorGroup):
            if executor not in running.executors:
                running.executors.append(executor)
        else:
            self.running = executor if running is None else ExecutorGroup([cast(StaleExecutor, running), executor])

    def start(self, function: Callable[..., object], *args: Any, here: bool = False) -> None:
        """Make a step by calling ``function(*args)``: in the background, if there are threads, or here and now."""
        try:
            if here:
                function(*args)
            else:
                self.running = kernels.cpu.threads.start(function, *args)
        except BaseException as error:
            self.failure = error
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Give the caller the table alone, with no step running."""
        self.queue()
        with self.lock:
            self.wait_for_step()
            yield

    def whole(self) -> ExclusiveLock:
        """Give the caller the table alone, with Ctrl-C held back: what it changes, it changes whole."""
        return ExclusiveLock(self)

    @contextmanager
    def beside_sides(self) -> Iterator[None]:
        """Give the caller the table with no step of the CPU running. Sides may be at work with rows that stay."""
        self.queue()
        with self.lock:
            self.settle_steps()
            yield

    def queue(self) -> None:
        """Let those who are `ahead` have the lock first."""
        if not self.lock._is_owned():
            with self._next:
                pass

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Take the lock before all who come later; a step may be running still.

        A lock goes to whoever asks at the right moment. That is hardly ever one who waits, where another thread takes
        it again as soon as it has let it go: a loop that trains. For threads that Ctrl-C never interrupts.
        """
        if self.lock._is_owned():  # or who is `ahead` already waits for this thread, and this one for that
            self.lock.acquire()
        else:
            with self._next:
                self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Let others have the table until `predicate` holds, and have it for oneself again.

        Raises:
            EmbedrockError: this is a child of the process that waits, forked by a handler of signals meanwhile.
        """
        process = os.getpid()
        with held_back(), self.lock:  # an interrupt inside of a condition leaves its lock in disorder
            self._changed.wait_for(lambda: os.getpid() != process or predicate())
            if os.getpid() != process:
                raise EmbedrockError(f"a fork came while process {process} waited: what it waits for is not here.")
            self.wait_for_step()

    def begin_child(self, is_torn: bool) -> None:
        """Begin in a forked child, in which nobody else has the table."""
        self.is_torn |= is_torn
        if is_torn:
            self.running = None  # there may be nobody to end it
        self.notify()

    def notify(self) -> None:
        """Wake those who wait, to look again."""
        with self.lock:
            self._changed.notify_all()


class ExclusiveLock:
    """Within it, the caller has a table alone, with Ctrl-C held back. (A generator would take twice as many calls.)"""

    def __init__(self, table_lock: TableLock) -> None:
        self._table_lock, self._held_back = table_lock, held_back()

    def __enter__(self) -> None:
        self._held_back.__enter__()
        self._table_lock.queue()
        self._table_lock.lock.acquire()
        try:
            if self._table_lock.running is not None:
                self._table_lock.wait_for_step()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._table_lock.lock.release()
        self._held_back.__exit__()


class together:
    """Within it, the caller has the locks of several tables, taken in one order: so callers never wait for each other.

    A step may be running still. The caller must not let one of the locks go (`wait_for`).
    """

    def __init__(self, table_locks: Iterable[TableLock]) -> None:
        self._locks = [table_lock.lock for table_lock in sorted(set(table_locks), key=_number)]

    def __enter__(self) -> None:
        lock = None
        try:
            for lock in self._locks:
                lock.acquire()
        except BaseException:  # Ctrl-C, say: that one is not held
            for held in itertools.takewhile(lambda each: each is not lock, self._locks):
                held.release()
            raise

    def __exit__(self, *error: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


_number = operator.attrgetter("number")


_turns: weakref.WeakSet[TableLock] = weakref.WeakSet()
_numbers = itertools.count()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    for table_lock in list(_turns):
        table_lock.begin_child(is_torn=table_lock.lock in missed)
