"""Models, backends and the contest between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tqdm")

from embedrock.bench.harness.processes import ChildError  # noqa: E402
from embedrock.demo.data.planted import Clicks, PlantedLog  # noqa: E402
from embedrock.demo.metrics import auc  # noqa: E402
from embedrock.demo.model_spec import PairSpec  # noqa: E402
from embedrock.demo.options import DIM_MULTIPLES  # noqa: E402
from embedrock.demo.torch import contest as contest_module  # noqa: E402
from embedrock.demo.torch.backends import BACKENDS, DENSE, EMBEDROCK, SPARSE, first_values  # noqa: E402
from embedrock.demo.torch.contest import Outcome, TimedBackend, contest, format_outcomes  # noqa: E402
from embedrock.demo.torch.learner import TorchLearner  # noqa: E402
from embedrock.demo.torch.models import MODELS  # noqa: E402

SPEC = PairSpec(model="mf", users=300, items=100, dim=16, lr=0.01, seed=3)


def batch(number: int, size: int = 256) -> Clicks:
    return PlantedLog(SPEC.users, SPEC.items, 0).clicks(np.random.default_rng(number), size)


def spec_of(**changes: Any) -> PairSpec:
    return PairSpec(**{**vars(SPEC), **changes})


# ---------------------------------------------------------------- models and backends


def test_options_know_the_models():
    assert DIM_MULTIPLES.keys() == MODELS.keys()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_one_user_is_scored_against_many_items(model: str, backend: Any):
    learner = TorchLearner(spec_of(model=model), backend)
    users, items = np.array([[5], [7]]), np.array([[1, 2, 3], [4, 2, 0]])
    scores = learner.scores(users, items)
    pairs = learner.scores(np.repeat(users, 3)[:, None], items.reshape(-1, 1))
    assert scores.shape == (2, 3)
    np.testing.assert_allclose(scores.ravel(), pairs.ravel(), rtol=1e-5, atol=1e-7)


def test_gmf_is_the_formula():
    learner = TorchLearner(spec_of(model="gmf"), SPARSE)
    weigh: Any = learner.model.score
    p, q = (first_values(spec).numpy() for spec in embeddings_of_gmf())
    expected = (p[5] * q[7]) @ weigh.weight.detach().numpy()[0] + weigh.bias.item()
    assert learner.scores(np.array([[5]]), np.array([[7]]))[0, 0] == pytest.approx(expected, rel=1e-6)


def embeddings_of_gmf() -> tuple[Any, ...]:
    return spec_of(model="gmf").embeddings


def test_neumf_scores_the_two_halves_of_a_row_by_themselves():
    learner = TorchLearner(spec_of(model="neumf"), SPARSE)
    model: Any = learner.model
    p, q = model.users.weight.detach()[5], model.items.weight.detach()[7]
    deep = model.mlp(torch.cat([p[8:], q[8:]]))
    expected = model.score(torch.cat([p[:8] * q[:8], deep])).item()
    assert learner.scores(np.array([[5]]), np.array([[7]]))[0, 0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_backends_start_alike_and_the_lazy_ones_train_alike(model: str):
    curves = []
    for backend in (EMBEDROCK, SPARSE, DENSE):
        learner = TorchLearner(spec_of(model=model), backend)
        curves.append([learner.step(batch(number)) for number in range(30)])
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-5)
    assert curves[0][0] == pytest.approx(curves[2][0], rel=1e-6)
    assert curves[0][-1] != pytest.approx(curves[2][-1], rel=1e-3)  # dense Adam moves all rows, so it is another one


def test_two_seeds_start_differently_and_tables_differ():
    users, items = SPEC.embeddings
    assert users.seed != items.seed
    assert SPEC.embeddings != spec_of(seed=4).embeddings


def test_training_learns_what_was_planted():
    learner = TorchLearner(spec_of(lr=0.02), EMBEDROCK)
    log = PlantedLog(SPEC.users, SPEC.items, 0)
    for number in range(150):
        learner.step(batch(number, 1024))
    test = log.clicks(np.random.default_rng(10**6), 20_000)
    scores = learner.scores(test.users[:, None], test.items[:, None])[:, 0]
    best = auc(test.labels, test.planted)
    assert best - 0.03 < auc(test.labels, scores) < best


# ---------------------------------------------------------------- the contest


def test_contenders_that_do_not_fit_are_skipped_with_the_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(contest_module, "available_bytes", lambda: 5 << 30)
    monkeypatch.setattr(contest_module, "Child", RefusedChild)
    spec = PairSpec(model="mf", users=20_000_000, items=2_000_000, dim=64, lr=0.01, seed=0)
    ours, sparse, dense = contest(spec, PlantedLog(20_000_000, 2_000_000, 0), 8192, threads=None)
    assert ours.reason == "failed: its process ended with signal SIGKILL (out of memory?)"
    assert sparse.need_bytes == 3 * 22_000_000 * 64 * 4
    assert sparse.reason == "needs 15.7 GiB for weights and two states of all rows; 5.0 GiB of RAM available"
    assert dense.reason.startswith("needs 26.2 GiB")
    assert [outcome.step_s for outcome in (ours, sparse, dense)] == [None, None, None]


class RefusedChild:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ChildError("Died", "its process ended with signal SIGKILL (out of memory?)")


def test_a_contender_measures_itself():
    measured = TimedBackend("sparse", SPEC, PlantedLog(SPEC.users, SPEC.items, 0), threads=None).run(batch_size=64)
    outcome = Outcome("sparse", 0, **measured)
    assert outcome.step_s
    assert outcome.new_step_s > 0
    assert outcome.rss_bytes > 1 << 20


def test_contenders_that_did_not_run_are_told_with_the_reason():
    ran = Outcome("fast", 0, step_s=0.002, new_step_s=0.003, setup_s=0.1, rss_bytes=1 << 30)
    slow = Outcome("slow", 0, step_s=0.007, new_step_s=0.008, setup_s=2.0, rss_bytes=1 << 30)
    lines = format_outcomes([ran, slow, Outcome("huge", 9, reason="needs 9 B")]).splitlines()
    assert lines[2].split() == ["fast", "2.0", "1.0x", "3.0", "0.1", "1.0", "GiB"]
    assert lines[3].split() == ["slow", "7.0", "3.5x", "8.0", "2.0", "1.0", "GiB"]
    assert lines[4] == "huge: skipped, needs 9 B"
    assert "skipped, needs" in format_outcomes([Outcome("huge", 9, reason="needs 9 B")])


def test_asking_to_die_first_needs_no_proc_folder(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, text: str) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "write_text", refuse)
    contest_module._die_first()
