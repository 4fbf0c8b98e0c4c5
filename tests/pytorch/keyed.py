"""`KeyedFeatures`: a stand-in for TorchRec's `KeyedJaggedTensor`, with those of its methods that collections call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Fields(NamedTuple):
    names: list[str]
    ids: Tensor
    bounds: Tensor
    factors: Tensor | None
    bags: int


class Keyed(_Fields):
    """Ids of several features, one after the other, each in `bags` bags."""

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def offsets(self) -> Tensor:
        return self.bounds

    def weights_or_none(self) -> Tensor | None:
        return self.factors

    def stride(self) -> int:
        return self.bags


def keyed(names: list[str], ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Keyed:
    """Return one, given the length of each bag, feature after feature."""
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Keyed(names, ids, bounds, weights, len(lengths) // len(names))
