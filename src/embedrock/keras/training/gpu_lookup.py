"""`GpuLookup`: the host part of a lookup whose rows a GPU has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor

from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.plan import DeviceBatchPlan
from embedrock.device.pooling import DeviceBags
from embedrock.errors import IdError
from embedrock.keras.training.requests import LookupRequest, refuse_outside, wrong_weights


class GpuLookup:
    """The requests of a lookup for one table that share a plan, on its GPU: a `HostLookup` of tensors."""

    def __init__(self, requests: Sequence[LookupRequest], which: Sequence[int]) -> None:
        self.requests, self.which = requests, which
        self._handle, self._is_max = requests[0].handle, requests[0].is_max
        self._executor: Any = self._handle.executor
        self._pools = any(request.offsets is not None for request in requests)
        self._is_weighted = any(request.weights is not None for request in requests)
        self.saved = tf.int64 if self._is_max else tf.float32 if self._is_weighted else None

    def plan(self, inputs: Sequence[Tensor]) -> DeviceBatchPlan:
        return self._asking(self._executor.plan, inputs)

    def read(self, inputs: Sequence[Tensor], keep: bool) -> tuple[list[Tensor], Tensor | None, DeviceBatchPlan | None]:
        """Return the rows or bags of each request, the array to save, and the plan: see `HostLookup.read`."""
        executor, saved = self._executor.stepped, None
        plan = self.plan(inputs) if keep or self._pools else None
        if plan is None:
            found = self._asking(self._executor.lookup, inputs)
        elif not self._pools:
            found = executor.read(plan)
        else:
            rows = executor.read_rows(plan)
            found, trace = executor.pool(rows, self._weights(inputs), self._bags(inputs, plan))
            saved = trace if self._is_max else rows if self._is_weighted else None
        shapes = [
            inputs[one.ids].shape if one.offsets is None else (len(inputs[one.offsets]) - 1,) for one in self.requests
        ]
        parts = torch.split_with_sizes(found, [math.prod(shape) for shape in shapes])
        return [part.view(*shape, found.shape[1]) for part, shape in zip(parts, shapes, strict=True)], saved, plan

    def sum_gradients(
        self, inputs: Sequence[Tensor], plan: DeviceBatchPlan | None, grads: Sequence[Tensor], saved: Tensor | None
    ) -> tuple[list[tuple[Any, DeviceRowGradients]], list[Tensor]]:
        """Sum the gradients of all rows and bags that were read: see `HostLookup.sum_gradients`."""
        executor, plan = self._executor.stepped, self.plan(inputs) if plan is None else plan
        flat = torch.cat([grads[k].reshape(-1, self._handle.table.dim) for k in self.which])
        if not self._pools:
            return [(self._handle, executor.sum(plan, flat, None, by_frequency=False))], []
        bags, weights = self._bags(inputs, plan), self._weights(inputs)
        trace = saved.to(torch.int32) if self._is_max and saved is not None else flat.new_ones(len(flat))
        summed = [(self._handle, executor.unpool(flat, weights, bags, trace, by_frequency=False))]
        if weights is None:
            return summed, []
        of_all = torch.split_with_sizes(executor.weight_grads(flat, saved, bags), self._sizes(inputs))
        return summed, [part for part, one in zip(of_all, self.requests, strict=True) if one.weights is not None]

    def _asking(self, ask: Callable[[Tensor], Any], inputs: Sequence[Tensor]) -> Any:
        try:
            return ask(torch.cat([inputs[request.ids].reshape(-1) for request in self.requests]))
        except IdError:
            array = self._executor.host_array
            refuse_outside([one.of(iter([array(inputs[k]) for k in one.parts()])) for one in self.requests])
            raise

    def _sizes(self, inputs: Sequence[Tensor]) -> list[int]:
        return [inputs[request.ids].numel() for request in self.requests]

    def _bags(self, inputs: Sequence[Tensor], plan: DeviceBatchPlan) -> DeviceBags:
        """Return the bags of all requests, one after the other; rows are bags of one."""
        executor, sizes, start = self._executor.stepped, self._sizes(inputs), 0
        bounds = [torch.zeros(1, dtype=torch.int64, device=self._executor.device)]
        for request, size in zip(self.requests, sizes, strict=True):
            if request.offsets is None:
                ends = torch.arange(1, size + 1, device=self._executor.device)
            else:
                ends = inputs[request.offsets][1:]
            bounds.append(start + ends)
            start += size
        placed = executor.bounds(torch.cat(bounds), start)
        return executor.bags(plan, placed, "max" if self._is_max else "sum", None)

    def _weights(self, inputs: Sequence[Tensor]) -> Tensor | None:
        if not self._is_weighted:
            return None
        parts = []
        for request, size in zip(self.requests, self._sizes(inputs), strict=True):
            own = torch.ones(size, device=self._executor.device) if request.weights is None else inputs[request.weights]
            if len(own) != size:
                raise wrong_weights(self._handle, len(own), size)
            parts.append(own)
        return torch.cat(parts)
