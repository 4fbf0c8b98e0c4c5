"""Train a recommender with PyTorch on planted clicks. Its tables have 22 million rows, on disk behind 360 MiB of RAM.

python examples/recommender.py                   killed and started again, it goes on
python examples/recommender.py --path FOLDER     keeps the tables; more --steps go on with them
python examples/recommender.py --ranks 2         in two processes; each has its part of the rows and of a batch
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # few cores: threads that wait by spinning make a step 10x longer

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import embedrock as er
import embedrock.torch as ert
from common import add_training_options, auc, count, describe, make_parser, reports, run, summary, training_folder
from planted import Clicks, PlantedClicks

SAVE_STEPS = 250  # between two checkpoints
SCORED = 1 << 14  # clicks that are scored at a time
SAME = "users", "items", "dim", "lr", "batch_size", "seed", "ranks"
COUNTS = "hits", "misses", "reads", "rows_touched", "bytes_used"


class MF(nn.Module):
    """Matrix factorization: the inner product of a user and an item, with a bias that each row gives."""

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.user_bias, self.item_bias = nn.Linear(dim, 1), nn.Linear(dim, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair of ids."""
        p, q = self.users(users), self.items(items)
        return (p * q).sum(-1) + (self.user_bias(p) + self.item_bias(q)).squeeze(-1)


def make_model(options: Namespace, folder: Path | None) -> MF:
    """Return the model. Its tables are one group; those of several processes lie each by themselves."""
    place: dict[str, Any] = {"sharded": True}
    if options.ranks == 1:
        path, memory = (folder / "model.rock", options.memory) if folder else (None, None)
        place = {"group": er.Group(memory=memory, path=path)}
    seeds = np.random.SeedSequence(options.seed).generate_state(2).tolist()
    layers = list[Any]()
    for name, rows, seed in zip(("users", "items"), (options.users, options.items), seeds, strict=True):
        if folder and options.ranks > 1:
            place |= {"path": folder / f"{name}.rock", "memory": options.memory // (2 * options.ranks)}
        layers.append(ert.Embedding(rows, options.dim, init=er.Normal(std=0.01), seed=seed, name=name, **place))
    torch.manual_seed(options.seed)
    users, items = layers
    return MF(users, items, options.dim)


def train(options: Namespace, folder: Path | None) -> None:
    """Train from the last checkpoint on, and print the AUC on the way."""
    model = make_model(options, folder)
    net = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=options.lr)
    clicks = PlantedClicks(options.users, options.items, options.batch_size, options.seed)
    first = resume(model, optimizer, folder)
    measured, losses = reports(first, options.steps), []
    say(f"\n    step    loss     AUC   (best possible: {clicks.best:.4f}, by the planted model itself)")
    before, started = stats(model), time.perf_counter()
    for step, batch in enumerate(batches(model, clicks, range(first, options.steps), folder), first + 1):
        losses.append(train_step(net, optimizer, batch[:3]))
        if folder and (step % SAVE_STEPS == 0 or step in measured):
            ert.save(model, folder / "checkpoints", step, optimizer)
        if sys.stderr.isatty():
            print(f"\r{step:8,}  {losses[-1]:.4f}", end="\r", file=sys.stderr)
        if step in measured:
            say(f"{step:8,}  {np.mean(losses[-100:]):.4f}  {test_auc(model, clicks.test):.4f}")
    seconds, grown = time.perf_counter() - started, stats(model)
    grown.update({name: grown[name] - before[name] for name in ("hits", "misses", "reads")})
    say("\n" + summary(grown, options, max(0, options.steps - first), seconds))
    trained = test_auc(model, clicks.test)
    say(f"AUC      {trained:.4f} trained, {clicks.best:.4f} planted model, on {len(clicks.test.labels):,} clicks")
    close(model)


def batches(model: MF, clicks: PlantedClicks, steps: range, folder: Path | None) -> Iterable[Clicks]:
    """Go through this process's part of each batch. On disk, the rows of the next two are read meanwhile."""
    own = (part_of(clicks.batch(step)) for step in steps)
    if folder is None:
        return own
    users, items = layers_of(model)
    return ert.prefetch(own, {users: lambda batch: batch.users, items: lambda batch: batch.items})


def part_of(batch: Clicks) -> Clicks:
    """Return the part of a batch that this process trains."""
    if not dist.is_initialized():
        return batch
    return Clicks(*(np.array_split(each, dist.get_world_size())[dist.get_rank()] for each in batch))


def train_step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[np.ndarray]) -> float:
    """Train on a batch of users, items and labels; return its loss of before."""
    optimizer.zero_grad()
    users, items, labels = map(torch.from_numpy, batch)
    loss = binary_cross_entropy_with_logits(net(users, items), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test_auc(model: MF, test: Clicks) -> float:
    """Return the AUC on the test."""
    users, items = (torch.from_numpy(ids).split(SCORED) for ids in (test.users, test.items))
    return auc(test.labels, torch.cat([model(*pair) for pair in zip(users, items, strict=True)]).numpy())


def resume(model: nn.Module, states: Any, folder: Path | None) -> int:
    """Go back to the last checkpoint; return its step, 0 without one. `states` are those of `ert.save`."""
    try:
        step = ert.load(model, folder / "checkpoints", states) if folder else 0
    except ert.NoCheckpointError:
        return 0
    if step:
        say(f"resumed  at step {step:,}")
    return step


def layers_of(model: MF) -> list[Any]:
    """Return the layers that have tables."""
    return [model.users, model.items]


def tables_of(model: MF) -> Iterator[Any]:
    """Go through the group of the tables, or through the tables that lie by themselves."""
    yield from {id(each): each for each in (layer.table.group or layer.table for layer in layers_of(model))}.values()


def stats(model: MF) -> Counter[str]:
    """Return the counts of all tables, of all processes together."""
    own = Counter[str]()
    for table in tables_of(model):
        own.update({name: table.stats().get(name, 0) for name in COUNTS})
    if not dist.is_initialized():
        return own
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return sum(everywhere, Counter[str]())


def close(model: MF) -> None:
    """Close the tables."""
    for table in tables_of(model):
        table.close()


def say(text: str) -> None:
    """Print a line, from one of the processes."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def use_threads(threads: int | None) -> None:
    """Give PyTorch and Embedrock that many threads each; None: their own choice."""
    if threads is not None:
        torch.set_num_threads(threads)
        er.set_threads(threads)


def train_rank(rank: int, options: Namespace, folder: Path | None, store: str) -> None:
    """Train as one of several processes; `store` is the file by which they find each other."""
    use_threads(options.threads or max(1, er.get_threads() // options.ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    try:
        train(options, folder)
    finally:
        dist.destroy_process_group()


def main(words: list[str]) -> None:
    """Train as the words of the command line say."""
    parser = make_parser(__doc__)
    add_training_options(parser)
    parser.add_argument("--ranks", type=count, default=1, metavar="N", help="processes that train together")
    options = parser.parse_args(words)
    describe(options)
    with training_folder(options, *SAME) as folder:
        if options.ranks == 1:
            use_threads(options.threads)
            train(options, folder)
        else:
            with tempfile.TemporaryDirectory() as meeting:
                arguments = options, folder, f"{meeting}/store"
                torch.multiprocessing.spawn(train_rank, arguments, options.ranks)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
