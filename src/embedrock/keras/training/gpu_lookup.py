"""`GpuLookup`: the host part of a lookup whose rows a GPU has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from embedrock.device.features import FeatureBags, FeatureLayout
from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.lookup import DeviceLookup
from embedrock.keras.training.requests import HostLookup, LookupRequest


class GpuLookup(HostLookup):
    """A `HostLookup` for one table, on its GPU. Inputs are tensors, and a plan is a `DeviceLookup`."""

    def __init__(self, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        super().__init__(requests, which)
        self.saved = tf.int64 if self._is_max else self.saved  # TensorFlow passes no other integers on a GPU

    def plan(self, inputs: Sequence[Tensor], trains: bool = True) -> Any:
        return self._asking(functools.partial(self._planned, trains), inputs)

    def _planned(self, trains: bool, layout: Any, given: Any, all_offsets: Any, weights: Any) -> DeviceLookup:
        """Return the lookup of all requests. It keeps no input."""
        executor: Any = self.requests[0].handle.executor
        joined = torch.cat([part.reshape(-1) for part in given])  # a copy
        executor.check_range(joined)
        ids, bags, mode = joined.split(list(map(torch.numel, given))), None, "max" if self._is_max else "sum"
        if self._pooled:
            bags = [
                FeatureBags(mode, 1, None, None)  # rows are bags of one
                if offsets is None
                else FeatureBags(mode, 0, offsets[:-1].clone(), None if own is None else own.clone())
                for offsets, own in zip(all_offsets, weights, strict=True)
            ]
        features = FeatureLayout([executor.stepped] * len(ids), [None] * len(ids))
        lookup = DeviceLookup(features, ids, bags, trains)
        lookup.plan()
        return lookup

    def read(
        self, inputs: Sequence[Tensor], keep: bool, plan: Any = None, rows: Any = None
    ) -> tuple[list[Tensor], Tensor | None, Any]:
        lookup = self.plan(inputs, keep)
        found = lookup.read(self._is_weighted)
        saved = lookup.trace if self._is_max else lookup.rows if self._is_weighted else None
        lookup.trace = lookup.rows = None  # the program keeps them
        outputs = [
            out.view(*inputs[one.ids].shape, out.shape[1]) if one.offsets is None else out
            for out, one in zip(found, self.requests, strict=True)
        ]
        return outputs, saved, lookup if keep else None

    def sum_gradients(
        self, inputs: Sequence[Tensor], plan: Any, grads: Sequence[Tensor], saved: Tensor | None
    ) -> tuple[list[tuple[Any, DeviceRowGradients]], list[Tensor]]:
        handle, lookup = self.requests[0].handle, self.plan(inputs) if plan is None else plan
        own = [grads[k].reshape(-1, handle.table.dim) for k in self.which]
        factors = own[0].new_ones(sum(map(len, own)))
        lookup.trace = saved.to(torch.int32) if self._is_max and saved is not None else factors
        summed = [(handle, sums.of(0)) for sums, _ in lookup.sums(own)]
        if not self._is_weighted:
            return summed, []
        lookup.rows = saved
        return summed, list(lookup.weight_grads(own).values())
