"""The options of layers: those of their tables, as these declare them, and Keras' own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from embedrock.table.options import LayerOptions, declared, defaults
from embedrock.table.options import shows as shows_options

F = TypeVar("F", bound=Callable[..., Any])

REFUSED = {
    "weights": "use from_pretrained(weights), which copies nothing",
    "lora_rank": "rows are trained themselves. Leave it out",
    "lora_alpha": "rows are trained themselves. Leave it out",
    "quantization_config": 'use dtype="bfloat16" for rows of half the size',
    "input_length": "it is not needed. Leave it out",
    **dict.fromkeys(("input_shape", "batch_shape", "batch_input_shape", "batch_size"), "use keras.Input"),
}
# Of keras.layers.Embedding.
REFUSED_METHODS = {
    "quantize": 'use dtype="bfloat16" for rows of half the size',
    "enable_lora": "rows are trained themselves, and a step touches only those of its batch",
}


class RowLayerOptions(LayerOptions, total=False):
    """Options of `Embedding` and `EmbeddingBag`: those of a table, and those of all layers of Keras."""

    name: str | None
    trainable: bool
    dtype: Any
    autocast: bool
    activity_regularizer: Any


OF_KERAS = RowLayerOptions.__annotations__.keys() - LayerOptions.__annotations__.keys()
# That are not the table's, in their order.
OWN = (
    *("input_dim", "output_dim", "embeddings_initializer", "embeddings_regularizer", "embeddings_constraint"),
    *("mask_zero", "mode", "group", "sharded", "wire"),
)
KNOWN = (*OWN, *declared(LayerOptions), *OF_KERAS)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the options of a layer's table, with defaults; those of Keras that were given; and the unknown ones."""
    known = declared(LayerOptions)
    of_table = {**defaults(LayerOptions), **{name: value for name, value in options.items() if name in known}}
    of_keras = {name: value for name, value in options.items() if name in OF_KERAS}
    return of_table, of_keras, {name: value for name, value in options.items() if name not in {*known, *OF_KERAS}}


def shows(function: F) -> F:
    """Give what makes a layer a signature that names the options of its table, and has room for others."""
    others = [p for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    shown: Any = shows_options(LayerOptions)(function)
    signature = inspect.signature(shown)
    shown.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *others])
    return shown


def shows_but(*left_out: str) -> Callable[[F], F]:
    """Do what `shows` does, without some of the options."""

    def shown(function: F) -> F:
        made: Any = shows(function)
        signature = inspect.signature(made)
        kept = [each for name, each in signature.parameters.items() if name not in left_out]
        made.__signature__ = signature.replace(parameters=kept)
        return made

    return shown
