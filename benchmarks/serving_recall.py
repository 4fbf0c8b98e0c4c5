"""Recall of the top 20 by rows of int8, int4 and bfloat16: ``python -m benchmarks.serving_recall LOG``.

Factors of users and items are trained on a log of ratings. Then rows of items, or of both, are rounded to another
dtype. The squared loss of all pairs gives wider gaps between scores than the BPR loss, and so a higher recall.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import embedrock as er
from embedrock.storage.records import Records, encode

DTYPES = ("bfloat16", "int8", "int4")
DIM, TOP, BATCH = 32, 20, 2048
NEUTRAL = 2.5  # a rating above it is liked, one below is not; pairs without one count as 0

Log = tuple[np.ndarray, np.ndarray, np.ndarray]
Step = Callable[[er.Table, er.Table], None]


def read_log(path: Path) -> Log:
    """Return the dense numbers of users and of items, and the ratings, of a log with a line of names."""
    pairs = np.loadtxt(path, skiprows=1, usecols=(0, 1, 2), dtype=np.int64)
    users, items = (np.unique(column, return_inverse=True)[1] for column in pairs.T[:2])
    return users, items, pairs[:, 2].astype(np.float32)


def squared(log: Log) -> Step:
    """Return a step of the squared loss of all pairs of a user and an item."""
    users, items, ratings = log
    target = np.zeros((users.max() + 1, items.max() + 1), np.float32)
    target[users, items] = ratings - NEUTRAL
    every = [np.arange(size) for size in target.shape]

    def step(of_users: er.Table, of_items: er.Table) -> None:
        u, i = of_users.lookup(every[0]), of_items.lookup(every[1])
        error = u @ i.T - target
        of_users.update(every[0], error @ i + u)
        of_items.update(every[1], error.T @ u + i)

    return step


def bpr(log: Log) -> Step:
    """Return a step of the BPR loss: items that users rated rank above random ones."""
    (users, items, _), rng = log, np.random.default_rng(0)

    def step(of_users: er.Table, of_items: er.Table) -> None:
        part, other = rng.integers(0, len(users), BATCH), rng.integers(0, items.max() + 1, BATCH)
        u, i, j = of_users.lookup(users[part]), of_items.lookup(items[part]), of_items.lookup(other)
        slope, decay = -1 / (1 + np.exp(((i - j) * u).sum(axis=1, keepdims=True))), np.float32(0.01)
        of_users.update(users[part], slope * (i - j) + decay * u)
        of_items.update(
            np.concatenate([items[part], other]),
            np.concatenate([slope * u, -slope * u]) + decay * np.concatenate([i, j]),
        )

    return step


LOSSES = {"squared": (squared, er.Adam(lr=0.02), 200), "BPR": (bpr, er.Adagrad(lr=0.1), 1500)}


def factors(log: Log, loss: str) -> list[np.ndarray]:
    """Train a table of users and one of items from fixed seeds, and return the rows of both."""
    make, rule, steps = LOSSES[loss]
    sizes, step = [int(ids.max()) + 1 for ids in log[:2]], make(log)
    tables = [er.Table(rows, DIM, rule=rule, init=er.Normal(std=0.1), seed=k) for k, rows in enumerate(sizes)]
    for _ in range(steps):
        step(*tables)
    return [table.lookup(np.arange(rows)) for table, rows in zip(tables, sizes, strict=True)]


def rounded(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return rows after a round trip through records of a dtype."""
    spec, slots = er.Spec(None, rows.shape[1], dtype, None, er.Zeros(), 0), np.arange(len(rows))
    made, out = Records(spec, encode(spec, slots, rows).reshape(-1)), np.empty_like(rows)
    made.read(slots, slots.astype(np.int32), rows[:0], out)
    return out


def recall(users: np.ndarray, items: np.ndarray, other_users: np.ndarray, other_items: np.ndarray) -> float:
    """Return the share of the top 20 items of each user that other rows find, too."""
    scores = users @ items.T, other_users @ other_items.T
    best = [np.argpartition(-each, TOP, axis=1)[:, :TOP] for each in scores]
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(*best, strict=True)]))


def main() -> None:
    """Print the recall of each loss and dtype."""
    log = read_log(Path(sys.argv[1]))
    for loss in LOSSES:
        users, items = factors(log, loss)
        for dtype in DTYPES:
            of_items = rounded(items, dtype)
            alone, both = recall(users, items, users, of_items), recall(users, items, rounded(users, dtype), of_items)
            print(f"{loss:8} {dtype:9} recall@{TOP}: items {alone:.4f}, users and items {both:.4f}")


if __name__ == "__main__":
    main()
