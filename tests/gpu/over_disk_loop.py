"""A training of a table on disk whose rows are near a device, which goes on until it is killed.

    python tests/gpu/over_disk_loop.py PATH

It goes on from the last commit, and prints the number of each step whose commit is acknowledged.
"""

from __future__ import annotations

import sys

import numpy as np
import quick_interpreter
import torch
from gpu_device import DEVICE, INTERPRETED

import embedrock.torch as ert

ROWS, DIM, STEPS = 400, 16, 10_000


def ids_of(step: int) -> torch.Tensor:
    """Return the ids of a step, half of them of a few rows."""
    rng = np.random.default_rng(step)
    return torch.from_numpy(np.concatenate([rng.integers(0, 20, 12), rng.integers(0, ROWS, 12)]))


def train(layer: ert.Embedding, steps: range) -> None:
    """Make steps, and commit the rows of a layer on disk: after some of them, or beside the next ones."""
    optimizer = ert.Adam(layer, lr=0.1)
    for step in steps:
        layer(ids_of(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if layer.table.is_on_disk and step % 3:
            layer.table.commit(step=step + 1, wait=step % 3 == 1)
            if step % 3 == 1:
                print(step + 1, flush=True)


def main(path: str) -> None:
    if INTERPRETED:
        quick_interpreter.install()
    layer = ert.Embedding(ROWS, DIM, path=path, memory="16KiB", device_memory="3KiB", seed=1)
    ert.place(layer, DEVICE)
    train(layer, range(layer.table.last_step or 0, STEPS))


if __name__ == "__main__":
    main(sys.argv[1])
