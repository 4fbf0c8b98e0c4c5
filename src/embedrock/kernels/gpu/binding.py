"""How arguments reach compiled kernels: memory by its address, with what Triton compiles kernels for.

Triton, and a loop over arguments, look at each of them anew at each launch: what is it? Of a launch, that takes the
host longest. So it is found out once for each sequence of types, of which a *binder* is made: a function that does
what is left, line by line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import NoneType
from typing import Any, NamedTuple

Binder = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]


class FixedArguments:
    """Arguments that are the same in many launches: what of them kernels are compiled for is found out once.

    Attributes:
        kind: stands for what kernels are compiled for of them.
        values: as kernels take them.
    """

    __slots__ = "args", "kind", "values"

    def __init__(self, *args: Any) -> None:
        self.args = args
        kind, self.values = bound(args)
        self.kind = _known.setdefault(kind, next(_numbers))


class TensorPart:
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

    def __getitem__(self, which: slice) -> TensorPart:
        """Return a part of one that has one dimension."""
        start, stop, _ = which.indices(*self.shape)
        return TensorPart(
            self._whole, self._start + start * self.dtype.itemsize // 4, (max(0, stop - start),), self.dtype
        )

    @property
    def tensor(self) -> Any:
        """A tensor of it."""
        stop = self._start + prod(self.shape) * self.dtype.itemsize // 4
        return self._whole.reshape(-1)[self._start : stop].view(self.dtype).view(self.shape)


def as_tensor(array: Any) -> Any:
    """Return a tensor of a part of one, or a tensor as it is."""
    return array.tensor if type(array) is TensorPart else array


def bound(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what kernels are compiled for of arguments, and the arguments as kernels take them."""
    return _binder(tuple(map(type, args)))(*args)


@functools.cache
def _binder(types: tuple[type, ...]) -> Binder:
    """Return what `bound` calls for arguments of such types.

    Of ``(values: Tensor, count: int)`` that is, if these types are the fifth that there were::

        def bind(a0, a1):
            pa0 = a0.data_ptr()
            return (5, a0.dtype, 1 if ..., (a1) >> 31 and ..., (pa0) & 15 and (pa0 & 15 == 0,)), (pa0, a1)
    """
    look = _look(types)
    return _made("bind", look.names, [*look.first, f"return ({look.kinds}), ({look.values})"])


def launcher(types: tuple[type, ...], varying: Sequence[bool], **known: Any) -> Callable[..., None]:
    """Return a function that launches a kernel with arguments of such types, after the size of the grid.

    Args:
        types: of the arguments. The first tensor among them is on the GPU that runs the kernel.
        varying: of which of them it does not matter to the kernel, if it is an integer, that it is 1 or a multiple
            of 16.
        known: what the function uses: `compiled`, see `Ready`; `hooks`, Triton's; and `anew`, which launches what was
            not compiled yet, or is watched, by the key in `compiled`, the size of the grid and the arguments.

    Of ``(values: Tensor, count: int)``, which varies, that is::

        def launch(grid, a0, a1):
            pa0 = a0.data_ptr()
            device = a0.get_device()
            key = (device, 5, a0.dtype, (a1) >> 31 and types_of(a1), (pa0) & 15 and (pa0 & 15 == 0,))
            known, watched = compiled.get(key), hooks.launch_enter_hook
            if known is None or getattr(watched, "calls", watched):
                return anew(key, grid, (a0, a1))
            run, stream, handles, constants = known
            run(grid, 1, 1, stream(device), *handles, pa0, a1, *constants)
    """
    look = _look(types, varying)
    assert look.tensor  # or the stream would not be known
    lines = [
        *look.first,
        f"device = {look.tensor}.get_device()",
        f"key = (device, {look.kinds})",
        "known, watched = compiled.get(key), hooks.launch_enter_hook",
        'if known is None or getattr(watched, "calls", watched):',
        f"    return anew(key, grid, ({look.names}))",
        "run, stream, handles, constants = known",
        f"run(grid, 1, 1, stream(device), *handles, {look.values}*constants)",
    ]
    return _made("launch", f"grid, {look.names}", lines, **known)


