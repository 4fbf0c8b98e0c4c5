"""How CPU kernels are compiled and run: the flags, software prefetch, and the thread pool.

Kernels are serial and release the GIL; this file cuts their outer range into parts and runs the parts on a few
threads of our own. Numba's ``parallel=True`` was rejected: its OpenMP or TBB pool spins beside PyTorch's and
TensorFlow's (stalls of 4 to 60 ms were measured), and it breaks after a fork.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from embedrock.errors import ArgumentError
from embedrock.kernels.cpu.machine_code import KernelCache

# No fastmath: results must not depend on the machine's vector width. error_model="numpy": no ZeroDivisionError
# branches, which would keep loops from being vectorized.
_FLAGS: Any = {"nogil": True, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel at its first call, and keep the machine code on disk for other processes."""
    compiled = njit(**_FLAGS)(function)
    try:
        compiled._cache = KernelCache(function)  # Numba has a name for one cache only, its own
    except OSError as error:
        warnings.warn(
            f"kernels are compiled anew in every process, because there is no place to keep them: {error}. "
            "Set NUMBA_CACHE_DIR to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=2,
        )
    return compiled


# For parts of kernels whose loops must be vectorized together with those around them. LLVM's own choice leaves a call
# in the generator's loop over blocks, which then runs 6 times slower.
INLINED: Any = {**_FLAGS, "forceinline": True}
inlined = njit(**INLINED)

CACHE_LINE = 64


def _emit_prefetch(context: Any, builder: Any, kind: Any, args: Any, for_writing: int) -> Any:
    array = context.make_array(kind)(context, builder, args[0])
    word, i32 = ir.IntType(64), ir.IntType(32)
    pointer = ir.IntType(8).as_pointer()
    stride = builder.extract_value(array.strides, 0)
    start = builder.add(builder.ptrtoint(array.data, word), builder.mul(args[1], stride))
    function_type = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    line = ir.Constant(word, CACHE_LINE)
    with cgutils.for_range_slice(builder, ir.Constant(word, 0), args[2], line, word) as (offset, _):
        address = builder.inttoptr(builder.add(start, offset), pointer)
        builder.call(function, [address, i32(for_writing), i32(3), i32(1)])
    return context.get_dummy_value()


@intrinsic
def prefetch(typingctx: Any, rows: Any, index: Any, nbytes: Any) -> Any:
    """Ask for the first `nbytes` of ``rows[index]`` (2-D, C-contiguous) to be brought into cache for reading."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_prefetch(context, builder, signature.args[0], args, for_writing=0)

    return types.void(rows, types.intp, types.intp), generate


@intrinsic
def prefetch_to_write(typingctx: Any, rows: Any, index: Any, nbytes: Any) -> Any:
    """Do the same for writing. What another core will write to next should not be asked for like this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _emit_prefetch(context, builder, signature.args[0], args, for_writing=1)

    return types.void(rows, types.intp, types.intp), generate


class Call:
    """A call in the background. Whoever claims it first makes it: a worker, or a caller who got there before."""

    __slots__ = ("__weakref__", "_args", "_claim", "_done", "_error", "_function")

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._function, self._args = function, args
        self._error: BaseException | None = None
        self._claim, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def run_once(self) -> None:
        """Make the call, unless somebody has begun it."""
        if not self._claim.acquire(blocking=False):
            return
        try:
            self._function(*self._args)
        except BaseException as error:
            self._error = error
        finally:
            self._args = ()  # they hold the arrays of a table, which may be closed
            self._done.release()

    def finish(self) -> None:
        """Return once the call has ended, and raise what it raised. Meanwhile, help with what waits in the queue."""
        self.run_once()
        _current_pool().help()
        error = self.wait()
        if error is not None:
            raise error

    def wait(self) -> BaseException | None:
        """Return once the call has ended, with what it raised or what interrupted the waiting."""
        self.run_once()
        interrupt: BaseException | None = None
        while True:
            try:
                with self._done:
                    return interrupt or self._error
            except KeyboardInterrupt as signal:  # a worker still writes to the caller's arrays: let it end first
                interrupt = signal


