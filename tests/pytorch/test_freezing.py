"""Models with plain layers in the place of ours: the same bits, and whatever takes models of PyTorch's takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from embedrock.torch import freezing
from slow import slow

ROWS, DIM = 50, 4
IDS = torch.tensor([[3, 14, 15], [9, 2, 6]])
IN_BAGS = torch.tensor([[3, 14], [9, 3]])


class Model(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.item = ert.Embedding(ROWS, DIM, padding_idx=9, **arguments)
        self.tags = ert.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        return self.head(torch.cat([self.item(ids).sum(1), self.tags(tags)], dim=1))


def trained(model: nn.Module) -> nn.Module:
    optimizer = ert.Adam(ert.handles(model), lr=0.1)
    for _ in range(3):
        model(IDS, IN_BAGS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.parametrize("arguments", [{}, {"dtype": torch.bfloat16}, {"max_norm": 0.5}], ids=str)
def test_all_rows(arguments: dict[str, Any]):
    model = trained(Model(**arguments).to(arguments.get("dtype")))
    frozen = ert.freeze(model)
    assert [type(part) for part in frozen.children()] == [nn.Embedding, nn.EmbeddingBag, nn.Linear]
    assert torch.equal(frozen(IDS, IN_BAGS), model(IDS, IN_BAGS))
    plain = nn.Embedding(ROWS, DIM)
    plain.load_state_dict(frozen.get_submodule("item").state_dict())
    assert torch.equal(plain(torch.arange(ROWS)), model.get_submodule("item")(torch.arange(ROWS)).float())
    assert [name for name, parameter in frozen.named_parameters() if parameter.requires_grad] == [
        "head.weight", "head.bias",
    ]  # fmt: skip
    assert not frozen.training


def test_the_copy_and_the_model_share_nothing():
    model = trained(Model())
    frozen, before = ert.freeze(model), model(IDS, IN_BAGS)
    trained(model)
    assert torch.equal(frozen(IDS, IN_BAGS), before)


@pytest.mark.parametrize("by_name", [True, False])
def test_rows_of_some_ids(by_name: bool):
    model = trained(Model())
    some = {"item": [15, 3, 14, 2, 6, 3], "tags": np.array([14, 9])}
    frozen = ert.freeze(model, {(k if by_name else model.get_submodule(k)): ids for k, ids in some.items()})
    assert torch.equal(frozen(IDS, IN_BAGS), model(IDS, IN_BAGS))
    item = frozen.get_submodule("item")
    assert isinstance(item, freezing.KnownRows)
    assert item.ids.tolist() == [2, 3, 6, 9, 14, 15]  # with the padding
    assert torch.equal(item(torch.tensor([0, 7, 49, 3]))[:3], torch.zeros(3, DIM))


def test_open_ids():
    layer = ert.Embedding(None, DIM)
    ids = [-(2**63), 5, 2**63 - 1]
    frozen = ert.freeze(nn.Sequential(layer), {layer: ids})
    assert torch.equal(frozen(torch.tensor(ids)), layer(torch.tensor(ids)))
    with pytest.raises(er.ArgumentError, match=r"Embedding\(None, 4\) has open ids: .*table\.export"):
        ert.freeze(nn.Sequential(layer))


def test_tied_layers_stay_tied():
    table = er.Table(ROWS, DIM)
    frozen = ert.freeze(nn.ModuleList([ert.Embedding(table), ert.EmbeddingBag(table)]))
    assert len(list(frozen.parameters())) == 1


@pytest.mark.parametrize("first", ["item", "raw"])
def test_tied_layers_of_which_one_has_max_norm(first: str):
    item = ert.Embedding(ROWS, DIM, max_norm=0.5)
    layers = {"item": item, "raw": ert.Embedding(item.table)}
    frozen: Any = ert.freeze(nn.ModuleDict({name: layers[name] for name in sorted(layers, key=first.__ne__)}))
    every = torch.arange(ROWS)
    for name in ("raw", "item"):  # which shrinks the rows
        assert torch.equal(frozen[name](every), layers[name](every))


@pytest.mark.parametrize("ids", [None, {"0": IDS}], ids=["all rows", "some rows"])
def test_hooks_of_a_layer_stay(ids: Any):
    layer = ert.Embedding(ROWS, DIM)
    layer.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    layer.register_forward_hook(lambda _, args, kwargs, out: 2 * out, with_kwargs=True)
    frozen = ert.freeze(nn.Sequential(layer), ids)
    assert torch.equal(frozen(IDS.flatten()[:1] - 1), layer(IDS.flatten()[:1] - 1))


def test_a_layer_with_a_forward_of_its_own_is_refused():
    class Scaled(ert.Embedding):
        def forward(self, input: Tensor, time: Any = None) -> Tensor:  # noqa: A002
            return 2 * super().forward(input, time=time)

    class Named(ert.Embedding):
        pass

    with pytest.raises(
        er.UnsupportedError, match=r"Scaled\(50, 4\) cannot be frozen: Scaled\.forward is not .*a module"
    ):
        ert.freeze(nn.Sequential(Scaled(ROWS, DIM)))
    layer = Named(ROWS, DIM)
    assert torch.equal(ert.freeze(layer)(IDS), layer(IDS))


def test_jagged_ids_of_known_rows():
    layer = ert.Embedding(ROWS, DIM)
    jagged = torch.nested.nested_tensor([torch.tensor([3, 14, 5]), torch.tensor([9])], layout=torch.jagged)
    found: Any = ert.freeze(layer, {"": IDS})(jagged)
    assert found.shape[0] == 2
    expected = layer(jagged).values() * torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    assert torch.equal(found.values(), expected)


def test_wrong_ids():
    model = nn.Sequential(ert.Embedding(ROWS, DIM))
    cases: list[tuple[Any, type[Exception], str]] = [
        ([1, 2], er.ArgumentError, r"`ids` of ert\.freeze must be a dict from layers to the ids of each: got list"),
        ({"1": [1]}, er.ArgumentError, r"must name embedding layers of the model \('0'\): got '1'"),
        ({ert.Embedding(3, 3): [1]}, er.ArgumentError, "must name embedding layers of the model"),
        ({"0": np.empty(0, np.int64)}, er.ArgumentError, "must not be empty"),
        ({"0": [ROWS]}, er.IdError, rf"^`ids` of Embedding\(50, 4\) must lie in \[0, {ROWS}\)"),
        ({"0": [0.5]}, er.IdTypeError, r"Embedding\(50, 4\)"),
    ]
    for ids, error, text in cases:
        with pytest.raises(error, match=text):
            ert.freeze(model, ids)


def test_more_rows_than_there_is_memory():
    with pytest.raises(
        er.MemoryBudgetError, match=r"take 4,000,000,000,000 bytes of RAM, .*ert\.freeze\(model, \{layer"
    ):
        ert.freeze(ert.Embedding(10**12, 1))


@pytest.mark.parametrize("ids", [None, {"item": IDS, "tags": IN_BAGS}], ids=["all", "some"])
def test_torch_export(ids: Any):
    model = trained(Model())
    program = torch.export.export(ert.freeze(model, ids), (IDS, IN_BAGS))
    torch.testing.assert_close(program.module()(IDS, IN_BAGS), model(IDS, IN_BAGS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_torch_jit_script():
    with pytest.raises(
        er.UnsupportedError, match=r"Embedding\(50, 4\) cannot be compiled by torch\.jit\.script.*freeze"
    ):
        torch.jit.script(Model())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own
def test_aot_inductor(tmp_path: Path):
    model = trained(Model())
    with torch.no_grad():
        program = torch.export.export(ert.freeze(model, {"item": IDS}), (IDS, IN_BAGS))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        served = torch._inductor.aoti_load_package(path)
        torch.testing.assert_close(served(IDS, IN_BAGS), model(IDS, IN_BAGS))


# ---------------------------------------------------------------- ONNX


class Bags(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.bag = ert.EmbeddingBag(ROWS, DIM, **arguments)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(ids, offsets)


ONNX: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], Any]] = {
    "all rows": (Model, (IDS, IN_BAGS), None),
    "some rows": (Model, (IDS, IN_BAGS), {"item": [3, 15, 2]}),
    "open ids": (lambda: nn.Sequential(ert.Embedding(None, DIM)), (IDS,), {"0": [-(2**63), 14, 2**63 - 1]}),
    "sums": (lambda: Bags(mode="sum", padding_idx=3), (IDS.reshape(-1), torch.tensor([0, 2, 2])), None),
    "maxima": (lambda: Bags(mode="max"), (IDS.reshape(-1), torch.tensor([0, 2])), {"bag": [3, 14, 9]}),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # PyTorch's own
@pytest.mark.parametrize("case", ["some rows", *slow("all rows", "open ids", "sums", "maxima")])
def test_onnx(case: str, tmp_path: Path):
    """By ONNX's reference, which is NumPy: rows, and the map to them, are those of the model."""
    make, inputs, ids = ONNX[case]
    frozen = ert.freeze(make().eval(), ids)
    torch.onnx.export(frozen, inputs, str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    served = ReferenceEvaluator(str(tmp_path / "model.onnx"))
    names = map(str, served.input_names)
    found: Any = served.run(None, dict(zip(names, [x.numpy() for x in inputs], strict=True)))
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(np.asarray(found[0])), frozen(*inputs))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000])
def test_the_search_that_onnx_has(count: int):
    draw = torch.Generator().manual_seed(count)
    ids = torch.randint(-(2**62), 2**62, (count,), generator=draw).unique()
    wanted = torch.cat([ids - 1, ids, ids + 1, torch.tensor([-(2**63), 2**63 - 1])])
    assert torch.equal(freezing._count_below(ids, wanted), torch.searchsorted(ids, wanted))
