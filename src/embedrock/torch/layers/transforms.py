"""What a lookup has to do where tensors are not what they seem: in graphs, in transforms of `torch.func`, if jagged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

from embedrock.batch.wrong_ids import Place, in_array, in_jagged
from embedrock.errors import UnsupportedError

Method = TypeVar("Method", bound=Callable[..., Any])


def on_plain_tensors(forward: Method) -> Method:
    """Let a layer's method see real tensors only, wherever it is called.

    In a graph of `torch.compile` the layer's `in_graph` stands for it, and a transform of `torch.func` takes the rows
    as constants: neither could see the rows change.
    """

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _check_not_exported(self)
            return self.in_graph(*args, **kwargs)
        if _functorch.peek_interpreter_stack() is None:
            return forward(self, *args, **kwargs)
        _check_frozen(self.handle)
        label = _label(self.handle)
        plain = [_plain(value, label) for value in args]
        named = {name: _plain(value, label) for name, value in kwargs.items()}
        with torch._C._DisableFuncTorch():  # the rows are constants
            return forward(self, *plain, **named)

    return call  # pyright: ignore[reportReturnType]


def are_plain() -> bool:
    """Return whether tensors are what they seem: no graph is being made, and no transform of `torch.func` runs."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is None


# PyTorch before 2.7 has no such function.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: not torch.compiler.is_dynamo_compiling())


def _check_not_exported(layer: Any) -> None:
    if _is_exporting():
        raise UnsupportedError(
            f"{layer.label} cannot be exported (torch.export, torch.onnx): its rows are in a table, not in the model. "
            "Export ert.freeze(model), which has plain layers; torch.compile takes the model as it is."
        )


def _check_frozen(handle: Any) -> None:
    if handle.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"rows of {_label(handle)} cannot train inside of torch.func's transforms (vmap, grad, jacrev, ...). Look "
            "them up outside, `rows = layer(ids)`, and pass the rows to the function; or freeze them by "
            "requires_grad_(False)."
        )


def _label(handle: Any) -> str:
    """Return what errors call the layer; functional_call may have put a tensor in the place of its handle."""
    return getattr(handle, "label", "an embedding layer")


def _plain(value: Any, label: str) -> Any:
    """Return the tensor inside of a transform's tensor."""
    while isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            raise UnsupportedError(
                f"{label} cannot be looked up for ids that vmap goes over. Layers take ids of any shape: look them up "
                "outside, `rows = layer(ids)`, and let vmap go over the rows."
            )
        value = _functorch.get_unwrapped(value)
    return value


def is_jagged(ids: Any) -> bool:
    """Return whether ids are a nested tensor (n, j) with layout `torch.jagged`."""
    return isinstance(ids, Tensor) and ids.is_nested and ids.layout is torch.jagged and ids.dim() == 2


def flat_ids(ids: Tensor) -> Tensor:
    """Return the values of a jagged tensor; others as they are."""
    return ids.contiguous().values() if is_jagged(ids) else ids


def place_in(ids: Tensor) -> Place:
    """Return what says where one of the ids of a tensor is."""
    return in_jagged(offsets_of(ids.contiguous()).cpu().numpy()) if is_jagged(ids) else in_array(ids.shape)


def jagged_like(ids: Tensor, rows: Tensor) -> Tensor:
    """Return rows, one for each id of a jagged tensor, as a jagged tensor like it: (n, j, dim)."""
    return torch.nested.nested_tensor_from_jagged(rows, offsets_of(ids))


def offsets_of(ids: Any) -> Tensor:
    """Return where the parts of jagged ids start, and where the last ends: int64 (n + 1,)."""
    return ids.offsets()
