"""Train sharded tables in several processes. Kill one by SIGKILL, start again, and end with the same bits.

    python examples/torchrun.py                              # the whole story: two runs of two processes, one killed
    torchrun --nproc-per-node 2 examples/torchrun.py         # one run, with files in torchrun_example or --path FOLDER

Each process owns the rows of some ids, by a hash, in a folder of its own. `ert.save` on all of them is one checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share the machine

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert

USERS, ITEMS, DIM, BATCH, SAVED = 2_000_000, 200_000, 16, 1024, 50  # SAVED: steps between checkpoints


class Model(nn.Module):
    """Matrix factorization of users and items, with both tables in shards on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        shards = {"sharded": True, "memory": "32MiB", "init": er.Normal(std=0.1)}
        self.users = ert.Embedding(USERS, DIM, path=folder / "users.rock", **shards)
        self.items = ert.Embedding(ITEMS, DIM, path=folder / "items.rock", **shards)
        self.score = nn.Linear(DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.score(self.users(users) * self.items(items)).squeeze(1)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, items and clicks of a rank's batch: users click items of their own kind, one of four."""
    draw = torch.Generator().manual_seed(step * 1000 + rank)
    users = (USERS * torch.rand(BATCH, generator=draw) ** 12).long()  # a few are frequent
    items = (ITEMS * torch.rand(BATCH, generator=draw) ** 12).long()
    return users, items, (users % 4 == items % 4).float()


def train(folder: Path, steps: int, die_at: int) -> None:
    """Train as one of the processes that torchrun starts, from the last checkpoint on."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same on all ranks
    rank, step = dist.get_rank(), 0
    model = Model(folder)
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=0.01)
    with contextlib.suppress(ert.NoCheckpointError):
        step = ert.load(model, folder / "checkpoints", optimizer)
    while step < steps:
        if step == die_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step += 1
        users, items, clicks = batch(step, rank)
        loss = nn.functional.binary_cross_entropy_with_logits(net(users, items), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % SAVED == 0 or step == steps:
            ert.save(model, folder / "checkpoints", step, optimizer)
            print(f"  step {step:4}, rank {rank}: loss {loss.item():.3f}, {len(model.users.table):,} users", flush=True)
    dist.destroy_process_group()


def run(folder: Path, steps: int, die_at: int = -1) -> int:
    """Run this file by torchrun in two processes; return its exit status."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    command = [*launch, f"--path={folder}", f"--steps={steps}", f"--die-at={die_at}"]
    quiet = None if die_at < 0 else subprocess.DEVNULL  # torchrun tells at length that a process was killed
    return subprocess.run(command, check=False, stderr=quiet).returncode


def rows(folder: Path, table: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and rows of a table, of all shards as one, in the order of ids."""
    with er.open(folder / table, mode="r") as reader:
        ids, weights = reader.export()
    order = np.argsort(ids)
    return ids[order], weights[order]


def main() -> None:
    """Train as one of several processes; or start them, and show that a kill changes nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("torchrun_example"), help="folder of all files")
    parser.add_argument("--steps", type=int, default=200, help="default: 200")
    parser.add_argument("--die-at", type=int, default=-1, help="step at which rank 1 kills itself")
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun started this process
        options.path.mkdir(parents=True, exist_ok=True)
        return train(options.path, options.steps, options.die_at)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        print("A run without a failure (a constant has loss 0.562):", flush=True)
        statuses = [run(whole, options.steps)]
        print("A run whose rank 1 is killed, and the same command again:", flush=True)
        statuses += [run(killed, options.steps, die_at=options.steps * 5 // 8), run(killed, options.steps)]
        assert [status == 0 for status in statuses] == [True, False, True], statuses
        for table in ("users.rock", "items.rock"):
            (ids, one), (others, other) = rows(whole, table), rows(killed, table)
            equal = np.array_equal(ids, others) and one.tobytes() == other.tobytes()
            print(f"{table}: {len(ids):,} rows of 2 shards, equal bits: {int(equal)}")


if __name__ == "__main__":
    main()
