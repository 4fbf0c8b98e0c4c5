"""How GPU kernels are compiled and launched. Tensors are whatever Triton takes: nothing here imports a framework.

Where ``TRITON_INTERPRET=1`` was set before Triton was first imported, kernels run on CPU tensors, slowly and with the
same results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import triton
from triton import knobs
from triton.language import random
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from embedrock.process import forks

ALIGNMENT = 16  # of the first record of any memory: GPUs read and write 16 bytes at a time


class Form(NamedTuple):
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


class Tile(NamedTuple):
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


def tile(form: Form, rows: int | None = None) -> Tile:
    """Return the tile for records: by default as many as give each thread 16 bytes of weights."""
    block = max(4, 1 << (form.dim - 1).bit_length())
    return Tile(rows or max(1, 512 // block), block, gcd(form.record_bytes, ALIGNMENT))


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
        ready = _ready[key] = Ready(kernel, num_warps=num_warps, **constexprs)
    ready.launch(grid_size, *args)


class Fixed:
    """Arguments that are the same in many launches: what of them kernels are compiled for is found out once."""

    __slots__ = "args", "kinds", "values"

    def __init__(self, *args: Any) -> None:
        self.args = args
        kinds, self.values = _kinds_and_values(args)
        self.kinds = tuple(kinds)


class Part:
    """A part of a tensor's memory that kernels use and hardly anybody else: they take it by its address.

    A framework takes as long to make a tensor of it as Python to launch a kernel, so one is made where it is asked for.

    Args:
        whole: elements of 4 bytes.
        start: which of them is the first.
        shape: of the part.
        dtype: of the part, of 4 or 8 bytes.
    """

    __slots__ = "_start", "_whole", "address", "dtype", "shape"

    def __init__(self, whole: Any, start: int, shape: tuple[int, ...], dtype: Any) -> None:
        self._whole, self._start, self.shape, self.dtype = whole, start, shape, dtype
        self.address = whole.data_ptr() + 4 * start

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address

    def __getitem__(self, which: slice) -> Part:
        """Return a part of one that has one dimension."""
        start, stop, _ = which.indices(*self.shape)
        return Part(self._whole, self._start + start * self.dtype.itemsize // 4, (max(0, stop - start),), self.dtype)

    @property
    def tensor(self) -> Any:
        """A tensor of it."""
        stop = self._start + prod(self.shape) * self.dtype.itemsize // 4
        return self._whole.reshape(-1)[self._start : stop].view(self.dtype).view(self.shape)


def as_tensor(array: Any) -> Any:
    """Return a tensor of a part of one, or a tensor as it is."""
    return array.tensor if type(array) is Part else array


class Ready:
    """A kernel with its constexprs.

    Triton finds out anew at each launch which compiled kernel the arguments want, in 8 to 23 microseconds, where 6
    launches make a step. So each is kept, by what Triton would look at.

    Args:
        kernel: that is launched.
        num_warps: of a program.
        constexprs: by name.

    Attributes:
        compiled: what was compiled of it: its launcher, what that takes first, and last, the constexprs.
    """

    def __init__(self, kernel: Any, *, num_warps: int = 4, **constexprs: Any) -> None:
        self.kernel, self.options = kernel, {"num_warps": num_warps, **constexprs}
        self.compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._is_compiled, self._constexprs = isinstance(kernel, JITFunction), constexprs

    def launch(self, grid_size: int, *args: Any) -> None:
        """Run so many programs by arguments, some of which may be `Fixed` together: see `launch`."""
        if grid_size == 0:
            return
        if on_launch is not None:
            on_launch(self.kernel)
        if not self._is_compiled:
            with _interpreter, np.errstate(all="ignore"):  # GPUs do not warn
                self.kernel[(grid_size,)](*_rounded(plain(args)), **self.options)
            return
        gpu = driver.active
        device = gpu.get_current_device()
        kinds, values = _kinds_and_values(args)
        key = device, *kinds
        known, hook = self.compiled.get(key), knobs.runtime.launch_enter_hook
        if known is None or getattr(hook, "calls", hook):  # somebody, a profiler, is to be told of launches
            self._launch_anew(key, grid_size, plain(args))
        else:
            run, handles, constants = known
            run(grid_size, 1, 1, gpu.get_current_stream(device), *handles, None, None, None, *values, *constants)

    def _launch_anew(self, key: tuple[Any, ...], grid_size: int, args: Sequence[Any]) -> None:
        """Let Triton launch, and keep what it has compiled for such arguments."""
        compiled = self.kernel[(grid_size,)](*args, enable_fp_fusion=False, **self.options)
        if compiled is None:  # one of Triton's hooks has stood in its way
            return
        names = self.kernel.arg_names[len(args) :]
        handles = compiled.function, compiled.packed_metadata
        self.compiled[key] = compiled.run, handles, tuple(self._constexprs[name] for name in names)


_ready: dict[tuple[Any, ...], Ready] = {}
_interpreter = forks.lock(forks.Rank.WORKER)  # there is one, and it does not know of threads


def plain(args: Sequence[Any]) -> list[Any]:
    """Return arguments one by one, all in memory as tensors."""
    return [as_tensor(one) for arg in args for one in (arg.args if type(arg) is Fixed else (arg,))]


def _rounded(args: Sequence[Any]) -> list[Any]:
    """Return arguments as they reach a compiled kernel: the interpreter would calculate in float64."""
    return [
        single(arg) if type(arg) is float else type(arg)(*_rounded(arg)) if isinstance(arg, tuple) else arg
        for arg in args
    ]


def _kinds_and_values(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return what of arguments Triton compiles kernels for, and the arguments, tensors by their addresses."""
    kinds: list[Any] = []
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Part:
            kinds.append(arg.dtype if arg.address & 15 == 0 else (arg.dtype,))
            values.append(arg.address)
        elif kind in _in_memory:
            address = arg.data_ptr()
            kinds.append(arg.dtype if address & 15 == 0 else (arg.dtype,))
            values.append(address)
        elif kind is int:
            fits = 0 if -(2**31) <= arg < 2**31 else 4 if arg < 2**63 else 8
            kinds.append(fits + (1 if arg == 1 else 2 if arg & 15 == 0 else 0))
            values.append(arg)
        elif kind is float or arg is None:
            kinds.append(kind)
            values.append(arg)
        elif kind is Fixed:
            kinds.append(arg.kinds)
            values += arg.values
        elif isinstance(arg, tuple):
            its_kinds, its_values = _kinds_and_values(arg)
            kinds += kind, *its_kinds
            values.append(tuple(its_values))
        else:  # a tensor, of a type that was not seen yet
            _in_memory.add(kind)
            its_kinds, its_values = _kinds_and_values((arg,))
            kinds += its_kinds
            values += its_values
    return kinds, values


_in_memory: set[type] = set()  # types of tensors
