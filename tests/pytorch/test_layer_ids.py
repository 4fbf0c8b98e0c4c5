"""What layers say of ids that are none: which layer of the model, which id, where it was given, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert

BAGS = torch.tensor([1, 2, 50, 3, 4])
JAGGED = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 50]), BAGS[:0]], layout=torch.jagged)


def tower() -> Any:
    return nn.ModuleDict({"user": ert.Embedding(50, 4), "tags": ert.EmbeddingBag(50, 4)})


@pytest.fixture
def model() -> Any:
    made = nn.ModuleDict({"left": tower(), "right": tower()})
    ert.Adam(made)
    return made


@pytest.mark.parametrize("trains", [True, False])
def test_the_layer_and_the_place(model: Any, trains: bool):
    model.requires_grad_(trains)
    user, tags = model["right"]["user"], model["right"]["tags"]
    for call, label, got in (
        (lambda: user(torch.full((32, 26), 50)), "user', Embedding", "50 at [0, 0] of ids of shape (32, 26)"),
        (lambda: user(torch.tensor([[1, 2], [3, -1]])), "user', Embedding", "-1 at [1, 1] of ids of shape (2, 2)"),
        (lambda: user(JAGGED), "user', Embedding", "50 at [1, 1] of jagged ids (3, j)"),
        (lambda: tags(BAGS[1:].view(2, 2)), "tags', EmbeddingBag", "50 at [0, 1] of ids of shape (2, 2)"),
        (lambda: tags(JAGGED), "tags', EmbeddingBag", "50 at [1, 1] of jagged ids (3, j)"),
        (
            lambda: tags(BAGS, torch.tensor([0, 2, 2])),
            "tags', EmbeddingBag",
            "50 at [2] of ids of shape (5,), in bag 2",
        ),
    ):
        with pytest.raises(er.IdError) as caught:
            call()
        expected = f"`ids` of 'right.{label}(50, 4) must lie in [0, 50): got {got}. For "
        assert str(caught.value).startswith(expected)


def test_a_model_without_an_optimizer_is_named_by_its_state():
    saved, loaded = tower(), tower()
    loaded.load_state_dict(saved.state_dict())
    for each in (saved, loaded):
        with pytest.raises(er.IdError, match=r"`ids` of 'user', Embedding\(50, 4\)"):
            each["user"](BAGS)


def test_other_errors_of_a_table_name_its_layer(model: Any):
    layer = model["left"]["user"]
    optimizer = ert.SGD(model, lr=0.1)
    out = layer(torch.tensor([[1, 2], [7, 3]]))
    out.register_hook(lambda grad: grad * torch.tensor([[[1.0], [1.0]], [[torch.nan], [1.0]]]))
    out.sum().backward()
    told = (
        r"gradients of 'left\.user', Embedding\(50, 4\) must be finite: got NaN or Inf in 1 of 4 rows, first ids \[7\]"
    )
    with pytest.raises(er.NonFiniteGradientError, match=told):
        optimizer.step()
    layer.table.close()
    told = (
        rf"^'left\.user', Embedding\(50, 4\) is closed, since {re.escape(__file__)}:\d+\. Make a new Table, or a layer"
    )
    with pytest.raises(er.ClosedTableError, match=told):
        layer(torch.tensor([1]))


def test_a_table_on_disk_is_named_by_its_layer_and_its_path(tmp_path: Path):
    model: Any = nn.ModuleDict({"user": ert.Embedding(50, 4, path=tmp_path / "t.rock")})
    ert.Adam(model)
    named = re.escape(f"'user', Embedding(50, 4) at {str(tmp_path / 't.rock')!r}")
    with pytest.raises(er.IdError, match=rf"`ids` of {named} must lie in"):
        model["user"](BAGS)
    model["user"].table.close()
    with pytest.raises(
        er.ClosedTableError, match=rf"^{named} is closed, since .*\.py:\d+\. Open it again, er\.open\('.*t.rock'\)"
    ):
        model["user"](torch.tensor([1]))


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        (torch.tensor([[1, 2], [50, 3]]), "[1, 0] of ids of shape (2, 2)"),
        (np.array([[1, 2], [50, 3]]), "[1, 0] of ids of shape (2, 2)"),
        ((torch.tensor([1, 2, 3]), torch.tensor([4, 50])), "[1] of ids of shape (2,)"),
        (JAGGED, "[1, 1] of jagged ids (3, j)"),
    ],
    ids=["tensor", "array", "tuple", "jagged"],
)
def test_prefetch_names_the_place_in_the_batch(tmp_path: Path, ids: Any, place: str):
    layer = ert.Embedding(50, 4, path=tmp_path / "t.rock")
    batches = ert.prefetch([{"user": torch.tensor([1])}, {"user": ids}], {layer: lambda batch: batch["user"]}, 2)
    next(batches)
    with pytest.raises(er.IdError) as caught:
        next(batches)
    named = f"Embedding(50, 4) at {str(tmp_path / 't.rock')!r}"
    assert str(caught.value).startswith(f"`ids` of {named} must lie in [0, 50): got 50 at {place}. ")
    layer.table.close()


def refused(ids: Any) -> str:
    layers = [ert.Embedding(None, 4, name="x"), ert.EmbeddingBag(None, 4, name="x")]
    texts = []
    for layer in layers:
        with pytest.raises(er.IdTypeError) as caught:
            layer(ids)
        texts.append(str(caught.value))
    assert texts[1] == texts[0].replace("Embedding(", "EmbeddingBag(")
    return texts[0]


@pytest.mark.parametrize(
    ("ids", "text", "advice"),
    [
        (
            torch.tensor([2**64 - 5, 3], dtype=torch.uint64),
            r"got torch.uint64, .* num_embeddings=None: ",
            "ids.view(torch.int64)",
        ),
        (torch.tensor([1.0, 3.0]), "got torch.float32, torch.strided. Convert it", ".long()"),
        (torch.tensor([1], dtype=torch.int16), "got torch.int16, torch.strided. Convert it", ".long()"),
        (torch.tensor([True]), "got torch.bool, torch.strided. Convert it", ".long()"),
        (torch.eye(3).long().to_sparse(), "got torch.int64, torch.sparse_coo. Convert it", ".to_dense()"),
        ([1, 2], "got list. Make a tensor of it: ", "torch.from_numpy(np.asarray(ids).astype('int64'))"),
        (np.array([1, 2]), "got ndarray. Make a tensor of it: ", "torch.from_numpy(np.asarray(ids).astype('int64'))"),
        ([[1, 2], [3]], "got list. .* Make tensors of both, torch.from_numpy", "er.jagged(ids)"),
    ],
    ids=["uint64", "float", "int16", "bool", "sparse", "list", "array", "lists of several lengths"],
)
def test_the_advice_works(ids: Any, text: str, advice: str):
    told = refused(ids)
    assert re.search(text, told)
    assert advice in told
    space = {"torch": torch, "ids": ids, "np": np, "er": er}
    converted = eval(f"ids{advice}" if advice.startswith(".") else advice, space)
    if isinstance(converted, tuple):
        assert ert.EmbeddingBag(None, 4)(*map(torch.from_numpy, converted)).shape == (2, 4)
        return
    rows = ert.Embedding(None, 4)(converted)
    assert len(rows) == len(ids)


def test_ids_that_are_no_numbers():
    told = refused(["a", "b"])
    assert (
        "must be a dense tensor of torch.int32 or torch.int64: got list of dtype <U1, 'a' at [0] of ids of shape (2,)"
        in told
    )
    assert "er.Vocabulary(path).add(ids)" in told
    assert "got torch.float32, torch.strided, nan at [1] of ids of shape (2,)" in refused(torch.tensor([1, torch.nan]))
    assert "got torch.float32, torch.strided, 0.5 at [1, 0] of ids of shape (2, 1)" in refused(
        torch.tensor([[1], [0.5]])
    )


@pytest.mark.parametrize(
    "ids", [None, "word", {1, 2}, {"a": 1}, (k for k in (1, 2))], ids=lambda ids: type(ids).__name__
)
def test_what_pytorch_makes_no_tensor_of(ids: Any):
    """No text may say that it does."""
    told = refused(ids)
    assert f"got {type(ids).__name__} of dtype " in told
    assert "torch.as_tensor" not in told


def test_lists_of_hashes_that_are_uint64():
    ids = [3, 2**64 - 5]
    told = refused(ids)
    found = re.search(r"np\.asarray\(ids, np\.uint64\)\.view\(np\.int64\)", told)
    assert found is not None
    assert told.endswith("Make a tensor of that: torch.from_numpy(np.asarray(ids).astype('int64')).")
    assert ert.Embedding(None, 4)(torch.from_numpy(eval(found[0], {"np": np, "ids": ids}))).shape == (2, 4)
