"""The benchmark of JAX: all implementations train the same model, and ours only with the bits of `Table.update`."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_benchmark_command import ROUNDS, lines_of, run, targets_of

pytest.importorskip("optax")

from benchmarks import jax_step
from benchmarks.implementations import Step
from benchmarks.jax_step import JAX

NAMES = [one.name for one in JAX.implementations]
TINY = replace(JAX.workloads[0], max_rows=40, dim=4, batch=16, batches=3)


def made(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setenv(jax_step.FOLDER, str(folder))
    monkeypatch.setenv("EMBEDROCK_THREADS", "1")
    (one,) = [one for one in JAX.implementations if one.name == name]
    return one.make(TINY)


@pytest.fixture
def ends() -> Iterator[None]:
    """Let go of tables on disk before a test's warnings count no more: their process would have ended."""
    yield
    gc.collect()


@pytest.mark.usefixtures("ends")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since")
def test_all_train_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {name: made(name, tmp_path, monkeypatch) for name in NAMES}
    losses: dict[str, Any] = {name: [float(step(k)) for k in range(4)] for name, step in steps.items()}  # type: ignore[arg-type]
    expected = losses.pop("ours-torch")
    assert expected[0] > expected[3]  # on the first batch again
    np.testing.assert_allclose(losses.pop("jax-dense")[:1], expected[:1], rtol=1e-5)  # it steps all rows then
    for own in losses.values():
        np.testing.assert_allclose(own, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["ours-jax", "ours-jax-positions"])
def test_wrong_rows_are_not_timed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import embedrock.jax as ej

    apply = ej.Tables.apply
    half = lambda self, batch, grads, *more, **own: apply(self, batch, {**grads, "t01": None}, *more, **own)  # noqa: E731
    monkeypatch.setattr(ej.Tables, "apply", half)
    with pytest.raises(AssertionError, match=re.escape("rows differ from those of Table.update")):
        made(name, tmp_path, monkeypatch)(0)


@pytest.mark.usefixtures("ends", "in_process")
@pytest.mark.filterwarnings("ignore:.*is closed with changes since")
def test_the_command(tmp_path: Path) -> None:
    sizes = ["--max-rows=50", "--dim=4", "--batch=8", "--batches=2", f"--folder={tmp_path}", *ROUNDS]
    document = run(tmp_path, "jax", *sizes)
    assert list(lines_of(document)) == NAMES
    assert len(document["results"]) == 3 * len(NAMES)  # two towers by two laws of ids, and 26 tables
    assert "50 rows, Zipf(1.05): least time of ours-jax over that of ours-torch" in targets_of(document)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
