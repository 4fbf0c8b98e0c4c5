"""`embedrock demo` from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tqdm")

TINY = ["--users", "3000", "--items", "500", "--steps", "40", "--batch-size", "256", "--dim", "8"]


def demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "embedrock", "demo", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def write_log(folder: Path) -> Path:
    random = np.random.default_rng(0)
    rows = [f"u{user}\tfilm {item}\t{k}" for k, (user, item) in enumerate(random.integers(0, 60, (1500, 2)))]
    path = folder / "log.tsv"
    path.write_text("\n".join(rows))
    return path


def test_clicks_end_to_end(tmp_path: Path) -> None:
    result = demo(*TINY, "--json", "out.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    for text in ("3,000", "best possible", "AUC", "Embedrock", "nn.Embedding + SparseAdam", "nn.Embedding + Adam"):
        assert text in result.stdout
    numbers = json.loads((tmp_path / "out.json").read_text())
    text = json.dumps(numbers)
    assert "auc" in text.lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_a_log_end_to_end(tmp_path: Path, model: str) -> None:
    write_log(tmp_path)
    arguments = ["--data", "log.tsv", "--model", model, "--epochs", "2", "--batch-size", "512", "--json", "out.json"]
    result = demo(*arguments, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "HR@10" in result.stdout
    assert "NOT WITHIN" not in result.stdout
    comparison = json.loads((tmp_path / "out.json").read_text())["comparison"]
    assert comparison["curve_difference"] <= 1e-5
    assert comparison["hit_rate_difference"] <= 0.002


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--data", "missing.txt"], 2, "must be a file that exists: got 'missing.txt'"),
        (["--data", "empty.txt"], 1, "got an empty file"),
        (["--data", "bad.txt"], 1, "bad.txt, line 2: expected 2 fields"),
        (["--model", "svd"], 2, "invalid choice: 'svd'"),
        (["--steps", "0"], 2, "--steps"),
        (["--users", "-5"], 2, "--users"),
        (["--epochs", "3"], 2, "--data"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], status: int, message: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.txt").write_text("1 2\n1 2 3\n")
    result = demo(*arguments, folder=tmp_path)
    assert result.returncode == status, result.stdout + result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a process group")
def test_ctrl_c_leaves_no_mess(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embedrock", "demo", *TINY, "--steps", "1000000"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "best possible" in line:
            break
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):  # no child of it is left
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["video_games.txt", "ml-100k.inter"])
@pytest.mark.parametrize("model", ["gmf", "neumf"])
def test_real_logs_train_alike(tmp_path: Path, data_folder: Path, name: str, model: str) -> None:
    path = data_folder / name
    if not path.is_file():
        pytest.skip(f"no {name} in {data_folder}")
    result = demo("--data", str(path), "--model", model, "--json", "out.json", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    comparison = json.loads((tmp_path / "out.json").read_text())["comparison"]
    assert comparison["curve_steps"] == 100
    assert comparison["curve_difference"] <= 1e-5
    assert comparison["hit_rate_difference"] <= 0.002


def test_the_first_steps_on_a_real_log(tmp_path: Path, data_folder: Path) -> None:
    path = data_folder / "ml-100k.inter"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {data_folder}")
    arguments = ["--data", str(path), "--epochs", "2", "--dim", "16", "--json", "out.json"]
    result = demo(*arguments, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    comparison = json.loads((tmp_path / "out.json").read_text())["comparison"]
    assert comparison["curve_difference"] <= 1e-5
