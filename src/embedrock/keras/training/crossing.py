"""`DlpackTransfer`: calls of PyTorch from TensorFlow's programs. GPU tensors cross by DLPack, without a copy.

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

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch.utils import dlpack

from embedrock.device.stream_order import wait_for_caller
from embedrock.keras.training import host_calls


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
