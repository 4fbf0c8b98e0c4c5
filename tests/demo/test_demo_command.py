"""`embedrock demo` from the command line: what it prints and writes, what it refuses, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedrock.bench.harness.processes import child_environment
from embedrock.cli.main import FAILED, INTERRUPTED, main
from embedrock.kernels.cpu.machine_code import user_cache_folder
from slow import slow

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

USAGE = 2  # argparse's exit status
TINY = ["--users", "3k", "--items", "500", "--steps", "40", "--batch-size", "256", "--dim", "8"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a demo without ``--path`` has its tables."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(user_cache_folder()))  # compiled kernels are not made anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "embedrock" / "demo"


def wait_for_the_end_of(group: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"processes of group {group} are left")


# PyTorch's demo needs neither TensorFlow nor Keras.
WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
from embedrock.cli.main import main
sys.exit(main())
"""


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WITHOUT_TENSORFLOW, "demo", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=child_environment(), start_new_session=True
    )


def write_log(folder: Path, name: str = "log.tsv") -> Path:
    random = np.random.default_rng(0)
    rows = [f"u{user}\tfilm {item}\t{k}" for k, (user, item) in enumerate(random.integers(0, 60, (1500, 2)))]
    path = folder / name
    path.write_text("user\titem\ttimestamp\n" + "\n".join(rows))
    return path


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.json").read_text())


# ---------------------------------------------------------------- what it does


@pytest.mark.usefixtures("in_process")
def test_clicks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *TINY, "--json", "out.json"]) == 0
    output = capsys.readouterr().out
    for text in ("3,000 users", "best possible", "AUC", "rows", "RAM"):
        assert text in output
    numbers = results(tmp_path)
    assert [point["step"] for point in numbers["training"]["curve"]] == [10, 20, 30, 40]
    assert numbers["training"]["tables"]["users"]["rows_touched"] <= 3000
    assert [outcome["name"] for outcome in numbers["contest"]] == [
        "Embedrock",
        "nn.Embedding + SparseAdam",
        "nn.Embedding + Adam",
    ]
    assert all(outcome["step_s"] > 0 and not outcome["reason"] for outcome in numbers["contest"])
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("model", ["mf", "gmf", "neumf"])
def test_a_log_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str):
    log, out = str(write_log(tmp_path)), str(tmp_path / "out.json")
    options = ["--model", model, "--epochs", "2", "--batch-size", "512", "--dim", "16"]
    assert main(["demo", "--data", log, *options, "--json", out]) == 0
    output = capsys.readouterr().out
    assert "separated by tabs, header line" in output
    assert "HR@10" in output
    assert "NOT WITHIN" not in output
    numbers = results(tmp_path)
    assert numbers["comparison"]["curve_difference"] <= 1e-5
    assert numbers["comparison"]["hit_rate_difference"] <= 0.002
    assert [len(course["epochs"]) for course in numbers["courses"]] == [2, 2]


def test_no_compare_and_the_same_numbers_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log, curves = str(write_log(tmp_path)), []
    for _ in range(2):
        options = ["--epochs", "1", "--batch-size", "512", "--dim", "8", "--threads", "1", "--no-compare"]
        assert main(["demo", "--data", log, *options, "--json", str(tmp_path / "out.json")]) == 0
        (course,) = results(tmp_path)["courses"]
        curves.append(course["losses"])
    assert "SparseAdam" not in capsys.readouterr().out
    assert curves[0] == curves[1]


# ---------------------------------------------------------------- tables on disk

SMALL = ["--users", "20k", "--items", "2k", "--batch-size", "256", "--dim", "8", "--no-compare"]


def test_tables_on_disk_are_removed_at_the_end(cache: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["demo", *TINY, "--no-compare"]) == 0
    output = capsys.readouterr().out
    assert f"on disk  in {cache}" in output
    assert "of the rows were in RAM" in output
    assert "removed now; --path FOLDER keeps them" in output
    assert not cache.exists()


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO", "embedrock")
    folder, out = tmp_path / "demo", tmp_path / "out.json"
    options = ["--steps", "300", "--path", str(folder), "--memory", "1MiB", *SMALL]
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))  # PyTorch's sums of losses depend on it
    with start(*options, folder=tmp_path) as process:
        wait_for(folder / "checkpoints", "*.pt")
        process.kill()
        process.communicate(timeout=300)
    assert main(["demo", *options, "--json", str(out)]) == 0
    resumed, told = json.loads(out.read_text())["training"], capsys.readouterr()
    assert resumed["resumed_at"] in (75, 150, 225, 250)  # every 250, and where the AUC is measured
    assert f"resumed at step {resumed['resumed_at']}" in caplog.text
    assert f"stay in {folder}" in told.out
    whole = tmp_path / "whole.json"
    assert main(["demo", *options[:3], str(tmp_path / "other"), *options[4:], "--json", str(whole)]) == 0
    wanted = json.loads(whole.read_text())["training"]
    assert resumed["curve"][-1]["auc"] == wanted["curve"][-1]["auc"]  # as if nothing had happened
    assert wanted["disk"]["reads_per_step"] > 0


