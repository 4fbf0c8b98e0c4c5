"""The recommender with Keras: as good as with PyTorch, interrupted, and killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er

pytest.importorskip("tensorflow")

import keras

import common
import demo
import planted
import recommender_keras

TINY = ["--users", "3k", "--items", "500", "--steps", "40", "--batch-size", "256", "--dim", "8"]


@pytest.fixture(autouse=True)
def few_clicks(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(planted, "TEST_CLICKS", 5000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def aucs(output: str) -> list[float]:
    """Return the AUCs that a training measured."""
    return [float(line.split()[2]) for line in output.splitlines() if line.startswith("      ")]


class Interrupt(keras.callbacks.Callback):
    """Ctrl-C in the middle of `fit`."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        model: Any = self.model
        if model.optimizer.iterations == 35:
            raise KeyboardInterrupt


def test_interrupted_it_goes_on_and_is_as_good_as_in_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = keras.Model.fit
    words = ["--keras", *TINY, "--path"]
    with monkeypatch.context() as patch:
        fit = lambda *args, callbacks, **how: whole(*args, callbacks=[*callbacks, Interrupt()], **how)  # noqa: E731
        patch.setattr(keras.Model, "fit", fit)
        assert common.run(demo.main, [*words, str(tmp_path / "one")]) == 130
    with pytest.warns(er.UncommittedWarning):
        er.close(tmp_path / "one" / "model.rock")
    capsys.readouterr()
    demo.main([*words, str(tmp_path / "one")])
    resumed = capsys.readouterr().out
    assert "resumed  at step 30" in resumed
    pytest.importorskip("torch")
    demo.main(TINY)
    in_torch = aucs(capsys.readouterr().out)[-1]
    assert aucs(resumed) == pytest.approx([in_torch], abs=0.02)  # their dense weights begin with other values
    assert in_torch > 0.6


@pytest.mark.slow
def test_as_good_as_in_pytorch_on_disk_and_in_ram(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    import recommender

    found = []
    for main, words in ((recommender_keras.main, []), (recommender_keras.main, ["--in-ram"]), (recommender.main, [])):
        main([*TINY, *words])
        found.append(capsys.readouterr().out)
    on_disk, in_ram, in_torch = map(aucs, found)
    np.testing.assert_allclose(on_disk, in_ram, atol=1e-4)
    np.testing.assert_allclose(on_disk, in_torch, atol=0.02)  # their dense weights begin with other values
    rows = [next(line for line in output.splitlines() if line.startswith("rows")) for output in found]
    assert len(set(rows)) == 1


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on_without_torch(tmp_path: Path):
    program = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(Path(demo.__file__).parent)!r})\n"
    program += "import demo; demo.main(sys.argv[1:])"
    words = ["--users", "20k", "--items", "2k", "--steps", "400", "--batch-size", "256", "--dim", "8"]
    command = [sys.executable, "-c", program, "--keras", *words, "--path", str(tmp_path / "demo"), "--memory", "1MiB"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while not [file for file in (tmp_path / "demo" / "checkpoints").glob("step-*.h5") if ".tmp." not in file.name]:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "resumed  at step" in done.stdout
