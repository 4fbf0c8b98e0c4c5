"""Pooled rows on a GPU as a tensor, and the gradients back to the handle and to the positions' weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from embedrock.device.pooling import DeviceBags, bag_of_position, pool, unpool, weight_grads
from embedrock.device.side import DeviceSide
from embedrock.torch.device_lookup import as_asked
from embedrock.torch.handle import Handle
from embedrock.torch.lookup import Options, refuse_second_derivative


class Request(NamedTuple):
    """What a layer asks of a pooled lookup.

    Attributes:
        ids: of all bags, (n,).
        offsets: int64 (bags + 1,), where bags start and end.
        mode: "sum", "mean" or "max".
        options: of the layer.
        trains: whether gradients of rows follow.
    """

    ids: Tensor
    offsets: Tensor
    mode: str
    options: Options
    trains: bool


def device_pooled_lookup(handle: Handle, side: DeviceSide, weights: Tensor | None, request: Request) -> Tensor:
    """Return the bags (bags, dim) on the side's device; `weights` of the positions (n,), None for ones."""
    with side.working():
        bags = _bags(side, request)
    if request.trains or (weights is not None and weights.requires_grad and torch.is_grad_enabled()):
        return DevicePooledLookup.apply(handle, side, weights, bags, request.options)
    rows = side.read(bags.plan)
    with side.working():
        return pool(rows, _float32(weights, side), bags)[0].to(request.options.dtype)


def _bags(side: DeviceSide, request: Request) -> DeviceBags:
    offsets, n = side.on_device(request.offsets), len(request.ids)
    if request.offsets.device.type != "cpu":  # on the host they have been checked
        offsets = side.faults.checked_offsets(offsets, n)
    skip, plan = side.without(side.plan(request.ids, request.trains), request.options.padding_idx)
    return DeviceBags(plan, offsets, bag_of_position(offsets, n), skip, request.mode)


def _float32(weights: Tensor | None, side: DeviceSide) -> Tensor | None:
    return None if weights is None else side.on_device(weights.detach()).to(torch.float32).contiguous()


class DevicePooledLookup(torch.autograd.Function):
    """Pooled rows of a plan; the gradients go to the table's handle and to the weights of the positions."""

    @staticmethod
    def forward(
        ctx: Any, handle: Handle, side: DeviceSide, weights: Tensor | None, bags: DeviceBags, options: Options
    ) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones."""
        rows = side.read(bags.plan)
        with side.working():
            out, trace = pool(rows, _float32(weights, side), bags)
        ctx.handle, ctx.side, ctx.bags, ctx.options, ctx.trace = handle, side, bags, options, trace
        ctx.rows = rows if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(weights)  # so that autograd notices when they are written to before the backward
        return out.to(options.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Sum the gradient by row, for the handle, and by position, for the weights."""
        refuse_second_derivative()
        grads, (weights,) = grad_outputs[0].contiguous(), ctx.saved_tensors
        of_handle = of_weights = None
        if ctx.needs_input_grad[0]:
            with ctx.side.working():
                of_rows = as_asked(unpool(grads, _float32(weights, ctx.side), ctx.bags, ctx.trace), ctx.options)
            of_handle = ctx.handle.receive(of_rows)
        if ctx.needs_input_grad[2]:
            with ctx.side.working():
                of_weights = weight_grads(grads, ctx.rows, ctx.bags).to(weights.device, weights.dtype)
        return of_handle, None, of_weights, None, None
