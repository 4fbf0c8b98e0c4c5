"""The arithmetic: arrays in, arrays out.

The specification is short NumPy, ``tests/reference``. ``cpu`` is Numba: a kernel has the name, the arguments and the
file of its reference. ``gpu`` is Triton, which some machines lack. GPU kernels take addresses of records instead of
slots. Each set is imported at first use, because importing Numba takes longer than all the rest.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from embedrock.system import forks
from embedrock.system.interrupts import held_back

if TYPE_CHECKING:
    from embedrock.kernels import cpu, gpu

__all__ = ["cpu", "gpu"]

_loading = forks.lock(forks.LockRank.LOADING)  # otherwise a child may have modules whose import nobody finishes


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with held_back(), _loading:  # an interrupt would leave Numba half imported in this process
        return importlib.import_module(f"{__name__}.{name}")


def set_threads(count: int) -> None:
    """Set the number of threads that Embedrock's CPU kernels use. Results do not depend on it.

    Without it, the environment variable EMBEDROCK_THREADS decides, or the number of cores, at most 16.

    Args:
        count: number of threads.

    Raises:
        ArgumentError: `count` is not a whole number >= 1.

    Example:
        >>> import embedrock as er
        >>> before = er.get_threads()
        >>> er.set_threads(1)
        >>> er.get_threads()
        1
        >>> er.set_threads(before)
    """
    __getattr__("cpu").threads.set_threads(count)


def get_threads() -> int:
    """Return the number of threads that Embedrock's CPU kernels use.

    Example:
        >>> import embedrock as er
        >>> er.get_threads() >= 1
        True
    """
    return __getattr__("cpu").threads.get_threads()
