"""The recommender with PyTorch: trained, interrupted and killed, in several processes, and as its options say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er

pytest.importorskip("torch")

import common
import demo
import planted
import recommender
from common import DataError

EXAMPLES = Path(demo.__file__).parent
TINY = ["--users", "3k", "--items", "500", "--steps", "40", "--batch-size", "256", "--dim", "8"]
SMALL = ["--users", "20k", "--items", "2k", "--batch-size", "256", "--dim", "8", "--memory", "1MiB"]


@pytest.fixture(autouse=True)
def small_test(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Score few clicks; return the folder of a training without ``--path``."""
    monkeypatch.setattr(planted, "TEST_CLICKS", 5000)
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "embedrock" / "demo"


def trained_auc(output: str) -> float:
    return float(output.partition("\nAUC")[2].split()[0])


def rows_of(folder: Path) -> list[np.ndarray]:
    """Return the ids and values of both tables, as committed."""
    snapshot: Any = er.open(folder / "model.rock", mode="r")
    with snapshot:
        return [values for name in ("users", "items") for values in snapshot[name].export()]


def test_on_disk_and_in_ram_it_trains_alike(capsys: pytest.CaptureFixture[str], small_test: Path):
    demo.main(TINY)
    on_disk = capsys.readouterr().out
    for text in ("3,000 users", "best possible", "of 3,500 touched", f"in {small_test}", "removed now"):
        assert text in on_disk
    assert [line.split()[0] for line in on_disk.splitlines() if line.startswith("      ")] == ["10", "20", "30", "40"]
    assert not small_test.exists()
    recommender.main([*TINY, "--in-ram"])
    assert trained_auc(capsys.readouterr().out) == trained_auc(on_disk) > 0.6


def stop_after(steps: int) -> Callable[..., float]:
    """Return `train_step` that Ctrl-C interrupts."""
    calls, step = iter(range(steps)), recommender.train_step

    def interrupted(*arguments: Any) -> float:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return step(*arguments)

    return interrupted


def test_interrupted_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = [*SMALL, "--steps", "60", "--path"]
    with monkeypatch.context() as patch:
        patch.setattr(recommender, "train_step", stop_after(40))
        assert common.run(recommender.main, [*options, str(tmp_path / "one")]) == 130
    with pytest.warns(er.UncommittedWarning):
        er.close(tmp_path / "one" / "model.rock")
    recommender.main([*options, str(tmp_path / "one")])
    assert "resumed  at step 30" in capsys.readouterr().out
    recommender.main([*options, str(tmp_path / "other")])
    assert "resumed" not in capsys.readouterr().out
    for one, other in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "other"), strict=True):
        np.testing.assert_array_equal(one, other)
    recommender.main([*options, str(tmp_path / "one")])
    assert "trained  0 steps" in capsys.readouterr().out


def kill_after_a_checkpoint(folder: Path, *options: str) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *SMALL, "--steps", "400", "--path", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        deadline = time.monotonic() + 300
        while not any((folder / "checkpoints").glob("*.pt")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    while True:  # until all of its processes have ended
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]], ids=["alone", "two processes"])
def test_killed_and_started_again_it_goes_on(tmp_path: Path, ranks: list[str], capfd: pytest.CaptureFixture[str]):
    kill_after_a_checkpoint(tmp_path / "one", *ranks)
    recommender.main([*SMALL, "--steps", "400", "--path", str(tmp_path / "one"), *ranks])
    resumed = capfd.readouterr().out
    assert "resumed  at step" in resumed
    recommender.main([*SMALL, "--steps", "400", "--path", str(tmp_path / "other"), *ranks])
    assert trained_auc(resumed) == trained_auc(capfd.readouterr().out)


@pytest.mark.slow  # tests/pytorch/test_shards.py trains in two processes each time
def test_two_processes_train_as_one(capfd: pytest.CaptureFixture[str]):
    recommender.main([*TINY, "--in-ram"])
    one = capfd.readouterr().out
    recommender.main([*TINY, "--in-ram", "--ranks", "2"])
    both = capfd.readouterr().out
    assert trained_auc(both) == pytest.approx(trained_auc(one), abs=5e-3)  # they score other numbers of clicks
    assert next(line for line in one.splitlines() if line.startswith("rows")) in both


def test_a_folder_of_another_training_is_refused(tmp_path: Path):
    options = [*SMALL, "--steps", "2", "--path", str(tmp_path / "demo")]
    recommender.main(options)
    with pytest.raises(DataError, match=r"training with other options \(seed=0\)\. Choose those again"):
        recommender.main([*options, "--seed", "5"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "argument --steps: must be a positive whole number, such as 8192, 20M or 360MiB: got '0'"),
        (["--users", "1.5"], "argument --users: must be a positive whole number"),
        (["--memory", "much"], "argument --memory: must be a positive whole number"),
        (["--speed", "3"], "unrecognized arguments: --speed 3"),
        (["--data", __file__, "--steps", "3"], "unrecognized arguments: --steps 3"),
        (["--data", __file__, "--dim", "12"], "argument --dim: must be a multiple of 8 for neumf: got 12"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    with pytest.raises(SystemExit):
        demo.main(words)
    assert said in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "log.txt").write_text("1 2\n1 2 3\n")
    assert common.run(demo.main, ["--data", str(tmp_path / "log.txt")]) == 1
    error = capsys.readouterr().err
    assert "line 2: expected 2 fields" in error
    assert error.count("\n") == 1


def test_clicks_are_a_function_of_seed_and_step():
    log, again = (planted.PlantedClicks(20_000_000, 2_000_000, 1000, seed=0) for _ in range(2))
    for one, other in zip(log.batch(7), again.batch(7), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (log.batch(8).users != log.batch(7).users).any()
    assert [table.stats()["rows_touched"] for table in log._tables] == [0, 0]
    with pytest.raises(ValueError, match=r"must be below 2,654,435,761: got 9,000,000,000"):
        planted.PlantedClicks(9 * 10**9, 5, 5, 0)


def test_the_planted_model_scores_best():
    log = planted.PlantedClicks(20_000_000, 2_000_000, 100_000, seed=0)
    clicks = log.batch(0)
    best = common.auc(clicks.labels, clicks.planted)
    assert 0.85 < best < 0.89
    assert common.auc(clicks.labels, clicks.planted + np.random.default_rng(4).normal(0, 0.5, 100_000)) < best
    chances = 1 / (1 + np.exp(-clicks.planted))
    for low in np.arange(0, 1, 0.1):
        inside = (chances >= low) & (chances < low + 0.1)
        expected = chances[inside].mean()
        spread = np.sqrt(expected * (1 - expected) / inside.sum())
        assert abs(clicks.labels[inside].mean() - expected) < 5 * spread
    ids, counts = np.unique(clicks.users, return_counts=True)
    top = ids[np.argsort(-counts)[:3]]
    assert set(top) == {rank * planted.SCATTER % 20_000_000 for rank in range(3)}


def test_auc_is_the_share_of_pairs_in_order():
    random = np.random.default_rng(0)
    for count in (2, 5, 40):
        labels, scores = random.integers(0, 2, count), random.integers(-3, 4, count).astype(float)
        labels[:2] = 0, 1
        above = scores[labels == 1][:, None] - scores[labels == 0]
        assert common.auc(labels, scores) == pytest.approx(((above > 0) + 0.5 * (above == 0)).mean(), abs=1e-12)
    with pytest.raises(ValueError, match="finite"):
        common.auc(np.array([1, 0]), np.array([np.nan, 1.0]))
