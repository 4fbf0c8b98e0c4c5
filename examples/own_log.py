"""Train a recommender on a log of your own, once with Embedrock and once with `nn.Embedding` and `SparseAdam`.

    python examples/own_log.py --data interactions.csv

The log has one interaction per line, ``user item [rating] [timestamp]``, separated by tabs, commas or whitespace, with
or without a header line. The last item of each user is held out, and ranked among 100 items that the user never
touched (HR@10, NDCG@10). Both models start from the same values and train on the same batches.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert
from common import DataError, count, facts, make_parser, run
from interactions import Interactions, read_log
from leave_one_out import NOTHING, Split, leave_one_out
from recommender import MF, train_step, use_threads

FIRST = 100  # steps whose losses are compared
SCORED = 1 << 18  # pairs that are scored at a time
WIDTHS = 3  # hidden layers, each half as wide as its input


class GMF(nn.Module):
    """Generalized matrix factorization: a learned weighing of the product of user and item."""

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items, self.score = users, items, nn.Linear(dim, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair of ids, whose shapes broadcast."""
        return self.score(self.users(users) * self.items(items)).squeeze(-1)


class NeuMF(nn.Module):
    """Neural matrix factorization: `GMF` and a small MLP side by side, each on one half of the rows.

    The paper's ReLU is a SiLU here: a ReLU near 0 makes a visible difference of the last bit of a sum, and two runs
    that should agree drift apart after some 1,000 steps.
    """

    def __init__(self, users: nn.Module, items: nn.Module, dim: int) -> None:
        super().__init__()
        self.users, self.items = users, items
        hidden = [(nn.Linear(dim >> depth, dim >> (depth + 1)), nn.SiLU()) for depth in range(WIDTHS)]
        self.mlp = nn.Sequential(*(layer for pair in hidden for layer in pair))
        self.score = nn.Linear(dim // 2 + (dim >> WIDTHS), 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return a logit for each pair of ids, whose shapes broadcast."""
        (p, user), (q, item) = self.users(users).chunk(2, -1), self.items(items).chunk(2, -1)
        deep = self.mlp(torch.cat(torch.broadcast_tensors(user, item), -1))
        return self.score(torch.cat([p * q, deep], -1)).squeeze(-1)


MODELS = {"mf": MF, "gmf": GMF, "neumf": NeuMF}


class Epoch(NamedTuple):
    """An epoch of one model: its mean loss, the ranks of the held-out items, and seconds."""

    loss: float
    hits: float
    ndcg: float
    seconds: float

    def __str__(self) -> str:
        return f"{self.loss:9.4f}  {self.hits:7.4f}  {self.ndcg:8.4f}  {self.seconds:6.2f}"


class Learner:
    """A model, its optimizer, and its way."""

    def __init__(self, name: str, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self.name, self.model, self.optimizers = name, model, optimizers
        self.losses, self.epochs = list[float](), list[Epoch]()

    def step(self, batch: Sequence[np.ndarray]) -> float:
        """Train on a batch; return its loss of before."""
        first, *others = self.optimizers
        loss = train_step(self.model, first, batch)
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def train(self, batches: Sequence[Sequence[np.ndarray]], split: Split) -> None:
        """Train an epoch, then rank the held-out items."""
        start = time.perf_counter()
        losses = [self.step(batch) for batch in batches]
        seconds = time.perf_counter() - start
        self.losses += losses
        ranks = ranks_of(self.model, split)
        ndcg = np.where(ranks < 10, 1 / np.log2(ranks + 2), 0).mean()
        self.epochs.append(Epoch(float(np.mean(losses)), float((ranks < 10).mean()), float(ndcg), seconds))


def make_learners(log: Interactions, options: Namespace) -> list[Learner]:
    """Return a learner with Embedrock's tables, and one with PyTorch's that starts from the same values."""
    rows = {"users": log.num_users, "items": log.num_items}
    seeds = np.random.SeedSequence(options.seed).generate_state(2).tolist()
    ours = [
        ert.Embedding(size, options.dim, init=er.Normal(std=0.01), seed=seed, name=name)
        for (name, size), seed in zip(rows.items(), seeds, strict=True)
    ]
    theirs = [
        nn.Embedding.from_pretrained(torch.from_numpy(layer.table.lookup(np.arange(size))), freeze=False, sparse=True)
        for layer, size in zip(ours, rows.values(), strict=True)
    ]
    made = []
    for layers in (ours, theirs)[: 1 + options.compare]:
        torch.manual_seed(options.seed)  # of the dense weights
        made.append(MODELS[options.model](*layers, options.dim))
    learners = [Learner("Embedrock", made[0], [ert.optimizer(made[0], ert.Adam, torch.optim.Adam, lr=options.lr)])]
    for model in made[1:]:
        sparse = [model.users.weight, model.items.weight]
        dense = [each for name, each in model.named_parameters() if name not in ("users.weight", "items.weight")]
        steppers = [torch.optim.SparseAdam(sparse, lr=options.lr), torch.optim.Adam(dense, lr=options.lr)]
        learners.append(Learner("nn.Embedding + SparseAdam", model, steppers))
    return learners


@torch.no_grad()
def ranks_of(model: nn.Module, split: Split) -> np.ndarray:
    """Return how many candidates score at least as high as the one held out, for each user."""
    missing = split.candidates == NOTHING
    users, items = torch.from_numpy(split.test_users[:, None]), torch.from_numpy(np.where(missing, 0, split.candidates))
    users_at_a_time = max(1, SCORED // items.shape[1])
    parts = zip(users.split(users_at_a_time), items.split(users_at_a_time), strict=True)
    scores = np.where(missing, -np.inf, torch.cat([model(*part) for part in parts]).numpy())
    return np.count_nonzero(~(scores[:, 1:] < scores[:, :1]), axis=1)


def train(log: Interactions, split: Split, options: Namespace) -> list[Learner]:
    """Train each model on the same batches, and print each epoch."""
    learners = make_learners(log, options)
    head = f"{'loss':>9}  {'HR@10':>7}  {'NDCG@10':>8}  {'s':>6}"
    print("\n     " + "".join(f"  {learner.name:^{len(head)}}" for learner in learners).rstrip())
    print("epoch" + f"  {head}" * len(learners))
    for number in range(1, options.epochs + 1):
        epoch = split.epoch(options.seed, number)
        cuts = range(options.batch_size, len(epoch[0]), options.batch_size)
        batches = list(zip(*(np.split(each, cuts) for each in epoch), strict=True))
        for learner in learners:
            learner.train(batches, split)
        print(f"{number:5}" + "".join(f"  {learner.epochs[-1]}" for learner in learners), flush=True)
    return learners


def comparison(ours: Learner, theirs: Learner) -> str:
    """Return how far two models are apart."""
    a, b = np.array(ours.losses[:FIRST]), np.array(theirs.losses[:FIRST])
    hits = abs(ours.epochs[-1].hits - theirs.epochs[-1].hits)
    seconds, others = (np.median([epoch.seconds for epoch in learner.epochs]) for learner in (ours, theirs))
    return facts(
        {
            "losses": f"differ by {np.max(np.abs(a - b) / b):.2g} at most in the first {len(a)} steps",
            "HR@10": f"differs by {hits:.2g}",
            "an epoch": f"takes {seconds:.2f} against {others:.2f} s, {others / seconds:.1f}x",
        }
    )


def main(words: list[str]) -> None:
    """Train as the words of the command line say."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="the log")
    parser.add_argument("--model", choices=MODELS, default="neumf", help="of rows and dense layers")
    for name, default in (("dim", 64), ("batch-size", 8192), ("epochs", 12)):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help="a number")
    parser.add_argument("--lr", type=float, default=0.003, metavar="X", help="learning rate of Adam")
    parser.add_argument("--no-compare", dest="compare", action="store_false", help="leave `nn.Embedding` out")
    options = parser.parse_args(words)
    if options.model == "neumf" and options.dim % 8:
        parser.error(f"argument --dim: must be a multiple of 8 for neumf: got {options.dim}")
    use_threads(options.threads)
    log = read_log(options.data)
    split = leave_one_out(log, options.seed)
    if not len(split.test_users):
        raise DataError(f"{options.data}: expected users with two interactions or more; got none to hold out.")
    counts = f"{len(log.users):,} interactions, {log.num_users:,} users, {log.num_items:,} items"
    print(facts({"log": f"{options.data.name}: {log.form}; {counts}", "test": f"{len(split.test_users):,} users"}))
    learners = train(log, split, options)
    if options.compare:
        print("\n" + comparison(*learners))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
