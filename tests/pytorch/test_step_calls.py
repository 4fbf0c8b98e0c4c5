"""What a small batch costs in Python through PyTorch: see tests/table/test_table_calls.py."""

from __future__ import annotations

import torch

import embedrock.torch as ert
from python_calls import least_calls

IDS = torch.arange(32) % 24


def test_a_warm_step():
    layer = ert.Embedding(1000, 16, seed=0)
    optimizer = ert.Adam(layer)

    def step() -> None:
        optimizer.zero_grad()
        layer(IDS).sum().backward()
        optimizer.step()

    assert least_calls(step) <= 370


def test_a_warm_step_of_several_layers():
    layers = torch.nn.ModuleList([ert.Embedding(1000, 16, seed=0) for _ in range(5)])
    optimizer = ert.Adam(layers)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([layer(IDS).sum() for layer in layers]).sum().backward()
        optimizer.step()

    assert least_calls(step) <= 5 * 340  # 10 of them tell tables alone from those of a group, and step each kind


def test_a_warm_lookup():
    layer = ert.Embedding(1000, 16, seed=0)

    def look_up() -> None:
        with torch.no_grad():
            layer(IDS)

    assert least_calls(look_up) <= 55
