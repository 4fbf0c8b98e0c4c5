"""Serve a model while it trains: a trainer publishes, a carrier copies, a subscriber keeps a search index in step.

    python examples/serving.py                     planted clicks; trainer and subscriber are killed twice each
    python examples/serving.py --data FILE         a log of yours, ``user item [rating] [timestamp]`` a line
    python examples/serving.py --index faiss       or usearch, where installed; exact is NumPy, and slow for many items

Each of the three may run on a machine of its own. Here they are processes, and folders in one that is removed at the
end. Every so often the oldest items leave the shop, and their rows are forgotten.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import embedrock as er
from common import DataError, count, facts, make_parser, mib, run
from interactions import read_log
from planted import Clicks, PlantedClicks

TABLES, CHECKPOINTS, SERVED, COPY = "model.rock", "checkpoints", "served", "copy"  # folders
LAST = "last"  # file with the number of the step that was published last
LEAVING = 4  # times that items leave ...
LEAVE = 100  # ... one in so many
SAVES = 10  # checkpoints of a training
TOP, ASKED, VISITORS = 10, 200, 8  # items that are found for each user; users of the check, and of a look


class ServingError(er.EmbedrockError):
    """What is served is not what was published."""


# ---------------------------------------------------------------- the trainer


def train(options: Namespace, folder: Path) -> None:
    """Train from the last checkpoint on, and publish meanwhile."""
    import torch  # which a subscriber does not need

    import embedrock.torch as ert
    from recommender import close, layers_of, make_model, resume, train_step

    torch.set_num_threads(1)
    clicks = clicks_of(options)
    model = make_model(options, folder)  # layers with tables in folder / "model.rock", which are one group
    optimizer = ert.optimizer(model, rows=ert.Adam, dense=torch.optim.Adam, lr=options.lr)
    first, (_, items) = resume(model, optimizer, folder), layers_of(model)
    with ert.publish(model, folder / SERVED, every=options.every, dtype="int8") as publisher:
        for step in range(first, options.steps):
            left = items_left(options, step)
            if left > items_left(options, step - 1):
                items.table.forget(np.arange(left))
            batch = clicks.batch(step)
            is_sold = batch.items >= left
            train_step(model, optimizer, [each[is_sold] for each in batch[:3]])
            if (step + 1) % max(1, options.steps // SAVES) == 0:
                ert.save(model, folder / CHECKPOINTS, step + 1, optimizer)
        (folder / LAST).write_text(str(publisher.publish(step=options.steps).number))
    close(model)


def items_left(options: Namespace, step: int) -> int:
    """Return the number of items that have left the shop by a step: those with the lowest ids."""
    return max(0, step) * (LEAVING + 1) // options.steps * max(1, options.items // LEAVE)


def clicks_of(options: Namespace) -> PlantedClicks | LoggedClicks:
    """Return the clicks to train on."""
    if options.data:
        return LoggedClicks(options.data, options.batch_size, options.seed)
    return PlantedClicks(options.users, options.items, options.batch_size, options.seed)


class LoggedClicks:
    """Clicks of a log. Beside each stands an item at random, with label 0."""

    def __init__(self, path: Path, batch_size: int, seed: int) -> None:
        self.log, self._half, self._seed = read_log(path), max(1, batch_size // 2), seed

    def batch(self, step: int) -> Clicks:
        """Return the clicks of a step."""
        drawn = np.random.default_rng((self._seed, step))
        taken = drawn.integers(0, len(self.log.items), self._half)
        others = drawn.integers(0, self.log.num_items, self._half)
        items = np.concatenate([self.log.items[taken], others])
        labels = np.repeat(np.array([1, 0], np.float32), self._half)
        return Clicks(np.tile(self.log.users[taken], 2), items, labels, labels)


# ---------------------------------------------------------------- the carrier


def carry(served: Path, copy: Path) -> None:
    """Copy files that are new or have grown, and remove those that are gone, as ``rsync -a --delete`` does."""
    here, there = files_in(served), files_in(copy)
    for name in [name for name, state in here.items() if state != there.get(name)]:
        target, draft = copy / name, copy / f"{name}.part"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copy2(served / name, draft)
        except FileNotFoundError:  # its writer has removed it
            continue
        os.replace(draft, target)  # a file that a subscriber has mapped must not be rewritten
    for name in there.keys() - here.keys():
        (copy / name).unlink()


def files_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size and time of each file of a folder."""
    found = dict[Path, tuple[int, int]]()
    for where, _, names in os.walk(folder):
        for path in (Path(where, name) for name in names):
            try:
                state = path.stat()
            except FileNotFoundError:
                continue
            found[path.relative_to(folder)] = state.st_size, state.st_mtime_ns
    return found


# ---------------------------------------------------------------- the subscriber


class Index(Protocol):
    """A search index for inner products, of rows by id."""

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Add rows, or replace those of ids that are there."""

    def remove(self, ids: np.ndarray) -> None:
        """Remove rows. Ids that are not there do not matter."""

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows that are there."""
        ...

    def search(self, queries: np.ndarray, most: int) -> np.ndarray:
        """Return the ids of the best rows for each query, the best first."""
        ...

    def __len__(self) -> int: ...


