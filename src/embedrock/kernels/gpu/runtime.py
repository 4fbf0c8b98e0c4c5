"""How GPU kernels are compiled and launched. Tensors are whatever Triton takes: nothing here imports a framework.

Where ``TRITON_INTERPRET=1`` was set before Triton was first imported, kernels run on CPU tensors, slowly and with the
same results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import triton
from triton import knobs
from triton.language import random
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from embedrock.kernels.gpu.binding import in_place_of, launcher, plain
from embedrock.system import forks

ALIGNMENT = 16  # of the first record of any memory: GPUs read and write 16 bytes at a time


class RecordForm(NamedTuple):
    """How the records of a table lie, for kernels: a constexpr, so each form is compiled for itself.

    Attributes:
        dim: columns of weights.
        dtype_name: of the weights, as in `Spec`.
        record_bytes: bytes from one record to the next.
        state_start: index of the first state column, in float32 units.
        state_width: float32 state columns in all.
    """

    dim: int
    dtype_name: str
    record_bytes: int
    state_start: int
    state_width: int


class RecordTile(NamedTuple):
    """How many records of a form one program handles, and how: a constexpr.

    Attributes:
        rows: how many records.
        block: columns of weights, a power of two and at least 4, of which `dim` are there.
        align: bytes; addresses of records are multiples of it.
    """

    rows: int
    block: int
    align: int

    def programs(self, count: int) -> int:
        """Return how many programs `count` records take."""
        return -(-count // self.rows)

    @property
    def warps(self) -> int:
        """How many warps a program has."""
        return min(max(self.rows * self.block // 128, 1), 16)


def tile(form: RecordForm, rows: int | None = None) -> RecordTile:
    """Return the tile for records: by default as many as give each thread 16 bytes of weights."""
    block = max(4, 1 << (form.dim - 1).bit_length())
    return RecordTile(rows or max(1, 512 // block), block, gcd(form.record_bytes, ALIGNMENT))


KERNELS: list[Any] = []  # all that can be launched: tests compile each of them

# For the parts of kernels. Triton inlines them.
inlined: Any = triton.jit


def kernel(*varying: str, anywhere: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a kernel that can be launched: ``@kernel("count", "step")``.

    Args:
        varying: integer parameters that differ from call to call. Triton compiles a kernel anew for integers that
            are 1 or divisible by 16, unless it is told of them.
        anywhere: parameters that are addresses and need not be multiples of 16, for which it would do so, too.
    """

    def make(function: Callable[..., Any]) -> Any:
        made = triton.jit(do_not_specialize=varying, do_not_specialize_on_alignment=anywhere)(function)
        KERNELS.append(made)
        return made

    return make


def is_interpreted() -> bool:
    """Return whether kernels are interpreted, on CPU tensors."""
    return not isinstance(random.philox_impl, JITFunction)


def single(number: float) -> float:
    """Round a number to float32, as it reaches a compiled kernel. The interpreter would calculate in float64."""
    return float(np.float32(number))


on_launch: Callable[[Any], None] | None = None  # is told of each kernel, where tests want to know


def launch(kernel: Any, grid_size: int, *args: Any, num_warps: int = 4, **constexprs: Any) -> None:
    """Run `grid_size` programs of a kernel on the current stream of the current device.

    Without fused multiply-add, so that results are those of the CPU wherever they can be.
    """
    key = id(kernel), num_warps, *constexprs.values()
    ready = _ready.get(key)
    if ready is None:
        ready = _ready[key] = ReadyKernel(kernel, num_warps=num_warps, **constexprs)
    ready.launch(grid_size, *args)


class ReadyKernel:
    """A kernel with its constexprs.

    Triton finds out anew at each launch which compiled kernel the arguments want, in 8 to 23 microseconds, where 6
    launches make a step. So each is kept, by what Triton would look at.

    Args:
        kernel: that is launched.
        num_warps: of a program.
        constexprs: by name.

    Attributes:
        compiled: what was compiled of it: its launcher, what tells the stream of a device, what the launcher takes
            first, and last, the constexprs.
    """

    def __init__(self, kernel: Any, *, num_warps: int = 4, **constexprs: Any) -> None:
        self.kernel, self.options = kernel, {"num_warps": num_warps, **constexprs}
        self.compiled: dict[tuple[Any, ...], tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._constexprs = constexprs
        self._launchers = dict[tuple[type, ...], Callable[..., None]]()

    def launch(self, grid_size: int, *args: Any) -> None:
        """Run so many programs by arguments, some of which may be `FixedArguments` together: see `launch`."""
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
        """Return what launches the kernel with arguments of such types."""
        if not isinstance(self.kernel, JITFunction):
            return self._interpret
        parameters = [one.do_not_specialize for one in self.kernel.params if not one.is_constexpr]
        varying = in_place_of(types, parameters)
        return launcher(types, varying, compiled=self.compiled, hooks=knobs.runtime, anew=self._launch_anew)

    def _interpret(self, grid_size: int, *args: Any) -> None:
        with _interpreter, np.errstate(all="ignore"):  # GPUs do not warn
            self.kernel[(grid_size,)](*_rounded(plain(args)), **self.options)

    def _launch_anew(self, key: tuple[Any, ...], grid_size: int, args: Sequence[Any]) -> None:
        """Let Triton launch, and keep what it has compiled for such arguments."""
        given = plain(args)
        compiled = self.kernel[(grid_size,)](*given, enable_fp_fusion=False, **self.options)
        if compiled is None:  # one of Triton's hooks has stood in its way
            return
        names = self.kernel.arg_names[len(given) :]
        run, handles = straight(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None))
        constants = tuple(self._constexprs[name] for name in names)
        self.compiled[key] = run, driver.active.get_current_stream, handles, constants


def straight(launcher: Any, handles: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return what a launcher of Triton's calls itself, if it only adds numbers, and what that takes before arguments.

    It asks anew at each launch whether a kernel wants memory of its own, which ours do not. What it adds, versions of
    Triton differ in. So it is found out of a copy, that launches nothing.

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
    except RuntimeError:  # it does want memory, and there is no allocator
        return launcher, handles
    call = seen[0]
    added = call[len(start) : -1]
    known = {*map(id, handles)}
    is_as_told = call[: len(start)] == start and call[-1] is argument
    is_plain = all(id(one) in known or one is None or isinstance(one, int) for one in added)
    return (launcher.launch, added) if is_as_told and is_plain else (launcher, handles)


_ready: dict[tuple[Any, ...], ReadyKernel] = {}
_interpreter = forks.lock(forks.LockRank.WORKER)  # there is one, and it does not know of threads


def _rounded(args: Sequence[Any]) -> list[Any]:
    """Return arguments as they reach a compiled kernel: the interpreter would calculate in float64."""
    return [
        single(arg) if type(arg) is float else type(arg)(*_rounded(arg)) if isinstance(arg, tuple) else arg
        for arg in args
    ]
