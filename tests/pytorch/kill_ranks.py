"""Kill ranks that train and commit one table in parts, at random moments, and compare what is left with one table.

``python kill_ranks.py LIVES SEED LATEST [KIND]``: each life has 1, 2 or 4 ranks, which go on from what the one before
left, so that rows are shared out anew as they open. Whatever their number, a step has the same two blocks. Of kind
"goes", the table has an admission with a default row and an eviction.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import embedrock as er
import embedrock.torch as ert
from embedrock.distributed import stages
from embedrock.distributed.stages import GradientBlock

DIM, IDS, SPREAD = 8, 200, 2000
COUNTS = ("admitted", "evicted", "gradients_shared", "pending")
RANKS = (1, 2, 4)
KINDS: dict[str, dict[str, Any]] = {
    "stays": {},
    "goes": {
        "admission": er.Admission(2, within=40, default="shared"),
        "eviction": er.Eviction(max_rows=600, idle=30, by="recency"),
    },
}


def batch(step: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the unique ids of a block of a step, and their gradients."""
    draw = np.random.default_rng([step, block])
    ids = np.unique(draw.integers(0, SPREAD, IDS)) * 7919
    return ids, draw.normal(size=(len(ids), DIM)).astype(np.float32)


def live(path: str, rank: int, ranks: int, store: str, kind: str) -> None:
    """Train as one rank, until it is killed, or another one is."""
    torch.set_num_threads(1)
    if ranks > 1:
        wait = timedelta(seconds=20)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=wait)
    options: dict[str, Any] = {"path": path, "memory": "1MiB", "init": er.Normal(std=0.1), "seed": 1, **KINDS[kind]}
    layer = ert.Embedding(None, DIM, sharded=True, reshard="auto", **options)
    optimizer = ert.Adam(layer, lr=0.05)
    while True:
        step = layer.table.steps
        for block in [0, 1] if ranks == 1 else [rank]:
            ids, grads = batch(step, block) if block < 2 else (np.empty(0, np.int64), np.empty((0, DIM), np.float32))
            layer(torch.from_numpy(ids)).backward(torch.from_numpy(grads * np.float32(ranks)))
        optimizer.step()
        optimizer.zero_grad()
        layer.table.commit(step=step + 1, wait=step % 3 > 0)


class Oracle:
    """One table in RAM, which makes the same steps."""

    def __init__(self, kind: str) -> None:
        policies = KINDS[kind]
        more = {**policies, "segments": None} if policies else {}
        self.table = er.Table(None, DIM, seed=1, init=er.Normal(std=0.1), rule=er.Adam(lr=0.05), **more)

    def check(self, path: str) -> int:
        """Compare the parts at a path, as of the newest commit of all, to the bit; return how many steps they made."""
        try:
            opened = er.open(path, mode="r")
        except er.ArgumentError as error:  # ranks were killed as they made the table
            if self.table.steps or "got none in shard-" not in str(error):
                raise
            return 0
        with opened as found:
            assert found.steps >= self.table.steps, (found.steps, self.table.steps)
            while self.table.steps < found.steps:
                blocks = [GradientBlock(*batch(self.table.steps, block)) for block in range(2)]
                self.table.step(stages.fold(blocks))
            for ours, theirs in zip(found.export(), self.table.export(), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            np.testing.assert_array_equal(
                found.lookup([-1]), self.table.lookup([-1])
            )  # the default row, if there is one
            has, expected = found.stats(), self.table.stats()
            assert all(has[name] == expected[name] for name in COUNTS if name in expected), (has, expected)
            assert not found.verify().problems
            return found.steps


def start(path: str, ranks: int, store: str, kind: str) -> list[int]:
    """Return the processes of a life."""
    started = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            with open(f"{path}.log", "a") as log:
                os.dup2(log.fileno(), 2)
            try:
                live(path, rank, ranks, store, kind)
            except er.WorkerLostError:
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        started.append(pid)
    return started


def end(processes: list[int], draw: np.random.Generator) -> None:
    """Kill one of them, and a moment later the others; those that are gone by themselves had to."""
    order = draw.permutation(len(processes))
    for place in order:
        os.kill(processes[place], signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.05))
    for place in order:
        _, status = os.waitpid(processes[place], 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a rank failed by itself"


def main(lives: int, seed: int, latest: float, kind: str = "stays") -> None:
    """Live so often, each life for up to `latest` seconds: opening takes some tenths, a commit some hundredths."""
    draw, oracle, steps = np.random.default_rng(seed), Oracle(kind), []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "users.rock")
        try:
            for life in range(lives):
                ranks = int(draw.choice(RANKS))
                processes = start(path, ranks, os.path.join(folder, f"store-{life}"), kind)
                time.sleep(draw.uniform(0, latest))
                end(processes, draw)
                if os.path.exists(os.path.join(path, "SHARDED")) or steps:
                    steps.append(oracle.check(path))
        except BaseException:
            sys.stderr.write(Path(f"{path}.log").read_text()[-6000:] if os.path.exists(f"{path}.log") else "")
            raise
    print(f"{lives} lives, {len(set(steps))} different commits, {steps[-1]} steps")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
