"""`HandleGradient`: the number in ``handle.grad``, linked to the row gradients that it represents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._mode_utils import no_dispatch

from embedrock.errors import UnsupportedError
from embedrock.system import forks
from embedrock.table.event_time import newer
from embedrock.torch.training.executor import Executor, Gradients, JointGradients
from embedrock.torch.training.ranks import are_there_groups

without_overrides = torch._C.DisableTorchFunctionSubclass


class _Proxied:
    """Gradients behind a number and all of its views: `rows` of `owner`."""

    __slots__ = ("owner", "rows")

    def __init__(self, rows: Gradients | None, owner: object) -> None:
        self.rows, self.owner = rows, owner


class HandleGradient(Tensor):
    """L2 norm of row gradients, as a scalar tensor that acts on the gradients.

    - A norm of any order, as in `torch.nn.utils.clip_grad_norm_`, is the norm of the row gradients.
    - Clamping it, as `torch.nn.utils.clip_grad_value_` does, clamps each element of the gradients.
    - Multiplying it, in place or not, multiplies the gradients.
    - Functions that row gradients cannot follow raise an error.

    All else, such as ``handle.grad.item()``, acts on the number.
    """

    _behind: _Proxied

    @staticmethod
    def show(rows: Gradients, number: Tensor, owner: object) -> HandleGradient:
        """Set a scalar tensor to the norm of row gradients. Return it, or an alias, linked to the gradients."""
        if type(number) is not HandleGradient:
            is_spare = bool(rows.spare) and number.data_ptr() == rows.spare[0].data_ptr()
            return _as_gradient(rows.spare[1].detach() if is_spare else number.fill_(rows.shown), _Proxied(rows, owner))
        number._behind.rows = rows
        with without_overrides():
            number.fill_(rows.shown)
        return number

    def rows(self) -> Gradients | None:
        """Return the gradients, scaled as the number was; None if the factor is zero."""
        behind = self._behind
        if behind.rows is not None:
            with without_overrides():
                behind.rows = behind.rows.rescaled_by(self)
        return behind.rows

    def belongs_to(self, owner: object) -> bool:
        """Return whether the number represents gradients of `owner`."""
        return self._behind.owner is owner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in _ANSWERS:
            return _ANSWERS[name](func, *args, **(kwargs or {}))
        if _loses_rows(name, func, args, kwargs or {}):
            _refuse(name)
        with without_overrides():
            done = func(*args, **(kwargs or {}))
        if name in _WRITES:
            _follow(name, args, kwargs or {})
            return done
        source = _source(name, args)
        if source is not None and type(done) is Tensor:
            if name in _SCALED and (done.shape, done.dtype) == (source.shape, source.dtype):
                return _as_gradient(done, _Proxied(source._behind.rows, source._behind.owner))
            if name == "detach" or func == _DATA:
                return _as_gradient(done, source._behind)
        return GradientBucket.of(done, _moved(name, args)) if name in _MOVED or _is_view(done, args) else done

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse another number. (`set_` does not call `__torch_function__`.)"""
        _refuse("set_")

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return a plain number: rows are not copied."""
        return self._number().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain number."""
        return self._number().__reduce_ex__(protocol)

    def _number(self) -> Tensor:
        with without_overrides():
            return self.as_subclass(Tensor)


class GradientBucket(Tensor):
    """Bucket, or part of one: numbers of several gradients, moved and scaled but not added up."""

    behind: list[_Proxied]  # the gradients; views of one tensor share one list
    viewed: HandleGradient | None  # gradient with the same number in another shape; None: this is a copy

    @staticmethod
    def of(done: Any, args: Any) -> Any:
        """Return a function's result, with tensors linked to the gradients in its arguments."""
        if isinstance(done, list | tuple):
            return type(done)([GradientBucket.of(part, args) for part in done])
        parts = [part for arg in args for part in _tensors(arg)]
        behind = [each for part in parts if isinstance(part, GradientBucket) for each in part.behind]
        behind += [
            _Proxied(part._behind.rows, part._behind.owner) for part in parts if isinstance(part, HandleGradient)
        ]
        if type(done) is not Tensor or not behind:
            return done
        made = Tensor._make_subclass(GradientBucket, done)
        same = next((part for part in parts if _is_view(done, [part])), None)
        made.behind = same.behind if isinstance(same, GradientBucket) else behind
        made.viewed = _viewed(same) if isinstance(_viewed(same), HandleGradient) else None
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        on = *map(_viewed, args[:1]), *args[1:]
        named = {key: _viewed(value) for key, value in (kwargs or {}).items()}
        if _loses_rows(name, func, on, named):
            _refuse(name)
        with without_overrides():
            done = func(*args, **(kwargs or {}))
        if name in _WRITES:
            _follow(name, on, named)
        if name in _WRITES or _changes(name, func):
            for part in _tensors(args[0] if args else ()):
                if isinstance(part, GradientBucket) and part.viewed is None:
                    part.behind.clear()  # it is no longer a share of gradients
            return done
        is_scaled = name in _SCALED and sum(isinstance(arg, GradientBucket | HandleGradient) for arg in args) == 1
        is_share = is_scaled or name in _MOVED or _is_view(done, args)
        return GradientBucket.of(done, args if is_scaled else _moved(name, args)) if is_share else done


