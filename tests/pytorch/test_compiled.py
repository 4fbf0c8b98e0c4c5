"""Models that `torch.compile` takes as one graph each: they do what the models do that are not compiled."""

from __future__ import annotations

import copy
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint
from twins import DIM, ROWS, gradient_of, rows_of, weight_of

import embedrock as er
import embedrock.torch as ert
from embedrock.torch.layers import operators
from slow import slow

DATA: Any = Tensor.data
IDS = torch.tensor([3, 1, 3, 7])

pytestmark = [  # of the compilers' own imports
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh(small_heap: None) -> Iterator[None]:
    """Graphs of other tests are forgotten, and no lookup is remembered for a backward that will not come."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    gc.collect()
    assert not operators._tickets


def compiled(function: Any, backend: str = "aot_eager", **arguments: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **arguments)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Model(nn.Module):
    """All kinds of lookups: twice by one layer, bags of a tied one with weights that train, open ids."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        more: Any = {} if folder is None else {"path": folder / "items.rock", "memory": "1MiB"}
        self.item = ert.Embedding(ROWS, DIM, padding_idx=3, **more)
        self.tags = ert.EmbeddingBag(ROWS, DIM, mode="mean")
        self.tied = ert.EmbeddingBag(self.item.table, mode="sum", include_last_offset=True)
        self.open = ert.EmbeddingBag(None, DIM, mode="max")
        self.scale, self.head = nn.Linear(1, 1), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, len(ids) + 1, 2)
        weights = self.scale(ids[:, None].float()).squeeze(1)
        rows = (self.item(ids).sin() + self.item((ids + 1) % ROWS)).mean(0)
        bags = self.tags(ids[:, None]).sum(0) + self.tied(ids, offsets, weights).sum(0)
        return self.head(rows + (bags + self.open(ids, offsets[:-1]).sum(0)).tanh()).square().sum()


def trained(folder: Path | None, make: Callable[[Any], Any]) -> list[Tensor]:
    """Return what comes out of training on batches of several sizes, of a model as `make` returns it."""
    torch.manual_seed(0)
    model = Model(folder)
    run = make(model)
    optimizer = ert.optimizer(run, rows=ert.Adam, dense=torch.optim.SGD, lr=0.05)
    out = []
    for size in (4, 6, 8):
        optimizer.zero_grad()
        loss = run(torch.arange(size) * 5 % ROWS)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        out.append(loss.detach())
    with torch.no_grad():
        out.append(run.eval()(IDS))
    assert rows_of(model.item).steps == 3
    found = [*out, weight_of(model.item), weight_of(model.tags), model.open(torch.arange(ROWS)[:, None]).detach()]
    model.item.table.close()
    return found + [parameter.detach() for parameter in ert.dense_parameters(model)]


@pytest.mark.parametrize(
    ("backend", "where"),
    [("aot_eager", "on disk"), *slow(("aot_eager", "in RAM"), ("eager", "in RAM"), ("eager", "on disk"))],
)
def test_a_compiled_model_trains_to_the_same_bits(backend: str, where: str, tmp_path: Path):
    found = trained(tmp_path if where == "on disk" else None, lambda model: compiled(model, backend))
    assert graphs() == 3  # of one size, of any size, and without gradients
    assert all(map(torch.equal, found, trained(None, lambda model: model)))


