"""The threads of kernels, and calls in the background.

Kernels are serial and release the GIL. This file cuts their outer range into parts and runs the parts on a few threads
of our own. Numba's ``parallel=True`` was rejected. The OpenMP or TBB pool spins beside PyTorch's and TensorFlow's:
stalls of 4 to 60 ms were measured. It also breaks after a fork.
"""

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from embedrock.errors import ArgumentError, EmbedrockError
from embedrock.system import forks, platform


class BackgroundCall:
    """A call in the background. The first thread to claim it makes it: a worker, or a caller that needs it sooner."""

    __slots__ = ("_args", "_claim", "_done", "_error", "_function")

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._error: BaseException | None = None
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def run_once(self) -> None:
        """Make the call unless it has begun already."""
        me = threading.get_ident()
        if not self._claim.acquire(blocking=False):
            return
        try:
            _under_way[self] = me
            self._function(*self._args)
        except BaseException as error:
            self._error = error
        finally:
            self._args = ()  # they hold the arrays of a table, which may be closed
            del _under_way[self]
            self._done.release()

    def finish(self) -> None:
        """Wait until the call has ended, and raise its error. Meanwhile, work on the queue."""
        self.run_once()
        _current_pool().help()
        error = self.wait()
        if error is not None:
            raise error

    def wait(self) -> BaseException | None:
        """Wait until the call has ended; return its error, or the interrupt of the wait."""
        self.run_once()
        interrupt: BaseException | None = None
        while True:
            try:
                with self._done:
                    return interrupt or self._error
            except KeyboardInterrupt as signal:  # a worker still writes to the caller's arrays: wait for it
                interrupt = signal

    def lose(self) -> None:
        """Fail the call because its thread does not exist after a fork."""
        self._error = EmbedrockError(
            "this process was forked while a thread of its parent had been making this call for too long to be waited "
            "for, and that thread is not here. Start processes before such calls, or wait for them."
        )
        self._done.release()


def _take(function: Callable[..., object], args: Sequence[Any], parts: Iterator[tuple[int, int]]) -> None:
    """Do the parts of a call that no other thread has taken. The shared iterator yields each part once."""
    for lo, hi in parts:
        function(*args, lo, hi)


class _CallQueue:
    """Daemon threads that take calls from one queue.

    The calling thread does parts of a call itself, and all that no worker has taken by then. So a busy or closed pool
    delays a call but never blocks it.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: SimpleQueue[BackgroundCall | None] = SimpleQueue()
        for index in range(threads - 1):
            threading.Thread(target=self._work, name=f"embedrock-{index}", daemon=True).start()

    def _work(self) -> None:
        working = forks.lock(forks.LockRank.WORKER)
        while (call := self._queue.get()) is not None:
            with working:  # no call is half made in a forked child
                call.run_once()
            del call  # it holds a table, which may be closed while this thread waits

    def put(self, call: BackgroundCall) -> None:
        self._queue.put(call)

    def help(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            if call is None:  # stop signal of a worker
                return self._queue.put(None)
            call.run_once()

    def run(self, function: Callable[..., object], bounds: list[int], args: Sequence[Any]) -> None:
        parts = iter(list(itertools.pairwise(bounds)))
        calls = [BackgroundCall(_take, (function, args, parts)) for _ in range(min(self.threads, len(bounds) - 1) - 1)]
        for call in calls:
            self.put(call)
        try:
            _take(function, args, parts)
        finally:
            errors = [error for call in calls if (error := call.wait())]
        if errors:
            raise errors[0]

    def close(self) -> None:
        for _ in range(self.threads - 1):
            self._queue.put(None)


def _default_threads() -> int:
    text = os.environ.get("EMBEDROCK_THREADS")
    if text is None:
        return min(platform.usable_cores(), 16)
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError(
            f"the environment variable EMBEDROCK_THREADS must be a positive whole number: got {text!r}. "
            "Unset it to use all cores."
        )
    return int(text)


_lock = forks.lock(forks.LockRank.LOADING)
_pool: _CallQueue | None = None
_under_way: dict[BackgroundCall, int] = {}  # and the threads that make them


def _current_pool() -> _CallQueue:
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = _CallQueue(_default_threads())
    return _pool


def set_threads(count: int) -> None:
    """See `embedrock.set_threads`."""
    global _pool
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ArgumentError(f"the number of threads must be a whole number >= 1: got {count!r}.")
    with _lock:
        old, _pool = _pool, _CallQueue(int(count))
    if old is not None:
        old.close()


def get_threads() -> int:
    return _current_pool().threads


# Columns of rows that are worth a second thread. They take 0.3 to 0.5 ms. A call of a thread that sleeps takes 0.1 ms,
# and memory serves two threads less than twice as fast.
LEAST_WORK = 1 << 20


def run(
    function: Callable[..., object],
    count: int,
    args: Sequence[Any],
    grain: int,
    cuts: int = 1,
    work: int = LEAST_WORK,
) -> None:
    """Call ``function(*args, lo, hi)`` over ``[0, count)``, cut into parts for the threads.

    Args:
        function: called with independent parts.
        count: length of its outer range.
        args: its arguments before ``lo, hi``.
        grain: fewest items worth a part of their own.
        cuts: most parts for each thread.
        work: about the number of columns of rows that it touches. One thread makes a call of few.
    """
    pool = _current_pool()
    worth = work * (pool.threads - 1) >= LEAST_WORK
    parts = min(pool.threads * cuts, max(1, count // grain)) if worth else 1
    if parts == 1:
        function(*args, 0, count)
    else:
        pool.run(function, [count * k // parts for k in range(parts + 1)], args)


def start(function: Callable[..., object], *args: Any) -> BackgroundCall | None:
    """Call ``function(*args)`` on a worker, in the background. With one thread, call it now and return None.

    Users of the result call `BackgroundCall.finish`, which makes the call itself if no worker has begun it.
    """
    pool = _current_pool()
    if pool.threads == 1:
        function(*args)
        return None
    call = BackgroundCall(function, args)
    pool.put(call)
    return call


def _finish_all() -> None:
    """Make all queued calls, and wait for those of other threads."""
    if _pool is not None:
        _pool.help()
    for call in list(_under_way):
        call.wait()


atexit.register(_finish_all)  # the interpreter frees the memory at exit


@forks.in_child
def _begin_child(missed: Set[forks.Lock]) -> None:
    """Start a forked child without threads. The first use makes a pool."""
    global _pool
    _pool, me = None, threading.get_ident()
    for call in [call for call, thread in _under_way.items() if thread != me]:
        del _under_way[call]
        call.lose()


# A compiling thread of the parent does not exist in a child, which would wait for this lock forever.
forks.hold(global_compiler_lock._lock, forks.LockRank.COMPILER)
