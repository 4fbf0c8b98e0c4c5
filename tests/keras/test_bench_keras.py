"""`embedrock bench keras` at toy size. No speed is asserted here."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from embedrock.bench import cli
from embedrock.bench.harness.bench import Task
from embedrock.bench.harness.report import Report
from embedrock.bench.harness.targets import Race, judge
from embedrock.bench.harness.workload import Workload
from embedrock.bench.keras import fit
from embedrock.bench.keras.contenders import FIT, LAYER, FitSession
from embedrock.bench.keras.fit import KERAS, PEAK_ROWS, RACES, KerasEffort

pytest.importorskip("tensorflow")

TINY = Workload(rows=1000, dim=8, batch=16, features=1, batches=3)
TINY_OPTIONS = ["--rows=1000", "--dim=8", "--batch=16", "--batches=3", "--rounds=2", "--steps=2", "--threads=1"]
NAMES = [contender.name for contender in (*FIT, *LAYER)]


def bench(folder: Path, contenders: str) -> dict:
    file = folder / "found.json"
    assert cli.main(["keras", *TINY_OPTIONS, f"--contenders={contenders}", f"--json={file}"]) == 0
    return json.loads(file.read_text())


def check_lines(document: dict, names: list[str]) -> None:
    assert [line["name"] for line in document["results"]] == names
    for line in document["results"]:
        assert line["status"] == "ok", line["reason"]
        assert line["steps"] == 4
        assert 0 < line["rss_bytes"] <= line["peak_bytes"]


def test_names_are_unique_and_targets_name_them():
    assert len(set(NAMES)) == len(NAMES)
    races = [target.measure for target in RACES]
    assert all(isinstance(race, Race) and {*race.fast, *race.slow} <= {*NAMES} for race in races)


@pytest.mark.slow
def test_ours_beside_keras(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = bench(tmp_path, "ours-adam,keras-adam")
    check_lines(document, ["ours-adam", "keras-adam"])
    assert "fit: 1,000 x 8 float32" in capsys.readouterr().out
    assert {"keras", "tensorflow"} <= document["machine"]["packages"].keys()


@pytest.mark.slow
def test_the_layer_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    document = bench(tmp_path, "*-layer")
    check_lines(document, ["torch-layer", "keras-layer"])
    assert [verdict["what"] for verdict in document["verdicts"]] == ["time of our Keras layer beyond our PyTorch layer"]
    assert "at most 1.5 ms" in capsys.readouterr().out


@pytest.mark.slow
def test_all_contenders(tmp_path: Path):
    document = bench(tmp_path, "*")
    check_lines(document, NAMES)
    assert "1,000 rows: time of ours-mirrored over that of ours-adam" in [each["what"] for each in document["verdicts"]]


@pytest.mark.slow
def test_a_turn_is_boxed_in_time_and_has_one_timed_step_at_least():
    contender = next(one for one in FIT if one.name == "ours-sgd")
    with KerasEffort(threads=1, timeout_s=120).child(FitSession, contender.make, TINY) as child:
        assert len(child.call("warm_up", 60.0)) == TINY.batches
        assert len(child.call("turn", 5, 60.0).steps_s) == 5
        assert len(child.call("turn", 5, 1e-9).steps_s) == 1


def line(name: str, rows: int, median_ms: float, peak_bytes: int) -> dict:
    return {"name": name, "status": "ok", "workload": {"rows": rows}, "median_ms": median_ms, "peak_bytes": peak_bytes}


def test_what_is_no_ratio_of_times_is_judged_too(monkeypatch: pytest.MonkeyPatch):
    def compare(racers: list, targets: list, effort: KerasEffort) -> Report:
        lines = [line(one.name, one.workload.rows, 3 + k, (4 - 3 * (k == 0)) << 30) for k, one in enumerate(racers)]
        return Report(lines, judge([target for target in targets if not isinstance(target.measure, Race)], lines))

    monkeypatch.setattr(fit, "compare", compare)
    chosen = [one for one in (*FIT, *LAYER) if one.name in ("ours-adam", "keras-adam", "torch-layer", "keras-layer")]
    arguments = Namespace(sizes=[1000, PEAK_ROWS], contenders=chosen)
    report = fit.measure(Task(replace(KERAS, workloads=(TINY,)), arguments))
    assert [(verdict.what, verdict.measured, verdict.reached) for verdict in report.verdicts] == [
        ("10,000,000 rows: peak RAM of ours-adam over that of keras-adam", 0.25, True),
        ("time of our Keras layer beyond our PyTorch layer", 1.0, True),
    ]
