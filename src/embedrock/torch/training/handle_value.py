"""`HandleValue`: the value of a handle for other code. It contains no rows, so it can be neither read nor written.

A readable value would mislead: a norm, a penalty or an average of all parameters would miss the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._mode_utils import no_dispatch

from embedrock.errors import UnsupportedError
from embedrock.torch.training.ranks import are_there_groups

# Functions that move, copy or show a value. Their results have no rows either.
_COPIES = frozenset({
    "alias", "clone", "detach", "expand", "lift_fresh", "permute", "select", "slice", "squeeze", "t", "unsqueeze",
    "view", "_pin_memory", "_reshape_alias", "_to_copy", "_unsafe_view",
})  # fmt: skip
# Functions that read the form of a value, or make another tensor of it.
_FORMS = frozenset({
    "_has_same_storage_numel", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty", "new_empty_strided",
    "new_full", "new_ones",
    "new_zeros", "ones_like", "rand_like", "randn_like", "record_stream", "zeros_like",
})  # fmt: skip
# Functions that average rows, on one or on many values.
_AVERAGING = frozenset({"add", "copy", "div", "lerp", "mul", "sub"})
_SENDING = frozenset({"cat", "copy_", "stack"})  # torch.distributed sends the parameters of a model by it, as bits

# A weighted sum of rows and averages: the factor of each, at its version.
Factors = dict[tuple[Any, int], float]

_PYTORCHS: Any = Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue]


class _ValueDispatch:
    """`__torch_dispatch__` of values: it handles each PyTorch operator on a value.

    `torch.compile` accepts no parameter with this method. A graph only passes the handle to operators of the layers. So
    the method does not exist while a graph is made.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return _PYTORCHS if TracingContext.try_get() is not None else _dispatch


class HandleValue(Tensor):
    """Value of a handle, an alias of it, or a copy."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]
    __torch_dispatch__ = _ValueDispatch()
    _whose: Any

    def numpy(self, *, force: bool = False) -> NoReturn:
        _refuse("numpy", self)

    def tolist(self) -> NoReturn:
        _refuse("tolist", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse("pickle", self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"the value of {self._whose!r}, which has no rows"


def _dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an operator that needs no rows.

    Raises:
        ForgottenGradientsError: the operator would write another value. Nothing was written.
        UnsupportedError: the operator would read the value.
    """
    space, _, name = func._schema.name.partition("::")
    writes = func._schema.is_mutable and _values(args[0])
    may_be_done = name in _COPIES or name in _FORMS or space != "aten"
    if name.removeprefix("_foreach_").rstrip("_") in _AVERAGING and _may_average(name, args):
        return _average(func, args, kwargs or {})
    if writes and name == "copy_":
        may_be_done = _whose(args[0]) is _whose(args[1]) if _values(args[1]) else _are_same(args[0], args[1])
    elif name in _SENDING:
        may_be_done = are_there_groups()
    if name == "equal" and (known := _are_equal(*args)) is not None:
        return known
    if not may_be_done:
        value = next(value for arg in (*args, *(kwargs or {}).values()) for value in _values(arg))
        if writes:
            _whose(value).refuse_write()
        _refuse(name, value)
    with no_dispatch():
        done = func(*args, **(kwargs or {}))
        if name not in _COPIES:
            return done
    factors = factors_of(args[0]) if name in ("_to_copy", "clone") else args[0].__dict__.get("_factors")
    return _value(done, args[0], factors)


def _value(number: Tensor, of: HandleValue, factors: Factors | None) -> HandleValue:
    """Return a value that stands for fixed factors; None: for those of its handle, which it is an alias of."""
    with no_dispatch():
        made: Any = Tensor._make_subclass(HandleValue, number)
    made._whose = _whose(of)
    made._factors = factors
    return made


def factors_of(value: Any) -> Factors | None:
    """Return the rows and averages that a value stands for; None: no averages follow the rows."""
    fixed = value.__dict__.get("_factors")
    return _whose(value).factors() if fixed is None else fixed


def _may_average(name: str, args: Any) -> bool:
    """Return whether an operator combines values of rows and averages: by factors, or with one another."""
    one, other = map(_parts, args[:2])
    if "mul" in name or "div" in name:
        fits = not any(isinstance(part, Tensor) and (part.dim() or _values(part)) for part in other)
    else:
        fits = len(one) == len(other) and all(len(_values(pair)) != 1 for pair in zip(one, other, strict=True))
    return fits and None not in map(factors_of, _values((*one, *other)))


def _average(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the factors of rows and averages, in place of their values."""
    known = list({key: None for arg in args for value in _values(arg) for key in factors_of(value) or ()})
    is_alone = not isinstance(args[0], list | tuple)  # else dense weights are among the tensors

    def vector_of(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [vector_of(part) for part in arg]
        if not isinstance(arg, HandleValue):
            return arg.double() if isinstance(arg, Tensor) and is_alone else arg
        found = factors_of(arg) or {}
        return torch.tensor([found.get(key, 0.0) for key in known], dtype=torch.float64, device=arg.device)

    given = [vector_of(arg) for arg in args]
    with no_dispatch():
        done, writes = func(*given, **kwargs), func._schema.is_mutable
    results = list[Any](_parts(args[0]))
    for place, (target, vector) in enumerate(zip(results, _parts(given[0] if writes else done), strict=True)):
        if not isinstance(target, HandleValue):
            results[place] = target if writes else vector
            continue
        factors = {key: factor for key, factor in zip(known, vector.tolist(), strict=True) if factor}
        if not writes:
            results[place] = _value(torch.zeros_like(vector[0], dtype=torch.float32), target, factors)
        elif target.__dict__.get("_factors") is None:
            _whose(target).write(factors)
        else:
            cast(Any, target)._factors = factors
    if done is None:  # an operator on many tensors in place
        return None
    return results[0] if is_alone else results


def _whose(value: Any) -> Any:
    """Return the handle of a value."""
    return getattr(value, "_whose", value)


def _values(arg: Any) -> list[HandleValue]:
    return [part for part in _parts(arg) if isinstance(part, HandleValue)]


def _parts(arg: Any) -> Sequence[Any]:
    return arg if isinstance(arg, list | tuple) else (arg,)


def _are_equal(*tensors: Any) -> bool | None:
    """Return the result of `torch.equal` if it needs no values; else None.

    Code finds a parameter in a list by `torch.equal`, as Lightning's `BaseFinetuning` does.
    """
    if tensors[0] is tensors[1]:
        return True
    shapes = []
    for each in tensors:
        table = getattr(_whose(each), "table", None)  # for a handle
        shapes.append(tuple(each.shape) if table is None else (table.rows, table.dim))
    return None if shapes[0] == shapes[1] else False


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two values have the same bits: -0.0 is not 0.0."""
    with no_dispatch():
        parts = [part.detach().reshape(-1).cpu() for part in (one, other)]
        return parts[0].dtype == parts[1].dtype and torch.equal(*(part.view(torch.int32) for part in parts))


def _refuse(name: str, value: Any) -> NoReturn:
    name = {"_local_scalar_dense": "item"}.get(name, name)
    raise UnsupportedError(
        f"`{name}` reads the value of the handle of {_whose(value).label}, which only stands for the "
        "rows: they are not in it. Go through ert.dense_parameters(model) in the place of model.parameters(). What is "
        "to be known of rows (a norm, a penalty, a histogram) is that of the batch's, layer(ids), or of "
        "layer.table.export(). Their gradients are clipped by clip_grad_norm_, clip_grad_value_ or "
        "ert.Adam(model, clip_value=...)."
    )
