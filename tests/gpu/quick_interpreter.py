"""Triton's interpreter does once what it does anew in every operation. What it calculates stays the same.

It took half of the time of the tests of kernels. Written for the Triton of constraints.txt: without this, tests are
slow, nothing else.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language
from triton.language import core
from triton.runtime import interpreter


def install() -> None:
    """Replace the functions of the interpreter that take the most time for nothing."""
    anything: Any = interpreter
    anything.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": _members})
    anything._get_np_dtype = _np_dtype
    # Checks of overflows are calculated and then left out, but where kernels are debugged.
    builder: Any = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    anything_of_core: Any = core
    anything_of_core._type_for_tuple_values = _type_for_tuple_values
    anything._patch_lang = _patch_lang
    anything_of_core.block_type.__init__ = _begin_type
    anything_of_core.tensor.__init__ = _begin_tensor


def _members(package: Any) -> list[tuple[str, Any]]:
    """Return what the interpreter replaces of a package, for which it looks at all members in every call."""
    return [(name, getattr(package, name)) for name in _builtins(package)]


@functools.cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


_patched_for = interpreter._patch_lang


def _patch_lang(function: Any) -> Any:
    """Patch the language for a function, unless it is: each call of one that is inlined does so anew."""
    if any(core.is_builtin(lang.load) or core.is_builtin(lang.tensor.__add__) for lang in _langs(function)):
        return _patched_for(function)
    return interpreter._LangPatchScope()


def _langs(function: Any) -> list[Any]:
    names = function.__globals__
    found = _langs_by_file.get(id(names))
    if found is None:
        modules = [value for value in names.values() if inspect.ismodule(value)]
        found = _langs_by_file[id(names)] = [module for module in modules if module in (language, core)]
    return found


_langs_by_file: dict[int, list[Any]] = {}  # modules stay

_begin_a_type = core.block_type.__init__
_types: dict[Any, dict[str, Any]] = {}


def _begin_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Make the type of a block as that of the same was made: nobody changes them."""
    key = element_ty.name, *(size.value if type(size) is core.constexpr else size for size in shape)
    known = _types.get(key)
    if known is None:
        _begin_a_type(self, element_ty, shape)
        _types[key] = self.__dict__
    else:
        self.__dict__ = known


def _begin_tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002  # Triton's name
    """Make a tensor of a type that knows what the shape of its tensors is."""
    known = vars(type).get("of_tensors")
    if known is None:
        shape = type.shape if type.is_block() else ()
        sizes = core.tuple([core.constexpr(size) for size in shape])
        known = type.of_tensors = sizes, core.constexpr(math.prod(shape)), type.scalar
    self.handle, self.type = handle, type
    self.shape, self.numel, self.dtype = known


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
