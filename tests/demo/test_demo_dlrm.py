"""The demo of DLRM: what it is trained on, its model, where its tables are, and going on after it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

import embedrock as er  # noqa: E402
import embedrock.torch as ert  # noqa: E402
from embedrock.bench.harness.many_tables import ManyTables  # noqa: E402
from embedrock.bench.harness.processes import child_environment  # noqa: E402
from embedrock.cli.main import FAILED, main  # noqa: E402
from embedrock.demo.data import planted_impressions  # noqa: E402
from embedrock.demo.data.planted_impressions import ImpressionLog, ImpressionSplit  # noqa: E402
from embedrock.demo.metrics import auc  # noqa: E402
from embedrock.demo.model_spec import DlrmSpec  # noqa: E402
from embedrock.demo.options import FULL, DlrmOptions  # noqa: E402
from embedrock.demo.torch.backends import EMBEDROCK, SPARSE  # noqa: E402
from embedrock.demo.torch.learner import TorchLearner  # noqa: E402
from embedrock.demo.training_folder import TrainingFolder  # noqa: E402

USAGE = 2
LOG = ImpressionLog(ManyTables(max_bag=5), seed=0)
FEW = ManyTables(cardinalities=(500, 3, 40), bag_sizes=(4, 1, 2), seed=1)
FEW_LOG = ImpressionLog(FEW, seed=1)
SPEC = DlrmSpec(dim=4, lr=0.01, seed=3, rows=FEW.rows, bags=FEW.bags, numbers=13, bottom=(8,), top=(16, 8))
TINY = ["--dlrm", "--max-rows", "300", "--max-bag", "3", "--batch-size", "64", "--dim", "4", "--no-compare"]


def batch(step: int) -> Any:
    return FEW_LOG.clicks(np.random.default_rng(step), 64)


# ---------------------------------------------------------------- planted impressions


def test_same_seed_same_impressions_of_other_logs_too():
    one, two = (ImpressionLog(ManyTables(max_bag=5), 0).clicks(np.random.default_rng(7), 200) for _ in range(2))
    for a, b in zip((*one.inputs, one.labels, one.planted), (*two.inputs, two.labels, two.planted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_effects_depend_on_seed_feature_and_id_only():
    ids = tuple(np.zeros((4, bag), np.int64) for bag in LOG.tables.bags)
    numbers = np.ones((4, 13), np.float32)
    ids[0][1], ids[21][2] = 39_999_999, 39_999_999
    logits = LOG.planted(ids, numbers)
    assert logits[0] == logits[3]
    assert len({*logits.tolist()}) == 3
    back = tuple(each[::-1] for each in ids)
    np.testing.assert_array_equal(LOG.planted(back, numbers), logits[::-1])
    assert (ImpressionLog(LOG.tables, 1).planted(ids, numbers) != logits).all()


def test_labels_follow_the_planted_chances_and_no_model_scores_better():
    clicks = LOG.clicks(np.random.default_rng(1), 40_000)
    chances = 1 / (1 + np.exp(-clicks.planted))
    for low in np.arange(0, 1, 0.1):
        inside = (chances >= low) & (chances < low + 0.1)
        expected = chances[inside].mean()
        assert abs(clicks.labels[inside].mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / inside.sum())
    best = auc(clicks.labels, clicks.planted)
    assert 0.83 < best < 0.89
    assert auc(clicks.labels, clicks.planted + np.random.default_rng(4).normal(0, 0.5, 40_000)) < best


def test_204_million_rows_take_no_ram():
    log = ImpressionLog(ManyTables(max_bag=2), seed=0)
    log.clicks(np.random.default_rng(0), 50)
    assert sum(table.spec.rows or 0 for table in log._effects) == 204_184_588
    assert [table.stats()["rows_touched"] for table in log._effects] == [0] * 26
    assert sum(table.stats()["bytes_used"] for table in log._effects) < 26 << 17


def test_a_batch_is_a_function_of_its_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planted_impressions, "TEST_IMPRESSIONS", 200)
    one, two = ImpressionSplit(FEW_LOG, 16), ImpressionSplit(FEW_LOG, 16)
    one.batch(3)
    for a, b in zip(one.batch(8).inputs, two.batch(8).inputs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.batch(8).ids[0], one.batch(9).ids[0])
    np.testing.assert_array_equal(one.test.labels, two.test.labels)
    assert one.best == auc(one.test.labels, one.test.planted)


# ---------------------------------------------------------------- the model


def test_dlrm_is_the_formula():
    learner, examples = TorchLearner(SPEC, SPARSE), batch(0)
    model: Any = learner.model
    tables = [bag.weight.detach().numpy() for bag in model.bags.bags]
    bottom, top = (_layers(part) for part in (model.bottom, model.top))
    for number, scored in enumerate(learner.scores(*examples.inputs)[:5]):
        described = _mlp(examples.numbers[number], bottom)
        vectors = [described, *(table[ids[number]].sum(0) for table, ids in zip(tables, examples.ids, strict=True))]
        products = [vectors[one] @ vectors[other] for one in range(4) for other in range(one)]
        hidden = _mlp(np.concatenate([described, products]), top)
        expected = model.score.weight.detach().numpy()[0] @ hidden + model.score.bias.item()
        assert scored == pytest.approx(expected, rel=1e-4, abs=1e-6)


def _layers(part: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    linear = [each for each in part if isinstance(each, torch.nn.Linear)]
    return [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in linear]


def _mlp(values: np.ndarray, layers: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    for weight, bias in layers:
        values = np.maximum(weight @ values + bias, 0)
    return values


def test_ours_trains_as_pytorchs_bags_do():
    curves = []
    for backend in (EMBEDROCK, SPARSE):
        learner = TorchLearner(SPEC, backend)
        curves.append([learner.step(batch(step)) for step in range(30)])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)


# ---------------------------------------------------------------- on disk


def trained(folder: Path, first: int, last: int, steps_lost: int = 0) -> tuple[TorchLearner, list[float]]:
    """Train up to `last` from the checkpoint of `first`, and some steps more that no checkpoint has."""
    folder.mkdir(exist_ok=True)
    learner = TorchLearner(placed(folder), EMBEDROCK, folder / "checkpoints")
    assert learner.resume() == first
    losses: list[float] = []
    learner.train(batch, range(first, last), losses.append)
    for step in range(last, last + steps_lost):
        learner.step(batch(step))
    return learner, losses


def placed(folder: Path) -> DlrmSpec:
    return DlrmSpec(**{**vars(SPEC), "folder": folder, "memory": 1 << 18})


@pytest.mark.filterwarnings("ignore::embedrock.table.storage.UncommittedWarning")
def test_what_is_resumed_has_the_bits_of_what_was_never_stopped(tmp_path: Path):
    whole, losses = trained(tmp_path / "whole", 0, 12)
    stopped, before = trained(tmp_path / "stopped", 0, 5, steps_lost=3)
    stopped.group.close()
    resumed, after = trained(tmp_path / "stopped", 5, 12)
    assert {each.name for each in (tmp_path / "stopped").iterdir()} == {"model.rock", "checkpoints"}
    assert resumed.group.last_commit == 2  # of all tables, for each checkpoint
    assert before + after == losses
    check_equal(whole, resumed)


def check_equal(one: TorchLearner, other: TorchLearner) -> None:
    check_same_rows(one.group, other.group)
    for a, b in zip(ert.dense_parameters(one.model), ert.dense_parameters(other.model), strict=True):
        assert torch.equal(a, b)


def check_same_rows(one: er.Group, other: er.Group) -> None:
    for a, b in zip(one, other, strict=True):
        for left, right in zip(rows_of(one[a]), rows_of(other[b]), strict=True):
            np.testing.assert_array_equal(left, right)
    one.close()
    other.close()


def rows_of(table: er.Table) -> list[np.ndarray]:
    """Return the ids and the records, weights and optimizer's state, in the order of ids."""
    with er.Table(table.spec.rows, table.dim, init=table.spec.init) as in_ram:
        in_ram.load_state(table)
        state = in_ram.state()
    order = np.argsort(state["ids"])
    assert len(order) > 0
    return [state["ids"][order], state["records"][order]]


