"""CUDA graphs of PyTorch itself, on a GPU or the emulated one: whole models, with a `GradScaler` and in Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE, INTERPRETED
from gpu_models import DIM, EVERYTHING, ROWS, batches, memory_of
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from pages import blocks_of, run_blocks

pytestmark = pytest.mark.skipif(INTERPRETED, reason="PyTorch captures graphs on a GPU only")


class Halved(nn.Module):
    """A model whose gradients overflow in float16: those of rows, or all."""

    def __init__(self, near: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = ert.Embedding(ROWS, DIM, init=er.Normal(std=0.5), seed=5, device_memory=near)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rows(ids).half().float()).square().half().float().sum()


def scaled(model: Halved) -> tuple[ert.RowOptimizer, torch.amp.GradScaler, Callable[[Tensor], Tensor], list[Any]]:
    """Return the optimizer of rows, the scaler, a training step, and schedules that are called beside it."""
    scaler, rows = torch.amp.GradScaler(DEVICE, init_scale=2.0**19, growth_interval=2), ert.Adam(model, lr=0.1)
    options = {"lr": torch.tensor(0.01, device=DEVICE), "fused": True, "capturable": True}
    optimizers = rows, torch.optim.Adam(ert.dense_parameters(model), **options)

    def step(ids: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(ids)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return rows, scaler, step, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # as the first step is skipped
@pytest.mark.parametrize("near", [17, None, 0], ids=["cached", "near", "in place"])
def test_a_scaler_and_schedules_in_graphs_train_as_by_launches(near: int | None) -> None:
    models = [Halved(memory_of(near) if near is not None else EVERYTHING).to(DEVICE) for _ in range(2)]
    made = [scaled(model) for model in models]
    rows, _, step, _ = made[0]
    steps = ert.graphed(step, rows), made[1][2]
    for k, ids in enumerate(batches(14)):
        losses = [step(ids.to(DEVICE)) for step in steps]
        assert torch.equal(*losses)
        assert len({model.rows.table.steps for model in models}) == 1
        for _, scaler, _, schedules in made:
            if k in (6, 9):  # it overflows in replays again
                scaler._get_scale_async().fill_(2.0**19)  # pyright: ignore[reportOptionalMemberAccess]
            for schedule in schedules:
                schedule.step()
    assert steps[0].graphs == 1
    assert models[0].rows.table.steps > 1
    mine, other = (model.rows.table.lookup(np.arange(ROWS)) for model in models)
    np.testing.assert_array_equal(mine, other)
    assert torch.equal(models[0].head.weight, models[1].head.weight)


@pytest.mark.filterwarnings("ignore")  # Lightning has some
def test_the_lightning_module_of_the_page_trains_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "trainers.md"
    blocks = blocks_of(page.read_text())
    (last,) = (k for k, block in enumerate(blocks) if "class LitGraphed" in block.source)
    graphs, graphed = list[Any](), ert.graphed
    monkeypatch.setattr(ert, "graphed", lambda *args: graphs.append(graphed(*args)) or graphs[-1])
    names = run_blocks(blocks[: last + 1], str(page))  # which trains, and resumes
    assert [one.graphs for one in graphs] == [1, 1, 1]
    by_launches = monkeypatch.setattr(ert, "graphed", lambda step, *_: step) or names["fit_graphed"](epochs=3)
    in_graphs = monkeypatch.setattr(ert, "graphed", graphed) or names["fit_graphed"](epochs=3)
    names["check_same"](by_launches, in_graphs)
