"""Compilation and launches of GPU kernels, on the tensors of any framework that Triton accepts.

If ``TRITON_INTERPRET=1`` was set before the first import of Triton, kernels run on CPU tensors. They are slow then,
with the same results.
"""

import copy
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple, Self

import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.language import random
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from embedrock.kernels.gpu.binding import launcher, plain
from embedrock.system import forks

ALIGNMENT = 16  # bytes, of the first record of any memory: GPUs access 16 bytes at a time


class RecordForm(NamedTuple):
    """Layout of a table's records, a constexpr, so that kernels are compiled for each layout.

    Attributes:
        dim: columns of weights.
        dtype_name: of the weights, as in `Spec`.
        record_bytes: bytes from one record to the next.
        state_start: index of the first state column, in float32 units.
        state_width: number of float32 state columns.
        rows: number of records that one program handles; 0 outside of kernels, like the next two.
        block: columns of weights, a power of two and at least 4, which includes `dim`.
        align: bytes; addresses of records are multiples of it.
    """

    dim: int
    dtype_name: str
    record_bytes: int
    state_start: int
    state_width: int
    rows: int = 0
    block: int = 0
    align: int = 0  # (Triton 3.8 gives kernels the fields of a tuple, and no properties)

    def tiled(self, most_rows: int | None = None) -> Self:
        """Return the layout for kernels. The default number of rows gives each thread 16 bytes of weights."""
        block = max(4, 1 << (self.dim - 1).bit_length())
        rows = most_rows or max(1, 512 // block)
        return self._replace(rows=rows, block=block, align=gcd(self.record_bytes, ALIGNMENT))

    @property
    def warps(self) -> int:
        """Number of warps of a program."""
        return min(max(self.rows * self.block // 128, 1), 16)


KERNELS: list[Any] = []  # all launchable kernels: tests compile each of them

# For parts of kernels, which Triton inlines.
inlined: Any = triton.jit


@inlined
def loaded(number):
    """Return a number that is an argument of the launch or, for replays of a CUDA graph, the address of one."""
    if not isinstance(number, float) and number.dtype.is_ptr():  # in the interpreter, numbers in tuples are Python's
        number = tl.load(number)
    return number


def kernel(*varying: str, anywhere: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a launchable kernel: ``@kernel("count", "step")``.

    Args:
        varying: integer parameters that differ from call to call. Triton recompiles a kernel for integers that are 1 or
            divisible by 16, except for these.
        anywhere: parameters with addresses that need not be multiples of 16. Triton recompiles for others, too.
    """

    def make(function: Callable[..., Any]) -> Any:
        made = triton.jit(do_not_specialize=varying, do_not_specialize_on_alignment=anywhere)(function)
        KERNELS.append(made)
        return made

    return make


def is_interpreted() -> bool:
    """Return whether kernels are interpreted, on CPU tensors."""
    return not isinstance(random.philox_impl, JITFunction)


on_launch: Callable[[Any], None] | None = None  # tests set this to observe launches


def launch(kernel: Any, grid_size: int, *args: Any, num_warps: int = 4, **constexprs: Any) -> None:
    """Run `grid_size` programs of a kernel on the current stream of the current device.

    Fused multiply-add is off, so that results equal those of the CPU wherever they can.
    """
    key = id(kernel), num_warps, *constexprs.values()
    ready = _ready.get(key)
    if ready is None:
        ready = _ready[key] = ReadyKernel(kernel, num_warps=num_warps, **constexprs)
    ready.launch(grid_size, *args)


class ReadyKernel:
    """A kernel with its constexprs.

    At each launch, Triton takes 8 to 23 microseconds to find the compiled kernel for the arguments. A step has 6
    launches. So this class keeps each compiled kernel, by the properties that Triton inspects.

    Args:
        kernel: that is launched.
        num_warps: of a program.
        constexprs: by name.

    Attributes:
        compiled: launcher, stream function, and the launcher's first and last arguments, by key.
    """

    def __init__(self, kernel: Any, *, num_warps: int = 4, **constexprs: Any) -> None:
        self.kernel, self.options = kernel, {"num_warps": num_warps, **constexprs}
        self.compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._launchers = dict[tuple[type, ...], Callable[..., None]]()

    def launch(self, grid_size: int, *args: Any) -> None:
        """Run `grid_size` programs with arguments: see `launch`."""
        if grid_size == 0:
            return
        if on_launch is not None:
            on_launch(self.kernel)
        types = tuple(map(type, args))
        launch = self._launchers.get(types)
        if launch is None:
            launch = self._launchers[types] = self._launcher(types)
        launch(grid_size, *args)

    def _launcher(self, types: tuple[type, ...]) -> Callable[..., None]:
        if not isinstance(self.kernel, JITFunction):
            return self._interpret
        varying = [one.do_not_specialize for one in self.kernel.params if not one.is_constexpr]
        return launcher(types, varying, compiled=self.compiled, hooks=knobs.runtime, anew=self._launch_anew)

    def _interpret(self, grid_size: int, *args: Any) -> None:
        with _interpreter, np.errstate(all="ignore"):  # GPUs do not warn
            self.kernel[(grid_size,)](*_rounded(plain(args)), **self.options)

    def _launch_anew(self, key: tuple[Any, ...], grid_size: int, args: Sequence[Any]) -> None:
        """Launch through Triton, and keep the compiled kernel for such arguments."""
        given = plain(args)
        compiled = self.kernel[(grid_size,)](*given, enable_fp_fusion=False, **self.options)
        if compiled is None:  # one of Triton's hooks has prevented the launch
            return
        names = self.kernel.arg_names[len(given) :]
        run, handles = straight(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None))
        constants = tuple(self.options[name] for name in names)
        self.compiled[key] = run, driver.active.get_current_stream, handles, constants


def straight(launcher: Any, handles: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the inner function of Triton's launcher, if that only adds numbers, with its first arguments.

    The launcher checks at each launch whether a kernel needs scratch memory, which ours never do. The added numbers
    differ between versions of Triton. So a copy of the launcher that launches nothing reveals them.

    Args:
        launcher: takes the sizes of a grid, a stream, handles and the arguments.
        handles: see above.
    """
    if not hasattr(launcher, "launch"):
        return launcher, handles
    seen = list[tuple[Any, ...]]()
    asked, start, argument = copy.copy(launcher), (1, 1, 1, 0), object()
    asked.launch = lambda *call: seen.append(call)
    try:
        asked(*start, *handles, argument)
    except RuntimeError:  # it needs memory, and there is no allocator
        return launcher, handles
    call = seen[0]
    added = call[len(start) : -1]
    known = {*map(id, handles)}
    is_as_told = call[: len(start)] == start and call[-1] is argument
    is_plain = all(id(one) in known or one is None or isinstance(one, int) for one in added)
    return (launcher.launch, added) if is_as_told and is_plain else (launcher, handles)


_ready: dict[tuple[Any, ...], ReadyKernel] = {}
_interpreter = forks.lock(forks.LockRank.WORKER)  # Triton's interpreter is global, and not thread-safe


def _rounded(args: Sequence[Any]) -> list[Any]:
    """Return arguments as compiled kernels receive them. The interpreter would use float64."""
    return [
        float(np.float32(arg)) if type(arg) is float else type(arg)(*_rounded(arg)) if isinstance(arg, tuple) else arg
        for arg in args
    ]
