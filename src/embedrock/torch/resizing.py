"""`model.resize_token_embeddings` of transformers, for models whose input embeddings are ours.

transformers makes a larger `nn.Embedding`, and draws its new rows. Here it does so with a copy of the layer's rows, so
that the draws are the same. Then the layer grows, or shrinks, and gets the new rows. The model keeps the layer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from embedrock.errors import UnsupportedError
from embedrock.frontend.arguments import lags_behind
from embedrock.initializers import FromArray
from embedrock.system.scopes import on_failure
from embedrock.torch.layers.row_layer import RowLayer

_resizable = set[type]()  # kinds of models whose method was replaced


def _follow_transformers(*registered: Any) -> None:
    """Replace the method of transformers' models, once there are any. PyTorch calls this for each new submodule."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is not None and kind not in _resizable:
        _resizable.add(kind)
        kind.resize_token_embeddings = _resizing(kind.resize_token_embeddings)


register_module_module_registration_hook(_follow_transformers)


def _resizing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `PreTrainedModel.resize_token_embeddings`, also for models whose input embeddings are a `RowLayer`."""

    @functools.wraps(method)
    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
        layer = self.get_input_embeddings()
        if not isinstance(layer, RowLayer):
            return method(self, *args, **options)
        twin = _twin(layer)
        own: dict[str, Any] = {
            "get_input_embeddings": lambda: twin,
            "set_input_embeddings": functools.partial(_take, layer),
            "tie_weights": lambda *args, **options: None,  # a head of its own keeps its rows
        }
        head = self.get_output_embeddings()
        if head is not None and any(getattr(each, "_table", None) is layer.table for each in head.modules()):
            own["get_output_embeddings"] = lambda: None  # it grows with the layer
        with _methods(self, own):
            method(self, *args, **options)
        if type(self).resize_token_embeddings is resize_token_embeddings:
            return layer
        return nn.Embedding(*twin.weight.shape, device="meta")  # overrides such as Bart's read the shape of its weight

    return resize_token_embeddings


@contextmanager
def _methods(model: nn.Module, methods: dict[str, Any]) -> Iterator[None]:
    before = {name: model.__dict__[name] for name in methods if name in model.__dict__}
    model.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del model.__dict__[name]
        model.__dict__.update(before)


def _twin(layer: RowLayer) -> nn.Embedding:
    """Return an `nn.Embedding` of a layer's rows."""
    label, table = layer.handle.label, layer.table
    if table.rows is None:
        raise UnsupportedError(
            f"{label} needs no resize_token_embeddings: its table takes any int64 as an id. Set "
            "model.config.vocab_size, and resize the head alone."
        )
    if lags_behind(table.rule):
        raise UnsupportedError(
            f"{label} cannot be resized under {table.rule}, where rows lag behind: new rows could not be written. Call "
            "layer.grow(n), for new rows of first values."
        )
    rows = layer.handle.rows(np.arange(table.rows))
    weight = torch.from_numpy(rows).to(layer.handle.device, layer.dtype)
    return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=layer.padding_idx)


def _take(layer: RowLayer, resized: nn.Embedding) -> None:
    """Grow or shrink a layer to the rows of a resized twin."""
    had, count = layer.table.rows, resized.num_embeddings
    assert had is not None  # `_twin` checked it
    if count < had:
        layer.padding_idx = resized.padding_idx
        layer.shrink(count)
    elif count > had:
        init = layer.table.spec.init
        if isinstance(init, FromArray):  # its new rows are all written
            more = np.zeros((count - had, layer.embedding_dim), init.array.dtype)
            init = type(init)(np.concatenate([init.array, more]))
        layer.grow(count, init if isinstance(init, FromArray) else None)
        with on_failure(lambda: layer.shrink(had)):
            layer.write_rows(resized.weight[had:], had)
