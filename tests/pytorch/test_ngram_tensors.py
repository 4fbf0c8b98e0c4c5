"""`er.Ngrams` on tensors: the ids of arrays, eagerly, compiled and exported; and a model that reads rows by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from slow import examples, slow_but

pytestmark = [  # of the compilers' own imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

VALUES = {
    "own": er.Ngrams(10**6, 50),
    "open": er.Ngrams(None, 50, orders=(1, 2, 4), boundary=3),
    "xor, folded": er.Ngrams(None, 50, heads=2, boundary=3, pad=7, mix="xor", token_map=[k // 3 for k in range(50)]),
    "shared rows": er.Ngrams(None, 50, heads=2, multipliers=np.arange(1, 13).reshape(4, 3) * 10**9 + 7, moduli=9973),
    "no multiplier": er.Ngrams(50, 50, orders=(2,), heads=1, multipliers=[0, 0], moduli=5),
    "tokens alone": er.Ngrams(1000, 50, orders=(1,), boundary=3),
}
EVERY = pytest.mark.parametrize("grams", VALUES.values(), ids=VALUES)
TOKENS = np.random.default_rng(0).integers(0, 50, (3, 17))
TOKENS[:, [4, 5, 11]] = 3


@EVERY
@settings(max_examples=examples(60))
@given(cut=st.integers(0, 17), first=st.integers(0, 17), dtype=st.sampled_from([torch.int32, torch.int64, torch.uint8]))
def test_the_ids_of_arrays(grams: er.Ngrams, cut: int, first: int, dtype: torch.dtype):
    first = min(first, max(cut - max(grams.orders) + 1, 0))
    tokens = torch.from_numpy(TOKENS).to(dtype)
    ids = grams.ids(tokens[:, cut:], tokens[:, first:cut])
    assert ids.dtype == torch.int64
    assert np.array_equal(ids, grams.ids(TOKENS)[:, cut:])
    assert np.array_equal(grams.ids(tokens[0]), grams.ids(TOKENS[0]))
    assert np.array_equal(grams.ids(tokens[:, cut:], TOKENS[:, first:cut]), ids)  # history as an array


@pytest.fixture
def fresh_compiler() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("grams", slow_but(VALUES, "xor, folded"))
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_for_any_length(grams: er.Ngrams):
    ids_of: Any = torch.compile(grams.ids, fullgraph=True, backend="aot_eager")
    tokens = torch.from_numpy(TOKENS)
    for cut in (2, 9, 16):
        assert np.array_equal(ids_of(tokens[:, cut:], tokens[:, :cut]), grams.ids(TOKENS)[:, cut:])


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_all_values():
    """Compiled for a block of a model, which another block has with other numbers."""
    ids_of: Any = torch.compile(lambda grams, tokens: grams.ids(tokens), fullgraph=True, backend="aot_eager")
    tokens = torch.from_numpy(TOKENS)
    for grams in (er.Ngrams(10**6, 50, seed=seed, heads=2) for seed in range(3)):
        assert torch.equal(ids_of(grams, tokens), grams.ids(tokens))


class Ids(nn.Module):
    def __init__(self, grams: er.Ngrams) -> None:
        super().__init__()
        self.grams = grams

    def forward(self, tokens: Tensor) -> Tensor:
        return self.grams.ids(tokens)


@EVERY
def test_exported(grams: er.Ngrams):
    tokens = torch.from_numpy(TOKENS)
    dynamic = {"tokens": {1: torch.export.Dim("positions", min=2, max=4096)}}
    program = torch.export.export(Ids(grams), (tokens,), dynamic_shapes=dynamic).module()
    assert torch.equal(program(tokens), grams.ids(tokens))
    assert torch.equal(program(tokens[:, :9]), grams.ids(tokens[:, :9]))


@EVERY
def test_wrong_tokens_get_ids_that_layers_refuse(grams: er.Ngrams):
    tokens = torch.from_numpy(TOKENS).clone()
    tokens[1, 6], tokens[2, 8] = 50, -1
    ids = grams.ids(tokens)
    reach = max(grams.orders)
    expected = grams.ids(TOKENS)
    expected[1, 6 : 6 + reach] = expected[2, 8 : 8 + reach] = -1
    assert np.array_equal(ids, expected)
    after = grams.ids(tokens[2:, 9:], tokens[2:, 7:9])  # the wrong one is history
    assert np.array_equal(after, expected[2:, 9:])
    if grams.rows is not None:
        with pytest.raises(er.IdError, match=r"must lie in \[0, \d+\): got -1 at \[1, 6, 0\] of ids"):
            ert.Embedding(grams.rows, 2)(ids)


def test_floats_are_refused():
    for tokens in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(
            er.IdTypeError, match=r"^`tokens` of Ngrams\.ids must be integers .*: got torch\.\w+ of shape"
        ):
            VALUES["own"].ids(tokens)
    with pytest.raises(er.IdTypeError, match=r"`tokens` of Ngrams\.ids .*: got torch\.int64 of shape \(\)"):
        VALUES["own"].ids(torch.tensor(3))
    with pytest.raises(er.IdTypeError, match=r"`history` of Ngrams\.ids .*: got torch\.float32 of shape \(1,\)"):
        VALUES["own"].ids(torch.tensor([3]), torch.ones(1))


class Model(nn.Module):
    """A language model of few weights, with a memory of n-grams."""

    def __init__(self, grams: er.Ngrams) -> None:
        super().__init__()
        self.grams = grams
        self.token = nn.Embedding(50, 8)
        self.memory = ert.Embedding(grams.rows, 4)
        self.head = nn.Linear(8 + 4 * grams.ids_per_token, 50)

    def forward(self, tokens: Tensor, history: Tensor | None = None) -> Tensor:
        rows = self.memory(self.grams.ids(tokens, history)).flatten(-2)
        return self.head(torch.cat([self.token(tokens), rows], -1))


@pytest.mark.parametrize("name", ["own", "open"])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_trains_and_decodes(name: str):
    grams = VALUES[name]
    tokens = torch.from_numpy(TOKENS)
    losses = []
    for make in (lambda model: model, lambda model: torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        model = Model(grams)
        run = make(model)
        optimizer = ert.optimizer(model, rows=ert.Adagrad, dense=torch.optim.Adam, lr=0.1)
        losses.append([])
        for _ in range(5):
            loss = nn.functional.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        with torch.no_grad():
            whole = model(tokens)
            steps = [model(tokens[:, k : k + 1], tokens[:, max(k - 3, 0) : k]) for k in range(tokens.shape[1])]
        torch.testing.assert_close(torch.cat(steps, 1), whole)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
