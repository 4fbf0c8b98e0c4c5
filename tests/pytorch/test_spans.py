"""Phases in `torch.profiler`, which change no result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from twins import DIM, ROWS, weight_of

import embedrock.torch as ert
from embedrock.torch.training.backward import record

IDS = torch.tensor([[3, 1], [3, 7]])


def train(kind: Any) -> torch.Tensor:
    layer = kind(ROWS, DIM, seed=0)
    optimizer = ert.Adam(layer, lr=0.1)
    for _ in range(3):
        layer(IDS).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        layer(IDS)
    return weight_of(layer)


@pytest.mark.parametrize("kind", [ert.Embedding, ert.EmbeddingBag])
def test_spans(kind: Any):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled = train(kind)
    seen = Counter(event.name for event in profile.events() or () if event.name.startswith("embedrock."))
    phases = {name.removeprefix("embedrock."): count for name, count in seen.items()}
    plans = 3 + (kind is ert.EmbeddingBag)  # a lookup for no gradient plans by itself, in the same pass
    wanted = {"plan": plans, "read": 4, "sum": 3, "step": 3}
    assert {name: phases[name] for name in wanted} == wanted
    assert set(phases) - set(wanted) <= {"gather", "rule", "wait"}
    assert sum(event.name == "Optimizer.step#Adam.step" for event in profile.events() or ()) == 3  # PyTorch's own
    assert torch.equal(profiled, train(kind))


def test_nothing_is_recorded_where_no_profiler_runs():
    assert record("read") is None