@pytest.mark.parametrize("mode", slow("default", "reduce-overhead"))
def test_inductor(mode: str):
    """It makes C++ of what "aot_eager" runs as it is, for half a minute, and rounds dense arithmetic differently."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler for inductor")
    found = trained(None, lambda model: compiled(model, "inductor", mode=mode))
    assert graphs() == 3
    torch.testing.assert_close(found, trained(None, lambda model: model))


JAGGED = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4])], layout=torch.jagged)
OFFSETS, WEIGHTS = torch.tensor([0, 3]), torch.linspace(-1, 1, 4, requires_grad=True)
FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "n-D": (lambda: ert.Embedding(ROWS, DIM), (IDS.reshape(2, 1, 2),)),
    "a number": (lambda: ert.Embedding(ROWS, DIM), (torch.tensor(3),)),
    "no ids": (lambda: ert.Embedding(ROWS, DIM), (torch.empty(0, 3, dtype=torch.int64),)),
    "int32": (lambda: ert.Embedding(ROWS, DIM, padding_idx=-16, scale_grad_by_freq=True), (IDS.int(),)),
    "bfloat16": (lambda: ert.Embedding(ROWS, DIM, dtype=torch.bfloat16), (IDS,)),
    "max_norm": (lambda: ert.Embedding(ROWS, DIM, max_norm=0.5), (IDS,)),
    "jagged": (lambda: ert.Embedding(ROWS, DIM), (JAGGED,)),
    "bags": (lambda: ert.EmbeddingBag(ROWS, DIM, scale_grad_by_freq=True), (IDS.reshape(2, 2),)),
    "offsets": (lambda: ert.EmbeddingBag(ROWS, DIM, mode="max", padding_idx=7), (IDS, OFFSETS.int())),
    "last offset": (lambda: ert.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True), (IDS, OFFSETS, WEIGHTS)),
    "weights": (lambda: ert.EmbeddingBag(ROWS, DIM, mode="sum"), (IDS[None], None, WEIGHTS[None])),
    "weights of frozen rows": (
        lambda: ert.EmbeddingBag(ROWS, DIM, mode="sum").requires_grad_(False),
        (IDS, OFFSETS, WEIGHTS),
    ),
    "jagged bags": (lambda: ert.EmbeddingBag(ROWS, DIM), (JAGGED,)),
    "jagged bags, last offset": (lambda: ert.EmbeddingBag(ROWS, DIM, include_last_offset=True), (JAGGED,)),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_calls(form: str):
    make, inputs = FORMS[form]
    results = []
    for run in (compiled, lambda layer: layer):
        torch.manual_seed(0)
        layer = make()
        out = run(layer)(*inputs)
        dense = out.values() if out.is_nested else out
        if dense.requires_grad:
            dense.square().sum().backward(retain_graph=True)
            assert isinstance(layer, ert.Embedding | ert.EmbeddingBag)
            results.append([dense.detach(), gradient_of(layer), WEIGHTS.grad])
        WEIGHTS.grad = None
    for mine, plain in zip(*results, strict=True):
        assert mine is plain is None or torch.equal(mine, plain)
    assert (results[0][2] is None) == (len(inputs) < 3)


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
@pytest.mark.parametrize("kind", ["rows", *slow("bags"), "weighted bags"])
def test_lookups_of_the_same_ids_in_one_graph(kind: str, backend: str):
    """Compilers make one call of two that are the same. Here each brings its own gradient."""
    bag, weights = ert.EmbeddingBag(ROWS, DIM, mode="sum"), None if kind == "bags" else torch.ones(1, 4)
    layer = ert.Embedding(ROWS, DIM) if kind == "rows" else bag

    def look_up(ids: Tensor) -> Tensor:
        return layer(ids) if layer is not bag else bag(ids[None], per_sample_weights=weights)

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            scale = look_up(ids)
        return sum((look_up((ids + k % 2) % ROWS) for k in range(5)), look_up(ids) * scale).sum()

    found = []
    for run in (compiled(loss, backend), loss):
        layer.zero_grad()
        run(IDS).backward()
        found.append(gradient_of(layer))
    assert torch.equal(*found)


def test_errors_of_a_lookup_are_raised_when_the_graph_runs():
    layer, bag = ert.Embedding(ROWS, DIM), ert.EmbeddingBag(ROWS, DIM)
    look_up, pool = compiled(layer, "eager"), compiled(bag, "eager")
    for run, inputs, error, text in (
        (look_up, (torch.tensor([3, ROWS]),), er.IdError, r"`ids` of Embedding\(23, 5\) must lie in .*got 23 at \[1\]"),
        (look_up, (torch.tensor([0.5]),), er.IdTypeError, r"of Embedding\(23, 5\) must be a dense tensor"),
        (pool, (IDS,), er.ArgumentError, "must be 2-D, or 1-D with 1-D `offsets`"),
        (pool, (IDS, torch.tensor([1, 2])), er.ArgumentError, "must start at 0"),
        (pool, (IDS[None], None, torch.ones(1, 4)), er.UnsupportedError, "mode='sum' only"),
    ):
        with pytest.raises(error, match=text):
            run(*inputs)
    assert torch.equal(look_up(IDS), layer(IDS))
    layer.table.close()
    with pytest.raises(er.ClosedTableError, match="closed"):
        look_up(IDS)


def test_gradients_that_nobody_applies_are_noticed():
    layer = ert.Embedding(ROWS, DIM)
    model = nn.Sequential(layer, nn.Linear(DIM, 1))
    run, optimizers = compiled(model), [ert.Adam(model), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)]
    run(IDS).sum().backward()
    optimizers[1].step()
    with pytest.raises(ert.ForgottenGradientsError, match=r"'0', Embedding\(23, 5\).*SGD stepped"):
        run(IDS)
    optimizers[0].step()
    DATA.__set__(layer.handle, torch.ones(()))  # as none but C++ can
    with pytest.raises(ert.ForgottenGradientsError, match="something wrote to the handle"):
        run(IDS)
    with pytest.raises(ert.ForgottenGradientsError, match="something wrote to the handle"):
        nn.init.normal_(layer.handle)


def test_one_graph_serves_all_layers_that_are_alike():
    layers = [ert.Embedding(ROWS + index, DIM) for index in range(20)]
    layers.append(copy.deepcopy(layers[0]))
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
        assert torch.equal(layer(IDS), layer.forward(IDS))
    assert graphs() == 1
    layers[-1](IDS).sum().backward()
    assert layers[0].handle.grad is None
    assert gradient_of(layers[-1]).sum() == 4 * DIM


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_checkpointing_and_autocast(backend: str):
    layer, dense = ert.Embedding(ROWS, DIM), nn.Linear(DIM, DIM)

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(lambda ids: dense(layer(ids)).sin(), ids, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out.square().sum()

    results = []
    for run in (compiled(loss, backend), loss):
        layer.zero_grad()
        out = run(IDS)
        out.backward()
        results.append((out, gradient_of(layer)))
    assert results[0][0].dtype == torch.bfloat16
    assert all(map(torch.equal, *results))


def test_a_compiled_step_of_training():
    """PyTorch leaves its graph for `backward` and for the optimizers, which do what they always do."""
    results = []
    for run in (lambda step: torch.compile(step, backend="aot_eager"), lambda step: step):
        torch.manual_seed(0)
        model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
        optimizers = [ert.Adam(model, lr=0.1), torch.optim.SGD(ert.dense_parameters(model), lr=0.1)]
        both = ert.optimizer(copy.deepcopy(model), rows=ert.Adam, dense=torch.optim.SGD, lr=0.1)

        def step(ids: Tensor, model: nn.Module = model, optimizers: Any = (*optimizers, both)) -> Tensor:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(ids).square().sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss

        stepped = run(step)
        losses = [stepped(IDS + k).detach() for k in range(3)]
        results.append([*losses, weight_of(model[0]), *map(Tensor.detach, ert.dense_parameters(model))])
        assert rows_of(model[0]).steps == 3
    assert all(map(torch.equal, *results))


def test_a_closure_that_calls_a_compiled_model():
    model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    run, optimizer = compiled(model), ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run(IDS).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) is not None
    assert (graphs(), rows_of(model[0]).steps) == (1, 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch reads it
def test_compiled_autograd_of_a_compiled_model():
    from torch._dynamo import compiled_autograd

    layer = ert.Embedding(ROWS, DIM)
    loss = lambda ids: (layer(ids).square() + layer(ids + 1)).sum()  # noqa: E731
    found = compiled(loss)(IDS)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found.backward()
    gradient = gradient_of(layer)
    layer.zero_grad()
    loss(IDS).backward()
    assert torch.equal(gradient, gradient_of(layer))


def test_an_average_of_a_compiled_model():
    model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 1))
    optimizer, run = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.1), compiled(model)
    averaged = ert.average(model, 0.9)
    for _ in range(2):
        run(IDS).sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    assert torch.equal(compiled(averaged)(IDS), averaged(IDS))
    assert not torch.equal(averaged(IDS), run(IDS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_autograd_is_asked_for(backend: str):
    layer = ert.Embedding(ROWS, DIM)
    run = compiled(lambda ids: layer(ids).square().sum(), backend)
    run(IDS)  # and no backward
    (norm,) = torch.autograd.grad(run(IDS), [layer.handle])
    assert layer.handle.grad is None
    with functorch.patch(donated_buffer=False):  # or PyTorch refuses to retain a graph of a compiler
        run = compiled(lambda ids: layer(ids).square().sum(), backend)
        loss = run(IDS)
        loss.backward(retain_graph=True)
        assert layer.handle.grad is not None
        assert torch.equal(layer.handle.grad, norm)
        once = gradient_of(layer)
        loss.backward()
        assert torch.equal(gradient_of(layer), 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        loss = run(IDS)
    with pytest.raises(er.UnsupportedError, match=r"what autograd saves was copied .*saved_tensors_hooks"):
        loss.backward()


def test_a_second_derivative_is_refused():
    layer = ert.Embedding(ROWS, DIM)
    loss = compiled(lambda ids: layer(ids).square().sum(), "eager")(IDS)
    with pytest.raises(er.UnsupportedError, match="create_graph=True"):
        loss.backward(create_graph=True)
    layer.zero_grad()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_replaced_handle_is_refused(backend: str):
    layer = ert.Embedding(ROWS, DIM)
    run = compiled(lambda handle: torch.func.functional_call(layer, {"handle": handle}, (IDS,)), backend)
    with pytest.raises(er.UnsupportedError, match="the handle was replaced by another tensor"):
        run(torch.zeros((), requires_grad=True))


def test_a_graph_that_outlives_its_layer():
    number = ert.Embedding(ROWS, DIM)._number
    gc.collect()
    with pytest.raises(er.UnsupportedError, match="names an embedding layer that is gone"):
        operators.lookup(
            torch.zeros(()), IDS, None, None, None, number, operators.new_call(), DIM, torch.float32, False, False
        )


def test_rows_of_a_batch_do_not_share_memory_with_the_table():
    """A graph may write to what an operator returned."""
    layer = ert.Embedding(ROWS, DIM)
    before, arguments = (
        weight_of(layer),
        (layer.handle, IDS, None, None, None, layer._number, operators.new_call(), DIM, torch.float32),
    )
    with torch.no_grad():
        operators.lookup(*arguments, False, False)[0].zero_()
    operators.lookup(*arguments, True, False)[0].detach().zero_()
    np.testing.assert_array_equal(weight_of(layer), before)


def test_strings_name_what_makes_ids_of_them():
    layer = torch.compile(ert.Embedding(None, 2), backend="eager")
    with pytest.raises(
        er.IdTypeError, match=r"got list of dtype <U1, 'a' at \[0\].*er\.hash_ids\(ids\).*er\.Vocabulary"
    ):
        layer(["a"])
