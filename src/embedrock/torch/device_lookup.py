"""Rows on a GPU out of a table, and their gradient back to the table's handle. Nothing waits for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embedrock.device.gradients import DeviceGradients
from embedrock.device.plan import DevicePlan
from embedrock.device.side import DeviceSide
from embedrock.kernels.gpu import sums
from embedrock.torch.handle import Handle
from embedrock.torch.lookup import Options, check_ids, refuse_second_derivative


def device_lookup(handle: Handle, side: DeviceSide, ids: Tensor, options: Options, trains: bool) -> Tensor:
    """Return the rows of ids, ``ids.shape + (dim,)``, on the side's device."""
    plan = side.plan(check_ids(ids, handle.label), trains)
    if trains:
        return DeviceLookup.apply(handle, side, plan, options)
    return _spread(side.read(plan), plan, options.dtype)


def _spread(rows: Tensor, plan: DevicePlan, dtype: torch.dtype) -> Tensor:
    return rows.index_select(0, plan.inverse).to(dtype).reshape(*plan.shape, rows.shape[1])


def as_asked(grads: DeviceGradients, options: Options) -> DeviceGradients:
    """Return the gradients of rows as the layer wants them, but for `padding_idx`, which `DeviceSide.sum` knows."""
    if not options.scale_grad_by_freq:
        return grads
    plan = grads.plan
    occurrences = (plan.starts[1:] - plan.starts[:-1]).clamp(min=1)  # beyond the rows that there are: anything
    values = grads.values.clone()
    values[: len(occurrences)] /= occurrences[:, None]
    squares = torch.empty(len(values), dtype=torch.float64, device=values.device)
    sums.row_squares(values, plan.count, squares)
    return DeviceGradients.of(plan, values, squares)


class DeviceLookup(torch.autograd.Function):
    """Rows of a plan; the gradient goes to the table's handle."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, side: DeviceSide, plan: DevicePlan, options: Options) -> Tensor:
        """Return the rows: ``plan.shape + (dim,)``."""
        ctx.handle, ctx.side, ctx.plan, ctx.options = handle, side, plan, options
        return _spread(side.read(plan), plan, options.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradient by row, for the handle."""
        refuse_second_derivative()
        with ctx.side.working():
            grads = as_asked(ctx.side.sum(ctx.plan, grad_outputs[0], ctx.options.padding_idx), ctx.options)
        return ctx.handle.receive(grads), None, None, None