def test_mlperfs_tables_fit_4_gib_and_say_if_they_do_not(tmp_path: Path):
    full: dict[str, Any] = FULL
    options = DlrmOptions(steps=10, path=tmp_path, **full)
    tables = ManyTables()
    spec = DlrmSpec(**{**vars(SPEC), "dim": 128, "rows": tables.rows, "bags": tables.bags})
    assert TrainingFolder.of(spec, options).memory == 4 << 30
    with pytest.raises(ValueError, match=r"--memory must hold the rows of 5 batches, about .* GiB: got 64"):
        TrainingFolder.of(spec, DlrmOptions(**{**vars(options), "memory": 64 << 20}))


# ---------------------------------------------------------------- the program


def test_planted_impressions_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    monkeypatch.setattr(planted_impressions, "TEST_IMPRESSIONS", 500)
    out = tmp_path / "out.json"
    options = ["--steps", "8", "--path", str(tmp_path / "demo"), "--json", str(out)]
    assert main(["demo", *TINY, *options]) == 0
    output = capsys.readouterr().out
    for text in ("26 features with 54 ids", "best possible", "13-64-4, top 128-64-1", "8 steps", "planted model"):
        assert text in output
    numbers = json.loads(out.read_text())["training"]
    assert [point["step"] for point in numbers["curve"]] == [2, 4, 6, 8]
    assert len(numbers["tables"]) == 26
    assert numbers["tables"]["feature06"]["rows"] == 3
    assert main(["demo", *TINY, *options, "--max-rows", "200"]) == FAILED
    assert "a demo with other options (max_rows=300)" in capsys.readouterr().err


