"""Random sequences of whatever a training loop does to gradients, on an Embedrock layer and on PyTorch's own."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from twins import DIM, ROWS, check_equal, embedding_twins, gradient_of

import embedrock.torch as ert
from slow import examples

BATCH = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5)
ACTION = st.one_of(
    st.tuples(st.just("backward"), BATCH, st.integers(1, 3)),
    st.tuples(st.just("look"), BATCH),
    st.tuples(st.just("scale"), st.sampled_from([0.5, 2.0, -1.0, 0.3])),
    st.tuples(st.just("zero"), st.booleans(), st.booleans()),
    st.just(("step",)),
)


class Loop:
    """One layer, its parameter and its optimizer."""

    def __init__(self, layer: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (self.parameter,) = layer.parameters()
        self.layer, self.optimizer = layer, optimizer

    def loss(self, ids: list[int], uses: int) -> torch.Tensor:
        batch = torch.tensor(ids)
        weights = torch.linspace(-1, 2, len(ids))[:, None]
        return torch.stack([(self.layer((batch + k) % ROWS).sin() * weights).sum() for k in range(uses)]).sum()

    def backward(self, ids: list[int], uses: int) -> None:
        self.loss(ids, uses).backward()

    def look(self, ids: list[int]) -> None:
        torch.autograd.grad(self.loss(ids, 2), [self.parameter])

    def scale(self, factor: float) -> None:
        if self.parameter.grad is not None:
            self.parameter.grad *= factor

    def zero(self, by_optimizer: bool, set_to_none: bool) -> None:
        (self.optimizer if by_optimizer else self.layer).zero_grad(set_to_none)

    def step(self) -> None:
        self.optimizer.step()


@settings(max_examples=examples(150))
@given(actions=st.lists(ACTION, max_size=12))
def test_any_loop_like_torch(actions):
    mine, theirs = embedding_twins(ROWS, DIM)
    loops = Loop(mine, ert.SGD(mine, lr=0.1)), Loop(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1))
    for name, *arguments in actions:
        for loop in loops:
            getattr(loop, name)(*arguments)
        if name == "step":
            check_equal(mine, theirs)
    assert (mine.handle.grad is None) == (theirs.weight.grad is None)
    if theirs.weight.grad is not None:
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
        assert mine.handle.grad is not None
        np.testing.assert_allclose(abs(mine.handle.grad), theirs.weight.grad.norm(), rtol=1e-5, atol=1e-6)
