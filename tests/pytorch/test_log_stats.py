"""`ert.log_stats`: the numbers, their names, and where they go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import embedrock as er
import embedrock.torch as ert

OF_DISK = {"disk_bytes", "hit_rate", "commit_age_s"}


class Model(nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.user = ert.Embedding(1000, 4, path=folder / "users.rock")
        self.item = nn.ModuleDict({"one": ert.Embedding(None, 4)})
        self.same = ert.EmbeddingBag(self.user.table)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.user(ids) + self.item["one"](ids) + self.same(ids[:, None]))


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    model = Model(tmp_path)
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.SGD, lr=0.1)
    model(torch.arange(10)).sum().backward()
    optimizer.step()
    with model.user.table as table:
        yield model
        table.commit()


def test_tensorboard(model: Model, tmp_path: Path):
    with SummaryWriter(str(tmp_path / "log")) as writer:
        logged = ert.log_stats(model, writer, step=1)
        model.user.table.commit()
        model.user(torch.arange(10))
        again = ert.log_stats(model, writer, step=2)
        assert "user/hit_rate" not in ert.log_stats(model, writer, step=3)  # nobody asked for a row
    names = {f"{name}/{what}" for name in ("user", "item.one") for what in ("rows", "ram_bytes")}
    assert set(logged) == names | {f"user/{what}" for what in OF_DISK}
    assert logged["user/rows"] == logged["item.one/rows"] == 10
    assert logged["user/ram_bytes"] == model.user.table.stats()["bytes_used"]
    assert logged["user/disk_bytes"] == 0 < again["user/disk_bytes"]
    assert logged["user/hit_rate"] < again["user/hit_rate"] == 1
    assert 0 <= again["user/commit_age_s"] < 600

    found = EventAccumulator(str(tmp_path / "log")).Reload()
    assert set(found.Tags()["scalars"]) == set(logged)
    for name, number in logged.items():
        first = found.Scalars(name)[0]
        assert (first.step, first.value) == (1, pytest.approx(number))
    assert [event.step for event in found.Scalars("user/rows")] == [1, 2, 3]


class Run:
    """Takes dicts, as a run of W&B's and loggers of Lightning's do."""

    def __init__(self, method: str) -> None:
        self.taken: list[Any] = []
        setattr(self, method, lambda numbers, step=None: self.taken.append((numbers, step)))


@pytest.mark.parametrize("method", ["log", "log_metrics"])
def test_runs_and_functions(method: str, model: Model):
    run, taken = Run(method), []
    ert.log_stats(model, run, step=7)
    ert.log_stats(model, run)
    ert.log_stats(model, taken.append)
    assert [step for _, step in run.taken] == [7, None]
    assert [numbers["user/rows"] for numbers in (*(numbers for numbers, _ in run.taken), *taken)] == [10, 10, 10]
    together = ert.log_stats(model, taken.append, per_table=False)
    assert taken[-1] == together
    assert together["tables/rows"] == 20
    assert together.keys() == {f"tables/{what}" for what in ("rows", "ram_bytes", "disk_bytes", "commit_age_s")}


def test_names():
    layer = ert.Embedding(10, 2)
    assert set(ert.log_stats(layer, dict)) == {"Embedding/rows", "Embedding/ram_bytes"}
    assert set(ert.log_stats(nn.ModuleList([layer]), dict)) == {"0/rows", "0/ram_bytes"}
    compiled: Any = torch.compile(nn.ModuleList([layer]), backend="eager")
    assert set(ert.log_stats(compiled, dict)) == {"0/rows", "0/ram_bytes"}
    assert ert.log_stats(nn.Linear(1, 1), dict) == {}


def test_what_is_no_writer():
    with pytest.raises(
        er.ArgumentError, match=r"must have add_scalar .* or be a function of a dict: got Path|PosixPath"
    ):
        ert.log_stats(ert.Embedding(10, 2), Path("log"))
