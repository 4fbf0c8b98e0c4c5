"""`ert.EmbeddingBag` against `nn.EmbeddingBag`, argument by argument."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from twins import DIM, ROWS, bag_twins, check_equal, gradient_of, weight_of

import embedrock as er
import embedrock.torch as ert

ARGUMENTS = [
    {},
    {"padding_idx": 3},
    {"padding_idx": -1},
    {"max_norm": 1.0},
    {"max_norm": 1.0, "norm_type": 1.0, "padding_idx": 4},
]
# ids and offsets: 2-D; ragged with empty bags first, between and last; ids that start after 0 repeat; no ids; no bags
BATCHES = {
    "rows": (torch.tensor([[1, 3, 1], [22, 3, 3], [4, 5, 6]]), None),
    "ragged": (torch.tensor([3, 1, 3, 4, 22, 3, 1, 1]), torch.tensor([0, 0, 2, 5, 5, 8])),
    "int32": (torch.tensor([3, 1, 3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)),
    "only padding": (torch.tensor([3, 3, 4, 3]), torch.tensor([0, 2])),
    "no ids": (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])),
}


def both_losses(mine: ert.EmbeddingBag, theirs: torch.nn.EmbeddingBag, *batch: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call both, compare, and return two equal losses."""
    out, expected = mine(*batch), theirs(*batch)
    torch.testing.assert_close(out, expected)
    factors = torch.linspace(-1, 2, out.numel()).reshape(out.shape)
    return (out * factors).square().sum(), (expected * factors).square().sum()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_like_torch(mode: str, arguments: dict, batch: tuple[Tensor, Tensor | None]):
    mine, theirs = bag_twins(mode=mode, **arguments)
    rows, dense = ert.SGD(mine, lr=0.3), torch.optim.SGD(theirs.parameters(), lr=0.3)
    for _ in range(2):
        losses = both_losses(mine, theirs, *batch)
        for loss, optimizer in zip(losses, (rows, dense), strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert theirs.weight.grad is not None
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)
        rows.step()
        dense.step()
        check_equal(mine, theirs)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradients_scaled_by_frequency(mode: str, padding_idx: int | None):
    # nn.EmbeddingBag divides by the count of another id (pytorch/pytorch#190063), so the oracle is nn.Embedding.
    mine = ert.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx, scale_grad_by_freq=True)
    theirs = torch.nn.Embedding(ROWS, DIM, padding_idx=padding_idx, scale_grad_by_freq=True)
    with torch.no_grad():
        theirs.weight.copy_(weight_of(mine))
    ids = BATCHES["rows"][0]
    counted = torch.ones(ids.shape) if padding_idx is None else (ids != padding_idx).float()
    expected = (theirs(ids) * counted[:, :, None]).sum(1) / (counted.sum(1)[:, None] if mode == "mean" else 1)
    torch.testing.assert_close(mine(ids), expected)
    mine(ids).square().sum().backward()
    expected.square().sum().backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


