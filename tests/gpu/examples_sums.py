"""How sums.py and pooling.py are called, for compile_all.py."""

from __future__ import annotations

import itertools

import torch

from embedrock.kernels.gpu import pooling, sums

N = 100
ORDER, COUNT = torch.arange(N), torch.full((1,), N, dtype=torch.int32)
INVERSE, STARTS = torch.zeros(N, dtype=torch.int32), torch.zeros(N + 1, dtype=torch.int32)
PLAN = STARTS, ORDER, INVERSE, COUNT
NORMS, SKIP = torch.zeros(3), torch.zeros(1, dtype=torch.int32)
LAYOUT = torch.tensor([0, N, 0, N]), N
WIDE = 4096
DTYPES = torch.float32, torch.bfloat16, torch.float16


def scratch(dim: int, tables: int = 1) -> tuple[torch.Tensor, ...]:
    squares, partial = torch.zeros(sums.square_sums(N, dim, tables)), torch.zeros(sums.partial_rows(N, tables), dim)
    return partial, squares.double(), torch.zeros(9, dtype=torch.int32)


def example_sums() -> None:
    for dim, dtype in itertools.product((64, 17, 1, WIDE), DTYPES):
        values = torch.zeros(N, dim)
        sums.sum_shares(sums.PLAIN, values.to(dtype), sums.NO_SHARE, PLAN, SKIP, scratch(dim), values, NORMS, *LAYOUT)
        _, squares, tickets = scratch(dim)
        sums.norm(values, COUNT, squares, tickets, NORMS)


def example_pooling() -> None:
    for dim in (64, 17, WIDE):
        values = torch.zeros(N, dim)
        argmax = torch.zeros((N, dim), dtype=torch.int32)
        for weights in (torch.ones(N), torch.ones(0)):
            pooling.pool(sums.POOLED, values, INVERSE, INVERSE, weights, INVERSE, values, torch.ones(N))
            share = INVERSE, weights, torch.ones(N)
            sums.sum_shares(sums.POOLED, values, share, PLAN, SKIP, scratch(dim), values, NORMS, *LAYOUT)
        pooling.pool(sums.MAXIMA, values, INVERSE, INVERSE, torch.ones(0), INVERSE, values, argmax)
        share = INVERSE, torch.ones(0), argmax
        sums.sum_shares(sums.MAXIMA, values, share, PLAN, SKIP, scratch(dim), values, NORMS, *LAYOUT)
        pooling.weight_grads(values, values, INVERSE, INVERSE, INVERSE, torch.zeros(N))
