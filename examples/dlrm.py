"""Train DLRM on click logs in Criteo's format: a label, 13 whole numbers, 26 categories, separated by tabs.

    python examples/dlrm.py                      # makes such a file, with planted clicks
    python examples/dlrm.py --data train.txt     # reads yours, of any size; fields may be empty
    python examples/dlrm.py --path run           # rows on disk behind 16 MiB of RAM; killed, it goes on

Hashes of categories are the ids: no two share a row. The AUC is of the last 20,000 lines, before it trained on them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on few cores, threads that spin while they wait cost the most

import numpy as np
import torch
from torch import Tensor, nn

import embedrock as er
import embedrock.torch as ert

NUMBERS, CATEGORIES, BATCH, SCORED = 13, 26, 512, 20_000


def make_clicks(path: Path, lines: int) -> np.ndarray:
    """Write planted clicks to a file, and return the chance (lines,) by which each was drawn."""
    rng = np.random.default_rng(0)
    logits, factors, columns = np.full(lines, -4.0), [], []
    for column in range(NUMBERS + CATEGORIES):
        count = 30 if column < NUMBERS else int(10 ** rng.uniform(1, 3))
        code, is_there = (count * rng.random(lines) ** 3).astype(int), rng.random(lines) > 0.1
        logits += is_there * (0.2 * np.log1p(code) if column < NUMBERS else rng.normal(scale=0.4, size=count)[code])
        factors.append(is_there[:, None] * rng.normal(size=(count, 2))[code])
        names = range(count) if column < NUMBERS else [f"{k:08x}" for k in rng.integers(2**32, size=count)]
        columns.append(np.where(is_there, np.array(list(map(str, names)), object)[code], ""))
    logits += sum((factors[k] * factors[k + 1]).sum(1) for k in range(NUMBERS, NUMBERS + 6, 2)) * 0.7
    chances = 1 / (1 + np.exp(-logits))
    columns.insert(0, np.where(rng.random(lines) < chances, "1", "0"))
    path.write_text("".join("\t".join(fields) + "\n" for fields in zip(*columns, strict=True)))
    return chances


def batches(path: Path, skipped: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Read labels (n,), numbers (n, 13) and ids of categories (n, 26) from a file, batch by batch."""
    with path.open() as lines:
        next(islice(lines, skipped, skipped), None)
        while chunk := [line.rstrip("\n").split("\t") for line in islice(lines, BATCH)]:
            fields = np.array(chunk, object)
            numbers = np.where(fields[:, : NUMBERS + 1] == "", "0", fields[:, : NUMBERS + 1]).astype(np.float32)
            ids = er.hash_ids(fields[:, NUMBERS + 1 :])  # an empty field is the category ""
            yield torch.from_numpy(numbers[:, 0]), torch.from_numpy(numbers[:, 1:]), torch.from_numpy(ids)


class DLRM(nn.Module):
    """Two MLPs, and the inner products of all pairs of rows between them."""

    def __init__(self, dim: int, group: er.Group) -> None:
        super().__init__()
        configs = [ert.EmbeddingBagConfig(None, dim, f"C{k + 1}", init=er.Normal(std=0.1)) for k in range(CATEGORIES)]
        self.tables = ert.EmbeddingBagCollection(configs, group=group)  # one lookup for all of them
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.pairs = torch.tril_indices(CATEGORIES + 1, CATEGORIES + 1, offset=-1)
        self.top = nn.Sequential(nn.Linear(dim + self.pairs.shape[1], 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers.clamp(min=0).log1p())
        rows = self.tables(dict(zip(self.tables.features, ids.T, strict=True)), concatenate=True)
        vectors = torch.cat([dense, rows], 1).view(len(ids), CATEGORIES + 1, -1)
        return self.top(torch.cat([dense, (vectors @ vectors.mT)[:, *self.pairs]], 1)).squeeze(1)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the chance that a click scores above a line without one."""
    ranks, clicks = scores.argsort().argsort() + 1, labels.sum()
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def main() -> None:
    """Train on a file, and print the AUC on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file in Criteo's format")
    parser.add_argument("--path", type=Path, help="folder of rows on disk and of checkpoints; without it, rows in RAM")
    parser.add_argument("--lines", type=int, default=300_000, help="lines of the file that it makes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        data = options.data or Path(made) / "clicks.txt"
        chances = None if options.data else make_clicks(data, options.lines)
        torch.manual_seed(0)
        folder, step = options.path or Path(made), 0
        folder.mkdir(parents=True, exist_ok=True)
        group = er.Group(path=folder / "tables.rock", memory="16MiB") if options.path else er.Group()
        model = DLRM(16, group)
        optimizer = ert.optimizer(model, rows=ert.Adagrad, dense=torch.optim.Adagrad, lr=0.05)
        with contextlib.suppress(ert.NoCheckpointError):
            step = ert.load(model, folder / "checkpoints", optimizer)
        labels = scores = np.empty(0)
        for step, (label, numbers, ids) in enumerate(batches(data, step * BATCH), step + 1):  # noqa: B020
            logits = model(numbers, ids)
            nn.functional.binary_cross_entropy_with_logits(logits, label).backward()
            optimizer.step()
            optimizer.zero_grad()
            labels, scores = np.append(labels, label)[-SCORED:], np.append(scores, logits.detach())[-SCORED:]
            if step % 100 == 0 or len(label) < BATCH:
                print(f"{(step - 1) * BATCH + len(label):9,} lines  AUC {auc(labels, scores):.4f}", flush=True)
                ert.save(model, folder / "checkpoints", step, optimizer)
    print(f"{ert.num_parameters(model):,} weights, {sum(len(group[name]) for name in group):,} rows")
    if chances is not None and len(labels):
        print(f"AUC {auc(labels, chances[-len(labels) :]):.4f} of the planted chances, which no model beats")
    print(f"AUC {auc(labels, scores):.4f} of DLRM, before it trained on a line" if len(labels) else "No line is new")


if __name__ == "__main__":
    main()