class _Pool:
    """Daemon threads that take calls from one queue. The calling thread does the first part itself, and every
    other part that no worker has begun by then, so that a busy or closed pool delays a call but never blocks it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        for index in range(threads - 1):
            threading.Thread(target=self._work, name=f"embedrock-{index}", daemon=True).start()

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.run_once()
            del call  # it holds a table, which may be closed while this thread waits

    def put(self, call: Call) -> None:
        self._queue.put(call)

    def help(self) -> None:
        """Make calls that wait for a worker."""
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            if call is None:  # for a worker, which is to end
                return self._queue.put(None)
            call.run_once()

    def run(self, function: Callable[..., object], bounds: list[int], args: tuple[Any, ...]) -> None:
        calls = [Call(function, (*args, *part)) for part in itertools.pairwise(bounds[1:])]
        for call in calls:
            self.put(call)
        try:
            function(*args, bounds[0], bounds[1])
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
        return max(
            1,
            min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 16),
        )
    if not text.isdigit() or int(text) < 1:
        raise ArgumentError(
            f"the environment variable EMBEDROCK_THREADS must be a positive whole number: got {text!r}. "
            "Unset it to use all cores."
        )
    return int(text)


_lock = threading.Lock()
_pool: _Pool | None = None
_in_flight: weakref.WeakSet[Call] = weakref.WeakSet()  # background calls that somebody still waits for


def _current_pool() -> _Pool:
    global _pool
    if _pool is None:
        with _lock:
            if _pool is None:
                _pool = _Pool(_default_threads())
    return _pool


def set_threads(count: int) -> None:
    """Set the number of threads that Embedrock's CPU kernels use (results do not depend on it)."""
    global _pool
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ArgumentError(f"the number of threads must be a whole number >= 1: got {count!r}.")
    with _lock:
        old, _pool = _pool, _Pool(int(count))
    if old is not None:
        old.close()


def get_threads() -> int:
    """Return the number of threads that Embedrock's CPU kernels use."""
    return _current_pool().threads


def run(function: Callable[..., object], count: int, *args: Any, grain: int = 1024, cuts: int = 1) -> None:
    """Call ``function(*args, lo, hi)`` over ``[0, count)``, cut into parts for the threads.

    Args:
        function: a kernel whose parts are independent of each other.
        count: length of its outer range.
        args: its arguments before ``lo, hi``.
        grain: fewest items worth a part of their own (a hand-over to a thread costs 20 to 30 microseconds).
        cuts: most parts for each thread: more than 1 where threads may join later.
    """
    pool = _current_pool()
    parts = min(pool.threads * cuts, max(1, count // grain)) if pool.threads > 1 else 1
    if parts == 1:
        function(*args, 0, count)
    else:
        pool.run(function, [count * k // parts for k in range(parts + 1)], args)


def start(function: Callable[..., object], *args: Any) -> Call | None:
    """Have a worker call ``function(*args)`` in the background; with one thread, call it now and return None.

    Whoever needs what it does calls its `Call.finish`, which does the work itself where no worker has begun it.
    """
    pool = _current_pool()
    if pool.threads == 1:
        function(*args)
        return None
    call = Call(function, args)
    _in_flight.add(call)
    pool.put(call)
    return call


def _finish_all() -> None:
    for call in list(_in_flight):
        call.wait()


# A forked child has no worker to end what one has begun, and an interpreter that exits takes the memory away.
atexit.register(_finish_all)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written to.

    Numba compiles a kernel once more for read-only arrays, and the arrays of a plan are: what a kernel only reads, and
    may be either, is always passed as this.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def _forget_pool() -> None:
    # A forked child has none of its parent's threads: it makes a pool of its own when it first needs one.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    # Nor has it the thread that was compiling a kernel, and would hold the lock of Numba's compiler for ever. What is
    # registered later runs earlier before a fork: calls that still have to compile end before the lock is taken.
    release = global_compiler_lock.release
    os.register_at_fork(before=global_compiler_lock.acquire, after_in_parent=release, after_in_child=release)
    os.register_at_fork(before=_finish_all, after_in_child=_forget_pool)
