"""The script for the day that a GPU is there: goes on after failures, ends what hangs, and writes all of it down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import on_gpu
import on_gpu_steps
import pytest
import torch
from on_gpu import Run, Step


def python(code: str, name: str = "step", seconds: float = 60.0, **options: Any) -> Step:
    return Step(name, seconds, (sys.executable, "-c", code), **options)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    steps: list[dict[str, Any]] = json.loads((folder / "gpu.json").read_text())["steps"]
    return {step.pop("name"): step for step in steps}


def is_alive(number: int) -> bool:
    try:
        return (Path("/proc") / str(number) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_step_says_what_became_of_it_and_the_next_one_is_made(tmp_path: Path):
    hangs = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('FOUND', '{\"child\": %d}' % child.pid, flush=True)\n"
        "time.sleep(1000)"
    )
    outcomes = "a.py::one PASSED\\na.py::two[x y] FAILED\\nb.py::three SKIPPED (why)\\nb.py::four PASSED"
    report = tmp_path / "report.json"
    steps = [
        python("import sys; sys.exit(3)", "breaks"),
        python("print('FOUND {\"rate\": 1.5}'); print('FOUND {\"other\": [1]}')", "finds"),
        python(hangs, "hangs", 1.5),
        Step("missing", 9, ("/no/such/program",)),
        python("", "needy", needs="no-such-tool"),
        python(f"print('{outcomes}')", "tests"),
        python(f"open({str(report)!r}, 'w').write('[7]')", "reports", report=report),
        python("import os; os.kill(os.getpid(), 9)", "dies"),
    ]
    assert not Run(tmp_path, dict(os.environ)).make(steps)
    found = read(tmp_path)
    assert {name: step["status"] for name, step in found.items()} == {
        "breaks": "failed: exit status 3",
        "finds": "ok",
        "hangs": "ended after 2 s",
        "missing": "failed: [Errno 2] No such file or directory: '/no/such/program'",
        "needy": "skipped",
        "tests": "ok",
        "reports": "ok",
        "dies": "failed: exit status -9",
    }
    assert (found["finds"]["rate"], found["finds"]["other"]) == (1.5, [1])
    assert found["needy"]["why"] == "no-such-tool is not installed"
    assert found["tests"]["tests"] == {"PASSED": 2, "FAILED": 1, "SKIPPED": 1}
    assert found["tests"]["failed"] == ["a.py::two[x y]"]
    assert found["reports"]["report"] == [7]
    assert not is_alive(found["hangs"]["child"])  # nor what a step has started
    log = (tmp_path / "gpu.log").read_text()
    assert [line.split()[1] for line in log.splitlines() if line.startswith("=====")] == [
        f"{name}:" for name in found if name != "needy"
    ]


def test_what_there_is_no_time_for_is_left_out_and_said(tmp_path: Path):
    steps = [python("import time; time.sleep(60)", "long"), python("", "next")]
    start = time.monotonic()
    Run(tmp_path, dict(os.environ), budget_s=0.5).make(steps)
    assert time.monotonic() - start < 50
    assert [step["status"] for step in read(tmp_path).values()] == ["ended after 0 s", "left out, for want of time"]


def test_outcomes_of_several_processes_are_found_and_why_tests_failed(tmp_path: Path):
    said = (
        "tests/a.py::one \n[gw3] [ 12%] PASSED tests/a.py::one \n[gw0] [100%] FAILED tests/a.py::two[x y] \n"
        "FAILED tests/a.py::two[x y] - AssertionError: 3 rows - not 4\nERROR tests/b.py::three - OSError: no\n"
    )
    Run(tmp_path, dict(os.environ)).make([python(f"print({said!r})", "tests")])
    found = read(tmp_path)["tests"]
    assert found["tests"] == {"PASSED": 1, "FAILED": 1}
    assert found["failed"] == ["tests/a.py::two[x y]"]
    assert found["why"] == {
        "tests/a.py::two[x y]": "AssertionError: 3 rows - not 4",
        "tests/b.py::three": "OSError: no",
    }


def test_tests_that_are_ended_tell_why_those_before_failed(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "import time\ndef test_wrong(): assert 1 == 2, 'so it is'\ndef test_hangs(): time.sleep(1000)\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-c", os.devnull, "-p", "no:cacheprovider", str(tmp_path)]
    log = tmp_path / "log"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=file, env=on_gpu.environment(dry=True), start_new_session=True) as process,
    ):
        while "test_hangs" not in log.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        on_gpu._end(process)
    found = dict(on_gpu._found(log.read_text()))
    assert "so it is" in found["why"][found["failed"][0]]


def test_of_what_says_very_much_the_log_has_the_beginning_and_the_end(tmp_path: Path):
    Run(tmp_path, dict(os.environ)).make(
        [python("for k in range(400_000): print('line', k)", "long"), python("", "next")]
    )
    log = (tmp_path / "gpu.log").read_text()
    assert len(log) < on_gpu.MOST_SAID + 1000
    assert "\nline 0\n" in log
    assert "\nline 399999\n" in log
    assert "===== next" in log


def test_steps_that_were_left_out_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(on_gpu, "BUDGET_S", 0.0)
    on_gpu.main(["--dry", "--out", str(tmp_path), "--steps", "facts,open ids"])
    assert "there was no time for --steps 'facts,open ids'" in capsys.readouterr().out


def test_what_the_host_calls_by_a_name_is_no_kernel():
    events = [
        SimpleNamespace(device_type=kind, is_user_annotation=named)
        for kind in (torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU)
        for named in (False, True)
    ]
    assert on_gpu_steps.kernels_of(events) == events[:1]


def test_a_report_that_is_cut_off_has_what_was_done(tmp_path: Path):
    reader = f"import json; print('FOUND', json.dumps({{'seen': json.load(open({str(tmp_path / 'gpu.json')!r}))}}))"
    Run(tmp_path, dict(os.environ)).make([python("", "first"), python(reader, "second")])
    seen = read(tmp_path)["second"]["seen"]["steps"]
    assert [step["status"] for step in seen] == ["ok", "not begun"]


def test_steps_fit_ten_minutes_and_name_programs_that_there_are(tmp_path: Path):
    assert on_gpu.BUDGET_S < 600
    for dry in (False, True):
        every = on_gpu.steps(tmp_path, dry)
        assert [step.name for step in every[:5]] == ["facts", "modes", "bench", "cache", "tests"]
        assert sum(step.seconds for step in every[:5]) <= on_gpu.BUDGET_S  # whatever becomes of them
        for step in every:
            files = [part for part in step.command if part.endswith(".py")]
            assert all(Path(file).exists() for file in files)
    environment = on_gpu.environment(dry=False)
    assert environment["TRITON_INTERPRET"] == "0"
    assert str(on_gpu.ROOT / "src") in environment["PYTHONPATH"].split(os.pathsep)


def test_an_unknown_step_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        on_gpu.main(["--steps", "facts,warmth"])
    assert "no steps: warmth. There are facts, modes," in capsys.readouterr().err


@pytest.mark.slow
def test_every_step_runs_at_the_size_of_a_toy(tmp_path: Path):
    assert on_gpu.main(["--dry", "--out", str(tmp_path)]) == 0, (tmp_path / "gpu.log").read_text()
    found = read(tmp_path)
    assert found["tests"]["tests"]["PASSED"] > 30
    assert found["tests"]["failed"] == []
    assert found["modes"]["mode some near"]["rows that differ"] == 0
    assert found["late"]["late_steps"] == 3
    assert found["open ids"]["open ids, new rows, host, us"] > 0
    assert {"registered, read, GB/s", "allocated, both ways, GB/s"} <= found["rates"].keys()
    assert found["bench"]["report"]
    assert found["cache"]["report"]
    assert found["profile"]["mode c"]["host_us"] > 0
    assert found["forum"]["mode c, launches"]["step_us"] > 0


def test_tests_that_need_hypothesis_are_skipped_where_there_is_none(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "from hypothesis import HealthCheck, Phase, given, settings\n"
        "from hypothesis import strategies as st\n"
        "from hypothesis.extra import numpy as arrays\n"
        "@settings(max_examples=3, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])\n"
        "@given(rows=st.lists(st.integers(0, 3).map(str), min_size=1), them=arrays.arrays(int, 3))\n"
        "def test_given(rows, them): assert False\n"
        "def test_plain(): pass\n"
    )
    stand_in = str(on_gpu.HERE / "stand_in")
    command = sys.executable, "-m", "pytest", "-v", "-p", "no:hypothesispytest", "-p", "no:cacheprovider", str(tmp_path)
    run = Run(tmp_path, {**os.environ, "PYTHONPATH": stand_in})
    assert run.make([Step("tests", 60, command)]), (tmp_path / "gpu.log").read_text()
    assert read(tmp_path)["tests"]["tests"] == {"SKIPPED": 1, "PASSED": 1}
