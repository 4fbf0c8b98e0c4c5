"""`GpuLookup`: the host part of a lookup whose rows a GPU has."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from embedrock.device.features import FeatureBags
from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.lookup import DeviceLookup
from embedrock.keras.training.requests import HostLookup, LookupRequest


class GpuLookup(HostLookup):
    """A `HostLookup` for one table, on its GPU. Inputs are tensors, and a plan is a `DeviceLookup`."""

    def __init__(self, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        super().__init__(requests, which)
        self.saved = tf.int64 if self._is_max else self.saved  # TensorFlow passes no other integers on a GPU

    def plan(self, inputs: Sequence[Tensor], trains: bool = True) -> Any:
        return self._asking(functools.partial(self._joined, trains), inputs)

    def _joined(self, trains: bool, layout: Any, given: Any, all_offsets: Any, weights: Any) -> DeviceLookup:
        """Return the lookup of all features as one. Rows are bags of one if others are bags."""
        executor: Any = self.requests[0].handle.executor
        parts, bags = [part.reshape(-1) for part in given], None
        ids, sizes = torch.cat(parts), list(map(len, parts))  # a copy, which plans may keep
        executor.check_range(ids)
        if self._pooled:
            firsts = itertools.accumulate(sizes, initial=0)
            starts = [
                first + (torch.arange(size, device=ids.device) if offsets is None else offsets[:-1])
                for offsets, size, first in zip(all_offsets, sizes, firsts, strict=False)
            ]
            joined = None
            if self._is_weighted:
                pairs = zip(weights, sizes, strict=True)
                joined = torch.cat([torch.ones(n, device=ids.device) if own is None else own for own, n in pairs])
            bags = FeatureBags("max" if self._is_max else "sum", 0, torch.cat(starts), joined)
        lookup = DeviceLookup(executor.stepped.layout(), [ids], None if bags is None else [bags], trains)
        lookup.plan()
        return lookup

    def read(
        self, inputs: Sequence[Tensor], keep: bool, plan: Any = None, rows: Any = None
    ) -> tuple[list[Tensor], Tensor | None, Any]:
        lookup = self.plan(inputs, keep)
        (found,) = lookup.read(self._is_weighted)
        saved = lookup.trace if self._is_max else lookup.rows if self._is_weighted else None
        lookup.trace = lookup.rows = None  # the program keeps them
        shapes = [
            inputs[one.ids].shape if one.offsets is None else (len(inputs[one.offsets]) - 1,) for one in self.requests
        ]
        parts = torch.split_with_sizes(found, [math.prod(shape) for shape in shapes])
        outputs = [part.view(*shape, found.shape[1]) for part, shape in zip(parts, shapes, strict=True)]
        return outputs, saved, lookup if keep else None

    def sum_gradients(
        self, inputs: Sequence[Tensor], plan: Any, grads: Sequence[Tensor], saved: Tensor | None
    ) -> tuple[list[tuple[Any, DeviceRowGradients]], list[Tensor]]:
        handle, lookup = self.requests[0].handle, self.plan(inputs) if plan is None else plan
        flat = torch.cat([grads[k].reshape(-1, handle.table.dim) for k in self.which])
        lookup.trace = saved.to(torch.int32) if self._is_max and saved is not None else flat.new_ones(len(flat))
        summed = [(handle, sums.of(0)) for sums, _ in lookup.sums([flat])]
        if not self._is_weighted:
            return summed, []
        lookup.rows = saved
        of_all = torch.split_with_sizes(
            lookup.weight_grads([flat])[0], [inputs[one.ids].numel() for one in self.requests]
        )
        return summed, [part for part, one in zip(of_all, self.requests, strict=True) if one.weights is not None]
