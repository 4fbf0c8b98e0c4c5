"""Time of the event on a device: the clock, the rows and the evicted ids of the same table on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_device import DEVICE

import embedrock as er
import embedrock.torch as ert
from embedrock.table.table import rows_of
from same_tables import check_same
from slow import slow

DAY = 86_400


def clock_of(layer: ert.Embedding) -> float:
    lifecycle = rows_of(layer.table).lifecycle
    assert lifecycle is not None
    assert lifecycle.usage is not None
    return lifecycle.usage.clock.read.now / DAY


@pytest.mark.parametrize(("near", "on_disk"), [("4KiB", False), *slow((0, False), ("3KiB", True))])
def test_a_device_evicts_by_the_time_of_the_event_as_the_cpu_does(near: int | str, on_disk: bool, tmp_path: Path):
    rng, told, layers, optimizers = np.random.default_rng(0), ([], []), [], []
    for left, name in zip(told, ("mine", "other"), strict=True):
        place = {"path": str(tmp_path / name), "memory": "16KiB"} if on_disk else {}
        eviction = er.Eviction(idle="30d", evicted=lambda ids, left=left: left.append(ids.tolist()))
        given = {"seed": 1, "init": er.Normal(std=0.5), "device_memory": near, "eviction": eviction, **place}
        layers.append(ert.Embedding(None, 8, **given))
        optimizers.append(ert.Adam(layers[-1], lr=0.1))
    ert.place(layers[0], DEVICE)
    for step in range(1, 40):
        parts = [(rng.integers(2 * step, 2 * step + 30, 12), 2 * step + rng.random()) for _ in range(1 + step % 2)]
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            for ids, day in parts:  # micro-batches
                times = torch.tensor([day - 1, day], dtype=torch.float64) * DAY
                layer(torch.from_numpy(ids), time=times).sum().backward()
            with torch.no_grad():
                layer(torch.arange(9), time=90 * DAY)
            if step % 7 == 6:
                gradient: Any = layer.handle.grad
                gradient.zero_()
            optimizer.step()
        assert clock_of(layers[0]) == clock_of(layers[1])
        assert told[0] == told[1]
    assert sum(map(len, told[0])) > 20
    check_same(layers[0].table, layers[1].table)
    for layer in layers:
        if on_disk:
            layer.table.commit()
        layer.table.close()
