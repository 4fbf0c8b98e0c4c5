"""Rows pooled into bags as a tensor, and the gradients back to the handle and to the positions' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from embedrock.process.spans import span
from embedrock.torch.training.backward import as_it_is
from embedrock.torch.training.handle import Handle
from embedrock.torch.training.lookup import LookupOptions, refuse_second_derivative
from embedrock.torch.training.side import Executor


class PooledLookupState:
    """A lookup of bags that gradients come back to: see `Reading`.

    Args:
        handle: of the rows.
        side: where they are used.
        bags: of the batch.
        options: of the layer.
    """

    def __init__(self, handle: Handle, executor: Executor, bags: Any, options: LookupOptions) -> None:
        self.handle, self.executor, self.bags, self.options = handle, executor, bags, options
        self._trace = self._rows = None

    def read(self, weights: Tensor | None, keeps_rows: bool = False) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones.

        Args:
            weights: of the positions.
            keeps_rows: `weight_grads` will be asked for.
        """
        with span("read"):
            rows = self.executor.read_rows(self.bags.plan)
            out, self._trace = self.executor.pool(rows, weights, self.bags)
        self._rows = rows if keeps_rows else None
        return out.to(self.handle.device, self.options.dtype)

    def receive(self, grads: Tensor, weights: Tensor | None, node: Any) -> Tensor:
        """Sum the gradients of the bags by row, for the handle: see `Handle.receive`."""
        by_frequency = self.options.scale_grad_by_freq
        of_rows = self.executor.unpool(grads.resolve_neg(), weights, self.bags, self._trace, by_frequency)
        return self.handle.receive(of_rows, node)

    def weight_grads(self, grads: Tensor, weights: Tensor) -> Tensor:
        """Return the gradients of the positions' weights: (n,), like `weights`."""
        grads = self.executor.weight_grads(grads.resolve_neg(), self._rows, self.bags)
        return grads.to(weights.device, weights.dtype)


class PooledLookup(torch.autograd.Function):
    """Pooled rows of bags; the gradients go to the table's handle and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, weights: Tensor | None, reading: PooledLookupState) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones."""
        ctx.reading = reading
        ctx.save_for_backward(weights)  # so that autograd notices when they are written to before the backward
        return reading.read(weights, ctx.needs_input_grad[1])

    @staticmethod
    @as_it_is
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Sum the gradient by row, for the handle, and by position, for the weights."""
        refuse_second_derivative()
        (grads,), (weights,), reading = grad_outputs, ctx.saved_tensors, ctx.reading
        of_handle = of_weights = None
        if ctx.needs_input_grad[0]:
            of_handle = reading.receive(grads, weights, ctx.next_functions[0][0])
        if ctx.needs_input_grad[1]:
            of_weights = reading.weight_grads(grads, weights)
        return of_handle, of_weights, None