@st.composite
def ragged(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Ids, and bounds of bags from 0 to at most their number."""
    ids = draw(st.lists(st.integers(0, ROWS - 1), max_size=30))
    inner = draw(st.lists(st.integers(0, len(ids)), max_size=6))
    return ids, [0, *sorted(inner)]


@given(
    batch=ragged(),
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding_idx=st.none() | st.integers(-ROWS, ROWS - 1),
    include_last_offset=st.booleans(),
)
def test_any_bags_like_torch(batch, mode, padding_idx, include_last_offset):
    ids, bounds = batch
    if include_last_offset:
        bounds = [*bounds, len(ids)]
    mine, theirs = bag_twins(mode=mode, padding_idx=padding_idx, include_last_offset=include_last_offset)
    losses = both_losses(mine, theirs, torch.tensor(ids, dtype=torch.int64), torch.tensor(bounds))
    for loss in losses:
        loss.backward()
    assert theirs.weight.grad is not None
    torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


@given(batch=ragged(), padding_idx=st.none() | st.integers(0, ROWS - 1), frozen=st.booleans())
def test_per_sample_weights_like_torch(batch, padding_idx, frozen):
    ids, bounds = torch.tensor(batch[0], dtype=torch.int64), torch.tensor(batch[1])
    mine, theirs = bag_twins(mode="sum", padding_idx=padding_idx)
    weights = torch.linspace(-2, 3, len(ids)).requires_grad_(), torch.linspace(-2, 3, len(ids)).requires_grad_()
    for layer in (mine, theirs):
        layer.requires_grad_(not frozen)
    out, expected = mine(ids, bounds, weights[0]), theirs(ids, bounds, weights[1])
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    if not frozen:
        assert theirs.weight.grad is not None
        torch.testing.assert_close(gradient_of(mine), theirs.weight.grad)


def test_per_sample_weights_of_a_matrix_of_ids():
    mine, theirs = bag_twins(mode="sum")
    ids, weights = torch.tensor([[1, 2], [2, 2]]), torch.tensor([[0.5, -1.0], [2.0, 3.0]])
    torch.testing.assert_close(mine(ids, None, weights), theirs(ids, None, weights))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids, None, weights), theirs(ids, None, weights))


def test_weights_written_to_before_the_backward_are_noticed():
    layer = ert.EmbeddingBag(ROWS, DIM, mode="sum")
    weights = torch.ones(1, 3)
    out = layer(torch.tensor([[1, 2, 3]]), None, weights)
    weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_ids_beyond_the_last_offset_belong_to_no_bag():
    layer = ert.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
    ids, weights = torch.tensor([1, 2, 3, 4]), torch.ones(4, requires_grad=True)
    out = layer(ids, torch.tensor([0, 1, 2]), weights)
    assert out.shape == (2, DIM)
    out.sum().backward()
    assert gradient_of(layer).abs().sum(1).nonzero().flatten().tolist() == [1, 2]
    assert weights.grad is not None
    assert weights.grad[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_16_bit_rows(dtype: torch.dtype, mode: str):
    mine, theirs = bag_twins(mode=mode, dtype=dtype)
    ids = torch.tensor([[1, 2, 1], [3, 4, 5]])
    out, expected = mine(ids), theirs(ids)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(threads: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embedrock.kernels.cpu.threads.LEAST_WORK", 1)
    before = er.get_threads()
    generator = torch.Generator().manual_seed(0)
    ids, weights = torch.randint(0, 3000, (2000, 6), generator=generator), torch.randn(2000, 6, generator=generator)
    try:
        results = []
        for count in (2, threads):
            er.set_threads(count)
            layer = ert.EmbeddingBag(3000, 9, mode="sum", seed=0)
            trained = weights.clone().requires_grad_()
            out = layer(ids, None, trained)
            out.square().sum().backward()
            results.append((out.detach(), gradient_of(layer), trained.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        er.set_threads(before)


def test_from_pretrained():
    weights = torch.randn(ROWS, DIM)
    arguments = {"mode": "sum", "padding_idx": 2, "include_last_offset": True}
    mine = ert.EmbeddingBag.from_pretrained(weights, **arguments)
    theirs = torch.nn.EmbeddingBag.from_pretrained(weights, **arguments)
    batch = torch.tensor([1, 2, 5]), torch.tensor([0, 2, 3])
    torch.testing.assert_close(mine(*batch), theirs(*batch))
    assert not mine(*batch).requires_grad


def test_max_has_no_frequencies():
    with pytest.raises(ValueError, match="mode 'max'"):
        ert.EmbeddingBag(ROWS, DIM, mode="max", scale_grad_by_freq=True)


def test_repr_is_that_of_torch():
    theirs = repr(torch.nn.EmbeddingBag(7, 3, mode="sum", padding_idx=0, max_norm=2.0))
    assert repr(ert.EmbeddingBag(7, 3, mode="sum", padding_idx=0, max_norm=2.0)).startswith(
        f"{theirs[:-1]}; 1 row touched"
    )


IDS, FLAT = torch.tensor([[1, 2]]), torch.tensor([1, 2])
WRONG = {
    "unknown mode": (lambda: ert.EmbeddingBag(3, 2, mode="min"), ValueError, "sum, mean, max"),
    "2-D with offsets": (lambda: ert.EmbeddingBag(3, 2)(IDS, torch.tensor([0])), ValueError, "Leave them out"),
    "1-D without": (lambda: ert.EmbeddingBag(3, 2)(FLAT), ValueError, "no offsets"),
    "3-D": (lambda: ert.EmbeddingBag(3, 2)(IDS[None]), ValueError, r"shape \(1, 1, 2\)"),
    "2-D offsets": (lambda: ert.EmbeddingBag(3, 2)(FLAT, IDS), ValueError, r"offsets of shape \(1, 2\)"),
    "float offsets": (lambda: ert.EmbeddingBag(3, 2)(FLAT, torch.zeros(1)), TypeError, "the offsets of"),
    "late start": (lambda: ert.EmbeddingBag(3, 2)(FLAT, torch.tensor([1])), ValueError, r"start at 0.*got \[1\]"),
    "decreasing": (lambda: ert.EmbeddingBag(3, 2)(FLAT, torch.tensor([0, 2, 1])), ValueError, "not decrease"),
    "beyond the end": (lambda: ert.EmbeddingBag(3, 2)(FLAT, torch.tensor([0, 3])), ValueError, "2 ids"),
    "no last offset": (
        lambda: ert.EmbeddingBag(3, 2, include_last_offset=True)(FLAT, torch.empty(0, dtype=torch.int64)),
        ValueError,
        "start at 0",
    ),
    "weights of a mean": (lambda: ert.EmbeddingBag(3, 2)(IDS, None, torch.ones(1, 2)), NotImplementedError, "sum"),
    "weights' shape": (
        lambda: ert.EmbeddingBag(3, 2, mode="sum")(IDS, None, torch.ones(2)),
        ValueError,
        r"shape \(1, 2\)",
    ),
    "weights' dtype": (
        lambda: ert.EmbeddingBag(3, 2, mode="sum")(IDS, None, torch.ones(1, 2).double()),
        ValueError,
        "torch.float32",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_calls(call, error, text):
    with pytest.raises(er.EmbedrockError, match=text) as caught:
        call()
    assert isinstance(caught.value, error)


@pytest.mark.parametrize("offsets", [[], [1], [0, 9]], ids=str)
def test_an_error_shows_the_offsets_that_were_given(offsets: list[int]):
    bag = ert.EmbeddingBag(9, 2)
    with pytest.raises(er.ArgumentError, match=re.escape(f"not exceed the 5 ids: got {offsets}.")):
        bag(torch.arange(5), torch.tensor(offsets, dtype=torch.int64))
