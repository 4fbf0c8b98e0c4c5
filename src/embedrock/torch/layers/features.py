"""Inputs of collections: ids by feature, in a dict or in TorchRec's `KeyedJaggedTensor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from embedrock.errors import ArgumentError, UnsupportedError
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.lookup import ID_DTYPES, host_ids


class KeyedFeatures(Protocol):
    """Ids of several features, one feature after the other, each in `stride` bags: TorchRec's `KeyedJaggedTensor`."""

    def keys(self) -> Sequence[str]:
        """Return the features."""
        ...

    def values(self) -> Tensor:
        """Return all ids: (n,)."""
        ...

    def offsets(self) -> Tensor:
        """Return the bounds of the bags: (features * stride + 1,)."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """Return the weights (n,) of the ids; None without weights."""
        ...

    def stride(self) -> int:
        """Return the number of bags of each feature."""
        ...


METHODS = ("keys", "values", "offsets", "weights_or_none", "stride")


class HostBags(NamedTuple):
    """Bags of one feature as checked arrays.

    Attributes:
        ids: (n,), int32 or int64.
        bounds: int64 (bags + 1,), bounds of the bags in `ids`.
    """

    ids: np.ndarray
    bounds: np.ndarray


class BagInput(NamedTuple):
    """Input of a collection for one feature of bags.

    Attributes:
        ids, offsets, weights: as in `EmbeddingBag.forward`; or ids (batch,) without offsets, one for each sample.
        host: the ids and offsets as arrays, if they exist.
    """

    ids: Any
    offsets: Tensor | None = None
    weights: Tensor | None = None
    host: HostBags | None = None

    @property
    def arguments(self) -> tuple[Any, Tensor | None, Tensor | None]:
        """Arguments of `EmbeddingBag.forward`."""
        if self.offsets is not None or not _is_flat(self.ids):
            return self.ids, self.offsets, self.weights
        return self.ids.unsqueeze(1), None, None if self.weights is None else self.weights.unsqueeze(-1)


def is_keyed(features: Any) -> TypeGuard[KeyedFeatures]:
    """Return whether an object has the methods of a `KeyedJaggedTensor`."""
    return not isinstance(features, Mapping) and all(callable(getattr(features, name, None)) for name in METHODS)


def check_names(given: Sequence[str], wanted: Sequence[str], label: str) -> None:
    """Raise `ArgumentError` unless the features of a dict are the features of a collection."""
    if set(given) != set(wanted):
        raise ArgumentError(f"{label} {_odd(given, wanted)}. It takes {_names(wanted)}: got {_names(given)}.")


def check_keys(given: Sequence[str], wanted: Sequence[str], label: str) -> None:
    """Raise `ArgumentError` unless the keys of a `KeyedFeatures` are the features of a collection, each once."""
    if len(set(given)) != len(given):
        raise ArgumentError(f"{label} must be called with each key once: got {_names(given)}.")
    if set(given) == set(wanted):
        return
    known = [place for place, key in enumerate(given) if key in wanted]
    remedy = ""
    if set(wanted) <= set(given):
        remedy = f" For a KeyedJaggedTensor of those that it has: features.permute({known})."
    raise ArgumentError(
        f"{label} {_odd(given, wanted)}. It takes the keys {_names(wanted)}: got {_names(given)}.{remedy}"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _odd(given: Sequence[str], wanted: Sequence[str]) -> str:
    unknown = [name for name in given if name not in wanted]
    missing = [name for name in wanted if name not in given]
    faults = [f"has no feature {_names(unknown)}"] * bool(unknown)
    faults += [f"was given nothing for {_names(missing)}"] * bool(missing)
    return ", and ".join(faults)


@as_it_is  # a graph does not know the number of ids of a feature
def parts_of(features: KeyedFeatures, wanted: Sequence[str], label: str) -> list[BagInput]:
    """Return the part of a `KeyedFeatures` for each feature of a collection. Its offsets include the last bag's end.

    Raises:
        ArgumentError: the keys are others, or the parts do not match.
        UnsupportedError: the features have different numbers of bags.
    """
    keys, values, weights = list(features.keys()), features.values(), features.weights_or_none()
    check_keys(keys, wanted, label)
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
        host = None if array is None else HostBags(array[own], bounds)
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


def _is_flat(ids: Any) -> bool:
    return isinstance(ids, Tensor) and not ids.is_nested and ids.dim() == 1
