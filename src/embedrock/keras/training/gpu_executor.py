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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor
from torch.utils import dlpack

from embedrock.device.executor import GpuExecutor
from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.lookup import DeviceLookup
from embedrock.device.requirements import device_side
from embedrock.device.stream_order import wait_for_caller
from embedrock.errors import IdError, UnsupportedError
from embedrock.keras.training import host_calls
from embedrock.keras.training.executors import ProgramExecutor
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

    def check_range(self, ids: Tensor) -> None:
        """Raise `IdError` if an id is outside of the table.

        Kernels would report invalid ids only later. Here the host waits in any case.
        """
        rows = self.table.rows
        if rows is not None and ids.numel():
            least, most = torch.stack(torch.aminmax(ids)).tolist()
            if least < 0 or most >= rows:
                raise IdError(f"`ids` of {self._label} must lie in [0, {rows}): got {least} to {most}.")

    def sum_of(self, parts: Sequence[DeviceRowGradients]) -> DeviceRowGradients:
        return functools.reduce(self.stepped.merge, parts)

    def shown(self, grads: DeviceRowGradients, is_last: bool) -> list[Tensor]:
        with self.stepped.working:
            ids = grads.batch.row_ids()
            return [grads.whole()[: len(ids)], ids]

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> DeviceRowGradients:
        given = torch.as_tensor(ids, device=self.device).clone()  # the lookup may keep it
        self.check_range(given)
        lookup = DeviceLookup(self.stepped.layout(), [given], trains=True)
        ((sums, _),) = lookup.sums([torch.as_tensor(values, device=self.device)])
        return sums.of(0)