# So PyTorch's utilities take lists with a `HandleGradient` as quickly as other lists.
_foreach_utils._foreach_supported_types.append(HandleGradient)

ROUNDING = 2.0**-20  # relative loss of a number in a copy

_DATA = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
# Functions that return a new number, whose gradients are scaled like it.
_SCALED = frozenset({
    "clone", "mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide", "true_divide", "neg", "__neg__",
    "to", "cpu", "cuda",
})  # fmt: skip
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply"})
# In-place functions that rows can follow, or that change no element.
_FOLLOWED = frozenset({
    *(name + "_" for name in ("mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "zero", "detach")),
    *(f"_foreach_{name}_" for name in ("mul", "div", "neg", "zero")), "requires_grad_", "__imul__", "__itruediv__",
    "__idiv__", "_amp_foreach_non_finite_check_and_unscale_",
})  # fmt: skip
# Functions that move numbers.
_MOVED = frozenset({
    "__getitem__", "bfloat16", "cat", "chunk", "contiguous", "clone", "concat", "cpu", "cuda", "detach", "double",
    "expand", "flatten", "flatten_dense_tensors", "float", "half", "narrow", "permute", "ravel", "reshape",
    "reshape_as", "select", "split", "squeeze", "stack", "t", "to", "unbind", "unflatten_dense_tensors", "unsqueeze",
    "view", "view_as", "where",
})  # fmt: skip
_WRITES = frozenset({"copy_", "fill_", "__setitem__", "_foreach_copy_"})  # rows may follow: see `_stands_for_rows`
_IN_PLACE = frozenset({"__iadd__", "__isub__", "__ipow__", "__imod__", "__ifloordiv__"})
# Functions that combine gradients of several backwards.
_SUMS = frozenset({"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "subtract", "_foreach_add",
                   "_foreach_sub", "stack", "cat", "lerp", "dot"})  # fmt: skip


def _as_gradient(number: Tensor, behind: _Proxied) -> HandleGradient:
    made = Tensor._make_subclass(HandleGradient, number)
    made._behind = behind
    return made


def _source(name: str, args: Any) -> HandleGradient | None:
    """Return the gradient among a function's arguments: the first one, or either factor of a product."""
    ours = [part for part in args[: 2 if name in _PRODUCTS else 1] if isinstance(part, HandleGradient)]
    return ours[0] if len(ours) == 1 else None


def _moved(name: str, args: Any) -> Any:
    """Return the arguments that a function moves. Other arguments, for instance of `view_as`, only give a shape."""
    return args if name == "where" else args[:1]


def _is_view(done: Any, args: Any) -> bool:
    """Return whether a function's result shares the memory of its first argument."""
    if not (args and isinstance(done, Tensor) and isinstance(args[0], Tensor)) or done is args[0]:
        return False
    return done.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()


def _viewed(part: Any) -> Any:
    """Replace buckets by the gradients that they view. All else stays as it is."""
    if isinstance(part, list | tuple):
        return [_viewed(each) for each in part]
    return part.viewed if isinstance(part, GradientBucket) and part.viewed is not None else part


def _follow(name: str, args: Any, kwargs: Any) -> None:
    for gradient, value in _written(name, args, kwargs):
        if isinstance(value, HandleGradient):
            gradient._behind.rows = value.rows()


def _tensors(tensors: Any) -> Any:
    return tensors if isinstance(tensors, list | tuple) else (tensors,)


def _refuse(name: str) -> NoReturn:
    raise UnsupportedError(
        f"`{name}` cannot be done to handle.grad, a number that stands for the gradients of all rows: they can "
        "be multiplied, clamped and zeroed through it. Gradients of several backwards add up by themselves: "
        "call backward() again without zero_grad(), or of a sum of losses, weighted as you like. To change "
        "one otherwise, change the loss, or the gradient of the layer's output by a hook on it; weight decay "
        "of rows is that of ert.AdamW."
    )


def _loses_rows(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether rows cannot follow a function that computes with the numbers, or writes into them."""
    if "out" in kwargs and _ours([kwargs["out"]]):
        return True
    if name in _WRITES:
        return not all(_stands_for_rows(gradient, value) for gradient, value in _written(name, args, kwargs))
    if name in _SUMS:
        ours = {id(part._behind.owner): part for part in _ours(args)}
        return any(ours[id(part._behind.owner)]._behind.rows is not part._behind.rows for part in _ours(args))
    return bool(_changes(name, func) and _ours(args[:1]))


def _changes(name: str, func: Any) -> bool:
    """Return whether a function changes its first argument in a way that rows cannot follow."""
    return name in _IN_PLACE or func == _SET_DATA or (name[-1] == "_" != name[-2] and name not in _FOLLOWED)


def _ours(args: Any) -> list[HandleGradient]:
    parts = [part for arg in args for part in _tensors(arg)]
    return [part for part in parts if isinstance(part, HandleGradient)]


def _written(name: str, args: Any, kwargs: Any) -> list[tuple[HandleGradient, Any]]:
    """Return the gradients that a function writes into, each with the new value."""
    value = next(iter(kwargs.values())) if len(args) < 2 else args[-1 if name == "__setitem__" else 1]
    several = name == "_foreach_copy_"
    pairs = zip(args[0], value, strict=True) if several else [(args[0], value)]
    return [(gradient, value) for gradient, value in pairs if isinstance(gradient, HandleGradient)]


def _stands_for_rows(gradient: HandleGradient, value: Any) -> bool:
    """Return whether rows can follow when a value replaces their number.

    The value may be the number of other gradients of these rows. It may be a share of their gradients, as an all-reduce
    in buckets writes. It may also be zero, or not finite. With several processes, it may be the sum of the numbers of
    all processes, or a part of the sum.
    """
    if isinstance(value, HandleGradient):
        return value.belongs_to(gradient._behind.owner)
    if isinstance(value, GradientBucket):
        own = [each.rows for each in value.behind if each.owner is gradient._behind.owner]
        return bool(own) and all(rows is gradient._behind.rows for rows in own)
    with without_overrides():
        number, shown = float(value), abs(float(gradient))
    ranks = torch.distributed.get_world_size() if are_there_groups() else 0
    return number == 0 or not math.isfinite(number) or 0 < number <= shown * ranks * (1 + ROUNDING)


def _norm(gradient: HandleGradient, order: Any, dtype: torch.dtype | None) -> Tensor:
    power = 2.0 if order in ("fro", None) else float(order)
    if power < 0:
        raise UnsupportedError(
            f"the norm of order {power} of gradients of rows is that of their smallest elements, and most rows have "
            "none. Take an order of 0 or more."
        )
    with without_overrides():
        number = gradient.as_subclass(Tensor)
        if power != 2:
            rows = gradient.rows()
            number = torch.zeros_like(number) if rows is None else torch.as_tensor(rows.vector_norm(power))
        return number.abs().to(gradient.device, dtype or gradient.dtype)


def _answer_norm(func: Any, input: Any, p: Any = 2.0, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:  # noqa: A002
    return _norm(input, kwargs.get("ord", p), dtype)


def _answer_norms(func: Any, tensors: Any, ord: Any = 2.0, dtype: Any = None) -> Any:  # noqa: A002
    with without_overrides():
        plain = list(func(tensors, ord, dtype=dtype))
    norms = zip(tensors, plain, strict=True)
    return tuple(_norm(part, ord, dtype) if isinstance(part, HandleGradient) else norm for part, norm in norms)


def _answer_clamp(func: Any, input: Any, min: Any = None, max: Any = None) -> HandleGradient:  # noqa: A002
    gradient = input if func.__name__.endswith("_") else input.clone()
    bounds = [None if bound is None else float(bound) for bound in (min, max)]
    if (bounds[0] or 0.0) > 0 or (bounds[1] or 0.0) < 0:
        raise UnsupportedError(
            f"gradients of rows cannot be clamped to [{bounds[0]}, {bounds[1]}], which excludes 0: that of most rows "
            "is 0. Clamp to an interval around it."
        )
    rows = gradient.rows()
    return gradient if rows is None else HandleGradient.show(rows.clamped(*bounds), gradient, gradient._behind.owner)


def _answer_clamp_max(func: Any, input: Any, max: Any) -> Any:  # noqa: A002
    return _answer_clamp(func, input, None, max)


def _answer_each(one: Callable[..., Any], func: Any, tensors: Any, bounds: Any) -> Any:
    each = bounds if isinstance(bounds, list | tuple) else [bounds] * len(tensors)
    pairs = list(zip(tensors, each, strict=True))
    plain = [pair for pair in pairs if not isinstance(pair[0], HandleGradient)]
    others = iter((func(*map(list, zip(*plain, strict=True))) if plain else None) or [part for part, _ in plain])
    return [one(func, part, bound) if isinstance(part, HandleGradient) else next(others) for part, bound in pairs]


_CLAMPS = {
    _answer_clamp: ("clamp", "clip", "clamp_min"),
    _answer_clamp_max: ("clamp_max",),
    functools.partial(_answer_each, _answer_clamp): ("_foreach_clamp_min", "_foreach_maximum"),
    functools.partial(_answer_each, _answer_clamp_max): ("_foreach_clamp_max", "_foreach_minimum"),
}
# Functions by name. Functions of torch and methods of tensors share their names.
_ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("linalg_vector_norm", "linalg_norm", "norm"), _answer_norm),
    "_foreach_norm": _answer_norms,
    **{name + end: answer for answer, names in _CLAMPS.items() for name in names for end in ("", "_")},
}


_GRAD: Any = Tensor.grad
number_of: Callable[[Tensor], Any] = _GRAD.__get__  # ``.grad`` of a handle, if other code has seen it
set_number: Callable[[Tensor, Any], None] = _GRAD.__set__


def _number_of(grads: Gradients, device: torch.device) -> Tensor:
    """Return the norm of gradients as a new number. The host does not wait for a GPU."""
    if not isinstance(grads.shown, Tensor):
        return torch.scalar_tensor(float(grads.shown), dtype=torch.float32, device=device)
    own = grads.spare[1].detach()
    return own if own.device == device else own.to(device)


class Pending:
    """Row gradients since the last zeroing. Other code sees their norm (`Gradients.shown`).

    Scaling the number scales the rows' gradients, and zeroing it drops them. So loss scaling, clipping by norm and
    zeroing reach rows that no other code can see. No number is made before other code looks for it.

    Attributes:
        executor: executor of the rows and the gradients.
        joint: gradients of several tables, which have these as number `number`. Other code has not seen them. None: it
            has, or there are none.
        seen: gradients that other code has seen; None without any.
        time: of the newest event of the gradients, in seconds since 1970; None: it is not known.
        arriving: lock of `joint`, for all handles.
    """

    arriving = forks.lock(forks.LockRank.SECTION)

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.joint: JointGradients | None = None
        self.number = 0
        self.seen: Gradients | None = None
        self.time: float | None = None
        self._lock = forks.lock(forks.LockRank.SECTION)

    @property
    def grads(self) -> Gradients | None:
        """The gradients; None without any."""
        joint = self.joint
        return self.seen if joint is None else joint.of(self.number)

    @grads.setter
    def grads(self, grads: Gradients | None) -> None:
        self.seen, self.joint = grads, None

    @property
    def shown(self) -> float | Tensor:
        """Number in place of the gradients."""
        return 0.0 if self.grads is None else self.grads.shown

    def look(self, handle: Tensor) -> None:
        """Set the handle's number to the norm of gradients that other code has not seen."""
        if torch._C._len_torch_dispatch_stack() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), no_dispatch():
                self._look(handle)
        else:
            self._look(handle)

    def _look(self, handle: Tensor) -> None:
        with self.arriving:
            grads, number = self.grads, number_of(handle)
            if self.joint is None or grads is None:
                return
            if number is None:
                set_number(handle, _as_gradient(_number_of(grads, handle.device), _Proxied(grads, self)))
            else:
                set_number(handle, HandleGradient.show(grads, number, self))
            self.grads = grads

    def drop_unless_shown(self, handle: Tensor) -> None:
        """Drop the gradients if the handle has none. Backwards of other threads may add to them."""
        if self.seen is not None and number_of(handle) is None:
            with self._lock:
                if number_of(handle) is None:  # another thread's backward may have shown new gradients
                    self.seen = None

    def follow(self, shown: Tensor | None) -> None:
        """Apply the changes of the number since it was set to the gradients. None: the number is gone."""
        if type(shown) is HandleGradient:
            self.grads = shown.rows()
        elif self.grads is not None:
            self.grads = None if shown is None else self.grads.rescaled_by(shown)

    def show(self, grads: Gradients, number: Tensor, time: float | None) -> HandleGradient:
        """Replace the gradients and their time, and set a number to their norm. Return the number."""
        with self._lock:
            self.grads, self.time = grads, time
            return HandleGradient.show(grads, number, self)

    def add(self, grads: Gradients, shown: Tensor, time: float | None) -> HandleGradient:
        """Add gradients to the pending ones, and set the number to the norm of the sum. Return the number."""
        with self._lock:
            self.follow(shown)
            both = grads if self.grads is None else self.executor.merge(self.grads, grads)
            self.time = time if self.grads is None else newer(self.time, time)
            self.grads = both
            return HandleGradient.show(both, shown, self)
