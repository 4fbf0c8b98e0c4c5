"""`EmbeddingBagCollection` and `EmbeddingCollection`: layers of many features, looked up in one call."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from embedrock.errors import ArgumentError, IdError, IdTypeError, counted, did_you_mean, listed, not_one_of
from embedrock.initializers import Initializer
from embedrock.optimizers import Rule
from embedrock.system.notebook import PublicNames
from embedrock.table.group import Group
from embedrock.torch.layers.bag import EmbeddingBag
from embedrock.torch.layers.embedding import Embedding, are_plain
from embedrock.torch.layers.features import BagInput, KeyedFeatures, check_names, is_keyed, parts_of
from embedrock.torch.layers.row_layer import HOOKS, RowLayer
from embedrock.torch.training.generation import generation
from embedrock.torch.training.lookup import DeviceLookupState, HostLookup, LayerLayout, looked_up
from embedrock.torch.training.parameters import device_of
from embedrock.torch.training.ranks import are_there_groups

NOT_OF_LAYERS = ("feature_names", "options", "pooling")  # fields of a config


class PoolingType(StrEnum):
    """Kinds of pooling of an `EmbeddingBagConfig`, under TorchRec's name. Each equals its string, such as "sum".

    Example:
        >>> import embedrock.torch as ert
        >>> ert.EmbeddingBagConfig(10**6, 32, "genre", pooling=ert.PoolingType.MEAN).pooling
        'mean'
    """

    SUM = "sum"
    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True)
class EmbeddingConfig:
    """Description of a table of an `EmbeddingCollection`.

    Args:
        num_embeddings: number of rows; None for open ids.
        embedding_dim: weights in a row.
        name: name of the table.
        feature_names: features that look up ids in the table; by default one with the table's name.
        padding_idx, rule, init, seed, dtype: as for `Embedding`.
        options: further arguments of the layer, by name.

    Raises:
        ArgumentError: the name is missing, or features are no names.

    Example:
        >>> import embedrock.torch as ert
        >>> ert.EmbeddingConfig(10**9, 64, "item", feature_names=["clicked", "bought"]).features
        ('clicked', 'bought')
    """

    num_embeddings: int | None
    embedding_dim: int
    name: str
    feature_names: Sequence[str] = ()
    padding_idx: int | None = None
    rule: Rule | None = None
    init: Initializer | str | Callable[..., Any] | None = None
    seed: int | None = None
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, names = f"ert.{type(self).__name__}", self.feature_names
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ArgumentError(f"`name` of {kind} must be a name without dots: got {self.name!r}.")
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ArgumentError(f"`feature_names` of {kind} must be a list of names: got {names!r}.")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that look up ids in the table."""
        return tuple(self.feature_names) or (self.name,)

    def arguments(self, group: Group) -> dict[str, Any]:
        """Return the arguments of a layer whose table is in a group, by name."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in NOT_OF_LAYERS}
        return {**own, "group": group, **self.options}


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """Description of a table of an `EmbeddingBagCollection`.

    Args:
        pooling: "sum", "mean" or "max" of the rows of a bag, or a `PoolingType`, also TorchRec's. The default is "sum"
            as in TorchRec, not "mean" as in `torch.nn.EmbeddingBag`.
        num_embeddings, embedding_dim, name, feature_names: as for `EmbeddingConfig`.
        padding_idx, rule, init, seed, dtype: as for `EmbeddingBag`.
        options: further arguments of the layer, by name.

    Example:
        >>> import embedrock.torch as ert
        >>> ert.EmbeddingBagConfig(10**6, 32, "genre", pooling="mean").features
        ('genre',)
    """

    pooling: Any = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        named = getattr(self.pooling, "value", self.pooling)  # TorchRec's PoolingType has names such as "SUM"
        object.__setattr__(self, "pooling", str(named).lower() if isinstance(named, str) else named)
        if self.pooling not in list(PoolingType):
            raise not_one_of("`pooling` of ert.EmbeddingBagConfig", self.pooling, PoolingType)

    def arguments(self, group: Group) -> dict[str, Any]:
        return {**super().arguments(group), "mode": self.pooling}


Result = TypeVar("Result")
Features = Mapping[str, Any] | KeyedFeatures


class Layers(nn.ModuleDict):
    """Layers by any name, also by those that `nn.ModuleDict` refuses, such as "items" or "type"."""

    def add_module(self, name: str, module: Any) -> None:
        self._modules[name] = module


class Share(NamedTuple):
    """Features of a collection that one call looks up."""

    layers: dict[str, Any]  # of the features, by the names of their outputs
    each: Sequence[Any]  # the layers
    layout: LayerLayout


class Route(NamedTuple):
    """How a collection looks up its features."""

    generation: int  # of the layers and handles, as of which it holds
    container: dict[str, Any]  # layers by name
    layers: dict[str, Any]  # layers of the outputs
    shares: list[Share]  # features that are looked up together
    alone: list[str]  # outputs of layers that are called by themselves
    hooks: list[Any]  # of the layers, by the layer and the kind of hook

    @property
    def may_be_kept(self) -> bool:
        """Return whether a later lookup can tell that something has changed."""
        return not any(self.hooks) and not are_there_groups()

    def is_current(self, container: dict[str, Any]) -> bool:
        is_same = self.generation == generation.now and self.container == container
        if not is_same or any(self.hooks) or are_there_groups():
            return False
        return False not in [share.layout.has_its_handles() for share in self.shares]


class Collection(PublicNames, nn.Module):
    """Base of both collections, which describe the arguments."""

    kind: ClassVar[str]
    container: ClassVar[str]  # attribute with the layers
    layer_type: ClassVar[type[Embedding | EmbeddingBag]]
    config_type: ClassVar[type[EmbeddingConfig]]
    _known_route: Route | None = None
    _unlisted = "config_type container kind layer_type"

    def __init__(
        self,
        tables: Mapping[str, RowLayer] | Sequence[EmbeddingConfig],
        *,
        group: Group | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self._places: list[int] | None = None  # input feature of each output; None: one output for each feature
        by_feature = self._from_layers(tables) if isinstance(tables, Mapping) else self._from_configs(tables, group)
        names = self._names(by_feature)
        self._name_of = {feature: names[layer] for feature, layer in by_feature.items()}
        self._has_end = {name: getattr(layer, "include_last_offset", False) for name, layer in by_feature.items()}
        self.add_module(self.container, Layers({name: layer for layer, name in names.items()}))
        if self._places is None:
            self._inputs = self.features
        if device is not None:
            self.to(device_of(self.kind, device))

    def _from_layers(self, layers: Mapping[str, RowLayer]) -> dict[str, RowLayer]:
        are_names = all(isinstance(feature, str) for feature in layers)
        if not (layers and are_names and all(isinstance(layer, self.layer_type) for layer in layers.values())):
            raise self._wrong(layers)
        return dict(layers)

    def _from_configs(self, tables: Sequence[EmbeddingConfig], group: Group | None) -> dict[str, RowLayer]:
        is_list = isinstance(tables, list | tuple) and tables
        if not is_list or not all(type(config) is self.config_type for config in tables):
            raise self._wrong(tables)
        tables_of = Counter(feature for config in tables for feature in config.features)
        names = [("table", Counter(config.name for config in tables))]
        names += [(f"feature of table {config.name!r}", Counter(config.features)) for config in tables]
        for what, counts in names:
            if twice := sorted(name for name, count in counts.items() if count > 1):
                raise ArgumentError(f"each {what} of {self.kind} must be named once: got {twice[0]!r} twice.")
        looked_up = [(feature, config) for config in tables for feature in config.features]
        outputs = [f"{name}@{config.name}" if tables_of[name] > 1 else name for name, config in looked_up]
        if len(tables_of) < len(outputs):
            self._inputs = tuple(tables_of)
            self._places = [self._inputs.index(feature) for feature, _ in looked_up]
        own = Group() if group is None else group
        made = {config.name: self.layer_type(**config.arguments(own)) for config in tables}
        return {output: made[config.name] for output, (_, config) in zip(outputs, looked_up, strict=True)}

    def _wrong(self, tables: Any) -> ArgumentError:
        layer, config = f"ert.{self.layer_type.__name__}", f"ert.{self.config_type.__name__}"
        return ArgumentError(
            f"`tables` of {self.kind} must be a dict from features to {layer} layers, or a list of {config}s, of "
            f"at least one: got {reprlib.repr(tables)}."
        )

    def _names(self, by_feature: Mapping[str, RowLayer]) -> dict[RowLayer, str]:
        """Return the name of each layer: its table's name, else its first feature."""
        names: dict[RowLayer, str] = {}
        for feature, layer in by_feature.items():
            name = (layer.table.name or feature).replace(".", "_")
            if layer not in names and name in names.values():
                name = feature.replace(".", "_")
            if layer not in names and name in names.values():
                raise ArgumentError(f"two layers of {self.kind} would be called {name!r}. Call a feature otherwise.")
            names.setdefault(layer, name)
        return names

    @property
    def features(self) -> tuple[str, ...]:
        """Features in the order of the outputs. A feature of several tables has the name ``feature@table`` here."""
        return tuple(self._name_of)

    def layer_of(self, feature: str) -> Any:
        """Return the layer that looks up a feature's ids."""
        if feature not in self._name_of:
            has = f"it has {listed(self.features)}.{did_you_mean(feature, self.features)}"
            raise ArgumentError(f"{self.kind} has no feature {feature!r}: {has}")
        return self._container[self._name_of[feature]]

    @property
    def _container(self) -> dict[str, Any]:
        """Layers by name, without the microsecond that `nn.Module` takes for an attribute."""
        container = self._modules[self.container]
        assert container is not None
        return container._modules

    def extra_repr(self) -> str:
        others = {feature: name for feature, name in self._name_of.items() if feature != name}
        return ", ".join(f"{feature!r} in {name!r}" for feature, name in others.items())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known_route": None}  # a copy has layers of its own

    def _route(self) -> Route:
        """Return how the features are looked up now."""
        layers = self._container
        if not are_plain():
            return self._resolved(layers, 0)
        known = self._known_route
        if known is None or not known.is_current(layers):
            known = self._resolved(layers, generation.now)
            self._known_route = known if known.may_be_kept else None
        return known

    def _resolved(self, container: dict[str, Any], now: int) -> Route:
        """Find the features of each joint lookup: see `Executor.joins`."""
        layers = {feature: container[name] for feature, name in self._name_of.items()}
        if not are_plain():
            return Route(now, container, layers, [], list(layers), [])
        joint: dict[Any, dict[str, Any]] = {}
        for feature, layer in layers.items():
            is_own = isinstance(layer, RowLayer) and type(layer).forward is self.layer_type.forward
            joins = layer.joined_by() if is_own and not any(map(vars(layer).get, HOOKS)) else None
            if joins is not None:
                joint.setdefault(joins, {})[feature] = layer
        shares = [Share(own, each := list(own.values()), LayerLayout(now, each)) for own in joint.values()]
        alone = [feature for feature in layers if not any(feature in share.layers for share in shares)]
        hooks = [vars(layer).get(name) for layer in container.values() for name in HOOKS]
        return Route(now, dict(container), layers, shares, alone, hooks)

    def _given(self, features: Features) -> dict[str, Any]:
        """Return the input of each output's layer."""
        layer_type, inputs = self.layer_type, self._inputs
        if type(features) is not dict:
            if is_keyed(features):
                parts = self._of_outputs(parts_of(features, inputs, self.kind))
                return {name: layer_type.keyed_input(part, self._has_end[name]) for name, part in parts.items()}
            if not isinstance(features, Mapping):
                raise ArgumentError(
                    f"{self.kind} must be called with a dict by feature, or with a KeyedJaggedTensor: got "
                    f"{type(features).__name__}."
                )
        check_names(list(features), inputs, self.kind)
        given = dict(zip(inputs, map(features.__getitem__, inputs), strict=True))
        if set(map(type, given.values())) != {Tensor}:
            others = [name for name, value in given.items() if type(value) is not Tensor]
            found = self._call_for_each(lambda name: layer_type.feature_input(given[name]), others)
            given |= zip(others, found, strict=True)
        return given if self._places is None else self._of_outputs(list(given.values()))

    def _of_outputs(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the value of each output, from values of the input features."""
        places = range(len(values)) if self._places is None else self._places
        return {feature: values[place] for feature, place in zip(self._name_of, places, strict=True)}

    def _each(self, given: Mapping[str, Any], route: Route, time: Any) -> dict[str, Tensor]:
        """Return the output of each feature. Features of a group take one call."""
        found: dict[str, Tensor] = {}
        for share in route.shares:
            found |= zip(share.layers, self._looked_up(share, given, time), strict=True)
        if route.alone:
            called, layers, at = self.layer_type.called, route.layers, {} if time is None else {"time": time}
            own = {each: at if isinstance(layers[each], RowLayer) else {} for each in route.alone}
            alone = self._call_for_each(lambda each: called(layers[each], given[each], **own[each]), route.alone)
            found |= zip(route.alone, alone, strict=True)
        return {feature: found[feature] for feature in given}

    def _looked_up(
        self, share: Share, given: Mapping[str, Any], time: Any, side_by_side: bool = False
    ) -> Sequence[Tensor]:
        """Return the output of each feature of a share; one of all if that is wished and possible."""
        try:
            return self._read(share, given, time, side_by_side)
        except IdError as error:
            for feature, layer in share.layers.items():
                placed = layer.outside(error, given[feature])
                if placed is not error:
                    raise IdError(f"feature {feature!r}: {placed}") from None
            raise

    def _read(self, share: Share, given: Mapping[str, Any], time: Any, side_by_side: bool) -> Sequence[Tensor]:
        layout, layers, values = share.layout, share.layers, list(map(given.__getitem__, share.layers))
        trained, is_on_host = layout.trained(share.each), layout.features is not None
        newest = layout.newest_event(time, trained)
        if is_on_host and (arrays := layout.plain(values)) is not None:
            return looked_up(HostLookup(layout, trained, arrays, side_by_side).at(newest))
        if not is_on_host:
            plain = layout.ids_on_device(values) if self.layer_type is Embedding else None
            if plain is not None:
                return looked_up(DeviceLookupState(layout, trained, plain).at(newest))
            inputs = self._call_for_each(lambda each: layers[each].gpu_input(given[each]), layers)
            ids, bags, weights = map(list, zip(*inputs, strict=True))
            pooled = None if self.layer_type is Embedding else bags
            outputs = looked_up(DeviceLookupState(layout, trained, ids, pooled, weights).at(newest))
        else:
            inputs = self._call_for_each(lambda each: layers[each].host_input(given[each]), layers)
            ids, bounds, weights = map(list, zip(*inputs, strict=True))
            outputs = looked_up(HostLookup(layout, trained, ids, side_by_side, bounds, weights).at(newest))
        if len(outputs) < len(values):
            return outputs
        return list(map(self.layer_type.shaped, outputs, values))

    @staticmethod
    def _call_for_each(call: Callable[[str], Result], features: Iterable[str]) -> list[Result]:
        """Return the result of a call for each feature. An error names its feature."""
        if torch.compiler.is_compiling():
            return [call(feature) for feature in features]
        found: list[Result] = []
        for feature in features:
            try:
                found.append(call(feature))
            except (ArgumentError, IdError, IdTypeError) as error:
                raise type(error)(f"feature {feature!r}: {error}") from error
        return found


class EmbeddingBagCollection(Collection):
    """Bags of many features in one or more tables, looked up together. The name is TorchRec's.

    Args:
        tables: `EmbeddingBag` layers by feature, or a list of `EmbeddingBagConfig`. One layer may have several
            features.
        group: `er.Group` of tables made from configs; None: a new group, with all of the machine's RAM.
        device: device of the outputs and the rows' handles, as of ``to(device)``. None and "meta": the CPU, where rows
            take no room before they are stepped.

    A feature may be in several configs. As in TorchRec, the names of its outputs are then ``feature@table``.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> bags = ert.EmbeddingBagCollection([
        ...     ert.EmbeddingBagConfig(10**9, 8, "item", feature_names=["clicked", "bought"]),
        ...     ert.EmbeddingBagConfig(24, 8, "hour"),
        ... ])
        >>> clicked = torch.tensor([3, 14, 159]), torch.tensor([0, 2])  # ids, and where each bag begins
        >>> rows = bags({"clicked": clicked, "bought": torch.tensor([[3, 3], [9, 2]]), "hour": torch.tensor([7, 23])})
        >>> {feature: tuple(each.shape) for feature, each in rows.items()}
        {'clicked': (2, 8), 'bought': (2, 8), 'hour': (2, 8)}
    """

    kind, container = "ert.EmbeddingBagCollection", "embedding_bags"
    layer_type, config_type = EmbeddingBag, EmbeddingBagConfig

    def forward(self, features: Features, concatenate: bool = False, time: Any = None) -> Any:
        """Return the pooled rows of all features.

        Args:
            features: dict with the ids of each feature, or TorchRec's `KeyedJaggedTensor`, whose weights are used. Ids
                in a dict are (batch,), one for each sample, or (batch, n). They may also be a nested tensor (batch, j)
                of layout `torch.jagged`. A tuple holds ids (n,), offsets and optional weights, as for
                `EmbeddingBag.forward`.
            concatenate: return one tensor with all features side by side, in order.
            time: times of the batch's events, for all tables: as in `Embedding.forward`.

        Returns:
            A dict of (batch, embedding_dim); with `concatenate`, a tensor (batch, sum of all embedding_dims).

        Raises:
            ArgumentError: the features are others, or their parts do not match.
            UnsupportedError: features of a `KeyedJaggedTensor` have different numbers of bags. Further errors are those
                of `EmbeddingBag.forward`.
        """
        given, route = self._given(features), self._route()
        if not concatenate:
            return self._each(given, route, time)
        try:
            if len(route.shares) != 1 or route.alone:
                return torch.cat(list(self._each(given, route, time).values()), dim=1)
            found = self._looked_up(route.shares[0], given, time, side_by_side=True)
            return found[0] if len(found) == 1 else torch.cat(list(found), dim=1)
        except RuntimeError as error:
            self._check_batch(given, error)
            raise

    def _check_batch(self, given: Mapping[str, Any], error: RuntimeError) -> None:
        counts = dict[int, str]()
        for feature, one in given.items():
            ids, offsets, _ = BagInput.of(one).arguments
            counts.setdefault(len(ids) if offsets is None else len(offsets) - self._has_end[feature], feature)
        if len(counts) > 1:
            bag_counts = ", ".join(f"{counted(count, 'bag')} of {feature!r}" for count, feature in counts.items())
            raise ArgumentError(
                f"{self.kind} can put features side by side (concatenate=True) only where each has as many bags: "
                f"got {bag_counts}. Give each feature as many, or leave concatenate=True out."
            ) from error


class EmbeddingCollection(Collection):
    """Rows for many features in one or more tables, looked up together.

    Args:
        tables: `Embedding` layers by feature, or a list of `EmbeddingConfig`. One layer may have several features.
        group: `er.Group` of tables made from configs; None: a new group, with all of the machine's RAM.
        device: device of the outputs and the rows' handles, as of ``to(device)``. None and "meta": the CPU, where rows
            take no room before they are stepped.

    A feature may be in several configs. As in TorchRec, the names of its outputs are then ``feature@table``.

    Example:
        >>> import torch, embedrock.torch as ert
        >>> rows = ert.EmbeddingCollection({"user": ert.Embedding(10**9, 8), "item": ert.Embedding(10**6, 4)})
        >>> found = rows({"user": torch.tensor([3, 14]), "item": torch.tensor([[1, 5, 9], [2, 6, 5]])})
        >>> {feature: tuple(each.shape) for feature, each in found.items()}
        {'user': (2, 8), 'item': (2, 3, 4)}
    """

    __call__: Callable[..., dict[str, Tensor]]
    kind, container = "ert.EmbeddingCollection", "embeddings"
    layer_type, config_type = Embedding, EmbeddingConfig

    def forward(self, features: Features, time: Any = None) -> dict[str, Tensor]:
        """Return the rows of all features.

        Args:
            features: dict with the ids of each feature, as for `Embedding.forward`; or TorchRec's `KeyedJaggedTensor`.
                Weights of a `KeyedJaggedTensor` are ignored.
            time: times of the batch's events, for all tables: as in `Embedding.forward`.

        Returns:
            A dict of ``ids.shape + (embedding_dim,)``. Nested ids and a `KeyedJaggedTensor` give nested tensors (batch,
            j, embedding_dim).

        Raises:
            ArgumentError: the features are others. Further errors are those of `Embedding.forward`.
        """
        return self._each(self._given(features), self._route(), time)
