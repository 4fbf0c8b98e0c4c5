"""`ert.publish`: rows and dense weights of one step, while a model trains."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import embedrock as er
import embedrock.torch as ert


class Model(nn.Module):
    """Two tables with folders of their own, dense weights of two dtypes, and a counter of steps."""

    steps: torch.Tensor

    def __init__(self, at: Path) -> None:
        super().__init__()
        self.users = ert.Embedding(200, 4, path=at / "users.rock")
        self.items = ert.Embedding(100, 4, path=at / "items.rock")
        self.out, self.low = nn.Linear(8, 1), nn.Linear(2, 2).bfloat16()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.users(users), self.items(items)], 1))


class Training:
    def __init__(self, at: Path) -> None:
        self.model = Model(at)
        self.optimizers = [ert.SGD(self.model, lr=0.1), torch.optim.SGD(ert.dense_parameters(self.model), lr=0.1)]

    def end(self) -> None:
        for table in (self.model.users.table, self.model.items.table):
            table.commit()
            table.close()

    def step(self) -> None:
        loss = self.model(torch.randint(0, 200, (16,)), torch.randint(0, 100, (16,))).square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.model.steps += 1


def test_rows_and_dense_weights_are_of_one_step(tmp_path: Path):
    training, known = Training(tmp_path), dict[int, tuple[np.ndarray, ...]]()
    known[0] = *(np.empty((0, 4)),) * 2, training.model.out.weight.detach().numpy().copy()
    publisher = ert.publish(training.model, tmp_path / "served", every=0)
    served, shown = er.Subscriber(tmp_path / "served", memory="2MiB", patience=5), set[int]()
    for number in itertools.count(1):
        training.step()
        model = training.model
        tables = model.users.table, model.items.table
        known[number] = *(table.export()[1] for table in tables), model.out.weight.detach().numpy().copy()
        served.refresh()
        if served.number is not None:
            with served.step() as step:
                assert step.step is not None
                assert step.step == step.dense["steps"] == served.step_number
                shown.add(step.step)
                users, items, weight = known[step.step]
                assert np.array_equal(step["users"].export()[1], users)
                assert np.array_equal(step["items"].export()[1], items)
                assert np.array_equal(step.dense["out.weight"], weight)
        if len(shown) > 3:
            break
    publisher.close()
    served.close()
    training.end()


def test_what_is_dense(tmp_path: Path):
    training = Training(tmp_path)
    training.step()
    with ert.publish(training.model, tmp_path / "served") as publisher:
        assert publisher.publish(step=7).step == 7
        assert publisher.last is not None
    with er.Subscriber(tmp_path / "served") as served, served.step() as step:
        assert sorted(step.dense) == ["low.bias", "low.weight", "out.bias", "out.weight", "steps"]
        like = nn.Module()
        like.low = nn.Linear(2, 2).bfloat16()
        state = {name: torch.from_numpy(array.copy()) for name, array in step.dense.items()}
        like.load_state_dict({name: state[name] for name in ("low.weight", "low.bias")})
        assert torch.equal(like.low.weight, training.model.low.weight)
    training.end()


def test_commits_are_held_only_until_they_are_published(tmp_path: Path):
    training = Training(tmp_path)
    table = training.model.users.table
    table.commit(name="published-01234567")  # of a process that was killed
    publisher = ert.publish(training.model, tmp_path / "served")
    training.step()
    publisher.publish()
    publisher.close()
    assert [commit["name"] for commit in table.commits()] == [None] * len(table.commits())
    training.end()


def test_pretrained_rows_of_several_tables(tmp_path: Path):
    weights = [torch.randn(20, 4), torch.randn(20, 4)]
    layers = [
        ert.Embedding.from_pretrained(each, freeze=False, path=tmp_path / f"{name}.rock")
        for name, each in zip("ab", weights, strict=True)
    ]
    with ert.publish(nn.ModuleList(layers), tmp_path / "served") as publisher:
        publisher.publish()
    with er.Subscriber(tmp_path / "served") as served:
        rows = served.lookup({"a": range(20), "b": range(20)})
    assert [rows[name].tolist() for name in "ab"] == [each.tolist() for each in weights]
    for layer in layers:
        layer.table.close()


def test_a_group_in_a_compiled_model(tmp_path: Path):
    group = er.Group(path=tmp_path / "model.rock")
    layers = [ert.Embedding(50, 4, group=group, name=name) for name in ("a", "b")]
    model = nn.Sequential(layers[0], nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager")
    publisher = ert.publish(compiled, tmp_path / "served", every=0)  # pyright: ignore[reportArgumentType]
    compiled(torch.arange(3))
    publisher.close()
    assert publisher.last is not None
    with er.Subscriber(tmp_path / "served") as served, served.step() as step:
        assert list(step) == ["a"]
        assert sorted(step.dense) == ["1.bias", "1.weight"]
    group.close()


def test_an_error_is_logged_and_raised_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    training = Training(tmp_path)
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "mine.txt").write_text("mine")
    publisher = ert.publish(training.model, tmp_path / "served", every=0)
    training.step()
    with pytest.raises(er.TableFileError, match=r"has 'mine\.txt'"):
        publisher.close()
    assert "a step was not published: " in caplog.text
    publisher.close()
    training.end()


def test_a_copy_of_the_model_publishes_nothing(tmp_path: Path):
    training = Training(tmp_path)
    model = nn.Sequential(training.model.out)
    model.add_module("0", training.model.users)
    publisher = ert.publish(model, tmp_path / "served", every=0)
    plain = copy.copy(model)
    plain(torch.arange(3))
    assert publisher.last is None
    publisher.close()
    assert not (tmp_path / "served").exists()
    training.end()


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(
        er.UnsupportedError, match=r"cannot be published: they have no commits, .* Give the layer a path"
    ):
        ert.publish(ert.Embedding(10, 4), tmp_path / "served")
    with pytest.raises(
        er.ArgumentError, match="must have embedding layers whose tables' names differ: got no embedding"
    ):
        ert.publish(nn.Linear(2, 2), tmp_path / "served")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = nn.ModuleList([ert.Embedding(10, 4, path=tmp_path / f"{at}/users.rock") for at in "ab"])
    with pytest.raises(er.ArgumentError, match="differ: got tables named users, users"):
        ert.publish(model, tmp_path / "served")
    with pytest.raises(er.ArgumentError, match=r"`dtype` must be one of .*int4: got 'int2'\. Did you mean 'int8'"):
        ert.publish(nn.Sequential(ert.Embedding(10, 2, path=tmp_path / "one.rock")), tmp_path / "served", dtype="int2")
    with pytest.raises(er.ArgumentError, match='must be seconds, or a time such as "5min": got True'):
        ert.publish(Model(tmp_path), tmp_path / "served", every=True)


def test_a_cell_that_runs_twice_has_one_publisher(tmp_path: Path):
    training = Training(tmp_path)
    first = ert.publish(training.model, tmp_path / "served", every=0)
    training.step()  # begins a step
    second = ert.publish(training.model, tmp_path / "served", every=60)
    assert first.last is not None  # that step was published first
    assert first.error is None
    hooks = training.model._forward_pre_hooks
    assert len(hooks) == 1
    training.step()
    assert second.publish(step=2).step == 2
    second.close()
    with er.Subscriber(tmp_path / "served").step() as step:
        np.testing.assert_array_equal(step["users"].lookup(range(200)), training.model.users.table.lookup(range(200)))
    training.end()
