"""Train on a stream of items that come and go, and serve them from another process meanwhile.

    python examples/stream.py

Items are strings, each day brings new ones, and 30 % of the impressions show an item that never comes again. A model
trains twice: with a row for each item, and with rows that come and go (`er.Admission`, `er.Eviction`). A service in
another process reads the latter while they train, and follows each commit. Each day has a line with AUC, rows and
files; the last line has the times of the service. For your own data, replace `impressions`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import defaultdict
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch

import embedrock as er
import embedrock.torch as ert

DAY, START = 86_400, 1_735_689_600  # seconds; 2025-01-01
LIFE, SHOWN_ONCE = 5, 0.3  # days of an item; share of impressions whose item never comes again
PULLS = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)  # what makes people click
BIAS, DIM = -1.0, 16  # logit of an item that nobody knows; columns of a row


def impressions(options: argparse.Namespace, step: int, size: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return names of items, 1 where they were clicked, and the best logits that a model may know: each (size,)."""
    random, alive = np.random.default_rng((seed, step)), options.alive
    newest = alive + alive * step // (LIFE * options.steps_a_day)
    items = newest - (alive * random.random(size) ** 2).astype(np.int64)  # young ones come most
    is_once = random.random(size) < SHOWN_ONCE
    items[is_once] = random.integers(10**9, 10**15, is_once.sum())
    logits = 1.5 * PULLS[items * 7919 % len(PULLS)] + BIAS
    labels = random.random(size) < 1 / (1 + np.exp(-logits))
    return np.char.add("item-", items.astype(str)), labels.astype(np.float32), np.where(is_once, BIAS, logits)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the chance that a click scores above another impression; a tie counts one half."""
    _, place = np.unique(scores, return_inverse=True)
    clicks, others = np.bincount(place, labels), np.bincount(place, 1 - labels)
    return float(clicks @ (others.cumsum() - others / 2) / (clicks.sum() * others.sum()))


def serve(path: Path, last_step: int, options: argparse.Namespace) -> str:
    """Answer requests of 64 items from the newest commit, until that is the last one. Return what was measured."""
    table = er.open(path, mode="r", memory="64MiB")
    seconds, refreshes, due = list[float](), 0, time.monotonic()
    while len(seconds) < 100 or (table.last_step or 0) < last_step:
        names = impressions(options, table.last_step or 0, 64, seed=len(seconds))[0]
        start = time.perf_counter()
        scores = table.lookup(er.hash_ids(names)).sum(1)  # an item without a row scores `BIAS`
        _answer = names[scores.argsort()[::-1][:10]]  # the best first
        seconds.append(time.perf_counter() - start)
        time.sleep(0.002)
        if time.monotonic() > due:  # a service with threads has one for this
            refreshes, due = refreshes + table.refresh(), time.monotonic() + 0.5
    least, p50, p99 = 1e6 * np.percentile(seconds, [0, 50, 99])
    measured = f"for 64 items least {least:,.0f} us, p50 {p50:,.0f} us, p99 {p99:,.0f} us"
    return f"{len(seconds):,} answers beside the trainer, {refreshes} refreshes; {measured}"


def main(options: argparse.Namespace, folder: Path, pool: Pool) -> None:
    """Train both models on each batch, and print a line for each of them after each day."""
    torch.set_num_threads(1)
    layer = partial(ert.Embedding, None, DIM, init=er.Constant(BIAS / DIM), memory="128MiB", keep=1)  # open ids
    admission = er.Admission(min_count=2, within=2 * options.steps_a_day)  # in steps
    eviction = er.Eviction(max_rows=options.alive * 3 // 2, idle="2 days", half_life=options.steps_a_day // 2)
    bounded = layer(path=folder / "served.rock", admission=admission, eviction=eviction)
    models = {"a row for each": layer(path=folder / "all.rock"), "come and go": bounded}
    optimizer = ert.Adam(torch.nn.ModuleList(models.values()), lr=0.02)
    bounded.table.commit(step=0)
    service = pool.apply_async(serve, (folder / "served.rock", options.days * options.steps_a_day, options))
    print(f"{options.days} days of {options.steps_a_day} batches of {options.batch_size:,} impressions")
    print("day  rows            AUC     best      rows     files")
    for day in range(options.days):
        seen = defaultdict[str, list[np.ndarray]](list)
        for step in range(day * options.steps_a_day, (day + 1) * options.steps_a_day):
            names, labels, best = impressions(options, step, options.batch_size, seed=10**6)
            ids, clock = torch.from_numpy(er.hash_ids(names)), START + step * DAY // options.steps_a_day
            seen["labels"] += [labels]
            seen["best"] += [best]
            optimizer.zero_grad()
            for name, items in models.items():
                logits = items(ids, time=clock).sum(-1)
                seen[name] += [logits.detach().numpy()]  # scored before it trains on them
                torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels)).backward()
            optimizer.step()
            if (step + 1) % max(1, options.steps_a_day // 5) == 0:
                bounded.table.commit(step=step + 1, wait=False)
        scores = {name: auc(np.concatenate(seen["labels"]), np.concatenate(parts)) for name, parts in seen.items()}
        for name, items in models.items():
            items.table.commit(step=(day + 1) * options.steps_a_day)
            numbers, quality = items.table.stats(), f"{scores[name]:.4f}  {scores['best']:.4f}"
            size = f"{numbers['rows_touched']:9,}  {numbers['disk_bytes'] / 1e6:5.1f} MB"
            print(f"{day + 1:3}  {name:14}  {quality}  {size}", flush=True)
    print(f"service  {service.get(timeout=300)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("days", 8), ("steps-a-day", 150), ("batch-size", 4096), ("alive", 20_000)):
        parser.add_argument(f"--{option}", type=int, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, multiprocessing.get_context("spawn").Pool(1) as processes:
        main(arguments, Path(scratch), processes)
