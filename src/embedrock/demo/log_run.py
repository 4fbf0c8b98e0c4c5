"""The demo on a log of the user's own, from top to bottom."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from embedrock.demo.backends import EMBEDROCK, SPARSE, Backend
from embedrock.demo.interactions import Log, LogError, read_log
from embedrock.demo.leave_one_out import CANDIDATES, NEGATIVES, NOTHING, Batch, Split, batches, leave_one_out
from embedrock.demo.metrics import hit_rate, ndcg, ranks_of_first
from embedrock.demo.options import LogOptions
from embedrock.demo.plan import ModelPlan
from embedrock.demo.train import Trainer, use_threads, warm_up
from embedrock.terminal.tables import format_table

CURVE_STEPS = 100  # of the two loss curves that are compared
CURVE_TARGET, HIT_RATE_TARGET = 1e-5, 0.002


@dataclass(frozen=True)
class Epoch:
    """What one epoch of training came to; `loss` is the mean over its batches, `train_s` the time in steps."""

    loss: float
    hit_rate: float
    ndcg: float
    train_s: float


@dataclass
class Course:
    """A backend's way through the epochs."""

    backend: Backend
    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    epochs: list[Epoch] = field(default_factory=list)

    def train(self, epoch: Batch, split: Split, options: LogOptions) -> None:
        """Train one epoch, then rank the candidates."""
        before = len(self.losses)
        start = time.perf_counter()
        parts = batches(epoch, options.batch_size)
        total = -(-len(epoch.users) // options.batch_size)
        for batch in tqdm(parts, self.backend.name, total, leave=False, disable=None):
            self.losses.append(self.trainer.step(batch.users, batch.items, batch.labels))
        train_s = time.perf_counter() - start
        ranks = _ranks(self.trainer, split)
        loss = float(np.mean(self.losses[before:]))
        self.epochs.append(Epoch(loss, hit_rate(ranks), ndcg(ranks), train_s))

    def results(self) -> dict[str, Any]:
        """Return all numbers, as plain JSON values."""
        epochs = [asdict(epoch) for epoch in self.epochs]
        return {"name": self.backend.name, "epochs": epochs, "losses": self.losses[:CURVE_STEPS]}


def run(options: LogOptions) -> dict[str, Any]:
    """Train on a log and print how it goes; return all numbers, as plain JSON values."""
    use_threads(options.threads)
    log = read_log(options.data)
    split = leave_one_out(log, options.seed)
    if not len(split.test_users):
        raise LogError(
            f"{options.data}: expected users with two interactions or more, and items that they did not touch; "
            "got none. There would be nothing to hold out."
        )
    _print_plan(log, split, options)
    courses = _train(split, options)
    results: dict[str, Any] = {"courses": [course.results() for course in courses]}
    if options.compare:
        results["comparison"] = compare(*courses)
        print(_format_comparison(courses, results["comparison"]))
    return results


def _train(split: Split, options: LogOptions) -> list[Course]:
    plan = ModelPlan(options.model, split.num_users, split.num_items, options.dim, options.lr, options.seed)
    backends = (EMBEDROCK, SPARSE) if options.compare else (EMBEDROCK,)
    for backend in backends:
        warm_up(plan, backend)
    courses = [Course(backend, Trainer(plan, backend)) for backend in backends]
    print(_format_head(courses))
    for number in range(1, options.epochs + 1):
        epoch = split.epoch(options.seed, number)
        for course in courses:
            course.train(epoch, split, options)
        print(_format_epoch(number, courses))
    return courses


def _ranks(trainer: Trainer, split: Split) -> np.ndarray:
    """Return the rank of each user's held-out item among its candidates."""
    missing = split.candidates == NOTHING
    scores = trainer.scores(split.test_users[:, None], np.where(missing, 0, split.candidates))
    return ranks_of_first(np.where(missing, -np.inf, scores))


def compare(ours: Course, theirs: Course) -> dict[str, float]:
    """Return how far two courses are apart, as plain numbers."""
    a, b = np.array(ours.losses[:CURVE_STEPS]), np.array(theirs.losses[:CURVE_STEPS])
    return {
        "curve_steps": len(a),
        "curve_difference": float(np.max(np.abs(a - b) / np.abs(b))),
        "hit_rate_difference": abs(ours.epochs[-1].hit_rate - theirs.epochs[-1].hit_rate),
        "ndcg_difference": abs(ours.epochs[-1].ndcg - theirs.epochs[-1].ndcg),
        "times_faster": _epoch_s(theirs) / _epoch_s(ours),
    }


def _epoch_s(course: Course) -> float:
    return median(epoch.train_s for epoch in course.epochs)


# ---------------------------------------------------------------- printing


def _print_plan(log: Log, split: Split, options: LogOptions) -> None:
    order = "order of the file" if log.times is None else "time"
    repeats = f"; {split.repeats:,} repeats left out" if split.repeats else ""
    print(f"log      {options.data.name}: {log.form}")
    print(f"         {len(log.users):,} interactions, {log.num_users:,} users, {log.num_items:,} items{repeats}")
    print(
        f"test     the last item (by {order}) of {len(split.test_users):,} users, each among {CANDIDATES} unseen items"
    )
    print(f"train    {len(split.users):,} interactions, each with {NEGATIVES} unseen items, anew in every epoch")
    print(f"model    {options.model}, dim {options.dim}, Adam(lr={options.lr:g}), batch {options.batch_size:,}")


def _format_head(courses: list[Course]) -> str:
    titles = "".join(f"   {course.backend.name:^32}" for course in courses).rstrip()
    columns = f"   {'loss':>7} {'HR@10':>7} {'NDCG@10':>8} {'s':>7}" * len(courses)
    return f"\n{'':5}{titles}\nepoch{columns}"


def _format_epoch(number: int, courses: list[Course]) -> str:
    last = [course.epochs[-1] for course in courses]
    return f"{number:>5}" + "".join(f"   {e.loss:7.4f} {e.hit_rate:7.4f} {e.ndcg:8.4f} {e.train_s:7.2f}" for e in last)


def _format_comparison(courses: list[Course], difference: dict[str, float]) -> str:
    curve, hits = difference["curve_difference"], difference["hit_rate_difference"]
    steps = f"first {difference['curve_steps']} steps"
    bests = [max(course.epochs, key=lambda epoch: epoch.hit_rate) for course in courses]
    rows = [
        ("HR@10", *(f"{course.epochs[-1].hit_rate:.4f}" for course in courses), _verdict(hits, HIT_RATE_TARGET)),
        ("NDCG@10", *(f"{course.epochs[-1].ndcg:.4f}" for course in courses), ""),
        ("HR@10, best epoch", *(f"{best.hit_rate:.4f}" for best in bests), ""),
        (f"loss, {steps}", "", "", _verdict(curve, CURVE_TARGET, " relative")),
        ("an epoch, s", *(f"{_epoch_s(course):.2f}" for course in courses), f"{difference['times_faster']:.1f}x"),
    ]
    head = ("from the same values", *(course.backend.name for course in courses), "difference")
    return "\n" + format_table(head, rows)


def _verdict(measured: float, wanted: float, unit: str = "") -> str:
    reached = "within" if measured <= wanted else "NOT WITHIN"
    return f"{measured:.2g}{unit}, {reached} {wanted:g}"
