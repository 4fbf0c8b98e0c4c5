"""Inputs of collections: ids by feature, in a dict or in TorchRec's `KeyedJaggedTensor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import ArgumentError, UnsupportedError, did_you_mean, listed
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.lookup import ID_DTYPES, host_ids


class KeyedFeatures(Protocol):
    """Ids of several features, one feature after the other, each in `stride` bags: TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> Sequence[str]: ...  # the features
    def values(self) -> Tensor: ...  # all ids: (n,)
    def offsets(self) -> Tensor: ...  # bounds of the bags: (features * stride + 1,)
    def weights_or_none(self) -> Tensor | None: ...  # weights (n,) of the ids
    def stride(self) -> int: ...  # number of bags of each feature


METHODS = ("keys", "values", "offsets", "weights_or_none", "stride")


class BagInput(NamedTuple):
    """Input of a collection for one feature of bags.

    Attributes:
        ids, offsets, weights: as in `EmbeddingBag.forward`; or ids (batch,) without offsets, one for each sample.
        host: the ids (n,) and the bounds of the bags, int64 (bags + 1,), as checked arrays, if they exist.
    """

    ids: Any
    offsets: Tensor | None = None
    weights: Tensor | None = None
    host: tuple[np.ndarray, np.ndarray] | None = None

    @staticmethod
    def of(value: Any) -> BagInput:
        """Return the input of bags, also for a tensor of ids."""
        return value if isinstance(value, BagInput) else BagInput(value)

    @property
    def arguments(self) -> tuple[Any, Tensor | None, Tensor | None]:
        is_flat = isinstance(self.ids, Tensor) and not self.ids.is_nested and self.ids.dim() == 1
        if self.offsets is not None or not is_flat:
            return self.ids, self.offsets, self.weights
        return self.ids.unsqueeze(1), None, None if self.weights is None else self.weights.unsqueeze(-1)


def is_keyed(features: Any) -> TypeGuard[KeyedFeatures]:
    """Return whether an object has the methods of a `KeyedJaggedTensor`."""
    return not isinstance(features, Mapping) and all(callable(getattr(features, name, None)) for name in METHODS)


def check_names(given: Sequence[str], wanted: Sequence[str], label: str, are_keys: bool = False) -> None:
    """Raise `ArgumentError` unless features are those of a collection. Keys of a `KeyedFeatures` must differ."""
    if are_keys and len(set(given)) != len(given):
        raise ArgumentError(f"{label} must be called with each key once: got {listed(given)}.")
    if set(given) == set(wanted):
        return
    unknown = [name for name in given if name not in wanted]
    missing = [name for name in wanted if name not in given]
    faults = [f"has no feature {listed(unknown)}"] * bool(unknown)
    faults += [f"was given nothing for {listed(missing)}"] * bool(missing)
    remedy = did_you_mean(unknown[0], missing) if unknown else ""
    if are_keys and not missing:
        known = [place for place, key in enumerate(given) if key in wanted]
        remedy = f" For a KeyedJaggedTensor of those that it has: features.permute({known})."
    takes = f"{'the keys ' * are_keys}{listed(wanted)}"
    raise ArgumentError(f"{label} {', and '.join(faults)}. It takes {takes}: got {listed(given)}.{remedy}")


@as_it_is  # a graph does not know the number of ids of a feature
def parts_of(features: KeyedFeatures, wanted: Sequence[str], label: str) -> list[BagInput]:
    """Return the part of a `KeyedFeatures` for each feature of a collection. Its offsets include the last bag's end.

    Raises:
        ArgumentError: the keys are others, or the parts do not match.
        UnsupportedError: the features have different numbers of bags.
    """
    keys, values, weights = list(features.keys()), features.values(), features.weights_or_none()
    check_names(keys, wanted, label, are_keys=True)
    bags, offsets = int(features.stride()), host_ids(features.offsets(), f"the offsets of {label}").astype(np.int64)
    if len(offsets) != len(keys) * bags + 1:
        raise UnsupportedError(
            f"{label} takes features with one number of bags: got {len(keys)} keys, stride() {bags} and "
            f"{len(offsets)} offsets. Call it with a dict of (ids, offsets)."
        )
    check_bounds(offsets, len(values))
    array = values.resolve_neg().cpu().numpy() if values.dtype in ID_DTYPES and values.ndim == 1 else None
    places, cuts, found = {key: place for place, key in enumerate(keys)}, offsets[:: max(1, bags)].tolist(), []
    for name in wanted:
        place = places[name]
        start, stop = (cuts[place], cuts[place + 1]) if bags else (0, 0)
        bounds, own = offsets[place * bags : (place + 1) * bags + 1] - start, slice(start, stop)
        host = None if array is None else (array[own], bounds)
        found.append(BagInput(values[own], torch.from_numpy(bounds), None if weights is None else weights[own], host))
    return found


def check_bounds(bounds: np.ndarray, count: int, given: np.ndarray | None = None) -> None:
    """Raise `ArgumentError` unless `bounds` int64 (bags + 1,) are ascending positions in `count` ids, from 0.

    The error shows `given`, or the bounds if it is None.
    """
    if len(bounds) and bounds[0] == 0 and bounds[-1] <= count and np.all(np.diff(bounds) >= 0):
        return
    given = bounds if given is None else given
    some = ", ".join(map(str, given[:8])) + ", ..." * (len(given) > 8)
    raise ArgumentError(f"`offsets` must start at 0, not decrease, and not exceed the {count} ids: got [{some}].")
