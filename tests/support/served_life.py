"""Programs that `test_serving_kills.py` kills: one trains and publishes, others follow what it publishes.

Rows and dense weights are a function of the training step. So every process can tell what a step must show.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import embedrock as er

ROWS, BATCH = 200, 12


def rows_at(step: int) -> dict[str, dict[int, float]]:
    """Return the rows with a record by table, and the value in all of their columns."""
    found: dict[str, dict[int, float]] = {"users": {}, "words": {}}
    for number in range(1, step + 1):
        for name, rows in found.items():
            written, forgotten = changes_of(name, number)
            for one in forgotten:
                rows.pop(one, None)
            rows |= dict.fromkeys(written, float(number))
    return found


def changes_of(name: str, step: int) -> tuple[list[int], list[int]]:
    """Return the ids that a step writes, and those that it forgets before."""
    rng = np.random.default_rng([step, len(name)])
    factor = 1 if name == "users" else 2**40
    forgotten = rng.choice(ROWS, 3, replace=False) * factor if step % 5 == 0 else np.empty(0, np.int64)
    return sorted((rng.choice(ROWS, BATCH, replace=False) * factor).tolist()), sorted(forgotten.tolist())


def train(group: er.Group, step: int) -> None:
    for name in group:
        written, forgotten = changes_of(name, step)
        group[name].forget(forgotten)
        group[name].assign(written, np.full((len(written), group[name].dim), step, np.float32))


def check(step: er.ServedStep) -> None:
    """Check that a step shows the rows and dense weights of one training step."""
    assert step.step is not None
    assert step.dense["step"].tolist() == [step.step]
    for name, rows in rows_at(step.step).items():
        ids, values = step[name].export()
        assert ids.tolist() == sorted(rows)
        assert (values == np.array([rows[one] for one in ids.tolist()], np.float32)[:, None]).all()


def trainer(at: str) -> None:
    """Train and publish until the end of time."""
    group = er.Group(path=f"{at}/run", memory="4MiB")
    group.table("users", ROWS, 4, rule=er.SGD(lr=1.0), seed=1)
    group.table("words", None, 3, rule=er.SGD(lr=1.0), seed=2)
    step = group.last_step or 0
    while True:
        step += 1
        train(group, step)
        group.commit(step=step, wait=step % 3 > 0)
        if step % 3:
            made = er.publish(group, f"{at}/served", dense={"step": np.array([step])})
            print(made.number, flush=True)


def follower(at: str) -> None:
    """Follow what is published, and check each step, until the end of time."""
    last = 0
    while not Path(f"{at}/served/manifest").exists():
        time.sleep(0.01)
    with er.Subscriber(f"{at}/served", memory="4MiB", patience=60) as served:
        served.follow(0.01)
        while True:
            if served.number is not None:
                with served.step() as step:
                    assert step.number >= last
                    check(step)
                    last = step.number
                print(last, flush=True)
            assert served.error is None, served.error
            time.sleep(0.01)


if __name__ == "__main__":
    {"trainer": trainer, "follower": follower}[sys.argv[1]](sys.argv[2])
