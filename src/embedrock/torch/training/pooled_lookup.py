"""Rows pooled into bags as a tensor, and the gradients back to the handle and to the positions' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.lookup import Options, refuse_second_derivative
from embedrock.torch.training.side import RowSide
from embedrock.torch.training.spans import span, waited


class PooledLookup(torch.autograd.Function):
    """Pooled rows of bags; the gradients go to the table's handle and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, side: RowSide, weights: Tensor | None, bags: Any, options: Options) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones."""
        waited(side)
        with span("read"):
            rows = side.read_rows(bags.plan)
            out, trace = side.pool(rows, weights, bags)
        ctx.handle, ctx.side, ctx.bags, ctx.options, ctx.trace = handle, side, bags, options, trace
        ctx.rows = rows if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(weights)  # so that autograd notices when they are written to before the backward
        return out.to(handle.device, options.dtype)

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Sum the gradient by row, for the handle, and by position, for the weights."""
        refuse_second_derivative()
        grads, (weights,), side = grad_outputs[0].resolve_neg(), ctx.saved_tensors, ctx.side
        of_handle = of_weights = None
        if ctx.needs_input_grad[0]:
            with span("sum"):
                of_rows = side.unpool(grads, weights, ctx.bags, ctx.trace, ctx.options.scale_grad_by_freq)
            of_handle = ctx.handle.receive(of_rows, ctx.next_functions[0][0])
        if ctx.needs_input_grad[2]:
            of_weights = side.weight_grads(grads, ctx.rows, ctx.bags).to(weights.device, weights.dtype)
        return of_handle, None, of_weights, None, None
