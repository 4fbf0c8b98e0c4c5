"""`model.resize_token_embeddings` of transformers, for models whose input embeddings are ours.

transformers resizes a copy of the layer's rows, an `nn.Embedding`. So new rows are drawn as always. The layer then
grows or shrinks, gets the new rows, and stays in the model.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from embedrock.errors import UnsupportedError
from embedrock.initializers import FromArray
from embedrock.system.scopes import on_failure
from embedrock.torch.layers.row_layer import RowLayer

_known = set[type]()  # kinds of models whose method was replaced


def _follow_transformers(*registered: Any) -> None:
    """Replace the method of transformers' models, if they were imported. PyTorch calls this for each new submodule."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is not None and kind not in _known:
        _known.add(kind)
        kind.resize_token_embeddings = _resizing(kind.resize_token_embeddings)


register_module_module_registration_hook(_follow_transformers)


def _resizing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resize_token_embeddings(self: Any, *args: Any, **options: Any) -> Any:
        layer = self.get_input_embeddings()
        if not isinstance(layer, RowLayer):
            return method(self, *args, **options)
        twin, head, own = _twin(layer), self.get_output_embeddings(), vars(self)
        own["get_input_embeddings"], own["set_input_embeddings"] = lambda: twin, functools.partial(_take, layer)
        own["tie_weights"] = lambda *args, **options: None  # a head has rows of its own, or shares the table
        if head is not None and any(getattr(each, "_table", None) is layer.table for each in head.modules()):
            own["get_output_embeddings"] = lambda: None  # nothing to resize
        try:
            method(self, *args, **options)
        finally:
            for name in ("get_input_embeddings", "set_input_embeddings", "tie_weights", "get_output_embeddings"):
                own.pop(name, None)
        # Methods of subclasses, such as BART's, call this one, and read the shape of `weight`.
        is_inner = type(self).resize_token_embeddings is not resize_token_embeddings
        return nn.Embedding(twin.num_embeddings, twin.embedding_dim, device="meta") if is_inner else layer

    return resize_token_embeddings


def _twin(layer: RowLayer) -> nn.Embedding:
    if (count := layer.num_embeddings) is None:
        raise UnsupportedError(
            f"{layer.handle.label} takes any int64 as an id, and needs no resize_token_embeddings. Set "
            "model.config.vocab_size, and resize the head alone."
        )
    weight = torch.from_numpy(layer.handle.rows(np.arange(count))).to(layer.handle.device, layer.dtype)
    return nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=layer.padding_idx)


def _take(layer: RowLayer, resized: nn.Embedding) -> None:
    """Give a layer the size, and the new rows, of its resized twin."""
    had, count, init = layer.num_embeddings or 0, resized.num_embeddings, layer.table.spec.init
    if count < had:
        layer.padding_idx = resized.padding_idx
        layer.shrink(count)
    elif count > had:
        more = None
        if isinstance(init, FromArray):  # its further rows are written over
            zeros = np.zeros((count - had, layer.embedding_dim), init.array.dtype)
            more = type(init)(np.concatenate([init.array, zeros]))
        layer.grow(count, more)
        with on_failure(lambda: layer.shrink(had)):
            layer.write_rows(np.arange(had, len(resized.weight)), resized.weight[had:])
