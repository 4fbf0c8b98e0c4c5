"""Fast binding of Python arguments to compiled kernels.

Triton inspects each argument at each launch, which takes the host longest. So the inspection is compiled once for each
sequence of types, into a *binder*. A binder does the remaining work in straight-line code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from types import NoneType
from typing import Any


class TensorPart:
    """Part of a tensor's memory that kernels take by address.

    Creating a tensor takes a framework as long as a kernel launch takes Python. So `tensor` creates one only on
    request.

    Args:
        whole: tensor of elements of 4 or 8 bytes.
        start: bytes before the part, divided by 4.
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
        """Return a slice of a one-dimensional part."""
        start, stop, _ = which.indices(*self.shape)
        return TensorPart(
            self._whole, self._start + start * self.dtype.itemsize // 4, (max(0, stop - start),), self.dtype
        )

    @property
    def tensor(self) -> Any:
        size = self._whole.element_size()
        start, count = 4 * self._start // size, prod(self.shape) * self.dtype.itemsize // size
        return self._whole.reshape(-1)[start : start + count].view(self.dtype).view(self.shape)


def as_tensor(array: Any) -> Any:
    """Return a part as a tensor, or a tensor as it is."""
    return array.tensor if type(array) is TensorPart else array


@functools.cache
def binder(types: tuple[type, ...]) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return a function of arguments of these types: their specialization, and the arguments for kernels."""
    return _made("", types, ["return ({kinds}), ({values})"])


def launcher(types: tuple[type, ...], varying: Sequence[bool], **known: Any) -> Callable[..., None]:
    """Return a function that launches a kernel with a grid size and arguments of these types.

    Args:
        types: of the arguments. The first tensor among them is on the GPU that runs the kernel.
        varying: flags of integers that are not specialized for 1 and for multiples of 16.
        known: globals of the function. `compiled`: see `ReadyKernel`. `hooks`: Triton's. `anew`: launches a kernel that
            is not compiled yet, or is watched. It takes the key in `compiled`, the grid size and the arguments.

    Of ``(values: Tensor, count: int)``, where `count` varies, it is::

        def made(grid, a0, a1):
            pa0 = a0.data_ptr()
            device = a0.get_device()
            key = (device, 5, a0.dtype, (a1) >> 31 and types_of(a1), (pa0) & 15 and (pa0 & 15 == 0,))
            known, watched = compiled.get(key), hooks.launch_enter_hook
            if known is None or getattr(watched, "calls", watched):
                return anew(key, grid, (a0, a1))
            run, stream, handles, constants = known
            run(grid, 1, 1, stream(device), *handles, pa0, a1, *constants)
    """
    lines = [
        "device = {tensor}.get_device()",
        "key = (device, {kinds})",
        "known, watched = compiled.get(key), hooks.launch_enter_hook",
        'if known is None or getattr(watched, "calls", watched):',
        "    return anew(key, grid, ({names}))",
        "run, stream, handles, constants = known",
        "run(grid, 1, 1, stream(device), *handles, {values}*constants)",
    ]
    return _made("grid, ", types, lines, varying, **known)


def _made(
    first: str, types: tuple[type, ...], lines: Sequence[str], varying: Sequence[bool] = (), **known: Any
) -> Callable[..., Any]:
    """Return a function that inspects arguments of some types.

    Args:
        first: the parameters before the arguments.
        types: of the arguments.
        lines: of the function. In them, {names} are the arguments, {kinds} the specialization of these, and {values}
            the arguments for kernels. Such lists end with a comma. {tensor} is the first tensor.
        varying: see `launcher`.
        known: globals of the function.
    """
    names = [f"a{k}" for k in range(len(types))]
    looks, values, tensors = list[str](), list[str](), list[str]()
    addresses, integers = list[str](), list[str]()
    kinds = [str(next(_numbers))]  # number of these types
    for arg, kind, varies in zip(names, types, varying or itertools.repeat(False), strict=False):
        value = arg
        if kind is int:
            integers.append(arg)
            if not varies:
                kinds.append(_KIND_OF_INTEGER.format(arg))
        elif issubclass(kind, tuple):
            looks.append(f"k{arg}, v{arg} = binder((*map(type, {arg}),))(*{arg})")
            kinds.append(f"k{arg}")
            value = f"v{arg}"
        elif kind not in (float, NoneType):
            value = f"p{arg}"
            looks.append(f"{value} = {arg}.{'address' if kind is TensorPart else 'data_ptr()'}")
            addresses.append(value)
            kinds.append(f"{arg}.dtype")
            if kind is not TensorPart:
                tensors.append(arg)
        values.append(value)
    # Usually, all integers have 31 bits, and all addresses are multiples of 16.
    if integers:
        kinds.append(f"({' | '.join(integers)}) >> 31 and types_of({_listed(integers)})")
    if addresses:
        kinds.append(f"({' | '.join(addresses)}) & 15 and ({_listed(f'{one} & 15 == 0' for one in addresses)})")
    lists = {"names": _listed(names), "kinds": _listed(kinds), "values": _listed(values)}
    body = [*looks, *(line.format(**lists, tensor=next(iter(tensors), "")) for line in lines)]
    made: dict[str, Any] = {"binder": binder, "types_of": _types_of, **known}
    exec("\n    ".join([f"def made({first}{lists['names']}):", *body]), made)
    return made["made"]


def _listed(parts: Iterable[str]) -> str:
    return "".join(f"{part}, " for part in parts)


def _types_of(*numbers: int) -> tuple[int, ...] | int:
    """Return the kernel types of integers: 32 bits, 64, or unsigned 64; 0 if all have 32 bits."""
    types = tuple(0 if -(2**31) <= one < 2**31 else 1 if one < 2**63 else 2 for one in numbers)
    return any(types) and types


# Specialization of an integer that does not vary: 1, or a multiple of 16.
_KIND_OF_INTEGER = "1 if {0} == 1 else 2 if {0} & 15 == 0 else 0"
_numbers = itertools.count()


def plain(args: Sequence[Any]) -> list[Any]:
    """Return arguments with all memory as tensors."""
    return [as_tensor(arg) for arg in args]
