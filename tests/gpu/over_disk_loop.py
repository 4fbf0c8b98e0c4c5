"""A training of a table on disk whose rows are near a device, which goes on until it is killed.

    python tests/gpu/over_disk_loop.py PATH [group | "comes and goes"]

In a group there are two layers, of two pools. It goes on from the last commit, and prints the number of each step whose
commit is acknowledged.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import quick_interpreter
import torch
from gpu_device import DEVICE, INTERPRETED

import embedrock as er
import embedrock.torch as ert

ROWS, DIM, STEPS = 400, 16, 10_000


def ids_of(step: int) -> torch.Tensor:
    """Return the ids of a step, half of them of a few rows."""
    rng = np.random.default_rng(step)
    return torch.from_numpy(np.concatenate([rng.integers(0, 20, 12), rng.integers(0, ROWS, 12)]))


def layers(**options: Any) -> torch.nn.ModuleList:
    """Return layers of two shapes."""
    return torch.nn.ModuleList(ert.Embedding(ROWS, dim, seed=dim, name=str(dim), **options) for dim in (DIM, DIM // 2))


def coming_and_going(**options: Any) -> ert.Embedding:
    """Return a layer whose rows come and go."""
    policies = {"admission": er.Admission(2, default="shared"), "eviction": er.Eviction(max_rows=50)}
    return ert.Embedding(ROWS, DIM, seed=1, **policies, **options)


def layers_in(model: torch.nn.Module) -> list[ert.Embedding]:
    """Return the layers of a model, which may be one."""
    return [module for module in model.modules() if isinstance(module, ert.Embedding)]


def train(model: torch.nn.Module, steps: range, files: er.Table | er.Group | None = None) -> None:
    """Make steps of a layer, or several, and commit the rows: after some of them, or beside the next ones."""
    optimizer = ert.Adam(model, lr=0.1)
    for step in steps:
        for layer in layers_in(model):
            layer(ids_of(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if files is not None and step % 3:
            files.commit(step=step + 1, wait=step % 3 == 1)
            if step % 3 == 1:
                print(step + 1, flush=True)


def main(path: str, kind: str = "") -> None:
    if INTERPRETED:
        quick_interpreter.install()
    if kind == "group":
        files = er.Group(path=path, memory="24KiB", device_memory="4KiB")
        model: torch.nn.Module = layers(group=files)
    else:
        options: dict[str, Any] = {"path": path, "memory": "16KiB", "device_memory": "3KiB"}
        model = coming_and_going(**options) if kind else ert.Embedding(ROWS, DIM, seed=1, **options)
        files = model.table
    ert.place(model, DEVICE)
    train(model, range(files.last_step or 0, STEPS), files)


if __name__ == "__main__":
    main(*sys.argv[1:])