def in_place_of(types: Sequence[type], parameters: Sequence[bool]) -> list[bool]:
    """Return what is said of a kernel's parameters of the arguments of such types: False of what is `FixedArguments`.

    How many parameters are in the place of that, types do not say. So, of what is between two, it is False as well.
    """
    count = len(types)
    before = types.index(FixedArguments) if FixedArguments in types else count
    after = 0 if before == count else types[::-1].index(FixedArguments)
    return [*parameters[:before], *[False] * (count - before - after), *parameters[len(parameters) - after :]]


class _Specializer(NamedTuple):
    """Python that looks at arguments of some types: lists end with a comma.

    Attributes:
        names: of the arguments.
        first: lines that come first.
        kinds: what kernels are compiled for of the arguments.
        values: the arguments as kernels take them.
        tensor: the name of the first tensor; empty where there is none.
    """

    names: str
    first: list[str]
    kinds: str
    values: str
    tensor: str


def _look(types: tuple[type, ...], varying: Sequence[bool] = ()) -> _Specializer:
    names = [f"a{k}" for k in range(len(types))]
    first, values, tensors = list[str](), list[str](), list[str]()
    addresses, integers = list[str](), list[str]()
    kinds = [str(next(_numbers))]  # of these types
    for arg, kind, varies in zip(names, types, varying or itertools.repeat(False), strict=False):
        value = arg
        if kind is int:
            integers.append(arg)
            if not varies:
                kinds.append(_KIND_OF_INTEGER.format(arg))
        elif kind is FixedArguments:
            kinds.append(f"{arg}.kind")
            value = f"*{arg}.values"
        elif issubclass(kind, tuple):
            first.append(f"k{arg}, v{arg} = bound({arg})")
            kinds.append(f"k{arg}")
            value = f"v{arg}"
        elif kind not in (float, NoneType):
            value = f"p{arg}"
            first.append(f"{value} = {arg}.{'address' if kind is TensorPart else 'data_ptr()'}")
            addresses.append(value)
            kinds.append(f"{arg}.dtype")
            if kind is not TensorPart:
                tensors.append(arg)
        values.append(value)
    # As a rule, all integers have 31 bits, and all addresses are multiples of 16.
    if integers:
        kinds.append(f"({' | '.join(integers)}) >> 31 and types_of({_listed(integers)})")
    if addresses:
        kinds.append(f"({' | '.join(addresses)}) & 15 and ({_listed(f'{one} & 15 == 0' for one in addresses)})")
    return _Specializer(_listed(names), first, _listed(kinds), _listed(values), tensors[0] if tensors else "")


def _listed(parts: Iterable[str]) -> str:
    return "".join(f"{part}, " for part in parts)


def _made(name: str, parameters: str, lines: Sequence[str], **known: Any) -> Callable[..., Any]:
    """Return a function of such lines, that uses what is `known` to it."""
    made: dict[str, Any] = {"bound": bound, "types_of": _types_of, **known}
    exec("\n    ".join([f"def {name}({parameters}):", *lines]), made)
    return made[name]


def _types_of(*numbers: int) -> tuple[int, ...] | int:
    """Return which types integers have in a kernel, of 32 bits, 64, or 64 without a sign; 0 if all have 32."""
    types = tuple(0 if -(2**31) <= one < 2**31 else 1 if one < 2**63 else 2 for one in numbers)
    return any(types) and types


# What an integer that does not vary is: 1, or a multiple of 16.
_KIND_OF_INTEGER = "1 if {0} == 1 else 2 if {0} & 15 == 0 else 0"
_numbers = itertools.count()
_known: dict[tuple[Any, ...], int] = {}  # what `FixedArguments` arguments are, by which number


def plain(args: Sequence[Any]) -> list[Any]:
    """Return arguments one by one, all in memory as tensors."""
    return [as_tensor(one) for arg in args for one in (arg.args if type(arg) is FixedArguments else (arg,))]
