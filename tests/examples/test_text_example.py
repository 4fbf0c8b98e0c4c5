"""The language model with a memory: its text, its bits after a kill, what is printed, and all of it with a kill."""

from __future__ import annotations

import re
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import embedrock as er

pytest.importorskip("torch")

import torch

import demo
import side_by_side
import text
from embedrock.system import spans
from side_by_side import Training, TrainingError

STEPS = 12
Told = list[dict[str, Any]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Train on short sequences of some text, and return what is held out of it."""
    train, held_out = (np.frombuffer(Path(file).read_bytes(), np.uint8) for file in (text.__file__, demo.__file__))
    monkeypatch.setattr(text, "read_text", lambda: (train, held_out))
    monkeypatch.setattr(spans, "_tracers", spans._tracers)  # forget the clocks
    monkeypatch.setattr(text, "use_threads", lambda threads: None)  # which is for a process of its own
    for name, value in {"CONTEXT": 32, "SEQUENCES": 4, "SCORED": 16, "REPORTS": 3}.items():
        monkeypatch.setattr(text, name, value)
    return held_out


def options_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Return the options that `main` makes of words."""
    found: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(text, "Training", lambda name, train, options, folder: found.append(options))
        patch.setattr(text, "run_all", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            text.main(["--steps", str(STEPS), "--rows", "1M", "--memory", "1MiB", *words])
    return found[0]


def losses(told: Told) -> list[float]:
    return [numbers["loss"] for numbers in told if "step" in numbers]


def rows_of(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and values of the memory, as committed."""
    snapshot: Any = er.open(folder / "memory.rock", mode="r")
    with snapshot:
        return snapshot.export()


def stop_after(step: int, told: Told) -> Callable[[dict[str, Any]], None]:
    """Return what hears the numbers of some steps, and then is interrupted."""

    def hear(numbers: dict[str, Any]) -> None:
        told.append(numbers)
        if numbers["step"] == step:
            raise KeyboardInterrupt

    return hear


@pytest.mark.parametrize("words", [[], ["--open"]], ids=["hashed", "open"])
def test_interrupted_it_goes_on_with_the_same_bits(
    small: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list
):
    options, whole, before, after = options_of(monkeypatch, *words), Told(), Told(), Told()
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    text.train(text.MEMORY, options, one, whole.append)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        text.train(text.MEMORY, options, other, stop_after(6, before))
    with pytest.warns(er.UncommittedWarning):  # the traceback has kept the table
        er.close(other / "memory.rock")
    del interrupted
    text.train(text.MEMORY, options, other, after.append)
    assert "resumed  at step 4" in capsys.readouterr().out
    assert (len(losses(whole)), len(losses(before)), len(losses(after))) == (STEPS, 6, STEPS - 4)
    assert losses(before)[:4] + losses(after) == losses(whole)
    assert losses(before)[4:] == losses(after)[:2]
    assert after[-2]["bits"] == whole[-2]["bits"] < whole[3]["bits"]
    for expected, got in zip(rows_of(one), rows_of(other), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert after[-1]["rows"] == whole[-1]["rows"] > 0


def test_all_begin_with_the_same_loss_and_rows_of_zeros(
    small: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options, all_told = options_of(monkeypatch), dict[str, Told]()
    for name in (text.ALONE, text.MEMORY, text.PLAIN):
        text.train(name, options, tmp_path, all_told.setdefault(name, Told()).append)
    alone, memory, plain = (losses(told) for told in all_told.values())
    assert alone[0] == memory[0] == plain[0] == pytest.approx(np.log(256), rel=0.1)
    assert alone[-1] != memory[-1] != plain[-1]
    results = [told[-1] for told in all_told.values()]
    assert [result.get("rows") for result in results] == [None, results[1]["rows"], 1_000_000]
    assert 0 < results[1]["rows"] <= STEPS * 4 * 32 * 4
    files = [file.stat().st_size for file in (tmp_path / "memory.rock").rglob("*") if file.is_file()]
    assert results[1]["files"] == sum(files)
    for told in all_told.values():
        assert [numbers["step"] for numbers in told if "bits" in numbers] == [4, 8, 12]
        assert all(numbers["on rows"] < numbers["seconds"] + 0.01 for numbers in told[:-1])
    assert [sum(numbers["on rows"] > 0 for numbers in told[:-1]) for told in all_told.values()] == [0, STEPS, STEPS]


def test_bits_per_byte_are_those_of_the_distribution(small: np.ndarray):
    torch.manual_seed(0)
    model = text.Transformer(None)
    grams = er.Ngrams(rows=1000, vocabulary=256, orders=text.ORDERS, heads=1)
    starts = np.random.default_rng(0).permutation((len(small) - 1) // 32)[:16] * 32
    expected = []
    with torch.no_grad():
        for start in starts:
            batch = text.batch_at(small, np.array([start]), grams)
            chances = model(batch.inputs, batch.ids).double().softmax(-1)[0].numpy()
            expected += [-np.log2(chances[at, small[start + 1 + at]]) for at in range(32)]
    assert text.bits_per_byte(model, small, grams) == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_model_sees_no_byte_that_follows():
    torch.manual_seed(0)
    grams = er.Ngrams(rows=1000, vocabulary=256, orders=text.ORDERS, heads=1)
    table = torch.nn.Embedding(1000, text.WIDTH)
    model = text.Transformer(table)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    tokens = torch.randint(0, 256, (1, 20))
    changed = tokens.clone()
    changed[0, 12] += 1 if changed[0, 12] < 255 else -1
    one, other = (model(each, grams.ids(each))[0] for each in (tokens, changed))
    assert torch.equal(one[:12], other[:12])
    assert not torch.equal(one[12], other[12])


def test_files_are_held_out():
    train, held_out = text.read_text()
    again = text.read_text()
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(held_out, again[1])
    files = [set(bytes(part).split(b"\0")) for part in (train, held_out)]
    assert 18 < len(files[0]) / len(files[1]) < 20
    assert len(files[0] & files[1]) < 5  # files that are alike, such as empty ones


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(text.DataError, match=r"expected the sources of Python's standard library; got 0 files\. Inst"):
        text.read_text()


def test_rates_warm_up_and_decay():
    rates = [text.rate(done, 1200) for done in range(1201)]
    assert rates[0] == 0.02
    assert rates[49] == rates[700] == 1
    assert rates[960] == 0.5
    assert rates[-1] == 0.05


# ---------------------------------------------------------------- trainings side by side


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """Return a training whose numbers come from its `told`, in place of a process."""

    def start(self: Any) -> None:
        self.reader, self.told = get_context("spawn").Pipe(duplex=False)

    monkeypatch.setattr(Training, "start", start)
    return Training("memory", lambda *_: None)


def tell(training: Any, *numbers: dict[str, Any]) -> None:
    for each in numbers:
        training.told.send(each)
        assert training.hear() == each


def numbers_of(step: int, loss: float, **more: float) -> dict[str, Any]:
    return {"step": step, "loss": loss, "seconds": 0.06, "on rows": 0.003, **more}


def test_steps_that_were_trained_twice_must_have_the_same_loss(training: Any):
    tell(training, numbers_of(1, 3.0), numbers_of(2, 2.5), numbers_of(3, 2.25), numbers_of(2, 2.5))
    assert training.repeated == 1
    training.told.send(numbers_of(3, float(np.nextafter(2.25, 3))))
    with pytest.raises(TrainingError, match=r"step 3 of 'memory' had the loss 2\.25, and 2\.250+4 when it was"):
        training.hear()


def test_a_process_that_ends_early_is_named(training: Any):
    training._process = SimpleNamespace(join=lambda: None, exitcode=-9)
    training.told.close()
    with pytest.raises(TrainingError, match=r"'memory' has ended early, with exit code -9\. A traceback is above"):
        training.hear()


def test_the_summary_and_the_figure(training: Any):
    tell(training, *(numbers_of(step, 2.0) for step in range(1, 100)), numbers_of(100, 2.0, bits=2.5, ram=2**29))
    tell(training, numbers_of(200, 2.0, bits=1.875, ram=2**30), {"ram": 2**30, "rows": 12345, "files": 2**24})
    printed = text.summary([training], repeated=7)
    assert "memory                1.875   1.00 GiB           60.0     5.0%     12,345   16.0 MiB" in printed
    assert "7 steps of the memory were trained twice" in printed
    drawn = ElementTree.fromstring(side_by_side.figure([training], "bits by steps"))
    path = next(each.get("d") for each in drawn.iter() if (each.get("stroke") or "") == side_by_side.COLOURS[0])
    assert path == "M340.0 30.0 620.0 211.2"  # 2.5 bits at 100 steps; 1.875 at 200, between 1.5 and 2.5
    assert "memory: 1.875" in [each.text for each in drawn.iter()]


@pytest.mark.slow
def test_all_of_it_with_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["--text", "--steps", "120", "--rows", "100k", "--svg", str(tmp_path / "bits.svg")]
    demo.main(words)
    printed = capfd.readouterr().out
    assert "killed   memory, after step 70" in printed
    resumed, repeated = re.search(r"resumed  at step (\d+)", printed), re.search(r"(\d+) steps of the memory", printed)
    assert resumed is not None
    assert repeated is not None
    assert int(resumed[1]) >= 60  # or a later checkpoint, if the process was ahead of its killer
    assert int(repeated[1]) == max(0, 70 - int(resumed[1]))
    bits = {line[:12].strip(): float(line[12:27]) for line in printed.splitlines() if " GiB  " in line}
    assert bits["memory"] < bits["alone"] - 0.1
    assert abs(bits["memory"] - bits["nn.Embedding"]) < 0.2
    assert "memory" in (tmp_path / "bits.svg").read_text()
    assert list((tmp_path / "embedrock").glob("text-*")) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--svg", "nowhere/bits.svg"],
            "argument --svg: must be a file in a folder that exists: got 'nowhere/bits.svg'",
        ),
        (["--steps", "0"], "argument --steps: must be a positive whole number"),
    ],
)
def test_bad_options(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    with pytest.raises(SystemExit):
        demo.main(["--text", *words])
    assert said in capsys.readouterr().err
