"""`TensorFlowGpuExecutor`: rows of a table on TensorFlow's GPU, by the kernels of PyTorch's front end.

GPU tensors cross from TensorFlow's programs to PyTorch and back by DLPack, without a copy.

TensorFlow and PyTorch have streams and memory of their own, and neither waits for the other's. So the host waits:

1. **For TensorFlow, before PyTorch reads.** `to_dlpack` returns after all work submitted to TensorFlow's GPU
   (`TFE_TensorHandleDevicePointer` calls `Device::Sync`).
2. **For PyTorch, before TensorFlow continues**, also after an error. TensorFlow may then free its inputs, and read its
   outputs.

TensorFlow's outputs are in new memory of TensorFlow's, and PyTorch copies into it. Memory of PyTorch's would not do: it
is free once TensorFlow's host releases it. The GPU may still read it then. The next batch could overwrite it. So
TensorFlow never sees memory of a table, and no tensor of TensorFlow's is changed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor
from torch.utils import dlpack

from embedrock.device.executor import GpuExecutor
from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.plan import DeviceBatchPlan
from embedrock.device.pooling import DeviceBags
from embedrock.device.requirements import device_side
from embedrock.device.stream_order import wait_for_caller
from embedrock.errors import IdError, UnsupportedError
from embedrock.keras.training import host_calls
from embedrock.keras.training.executors import ProgramExecutor
from embedrock.keras.training.requests import LookupRequest, refuse_outside, wrong_weights
from embedrock.table.table import Table


class DlpackTransfer:
    """A path for tensors from TensorFlow's GPU to PyTorch on the same GPU, and back.

    Args:
        place: TensorFlow's name of the GPU.
        device: PyTorch's device; the CPU if Triton interprets its kernels.
    """

    def __init__(self, place: str, device: torch.device) -> None:
        self._place, self.device = place, device

    def call(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        dtypes: Sequence[tf.DType],
        *,
        functions: list[Callable[..., Any]],
        stateful: bool = True,
    ) -> list[tf.Tensor]:
        """Call a function of PyTorch tensors; return its outputs as TensorFlow's: see `host_calls.call`.

        In a program, calls run one after the other, `stateful` or not. Integer inputs arrive as int64, because
        TensorFlow passes no 32-bit integers on a GPU. Outputs may be of NumPy as well. The function must keep no input.
        """
        with tf.device(self._place):
            given = [tf.cast(each, tf.int64) if each.dtype == tf.int32 else each for each in inputs]
            if tf.executing_eagerly():
                return self._cross(function, dtypes, [tf.identity(each) for each in given])

            def operation(called: Callable[..., Any]) -> Any:
                def cross(*tensors: tf.Tensor) -> list[tf.Tensor]:
                    return self._cross(called, dtypes, tensors)

                return tf.py_function(cross, given, list(dtypes), name=host_calls.NAME)

            return host_calls.in_program(operation, function, functions)

    def _cross(
        self, function: Callable[..., Any], dtypes: Sequence[tf.DType], tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        try:
            with torch.no_grad():
                made = function(*map(_seen, tensors))
                parts = made if isinstance(made, (list, tuple)) else [made]
                return [self._handed_out(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]
        finally:
            wait_for_caller(self.device)

    def _handed_out(self, part: Any, dtype: tf.DType) -> tf.Tensor:
        with tf.device(self._place):
            if not isinstance(part, torch.Tensor):
                return tf.constant(part, dtype)
            out = tf.raw_ops.Empty(shape=list(part.shape), dtype=dtype)
        if part.numel():
            _seen(out).copy_(part)
        return out


def _seen(tensor: tf.Tensor) -> torch.Tensor:
    """Return a TensorFlow tensor as PyTorch's, once its memory is ready."""
    return dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


class TensorFlowGpuExecutor(ProgramExecutor):
    """A `ProgramExecutor` on a GPU, of PyTorch tensors.

    The first lookup copies the rows to the GPU. So does the first lookup after a change of their layout.
    """

    is_on_gpu = True

    def __init__(self, table: Table, label: str, transfer: DlpackTransfer) -> None:
        super().__init__(table, label)
        self.device, self.call = transfer.device, transfer.call

    @property
    def stepped(self) -> GpuExecutor:
        executor = self.table.executor
        if isinstance(executor, GpuExecutor) and executor.is_used_on(self.device):
            return executor
        made = device_side(self.table, self.device)
        if made is None:
            raise UnsupportedError(
                f"rows of {self._label} cannot be used on {self.device}: a warning before this error says why. Leave "
                "out `device_memory`, and the CPU uses them."
            )
        return made

    def begin(self) -> None:
        self.stepped.check()

    def host_array(self, array: Any) -> np.ndarray:
        return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows without gradients: float32 (n, dim).

        Raises:
            IdError: an id is outside of the table.
        """
        return self.stepped.lookup(self._checked(ids))

    def plan(self, ids: Tensor) -> DeviceBatchPlan:
        """Return the plan of a batch of ids (n,). Raises as `lookup` does."""
        return self.stepped.plan(self._checked(ids), trains=True)

    def _checked(self, ids: Tensor) -> Tensor:
        """Return a copy of ids, which plans may keep.

        Kernels would report invalid ids only later. Here the host waits in any case.
        """
        rows = self.table.rows
        if rows is not None and ids.numel():
            least, most = torch.stack(torch.aminmax(ids)).tolist()
            if least < 0 or most >= rows:
                raise IdError(f"`ids` of {self._label} must lie in [0, {rows}): got {least} to {most}.")
        return ids.clone()

    def sum_of(self, parts: Sequence[DeviceRowGradients]) -> DeviceRowGradients:
        return functools.reduce(self.stepped.merge, parts)

    def shown(self, grads: DeviceRowGradients, is_last: bool) -> list[Tensor]:
        with self.stepped.working:
            count = int(grads.plan.count)
            return [grads.whole()[:count], grads.plan.ids[:count]]

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> DeviceRowGradients:
        of_positions = torch.as_tensor(values, device=self.device)
        plan = self.plan(torch.as_tensor(ids, device=self.device))
        return self.stepped.sum(plan, of_positions, None, by_frequency=False)


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
