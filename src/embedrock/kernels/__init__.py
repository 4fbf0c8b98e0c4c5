"""The arithmetic: arrays in, arrays out.

``reference`` is short NumPy and is the specification. ``cpu`` is Numba: a kernel has the name, the arguments and the
file of its reference. ``gpu`` is Triton, which not every machine has; its kernels take addresses of records instead of
slots. Each set is imported when it is first used, because Numba alone takes longer to import than all the rest.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embedrock.kernels import cpu, gpu, reference

__all__ = ["cpu", "gpu", "reference"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
