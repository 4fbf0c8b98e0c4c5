"""Train a two-tower retrieval model with PyTorch Lightning, and answer "the top 20 for this user" from its files.

python examples/two_tower.py                      # planted clicks: trains, tests, serves
python examples/two_tower.py --data clicks.txt    # of your own: a line is "user item" (words or numbers), by time
python examples/two_tower.py --path run           # keeps all files; killed and called again, it goes on
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on few cores, threads that spin while they wait cost the most

import faiss
import lightning
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import embedrock as er
import embedrock.torch as ert

DIM, TOP, EPOCHS, BASE = 32, 20, 6, 1 << 32  # BASE: above all numbers of items


def planted_clicks(rows: int, clusters: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Return clicks (n, 2), and each user's best items (rows, n): 4 of 5 clicks are in the user's cluster."""
    rng, user = np.random.default_rng(0), np.tile(np.arange(rows), 24)
    taste, rank = rng.integers(clusters, size=rows), (rows // clusters * rng.random(len(user)) ** 3).astype(int)
    cluster = np.where(rng.random(len(user)) < 0.8, taste[user], rng.integers(clusters, size=len(user)))
    return np.stack([user, rank * clusters + cluster], 1), np.arange(rows // clusters) * clusters + taste[:, None]


def recall(ranked: np.ndarray, seen: np.ndarray, last: np.ndarray) -> float:
    """Return the share of users' `last` clicks (n, 2) whose item is in the first 20 unseen of `ranked` (n, k)."""
    is_new = ~np.isin(last[:, :1] * BASE + ranked, seen @ [BASE, 1])
    return float((is_new & (is_new.cumsum(1) <= TOP) & (ranked == last[:, 1:])).sum() / len(last))


class TwoTowers(lightning.LightningModule):
    """Towers of users and items, with rows on disk. The loss is the batch's softmax, corrected for popularity."""

    def __init__(self, folder: Path, users: int, seen_of: np.ndarray) -> None:
        super().__init__()
        rows = {"memory": "4MiB", "init": er.Normal(std=0.1)}
        self.users = ert.Embedding(users, DIM, path=folder / "users.rock", **rows)
        self.items = ert.Embedding(len(seen_of), DIM, path=folder / "items.rock", **rows)
        self.user_tower = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.item_tower = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        self.log_q = torch.from_numpy(seen_of / seen_of.sum()).float().log()
        self.optimizer = ert.optimizer(self, rows=ert.Adam, dense=torch.optim.Adam, lr=1e-2)
        self.checkpoints, self.epoch = folder / "checkpoints", 0
        with contextlib.suppress(ert.NoCheckpointError):
            self.epoch = ert.load(self, self.checkpoints, self.optimizer)

    def training_step(self, clicks: list[Tensor], batch: int) -> Tensor:
        users, items = clicks
        logits = self.user_tower(self.users(users)) @ self.item_tower(self.items(items)).T - self.log_q[items]
        logits[(items == items[:, None]).fill_diagonal_(False)] = -torch.inf  # the same item is no negative
        return nn.functional.cross_entropy(logits, torch.arange(len(items)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer

    def on_train_epoch_end(self) -> None:
        self.epoch += 1
        ert.save(self, self.checkpoints, self.epoch, self.optimizer)  # rows and dense weights as one


def serve(folder: Path, users: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` best items of each user, by the files alone: index, rows and dense weights."""
    with er.Subscriber(folder / "served").step() as step:  # a service calls follow(), and gets newer steps
        w, b, w2, b2 = (step.dense[f"user_tower.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
        queries = np.maximum(step["users"].lookup(users) @ w.T + b, 0) @ w2.T + b2
    return faiss.read_index(str(folder / "items.faiss")).search(queries, count)[1]


def main() -> None:
    """Train, make the index, and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file of clicks")
    parser.add_argument("--path", help="folder of all files; by default a new one")
    parser.add_argument("--rows", type=int, default=10_000, help="planted users, and planted items")
    options = parser.parse_args()
    clicks, best = planted_clicks(options.rows)
    names = [np.arange(1 + each.max()) for each in clicks.T]
    if options.data:
        numbered = [np.unique(each, return_inverse=True) for each in np.loadtxt(options.data, str).T]
        names, clicks, best = [each[0] for each in numbered], np.stack([each[1] for each in numbered], 1), None
    folder = Path(options.path or tempfile.mkdtemp(prefix="two_tower-"))
    folder.mkdir(parents=True, exist_ok=True)
    at_end = len(clicks) - 1 - np.unique(clicks[::-1, 0], return_index=True)[1]
    seen, last = np.delete(clicks, at_end, 0), clicks[at_end]
    last = last[np.isin(last[:, 0], seen[:, 0]) & ~np.isin(last @ [BASE, 1], seen @ [BASE, 1])]
    seen_of, most = np.bincount(seen[:, 1], minlength=clicks[:, 1].max() + 1), TOP + np.bincount(seen[:, 0]).max()
    torch.manual_seed(0)
    model = TwoTowers(folder, clicks[:, 0].max() + 1, seen_of)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = lightning.Trainer(max_epochs=EPOCHS - model.epoch, accelerator="cpu", **quiet)
    loader = DataLoader(TensorDataset(*torch.from_numpy(seen.T)), batch_size=512, shuffle=True, drop_last=True)
    trainer.fit(model, loader)
    with ert.publish(model, folder / "served") as publisher:
        publisher.publish(step=model.epoch)
    index, items = faiss.IndexFlatIP(DIM), torch.arange(len(seen_of))  # exact; IndexHNSWFlat for millions of items
    index.add(model.eval().item_tower(model.items(items)).detach().numpy())
    faiss.write_index(index, str(folder / "items.faiss"))
    ranked = {} if best is None else {"planted clusters, the best possible": best[last[:, 0]]}
    ranked |= {"most popular": np.argsort(-seen_of)[None, :most], "two towers": serve(folder, last[:, 0], int(most))}
    print(*(f"recall@{TOP} {recall(found, seen, last):.3f}  {name}" for name, found in ranked.items()), sep="\n")
    top = names[1][ranked["two towers"][0, :TOP]].tolist()
    print(f"top {TOP} of user {names[0][last[0, 0]]}: {top}\nfiles in {folder}")


if __name__ == "__main__":
    main()