def auc_of(*options: str, out: Path) -> float:
    assert main(["demo", *options, "--json", str(out)]) == 0
    return json.loads(out.read_text())["training"]["curve"][-1]["auc"]


@pytest.mark.slow  # tests/pytorch/test_shards.py trains in two processes each time
def test_two_processes_train_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = auc_of(*TINY, "--no-compare", "--in-ram", out=tmp_path / "one.json")
    both = auc_of(*TINY, "--no-compare", "--in-ram", "--ranks", "2", out=tmp_path / "both.json")
    assert "2 processes, each with its part of the rows" in capsys.readouterr().out
    assert both == pytest.approx(one, abs=1e-4)
    assert 0.55 < one < 0.9
    kept, shared = (json.loads((tmp_path / name).read_text())["training"] for name in ("one.json", "both.json"))
    assert shared["curve"][-1]["loss"] == pytest.approx(kept["curve"][-1]["loss"], rel=1e-4)
    assert shared["tables"]["users"]["rows_touched"] == kept["tables"]["users"]["rows_touched"]


@pytest.mark.slow
def test_two_processes_that_are_killed_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = ["--steps", "300", "--memory", "1MiB", *SMALL, "--ranks", "2"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "demo"
    with start(*options, "--path", str(folder), folder=tmp_path) as process:
        wait_for(folder / "checkpoints", "*.pt")
        process.kill()
        process.communicate(timeout=300)
    wait_for_the_end_of(process.pid)  # the other process ends with it
    out = tmp_path / "out.json"
    resumed = auc_of(*options, "--path", str(folder), out=out)
    assert json.loads(out.read_text())["training"]["resumed_at"] in (75, 150, 225, 250)
    assert resumed == auc_of(*options, "--path", str(tmp_path / "other"), out=out)  # as if nothing had happened


def wait_for(folder: Path, pattern: str) -> None:
    deadline = time.monotonic() + 300
    while not any(folder.glob(pattern)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_of_another_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["demo", "--steps", "2", "--path", str(tmp_path / "demo"), *SMALL]
    assert main(options) == 0
    assert main([*options, "--seed", "5"]) == FAILED
    assert "has the files of a demo with other options (seed=0)" in capsys.readouterr().err
    assert main(options) == 0  # nothing is left to do
    assert "trained  0 steps" in capsys.readouterr().out


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.txt"], "argument --data: must be a file that exists: got 'missing.txt'"),
        (["--data", "."], "argument --data: must be a file that exists: got '.'"),
        (["--model", "svd"], "argument --model: invalid choice: 'svd'"),
        (["--steps", "0"], "argument --steps: must be a positive whole number"),
        (["--users", "-5"], "argument --users: must be a positive whole number"),
        (["--users", "9e9"], "argument --users: must be at most"),
        (["--lr", "nan"], "argument --lr: must be a number above 0: got 'nan'"),
        (["--seed", "-1"], "argument --seed: must be a whole number of at least 0"),
        (["--model", "neumf", "--dim", "12"], "argument --dim: must be a multiple of 8 for neumf: got 12"),
        (["--json", "no/such/folder.json"], "argument --json: must be a file in a folder that exists"),
        (["--epochs", "3"], "argument --epochs: only goes with --data FILE"),
        (["--data", __file__, "--steps", "3"], "argument --steps: only goes without --data FILE"),
        (["--memory", "much"], 'argument --memory: must be a size such as "512MiB"'),
        (["--in-ram", "--path", "x"], "argument --in-ram: does not go with --path or --memory"),
        (["--data", __file__, "--in-ram"], "argument --in-ram: only goes without --data FILE"),
        (["--data", __file__, "--keras"], "argument --keras: only goes without --data FILE"),
        (
            ["--keras", "--ranks", "2"],
            "argument --ranks: does not go with --keras: processes of PyTorch train together",
        ),
        (["--data", __file__, "--ranks", "2"], "argument --ranks: only goes without --data FILE"),
        (["--keras", "--no-compare"], "argument --no-compare: does not go with --keras, which compares nothing"),
        (["--speed", "3"], "unrecognized arguments: --speed 3"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ("1 2\n1 2 3\n", "line 2: expected 2 fields"),
        ("1 2\n2 2\n3 1\n", "nothing to hold out"),
    ],
)
def test_bad_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str):
    path = tmp_path / "log.txt"
    path.write_text(text)
    assert main(["demo", "--data", str(path)]) == FAILED
    error = capsys.readouterr().err
    assert error.startswith("embedrock: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_too_little_ram_for_the_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from embedrock.demo import clicks

    monkeypatch.setattr(clicks, "available_bytes", lambda: 200_000)
    assert main(["demo", *TINY, "--no-compare", "--in-ram"]) == FAILED
    error = capsys.readouterr().err
    assert "budget 195.3 KiB" in error
    assert "In the demo: fewer --steps" in error


@pytest.mark.parametrize(
    ("package", "option", "extra"),
    [("torch", [], "torch"), *slow(("tqdm", [], "torch"), ("tensorflow", ["--keras"], "keras"))],
)
def test_without_an_extra(tmp_path: Path, package: str, option: list[str], extra: str):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from embedrock.cli.main import main\n"
        f"sys.exit(main(['demo', *{option}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == FAILED
    assert f"the demo needs {package}" in done.stderr
    assert f'pip install "embedrock[{extra},cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_no_torch(tmp_path: Path):
    program = (
        "import sys; from embedrock.cli.main import main\n"
        "try: main(['demo', '--help'])\n"
        "finally: print('torch loaded:', 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True)
    assert "--batch-size" in done.stdout
    assert "torch loaded: False" in done.stdout


# ---------------------------------------------------------------- leaving early


@pytest.mark.parametrize(
    ("steps", "line"),
    slow(("4", "a few steps"), ("1000000", "best possible")),
    ids=["while a contender's process runs", "in training"],
)
def test_ctrl_c_leaves_no_mess(tmp_path: Path, steps: str, line: str):
    with start(*TINY, "--steps", steps, "--json", "out.json", folder=tmp_path) as process:
        assert process.stdout is not None
        assert any(line in text for text in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == INTERRUPTED
    assert errors.strip() == "embedrock: interrupted"
    wait_for_the_end_of(process.pid)  # no child of it is left, once all have seen the signal
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_is_no_crash(tmp_path: Path):
    program = (
        "from types import SimpleNamespace as Bag\n"
        "import embedrock.cli.main as cli\n"
        "talk = Bag(run=lambda arguments: [print('a line') for _ in range(10**6)])\n"
        "cli._parser = lambda: Bag(parse_args=lambda argv: talk)\n"
        "raise SystemExit(cli.main())"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=child_environment(), stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "a line\n"
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == FAILED
    assert errors == ""


# ---------------------------------------------------------------- real logs


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gmf", "neumf"])
@pytest.mark.parametrize(("name", "hit_rate"), [("ml-100k.inter", 0.64), ("video_games.txt", 0.59)])
def test_real_logs_train_alike(tmp_path: Path, data_folder: Path, name: str, hit_rate: float, model: str):
    assert (
        main(["demo", "--data", str(data_folder / name), "--model", model, "--json", str(tmp_path / "out.json")]) == 0
    )
    numbers = results(tmp_path)
    assert numbers["comparison"]["curve_steps"] == 100
    assert numbers["comparison"]["curve_difference"] <= 1e-5
    assert numbers["comparison"]["hit_rate_difference"] <= 0.002
    assert numbers["courses"][0]["epochs"][-1]["hit_rate"] > hit_rate


def test_the_first_steps_on_a_real_log(tmp_path: Path, data_folder: Path):
    options = ["--epochs", "1", "--dim", "16", "--json", str(tmp_path / "out.json")]
    assert main(["demo", "--data", str(data_folder / "ml-100k.inter"), *options]) == 0
    comparison = results(tmp_path)["comparison"]
    assert comparison["curve_steps"] == 61
    assert comparison["curve_difference"] <= 1e-5
    assert comparison["hit_rate_difference"] <= 0.002
