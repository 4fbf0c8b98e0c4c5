"""``bench plan``: what is drawn, what is compared, and one setting at a small size."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.bench.cli import main
from embedrock.bench.harness.targets import judge
from embedrock.bench.planner import benches
from embedrock.bench.planner.benches import TARGETS, best_of, compared, numbers
from embedrock.bench.planner.contender import Trainer
from embedrock.bench.planner.settings import Setting, drawn
from embedrock.bench.planner.splits import split_over_best
from embedrock.planner import machine as machines
from embedrock.planner.cost import Taken, Work, fit
from embedrock.planner.machine import EXAMPLE

SMALL = Setting(
    tables=2, rows=4000, dim=4, batch=64, zipf=1.0, share=0.1, memory=48 << 10, steps=12, together=2
)  # fmt: skip


def test_settings_are_those_of_their_seed_and_go_over_the_whole_range():
    assert drawn(20, 5) == drawn(20, 5) != drawn(20, 6)
    some = [one for seed in range(2) for one in drawn(20, seed)]
    assert {one.tables for one in some} == {1, 26}
    assert {bool(one.memory) for one in some} == {True, False}
    for name, low, high in (("batch", 512, 65_536), ("zipf", 0.8, 1.3), ("dim", 16, 256), ("share", 0.02, 1.0)):
        values = [getattr(one, name) for one in some]
        assert low * 0.99 <= min(values) < low * 2
        assert high * 0.5 < max(values) <= high


def test_what_a_setting_is_compared_with():
    found = {"step_s": 1.0, "misses": 0.0, "peak_bytes": 1 << 28}
    told, *rounds = (
        er.plan(SMALL.demands(), SMALL.batch, steps=steps, machine=EXAMPLE) for steps in (18, 13, 15, 17, 19, 21, 23)
    )
    line = compared(SMALL, EXAMPLE, found)
    assert line["told_step_s"] == sorted(one.alone_s for one in rounds)[1]  # longer than a quarter of the rounds
    assert line["step_off"] == line["told_step_s"] - 1
    assert line["misses_off"] is None
    assert line["peak_off"] == told.peak_then / (1 << 28) - 1


def test_targets():
    lines: list[dict[str, Any]] = [
        {"step_off": 0.05, "misses_off": None, "peak_off": 0.02, "over_best": 1.01},
        {"step_off": -0.2, "misses_off": 0.02, "peak_off": -0.01},
    ]
    found = {verdict.what: (round(verdict.measured, 6), verdict.reached) for verdict in judge(TARGETS, lines)}
    assert list(found.values()) == [
        (12.5, False), (20, True), (2, True), (2, True), (2, True), (1, False), (1.01, True)
    ]  # fmt: skip


def test_numbers_of_settings():
    assert numbers("3,21") == (3, 21)
    assert numbers("1-3,20-21") == (1, 2, 3, 20, 21)
    for wrong in ("0", "3-1", "20-22", "a", "1-2-3"):
        with pytest.raises(SystemExit):
            main(["plan", "--settings", wrong])


def line_of(number: int, step_s: float) -> dict[str, Any]:
    found = {"step_s": step_s, "misses": 9.0, "peak_bytes": 1 << 28, "others": 0.0, "turns": [step_s]}
    return {"name": str(number), "status": "ok", **SMALL.to_json(), **found}


def machine_line(first: float) -> dict[str, Any]:
    """A machine in which a step takes so long, whatever it has."""
    runs = [(Work(64, 60, 4, 48, tables=tables), Taken(first)) for tables in (1, 2)]
    machine = replace(EXAMPLE, runs=tuple(runs), constants=fit(runs, EXAMPLE.disk))
    return {"name": "machine", "status": "ok", "machine": json.loads(json.dumps(machine.to_json()))}


def test_the_fastest_turns_of_settings_and_machine_count():
    lines = [
        machine_line(0.004),
        line_of(2, 1.0),
        machine_line(0.002),
        line_of(2, 0.5),
        line_of(1, 3.0),
        line_of(2, 2.0),
    ]
    machine, *settings = best_of(lines)
    assert [one["name"] for one in settings] == ["1", "2"]
    assert (settings[1]["step_s"], settings[1]["turns"]) == (0.5, [1.0, 0.5, 2.0])
    assert settings[1]["told_step_s"] == pytest.approx(
        2 * 0.002, rel=0.3
    )  # of two tables; other ids than those of runs
    assert best_of([machine, *settings]) == [machine, *settings]
    assert best_of([lines[1]]) == [lines[1]]  # nobody knows the machine


def test_runs_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    line = {"told_step_s": 1.1, "misses_off": 0.0, "peak_off": 0.05}
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for path, some in zip(files, ([12], [2, 3]), strict=True):
        lines = [{**line_of(number, 1.0), **line, "step_off": 0.1 * number} for number in some]
        path.write_text(json.dumps({"results": lines}))
    monkeypatch.setattr(benches, "split_over_best", lambda seed: 1.5)
    found = tmp_path / "all.json"
    assert main(["plan", "--settings", "21", "--join", *map(str, files), "--json", str(found)]) == 0
    assert [one["name"] for one in json.loads(found.read_text())["results"]] == ["2", "3", "12", "split"]
    shown = capsys.readouterr().out
    assert re.search(r"step: median error +30 % +at most 10 % +NOT reached", shown)
    assert re.search(r"over the best of 200 +1.5 x +at most 1.02 x +NOT reached", shown)
    files[0].write_text("[]")
    with pytest.raises(er.ArgumentError, match=r"--join takes what .* wrote: '.*a\.json' cannot be read"):
        main(["plan", "--settings", "21", "--join", str(files[0])])


@pytest.mark.slow
def test_misses_of_tables_are_those_that_a_plan_tells(tmp_path: Path):
    setting = replace(SMALL, steps=60, together=1)
    found = Trainer(setting, tmp_path, seed=3).run()
    assert abs(compared(setting, EXAMPLE, found)["misses_off"]) < 0.06
    assert found["misses"] > found["reads"] > 0 < found["spilled"]


@pytest.mark.slow
def test_one_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here = replace(EXAMPLE, base_bytes=machines._base_bytes())  # Python and NumPy, which differ between systems
    monkeypatch.setattr(benches.machines, "load", lambda: here)
    options = {"--settings": "1", "--turns": "1", "--folder": str(tmp_path), "--json": str(tmp_path / "found.json")}
    words = ["--kept", *(word for option in options.items() for word in option)]
    assert main(["plan", *words]) == 0
    _, line = json.loads((tmp_path / "found.json").read_text())["results"]
    assert line["step_s"] > 0
    assert -0.1 < line["peak_off"] < 0.3


@pytest.mark.slow
def test_a_split_is_as_good_as_the_best_of_many():
    assert np.isfinite(found := split_over_best(4))
    assert 0.5 < found < 1.02