class ExactIndex:
    """All rows in an array, searched in one product: for tests, and some 100,000 rows.

    Example:
        >>> index = ExactIndex(2)
        >>> index.add(np.array([3, 5]), np.array([[1, 0], [0, 1]], np.float32))
        >>> index.search(np.array([[0, 1]], np.float32), most=1)
        array([[5]])
    """

    def __init__(self, dim: int) -> None:
        self._ids, self._rows = np.empty(0, np.int64), np.empty((0, dim), np.float32)

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self.remove(ids)
        self._ids, self._rows = np.concatenate([self._ids, ids]), np.concatenate([self._rows, rows])

    def remove(self, ids: np.ndarray) -> None:
        stay = ~np.isin(self._ids, ids)
        self._ids, self._rows = self._ids[stay], self._rows[stay]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        order = np.argsort(self._ids)
        return self._rows[order[np.searchsorted(self._ids, ids, sorter=order)]]

    def search(self, queries: np.ndarray, most: int) -> np.ndarray:
        return self._ids[np.argsort(-(queries @ self._rows.T), axis=1, kind="stable")[:, :most]]

    def __len__(self) -> int:
        return len(self._ids)


class FaissIndex:
    """FAISS's flat index. Another one that has `remove_ids` may take its place, such as an IVF."""

    def __init__(self, dim: int) -> None:
        faiss = importlib.import_module("faiss")
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self._index.remove_ids(ids)  # it would have both
        self._index.add_with_ids(rows, ids)

    def remove(self, ids: np.ndarray) -> None:
        self._index.remove_ids(ids)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self._index.reconstruct_batch(ids)

    def search(self, queries: np.ndarray, most: int) -> np.ndarray:
        return self._index.search(queries, most)[1]

    def __len__(self) -> int:
        return self._index.ntotal


class UsearchIndex:
    """USearch's graph (HNSW). It finds most of the best rows, not all."""

    def __init__(self, dim: int) -> None:
        self._index = importlib.import_module("usearch.index").Index(ndim=dim, metric="ip", dtype="f32")

    def add(self, ids: np.ndarray, rows: np.ndarray) -> None:
        self.remove(ids)  # it would refuse them
        self._index.add(ids, rows)

    def remove(self, ids: np.ndarray) -> None:
        there = ids[self._index.contains(ids)] if len(ids) else ids
        if len(there):
            self._index.remove(there)

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self._index.get(ids)

    def search(self, queries: np.ndarray, most: int) -> np.ndarray:
        return self._index.search(queries, most).keys.astype(np.int64)

    def __len__(self) -> int:
        return len(self._index)


INDEXES: dict[str, Callable[[int], Index]] = {"exact": ExactIndex, "faiss": FaissIndex, "usearch": UsearchIndex}


class IndexInStep:
    """A search index of a served table, which follows from one published step to the next.

    Attributes:
        index: the index, None before the first step.
        number: of the published step that it has.
        built, updated: times that it was made of all rows, and of those that changed.
    """

    def __init__(self, make: Callable[[int], Index], table: str) -> None:
        self._make, self._table, self._chain = make, table, ""
        self.index: Any = None
        self.number: int | None = None
        self.built = self.updated = 0

    def follow(self, step: er.ServedStep) -> None:
        """Take the rows of a step."""
        if (step.chain, step.number) == (self._chain, self.number):
            return
        table = step[self._table]
        try:
            changes = table.changes(self.number if step.chain == self._chain else None)
        except er.HistoryDroppedError:  # after a forget, or if the list of changes was not carried
            changes = table.changes(None)
        self._chain = ""  # should this fail half-way, the next step makes it anew
        if changes.since is None:
            self.index, self.built = self._make(table.dim), self.built + 1
        else:
            self.updated += 1
        for ids, rows, gone in changes:
            self.index.remove(gone)
            self.index.add(ids, rows)
        self._chain, self.number = step.chain, step.number


def subscribe(options: Namespace, folder: Path) -> None:
    """Follow the copy until it has the last step of the training. Then compare the index with the rows."""
    items = IndexInStep(INDEXES[options.index], "items")
    with er.Subscriber(folder / COPY, memory="map", patience="1min") as served:
        served.follow(every=options.every / 4)
        while str(served.number) != read_text(folder / LAST):
            time.sleep(options.every / 4)
            if served.error:
                raise served.error
            if served.number is not None:
                with served.step() as step:  # rows of both tables, and dense weights, of one training step
                    items.follow(step)
                    recommend(step, items.index, np.random.default_rng().integers(0, options.users, VISITORS))
        with served.step() as step:
            items.follow(step)
            print(check(options, step, items), flush=True)


def read_text(path: Path) -> str:
    """Return the text of a file, "" if it is not there."""
    return path.read_text() if path.exists() else ""


def queries_of(step: er.ServedStep, users: np.ndarray) -> np.ndarray:
    """Return the queries of users: p·q + w·q is (p + w)·q, where w is the weight of the items' bias."""
    return step["users"].lookup(users) + step.dense["item_bias.weight"]


