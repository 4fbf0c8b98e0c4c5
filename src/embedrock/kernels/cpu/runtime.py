"""Compilation and launch of CPU kernels."""

import functools
import warnings
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from numba import njit
from numba.extending import overload

from embedrock.kernels.cpu.machine_code import KernelCache
from embedrock.kernels.cpu.threads import LEAST_WORK, run
from embedrock.system.interrupts import held_back

# No fastmath: results must not depend on the machine's vector width. error_model="numpy": ZeroDivisionError branches
# would prevent vectorization. No reference counts: kernels allocate nothing, and their callers keep the arrays. Each
# view of a row would cost an atomic increment and decrement, twice the time of adding 16 columns.
_FLAGS: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}

# For parts of kernels whose loops must be vectorized together with the surrounding ones. LLVM's own choice leaves a
# call in the generator's loop over blocks, which then runs 6 times slower.
INLINED: Any = {**_FLAGS, "forceinline": True}
inlined = njit(**INLINED)
_IS_WRITEABLE = attrgetter("flags.writeable")  # some arrays are read by one call of `map`


def by_types(choose: Callable[..., Any]) -> Any:
    """Make a function for compiled code only. For the types of its arguments, `choose` returns its code."""

    @functools.wraps(choose)
    def chosen(*args: Any) -> Any:
        raise NotImplementedError

    overload(chosen, jit_options=INLINED)(choose)
    return chosen


ROW_WORK = 32  # columns that take as long as the miss of a row


class Launch(NamedTuple):
    """Launch parameters of a kernel.

    Attributes:
        over: position of the argument whose items ``lo`` to ``hi`` the kernel processes; None: no range.
        reads: positions of the arguments that become read-only views.
        pick: returns these arguments, maybe twice.
        grain: fewest items worth a part of their own.
        cuts: most parts for each thread.
        work: positions of two arguments: one with an item for each row, and one with their columns.
    """

    over: int | None
    reads: tuple[int, ...]
    pick: Callable[[Any], Any]
    grain: int
    cuts: int
    work: tuple[int, ...]


def kernel(
    over: str | None = None,
    reads: tuple[str, ...] = (),
    grain: int = 1024,
    cuts: int = 1,
    work: tuple[str, str] | tuple[()] = (),
) -> Callable[..., Any]:
    """Make a kernel: compiled at its first call, with the machine code kept on disk for other processes.

    Args:
        over: parameter with independent items. The kernel then ends in ``lo, hi``, the range of items to process.
            `launch` cuts the items into parts for the threads.
        reads: parameters whose arrays it only reads; callers may pass read-only arrays. Numba would compile a kernel
            once more for read-only arrays, and arrays of a plan are read-only. So `launch` always passes these as
            read-only.
        grain: fewest items worth a part of their own.
        cuts: most parts for each thread: more than 1 if threads may join later.
        work: of kernels whose items are rows: the parameters with an item for each row, and with columns of the rows.
            One thread makes a call of little work: see `run`.
    """

    def make(function: Callable[..., Any]) -> Any:
        compiled = _compiled(function)
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        position = None if over is None else names.index(over)
        positions = tuple(map(names.index, reads))
        pick = itemgetter(*positions, positions[0]) if reads else itemgetter(slice(0))
        compiled.launch = Launch(position, positions, pick, grain, cuts, tuple(map(names.index, work)))
        return compiled

    return make


def _compiled(function: Callable[..., Any]) -> Any:
    compiled: Any = njit(**_FLAGS)(function)
    try:
        compiled._cache = KernelCache(function)  # Numba has a name for its own cache only
    except OSError as error:
        warnings.warn(
            f"kernels are compiled anew in every process, because there is no place to keep them: {error}. "
            "Set NUMBA_CACHE_DIR to a folder that can be written to.",
            RuntimeWarning,
            stacklevel=3,
        )
    compiled.compile = _whole(compiled.compile)
    return compiled


def _whole(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles or loads a kernel while Ctrl-C waits: LLVM's callbacks lose it."""

    @functools.wraps(compile_)
    def whole(*args: Any) -> Any:
        with held_back():
            return compile_(*args)

    return whole


def launch(kernel: Any, *args: Any) -> Any:
    """Call a kernel over all items, on as many threads as pay, and return its result.

    Args:
        kernel: made by `kernel`.
        args: its arguments, without ``lo, hi``.
    """
    over, reads, pick, grain, cuts, work = kernel.launch
    given: Any = args
    if True in map(_IS_WRITEABLE, pick(args)):
        given = list(args)
        for position in reads:
            if args[position].flags.writeable:
                given[position] = view = args[position].view()
                view.setflags(False)  # not writable; by position, which takes half the time
    if over is None:
        return kernel(*given)
    count = args[over].shape[0]
    if count < 2 * grain:
        return kernel(*given, 0, count)
    about = len(args[work[0]]) * (args[work[1]].shape[1] + ROW_WORK) if work else LEAST_WORK
    return run(kernel, count, given, grain, cuts, about)
