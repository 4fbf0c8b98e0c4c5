"""What a small batch costs in Python through PyTorch: see tests/table/test_table_calls.py.

In a process of its own: PyTorch's hooks are global, so that layers and optimizers of other tests would add calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def measure() -> dict[str, int]:
    """Return how many Python functions are called by a step of a layer, of five, of a collection, and by a lookup."""
    import torch

    import embedrock.torch as ert
    from python_calls import least_calls

    ids = torch.arange(32) % 24
    layers = torch.nn.ModuleList([ert.Embedding(1000, 16, seed=0) for _ in range(5)])
    layer = ert.Embedding(1000, 16, seed=0)
    optimizer, optimizer_of_all = ert.Adam(layer), ert.Adam(layers)

    def step() -> None:
        optimizer.zero_grad()
        layer(ids).sum().backward()
        optimizer.step()

    def step_of_all() -> None:
        optimizer_of_all.zero_grad()
        torch.stack([each(ids).sum() for each in layers]).sum().backward()
        optimizer_of_all.step()

    collection = ert.EmbeddingBagCollection([ert.EmbeddingBagConfig(1000, 16, name) for name in "abcdefghijklmnop"])
    optimizer_of_collection = ert.Adam(collection)

    def step_of_collection() -> None:
        optimizer_of_collection.zero_grad()
        torch.cat(list(collection(dict.fromkeys(collection.features, ids)).values()), dim=1).sum().backward()
        optimizer_of_collection.step()

    def look_up() -> None:
        with torch.no_grad():
            layer(ids)

    return {each.__name__: least_calls(each) for each in (step, step_of_all, step_of_collection, look_up)}


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    support = Path(__file__).parent.parent / "support"
    paths = [str(support), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout)


def test_a_warm_step(calls: dict[str, int]) -> None:
    assert calls["step"] <= 210


def test_a_warm_step_of_several_layers(calls: dict[str, int]) -> None:
    assert calls["step_of_all"] <= 5 * 235


def test_a_warm_step_of_a_collection(calls: dict[str, int]) -> None:
    assert calls["step_of_collection"] <= 1.5 * calls["step"]  # of sixteen tables


def test_a_warm_lookup(calls: dict[str, int]) -> None:
    assert calls["look_up"] <= 36


if __name__ == "__main__":
    print(json.dumps(measure()))
