"""Averages of rows: those of PyTorch's `AveragedModel` over dense weights; other ways to average are noticed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import swa_utils
from twins import bag_twins, embedding_twins, weight_of

import embedrock as er
import embedrock.torch as ert

ROWS, DIM = 23, 5
DATA: Any = Tensor.data
IDS = torch.tensor([3, 1, 3, 7])
EVERY = torch.arange(ROWS)
PYTORCH_S = {None: swa_utils.get_swa_multi_avg_fn, 0.9: lambda: swa_utils.get_ema_multi_avg_fn(0.9)}


class Twins:
    """A model and PyTorch's own of the same weights, trained alike."""

    def __init__(self, make: Any = embedding_twins, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.rows, self.weights = make(ROWS, DIM, **arguments)
        dense = nn.Linear(DIM, 2)
        self.mine = nn.Sequential(self.rows, dense)
        self.theirs = nn.Sequential(self.weights, copy.deepcopy(dense))
        self.optimizers = [
            ert.optimizer(self.mine, rows=ert.SGD, dense=torch.optim.SGD, lr=0.02),
            torch.optim.SGD(self.theirs.parameters(), lr=0.02),
        ]

    def train(self, steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            ids = torch.randint(0, 9, (2, 3), generator=generator)
            for model, optimizer in zip((self.mine, self.theirs), self.optimizers, strict=True):
                optimizer.zero_grad()
                model(ids).square().sum().backward()
                optimizer.step()

    def averages(self, decay: float | None) -> list[Any]:
        return [ert.average(self.mine, decay), swa_utils.AveragedModel(self.theirs, multi_avg_fn=PYTORCH_S[decay]())]

    def update(self, averages: list[Any]) -> None:
        for average, model in zip(averages, (self.mine, self.theirs), strict=True):
            average.update_parameters(model)


def layer_average(averaged: nn.Module) -> Any:
    return ert.handles(averaged)[0].average


def check_equal(averages: list[Any], ids: Tensor = EVERY) -> None:
    for model in (lambda average: average.module[0], lambda average: average):
        torch.testing.assert_close(*(model(average)(ids) for average in averages), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("decay", [0.9, None])
def test_averages_are_those_of_pytorch(decay: float | None):
    twins = Twins()
    twins.train(2)
    averages = twins.averages(decay)
    check_equal(averages)
    for seed, steps in enumerate([1, 1, 0, 3, 1, 0, 0, 0, 1, 2]):
        twins.train(steps, seed)
        twins.update(averages)
        check_equal(averages)
    assert int(averages[0].n_averaged) == 10
    assert not torch.equal(averages[0].module[0](EVERY), twins.rows(EVERY))


def test_steps_after_the_last_update_do_not_count():
    twins = Twins()
    averages = twins.averages(0.9)
    twins.train(2)
    twins.update(averages)
    twins.train(3, seed=1)
    check_equal(averages)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_averages_of_rows_in_bags(mode: str):
    twins = Twins(bag_twins, mode=mode)
    averages = twins.averages(0.9)
    for seed in range(4):
        twins.train(1, seed)
        twins.update(averages)
    check_equal(averages, EVERY[:22].reshape(2, 11))


def test_rows_on_disk_with_a_small_cache(tmp_path: Any):
    averages = []
    for path in (None, str(tmp_path / "rows.rock")):
        layer = ert.Embedding(5000, 4, path=path, memory=None if path is None else "1MiB", seed=0)
        optimizer, average = ert.Adam(layer, lr=0.1), ert.average(layer, 0.5)
        for k in range(5):
            layer(torch.arange(k * 50, k * 50 + 400)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(layer)
        averages.append(average)
    assert torch.equal(*(average(torch.arange(5000)) for average in averages))
    state, wanted = averages[1].module.state_dict(), averages[1](torch.arange(5000))
    assert len(state["rows.ids"]) == 550  # those that were stepped after the first update, a copy
    layer(torch.arange(9)).sum().backward()
    optimizer.step()
    layer.load_state_dict(state)  # the averages become the rows of the table, beside the state of its commit
    assert torch.equal(layer(torch.arange(5000)), wanted)
    with pytest.raises(er.UnsupportedError, match="were changed by something else"):
        averages[1](torch.arange(5000))
    layer.table.commit()
    layer.table.close()


def test_cost_follows_the_rows_stepped():
    layer = ert.Embedding(None, 4)
    optimizer, average = ert.SGD(layer, lr=0.1), ert.average(layer)
    for _ in range(2):
        layer(torch.tensor([-(2**63), 5, 2**62])).sum().backward()
        optimizer.step()
        average.update_parameters(layer)
    assert layer_average(average)._distances.stats()["rows_touched"] == 3
    assert torch.equal(average(torch.tensor([7])), layer(torch.tensor([7])))


def test_averages_share_no_rows_and_do_not_train():
    twins = Twins()
    average = ert.average(twins.mine)
    (handle,) = ert.handles(average)
    assert handle.table is twins.rows.table
    assert handle is not twins.rows.handle
    assert not average(IDS).requires_grad  # nor do the dense weights
    assert handle.grad is None
    assert twins.rows.handle.grad is None
    assert twins.rows.handle.requires_grad


def test_training_averages_is_refused():
    """A step would move the rows of the model that is averaged."""
    twins = Twins()
    average, before = ert.average(twins.mine), weight_of(twins.rows)
    average.requires_grad_(True)
    layer: Any = next(average.module.children())
    for given in (average, average.module, layer, ert.handles(average)):
        with pytest.raises(er.UnsupportedError, match=r"SGD cannot step the average of '0', .*averaged\.update_para"):
            ert.SGD(given, lr=0.1)
    with pytest.raises(er.UnsupportedError, match=r"SGD cannot step the average of '0'"):
        ert.optimizer(average, rows=ert.SGD, dense=torch.optim.SGD, lr=0.1)
    with pytest.raises(er.UnsupportedError, match=r"^the average of '0', Embedding\(23, 5\) cannot train: "):
        average(IDS).sum().backward()
    assert torch.equal(weight_of(twins.rows), before)


@pytest.mark.parametrize("inside", [False, True])
def test_frozen_averages(inside: bool):
    twins = Twins()
    averages = twins.averages(0.9)
    for seed in range(2):
        twins.train(1, seed)
        twins.update(averages)
    both = nn.ModuleDict({"now": twins.mine, "averaged": averages[0]})
    every: Any = ert.freeze(both)
    frozen = every["averaged"] if inside else ert.freeze(averages[0])
    assert torch.equal(frozen(EVERY), averages[0](EVERY))
    assert not any(type(module).__module__.startswith("embedrock") for module in frozen.modules())
    assert torch.equal(every["now"](EVERY), twins.mine(EVERY))


def test_many_steps_between_updates_take_the_room_of_their_rows():
    twins = Twins()
    averages = twins.averages(0.9)
    twins.train(50)
    of_rows = layer_average(averages[0])
    assert len(of_rows._old.ids) + sum(len(old.ids) for old in of_rows._noted) <= 2 * 9  # ids < 9 are trained
    check_equal(averages)
    twins.update(averages)
    check_equal(averages)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("decay", [0.9, None])
def test_an_average_that_is_made_before_the_optimizer(decay: float | None, resumed: bool):
    twins = Twins()
    twins.rows.table.set_rule(None)
    averages = twins.averages(decay)
    twins.optimizers[0] = ert.optimizer(twins.mine, rows=ert.SGD, dense=torch.optim.SGD, lr=0.02)
    twins.train(2)
    if resumed:  # before the first update
        state, averages[0] = averages[0].state_dict(), ert.average(twins.mine, decay)
        averages[0].load_state_dict(state)
    for seed in range(2):
        check_equal(averages)
        twins.train(2, seed)
        twins.update(averages)
    check_equal(averages)


def test_averages_in_state_dicts():
    twins = Twins()
    averages = twins.averages(0.9)
    for seed in range(3):
        twins.train(1, seed)
        twins.update(averages)
    plain = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    plain.load_state_dict(averages[0].module.state_dict())
    torch.testing.assert_close(plain(EVERY), averages[1](EVERY), rtol=2e-6, atol=1e-6)
    again = ert.average(twins.mine, 0.9)
    again.load_state_dict(averages[0].state_dict())
    for seed in range(3):
        twins.train(1, seed)
        twins.update([again, averages[1]])
    check_equal([again, averages[1]])


def test_rows_that_changed_otherwise_are_noticed():
    twins = Twins()
    average = ert.average(twins.mine)
    twins.train(1)
    twins.rows.table.assign([3], np.ones((1, DIM), np.float32))
    for _ in range(2):
        for use in (lambda: average(IDS), lambda: average.update_parameters(twins.mine)):
            with pytest.raises(er.UnsupportedError, match=r"Embedding\(23, 5\) were changed by something else .*\.av"):
                use()
        twins.train(1)  # the model goes on without the average


def test_a_rule_that_moves_rows_without_steps_is_noticed():
    layer = ert.Embedding(ROWS, DIM)
    average = ert.average(layer)
    with pytest.raises(er.UnsupportedError, match=r"Embedding\(23, 5\) cannot be averaged: with Adam"):
        ert.Adam(layer, dense=True)
    assert torch.equal(average(EVERY), layer(EVERY))


@pytest.mark.parametrize(
    "arguments",
    [
        {"rule": er.Adam(dense=True)},
        {"max_norm": 1.0},
        {"eviction": er.Eviction(max_rows=9)},
        {"admission": er.Admission(2, default="shared")},
    ],
    ids=str,
)
def test_rows_that_change_without_a_step_are_refused(arguments: dict[str, Any]):
    layer = ert.Embedding(ROWS, DIM, **arguments)
    with pytest.raises(er.UnsupportedError, match=r"Embedding\(23, 5\) cannot be averaged: with .*they change without"):
        ert.average(layer)


def test_wrong_arguments():
    with pytest.raises(er.ArgumentError, match=r"`decay` of ert\.average must be a number from 0 to 1, or None: got 2"):
        ert.average(ert.Embedding(ROWS, DIM), 2)
    average = ert.average(ert.Embedding(ROWS, DIM))
    with pytest.raises(er.UnsupportedError, match=r"cannot be copied: .*ert\.average"):
        copy.deepcopy(average)


# ---------------------------------------------------------------- other ways


def ema(averaged: nn.Module, model: nn.Module) -> None:
    for e, p in zip(averaged.parameters(), model.parameters(), strict=True):
        e.data.mul_(0.9).add_(p.data, alpha=0.1)


def lerp(averaged: nn.Module, model: nn.Module) -> None:
    for e, p in zip(averaged.parameters(), model.parameters(), strict=True):
        e.data.lerp_(p.data, 0.1)


def new_data(averaged: nn.Module, model: nn.Module) -> None:
    for e, p in zip(averaged.parameters(), model.parameters(), strict=True):
        e.data = 0.9 * e.data + 0.1 * p.data


def copy_back(averaged: nn.Module, model: nn.Module) -> None:
    for e, p in zip(averaged.parameters(), model.parameters(), strict=True):
        e.data.copy_(p.data)


def vector(averaged: nn.Module, model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()), averaged.parameters())


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("average", [ema, lerp, new_data, copy_back, vector])
def test_averaging_through_data_is_noticed(average: Any, twice: bool):
    model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    if twice:  # a copy of a copy
        model = copy.deepcopy(model)
    averaged = copy.deepcopy(model)
    averaged(IDS)
    dense = [parameter.detach().clone() for parameter in ert.dense_parameters(averaged)]
    for _ in range(2):
        with pytest.raises(er.EmbedrockError, match=r"ert\.average|reads the value of the handle"):
            average(averaged, model)
    averaged(IDS)
    averaged.state_dict()
    assert all(map(torch.equal, dense, ert.dense_parameters(averaged)))


@pytest.mark.parametrize(
    "move", [nn.Module.cpu, nn.Module.double, lambda model: model.to("cpu")], ids=["cpu", "double", "to"]
)
def test_what_wrote_to_a_handle_is_noticed_after_a_move(move: Any):
    """What writes below PyTorch's operators is noticed by the value."""
    model = nn.Sequential(ert.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    uses = [lambda: model(IDS), model.state_dict, lambda: ert.freeze(model)]
    for use in uses:
        DATA.__set__(ert.handles(model)[0], torch.ones(()))
        move(move(model))
        with pytest.raises(ert.ForgottenGradientsError, match=r"wrote to the handle of .*Embedding\(23, 5\)"):
            use()
        move(model)
        use()


def test_copies_train_like_the_first():
    model = nn.Sequential(ert.Embedding(ROWS, DIM))
    other = copy.deepcopy(copy.deepcopy(model))
    for each in (model, other):
        optimizer = ert.Adam(each)
        each(IDS).sum().backward()
        optimizer.step()
    assert torch.equal(weight_of(model[0]), weight_of(other[0]))
