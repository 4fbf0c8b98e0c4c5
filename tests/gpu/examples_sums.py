"""How sums.py and pooling.py are called, for compile_all.py."""

from __future__ import annotations

import itertools

import torch

from embedrock.kernels.gpu import pooling, sums

N = 100
ORDER, COUNT = torch.arange(N), torch.full((1,), N, dtype=torch.int32)
INVERSE, STARTS = torch.zeros(N, dtype=torch.int32), torch.zeros(N + 1, dtype=torch.int32)
PLAN = STARTS, ORDER, INVERSE, COUNT
SQUARES, SKIP = torch.zeros(N, dtype=torch.float64), torch.zeros(1, dtype=torch.int32)
WIDE = 4096
DTYPES = torch.float32, torch.bfloat16, torch.float16


def example_sums() -> None:
    for dim, dtype in itertools.product((1, 17, 64, WIDE), DTYPES):
        values = torch.zeros(N, dim)
        partial = torch.zeros(sums.partial_rows(N), dim)
        sums.sum_segments(values.to(dtype), *PLAN, SKIP, partial, values, SQUARES)
        sums.row_squares(values, COUNT, SQUARES)


def example_norm() -> None:
    sums.norm(torch.zeros((), dtype=torch.float64), torch.zeros(2))


def example_pooling() -> None:
    for dim in (17, 64, WIDE):
        values, partial = torch.zeros(N, dim), torch.zeros(sums.partial_rows(N), dim)
        argmax = torch.zeros((N, dim), dtype=torch.int32)
        for weights, mean in itertools.product((torch.ones(N), torch.ones(0)), (False, True)):
            pooling.pool_sum(values, INVERSE, ORDER, weights, SKIP, mean, values, torch.ones(N))
            args = PLAN, weights, torch.ones(N), SKIP, partial, values, SQUARES
            pooling.pool_sum_backward(values, INVERSE, *args)
        pooling.pool_max(values, INVERSE, ORDER, SKIP, values, argmax)
        pooling.pool_max_backward(values, INVERSE, PLAN, argmax, SKIP, partial, values, SQUARES)
        pooling.weight_grads(values, values, INVERSE, INVERSE, SKIP, torch.zeros(N))