def recommend(step: er.ServedStep, index: Index, users: np.ndarray) -> np.ndarray:
    """Return the best items for each user."""
    return index.search(queries_of(step, users), TOP)


def check(options: Namespace, step: er.ServedStep, items: IndexInStep) -> str:
    """Return what the index and the step have.

    Raises:
        ServingError: they differ, or items that have left are found.
    """
    index, table, left = items.index, step["items"], np.arange(items_left(options, options.steps - 1))
    ids, rows = table.export()
    if len(index) != len(ids) or not np.array_equal(index.rows(ids), rows):
        raise ServingError(f"the index has {len(index):,} rows, which are not the {len(ids):,} of step {step.number}")
    users = np.arange(ASKED) % options.users
    found = recommend(step, index, users)
    if np.isin(found, left).any() or table.contains(left).any():
        raise ServingError("items that have left are found")
    best = ids[np.argsort(-(queries_of(step, users) @ rows.T), axis=1, kind="stable")[:, :TOP]]
    share = np.mean([len(np.intersect1d(*pair)) / TOP for pair in zip(found, best, strict=True)])
    shown = f"published step {step.number}, training step {step.step:,}"
    anew = f"made of all rows {items.built} times and updated {items.updated} times since its last start"
    return facts(
        {
            "index": f"{options.index}: {len(index):,} items, the rows of {shown}; {anew}",
            "forgot": f"{len(left):,} items have left: no search finds them, and no row is there",
            "search": f"{share:.1%} of the best {TOP} items are found, for {len(users)} users",
        }
    )


# ---------------------------------------------------------------- all of them, and their killer


def serve(options: Namespace, folder: Path) -> None:
    """Run the trainer and the subscriber, carry files between them, kill both some times, and start them again."""
    processes, started = multiprocessing.get_context("spawn"), time.perf_counter()
    roles: dict[str, Callable[[Namespace, Path], None]] = {"trainer": train, "subscriber": subscribe}
    running = dict[str, Any]()
    dice, kills = random.Random(options.seed), 0
    with er.Subscriber(folder / SERVED) as published:
        while True:
            for name, role in roles.items():
                if name not in running:
                    running[name] = processes.Process(target=role, args=(options, folder), daemon=True)
                    running[name].start()
            published.refresh()
            carry(folder / SERVED, folder / COPY)
            if (published.step_number or 0) >= options.steps * (kills + 1) / (options.kills + 1):
                time.sleep(dice.random() * options.every)  # anywhere: in a step, a commit, or a copy of files
                if kills < options.kills:
                    kills += 1
                    kill(running, published)
                    (folder / LAST).unlink(missing_ok=True)
                    continue
            if any(each.exitcode for each in running.values()):
                raise ServingError(" and ".join(name for name, each in running.items() if each.exitcode) + " failed")
            if all(each.exitcode == 0 for each in running.values()):
                break
            time.sleep(options.every / 10)
        print(sizes(folder, published, time.perf_counter() - started))


def kill(running: dict[str, Any], published: er.Subscriber) -> None:
    """Kill the processes without a warning."""
    print(
        f"killed   both, after published step {published.number}, training step {published.step_number:,}", flush=True
    )
    for process in running.values():
        process.kill()
        process.join()
    running.clear()


def sizes(folder: Path, published: er.Subscriber, seconds: float) -> str:
    """Return what was published, and what it takes."""
    table, copy = (sum(size for size, _ in files_in(folder / part).values()) for part in (TABLES, SERVED))
    return facts(
        {
            "newest": f"published step {published.number}, training step {published.step_number:,}",
            "files": f"{mib(table)} of the tables, {mib(copy)} as published in 8 bits; all removed now",
            "took": f"{seconds:.0f} s",
        }
    )


def main(words: list[str]) -> None:
    """Train and serve as the words of the command line say."""
    parser = make_parser(__doc__)
    for name, default, text in (
        ("users", 100_000, "rows of the table of users"),
        ("items", 20_000, "rows of the table of items"),
        ("dim", 32, "columns of the rows"),
        ("steps", 600, "batches"),
        ("batch-size", 1024, "clicks in a batch"),
        ("memory", "64MiB", "RAM of the tables"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=text)
    parser.add_argument("--lr", type=float, default=0.005, metavar="X", help="learning rate of Adam")
    parser.add_argument("--data", type=Path, metavar="FILE", help="a log of clicks")
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two published steps")
    parser.add_argument("--kills", type=int, default=2, metavar="N", help="of the trainer and of the subscriber each")
    parser.add_argument("--index", choices=INDEXES, default="exact", help="the search index")
    options = parser.parse_args(words)
    options.ranks = 1
    try:
        INDEXES[options.index](options.dim)
    except ImportError:
        package = {"faiss": "faiss-cpu"}.get(options.index, options.index)
        raise DataError(f"--index {options.index} needs a package: pip install {package}") from None
    if options.data:
        log = read_log(options.data)
        options.users, options.items = log.num_users, log.num_items
    print(facts({"clicks": f"{options.users:,} users x {options.items:,} items, {options.steps:,} steps"}))
    with tempfile.TemporaryDirectory() as folder:
        serve(options, Path(folder))


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
