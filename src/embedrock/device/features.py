"""`DeviceFeature`: ids of one table that are looked up together with those of others, as rows or in bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.device.interfaces import JointExecutor
from embedrock.kernels.gpu.runtime import RecordForm

MOST_KEYS = 2**31 - 2  # of tables that are used together: int32


class FeatureBags(NamedTuple):
    """How the ids of a feature lie in bags.

    Attributes:
        mode: "sum", "mean" or "max".
        size: ids of each bag; 0 where `starts` tells.
        starts: where each bag begins, int32 or int64 (bags,), on the host or there; those on the host were checked.
        weights: of the ids, float32 (n,), on the device; None for ones.
    """

    mode: str
    size: int
    starts: Tensor | None
    weights: Tensor | None

    def count(self, n: int) -> int:
        """Return how many bags n ids are in."""
        return n // self.size if self.starts is None else len(self.starts)

    @property
    def are_rows(self) -> bool:
        """Whether each bag is the row of its id, if no id is left out."""
        return self.size == 1 and self.weights is None


class BagOffsets(NamedTuple):
    """Where the bags of features are that lie one after the other.

    Attributes:
        words: what `kernels.join` and `kernels.bags` know of the features.
        is_even: no starts tell where bags are.
    """

    words: tuple[int, ...]
    is_even: bool


def cuts_of(all_bags: Sequence[FeatureBags], sizes: Sequence[int]) -> BagOffsets:
    """Return where bags are of features with so many ids; the words are those after the ones that are of ids."""
    firsts, begins = [0], [0]
    for bags, n in zip(all_bags, sizes, strict=True):
        count = bags.count(n)
        firsts.append(firsts[-1] + count)
        begins.append(begins[-1] + (0 if bags.starts is None else count))
    means = [int(bags.mode == "mean") for bags in all_bags]
    words = *firsts, *(bags.size for bags in all_bags), *begins[:-1], *means
    return BagOffsets(words, begins[-1] == 0)


class TableFamily(NamedTuple):
    """What tables that are used together have in common.

    Attributes:
        device: that uses them.
        form: of their records.
        homes: where these are, see `homes.Kind`.
        draw: how first values are drawn.
        is_open: any number is an id, and directories on the device tell the slots.
    """

    device: torch.device
    form: RecordForm
    homes: Any
    draw: str
    is_open: bool

    def shares(self, features: Sequence[DeviceFeature]) -> list[list[int]]:
        """Return which of the features, rows or bags, are looked up together: as many as there are keys for.

        Another kernel pools bags of which the largest values are taken: so they are apart, unless all bags are rows.
        """
        apart: dict[bool, list[int]] = {}
        are_rows = all(feature.is_row for feature in features)
        for number, feature in enumerate(features):
            takes_maxima = feature.bags is not None and feature.bags.mode == "max"
            apart.setdefault(takes_maxima and not are_rows, []).append(number)
        return [share for numbers in apart.values() for share in _that_fit(features, numbers)]


def _that_fit(features: Sequence[DeviceFeature], numbers: Sequence[int]) -> list[list[int]]:
    """Return some of the features in shares for which there are keys."""
    executors: set[JointExecutor] = set()
    keys, shares = 0, list[list[int]]([[]])
    for number in numbers:
        executor = features[number].executor
        own = executor.key_count
        keys += 0 if executor in executors else own
        if keys > MOST_KEYS:
            executors, keys = set(), own
            shares.append([])
        executors.add(executor)
        shares[-1].append(number)
    return [share for share in shares if share]


class DeviceFeature(NamedTuple):
    """Ids that are looked up together with those of others.

    Attributes:
        side: of their table, which has a `kind`.
        ids: of any shape, on the host or there.
        padding: the id that gets no gradient, and counts in no bag.
        bags: that the ids are in; None: their rows are looked up.
    """

    executor: Any
    ids: Tensor
    padding: int | None
    bags: FeatureBags | None = None

    @property
    def is_row(self) -> bool:
        """Whether what is returned of each id is its row."""
        return self.bags is None or (self.bags.are_rows and self.padding is None)


def kind_of(executor: JointExecutor, is_open: bool = False) -> TableFamily:
    """Return which tables can be used together with one: the same object of all of them."""
    kind = TableFamily(executor.device, executor.form, executor.near.homes.kind_to_step, executor.drawn[0], is_open)
    return _kinds.setdefault(kind, kind)


_kinds: dict[TableFamily, TableFamily] = {}  # each step asks several times whether those of tables are the same
