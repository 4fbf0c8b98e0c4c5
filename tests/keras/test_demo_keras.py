"""`embedrock demo --keras`: as good as the PyTorch one, with tables in RAM and on disk, killed and interrupted."""

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

from slow import slow

pytest.importorskip("tensorflow")
pytest.importorskip("tqdm")

from embedrock.bench.harness.processes import child_environment
from embedrock.cli.main import FAILED, INTERRUPTED, main
from embedrock.demo import clicks
from embedrock.demo.keras import learner
from embedrock.demo.keras.models import MODELS, make_model
from embedrock.demo.model_spec import PairSpec
from embedrock.demo.options import DIM_MULTIPLES
from embedrock.kernels.cpu.machine_code import user_cache_folder

TINY = ["--users", "3k", "--items", "500", "--steps", "40", "--batch-size", "256", "--dim", "8"]
SMALL = ["--users", "20k", "--items", "2k", "--steps", "600", "--batch-size", "256", "--dim", "8", "--memory", "1MiB"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a demo without ``--path`` has its tables."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(user_cache_folder()))  # compiled kernels are not made anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "embedrock" / "demo"


def training(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "out.json"
    assert main(["demo", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text())["training"]


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "embedrock", "demo", "--keras", *arguments], subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=child_environment(), start_new_session=True
    )


# ---------------------------------------------------------------- what it does


@pytest.mark.slow
def test_as_good_as_in_pytorch_on_disk_and_in_ram(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    on_disk = training(tmp_path, "--keras", *TINY)
    output = capsys.readouterr().out
    assert f"on disk  in {cache}" in output
    assert "best possible" in output
    assert "removed now; --path FOLDER keeps them" in output
    assert not cache.exists()
    in_ram, in_torch = training(tmp_path, "--keras", "--in-ram", *TINY), training(tmp_path, "--no-compare", *TINY)
    assert [point["step"] for point in on_disk["curve"]] == [10, 20, 30, 40]
    for there, here, torch in zip(on_disk["curve"], in_ram["curve"], in_torch["curve"], strict=True):
        assert there["auc"] == pytest.approx(here["auc"], abs=1e-4)
        assert here["auc"] == pytest.approx(torch["auc"], abs=0.02)  # their dense weights begin with other values
    for numbers in (in_ram, in_torch):
        assert numbers["tables"]["users"]["rows_touched"] == on_disk["tables"]["users"]["rows_touched"]
        assert numbers["planted_auc"] == on_disk["planted_auc"]


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(tmp_path: Path):
    folder = tmp_path / "demo"
    with start(*SMALL, "--path", str(folder), folder=tmp_path) as process:
        deadline = time.monotonic() + 120
        while not [file for file in (folder / "checkpoints").glob("step-*.h5") if ".tmp." not in file.name]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=300)
    resumed = training(tmp_path, "--keras", *SMALL, "--path", str(folder))
    whole = training(tmp_path, "--keras", *SMALL, "--path", str(tmp_path / "other"))
    assert 0 < resumed["resumed_at"] < 600
    assert resumed["curve"][-1]["auc"] == pytest.approx(whole["curve"][-1]["auc"], abs=1e-6)


@pytest.mark.parametrize("model", ["neumf", *slow(*(name for name in MODELS if name != "neumf"))])
def test_models_train(model: str):
    made = make_model(PairSpec(model=model, users=300, items=100, dim=16, lr=0.01, seed=3))
    inputs = {"users": np.arange(64) % 7, "items": np.arange(64) % 5}
    labels = (np.arange(64) % 2)[:, None]
    losses = made.fit(inputs, labels, epochs=20, batch_size=64, verbose=0).history["loss"]
    assert made.predict(inputs, verbose=0).shape == (64, 1)
    assert losses[-1] < losses[0]


def test_options_know_the_models():
    assert DIM_MULTIPLES.keys() == MODELS.keys()


def test_losses_are_those_of_single_batches():
    losses = [0.5, 0.25, 0.75, 0.5]
    noted: list[float] = []
    callback = learner._Losses(noted.append)
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        for batch in range(len(losses)):
            callback.on_train_batch_end(batch, {"loss": np.mean(losses[: batch + 1])})
    np.testing.assert_allclose(noted, losses * 2)


# ---------------------------------------------------------------- what goes wrong


def test_too_little_ram_for_the_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(clicks, "available_bytes", lambda: 200_000)
    assert main(["demo", "--keras", "--in-ram", *TINY]) == FAILED
    error = capsys.readouterr().err
    assert "embedrock: error: " in error
    assert "budget 195.3 KiB" in error
    assert "File" not in error


@pytest.mark.slow
def test_it_needs_no_torch(tmp_path: Path):
    program = (
        "import sys; sys.modules['torch'] = None; from embedrock.cli.main import main\n"
        f"sys.exit(main(['demo', '--keras', '--in-ram', *{TINY}]))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "best possible" in done.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_no_mess(tmp_path: Path):
    options = [*TINY, "--steps", "1000000", "--path", "demo", "--json", "out.json"]
    with start(*options, folder=tmp_path) as process:
        assert process.stdout is not None
        assert any("best possible" in text for text in process.stdout)
        time.sleep(2)  # into `fit`
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    assert process.returncode == INTERRUPTED
    assert "the same command goes on from the last checkpoint" in output
    assert errors.strip().splitlines()[-1] == "embedrock: interrupted"
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
