"""`EmbeddingCollection`: several layers looked up in one host call. `fuse` puts it into a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from embedrock.errors import ArgumentError, UnsupportedError, listed
from embedrock.keras.layers.row_layer import KerasRowLayer
from embedrock.keras.training.lookup import look_up, whole_seconds


@keras.saving.register_keras_serializable("embedrock")
class EmbeddingCollection(keras.layers.Layer):
    """A layer of embedding layers and bags, by feature: one host call for all lookups, and one for the backward.

    Each host call costs some 0.1 ms, whatever it does, and calls wait for each other.

    Args:
        embeddings: `Embedding` and `EmbeddingBag` layers, by name. A layer may have more than one.
        more: arguments of `keras.layers.Layer`.

    Input: a dict of each layer's input; and `weights`, a dict of the weights of some bags. `time` is for all tables:
    see `Embedding`.
    Output: a dict of each layer's output.

    Example:
        >>> import numpy as np, embedrock.keras as erk
        >>> features = erk.EmbeddingCollection({"user": erk.Embedding(10**9, 8), "genres": erk.EmbeddingBag(100, 4)})
        >>> rows = features({"user": np.array([3, 14]), "genres": np.array([[1, 2], [2, 2]])})
        >>> {name: tuple(out.shape) for name, out in rows.items()}
        {'user': (2, 8), 'genres': (2, 4)}
    """

    def __init__(self, embeddings: Mapping[str, KerasRowLayer], **more: Any) -> None:
        super().__init__(**more)
        is_dict = isinstance(embeddings, Mapping) and embeddings and all(isinstance(name, str) for name in embeddings)
        if not is_dict or not all(isinstance(layer, KerasRowLayer) for layer in embeddings.values()):
            raise ArgumentError(
                "`embeddings` of erk.EmbeddingCollection must be a dict from names to layers, each an erk.Embedding or "
                f"an erk.EmbeddingBag, at least one: got {embeddings!r}."
            )
        self._names, self._members = list(embeddings), list(embeddings.values())
        self.supports_masking = any(layer.supports_masking for layer in self._members)
        self.supports_jit = False  # XLA cannot call the host

    @property
    def embeddings(self) -> dict[str, Any]:
        """The layers, by name."""
        return self._packed(list(self._members))

    def build(self, input_shape: Any = None) -> None:
        for layer in self._members:
            layer.build()
        self.built = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("time") is not None:
            kwargs["time"] = whole_seconds(kwargs["time"], self.name)
        return super().__call__(*args, **kwargs)

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None, time: Any = None) -> Any:
        """Return the output of each layer."""
        weights = {} if weights is None else weights
        if not isinstance(weights, Mapping) or not set(weights) <= set(self._names):
            raise self._misfit("weights", "a dict of some of", weights)
        parts, factors = self._unpacked(inputs), [weights.get(name) for name in self._names]
        each = list(zip(self._members, parts, factors, strict=True))
        requests_by_layer = [layer.ask_all(part, factor) for layer, part, factor in each]
        found = iter(look_up([request for requests in requests_by_layer for request in requests], training, time))
        return self._packed(
            [
                layer.answer_all(part, requests, [next(found) for _ in requests])
                for (layer, part, _), requests in zip(each, requests_by_layer, strict=True)
            ]
        )

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        def mask_of(layer: KerasRowLayer, part: Any) -> Any:
            mask = layer.compute_mask(part, None)
            return keras.tree.map_structure(lambda _: None, part) if mask is None else mask

        return self._of_each(mask_of, inputs)

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._of_each(lambda layer, part: layer.compute_output_spec(part), inputs)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return self._of_each(lambda layer, part: layer.compute_output_shape(part), input_shape)

    def _of_each(self, function: Callable[[KerasRowLayer, Any], Any], inputs: Any) -> dict[str, Any]:
        return self._packed(list(map(function, self._members, self._unpacked(inputs))))

    def get_config(self) -> dict[str, Any]:
        layers = list({id(layer): layer for layer in self._members}.values())
        places = [next(k for k, one in enumerate(layers) if one is layer) for layer in self._members]
        more = {"layers": [keras.saving.serialize_keras_object(layer) for layer in layers]}
        return {**super().get_config(), **more, "embeddings": self._packed(places)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        config = dict(config)
        layers = [keras.saving.deserialize_keras_object(one) for one in config.pop("layers")]
        places = config.pop("embeddings")
        return cls({name: layers[place] for name, place in places.items()}, **config)

    def _packed(self, parts: list[Any]) -> dict[str, Any]:
        return dict(zip(self._names, parts, strict=True))

    def _unpacked(self, inputs: Any) -> list[Any]:
        if isinstance(inputs, Mapping) and set(inputs) == set(self._names):
            return [inputs[name] for name in self._names]
        raise self._misfit("inputs", "a dict of", inputs)

    def _misfit(self, argument: str, wanted: str, given: Any) -> ArgumentError:
        got = f"a dict of {listed(given)}" if isinstance(given, Mapping) else type(given).__name__
        wanted = f"{wanted} {listed(self._names)}"
        return ArgumentError(f"`{argument}` of {self.name!r}, an erk.EmbeddingCollection, must be {wanted}: got {got}.")


def fuse(model: Any) -> Any:
    """Return a functional model with the same layers that looks up the rows of all inputs in one host call.

    Each layer computes the same as before. Lookups that depend on no other lookup become one `EmbeddingCollection`. The
    new model shares all weights with the old one, and must be compiled. Fuse before training: weight files of either
    model do not fit the other.

    Args:
        model: a functional model. Lookups inside models that it calls as layers stay as they are.

    Raises:
        UnsupportedError: the model is subclassed, so its lookups are known only when it runs.

    Example:
        >>> import keras, embedrock.keras as erk
        >>> user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
        >>> dot = keras.layers.Dot(1)([erk.Embedding(10**9, 8)(user), erk.Embedding(10**6, 8)(item)])
        >>> model = erk.fuse(keras.Model([user, item], dot))
        >>> [type(layer).__name__ for layer in model.layers]
        ['InputLayer', 'InputLayer', 'EmbeddingCollection', 'Dot']
    """
    if isinstance(model, keras.Sequential):
        return model  # it has one input, and so one lookup
    if not isinstance(model, keras.Model) or not getattr(model, "_nodes_by_depth", None):
        raise UnsupportedError(
            f"erk.fuse must be given a functional model, keras.Model(inputs, outputs): got {model!r}. In a subclassed "
            "model call one erk.EmbeddingCollection in place of its layers."
        )
    depths = sorted(model._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in model._nodes_by_depth[depth] if not node.is_input]
    by_time: dict[int, list[Any]] = {}  # a collection has one `time`
    for node in _first_lookups(nodes):
        by_time.setdefault(id(node.arguments.kwargs.get("time")), []).append(node)
    together = [own for own in by_time.values() if len(own) > 1]
    lookups = [node for own in together for node in own]
    if not lookups:
        return model
    tensors = {id(tensor): tensor for node in nodes for tensor in (*node.input_tensors, *node.outputs)}
    tensors |= {id(tensor): tensor for tensor in model.inputs}
    changed = {old: new for own in together for old, new in _look_up_together(own).items()}
    for node in nodes:
        if node not in lookups and any(id(tensor) in changed for tensor in node.input_tensors):
            args, kwargs = node.arguments.fill_in(tensors | changed)
            outputs = keras.tree.flatten(node.operation(*args, **kwargs))
            changed |= {id(old): new for old, new in zip(node.outputs, outputs, strict=True)}
    outputs = keras.tree.map_structure(lambda old: (tensors | changed)[id(old)], model._outputs_struct)
    return type(model)(inputs=model._inputs_struct, outputs=outputs, name=model.name)


def _first_lookups(nodes: Sequence[Any]) -> list[Any]:
    """Return the lookup nodes of a model that depend on no other lookup."""
    found, looked_up = [], set()
    for node in nodes:
        is_after = any(id(tensor) in looked_up for tensor in node.input_tensors)
        is_lookup = isinstance(node.operation, KerasRowLayer)
        if is_lookup and not is_after:
            found.append(node)
        if is_lookup or is_after:
            looked_up |= {id(tensor) for tensor in node.outputs}
    return found


def _look_up_together(lookups: Sequence[Any]) -> dict[int, Any]:
    """Call the layers of nodes as one collection. Return its outputs by the ids of the nodes' old outputs."""
    named = {f"{node.operation.name}_{k}": node for k, node in enumerate(lookups)}  # a layer may be called twice
    ids = {name: _argument(node, 0, "inputs") for name, node in named.items()}
    weights = {name: given for name, node in named.items() if (given := _argument(node, 1, "weights")) is not None}
    layers = EmbeddingCollection({name: node.operation for name, node in named.items()})
    more = {"time": time} if (time := lookups[0].arguments.kwargs.get("time")) is not None else {}
    outputs = layers(ids, weights=weights, **more) if weights else layers(ids, **more)
    return {
        id(old): new
        for name, node in named.items()
        for old, new in zip(node.outputs, keras.tree.flatten(outputs[name]), strict=True)
    }


def _argument(node: Any, place: int, name: str) -> Any:
    args, kwargs = node.arguments.args, node.arguments.kwargs
    return args[place] if len(args) > place else kwargs.get(name)
