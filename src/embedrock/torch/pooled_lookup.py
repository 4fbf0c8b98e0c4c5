"""Rows pooled into bags as a tensor, and the gradients back to the handle and to the positions' weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embedrock import kernels
from embedrock.gradients import RowGradients
from embedrock.plan import Plan
from embedrock.torch.handle import Handle
from embedrock.torch.lookup import Options, as_asked, deliver, host_grads


class Bags(NamedTuple):
    """A batch of bags.

    Attributes:
        plan: of the n positions of all bags.
        offsets: int64 (bags + 1,); bag b holds the positions ``offsets[b]`` to ``offsets[b + 1]``.
        skip: index in ``plan.ids`` of the id that counts in no bag, -1 for none.
        mode: "sum", "mean" or "max".
    """

    plan: Plan
    offsets: np.ndarray
    skip: int
    mode: str

    def bag_of_position(self) -> np.ndarray:
        """Return the bag of each position: int32 (n,)."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))


def pool(rows: np.ndarray, weights: Tensor | None, bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """Pool unique rows float32 (unique, dim).

    Returns:
        The bags float32 (bags, dim), and what `unpool` needs: the factors of sums, or the places of maxima.
    """
    count, dim = len(bags.offsets) - 1, rows.shape[1]
    out = np.empty((count, dim), np.float32)
    cpu, inverse = kernels.cpu, bags.plan.inverse
    if bags.mode == "max":
        trace = np.empty((count, dim), np.int32)
        cpu.runtime.run(cpu.pooling.pool_max, count, rows, inverse, bags.offsets, bags.skip, out, trace, grain=256)
    else:
        trace = np.empty(count, np.float32)
        args = rows, inverse, bags.offsets, _factors(weights), bags.skip, bags.mode == "mean", out, trace
        cpu.runtime.run(cpu.pooling.pool_sum, count, *args, grain=256)
    return out, trace


def unpool(grads: np.ndarray, weights: Tensor | None, bags: Bags, trace: np.ndarray) -> RowGradients:
    """Return the gradients of the rows from those of the bags, float32 (bags, dim)."""
    plan = bags.plan
    values, squares = (
        np.empty((len(plan.ids), grads.shape[1]), np.float32),
        np.empty(len(plan.ids), np.float64),
    )
    cpu, segments = kernels.cpu, (grads, bags.bag_of_position(), plan.starts, plan.order)
    if bags.mode == "max":
        args = *segments, trace, values, squares
        cpu.runtime.run(cpu.pooling.pool_max_backward, len(values), *args, grain=256)
    else:
        args = *segments, _factors(weights), trace, bags.skip, values, squares
        cpu.runtime.run(cpu.pooling.pool_sum_backward, len(values), *args, grain=256)
    return RowGradients(plan, values, float(squares.sum()))


def _factors(weights: Tensor | None) -> np.ndarray:
    """Return the positions' weights as float32, (0,) for ones."""
    if weights is None:
        return np.empty(0, np.float32)
    return weights.detach().to("cpu", torch.float32).contiguous().numpy()


class PooledLookup(torch.autograd.Function):
    """Pooled rows of a plan; the gradients go to the table's handle and to the weights of the positions."""

    @staticmethod
    def forward(ctx: Any, handle: Handle, weights: Tensor | None, bags: Bags, options: Options) -> Tensor:
        """Return the bags, (bags, dim), of positions with weights (n,), or None for ones."""
        rows = handle.table.read_rows(bags.plan)
        out, trace = pool(rows, weights, bags)
        ctx.handle, ctx.bags, ctx.options, ctx.trace = handle, bags, options, trace
        ctx.rows = rows if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(weights)  # so that autograd notices when they are written to before the backward
        return deliver(out, handle.device, options.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Sum the gradient by row, for the handle, and by position, for the weights."""
        grads, (weights,) = host_grads(grad_outputs[0]), ctx.saved_tensors
        handle_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            of_rows = unpool(grads, weights, ctx.bags, ctx.trace)
            handle_grad = ctx.handle.receive(as_asked(of_rows, ctx.options))
        if ctx.needs_input_grad[1]:
            weight_grad = deliver(_weight_grads(grads, ctx.rows, ctx.bags), weights.device, weights.dtype)
        return handle_grad, weight_grad, None, None


def _weight_grads(grads: np.ndarray, rows: np.ndarray, bags: Bags) -> np.ndarray:
    out = np.empty(len(bags.plan.inverse), np.float32)
    args = grads, rows, bags.plan.inverse, bags.bag_of_position(), bags.skip, out
    kernels.cpu.runtime.run(kernels.cpu.pooling.weight_grads, len(out), *args)
    return out
