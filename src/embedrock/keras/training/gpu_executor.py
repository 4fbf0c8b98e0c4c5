"""`TensorFlowGpuExecutor`: rows of a table on TensorFlow's GPU, by the kernels of PyTorch's front end."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from embedrock.device.executor import GpuExecutor
from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.plan import DevicePlan
from embedrock.device.pooling import DeviceBags
from embedrock.device.requirements import device_side
from embedrock.errors import IdError, UnsupportedError
from embedrock.keras.training.crossing import DlpackTransfer
from embedrock.keras.training.executors import ProgramExecutor
from embedrock.table.table import Table


class TensorFlowGpuExecutor(ProgramExecutor):
    """A `ProgramExecutor` on a GPU, of PyTorch tensors.

    The first lookup copies the rows to the GPU. So does the first lookup after a change of their layout.

    Args:
        table: the table.
        label: name of the layer in messages.
        crossing: path to the GPU.
    """

    is_on_gpu = True
    trace: tf.DType = tf.int64

    def __init__(self, table: Table, label: str, crossing: DlpackTransfer) -> None:
        super().__init__(table, label)
        self._device, self.call = crossing.device, crossing.call

    @property
    def stepped(self) -> GpuExecutor:
        executor = self.table.executor
        if isinstance(executor, GpuExecutor) and executor.is_used_on(self._device):
            return executor
        made = device_side(self.table, self._device)
        if made is None:
            raise UnsupportedError(
                f"rows of {self._label} cannot be used on {self._device}: a warning before this error says why. Leave "
                "out `device_memory`, and the CPU uses them."
            )
        return made

    def begin(self) -> None:
        """Begin a lookup. Raise earlier errors of the GPU."""
        self.stepped.check()

    def host_array(self, array: Any) -> np.ndarray:
        return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def numbers(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self._device)

    def ones(self, n: int) -> Tensor:
        return torch.ones(n, device=self._device)

    def lookup(self, ids: Tensor) -> Tensor:
        return self.stepped.lookup(self._checked(ids))

    def plan(self, ids: Tensor) -> DevicePlan:
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

    def read(self, plan: DevicePlan) -> Tensor:
        return self.stepped.read(plan)

    def read_rows(self, plan: DevicePlan) -> Tensor:
        """Return each row once, with arbitrary values after the last row."""
        return self.stepped.read_rows(plan)

    def sum(self, plan: DevicePlan, grads: Tensor) -> DeviceRowGradients:
        return self.stepped.sum(plan, grads, None, by_frequency=False)

    def bags(self, plan: DevicePlan, bounds: Tensor, mode: str) -> DeviceBags:
        executor = self.stepped
        return executor.bags(plan, executor.bounds(bounds, plan.shape[0]), mode, None)

    def pool(self, rows: Tensor, weights: Tensor | None, bags: DeviceBags) -> tuple[Tensor, Tensor]:
        return self.stepped.pool(rows, weights, bags)

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: DeviceBags, places: Tensor | None
    ) -> DeviceRowGradients:
        trace = self.ones(len(grads)) if places is None else places.to(torch.int32)
        return self.stepped.unpool(grads, weights, bags, trace, by_frequency=False)

    def weight_grads(self, grads: Tensor, rows: Tensor, bags: DeviceBags) -> Tensor:
        return self.stepped.weight_grads(grads, rows, bags)

    def sum_of(self, parts: Sequence[DeviceRowGradients]) -> DeviceRowGradients:
        return functools.reduce(self.stepped.merge, parts)

    def shown(self, grads: DeviceRowGradients, is_last: bool) -> list[Tensor]:
        with self.stepped.working:
            count = int(grads.plan.count)
            return [grads.whole()[:count], grads.plan.ids[:count]]

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> DeviceRowGradients:
        of_positions = torch.as_tensor(values, device=self._device)
        return self.sum(self.plan(torch.as_tensor(ids, device=self._device)), of_positions)
