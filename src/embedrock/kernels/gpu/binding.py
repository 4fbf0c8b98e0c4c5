"""How arguments reach compiled kernels: memory by its address, with what Triton compiles kernels for.

Triton, and a loop over arguments, look at each of them anew at each launch: what is it? Of a launch, that takes the
host longest. So it is found out once for each sequence of types, of which a *binder* is made: a function that does
what is left, line by line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from math import prod
from types import NoneType
from typing import Any

Binder = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]


class Fixed:
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


def bound(args: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return what kernels are compiled for of arguments, and the arguments as kernels take them."""
    return _binder(tuple(map(type, args)))(*args)


@functools.cache
def _binder(types: tuple[type, ...]) -> Binder:
    """Return what `bound` calls for arguments of such types.

    Of ``(values: Tensor, count: int)`` that is, if these types are the fifth that there were::

        def bind(a0, a1):
            p0 = a0.data_ptr()
            return (5, a0.dtype, (0 if ...), (p0) & 15 and (p0 & 15 == 0,)), (p0, a1)
    """
    first, addresses, values = list[str](), list[str](), list[str]()
    kinds = [str(next(_numbers))]  # of these types
    for k, kind in enumerate(types):
        arg, value = f"a{k}", f"a{k}"
        if kind is int:
            kinds.append(_KIND_OF_INTEGER.format(arg))
        elif kind is Fixed:
            kinds.append(f"{arg}.kind")
            value = f"*{arg}.values"
        elif issubclass(kind, tuple):
            first.append(f"k{k}, {value} = bound({arg})")
            kinds.append(f"k{k}")
        elif kind not in (float, NoneType):
            value = f"p{k}"
            first.append(f"{value} = {arg}.{'address' if kind is Part else 'data_ptr()'}")
            addresses.append(value)
            kinds.append(f"{arg}.dtype")
        values.append(value)
    if addresses:  # most are multiples of 16, all of them
        kinds.append(f"({' | '.join(addresses)}) & 15 and ({''.join(f'{one} & 15 == 0, ' for one in addresses)})")
    said = f"return ({', '.join(kinds)},), ({''.join(f'{value}, ' for value in values)})"
    header = f"def bind({', '.join(f'a{k}' for k in range(len(types)))}):"
    made: dict[str, Any] = {"bound": bound}
    exec("\n    ".join([header, *first, said]), made)
    return made["bind"]


# Which of its types an integer has, and whether it is 1, or a multiple of 16.
_TYPE_OF_INTEGER = "(0 if -0x80000000 <= {0} < 0x80000000 else 4 if {0} < 2**63 else 8)"
_KIND_OF_INTEGER = _TYPE_OF_INTEGER + " + (1 if {0} == 1 else 2 if {0} & 15 == 0 else 0)"
_numbers = itertools.count()
_known: dict[tuple[Any, ...], int] = {}  # what `Fixed` arguments are, by which number


def plain(args: Sequence[Any]) -> list[Any]:
    """Return arguments one by one, all in memory as tensors."""
    return [as_tensor(one) for arg in args for one in (arg.args if type(arg) is Fixed else (arg,))]
