"""Matrix factorization in PyTorch: beside nn.Embedding in RAM, then 22 million rows on disk, killed and resumed.

Run: `make demo`, or `python examples/matrix_factorization.py`. The clicks come from a planted model, whose AUC is the
best possible. For your own, return ids (of a user and an item, below the number of rows) and labels in `Clicks.batch`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait by spinning take the cores of a small machine

import numpy as np
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert

DIM, BATCH, LR, INIT, REPORT, PRIME, MIB = 64, 8192, 0.01, er.Normal(std=0.01), 50, 2_654_435_761, 2**20


class Clicks:
    """Clicks of users on a tenth as many items, by Zipf's law. The items' ids follow those of the users."""

    def __init__(self, users: int) -> None:
        self.counts, self.rows = np.array([users, users // 10]), users + users // 10
        self.truth = er.Table(self.rows, 3, init=er.Normal(), seed=1, directory="hashed")  # never trains: takes no RAM
        _, self.test, self.labels, logits = self.batch(0, 100_000)
        self.best = self.auc(logits)

    def batch(self, step: int, size: int = BATCH) -> tuple[int, Tensor, Tensor, Tensor]:
        random = np.random.default_rng(step)
        ids = (self.counts ** random.random((size, 2))).astype(int) * PRIME % self.counts + [0, self.counts[0]]
        user, item = self.truth.lookup(ids).swapaxes(0, 1)
        logits = 0.5 * user[:, 0] + 2 * item[:, 0] + 0.5 * (user * item)[:, 1:].sum(1) - 1
        labels = (random.random(size) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        return step, torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(logits)

    def auc(self, logits: Tensor) -> float:
        """Return the chance that a click of the test has a higher logit than a view without one."""
        clicked, others = logits[self.labels == 1], logits[self.labels == 0].sort().values
        return torch.searchsorted(others, clicked).double().mean().item() / len(others)


def score(layer: nn.Module, ids: Tensor) -> Tensor:
    """Multiply the rows of users and items: ids (n, 2). Their first columns are biases, too."""
    p, q = layer(ids).unbind(1)
    return (p * q).sum(-1) + 8 * (p[:, 0] + q[:, 0])


def train(layer: nn.Module, optimizer: torch.optim.Optimizer, clicks: Clicks, batches: Iterable) -> Iterator[int]:
    """Train a layer on batches; print where it is, and yield each step."""
    name, seconds, start = type(layer).__module__.partition(".")[0], [], time.perf_counter()
    for step, ids, labels, _ in batches:
        loss = nn.functional.binary_cross_entropy_with_logits(score(layer, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        if step % REPORT == 0:
            auc, ms = clicks.auc(score(layer, clicks.test).detach()), 1000 * np.median(seconds)
            print(f"   step {step:4}   {name:9}   loss {loss:.5f}   AUC {auc:.4f}   {ms:5.1f} ms a step", flush=True)
        yield step
        start = time.perf_counter()


def on_disk(options: argparse.Namespace, dies_at: int) -> None:
    """Train rows on disk from their last commit on; die after a step."""
    clicks, disk = Clicks(options.users), {"path": options.path, "memory": options.memory, "commit_every": 2 * REPORT}
    layer = ert.Embedding(clicks.rows, DIM, init=INIT, seed=0, **disk)
    print(f"   A process begins after step {layer.table.steps}. Best possible AUC: {clicks.best:.4f}", flush=True)
    batches = map(clicks.batch, range(layer.table.steps + 1, options.steps + 1))
    ahead = ert.prefetch(batches, {layer: lambda batch: batch[1]})
    for step in train(layer, ert.Adam(layer, lr=LR), clicks, ahead):
        if step == dies_at:
            os.kill(os.getpid(), 9)  # SIGKILL
    stats = layer.table.stats()
    print(f"   {stats['rows_touched']:,} rows have trained: {stats['disk_bytes'] / MIB:,.0f} MiB of files")
    layer.table.close()
    print("3. Next: python examples/dlrm.py (Criteo's format); README.md (every page); your clicks, in `Clicks.batch`")


def main() -> None:
    """Train in RAM, then on disk in two processes, of which the first is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=20_000_000, help="and a tenth as many items; in RAM a twentieth")
    parser.add_argument("--steps", type=int, default=400, help="on disk; in RAM half as many")
    parser.add_argument("--memory", default="256MiB", help="RAM for the rows on disk")
    parser.add_argument("--path", help="a folder that stays: the next run goes on there")
    options = parser.parse_args()
    clicks = Clicks(options.users // 20)
    batches = [clicks.batch(step) for step in range(1, options.steps // 2 + 1)]
    ours = ert.Embedding(clicks.rows, DIM, init=INIT, seed=0)
    theirs = nn.Embedding.from_pretrained(ours(torch.arange(clicks.rows)).detach(), freeze=False, sparse=True)
    print(f"1. In RAM: {clicks.rows:,} rows, beside nn.Embedding. Best possible AUC: {clicks.best:.4f}", flush=True)
    one = train(ours, ert.Adam(ours, lr=LR), clicks, batches)
    other = train(theirs, torch.optim.SparseAdam(theirs.parameters(), lr=LR), clicks, batches)
    list(zip(one, other, strict=True))  # step by step, in turns
    print(f"   RAM: embedrock {ours.table.stats()['bytes_used'] / MIB:.0f}, torch {3 * theirs.weight.nbytes >> 20} MiB")
    print(f"2. On disk: {options.users * 11 // 10:,} rows behind {options.memory} of RAM", flush=True)
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        options.path = options.path or f"{temporary}/rows.rock"
        for dies_at in (5 * options.steps // 8, 0):
            process = get_context("spawn").Process(target=on_disk, args=(options, dies_at))
            process.start()
            process.join()
            if process.exitcode != -9:
                break
            print("   Killed by SIGKILL: the steps since the last commit are lost.", flush=True)
    raise SystemExit(process.exitcode)


if __name__ == "__main__":
    main()