def test_a_log_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(0)
    ids = random.integers(0, 50, (300, 26)) * 80_000_000
    lines = ["\t".join([str(k % 2), *["5"] * 13, *(f"{each:08x}" for each in row)]) for k, row in enumerate(ids)]
    data, out = tmp_path / "day_0", tmp_path / "out.json"
    data.write_text("\n".join(lines))
    options = [*TINY[:1], *TINY[5:9], "--data", str(data), "--memory", "16MiB", "--json", str(out)]
    assert main(["demo", *options, "--path", str(tmp_path / "demo")]) == 0
    output = capsys.readouterr().out
    assert "day_0: 300 lines, the last 30 of them to test on" in output
    assert "ids as they are: any integer" in output
    training = json.loads(out.read_text())["training"]
    assert training["curve"][-1]["step"] == 4  # 270 lines in batches of 64
    assert training["planted_auc"] is None
    assert training["tables"]["feature26"]["rows"] == 1 << 32
    assert training["group"]["pools"] == 1
    data.write_text("\n".join([*lines[:9], "1\tx", *lines[10:]]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["demo", *options[:-2]]) == FAILED
    assert f"{data}, line 10: expected 40 fields" in capsys.readouterr().err
    assert list((tmp_path / "cache" / "embedrock").iterdir()) == []  # nothing was saved: nothing to go on with


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dlrm", "--users", "5"], "argument --users: does not go with --dlrm"),
        (["--dlrm", "--keras"], "argument --keras: does not go with --dlrm"),
        (["--dlrm", "--model", "mf"], "argument --model: does not go with --dlrm"),
        (["--dlrm", "--ids-below", "5"], "argument --ids-below: only goes with --data FILE"),
        (["--dlrm", "--max-bag", "5", "--data", __file__], "argument --max-bag: only goes without --data FILE"),
        (["--max-rows", "5"], "argument --max-rows: only goes with --dlrm"),
        (["--full"], "argument --full: only goes with --dlrm"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_options(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    with pytest.raises(SystemExit) as stop:
        main(["demo", *arguments])
    assert stop.value.code == USAGE
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_killed_and_started_again_it_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    options = [*TINY, "--steps", "400"]
    command = [sys.executable, "-m", "embedrock", "demo", *options, "--path"]
    folder = tmp_path / "killed"
    with subprocess.Popen(
        [*command, str(folder)], env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 300
        while not any((folder / "checkpoints").glob("*.pt")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    for each in (folder, tmp_path / "whole"):
        subprocess.run([*command, str(each)], env=child_environment(), check=True, capture_output=True, timeout=600)
    whole, killed = (er.open(tmp_path / name / "model.rock", mode="r") for name in ("whole", "killed"))
    assert whole.last_step == killed.last_step == 400
    check_same_rows(whole, killed)
