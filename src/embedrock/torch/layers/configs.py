"""What a table of a collection is made from: `EmbeddingConfig` and `EmbeddingBagConfig`, named as in TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from embedrock.errors import ArgumentError
from embedrock.initializers import Initializer
from embedrock.rules import Rule
from embedrock.table.group import Group
from embedrock.wording import not_one_of

POOLINGS = ("sum", "mean", "max")


@dataclass(frozen=True)
class EmbeddingConfig:
    """Describes a table of an `EmbeddingCollection`.

    Args:
        num_embeddings: number of rows; None for open ids.
        embedding_dim: weights in a row.
        name: of the table.
        feature_names: whose ids are looked up in it; by default one of the table's name.
        padding_idx, rule, init, seed, dtype: as for `Embedding`.
        options: further arguments of the layer, by name.

    Raises:
        ArgumentError: no name, or features that are no names.

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
        """The features whose ids are looked up in the table."""
        return tuple(self.feature_names) or (self.name,)

    def arguments(self, group: Group) -> dict[str, Any]:
        """Return the arguments of a layer on the table in a group, by name."""
        own = {name: getattr(self, name) for name in ("padding_idx", "rule", "init", "seed", "dtype", "name")}
        return {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "group": group,
            **own,
            **self.options,
        }


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """Describes a table of an `EmbeddingBagCollection`.

    Args:
        pooling: "sum", "mean" or "max" of the rows of a bag, or TorchRec's `PoolingType`. ("sum" by default as in
            TorchRec, and not "mean" as in `torch.nn.EmbeddingBag`.)
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
        named = getattr(self.pooling, "value", self.pooling)  # of TorchRec's PoolingType, "SUM"
        object.__setattr__(self, "pooling", named.lower() if isinstance(named, str) else named)
        if self.pooling not in POOLINGS:
            raise not_one_of("`pooling` of ert.EmbeddingBagConfig", self.pooling, POOLINGS)

    def arguments(self, group: Group) -> dict[str, Any]:
        """Return the arguments of a layer on the table in a group, by name."""
        return {**super().arguments(group), "mode": self.pooling}
