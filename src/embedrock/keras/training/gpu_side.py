"""`TensorFlowGpuExecutor`: the rows of a table that TensorFlow's GPU uses, by the kernels that are PyTorch's front end's as well."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch
from torch import Tensor

from embedrock.device.gradients import DeviceRowGradients
from embedrock.device.plan import DevicePlan
from embedrock.device.pooling import DeviceBags
from embedrock.device.requirements import device_side
from embedrock.device.side import GpuExecutor
from embedrock.errors import IdError, UnsupportedError
from embedrock.keras.training.crossing import DlpackTransfer
from embedrock.table.table import Table


class TensorFlowGpuExecutor:
    """Rows that a GPU reads and steps: a `ProgramExecutor`, of PyTorch's tensors.

    They are brought there at the first lookup, and anew when they were laid out anew.

    Args:
        table: whose rows.
        label: what messages call the layer.
        crossing: to the GPU.
    """

    is_on_gpu = True
    trace: tf.DType = tf.int64

    def __init__(self, table: Table, label: str, crossing: DlpackTransfer) -> None:
        self.table, self._label, self._device = table, label, crossing.device
        self.call = crossing.call

    @property
    def stepped(self) -> GpuExecutor:
        """Who steps the rows: the GPU."""
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
        """Begin a lookup: raise what went wrong before."""
        self.stepped.check()

    def host_array(self, array: Any) -> np.ndarray:
        """Return a tensor, or an array, as NumPy's."""
        return array.cpu().numpy() if isinstance(array, Tensor) else np.asarray(array)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors one after the other."""
        return parts[0] if len(parts) == 1 else torch.cat(list(parts))

    def numbers(self, start: int, stop: int) -> Tensor:
        """Return the whole numbers from `start` to before `stop`."""
        return torch.arange(start, stop, device=self._device)

    def ones(self, n: int) -> Tensor:
        """Return ones."""
        return torch.ones(n, device=self._device)

    def lookup(self, ids: Tensor) -> Tensor:
        """Return rows for no gradient."""
        return self.stepped.lookup(self._checked(ids))

    def plan(self, ids: Tensor) -> DevicePlan:
        """Decide what a batch of ids needs."""
        return self.stepped.plan(self._checked(ids), trains=True)

    def _checked(self, ids: Tensor) -> Tensor:
        """Return a copy of ids, which plans may keep.

        Kernels would tell of wrong ones later only. Here the host waits in any case.
        """
        rows = self.table.rows
        if rows is not None and ids.numel():
            least, most = torch.stack(torch.aminmax(ids)).tolist()
            if least < 0 or most >= rows:
                raise IdError(f"`ids` of {self._label} must lie in [0, {rows}): got {least} to {most}.")
        return ids.clone()

    def read(self, plan: DevicePlan) -> Tensor:
        """Return the row of each position."""
        return self.stepped.read(plan)

    def read_rows(self, plan: DevicePlan) -> Tensor:
        """Return each row once, and anything after those that there are."""
        return self.stepped.read_rows(plan)

    def sum(self, plan: DevicePlan, grads: Tensor) -> DeviceRowGradients:
        """Return the gradients of positions summed to one for each row."""
        return self.stepped.sum(plan, grads, None, by_frequency=False)

    def bags(self, plan: DevicePlan, bounds: Tensor, mode: str) -> DeviceBags:
        """Return the positions of a plan as bags."""
        executor = self.stepped
        return executor.bags(plan, executor.bounds(bounds, plan.shape[0]), mode, None)

    def pool(self, rows: Tensor, weights: Tensor | None, bags: DeviceBags) -> tuple[Tensor, Tensor]:
        """Pool unique rows."""
        return self.stepped.pool(rows, weights, bags)

    def unpool(
        self, grads: Tensor, weights: Tensor | None, bags: DeviceBags, places: Tensor | None
    ) -> DeviceRowGradients:
        """Return the gradients of the rows from those of the bags."""
        trace = self.ones(len(grads)) if places is None else places.to(torch.int32)
        return self.stepped.unpool(grads, weights, bags, trace, by_frequency=False)

    def weight_grads(self, grads: Tensor, rows: Tensor, bags: DeviceBags) -> Tensor:
        """Return the gradients of the positions' weights."""
        return self.stepped.weight_grads(grads, rows, bags)

    def sum_of(self, parts: Sequence[DeviceRowGradients]) -> DeviceRowGradients:
        """Return the sum of gradients."""
        return functools.reduce(self.stepped.merge, parts)

    def shown(self, grads: DeviceRowGradients, is_last: bool) -> list[Tensor]:
        """Return gradients, and the ids of their rows, both of which are copied on the way out."""
        with self.stepped.working:
            count = int(grads.plan.count)
            return [grads.whole()[:count], grads.plan.ids[:count]]

    def of_rows(self, values: Any, ids: Any, plans: Sequence[Any]) -> DeviceRowGradients:
        """Return values for rows as gradients."""
        of_positions = torch.as_tensor(values, device=self._device)
        return self.sum(self.plan(torch.as_tensor(ids, device=self._device)), of_positions)
