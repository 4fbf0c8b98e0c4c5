"""Layers whose tables get more rows while a model is trained."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert
from same_tables import check_same

ROWS, MORE, DIM = 50, 400, 8


def batches(below: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.from_numpy(np.random.default_rng(seed).integers(0, below, (count, 16))))


def train(layer: ert.Embedding, optimizer: Any, ids_of_batches: list[torch.Tensor]) -> None:
    for ids in ids_of_batches:
        optimizer.zero_grad()
        layer(ids).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("rows", [MORE, None])
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_grown_layer_trains_on_as_one_that_was_made_so(rows: int | None, on_disk: bool, tmp_path: Path):
    grown = ert.Embedding(ROWS, DIM, seed=1, path=tmp_path / "t" if on_disk else None)
    made = ert.Embedding(rows, DIM, seed=1)
    steps = [ert.Adam(layer, lr=0.1) for layer in (grown, made)]
    scheduler = torch.optim.lr_scheduler.StepLR(steps[0], 1000)
    for layer, optimizer in zip((grown, made), steps, strict=True):
        train(layer, optimizer, batches(ROWS, 5))
        optimizer.zero_grad()
        layer(torch.arange(20)).square().sum().backward()  # which waits for its step
    grown.grow(rows)
    scheduler.step()
    assert (grown.num_embeddings, grown.table.rows) == (rows, rows)
    assert ert.num_parameters(grown) == ert.num_parameters(made)
    assert f"({rows}, {DIM}" in grown.handle.label
    assert f"({rows}, {DIM}" in repr(grown)
    for layer, optimizer in zip((grown, made), steps, strict=True):
        optimizer.step()
        train(layer, optimizer, batches(MORE, 5, seed=1))
    assert torch.equal(grown(torch.arange(MORE)), made(torch.arange(MORE)))
    if not on_disk:
        again = ert.Embedding(rows, DIM)
        again.load_state_dict(copy.deepcopy(grown.state_dict()))
        assert torch.equal(again(torch.arange(MORE)), made(torch.arange(MORE)))
    grown.table.commit() if on_disk else None
    grown.table.close()


def test_what_the_optimizer_has_named_keeps_its_name():
    layer = ert.Embedding(ROWS, DIM)
    model = nn.Sequential(layer, nn.Linear(DIM, 1))
    ert.Adam(model)
    layer.grow(MORE)
    assert layer.handle.label == f"'0', Embedding({MORE}, {DIM})"
    with pytest.raises(IndexError, match=str(MORE)):
        model(torch.tensor([MORE]))


DENSE = [
    (er.Adam(lr=0.05, dense=True), lambda weight: torch.optim.Adam([weight], lr=0.05)),
    (er.Momentum(lr=0.05, dense=True), lambda weight: torch.optim.SGD([weight], lr=0.05, momentum=0.9)),
    (er.RMSprop(lr=0.05, dense=True), lambda weight: torch.optim.RMSprop([weight], lr=0.05)),
]


@pytest.mark.parametrize(("rule", "optimizer_of"), DENSE, ids=lambda value: getattr(value, "name", None))
def test_new_rows_under_dense_rules_are_those_of_a_parameter_that_grew_at_that_step(rule: er.Rule, optimizer_of: Any):
    """The parameter gets rows of first values and of no state, and the count of its steps goes on."""
    table = er.Table(ROWS, DIM, rule=rule, seed=3)
    weight = nn.Parameter(torch.from_numpy(table.lookup(np.arange(ROWS))))
    optimizer = optimizer_of(weight)

    def train_both(below: int, seed: int) -> None:
        for ids in batches(below, 30, seed):
            grads = torch.from_numpy(np.random.default_rng(seed).standard_normal((16, DIM)).astype(np.float32))
            table.update(ids.numpy(), grads.numpy())
            weight.grad = torch.zeros(len(weight), DIM).index_add_(0, ids, grads)
            optimizer.step()

    train_both(ROWS, 0)
    table.grow(MORE)
    fresh = torch.from_numpy(table.lookup(np.arange(ROWS, MORE)))
    np.testing.assert_array_equal(fresh, er.Table(MORE, DIM, seed=3).lookup(np.arange(ROWS, MORE)))
    state = optimizer.state[weight]
    weight.data = torch.cat([weight.data, fresh])
    for key, value in state.items():
        if value is not None and value.ndim == 2:
            state[key] = torch.cat([value, torch.zeros(MORE - ROWS, DIM)])
    train_both(MORE, 1)
    np.testing.assert_allclose(table.lookup(np.arange(MORE)), weight.detach(), rtol=2e-6, atol=3e-6)


def test_state_of_before_is_loaded_before_growing():
    layer, larger = ert.Embedding(ROWS, DIM, seed=1), ert.Embedding(MORE, DIM, seed=2)
    train(layer, ert.Adam(layer, lr=0.1), batches(ROWS, 3))
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        er.ArgumentError, match=rf"must have rows {MORE}: got {ROWS}\..*grow=True .*ert\.load_state_dict"
    ):
        larger.load_state_dict(before)
    layer.grow(MORE)
    with pytest.raises(er.ArgumentError, match=f"must have rows {MORE}: got {ROWS}"):
        layer.load_state_dict(before)


def test_a_checkpoint_goes_back_to_the_rows_that_there_were(tmp_path: Path):
    layer = ert.Embedding(ROWS, DIM, seed=1, path=tmp_path / "t")
    optimizer = ert.Adam(layer, lr=0.1)
    train(layer, optimizer, batches(ROWS, 3))
    before = layer(torch.arange(ROWS)).detach()
    ert.save(layer, tmp_path / "checkpoints", step=3, optimizer=optimizer)
    layer.grow(MORE)
    train(layer, optimizer, batches(MORE, 3))
    ert.load(layer, tmp_path / "checkpoints", optimizer)
    assert layer.num_embeddings == ROWS
    with pytest.raises(er.IdError, match=rf"Embedding\({ROWS}, {DIM}\)"):
        layer(torch.tensor([ROWS]))
    assert torch.equal(layer(torch.arange(ROWS)), before)
    layer.table.close()


def test_averages_of_rows_go_on():
    layers = [ert.Embedding(rows, DIM, seed=1) for rows in (ROWS, MORE)]
    averages = []
    for layer in layers:
        optimizer, average = ert.Adam(layer, lr=0.1), ert.average(layer, 0.9)
        for below, seed in ((ROWS, 0), (MORE, 1)):
            for ids in batches(below, 4, seed):
                train(layer, optimizer, [ids])
                average.update_parameters(layer)
            if layer.num_embeddings == ROWS:
                layer.grow(MORE)
        averages.append(average.module(torch.arange(MORE)))
    assert torch.equal(*averages)


@pytest.mark.parametrize("rows", [20, None])
@pytest.mark.parametrize("given", [5, 30])
def test_the_line_for_a_weight_of_another_number_of_rows(rows: int | None, given: int):
    layer, weight = ert.Embedding(rows, 4), torch.randn(given, 4)
    before, state = layer(torch.arange(20)).detach(), {"weight": weight}
    with pytest.raises(er.ArgumentError, match=rf"`weight` for ert\.Embedding must have .*got \({given}, 4\)") as found:
        layer.load_state_dict(state)
    assert torch.equal(layer(torch.arange(20)), before)
    if rows is not None and given > rows:  # too many are too many
        with pytest.raises(er.ArgumentError, match=r"layer\.grow\(30\), .* leave 10 out, by weight\[:20\]"):
            layer.load_state_dict(state, grow=True)
        assert torch.equal(layer(torch.arange(20)), before)
    line = re.findall(r"layer\.\w+\(.*?\)", str(found.value))[0]
    exec(line, {"layer": layer, "state": state})
    if "layer.grow" in line:
        layer.load_state_dict(state)
    assert torch.equal(layer(torch.arange(given)), weight)
    assert given >= 20 or torch.equal(layer(torch.arange(given, 20)), before[given:])


# ---------------------------------------------------------------- checkpoints of fewer rows


class Model(nn.Module):
    """A layer on disk or in RAM, one in RAM, a bag collection (a group), and a head."""

    def __init__(self, rows: int, folder: Path | None = None, padding: int | None = None) -> None:
        super().__init__()
        self.users = ert.Embedding(ROWS, DIM, seed=1, path=None if folder is None else folder / "users")
        self.items = ert.Embedding(ROWS, DIM, seed=2)
        configs = [ert.EmbeddingBagConfig(ROWS, DIM, name, [name], seed=3) for name in ("a", "b")]
        self.bags = ert.EmbeddingBagCollection(
            configs, group=None if folder is None else er.Group(path=folder / "bags")
        )
        for layer in self.layers():
            layer.grow(rows)
        if padding is not None:
            for layer in self.layers():
                layer.padding_idx = padding
                layer.table.assign([padding], np.zeros((1, DIM)))
        torch.manual_seed(0)
        self.head = nn.Linear(DIM, 1)

    def layers(self) -> list[Any]:
        return [module for module in self.modules() if isinstance(module, ert.Embedding | ert.EmbeddingBag)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = self.bags(dict.fromkeys(("a", "b"), ids))
        return self.head(self.users(ids) + self.items(ids) + bags["a"] + bags["b"])

    def trained(self, below: int, seed: int) -> Model:
        for ids in batches(below, 4, seed):
            self.optimizer.zero_grad()
            self(ids).square().sum().backward()
            self.optimizer.step()
        return self

    @functools.cached_property
    def optimizer(self) -> Any:
        return ert.optimizer(self, rows=ert.Adam, dense=torch.optim.Adam, lr=0.1)

    def close(self) -> None:
        for path in {layer.table.path for layer in self.layers() if layer.table.is_on_disk}:
            er.close(path)


def check_same_models(model: Model, expected: Model) -> None:
    for layer, other in zip(model.layers(), expected.layers(), strict=True):
        assert layer.num_embeddings == other.num_embeddings
        check_same(layer.table, other.table)
        ids = np.arange(MORE)
        np.testing.assert_array_equal(layer.table.lookup(ids), other.table.lookup(ids))
    assert torch.equal(model.head.weight, expected.head.weight)


def by_ert(small: Model, folder: Path) -> Any:
    ert.save(small, folder / "checkpoints", 4, small.optimizer)
    return lambda model, **how: ert.load(model, folder / "checkpoints", model.optimizer, **how)


def by_state(small: Model, folder: Path) -> Any:
    torch.save([small.state_dict(), small.optimizer.state_dict()], folder / "model.pt")

    def load(model: Model, **how: Any) -> None:
        state, of_optimizer = torch.load(folder / "model.pt")
        ert.load_state_dict(model, state, **how)
        model.optimizer.load_state_dict(of_optimizer)

    return load


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("saved_by", [by_ert, by_state])
@pytest.mark.parametrize("reopened", [False, True])
def test_a_checkpoint_of_fewer_rows(on_disk: bool, saved_by: Any, reopened: bool, tmp_path: Path):
    """The model goes on as one that had all rows from the start; tables on disk had grown and trained since."""
    folder = tmp_path if on_disk else None
    model = Model(ROWS, folder).trained(ROWS, 0)
    load = saved_by(model, tmp_path)
    if reopened:
        model.close()
        model = Model(MORE, folder)
    else:
        for layer in model.layers():
            layer.grow(MORE)
        model.trained(MORE, 5)
    load(model, grow=True)
    expected = Model(MORE).trained(ROWS, 0)
    check_same_models(model, expected)
    check_same_models(model.trained(MORE, 1), expected.trained(MORE, 1))
    for layer in model.layers():
        layer.table.commit() if on_disk and layer.table.is_on_disk else None
    model.close()


@pytest.mark.parametrize("saved_by", [by_ert, by_state])
def test_without_grow_it_is_refused_and_nothing_changes(saved_by: Any, tmp_path: Path):
    load, model = saved_by(Model(ROWS).trained(ROWS, 0), tmp_path), Model(MORE).trained(MORE, 1)
    model.items.shrink(ROWS)  # which would fit, before the ones that do not
    expected = copy.deepcopy([layer.table.state() for layer in model.layers()])
    with pytest.raises(er.ArgumentError, match=rf"must have rows {MORE}: got {ROWS}\..*Pass grow=True .*ert\.load,"):
        load(model)
    for layer, state in zip(model.layers(), expected, strict=True):
        np.testing.assert_array_equal(layer.table.state()["records"], state["records"])


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("saved_by", [by_ert, by_state])
def test_a_padding_row_that_is_new_is_zeros(saved_by: Any, on_disk: bool, tmp_path: Path):
    model = Model(ROWS, tmp_path if on_disk else None).trained(ROWS, 0)
    load = saved_by(model, tmp_path)
    model.close()
    model = Model(MORE, tmp_path if on_disk else None, padding=MORE - 1)
    load(model, grow=True)
    for layer in model.layers():
        assert not layer.table.lookup([MORE - 1]).any()
        assert layer.table.lookup([MORE - 2]).any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", er.UncommittedWarning)
        model.close()


def test_a_layer_alone_and_a_weight():
    small, large = ert.Embedding(ROWS, DIM, seed=1), ert.Embedding(MORE, DIM, seed=2)
    train(small, ert.Adam(small, lr=0.1), batches(ROWS, 3))
    large.load_state_dict(small.state_dict(), grow=True)
    small.grow(MORE)
    assert torch.equal(large(torch.arange(MORE)), small(torch.arange(MORE)))
    weight, before = nn.Embedding(ROWS, DIM).weight, large(torch.arange(MORE)).detach()
    for load in (large.load_state_dict, functools.partial(ert.load_state_dict, nn.Sequential(large))):
        key = "weight" if load == large.load_state_dict else "0.weight"
        with pytest.raises(er.ArgumentError, match="grow=True"):
            load({key: weight})
        load({key: weight}, grow=True)
        assert torch.equal(large(torch.arange(ROWS)), weight)
        assert torch.equal(large(torch.arange(ROWS, MORE)), before[ROWS:])
        large.table.assign(np.arange(ROWS), np.ones((ROWS, DIM)))


def test_first_values_by_a_name_are_those_of_fewer_rows():
    """The numbers of such a name are computed from the count of rows; the error says which there were."""
    state = ert.Embedding(ROWS, DIM, init="xavier_uniform").state_dict()
    with pytest.raises(er.ArgumentError, match=r"must have init .*, here er\.Uniform") as error:
        ert.Embedding(MORE, DIM, init="xavier_uniform").load_state_dict(state, grow=True)
    init = eval(re.findall(r"here (.*)\.$", str(error.value))[0], {"er": er})
    layer = ert.Embedding(MORE, DIM, init=init)
    layer.load_state_dict(state, grow=True)
    assert layer.num_embeddings == MORE


@pytest.mark.parametrize("grow", [False, True])
def test_a_checkpoint_of_more_rows_says_how_many_had_records(grow: bool):
    large, small = ert.Embedding(MORE, DIM, seed=1), ert.Embedding(ROWS, DIM, seed=2)
    train(large, ert.Adam(large, lr=0.1), [torch.tensor([1, ROWS, MORE - 1])])
    with pytest.raises(er.ArgumentError, match=rf"grow\({MORE}\)\. 2 rows with records .*shrink\({ROWS}\) cuts"):
        small.load_state_dict(large.state_dict(), grow=grow)
    small.grow(MORE)
    small.load_state_dict(large.state_dict())
    assert small.shrink(ROWS) == 2
    assert small.num_embeddings == ROWS
    assert f"({ROWS}, {DIM}" in small.handle.label
    assert torch.equal(small(torch.arange(ROWS)), large(torch.arange(ROWS)))
    small.padding_idx = ROWS - 1
    with pytest.raises(
        er.ArgumentError, match=r"`padding_idx` of Embedding\(50, 8\) must be a row that stays, below 20"
    ):
        small.shrink(20)
    assert small.num_embeddings == ROWS


def test_a_step_of_rows_that_were_cut_off_is_an_error():
    layer = ert.Embedding(MORE, DIM)
    optimizer = ert.Adam(layer, lr=0.1)
    layer(torch.tensor([1, MORE - 1])).sum().backward()
    before = layer.table.lookup([1])
    layer.shrink(ROWS)
    with pytest.raises(er.IdError, match=rf"\[0, {ROWS}\)"):
        optimizer.step()
    np.testing.assert_array_equal(layer.table.lookup([1]), before)
    optimizer.zero_grad()
    train(layer, optimizer, batches(ROWS, 2))


def test_a_moved_table_of_fewer_rows(tmp_path: Path):
    layer = ert.Embedding(ROWS, DIM, seed=1, path=tmp_path / "old")
    train(layer, ert.Adam(layer, lr=0.1), batches(ROWS, 3))
    ert.save(layer, tmp_path / "checkpoints", 3)
    expected = layer(torch.arange(ROWS)).detach()
    layer.table.close()
    (tmp_path / "old").rename(tmp_path / "new")
    where = {str(tmp_path / "old"): str(tmp_path / "new")}
    layer = ert.Embedding(MORE, DIM, path=tmp_path / "old")
    assert ert.load(layer, tmp_path / "checkpoints", relocate=where, grow=True) == 3
    assert layer.num_embeddings == MORE
    assert torch.equal(layer(torch.arange(ROWS)), expected)
    layer.table.commit()
    layer.table.close()


def test_the_error_of_resizing_names_the_line():
    layer = ert.Embedding(20, 4)
    with pytest.raises(AttributeError, match=r"layer\.grow\(n\), as model\.resize_token_embeddings"):
        layer.weight  # noqa: B018
