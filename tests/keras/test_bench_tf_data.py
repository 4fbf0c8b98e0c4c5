"""``bench tf-data`` at toy size: every way to read gives the ids, and the command its lines. No speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embedrock.bench import cli
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras.readings import READINGS, ClickLog
from embedrock.bench.keras.tf_data import FIT, PROBED_UNITS, LogWriter, ReadingSession, TrainingSession, units_for

BY_NAME = {one.name: one for one in READINGS}
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


def test_turns_of_training(log: ClickLog, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("embedrock.bench.keras.tf_data.WARM_UP_STEPS", 1)
    monkeypatch.setattr("embedrock.bench.keras.tf_data.PROBING_STEPS", 1)
    LogWriter(log).write_table()
    session = TrainingSession(log)
    for way in ("", "-erk-prefetch-2"):
        session.use(FIT.ways[way])
        assert session.warm_up(1.0) >= PROBED_UNITS[0]
        turn = session.turn(3, 1.0)
        assert turn["ms_per_step"] > 0
        assert turn["reads_per_step"] > 0 or way  # brought up before they are looked at
    with pytest.warns(match="closed with changes"):
        session._layer.table.close()


@pytest.mark.parametrize(("reading", "units"), [(20.0, 1000), (5.0, 64), (1e6, 8192)])
def test_the_dense_model_takes_as_long_as_the_reads(reading: float, units: int):
    rests = [10.0 + probed / 100 for probed in PROBED_UNITS]  # ms, and another one for each 100 units
    probes = [{"reading_ms_per_step": reading, "ms_per_step": reading + rest} for rest in rests]
    assert units_for(probes) == units


@pytest.mark.slow
def test_the_command(tmp_path: Path):
    tiny = ["--rows=4000", "--dim=4", "--batch=16", "--features=2", "--batches=10", "--rounds=1", "--steps=2"]
    status = cli.main(["tf-data", *tiny, f"--folder={tmp_path}", f"--json={tmp_path / 'found.json'}"])
    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 0
    names = [one.name for one in READINGS] + [FIT.name + way for way in FIT.ways]
    assert [line["name"] for line in found["results"]] == names
    assert all(line["status"] == "ok" for line in found["results"])
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
