"""`DeviceFeature`: ids of one table that are looked up together with those of others, as rows or in bags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.kernels.gpu.addresses import AddressKind
from embedrock.kernels.gpu.runtime import RecordForm

MOST_KEYS = 2**31 - 2  # of all tables in a joint plan: int32


class FeatureBags(NamedTuple):
    """The bags of a feature's ids.

    Attributes:
        mode: "sum", "mean" or "max".
        size: ids of each bag; 0 if `starts` is given.
        starts: first position of each bag, int32 or int64 (bags,), on either device; host tensors are already checked.
        weights: of the ids, float32 (n,), on the device; None for ones.
    """

    mode: str
    size: int
    starts: Tensor | None
    weights: Tensor | None

    def count(self, n: int) -> int:
        """Return the number of bags that n ids are in."""
        return n // self.size if self.starts is None else len(self.starts)

    @property
    def are_rows(self) -> bool:
        """True if each bag is the row of its id, as long as no id is left out."""
        return self.size == 1 and self.weights is None


def bag_words(all_bags: Sequence[FeatureBags], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the words about the bags of features of given sizes, for kernels: see `kernels.bags`.

    The bags of the features lie one after the other. The kernels read these words after the words of the ids.
    """
    firsts, begins = [0], [0]
    for bags, n in zip(all_bags, sizes, strict=True):
        count = bags.count(n)
        firsts.append(firsts[-1] + count)
        begins.append(begins[-1] + (0 if bags.starts is None else count))
    means = [int(bags.mode == "mean") for bags in all_bags]
    return *firsts, *(bags.size for bags in all_bags), *begins[:-1], *means


class TableFamily(NamedTuple):
    """Properties that all tables of a joint plan have in common.

    Attributes:
        device: that uses the tables.
        form: layout of the records.
        kind: of the record addresses.
        draw: generator of initial values.
        is_open: ids are open, and hash indexes on the device have the slots.
    """

    device: torch.device
    form: RecordForm
    kind: AddressKind
    draw: str
    is_open: bool

    def shares(self, features: Sequence[DeviceFeature]) -> list[list[int]]:
        """Return lists of features, rows or bags, that are looked up together, within the limit of keys.

        Bags of mode "max" have a kernel of their own. So they are separate, unless all bags are rows.
        """
        apart: dict[bool, list[int]] = {}
        for number, feature in enumerate(features):
            apart.setdefault(feature.bags is not None and feature.bags.mode == "max", []).append(number)
        if len(apart) > 1 and all(feature.is_row for feature in features):
            return _that_fit(features, range(len(features)))
        return [share for numbers in apart.values() for share in _that_fit(features, numbers)]


def _that_fit(features: Sequence[DeviceFeature], numbers: Iterable[int]) -> list[list[int]]:
    executors: set[Any] = set()
    keys, shares = 0, list[list[int]]([[]])
    for number in numbers:
        executor = features[number].executor
        own = executor.cache.slots.where.shape[0] + 2  # keys of ids outside, too
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
        executor: of the table, which has a `TableFamily`.
        ids: of any shape, on the host or the device.
        padding: the id that gets no gradient, and counts in no bag.
        bags: of the ids; None: the lookup returns rows.
    """

    executor: Any
    ids: Tensor
    padding: int | None
    bags: FeatureBags | None = None

    @property
    def is_row(self) -> bool:
        """True if the lookup returns the row of each id."""
        return self.bags is None or (self.bags.are_rows and self.padding is None)


def kind_of(executor: Any, is_open: bool = False) -> TableFamily:
    """Return an executor's table family: one object for all tables of the family."""
    kind = TableFamily(executor.device, executor.form, executor.cache.kind, executor.first.drawn[0], is_open)
    return _kinds.setdefault(kind, kind)


_kinds: dict[TableFamily, TableFamily] = {}  # one object a family makes the checks of each step fast
