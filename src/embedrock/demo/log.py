"""The demo on a log of the user's own, from top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from embedrock.demo.data.interactions import Interactions, LogError, read_log
from embedrock.demo.data.leave_one_out import CANDIDATES, NEGATIVES, NOTHING, Split, leave_one_out
from embedrock.demo.metrics import hit_rate, ndcg, ranks_of_first
from embedrock.demo.model_spec import PairSpec
from embedrock.demo.options import LogOptions
from embedrock.demo.torch.backends import EMBEDROCK, SPARSE
from embedrock.demo.torch.learner import TorchLearner, use_threads, warm_up
from embedrock.demo.training import Batches, Learner, Measured, Training
from embedrock.terminal.progress import progress
from embedrock.terminal.tables import Column, format_count, format_facts, format_head, format_row, format_table

CURVE_STEPS = 100  # of the two loss curves that are compared
CURVE_TARGET, HIT_RATE_TARGET = 1e-5, 0.002
EPOCH = Column("epoch", 5, "d")
MEASURED = (Column("loss", 9, ".4f"), Column("HR@10", 7, ".4f"), Column("NDCG@10", 8, ".4f"), Column("s", 7, ".2f"))


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
    print(_format_start(log, split, options))
    trainings = _train(split, options)
    results: dict[str, Any] = {"courses": [_results(training) for training in trainings]}
    if options.compare:
        results["comparison"] = compare(*trainings)
        print(_format_comparison(trainings, results["comparison"]))
    return results


def _train(split: Split, options: LogOptions) -> list[Training]:
    """Train a learner on each backend, epoch by epoch on the same batches, and print how good they are."""
    users, items = split.num_users, split.num_items
    spec = PairSpec(model=options.model, users=users, items=items, dim=options.dim, lr=options.lr, seed=options.seed)
    backends = (EMBEDROCK, SPARSE) if options.compare else (EMBEDROCK,)
    for backend in backends:
        warm_up(spec, backend)
    learners = [TorchLearner(spec, backend) for backend in backends]
    trainings = [Training(learner, partial(_ranking, split=split)) for learner in learners]
    print(_format_head(trainings))
    for number in range(1, options.epochs + 1):
        epoch = split.epoch(options.seed, number)
        batches, steps = partial(epoch.batch, size=options.batch_size), range(epoch.batches(options.batch_size))
        measured = [_train_epoch(training, batches, steps) for training in trainings]
        print(_format_epoch(number, measured))
    return trainings


def _train_epoch(training: Training, batches: Batches, steps: range) -> Measured:
    with progress(training.learner.name, len(steps), 0, "it") as advance:
        return training.train(batches, steps, partial(advance, 1))


def _ranking(learner: Learner, split: Split) -> dict[str, float]:
    """Rank each user's held-out item among its candidates; return how good the ranks are."""
    missing = split.candidates == NOTHING
    scores = learner.scores(split.test_users[:, None], np.where(missing, 0, split.candidates))
    ranks = ranks_of_first(np.where(missing, -np.inf, scores))
    return {"hit_rate": hit_rate(ranks), "ndcg": ndcg(ranks)}


def _results(training: Training) -> dict[str, Any]:
    """Return all numbers, as plain JSON values."""
    epochs = [{"loss": epoch.loss, **epoch.scores, "train_s": epoch.train_s} for epoch in training.parts]
    return {"name": training.learner.name, "epochs": epochs, "losses": training.losses[:CURVE_STEPS]}


def compare(ours: Training, theirs: Training) -> dict[str, float]:
    """Return how far two trainings are apart, as plain numbers."""
    a, b = np.array(ours.losses[:CURVE_STEPS]), np.array(theirs.losses[:CURVE_STEPS])
    ours_last, theirs_last = ours.parts[-1].scores, theirs.parts[-1].scores
    return {
        "curve_steps": len(a),
        "curve_difference": float(np.max(np.abs(a - b) / np.abs(b))),
        "hit_rate_difference": abs(ours_last["hit_rate"] - theirs_last["hit_rate"]),
        "ndcg_difference": abs(ours_last["ndcg"] - theirs_last["ndcg"]),
        "times_faster": _epoch_s(theirs) / _epoch_s(ours),
    }


def _epoch_s(training: Training) -> float:
    return median(epoch.train_s for epoch in training.parts)


# ---------------------------------------------------------------- printing


def _format_start(log: Interactions, split: Split, options: LogOptions) -> str:
    order = "order of the file" if log.times is None else "time"
    repeats = f"; {split.repeats:,} repeats left out" if split.repeats else ""
    seen = format_count(len(split.users), "interaction")
    people = format_count(log.num_users, "user")
    counts = f"{format_count(len(log.users), 'interaction')}, {people}, {format_count(log.num_items, 'item')}{repeats}"
    tested = f"of {format_count(len(split.test_users), 'user')}, each among {CANDIDATES} unseen items"
    return format_facts(
        {
            "log": f"{options.data.name}: {log.form}\n{counts}",
            "test": f"the last item (by {order}) {tested}",
            "train": f"{seen}, each with {NEGATIVES} unseen items, anew in every epoch",
            "model": f"{options.model}, dim {options.dim}, Adam(lr={options.lr:g}), batch {options.batch_size:,}",
        }
    )


def _format_head(trainings: Sequence[Training]) -> str:
    columns = format_head(MEASURED)
    names = "".join(f"  {training.learner.name.center(len(columns))}" for training in trainings).rstrip()
    return f"\n{'':{EPOCH.width}}{names}\n{format_head((EPOCH, *MEASURED * len(trainings)))}"


def _format_epoch(number: int, measured: Sequence[Measured]) -> str:
    cells = [cell for one in measured for cell in (one.loss, *one.scores.values(), one.train_s)]
    return format_row((EPOCH, *MEASURED * len(measured)), (number, *cells))


def _format_comparison(trainings: Sequence[Training], difference: dict[str, float]) -> str:
    curve, hits = difference["curve_difference"], difference["hit_rate_difference"]
    last = [training.parts[-1].scores for training in trainings]
    bests = [max(epoch.scores["hit_rate"] for epoch in training.parts) for training in trainings]
    rows = [
        ("HR@10", *(f"{scores['hit_rate']:.4f}" for scores in last), _verdict(hits, HIT_RATE_TARGET)),
        ("NDCG@10", *(f"{scores['ndcg']:.4f}" for scores in last), ""),
        ("HR@10, best epoch", *(f"{best:.4f}" for best in bests), ""),
        (
            f"loss, first {format_count(int(difference['curve_steps']), 'step')}",
            "",
            "",
            _verdict(curve, CURVE_TARGET, " relative"),
        ),
        ("an epoch, s", *(f"{_epoch_s(training):.2f}" for training in trainings), f"{difference['times_faster']:.1f}x"),
    ]
    head = ("from the same values", *(training.learner.name for training in trainings), "difference")
    return "\n" + format_table(head, rows)


def _verdict(measured: float, wanted: float, unit: str = "") -> str:
    reached = "within" if measured <= wanted else "NOT WITHIN"
    return f"{measured:.2g}{unit}, {reached} {wanted:g}"
