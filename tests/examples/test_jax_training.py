"""Two towers with JAX: rows beyond their RAM, a training that goes on to the bit, and real interactions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
pytest.importorskip("orbax")

import common
import embedrock as er
import jax_training
import planted

TINY = ["--users", "20000", "--items", "2000", "--batch-size", "128", "--dim", "8", "--lr", "0.02"]
MEMORY = 96 << 10


@pytest.fixture(autouse=True)
def few_clicks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "TEST_CLICKS", 5000)
    monkeypatch.setattr(jax_training, "EVERY", 80)


def train(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[list[tuple[float, float]], str]:
    """Return loss and AUC of each report, and all that was printed."""
    assert common.run(jax_training.main, list(words)) == 0
    output = capsys.readouterr().out
    return [(float(loss), float(auc)) for loss, auc in re.findall(r"^ +[\d,]+  (\S+)  (\S+)$", output, re.M)], output


def rows_in(folder: Path) -> np.ndarray:
    """Return all rows of the last commit."""
    with er.open(folder / "model.rock", mode="r", kind=er.Group) as group:
        rows = group.lookup({"users": np.arange(20000), "items": np.arange(2000)})
    return np.concatenate([rows["users"], rows["items"]])


def test_it_learns_with_more_rows_than_ram_and_goes_on_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [*TINY, "--memory", str(MEMORY), "--path"]
    reports, output = train(capsys, *words, str(tmp_path / "whole"), "--steps", "160")
    assert len(reports) == 2
    assert reports[-1][0] < 0.56 < 0.60 < reports[0][0]
    assert reports[-1][1] > 0.80 > 0.785 > reports[0][1]
    assert float(re.findall(r"needed +(\S+) MiB", output)[0]) * 2**20 > 2 * MEMORY
    assert 0 < float(re.findall(r"disk +(\S+)% of the rows were in RAM", output)[0]) < 95

    first, _ = train(capsys, *words, str(tmp_path / "parts"), "--steps", "80")
    second, output = train(capsys, *words, str(tmp_path / "parts"), "--steps", "160")
    assert "resumed  at step 80" in output
    assert [auc for _, auc in first + second] == [auc for _, auc in reports]
    np.testing.assert_array_equal(rows_in(tmp_path / "whole"), rows_in(tmp_path / "parts"))


def test_other_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = [*TINY, "--memory", str(MEMORY), "--steps", "2", "--path", str(tmp_path / "one")]
    train(capsys, *words)
    assert common.run(jax_training.main, [*words, "--dim", "4"]) == 1
    assert "a training with other options (dim=8)" in capsys.readouterr().err


def test_a_real_log(data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = "--data", str(data_folder / "ml-100k.inter"), "--path", str(tmp_path / "log"), "--steps", "160"
    reports, output = train(capsys, *words)
    assert reports[-1][0] < 0.49 < 0.64 < reports[0][0]
    assert reports[-1][1] > 0.72 > 0.60 > reports[0][1]
    assert "rows     2,625 of 2,625 touched" in output
    needed, given = map(float, re.findall(r"needed +(\S+) MiB .* (\S+) MiB", output)[0])
    assert needed > given
