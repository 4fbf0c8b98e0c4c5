"""`TableLock`: one thread at a time uses a table, and no step is running then."""

from __future__ import annotations

import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from embedrock import kernels
from embedrock.errors import EmbedrockError
from embedrock.storage.listeners import StaleExecutor
from embedrock.system import forks
from embedrock.system.interrupts import held_back
from embedrock.system.spans import span

if TYPE_CHECKING:
    from embedrock.kernels.cpu.threads import BackgroundCall


class TableLock:
    """The lock of a table, and the step that runs in the background.

    It does not refer to the table, because a waiting thread must not be its last owner.

    Attributes:
        lock: held by the thread that uses the table.
        running: the step of the CPU, or executors of the tables, whose rows may be newer than those of the backends.
        failure: error of a step, after which records may be half changed.
        generation: number of changes of what layouts rest on: the backends, sizes and executors of its tables.
        number: of its own.
        is_torn: records may be half changed, because this process was forked while another thread used the table.
    """

    def __init__(self) -> None:
        self.number, self.generation = next(_numbers), 0
        self.running: list[BackgroundCall | StaleExecutor] = []
        self.failure: BaseException | None = None
        self.is_torn = False
        self.lock, self._next = forks.lock(forks.LockRank.TABLE), forks.lock(forks.LockRank.QUEUE)
        self._changed = threading.Condition(self.lock)
        _turns.add(self)

    def wait_for_step(self) -> None:
        """Wait until no step is running."""
        if not self.running:
            return
        with span("wait"), held_back():
            while self.running:
                running = self.running[-1]
                try:
                    running.finish()
                except BaseException as error:
                    # An executor that raises such an error still has all rows, and can be called again.
                    if not (isinstance(error, EmbedrockError) and isinstance(running, StaleExecutor)):
                        self.failure, self.running = error, []
                    raise
                self.running.pop()

    def settle_steps(self) -> None:
        """Wait until no step of the CPU is running; executors on devices go on."""
        if self.running and isinstance(self.running[0], kernels.cpu.threads.BackgroundCall):
            self.wait_for_step()

    def use(self, executor: StaleExecutor) -> None:
        """Make readers of the records, of all tables with this lock, wait for an executor as well.

        No step of the CPU is running.
        """
        if executor not in self.running:
            self.running.append(executor)

    def start(self, function: Callable[..., object], *args: Any, here: bool = False) -> None:
        """Make a step by calling ``function(*args)``: in the background if there are threads, directly with `here`."""
        try:
            if here:
                function(*args)
            elif (call := kernels.cpu.threads.start(function, *args)) is not None:
                self.running = [call]
        except BaseException as error:
            self.failure = error
            raise

    @contextmanager
    def alone(self, beside_executors: bool = False) -> Iterator[None]:
        """Hold the lock, with no step running. Executors on devices go on if they may use rows that stay."""
        self.queue()
        with self.lock:
            if beside_executors:
                self.settle_steps()
            else:
                self.wait_for_step()
            yield

    def whole(self) -> ExclusiveLock:
        """Return a context that holds the lock, with no step running and Ctrl-C held back."""
        return ExclusiveLock(self)

    def queue(self) -> None:
        """Wait until the threads that are `ahead` have had the lock."""
        if not self.lock._is_owned():
            with self._next:
                pass

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Take the lock before all later callers. A step may still be running.

        `RLock` is not fair: a training loop that releases and reacquires it would starve waiters. `ahead` gives this
        thread the next turn. Only for threads that Ctrl-C never interrupts.
        """
        if self.lock._is_owned():  # or this thread and the one that is `ahead` would wait for each other
            self.lock.acquire()
        else:
            with self._next:
                self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Release the lock until `predicate` holds, and take it again.

        Raises:
            EmbedrockError: this is a forked child of the waiting process, forked by a signal handler meanwhile.
        """
        process = os.getpid()
        with held_back(), self.lock:  # an interrupt inside of a condition breaks its lock
            self._changed.wait_for(lambda: os.getpid() != process or predicate())
            if os.getpid() != process:
                raise EmbedrockError(f"a fork came while process {process} waited: what it waits for is not here.")
            self.wait_for_step()

    def notify(self) -> None:
        """Wake waiting threads to check their predicates."""
        with self.lock:
            self._changed.notify_all()


class ExclusiveLock:
    """A context that holds a table lock, with Ctrl-C held back. (A generator would take twice as many calls.)"""

    def __init__(self, table_lock: TableLock) -> None:
        self._table_lock, self._held_back = table_lock, held_back()

    def __enter__(self) -> None:
        self._held_back.__enter__()
        self._table_lock.queue()
        self._table_lock.lock.acquire()
        try:
            if self._table_lock.running:
                self._table_lock.wait_for_step()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._table_lock.lock.release()
        self._held_back.__exit__()


class together:
    """A context that holds the locks of several tables. One common order prevents deadlocks.

    A step may still be running. The caller must not release one of the locks (`wait_for`).
    """

    def __init__(self, table_locks: Iterable[TableLock]) -> None:
        self._locks = list(map(_lock, sorted(set(table_locks), key=_number)))

    def __enter__(self) -> None:
        lock = None
        try:
            for lock in self._locks:
                lock.acquire()
        except BaseException:  # for example Ctrl-C: this lock is not held
            for held in itertools.takewhile(lambda each: each is not lock, self._locks):
                held.release()
            raise

    def __exit__(self, *error: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


_number, _lock = operator.attrgetter("number"), operator.attrgetter("lock")


_turns: weakref.WeakSet[TableLock] = weakref.WeakSet()
_numbers = itertools.count()


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    for table_lock in list(_turns):
        if table_lock.lock in missed:
            table_lock.is_torn, table_lock.running = True, []  # the thread of a step does not exist here
        table_lock.notify()
