"""`Turn`: one thread at a time has a table, and no step is running then."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from embedrock import kernels
from embedrock.machine.interrupts import held_back

if TYPE_CHECKING:
    from embedrock.kernels.cpu.threads import Call
    from embedrock.tiers.side import Side


class Turn:
    """The lock of a table, and the step that runs in the background.

    It does not know the table: threads that wait here must not be the last that hold it.

    Attributes:
        lock: held by whoever has the table.
        running: the step.
        failure: what a step raised: records may be half changed.
        number: of its own.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.running: Call | Side | None = None
        self.failure: BaseException | None = None
        self.renew()
        _turns.add(self)

    def renew(self) -> None:
        """Make a new lock, which nobody holds."""
        self.lock, self._next = threading.RLock(), threading.Lock()
        self._changed = threading.Condition(self.lock)

    def settle(self) -> None:
        """Return once no step is running."""
        running = self.running
        if running is None:
            return
        with held_back():
            try:
                running.finish()
            except BaseException as error:
                self.failure = error
                raise
            finally:
                self.running = None

    def start(self, function: Callable[..., object], *args: Any) -> None:
        """Make a step in the background by calling ``function(*args)``, which may happen here and now."""
        try:
            self.running = kernels.cpu.threads.start(function, *args)
        except BaseException as error:
            self.failure = error
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Give the caller the table alone, with no step running."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]
            with self._next:
                pass
        with self.lock:
            self.settle()
            yield

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Take the lock before all who come later; a step may be running still.

        A lock goes to whoever asks at the right moment. That is hardly ever one who waits, where another thread takes
        it again as soon as it has let it go: a loop that trains. For threads that Ctrl-C never interrupts.
        """
        with self._next:
            self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Let others have the table until `predicate` holds, and have it for oneself again."""
        with held_back(), self.lock:  # an interrupt inside of a condition leaves its lock in disorder
            self._changed.wait_for(predicate)
            self.settle()

    def notify(self) -> None:
        """Wake those who wait, to look again."""
        with self.lock:
            self._changed.notify_all()


@contextmanager
def together(turns: Iterable[Turn]) -> Iterator[None]:
    """Give the caller the locks of several tables, in one order everywhere: so callers never wait for each other.

    A step may be running still. The caller must not let one of the locks go (`wait_for`).
    """
    with ExitStack() as stack:
        for turn in sorted(set(turns), key=lambda turn: turn.number):
            stack.enter_context(turn.lock)
        yield


_turns: weakref.WeakSet[Turn] = weakref.WeakSet()
_numbers = itertools.count()


def _renew_all() -> None:
    # A forked child has none of the threads that may have held them.
    for turn in list(_turns):
        turn.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
