"""Rows pooled into bags as a tensor, and the gradients back to the handle and to the positions' weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embedrock.batch.pooling import Bags, pool, unpool, weight_grads
from embedrock.torch.handle import Handle
from embedrock.torch.lookup import Options, as_asked, deliver, host_grads


def host_weights(weights: Tensor | None) -> np.ndarray | None:
    """Return the positions' weights, of any dtype and on any device, as float32; None for ones."""
    return None if weights is None else weights.detach().to("cpu", torch.float32).contiguous().numpy()


class PooledLookup(torch.autograd.Function):
    """Pooled rows of a plan; the gradients go to the table's handle and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, weights: Tensor | None, bags: Bags, options: Options) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones."""
        rows = handle.table.read_rows(bags.plan)
        out, trace = pool(rows, host_weights(weights), bags)
        ctx.handle, ctx.bags, ctx.options, ctx.trace = handle, bags, options, trace
        ctx.rows = rows if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weights)  # so that autograd notices when they are written to before the backward
        return deliver(out, handle.device, options.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Sum the gradient by row, for the handle, and by position, for the weights."""
        grads, (weights,) = host_grads(grad_outputs[0]), ctx.saved_tensors
        of_handle = of_weights = None
        if ctx.needs_input_grad[0]:
            of_rows = unpool(grads, host_weights(weights), ctx.bags, ctx.trace)
            of_handle = ctx.handle.receive(as_asked(of_rows, ctx.options))
        if ctx.needs_input_grad[1]:
            of_weights = deliver(weight_grads(grads, ctx.rows, ctx.bags), weights.device, weights.dtype)
        return of_handle, of_weights, None, None
