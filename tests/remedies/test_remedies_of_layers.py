"""What errors of PyTorch's layers say to do, done: to the state that the error left. No row is lost."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
import programs

torch = pytest.importorskip("torch")
import embedrock.torch as ert  # noqa: E402

SOME = torch.arange(3)


def pasted(text: str, pattern: str, **names: Any) -> Any:
    """Return what the code in a text gives that a pattern finds."""
    found = re.search(pattern, text)
    assert found is not None, text
    return eval(found[0], {"np": np, "er": er, "ert": ert, "torch": torch, **names})


def trained(layer: Any) -> Any:
    """Step rows of a layer; return them."""
    optimizer = ert.Adam(layer)
    layer(SOME).sum().backward()
    optimizer.step()
    return layer(SOME).detach()


def test_a_reference_given_to_a_layer_in_ram(tmp_path: Path):
    path = tmp_path / "users.rock"
    layer = ert.Embedding(100, 4, path=path)
    rows, other = trained(layer), ert.Embedding(100, 4)
    layer.table.commit()
    state = layer.state_dict()
    with pytest.raises(er.ArgumentError, match="got a reference to commit") as caught:
        other.load_state_dict(state)
    pasted(str(caught.value), r"layer\.table\.load_state\(.*\)(?=\.)", layer=other, path=path)
    assert other(SOME).equal(rows)
    layer.table.close()


def test_a_layer_on_disk_for_another_process(tmp_path: Path):
    layer = ert.Embedding(100, 4, path=tmp_path / "users.rock")
    rows = trained(layer)
    layer.table.commit()
    with pytest.raises(er.UnsupportedError, match="cannot be pickled") as caught:
        pickle.dumps(layer)
    assert "state" not in str(caught.value).partition("cannot")[2]
    code = re.findall(r"er\.open\(.*?mode=\"r\"\)", str(caught.value))[0]
    program = (
        f"import embedrock as er, embedrock.torch as ert, torch\n"
        f"print(ert.Embedding({code})(torch.arange(3)).detach().numpy().tobytes().hex())"
    )
    found = programs.run(program, programs.TORCH)
    assert found.stdout.strip() == rows.numpy().tobytes().hex()
    layer.table.close()


def test_ids_with_offsets_where_rows_are_wanted():
    collection = ert.EmbeddingCollection({"user": ert.Embedding(10, 2)})
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    with pytest.raises(er.IdTypeError, match="are for bags") as caught:
        collection({"user": (ids, offsets)})
    nested = pasted(str(caught.value), r"torch\.nested\..*\)(?=\.)", ids=ids, offsets=offsets)
    assert [len(part) for part in nested.unbind()] == [2, 1]
    assert collection({"user": nested})["user"].values().shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16])
def test_tensors_that_are_no_ids(dtype: Any):
    layer, ids = ert.Embedding(100, 4), torch.tensor([1, 2], dtype=dtype)
    with pytest.raises(er.IdTypeError) as caught:
        layer(ids)
    assert pasted(str(caught.value), r"ids\.long\(\)", ids=ids).tolist() == [1, 2]
    if dtype.is_floating_point:
        ids = torch.tensor([1, torch.nan], dtype=dtype)
        with pytest.raises(er.IdTypeError) as caught:
            layer(ids)
        assert pasted(str(caught.value), r"torch\.where\(.*?long\(\)", ids=ids).tolist() == [1, 0]
        assert pasted(str(caught.value), r"ids\[.*?long\(\)", ids=ids).tolist() == [1]
        bits = round(1 - np.log2(torch.finfo(dtype).eps))
        for ids in (torch.tensor([2.0 ** (bits + 1)], dtype=dtype), torch.tensor([2.0**60, torch.nan], dtype=dtype)):
            with pytest.raises(er.IdTypeError, match=rf"Above 2\*\*{bits} not every whole number is a torch") as caught:
                layer(ids)
            assert "long" not in str(caught.value)


def test_a_model_of_open_ids_is_frozen_by_those_that_were_stepped():
    layer = ert.Embedding(None, 4)
    rows, model = trained(layer), torch.nn.Sequential(layer)
    with pytest.raises(er.ArgumentError, match="has open ids") as caught:
        ert.freeze(model)
    ids = pasted(str(caught.value), r"layer\.table\.export\(\)\[0\]", layer=layer)
    frozen = pasted(str(caught.value), r"ert\.freeze\(model, \{layer: ids\}\)", model=model, layer=layer, ids=ids)
    assert frozen(SOME).equal(rows)


def test_a_weight_that_a_layer_has_not():
    layer = ert.Embedding(10, 2)
    rows = trained(layer)
    with pytest.raises(AttributeError, match="has no attribute 'weight'") as caught:
        _ = layer.weight
    text = str(caught.value)
    assert pasted(text, r"layer\(torch\.arange\(n\)\)", layer=layer, n=3).detach().equal(rows)
    assert (pasted(text, r"layer\.table\.lookup\(ids\)", layer=layer, ids=[0, 1, 2]) == rows.numpy()).all()
    pasted(text, r"layer\.table\.assign\(ids, values\)", layer=layer, ids=[5], values=np.ones((1, 2), np.float32))
    assert layer(SOME).detach().equal(rows)
    assert layer(torch.tensor([5])).tolist() == [[1, 1]]


def test_an_optimizer_of_another_rule(tmp_path: Path):
    layer = ert.Embedding(10, 2, path=tmp_path / "users.rock")
    rows = trained(layer)
    with pytest.raises(er.ArgumentError, match="pass reset_state=True") as caught:
        ert.SGD(layer, lr=0.1)
    assert layer(SOME).detach().equal(rows)
    optimizer = pasted(
        f"ert.SGD(layer, lr=0.1, {re.findall('reset_state=True', str(caught.value))[0]})", "ert.*", layer=layer
    )
    assert layer(SOME).detach().equal(rows)  # as it says
    layer(SOME).sum().backward()
    optimizer.step()
    layer.table.commit()
    layer.table.close()
