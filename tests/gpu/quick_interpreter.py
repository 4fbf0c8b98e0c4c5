"""Triton's interpreter does once what it does anew in every operation. What it calculates stays the same.

It took half of the time of the tests of kernels. Written for the Triton of constraints.txt: without this, tests are
slow, nothing else.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter


def install() -> None:
    """Replace the four functions of the interpreter that take the most time for nothing."""
    anything: Any = interpreter
    anything.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": _members})
    anything._get_np_dtype = _np_dtype
    # Checks of overflows are calculated and then left out, but where kernels are debugged.
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    anything_of_core: Any = core
    anything_of_core._type_for_tuple_values = _type_for_tuple_values


def _members(package: Any) -> list[tuple[str, Any]]:
    """Return what the interpreter replaces of a package, for which it looks at all members in every call."""
    return [(name, getattr(package, name)) for name in _builtins(package)]


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


_np_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _np_dtype(dtype: Any) -> Any:
    """Return NumPy's dtype of a type, for which the interpreter makes a dict of all in every call."""
    if isinstance(dtype, core.block_type):
        dtype = dtype.element_ty
    return np.dtype(np.uint64) if isinstance(dtype, core.pointer_type) else _np_dtype_of_scalar(dtype)


_made = core._type_for_tuple_values
_type_of_shape = functools.cache(_made)


def _type_for_tuple_values(values: Iterable[Any], fields: Any = None) -> Any:
    """Return the type of a tuple: shapes are the same few tuples of numbers."""
    values = tuple(values)
    if fields is None and all(type(value) is int for value in values):
        return _type_of_shape(values)
    return _made(values, fields)
