"""Backwards of several threads on one layer: what a backward brings belongs to that backward."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from twins import DIM, ROWS, check_equal, embedding_twins, gradient_of

import embedrock.torch as ert
from embedrock.torch.training import backward

IDS = torch.tensor([3, 1, 3, 7])


class Pause(torch.autograd.Function):
    """Passes its input on, and calls a function in its backward."""

    @staticmethod
    def forward(ctx, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        ctx.call()
        return grads[0], None


def run(*calls: Callable[[], object]) -> None:
    """Run functions in threads, and raise what one of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result(timeout=60)


def loss_with_pause(layer: nn.Module, call: Callable[[], object], ids: Tensor = IDS) -> Tensor:
    """Return the loss of two lookups, between whose backwards a function is called.

    Autograd begins with what was recorded last, and adds to the handle's gradient when both have brought theirs.
    """
    first = Pause.apply(layer(ids), call)
    return first.square().sum() + layer(ids.flip(0) + 1).square().sum()


@pytest.mark.parametrize("forward", ["no_grad", "training"])
def test_a_lookup_in_another_thread_during_a_backward(forward: str):
    mine, theirs = embedding_twins()

    def look_up() -> None:
        with torch.set_grad_enabled(forward == "training"):
            run(lambda: mine(IDS + 1))

    loss_with_pause(mine, look_up).backward()
    loss_with_pause(theirs, lambda: None).backward()
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize("zeroed", [True, False])
def test_a_backward_in_another_thread_during_a_backward(zeroed: bool):
    mine, theirs = embedding_twins()
    for layer in (mine, theirs):
        layer(IDS + 2).square().sum().backward()
        if zeroed:
            layer.zero_grad()
        loss_with_pause(layer, lambda layer=layer: run(lambda: layer(IDS + 3).sin().sum().backward())).backward()
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad, rtol=1e-6, atol=1e-6)


def test_threads_in_step_with_each_other():
    # Both backwards have brought their rows before either adds to the handle's gradient.
    mine, theirs = embedding_twins()
    for layer in (mine, theirs):
        both = threading.Barrier(2)
        run(*(
            lambda ids=ids, layer=layer, both=both: loss_with_pause(layer, lambda: both.wait(60), ids).backward()
            for ids in (IDS, IDS + 1)
        ))  # fmt: skip
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_many_backwards_in_threads_lose_nothing():
    mine, theirs = embedding_twins()

    def train(layer: nn.Module) -> None:
        for k in range(60):
            (layer((IDS + k) % ROWS) * (k + 1)).sum().backward()

    run(*(lambda: train(mine) for _ in range(3)))
    for _ in range(3):
        train(theirs)
    torch.testing.assert_close(
        gradient_of(mine), theirs.weight.grad, rtol=0, atol=0
    )  # sums of small integers: exact in any order


def test_training_beside_a_reader():
    mine, theirs = embedding_twins()
    rows, dense = ert.SGD(mine, lr=0.01), torch.optim.SGD(theirs.parameters(), lr=0.01)
    done = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not done.is_set():
                mine(IDS)

    def train() -> None:
        try:
            for k in range(100):
                for layer, optimizer in ((mine, rows), (theirs, dense)):
                    optimizer.zero_grad()
                    (layer((IDS + k) % ROWS) * (k % 7)).sum().backward()
                    optimizer.step()
        finally:
            done.set()

    run(train, read)
    check_equal(mine, theirs)


@pytest.mark.parametrize("end", ["whole", "fails", "autograd.grad"])
def test_a_backward_leaves_nothing_behind(end: str):
    layer = ert.Embedding(ROWS, DIM)
    seen: list[weakref.ref[object]] = []

    def note() -> None:
        run_of_autograd = backward.BackwardPass.running()
        assert run_of_autograd is not None
        assert run_of_autograd.gradients or run_of_autograd.brought
        seen.append(weakref.ref(run_of_autograd))
        if end == "fails":
            raise ZeroDivisionError

    loss = loss_with_pause(layer, note)
    gc.disable()
    try:
        if end == "fails":
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        elif end == "whole":
            loss.backward()
        else:
            torch.autograd.grad(loss, [layer.handle])
    finally:
        gc.enable()
    assert [reference() for reference in seen] == [None]
    assert len(backward._running) == 0
