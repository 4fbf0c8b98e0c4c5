"""``bench tf-data`` at toy size: every way to read gives the ids, and the command its lines. No speed is asserted."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embedrock.bench import cli
from embedrock.bench.harness.effort import Effort
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.readings import READINGS, ClickLog
from embedrock.bench.keras.tf_data import AHEADS, LogWriter, ReadingSession, TrainingSession, units_for

BY_NAME = {one.name: one for one in (*READINGS, *AHEADS)}
TINY = Workload(rows=4000, dim=4, batch=16, features=2, batches=10)


@pytest.fixture
def log(tmp_path: Path) -> ClickLog:
    log = ClickLog(tmp_path, TINY)
    LogWriter(log).write_log()
    return log


def test_every_reading_gives_the_ids(log: ClickLog):
    expected = np.concatenate([TINY.batch_at(k) for k in range(TINY.batches)])
    for reading in READINGS:
        found = list(reading.make(log).as_numpy_iterator())
        assert [part.shape for part in found] == [(TINY.batch, TINY.features)] * TINY.batches, reading.name
        ids = np.concatenate(found)
        if "interleave" in reading.name:  # another order of the batches
            assert sorted(map(tuple, ids)) == sorted(map(tuple, expected))
        else:
            assert np.array_equal(ids, expected), reading.name


def test_a_turn_of_reading(log: ClickLog):
    turn = ReadingSession(log, BY_NAME["cache"]).turn(1, 1.0)
    assert turn["samples_per_s"] > 0
    assert turn["first_batch_s"] > 0


@pytest.mark.parametrize("name", ["fit", "fit-erk-prefetch-2"])
def test_a_turn_of_training(log: ClickLog, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embedrock.bench.keras.tf_data.WARM_UP_STEPS", 2)
    assert BY_NAME[name] in AHEADS
    LogWriter(log).write_table()
    with pytest.warns(match="closed with changes"):
        turn = TrainingSession(log, BY_NAME[name], 8).turn(3, 1.0)
    assert turn["ms_per_step"] > 0
    assert turn["reads_per_step"] > 0


class Probed(Effort):
    """Steps that read for `reading` ms, and train for 10 ms and another one for each 100 units."""

    reading = 0.0

    def child(self, factory: Any, *args: Any) -> Any:
        rest = 10.0 + args[-1] / 100
        turn = {"reading_ms_per_step": self.reading, "ms_per_step": self.reading + rest}
        return contextlib.nullcontext(SimpleNamespace(call=lambda *_: turn))


@pytest.mark.parametrize(("reading", "units"), [(20.0, 1000), (5.0, 64), (1e6, 8192)])
def test_the_dense_model_takes_as_long_as_the_reads(log: ClickLog, reading: float, units: int):
    effort = Probed()
    object.__setattr__(effort, "reading", reading)
    assert units_for(log, effort) == units


@pytest.mark.slow
def test_the_command(tmp_path: Path):
    tiny = ["--rows=4000", "--dim=4", "--batch=16", "--features=2", "--batches=10", "--rounds=1", "--steps=2"]
    status = cli.main(["tf-data", *tiny, f"--folder={tmp_path}", f"--json={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 0
    assert [line["name"] for line in found["results"]] == [one.name for one in (*READINGS, *AHEADS)]
    assert all(line["status"] == "ok" for line in found["results"])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
